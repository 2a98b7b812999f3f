"""Plan new archives, laid out like torch 2.7 and later write them.

Source: ``PyTorchStreamWriter`` (caffe2/serialize/inline_container.cc). Every record is aligned to 64 bytes, its
checksum and sizes are in a descriptor after it, and the end records always include zip64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Final

from ...base.errors import ReadBackError
from ...base.records import NamedTuple, new_tuple
from ..sources import AssembledSource, Computed, Deferred, Piece, Plan, Span, merge_pieces, size_of
from .reader import FULL32, LOCAL, PADDING_ID, ZIP64_ID, Archive, Record, content_chunks, extra_fields

_ALIGNMENT: Final = 64
#: Bytes read at once.
_CHUNK: Final = 4 << 20
_u16, _u32, _u64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack
#: A directory entry: signature, flags, method, CRC-32, sizes stored and inflated, lengths of name, extra fields and
#: comment, offset of the local header; versions, time, disk and attributes are zeros.
_ENTRY: Final = Struct("<4s4x2H4x3I3H8xI")
#: The signature and disks of a plain end record.
_END_HEAD: Final = b"PK\x05\x06" + bytes(4)


class RecordedCrc(Deferred):
    """The CRC-32 of a whole source, which is looked up once its bytes were written."""

    def __init__(self, source: AssembledSource) -> None:
        super().__init__()
        self.source = source


class RecordContent(NamedTuple):
    """A record to write: its full name, its bytes as stored, and their CRC-32 and size inflated.

    ``deflated`` says whether the bytes are a deflate stream; ``crc`` 0 means "not computed", a ``Deferred`` one is
    computed while the bytes are written.
    """

    name: str
    body: Piece
    crc: int | Deferred
    size: int
    deflated: bool = False


def stored_content(name: str, piece: Piece, size: int, crc: int | None, compressed: bool) -> RecordContent:
    """Return a stored record with ``size`` bytes and the checksum ``crc``, both inflated.

    If ``compressed``, the piece is a deflate stream and is inflated, because ``torch.load(mmap=True)`` uses bytes as
    they are stored. A missing checksum is computed: if ``crc`` is None, or 0 ("not computed") for a deflate stream.
    """
    if compressed:
        assert isinstance(piece, Span)
        piece = Computed(size, content_chunks, (piece, size, True, name))
    if size and (crc is None or (compressed and not crc)):
        return checksummed(name, piece)
    return RecordContent(name, piece, crc or 0, size)


def with_crc(piece: Piece) -> AssembledSource | None:
    """Return the source of a piece, if the piece is the whole source and the source may know its CRC-32; else None."""
    source = piece.source if isinstance(piece, Span) else None
    if isinstance(source, AssembledSource) and source.has_crc and piece == Span(source, 0, source.size):
        return source
    return None


def checksummed(name: str, piece: Piece) -> RecordContent:
    """Return a record whose checksum is computed while its bytes are written, or looked up afterwards."""
    source = with_crc(piece)
    if source is not None:
        return RecordContent(name, piece, RecordedCrc(source), source.size)
    crc = Deferred()
    late = isinstance(piece, Computed) and piece.late
    size = size_of(piece)
    body = new_tuple(Computed, (size, summed, (piece, crc), late))
    return new_tuple(RecordContent, (name, body, crc, size, False))


def summed(piece: Piece, crc: Deferred) -> Iterator[bytes]:
    """Yield the bytes of a piece, and keep their checksum."""
    crc.value = 0
    for data in _chunks(piece):
        crc.value = zlib.crc32(data, crc.value)
        yield data


def _chunks(piece: Piece) -> Iterable[bytes]:
    if isinstance(piece, Computed):
        return piece.chunks()
    if isinstance(piece, Span):
        steps = range(0, piece.size, _CHUNK)
        return (piece.source.read(piece.offset + at, min(_CHUNK, piece.size - at)) for at in steps)
    return (piece,)


def plan_archive(contents: Iterable[RecordContent]) -> Plan:
    """Plan an archive with these records, in this order."""
    pieces: list[Piece] = []
    directory: list[tuple[RecordContent, int]] = []
    at = 0
    for content in contents:
        header, descriptor = header_and_descriptor(content, at)
        directory.append((content, at))
        pieces += [header, content.body, descriptor]
        at += len(header) + size_of(content.body) + size_of(descriptor)
    deferred = any(isinstance(content.crc, Deferred) and content.size for content, _ in directory)
    listing = _directory(*directory)  # deferred checksums are 0 in it
    pieces.append(_deferred(len(listing), _directory, *directory) if deferred else listing)
    end = end_records(len(directory), at, len(listing), wide=_u16(0x031E) + _u16(45) + bytes(8))
    return Plan(merge_pieces([*pieces, end]))


def _deferred(size: int, build: Callable[..., bytes], *parameters: object) -> Computed:
    """Return bytes whose size is known now, but whose content is known only when they are written."""
    return new_tuple(Computed, (size, _built, (build, *parameters), True))


def _built(build: Callable[..., bytes], *parameters: object) -> tuple[bytes]:
    return (build(*parameters),)


def _directory(*entries: tuple[RecordContent, int]) -> bytes:
    return b"".join([directory_entry(content, at) for content, at in entries])


def header_and_descriptor(content: RecordContent, at: int, *, padded: bool = True) -> tuple[bytes, Piece]:
    """Return the local header of a record at ``at``, with padding if ``padded``, and its descriptor."""
    stored = size_of(content.body)
    if not content.deflated and stored != content.size:
        # For example, deflated bytes were mistaken for plain ones.
        raise ReadBackError(
            f"the record {content.name!r} would contain other bytes than it declares",
            promised=f"{content.name}: {content.size:,} bytes",
            read=f"{stored:,} bytes",
            next="this is a bug in ckptool, and nothing was written: please report it",
        )
    name = content.name.encode("utf-8", "surrogateescape")
    wide = zip64_field(local_zip64_values(content.size, at)) if max(content.size, at) >= FULL32 else b""
    padding = -(at + LOCAL.size + len(name) + len(wide) + 4) % _ALIGNMENT
    extra = wide + extra_field(PADDING_ID, b"Z" * padding) if padded else wide
    flags = 0x0808 if stored else 0x0800
    method = 8 if content.deflated else 0
    header = LOCAL.pack(b"PK\x03\x04", 0, flags, method, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra
    if not stored:
        return header, b""
    if isinstance(content.crc, Deferred):
        return header, _deferred(24 if wide else 16, _descriptor, content, bool(wide))
    return header, _descriptor(content, bool(wide))


def _descriptor(content: RecordContent, wide: bool) -> bytes:
    pack, crc = _u64 if wide else _u32, content.crc
    if isinstance(crc, RecordedCrc):
        crc.value = crc.source.crc()
    return b"PK\x07\x08" + _u32(crc) + pack(size_of(content.body)) + pack(content.size)


def padding_field(archive: Archive, record: Record) -> bytes | None:
    """Return the padding in the local header of a record, or None if its writer does not align."""
    raw = archive.local(record)
    fields = extra_fields(raw[LOCAL.size + int.from_bytes(raw[26:28], "little") :])
    return next((data for kind, data in fields if kind == PADDING_ID), None)


def extra_field(kind: int, data: bytes) -> bytes:
    """Return an extra field of a header."""
    return _u16(kind) + _u16(len(data)) + data


def zip64_field(values: Iterable[int]) -> bytes:
    """Return the zip64 extra field with these values, or b"" if there are none."""
    data = b"".join(map(_u64, values))
    return extra_field(ZIP64_ID, data) if data else b""


def local_zip64_values(size: int, at: int) -> list[int]:
    """Return the values that torch puts into the zip64 field of a local header; it leaves the compressed size 0."""
    return [*((size, 0) if size >= FULL32 else ()), *((at,) if at >= FULL32 else ())]


def directory_entry(content: RecordContent, at: int) -> bytes:
    """Return the directory entry of a record at ``at``."""
    name, stored = content.name.encode("utf-8", "surrogateescape"), size_of(content.body)
    is_wide = max(content.size, stored, at) >= FULL32
    wide = zip64_field(value for value in (content.size, stored, at) if value >= FULL32) if is_wide else b""
    flags = 0x0808 if stored else 0x0800
    method = 8 if content.deflated else 0
    sizes = min(stored, FULL32), min(content.size, FULL32)
    lengths = len(name), len(wide), 0
    return _ENTRY.pack(b"PK\x01\x02", flags, method, content.crc, *sizes, *lengths, min(at, FULL32)) + name + wide


def end_records(
    count: int, directory: int, size: int, *, wide: bytes, head: bytes = _END_HEAD, comment: bytes = bytes(2)
) -> bytes:
    """Return the end records for ``count`` entries, with a directory of ``size`` bytes at ``directory``.

    ``wide`` holds the versions and disks of the zip64 end record (12 bytes); b"" writes none. ``head`` holds the first
    8 bytes of the plain end record, and ``comment`` its 2 bytes for the length of the comment.
    """
    if wide:
        wide = b"PK\x06\x06" + _u64(44) + wide + _u64(count) * 2 + _u64(size) + _u64(directory)
        wide += b"PK\x06\x07" + bytes(4) + _u64(directory + size) + _u32(1)
    counts = _u16(min(count, 0xFFFF)) * 2
    return wide + head + counts + _u32(min(size, FULL32)) + _u32(min(directory, FULL32)) + comment


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
