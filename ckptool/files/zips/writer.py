"""A new archive, laid out as torch 2.7 and later write it.

Source: ``PyTorchStreamWriter`` (caffe2/serialize/inline_container.cc): every record padded to 64 bytes, its checksum
and sizes in a descriptor behind it, end records in zip64 always.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from struct import Struct
from typing import Final, NamedTuple

from ...base.errors import ReadBackError
from ..sources import Computed, Piece, Plan, Span, merged, size_of
from .reader import FULL32, LOCAL, Archive, Record, contents, extras

_GRID: Final = 64
#: The extra field with which torch pads, "FB".
PADDING: Final = 0x4246
_u16, _u32, _u64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack


#: Bytes read in one go.
_CHUNK: Final = 4 << 20


class Sum:
    """The CRC-32 of bytes that are summed while they are written; ``value`` is known afterwards."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Content(NamedTuple):
    """A record to be: its whole name, its bytes as stored, and its CRC-32 and size inflated.

    ``deflated`` whether the bytes are a deflate stream; ``crc`` 0 for "not computed".
    """

    name: str
    body: Piece
    crc: int | Sum
    size: int
    deflated: bool = False


def content_of(name: str, piece: Piece, size: int, crc: int | None, compressed: bool) -> Content:
    """A stored record of bytes that are there or were made: ``crc`` and ``size`` (bytes) inflated, ``compressed``
    whether the piece is a deflate stream, which is inflated: ``torch.load(mmap=True)`` takes bytes as they are stored.
    A checksum that is not there is computed: where ``crc`` is None, or 0 for "not computed" with a deflate stream.
    """
    plain = inflated(piece, size, name) if compressed else piece
    if size and (crc is None or (compressed and not crc)):
        return summed(name, plain)
    return Content(name, plain, crc or 0, size)


def inflated(piece: Piece, size: int, name: str) -> Computed:
    """What a deflate stream inflates to, ``size`` bytes; ``name`` is for errors."""
    assert isinstance(piece, Span)
    return Computed(size, partial(contents, piece, size, True, name))


def summed(name: str, piece: Piece) -> Content:
    """A record whose checksum is taken while its bytes are written."""
    crc = Sum()

    def chunks() -> Iterator[bytes]:
        crc.value = 0
        for data in _chunks(piece):
            crc.value = zlib.crc32(data, crc.value)
            yield data

    return Content(name, Computed(size_of(piece), chunks), crc, size_of(piece))


def _chunks(piece: Piece) -> Iterable[bytes]:
    if isinstance(piece, Computed):
        return piece.chunks()
    if isinstance(piece, Span):
        steps = range(0, piece.size, _CHUNK)
        return (piece.source.read(piece.offset + at, min(_CHUNK, piece.size - at)) for at in steps)
    return (piece,)


def fresh(contents: Iterable[Content]) -> Plan:
    """The plan of an archive with these records, in this order."""
    pieces: list[Piece] = []
    directory: list[tuple[Content, int]] = []
    at = 0
    for content in contents:
        header, descriptor = around(content, at)
        directory.append((content, at))
        pieces += [header, content.body, descriptor]
        at += len(header) + size_of(content.body) + size_of(descriptor)

    def directory_bytes() -> bytes:
        return b"".join([listed(content, place) for content, place in directory])

    late = any(isinstance(content.crc, Sum) and content.size for content, _ in directory)
    size = len(directory_bytes())
    return Plan(
        merged([*pieces, _late(directory_bytes) if late else directory_bytes(), _end(len(directory), at, size)])
    )


def _late(made: Callable[[], bytes]) -> Computed:
    """Bytes whose number is known now, and whose content when they are written."""
    return Computed(len(made()), lambda: (made(),))


def _crc(content: Content) -> bytes:
    return _u32(content.crc.value if isinstance(content.crc, Sum) else content.crc)


def around(content: Content, at: int, *, padded: bool = True) -> tuple[bytes, Piece]:
    """The local header, with its padding if it is to be ``padded``, and the descriptor, for a record at ``at``."""
    stored = size_of(content.body)
    if not content.deflated and stored != content.size:
        # Bytes of another length than they are said to have, such as deflated ones that are taken for plain ones.
        raise ReadBackError(
            f"the record {content.name!r} would hold other bytes than it says",
            promised=f"{content.name}: {content.size:,} bytes",
            read=f"{stored:,} bytes",
            next="this is a bug in ckptool, and nothing was written: please report it",
        )
    name = content.name.encode("utf-8", "surrogateescape")
    wide = b""
    if content.size >= FULL32:
        wide += _u64(content.size) + _u64(0)  # torch leaves the compressed size 0 here
    if at >= FULL32:
        wide += _u64(at)
    if wide:
        wide = _u16(1) + _u16(len(wide)) + wide
    padding = -(at + LOCAL.size + len(name) + len(wide) + 4) % _GRID
    extra = wide + b"FB" + _u16(padding) + b"Z" * padding if padded else wide
    flags = 0x0808 if stored else 0x0800
    method = 8 if content.deflated else 0
    fixed = LOCAL.pack(b"PK\x03\x04", 0, flags, method, 0, 0, 0, 0, 0, len(name), len(extra))
    pack = _u64 if wide else _u32

    def descriptor() -> bytes:
        return b"PK\x07\x08" + _crc(content) + pack(stored) + pack(content.size)

    if not stored:
        return fixed + name + extra, b""
    return fixed + name + extra, _late(descriptor) if isinstance(content.crc, Sum) else descriptor()


def padding_of(archive: Archive, record: Record) -> bytes | None:
    """What fills the local header of a record up to the alignment, None where the writer does not align."""
    raw = archive.local(record).raw
    fields = extras(raw[LOCAL.size + int.from_bytes(raw[26:28], "little") :])
    return next((data for kind, data in fields if kind == PADDING), None)


def listed(content: Content, at: int) -> bytes:
    """The directory entry of a record at ``at``."""
    name, stored = content.name.encode("utf-8", "surrogateescape"), size_of(content.body)
    wide = b"".join(_u64(value) for value in (content.size, stored, at) if value >= FULL32)
    if wide:
        wide = _u16(1) + _u16(len(wide)) + wide
    flags = 0x0808 if stored else 0x0800
    return (
        b"PK\x01\x02"
        + _u16(0) * 2
        + _u16(flags)
        + _u16(8 if content.deflated else 0)
        + bytes(4)
        + _crc(content)
        + _u32(min(stored, FULL32))
        + _u32(min(content.size, FULL32))
        + _u16(len(name))
        + _u16(len(wide))
        + bytes(10)
        + _u32(min(at, FULL32))
        + name
        + wide
    )


def _end(count: int, directory: int, size: int) -> bytes:
    wide = b"PK\x06\x06" + _u64(44) + _u16(0x031E) + _u16(45) + bytes(8) + _u64(count) * 2 + _u64(size)
    locator = b"PK\x06\x07" + bytes(4) + _u64(directory + size) + _u32(1)
    counts = _u16(min(count, 0xFFFF)) * 2
    plain = b"PK\x05\x06" + bytes(4) + counts + _u32(min(size, FULL32)) + _u32(min(directory, FULL32)) + bytes(2)
    return wide + _u64(directory) + locator + plain
