"""Which name of ours is which name of theirs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import zip_longest
from typing import Final

from ...base.errors import RefusedError
from ...base.prefixes import unwrapping
from ...base.text import counted, shown
from .comparison import Shape

#: Segments from the end that are looked at; no model nests its names this deep.
_DEEPEST: Final = 24


def paired(have: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Our names with the name that each has in ``wanted``; a name without a sure partner is not in it.

    In this order: equal names; names that are equal without the segments of wrappers; then, the longest common end
    first, families of names that differ in their numbers alone and have the same shapes number by number, and single
    names of the same shape, in each case where there is one such on either side; at last the other parameters of
    modules that were paired so. No two names get one partner.
    """
    found = {name: name for name in have if name in wanted}
    own_names = _plain(name for name in have if name not in found)
    other_names = _plain(name for name in wanted if name not in found)
    ours = {plain: have[name] for plain, name in own_names.items()}
    theirs = {plain: wanted[name] for plain, name in other_names.items()}
    plainly: dict[str, str] = {}

    def settle(pairs: Iterable[tuple[str, str]]) -> int:
        before = len(plainly)
        for own, other in pairs:
            if own in ours and other in theirs:
                plainly[own] = other
                del ours[own], theirs[other]
        return len(plainly) - before

    settle([(name, name) for name in ours if name in theirs])
    for depth in range(_longest(ours, theirs), 0, -1):
        if not ours or not theirs:
            break
        settle(_relatives(ours, theirs, depth))
        pairs = _alone(ours, theirs, _by_end(depth))
        # Names that differ in their numbers alone are other places in one sequence: which is which, nobody knows.
        settle([(own, other) for own, other in pairs if _family(own) != _family(other)])
    while ours and theirs and settle(_siblings({**found, **plainly}, ours, theirs)):
        pass
    return found | {own_names[own]: other_names[other] for own, other in plainly.items()}


def _plain(names: Iterable[str]) -> dict[str, str]:
    """Names by what they are without the segments of wrappers; those that would become one stay as they are."""
    found: dict[str, list[str]] = {}
    held = list(names)
    for plain, name in zip(map(unwrapping(held), held), held):
        found.setdefault(plain, []).append(name)
    return {plain if len(same) == 1 else name: name for plain, same in found.items() for name in same}


def in_order(have: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Our names with theirs by position: the first is the first.

    Raises RefusedError, with the first disagreement named, where the numbers of keys or two shapes differ.
    """
    step = "names can be taken by order only where the shapes agree one by one"
    for number, (own, other) in enumerate(zip_longest(have, wanted)):
        if own is None or other is None:
            sides = f"{counted(len(have), 'key')} here, {len(wanted):,} there"
            raise RefusedError(f"{sides}; the first without a partner is {shown(own or other or '')}", next=step)
        if have[own] != wanted[other]:
            here, there = f"{shown(own)} {_told(have[own])}", f"{shown(other)} {_told(wanted[other])}"
            raise RefusedError(f"key {number + 1:,} is {here} here, {there} there", next=step)
    return dict(zip(have, wanted))


def _told(shape: Shape) -> str:
    return "without a shape" if shape is None else f"of shape {'x'.join(map(str, shape)) or 'scalar'}"


def suffixes(name: str) -> list[str]:
    """The ends of a name in whole segments, the shortest first: ``weight``, ``conv.weight``, ..."""
    found = []
    at = len(name)
    for _ in range(_DEEPEST):
        at = name.rfind(".", 0, at)
        found.append(name[at + 1 :])
        if at < 0:
            break
    return found


def numbers_in(name: str) -> tuple[str, ...]:
    """The segments that are numbers: of layers, of blocks."""
    return tuple(part for part in name.split(".") if part.isdigit())


def _by_end(depth: int) -> Callable[[str, Shape], Hashable]:
    def mark(name: str, shape: Shape) -> Hashable:
        ends = suffixes(name)
        return (ends[depth - 1], shape) if len(ends) >= depth else None

    return mark


def _family(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _families(side: Mapping[str, Shape]) -> dict[str, dict[tuple[str, ...], tuple[Shape, str]]]:
    """Names by what they are without their numbers: ``layers.#.weight``; below that (shape, name) by the numbers."""
    found: dict[str, dict[tuple[str, ...], tuple[Shape, str]]] = {}
    for name, shape in side.items():
        numbers = numbers_in(name)
        if numbers:
            found.setdefault(_family(name), {})[numbers] = (shape, name)
    return found


def _relatives(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], depth: int) -> list[tuple[str, str]]:
    """The pairs of families with a common end of ``depth`` segments and equal shapes at equal numbers.

    That one name has the same number and shape as another says little: layer 1 of one model may be layer 3 of the
    other. That a whole family has says that it is the same.
    """
    sides = [_families(side) for side in (ours, theirs)]
    marks: list[dict[Hashable, str | None]] = []
    for families in sides:
        places: dict[Hashable, str | None] = {}
        for family, members in families.items():
            ends = suffixes(family)
            if len(ends) >= depth:
                mark: Hashable = (
                    ends[depth - 1],
                    frozenset((numbers, shape) for numbers, (shape, _) in members.items()),
                )
                places[mark] = None if mark in places else family
        marks.append(places)
    pairs = []
    for mark, own in marks[0].items():
        other = marks[1].get(mark)
        if own and other:
            there = sides[1][other]
            pairs += [(name, there[numbers][1]) for numbers, (_, name) in sides[0][own].items()]
    return pairs


def _longest(*sides: Mapping[str, Shape]) -> int:
    """The deepest end that both sides can have."""
    return min(max((min(name.count(".") + 1, _DEEPEST) for name in side), default=0) for side in sides)


def _alone(
    ours: Mapping[str, Shape], theirs: Mapping[str, Shape], mark: Callable[[str, Shape], Hashable]
) -> list[tuple[str, str]]:
    """The pairs with equal marks, where either side has that mark once; None is no mark."""
    sides: list[dict[Hashable, str | None]] = []
    for side in (ours, theirs):
        places: dict[Hashable, str | None] = {}
        for name, shape in side.items():
            key = mark(name, shape)
            if key is not None:
                places[key] = None if key in places else name
        sides.append(places)
    return [(own, other) for key, own in sides[0].items() if own and (other := sides[1].get(key))]


def _siblings(
    found: Mapping[str, str], ours: Mapping[str, Shape], theirs: Mapping[str, Shape]
) -> list[tuple[str, str]]:
    """The pairs of equal last segment and shape in modules that were paired one to one."""
    forth: dict[str, set[str]] = {}
    back: dict[str, set[str]] = {}
    for own, other in found.items():
        (a, _, end), (b, _, other_end) = own.rpartition("."), other.rpartition(".")
        if end == other_end:
            forth.setdefault(a, set()).add(b)
            back.setdefault(b, set()).add(a)
    pairs = []
    for name, shape in ours.items():
        module, dot, end = name.rpartition(".")
        others = forth.get(module, set())
        if dot and len(others) == 1:
            (there,) = others
            other = f"{there}.{end}" if there else end
            if len(back[there]) == 1 and other in theirs and theirs[other] == shape:
                pairs.append((name, other))
    return pairs
