"""Measure many small tensors together: the rows of one matrix, because each call of torch takes longer than a row.

A row gives the same numbers whatever its neighbours are. Rows with NaN or infinite numbers, and rows whose squares or
sums could leave the range of float64, are measured one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from ...base.dtypes import is_complex
from ...base.errors import MalformedError
from ...base.records import NamedTuple
from ...files.zips.reader import Nearby
from ..elements import BitDifference, short_elements
from ..interpretation import Reading, resolved_bytes
from .blocks import PACKED, ElementRule, numbers_of, raw_blocks
from .distance import Compared, Distance, PairMeasured, resolved_rule
from .loads import need_torch
from .measure import LARGE, SMALL, Measured

#: Maximum numbers in a batch. They and the intermediate results stay in the processor's cache.
_BATCH: Final = 1 << 16
#: Maximum numbers of a tensor in a batch.
_ROW: Final = 1 << 12
#: Integers below this are exact in float64, and so are sums of ``_ROW`` of them.
_EXACT: Final = float(1 << 40)
#: The rule for differences, which are plain float64 numbers.
_DIFFERENCE: Final = ElementRule("float64")


class Kind(NamedTuple):
    """What the tensors or pairs of a batch share: the rule of each side, the size, and the tolerance of ``distance``.

    A batch of single tensors has one rule.
    """

    rules: tuple[ElementRule, ...]
    numel: int
    tolerance: tuple[float, float] = (0.0, 0.0)


def kind_of(rules: Sequence[ElementRule], numel: int, tolerance: tuple[float, float] = (0.0, 0.0)) -> Kind | None:
    """Return the kind of a tensor or pair, or None if it must be measured by itself.

    It can be a row if it is small, and its numbers are real and fit in float64. 64-bit integers that do not fit are
    found later, by their size.
    """
    plain = not any(rule.dtype in PACKED or rule.dtype == "uint64" or is_complex(rule.dtype) for rule in rules)
    return Kind(tuple(rules), numel, tolerance) if plain and 0 < numel <= _ROW else None


def kind_of_pair(one: Reading, other: Reading, tolerance: tuple[float, float] = (0.0, 0.0)) -> Kind | None:
    """Return the kind of two tensors with equal shapes, or None if they must be compared by themselves."""
    return kind_of([resolved_rule(one), resolved_rule(other)], one.tensor.numel, tolerance)


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
        if (len(batch) + 1) * kind.numel > _BATCH:
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
        sizes = [rule.width * kind.numel for rule in kind.rules]
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
    return _measured(torch, numbers, kind.rules[0], bins)


def measure_pair_rows(data: Sequence[tuple[bytes, ...]], kind: Kind, bins: int) -> list[PairMeasured | None]:
    """Return what ``measure_pair`` returns for each pair, or None for one that must be measured by itself."""
    torch = need_torch("comparing values as numbers")
    sides = _sides(torch, data, kind)
    compared = _compared(torch, sides, kind)
    measured = (_measured(torch, side[1], rule, bins) for side, rule in zip(sides, kind.rules))
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
    numel = kind.numel
    for name, pieces, rule in zip(("a", "b"), zip(*data), kind.rules):
        raw = next(raw_blocks(torch, (b"".join(pieces),), rule, len(data) * numel, name))
        sides.append((raw, numbers_of(torch, raw, rule, 0, name)[0].double().view(-1, numel)))
    return sides


def _in_range(bound: float, rule: ElementRule) -> bool:
    """Return whether numbers of this size, NaN if there is one, need no care."""
    return not bound or (SMALL < bound < (_EXACT if rule.whole else LARGE))


def _measured(torch: Any, numbers: Any, rule: ElementRule, bins: int) -> list[Measured | None]:
    """Return the statistics of each row, or None if a number in it is not finite or needs care."""
    count = numbers.shape[1]
    low, high = numbers.amin(1), numbers.amax(1)
    lows, highs, bound = low.tolist(), high.tolist(), torch.maximum(low.abs(), high.abs())
    alone = [not _in_range(size, rule) for size in bound.tolist()]
    if all(alone):
        return [None] * len(alone)
    constant = low == high
    means = torch.where(constant, low, numbers.sum(1).div_(count))
    gaps = numbers - means[:, None]
    drift = gaps.sum(1)
    apart = (gaps.square_().sum(1) - drift.square_() / count).clamp_(min=0.0)
    squares = torch.where(constant, low.square() * count, numbers.square().sum(1))
    zeros = count - torch.count_nonzero(numbers, dim=1)
    columns = (
        zeros.tolist(),
        means.tolist(),
        (apart / (count - 1)).sqrt_().tolist() if count > 1 else [None] * len(alone),
        squares.sqrt().tolist(),
        *_histograms(torch, numbers, low, high, bins),
    )
    found: list[Measured | None] = []
    for single, least, most, row in zip(alone, lows, highs, zip(*columns)):
        if single:
            found.append(None)
            continue
        zeros, mean, std, norm, counts, edges = row
        if least == most:
            counts, edges = (count,), (least, most)
        if rule.whole:
            least, most = int(least), int(most)
        found.append(Measured(count, 0, 0, zeros, least, most, mean, std, norm, tuple(counts), tuple(edges)))
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


def _compared(torch: Any, sides: Sequence[tuple[Any, Any]], kind: Kind) -> list[Compared | None]:
    """Return how far the rows of two matrices are apart, or None for rows in which a number needs care."""
    (raw, left), (other, right) = sides
    count, (rtol, atol) = kind.numel, kind.tolerance
    gaps, sizes, unequal = (left - right).abs(), right.abs(), left != right
    rules = (*kind.rules, _DIFFERENCE)
    bounds = [numbers.abs().amax(1).tolist() for numbers in (left, right, gaps)]
    careful = [not all(map(_in_range, row, rules)) for row in zip(*bounds)]
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
    for one, bit, row in zip(careful, bits, zip(*(column.tolist() for column in columns))):
        if one:
            found.append(None)
            continue
        differing, first, far_apart, largest, largest_relative, *sums = row
        counts = (count, 0, differing, first if differing else -1, far_apart, largest, largest_relative)
        found.append(Compared(Distance(*counts, *sums), bit))
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
