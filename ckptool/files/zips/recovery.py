"""Read an archive from its start, record by record, if its directory is lost or cannot be trusted.

Torch writes a local header before each record and a descriptor after it, and the pickle first. So the records before a
truncation can be found without the directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from struct import Struct

from ...base.records import NamedTuple
from ..sources import Source, Span
from .audit import find_signatures
from .reader import FULL32, LOCAL, extra_fields

_LOCAL = LOCAL.unpack_from
_DESCRIPTOR32 = Struct("<3I").unpack_from
_DESCRIPTOR64 = Struct("<I2Q").unpack_from


class RecoveredRecord(NamedTuple):
    """A record found by its local header.

    ``span`` holds its bytes as stored; ``size`` is inflated; ``crc`` is 0 for "not computed". ``whole`` is False if its
    end was not found; its span then reaches to the end of the file.
    """

    name: str
    header: int
    span: Span
    size: int
    crc: int
    method: int
    whole: bool


def recover_records(source: Source, sizes: Mapping[str, int]) -> Iterator[RecoveredRecord]:
    """Yield every record from the start of the file.

    ``sizes`` maps the full names of records to their known sizes in bytes; the caller may fill it while iterating, once
    it has read the pickle. A record of unknown size ends at a descriptor that fits.
    """
    at = 0
    while at < source.size:
        raw = source.read(at, LOCAL.size)
        if raw[:4] == b"PK\x01\x02" or len(raw) < LOCAL.size:
            return
        if raw[:4] != b"PK\x03\x04":
            # The file is damaged here: continue with the next local header.
            at = next(find_signatures(source, at + 1, source.size), source.size)
            continue
        record, at = _recover(source, at, raw, sizes)
        yield record


def _recover(source: Source, at: int, raw: bytes, sizes: Mapping[str, int]) -> tuple[RecoveredRecord, int]:
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = _LOCAL(raw)
    rest = source.read(at + LOCAL.size, name_size + extra_size)
    name = rest[:name_size].decode("utf-8", "surrogateescape")
    begin = at + LOCAL.size + name_size + extra_size
    left = max(source.size - begin, 0)
    if not flags & 8:
        wide = dict(extra_fields(rest[name_size:])).get(1, b"")
        if size == FULL32 and len(wide) >= 16:
            size, packed = (int.from_bytes(wide[i : i + 8], "little") for i in (0, 8))
        whole = packed <= left
        span = Span(source, begin, min(packed, left))
        return RecoveredRecord(name, at, span, size, crc, method, whole), begin + span.size if whole else source.size
    known = sizes.get(name)
    if known is not None and method == 0:
        # Payloads may contain anything, so only the end according to the pickle counts.
        ends: Iterable[int] = (begin + known,)
        after = _next_header(source, begin + known)
    else:
        ends, after = find_signatures(source, begin, source.size, b"PK\x07\x08"), -1
    for end in ends:
        descriptor = _descriptor(source, begin, end)
        if descriptor is not None:
            crc, size, length = descriptor
            return RecoveredRecord(name, at, Span(source, begin, end - begin), size, crc, method, True), end + length
    if after < 0:
        after = next(find_signatures(source, begin, source.size), source.size)
    return RecoveredRecord(name, at, Span(source, begin, left), 0, 0, method, False), after


def _next_header(source: Source, end: int) -> int:
    """Return the offset of the next record after a damaged descriptor at ``end``, or -1."""
    if end + 16 > source.size:
        return source.size
    offsets = (end + 16, end + 24)
    return next((at for at in offsets if source.read(at, 4) in (b"PK\x03\x04", b"PK\x01\x02")), -1)


def _descriptor(source: Source, begin: int, end: int) -> tuple[int, int, int] | None:
    """Return (CRC, size, bytes of the descriptor) of a descriptor at ``end`` for the payload at ``begin``, or None."""
    raw = source.read(end, 24)
    if raw[:4] != b"PK\x07\x08" or len(raw) < 16:
        return None
    if len(raw) == 24:
        crc, packed, size = _DESCRIPTOR64(raw, 4)
        if packed == end - begin and (raw[12:16] == bytes(4) or packed >= FULL32):
            return crc, size, 24
    crc, packed, size = _DESCRIPTOR32(raw, 4)
    return (crc, size, 16) if packed == end - begin else None
