"""How far the numbers of two tensors are apart: the largest and the mean difference, relative L2, cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from ...base.records import NamedTuple
from ..elements import BitDifference, Filling, filling
from ..interpretation import Reading, resolved_bytes
from .loads import need_torch
from .measure import PACKED, Block, blocks, doubles, rule_of

#: Numbers of each side compared at a time. They and the intermediate results fit in the cache.
_SLICE: Final = 1 << 15
#: Integer differences below this do not overflow 64 bits.
_EXACT: Final = float(1 << 62)


class Distance(NamedTuple):
    """How far b is from a, summed over pairs of numbers.

    ``nonfinite`` counts the pairs without a difference: one number is NaN or infinite, the other is not the same. NaN
    equals NaN, and an infinite number equals itself. All fields except the counts cover the ``finite`` pairs, which are
    finite in both. ``differing`` counts unequal pairs, ``first`` is the index of the first of them (-1 if none), and
    ``far`` counts pairs that violate |a - b| <= atol + rtol * |b|. A figure whose sum is beyond float64 is None.
    """

    finite: int = 0
    nonfinite: int = 0
    differing: int = 0
    first: int = -1
    far: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    a_squares: float = 0.0
    b_squares: float = 0.0
    product: float = 0.0

    @property
    def max_abs(self) -> float | None:
        """The largest |a - b|; None without finite pairs."""
        return _finite(self.largest) if self.finite else None

    @property
    def max_rel(self) -> float | None:
        """The largest |a - b| / |b| where b is not 0; None without finite pairs."""
        return _finite(self.largest_relative) if self.finite else None

    @property
    def mean_abs(self) -> float | None:
        """The mean |a - b|; None without finite pairs."""
        return _finite(self.total / self.finite) if self.finite else None

    @property
    def rel_l2(self) -> float | None:
        """The L2 norm of a - b divided by the L2 norm of b; None if b is all zeros."""
        return _finite(math.sqrt(self.squares) / math.sqrt(self.b_squares)) if self.b_squares else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between a and b, with complex numbers as pairs; None if either is all zeros."""
        size = math.sqrt(self.a_squares) * math.sqrt(self.b_squares)
        cosine = _finite(self.product / size) if size else None
        return None if cosine is None else max(-1.0, min(cosine, 1.0))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def total(parts: Sequence[Distance]) -> Distance:
    """Return the distance over the pairs of all parts, which follow one another."""
    columns = tuple(zip(*parts)) or tuple((value,) for value in Distance())
    finite, nonfinite, differing, firsts, far, largest, largest_relative, *sums = columns
    counts = sum(finite), sum(nonfinite), sum(differing), next((first for first in firsts if first >= 0), -1), sum(far)
    return Distance(*counts, max(largest), max(largest_relative), *map(sum, sums))


class Compared(NamedTuple):
    """How far two tensors with equal shapes are apart.

    ``bits`` is None if the dtypes differ, or if an element is several numbers.
    """

    distance: Distance
    bits: BitDifference | None


def distance(one: Reading, other: Reading, tolerance: tuple[float, float]) -> Compared:
    """Measure how far two tensors with equal shapes are apart.

    ``tolerance`` is relative and absolute. Numbers of different dtypes are compared in float64, integers exactly. Raise
    MalformedError if bytes are missing, UnreadableError if torch is not installed.
    """
    torch = need_torch("comparing values as numbers")
    alike = one.tensor.dtype == other.tensor.dtype and one.tensor.dtype not in PACKED
    found: list[Distance] = []
    bits, at = BitDifference(), 0
    for pair, part in _blocks(torch, one, other, tolerance):
        found.append(part)
        if alike:
            bits = _bits(torch, *pair, bits, at)
        at += len(pair[0].numbers)
    return Compared(total(found), bits if alike else None)


def _bits(torch: Any, a: Block, b: Block, before: BitDifference, at: int) -> BitDifference:
    """Add the differing bits of two blocks, which begin at element ``at``, to the result ``before``."""
    left, right = (torch.view_as_real(block.raw) if block.raw.is_complex() else block.raw for block in (a, b))
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    unequal = left.view(same) != right.view(same)
    if len(unequal) != len(a.numbers) or unequal.dim() > 1:
        unequal = unequal.view(len(a.numbers), -1).any(1)  # one element is several numbers
    differing = int(torch.count_nonzero(unequal))
    if not differing:
        return before
    first = before.first if before.differing else at + int(unequal.to(torch.uint8).argmax())
    return BitDifference(first, before.differing + differing)


def _blocks(
    torch: Any, one: Reading, other: Reading, tolerance: tuple[float, float]
) -> Iterator[tuple[tuple[Block, Block], Distance]]:
    """Yield pairs of blocks, with their distance."""
    # The bytes that are read are resolved already.
    rules = [rule_of(side)._replace(negated=False) for side in (one, other)]
    sides = [blocks(torch, _bytes_of(side), rule, name) for name, side, rule in zip("ab", (one, other), rules)]
    at, known = 0, False
    for left, right in zip(*sides):
        found = []
        for begin in range(0, len(left.numbers), _SLICE):
            here = slice(begin, begin + _SLICE)
            one_slice, other_slice = (block._replace(numbers=block.numbers[here]) for block in (left, right))
            part, unequal = _distance(torch, one_slice, other_slice, tolerance)
            if part.differing and not known:
                known, part = True, part._replace(first=at + begin + int(unequal.to(torch.uint8).argmax()))
            found.append(part)
        yield (left, right), total(found)
        at += len(left.numbers)


def _bytes_of(reading: Reading) -> Iterable[bytes] | Filling:
    as_stored = not (reading.negated or reading.conjugated) and reading.tensor.dtype not in PACKED
    return (filling(reading.storage, reading.tensor) if as_stored else None) or resolved_bytes(reading)


def _distance(torch: Any, a: Block, b: Block, tolerance: tuple[float, float]) -> tuple[Distance, Any]:
    """Return the distance of two blocks without ``first``, and a mask of unequal numbers."""
    left, right = (
        side.numbers if side.numbers.is_complex() else doubles(torch, side.numbers, side.bias) for side in (a, b)
    )
    if left.is_complex() or right.is_complex():
        left, right = left.to(torch.complex128), right.to(torch.complex128)
    unequal = left != right
    difference = left - right
    if a.numbers.dtype == b.numbers.dtype == torch.int64 and a.bias == b.bias:
        unequal = a.numbers != b.numbers
        difference = torch.where(difference.abs() < _EXACT, (a.numbers - b.numbers).double(), difference)
    nonfinite = 0
    apart = difference
    if not bool(torch.isfinite(difference.sum())):
        finite = torch.isfinite(left) & torch.isfinite(right)
        unequal &= ~(torch.isnan(left) & torch.isnan(right))
        nonfinite = int((unequal & ~finite).sum())
        left, right, apart = left[finite], right[finite], difference[finite]
    differing = int(torch.count_nonzero(unequal))
    if not len(left):
        return Distance(0, nonfinite, differing, -1, nonfinite), unequal
    gaps, size = apart.abs(), right.abs()
    rtol, atol = tolerance
    far = (gaps > size.mul(rtol).add_(atol)) if tolerance != (0.0, 0.0) else None
    relative = gaps / size
    if not size.min() > 0:
        relative = torch.where(size > 0, relative, 0.0)
    gap, ours, theirs = (torch.view_as_real(x).flatten() if x.is_complex() else x for x in (gaps, left, right))
    counts = len(gaps), nonfinite, differing, -1, differing if far is None else int(far.sum()) + nonfinite
    products = (torch.dot(*pair) for pair in ((gap, gap), (ours, ours), (theirs, theirs), (ours, theirs)))
    return Distance(*counts, *map(float, (gaps.max(), relative.max(), gap.sum(), *products))), unequal
