"""Journals: append-only files with one JSON object per line. If a kill cuts a line, only that line is lost."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any, Final

from ...base.errors import OutputError, RefusedError, UnreadableError, refuse_remote, refuse_remote_output
from ...base.records import NamedTuple
from .output import sync_folder, without_folder

#: Seconds between two syncs of appended lines.
_SYNC: Final = 30.0


class Entry(NamedTuple):
    """A line of a journal: where it begins and ends, and its object, or None if it is not a JSON object."""

    begin: int
    end: int
    value: dict[str, Any] | None


class Journal:
    """A journal to append to; it is created if it does not exist.

    Every entry is written at once, and synced now and then, and at the end. An entry begins with its schema. Raises
    RefusedError for a file that does not begin with ``schema``, and OutputError if it cannot be written.
    """

    def __init__(self, path: str, schema: str) -> None:
        refuse_remote_output(path)
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        except FileNotFoundError as error:
            raise without_folder(path) from error
        except OSError as error:
            raise OutputError(f"the journal cannot be written: {error.strerror}", path=path) from error
        try:
            status = os.fstat(self._fd)
            begin = f'{{"schema": "{schema}"'.encode("ascii")
            head = os.pread(self._fd, len(begin), 0) if stat.S_ISREG(status.st_mode) else b"-"
            if not begin.startswith(head) or len(head) < min(len(begin), status.st_size):
                raise RefusedError("it is not a journal of ckptool", path=path, next="name a new file, or a journal")
            if 0 < len(head) < len(begin):
                os.ftruncate(self._fd, 0)  # a first line that was cut; an empty file may have one from another process
            elif status.st_size and os.pread(self._fd, 1, status.st_size - 1) != b"\n":
                os.write(self._fd, b"\n")  # the last line was cut
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = monotonic()

    def entries(self) -> Iterator[Entry]:
        """Yield the entries, starting with the first."""
        return entries(self.path)

    def entry_at(self, begin: int, end: int) -> dict[str, Any] | None:
        """Return the entry between two offsets, or None if it is not a JSON object."""
        return _object(os.pread(self._fd, end - begin, begin))

    def add(self, value: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append an entry; with ``sync``, it is on disk on return."""
        line = json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n"
        try:
            if os.write(self._fd, line) != len(line):
                raise OutputError("the journal cannot be written: the disk is full", path=self.path)
            if sync or monotonic() - self._synced > _SYNC:
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


def entries(path: str) -> Iterator[Entry]:
    """Yield the entries of a journal, or the lines of a ``LineFile``; raises UnreadableError."""
    refuse_remote(path)
    begin = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                yield Entry(begin, begin + len(line), _object(line) if line.endswith(b"\n") else None)
                begin += len(line)
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise UnreadableError(what, path=path) from error


class LineFile:
    """A new file of lines, written as they come; it is complete and on disk once it is closed."""

    def __init__(self, path: str) -> None:
        refuse_remote_output(path)
        self.path = path
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._file = os.fdopen(os.open(path, flags, 0o666), "wb")
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            raise without_folder(path) from error
        except OSError as error:
            raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error

    def add(self, line: Mapping[str, Any], *, now: bool = False) -> None:
        """Write a line; with ``now``, it is in the file even if this process is killed."""
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
            if now:
                self._file.flush()
        except OSError as error:
            raise OutputError(f"writing failed: {error.strerror or error}", path=self.path) from error

    def close(self) -> None:
        """Sync the file."""
        try:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            sync_folder(os.path.dirname(os.path.realpath(self.path)))
        except OSError as error:
            raise OutputError(f"writing failed: {error.strerror or error}", path=self.path) from error


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
