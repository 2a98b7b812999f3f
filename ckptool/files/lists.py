"""Read lists of paths as they are needed: one path per line, or NUL-separated, as from ``find -print0``.

Lines end with LF or CRLF, so that lists made on Windows work. A name that ends with CR therefore needs NUL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import BinaryIO, Final

from ..base.errors import TargetError, UnreadableError, refuse_remote
from ..base.steps import STDIN

_CHUNK: Final = 1 << 16


def listed_paths(path: str) -> Iterator[str]:
    """Yield the paths in a list, including repetitions; skip empty lines.

    Raises TargetError if the list cannot be read, UnreadableError if it is empty.
    """
    refuse_remote(path)
    count = 0
    try:
        with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as file:
            for item in filter(None, _items(file)):
                if b"\0" in item:
                    raise TargetError("the first part of the list has no NUL, a later line has one", path=path)
                count += 1
                yield os.fsdecode(item)
    except OSError as error:
        raise TargetError(f"the list of files cannot be read: {error.strerror}", path=path) from error
    if not count:
        raise UnreadableError("the list names no file", path=path)


def _items(file: BinaryIO) -> Iterator[bytes]:
    """Yield the items of a list, which are separated by NUL if there is one among the first bytes."""
    rest, separator = b"", b""
    while chunk := file.read1(_CHUNK) if hasattr(file, "read1") else file.read(_CHUNK):
        separator = separator or (b"\0" if b"\0" in chunk else b"\n")
        *items, rest = (rest + chunk).split(separator)
        yield from items if separator == b"\0" else (item.removesuffix(b"\r") for item in items)
    yield rest if separator == b"\0" else rest.removesuffix(b"\r")
