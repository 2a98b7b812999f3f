"""The one check that reads everything: each record against its checksum, each byte once, in order."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ..checkpoint import Container, StoredRecord
from ..errors import MalformedError
from ..limits import LIMITS

__all__ = ["Checksums", "checksum", "checksums"]

#: Bytes read at once: it stays in the cache of the processor between the read and the sum.
_CHUNK: Final = 1 << 18


class Checksums(NamedTuple):
    """``checked`` records of ``nbytes`` bytes agree or are in ``wrong``; ``uncomputed`` have no checksum on record
    although the format has them; ``without`` are records of a format that has none. ``lost`` are records that
    cannot be read, with the reason."""

    checked: int
    nbytes: int
    wrong: list[StoredRecord]
    lost: list[tuple[str, str]]
    uncomputed: int
    without: int


def checksums(container: Container, progress: Callable[[int], None] | None = None) -> Checksums:
    """Read every record that has a checksum; ``progress`` is called with numbers of bytes."""
    wrong: list[StoredRecord] = []
    lost: list[tuple[str, str]] = []
    checked = nbytes = uncomputed = without = 0
    records = iter(container.records())
    while True:
        try:
            record = next(records, None)
        except MalformedError as error:
            lost.append((error.where, str(error)))
            break
        if record is None:
            break
        if record.crc is None:
            without += bool(record.size)
        elif record.crc == 0 and record.size:
            uncomputed += 1
        else:
            checked += 1
            nbytes += record.size
            try:
                if checksum(record, progress) != record.crc:
                    wrong.append(record)
            except MalformedError as error:
                lost.append((record.name, error.what))
    return Checksums(checked, nbytes, wrong, lost, uncomputed, without)


def checksum(record: StoredRecord, progress: Callable[[int], None] | None = None) -> int:
    """The CRC-32 of a record's bytes, inflated; raises MalformedError where they do not inflate to their size."""
    crc = 0
    for data in content(record):
        crc = zlib.crc32(data, crc)
        if progress:
            progress(len(data))
    return crc


def content(record: StoredRecord) -> Iterator[bytes]:
    """The bytes of a record in pieces, inflated."""
    span = record.span
    inflater = zlib.decompressobj(-15) if record.compressed else None
    at = done = 0
    while at < span.size:
        data = span.source.read(span.offset + at, min(_CHUNK, span.size - at))
        if not data:
            raise MalformedError("the record reaches beyond the end of the file", where=record.name)
        at += len(data)
        if inflater is None:
            yield data
            continue
        try:
            while data:
                plain = inflater.decompress(data, _CHUNK)
                done += len(plain)
                if done > min(record.size, LIMITS.inflated_bytes):
                    raise MalformedError("it inflates to more than the directory says", where=record.name)
                yield plain
                data = inflater.unconsumed_tail
        except zlib.error as error:
            raise MalformedError(f"damaged deflate stream: {error}", where=record.name) from error
    if inflater is not None:
        plain = inflater.flush()
        if done + len(plain) != record.size:
            raise MalformedError("it inflates to another size than the directory says", where=record.name)
        yield plain
