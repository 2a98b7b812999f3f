"""The comparison of our lists with the sources of torch: what was read is what is installed, what moves is named."""

from __future__ import annotations

import re
import runpy
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ckptool.safety.torch_lists import NEWEST, VERSIONS

facts = SimpleNamespace(**runpy.run_path(str(ROOT / "fixtures" / "generators" / "torch_facts.py")))
LOAD = "code torch/serialization.py _load"


def installed() -> Path:
    """The folder that has torch."""
    return Path(pytest.importorskip("torch").__file__).parents[1]


def test_our_lists_are_those_of_torch() -> None:
    assert [*facts.differences(facts.stored())] == []


def test_what_is_stored_is_what_the_installed_torch_says() -> None:
    version, found = facts.facts_of(installed())
    if version not in VERSIONS:
        pytest.skip(f"no lists for torch {version}")
    assert facts.moved(facts.known_facts(facts.stored())[version], found) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("allowed torch.bcomplex32", "allowed torch.complex16"),
        ("opcode REDUCE", "opcode OBJ"),
        ("dtype bcomplex32", "dtype complex16"),
        ("storage bcomplex32", "storage bcomplex32 BComplexStorage"),
        ("layout torch.strided", "layout torch.odd"),
        ("device cuda", "device gpu"),
        ("restored cpu", "restored gpu"),
        ("blocked sys", "blocked subprocess"),
        ("scalar 7 FLOAT", "scalar 77 FLOAT"),
    ],
)
def test_what_moves_is_named(old: str, new: str) -> None:
    entries = facts.stored()
    entries[NEWEST]["removed"].append(old)
    entries[NEWEST]["added"].append(new)
    said = [*facts.differences(entries)]
    spelled = new.replace("FLOAT", "float32")
    assert f"torch {NEWEST}: {spelled} is in torch, not in our list" in said
    # Devices that torch can restore are more in ours: other packages add some.
    assert len(said) == (1 if old == "restored cpu" else 2)


def test_a_wheel_of_a_version_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What moved is named and written, to be reviewed; what is known of the other versions stays."""
    place, wheel = installed(), tmp_path / "torch-9.9.whl"
    headers = ("torch/_C/__init__.pyi", *(f"torch/include/{name}" for name in facts.DEVICES))
    with zipfile.ZipFile(wheel, "w") as made:
        for name in {*facts.file_names(place), *headers}:
            text = (place / name).read_text("utf-8") if (place / name).is_file() else ""
            if name == "torch/version.py":
                text = re.sub(r"\d+\.\d+\.\d+", "9.9.0", text)
            if name == "torch/serialization.py":
                text = text.replace("def _load(", "def _load(\n    more,", 1).replace("loaded_storages = {}", "x = {}")
            made.writestr(name, text.replace('"torch.Size": torch.Size,', '"torch.odd": torch.odd,'))
    file = tmp_path / "facts.json"
    shutil.copy(facts.FILE, file)
    before = facts.stored()
    monkeypatch.setitem(facts.stored.__globals__, "FILE", file)
    monkeypatch.setattr("sys.argv", ["torch_facts.py", str(wheel), "--write"])
    facts.main()
    said = capsys.readouterr().out
    assert said.startswith(f"torch 9.9, since {NEWEST}:\n")
    assert {"+ allowed torch.odd", "- allowed torch.Size", f"! {LOAD}"} <= {*said.splitlines()}
    after = facts.stored()
    assert after.pop("9.9")["reviews"][LOAD] == ""
    assert after == before
    assert f"torch 9.9: {LOAD} moved, nobody has read it" in facts.differences(facts.stored())
