"""A format that only this test knows: reports and edits take every fact about it from its container."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_line import say

import ckptool
from ckptool import formats
from ckptool.base.dtypes import BY_NAME
from ckptool.checkpoint.container import Container, StorageLocation, StoredRecord, Traits
from ckptool.checkpoint.graph_builder import Builder, contiguous
from ckptool.files.sources import Plan, Source, Span

MAGIC = b"TOY1"
#: Words that belong to other formats.
FOREIGN = ("safetensors", "header", "torch.distributed", "DCP")


class Toy(Container):
    """One vector of float32 after four bytes of magic, without a pickle."""

    format = "toy"
    traits = Traits(
        pickled=False, size_source="file", no_checksums="the toy format", loader="toylib.load", suffix=".toy"
    )

    def __init__(self, source: Source) -> None:
        self.source, self.problems, self.writer = source, [], "toylib"
        self.span = Span(source, len(MAGIC), source.size - len(MAGIC))
        builder = Builder()
        tensor = builder.tensor(contiguous(BY_NAME["float32"], (self.span.size // 4,), "0"))
        self.graph = builder.graph(builder.mapping([("layer.weight", tensor)]))

    def stored(self, key: str) -> StorageLocation:
        return StorageLocation(self.span, self.span.size)

    def records(self) -> Iterator[StoredRecord]:
        yield StoredRecord("0", self.span, self.span.size, None, False, "0")

    def plan(self, pickle: bytes | None) -> Plan:
        return Plan((Span(self.source, 0, self.source.size),))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = ModuleType("ckptool.formats.toy")
    module.sniff = lambda head, source: True  # type: ignore[attr-defined]
    module.read = Toy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = formats.Format("toy", "toy", lambda head: head.startswith(MAGIC))
    monkeypatch.setattr(formats, "FORMATS", (known, *formats.FORMATS))
    path = tmp_path / "model.toy"
    path.write_bytes(MAGIC + torch.arange(8.0).numpy().tobytes())
    return path


@pytest.mark.parametrize("name", ["model.toy", "model.bin"])
@pytest.mark.parametrize(
    "command", ["inspect", "inspect --json", "validate", "validate --quick", "scan", "keys", "hash"]
)
def test_a_report_about_a_toy_says_nothing_of_other_formats(command: str, name: str, toy: Path) -> None:
    path = toy.rename(toy.with_name(name))
    said = say(*command.split(), path)
    assert said.code in (0, 1), said.all
    assert not [word for word in FOREIGN if word in said.all], said.all


def test_the_loader_of_a_toy_is_named(toy: Path) -> None:
    assert ckptool.inspect(toy)["loader"] == "toylib.load"
    assert "toylib.load takes it" in say("validate", toy, "-v").out


def test_a_toy_under_another_name_gets_its_own_suffix(toy: Path) -> None:
    path = toy.rename(toy.with_name("model.bin"))
    assert f"mv {path} {path.with_suffix('.toy')}" in say("inspect", path).out
    assert "mv" not in say("inspect", path.rename(toy)).out


def test_an_edited_toy_is_a_file_of_torch(toy: Path, tmp_path: Path) -> None:
    said = say("edit", toy, "--repack", "-o", tmp_path / "out.pth")
    assert said.code == 0, said.all
    assert "rewritten in the layout of torch.save" in said.out
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert torch.equal(loaded["layer.weight"], torch.arange(8.0))


def test_an_unedited_toy_is_copied(toy: Path, tmp_path: Path) -> None:
    with ckptool.open(toy) as checkpoint:
        ckptool.save(checkpoint, tmp_path / "copy.toy")
    assert (tmp_path / "copy.toy").read_bytes() == toy.read_bytes()
