"""Standard input as a source: a redirected file itself, or an unnamed temporary copy of a stream."""

from __future__ import annotations

import os
import stat
from functools import cache

from ...base.errors import UnreadableError
from ...base.limits import LIMITS
from ...base.steps import STDIN
from ...base.text import human_bytes
from ..sources import FileSource, open_source
from .copying import write_all

_CHUNK = 1 << 20


def standard_input() -> FileSource:
    """Return standard input as a file; raise UnreadableError for a terminal, or for a stream that is too long.

    A redirected file has its own name if the system tells it, so that a next step can name it.
    """
    name, fd = _opened()
    return open_source(name) if fd < 0 else FileSource(name, os.dup(fd), os.fstat(fd))


@cache
def _opened() -> tuple[str, int]:
    """Return (name, -1) for a redirected file with a name, else ("-", descriptor).

    Cached, because a stream can be read only once, and a command opens its input twice.
    """
    try:
        status = os.fstat(0)
    except OSError as error:
        raise UnreadableError("standard input is closed", path=STDIN, next="name a file") from error
    if stat.S_ISREG(status.st_mode):
        return (name, -1) if (name := _name_of(status)) else (STDIN, 0)
    if os.isatty(0):
        step = "name a file, or redirect one: < model.pth"
        raise UnreadableError("standard input is a terminal: nothing is piped in", path=STDIN, next=step)
    return STDIN, _spooled()


def _name_of(status: os.stat_result) -> str:
    """Return the name of a redirected file, relative to the working folder if within it; "" if unknown."""
    try:
        name = os.readlink("/proc/self/fd/0")
        same = os.path.samestat(os.stat(name), status)
        near = os.path.relpath(name)
    except OSError:
        return ""
    return (name if near.startswith("..") else near) if same else ""


def _spooled() -> int:
    """Copy the stream to an unnamed file, which is gone when the process ends."""
    folder = os.environ.get("TMPDIR") or "/tmp"
    try:
        name = os.path.join(folder, f"ckptool-{os.urandom(8).hex()}")
        spool = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        os.unlink(name)
        size = 0
        while data := os.read(0, _CHUNK):
            size += len(data)
            if size > LIMITS.spooled_bytes:
                what = f"the stream has more than {human_bytes(LIMITS.spooled_bytes)}"
                raise UnreadableError(what, path=STDIN, next="save it to a file, and name that")
            write_all(spool, data)
    except OSError as error:
        what = f"the stream cannot be copied to {folder}: {error.strerror}"
        raise UnreadableError(what, path=STDIN, next="save it to a file, and name that") from error
    return spool
