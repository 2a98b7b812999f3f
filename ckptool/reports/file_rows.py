"""One row per file for many files: every command has the same columns with the same types."""

from __future__ import annotations

import os
from typing import Final, Literal, cast

from ..base.addresses import is_remote
from ..base.records import NamedTuple, TypedDict
from ..files.archives import file_of

SCHEMA: Final = "ckptool.file/1"
#: Verdicts that every command has: for unreadable files, and for skipped files in a folder of checkpoints.
UNREADABLE: Final = "unreadable"
PASSED_OVER: Final = "skipped"


class FileRow(TypedDict):
    """A row of ``--format rows``, schema ``ckptool.file/1``.

    No value is null: an unknown number is -1, an unknown text "". ``size`` is the size of a local file before reading;
    it is -1 for a folder or a remote file. ``code`` is the exit code for this file alone.
    """

    schema: Literal["ckptool.file/1"]
    command: str
    version: str
    path: str
    size: int
    verdict: str
    code: int
    format: str
    coverage: str
    hash: str
    message: str


class FileVerdict(NamedTuple):
    """A command's verdict on a file in short, as fields of a ``FileRow``."""

    path: str
    verdict: str
    code: int
    format: str = ""
    coverage: str = ""
    hash: str = ""
    message: str = ""
    size: int = -1


def file_row(command: str, version: str, verdict: FileVerdict) -> FileRow:
    """Return the row of a file; ``version`` is ckptool's version."""
    row = {"schema": SCHEMA, "command": command, "version": version, **verdict._asdict()}
    return cast("FileRow", row)


def size_of(path: str) -> int:
    """Return the size of a local file, or of the archive that an address begins with; -1 for anything else."""
    if is_remote(path) or not os.path.isfile(name := file_of(path)):
        return -1
    return os.path.getsize(name)
