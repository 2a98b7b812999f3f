"""Statistics of many numbers: extremes, sums, deviations, a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Any, Final, NamedTuple

from ...base.dtypes import is_complex
from ..elements import tensor_size
from ..interpretation import Reading
from .loads import need_torch, torch_dtype

#: Elements computed with at a time: they and their intermediate results stay in the processor's cache.
STEP: Final = 1 << 19


class ElementRule(NamedTuple):
    """The rule by which elements become numbers: (element - zero point) * scale, negated.

    ``scales`` and ``zero_points`` are empty for plain elements, else there is one for each channel: ``inner`` elements
    in a row belong to one channel, and the channels repeat.
    """

    dtype: str
    scales: Sequence[float] = ()
    zero_points: Sequence[float] = ()
    inner: int = 1
    negated: bool = False
    #: numbers in total, where the last byte holds fewer than it could; -1 elsewhere
    numel: int = -1


def rule_of(reading: Reading) -> ElementRule:
    """Return the rule for the elements of a reading."""
    tensor, affine = reading.tensor, reading.affine
    scales, zero_points = (affine.scales, affine.zero_points) if affine is not None else ((), ())
    inner = prod(tensor.shape[affine.axis + 1 :]) if affine is not None and affine.axis >= 0 else 1
    packed = tensor.dtype.startswith("quint") and tensor_size(tensor) != tensor.numel
    return ElementRule(tensor.dtype, scales, zero_points, inner, reading.negated, tensor.numel if packed else -1)


class Measured(NamedTuple):
    """Statistics of some numbers. All but the counts describe the ``finite`` ones, and are None where there are none.

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


def measure(pieces: Callable[[], Iterable[bytes]], rule: ElementRule, bins: int) -> Measured:
    """Measure the elements in ``pieces()``, little-endian bytes of whole elements, which are read twice.

    Complex numbers count by their absolute value. Sums are exact for integers, and pairwise in float64 for the rest.
    Raises UnreadableError where torch is not installed.
    """
    torch = need_torch("computing with values")
    totals = _Totals()
    kept: list[Any] = []
    for number, values in enumerate(numbers_of(torch, pieces(), rule)):
        # What fits into one step is not read twice.
        kept = [values] if number == 0 else []
        totals.add(torch, *values)
    if totals.finite == 0:
        return Measured(*totals.counts)
    return _measured(torch, kept or numbers_of(torch, pieces(), rule), totals, bins)


class _Totals:
    """The first pass: counts, extremes and the sum."""

    def __init__(self) -> None:
        self.finite = self.nans = self.infs = self.zeros = 0
        self.low: Any = math.inf
        self.high: Any = -math.inf
        self.sums: list[float | Fraction] = []

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.finite, self.nans, self.infs, self.zeros

    def add(self, torch: Any, numbers: Any, bias: int) -> None:
        if not len(numbers):
            return
        low, high = (bound.item() for bound in torch.aminmax(numbers))
        if numbers.dtype == torch.int64:
            low, high = low + bias, high + bias
            self.sums.append(Fraction(_exact_sum(numbers) + bias * len(numbers)))
        elif not (math.isfinite(low) and math.isfinite(high)):
            self.nans += int(torch.isnan(numbers).sum())
            self.infs += int(torch.isinf(numbers).sum())
            self.add(torch, numbers[torch.isfinite(numbers)], 0)
            return
        elif max(-low, high) < 1e290:
            self.sums.append(float(numbers.sum()))
        else:  # the sum could overflow
            self.sums.append(Fraction(float((numbers * 2.0**-64).sum())) * (1 << 64))
        self.finite += len(numbers)
        if low <= 0 <= high:
            self.zeros += len(numbers) - int((numbers != -bias).sum())
        self.low, self.high = min(self.low, low), max(self.high, high)


def _exact_sum(numbers: Any) -> int:
    """Return the exact sum of at most 2**19 integers of 64 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _measured(torch: Any, pieces: Iterable[tuple[Any, int]], totals: _Totals, bins: int) -> Measured:
    """Run the second pass: deviations from the mean, and the histogram."""
    low, high = totals.low, totals.high
    mean = sum((Fraction(part) for part in totals.sums), Fraction()) / totals.finite
    whole = isinstance(low, int)
    # Squares neither overflow nor vanish between these bounds; beyond them everything is scaled by a power of two.
    bound = max(abs(low), abs(high))
    shift = -math.frexp(bound)[1] if not whole and bound and not 1e-130 < bound < 1e130 else 0
    # In two steps, each of which is a float.
    factor = (math.ldexp(1.0, shift // 2), math.ldexp(1.0, shift - shift // 2))
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
            if totals.nans or totals.infs:
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
    norm = math.hypot(math.sqrt(squares), math.sqrt(totals.finite) * abs(center))
    std = math.sqrt(squares / (totals.finite - 1)) if totals.finite > 1 else None
    return Measured(
        *totals.counts,
        low,
        high,
        float(mean),
        None if std is None else _scaled(std, -shift),
        _scaled(norm, -shift),
        tuple(counts) if width else (totals.finite,),
        _edges(low, high, bins) if width else (float(low), float(high)),
    )


def _scaled(value: float, shift: int) -> float:
    try:
        return math.ldexp(value, shift)
    except OverflowError:
        return math.inf


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    start, end = float(low), float(high)
    inner = (start * (1 - step / bins) + end * (step / bins) for step in range(1, bins))
    return (start, *inner, end)


def numbers_of(
    torch: Any, pieces: Iterable[bytes], rule: ElementRule, modulus: bool = True
) -> Iterator[tuple[Any, int]]:
    """Yield at most 2**19 numbers at a time: float64, or int64 and the integer that must be added to them.

    Complex numbers come as their absolute values, without ``modulus`` as complex128.
    """
    at = 0
    for data in pieces:
        raw = torch.frombuffer(bytearray(data), dtype=torch_dtype(torch, _BYTES_OF.get(rule.dtype, rule.dtype)))
        for begin in range(0, len(raw), STEP):
            numbers, bias = _plain(torch, raw[begin : begin + STEP], rule.dtype, modulus)
            if rule.numel >= 0:
                numbers = numbers[: rule.numel - at]
            if rule.scales:
                numbers = _dequantized(torch, numbers, rule, at)
            at += len(numbers)
            yield (-numbers if rule.negated else numbers), bias


#: Dtypes that torch cannot compute with -> one of the same width that it can.
_BYTES_OF: Final = {
    **{"uint64": "int64", "bool": "uint8", "qint8": "int8", "quint8": "uint8", "qint32": "int32"},
    **{"quint4x2": "uint8", "quint2x4": "uint8", "float4_e2m1fn_x2": "uint8", "bcomplex32": "bfloat16"},
}
#: The values of float4_e2m1fn, by code.
_FOUR: Final = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def _plain(torch: Any, raw: Any, dtype: str, modulus: bool) -> tuple[Any, int]:
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
    if is_complex(dtype):
        pairs = (torch.view_as_real(raw) if raw.is_complex() else raw.view(-1, 2)).double()
        size = torch.view_as_complex(pairs)
        if not modulus:
            return size, 0
        size = size.abs()
        # An element with a NaN counts as NaN, even beside an infinity.
        return torch.where(torch.isnan(pairs).any(1), math.nan, size), 0
    if dtype.startswith("float8"):
        raw = raw.to(torch.float32)
    return raw.to(torch.float64 if raw.is_floating_point() else torch.int64), 0


def _dequantized(torch: Any, numbers: Any, rule: ElementRule, at: int) -> Any:
    numbers = numbers.double()
    if len(rule.scales) == 1:
        return (numbers - rule.zero_points[0]) * rule.scales[0]
    channel = (torch.arange(at, at + len(numbers)) // rule.inner) % len(rule.scales)
    scales, zero_points = (torch.tensor(part, dtype=torch.float64) for part in (rule.scales, rule.zero_points))
    return (numbers - zero_points[channel]) * scales[channel]
