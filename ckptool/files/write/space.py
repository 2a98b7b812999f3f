"""The room for an output: what a plan needs, and what its filesystem has left."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from ...base.text import human_bytes
from ..sources import FILESYSTEM_BLOCK, FileSource, FolderPlan, Plan, Span, size_of
from .copying import data_and_holes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: ioctl of Linux: share a range of blocks with another file (linux/fs.h, FICLONERANGE).
_CLONE_RANGE: Final = 0x4020940D


class Shortage(NamedTuple):
    """An output that needs more bytes than are free."""

    needed: int
    free: int

    @property
    def words(self) -> str:
        return f"it needs {human_bytes(self.needed)}, and {human_bytes(self.free)} are free"


def shortage(plan: Plan | FolderPlan, path: str) -> Shortage | None:
    """Return how the output at ``path`` does not fit on its filesystem; None where it does, or nobody knows.

    Holes of sparse inputs take no room, nor do blocks that the filesystem can share with them. What the output replaces
    stays until the new one is complete.
    """
    folder = os.path.dirname(os.path.realpath(path))
    free = free_bytes(folder)
    if free is None or plan.size <= free:
        return None
    files = [plan] if isinstance(plan, Plan) else [part for _, part in plan.files]
    needed = sum(size for part in files for size in _stored(part, folder))
    return Shortage(needed, free) if needed > free else None


def free_bytes(folder: str) -> int | None:
    """Return the bytes that may still be written to a filesystem, None where that cannot be known."""
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    if not status.f_blocks or not status.f_frsize:
        return None  # a filesystem that does not say, such as some of FUSE
    # Some blocks are kept for root.
    return status.f_frsize * (status.f_bfree if os.geteuid() == 0 else status.f_bavail)


def _stored(plan: Plan, folder: str) -> Iterator[int]:
    """Yield the bytes of each piece that need room of their own."""
    at = 0
    shares: dict[FileSource, bool] = {}
    for piece in plan.pieces:
        size = size_of(piece)
        if isinstance(piece, Span) and isinstance(piece.source, FileSource):
            for part, hole in data_and_holes(piece):
                if not hole:
                    yield part.size - _shared(part, at + part.offset - piece.offset, folder, shares)
        else:
            yield size
        at += size


def _shared(part: Span, at: int, folder: str, shares: dict[FileSource, bool]) -> int:
    """Return the bytes of whole blocks that the output, where the part is at ``at``, can share with the input."""
    source = part.source
    blocks = (part.size - -at % FILESYSTEM_BLOCK) // FILESYSTEM_BLOCK
    if not isinstance(source, FileSource) or (part.offset - at) % FILESYSTEM_BLOCK or blocks < 1:
        return 0
    if source not in shares:
        shares[source] = _can_share(source, folder)
    return blocks * FILESYSTEM_BLOCK if shares[source] else 0


def _can_share(source: FileSource, folder: str) -> bool:
    """Return whether a file without a name in ``folder`` can share the first block of a source."""
    if fcntl is None or not hasattr(os, "O_TMPFILE") or source.size < FILESYSTEM_BLOCK:
        return False
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        return False
    try:
        with suppress(OSError), source.kept_open():
            fcntl.ioctl(fd, _CLONE_RANGE, struct.pack("=qQQQ", source.fd, 0, FILESYSTEM_BLOCK, 0))
            return True
        return False
    finally:
        os.close(fd)
