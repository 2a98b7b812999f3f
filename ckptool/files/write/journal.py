"""Journals: JSON objects, a line each, only ever appended to. A line that a kill cut off costs itself alone."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any, Final, NamedTuple

from ...base.errors import OutputError, RefusedError

#: Seconds between two times that what was appended is brought to the disk.
_SYNC: Final = 30.0


class Entry(NamedTuple):
    """A line of a journal: where it begins and ends, and its object, None where it is not one."""

    begin: int
    end: int
    value: dict[str, Any] | None


class Journal:
    """A journal to append to, which is made if it is not there.

    Every entry is written at once, and synced now and then, and at the end. An entry begins with its schema. Raises
    RefusedError for a file that does not begin with ``schema``: it is something else; OutputError where nothing can be
    written.
    """

    def __init__(self, path: str, schema: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise OutputError(f"the journal cannot be written: {error.strerror}", path=path) from error
        try:
            status = os.fstat(self._fd)
            begin = f'{{"schema": "{schema}"'.encode("ascii")
            head = os.pread(self._fd, len(begin), 0) if stat.S_ISREG(status.st_mode) else b"-"
            if not begin.startswith(head) or len(head) < min(len(begin), status.st_size):
                raise RefusedError("it is not a journal of ckptool", path=path, next="name a new file, or a journal")
            if len(head) < len(begin):
                os.ftruncate(self._fd, 0)  # a first line of which nothing is left
            elif os.pread(self._fd, 1, status.st_size - 1) != b"\n":
                os.write(self._fd, b"\n")  # the last line was cut
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = monotonic()

    def entries(self) -> Iterator[Entry]:
        """Yield the entries from the first on."""
        with open(self.path, "rb") as file:
            begin = 0
            for line in file:
                yield Entry(begin, begin + len(line), _object(line))
                begin += len(line)

    def entry_at(self, begin: int, end: int) -> dict[str, Any] | None:
        """Return an entry by its place."""
        return _object(os.pread(self._fd, end - begin, begin))

    def add(self, value: Mapping[str, Any]) -> None:
        """Append an entry."""
        line = json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n"
        try:
            if os.write(self._fd, line) != len(line):
                raise OutputError("the journal cannot be written: the disk is full", path=self.path)
            if monotonic() - self._synced > _SYNC:
                self._sync()
        except OSError as error:
            raise OutputError(f"the journal cannot be written: {error.strerror}", path=self.path) from error

    def close(self) -> None:
        try:
            self._sync()
        finally:
            os.close(self._fd)

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced = monotonic()


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
