"""Two names for each other's file or folder, in one step where the system has that.

Sources: renameat2(2) with RENAME_EXCHANGE (Linux 3.15), renamex_np(2) with RENAME_SWAP (macOS 10.12); Python has
neither.
"""

from __future__ import annotations

import os
import sys
from typing import Final

__all__ = ["exchange"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_RENAME_SWAP: Final = 2


def exchange(one: str, other: str) -> None:
    """Let both paths, which must exist, stand for what the other one stood for.

    Where the filesystem cannot do that at once, ``one`` is away for a moment: a run that is killed right then leaves
    what it stood for under the name of ``other`` with ``.old`` behind it. Raises OSError.
    """
    if _at_once(os.fsencode(one), os.fsencode(other)):
        return
    aside = f"{other}.old"
    os.rename(one, aside)
    try:
        os.rename(other, one)
    except BaseException:
        os.rename(aside, one)
        raise
    os.rename(aside, other)


def _at_once(one: bytes, other: bytes) -> bool:
    """Did the system exchange them?"""
    try:
        import ctypes  # takes milliseconds to load, and some builds of Python lack it

        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(one, other, _RENAME_SWAP) == 0)
        return bool(libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE) == 0)
    except (ImportError, OSError, AttributeError, TypeError):
        return False
