"""The files of a folder, of which some are open at a time: there may be more of them than a process may open.

A file that is opened again must be the one that it was: its device, inode, size and time are compared.
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
from .sources import FileSource, open_file


class PooledFile(FileSource):
    """A file that is open only while it is read, and some time beyond that. Threads may share it."""

    def __init__(self, name: str, fd: int, status: os.stat_result) -> None:
        super().__init__(name, fd, status)
        #: Where it is opened again, whatever the working directory is then.
        self._path = os.path.realpath(name)
        self._mark = _mark(status)
        #: How many are reading it.
        self._users = 0
        self._closed = False
        with _LOCK:
            _keep(self)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._take()
        try:
            yield
        finally:
            self._release()

    def _take(self) -> None:
        with _LOCK:
            if self.fd < 0 and not self._closed:
                self._open()
            self._users += 1
            _keep(self)

    def _release(self) -> None:
        with _LOCK:
            self._users -= 1

    def _open(self) -> None:
        try:
            fd, status = open_file(self._path)
        except UnreadableError as error:
            what = f"it was read before and cannot be opened again: {error.what}"
            raise ChangedError(what, path=self.name, next="try again when nobody changes the folder") from error
        if _mark(status) != self._mark:
            os.close(fd)
            raise self._changed()
        self.fd = fd

    def _changed(self) -> ChangedError:
        what = "the file changed while the folder was read"
        return ChangedError(what, path=self.name, next="try again when nobody writes to it")

    def read(self, offset: int, size: int) -> bytes:
        self._take()  # a context manager would take twice the time of a small reading
        try:
            return super().read(offset, size)
        finally:
            self._release()

    def read_into(self, offset: int, buffer: bytearray) -> None:
        with self.held():
            super().read_into(offset, buffer)

    def next_data(self, offset: int) -> int:
        with self.held():
            return super().next_data(offset)

    def next_hole(self, offset: int) -> int:
        with self.held():
            return super().next_hole(offset)

    def check_unchanged(self) -> None:
        """Also where another file has taken its name: the next one to open it would read that."""
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise self._changed() from error
        if _mark(status) != self._mark or not stat.S_ISREG(status.st_mode):
            raise self._changed()

    def close(self) -> None:
        with _LOCK:
            self._closed = True
            _OPEN.pop(id(self), None)
            super().close()

    def _rest(self) -> None:
        """Let go of the descriptor until the next reading."""
        super().close()


def _mark(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


#: The open ones, that which was read last at the end. Reentrant: a file may be collected, and closed, at any point.
_OPEN: Final[OrderedDict[int, ref[PooledFile]]] = OrderedDict()
_LOCK: Final = threading.RLock()


def _keep(file: PooledFile) -> None:
    """Note that a file is open and in use, and close those beyond the limit that were not read for the longest time.

    What a thread is reading stays open, so there may be some more for a moment.
    """
    if file.fd < 0:
        return
    if id(file) not in _OPEN:
        _OPEN[id(file)] = ref(file)
    _OPEN.move_to_end(id(file))
    if len(_OPEN) <= LIMITS.open_files:
        return
    for key, known in list(_OPEN.items()):
        if len(_OPEN) <= LIMITS.open_files:
            return
        other = known()
        if other is None or (other is not file and not other._users):
            _OPEN.pop(key, None)
            if other is not None:
                other._rest()


def open_pooled(path: str) -> PooledFile:
    """Open a regular file of a folder; raises UnreadableError as ``open_source`` does."""
    return PooledFile(path, *open_file(path))
