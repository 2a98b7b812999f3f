"""Many small reads from one source that lie close together, by few large ones."""

from __future__ import annotations

from typing import Final

from ..source import Source

__all__ = ["Window"]

#: Bytes that are read at once.
_SIZE: Final = 1 << 16
#: Reads that are no farther apart are steps of a walk: the next one is probably as close.
_STEP: Final = 1 << 12


class Window:
    """A source through a window.

    Whoever walks from record to record of an archive with small records asks for a few dozen bytes every few hundred,
    and each would be a call of the system. So where three reads follow each other closely, a whole window is read, and
    what lies in it is answered from there. Between large records nothing is read but what is asked for.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._held = (0, b"")
        self._last = 0
        #: Reads in a row that were close to the one before.
        self._close = 0

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``, or fewer where the source ends."""
        data, begin = self.around(offset, size)
        return data[offset - begin : offset - begin + size]

    def around(self, offset: int, size: int) -> tuple[bytes, int]:
        """Bytes with those in them that ``read`` returns, and the offset of the first."""
        begin, data = self._held
        end = begin + len(data)
        close = 0 < offset - self._last < _STEP or (len(data) > 0 and -_STEP < offset - end < _STEP)
        self._close = self._close + 1 if close else 0
        self._last = offset
        if begin <= offset <= end - size:
            return data, begin
        # From the end of a large record to the next header it is one close step, but then comes a far one.
        if self._close < 2 or size > _STEP:
            return self.source.read(offset, size), offset
        data = self.source.read(offset, _SIZE)
        self._held = (offset, data)
        return data, offset
