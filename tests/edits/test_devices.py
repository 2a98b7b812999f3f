"""Devices in programs: those in tags and strings are changed, those in code, constants and inputs are reported."""

from __future__ import annotations

import io
import json
import linecache
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from torch import nn
from torch.jit.mobile import _load_for_lite_interpreter
from zip_copies import rewritten

import ckptool

CPU, CUDA = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1"

SOURCE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.cuda_ = 1
        self.meta = "meta"
        self.where = "cuda:1"
        self.names = ["cpu", "cuda:1"]
        self.table = {"cuda:1": 3, "b": 4}
        self.place = torch.device("cuda:1")

    def forward(self, x):
        if bool(x.sum() > 1e9):
            x = x.to(self.where).to("cuda:2").to(self.place)
        return self.layer(x) * self.table["b"] * len(self.names) * len(self.meta)
"""


def module() -> torch.jit.ScriptModule:
    # torch.jit.script reads the source of a class through linecache.
    file = "<net with devices>"
    linecache.cache[file] = (len(SOURCE), None, SOURCE.splitlines(True), file)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "net_with_devices"}
    exec(compile(SOURCE, file, "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(names["Net"]())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "m.pt"
    module().save(str(path))
    return path


def test_strings_of_attributes_are_changed(script: Path, tmp_path: Path) -> None:
    said = say("remap", script, "--to", "cpu", "--strings", "-o", tmp_path / "out.pt")
    assert said.code == 0 and "where: the string 'cuda:1' now reads 'cpu'" in said.all
    found = torch.jit.load(str(tmp_path / "out.pt"))
    assert (found.where, found.names, found.place) == ("cpu", ["cpu", "cpu"], torch.device("cpu"))
    # The key is one object with the strings in the file, and none of them; so is the name of an attribute.
    assert found.table == {"cuda:1": 3, "b": 4} and found.meta == "meta"
    x = torch.ones(1, 2)
    assert torch.equal(found(x), torch.jit.load(str(script))(x))
    report = ckptool.inspect(tmp_path / "out.pt")["program"]["devices"]
    assert {item["device"] for item in report["attributes"]} <= {"cpu", "meta"}


def test_keys_of_dicts_are_no_strings_that_name_a_device(tmp_path: Path) -> None:
    """The same in files of torch.save, where pickle writes equal strings of one object once."""
    cuda = "cuda"
    torch.save({cuda: 1, "device": cuda, "list": [cuda], "w.x": torch.ones(1)}, tmp_path / "a.pth")
    assert say("remap", tmp_path / "a.pth", "--to", "cpu", "--strings", "-o", tmp_path / "b.pth").code == 0
    found = torch.load(tmp_path / "b.pth", weights_only=True)
    assert (found["cuda"], found["device"], found["list"]) == (1, "cpu", ["cpu"])


def test_strings_of_mobile_models_are_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.ptl"
    module()._save_for_lite_interpreter(str(path))
    said = say("remap", path, "--to", "cpu", "--strings", "-o", tmp_path / "out.ptl")
    assert said.code == 0 and "where: the string 'cuda:1' now reads 'cpu'" in said.all
    with zipfile.ZipFile(tmp_path / "out.ptl") as archive:
        for name in archive.namelist():
            # Of data.pkl the key of a dict is left.
            assert name.endswith(("data.pkl", ".py", ".debug_pkl")) or b"cuda" not in archive.read(name), name
    assert _load_for_lite_interpreter(str(tmp_path / "out.ptl")) is not None


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.constant = torch.ones(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.constant

    path = tmp_path_factory.mktemp("export") / "x.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Net(), (torch.ones(1, 2),))
        torch.export.save(program, str(path), extra_files={"note.txt": "cuda:7"})
    return path


def tagged(name: str, data: bytes) -> bytes:
    """A file of torch.save with another tag."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(packed, "w") as target:
        for inner in source.namelist():
            target.writestr(inner, source.read(inner).replace(CPU, CUDA))
    return packed.getvalue()


@pytest.mark.parametrize("part", ["data/constants/model_constants_config.json", "data/sample_inputs/model.pt"])
def test_devices_that_an_export_names_beside_its_weights_are_reported(
    part: str, exported: Path, tmp_path: Path
) -> None:
    def change(name: str, data: bytes) -> bytes:
        if name != part:
            return data
        if name.endswith(".pt"):
            return tagged(name, data)
        return data.replace(b'"type": "cpu", "index": null', b'"type": "cuda", "index": 1')

    path = rewritten(exported, tmp_path / "c.pt2", change)
    said = say("remap", path, "--to", "cpu", "-o", tmp_path / "out.pt2")
    assert said.code == 0 and part in said.all and "names cuda:1 1 time; it stays as it is" in said.all
    assert "code-devices" in [finding["code"] for finding in ckptool.inspect(path)["findings"]]
    with pytest.raises(Exception):  # noqa: B017 - torch has a kind for each of them
        torch.export.load(str(path))


def compiled(path: Path) -> Path:
    """As torch._inductor.aoti_compile_and_package writes it: no weights by name, and a library."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {
            "data/aotinductor/model/abc.wrapper.so": b"\x7fELF",
            "data/aotinductor/model/abc.wrapper_metadata.json": json.dumps({"AOTI_DEVICE_KEY": "cuda"}).encode(),
            "archive_format": b"pt2",
            "archive_version": b"0",
            "byteorder": b"little",
            ".data/version": b"6\n",
        }.items():
            archive.writestr(f"m/{name}", data)
    return path


def test_devices_of_compiled_packages_are_reported(tmp_path: Path) -> None:
    path = compiled(tmp_path / "m.pt2")
    said = say("inspect", path)
    assert said.code == 0 and "it is an AOTInductor package, which holds code" in said.all
    assert "aoti_load_package" in said.all and "torch.export.load" not in said.all
    said = say("remap", path, "--to", "cpu", "-o", tmp_path / "out.pt2")
    assert said.code == 0 and "the compiled code names cuda 1 time; it stays as it is" in said.all
    said = say("edit", path, "--wrap", "x", "-o", tmp_path / "out2.pt2")
    assert said.code == 4 and "ckptool inspect" in said.all and "ckptool convert" not in said.all


def test_weights_of_programs_within_packages_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.package import package_exporter

    monkeypatch.setattr(package_exporter, "_gate_torchscript_serialization", False)
    with package_exporter.PackageExporter(str(tmp_path / "p.pt")) as exporter:
        exporter.extern("**")
        exporter.save_pickle("m", "m.pkl", {"net": module(), "w": torch.ones(2)})
    said = say("validate", tmp_path / "p.pt", "--format", "json")
    assert json.loads(said.out)["status"] == "valid" and "used by nothing" not in said.all
    assert "1 object that only its own code rebuilds, here None" in say("inspect", tmp_path / "p.pt").all
    said = say("convert", tmp_path / "p.pt", "-o", tmp_path / "w.pth")
    assert said.code == 4 and "that only its own code uses; keep the program" in said.all
