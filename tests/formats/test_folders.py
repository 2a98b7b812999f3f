"""Every folder format reads a folder through ``Folder`` alone: one in memory reads as the same folder on a disk."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import oracle
import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import RefusedError, UnreadableError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.cli.main import run
from ckptool.files.folders import Folder, LocalFolder
from ckptool.files.sources import BytesSource, FolderSource, Source
from ckptool.formats import FOLDERS, folder_format, read_folder


class MemoryFolder(Folder):
    """A folder whose files are in memory, by their whole paths."""

    def __init__(self, path: str, files: Mapping[str, bytes]) -> None:
        super().__init__(path)
        self.files = files

    def names(self, *, strict: bool = False) -> frozenset[str]:
        start = self.join("")
        names = frozenset(path[len(start) :].partition("/")[0] for path in self.files if path.startswith(start))
        if strict and not names:
            raise UnreadableError("it cannot be listed: no such folder", path=self.path)
        return names

    def is_folder(self, name: str) -> bool:
        return bool(self.inner(name).names())

    def size(self, name: str) -> int | None:
        data = self.files.get(self.join(name))
        return None if data is None else len(data)

    def open(self, name: str) -> Source:
        path = self.join(name)
        if path not in self.files:
            raise UnreadableError("no such file", path=path)
        return BytesSource(self.files[path], path)

    def inner(self, name: str) -> MemoryFolder:
        return MemoryFolder(self.join(name), self.files)

    def outer(self) -> MemoryFolder:
        return MemoryFolder(os.path.dirname(self.path), self.files)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


#: All folders in the fixtures that are one checkpoint.
CHECKPOINTS: Final = sorted(
    os.path.relpath(root, FIXTURES)
    for root, _, _ in os.walk(FIXTURES)
    if root != str(FIXTURES) and folder_format(root) is not None
)


def _write_ranks(folder: Path) -> None:
    """Write a tensor of 3 x 2 in two pieces, as ``HuggingFaceStorageWriter(save_distributed=True)`` does."""
    folder.mkdir(parents=True)
    for rank, begin, rows in ((1, 0, 2), (2, 2, 1)):
        size = rows * 8
        texts = {"DCP_SHARDING_INFO": json.dumps({"weight": {"saved_offsets": [begin, 0]}})}
        header = {"__metadata__": texts, "weight": {"dtype": "F32", "shape": [rows, 2], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(range(size))
        (folder / f"shard-{rank:05}-model-00001-of-00001.safetensors").write_bytes(data)


def _unpack(folder: Path) -> None:
    with zipfile.ZipFile(FIXTURES / "bare.pth") as file:
        file.extractall(folder.parent)
        (folder.parent / file.namelist()[0].partition("/")[0]).rename(folder)


#: Folders that are not in the fixtures.
MADE: Final = {"dcp-safetensors": _write_ranks, "torch-folder": _unpack}


def test_every_folder_format_is_tested() -> None:
    found = {known.name for path in CHECKPOINTS if (known := folder_format(str(FIXTURES / path))) is not None}
    assert found | MADE.keys() == {known.name for known in FOLDERS}


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _facts(folder: Folder) -> dict[str, Any]:
    """Return all that a reader finds in a folder, the bytes of its storages included."""
    opened = read_folder(folder)
    assert opened is not None
    source, container = opened
    assert isinstance(source, FolderSource)
    with Checkpoint.of(folder.path, source, container) as checkpoint:
        container.compare_copies()
        storages = checkpoint.survey.reader.storages
        bodies = {key: container.stored(key).span for key in storages}
        return {
            "format": (container.format, container.writer, container.byteorder, container.rank_save),
            "problems": container.problems,
            "audit": container.audit(list(storages)),
            "manifest": container.manifest(checked=True),
            "metadata": dict(container.metadata),
            "tensors": [(entry.key, entry.tensor.dtype, entry.tensor.shape) for entry in checkpoint.survey.tensors],
            "bytes": [span and (key, span.source.read(span.offset, span.size)) for key, span in bodies.items()],
            "records": [
                (record.name, record.size, record.crc, record.key, record.span and record.span.size)
                for record in container.records()
            ],
            "pickles": [(pickle.where, pickle.error) for pickle in container.pickles()],
            "source": (source.name, source.folder, source.beside, source.links, source.parts, source.size),
            "files": [file.name for file in source.files],
        }


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("path", [*CHECKPOINTS, *MADE])
def test_a_folder_in_memory_reads_as_on_a_disk(path: str, tmp_path: Path) -> None:
    place = tmp_path / path
    if path in MADE:
        MADE[path](place)
    elif path.count("/") > 1:
        shutil.copytree((FIXTURES / path).parent, place.parent)  # some readers look at the files around a step
    else:
        shutil.copytree(FIXTURES / path, place)
    on_disk = _facts(LocalFolder(str(place)))
    if path in MADE:
        assert on_disk["format"][0] == path
    files = _files(tmp_path)
    shutil.rmtree(tmp_path)  # whatever still asks the disk finds nothing
    assert _facts(MemoryFolder(str(place), files)) == on_disk


# -- A checkpoint that somebody unpacked: the folder is read, and one file of it is what it was.


def unpacked(name: str, tmp_path: Path) -> Path:
    with zipfile.ZipFile(FIXTURES / name) as archive:
        archive.extractall(tmp_path)
        return tmp_path / archive.namelist()[0].partition("/")[0]


@pytest.mark.parametrize(
    "name", ["bare.pth", "ddp4_training.pth", "big_endian.pth", "dtypes_typed.pt", "no_tensors.pth", "shared_views.pth"]
)
def test_the_file_is_what_it_was(name: str, tmp_path: Path) -> None:
    folder, out = unpacked(name, tmp_path), tmp_path / "out.pth"
    assert run(["inspect", str(folder)]) == 0
    assert run(["convert", str(folder), "-o", str(out), "-q"]) == 0
    assert oracle.difference(oracle.load(FIXTURES / name), oracle.load(out)) == ""


def test_a_storage_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = unpacked("bare.pth", tmp_path)
    (folder / "data" / "3").unlink()
    report = ckptool.validate(folder)
    assert not report["valid"]
    with pytest.raises(RefusedError, match="not all in the file"):
        ckptool.save(ckptool.convert(folder, "torch"), tmp_path / "out.pth")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = unpacked("bare.pth", tmp_path)
    size = (folder / "data" / "3").stat().st_size
    (folder / "data" / "3").unlink()
    (tmp_path / "secret").write_bytes(bytes(size))
    (folder / "data" / "3").symlink_to(tmp_path / "secret")
    with pytest.raises(RefusedError, match="link out of the folder"):
        ckptool.save(ckptool.convert(folder, "torch"), tmp_path / "out.pth")


def test_a_key_is_no_path(tmp_path: Path) -> None:
    folder = unpacked("bare.pth", tmp_path)
    (tmp_path / "secret").write_bytes(bytes(36))
    data = (folder / "data.pkl").read_bytes()
    name = b"../../secret"
    (folder / "data.pkl").write_bytes(data.replace(b"X\1\0\0\0000q", b"X%c\0\0\0%bq" % (len(name), name)))
    with ckptool.open(folder) as checkpoint:
        assert [key for key in checkpoint.survey.reader.storages if checkpoint.body(key) is None] == [name.decode()]


def test_a_program_is_no_checkpoint(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 3)).save(tmp_path / "script.pt")  # type: ignore[no-untyped-call]
    with zipfile.ZipFile(tmp_path / "script.pt") as archive:
        archive.extractall(tmp_path / "in")
    assert run(["convert", str(tmp_path / "in" / "script"), "-o", str(tmp_path / "out.pth")]) == 3
