"""What edits in place stumbled over: names that are no UTF-8, full extra fields, a failing close, long chains."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.files.sources import BytesSource
from ckptool.files.zips.reader import read_archive
from ckptool.files.zips.versions import versions


@pytest.mark.parametrize("root", [b"\xff\xfe\xfd\xfc", b"a\\bc", b"a\nbc"])
def test_a_root_that_is_no_text(root: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    path.write_bytes((FIXTURES / "bare.pth").read_bytes().replace(b"bare/", root + b"/"))
    whole = path.read_bytes()
    with ckptool.open(path) as checkpoint:
        expected = tmp_path / "out.pth"
        ckptool.save(edited := ckptool.wrap(checkpoint, "w"), expected)
        assert ckptool.save_in_place(edited).appended
    with ckptool.open(path) as one, ckptool.open(expected) as other:
        assert one.container.pickle == other.container.pickle
        assert one.root == other.root
    ckptool.undo(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("act", ["edit", "undo"])
def test_a_close_that_fails_has_nothing_to_lose(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "bare.pth", path)
    real = os.close
    writable: list[int] = []

    def opened(name: str, flags: int, *more: int, _open: object = os.open) -> int:
        fd = _open(name, flags, *more)  # type: ignore[operator]
        writable.extend([fd] if flags & os.O_RDWR else [])
        return int(fd)

    def close(fd: int) -> None:
        real(fd)
        if fd in writable:
            raise OSError(errno.EIO, "it is stuck")

    with ckptool.open(path) as checkpoint:
        edited = ckptool.wrap(checkpoint, "w")
        if act == "undo":
            ckptool.save_in_place(edited)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opened)
            patch.setattr(os, "close", close)
            if act == "edit":
                ckptool.save_in_place(edited)
            else:
                ckptool.undo(path)
    assert writable and ("w" in torch.load(path)) is (act == "edit")


def test_reading_the_directory_of_a_file_of_many_versions_does_not_visit_them(tmp_path: Path) -> None:
    """Each former version was opened by looking at all of those before it."""
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "bare.pth", path)
    reads: list[int] = []

    class Counted(BytesSource):
        def read(self, offset: int, size: int) -> bytes:
            reads.append(offset)
            return super().read(offset, size)

    counts = []
    for _ in range(20):
        with ckptool.open(path) as checkpoint:
            ckptool.save_in_place(ckptool.wrap(checkpoint, "w"))
        reads.clear()
        read_archive(Counted(path.read_bytes()))
        counts.append(len(reads))
    assert len(set(counts)) == 1
    assert len(versions(BytesSource(path.read_bytes()))) == 21
