"""A checkpoint that somebody unpacked: the folder is read, and one file of it is what it was."""

from __future__ import annotations

import zipfile
from pathlib import Path

import oracle
import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.cli.main import run


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
