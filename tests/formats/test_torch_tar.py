"""The tar format of torch 0.1, against ``torch.load(weights_only=False)`` of handmade files."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CORPUS, needs_corpus
from torch_tar_files import Pickler as TarPickler
from torch_tar_files import archive, dump, members, placeholder, typical

import ckptool
from ckptool.base.errors import MalformedError, NotACheckpointError, UnreadableError
from ckptool.base.limits import LIMITS


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


def test_storages_in_the_object(tmp_path: Path) -> None:
    """A storage, and a view of one, that the object holds without a tensor."""
    data = torch.arange(8, dtype=torch.float32)
    stored = [(1, "cpu", torch.FloatStorage, data)]
    path = archive(tmp_path / "s.tar", {"s": placeholder(1), "v": placeholder(2)}, stored, [], [(2, 1, 3, 4)])
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "new.pth")
        assert "becomes one of its own" in checkpoint.container.problems[-1].message
    found, expected = torch.load(tmp_path / "new.pth", weights_only=True), loaded(path)
    assert {key: item.tolist() for key, item in found.items()} == {key: item.tolist() for key, item in expected.items()}


def test_container_ids_become_classes(tmp_path: Path) -> None:
    """torch 0.1 noted the source of classes: (class, file, source); torch takes the class."""

    class Pickler(TarPickler):
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


class _Runs:
    def __reduce__(self) -> object:
        return print, ("run",)


def test_calls_in_the_small_pickles_are_not_let_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch would run what stands where the key of a storage must be."""
    path = typical(tmp_path / "old.tar")
    parts = {info.name: file.read() for info, file in _extracted(path)}
    hostile = dump(1) + pickle.dumps(((_Runs(), "cpu", torch.FloatStorage)), 2)
    for name in ("storages", "tensors"):
        members(path, {**parts, name: hostile})
        with pytest.raises(MalformedError, match="something other than numbers"):
            ckptool.open(path)
        report = ckptool.validate(path)
        assert not report["valid"]
        assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensors", "views", "words"),
    [
        ([(11, 1, (5, 6), (6, 1), 0)], [], "reaches beyond its storage"),
        ([(11, 9, (1,), (1,), 0)], [], "has no storage in the file"),
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
    path = archive(tmp_path / "bad.tar", {"w": placeholder(11)}, stored, tensors, views)
    with pytest.raises(MalformedError, match=words):
        ckptool.open(path)


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


def test_salvage(tmp_path: Path) -> None:
    path = typical(tmp_path / "old.tar")
    assert ckptool.salvage(path).lost == []
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UnreadableError):
        ckptool.salvage(path)


@needs_corpus
def test_a_foreign_one_is_named() -> None:
    """Written by tests of another project, without tensors: torch does not load it."""
    with pytest.raises(NotACheckpointError, match="has no member 'tensors'"):
        ckptool.open(CORPUS / "tracel-ai__burn__tar_2d_tensor.tar")
