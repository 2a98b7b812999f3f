"""The interface of rank files: what a module says of pieces is what commands see, torch loads and checksums guard."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.checksums import checksums
from ckptool.files.folders import open_folder
from ckptool.files.sources import FolderSource
from ckptool.formats.joined.container import JoinedTensor, RankFiles, rows
from ckptool.formats.pieces.chunks import Chunk
from ckptool.pickles.nodes import Global


class Halves(RankFiles):
    """Tensors cut along the columns, and the settings of the first rank with a tensor of their own."""

    format = "halves"
    writer = "a test"

    def __init__(self, folder: str, stack: ExitStack) -> None:
        super().__init__(open_folder(folder))
        files = [file for name in sorted(self.folder.names()) if (file := self.open_file(name, stack))]
        parts: dict[str, list[Chunk]] = {}
        width = 0
        for file in files:
            nodes = file.graph.nodes
            root = nodes[file.graph.root]
            tensors = dict(zip(root.pairs[::2], root.pairs[1::2]))  # type: ignore[union-attr]
            for key, value in tensors.items():
                if file.reader.tensor(value):
                    part = rows(file, value)
                    box = ((0, width), part.shape)
                    parts.setdefault(str(nodes[key]), []).append(Chunk(box, part.source, part.begin))
                elif file is files[0]:
                    settings = self.graft(file, value)
            width += part.shape[1]
        items = []
        for name, chunks in parts.items():
            shape = (chunks[0].box[1][0], width)
            items.append((name, self.add_tensor(name, JoinedTensor(part.dtype, shape, shape, lambda c=chunks: c))))  # type: ignore[misc]
        self.build(self.builder.mapping([*items, ("settings", settings)]))


@pytest.fixture
def whole() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.arange(35.0).reshape(7, 5), "b.weight": torch.randn(3, 5)}


@pytest.fixture
def folder(tmp_path: Path, whole: dict[str, torch.Tensor]) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    for rank, (low, high) in enumerate(((0, 2), (2, 5))):
        part = {name: tensor[:, low:high].clone() for name, tensor in whole.items()}
        # The second is a view with other strides.
        part["b.weight"] = part["b.weight"].t().contiguous().t()
        torch.save({**part, "settings": {"lr": 0.1, "mean": torch.ones(3)}}, made / f"rank{rank}.pt")
    return made


def opened(folder: Path) -> Checkpoint:
    container = Halves(str(folder), ExitStack())
    return Checkpoint.of(str(folder), FolderSource(str(folder), container.files), container)


def test_an_edit_writes_one_file_that_torch_loads(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    checkpoint = opened(folder)
    ckptool.save(ckptool.rename(checkpoint, {"a.weight": "c.weight"}), folder.parent / "one.pth")
    loaded = torch.load(folder.parent / "one.pth")
    assert loaded.pop("settings")["mean"].tolist() == [1, 1, 1]
    assert list(loaded) == ["c.weight", "b.weight"]
    assert all(map(torch.equal, loaded.values(), whole.values()))


def test_without_an_edit_it_is_one_file_too(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    ckptool.save(opened(folder), folder.parent / "one.pth")
    assert torch.equal(torch.load(folder.parent / "one.pth")["b.weight"], whole["b.weight"])


def test_its_checksums_are_those_of_the_files(folder: Path) -> None:
    checkpoint = opened(folder)
    parts = {record.part_of for record in checkpoint.container.records()}
    assert parts == {(), ("a.weight",), ("b.weight",)}
    assert [record.key for record in checkpoint.container.records() if record.key] == ["rank0, storage 2"]
    assert not checksums(checkpoint.container).wrong


@pytest.mark.parametrize("number", [0, 1])
def test_a_flipped_bit_is_not_carried_over(folder: Path, number: int) -> None:
    path = folder / "rank1.pt"
    data = bytearray(path.read_bytes())
    records = [record for record in opened(folder).container.records() if record.name.startswith("rank1.pt")]
    span = next(record.span for record in records if record.name.endswith(f"data/{number}"))
    data[span.offset + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(MalformedError, match="damaged"):
        ckptool.save(opened(folder), folder.parent / "one.pth")
    assert [record.name for record in checksums(opened(folder).container).wrong] == [f"rank1.pt: rank1/data/{number}"]


def test_every_pickle_is_looked_at(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    torch.save({"evil": Evil(), **torch.load(folder / "rank1.pt")}, folder / "rank1.pt")
    pickles = list(opened(folder).container.pickles())
    assert [pickle.where for pickle in pickles] == ["rank0.pt: data.pkl", "rank1.pt: data.pkl"]
    names = [{node.name for _, node in pickle.graph.of_type(Global)} for pickle in pickles if pickle.graph]
    assert ["system" in own for own in names] == [False, True]
