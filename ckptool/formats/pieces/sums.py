"""Sums and means of tensors, element by element, without torch: for the small tensors that parts of a model add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import frexp, inf, isfinite, ldexp
from struct import pack
from typing import Final

from ...files.sources import Source, Span
from ...values.numeric import to_numbers

#: The most bytes of each tensor in memory at once.
_BLOCK: Final = 1 << 16


def _packed(code: str, number: float) -> bytes:
    try:
        return pack(f"<{code}", number)
    except OverflowError:
        return pack(f"<{code}", inf if number > 0 else -inf)


def _bfloat16(number: float) -> bytes:
    """Return a number as bfloat16, rounded once: ties go to even."""
    if isfinite(number) and number:
        _, exponent = frexp(number)
        steps = 8 - max(exponent, -125)  # eight bits of precision, fewer below the smallest normal number
        number = ldexp(round(ldexp(number, steps)), -steps)
    return _packed("f", number)[2:]


#: Dtypes that have sums, and how a number is stored.
SUMMABLE: Final[Mapping[str, Callable[[float], bytes]]] = {
    "bfloat16": _bfloat16,
    **{name: partial(_packed, code) for name, code in {"float16": "e", "float32": "f", "float64": "d"}.items()},
}


class SumSource(Source):
    """The sums of tensors of one dtype, divided by ``divisor``: computed in float64, rounded once.

    ``terms`` are their elements, row by row.
    """

    def __init__(self, terms: Sequence[Span], dtype: str, width: int, divisor: int, name: str) -> None:
        self.name, self.size = name, terms[0].size
        self.terms, self.dtype, self.width, self.divisor = tuple(terms), dtype, width, divisor

    def read(self, offset: int, size: int) -> bytes:
        end = max(min(offset + size, self.size), offset)
        begin = offset - offset % self.width
        blocks = (self._block(at, min(at + _BLOCK, end)) for at in range(begin, end, _BLOCK))
        return b"".join(blocks)[offset - begin : end - begin]

    def _block(self, begin: int, end: int) -> bytes:
        end += -end % self.width
        columns = [to_numbers(span.source.read(span.offset + begin, end - begin), self.dtype) for span in self.terms]
        stored = SUMMABLE[self.dtype]
        return b"".join(stored(sum(numbers) / self.divisor) for numbers in zip(*columns))

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        for span in self.terms:
            yield span._replace(offset=span.offset + offset, size=min(size, self.size - offset))
