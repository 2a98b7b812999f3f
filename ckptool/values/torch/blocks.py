"""Bytes as blocks of numbers that torch computes with, in the same order and sizes whatever pieces they come in."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple, cast

from ...base.dtypes import BY_NAME, is_complex
from ...checkpoint.tensors import Tensor
from ..interpretation import Reading
from .loads import torch_dtype

#: Numbers computed with at a time: they and their intermediate results stay in the processor's cache.
STEP: Final = 1 << 18
#: The most channels of a tensor for which figures are kept, a byte each.
_MAX_CHANNELS: Final = 1 << 24
#: Dtypes that torch cannot compute with -> one of the same width that it can.
_BYTES_OF: Final = {
    **{"uint64": "int64", "bool": "uint8", "qint8": "int8", "quint8": "uint8", "qint32": "int32"},
    **{"quint4x2": "uint8", "quint2x4": "uint8", "float4_e2m1fn_x2": "uint8", "bcomplex32": "bfloat16"},
}
#: Bits of the numbers of which a byte has several, lowest first.
PACKED: Final = {"quint4x2": 4, "quint2x4": 2, "float4_e2m1fn_x2": 4}
#: The values of float4_e2m1fn, by code.
_FOUR: Final = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


class _Scratch(threading.local):
    """Memory of a thread for blocks: fresh memory for each takes longer than to compute with it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, object], Any] = {}

    def take(self, torch: Any, name: str, count: int, dtype: Any) -> Any:
        """Return memory for at most ``STEP`` numbers, the same for the same name."""
        if (name, dtype) not in self.kept:
            self.kept[name, dtype] = torch.empty(STEP, dtype=dtype)
        return self.kept[name, dtype][:count]

    def bytes(self, name: str, width: int) -> bytearray:
        """Return memory for ``STEP`` elements of ``width`` bytes, the same for the same name."""
        if (name, width) not in self.kept:
            self.kept[name, width] = bytearray(STEP * width)
        return cast("bytearray", self.kept[name, width])


SCRATCH: Final = _Scratch()


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

    @property
    def width(self) -> int:
        """Bytes of an element, once those of packed dtypes have a byte each."""
        return BY_NAME[self.dtype].itemsize

    @property
    def whole(self) -> bool:
        """Whether the numbers are integers."""
        return not self.scales and not self.dtype.startswith(("float", "bfloat")) and not is_complex(self.dtype)

    @property
    def coded(self) -> bool:
        """Whether there are at most 65,536 different elements, each of which stands for one number."""
        return self.width <= 2 and len(self.scales) <= 1 and not is_complex(self.dtype)


def rule_of(reading: Reading) -> ElementRule:
    """Return the rule for the elements of a reading."""
    tensor, affine = reading.tensor, reading.affine
    scales, zero_points = (affine.scales, affine.zero_points) if affine is not None else ((), ())
    inner = prod(tensor.shape[affine.axis + 1 :]) if affine is not None and affine.axis >= 0 else 1
    return ElementRule(tensor.dtype, scales, zero_points, inner, reading.negated)


class Layout(NamedTuple):
    """The order in which numbers come: ``channels`` times ``inner`` of one channel, all of that ``outer`` times.

    A tensor without channels is one.
    """

    outer: int
    channels: int
    inner: int

    @property
    def numel(self) -> int:
        return self.outer * self.channels * self.inner


def layout_of(tensor: Tensor, axes: Sequence[int]) -> Layout:
    """Return the layout of a tensor that is read along ``axes``; its channels are the indices of axis 0."""
    shape = tensor.shape
    # Each element of this dtype is two numbers.
    pair = 2 if tensor.dtype == "float4_e2m1fn_x2" else 1
    if len(shape) < 2 or 0 not in axes or shape[0] > _MAX_CHANNELS:
        return Layout(1, 1, prod(shape[axis] for axis in axes) * pair)
    place = axes.index(0)
    outer, inner = (prod(shape[axis] for axis in part) for part in (axes[:place], axes[place + 1 :]))
    return Layout(outer, shape[0], inner * pair)


def row_major(tensor: Tensor) -> Layout:
    """Return the layout of a tensor that is read in row-major order."""
    return layout_of(tensor, range(len(tensor.shape)))


class Part(NamedTuple):
    """A part of a tensor that is one block: ``length`` numbers of each of ``channels`` channels from ``first`` on, all
    of that ``repeats`` times."""

    repeats: int
    first: int
    channels: int
    length: int

    @property
    def numel(self) -> int:
        return self.repeats * self.channels * self.length


def parts(layout: Layout, group: int) -> Iterator[Part]:
    """Yield the parts of a tensor in order, each of at most ``STEP`` numbers.

    Where the channels come one after the other a part has whole groups of ``group`` channels, or lies within one.
    """
    outer, channels, inner = layout
    if outer > 1 and channels * inner <= STEP:
        most = STEP // (channels * inner)
        yield from (Part(min(most, outer - at), 0, channels, inner) for at in range(0, outer, most))
        return
    runs = list(_runs(channels, max(STEP // max(inner, 1), 1), group)) if outer * inner else []
    for _ in range(outer):
        for first, count in runs:
            yield from (Part(1, first, count, min(STEP, inner - at)) for at in range(0, inner, STEP))


def _runs(channels: int, most: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of stretches of at most ``most`` channels."""
    if most >= group:
        most -= most % group
        full = channels - channels % group
        yield from ((first, min(most, full - first)) for first in range(0, full, most))
        if full < channels:
            yield full, channels - full
        return
    for begin in range(0, channels, group):
        end = min(begin + group, channels)
        yield from ((first, min(most, end - first)) for first in range(begin, end, most))


def raw_blocks(
    torch: Any, pieces: Iterable[bytes], rule: ElementRule, sizes: Iterable[int], name: str
) -> Iterator[Any]:
    """Yield the elements as torch has them, so many at a time; each block is valid until the next one is requested.

    Packed elements come as their codes, a byte each. Ends where the bytes end. ``name`` is that of the memory.
    """
    dtype, width = torch_dtype(torch, _BYTES_OF.get(rule.dtype, rule.dtype)), rule.width
    block = SCRATCH.bytes(name, width)
    rest = memoryview(b"")
    unread = iter(_unpacked(pieces, rule.dtype))
    for size in sizes:
        at = 0
        while at < size * width and (rest or (rest := memoryview(next(unread, b"")))):
            part = rest[: size * width - at]
            block[at : at + len(part)] = part
            at += len(part)
            rest = rest[len(part) :]
        if at:
            yield torch.frombuffer(memoryview(block)[:at], dtype=dtype)


def _unpacked(pieces: Iterable[bytes], dtype: str) -> Iterable[bytes]:
    """Return the pieces with a byte for each number of a packed dtype."""
    bits = PACKED.get(dtype)
    return pieces if bits is None else (_codes(data, bits) for data in pieces)


def _codes(data: bytes, bits: int) -> bytes:
    codes = bytearray(len(data) * 8 // bits)
    for number, shift in enumerate(range(0, 8, bits)):
        codes[number :: 8 // bits] = data.translate(bytes(byte >> shift & (1 << bits) - 1 for byte in range(256)))
    return bytes(codes)


def numbers_of(torch: Any, raw: Any, rule: ElementRule, at: int, name: str = "a") -> tuple[Any, int]:
    """Return a block as numbers, float64 or complex128, or int64 and the integer that must be added to them.

    ``at`` is the number of the first one in the tensor, ``name`` that of the memory, which the next block overwrites.
    """
    numbers, bias = _plain(torch, raw, rule.dtype, name)
    if rule.scales:
        numbers = _dequantized(torch, numbers, rule, at)
    return (-numbers, -bias) if rule.negated else (numbers, bias)


def doubles(torch: Any, numbers: Any, bias: int) -> Any:
    """Return numbers that are not complex, with what must be added to them, as float64."""
    if not bias:
        return numbers.double()
    # Small ones would lose their last bits to the sum.
    return torch.where(numbers < 0, (numbers ^ -(1 << 63)).double(), numbers.double() + bias)


def modulus(torch: Any, numbers: Any) -> Any:
    """Return the absolute values of complex numbers; one with a NaN counts as NaN, even beside an infinity."""
    if not numbers.is_complex():
        return numbers
    return torch.where(torch.isnan(torch.view_as_real(numbers)).any(1), math.nan, numbers.abs())


def _plain(torch: Any, raw: Any, dtype: str, name: str) -> tuple[Any, int]:
    if dtype == "uint64":
        # In the order of the unsigned numbers: the smallest is the smallest int64.
        return raw ^ -(1 << 63), 1 << 63
    if dtype in ("int64", "float64"):
        return raw, 0
    if dtype == "float4_e2m1fn_x2":
        return torch.tensor(_FOUR, dtype=torch.float64)[(raw & 15).long()], 0
    if is_complex(dtype):
        return torch.view_as_complex((torch.view_as_real(raw) if raw.is_complex() else raw.view(-1, 2)).double()), 0
    if dtype.startswith("float8"):
        # Torch converts them one by one.
        codes = torch.arange(256, dtype=torch.uint8).view(raw.dtype).float().double()
        return torch.index_select(codes, 0, raw.view(torch.uint8).int()), 0
    if dtype == "bool":
        raw = raw != 0
    if dtype == "float16":
        raw = raw.float()
    return SCRATCH.take(torch, name, len(raw), torch.float64).copy_(raw), 0


def _dequantized(torch: Any, numbers: Any, rule: ElementRule, at: int) -> Any:
    if len(rule.scales) == 1:
        return (numbers - rule.zero_points[0]) * rule.scales[0]
    channel = (torch.arange(at, at + len(numbers)) // rule.inner) % len(rule.scales)
    scales, zero_points = (torch.tensor(part, dtype=torch.float64) for part in (rule.scales, rule.zero_points))
    return (numbers - zero_points[channel]) * scales[channel]
