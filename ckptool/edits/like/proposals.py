"""Steps worth trying, told by the names themselves: what differs between names that mean the same, by votes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from ...base.prefixes import common_prefix, unwrapping
from .comparison import Shape, agrees
from .pairing import numbers_in, suffixes
from .steps import Step

Key = TypeVar("Key")

#: What other libraries call the same thing, so that its order among the keys does not matter.
_SYNONYM_PAIRS: Final = (
    ("gamma", "weight"),
    ("beta", "bias"),
    ("moving_mean", "running_mean"),
    ("moving_variance", "running_var"),
    ("moving_var", "running_var"),
    ("kernel", "weight"),
    ("scale", "weight"),
)
_SYNONYMS: Final = frozenset((*_SYNONYM_PAIRS, *((b, a) for a, b in _SYNONYM_PAIRS)))

#: Partners that are tried for one name where nothing tells them apart.
_FEW: Final = 3
#: What a vote by order counts, against 1 for one by name.
_UNSURE: Final = 0.25
#: Of many pairs every so many-th votes. What is rare is heard once what is common is settled. Primes, because names
#: repeat from layer to layer.
_VOTERS: Final = 1_000
_STRIDES: Final = (1, 3, 7, 13, 29, 61, 127, 257)
#: A name with these cannot be spelled in a glob, or in s/.../.../.
_NOT_IN_GLOBS: Final = frozenset("*?=[]\\")
_NOT_IN_REGEX: Final = frozenset("/\\\n")
_NUMBERED: Final = re.compile(r"(.*?[^0-9])(\d+)\Z", re.DOTALL)


class Pair(NamedTuple):
    """Two names that may mean the same; ``sure`` when the names say so rather than their order, ``only`` when there is
    no other name with that end and shape, whatever its numbers."""

    own: str
    other: str
    sure: bool
    only: bool = False


def proposals(names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape], most: int) -> list[Step]:
    """Steps that may bring ``names`` nearer to ``wanted``, the most voted first; some ``most`` of each kind."""
    settled = {name for name, shape in zip(names, shapes) if _loads(name, shape, wanted)}
    free = [(name, shape) for name, shape in zip(names, shapes) if name not in settled]
    left = {name: shape for name, shape in wanted.items() if name not in settled}
    if not free or not left:
        return []
    votes = _Votes({}, {}, {}, {}, set())
    stride = next((step for step in _STRIDES if len(free) <= step * _VOTERS), _STRIDES[-1])
    for pair in islice(likely_pairs(free, left), 0, None, stride):
        votes.tally(pair)
    steps = [*_whole(names, votes, most), *_by_head(votes, most), *_by_middle(votes, most)]
    return list({step[:2]: step for step in reversed(steps)}.values())[::-1]


class _Votes(NamedTuple):
    """Differences between names with the weight of the pairs that have them; ``sure`` holds those that names tell.

    ``heads`` before the common end, ``longer`` the same with one segment more, ``names`` whole names without a common
    end, ``middles`` what lies between what two names begin and end with.
    """

    heads: dict[tuple[str, str], float]
    longer: dict[tuple[str, str], float]
    names: dict[tuple[str, str], float]
    middles: dict[tuple[str, str, bool], float]
    sure: set[tuple[str, str]]

    def tally(self, pair: Pair) -> None:
        """Count what one pair says."""
        found = difference(pair.own, pair.other)
        weight = 1.0 if pair.sure else _UNSURE
        # One number and one shape alike in one place may be chance.
        sure = pair.sure and (pair.only or found.end > 1 or found.begin > 0) and not found.moved
        told = []
        if found.end:
            self.heads[found.head] = self.heads.get(found.head, 0) + weight
            told.append(found.head)
        else:
            self.names[found.head] = self.names.get(found.head, 0) + weight
            told.append(found.head)
        if found.longer is not None:
            self.longer[found.longer] = self.longer.get(found.longer, 0) + weight
            told.append(found.longer)
        if found.middle is not None:
            middle = (*found.middle, not found.end)
            self.middles[middle] = self.middles.get(middle, 0) + weight
            told.append(found.middle)
        if sure or found.middle in _SYNONYMS:
            self.sure.update(told)


def _top(votes: Mapping[Key, float], most: int) -> list[Key]:
    """The keys with the most votes; of equal ones the first."""
    return nlargest(most, votes, key=lambda key: votes[key])


def _loads(name: str, shape: Shape, wanted: Mapping[str, Shape]) -> bool:
    return name in wanted and agrees(shape, wanted[name])


def likely_pairs(free: Sequence[tuple[str, Shape]], left: Mapping[str, Shape]) -> Iterator[Pair]:
    """Pairs of names with the longest common end and the same shape; without a common end, in one module."""
    ends: dict[tuple[str, Shape], list[str]] = {}
    modules: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in left.items():
        for end in suffixes(name):
            ends.setdefault((end, shape), []).append(name)
        modules.setdefault((name.rpartition(".")[0], shape), []).append(name)
    groups: dict[tuple[str, Shape], list[str]] = {}
    alone: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in free:
        best = None
        for end in suffixes(name):
            if (end, shape) not in ends:
                break  # what has no short end has no long one
            best = (end, shape)
        if best is not None:
            groups.setdefault(best, []).append(name)
        else:
            alone.setdefault((name.rpartition(".")[0], shape), []).append(name)
    for mark, own in groups.items():
        yield from _matched(own, ends[mark])
    for mark, own in alone.items():
        if mark in modules:
            yield from _zipped(own, modules[mark])


def _matched(own: list[str], others: list[str]) -> Iterator[Pair]:
    """Names of one group with those of the other: by the numbers in them, then by order."""
    if len(own) == len(others) == 1:
        yield Pair(own[0], others[0], True, True)
        return
    by_numbers: dict[tuple[str, ...], list[str]] = {}
    for name in others:
        by_numbers.setdefault(numbers_in(name), []).append(name)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in own:
        groups.setdefault(numbers_in(name), []).append(name)
    rest: list[str] = []
    for numbers, names in groups.items():
        if numbers in by_numbers:
            yield from _zipped(names, by_numbers[numbers])
        else:
            rest += names
    if rest:
        yield from _zipped(rest, others)


def _zipped(own: list[str], others: list[str]) -> Iterator[Pair]:
    if len(own) == len(others):
        for a, b in zip(own, others):
            yield Pair(a, b, len(own) == 1)
    else:
        for name in own:
            for other in others[:_FEW]:
                yield Pair(name, other, False)


class Difference(NamedTuple):
    """Where two names differ: ``head`` up to the common end of ``end`` segments, ``longer`` a segment further where
    there is one, ``middle`` without the common beginning of ``begin`` segments; None where that is empty or only
    numbers. ``moved`` says that they differ in numbers alone: another place in a sequence, which may be chance."""

    head: tuple[str, str]
    longer: tuple[str, str] | None
    middle: tuple[str, str] | None
    begin: int
    end: int
    moved: bool


def difference(own: str, other: str) -> Difference:
    """Compare two names segment by segment, from the end and from the beginning."""
    a, b = own.split("."), other.split(".")
    shorter = min(len(a), len(b))
    end = 0
    while end < shorter and a[-1 - end] == b[-1 - end]:
        end += 1
    begin = 0
    while begin < shorter - end and a[begin] == b[begin]:
        begin += 1
    to_a, to_b = len(a) - end, len(b) - end
    longer = (".".join(a[: to_a + 1]), ".".join(b[: to_b + 1])) if end > 1 else None
    middle = (".".join(a[begin:to_a]), ".".join(b[begin:to_b]))
    plain = all(part.isdigit() for part in a[begin:to_a])
    moved = plain and begin < to_a and all(part.isdigit() for part in b[begin:to_b])
    return Difference((".".join(a[:to_a]), ".".join(b[:to_b])), longer, None if plain else middle, begin, end, moved)


def _whole(names: Sequence[str], votes: _Votes, most: int) -> Iterator[Step]:
    """Steps about all names: the wrappers, what they all begin with, and what heads lack."""
    if any(name.startswith("module.") for name in names):
        yield Step("strip-module")
    unwrapped = unwrapping(names)
    if any(unwrapped(name) != name for name in names):
        yield Step("wrappers")
    shared = common_prefix(names)
    if shared:
        yield Step("strip-prefix", shared)
    # Where one head ends with the other, something was put before all names, or taken off.
    ends: dict[tuple[str, str], float] = {}
    for (own, other), weight in votes.heads.items():
        if own and other.endswith("." + own):
            ends["add-prefix", other[: -len(own)]] = ends.get(("add-prefix", other[: -len(own)]), 0) + weight
        elif other and own.endswith("." + other):
            ends["strip-prefix", own[: -len(other)]] = ends.get(("strip-prefix", own[: -len(other)]), 0) + weight
    yield from (Step(*mark) for mark in _top(ends, most))


def _by_head(votes: _Votes, most: int) -> Iterator[Step]:
    for own, other in _top(votes.heads, most):
        if own == "module" and not other:
            yield Step("strip-module")
        elif own and not other:
            yield Step("strip-prefix", own + ".")
        elif other and not own:
            yield Step("add-prefix", other + ".")
        elif own and not _NOT_IN_GLOBS & set(own + other):
            yield Step("rename", f"{own}.*={other}.*", (own, other) not in votes.sure)
    for own, other in _top(votes.longer, most):
        if not _NOT_IN_GLOBS & set(own + other):
            yield Step("rename", f"{own}.*={other}.*", (own, other) not in votes.sure)
    for own, other in _top(votes.names, most):
        if not _NOT_IN_GLOBS & set(own + other):
            yield Step("rename", f"{own}={other}", (own, other) not in votes.sure)


def _by_middle(votes: _Votes, most: int) -> Iterator[Step]:
    """Segments that are called otherwise wherever they stand; those with a number at their end together."""
    numbered: dict[tuple[str, str, bool], float] = {}
    sure: set[tuple[str, str]] = set()
    for (own, other, last), weight in votes.middles.items():
        a, b = _NUMBERED.match(own), _NUMBERED.match(other)
        if a and b and a[2] == b[2]:
            mark = (a[1], b[1], last)
            numbered[mark] = numbered.get(mark, 0) + weight
            if (own, other) in votes.sure:
                sure.add(mark[:2])
    for own, other, last in _top(numbered, most):
        if not _NOT_IN_REGEX & set(own + other):
            end, back = ("$", "") if last else (r"\.", ".")
            text = rf"s/(^|\.){re.escape(own)}(\d+){end}/\1{other}\g<2>{back}/"
            yield Step("rename-regex", text, (own, other) not in sure)
    for own, other, last in _top(votes.middles, most):
        if not _NOT_IN_REGEX & set(own + other) and (other or not last):
            end, back = ("$", "") if last else (r"\.", "." if other else "")
            # \1 before a digit would be another group.
            group = r"\g<1>" if other[:1].isdigit() else r"\1"
            text = rf"s/(^|\.){re.escape(own)}{end}/{group}{other}{back}/"
            yield Step("rename-regex", text, (own, other) not in votes.sure)
