"""What is staged is looked at before it takes its name: nothing is committed that was not read back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from ..errors import ReadBackError, UnreadableError
from ..source import Piece, Plan, Source, Span, size_of

__all__ = ["Check", "FolderCheck", "Synced", "as_planned"]

#: Raises ReadBackError where a staged file, or a folder by its path, is not what it must be.
Check: TypeAlias = Callable[[Source], None]
FolderCheck: TypeAlias = Callable[[str], None]
#: Of what was copied from a file, bytes at both ends that are compared.
_ENDS: Final = 4096
#: Bytes from which on a thread of its own pays.
_WORTH_IT: Final = 1 << 20


def as_planned(plan: Plan) -> Check:
    """Is the file as long as the plan, with its literal bytes in their places, and the ends of those it copied?"""

    def check(staged: Source) -> None:
        if staged.size != plan.size:
            promised, read = f"{plan.size:,} bytes", f"{staged.size:,} bytes"
            raise ReadBackError("it has another size than planned", promised=promised, read=read)
        at = 0
        for piece in plan.pieces:
            try:
                stands = _stands(piece, staged, at)
            except UnreadableError as error:
                if error.path == staged.name and isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None  # writing failed, of which the disk speaks late
                raise
            if not stands:
                words = f"{size_of(piece):,} bytes from byte {at:,} on"
                raise ReadBackError("it holds other bytes than planned", promised=words, read="other bytes there")
            at += size_of(piece)

    return check


def _stands(piece: Piece, staged: Source, at: int) -> bool:
    """Is the piece there, as far as that can be seen without computing or reading all of it?"""
    if isinstance(piece, bytes):
        return staged.read(at, len(piece)) == piece
    if not isinstance(piece, Span):
        return True
    source, offset, size = piece
    count = min(size, _ENDS)
    return all(staged.read(at + end, count) == source.read(offset + end, count) for end in {0, size - count})


class Synced:
    """Brings a file to the disk while something else is done with it. The error of either is raised."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True) if size >= _WORTH_IT else None

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread:
            self._thread.join()
        elif kind is None:
            os.fsync(self._fd)
        if self._error and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            os.fsync(self._fd)
        except BaseException as error:
            self._error = error
