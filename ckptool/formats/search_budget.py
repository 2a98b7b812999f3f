"""The budget of a search through a file: work that is bounded by its size, whatever it says of itself."""

from __future__ import annotations

from typing import Final

from ..files.sources import BytesSource, SliceSource, Source, Span

#: The cost of a pickle, a member or an archive of no size.
_COST: Final = 256


class BudgetError(Exception):
    """More bytes would have to be examined than a file of this size may cost."""


class Budget:
    """The bytes that may still be examined, and the spans that were: (file, offset, size, how it was read)."""

    def __init__(self, left: int) -> None:
        self.left = left
        #: The sources are kept alive, so that none of their ids is used again.
        self.seen: dict[tuple[int, int, int, object], Source] = {}

    def take(self, size: int) -> None:
        """Raise BudgetError where fewer bytes are left."""
        self.left -= size + _COST
        if self.left < 0:
            raise BudgetError

    def is_new(self, span: Span, how: object) -> bool:
        """Return whether a span was not yet examined in this way, under whatever name."""
        source, offset, size = span
        while isinstance(source, SliceSource):
            offset += source.offset
            source = source.source
        if isinstance(source, BytesSource):
            return True  # inflated: to remember it would keep it in memory
        key = (id(source), offset, size, how)
        new = key not in self.seen
        self.seen[key] = source
        return new
