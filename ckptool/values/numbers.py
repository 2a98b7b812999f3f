"""From bytes to Python numbers, without torch: every dtype that torch stores.

The formats of eight bits follow "FP8 Formats for Deep Learning" and the OCP specification, as torch implements them in
``torch/headeronly/util/Float8_*.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from math import inf, isfinite, nan
from struct import iter_unpack
from sys import byteorder
from typing import Final, TypeAlias

Number: TypeAlias = "bool | int | float | complex"

#: dtype -> code of ``array``, for those whose numbers Python itself has. Bits come as integers.
_ARRAYS: Final = {
    "float64": "d",
    "float32": "f",
    "int64": "q",
    "uint64": "Q",
    "int32": "i",
    "uint32": "I",
    "qint32": "i",
    "int16": "h",
    "uint16": "H",
    "bits16": "H",
    "int8": "b",
    "qint8": "b",
}
#: dtype -> bits of the exponent, of the mantissa, bias, and how it spells what is no number.
_EIGHT: Final = {
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "last"),
    "float8_e5m2fnuz": (5, 2, 16, "minus zero"),
    "float8_e4m3fnuz": (4, 3, 8, "minus zero"),
    "float8_e8m0fnu": (8, 0, 127, "last"),
}
_COMPLEX: Final = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def numbers(data: bytes, dtype: str) -> list[Number]:
    """The numbers in little-endian bytes.

    Quantized dtypes give their integers, with two or four to a byte those of every byte in order; bits and
    float4_e2m1fn_x2 (two codes to a byte) give whole integers. Raises KeyError for a dtype that torch does not know.
    """
    return _decoder(dtype)(data)


@cache
def _decoder(dtype: str) -> Callable[[bytes], list[Number]]:
    if dtype in _ARRAYS:
        return lambda data: _native(data, _ARRAYS[dtype])
    if dtype in _COMPLEX:
        parts = _decoder(_COMPLEX[dtype])
        return lambda data: _paired(parts(data))
    if dtype == "float16":
        return lambda data: [value for (value,) in iter_unpack("<e", data)]
    if dtype == "bfloat16":
        return _bfloat16
    if dtype == "bool":
        return lambda data: [byte != 0 for byte in data]
    if dtype in _EIGHT:
        table = [_eight(code, *_EIGHT[dtype]) for code in range(256)]
        return lambda data: [table[byte] for byte in data]
    if dtype == "quint4x2":
        return lambda data: [code for byte in data for code in (byte & 15, byte >> 4)]
    if dtype == "quint2x4":
        return lambda data: [byte >> shift & 3 for byte in data for shift in (0, 2, 4, 6)]
    if dtype in ("uint8", "quint8", "bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"):
        return list
    raise KeyError(dtype)


def _native(data: bytes, code: str) -> list[Number]:
    values: array[float] = array(code, data)
    if byteorder == "big":
        values.byteswap()
    return list(values)


def _paired(parts: Sequence[Number]) -> list[Number]:
    # Not complex(a, b) of parts that are complex: these are plain numbers, and signs of zeros stay.
    return [complex(real, imag) for real, imag in zip(parts[::2], parts[1::2])]


def _bfloat16(data: bytes) -> list[Number]:
    """The upper half of a float32."""
    wide = bytearray(len(data) * 2)
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return _native(bytes(wide), "f")


def _eight(code: int, exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> float:
    if exponent_bits == 8:  # no sign, no mantissa, no zero
        return nan if code == 255 else 2.0 ** (code - bias)
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    if special == "minus zero" and code == 128:
        return nan
    if special == "last" and code & 127 == 127:
        return nan
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return nan if mantissa else sign * inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def json_number(value: Number | None) -> object:
    """A number as JSON has it: "nan", "inf" and "-inf" as texts, a complex one as [real, imaginary]."""
    if isinstance(value, complex):
        return [json_number(value.real), json_number(value.imag)]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
