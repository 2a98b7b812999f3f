"""One row per file for many files: every command has the same columns with the same types."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from ..base.records import NamedTuple, TypedDict
from ..base.steps import is_remote
from ..files.archives import file_of
from ..formats.opening import in_several_files

SCHEMA: Final = "ckptool.file/1"
#: Verdicts that every command has: for unreadable files, and for skipped files in a folder of checkpoints.
UNREADABLE: Final = "unreadable"
PASSED_OVER: Final = "skipped"
#: Nanoseconds within which two changes of a file may get the same time: some file systems count whole seconds.
_SETTLED: Final = 2_000_000_000
_SIGN: Final = 1 << 63


class FileRow(TypedDict):
    """A row of ``--format rows``, schema ``ckptool.file/1``.

    There is no null: an unknown number is -1, an unknown text "". ``size``, ``mtime_ns`` and ``inode`` describe the
    file before it was read. For a checkpoint in several files they are the sum, the latest time, and a digest.
    ``mtime_ns`` is also -1 for a file that changed less than two seconds earlier. ``code`` is the exit code for this
    file alone. ``options`` is a digest of the options that decide the verdict.
    """

    schema: Literal["ckptool.file/1"]
    command: str
    version: str
    options: str
    path: str
    size: int
    mtime_ns: int
    inode: int
    verdict: str
    code: int
    format: str
    coverage: str
    hash: str
    message: str


class FileStamp(NamedTuple):
    """The facts by which a changed file is recognised."""

    size: int = -1
    mtime_ns: int = -1
    inode: int = -1


class FileVerdict(NamedTuple):
    """A command's verdict on a file in short, as fields of a ``FileRow``."""

    path: str
    verdict: str
    code: int
    format: str = ""
    coverage: str = ""
    hash: str = ""
    message: str = ""


def file_row(command: str, version: str, options: str, stamp: FileStamp, verdict: FileVerdict) -> FileRow:
    """Return the row of a file; ``version`` is ckptool's version."""
    return {
        "schema": SCHEMA,
        "command": command,
        "version": version,
        "options": options,
        "path": verdict.path,
        "size": stamp.size,
        "mtime_ns": stamp.mtime_ns,
        "inode": stamp.inode,
        "verdict": verdict.verdict,
        "code": verdict.code,
        "format": verdict.format,
        "coverage": verdict.coverage,
        "hash": verdict.hash,
        "message": verdict.message,
    }


def stamp_of(path: str) -> FileStamp:
    """Return the stamp of a file, of the archive that an address begins with, or of all files in a folder.

    A remote file has none.
    """
    if is_remote(path):
        return FileStamp()
    try:
        name = file_of(path)
        if in_several_files(name):
            return _folder_stamp(name if os.path.isdir(name) else os.path.dirname(name))
        status = os.stat(name)
        return FileStamp(status.st_size, status.st_mtime_ns, _signed(status.st_ino))
    except OSError:
        return FileStamp()


def settled(stamp: FileStamp) -> FileStamp:
    """Return a stamp that a later change would alter: without the time if that is about now."""
    fresh = abs(time.time_ns() - stamp.mtime_ns) < _SETTLED or stamp.mtime_ns > time.time_ns()
    return stamp._replace(mtime_ns=-1) if fresh else stamp


def _folder_stamp(folder: str) -> FileStamp:
    from ..files.folders import open_folder  # not needed for a file

    size, latest, digest = open_folder(folder).mark()
    return FileStamp(size, latest, _signed(digest))


def _signed(number: int) -> int:
    """Return a 64-bit number as a signed one, for a column of signed numbers."""
    number &= 2 * _SIGN - 1
    return number - 2 * _SIGN if number >= _SIGN else number


def options_digest(command: str, options: Mapping[str, Any], files: Iterable[str] = ()) -> str:
    """Return a digest of everything that decides the verdict: options, and the files that they name."""
    import json
    from hashlib import sha256

    digest = sha256(json.dumps([command, options], sort_keys=True, default=str).encode())
    for path in files:
        if not os.path.isfile(file_of(path)):  # a pipe can be read only once, and may be another one next time
            digest.update(os.urandom(16))
            continue
        try:
            with open(file_of(path), "rb") as file:
                digest.update(sha256(file.read()).digest())
        except OSError as error:
            digest.update(str(error.errno).encode())
    return digest.hexdigest()[:16]
