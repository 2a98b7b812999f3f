"""The tar format of torch 0.1, against ``torch.load(weights_only=False)`` of handmade files."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CORPUS, FIXTURES, needs_corpus

import ckptool
from ckptool.base.errors import CkptoolError, MalformedError, NotACheckpointError, RefusedError, UnreadableError
from ckptool.base.limits import LIMITS


class _Stands(tuple):  # type: ignore[type-arg]
    """What stands in the object for a tensor or storage: its number."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, _Stands):
            return obj[0]
        return None


def _dump(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def _at(key: int | str) -> _Stands:
    return _Stands((str(key),))


Stored = tuple[int, str, Any, torch.Tensor]
Viewed = tuple[int, int, int, int]
Placed = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


def archive(
    path: Path, value: object, storages: Iterable[Stored], tensors: Iterable[Placed], views: Iterable[Viewed] = ()
) -> Path:
    """Write a file as torch 0.1 did."""
    storages, tensors = list(storages), list(tensors)
    first = _dump(len(storages))
    for key, location, cls, data in storages:
        first += _dump((key, location, cls)) + struct.pack("<q", data.numel()) + data.numpy().tobytes()
    first += _dump(list(views))
    second = _dump(len(tensors))
    for key, storage, shape, strides, offset in tensors:
        second += _dump((key, storage, torch.FloatTensor)) + struct.pack("<i4x", len(shape))
        second += struct.pack(f"<{2 * len(shape) + 1}q", *shape, *strides, offset)
    parts = {"sys_info": _dump({"protocol_version": 1000}), "pickle": _dump(value)}
    return members(path, {**parts, "tensors": second, "storages": first})


def members(path: Path, parts: dict[str, bytes], style: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:", format=style) as file:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def typical(path: Path, location: str = "cpu") -> Path:
    """Tensors that share storages, views of storages, odd strides, a scalar and an empty one."""
    one, two = torch.arange(24, dtype=torch.float32), torch.arange(6, dtype=torch.int64)
    value = {
        "whole": _at(11),
        "turned": _at(12),
        "again": [_at(11)],
        "view": _at(13),
        "scalar": _at(14),
        "empty": _at(15),
        "long": _at(16),
        "epoch": 3,
        "state": OrderedDict([("w", _at(11)), ("b", _at(13))]),
    }
    tensors = [
        (11, 1, (4, 6), (6, 1), 0),
        (12, 1, (6, 4), (1, 6), 0),
        (13, 3, (2, 2), (2, 1), 1),
        (14, 1, (), (), 7),
        (15, 4, (0, 3), (3, 1), 0),
        (16, 2, (3,), (2,), 1),
    ]
    stored = [
        (1, location, torch.FloatStorage, one),
        (2, location, torch.LongStorage, two),
        (4, location, torch.FloatStorage, torch.zeros(0)),
    ]
    return archive(path, value, stored, tensors, [(3, 1, 4, 6)])


def loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every tensor and plain value, by its path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(item, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for key, item in enumerate(value) for k, v in leaves(item, f"{path}[{key}]").items()}
    return {path: value}


def same(a: Any, b: Any) -> None:
    """Equal values, shapes, strides and dtypes, and the same memory shared."""
    first, second = leaves(a), leaves(b)
    assert list(first) == list(second)
    tensors = [key for key, value in first.items() if isinstance(value, torch.Tensor)]
    for key in first:
        if key in tensors:
            assert torch.equal(first[key], second[key]), key
            assert (first[key].stride(), first[key].dtype) == (second[key].stride(), second[key].dtype), key
        else:
            assert first[key] == second[key]
    for one in tensors:
        for other in tensors:
            distance = [found[one].data_ptr() - found[other].data_ptr() for found in (first, second)]
            if min(first[one].numel(), first[other].numel()) and abs(distance[0]) < 96:
                assert distance[0] == distance[1], f"{one} and {other} share other memory"
            assert (first[one] is first[other]) == (second[one] is second[other])


def test_to_zip_keeps_tensors_and_sharing(tmp_path: Path) -> None:
    path = typical(tmp_path / "old.t7.tar")
    with ckptool.open(path) as checkpoint:
        assert checkpoint.format == "torch-tar"
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "new.pth")
    same(loaded(path), torch.load(tmp_path / "new.pth", weights_only=True))
    assert ckptool.validate(tmp_path / "new.pth")["valid"]


def test_an_edit_makes_a_zip(tmp_path: Path) -> None:
    path = typical(tmp_path / "old.tar", "cuda:1")
    with ckptool.open(path) as checkpoint:
        assert {entry.tensor.location for entry in checkpoint.survey.tensors} == {"cuda:1"}
        edited = ckptool.add_prefix(checkpoint, "module.", key="state")
        ckptool.save(edited, tmp_path / "new.pth")
        assert edited.changes[-1].what == "tar format -> zip"
    found = torch.load(tmp_path / "new.pth", map_location="cpu", weights_only=True)
    assert list(found["state"]) == ["module.w", "module.b"]
    with ckptool.open(tmp_path / "new.pth") as made:
        assert {entry.tensor.location for entry in made.survey.tensors} == {"cuda:1"}


def test_without_an_edit_it_is_copied(tmp_path: Path) -> None:
    path = typical(tmp_path / "old.tar")
    with ckptool.open(path) as checkpoint:
        ckptool.save(checkpoint, tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").read_bytes() == path.read_bytes()


def test_storages_in_the_object(tmp_path: Path) -> None:
    """A storage, and a view of one, that the object holds without a tensor."""
    data = torch.arange(8, dtype=torch.float32)
    stored = [(1, "cpu", torch.FloatStorage, data)]
    path = archive(tmp_path / "s.tar", {"s": _at(1), "v": _at(2)}, stored, [], [(2, 1, 3, 4)])
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "new.pth")
        assert "becomes one of its own" in checkpoint.container.problems[-1].message
    found, expected = torch.load(tmp_path / "new.pth", weights_only=True), loaded(path)
    assert {key: item.tolist() for key, item in found.items()} == {key: item.tolist() for key, item in expected.items()}


def test_container_ids_become_classes(tmp_path: Path) -> None:
    """torch 0.1 noted the source of classes: (class, file, source); torch takes the class."""

    class Pickler(_Pickler):
        def persistent_id(self, obj: object) -> object:
            return (OrderedDict, "net.py", "class Net: ...") if obj == "class" else super().persistent_id(obj)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"cls": "class"})
    path = archive(tmp_path / "c.tar", {}, [], [])
    parts = {info.name: file.read() for info, file in _extracted(path)}
    members(path, {**parts, "pickle": buffer.getvalue()})
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "new.pth")
    assert torch.load(tmp_path / "new.pth", weights_only=True) == {"cls": OrderedDict}


def _extracted(path: Path) -> list[tuple[tarfile.TarInfo, io.BytesIO]]:
    with tarfile.open(path) as file:
        found = [(info, file.extractfile(info)) for info in file]
        return [(info, io.BytesIO(data.read())) for info, data in found if data is not None]


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar(tmp_path: Path, style: int) -> None:
    path = typical(tmp_path / "old.tar")
    members(path, {info.name: file.read() for info, file in _extracted(path)}, style)
    with ckptool.open(path) as checkpoint:
        assert len(checkpoint.survey.tensors) == 9


def test_cut_files_are_told(tmp_path: Path) -> None:
    data = typical(tmp_path / "old.tar").read_bytes()
    for size in range(0, len(data), 97):
        cut = tmp_path / "cut.tar"
        cut.write_bytes(data[:size])
        try:
            ckptool.open(cut).close()
        except UnreadableError:
            continue
        # What is cut off is padding.
        same(loaded(tmp_path / "old.tar"), _converted(cut, tmp_path / "x.pth"))


def _converted(path: Path, out: Path) -> Any:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), out, force=True)
    return torch.load(out, weights_only=True)


def test_changed_bytes_never_crash(tmp_path: Path) -> None:
    data = typical(tmp_path / "old.tar").read_bytes()
    bad = tmp_path / "bad.tar"
    for at in range(0, len(data), 13):
        for value in (0, 0x7F, 0xFF):
            bad.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                ckptool.keys(bad)
            except CkptoolError:
                continue


class _Runs:
    def __reduce__(self) -> object:
        return print, ("run",)


def test_calls_in_the_small_pickles_are_not_let_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch would run what stands where the key of a storage must be."""
    path = typical(tmp_path / "old.tar")
    parts = {info.name: file.read() for info, file in _extracted(path)}
    hostile = _dump(1) + pickle.dumps(((_Runs(), "cpu", torch.FloatStorage)), 2)
    for name in ("storages", "tensors"):
        members(path, {**parts, name: hostile})
        with pytest.raises(MalformedError, match="something else than numbers"):
            ckptool.open(path)
        report = ckptool.validate(path)
        assert not report["valid"]
        assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensors", "views", "words"),
    [
        ([(11, 1, (5, 6), (6, 1), 0)], [], "reaches beyond its storage"),
        ([(11, 9, (1,), (1,), 0)], [], "on no storage"),
        ([(11, 1, (-1,), (1,), 0)], [], "negative"),
        ([(11, 1, (1 << 62,), (1,), 0)], [], "reaches beyond"),
        ([(11, 2, (1,), (1,), 0)], [(2, 1, 20, 6)], "view 2 reaches beyond"),
        ([(11, 2, (3,), (1,), 0)], [(2, 1, 20, 2)], "reaches beyond its storage"),
        ([(11, 1, (1,) * 2000, (1,) * 2000, 0)], [], "2,000 dimensions"),
        ([], [], "is not in the file"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, tensors: Any, views: Any, words: str) -> None:
    stored = [(1, "cpu", torch.FloatStorage, torch.arange(24, dtype=torch.float32))]
    path = archive(tmp_path / "bad.tar", {"w": _at(11)}, stored, tensors, views)
    with pytest.raises(MalformedError, match=words):
        ckptool.open(path)


def test_not_in_place(tmp_path: Path) -> None:
    path = typical(tmp_path / "old.tar")
    with ckptool.open(path) as checkpoint:
        edited = ckptool.add_prefix(checkpoint, "module.", key="state")
        with pytest.raises(RefusedError, match="read only"):
            from ckptool.formats.planning import in_place_of

            in_place_of(edited, "x", 0)


def test_long_names_and_many_members_are_bounded(tmp_path: Path) -> None:
    from ckptool.files.sources import BytesSource
    from ckptool.files.tars import members as walk

    name = "d/" * 300 + "f.pth"
    for style in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = members(tmp_path / "long.tar", {name: b"abc"}, style)
        found = list(walk(BytesSource(path.read_bytes())))
        assert [(item.name, item.size, item.plain) for item in found] == [(name, 3, True)]
    info = tarfile.TarInfo("a")
    block = info.tobuf(tarfile.USTAR_FORMAT)
    with pytest.raises(MalformedError, match="more than"):
        list(walk(BytesSource(block * (LIMITS.members + 1))))
    info.type, info.size = b"L", 1 << 30
    with pytest.raises(MalformedError, match="the limit is"):
        list(walk(BytesSource(info.tobuf(tarfile.GNU_FORMAT))))


def test_sizes_of_any_length(tmp_path: Path) -> None:
    """Sizes in pax headers and in base 256 are never believed."""
    from ckptool.files.sources import BytesSource
    from ckptool.files.tars import members as walk

    for digits in ("9" * 5000, "9" * 19, "0" * 30, "-1", "1e3"):
        info = tarfile.TarInfo("a")
        info.pax_headers = {"size": digits}
        data = info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
        assert [item.name for item in walk(BytesSource(data))] == ["a"]
    info = tarfile.TarInfo("a")
    info.size = 1 << 80
    assert next(walk(BytesSource(info.tobuf(tarfile.GNU_FORMAT)))).size == 1 << 80
    (tmp_path / "huge.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(UnreadableError, match="cut"):
        ckptool.open(f"{tmp_path / 'huge.tar'}!a")


def test_salvage(tmp_path: Path) -> None:
    path = typical(tmp_path / "old.tar")
    assert ckptool.salvage(path).lost == []
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UnreadableError):
        ckptool.salvage(path)


def test_the_fixture(tmp_path: Path) -> None:
    same(loaded(FIXTURES / "torch01.tar"), _converted(FIXTURES / "torch01.tar", tmp_path / "new.pth"))


@needs_corpus
def test_a_foreign_one_is_named() -> None:
    """Written by tests of another project, without tensors: torch does not load it."""
    with pytest.raises(NotACheckpointError, match="has no member 'tensors'"):
        ckptool.open(CORPUS / "tracel-ai__burn__tar_2d_tensor.tar")
