"""Convert values in an object graph to JSON values."""

from __future__ import annotations

from math import isfinite

from ..base.limits import LIMITS


def json_value(value: object) -> object:
    """Return a value that JSON can hold: without NaN, infinity, or integers too long for Python to print."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, int) and is_huge(value):
        return huge_text(value)
    return repr(value) if isinstance(value, bytes | complex) else value


def is_huge(value: int) -> bool:
    """Return whether an integer has more digits than Python prints."""
    return value.bit_length() > LIMITS.int_digits * 3


def huge_text(value: int) -> str:
    """Return a text to show instead of a huge integer."""
    return f"an integer of {value.bit_length():,} bits"
