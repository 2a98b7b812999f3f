"""The disk space for an output: the bytes that a plan needs, and the bytes that its filesystem has left."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from ...base.errors import OutputError
from ...base.records import NamedTuple
from ...base.text import human_bytes
from ..sources import FILESYSTEM_BLOCK, FileSource, FolderPlan, Plan, Span, size_of
from .copying import data_and_holes

#: Flags of Linux's fallocate (linux/falloc.h): the size of the file stays, the bytes become a hole.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
#: Opens an unnamed file in a folder; fails if the system or the filesystem has none.
_UNNAMED: Final = os.O_RDWR | getattr(os, "O_TMPFILE", 0)
#: Fewer bytes are written faster than they are reserved.
_MIN_ALLOCATED: Final = 16 << 20
#: Linux ioctl: share a range of blocks with another file (linux/fs.h, FICLONERANGE).
_CLONE_RANGE: Final = 0x4020940D


class Shortage(NamedTuple):
    """An output that needs more bytes than are free."""

    needed: int
    free: int

    @property
    def words(self) -> str:
        return f"it needs {human_bytes(self.needed)}, and {human_bytes(self.free)} are free"


def shortage(plan: Plan | FolderPlan, path: str) -> Shortage | None:
    """Return the bytes that the output at ``path`` needs and the bytes free; None if it fits, or if that is unknown.

    Holes of sparse inputs take no space, nor do blocks that the filesystem can share with them. A replaced output stays
    until the new one is complete.
    """
    folder = os.path.dirname(os.path.realpath(path))
    free = free_bytes(folder)
    if free is None or plan.size <= free:
        return None
    files = [plan] if isinstance(plan, Plan) else [part for _, part in plan.files]
    needed = sum(size for part in files for size in _stored(part, folder))
    return Shortage(needed, free) if needed > free else None


def free_bytes(folder: str) -> int | None:
    """Return the bytes that may still be written to a filesystem, or None if unknown."""
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    if not status.f_blocks or not status.f_frsize:
        return None  # some filesystems, such as some on FUSE, do not tell
    # Some blocks are reserved for root.
    return status.f_frsize * (status.f_bfree if os.geteuid() == 0 else status.f_bavail)


def _stored(plan: Plan, folder: str) -> Iterator[int]:
    """Yield the bytes of each piece that need new space: not those in whole blocks that can be shared with an input."""
    at = 0
    shares: dict[int, bool] = {}
    for piece in plan.pieces:
        file = piece.source.local_file() if isinstance(piece, Span) else None
        if file is None or not isinstance(piece, Span):
            yield size_of(piece)
            at += size_of(piece)
            continue
        for part, hole in data_and_holes(piece):
            blocks = (part.size - -at % FILESYSTEM_BLOCK) // FILESYSTEM_BLOCK
            aligned = (part.offset - at) % FILESYSTEM_BLOCK == 0
            shared = blocks if blocks > 0 and aligned and not hole and _can_share(file, folder, shares) else 0
            yield 0 if hole else part.size - shared * FILESYSTEM_BLOCK
            at += part.size


def _can_share(source: FileSource, folder: str, shares: dict[int, bool]) -> bool:
    """Return whether an unnamed file in ``folder`` can share the first block of a source.

    ``shares`` keeps the answers by device.
    """
    if source.size < FILESYSTEM_BLOCK:
        return False
    device = source.signature[0]
    if device not in shares:
        shares[device] = False
        with opened(folder, _UNNAMED) as fd, suppress(OSError), source.kept_open():
            if fd >= 0:
                import fcntl  # Linux has it, as it has unnamed files

                fcntl.ioctl(fd, _CLONE_RANGE, struct.pack("=qQQQ", source.fd, 0, FILESYSTEM_BLOCK, 0))
                shares[device] = True
    return shares[device]


def can_reclaim(path: str) -> bool:
    """Return whether files in this folder can get holes, by trial; raise OutputError if the disk fails."""
    with opened(os.path.dirname(os.path.realpath(path)), _UNNAMED) as fd:
        if fd < 0:
            return False
        try:
            os.ftruncate(fd, 2 * FILESYSTEM_BLOCK)
            return _punch(fd, 0, FILESYSTEM_BLOCK)
        except OSError as error:
            raise OutputError(error.strerror or str(error), path=path) from error


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Yield a descriptor of a file or folder, or -1 if it cannot be opened."""
    fd = -1
    with suppress(OSError):
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        if fd >= 0:
            with suppress(OSError):  # nothing was written to it
                os.close(fd)


def whole_blocks(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the whole blocks within some spans."""
    result = []
    for span in spans:
        begin, end = span.offset + -span.offset % FILESYSTEM_BLOCK, span.offset + span.size
        end -= end % FILESYSTEM_BLOCK
        result += [Span(span.source, begin, end - begin)] if begin < end else []
    return tuple(result)


def reclaim(fd: int, spans: Sequence[Span]) -> int:
    """Return whole blocks to the disk by making them holes. Return how many bytes that freed."""
    before = os.fstat(fd).st_blocks
    with suppress(OSError):
        for span in spans:
            _punch(fd, span.offset, span.size)
    os.fsync(fd)
    return max(before - os.fstat(fd).st_blocks, 0) * 512


def allocate(plan: Plan, fd: int, folder: str) -> None:
    """Reserve blocks for long stretches of the file in ``folder``, which makes writing them up to twice as fast.

    Holes stay holes, and blocks that can be shared with an input are not reserved. The size of the file stays. Nothing
    happens where the system cannot; a full disk is reported by the write.
    """
    if not hasattr(os, "posix_fallocate") or plan.size < _MIN_ALLOCATED:
        return  # Windows has no libc; a small output needs no trial of what the filesystem can share
    begin = at = 0
    shares: dict[int, bool] = {}
    for piece in (*plan.pieces, None):
        file = piece.source.local_file() if isinstance(piece, Span) else None
        copied = file is not None and not file.sparse and not _can_share(file, folder, shares)
        apart = piece is None or (isinstance(piece, Span) and not copied)
        if apart and at - begin >= _MIN_ALLOCATED:
            with suppress(OSError):
                _fallocate(fd, _KEEP_SIZE, begin, at - begin)
        at += 0 if piece is None else size_of(piece)
        begin = at if apart else begin


def _punch(fd: int, begin: int, size: int) -> bool:
    """Make a hole in a file; return False if the system or the filesystem has none. Raises OSError."""
    return _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, begin, size)


def _fallocate(fd: int, mode: int, begin: int, size: int) -> bool:
    """Call ``fallocate``; return False if the system or the filesystem lacks it. Raises OSError.

    ``os.posix_fallocate`` would write to every block where the filesystem lacks it.
    """
    try:
        import ctypes  # takes milliseconds to load, and some builds of Python lack it

        libc = ctypes.CDLL(None, use_errno=True)
        fallocate = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
    except (ImportError, OSError, AttributeError):
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, mode, begin, size) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))
