"""Edits in place and the file that they are in: links, permissions, other processes, odd names, odd orders."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from conftest import FIXTURES, ROOT
from in_place_edits import NAMES, copied, in_place, sha

import ckptool
from ckptool.base.errors import ChangedError, OutputError, RefusedError
from ckptool.cli.main import run

TOOL = [sys.executable, "-m", "ckptool"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def wrapped(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return ckptool.wrap(checkpoint, "w")


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    path, link = copied(FIXTURES / "bare.pth", tmp_path), tmp_path / "link.pth"
    link.symlink_to(path.name)
    whole = path.read_bytes()
    in_place(link, wrapped)
    assert link.is_symlink() and "w" in oracle.load(path)
    assert ckptool.undo(link)["undone"] and path.read_bytes() == whole


def test_hard_links_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = copied(FIXTURES / "bare.pth", tmp_path), tmp_path / "other.pth"
    os.link(path, other)
    assert run(["edit", str(path), "--wrap", "w", "--in-place"]) == 0
    assert "the file has 2 names (hard links): it changed under all of them" in capsys.readouterr().out
    assert path.samefile(other) and "w" in oracle.load(other)


def test_mode_and_owner_stay(tmp_path: Path) -> None:
    path = copied(FIXTURES / "bare.pth", tmp_path)
    path.chmod(0o640)
    before = path.stat()
    in_place(path, wrapped)
    after = path.stat()
    assert (after.st_ino, after.st_mode, after.st_uid) == (before.st_ino, before.st_mode, before.st_uid)
    ckptool.undo(path)
    assert path.stat().st_ino == before.st_ino


def test_a_file_that_cannot_be_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(FIXTURES / "bare.pth", tmp_path)
    real = os.open

    def refusing(name: str, flags: int, *more: int, **how: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *more, **how)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(OutputError, match="it cannot be edited: Permission denied"):
        in_place(path, wrapped)


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    """No other file is needed."""
    path = copied(FIXTURES / "bare.pth", tmp_path)
    tmp_path.chmod(0o555)
    try:
        in_place(path, wrapped)
        assert os.listdir(tmp_path) == [path.name]
    finally:
        tmp_path.chmod(0o755)


# -- others who write ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["replaced", "grew", "edited", "undone", "touched", "gone"])
def test_a_file_that_changed_since_it_was_read(what: str, tmp_path: Path) -> None:
    path = copied(FIXTURES / "bare.pth", tmp_path)
    ends = {"replaced": RefusedError, "gone": OutputError}
    if what == "undone":
        in_place(path, NAMES["set"].make)
    with ckptool.open(path) as checkpoint:
        edited = wrapped(checkpoint)
        if what == "replaced":
            shutil.copyfile(path, tmp_path / "new.pth")
            os.replace(tmp_path / "new.pth", path)
        elif what == "grew":
            path.write_bytes(path.read_bytes() + b"more")
        elif what == "edited":
            in_place(path, NAMES["add-module"].make)
        elif what == "undone":
            ckptool.undo(path)
        elif what == "touched":
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        whole = path.read_bytes() if path.exists() else b""
        with pytest.raises(ends.get(what, ChangedError)):
            ckptool.save_in_place(edited)
    assert not path.exists() or path.read_bytes() == whole


def test_eight_processes_at_once(tmp_path: Path) -> None:
    """Each edit is done or refused, and those that are done are all there."""
    path = copied(FIXTURES / "plain_dict.pth", tmp_path)
    running = [
        subprocess.Popen([*TOOL, "edit", path, "--set", f"n{number}={number}", "--in-place", "-q"], env=ENVIRONMENT,
                         stderr=subprocess.PIPE, text=True)
        for number in range(8)
    ]  # fmt: skip
    ends = [(process.communicate()[1], process.returncode) for process in running]
    done = {f"n{number}" for number, (_, code) in enumerate(ends) if code == 0}
    assert done and {code for _, code in ends} <= {0, 4, 5}
    assert all(not said if code == 0 else "edits it in place" in said or "changed while" in said for said, code in ends)
    assert {key for key in oracle.load(path) if key.startswith("n")} >= done
    assert {key for key in oracle.load(path) if key[1:].isdigit()} == done
    assert len(ckptool.history(path)["versions"]) == len(done) + 1
    ckptool.undo(path, original=True)
    assert sha(path) == sha(FIXTURES / "plain_dict.pth")


# -- as a user would -----------------------------------------------------------------------------------------


def test_salvage_of_a_cut_copy(tmp_path: Path) -> None:
    """Edited in place, copied in part: what is whole is saved, by the newest directory that is there."""
    path = copied(FIXTURES / "ddp4_training.pth", tmp_path)
    in_place(path, NAMES["strip-module"].make)
    in_place(path, NAMES["set"].make)
    whole = path.read_bytes()
    weights = oracle.load(FIXTURES / "ddp4_training.pth")["state_dict"]
    part, out = tmp_path / "part.pth", tmp_path / "out.pth"
    for size in (len(whole) - 1, len(whole) - 4000, 40_000, 36_864, 30_000, 26_106, 26_105, 26_000, 9_000):
        part.write_bytes(whole[:size])
        code = run(["salvage", str(part), "-o", str(out), "-q", "--force"])
        assert code in (0, 1), size
        saved = torch.load(out, weights_only=True, map_location="cpu")["state_dict"]
        for key, tensor in saved.items():
            name = key if key.startswith("module.") else f"module.{key}"
            assert torch.equal(tensor, weights[name].cpu())
        assert size < 26_000 or len(saved) == len(weights)
        assert run(["validate", str(part), "-q"]) in (0, 1)


# -- an edit under way is not an unfinished one ----------------------------------------------------------------
# While one process edits a file in place, another must not be told to take back what looks unfinished: an ``undo`` a
# moment later would take back the finished edit.


def test_an_edit_under_way_is_not_taken_for_an_unfinished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_refused_edit_releases_its_lock(tmp_path: Path) -> None:
    """Looking whether somebody edits it does not keep others from doing so."""
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "zip_trailing.pth", path)
    with ckptool.open(path) as checkpoint, path.open("rb+") as other:
        with pytest.raises(RefusedError, match="bytes follow the archive"):
            ckptool.save_in_place(ckptool.wrap(checkpoint, "a"))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- odd roots, failing closes, long chains --------------------------------------------------------------------


@pytest.mark.parametrize("root", [b"\xff\xfe\xfd\xfc", b"a\\bc", b"a\nbc"])
def test_a_root_folder_whose_name_is_odd_is_edited_in_place(root: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    path.write_bytes((FIXTURES / "bare.pth").read_bytes().replace(b"bare/", root + b"/"))
    whole = path.read_bytes()
    with ckptool.open(path) as checkpoint:
        expected = tmp_path / "out.pth"
        ckptool.save(edited := ckptool.wrap(checkpoint, "w"), expected)
        assert ckptool.save_in_place(edited)
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
