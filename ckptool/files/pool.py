"""A pool of open files for folders, which may have more files than a process may open at once.

A file that is reopened must be the same one: its device, inode, size and modification time are compared.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import ref

from ..base.errors import ChangedError, UnreadableError
from ..base.limits import LIMITS
from .sources import FileSource, open_file, signature

_CHANGED: Final = "the file changed while the folder was read"


class PooledFile(FileSource):
    """A file that is closed while idle if too many others are open. Threads may share it."""

    def __init__(self, name: str, fd: int, status: os.stat_result) -> None:
        super().__init__(name, fd, status)
        #: The path for reopening, independent of the working directory.
        self._path = os.path.realpath(name)
        self._readers = 0
        self._closed = False
        with _LOCK:
            _register(self)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        with _LOCK:
            if self.fd < 0 and not self._closed:
                self._reopen()
            self._readers += 1
            _register(self)

    def _release(self) -> None:
        with _LOCK:
            self._readers -= 1

    def _reopen(self) -> None:
        try:
            fd, status = open_file(self._path)
        except UnreadableError as error:
            what = f"it was read before and cannot be reopened: {error.what}"
            raise ChangedError(what, path=self.name, next="try again when nobody changes the folder") from error
        if signature(status) != self.signature:
            os.close(fd)
            raise self._changed(_CHANGED)
        self.fd = fd

    def read(self, offset: int, size: int) -> bytes:
        self._acquire()  # a context manager would double the time of a small read
        try:
            return super().read(offset, size)
        finally:
            self._release()

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        with self.kept_open():
            super().read_into(offset, buffer)

    def next_data(self, offset: int) -> int:
        with self.kept_open():
            return super().next_data(offset)

    def next_hole(self, offset: int) -> int:
        with self.kept_open():
            return super().next_hole(offset)

    def check_unchanged(self) -> None:
        """Raise ChangedError if the file changed, or another file has its name: reopening would read that one."""
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise self._changed(_CHANGED) from error
        if signature(status) != self.signature or not stat.S_ISREG(status.st_mode):
            raise self._changed(_CHANGED)

    def close(self) -> None:
        with _LOCK:
            self._closed = True
            _OPEN.pop(id(self), None)
            super().close()


#: The open files, least recently used first. The lock is reentrant: garbage collection may close a file at any point.
_OPEN: Final[OrderedDict[int, ref[PooledFile]]] = OrderedDict()
_LOCK: Final = threading.RLock()


def _register(file: PooledFile) -> None:
    """Record that a file was just used, and close the least recently used ones beyond the limit.

    Files being read stay open, so the limit may be exceeded for a moment.
    """
    if file.fd < 0:
        return
    if id(file) not in _OPEN:
        _OPEN[id(file)] = ref(file)
    _OPEN.move_to_end(id(file))
    if len(_OPEN) <= LIMITS.open_files:
        return
    # The garbage collector may close files at any allocation, and a list of keys is made without one.
    for key in list(_OPEN):
        if len(_OPEN) <= LIMITS.open_files:
            return
        reference = _OPEN.get(key)
        other = reference() if reference is not None else None
        if other is None or (other is not file and not other._readers):
            _OPEN.pop(key, None)
            if other is not None:
                FileSource.close(other)  # until the next read


def open_pooled(path: str) -> PooledFile:
    """Open a regular file of a folder; raises UnreadableError as ``open_source`` does."""
    return PooledFile(path, *open_file(path))
