"""``.metadata`` is read to what ``pickle.load`` makes of it, and a hostile one is refused at once."""

from __future__ import annotations

import pickle
import random
import resource
import time
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

from ckptool.base.errors import MalformedError
from ckptool.formats.dcp import metadata as records
from ckptool.formats.dcp.listing import read_listing

FOUND = sorted(path.parent for path in FIXTURES.rglob(".metadata"))


def listed(data: bytes) -> tuple[Any, ...]:
    """The values, paths and items of what ``pickle.loads`` makes."""
    theirs = pickle.loads(data)
    values = {}
    for name, value in theirs.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            values[name] = (None, (), ())
        else:
            boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks)
            values[name] = (str(value.properties.dtype)[6:], tuple(value.size), boxes)
    items = [
        records.Item(
            index.fqn,
            None if index.offset is None else tuple(index.offset),
            info.relative_path,
            info.offset,
            info.length,
            tuple(info.transform_descriptors or ()) if hasattr(info, "transform_descriptors") else (),
        )
        for index, info in (theirs.storage_data or {}).items()
    ]
    return values, dict(theirs.planner_data or {}), items


def read(data: bytes) -> tuple[Any, ...]:
    """The same as ckptool reads it, without a flaw."""
    found = read_listing(data, ".metadata")
    assert (found.flaws, found.subclasses, found.end) == ([], [], len(data))
    values = {name: (value.dtype and value.dtype.name, *value[1:]) for name, value in found.values.items()}
    return values, found.paths, found.items


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
    if "megatron" not in str(folder):  # their class takes Megatron-core to load
        assert read(data) == listed(data)
    found = read_listing(data, ".metadata")
    assert found.flaws == [] and found.items and all(item.name in found.values for item in found.items)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "metadata",
    [many(dims=1), many(dims=4), many(tensors=1, ranks=1001), many(tensors=1001, ranks=1), many(gathered=False)],
    ids=["lines", "four dimensions", "one tensor", "one rank", "shared strings"],
)
def test_many_pieces(metadata: Metadata, protocol: int) -> None:
    data = pickle.dumps(metadata, protocol)
    assert read(data) == listed(data)


def test_properties_of_torch_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have six values: the strides, too, or None."""
    metadata = many(tensors=2)
    plain = read(pickle.dumps(metadata))
    five = TensorProperties.__getstate__
    for strides in ((7, 1), None):
        monkeypatch.setattr(TensorProperties, "__getstate__", lambda self, strides=strides: (*five(self), strides))
        assert read(pickle.dumps(metadata)) == plain


@pytest.mark.parametrize("made", [print, ValueError, torch.nn.Linear, pickle.Unpickler, torch.Tensor])
def test_any_other_name_is_refused(made: Any) -> None:
    metadata = many(tensors=1, ranks=1)
    metadata.planner_data["x"] = made
    with pytest.raises(MalformedError, match="which torch never writes there: loading it imports or runs it"):
        read_listing(pickle.dumps(metadata), "")


def test_bytes_changed_at_random_are_never_read_as_something_else() -> None:
    """What is read without a flaw is what ``pickle.loads`` reads."""
    data = pickle.dumps(many(tensors=4, ranks=4))
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
        try:
            found = read_listing(bytes(changed), "")
        except MalformedError:
            continue
        if not found.flaws and not found.subclasses:
            accepted += 1
            assert (found.paths, found.items) == listed(bytes(changed))[1:]
    assert accepted


# -- hostile ones ------------------------------------------------------------------------------------------------------

TUPLES = b"".join(b"h%ch%c\x86\x94" % (at, at) for at in range(100))
HOSTILE = {
    "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a text of gigabytes": b"\x80\x04X\xff\xff\xff\x7f.",
    "a frame of exabytes": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "bytes of exabytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f.",
    "more objects than bytes": b"\x80\x04" + b"]" * 2_000_000 + b".",
    "a key of nested tuples": b"\x80\x04N\x85\x94" + TUPLES + b"0}h\x64Ns.",
    "a key of tuples that share tuples": b"\x80\x04}N\x85\x94" + TUPLES.replace(b"\x94", b"\x94", 100) + b"Ns.",
    "tuples nested a million times": b"\x80\x04}N" + b"\x85" * 400_000 + b"Ns.",
    "tuples nested in twos": b"\x80\x04}N" + b"N\x86" * 400_000 + b"Ns.",
    "an extension": b"\x80\x04\x82\x01.",
    "a persistent id": b"\x80\x04NQ.",
    "a call of a constant": b"\x80\x04NN\x85R.",
    "a size copied from a list": b"\x80\x04ctorch\nSize\n](" + b"N" * 1000 + b"e\x85R.",
    "a class with arguments": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN\x85\x81.",
    "a set": b"\x80\x04\x8f(N\x90.",
    "fields of a class": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\0\0\0aNsb.",
    "fields of a function": b"\x80\x04ctorch\nSize\nN}X\x0c\0\0\0__defaults__Ns\x86b.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_one_is_refused_at_once(name: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(MalformedError):
        read_listing(HOSTILE[name], ".metadata")
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def _shared(count: int, value: Any) -> Metadata:
    """``value`` as the entry and the path of many names."""
    names = [f"{number}" for number in range(count)]
    return Metadata(dict.fromkeys(names, value), dict.fromkeys(names, ("a" * 5000,) * 200), {})


def test_shared_parts_are_read_in_bounded_time() -> None:
    chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((0,)))] * 30_000
    value = TensorStorageMetadata(TensorProperties(), torch.Size((0,)), chunks)
    data = pickle.dumps(_shared(20_000, value))
    began = time.process_time()
    found = read_listing(data, ".metadata")
    assert found.flaws and time.process_time() - began < 5


def test_many_pieces_take_little_time() -> None:
    """64,000 pieces of any kind took 0.8 seconds of an idle core at most; here the bound is loose."""
    data = pickle.dumps(many(tensors=1000, ranks=8, transform_descriptors=["stream.zstd/1"]), 2)
    began = time.process_time()
    assert len(read_listing(data, ".metadata").items) == 8001
    assert time.process_time() - began < 2
