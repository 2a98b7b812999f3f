"""A sketch of many numbers for their quantiles: counts by code.

Codes are exact for elements of up to 16 bits, otherwise the first 8 significant bits. Sketches of parts add up to the
sketch of the whole, in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from ...base.records import NamedTuple
from .blocks import SCRATCH, ElementRule, doubles, numbers_of
from .loads import torch_dtype

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
