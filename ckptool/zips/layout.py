"""The plan of an archive in which some records have another content, everything else carried over.

A local header written by torch (``PyTorchStreamWriter``, caffe2/serialize/inline_container.cc) ends with
an extra field ``FB`` that pads the payload to a multiple of the alignment. When records move, the padding
of each is made anew by the same rule; where all move by a multiple of the alignment nothing changes, and
the whole stretch is one span. Headers by other writers are carried over as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

from ..errors import RefusedError
from ..source import Piece, Plan, Span, merged, size_of
from .read import FULL32, LOCAL, Archive, Record, extras

__all__ = ["alignment", "layout_holds", "rewritten"]

_PADDING: Final = 0x4246  # "FB"
_WIDE: Final = 1  # zip64
_u16, _u32, _u64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack


class _Moved(NamedTuple):
    """A record in the new archive: what its directory entry must say."""

    record: Record
    header: int
    crc: int
    size: int
    compressed: int
    method: int


def alignment(archive: Archive) -> int:
    """The alignment in bytes that the writer says it used; torch's own default is 64."""
    text = (archive.text(".storage_alignment") or b"64").strip()
    value = int(text) if text.isdigit() and len(text) < 6 else 64
    return value if 0 < value < 0x10000 else 64


def rewritten(archive: Archive, contents: Mapping[str, bytes]) -> Plan:
    """The plan of the archive with new contents for some records, by their whole names.

    With no contents it is the file itself. Raises RefusedError where records are ambiguous or overlap.
    Bytes that belong to no record (left by an edit in place) do not come along.
    """
    source = archive.source
    if not contents:
        return Plan(merged([Span(source, 0, source.size)]))
    for oddity in archive.oddities:
        if oddity.ambiguous:
            raise RefusedError(f"the archive is ambiguous: {oddity.message}", path=source.name)
    moved: list[_Moved] = []
    pieces = list(_records(archive, contents, moved))
    at = sum(map(size_of, pieces))
    place = {new.record.entry: new for new in moved}
    directory = b"".join(_entry(archive, place[record.entry]) for record in archive.records)
    pieces += [directory, _end(archive, at, len(directory))]
    # The comment, and what stands behind the archive.
    pieces.append(Span(source, archive.end.tail, source.size - archive.end.tail))
    return Plan(merged(pieces))


def _records(archive: Archive, contents: Mapping[str, bytes], moved: list[_Moved]) -> Iterator[Piece]:
    """Header, payload and descriptor of each record in the order of the file."""
    source, grid = archive.source, alignment(archive)
    ordered = sorted(archive.records, key=lambda record: record.header)
    at = 0
    for number, record in enumerate(ordered):
        limit = ordered[number + 1].header if number + 1 < len(ordered) else archive.end.directory
        shift = at - record.header
        size = limit - record.header
        content = contents.get(record.name)
        usual = content is None and shift % grid == 0 and size == _torch_size(record, grid) and at < FULL32
        if usual and _is_usual(archive, record, grid):
            # Torch's own layout at another place of the same residue: the same bytes.
            moved.append(_Moved(record, at, record.crc, record.size, record.compressed, record.method))
            yield Span(source, record.header, size)
            at += size
            continue
        for piece in _one(archive, record, limit, at, grid, content, moved):
            yield piece
            at += size_of(piece)


def layout_holds(archive: Archive, keys: Sequence[str]) -> bool:
    """Do the storages ``keys``, in the order of the pickle, stand where torch computes them to be?

    With ``.format_version`` 1 it does not look offsets up under ``map_location="meta"``, in FakeTensorMode and with
    ``calculate_storage_offsets`` (torch/serialization.py, ``_load._get_offset``).
    """
    grid = alignment(archive)
    found = [archive.find(f"data/{key}") for key in keys]
    if not keys or keys[0] != "0" or None in found:
        return not keys
    records = [record for record in found if record is not None]
    return all(
        record.header + _torch_size(record, grid) == after.header or _torch_size(record, grid) < 0
        for record, after in pairwise(records)
    )


def _is_usual(archive: Archive, record: Record, grid: int) -> bool:
    """Does the local header lead to the payload where torch's own layout has it? One flipped bit leads elsewhere."""
    raw = archive.source.read(record.header, LOCAL.size)
    name = len(record.name.encode("utf-8", "surrogateescape"))
    extra = 4 + -(record.header + LOCAL.size + name + 4) % grid
    return raw[:4] == b"PK\x03\x04" and raw[26:30] == _u16(name) + _u16(extra)


def _torch_size(record: Record, grid: int) -> int:
    """Bytes that torch gives to a record at this place, from its header to the end of its descriptor.

    -1 where a zip64 field would be needed.
    """
    if record.header >= FULL32 or record.size >= FULL32 or record.method:
        return -1
    head = LOCAL.size + len(record.name.encode("utf-8", "surrogateescape")) + 4
    return head + -(record.header + head) % grid + record.size + (16 if record.size else 0)


def _one(
    archive: Archive, record: Record, limit: int, at: int, grid: int, content: bytes | None, moved: list[_Moved]
) -> Iterator[Piece]:
    local = archive.local(record)
    payload = Span(archive.source, local.payload, record.compressed)
    if payload.offset + payload.size > limit:
        raise RefusedError(f"the record {record.name!r} overlaps what follows it", path=archive.source.name)
    tail = archive.source.read(payload.offset + payload.size, min(24, limit - payload.offset - payload.size))
    descriptor = _descriptor(record, tail)
    crc, size, packed, method = record.crc, record.size, record.compressed, record.method
    body: Piece = payload
    if content is not None:
        # 0 beside a payload says that the writer computes no checksums: neither do we.
        crc = zlib.crc32(content) if record.crc or not record.size else 0
        size, packed, method, body = len(content), len(content), 0, content
    new = _Moved(record, at, crc, size, packed, method)
    moved.append(new)
    header, wide = _header(new, local.raw, grid)
    # What did not change is a span, so that it joins the next one.
    yield Span(archive.source, record.header, len(header)) if header == local.raw else header
    yield body
    if content is None and len(descriptor) in (0, 24 if wide else 16):
        yield Span(archive.source, payload.offset + payload.size, len(descriptor))
    elif descriptor and (packed or record.compressed == 0):
        yield b"PK\x07\x08" + _u32(crc) + (_u64(packed) + _u64(size) if wide else _u32(packed) + _u32(size))


def _descriptor(record: Record, tail: bytes) -> bytes:
    """The data descriptor at the start of ``tail``, or nothing; only the form with a signature is written by torch."""
    if not record.flags & 8 or tail[:8] != b"PK\x07\x08" + _u32(record.crc):
        return b""
    if tail[8:24] == _u64(record.compressed) + _u64(record.size):
        return tail[:24]
    return tail[:16]


def _header(new: _Moved, raw: bytes, grid: int) -> tuple[bytes, bool]:
    """The local header at the new place, and whether it carries a zip64 field."""
    record = new.record
    name_size = int.from_bytes(raw[26:28], "little")
    name = raw[LOCAL.size : LOCAL.size + name_size]
    fields = extras(raw[LOCAL.size + name_size :])
    fixed = bytearray(raw[: LOCAL.size])
    if (new.crc, new.size, new.method) != (record.crc, record.size, record.method):
        fixed[8:10] = _u16(new.method)
        if any(fixed[14:26]):  # this writer puts the sizes here, not only into the descriptor
            fixed[14:26] = _u32(new.crc) + _u32(min(new.compressed, FULL32)) + _u32(min(new.size, FULL32))
    kinds = [kind for kind, _ in fields]
    if _PADDING not in kinds:
        rest = raw[LOCAL.size + name_size :]
        return bytes(fixed) + name + rest, _WIDE in kinds
    old_padding = next(data for kind, data in fields if kind == _PADDING)
    wide = b""
    if new.size >= FULL32:
        # Torch leaves the compressed size 0 here.
        wide += _u64(new.size) + _u64(0)
    if new.header >= FULL32:
        wide += _u64(new.header)
    others = b"".join(_field(kind, data) for kind, data in fields if kind not in (_PADDING, _WIDE))
    front = (_field(_WIDE, wide) if wide else b"") + others
    head = len(fixed) + len(name) + len(front) + 4
    old_head = len(raw) - len(old_padding)
    padding = len(old_padding)
    if padding == -(record.header + old_head) % grid:
        padding = -(new.header + head) % grid
    elif (record.header + len(raw)) % grid == 0:
        # More than the least padding, yet aligned: keep it so.
        padding = (padding // grid) * grid + -(new.header + head) % grid
    extra = front + _field(_PADDING, b"Z" * padding)
    fixed[28:30] = _u16(len(extra))
    return bytes(fixed) + name + extra, bool(wide)


def _field(kind: int, data: bytes) -> bytes:
    return _u16(kind) + _u16(len(data)) + data


def _entry(archive: Archive, new: _Moved) -> bytes:
    """The directory entry of a moved record: the old one with what changed, zip64 where needed."""
    record = new.record
    raw = archive.source.read(record.entry, record.entry_size)
    if (new.header, new.crc, new.size, new.method) == (record.header, record.crc, record.size, record.method):
        return raw
    name_size = int.from_bytes(raw[28:30], "little")
    extra_size = int.from_bytes(raw[30:32], "little")
    extra_at = 46 + name_size
    wide = b"".join(_u64(value) for value in (new.size, new.compressed, new.header) if value >= FULL32)
    if extra_size or wide:
        fields = [_field(k, data) for k, data in extras(raw[extra_at : extra_at + extra_size]) if k != _WIDE]
        extra = (_field(_WIDE, wide) if wide else b"") + b"".join(fields)
    else:
        extra = b""
    fixed = bytearray(raw[:46])
    fixed[10:12] = _u16(new.method)
    fixed[16:20] = _u32(new.crc)
    fixed[20:28] = _u32(min(new.compressed, FULL32)) + _u32(min(new.size, FULL32))
    fixed[30:32] = _u16(len(extra))
    fixed[42:46] = _u32(min(new.header, FULL32))
    return bytes(fixed) + raw[46:extra_at] + extra + raw[extra_at + extra_size :]


def _end(archive: Archive, directory: int, size: int) -> bytes:
    """The end records: zip64 where the source has it or the offsets need it."""
    count = len(archive.records)
    parts = b""
    if archive.end.zip64 >= 0 or directory >= FULL32 or count >= 0xFFFF:
        if archive.end.zip64 >= 0:
            head = archive.source.read(archive.end.zip64, 24)
        else:
            head = b"PK\x06\x06" + _u64(44) + _u16(45) + _u16(45) + bytes(8)
        parts += head[:4] + _u64(44) + head[12:24] + _u64(count) * 2 + _u64(size) + _u64(directory)
        parts += b"PK\x06\x07" + bytes(4) + _u64(directory + size) + _u32(1)
    counts = _u16(min(count, 0xFFFF)) * 2
    end = archive.source.read(archive.end.plain, 22)
    return parts + end[:8] + counts + _u32(min(size, FULL32)) + _u32(min(directory, FULL32)) + end[20:22]
