"""The outermost fields of a protobuf message, as far as telling one format from another takes."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...files.sources import Source

#: Fields that are looked at.
_MOST: Final = 64
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """A field: its number, its value where it is a number, its first bytes where it is bytes, and their size."""

    number: int
    value: int
    head: bytes
    size: int


def fields(source: Source) -> list[Field]:
    """The first fields of a message that takes the whole source; nothing where it is none."""
    found: list[Field] = []
    at = 0
    while at < source.size and len(found) < _MOST:
        block = source.read(at, 20)
        tag, used = _varint(block, 0)
        if used < 0 or not 0 < tag >> 3 < 1 << 29:
            return []
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, used = _varint(block, used)
            if used < 0:
                return []
            found.append(Field(number, value, b"", 0))
            at += used
        elif wire == _BYTES:
            size, used = _varint(block, used)
            if used < 0 or at + used + size > source.size:
                return []
            found.append(Field(number, -1, source.read(at + used, min(size, 64)), size))
            at += used + size
        elif wire in (_FIXED32, _FIXED64):
            found.append(Field(number, -1, b"", 0))
            at += used + (4 if wire == _FIXED32 else 8)
        else:
            return []
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, offset behind it); the offset is -1 where there is none."""
    value = 0
    for count in range(10):
        if at + count >= len(data):
            break
        value |= (data[at + count] & 0x7F) << (7 * count)
        if data[at + count] < 0x80:
            return value, at + count + 1
    return 0, -1
