"""The header of a safetensors file: which tensors, of what dtype and shape, where.

    u64 N | N bytes of JSON | the bytes of all tensors

Source: the format as huggingface/safetensors describes it, and the parser of safetensors 0.8 where that is stricter.
Every rule is checked; a file that breaks one is refused with that rule. One rule is ours: a name may stand there once
only, while the library takes the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import isfinite, prod
from operator import mul
from typing import Any, Final, NamedTuple

from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.text import counted, salvage_step, shown
from ...files.sources import Source

# -- JSON in which a name stands once: the last of two would win silently, and another reader may take the first


class DoubledError(ValueError):
    """An object has a name twice; the name is the message."""


def strict_json(text: str, parse_int: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; ``parse_int`` makes something else of an integer.

    Raises DoubledError where an object has a name twice, ValueError for what is no JSON, NaN and Infinity included, and
    RecursionError where it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_int=parse_int)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise DoubledError(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


#: Bits of one element. The tensors of 4 and 6 bits are packed, and end on a byte.
BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
#: Bytes of a header that the library reads.
MOST_HEADER: Final = 100_000_000
_METADATA: Final = "__metadata__"
_MOST_SIZE: Final = 1 << 64
#: Objects and lists in each other that the library follows, the header itself among them.
_DEEPEST: Final = 127
#: "-0" as a whole number: to the library that is one with a fraction.
_MINUS_ZERO: Final = re.compile(r"-0(?![0-9.eE])")
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Entry(NamedTuple):
    """A tensor: ``dtype`` as the format spells it, ``begin`` and ``end`` in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors in the order of the JSON, the texts beside them, and where the bytes begin.

    ``odd`` are remarks on what the library takes and its own writer never writes.
    """

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    data: int
    odd: tuple[str, ...] = ()


def read_header(source: Source, *, cut: bool = False) -> Header:
    """Read and check the header; raises MalformedError with the rule that the file breaks.

    With ``cut`` the file may end before its last tensor, or go on behind it.
    """
    if source.size < 8:
        raise _broken(source, "it has fewer than the 8 bytes that say how long the header is")
    size = int.from_bytes(source.read(0, 8), "little")
    if size > MOST_HEADER:
        raise _broken(source, f"the header is said to have {size:,} bytes, {MOST_HEADER:,} are the most")
    if 8 + size > source.size:
        raise _broken(source, f"the header is said to have {size:,} bytes, the file ends after {source.size - 8:,}")
    raw = source.read(8, size)
    fields = _parsed(source, raw)
    odd = [] if raw[:1] == b"{" else ["the header begins with blanks"]
    metadata = fields.pop(_METADATA, {})
    if metadata is None:  # the library takes null for nothing, so do we
        metadata = {}
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise _broken(source, f"{_METADATA} must be an object whose values are all strings")
    data = 8 + size
    entries = tuple(_entry(source, name, value, data) for name, value in fields.items())
    _check_tiling(source, entries, data, cut)
    return Header(entries, metadata, data, tuple(odd))


def _broken(source: Source, rule: str, where: str = "") -> MalformedError:
    what = f"no valid safetensors file: {rule}"
    return MalformedError(what, path=source.name, where=where, next="it is damaged: get the file again")


def _parsed(source: Source, raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _broken(source, f"the header is not UTF-8 at byte {8 + error.start:,}") from None
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise _broken(source, "the header must begin with '{'")
    try:
        # Seldom, and it takes time.
        fields = strict_json(text, parse_int=_whole if _MINUS_ZERO.search(text) else None)
    except DoubledError as error:
        raise _broken(source, f"the name {shown(str(error))} stands in the header twice") from None
    except (ValueError, RecursionError) as error:
        raise _broken(source, f"the header is no JSON: {error}") from None
    assert isinstance(fields, dict)
    # Half of a character that JSON spells in two; only an escape can bring it into text that was UTF-8.
    half = _HALF.search(text) and next((name for name in _texts(fields) if _SURROGATE.search(name)), None)
    if half:
        raise _broken(source, f"the text {shown(half)} holds half of a character")
    return fields


def _texts(fields: dict[str, Any]) -> Iterator[str]:
    """Every text of the header, the names among them."""
    work: list[Any] = [fields]
    while work:
        value = work.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            work += (*value, *value.values())
        elif isinstance(value, list):
            work += value


def _whole(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _entry(source: Source, name: str, value: Any, data: int) -> Entry:
    def broken(rule: str) -> MalformedError:
        return _broken(source, f"tensor {shown(name)}: {rule}", name)

    if not isinstance(value, dict):
        raise broken("its entry must be an object with dtype, shape and data_offsets")
    missing = [field for field in ("dtype", "shape", "data_offsets") if field not in value]
    if missing:
        raise broken(f"{missing[0]} is missing")
    if len(value) > 3:  # the library reads what it does not know, and lets it be
        rule = _unreadable([value[field] for field in value.keys() - {"dtype", "shape", "data_offsets"}])
        if rule:
            raise broken(rule)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or dtype not in BITS:
        raise broken(f"the dtype {shown(str(dtype))} is unknown")
    if type(shape) is not list or not all(_is_size(size) for size in shape):
        raise broken("its shape must be a list of integers from 0 on")
    if len(shape) > LIMITS.dimensions:
        raise broken(f"{len(shape):,} dimensions are more than any tensor has, {LIMITS.dimensions:,} are followed")
    if type(offsets) is not list or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise broken("its data_offsets must be two integers from 0 on")
    begin, end = offsets
    if begin > end:
        raise broken(f"its data_offsets are the wrong way round: {begin:,} and {end:,}")
    bits = prod(shape) * BITS[dtype]
    # The library multiplies from the left, and a product that overflows is not saved by a zero behind it.
    if max(accumulate(shape, mul), default=0) >= _MOST_SIZE or bits >= _MOST_SIZE:
        raise broken("its shape has more elements than can be counted")
    if bits % 8:
        raise broken(f"{counted(prod(shape), 'element')} of {BITS[dtype]} bits do not end on a byte")
    if bits // 8 != end - begin:
        raise broken(f"its shape takes {bits // 8:,} bytes, its data_offsets span {end - begin:,}")
    return Entry(name, dtype, tuple(shape), data + begin, data + end)


def _unreadable(values: list[Any]) -> str:
    """Why the library cannot read one of these values at all, "" where it can."""
    depth = 2  # the header, and the entry
    while values:
        deeper: list[Any] = []
        for value in values:
            if isinstance(value, dict | list):
                deeper.append(value)
            elif isinstance(value, int | float) and not _in_range(value):
                return "a number in it is out of range"
        depth += bool(deeper)
        if depth > _DEEPEST:
            return f"more than {_DEEPEST} objects and lists are in each other"
        values = [part for value in deeper for part in (value.values() if isinstance(value, dict) else value)]
    return ""


def _in_range(number: float) -> bool:
    """Is it a finite one for who reads it with 64 bits?"""
    try:
        return isfinite(number)
    except OverflowError:
        return False


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_SIZE


def _check_tiling(source: Source, entries: tuple[Entry, ...], data: int, cut: bool) -> None:
    """The tensors must fill the file from the header to its end, without a hole and without sharing a byte."""
    at = data
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin > at:
            raise _broken(source, f"a hole of {entry.begin - at:,} bytes before tensor {shown(entry.name)}", entry.name)
        if entry.begin < at:
            raise _broken(source, f"tensor {shown(entry.name)} begins within the one before it", entry.name)
        at = entry.end
    if at > source.size and not cut:
        left = sum(entry.end <= source.size for entry in entries)
        rule = f"its tensors end at byte {at:,}, the file has {source.size:,}"
        error = _broken(source, f"{rule}: it is cut, {left:,} of {counted(len(entries), 'tensor')} are whole")
        error.next = f"download it again, or {salvage_step(source.name)}" if left else "download it again"
        raise error
    if at < source.size and not cut:
        raise _broken(source, f"{counted(source.size - at, 'byte')} behind the last tensor")
