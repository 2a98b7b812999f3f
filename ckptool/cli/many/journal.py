"""Verdicts on files as rows: the journal of ``--since``, and the rows of ``--format rows``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ... import __version__
from ...base.text import pluralize
from ...reports.file_rows import (
    SCHEMA,
    UNREADABLE,
    FileRow,
    FileStamp,
    FileVerdict,
    file_row,
    options_digest,
    recorded_stamp,
    recorded_verdict,
    stamp_of,
)
from ..render import tell
from .inputs import FolderFile

if TYPE_CHECKING:
    from ...files.write.journal import Journal

#: Memory for the index of a journal, in KiB; the rest of the index is on the disk.
_CACHE: Final = 16_384


class SeenJournal:
    """The verdicts that a command recorded in the journal at ``path``, if any; new ones are appended.

    A verdict counts only with this version and these options, including the content of ``files`` that options name.
    The index is on the disk: a million entries take 16 MB of memory.
    """

    def __init__(self, path: str | None, command: str, options: Mapping[str, Any], files: Iterable[str] = ()) -> None:
        self._path, self._command = path, command
        self._options = options_digest(command, options, files)
        self._journal: Journal | None = None
        self._index: Any = None

    def __enter__(self) -> SeenJournal:
        if self._path is None:
            return self
        import sqlite3  # only --since needs it

        from ...files.write.journal import Journal

        self._journal = Journal(self._path, SCHEMA)
        # SQLite keeps a database without a name in a temporary file, which it deletes with the connection.
        self._index = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE}", "temp_store=FILE"):
            self._index.execute(f"PRAGMA {setting}")
        self._index.execute(
            "CREATE TABLE entries (path BLOB, options TEXT, begin INTEGER, end INTEGER, PRIMARY KEY (path, options))"
            " WITHOUT ROWID"
        )
        self._index.execute("BEGIN")
        damaged = 0
        for entry in self._journal.entries():
            if entry.value is None:
                damaged += 1
            elif self._is_current(entry.value) and isinstance(entry.value.get("path"), str):
                place = os.fsencode(entry.value["path"]), entry.value["options"], entry.begin, entry.end
                self._index.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", place)
        self._index.execute("COMMIT")
        if damaged:
            tell(f"ckptool: {self._path}: {pluralize(damaged, 'line')} cannot be read: their files are read again")
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._index.close()
            self._journal.close()

    def find(self, path: str) -> FileVerdict | None:
        """Return the recorded verdict on a file, or None if the file is new to the journal or has changed."""
        if self._journal is None:
            return None
        query = "SELECT begin, end FROM entries WHERE path = ? AND options = ?"
        place = self._index.execute(query, (os.fsencode(path), self._options_of(path))).fetchone()
        value = self._journal.entry_at(*place) if place else None
        if value is None:
            return None
        stamp = stamp_of(path)
        same = stamp.mtime_ns >= 0 and stamp == recorded_stamp(value)
        return recorded_verdict(value) if same else None

    def record(self, stamp: FileStamp, verdict: FileVerdict) -> FileRow:
        """Return the row of a file, and append it to the journal, if there is one."""
        row = file_row(self._command, __version__, self._options_of(verdict.path), stamp, verdict)
        if self._journal is not None:
            self._journal.add(row)
        return row

    def _options_of(self, path: str) -> str:
        """Return the digest of the options; a ``FolderFile`` gets a dash, because it is judged by other rules."""
        return self._options + "-" * isinstance(path, FolderFile)

    def _is_current(self, value: Mapping[str, Any]) -> bool:
        """Return whether a journal entry holds a verdict of this command, with this version and these options."""
        return (
            value.get("command") == self._command
            and value.get("version") == __version__
            and str(value.get("options")).rstrip("-") == self._options
            and value.get("verdict") != UNREADABLE
        )
