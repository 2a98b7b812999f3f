"""The axes of a tensor, as recipes write them: ``h/p r 2, i`` has two dimensions, the first of three factors.

- ``,`` separates dimensions, a blank separates the factors of one, the outermost first. A factor is a symbol or a
  number; without factors the tensor is a scalar.
- ``(q|k|k)`` are sections: they lie one behind the other along the dimension. ``(v|_)`` is padding behind v.
- ``h/p`` is cut over the parts of a checkpoint: each has its share of h. ``(v|_)/p`` is cut as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final

from ...base.errors import MalformedError
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import quoted
from .names import MOST_DIGITS

_TOKEN: Final = regex(r"\s*(?:([A-Za-z][A-Za-z_]*|_)(/p\b)?|(\d+)|([(|,]|\)(?:/p\b)?))")
PADDING: Final = "_"
#: The most factors of a tensor, and blocks that its sections make.
_MOST: Final = 64


class Factor(NamedTuple):
    """A factor of a dimension: a symbol, or a number with the symbol "". ``cut``: each part has a share of it."""

    symbol: str
    number: int = 0
    cut: bool = False

    def size(self, known: Mapping[str, int]) -> int:
        """Return the size for known symbols."""
        return known[self.symbol] if self.symbol else self.number


Factors = tuple[Factor, ...]
#: A factor of a tensor's section by its symbol or number, and how often that came before.
Tag = tuple[str, int, int]


class Dimension(NamedTuple):
    """One dimension: factors, sections one behind the other, and further factors inside these. Without sections there
    is one that has no factors. ``cut``: each part of a checkpoint has a share of the whole."""

    outer: Factors
    sections: tuple[Factors, ...]
    inner: Factors
    cut: bool = False

    def factors(self, section: int) -> Factors:
        """Return all factors of a section."""
        return self.outer + self.sections[section] + self.inner

    def size(self, known: Mapping[str, int]) -> int:
        """Return the number of elements for known symbols."""
        return sizes(self.outer, known) * sum(sizes(each, known) for each in self.sections) * sizes(self.inner, known)

    def solved(self, size: int, known: Mapping[str, int]) -> dict[str, int] | None:
        """Return the only unknown symbol with its value, {} if all or several are unknown, None if nothing fits."""
        unknown = {each.symbol for part in (self.outer, *self.sections, self.inner) for each in part if each.symbol}
        unknown -= known.keys()
        if not unknown:
            return {} if self.size(known) == size else None
        if len(unknown) > 1:
            return {}
        symbol = unknown.pop()
        # The size is a polynomial of the symbol, nearly always of the degree 1.
        low, high = 0, 1
        while self.size({**known, symbol: high}) < size:
            low, high = high, high * 2
            if high > 1 << 62:
                return None
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.size({**known, symbol: middle}) < size else (low, middle)
        return {symbol: low} if self.size({**known, symbol: low}) == size else None


Axes = tuple[Dimension, ...]


class Leaf(NamedTuple):
    """One choice of a section in each dimension of a tensor: a block that is a product of factors."""

    axes: Axes
    sections: tuple[int, ...]

    @property
    def factors(self) -> Factors:
        """The factors of all dimensions, the outermost first."""
        return tuple(
            each for dimension, section in zip(self.axes, self.sections) for each in dimension.factors(section)
        )

    @property
    def tags(self) -> list[Tag]:
        """The factors as tags; those of size 1 have none."""
        return [tag for tag in all_tags(self) if tag is not None]

    @property
    def is_padding(self) -> bool:
        """Whether the block is padding."""
        return any(each.symbol == PADDING for each in self.factors)


def sizes(factors: Sequence[Factor], known: Mapping[str, int]) -> int:
    """Return the product of the factors' sizes."""
    return prod(each.size(known) for each in factors)


def leaves(axes: Axes) -> list[Leaf]:
    """Return the blocks of a tensor, in the order in which their sections are written."""
    return [Leaf(axes, pick) for pick in product(*(range(len(each.sections)) for each in axes))]


def is_cut(axes: Axes) -> bool:
    """Return whether each part of a checkpoint has only a share of the tensor."""
    return any(
        dimension.cut
        or any(each.cut for part in (dimension.outer, *dimension.sections, dimension.inner) for each in part)
        for dimension in axes
    )


def part_and_whole(axes: Axes) -> tuple[Axes, Axes]:
    """Return the axes of one part, and of the whole in which p counts the parts. A factor ``h/p`` is the factor p
    before the share of one part, which is a symbol of its own. All that a dimension without sections has behind its
    first factor lies together, so it is one factor there."""
    part, whole = [], []
    for number, dimension in enumerate(axes):
        if dimension.cut or (
            dimension.sections == ((),) and not any(each.cut for each in (dimension.outer + dimension.inner)[1:])
        ):
            rest = Factor(f"rest {number}")
            part.append(Dimension((rest,), ((),), ()))
            is_cut_here = dimension.cut or dimension.outer[0].cut
            whole.append(Dimension((PARTS, rest) if is_cut_here else (rest,), ((),), ()))
        else:
            sections = tuple(tuple(map(_share, each)) for each in dimension.sections)
            part.append(Dimension(tuple(map(_share, dimension.outer)), sections, tuple(map(_share, dimension.inner))))
            whole.append(
                Dimension(
                    _with_parts(dimension.outer),
                    tuple(map(_with_parts, dimension.sections)),
                    _with_parts(dimension.inner),
                )
            )
    return tuple(part), tuple(whole)


#: The factor that counts the parts of a checkpoint.
PARTS: Final = Factor("p")


def _share(factor: Factor) -> Factor:
    return Factor(f"{factor.symbol}/p", cut=True) if factor.cut else factor


def _with_parts(factors: Factors) -> Factors:
    return tuple(part for each in factors for part in ((PARTS, _share(each)) if each.cut else (each,)))


def parsed(text: str) -> Axes:
    """Return the axes that a text describes; raise MalformedError if it describes none."""
    tokens, at = [], 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise MalformedError(f"{quoted(text)} is not a list of axes, as in 'h r 2, i' or '(q|k|k), i'")
        tokens.append(match)
        at = match.end()
    dimensions, outer, sections, inner = [], list[Factor](), list[list[Factor]](), list[Factor]()
    inside = whole = False
    for match in tokens:
        word, cut, number, mark = match.groups()
        if mark == "(" and not inside and not sections:
            inside, sections = True, [[]]
        elif mark == "|" and inside:
            sections.append([])
        elif mark and mark[0] == ")" and inside and len(sections) > 1 and all(sections):
            inside, whole = False, mark != ")"
        elif mark == "," and not inside and (outer or sections or inner):
            dimensions.append(_dimension(outer, sections, inner, whole))
            outer, sections, inner, whole = [], [], [], False
        elif not mark and len(number or "") <= MOST_DIGITS:
            (sections[-1] if inside else inner if sections else outer).append(
                Factor(word or "", int(number or 0), bool(cut))
            )
        else:
            odd = repr((mark or number)[:40])
            raise MalformedError(f"{quoted(text)}: {odd} is not expected there; sections are written (q|k|v), i")
    if inside or (tokens and not (outer or sections or inner)) or len(tokens) > _MOST:
        raise MalformedError(f"{quoted(text)} ends too early, or has more than {_MOST} words and marks")
    axes = (*dimensions, _dimension(outer, sections, inner, whole)) if tokens else ()
    if prod(len(dimension.sections) for dimension in axes) > _MOST:
        raise MalformedError(f"{quoted(text)} has more than {_MOST} blocks of sections")
    return axes


def _dimension(outer: list[Factor], sections: list[list[Factor]], inner: list[Factor], cut: bool) -> Dimension:
    return Dimension(tuple(outer), tuple(map(tuple, sections)) or ((),), tuple(inner), cut)


def all_tags(leaf: Leaf) -> list[Tag | None]:
    """Return the tag of each factor; None for the number 1."""
    before: Counter[tuple[str, int]] = Counter()
    tags: list[Tag | None] = []
    for key in ((each.symbol, each.number) for each in leaf.factors):
        tags.append(None if key == ("", 1) else (*key, before[key]))
        before[key] += 1
    return tags


def steps_of(leaf: Leaf, stride: Sequence[int], known: Mapping[str, int]) -> tuple[int, dict[Tag, int]]:
    """Return where a block of a tensor begins, and the distance between neighbours along each factor, in elements."""
    begin, steps, tags = 0, dict[Tag, int](), iter(all_tags(leaf))
    for dimension, section, step in zip(leaf.axes, leaf.sections, stride):
        inner = sizes(dimension.inner, known)
        widths = [sizes(each, known) for each in dimension.sections]
        begin += sum(widths[:section]) * inner * step
        parts = (
            (dimension.outer, step * inner * sum(widths)),
            (dimension.sections[section], step * inner),
            (dimension.inner, step),
        )
        for factors, unit in parts:
            for at, _ in enumerate(factors):
                tag = next(tags)
                if tag is not None:
                    steps[tag] = unit * sizes(factors[at + 1 :], known)
    return begin, steps


def grid_of(leaf: Leaf, known: Mapping[str, int]) -> Iterator[tuple[tuple[Any, ...], int, bool]]:
    """Yield the axes of the grid: factors, the offset of the block, and whether these are the sections."""
    for dimension, section in zip(leaf.axes, leaf.sections):
        yield from (((each,), 0, False) for each in dimension.outer)
        yield dimension.sections[section], sum(sizes(each, known) for each in dimension.sections[:section]), True
        yield from (((each,), 0, False) for each in dimension.inner)


def merged(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a view with as few dimensions as possible: neighbours that are one run become one."""
    merged: list[tuple[int, int]] = []
    for size, step in zip(shape, stride):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = merged[-1][0] * size, step
        else:
            merged.append((size, step))
    return tuple(size for size, _ in merged), tuple(step for _, step in merged)
