"""Files of lines of JSON that processes append to: each line is on the disk before anything depends on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...base.errors import OutputError, UnreadableError
from .copying import write_all
from .output import lock, sync_folder


def append_lines(path: str, lines: list[Mapping[str, Any]], *, new: bool = False) -> None:
    """Append lines to a file, and sync it; several processes may do so at once. Raises OutputError.

    A line that an interrupted process has left without its end is ended first. ``new`` says that there must be none.
    """
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        created = not os.path.exists(path)
        fd = os.open(path, flags | (os.O_EXCL if new else 0), 0o666)
        try:
            lock(fd, wait=True)
            size = os.fstat(fd).st_size
            if size:
                os.lseek(fd, size - 1, os.SEEK_SET)
                text = text if os.read(fd, 1) == b"\n" else "\n" + text
            write_all(fd, text.encode("ascii"))
            os.fsync(fd)
        finally:
            os.close(fd)
        if created:
            sync_folder(os.path.dirname(os.path.realpath(path)))
    except OSError as error:
        raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file, without those that an interrupted process left. Raises UnreadableError."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    value = json.loads(line) if line.endswith(b"\n") and line.strip() else None
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise UnreadableError(what, path=path) from error


class LineFile:
    """A new file of lines, written as they come and complete once it is closed: then it is on the disk."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._file = os.fdopen(os.open(path, flags, 0o666), "wb")
        except FileExistsError:
            raise
        except OSError as error:
            raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
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
