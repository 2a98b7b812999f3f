"""Error messages from logs and from standard input."""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import closing
from typing import Final

from ..base.steps import STDIN
from ..base.suffixes import CHECKPOINTS, PICKLES
from ..files.archives import exists, open_any

#: Names of text files that are a checkpoint or a part of one.
_CHECKPOINTS: Final = (*CHECKPOINTS, *PICKLES, ".json")
#: Bytes that logs do not have, unlike pickles and archives. Escape codes of terminals are left.
_BINARY: Final = frozenset({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})
#: The byte order mark of UTF-16, in which PowerShell redirects output.
_UTF_16: Final = b"\xff\xfe"
_HEAD: Final = 4096


def piped() -> bool:
    """Return whether standard input is a pipe or a file, not a terminal, /dev/null or closed."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (AttributeError, OSError):
        return False


def is_log(path: str) -> bool:
    """Return whether a path leads to text: a log, or a pipe such as ``<(command)``, but no Git LFS pointer."""
    try:
        if not os.path.isfile(path):
            return stat.S_ISFIFO(os.stat(path).st_mode)
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except (OSError, ValueError):
        return False
    if path.lower().endswith(_CHECKPOINTS) or head.startswith(b"version https://git-lfs"):
        return False
    return head.startswith(_UTF_16) or not _BINARY & {*head}


def is_checkpoint(path: str) -> bool:
    """Return whether a path leads to a file or folder that is not a log."""
    return "\0" not in path and exists(path) and not is_log(path)


def names_file(text: str) -> bool:
    """Return whether a text is one word that ends like the name of a log or a checkpoint."""
    return bool(re.fullmatch(r"\S+\.\w+", text)) and text.lower().endswith((*_CHECKPOINTS, ".txt", ".log", ".out"))


def read_message(path: str, most: int) -> str:
    """Return the last ``most`` bytes of a log as text, where the error is; ``-`` is standard input."""
    data = bytearray()
    if path == STDIN and sys.stdin is None:
        return ""  # it is closed
    if path == STDIN or (os.path.exists(path) and not os.path.isfile(path)):
        with open(sys.stdin.fileno() if path == STDIN else path, "rb", buffering=0, closefd=path != STDIN) as stream:
            while more := stream.read(1 << 16):
                data += more
                if len(data) > 2 * most:
                    del data[:-most]
    else:
        with closing(open_any(path)) as source:
            begin = max(source.size - most, 0)
            data += source.read(begin, source.size - begin)
    # Without its zero bytes, English in UTF-16 is UTF-8.
    return data[-most:].removeprefix(_UTF_16).replace(b"\0", b"").decode("utf-8-sig", "replace")
