"""Measure many small tensors together: the rows of one matrix, because each call of torch takes longer than a row.

A row gives the same numbers whatever its neighbours are. Rows with NaN or infinite numbers, and rows whose squares or
sums could leave the range of float64, are measured one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

from ...base.dtypes import is_complex
from ...base.errors import MalformedError
from ...base.records import NamedTuple
from ...files.zips.reader import Nearby
from ..elements import BitDifference, short_elements
from ..interpretation import Reading, resolved_bytes
from .blocks import PACKED, ElementRule, Layout, numbers_of, raw_blocks, row_major
from .distance import DIFFERENCE, Compared, Distance, PairMeasured, resolved_rule
from .loads import need_torch
from .measure import LARGE, PERCENT, SMALL, SORTED, Channels, Measured, group_size

#: Maximum numbers in a batch. They and the intermediate results stay in the processor's cache.
_BATCH: Final = 1 << 16
#: Rows of at least this many numbers are cut into this many bins to find quantiles.
_LONG: Final = 1 << 8
_NARROW: Final = 1 << 10
#: The ranks of absolute values, in percent.
_SIZES: Final = (50, 99)
#: Integers below this are exact in float64, and so are sums of ``SORTED`` of them.
_EXACT: Final = float(1 << 40)


class Kind(NamedTuple):
    """What the tensors or pairs of a batch share: the rule of each side, the layout, and the tolerance of ``distance``.

    A batch of single tensors has one rule.
    """

    rules: tuple[ElementRule, ...]
    layout: Layout
    tolerance: tuple[float, float] = (0.0, 0.0)


def kind_of(rules: Sequence[ElementRule], layout: Layout, tolerance: tuple[float, float] = (0.0, 0.0)) -> Kind | None:
    """Return the kind of a tensor or pair, or None if it must be measured by itself.

    It can be a row if it is small, its channels follow one another, and its numbers are real and fit in float64. 64-bit
    integers that do not fit are found later, by their size.
    """
    small = 0 < layout.numel <= SORTED and (layout.channels == 1 or layout.outer == 1)
    plain = not any(rule.dtype in PACKED or rule.dtype == "uint64" or is_complex(rule.dtype) for rule in rules)
    return Kind(tuple(rules), layout, tolerance) if small and plain else None


def kind_of_pair(one: Reading, other: Reading, tolerance: tuple[float, float] = (0.0, 0.0)) -> Kind | None:
    """Return the kind of two tensors with equal shapes, or None if they must be compared by themselves."""
    return kind_of([resolved_rule(one), resolved_rule(other)], row_major(one.tensor), tolerance)


def batches(kinds: Iterable[Kind | None]) -> list[list[int]]:
    """Return the indices of ``kinds`` in groups of equal kinds, as many as fit in the cache; None is always alone."""
    waiting: dict[Kind, list[int]] = {}
    groups: list[list[int]] = []
    for index, kind in enumerate(kinds):
        if kind is None:
            groups.append([index])
            continue
        batch = waiting.setdefault(kind, [])
        batch.append(index)
        if (len(batch) + 1) * kind.layout.numel > _BATCH:
            groups.append(waiting.pop(kind))
    return [*groups, *waiting.values()]


Item = TypeVar("Item")
Result = TypeVar("Result")


def measure_batch(
    items: Sequence[Item],
    kind: Kind | None,
    read: Callable[[Item, Sequence[Nearby]], tuple[bytes, ...]],
    rows: Callable[[list[tuple[bytes, ...]], Kind], list[Result | None]],
    alone: Callable[[Item], Result],
) -> list[Result | MalformedError]:
    """Measure a batch: ``read`` the elements of each item, measure all ``rows``, and the remaining items ``alone``.

    ``read`` also gets a reader of short pieces for each side. The result of an item whose bytes are missing is the
    error.
    """
    found: dict[int, Result | MalformedError] = {}
    data: dict[int, tuple[bytes, ...]] = {}
    nearby = Nearby(), Nearby()
    for number, item in enumerate(items if kind is not None else ()):
        try:
            data[number] = read(item, nearby)
        except MalformedError as error:
            found[number] = error
    if kind is not None:
        sizes = [rule.width * kind.layout.numel for rule in kind.rules]
        data = {number: row for number, row in data.items() if [len(side) for side in row] == sizes}
        results = rows(list(data.values()), kind) if data else []
        found.update((number, result) for number, result in zip(data, results) if result is not None)
    for number, item in enumerate(items):
        if number not in found:
            try:
                found[number] = alone(item)
            except MalformedError as error:
                found[number] = error
    return [found[number] for number in range(len(items))]


def read_pair(pair: tuple[Reading, Reading], nearby: Sequence[Nearby]) -> tuple[bytes, ...]:
    """Return the elements of two tensors; raise MalformedError if bytes are missing."""
    return tuple(map(_resolved, pair, nearby))


def _resolved(reading: Reading, nearby: Nearby) -> bytes:
    plain = not (reading.negated or reading.conjugated)
    data = short_elements(reading.storage, reading.tensor, nearby) if plain else None
    return b"".join(resolved_bytes(reading)) if data is None else data


def measure_rows(data: Sequence[tuple[bytes, ...]], kind: Kind, bins: int) -> list[Measured | None]:
    """Return what ``measure`` returns for each tensor, or None for one that must be measured by itself."""
    torch = need_torch("computing with values")
    [(_, numbers)] = _sides(torch, data, kind)
    return _measured(torch, numbers, kind.rules[0], kind.layout, bins)


def measure_pair_rows(data: Sequence[tuple[bytes, ...]], kind: Kind, bins: int) -> list[PairMeasured | None]:
    """Return what ``measure_pair`` returns for each pair, or None for one that must be measured by itself."""
    torch = need_torch("comparing values as numbers")
    sides = _sides(torch, data, kind)
    compared = _compared(torch, sides, kind)
    measured = (_measured(torch, side[1], rule, kind.layout, bins) for side, rule in zip(sides, kind.rules))
    return [
        PairMeasured(one, other, apart) if one is not None and other is not None and apart is not None else None
        for one, other, apart in zip(*measured, compared)
    ]


def distance_rows(data: Sequence[tuple[bytes, ...]], kind: Kind) -> list[Compared | None]:
    """Return what ``distance`` returns for each pair, or None for one that must be measured by itself."""
    torch = need_torch("comparing values as numbers")
    return _compared(torch, _sides(torch, data, kind), kind)


def _sides(torch: Any, data: Sequence[tuple[bytes, ...]], kind: Kind) -> list[tuple[Any, Any]]:
    """Return the elements of each side, and their numbers as float64 in rows."""
    sides = []
    numel = kind.layout.numel
    for name, pieces, rule in zip(("a", "b"), zip(*data), kind.rules):
        raw = next(raw_blocks(torch, (b"".join(pieces),), rule, (len(data) * numel,), name))
        sides.append((raw, numbers_of(torch, raw, rule, 0, name)[0].double().view(-1, numel)))
    return sides


def _in_range(bound: float, rule: ElementRule) -> bool:
    """Return whether numbers of this size, NaN if there is one, need no care."""
    return not bound or (SMALL < bound < (_EXACT if rule.whole else LARGE))


def _measured(torch: Any, numbers: Any, rule: ElementRule, layout: Layout, bins: int) -> list[Measured | None]:
    """Return the statistics of each row, or None if a number in it is not finite or needs care."""
    count = layout.numel
    low, high, sizes = numbers.amin(1), numbers.amax(1), numbers.abs()
    lows, highs, bound = low.tolist(), high.tolist(), torch.maximum(low.abs(), high.abs())
    alone = [not _in_range(size, rule) for size in bound.tolist()]
    if all(alone):
        return [None] * len(alone)
    constant = low == high
    means = torch.where(constant, low, numbers.sum(1).div_(count))
    gaps = numbers - means[:, None]
    drift = gaps.sum(1)
    apart = (gaps.square_().sum(1) - drift.square_() / count).clamp_(min=0.0)
    squared = numbers.square()
    squares = torch.where(constant, low.square() * count, squared.sum(1))
    zeros = count - torch.count_nonzero(numbers, dim=1)
    columns = (
        zeros.tolist(),
        means.tolist(),
        (apart / (count - 1)).sqrt_().tolist() if count > 1 else [None] * len(alone),
        squares.sqrt().tolist(),
        *_histograms(torch, numbers, low, high, bins),
        _at_ranks(torch, numbers, low, high, PERCENT),
        _at_ranks(torch, sizes, torch.zeros_like(low), bound, _SIZES),
        *_channels(torch, numbers, zeros, squared, squares, layout),
    )
    found: list[Measured | None] = []
    for single, least, most, row in zip(alone, lows, highs, zip(*columns)):
        if single:
            found.append(None)
            continue
        zeros, mean, std, norm, counts, edges, quantiles, magnitudes, dead, rms = row
        if least == most:
            counts, edges = (count,), (least, most)
        if rule.whole:
            least, most, quantiles = int(least), int(most), map(int, quantiles)
        ends = (least, most, mean, std, norm, tuple(counts), tuple(edges), tuple(quantiles), tuple(magnitudes))
        found.append(Measured(count, 0, 0, zeros, *ends, 0.0, Channels(layout.channels, dead, tuple(rms))))
    return found


def _histograms(torch: Any, numbers: Any, low: Any, high: Any, bins: int) -> tuple[Any, Any]:
    """Return for each row the counts of its numbers in equal bins, and the edges of the bins."""
    width = high - low
    scale = torch.where(width > 0, torch.full_like(width, bins) / width, 0.0)
    places = (numbers - low[:, None]).mul_(scale[:, None]).long().clamp_(0, bins - 1)
    places += torch.arange(0, len(numbers) * bins, bins)[:, None]
    counts = torch.bincount(places.view(-1), minlength=len(numbers) * bins).view(-1, bins)
    steps = torch.arange(bins + 1, dtype=torch.float64) / bins
    edges = low[:, None] * (1 - steps) + high[:, None] * steps
    return counts.tolist(), edges.tolist()


def _at_ranks(torch: Any, numbers: Any, low: Any, high: Any, percent: tuple[int, ...]) -> Any:
    """Return for each row the numbers at the ranks of ``percent``.

    Sorting takes most of the time. So long rows, whose ends are ``low`` and ``high``, are cut into narrow bins, and
    only bins that have one of the ranks are sorted.
    """
    rows, count = numbers.shape
    ranks = _columns(torch, count, percent)
    if count == 1:
        return numbers.expand(-1, len(percent)).tolist()
    if count >= _LONG:
        scale = torch.where(high > low, _NARROW / (high - low), 0.0)
        places = (numbers - low[:, None]).mul_(scale[:, None]).int().clamp_(0, _NARROW - 1)
        places += torch.arange(0, rows * _NARROW, _NARROW, dtype=torch.int32)[:, None]
        places = places.view(-1)
        counts = torch.bincount(places, minlength=rows * _NARROW)
        ends = counts.view(rows, _NARROW).cumsum(1)
        wanted = torch.searchsorted(ends, (ranks + 1).expand(rows, -1).contiguous())
        wanted += torch.arange(0, rows * _NARROW, _NARROW)[:, None]
        chosen = torch.zeros(len(counts), dtype=torch.bool)
        chosen[wanted.view(-1)] = True
        few = chosen[places].nonzero().view(-1)
        if len(few) < len(places) // 4:
            kept = counts * chosen
            begins = kept.cumsum(0) - kept - (ends.view(-1) - counts)
            values, order = torch.sort(numbers.view(-1)[few])
            values = values[torch.sort(places[few][order], stable=True)[1]]
            return values[begins[wanted] + ranks].tolist()
    return torch.sort(numbers, dim=1)[0][:, ranks].tolist()


@lru_cache(maxsize=64)
def _columns(torch: Any, count: int, percent: tuple[int, ...]) -> Any:
    return torch.tensor([-(-count * part // 100) - 1 for part in percent])


def _channels(torch: Any, numbers: Any, zeros: Any, squared: Any, squares: Any, layout: Layout) -> tuple[Any, Any]:
    """Return for each row the number of dead channels, and the root mean squares of groups of channels."""
    _, channels, inner = layout
    if channels == 1:
        roots = (squares / numbers.shape[1]).sqrt_()
        return (squares == 0).long().tolist(), roots[:, None].tolist()
    dead = torch.zeros_like(zeros)
    if bool((zeros >= inner).any()):
        dead = channels - (numbers != 0).unflatten(1, (channels, inner)).any(2).sum(1)
    group = group_size(channels)
    whole = channels // group
    cut = whole * group * inner
    roots = (squared[:, :cut].unflatten(1, (whole, group * inner)).sum(2) / (group * inner)).sqrt_()
    if cut < numbers.shape[1]:
        last = (squared[:, cut:].sum(1, keepdim=True) / (numbers.shape[1] - cut)).sqrt_()
        roots = torch.cat((roots, last), 1)
    return dead.tolist(), roots.tolist()


def _compared(torch: Any, sides: Sequence[tuple[Any, Any]], kind: Kind) -> list[Compared | None]:
    """Return how far the rows of two matrices are apart, or None for rows in which a number needs care."""
    (raw, left), (other, right) = sides
    count, (rtol, atol) = kind.layout.numel, kind.tolerance
    bounds = [numbers.abs().amax(1).tolist() for numbers in (left, right)]
    careful = [not all(map(_in_range, pair, kind.rules)) for pair in zip(*bounds)]
    difference = left - right
    apart = _measured(torch, difference, DIFFERENCE, Layout(1, 1, count), 1)
    gaps, sizes, unequal = difference.abs(), right.abs(), left != right
    far = unequal if kind.tolerance == (0.0, 0.0) else gaps > sizes * rtol + atol
    relative = torch.where(sizes > 0, gaps / sizes, 0.0)
    columns = (
        unequal.sum(1),
        _first(torch, unequal),
        far.sum(1),
        gaps.amax(1),
        relative.amax(1),
        gaps.sum(1),
        gaps.square().sum(1),
        left.square().sum(1),
        right.square().sum(1),
        (left * right).sum(1),
    )
    same = kind.rules[0].dtype == kind.rules[1].dtype
    bits = _bits(torch, raw, other, count) if same else [None] * len(left)
    found: list[Compared | None] = []
    for one, gap, bit, row in zip(careful, apart, bits, zip(*(column.tolist() for column in columns))):
        if one or gap is None:
            found.append(None)
            continue
        differing, first, far_apart, largest, largest_relative, *sums = row
        counts = (count, 0, differing, first if differing else -1, far_apart, largest, largest_relative)
        found.append(Compared(Distance(*counts, *sums), gap, bit))
    return found


def _first(torch: Any, unequal: Any) -> Any:
    """Return the column of the first true element in each row."""
    return unequal.to(torch.uint8).argmax(1)


def _bits(torch: Any, left: Any, right: Any, count: int) -> list[Any]:
    """Return how the bits of each row of two matrices with equal dtypes differ."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    unequal = (left.view(same) != right.view(same)).view(-1, count)
    differing, first = unequal.sum(1).tolist(), _first(torch, unequal).tolist()
    return [BitDifference(at, number) if number else BitDifference() for at, number in zip(first, differing)]
