"""While one process edited a file in place, another was told to take back what looked unfinished: an ``undo`` typed a
moment later would have taken back the finished edit."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import ChangedError, RefusedError


def test_it_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "bare.pth", path)
    refused: list[str] = []
    real = os.fsync

    def meanwhile(fd: int) -> None:
        real(fd)
        with pytest.raises(RefusedError) as caught, ckptool.open(path) as checkpoint:
            ckptool.save_in_place(ckptool.wrap(checkpoint, "b"))
        refused.append(caught.value.what)

    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = ckptool.wrap(checkpoint, "a")
        patch.setattr(os, "fsync", meanwhile)
        ckptool.save_in_place(edited)
    assert refused == ["another process edits it in place"] * 3


def test_it_ended_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "bare.pth", path)
    seen: list[Any] = []
    real = os.fsync

    def meanwhile(fd: int) -> None:
        real(fd)
        seen.append(ckptool.open(path))

    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = ckptool.wrap(checkpoint, "a")
        patch.setattr(os, "fsync", meanwhile)
        ckptool.save_in_place(edited)
    for other in seen[:2]:
        with other, pytest.raises(ChangedError):
            ckptool.save_in_place(ckptool.wrap(other, "b"))


def test_a_lock_is_let_go(tmp_path: Path) -> None:
    """Looking whether somebody edits it does not keep others from doing so."""
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "zip_trailing.pth", path)
    with ckptool.open(path) as checkpoint, path.open("rb+") as other:
        with pytest.raises(RefusedError, match="behind the archive"):
            ckptool.save_in_place(ckptool.wrap(checkpoint, "a"))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
