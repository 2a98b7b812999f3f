"""Compare pieces that several ranks list, each in its own metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

from ...base.errors import MalformedError
from ..pieces.boxes import Box
from ..pieces.copies import Copies, Copy, CopyPair, is_own
from .checks import AddProblem
from .metadata import Item, ValueMetadata


def compare_items(
    pairs: Iterable[tuple[Item, Item]],
    values: Mapping[str, ValueMetadata],
    opened: Callable[[Item], tuple[Box, Copy] | None],
    copies: Copies,
    note: AddProblem,
) -> list[str]:
    """Compare pairs of items; return the tensors that differ between ranks by design, such as random states.

    ``opened`` returns an item's box and elements, or None if its file lacks it. A damaged item becomes a problem.
    """
    own: dict[str, None] = {}
    for one, two in pairs:
        value = values[one.name]
        try:
            first, other = opened(one), opened(two)
        except MalformedError as error:
            note("bad-item", "error", f"{two.place}: {error.what}", two.file, two.at)
            continue
        if first is None or other is None or value.dtype is None:
            continue
        pair = CopyPair(one.name, first[1], other[1], prod(first[0][1]) * value.dtype.itemsize)
        if not is_own(one.name, value.dtype.name, value.shape):
            copies.add(pair)
        elif copies.compare(pair) is False:
            own[one.name] = None
    return list(own)
