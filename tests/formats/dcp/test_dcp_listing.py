"""The ``.metadata`` that torch writes is read in one pass, to what the reader of any pickle makes of it."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.formats.dcp.listing import _as_written, read_listing
from ckptool.formats.dcp.metadata import read_metadata

FOUND = sorted(path.parent for path in FIXTURES.rglob(".metadata"))


def listed(data: bytes) -> Any:
    """What any pickle is read to, without its graph."""
    return read_metadata(data, ".metadata")._replace(graph=None)


def many(tensors: int = 40, ranks: int = 64, dims: int = 2, gathered: bool = True, **more: Any) -> Metadata:
    """The metadata of many pieces; what was ``gathered`` from the ranks shares no string with the rest."""
    names = [f"layers.{number}.weight" for number in range(tensors)]
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in names}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(ranks):
        rest = (0,) * (dims - 1)
        for at, name in enumerate(names):
            offset = torch.Size((300 * rank, *rest))
            size = torch.Size((300, *(7,) * (dims - 1)))
            own = MetadataIndex(name, offset, rank), _StorageInfo(f"__{rank}_0.distcp", at << 30, 1400 + at, **more)
            index, info = pickle.loads(pickle.dumps(own)) if gathered else own
            chunks[name].append(ChunkStorageMetadata(offset, size))
            places[index] = info
    shape = torch.Size((300 * ranks, *(7,) * (dims - 1)))
    values: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), shape, chunks[name]) for name in names
    }
    values["epoch"] = BytesStorageMetadata()
    places[MetadataIndex("epoch")] = _StorageInfo("__0_0.distcp", 0, 9, **more)
    paths = {name: (name,) for name in values}
    return Metadata(values, paths, places, StorageMeta(checkpoint_id=Path("a/b"), modules=[]), "1.0.0")


@pytest.mark.parametrize("folder", FOUND, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_a_folder(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    assert read_listing(data, "")._replace(graph=None) == listed(data)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "metadata",
    [
        many(),
        many(dims=1),
        many(dims=4),
        many(tensors=1, ranks=3000),
        many(tensors=3000, ranks=1),
        many(gathered=False),
    ],
    ids=["many", "lines", "four dimensions", "one tensor", "one rank", "shared strings"],
)
def test_many_pieces(metadata: Metadata, protocol: int) -> None:
    data = pickle.dumps(metadata, protocol)
    assert _as_written(data) == listed(data)
    assert len(listed(data).items) == len(metadata.storage_data)


def test_pieces_that_were_compressed() -> None:
    data = pickle.dumps(many(transform_descriptors=["stream.zstd/1"]))
    assert _as_written(data) == listed(data)
    assert {item.transforms for item in listed(data).items} == {("stream.zstd/1",)}


def test_properties_of_torch_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have six values: the strides, too, or None."""
    metadata = many(tensors=2)
    plain = listed(pickle.dumps(metadata))
    five = TensorProperties.__getstate__
    for strides in ((7, 1), None):
        monkeypatch.setattr(TensorProperties, "__getstate__", lambda self, strides=strides: (*five(self), strides))
        data = pickle.dumps(metadata)
        assert _as_written(data) == listed(data) == plain._replace(end=len(data))


def test_scalars_and_long_names() -> None:
    metadata = many(tensors=3)
    metadata.state_dict_metadata = {}
    metadata.planner_data = None
    for number, name in enumerate(("x" * 300, "größe", "offset", "")):
        properties, chunk = TensorProperties(), ChunkStorageMetadata(torch.Size(()), torch.Size(()))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(()), [chunk])
        metadata.storage_data[MetadataIndex(name, torch.Size(()), 0)] = _StorageInfo("__0_0.distcp", number, 1)
    data = pickle.dumps(metadata)
    assert _as_written(data) == listed(data)


def _calls(metadata: Metadata) -> None:
    metadata.planner_data = print


def _unknown_class(metadata: Metadata) -> None:
    metadata.storage_meta = ValueError  # type: ignore[assignment]


def _negative(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("epoch")] = _StorageInfo("__0_0.distcp", -1, 1)


def _same_list(metadata: Metadata) -> None:
    first, second, *_ = metadata.state_dict_metadata.values()
    second.chunks = first.chunks  # type: ignore[union-attr]


def _wrong_path(metadata: Metadata) -> None:
    metadata.planner_data["layers.0.weight"] = ("elsewhere",)


@pytest.mark.parametrize("change", [_calls, _unknown_class, _negative, _same_list, _wrong_path])
def test_anything_else_is_left_to_the_reader_of_any_pickle(change: Any) -> None:
    metadata = many(tensors=3, ranks=3)
    change(metadata)
    assert _as_written(pickle.dumps(metadata)) is None
    assert _as_written(pickle.dumps(metadata, 2)) is None


def own(folder: Path) -> bytes:
    """The metadata that ckptool writes of tensors of some shapes and dtypes, one by one and in rows, and of objects."""
    shapes = [(), (3,), (2, 3), (2, 3), (0, 4), (5, 1, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    tensors = {f"layers.{at}.w": torch.zeros(shapes[at % 6], dtype=dtypes[at // 20]) for at in range(60)}
    torch.save(
        {"model": tensors, "same": [torch.ones(2) for _ in range(9)], "epoch": 3, "x" * 300: "y"}, folder / "a.pt"
    )
    ckptool.save(ckptool.convert(folder / "a.pt", "dcp", allow_loss=["containers"]), folder / "saved")
    return (folder / "saved" / ".metadata").read_bytes()


def test_what_ckptool_writes(tmp_path: Path) -> None:
    data = own(tmp_path)
    assert _as_written(data) == listed(data)
    assert len(listed(data).values) == 71


@pytest.mark.parametrize("kind", ["made", "dcp4", "own"])
def test_what_is_accepted_is_without_flaws(kind: str, tmp_path: Path) -> None:
    """Bytes changed at random: what is accepted is what any pickle is read to, with nothing to remark."""
    data = own(tmp_path) if kind == "own" else (FIXTURES / "dcp4" / ".metadata").read_bytes()
    data = pickle.dumps(many(tensors=4, ranks=4)) if kind == "made" else data
    draw = random.Random(16)
    accepted = 0
    for _ in range(1500):
        changed = bytearray(data)
        at = draw.randrange(len(data))
        kind = draw.random()
        if kind < 0.6:
            changed[at] = draw.choice((changed[at] ^ 1 << draw.randrange(8), draw.randrange(256), draw.choice(data)))
        elif kind < 0.8:
            del changed[at : at + draw.randrange(1, 9)]
        else:
            changed[at:at] = data[(other := draw.randrange(len(data))) : other + draw.randrange(1, 30)]
        result = _as_written(bytes(changed))
        if result is not None:
            accepted += 1
            assert result == listed(bytes(changed))
    assert accepted


def test_a_cut_one_is_refused() -> None:
    data = pickle.dumps(many(tensors=3, ranks=3))
    for end in range(0, len(data), 7):
        assert _as_written(data[:end]) is None
    with pytest.raises(MalformedError):
        read_listing(data[:-1], ".metadata")
