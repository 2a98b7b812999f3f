"""Statistics of many numbers, read once: extremes, sums, deviations, a histogram, quantiles, channels.

Quantiles come from a sketch, which counts numbers by code: exact for elements of up to 16 bits, otherwise by their
first 8 significant bits. Sketches of parts add up to the sketch of the whole, in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from ...base.records import NamedTuple
from ..elements import Filling
from .blocks import SCRATCH, STEP, ElementRule, Layout, Part, doubles, modulus, numbers_of, parts, raw_blocks
from .loads import need_torch, torch_dtype

#: The quantiles of a tensor, in percent.
PERCENT: Final = (1, 5, 25, 50, 75, 95, 99)
#: Maximum number of groups of neighbouring channels.
_GROUPS: Final = 64
#: Up to this many numbers are sorted; for more, a sketch is faster.
SORTED: Final = 1 << 12
#: If the square of the mean is at most this part of the mean square, squares give the deviation without a second pass,
#: and lose at most 5 bits.
_CLOSE: Final = 1 - 2**-5
#: Squares neither overflow nor vanish between these bounds. Other numbers are scaled by a power of two.
SMALL, LARGE = 1e-130, 1e130


class Channels(NamedTuple):
    """The indices of the first dimension: their ``number``, and how many have only zeros (``dead``).

    ``rms`` are root mean squares of the finite numbers in equal groups of neighbours; the last group may be smaller.
    None means that a group has no finite numbers.
    """

    number: int
    dead: int
    rms: tuple[float | None, ...]


class Measured(NamedTuple):
    """Statistics of some numbers. All fields except the counts cover the ``finite`` numbers, and are None without any.

    ``low`` and ``high`` are exact integers for integers. ``std`` is the sample deviation (divided by n - 1), None for
    one number; ``norm`` is the L2 norm. ``counts`` are for equal bins between ``edges``. ``quantiles`` are the numbers
    at the ranks ceil(n * p / 100) for p in ``PERCENT``; ``magnitudes`` are the same for the absolute values and p = 50,
    99. Quantiles, magnitudes and counts have a relative error of at most ``error``, except for subnormal float64
    numbers.
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
    quantiles: tuple[int | float, ...] = ()
    magnitudes: tuple[float, ...] = ()
    error: float = 0.0
    channels: Channels | None = None

    @property
    def outlier_ratio(self) -> float | None:
        """The largest absolute value divided by the 99th percentile of the absolute values.

        None if that percentile is 0, or the ratio is beyond float64.
        """
        if self.low is None or self.high is None or not self.magnitudes[1]:
            return None
        ratio = float(max(abs(self.low), abs(self.high))) / self.magnitudes[1]
        return ratio if math.isfinite(ratio) else None


def groups_of(channels: int) -> int:
    """Return the number of groups for this many channels."""
    return -(-channels // group_size(channels))


def group_size(channels: int) -> int:
    """Return the number of channels in a group."""
    return max(-(-channels // _GROUPS), 1)


class Moments(NamedTuple):
    """The count of some numbers, their sum, and the sum of their squared distances from ``center``.

    These are fractions, so they can be added in any order.
    """

    numel: int = 0
    total: Fraction = Fraction()
    center: Fraction = Fraction()
    squares: Fraction = Fraction()

    def around(self, center: Fraction) -> Fraction:
        """Return the sum of the squared distances from another center."""
        gap = self.center - center
        return self.squares + gap * (2 * self.total - self.numel * (self.center + center))

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both."""
        if not self.numel:
            return other
        squares = self.squares + other.around(self.center)
        return Moments(self.numel + other.numel, self.total + other.total, self.center, squares)

    @property
    def deviations(self) -> Fraction:
        """The sum of the squared distances from the mean."""
        excess = (self.total - self.numel * self.center) ** 2 / self.numel
        return max(self.squares - excess, Fraction())


def root(numerator: int, denominator: int) -> float:
    """Return the square root of a fraction, which need not be reduced; infinity beyond float64."""
    if not numerator:
        return 0.0
    # Divide by a power of four, so that the quotient is about 1. Fractions would search for common divisors.
    half = (numerator.bit_length() - denominator.bit_length()) // 2
    if half > 0:
        denominator <<= 2 * half
    else:
        numerator <<= -2 * half
    try:
        return math.ldexp(math.sqrt(numerator / denominator), half)
    except OverflowError:
        return math.inf


def _mean_root(value: Fraction, count: int) -> float:
    """Return the square root of the value for each of ``count``."""
    return root(value.numerator, value.denominator * count)


class Block(NamedTuple):
    """A part of a tensor as float64 or complex128 numbers, or as int64 and the ``bias`` that must be added to them.

    ``raw`` are the stored elements.
    """

    part: Part
    numbers: Any
    bias: int
    raw: Any


def blocks(
    torch: Any, pieces: Iterable[bytes] | Filling, rule: ElementRule, layout: Layout, name: str = "a"
) -> Iterator[Block]:
    """Yield the blocks of a tensor in order, given little-endian bytes of whole elements.

    Each block is valid until the next one is requested. ``name`` selects the memory; a thread that reads two tensors
    alternately needs two names.
    """
    plan = list(parts(layout, group_size(layout.channels)))
    at = 0
    for part, raw in zip(plan, raw_blocks(torch, pieces, rule, (part.numel for part in plan), name)):
        yield Block(part, *numbers_of(torch, raw, rule, at, name), raw)
        at += part.numel


def measure(pieces: Iterable[bytes] | Filling, rule: ElementRule, layout: Layout, bins: int) -> Measured:
    """Measure the elements in ``pieces``, little-endian bytes of whole elements, which are read once.

    Complex numbers count by absolute value. Sums are exact for integers, and pairwise in float64 otherwise. Memory:
    some blocks of ``STEP`` numbers. Raise UnreadableError if torch is not installed.
    """
    torch = need_torch("computing with values")
    gauge = Gauge(torch, rule, layout, bins)
    for block in blocks(torch, pieces, rule, layout):
        gauge.add(block._replace(numbers=modulus(torch, block.numbers)))
    return gauge.measured()


class Gauge:
    """Accumulates the statistics of the blocks of a tensor.

    ``alive`` marks channels with a number that is not 0. Groups of channels have ``sizes``, counts of ``nonfinite``
    numbers, and sums of ``squares``, in which nonfinite numbers count as 0. Where squares leave the range of float64,
    ``rms`` has their root mean squares.
    """

    def __init__(self, torch: Any, rule: ElementRule, layout: Layout, bins: int) -> None:
        self.torch = torch
        self.rule = rule
        self.layout = layout
        self.bins = bins
        self.nans = self.infs = self.zeros = 0
        self.low: Any = math.inf
        self.high: Any = -math.inf
        self.moments = Moments()
        #: Blocks that are not in the moments: their sums, sums of squares, and the count of their numbers.
        self.totals: list[float] = []
        self.square_totals: list[float] = []
        self.count = 0
        self.sketch = Sketch(torch, rule) if layout.numel > SORTED else None
        #: The finite numbers of a small tensor, and the bias to add to them.
        self.kept: list[Any] = []
        self.bias = 0
        self.group = group_size(layout.channels)
        self.alive = torch.zeros(layout.channels, dtype=torch.bool)
        first = torch.arange(0, layout.channels, self.group)
        self.sizes = (layout.channels - first).clamp(max=self.group) * layout.inner * layout.outer
        self.squares, self.rms = torch.zeros(2, len(first), dtype=torch.float64)
        self.nonfinite = torch.zeros_like(first)

    def add(self, block: Block) -> None:
        """Add a block of real numbers."""
        torch, (part, numbers, bias, raw) = self.torch, block
        plain = self.rule.dtype in ("float32", "bfloat16", "float16") and not self.rule.negated
        low, high = _ends(raw if plain else numbers)
        finite = filled = numbers
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = ~torch.isfinite(numbers)
            finite, filled = numbers[~bad], numbers.masked_fill(bad, 0.0)
            nans = int(torch.isnan(numbers).sum())
            self.nans, self.infs = self.nans + nans, self.infs + int(bad.sum()) - nans
            self.spread(bad, part, self.nonfinite)
            low, high = _ends(finite) if len(finite) else (math.inf, -math.inf)
        low, high = low + bias, high + bias
        if self.sketch is None:
            zeros = len(finite) - int((finite != -bias).sum())
        elif self.rule.coded:
            zeros = self.sketch.add_elements(raw)
        elif numbers.dtype == torch.int64:
            zeros = self.sketch.add(doubles(torch, finite, bias))
        else:
            zeros = self.sketch.add(raw if finite is numbers and plain else finite)
        self.zeros += zeros
        if self.layout.numel <= STEP and not (self.sketch and self.rule.coded):
            self.kept.append(finite.clone())
            self.bias = bias
        self.note_alive(numbers, bias, zeros, part)
        if not len(finite):
            return
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.add_sums(finite, filled, bias, (low, high), part, raw if finite is numbers and plain else None)

    def note_alive(self, numbers: Any, bias: int, zeros: int, part: Part) -> None:
        channels = self.alive[part.first : part.first + part.channels]
        if zeros < part.length:
            channels.fill_(True)
        else:
            nonzero = (numbers != -bias).view(part.repeats, part.channels, part.length)
            channels |= nonzero.any(2).any(0)

    def add_sums(self, finite: Any, filled: Any, bias: int, ends: tuple[Any, Any], part: Part, copied: Any) -> None:
        """Add to the sums, and to the norms of groups; ``filled`` has zeros in place of nonfinite numbers.

        Unless ``copied`` is None, both are a copy of it, which may be overwritten.
        """
        torch, count, (low, high) = self.torch, len(finite), ends
        if finite.dtype == torch.int64 or low == high or shift_of(max(abs(low), abs(high))):
            self.add_exactly(finite, filled, bias, ends, part)
            return
        total = float(finite.sum())
        if self.layout.channels > 1:
            scratch = SCRATCH.take(torch, "distances", len(filled), torch.float64) if copied is None else filled
            squared = torch.square(filled, out=scratch)
            size = float(self.spread(squared, part, self.squares).sum())
        else:
            size = float(torch.dot(finite, finite))
        middle = total / count
        if count * middle**2 <= size * _CLOSE:
            self.totals.append(total)
            self.square_totals.append(size)
            self.count += count
        else:
            given = finite if copied is None else copied.double()
            distances = torch.sub(given, middle, out=SCRATCH.take(torch, "distances", count, torch.float64))
            apart = Fraction(float(torch.dot(distances, distances)))
            self.moments = self.moments.plus(Moments(count, Fraction(total), Fraction(middle), apart))

    def add_exactly(self, finite: Any, filled: Any, bias: int, ends: tuple[Any, Any], part: Part) -> None:
        """Add large integers, equal numbers, or numbers whose squares leave the range of float64."""
        torch, count, (low, high) = self.torch, len(finite), ends
        base, unit = Fraction(), Fraction(1)
        factors: tuple[float, ...] = ()
        if finite.dtype == torch.int64:
            # Distances from the smallest number are exact as long as they fit in 64 bits.
            base, total = Fraction(low), Fraction(_exact_sum(finite) + bias * count)
            finite = (finite - (low - bias)).double() if high - low < 1 << 62 else finite.double() - (low - bias)
            filled = doubles(torch, filled, bias)
        else:
            factors = factors_of(shift_of(max(abs(low), abs(high))))
            for factor in factors:
                finite, filled, unit = finite * factor, filled * factor, unit * Fraction(factor)
            total = Fraction(float(finite.sum())) / unit
        if self.layout.channels > 1:
            squares = torch.zeros_like(self.rms)
            self.spread(filled.square(), part, squares)
            roots = (squares / self.sizes).sqrt_()
            for factor in factors:
                roots /= factor
            self.rms = torch.hypot(self.rms, roots)
        if low == high:
            moments = Moments(count, Fraction(low) * count, Fraction(low))
        else:
            middle = float((total / count - base) * unit)
            distances = torch.sub(finite, middle, out=SCRATCH.take(torch, "distances", count, torch.float64))
            apart = Fraction(float(torch.dot(distances, distances))) / unit**2
            moments = Moments(count, total, base + Fraction(middle) / unit, apart)
        self.moments = self.moments.plus(moments)

    def spread(self, numbers: Any, part: Part, into: Any) -> Any:
        """Add numbers to the sums of their groups of channels, and return what was added."""
        if self.layout.outer > 1:
            sums = numbers.view(part.repeats, part.channels, -1).sum((0, 2))
            groups = self.torch.arange(part.first, part.first + part.channels) // self.group
            into.index_add_(0, groups, sums)
            return sums
        first, whole = part.first // self.group, part.channels // self.group
        size = self.group * part.length
        sums = numbers[: whole * size].view(whole, size).sum(1)
        if whole * size < len(numbers):
            sums = self.torch.cat((sums, numbers[whole * size :].sum().view(1)))
        into[first : first + len(sums)] += sums
        return sums

    def measured(self) -> Measured:
        """Return the statistics of all added numbers. Call this once."""
        totals, squares = (Fraction(math.fsum(part)) for part in (self.totals, self.square_totals))
        self.moments = self.moments.plus(Moments(self.count, totals, Fraction(), squares))
        torch, count, channels = self.torch, self.moments.numel, self.channels()
        if not count:
            return Measured(0, self.nans, self.infs, 0, channels=channels)
        low, high = (int(end) if self.rule.whole else end for end in (self.low, self.high))
        kept = Distribution(torch.cat(self.kept), None, self.bias) if self.kept else None
        if self.sketch is not None:
            spread, error = self.sketch.distribution(low, high), self.sketch.error(low, high)
        else:
            values = torch.sort(torch.cat(self.kept))[0]
            spread, error = Distribution(values, torch.ones_like(values, dtype=torch.int64), self.bias), 0.0
        quantiles = spread.at_ranks(torch, [-(-count * percent // 100) for percent in PERCENT])
        return Measured(
            count,
            self.nans,
            self.infs,
            self.zeros,
            low,
            high,
            float(self.moments.total / count),
            _mean_root(self.moments.deviations, count - 1) if count > 1 else None,
            _mean_root(self.moments.around(Fraction()), 1),
            _histogram(torch, kept or spread, low, high, self.bins) if low < high else (count,),
            _edges(low, high, self.bins) if low < high else (float(low), float(high)),
            # As float64 the largest integers could exceed their bounds.
            tuple(min(max(int(value), low), high) for value in quantiles) if self.rule.whole else tuple(quantiles),
            tuple(spread.magnitudes(torch).at_ranks(torch, [-(-count // 2), -(-count * 99 // 100)])),
            error,
            channels,
        )

    def channels(self) -> Channels:
        """Return the statistics by channel."""
        torch, layout = self.torch, self.layout
        dead = layout.channels - int(self.alive.sum())
        if layout.channels == 1:
            count = self.moments.numel
            return Channels(1, dead, (_mean_root(self.moments.around(Fraction()), count) if count else None,))
        left = self.sizes - self.nonfinite
        rms = torch.hypot(self.rms, (self.squares / self.sizes).sqrt_())
        roots = (rms * (self.sizes / left).sqrt()).tolist()
        rms = tuple(root if count else None for root, count in zip(roots, left.tolist()))
        return Channels(layout.channels, dead, rms)


def _ends(numbers: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest number, NaN if one is NaN; ``aminmax`` takes longer for large blocks."""
    return numbers.amin().item(), numbers.amax().item()


def shift_of(size: float) -> int:
    """Return the exponent of the power of two that brings numbers of this size to about 1; 0 if none is needed."""
    return 0 if not size or SMALL < size < LARGE else -math.frexp(size)[1]


def factors_of(shift: int) -> tuple[float, ...]:
    """Return 2**shift as two factors, because it may be beyond float64; empty if ``shift`` is 0."""
    return (math.ldexp(1.0, shift // 2), math.ldexp(1.0, shift - shift // 2)) if shift else ()


def _exact_sum(numbers: Any) -> int:
    """Return the exact sum of at most 2**31 64-bit integers."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _histogram(torch: Any, numbers: Distribution, low: Any, high: Any, bins: int) -> tuple[int, ...]:
    """Return the number of values in equal bins from ``low`` to ``high``; if counts are None, each value
    counts once.
    """
    values, counts, bias = numbers
    if values.dtype == torch.int64:
        base, width = low - bias, float(high - low)
        places = (values - base).double() if high - low < 1 << 62 else values.double() - base
    else:
        base, top = float(low), float(high)
        for factor in factors_of(shift_of(max(abs(base), abs(top)))):
            values, base, top = values * factor, base * factor, top * factor
        places, width = values - base, top - base
    places = places.mul_(bins / width).to(torch.uint8).clamp_(max=bins - 1)
    weights = None if counts is None else counts.double()
    return tuple(map(int, torch.bincount(places, weights, minlength=bins).tolist()))


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    start, end = float(low), float(high)
    inner = (start * (1 - step / bins) + end * (step / bins) for step in range(1, bins))
    return (start, *inner, end)


#: Maximum relative error of a number with 8 known significant bits.
ERROR: Final = 2.0**-8
#: Codes are the upper 16 bits of a float32: sign, exponent, and 7 bits of the mantissa.
_CODES: Final = 1 << 16
#: The largest finite code of either sign, and the number of codes with fewer significant bits (subnormal numbers).
_FINITE, _COARSE = 0x7F7F, 0x80
#: The smallest normal float32.
_NORMAL: Final = 2.0**-126
#: Bits of a float64 after sign, exponent and 7 bits of the mantissa.
_REST: Final = 45


class Distribution(NamedTuple):
    """Numbers in ascending order, and how often each occurs; ``bias`` must be added to the numbers."""

    values: Any
    counts: Any
    bias: int = 0

    def at_ranks(self, torch: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the numbers at these ranks; rank 1 is the smallest."""
        places = torch.searchsorted(self.counts.cumsum(0), torch.tensor(ranks))
        return [value + self.bias for value in self.values[places].tolist()]

    def magnitudes(self, torch: Any) -> Distribution:
        """Return the distribution of the absolute values."""
        sizes, order = torch.sort(doubles(torch, self.values, self.bias).abs())
        return Distribution(sizes, self.counts[order])


class _Table(NamedTuple):
    """The meaning of codes: ``order`` has the codes of finite numbers, sorted by ``values``; ``ranks`` has the place of
    each code in it, -1 for NaN and infinities; ``zeros`` are the codes of 0.
    """

    order: Any
    values: Any
    ranks: Any
    zeros: Any


def _table_of(torch: Any, numbers: Any) -> _Table:
    """Return the table for codes with these numbers; NaN and infinities are left out."""
    values, order = torch.sort(numbers)
    finite = torch.isfinite(values)
    order, ranks = order[finite], torch.full(numbers.shape, -1, dtype=torch.int32)
    ranks[order] = torch.arange(len(order), dtype=torch.int32)
    return _Table(order, values[finite], ranks, (numbers == 0).nonzero().flatten())


@lru_cache(maxsize=64)
def _exact_table(torch: Any, rule: ElementRule) -> _Table:
    if rule.width == 1:
        raw = torch.arange(256).to(torch.uint8)
    else:
        raw = torch.arange(-1 << 15, 1 << 15).to(torch.int16)
    if rule.width == 2 or rule.dtype.startswith("float8"):
        raw = raw.view(torch_dtype(torch, rule.dtype))
    elif rule.dtype in ("int8", "qint8"):
        raw = raw.view(torch.int8)
    return _table_of(torch, numbers_of(torch, raw, rule, 0, "table")[0].clone())


@lru_cache(maxsize=1)
def _rounded_table(torch: Any) -> _Table:
    low = (torch.arange(_FINITE + 2, dtype=torch.int32) << 16).view(torch.float32).double()
    low[-1] = 2.0**128
    numbers = torch.full((2, _CODES // 2), math.nan, dtype=torch.float64)
    numbers[1, : _FINITE + 1] = _middle(low[:-1], low[1:])
    numbers[0] = -numbers[1]
    return _table_of(torch, numbers.flatten())


def _middle(low: Any, high: Any) -> Any:
    """Return the number with the least relative distance to all numbers from ``low`` to ``high``; 0 if ``low`` is 0."""
    return low * (2 / (1 + low / high))


class Sketch:
    """Counts by code; ``rare`` counts numbers outside the normal range of float32, by the upper bits of a float64."""

    def __init__(self, torch: Any, rule: ElementRule) -> None:
        self.torch = torch
        self.rule = rule
        self.table = _exact_table(torch, rule) if rule.coded else _rounded_table(torch)
        self.counts = torch.zeros(256 if rule.coded and rule.width == 1 else _CODES, dtype=torch.int64)
        self.rare: Counter[int] = Counter()

    def add_elements(self, raw: Any) -> int:
        """Add coded elements as they are stored; return how many are zero."""
        torch = self.torch
        if self.rule.width == 1:
            codes = raw.view(torch.uint8)
        else:
            codes = SCRATCH.take(torch, "codes", len(raw), torch.int32).copy_(raw.view(torch.int16)).add_(1 << 15)
        counts = torch.bincount(codes, minlength=len(self.counts))
        self.counts += counts
        return int(counts[self.table.zeros].sum())

    def add(self, numbers: Any) -> int:
        """Add finite float32 or float64 numbers by their first 8 significant bits; return how many are zero."""
        torch = self.torch
        codes = SCRATCH.take(torch, "codes", len(numbers), torch.int32)
        torch.bitwise_right_shift(numbers.float().view(torch.int32), 16, out=codes).add_(_CODES // 2)
        counts = torch.bincount(codes, minlength=_CODES)
        halves = counts.view(2, _CODES // 2)
        small = int(halves[:, :_COARSE].sum())
        huge = int(halves[:, _FINITE + 1 :].sum()) if numbers.dtype == torch.float64 else 0
        zeros = len(numbers) - int(torch.count_nonzero(numbers)) if small else 0
        if small > zeros or huge:
            sizes = numbers.float().abs()
            rare = ((sizes < _NORMAL) & (numbers != 0)) | torch.isinf(sizes)
            keys, times = torch.unique(numbers[rare].double().view(torch.int64) >> _REST, return_counts=True)
            self.rare.update(dict(zip(keys.tolist(), times.tolist())))
            counts = torch.bincount(codes[~rare], minlength=_CODES)
        self.counts += counts
        return zeros

    def merge(self, other: Sketch) -> None:
        """Add the numbers of another sketch with the same rule."""
        self.counts += other.counts
        self.rare.update(other.rare)

    def distribution(self, low: float, high: float) -> Distribution:
        """Return the distribution of the numbers, which lie between ``low`` and ``high``; integers stay integers."""
        torch = self.torch
        ranks = torch.sort(self.table.ranks[self.counts.nonzero().flatten()])[0]
        ranks = ranks[torch.count_nonzero(ranks < 0) :]
        values, counts = self.table.values[ranks], self.counts[self.table.order[ranks]]
        if self.rare:
            keys, times = (torch.tensor(list(part)) for part in (self.rare.keys(), self.rare.values()))
            sizes = keys & (1 << 63 - _REST) - 1
            edges = ((sizes + more << _REST).view(torch.float64) for more in (0, 1))
            more = torch.where(keys < 0, -1.0, 1.0) * _middle(*edges)
            values, order = torch.sort(torch.cat((values, more)))
            counts = torch.cat((counts, times))[order]
        if not self.rule.coded:
            values = (values.trunc() if self.rule.whole else values).clamp(low, high)
        return Distribution(values, counts)

    def error(self, low: float, high: float) -> float:
        """Return the maximum relative error of the distribution's numbers."""
        exact = self.rule.coded or (self.rule.whole and low >= -256 and high <= 256)
        return 0.0 if exact else ERROR
