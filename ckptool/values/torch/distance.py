"""How far the numbers of two tensors are apart: the largest and the mean difference, relative L2, cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

from ...base.records import NamedTuple
from ..elements import BitDifference, Filling, filling
from ..interpretation import Reading, resolved_bytes
from .blocks import PACKED, ElementRule, doubles, rule_of
from .loads import need_torch
from .measure import Block, blocks, factors_of, shift_of

#: Dtypes whose range exceeds these bounds.
_WIDE: Final = frozenset(("float64", "complex128"))
#: Numbers of each side compared at a time. They and the intermediate results fit in the cache.
_SLICE: Final = 1 << 15
#: Distances of so many parts are added at a time, because adding fractions one by one takes as long as computing them.
_TOGETHER: Final = 64
#: Integer differences below this do not overflow 64 bits.
_EXACT: Final = float(1 << 62)


class Distance(NamedTuple):
    """How far b is from a, summed over pairs of numbers. Sums are added exactly, so in any order.

    ``nonfinite`` counts the pairs without a difference: one number is NaN or infinite, the other is not the same. NaN
    equals NaN, and an infinite number equals itself. All fields except the counts cover the ``finite`` pairs, which are
    finite in both. ``differing`` counts unequal pairs, ``first`` is the index of the first of them (-1 if none), and
    ``far`` counts pairs that violate |a - b| <= atol + rtol * |b|.
    """

    finite: int = 0
    nonfinite: int = 0
    differing: int = 0
    first: int = -1
    far: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    total: Fraction | float = 0.0
    squares: Fraction | float = 0.0
    a_squares: Fraction | float = 0.0
    b_squares: Fraction | float = 0.0
    product: Fraction | float = 0.0

    @property
    def max_abs(self) -> float | None:
        """The largest |a - b|; None without finite pairs, or beyond float64."""
        return self.largest if self.finite and math.isfinite(self.largest) else None

    @property
    def max_rel(self) -> float | None:
        """The largest |a - b| / |b| where b is not 0; None without finite pairs, or beyond float64."""
        return self.largest_relative if self.finite and math.isfinite(self.largest_relative) else None

    @property
    def mean_abs(self) -> float | None:
        """The mean |a - b|; None without finite pairs."""
        return _ratio(self.total, self.finite) if self.finite else None

    @property
    def rel_l2(self) -> float | None:
        """The L2 norm of a - b divided by the L2 norm of b; None if b is all zeros."""
        (one, parts), (other, other_parts) = (part.as_integer_ratio() for part in (self.squares, self.b_squares))
        return _root(one * other_parts, parts * other) if other else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between a and b, with complex numbers as pairs; None if either is all zeros."""
        if not self.a_squares or not self.b_squares:
            return None
        sums = self.a_squares, self.b_squares, self.product
        (one, parts), (other, other_parts), (product, product_parts) = (part.as_integer_ratio() for part in sums)
        size = _root(product**2 * (parts * other_parts), product_parts**2 * (one * other))
        return None if size is None else min(size, 1.0) * (-1 if self.product < 0 else 1)


def total(parts: Sequence[Distance]) -> Distance:
    """Return the distance over the pairs of all parts, which follow one another."""
    if len(parts) == 1:
        return parts[0]
    columns = tuple(zip(*parts)) or tuple((value,) for value in Distance())
    finite, nonfinite, differing, firsts, far, largest, largest_relative, *sums = columns
    counts = sum(finite), sum(nonfinite), sum(differing), next((first for first in firsts if first >= 0), -1), sum(far)
    return Distance(*counts, max(largest), max(largest_relative), *map(_exact_sum, sums))


def _exact_sum(numbers: Iterable[Fraction | float]) -> Fraction:
    """Return the sum. All denominators are powers of two, and integers add up much faster than fractions."""
    numerators: dict[int, int] = {}
    for number in numbers:
        numerator, denominator = number.as_integer_ratio()
        numerators[denominator] = numerators.get(denominator, 0) + numerator
    most = max(numerators, default=1)
    return Fraction(sum(numerator * (most // denominator) for denominator, numerator in numerators.items()), most)


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
        if len(found) == _TOGETHER:
            found = [total(found)]
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


def _resolved_rule(reading: Reading) -> ElementRule:
    """Return the rule for the elements that ``resolved_bytes`` yields."""
    rule = rule_of(reading)
    return rule._replace(negated=False) if rule.negated else rule  # the bytes are already resolved


def _blocks(
    torch: Any, one: Reading, other: Reading, tolerance: tuple[float, float]
) -> Iterator[tuple[tuple[Block, Block], Distance]]:
    """Yield pairs of blocks, with their distance."""
    rules = [_resolved_rule(side) for side in (one, other)]
    named = zip(("a", "b"), (one, other), rules)
    sides = [blocks(torch, _bytes_of(side), rule, name) for name, side, rule in named]
    wide = any(rule.dtype in _WIDE or rule.scales for rule in rules)
    at, known = 0, False
    for left, right in zip(*sides):
        count = len(left.numbers)
        same = rules[0] == rules[1] and _same_bits(torch, left.raw, right.raw)
        found = [_no_distance(torch, left, wide)] if same else []
        for begin in range(0, 0 if same else count, _SLICE):
            here = slice(begin, begin + _SLICE)
            one_slice, other_slice = (block._replace(numbers=block.numbers[here]) for block in (left, right))
            part, unequal = _distance(torch, one_slice, other_slice, wide, tolerance)
            if part.differing and not known:
                known, part = True, part._replace(first=at + begin + int(unequal.to(torch.uint8).argmax()))
            found.append(part)
        yield (left, right), total(found)
        at += count


def _bytes_of(reading: Reading) -> Iterable[bytes] | Filling:
    """Return the resolved bytes of a tensor, or a function that reads them straight into memory."""
    as_stored = not (reading.negated or reading.conjugated) and reading.tensor.dtype not in PACKED
    return (filling(reading.storage, reading.tensor) if as_stored else None) or resolved_bytes(reading)


def _same_bits(torch: Any, a: Any, b: Any) -> bool:
    return bool(
        torch.equal(*((torch.view_as_real(raw) if raw.is_complex() else raw).view(torch.uint8) for raw in (a, b)))
    )


def _no_distance(torch: Any, block: Block, wide: bool) -> Distance:
    """Return the distance of a block's numbers from themselves."""
    found = []
    for begin in range(0, len(block.numbers), _SLICE):
        here = block.numbers[begin : begin + _SLICE]
        numbers = here if here.is_complex() else doubles(torch, here, block.bias)
        if not bool(torch.isfinite(numbers.sum())):
            numbers = numbers[torch.isfinite(numbers)]
        if not len(numbers):
            continue
        count = len(numbers)
        numbers = torch.view_as_real(numbers).flatten() if numbers.is_complex() else numbers
        shift = _shift(torch, numbers) if wide else 0
        scaled = _scaled(numbers, shift)
        square = _exact(torch.dot(scaled, scaled), 2 * shift)
        found.append(Distance(count, a_squares=square, b_squares=square, product=square))
    return total(found)


def _distance(torch: Any, a: Block, b: Block, wide: bool, tolerance: tuple[float, float]) -> tuple[Distance, Any]:
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
    gaps, size, shift = apart.abs(), right.abs(), 0
    rtol, atol = tolerance
    far = (gaps > size.mul(rtol).add_(atol)) if tolerance != (0.0, 0.0) else None
    relative = gaps / size
    if wide and not math.isfinite(float(gaps.max())):
        # Some gaps are beyond float64: scaled, they are not. Small numbers would vanish, and count as they are.
        shift = min(_shift(torch, left), _shift(torch, right))
        vast, gaps = ~torch.isfinite(gaps), (_scaled(left, shift) - _scaled(right, shift)).abs()
        large = _scaled(right, shift).abs()
        relative = torch.where(vast, gaps / large, relative)
        far = None if far is None else torch.where(vast, gaps > large.mul(rtol).add_(_ldexp(atol, shift)), far)
    if not size.min() > 0:
        relative = torch.where(size > 0, relative, 0.0)
    # Scale each of the three separately: one may be tiny compared with another.
    numbers = [torch.view_as_real(part).flatten() if part.is_complex() else part for part in (gaps, left, right)]
    shifts = [_shift(torch, part) if wide else 0 for part in numbers]
    gap, ours, theirs = (_scaled(part, own) for part, own in zip(numbers, shifts))
    found = Distance(
        len(gaps),
        nonfinite,
        differing,
        -1,
        (differing if far is None else int(far.sum()) + nonfinite),
        _ldexp(float(gaps.max()), -shift),
        float(relative.max()),
        _exact(gap.sum(), shift + shifts[0]),
        _exact(torch.dot(gap, gap), 2 * (shift + shifts[0])),
        _exact(torch.dot(ours, ours), 2 * shifts[1]),
        _exact(torch.dot(theirs, theirs), 2 * shifts[2]),
        _exact(torch.dot(ours, theirs), shifts[1] + shifts[2]),
    )
    return found, unequal


def _shift(torch: Any, values: Any) -> int:
    """Return the power of two that brings the largest number to about 1; 0 if no scaling is needed."""
    return shift_of(float((torch.view_as_real(values) if values.is_complex() else values).abs().max()))


def _scaled(values: Any, shift: int) -> Any:
    for factor in factors_of(shift):
        values = values * factor
    return values


def _exact(value: Any, shift: int) -> Fraction | float:
    if not shift:
        return float(value)
    number = Fraction(float(value))
    return number / (1 << shift) if shift > 0 else number * (1 << -shift)


def _ldexp(value: float, shift: int) -> float:
    try:
        return math.ldexp(value, shift)
    except OverflowError:
        return math.inf


def _ratio(value: Fraction | float, count: int) -> float | None:
    """Return the value for each of ``count``, or None beyond float64."""
    numerator, denominator = value.as_integer_ratio()
    try:
        return numerator / (denominator * count)
    except OverflowError:
        return None


def _root(numerator: int, denominator: int) -> float | None:
    """Return the square root of a fraction, which need not be reduced; None beyond float64."""
    if not numerator:
        return 0.0
    # Divide by a power of four, so that the quotient is about 1. Fractions would search for common divisors.
    half = (numerator.bit_length() - denominator.bit_length()) // 2
    if half > 0:
        denominator <<= 2 * half
    else:
        numerator <<= -2 * half
    size = _ldexp(math.sqrt(numerator / denominator), half)
    return size if math.isfinite(size) else None
