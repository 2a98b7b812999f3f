"""Copies of zip archives with other records."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

#: Returns the bytes of a record, given its name within the folder of the archive and its bytes; None leaves it out.
Change = Callable[[str, bytes], "bytes | None"]


def rewritten(old: Path, new: Path, change: Change) -> Path:
    """Write a copy of an archive with other records."""
    return _copied(old, new, change, zipfile.ZIP_STORED)


def deflated(old: Path, new: Path) -> Path:
    """Write a copy of an archive with compressed records."""
    return _copied(old, new, lambda _, data: data, zipfile.ZIP_DEFLATED)


def _copied(old: Path, new: Path, change: Change, method: int) -> Path:
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w", method) as target:
        for name in source.namelist():
            data = change(name.partition("/")[2], source.read(name))
            if data is not None:
                target.writestr(name, data)
    return new
