"""Combine CRC-32 checksums of bytes that were read in several parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

#: The polynomial of CRC-32, with the highest coefficient last.
_POLYNOMIAL: Final = 0xEDB88320


def combined_crc(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two adjacent byte ranges from their checksums; ``size`` is the size of the second, in bytes.

    As in zlib's ``crc32_combine``, the first checksum is shifted by as many zeros: multiplied by x^(8 size) modulo the
    polynomial.
    """
    return _product(_zeros(size), first) ^ second if size and first else first ^ second


@lru_cache(maxsize=64)
def _zeros(size: int) -> int:
    """Return x^(8 size) modulo the polynomial."""
    power, result = 1 << 23, 1 << 31  # x^8 and 1: the highest bit is the coefficient of x^0
    while size:
        if size & 1:
            result = _product(power, result)
        power = _product(power, power)
        size >>= 1
    return result


def _product(one: int, two: int) -> int:
    """Multiply two polynomials modulo the CRC-32 polynomial."""
    result = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            result ^= two
        two = two >> 1 ^ (_POLYNOMIAL if two & 1 else 0)
    return result
