"""The budget of a search through a file, and the decoding of pickles within it.

The work is bounded by the size of the file, whatever sizes the file claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final, cast

from ...base.errors import MalformedError, PickleError, PickleLimitError, TruncatedPickleError
from ...base.records import NamedTuple
from ...checkpoint.container import FoundPickle
from ...files.sources import Source
from ...pickles.decode import Decoded, decode
from ...pickles.nodes import Graph, Node, Style
from .numpy_arrays import JoblibArrays

#: The most bytes that are decoded on the mere chance of a pickle.
MAX_GUESS: Final = 64 << 20

#: Bytes that may be examined beyond the file size: inflated bytes, and bytes examined from several offsets.
_SPARE: Final = 16 << 20
#: The minimum cost of a pickle, a member or an archive.
_COST: Final = 256


class BudgetError(Exception):
    """The search would examine more bytes than allowed for a file of this size."""


class Budget:
    """The bytes that may still be examined."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, size: int) -> None:
        """Spend ``size`` bytes; raise BudgetError if too few are left."""
        self.left -= size + _COST
        if self.left < 0:
            raise BudgetError


#: The most bytes of a pickle that are decoded to recognise a file.
RECOGNISED: Final = 1 << 20


def decode_start(source: Source) -> Decoded:
    """Decode the pickle at the start of a source, if it has at most 1 MiB; raises PickleError."""
    data = source.read(0, min(source.size, RECOGNISED))
    return decode(data, foreign=JoblibArrays(data, "pickle").skip)


def decode_at(
    source: Source,
    begin: int,
    budget: Budget,
    *,
    where: str,
    nested: list[FoundPickle] | None = None,
    max_bytes: int = MAX_GUESS,
) -> tuple[Graph, int]:
    """Decode the pickle at an offset, of unknown length; return (graph, offset after it). Pickles in its joblib arrays
    are added to ``nested``. Raises PickleError."""
    size = 1 << 16
    while True:
        data = source.read(begin, min(size, max_bytes))
        budget.take(len(data))
        arrays = JoblibArrays(data, where)
        try:
            decoded: Decoded = decode(data, where=where, foreign=arrays.skip)
            return decoded.graph, begin + decoded.end
        except TruncatedPickleError as error:
            if begin + len(data) >= source.size:
                raise
            if size >= max_bytes:
                limit = PickleLimitError(f"it is longer than {max_bytes:,} bytes", where=where)
                limit.seen = error.seen
                raise limit from None
            arrays.found.clear()
            size *= 4
        finally:
            if nested is not None:
                nested += [FoundPickle(f"{where}: array of objects", graph) for graph in arrays.found.values()]


def broken(where: str, error: MalformedError) -> FoundPickle:
    """Return a pickle that cannot be decoded to its end. A reader would have executed it up to that place."""
    if not isinstance(error, PickleError):
        return FoundPickle(where, None, error.what)
    seen = cast("list[Node]", error.seen)
    # Only the list of nodes is meaningful; there is no root.
    return FoundPickle(where, Graph(seen, 0, Style()) if seen else None, str(error))


class Search(NamedTuple):
    """The depth of nested files, and the budget that they share. ``strict``: report bytes of unrecognised type as
    unchecked. Not set in a checkpoint, where no loader reads them. ``value``: the bytes are, or were held by, a value
    of a checkpoint: they count only as pickles."""

    budget: Budget
    depth: int = 0
    strict: bool = False
    value: bool = False

    def deeper(self) -> Search:
        return self._replace(depth=self.depth + 1)


#: The search that a checkpoint nested in another file belongs to.
outer_search: ContextVar[Search | None] = ContextVar("outer_search", default=None)


def limited(size: int, walk: Callable[[Search], Iterator[FoundPickle]], strict: bool = False) -> Iterator[FoundPickle]:
    """Yield the results of ``walk`` within the budget for ``size`` bytes, or within the outer search's budget."""
    outer = outer_search.get()
    if outer is not None:
        yield from walk(outer)
        return
    try:
        yield from walk(Search(Budget(size + _SPARE), strict=strict))
    except BudgetError:
        yield unchecked("the rest of the file", "the search stopped after it had read many times the size of the file")


def unchecked(where: str, why: str) -> FoundPickle:
    return FoundPickle(where, None, why, unchecked=True)
