"""DCP folders with a piece missing, cut or exchanged, and those that are made to do harm."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from ambiguous_archives import FAILURES
from conftest import FIXTURES
from crafted_files import ROOT, SYSTEM, TENSOR, Entry, archive, by_key, dumped, entries, legacy, plain
from dcp_folders import write_ranks
from torch import Size, float32
from torch.distributed.checkpoint import metadata as dcp_types
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.base.errors import MalformedError, RefusedError, UnreadableError

FOLDER = FIXTURES / "dcp4"
FILES = sorted(path.name for path in FOLDER.glob("*.distcp"))
UP = "model.up.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(FOLDER, tmp_path / "saved"))


def spoil(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata, as torch reads it."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def entry(metadata: Any, name: str, offset: tuple[int, ...] | None) -> tuple[Any, Any]:
    """The index and the place of a piece."""
    return next(
        (index, info)
        for index, info in metadata.storage_data.items()
        if index.fqn == name
        and (index.offset is None) == (offset is None)
        and tuple(index.offset or ()) == (offset or ())
    )


def found(folder: Path) -> str:
    """What ``validate`` has to say, all of it; the folder must not be valid, and nothing is written of it."""
    report = ckptool.validate(folder)
    assert report["status"] == "invalid"
    return "\n".join(note["message"] for check in report["checks"] for note in check["notes"])


def refused(folder: Path, tmp_path: Path) -> None:
    """No edit and no conversion of it is written."""
    for target in ("torch", "dcp"):
        with pytest.raises((MalformedError, RefusedError)), ckptool.open(folder) as checkpoint:
            ckptool.save(ckptool.convert(checkpoint, target), tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def _exchanged(metadata: Any) -> None:
    """Of another shape, which the items themselves tell."""
    (_, one), (_, two) = entry(metadata, UP, (0, 0)), entry(metadata, "model.norm.weight", (0,))
    one.__dict__, two.__dict__ = two.__dict__, one.__dict__


def _without_a_piece(metadata: Any) -> None:
    del metadata.state_dict_metadata[UP].chunks[1]
    del metadata.storage_data[entry(metadata, UP, (0, 3))[0]]


def _not_stored(metadata: Any) -> None:
    del metadata.storage_data[entry(metadata, UP, (0, 3))[0]]
    del metadata.storage_data[entry(metadata, "epoch", None)[0]]


def _endless(metadata: Any) -> None:
    metadata.state_dict_metadata[UP].size = Size((2**60, 2**2))
    metadata.planner_data["epoch"] = ("history", 2**60)


def _moved(metadata: Any) -> None:
    entry(metadata, UP, (0, 0))[1].offset += 7


def _longer(metadata: Any) -> None:
    entry(metadata, UP, (0, 0))[1].length += 10


def _transformed(metadata: Any) -> None:
    entry(metadata, UP, (0, 0))[1].transform_descriptors = ["stream.deflate/1"]


def _sized(*sizes: int) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata[UP].chunks[0], "sizes", Size(sizes))


_RENAMED = "nodel" + UP[5:]
_PLACES = {"epoch": ("model", "norm.weight"), "note": ("nothing", "x")}
#: What is wrong with ``.metadata``, the messages, and whether conversions are refused.
DAMAGE: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], bool]] = {
    "exchanged": (_exchanged, (f"'{UP}': .metadata lists float32[7, 3], and the item holds float32[3]",), False),
    "moved": (_moved, (f"'{UP}': no archive of torch.save is where .metadata says",), True),
    "a hole": (_without_a_piece, (f"{UP}: no piece of .metadata has [0:7, 3:6]",), True),
    # torch puts the tensor at the root, under its whole key: the model lacks it.
    "the path of another": (
        lambda m: m.planner_data.update({_RENAMED: m.planner_data.pop(UP)}),
        (f"'{UP}' has no path in the object, and '{_RENAMED}' has one but is no value",),
        True,
    ),
    "wider": (_sized(7, 4), (f"{UP}: the pieces [0:7, 0:4] and [0:7, 3:6] overlap",), True),
    "out of bounds": (_sized(8, 3), (f"{UP}: the piece [0:8, 0:3] lies outside of the tensor, [7, 9]",), True),
    "not stored": (_not_stored, ("does not say where the piece [0:7, 3:6] is", "does not say where 'epoch' is"), True),
    "longer": (_longer, ("overlap at byte",), False),
    "transformed": (_transformed, (f"{UP} [0:7, 0:3] in __0_0.distcp went through stream.deflate/1",), True),
    "endless": (_endless, ("larger than any tensor",), False),
    "in the way": (lambda m: m.planner_data.update(_PLACES), ("there is no room for 'epoch' where it belongs",), False),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_metadata_that_is_not_true_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    change, messages, unwritten = DAMAGE[name]
    spoil(folder, change)
    text = found(folder)
    assert all(message in text for message in messages), text
    if unwritten:
        refused(folder, tmp_path)


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "..", "a/b.distcp", "a\\b", "c:x", "x\0y", ""])
def test_a_way_out_of_the_folder(path: str, folder: Path, tmp_path: Path) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            if info.relative_path == FILES[0]:
                info.relative_path = path

    spoil(folder, change)
    text = found(folder)
    assert f"the file {path!r} is outside of the folder: not opened" in text
    refused(folder, tmp_path)


class Runs:
    """Its pickle calls a function."""

    def __reduce__(self) -> Any:
        return os.system, ("echo run > /tmp/never",)


def test_a_call_in_the_metadata(folder: Path) -> None:
    spoil(folder, lambda metadata: setattr(metadata, "extra", Runs()))
    text = found(folder)
    assert "posix.system" in text or "nt.system" in text
    assert "loading it imports or runs it" in text


def test_one_that_is_not_finished(folder: Path) -> None:
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    with pytest.raises(UnreadableError, match="not finished"):
        ckptool.open(folder)
    shutil.copy(FOLDER / ".metadata", folder / ".metadata")
    with ckptool.open(folder) as checkpoint:
        assert [problem.code for problem in checkpoint.container.problems] == ["unfinished-save"]


# -- what torch.load would not take alone, it does not take as an item ------------------------------------------


def with_item(folder: Path, data: bytes, object_: bool) -> Path:
    """A folder with one item of these bytes: an object, or the tensor that ``crafted_files`` puts in."""
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(data)
    offset = None if object_ else Size((0,))
    listed: Any = dcp_types.BytesStorageMetadata()
    if not object_:
        chunks = [dcp_types.ChunkStorageMetadata(Size((0,)), Size((4,)))]
        listed = dcp_types.TensorStorageMetadata(dcp_types.TensorProperties(dtype=float32), Size((4,)), chunks)
    places = {dcp_types.MetadataIndex("item", offset): _StorageInfo("__0_0.distcp", 0, len(data))}
    (folder / ".metadata").write_bytes(pickle.dumps(dcp_types.Metadata({"item": listed}, {"item": ("item",)}, places)))
    return folder


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("object_", [True, False])
@pytest.mark.parametrize("case", by_key(FAILURES))
def test_an_item_is_looked_at_like_a_file(case: Any, object_: bool, tmp_path: Path) -> None:
    folder = with_item(tmp_path / "saved", case.data, object_)
    assert ckptool.validate(folder)["status"] == "invalid"


@pytest.mark.parametrize("object_", [True, False])
def test_a_call_anywhere_in_an_item_is_seen(object_: bool, tmp_path: Path) -> None:
    good = plain(TENSOR)
    records = (
        Entry(f"{ROOT}/extra.pkl", dumped(SYSTEM)),
        Entry(f"{ROOT}/hidden.pkl", dumped(SYSTEM), unlisted=True),
        Entry(f"{ROOT}/inner.zip", plain(SYSTEM)),
    )
    datas = [archive([*entries(TENSOR).values(), record]) for record in records]
    datas += [archive(entries(pickled=dumped(TENSOR) + dumped(SYSTEM)).values()), legacy(SYSTEM)]
    folder = with_item(tmp_path / "good", good, object_)
    assert ckptool.validate(folder)["status"] == "valid"
    for number, data in enumerate(datas):
        folder = with_item(tmp_path / str(number), data, object_)
        report = ckptool.validate(folder)
        codes = {note["code"] for check in report["checks"] for note in check["notes"]}
        # A record that no directory lists is not searched: it is reported as such, and the item is invalid.
        wanted = {"unlisted-record", "not-checked"} if number == 1 else {"dangerous-call"}
        assert report["status"] == "invalid" and wanted <= codes, number


def test_metadata_of_a_subclass_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of Megatron-core: ``torch.distributed.checkpoint`` loads it, too, where the class is there."""
    before = ckptool.keys(folder)
    module = ModuleType("megatron_like")
    module.MCoreMetadata = type("MCoreMetadata", (dcp_types.Metadata,), {"__module__": "megatron_like"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_like", module)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.__class__ = module.MCoreMetadata
    path.write_bytes(pickle.dumps(metadata))
    assert ckptool.keys(folder) == before
    report = ckptool.validate(folder)
    assert report["status"] == "valid"
    assert "megatron_like.MCoreMetadata" in str(report["globals"])


def test_one_place_listed_twice_is_ambiguous(folder: Path, tmp_path: Path) -> None:
    """A dict takes the last of two equal keys, another reader of the pickle the first."""
    data = with_item(tmp_path / "twice", plain(TENSOR), False) / ".metadata"
    metadata = pickle.loads(data.read_bytes())
    (index,) = metadata.storage_data
    other = dcp_types.MetadataIndex("item", Size((0,)), 1)
    metadata.storage_data[dcp_types.MetadataIndex("item", Size((1,)))] = metadata.storage_data[index]
    text = pickle.dumps(metadata)
    assert text.count(b"K\x01\x85") == 1 and other == index
    data.write_bytes(text.replace(b"K\x01\x85", b"K\x00\x85"))
    assert "is listed twice" in found(data.parent)
    refused(data.parent, tmp_path)


def test_many_items_on_one_archive_take_no_longer_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.formats.dcp import folder as dcp_folder

    data = plain(TENSOR)
    folder = with_item(tmp_path / "saved", data, True)
    names = [f"item{number}" for number in range(300)]
    places = {dcp_types.MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, len(data)) for name in names}
    found = dcp_types.Metadata(
        {name: dcp_types.BytesStorageMetadata() for name in names}, {name: (name,) for name in names}, places
    )
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    opened: list[str] = []
    real = dcp_folder.open_item
    monkeypatch.setattr(dcp_folder, "open_item", lambda item, *more: (opened.append(item.name), real(item, *more))[1])
    assert ckptool.validate(folder)["status"] == "invalid"
    assert len(opened) < 10


def test_the_empty_places_of_a_list_are_bounded(tmp_path: Path) -> None:
    folder = with_item(tmp_path / "saved", plain(TENSOR), True)
    names = [f"item{number}" for number in range(2000)]
    paths = {name: ("list", number * 999) for number, name in enumerate(names)}
    one = dcp_types.TensorStorageMetadata(dcp_types.TensorProperties(dtype=float32), Size((0,)), [])
    (folder / ".metadata").write_bytes(pickle.dumps(dcp_types.Metadata(dict.fromkeys(names, one), paths, {})))
    with ckptool.open(folder) as checkpoint:
        assert len(checkpoint.graph.nodes) < 100_000
    assert ckptool.validate(folder)["coverage"] == "partial"
    refused(folder, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.planner_data.update({UP: ("model", "other")}),
        lambda m: m.planner_data.update({UP: (0, UP)}),
        lambda m: m.state_dict_metadata.update(lost=m.state_dict_metadata.pop(UP)),
        lambda m: m.state_dict_metadata.update(lost=m.state_dict_metadata["epoch"]),
    ],
)
def test_a_name_that_dcp_does_not_find(change: Callable[[Any], None], folder: Path, tmp_path: Path) -> None:
    spoil(folder, change)
    with pytest.raises(CheckpointException, match=r"Missing key|KeyError"):
        dcp_to_torch_save(folder, tmp_path / "by_torch.pt")
    assert found(folder)
    refused(folder, tmp_path)


class _Made(NamedTuple):
    """An object that pickle makes by a call."""

    func: Any
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.func, self.args


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (lambda a: a, True),
        (lambda a: (*a[:4], 1, a[5]), False),
        (lambda a: a[:5], False),
        (lambda a: (*a, 1), False),
        (lambda a: (*a, {}), True),
        (lambda a: (*a[:5], {"x": 1}), True),
        (lambda a: (*a[:5], os.getcwd), False),
    ],
)
def test_an_item_is_a_tensor_as_torch_takes_it(
    args: Callable[[tuple[Any, ...]], tuple[Any, ...]], kept: bool, tmp_path: Path
) -> None:
    tensor = torch.ones(3)
    func, given = tensor.__reduce_ex__(2)
    data = BytesIO()
    torch.save(_Made(func, args(given)), data)
    saved = write_ranks(tmp_path / "saved", {"w": tensor}, 1)
    (saved / "__0_0.distcp").write_bytes(data.getvalue())
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(data.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert (ckptool.validate(saved)["status"] == "valid") == kept
    if kept:
        dcp_to_torch_save(saved, tmp_path / "by_torch.pt")
    else:
        refused(saved, tmp_path)


# torch opens no archive without a version that it knows, and no item of a folder either.


# DCP loads objects with weights_only=False, whatever is said of their places.


def _cut(places: dict[Any, Any], harm: int) -> None:
    places[dcp_types.MetadataIndex("epoch")] = _StorageInfo("__0_0.distcp", harm, 1 << 20)


def _inside_another(places: dict[Any, Any], harm: int) -> None:
    """The object is in the bytes of a tensor."""
    (tensor,) = (index for index in places if index.fqn == "w")
    size = len(pickle.dumps(Runs()))
    places[tensor] = _StorageInfo("__0_0.distcp", 0, harm + size)
    places[dcp_types.MetadataIndex("epoch")] = _StorageInfo("__0_0.distcp", harm, size)


@pytest.mark.parametrize("change", [_cut, _inside_another])
def test_what_is_there_of_an_item_in_the_wrong_place_is_looked_at(
    change: Callable[[dict[Any, Any], int], None], tmp_path: Path
) -> None:
    folder = write_ranks(tmp_path / "saved", {"w": torch.ones(2), "epoch": 3}, 1)
    file = folder / "__0_0.distcp"
    harm = file.stat().st_size
    file.write_bytes(file.read_bytes() + pickle.dumps(Runs()))
    assert ckptool.scan(folder)["verdict"] == "unsafe"  # bytes that belong to no item are searched
    spoil(folder, lambda metadata: change(metadata.storage_data, harm))
    assert ckptool.scan(folder)["verdict"] == "unsafe"
    assert ckptool.validate(folder)["safety"]["verdict"] == "unsafe"
