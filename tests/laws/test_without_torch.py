"""Everything but real loads works in an environment that has click and tabulate and nothing else: no torch, no numpy.

test_light.py hides torch from an interpreter that has it; here it is not there at all.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import FIXTURES, ROOT

#: What ``pip install --no-deps ckptool`` and ``pip install click tabulate`` bring.
PACKAGES = ("ckptool", "click", "tabulate", *(() if sys.version_info >= (3, 11) else ("tomli",)))

RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); "
MAIN = RUN + "from ckptool.cli.main import main; main()"

NEEDS = "needs torch, which is not installed"


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


class Bare:
    """An interpreter without site-packages, that finds links to a few packages and no other."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        self.work = folder / "work"
        self.packages.mkdir()
        self.work.mkdir()
        for name in PACKAGES:
            place = _place(name)
            if place is not None:
                (self.packages / place.name).symlink_to(place)

    def python(self, code: str, arguments: Sequence[str] = ()) -> Done:
        # -I: no PYTHONPATH, no user folder, no current folder; -S: no site-packages.
        words = [sys.executable, "-I", "-S", "-c", code, str(self.packages), *arguments]
        done = subprocess.run(words, cwd=self.work, capture_output=True, text=True, timeout=600, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def ckptool(self, *arguments: str) -> Done:
        done = self.python(MAIN, arguments)
        assert "Traceback" not in done.err and "a bug in ckptool" not in done.err, done.err
        return done

    def put(self, name: str, as_name: str = "") -> str:
        """A copy of a fixture in the folder where commands run."""
        (self.work / (as_name or name)).write_bytes((FIXTURES / name).read_bytes())
        return as_name or name

    def report(self, *arguments: str) -> dict[str, Any]:
        done = self.ckptool("validate", *arguments, "--format", "json")
        found = json.loads(done.out)
        assert isinstance(found, dict)
        return found | {"exit": done.code}


def _place(name: str) -> Path | None:
    """The folder of a package, or the file of a module."""
    if name == "ckptool":
        return ROOT / name
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None
    origin = Path(found.origin)
    return origin.parent if origin.name == "__init__.py" else origin


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare"))


def test_there_is_no_torch_and_no_numpy(bare: Bare) -> None:
    code = "import importlib.util as u; print([u.find_spec(n) is None for n in ('torch', 'numpy', 'safetensors')])"
    assert bare.python(RUN + code) == Done(0, "[True, True, True]\n", "")
    code = "import ckptool, click, tabulate; print(ckptool.__file__)"
    assert bare.python(RUN + code).out == f"{bare.packages}/ckptool/__init__.py\n"


@pytest.mark.parametrize("style", ["table", "json"])
def test_inspect_and_keys(bare: Bare, style: str) -> None:
    files = [bare.put("ddp4_training.pth"), bare.put("legacy_cuda.pth"), bare.put("numpy_objects.pth")]
    for command in (["inspect"], ["keys"], ["keys", "--all"]):
        done = bare.ckptool(*command, *files, "--format", style)
        assert (done.code, done.err) == (0, "")
        assert done.out


@pytest.mark.parametrize("name", ["ddp4_training.pth", "legacy_cuda.pth"])
def test_strip_add_and_remap(bare: Bare, name: str) -> None:
    source = bare.put(name)
    for number, command in enumerate((["strip-module"], ["add-module"], ["remap", "--to", "cpu"])):
        done = bare.ckptool(*command, source, "-o", f"{number}.{name}")
        assert (done.code, done.err) == (0, "")
        checked = bare.report(f"{number}.{name}")
        assert (checked["exit"], checked["status"]) == (0, "valid")
    assert bare.report(f"2.{name}", "--device", "cpu")["exit"] == 0
    assert bare.report(source, "--device", "cpu")["exit"] == 1


@pytest.mark.parametrize("name", ["truncated.pth", "truncated_legacy.pth"])
def test_salvage(bare: Bare, name: str) -> None:
    done = bare.ckptool("salvage", bare.put(name), "-o", f"saved.{name}", "--format", "json")
    assert done.code == 1
    report = json.loads(done.out)
    assert report["saved"] and report["lost"]
    assert bare.report(f"saved.{name}")["status"] == "valid"


@pytest.mark.parametrize("option", ["finite", "load"])
@pytest.mark.parametrize("name", ["bare.pth", "ddp4_training.pth", "legacy_bare.pth", "tensor.pt"])
def test_what_needs_torch_is_not_possible(bare: Bare, name: str, option: str) -> None:
    file = bare.put(name)
    report = bare.report(file, f"--{option}")
    assert (report["exit"], report["status"], report["coverage"]) == (0, "valid", "partial")
    assert option in report["not_checked"]
    check = report["checks"][-1]
    assert (check["name"], check["status"]) == (option, "not possible")
    assert NEEDS in check["message"]
    strict = bare.report(file, f"--{option}", "--strict")
    assert (strict["exit"], strict["status"]) == (1, "invalid")
