"""What is known of many numbers: extremes, sums, deviations, a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

from .loads import need_torch

#: Elements computed with in one go: they and their intermediate results stay in the processor's cache.
STEP: Final = 1 << 19


class Rule(NamedTuple):
    """How elements become numbers: (element - zero point) * scale, negated.

    ``scales`` and ``zero_points`` are empty for plain elements, else there is one for each channel: ``inner`` elements
    in a row are of one channel, and the channels go round.
    """

    dtype: str
    scales: Sequence[float] = ()
    zero_points: Sequence[float] = ()
    inner: int = 1
    negated: bool = False
    #: numbers in all, where the last byte holds less than it could
    numel: int = -1


class Measured(NamedTuple):
    """What is known of some numbers. All but the counts is about the ``finite`` ones, and None where there is none.

    ``low`` and ``high`` are exact integers for integers. ``std`` is that of a sample (divided by n - 1), None for one
    number; ``norm`` is the L2 norm. ``counts`` are those of equal bins between ``edges``.
    """

    finite: int
    nans: int
    infs: int
    zeros: int
    low: int | float | None = None
    high: int | float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    counts: tuple[int, ...] = ()
    edges: tuple[float, ...] = ()


def measure(pieces: Callable[[], Iterable[bytes]], rule: Rule, bins: int) -> Measured:
    """Measure the elements in ``pieces()``, little-endian bytes of whole elements; they are gone through twice.

    Complex numbers count by their absolute value. Sums are exact for integers, and pairwise in float64 for the rest.
    Raises UnreadableError where torch is not installed.
    """
    torch = need_torch("computing with values")
    look = _Look()
    kept: list[Any] = []
    for number, values in enumerate(_numbers(torch, pieces(), rule)):
        # What fits into one step is not read twice.
        kept = [values] if number == 0 else []
        look.add(torch, values)
    if look.finite == 0:
        return Measured(0, look.nans, look.infs, look.zeros)
    again = kept or _numbers(torch, pieces(), rule)
    return _spread(torch, again, look, bins)


class _Look:
    """The first pass: how many, from where to where, their sum."""

    def __init__(self) -> None:
        self.finite = self.nans = self.infs = self.zeros = 0
        self.low: Any = math.inf
        self.high: Any = -math.inf
        self.bias = 0
        self.sums: list[Any] = []

    def add(self, torch: Any, values: tuple[Any, int]) -> None:
        numbers, bias = values
        if not len(numbers):
            return
        low, high = (bound.item() for bound in torch.aminmax(numbers))
        if numbers.dtype == torch.int64:
            low, high = low + bias, high + bias
            self.sums.append(_exact_sum(numbers) + bias * len(numbers))
        elif not (math.isfinite(low) and math.isfinite(high)):
            nans = int(torch.isnan(numbers).sum())
            self.nans += nans
            self.infs += int(torch.isinf(numbers).sum())
            numbers = numbers[torch.isfinite(numbers)]
            self.add(torch, (numbers, 0))
            return
        else:
            self.sums.append(_sum(numbers, max(-low, high)))
        self.finite += len(numbers)
        if low <= 0 <= high:
            self.zeros += len(numbers) - int((numbers != -bias).sum())
        self.low, self.high = min(self.low, low), max(self.high, high)

    @property
    def total(self) -> Fraction:
        if len(self.sums) == 1 and isinstance(self.sums[0], float):
            return Fraction(self.sums[0])
        return sum(map(Fraction, self.sums), Fraction())


def _exact_sum(numbers: Any) -> int:
    """The sum of at most 2**19 integers of 64 bits, none lost."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _sum(numbers: Any, bound: float) -> float | Fraction:
    if bound < 1e290:
        return float(numbers.sum())
    return Fraction(float((numbers * 2.0**-64).sum())) * (1 << 64)


def _spread(torch: Any, pieces: Iterable[tuple[Any, int]], look: _Look, bins: int) -> Measured:
    """The second pass: deviations from the mean, and the histogram."""
    low, high = look.low, look.high
    mean = look.total / look.finite
    whole = isinstance(low, int)
    # Squares neither overflow nor vanish between these bounds; beyond them everything is scaled by a power of two.
    bound = max(abs(low), abs(high))
    shift = -math.frexp(bound)[1] if not whole and bound and not 1e-130 < bound < 1e130 else 0
    factor = (_power(shift // 2), _power(shift - shift // 2)) if shift else (1.0, 1.0)
    base = low if whole else low * factor[0] * factor[1]
    width = float(high - low) if whole else high * factor[0] * factor[1] - base
    middle = float((mean - low) if whole else mean * Fraction(2) ** shift)
    squares = 0.0
    counts = [0] * bins
    for numbers, bias in pieces:
        if numbers.dtype == torch.int64:
            # Distances from the smallest: exact as long as they fit into 64 bits.
            numbers = (numbers - (low - bias)).double() if high - low < 1 << 62 else numbers.double() - (low - bias)
            distance = numbers
        else:
            if look.nans or look.infs:
                numbers = numbers[torch.isfinite(numbers)]
            if shift:
                numbers = numbers * factor[0] * factor[1]
            distance = numbers - base
        if width:
            deviation = numbers - middle
            squares += float(torch.dot(deviation, deviation))
            place = distance.mul_(bins / width).to(torch.uint8)
            for number, count in enumerate(torch.bincount(place, minlength=bins).tolist()):
                counts[min(number, bins - 1)] += count
    # Deviations from the smallest number have another mean than the numbers themselves.
    center = float(mean) if whole else middle
    norm = math.hypot(math.sqrt(squares), math.sqrt(look.finite) * abs(center))
    std = math.sqrt(squares / (look.finite - 1)) if look.finite > 1 else None
    return Measured(
        look.finite,
        look.nans,
        look.infs,
        look.zeros,
        low,
        high,
        float(mean),
        None if std is None else _scaled(std, -shift),
        _scaled(norm, -shift),
        tuple(counts) if width else (look.finite,),
        _edges(low, high, bins) if width else (float(low), float(high)),
    )


def _power(exponent: int) -> float:
    return math.ldexp(1.0, exponent)


def _scaled(value: float, shift: int) -> float:
    try:
        return math.ldexp(value, shift)
    except OverflowError:
        return math.inf


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    start, end = float(low), float(high)
    inner = (start * (1 - step / bins) + end * (step / bins) for step in range(1, bins))
    return (start, *inner, end)


def _numbers(torch: Any, pieces: Iterable[bytes], rule: Rule) -> Iterator[tuple[Any, int]]:
    """At most 2**19 numbers at a time: float64, or int64 and what must be added to them."""
    at = 0
    for data in pieces:
        raw = torch.frombuffer(bytearray(data), dtype=getattr(torch, _BYTES_OF.get(rule.dtype, rule.dtype)))
        for begin in range(0, len(raw), STEP):
            numbers, bias = _plain(torch, raw[begin : begin + STEP], rule.dtype)
            if rule.numel >= 0:
                numbers = numbers[: rule.numel - at]
            if rule.scales:
                numbers = _dequantized(torch, numbers, rule, at)
            at += len(numbers)
            yield (-numbers if rule.negated else numbers), bias


#: Dtypes that are computed with as another one of the same width.
_BYTES_OF: Final = {
    "uint64": "int64",
    "bool": "uint8",
    "qint8": "int8",
    "quint8": "uint8",
    "qint32": "int32",
    "quint4x2": "uint8",
    "quint2x4": "uint8",
    "float4_e2m1fn_x2": "uint8",
}


#: The values of float4_e2m1fn, by code.
_FOUR: Final = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def _plain(torch: Any, raw: Any, dtype: str) -> tuple[Any, int]:
    if dtype == "uint64":
        # In the order of the unsigned numbers: the smallest is the smallest int64.
        return raw ^ -(1 << 63), 1 << 63
    if dtype in ("quint4x2", "float4_e2m1fn_x2"):
        codes = torch.stack((raw & 15, raw >> 4), 1).flatten().to(torch.int64)
        return (codes, 0) if dtype == "quint4x2" else (torch.tensor(_FOUR, dtype=torch.float64)[codes], 0)
    if dtype == "quint2x4":
        return torch.stack([raw >> shift & 3 for shift in (0, 2, 4, 6)], 1).flatten().to(torch.int64), 0
    if dtype == "bool":
        return (raw != 0).to(torch.int64), 0
    if dtype.startswith("complex"):
        pairs = torch.view_as_real(raw).double()
        size = torch.view_as_complex(pairs).abs()
        # An element with a NaN is none, also beside an infinity.
        return torch.where(torch.isnan(pairs).any(1), math.nan, size), 0
    if dtype.startswith("float8"):
        raw = raw.to(torch.float32)
    return raw.to(torch.float64 if raw.is_floating_point() else torch.int64), 0


def _dequantized(torch: Any, numbers: Any, rule: Rule, at: int) -> Any:
    numbers = numbers.double()
    if len(rule.scales) == 1:
        return (numbers - rule.zero_points[0]) * rule.scales[0]
    channel = (torch.arange(at, at + len(numbers)) // rule.inner) % len(rule.scales)
    scales, zero_points = (torch.tensor(part, dtype=torch.float64) for part in (rule.scales, rule.zero_points))
    return (numbers - zero_points[channel]) * scales[channel]
