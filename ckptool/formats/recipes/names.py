"""Names of tensors with holes for numbers, as recipes write them: ``layers.{L}.attention.wq.weight``.

A hole is a sum of symbols, such as ``{L-2}`` or ``{3B+J+1}``. A symbol is a number of the recipe, or takes any value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from math import prod
from typing import Final

from ...base.errors import MalformedError
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import quoted

_HOLE: Final = regex(r"\{([^{}]*)\}")
_TERM: Final = regex(r"([+-]?)(\d*)([A-Za-z][A-Za-z_]*)?")
_DIGITS: Final = regex(r"\d+")
#: A number in a name: without leading zeros, and not longer than any layer needs.
_NUMBER: Final = regex(r"0|[1-9][0-9]{0,9}")
#: The largest number in a name, and the most names that choices may stand for.
_LARGEST: Final = 1 << 31
_MOST_CHOICES: Final = 256
#: The most digits of a number in a recipe.
MOST_DIGITS: Final = 9


class Sum(NamedTuple):
    """A number in a name: ``constant`` plus multiples of symbols."""

    factors: tuple[tuple[str, int], ...]
    constant: int

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in the sum."""
        return tuple(symbol for symbol, _ in self.factors)

    def value(self, known: Mapping[str, int]) -> int:
        """Return the number for known symbols."""
        return self.constant + sum(factor * known[symbol] for symbol, factor in self.factors)

    def solved(self, number: int, known: Mapping[str, int]) -> dict[str, int] | None:
        """Return the values of the other symbols for which the sum is ``number``, or None if there are none. Several
        unknown symbols are digits: in {3B+J+1} J is 0, 1 or 2."""
        rest = number - self.constant - sum(known[name] * factor for name, factor in self.factors if name in known)
        unknown = sorted((item for item in self.factors if item[0] not in known), key=lambda item: -abs(item[1]))
        found = {}
        for symbol, factor in unknown:
            found[symbol], rest = divmod(rest, factor) if factor > 0 else (-(rest // -factor), rest % -factor)
        return None if rest or min(found.values(), default=0) < 0 else found


class NamePattern(NamedTuple):
    """A name with holes: ``texts`` around ``sums``, so that there is one text more."""

    text: str
    texts: tuple[str, ...]
    sums: tuple[Sum, ...]

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols in the holes."""
        return frozenset(symbol for each in self.sums for symbol in each.symbols)

    @property
    def skeleton(self) -> str:
        """The name with # for each number, which finds the pattern of a name quickly."""
        return skeleton("0".join(self.texts))

    @property
    def expression(self) -> str:
        """The regular expression of the names."""
        return f"({_NUMBER.pattern})".join(map(re.escape, self.texts))

    def filled(self, known: Mapping[str, int]) -> str:
        """Return the name for known symbols."""
        numbers = (str(each.value(known)) for each in self.sums)
        return self.texts[0] + "".join(number + text for number, text in zip(numbers, self.texts[1:]))

    def numbers_in(self, name: str) -> list[int] | None:
        """Return the numbers that a name has in place of the holes, or None for another name."""
        if not name.startswith(self.texts[0]):
            return None
        found, at = [], len(self.texts[0])
        for text in self.texts[1:]:
            number = _NUMBER.match(name, at)
            if number is None or not name.startswith(text, number.end()):
                return None
            found.append(int(number[0]))
            at = number.end() + len(text)
        return found if at == len(name) else None

    def values_in(self, name: str, known: Mapping[str, int]) -> dict[str, int] | None:
        """Return the values of the symbols in a name, or None if the name does not fit."""
        numbers = self.numbers_in(name)
        if numbers is None or max(numbers, default=0) > _LARGEST:
            return None
        found: dict[str, int] = {}
        # A hole with one unknown symbol decides it for the others.
        for each, number in sorted(zip(self.sums, numbers), key=lambda item: len(item[0].factors)):
            solved = each.solved(number, {**known, **found})
            if solved is None:
                return None
            found |= solved
        return found


def skeleton(name: str) -> str:
    """Return a name with # for each number in it."""
    return _DIGITS.sub("#", name)


def parsed(text: str) -> NamePattern:
    """Return the pattern that a text describes; raise MalformedError if it describes none."""
    parts = _HOLE.split(text.replace("{*}", "\0"))
    if "*" in text.replace("{*}", ""):
        raise MalformedError(f"{quoted(text)}: {{L}} is a number in a name, {{*}} any text, * alone nothing")
    if any(mark in part for part in parts[::2] for mark in "{}"):
        raise MalformedError(f"{quoted(text)} has a brace without its partner")
    texts = parts[::2]
    between = pairwise(texts)
    if any(before[-1:].isdigit() or after[:1].isdigit() for before, after in between) or "" in texts[1:-1]:
        raise MalformedError(f"{quoted(text)} has digits or a number next to a number: which is which?")
    return NamePattern(text, tuple(texts), tuple(_sum(part, text) for part in parts[1::2]))


def _sum(text: str, name: str) -> Sum:
    constant, factors, at = 0, dict[str, int](), 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None or match.end() == at or not (match[2] or match[3]) or (at and not match[1]):
            break
        if len(match[2]) > MOST_DIGITS:
            break
        amount = int(match[2] or 1) * (-1 if match[1] == "-" else 1)
        if match[3]:
            factors[match[3]] = factors.get(match[3], 0) + amount
        else:
            constant += amount
        at = match.end()
    if at < len(text) or not text or 0 in factors.values():
        raise MalformedError(f"{{{text}}} in {quoted(name)} is not a sum, as {{L}}, {{L-2}} and {{3B+J+1}} are")
    return Sum(tuple(factors.items()), constant)


def choices(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts with each choice, such as ``{weight|bias}``, replaced by one of its words. The choices of one
    number are made together: the first of each text, the second of each text, and so on. Raise MalformedError if they
    differ in length."""
    found = [[hole.split("|") for hole in _HOLE.findall(text) if "|" in hole] for text in texts]
    most = max(map(len, found), default=0)
    if not most:
        yield texts
        return
    lengths = [{len(words[number]) for words in found if number < len(words)} for number in range(most)]
    if any(len(length) > 1 for length in lengths):
        raise MalformedError(f"the choices in {' and '.join(map(quoted, texts))} do not have as many words each")
    ways = [range(length.pop()) for length in lengths]
    if prod(map(len, ways)) > _MOST_CHOICES:
        raise MalformedError(f"{quoted(texts[0])} stands for more than {_MOST_CHOICES} names")
    for pick in product(*ways):
        yield [_picked(text, pick) for text in texts]


def _picked(text: str, pick: tuple[int, ...]) -> str:
    numbers = iter(pick)
    return _HOLE.sub(lambda hole: hole[1].split("|")[next(numbers)] if "|" in hole[1] else hole[0], text)
