"""Filesystems in image files, mounted only while they are measured. Mounting needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = ("xfs", "btrfs")
_SIZE = 6 << 30  # bytes; the image file is sparse


class ImageError(Exception):
    """The filesystem cannot be made here. The message says why."""


def folder(kind: str, work: Path) -> Path:
    """Return the folder at which the filesystem is mounted."""
    return work / f"on-{kind}"


@contextlib.contextmanager
def mounted(kind: str, work: Path) -> Iterator[Path]:
    """Mount an empty filesystem of this kind, and remove it afterwards. Raises ImageError if it cannot be made."""
    point, image = folder(kind, work), work / f"{kind}.img"
    if os.geteuid() != 0:
        raise ImageError("mounting needs root")
    for program in (f"mkfs.{kind}", "mount"):
        if shutil.which(program) is None:
            raise ImageError(f"{program} is not installed")
    remove(kind, work)  # a killed run may have left one
    try:
        point.mkdir(parents=True)
        with image.open("wb") as file:
            file.truncate(_SIZE)
        _run(f"mkfs.{kind}", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(point))
        yield point
    finally:
        remove(kind, work)


def remove(kind: str, work: Path) -> None:
    """Unmount the filesystem if it is mounted, and delete its image and folder if they exist."""
    point = folder(kind, work)
    for _ in range(20):  # an interrupted job may use the filesystem for another moment
        if not point.is_mount():
            break
        if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
            time.sleep(0.5)
    else:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
    (work / f"{kind}.img").unlink(missing_ok=True)
    if point.is_dir():
        point.rmdir()


def free(path: Path) -> int:
    """Return the free bytes of the filesystem that holds ``path``, after all pending writes."""
    os.sync()
    status = os.statvfs(path)
    return status.f_bfree * status.f_frsize


def shared(path: Path) -> float | None:
    """Return which share of a file's blocks (0 to 1) another file uses too, or None if filefrag is missing or fails."""
    if shutil.which("filefrag") is None:
        return None
    answer = subprocess.run(["filefrag", "-b512", "-v", str(path)], capture_output=True, text=True, check=False)
    total = common = 0
    for line in answer.stdout.splitlines():
        fields = line.split(":")
        # extent: first..last (logical): first..last (physical): length: expected: flags
        if answer.returncode == 0 and fields[0].strip().isdigit():
            length = int(fields[3])
            total += length
            common += length if "shared" in fields[-1] else 0
    return common / total if total else None


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"{words[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
