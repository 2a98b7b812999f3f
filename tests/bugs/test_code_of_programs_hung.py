"""One line of a megabyte in the code of a TorchScript archive, all escaped quotes, took hours; a million classes, or
devices by a million numbers, took gigabytes. And of more than 20,000 files of code the rest was not read: its tensors
all counted as parameters."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.formats.programs import script_modules
from ckptool.formats.programs.torchscript import TorchScript

HEAD = "class Net(Module):\n  __parameters__ = ["
MANY = 1 << 20

HOSTILE = {
    "escapes": HEAD + '"' + '\\"' * MANY + ", ]\n",
    "quotes": HEAD + '"' * MANY + "]\n",
    "backslashes": HEAD + '"' + "\\" * MANY + "]",
    "one line": "x" * MANY,
    "brackets": "class Net(Module):\n" + "(" * MANY,
    "lines": "\n" * (8 * MANY),
    "devices": "".join(f'"cuda:{number}"' for number in range(MANY)),
    "one device": '"cuda:0" ' * MANY,
    "classes": "".join(f"class A{number}(Module):\n" for number in range(MANY)),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "m.pt"
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(path))
    return path


@pytest.mark.parametrize("kind", HOSTILE)
def test_it_ends(kind: str, script: Path, tmp_path: Path) -> None:
    out = tmp_path / "h.pt"
    with zipfile.ZipFile(script) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("m/code/__torch__/more.py", HOSTILE[kind], zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        rows = ckptool.keys(out)["tensors"]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row["key"] for row in rows] == ["weight", "bias"]
    assert most < 200_000_000


def test_a_class_with_an_unusual_attribute(script: Path, tmp_path: Path) -> None:
    """Before torch 1.6 the declared tensors are the buffers: the one whose name is none of Python's, too."""
    text = 'class Net(Module):\n  __parameters__ = ["größe", ]\n  __annotations__ = []\n'
    text += '  __annotations__["a b"] = Tensor\n  plain : Optional[Tensor]\n  other : int\n'
    ((name, said),) = script_modules._classes(text)
    assert name == "Net" and said.parameters == {"größe"} and said.tensors == {"a b", "plain"}


def test_every_file_of_code_is_read(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "many.pt"
    with zipfile.ZipFile(out, "w") as target, zipfile.ZipFile(script) as source:
        # The record of the root names the folder: the files come before the classes that count.
        target.writestr("m/version", "3\n")
        for number in range(20_001):
            target.writestr(f"m/code/__torch__/a{number}.py", "")
        for name in source.namelist():
            if not name.endswith("/version"):
                target.writestr(name, source.read(name))
    with ckptool.open(out) as checkpoint:
        assert isinstance(checkpoint.container, TorchScript)
        assert not checkpoint.container.code.unread and not checkpoint.container.modules.guessed
