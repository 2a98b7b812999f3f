"""Recognise tensors that one side stacks into one, such as experts, and rows that one side lacks.

Shapes show what may belong together. The first, the middle and the last row of each tensor prove it, where both sides
have values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, permutations
from math import prod
from typing import Final

from ...base.records import NamedTuple
from .fused import Side
from .names import numbers_in

#: The most series that one stack may hold, such as gate and up, and the most that are tried for it.
_MOST_SERIES: Final = 3
_MOST_TRIED: Final = 8
#: The most stacks that are tried for all tensors together.
_MOST_STACKS: Final = 20_000
#: The most elements of a row that are compared.
_ROW: Final = 256
#: Fewer distinct elements may be equal by chance.
_TELLING: Final = 4
#: What stands for the number along which tensors are stacked.
HOLE: Final = "{e}"


class Stack(NamedTuple):
    """A tensor of one side whose first axis has several tensors of the other side.

    ``parts`` has the names of these for each section. Sections follow each other along ``axis`` of a part.
    """

    whole: str
    parts: tuple[tuple[str, ...], ...]
    axis: int


def find_stacks(wholes: Side, parts: Side, whole_names: Collection[str], part_names: Collection[str]) -> list[Stack]:
    """Return the tensors of ``wholes`` that are stacks of tensors of ``parts``, as the values of both sides prove."""
    if wholes.values is None or parts.values is None:
        return []
    series: dict[tuple[int, tuple[str, ...]], list[tuple[str, ...]]] = {}
    for template, names in _series(part_names):
        series.setdefault((len(names), numbers_in(template)), []).append(names)
    stacks = []
    left = _MOST_STACKS
    for whole in whole_names:
        shape = wholes.shape(whole) or ()
        if len(shape) < 2:
            continue
        near = series.get((shape[0], numbers_in(whole)), [])[:_MOST_TRIED]
        tried = list(islice(_fitting(whole, shape, near, parts), left))
        left -= len(tried)
        found = [stack for stack in tried if _is_proven(stack, wholes, parts)]
        stacks += found if len(found) == 1 else []
    return stacks


def with_hole(names: Sequence[str]) -> str:
    """Return the names of a series as one, with a hole for the number in which they differ, or "" if they have none."""
    rows = [name.split(".") for name in names]
    odd = [at for at, column in enumerate(zip(*rows)) if len({*column}) > 1]
    if len(odd) != 1 or [row[odd[0]] for row in rows] != [str(number) for number in range(len(rows))]:
        return ""
    return ".".join([*rows[0][: odd[0]], HOLE, *rows[0][odd[0] + 1 :]])


def padded_rows(name: str, own: Side, target: Side) -> int:
    """Return how many rows of a tensor both sides have, if values prove that the other ones are padding; else 0.

    Padding is what the target lacks, or rows of zeros that it adds.
    """
    have, wanted = own.shape(name), target.shape(name)
    if not have or not wanted or have[1:] != wanted[1:] or own.specs[name].dtype != target.specs[name].dtype:
        return 0
    rows = min(have[0], wanted[0])
    if not rows or have[0] == wanted[0] or not prod(have[1:]):
        return 0
    mine, theirs = ([side.piece(name, *place) for place in _places(have, 0, rows)] for side in (own, target))
    added = [target.piece(name, *place) for place in _places(wanted, rows, wanted[0])]
    known = mine == theirs and all(mine) and len({element for row in mine for element in row}) >= _TELLING
    return rows if known and all(added) and not any(any(element) for row in added for element in row) else 0


def _places(shape: Sequence[int], first: int, stop: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the places of the first, the middle and the last row before ``stop``, or of the ends of a vector.

    A place is the index in all axes but the last, and the first element and the number of elements there.
    """
    if len(shape) == 1 and first < stop:
        count = min(stop - first, _ROW)
        yield from (((), first, count), ((), stop - count, count))
    for row in sorted({first, (first + stop) // 2, stop - 1}) if len(shape) > 1 and first < stop else ():
        yield (row, *(0 for _ in shape[2:])), 0, min(shape[-1], _ROW)


def _series(names: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names that differ only in a number that counts from 0, in its order, with a hole for that number."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        segments = name.split(".")
        for at, segment in enumerate(segments):
            if segment.isdigit():
                template = ".".join([*segments[:at], HOLE, *segments[at + 1 :]])
                found.setdefault(template, {})[segment] = name
    for template, members in found.items():
        counted = tuple(members.get(str(number), "") for number in range(len(members)))
        if len(counted) > 1 and all(counted):
            yield template, counted


def _fitting(whole: str, shape: Sequence[int], near: Sequence[tuple[str, ...]], parts: Side) -> Iterator[Stack]:
    """Yield the ways to make a stack of series, by their shapes."""
    shapes = {names: {parts.shape(name) for name in names} for names in near}
    alike = {names: own.pop() for names, own in shapes.items() if len(own) == 1}
    for count in range(1, _MOST_SERIES + 1):
        for chosen in permutations([names for names in alike if len(alike[names] or ()) == len(shape) - 1], count):
            own = [alike[names] or () for names in chosen]
            for axis in range(len(shape) - 1 if count > 1 else 1):
                rest = {(*each[:axis], *each[axis + 1 :]) for each in own}
                size = sum(each[axis] for each in own)
                if rest == {(*shape[1 : axis + 1], *shape[axis + 2 :])} and size == shape[axis + 1]:
                    yield Stack(whole, chosen, axis)


def _is_proven(stack: Stack, wholes: Side, parts: Side) -> bool:
    """Return whether the rows of all parts are in their places of the stack, and differ from each other."""
    first: list[tuple[bytes, ...]] = []
    dtype = wholes.specs[stack.whole].dtype
    for number in range(len(stack.parts[0])):
        at = 0
        for names in stack.parts:
            name, shape = names[number], parts.shape(names[number]) or ()
            for look, (index, begin, count) in enumerate(_places(shape, 0, shape[0])):
                own = parts.piece(name, index, begin, count)
                place = [number, *index, begin]
                place[stack.axis + 1] += at
                there = wholes.piece(stack.whole, place[:-1], place[-1], count)
                if not own or own != there or parts.specs[name].dtype != dtype:
                    return False
                first += [tuple(own)] if not look else []
            at += shape[stack.axis]
    return len({*first}) == len(first) and len({element for row in first for element in row}) >= _TELLING
