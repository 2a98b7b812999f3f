"""Statistics of many numbers: extremes, sums and deviations in a first reading, a histogram in a second.

Bytes become blocks of numbers for torch, with the same order and sizes however they are split. Numbers that fit in one
block are read once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, cast

from ...base.dtypes import BY_NAME, is_complex
from ...base.records import NamedTuple
from ..elements import Filling
from ..interpretation import Reading
from ..numeric import E2M1
from .loads import torch_dtype

#: Numbers computed at a time. They and their intermediate results stay in the processor's cache.
STEP: Final = 1 << 18
#: Numbers for which a thread keeps memory.
_ROOM: Final = STEP
#: Dtypes that torch cannot compute with -> a dtype of the same width that it can.
_BYTES_OF: Final = {
    **{"uint64": "int64", "bool": "uint8", "qint8": "int8", "quint8": "uint8", "qint32": "int32"},
    **{"quint4x2": "uint8", "quint2x4": "uint8", "float4_e2m1fn_x2": "uint8", "bcomplex32": "bfloat16"},
}
#: Bits per number of dtypes with several numbers in a byte, lowest bits first.
PACKED: Final = {"quint4x2": 4, "quint2x4": 2, "float4_e2m1fn_x2": 4}


class _Scratch(threading.local):
    """Per-thread memory for blocks, because allocating fresh memory takes longer than the computation."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, object], Any] = {}

    def take(self, torch: Any, name: str, count: int, dtype: Any) -> Any:
        """Return memory for numbers; the same name gives the same memory."""
        if (name, dtype) not in self.kept:
            self.kept[name, dtype] = torch.empty(_ROOM, dtype=dtype)
        return self.kept[name, dtype][:count]

    def bytes(self, name: str, width: int) -> bytearray:
        """Return memory for elements of ``width`` bytes; the same name gives the same memory."""
        if (name, width) not in self.kept:
            self.kept[name, width] = bytearray(_ROOM * width)
        return cast("bytearray", self.kept[name, width])


SCRATCH: Final = _Scratch()


class ElementRule(NamedTuple):
    """The rule that turns elements into numbers: (element - zero point) * scale, with the sign changed if ``negated``.

    ``scales`` and ``zero_points`` are empty for plain elements. Otherwise there is one per channel: ``inner``
    successive elements belong to one channel, and the channels repeat. ``numel`` is the number of elements if the last
    byte may have more.
    """

    dtype: str
    scales: Sequence[float] = ()
    zero_points: Sequence[float] = ()
    inner: int = 1
    negated: bool = False
    numel: int | None = None

    @property
    def width(self) -> int:
        """Bytes of an element, after packed dtypes were expanded to one byte per number."""
        return BY_NAME[self.dtype].itemsize

    @property
    def whole(self) -> bool:
        """Whether the numbers are integers."""
        return not self.scales and not self.dtype.startswith(("float", "bfloat")) and not is_complex(self.dtype)


def rule_of(reading: Reading) -> ElementRule:
    """Return the rule for the elements of a reading."""
    tensor, affine = reading.tensor, reading.affine
    scales, zero_points = (affine.scales, affine.zero_points) if affine is not None else ((), ())
    inner = prod(tensor.shape[affine.axis + 1 :]) if affine is not None and affine.axis >= 0 else 1
    numel = tensor.numel if tensor.dtype in ("quint4x2", "quint2x4") else None
    return ElementRule(tensor.dtype, scales, zero_points, inner, reading.negated, numel)


def _filling(pieces: Iterable[bytes]) -> Filling:
    """Return a function that copies the next bytes into memory, as many as fit, and returns their number."""
    unread, rest = iter(pieces), memoryview(b"")

    def fill(block: memoryview) -> int:
        nonlocal rest
        at = 0
        while at < len(block) and (rest or (rest := memoryview(next(unread, b"")))):
            part = rest[: len(block) - at]
            block[at : at + len(part)] = part
            at += len(part)
            rest = rest[len(part) :]
        return at

    return fill


def _codes(data: bytes, bits: int) -> bytes:
    """Return one byte for each number of a packed dtype."""
    codes = bytearray(len(data) * 8 // bits)
    for number, shift in enumerate(range(0, 8, bits)):
        codes[number :: 8 // bits] = data.translate(bytes(byte >> shift & (1 << bits) - 1 for byte in range(256)))
    return bytes(codes)


def doubles(torch: Any, numbers: Any, bias: int) -> Any:
    """Return real numbers as float64, after adding ``bias``."""
    if not bias:
        return numbers.double()
    # Small numbers would lose their last bits in the sum.
    return torch.where(numbers < 0, (numbers ^ -(1 << 63)).double(), numbers.double() + bias)


def modulus(torch: Any, numbers: Any) -> Any:
    """Return the absolute values of complex numbers. A number with a NaN part is NaN, even if the other is infinite."""
    if not numbers.is_complex():
        return numbers
    return torch.where(torch.isnan(torch.view_as_real(numbers)).any(1), math.nan, numbers.abs())


def _plain(torch: Any, raw: Any, dtype: str, name: str) -> tuple[Any, int]:
    if dtype == "uint64":
        # Keep the order of the unsigned numbers: the smallest becomes the smallest int64.
        return raw ^ -(1 << 63), 1 << 63
    if dtype in ("int64", "float64"):
        return raw, 0
    if dtype == "float4_e2m1fn_x2":
        return torch.tensor(E2M1, dtype=torch.float64)[(raw & 15).long()], 0
    if is_complex(dtype):
        return torch.view_as_complex((torch.view_as_real(raw) if raw.is_complex() else raw.view(-1, 2)).double()), 0
    if dtype.startswith("float8"):
        # Torch converts these elements one by one, so look them up in a table.
        codes = torch.arange(256, dtype=torch.uint8).view(raw.dtype).float().double()
        return torch.index_select(codes, 0, raw.view(torch.uint8).int()), 0
    if dtype == "bool":
        raw = raw != 0
    if dtype == "float16":
        raw = raw.float()
    return SCRATCH.take(torch, name, raw.numel(), torch.float64).copy_(raw), 0


def _dequantized(torch: Any, numbers: Any, rule: ElementRule, at: int) -> Any:
    if len(rule.scales) == 1:
        return (numbers - rule.zero_points[0]) * rule.scales[0]
    channel = (torch.arange(at, at + len(numbers)) // rule.inner) % len(rule.scales)
    scales, zero_points = (torch.tensor(part, dtype=torch.float64) for part in (rule.scales, rule.zero_points))
    return (numbers - zero_points[channel]) * scales[channel]


#: Squares neither overflow nor vanish if the largest number is between these bounds.
SMALL, LARGE = 1e-130, 1e130
#: If the square of the mean is at most this part of the mean square, squares give the deviation, less 5 bits.
_CLOSE: Final = 1 - 2**-5


class Measured(NamedTuple):
    """Statistics of some numbers. All fields except the counts cover the ``finite`` numbers, and are None without any.

    ``low`` and ``high`` are exact integers for integers. ``std`` is the sample deviation (divided by n - 1), None for
    one number; ``norm`` is the L2 norm. ``counts`` are for equal bins between ``edges``. If the largest number is
    beyond 1e130 or below 1e-130, ``mean``, ``std`` and ``norm`` are None, and one bin has all numbers.
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


class Moments(NamedTuple):
    """The count and mean of some numbers, the sum of their squares, and of their squared distances from the mean."""

    numel: int = 0
    mean: float = 0.0
    squares: float = 0.0
    apart: float = 0.0

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both."""
        if not self.numel:
            return other
        numel = self.numel + other.numel
        part, gap = other.numel / numel, other.mean - self.mean
        apart = self.apart + other.apart + gap**2 * self.numel * part
        return Moments(numel, self.mean + gap * part, self.squares + other.squares, apart)


class Block(NamedTuple):
    """Elements of a tensor as float64 or complex128 numbers, or as int64 and the ``bias`` that must be added to them.

    ``raw`` are the stored elements.
    """

    numbers: Any
    bias: int
    raw: Any


def blocks(torch: Any, pieces: Iterable[bytes] | Filling, rule: ElementRule, name: str = "a") -> Iterator[Block]:
    """Yield the blocks of a tensor in order, given little-endian bytes of whole elements.

    Each block is valid until the next one is requested. ``name`` selects the memory; a thread that reads two tensors
    alternately needs two names.
    """
    dtype, width, bits = torch_dtype(torch, _BYTES_OF.get(rule.dtype, rule.dtype)), rule.width, PACKED.get(rule.dtype)
    memory, at = memoryview(SCRATCH.bytes(name, width))[: STEP * width], 0
    if not callable(pieces):
        pieces = _filling(pieces if bits is None else (_codes(data, bits) for data in pieces))
    while done := pieces(memory):
        raw = torch.frombuffer(memory[:done], dtype=dtype)
        raw = raw if rule.numel is None else raw[: rule.numel - at]
        numbers, bias = _plain(torch, raw, rule.dtype, name)
        if rule.scales:
            numbers = _dequantized(torch, numbers, rule, at)
        yield Block(-numbers, -bias, raw) if rule.negated else Block(numbers, bias, raw)
        at += numbers.numel()


def measure(
    torch: Any,
    read: Callable[[], Iterable[bytes] | Filling],
    rule: ElementRule,
    bins: int,
    advance: Callable[[int], object] = lambda size: None,
) -> Measured:
    """Measure elements; ``read`` begins a reading of their little-endian bytes.

    Complex numbers count by absolute value. Sums are pairwise in float64. Memory: some blocks of ``STEP`` numbers.
    ``advance`` is called with numbers of bytes, in the first reading.
    """
    gauge = Gauge(torch, rule, bins)
    for block in blocks(torch, read(), rule):
        gauge.add(block)
        advance(block.raw.nbytes * PACKED.get(rule.dtype, 8) // 8)
    return gauge.measured(read)


class Gauge:
    """Accumulates the statistics of the blocks of a tensor. ``kept`` is the only block of a small one, valid until
    the next tensor is read."""

    def __init__(self, torch: Any, rule: ElementRule, bins: int) -> None:
        self.torch = torch
        self.rule = rule
        self.bins = bins
        self.nans = self.infs = self.zeros = self.blocks = 0
        self.low: Any = math.inf
        self.high: Any = -math.inf
        self.moments = Moments()
        self.kept: Any = None
        self.bias = 0

    def add(self, block: Block) -> None:
        """Add a block."""
        torch, bias, numbers = self.torch, block.bias, modulus(self.torch, block.numbers)
        finite, low, high = _finite(torch, numbers)
        count, rest = finite.numel(), numbers.numel() - finite.numel()  # ``len`` takes longer
        nans = int(torch.isnan(numbers).sum()) if rest else 0
        self.nans, self.infs = self.nans + nans, self.infs + rest - nans
        self.blocks, self.bias = self.blocks + 1, bias
        self.kept = finite if self.blocks == 1 else None
        if count:
            self.zeros += count - int(torch.count_nonzero(finite != -bias if bias else finite))
            low, high = low + bias, high + bias
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.moments = self.moments.plus(self._moments(finite, bias, low, high))

    def _moments(self, finite: Any, bias: int, low: Any, high: Any) -> Moments:
        torch, count = self.torch, finite.numel()
        bound = float(low)
        if low == high:
            return Moments(count, bound, bound * bound * count)
        if finite.dtype == torch.int64:
            # The sum of at most 2**31 numbers is exact, and so are distances from the smallest number as long as they
            # fit in 64 bits.
            exact = (int((finite >> 32).sum()) << 32) + int((finite & 0xFFFFFFFF).sum())
            mean = (exact + bias * count) / count
            squares = float(doubles(torch, finite, bias).square_().sum())
            finite = _above(finite, low - bias, high - low)
            middle, square = float(finite.mean()), math.inf
        else:
            mean = middle = float(finite.sum()) / count
            squares = square = float(torch.dot(finite, finite))
        if middle * middle * count <= square * _CLOSE < math.inf:
            return Moments(count, mean, squares, square - middle * middle * count)
        distances = torch.sub(finite, middle, out=SCRATCH.take(torch, "distances", count, torch.float64))
        return Moments(count, mean, squares, float(torch.dot(distances, distances)))

    def measured(self, read: Callable[[], Iterable[bytes] | Filling]) -> Measured:
        """Return the statistics of all added numbers; ``read`` reads them again if there are many."""
        torch, count = self.torch, self.moments.numel
        if not count:
            return Measured(0, self.nans, self.infs, 0)
        low, high = (int(end) if self.rule.whole else end for end in (self.low, self.high))
        counts: tuple[int, ...] = (count,)
        edges: tuple[float, ...] = (float(low), float(high))
        size = max(abs(low), abs(high))
        in_range = not size or SMALL < size < LARGE
        if low < high and in_range:
            edges = _edges(low, high, self.bins)
            if self.kept is not None:
                found = _histogram(torch, self.kept, self.bias, low, high, self.bins)
            else:
                found = torch.zeros(self.bins + 1, dtype=torch.int64)
                for numbers, bias, _ in blocks(torch, read(), self.rule):
                    real = modulus(torch, numbers)
                    finite = _finite(torch, real)[0] if self.nans or self.infs else real
                    found += _histogram(torch, finite, bias, low, high, self.bins)
            *inner, last, highest = found.tolist()
            counts = (*inner, last + highest)
        mean, squares, apart = self.moments[1:] if in_range else (None, None, None)
        norm = None if squares is None else math.sqrt(squares)
        std = None if apart is None or count < 2 else math.sqrt(apart / (count - 1))
        return Measured(count, self.nans, self.infs, self.zeros, low, high, mean, std, norm, counts, edges)


def _finite(torch: Any, numbers: Any) -> tuple[Any, Any, Any]:
    """Return the finite numbers, the smallest and the largest."""
    low, high = (end.item() for end in numbers.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return numbers, low, high
    finite = numbers[torch.isfinite(numbers)]
    return (finite, *(end.item() for end in finite.aminmax())) if finite.numel() else (finite, math.inf, -math.inf)


def _above(numbers: Any, low: int, width: int) -> Any:
    """Return the distances of 64-bit integers from the smallest, given the largest distance."""
    return (numbers - low).double() if width < 1 << 62 else numbers.double() - low


def _histogram(torch: Any, numbers: Any, bias: int, low: Any, high: Any, bins: int) -> Any:
    """Return the number of finite numbers in equal bins from ``low`` to ``high``, and last how many are ``high``."""
    if numbers.dtype == torch.int64:
        places, width = _above(numbers, low - bias, high - low), float(high - low)
    else:
        scratch = SCRATCH.take(torch, "distances", numbers.numel(), torch.float64)
        places, width = torch.sub(numbers, float(low), out=scratch), float(high) - float(low)
    return torch.bincount(places.mul_(bins / width).to(torch.uint8), minlength=bins + 1)


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    start, end = float(low), float(high)
    inner = (start * (1 - step / bins) + end * (step / bins) for step in range(1, bins))
    return (start, *inner, end)
