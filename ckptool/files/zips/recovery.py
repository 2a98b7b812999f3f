"""Reading an archive from its start, record by record, where its directory is lost or not to be believed.

Torch writes each record with a local header before it and a descriptor behind it, and the pickle first, so that what
was written before a cut can be found without the directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from ..sources import Source, Span
from .audit import signatures
from .reader import FULL32, LOCAL, extras

_LOCAL = LOCAL.unpack_from
_DESCRIPTOR32 = Struct("<3I").unpack_from
_DESCRIPTOR64 = Struct("<I2Q").unpack_from


class Walked(NamedTuple):
    """A record as its local header tells: ``span`` its bytes as stored, ``size`` inflated, ``crc`` 0 for "not
    computed".

    ``whole`` is False where its end was not found; its span then reaches to the end of the file at most.
    """

    name: str
    header: int
    span: Span
    size: int
    crc: int
    method: int
    whole: bool


def walk(source: Source, sizes: Mapping[str, int]) -> Iterator[Walked]:
    """Every record from the start of the file on.

    ``sizes`` are bytes of records by whole name, as far as they are known; the caller may fill it while it
    iterates, as soon as it has read the pickle. A record of unknown size ends at a descriptor that fits.
    """
    at = 0
    while at < source.size:
        raw = source.read(at, LOCAL.size)
        if raw[:4] == b"PK\x01\x02" or len(raw) < LOCAL.size:
            return
        if raw[:4] != b"PK\x03\x04":
            # Damaged here: the next header that looks like one.
            at = next(signatures(source, at + 1, source.size), source.size)
            continue
        found, after = _record(source, at, raw, sizes)
        yield found
        at = after


def _record(source: Source, at: int, raw: bytes, sizes: Mapping[str, int]) -> tuple[Walked, int]:
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = _LOCAL(raw)
    rest = source.read(at + LOCAL.size, name_size + extra_size)
    name = rest[:name_size].decode("utf-8", "surrogateescape")
    begin = at + LOCAL.size + name_size + extra_size
    left = max(source.size - begin, 0)
    if not flags & 8:
        wide = dict(extras(rest[name_size:])).get(1, b"")
        if size == FULL32 and len(wide) >= 16:
            size, packed = (int.from_bytes(wide[i : i + 8], "little") for i in (0, 8))
        whole = packed <= left
        span = Span(source, begin, min(packed, left))
        return Walked(name, at, span, size, crc, method, whole), begin + span.size if whole else source.size
    guess = sizes.get(name)
    if guess is not None and method == 0:
        # Where the pickle says it ends: payloads may contain anything.
        ends: Iterable[int] = (begin + guess,)
        after = _after(source, begin + guess)
    else:
        ends, after = signatures(source, begin, source.size, b"PK\x07\x08"), -1
    for end in ends:
        fits = _descriptor(source, begin, end)
        if fits is not None:
            crc, size, length = fits
            return Walked(name, at, Span(source, begin, end - begin), size, crc, method, True), end + length
    if after < 0:
        after = next(signatures(source, begin, source.size), source.size)
    return Walked(name, at, Span(source, begin, left), 0, 0, method, False), after


def _after(source: Source, end: int) -> int:
    """Where the next record begins although the descriptor at ``end`` is damaged; -1 when it is not there."""
    if end + 16 > source.size:
        return source.size
    places = (end + 16, end + 24)
    return next((at for at in places if source.read(at, 4) in (b"PK\x03\x04", b"PK\x01\x02")), -1)


def _descriptor(source: Source, begin: int, end: int) -> tuple[int, int, int] | None:
    """(CRC, size, bytes of the descriptor) of the descriptor at ``end``, if it is one for what begins at ``begin``."""
    raw = source.read(end, 24)
    if raw[:4] != b"PK\x07\x08" or len(raw) < 16:
        return None
    if len(raw) == 24:
        crc, packed, size = _DESCRIPTOR64(raw, 4)
        if packed == end - begin and (raw[12:16] == bytes(4) or packed >= FULL32):
            return crc, size, 24
    crc, packed, size = _DESCRIPTOR32(raw, 4)
    return (crc, size, 16) if packed == end - begin else None
