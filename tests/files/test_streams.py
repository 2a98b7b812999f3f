"""``-`` is standard input: a redirected file is that file, a stream is copied to a temporary file, within bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FIXTURES, ROOT

PROGRAM = [sys.executable, "-m", "ckptool"]
#: A file of each format that is one file.
FILES = ("ddp4_training.pth", "legacy_bare.pth", "torch01.tar", "model.safetensors", "script_net.pt")


def ckptool(*arguments: str, cwd: Path, **streams: object) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*PROGRAM, *arguments], cwd=cwd, env=environment, capture_output=True, timeout=600, check=False, **streams
    )


@pytest.mark.parametrize("name", FILES)
def test_a_stream_reads_like_the_file(name: str, tmp_path: Path) -> None:
    data = (FIXTURES / name).read_bytes()
    for command in ("keys", "hash"):
        direct = ckptool(command, name, cwd=FIXTURES)
        piped = ckptool(command, "-", cwd=tmp_path, input=data)
        assert piped.returncode == direct.returncode
        assert piped.stdout.replace(b"  -\n", f"  {name}\n".encode()) == direct.stdout


def test_a_redirected_file_is_that_file(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "ddp4_training.pth", tmp_path / "a.pth")
    direct = ckptool("inspect", "a.pth", cwd=tmp_path)
    with (tmp_path / "a.pth").open("rb") as file:
        redirected = ckptool("inspect", "-", cwd=tmp_path, stdin=file)
    assert (redirected.returncode, redirected.stdout) == (0, direct.stdout)
    assert b"-> ckptool strip-module a.pth -o a.plain.pth" in direct.stdout or b"ckptool edit a.pth" in direct.stdout


def test_a_redirected_file_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    shutil.copy(FIXTURES / "bare.pth", path)
    with path.open("rb") as file:
        path.unlink()
        assert ckptool("validate", "-", cwd=tmp_path, stdin=file).returncode == 0


def test_an_edit_of_a_stream(tmp_path: Path) -> None:
    data = (FIXTURES / "ddp4_training.pth").read_bytes()
    piped = ckptool("strip-module", "-", "-o", "out.pth", cwd=tmp_path, input=data)
    assert piped.returncode == 0, piped.stderr
    shutil.copy(FIXTURES / "ddp4_training.pth", tmp_path / "in.pth")
    assert ckptool("strip-module", "in.pth", "-o", "expected.pth", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.pth").read_bytes() == (tmp_path / "expected.pth").read_bytes()


def test_the_temporary_file_has_no_name(tmp_path: Path) -> None:
    data = (FIXTURES / "bare.pth").read_bytes()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    subprocess.run([*PROGRAM, "inspect", "-"], input=data, env=environment, capture_output=True, check=True)
    assert list(tmp_path.iterdir()) == []


def test_an_endless_stream_ends() -> None:
    """Within the bound: 64 GiB are not written in a test."""
    program = (
        "from ckptool.base import limits\nfrom ckptool.files.write import spool\n"
        "spool.LIMITS = limits.LIMITS._replace(spooled_bytes=5_000_000)\n"
        "from ckptool.cli.main import main\nmain(['inspect', '-'])\n"
    )
    with open("/dev/zero", "rb") as zeros:
        said = subprocess.run(
            [sys.executable, "-c", program], stdin=zeros, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, timeout=600, check=False,
        )  # fmt: skip
    assert said.returncode == 3
    assert b"the stream has more than 5.00 MB" in said.stderr and b"save it to a file" in said.stderr
