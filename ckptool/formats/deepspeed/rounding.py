"""Compare 16-bit weights with the optimizer's 32-bit weights: whether they are equal after rounding."""

from __future__ import annotations

import struct
from typing import Final

from ..pieces.chunks import Rows

#: Elements that are compared in one place.
SAMPLE: Final = 64
#: One in this many elements may differ: a program may have changed some since the last step.
MOST_UNLIKE: Final = 16
#: Struct formats for the bits of a dtype.
_BITS: Final = {"float32": "I", "bfloat16": "H", "float16": "H"}


def unlike(wide: Rows, at: int, narrow: Rows, there: int, count: int) -> tuple[int, int]:
    """Compare up to ``SAMPLE`` elements from ``at`` and ``there`` on; return (unequal elements, compared elements).

    Elements of ``wide`` are rounded to the dtype of ``narrow``. Returns (0, 0) for other dtypes than 32 and 16 bits.
    """
    count = min(count, SAMPLE)
    if wide.dtype.name not in _BITS or narrow.dtype.name not in _BITS:
        return 0, 0
    first = _read(wide, at, count)
    second = _read(narrow, there, count)
    if len(first) != count * wide.dtype.itemsize or len(second) != count * narrow.dtype.itemsize:
        return 0, 0
    expected = rounded(first, wide.dtype.name, narrow.dtype.name)
    if expected is None:
        return 0, 0
    own = struct.unpack(f"<{count}{_BITS[narrow.dtype.name]}", second)
    name = narrow.dtype.name
    return sum(one != two and not (_is_nan(one, name) and _is_nan(two, name)) for one, two in zip(expected, own)), count


def _read(rows: Rows, at: int, count: int) -> bytes:
    width = rows.dtype.itemsize
    return rows.source.read(rows.begin + at * width, count * width)


def rounded(data: bytes, dtype: str, target: str) -> tuple[int, ...] | None:
    """Return the bits of elements rounded to another dtype, to nearest, ties to even; None if it is not narrower."""
    count = len(data) // (4 if dtype == "float32" else 2)
    bits: tuple[int, ...] = struct.unpack(f"<{count}{_BITS[dtype]}", data)
    if dtype == target:
        return bits
    if dtype != "float32":
        return None
    if target == "bfloat16":
        return tuple(map(_upper_half, bits))
    return tuple(map(_half, struct.unpack(f"<{count}f", data)))


def _upper_half(bits: int) -> int:
    return bits >> 16 | 0x40 if _is_nan(bits, "float32") else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _half(value: float) -> int:
    try:
        bits: int = struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00
    return bits


def _is_nan(bits: int, dtype: str) -> bool:
    magnitude = bits & (0x7FFFFFFF if dtype == "float32" else 0x7FFF)
    return magnitude > {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
