"""Read lists of paths as they are needed: one path per line, or NUL-separated, as from ``find -print0``.

Lines end with LF or CRLF, so that lists made on Windows work. A name that ends with CR therefore needs NUL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import BinaryIO, Final

from ..base.errors import TargetError, UnreadableError, refuse_remote
from ..base.steps import Setting, advice

#: The list that comes from standard input.
STDIN: Final = "-"
_CHUNK: Final = 1 << 16


def listed_paths(path: str, null: bool = False) -> Iterator[str]:
    """Yield the paths in a list, including repetitions; skip empty lines.

    Raises TargetError if the list cannot be read, or has a NUL in a line; UnreadableError if it is empty.
    """
    count = 0
    try:
        with _opened(path) as file:
            for item in filter(None, _items(file, b"\0" if null else b"\n")):
                if b"\0" in item:
                    what = "there is a NUL in a line of the list of files"
                    raise TargetError(what, path=path, next=advice("if NUL separates them, add ", Setting("null")))
                count += 1
                yield os.fsdecode(item)
    except OSError as error:
        raise TargetError(f"the list of files cannot be read: {error.strerror}", path=path) from error
    if not count:
        raise UnreadableError("the list names no file", path=path)


def listed_count(path: str, null: bool = False) -> int:
    """Return the number of paths in a list, or -1 if the list can be read only once."""
    if path == STDIN or not os.path.isfile(path):
        return -1
    with _opened(path) as file:
        return sum(bool(item) for item in _items(file, b"\0" if null else b"\n"))


def _opened(path: str) -> BinaryIO:
    refuse_remote(path)
    return open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN)


def _items(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    if separator == b"\n":
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
        return
    rest = b""
    while chunk := file.read1(_CHUNK) if hasattr(file, "read1") else file.read(_CHUNK):
        *items, rest = (rest + chunk).split(separator)
        yield from items
    yield rest
