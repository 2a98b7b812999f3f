"""How far the numbers of two tensors are apart: the largest and the mean difference, relative L2, cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Final, NamedTuple

from .loads import need_torch
from .measure import ElementRule, numbers_of

#: float64 squares neither overflow nor vanish between these bounds; beyond them numbers are scaled by a power of two.
_LARGE, _SMALL = 1e130, 1e-130
#: Dtypes that reach beyond these bounds.
_WIDE: Final = frozenset(("float64", "complex128"))
#: Differences of integers below this do not overflow 64 bits.
_EXACT: Final = float(1 << 62)


class Distance(NamedTuple):
    """How far b is from a, summed over pairs of numbers; sums are exact, so that they can be added in any order.

    ``nonfinite`` counts the pairs without a difference: NaN or infinite in one, something else in the other. NaN equals
    NaN, and an infinite number itself. All but the counts are over the ``finite`` pairs, finite in both. ``differing``
    are unequal, ``first`` is the number of the first of them (-1 for none), and ``far`` violate
    |a - b| <= atol + rtol * |b|.
    """

    finite: int = 0
    nonfinite: int = 0
    differing: int = 0
    first: int = -1
    far: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    total: Fraction = Fraction()
    squares: Fraction = Fraction()
    a_squares: Fraction = Fraction()
    b_squares: Fraction = Fraction()
    product: Fraction = Fraction()

    def plus(self, other: Distance) -> Distance:
        """Return the distance over the pairs of both; ``first`` is that of this one."""
        return Distance(
            self.finite + other.finite,
            self.nonfinite + other.nonfinite,
            self.differing + other.differing,
            self.first,
            self.far + other.far,
            max(self.largest, other.largest),
            max(self.largest_relative, other.largest_relative),
            self.total + other.total,
            self.squares + other.squares,
            self.a_squares + other.a_squares,
            self.b_squares + other.b_squares,
            self.product + other.product,
        )

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
        return _float(self.total / self.finite) if self.finite else None

    @property
    def rel_l2(self) -> float | None:
        """The L2 norm of a - b over that of b; None if b is all zeros."""
        return _root(self.squares / self.b_squares) if self.b_squares else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between a and b, complex numbers as pairs; None if either is all zeros."""
        if not self.a_squares or not self.b_squares:
            return None
        size = _root(self.product**2 / (self.a_squares * self.b_squares))
        return None if size is None else min(size, 1.0) * (-1 if self.product < 0 else 1)


def distance(
    a: Iterable[bytes], b: Iterable[bytes], rules: tuple[ElementRule, ElementRule], rtol: float, atol: float
) -> Distance:
    """Measure how far elements are apart, given as little-endian pieces that have as many numbers on both sides.

    Numbers of different dtypes are compared in float64, integers exactly. Raises UnreadableError where torch is not
    installed.
    """
    torch = need_torch("comparing values as numbers")
    whole = Distance()
    sides = (numbers_of(torch, data, rule, False) for data, rule in zip((a, b), rules))
    wide = any(rule.dtype in _WIDE or rule.scales for rule in rules)
    at = 0
    for (left, bias), (right, other_bias) in zip(*sides):
        part = _distance(torch, (left, bias), (right, other_bias), wide, rtol, atol)
        first = at + part.first if part.first >= 0 > whole.first else whole.first
        whole = whole.plus(part)._replace(first=first)
        at += len(left)
    return whole


def _distance(torch: Any, a: tuple[Any, int], b: tuple[Any, int], wide: bool, rtol: float, atol: float) -> Distance:
    left, right = (side if side.is_complex() else side.double() + float(bias) for side, bias in (a, b))
    if left.is_complex() or right.is_complex():
        left, right = left.to(torch.complex128), right.to(torch.complex128)
    exact = None
    if a[0].dtype == b[0].dtype == torch.int64 and a[1] == b[1]:
        exact = (a[0] - b[0]).double().abs_()
    unequal = left != right if exact is None else a[0] != b[0]
    nonfinite = 0
    if not bool(torch.isfinite((left - right).sum())):
        finite = torch.isfinite(left) & torch.isfinite(right)
        unequal &= ~(torch.isnan(left) & torch.isnan(right))
        nonfinite = int((unequal & ~finite).sum())
        left, right = left[finite], right[finite]
    differing = int(unequal.sum())
    first = int(unequal.to(torch.uint8).argmax()) if differing else -1
    if not len(left):
        return Distance(0, nonfinite, differing, first, nonfinite)
    shift = min(_shift(torch, left), _shift(torch, right)) if wide else 0
    gaps = (_scaled(left, shift) - _scaled(right, shift)).abs()
    if exact is not None:
        gaps = torch.where(gaps < _EXACT, exact, gaps)
    size = _scaled(right, shift).abs()
    far = int((gaps > size.mul(rtol).add_(_ldexp(atol, shift))).sum())
    relative = torch.where(size > 0, gaps / size, 0.0)
    # Each of the three by itself: one may vanish beside another. Products and sums, as torch.dot starts threads, which
    # for so few numbers takes a hundred times longer.
    parts = [torch.view_as_real(part).flatten() if part.is_complex() else part for part in (gaps, left, right)]
    shifts = [_shift(torch, part) if wide else 0 for part in parts]
    gap, one, other = (_scaled(part, own) for part, own in zip(parts, shifts))
    return Distance(
        len(gaps),
        nonfinite,
        differing,
        first,
        far + nonfinite,
        _ldexp(float(gaps.max()), -shift),
        float(relative.max()),
        _exact(gaps.sum(), shift),
        _exact((gap * gap).sum(), 2 * (shift + shifts[0])),
        _exact((one * one).sum(), 2 * shifts[1]),
        _exact((other * other).sum(), 2 * shifts[2]),
        _exact((one * other).sum(), shifts[1] + shifts[2]),
    )


def _shift(torch: Any, values: Any) -> int:
    """Return the power of two that brings the largest to about 1, 0 if the numbers need none."""
    size = float((torch.view_as_real(values) if values.is_complex() else values).abs().max())
    return -math.frexp(size)[1] if size and not _SMALL < size < _LARGE else 0


def _scaled(values: Any, shift: int) -> Any:
    # In two steps, each of which is a float.
    return values * math.ldexp(1.0, shift // 2) * math.ldexp(1.0, shift - shift // 2) if shift else values


def _exact(value: Any, shift: int) -> Fraction:
    number = Fraction(float(value))
    return number / (1 << shift) if shift > 0 else number * (1 << -shift)


def _ldexp(value: float, shift: int) -> float:
    try:
        return math.ldexp(value, shift)
    except OverflowError:
        return math.inf


def _float(value: Fraction) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _root(value: Fraction) -> float | None:
    """Return the square root, None beyond float64."""
    if not value:
        return 0.0
    half = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    root = _ldexp(math.sqrt(value / Fraction(4) ** half), half)
    return root if math.isfinite(root) else None
