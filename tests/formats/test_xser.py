"""Files of torch_xla's ``xser.save``: references in one file, each tensor in a file of its own, read as one."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say

import ckptool
from ckptool.base.errors import CkptoolError

_MODULE = "torch_xla.utils.serialization"
TENSORS = {
    "a.weight": torch.arange(12.0).reshape(4, 3),
    "a.bias": torch.ones(4, dtype=torch.bfloat16),
    "b.weight": torch.arange(6.0).reshape(2, 3).t(),
    "view": torch.arange(10)[2:5],
}


class TensorReference:
    def __init__(self, tid: int, *more: Any) -> None:
        self.tid = tid
        if more:  # as AWS Neuron writes it
            self.shape, self.dtype = more


@pytest.fixture(autouse=True)
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("torch_xla", "torch_xla.utils", _MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(TensorReference, "__module__", _MODULE)
    sys.modules[_MODULE].TensorReference = TensorReference  # type: ignore[attr-defined]
    yield


def xser_save(path: Path, *, neuron: bool = False) -> Path:
    """Do what ``xser.save`` does, with a tied parameter."""
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    references = {}
    for tid, (name, tensor) in enumerate(TENSORS.items()):
        more = (tensor.shape, tensor.dtype) if neuron else ()
        references[name] = TensorReference(tid, *more)
        torch.save(tensor, folder / f"tensor_{tid}.pt")
    references["tied"] = references["a.weight"]
    torch.save({"model": references, "epoch": 3}, path)
    return path


@pytest.mark.parametrize("neuron", [False, True])
def test_the_tensors_are_joined(neuron: bool, tmp_path: Path) -> None:
    path, out = xser_save(tmp_path / "m.pt", neuron=neuron), tmp_path / "out.pth"
    said = say("inspect", path)
    assert "4 tensors in m.pt.tensors" in said.out and "state dict under 'model', 5 tensors" in said.out
    assert say("validate", path).code == 0
    for command in ("sanitize", "convert", "strip-module"):
        assert say(command, path, "-o", out, "--force").code == 0
        loaded = torch.load(out, weights_only=True)
        assert loaded["epoch"] == 3 and list(loaded["model"]) == [*TENSORS, "tied"]
        assert loaded["model"]["tied"] is loaded["model"]["a.weight"]
        for name, tensor in TENSORS.items():
            assert torch.equal(loaded["model"][name], tensor)
            assert loaded["model"][name].stride() == tensor.stride()


def test_a_missing_tensor_file_is_named(tmp_path: Path) -> None:
    path, out = xser_save(tmp_path / "m.pt"), tmp_path / "out.pth"
    (tmp_path / "m.pt.tensors" / "tensor_1.pt").unlink()
    assert "error: m.pt.tensors/tensor_1.pt cannot be read: no such file" in say("inspect", path).all
    assert say("validate", path).code == 1
    for command in ("sanitize", "convert", "strip-module"):
        said = say(command, path, "-o", out)
        assert said.code == 3 and "m.pt.tensors/tensor_1.pt" in said.err and not out.exists()


def test_a_file_without_its_folder_is_incomplete(tmp_path: Path) -> None:
    path, out = xser_save(tmp_path / "m.pt"), tmp_path / "out.pth"
    (tmp_path / "m.pt.tensors").rename(tmp_path / "elsewhere")
    assert "its tensors are in m.pt.tensors, which is not there: tensor_0.pt" in say("inspect", path).all
    assert say("validate", path).code == 1
    with pytest.raises(CkptoolError, match=r"m\.pt\.tensors, which is not there"):
        ckptool.save(ckptool.sanitize(path), out)


def test_a_damaged_tensor_file_is_refused(tmp_path: Path) -> None:
    path, out = xser_save(tmp_path / "m.pt"), tmp_path / "out.safetensors"
    file = tmp_path / "m.pt.tensors" / "tensor_0.pt"
    values = TENSORS["a.weight"].numpy().tobytes()
    data = file.read_bytes()
    file.write_bytes(data.replace(values, values[:-1] + b"\x7f"))
    said = say("convert", path, "--key", "model", "--tied", "clone", "--allow-loss", "strides", "-o", out)
    assert said.code == 3 and "model" in said.err and "a.weight" in said.err and not out.exists()
    assert "tensor_0.pt" in say("validate", path).all


def test_a_folder_of_that_name_means_nothing_else(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    (tmp_path / "m.pt.tensors").mkdir()
    assert say("validate", tmp_path / "m.pt").code == 0
    assert ckptool.open(tmp_path / "m.pt").format == "torch-zip"
