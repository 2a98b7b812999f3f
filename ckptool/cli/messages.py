"""Error messages from logs and from standard input."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import closing
from typing import Final

from ..base.errors import CkptoolError
from ..base.steps import STDIN, is_remote
from ..base.suffixes import CHECKPOINTS, PICKLES
from ..files.archives import exists, open_any

#: Names of text files that are a checkpoint or a part of one.
_CHECKPOINTS: Final = (*CHECKPOINTS, *PICKLES, ".json")
#: Bytes that logs do not have, unlike pickles and archives. Escape codes of terminals are left.
_BINARY: Final = frozenset({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})
#: The byte order mark of UTF-16, in which PowerShell redirects output.
_UTF_16: Final = b"\xff\xfe"


def piped() -> bool:
    """Return whether standard input is a pipe or a file, not a terminal, /dev/null or closed; nor a file that another
    program, such as ``while read``, began to read.
    """
    try:
        mode, number = os.fstat(sys.stdin.fileno()).st_mode, sys.stdin.fileno()
        begun = stat.S_ISREG(mode) and os.lseek(number, 0, os.SEEK_CUR) > 0
    except (AttributeError, OSError):
        return False
    return not (stat.S_ISCHR(mode) or begun)


def is_waited_for() -> bool:
    """Return whether standard input, a pipe, stays silent for two seconds."""
    import select

    try:
        return not select.select([sys.stdin.fileno()], [], [], 2)[0]
    except (AttributeError, OSError, ValueError):
        return False


def is_log(path: str) -> bool:
    """Return whether a path leads to text: a log, or a pipe such as ``<(command)``."""
    if path == STDIN or (is_remote(path) and (" " in path or path.lower().endswith(_CHECKPOINTS))):
        return False  # a message may begin so
    try:
        if not (is_remote(path) or os.path.isfile(path)):
            return stat.S_ISFIFO(os.stat(path).st_mode)
        with closing(open_any(path)) as file:
            head = file.read(0, 4096)
    except (OSError, ValueError, CkptoolError):
        return False
    return not path.lower().endswith(_CHECKPOINTS) and (head.startswith(_UTF_16) or not _BINARY & {*head})


def is_checkpoint(path: str) -> bool:
    """Return whether a path leads to a file or folder that is not a log."""
    return exists(path) and not is_log(path) and not (is_remote(path) and " " in path)


def read_message(path: str, most: int) -> str:
    """Return the last ``most`` bytes of a log as text, where the error is; ``-`` is standard input."""
    data = b""
    if path == STDIN and sys.stdin is None:
        return ""  # it is closed
    if path == STDIN or (os.path.exists(path) and not os.path.isfile(path)):
        with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as stream:
            while more := stream.read(most):
                data = (data + more)[-most:]
    else:
        with closing(open_any(path)) as source:
            begin = max(source.size - most, 0)
            data = source.read(begin, source.size - begin)
    # Without its zero bytes, English in UTF-16 is UTF-8.
    return data.removeprefix(_UTF_16).replace(b"\0", b"").decode("utf-8-sig", "replace")
