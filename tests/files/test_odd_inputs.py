"""What is no regular file, or a strange one: an answer in under two seconds, never a wait."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Said, program, say
from crafted_files import TENSOR, plain

import ckptool

COMMANDS = ("inspect", "keys", "validate", "strip-module", "salvage")


def ask(folder: Path, *arguments: str) -> Said:
    """A process of its own: a wait in open() cannot be interrupted from within."""
    return program(*arguments, cwd=folder, stdin=subprocess.DEVNULL)


def called(command: str, name: str) -> list[str]:
    more = ["-o", "out.pth", "--force"] if command in ("strip-module", "salvage") else []
    return [command, *more, "--", name]


def checked(folder: Path, name: str, words: str) -> None:
    """Every command, one after the other."""
    for command in COMMANDS:
        said = ask(folder, *called(command, name))
        assert said.code == 3, (command, said)
        assert words in said.err, (command, said.err)
        assert "Traceback" not in said.err
        assert not (folder / "out.pth").exists()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)  # the names of sockets are short


def in_a_circle(path: Path) -> None:
    path.symlink_to("b.pth")
    path.with_name("b.pth").symlink_to(path.name)


def to_nothing(path: Path) -> None:
    path.symlink_to("nowhere.pth")


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 << 30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (pipe, "a named pipe"),
        (bound, "a socket"),
        (in_a_circle, "symbolic links"),
        (to_nothing, "the link points to nothing"),
        (holes, "zeros"),
    ],
)
def test_what_is_no_file(
    make: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.pth")
    checked(tmp_path, "a.pth", words)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom", "/dev/tty"])
def test_device(device: str, tmp_path: Path) -> None:
    said = ask(tmp_path, "validate", device)
    assert (said.code, "Traceback" in said.err) == (3, False)
    if device != "/dev/tty":  # there may be none
        assert "a character device" in said.err


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "folder.pth").mkdir()
    for command in ("strip-module", "salvage"):
        said = ask(tmp_path, command, "-o", "out.pth", "folder.pth")
        assert said.code in (2, 3)
        assert "Traceback" not in said.err
    for command in ("inspect", "keys", "validate"):
        said = ask(tmp_path, command, "folder.pth")
        assert said.code == 3
        assert "folder" in said.err or "directory" in said.err


def test_a_folder_that_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "last").symlink_to("..", target_is_directory=True)
    (tmp_path / "runs" / "a.pth").write_bytes(plain())
    said = ask(tmp_path, "validate", "runs")
    assert said.code == 0


def test_a_folder_with_a_pipe_in_it(tmp_path: Path) -> None:
    """A search looks at content, and must not wait for it."""
    (tmp_path / "runs").mkdir()
    os.mkfifo(tmp_path / "runs" / "pipe.pth")
    (tmp_path / "runs" / "a.pth").write_bytes(plain())
    said = ask(tmp_path, "validate", "runs")
    assert said.code == 0, said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_mode_000(tmp_path: Path) -> None:
    path = tmp_path / "shut.pth"
    path.write_bytes(plain())
    path.chmod(0)
    checked(tmp_path, "shut.pth", "no permission")


@pytest.mark.parametrize("command", ["inspect", "keys", "validate"])
def test_64_gib_of_nothing_behind_a_checkpoint(command: str, tmp_path: Path) -> None:
    """A download into a file that was made at its full size, and stopped."""
    with (tmp_path / "sparse.pth").open("wb") as file:
        file.write(plain()[:-300])
        file.truncate(64 << 30)
    said = ask(tmp_path, command, "sparse.pth")
    assert said.code in (1, 3)


@pytest.mark.parametrize(
    "name", ["a\nb.pth", "-o.pth", "--help", "a b'\".pth", "\udcff\udcfe.pth", "*.pth", "[a].pth", "é.pth"]
)
def test_a_strange_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        (tmp_path / name).write_bytes(plain({"module.w": TENSOR}))
    except OSError:
        pytest.skip("this file system has no such names")
    for command in COMMANDS:
        said = say(*called(command, name))
        assert said.code == 0, (command, said)


@pytest.mark.parametrize("name", ["", "nowhere.pth", "x" * 300, "/".join("x" * 9 for _ in range(900))])
def test_a_name_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        said = say(*called(command, name))
        assert said.code in (2, 3), (command, said)


def test_a_name_with_nul(tmp_path: Path) -> None:
    with pytest.raises(ckptool.CkptoolError):
        ckptool.open(f"{tmp_path}/a\0b.pth")
