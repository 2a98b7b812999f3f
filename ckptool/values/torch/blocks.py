"""Turn bytes into blocks of numbers for torch, with the same order and sizes however the bytes are split."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, cast

from ...base.dtypes import BY_NAME, is_complex
from ...base.records import NamedTuple
from ..elements import Filling
from ..interpretation import Reading
from .loads import torch_dtype

#: Numbers computed at a time. They and their intermediate results stay in the processor's cache.
STEP: Final = 1 << 18
#: Dtypes that torch cannot compute with -> a dtype of the same width that it can.
_BYTES_OF: Final = {
    **{"uint64": "int64", "bool": "uint8", "qint8": "int8", "quint8": "uint8", "qint32": "int32"},
    **{"quint4x2": "uint8", "quint2x4": "uint8", "float4_e2m1fn_x2": "uint8", "bcomplex32": "bfloat16"},
}
#: Bits per number of dtypes with several numbers in a byte, lowest bits first.
PACKED: Final = {"quint4x2": 4, "quint2x4": 2, "float4_e2m1fn_x2": 4}
#: The values of float4_e2m1fn, by code.
_FOUR: Final = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


class _Scratch(threading.local):
    """Per-thread memory for blocks, because allocating fresh memory takes longer than the computation."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, object], Any] = {}

    def take(self, torch: Any, name: str, count: int, dtype: Any) -> Any:
        """Return memory for at most ``STEP`` numbers; the same name gives the same memory."""
        if (name, dtype) not in self.kept:
            self.kept[name, dtype] = torch.empty(STEP, dtype=dtype)
        return self.kept[name, dtype][:count]

    def bytes(self, name: str, width: int) -> bytearray:
        """Return memory for ``STEP`` elements of ``width`` bytes; the same name gives the same memory."""
        if (name, width) not in self.kept:
            self.kept[name, width] = bytearray(STEP * width)
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


def raw_blocks(torch: Any, pieces: Iterable[bytes] | Filling, rule: ElementRule, size: int, name: str) -> Iterator[Any]:
    """Yield the elements in torch dtypes, ``size`` at a time; each block is valid until the next one is requested.

    Packed elements become codes, one byte each. ``name`` selects the memory.
    """
    dtype, width = torch_dtype(torch, _BYTES_OF.get(rule.dtype, rule.dtype)), rule.width
    block = memoryview(SCRATCH.bytes(name, width))[: size * width]
    fill = pieces if callable(pieces) else _filling(_unpacked(pieces, rule.dtype))
    while done := fill(block):
        yield torch.frombuffer(block[:done], dtype=dtype)


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


def _unpacked(pieces: Iterable[bytes], dtype: str) -> Iterable[bytes]:
    """Return the pieces with one byte for each number of a packed dtype."""
    bits = PACKED.get(dtype)
    return pieces if bits is None else (_codes(data, bits) for data in pieces)


def _codes(data: bytes, bits: int) -> bytes:
    codes = bytearray(len(data) * 8 // bits)
    for number, shift in enumerate(range(0, 8, bits)):
        codes[number :: 8 // bits] = data.translate(bytes(byte >> shift & (1 << bits) - 1 for byte in range(256)))
    return bytes(codes)


def numbers_of(torch: Any, raw: Any, rule: ElementRule, at: int, name: str = "a") -> tuple[Any, int]:
    """Return a block as float64 or complex128 numbers, or as int64 and the integer that must be added to them.

    ``at`` is the index of the first number in the tensor. ``name`` selects the memory, which the next block overwrites.
    """
    numbers, bias = _plain(torch, raw, rule.dtype, name)
    if rule.scales:
        numbers = _dequantized(torch, numbers, rule, at)
    return (-numbers, -bias) if rule.negated else (numbers, bias)


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
        return torch.tensor(_FOUR, dtype=torch.float64)[(raw & 15).long()], 0
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
    return SCRATCH.take(torch, name, len(raw), torch.float64).copy_(raw), 0


def _dequantized(torch: Any, numbers: Any, rule: ElementRule, at: int) -> Any:
    if len(rule.scales) == 1:
        return (numbers - rule.zero_points[0]) * rule.scales[0]
    channel = (torch.arange(at, at + len(numbers)) // rule.inner) % len(rule.scales)
    scales, zero_points = (torch.tensor(part, dtype=torch.float64) for part in (rule.scales, rule.zero_points))
    return (numbers - zero_points[channel]) * scales[channel]
