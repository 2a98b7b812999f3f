"""Statistics of many numbers, read once: extremes, sums, deviations, a histogram, quantiles, channels."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

from ...base.records import NamedTuple
from ...files.threads import run_in_threads
from ..elements import Filling
from .blocks import SCRATCH, STEP, ElementRule, Layout, Part, doubles, modulus, numbers_of, parts, raw_blocks
from .loads import need_torch
from .sketch import Distribution, Sketch

#: The quantiles of a tensor, in percent.
PERCENT: Final = (1, 5, 25, 50, 75, 95, 99)
#: Maximum number of groups of neighbouring channels.
_GROUPS: Final = 64
#: Up to this many numbers are sorted; for more, a sketch is faster.
SORTED: Final = 1 << 12
#: If the square of the mean is at most this part of the mean square, squares give the deviation without a second pass,
#: and lose at most 5 bits.
_CLOSE: Final = 1 - 2**-5
#: Numbers of a large tensor that one thread measures at a time.
_SHARE: Final = 1 << 23
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
    torch: Any, pieces: Iterable[bytes] | Filling, rule: ElementRule, plan: Sequence[Part], name: str = "a", at: int = 0
) -> Iterator[Block]:
    """Yield the blocks of a tensor in order, given its parts, and little-endian bytes of whole elements.

    ``at`` is the index of the first element. Each block is valid until the next one is requested. ``name`` selects the
    memory; a thread that reads two tensors alternately needs two names.
    """
    for part, raw in zip(plan, raw_blocks(torch, pieces, rule, (part.numel for part in plan), name)):
        yield Block(part, *numbers_of(torch, raw, rule, at, name), raw)
        at += part.numel


def plan_of(layout: Layout) -> list[Part]:
    """Return the parts in which a tensor is measured."""
    return list(parts(layout, group_size(layout.channels)))


def measure(pieces: Iterable[bytes] | Filling, rule: ElementRule, layout: Layout, bins: int) -> Measured:
    """Measure the elements in ``pieces``, little-endian bytes of whole elements, which are read once.

    Complex numbers count by absolute value. Sums are exact for integers, and pairwise in float64 otherwise. Memory:
    some blocks of ``STEP`` numbers. Raise UnreadableError if torch is not installed.
    """
    torch = need_torch("computing with values")
    gauge = Gauge(torch, rule, layout, bins)
    gauge.add_all(pieces, plan_of(layout))
    return gauge.measured()


def measure_shares(reading: Callable[[int, int], Filling], rule: ElementRule, layout: Layout, bins: int) -> Measured:
    """Measure a large tensor in several threads.

    ``reading`` returns a function that reads elements into memory, given the index of the first one and their number.
    The result does not depend on the number of threads.
    """
    torch = need_torch("computing with values")
    whole, lock = Gauge(torch, rule, layout, bins), threading.Lock()
    squares: dict[int, tuple[Any, Any]] = {}

    def do(share: tuple[int, list[Part]]) -> None:
        at, plan = share
        gauge = Gauge(torch, rule, layout, bins)
        gauge.add_all(reading(at, sum(part.numel for part in plan)), plan, at)
        with lock:
            whole.merge(gauge)
            squares[at] = gauge.squares, gauge.rms

    run_in_threads(_shares(plan_of(layout)), do, layout.numel * rule.width)
    for _, (ours, scaled) in sorted(squares.items(), key=lambda item: item[0]):
        whole.squares += ours
        whole.rms = torch.hypot(whole.rms, scaled)
    return whole.measured()


def _shares(plan: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
    """Yield the parts in stretches of about ``_SHARE`` numbers, each with the index of its first number."""
    begin = end = 0
    share: list[Part] = []
    for part in plan:
        share.append(part)
        end += part.numel
        if end - begin >= _SHARE:
            yield begin, share
            begin, share = end, []
    if share:
        yield begin, share


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

    def add_all(self, pieces: Iterable[bytes] | Filling, plan: Sequence[Part], at: int = 0) -> None:
        """Add the parts of a tensor, given their bytes; ``at`` is the index of the first element."""
        for block in blocks(self.torch, pieces, self.rule, plan, at=at):
            self.add(block._replace(numbers=modulus(self.torch, block.numbers)))

    def merge(self, other: Gauge) -> None:
        """Add what another gauge of the same tensor has, except the squares: their order matters.

        The tensor has more numbers than are kept.
        """
        assert self.sketch is not None and other.sketch is not None and not other.kept
        self.nans, self.infs, self.zeros = self.nans + other.nans, self.infs + other.infs, self.zeros + other.zeros
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count += other.count
        self.totals += other.totals
        self.square_totals += other.square_totals
        self.moments = self.moments.plus(other.moments)
        self.sketch.merge(other.sketch)
        self.alive |= other.alive
        self.nonfinite += other.nonfinite

    def add(self, block: Block) -> None:
        """Add a block of real numbers."""
        torch, (part, numbers, bias, raw) = self.torch, block
        plain = self.rule.dtype in ("float32", "bfloat16", "float16") and not self.rule.negated
        ends = torch.aminmax(raw if plain else numbers)
        low, high = (end.item() for end in ends)
        finite = filled = numbers
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = ~torch.isfinite(numbers)
            finite, filled = numbers[~bad], numbers.masked_fill(bad, 0.0)
            nans = int(torch.isnan(numbers).sum())
            self.nans, self.infs = self.nans + nans, self.infs + int(bad.sum()) - nans
            self.spread(bad, part, self.nonfinite)
            low, high = (end.item() for end in torch.aminmax(finite)) if len(finite) else (math.inf, -math.inf)
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
        self.add_sums(finite, filled, bias, (low, high), part)

    def note_alive(self, numbers: Any, bias: int, zeros: int, part: Part) -> None:
        channels = self.alive[part.first : part.first + part.channels]
        if zeros < part.length:
            channels.fill_(True)
        else:
            nonzero = (numbers != -bias).view(part.repeats, part.channels, part.length)
            channels |= nonzero.any(2).any(0)

    def add_sums(self, finite: Any, filled: Any, bias: int, ends: tuple[Any, Any], part: Part) -> None:
        """Add to the sums, and to the norms of groups; ``filled`` has zeros in place of nonfinite numbers."""
        torch, count, (low, high) = self.torch, len(finite), ends
        if finite.dtype == torch.int64 or low == high or shift_of(max(abs(low), abs(high))):
            self.add_exactly(finite, filled, bias, ends, part)
            return
        total = float(finite.sum())
        if self.layout.channels > 1:
            squared = torch.square(filled, out=SCRATCH.take(torch, "distances", len(filled), torch.float64))
            size = float(self.spread(squared, part, self.squares).sum())
        else:
            size = float(torch.dot(finite, finite))
        middle = total / count
        if count * middle**2 <= size * _CLOSE:
            self.totals.append(total)
            self.square_totals.append(size)
            self.count += count
        else:
            distances = torch.sub(finite, middle, out=SCRATCH.take(torch, "distances", count, torch.float64))
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
