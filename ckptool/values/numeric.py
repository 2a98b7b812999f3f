"""Convert bytes to Python numbers without torch, for every dtype that torch stores.

The eight-bit formats follow "FP8 Formats for Deep Learning" and the OCP specification, as torch implements them in
``torch/headeronly/util/Float8_*.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import copysign, frexp, inf, isfinite, ldexp, nan
from struct import iter_unpack, pack
from sys import byteorder
from typing import Final, TypeAlias

Number: TypeAlias = "bool | int | float | complex"

#: The code of ``array`` for each dtype that it supports.
_ARRAY_CODES: Final = {
    **{"float64": "d", "float32": "f", "int64": "q", "uint64": "Q", "int32": "i", "uint32": "I"},
    **{"int16": "h", "uint16": "H", "int8": "b", "qint32": "i", "qint8": "b", "bits16": "H"},
}
#: dtype -> bits of the exponent, bits of the mantissa, bias, and the encoding of NaN: as in IEEE 754, in the last code,
#: or in the code of minus zero.
_FLOAT8: Final = {
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "last"),
    "float8_e5m2fnuz": (5, 2, 16, "minus zero"),
    "float8_e4m3fnuz": (4, 3, 8, "minus zero"),
    "float8_e8m0fnu": (8, 0, 127, "last"),
}
#: The values of float4_e2m1fn, by code (OCP Microscaling Formats).
E2M1: Final = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_COMPLEX: Final = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
_BYTES: Final = frozenset(("uint8", "quint8", "bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"))


def to_numbers(data: bytes, dtype: str) -> list[Number]:
    """Return the numbers in little-endian bytes.

    Quantized dtypes give their integers; with two or four integers per byte, the lowest bits come first. Bits and
    float4_e2m1fn_x2 (two codes per byte) give whole bytes. Raise KeyError for a dtype that torch does not have.
    """
    return _decoder(dtype)(data)


@cache
def _decoder(dtype: str) -> Callable[[bytes], list[Number]]:
    if dtype in _ARRAY_CODES:
        return lambda data: _from_array(data, _ARRAY_CODES[dtype])
    if dtype in _COMPLEX:
        # The parts are plain numbers here, because complex(a, b) with complex parts would lose the signs of zeros.
        parts = _decoder(_COMPLEX[dtype])
        return lambda data: list(map(complex, (numbers := parts(data))[::2], numbers[1::2]))
    if dtype == "float16":
        return lambda data: [value for (value,) in iter_unpack("<e", data)]
    if dtype == "bfloat16":
        return lambda data: _from_array(widened_bfloat16(data), "f")
    if dtype == "bool":
        return lambda data: [byte != 0 for byte in data]
    if dtype in _FLOAT8:
        table = [_float8(code, *_FLOAT8[dtype]) for code in range(256)]
        return lambda data: [table[byte] for byte in data]
    if dtype == "quint4x2":
        return lambda data: [code for byte in data for code in (byte & 15, byte >> 4)]
    if dtype == "quint2x4":
        return lambda data: [byte >> shift & 3 for byte in data for shift in (0, 2, 4, 6)]
    if dtype in _BYTES:
        return list
    raise KeyError(dtype)


def _from_array(data: bytes, code: str) -> list[Number]:
    values: array[float] = array(code, data)
    if byteorder == "big":
        values.byteswap()
    return list(values)


def widened_bfloat16(data: bytes) -> bytes:
    """Return bfloat16 numbers as float32, whose upper halves they are."""
    wide = bytearray(len(data) * 2)
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return bytes(wide)


def _float8(code: int, exponent_bits: int, mantissa_bits: int, bias: int, nan_code: str) -> float:
    if exponent_bits == 8:  # this format has no sign, no mantissa, no zero
        return nan if code == 255 else 2.0 ** (code - bias)
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    if (nan_code == "minus zero" and code == 128) or (nan_code == "last" and code & 127 == 127):
        return nan
    if nan_code == "ieee" and exponent == (1 << exponent_bits) - 1:
        return nan if mantissa else sign * inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def _packed(code: str, number: float) -> bytes:
    try:
        return pack(f"<{code}", number)
    except OverflowError:
        return pack(f"<{code}", inf if number > 0 else -inf)


def _bfloat16(number: float) -> bytes:
    if isfinite(number) and number:
        _, exponent = frexp(number)
        steps = 8 - max(exponent, -125)  # eight bits of precision, fewer below the smallest normal number
        number = copysign(ldexp(round(ldexp(number, steps)), -steps), number)
    return _packed("f", number)[2:]


#: How a number is stored in each dtype to which numbers can be rounded: once, ties to even.
ROUNDED: Final[Mapping[str, Callable[[float], bytes]]] = {
    "bfloat16": _bfloat16,
    **{name: partial(_packed, code) for name, code in {"float16": "e", "float32": "f", "float64": "d"}.items()},
}


def json_number(value: Number | None) -> object:
    """Return a number for JSON: "nan", "inf" and "-inf" as strings, a complex number as [real, imaginary]."""
    if isinstance(value, complex):
        return [json_number(value.real), json_number(value.imag)]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
