"""The plan of an archive in which some records have another content, everything else carried over.

A local header written by torch (``PyTorchStreamWriter``, caffe2/serialize/inline_container.cc) ends with
an extra field ``FB`` that pads the payload to a multiple of the alignment. When records move, the padding
of each is made anew by the same rule; where all move by a multiple of the alignment nothing changes, and
the whole stretch is one span. Headers by other writers are carried over as they are.

Where bytes move by a multiple of a block, a filesystem can share them between input and output. So when torch's own
layout would move the storages by anything else, the last record before them is padded by as much as is missing; torch
takes any padding there. That depends on the archive alone: the same input gives the same output everywhere, and the
reverse edit comes back to torch's own layout, which is a multiple of a block away.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import lcm
from struct import Struct
from typing import Final, NamedTuple

from ...base.errors import RefusedError
from ...base.text import argument, undo_step
from ..sources import BLOCK, Appending, Piece, Plan, Span, merged, size_of
from .reader import FULL32, LOCAL, Archive, Record, extras
from .versions import ENDING, EXTRA, UNSIGNED, Note, is_spare, spelled, without_note
from .writer import PADDING, Content, around, listed, padding_of

_WIDE: Final = 1  # zip64
_MOST_EXTRA: Final = 0xFFFF
#: Where a directory entry holds the offset of the local header.
_HEADER_AT: Final = 42
_u16, _u32, _u64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack
_put_u32 = Struct("<I").pack_into


class _Stretch(NamedTuple):
    """Records that follow each other up to ``end``: some that lie ``as_torch`` puts them, or one of another kind."""

    records: Sequence[Record]
    end: int
    as_torch: bool


class _Filler(NamedTuple):
    """The record that takes the padding before the storages; ``alone`` where no other record has a padding, as in
    archives by other writers."""

    record: Record | None
    alone: bool


class _Moved(NamedTuple):
    """A record in the new archive: what its directory entry must say."""

    record: Record
    header: int
    crc: int
    size: int
    compressed: int
    method: int


class _Layout(NamedTuple):
    """The pieces of an archive up to its directory, and where its records went.

    ``shifted`` are runs of records and by how many bytes they moved, ``moved`` all other records; ``carried`` counts
    the bytes that are carried over by the number of bytes that they moved.
    """

    pieces: list[Piece]
    size: int
    shifted: list[tuple[Sequence[Record], int]]
    moved: list[_Moved]
    carried: Counter[int]


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
    grid, filler = alignment(archive), _filler(archive)
    stretches = list(_stretches(archive, contents, filler, grid))
    layout = _layout(archive, stretches, contents, grid, filler, 0)
    missing = _missing(layout, BLOCK if filler.alone else lcm(BLOCK, grid))
    if missing and filler.record and missing + _extra_size(archive, filler.record) <= _MOST_EXTRA:
        layout = _layout(archive, stretches, contents, grid, filler, missing)
    directory = _directory(archive, layout)
    end = ending(archive, len(archive.records), layout.size, len(directory))
    # The comment, and what stands behind the archive.
    rest = Span(source, archive.end.tail, source.size - archive.end.tail)
    return Plan(merged([*layout.pieces, directory, end, rest]))


def _filler(archive: Archive) -> _Filler:
    data = f"{archive.root}/data/"
    storages = [record for record in archive.records if record.name.startswith(data)]
    first = min(storages, key=lambda record: record.header, default=None)
    if first is None:
        return _Filler(None, False)
    before = [record for record in archive.records if record.header < first.header]
    return _Filler(max(before, key=lambda record: record.header, default=None), padding_of(archive, first) is None)


def _stretches(archive: Archive, contents: Mapping[str, bytes], filler: _Filler, grid: int) -> Iterator[_Stretch]:
    """All records in the order of the file."""
    ordered = sorted(archive.records, key=lambda record: record.header)
    limits = [record.header for record in ordered[1:]] + [archive.end.directory]
    run: list[Record] = []
    for record, limit in zip(ordered, limits):
        usual = record.name not in contents and record is not filler.record and _is_usual(archive, record, limit, grid)
        if usual:
            run.append(record)
            continue
        if run:
            yield _Stretch(run, record.header, True)
            run = []
        yield _Stretch((record,), limit, False)
    if run:
        yield _Stretch(run, archive.end.directory, True)


def _layout(
    archive: Archive,
    stretches: Sequence[_Stretch],
    contents: Mapping[str, bytes],
    grid: int,
    filler: _Filler,
    padding: int,
) -> _Layout:
    """Each stretch behind the one before it; ``padding`` bytes more than needed in the header of the filler."""
    source = archive.source
    layout = _Layout([], 0, [], [], Counter())
    at = 0
    for stretch in stretches:
        records = stretch.records
        while records:
            shift = at - records[0].header
            # A header beyond 4 GiB says where it stands; all others can move as they are.
            many = len(records) if shift <= 0 else bisect_left(records, FULL32 - shift, key=_header_of)
            end = records[many].header if many < len(records) else stretch.end
            if stretch.as_torch and shift % grid == 0 and many:
                size = end - records[0].header
                layout.pieces.append(Span(source, records[0].header, size))
                layout.shifted.append((records[:many], shift))
                layout.carried[shift] += size
                at += size
                records = records[many:]
                continue
            record, records = records[0], records[1:]
            limit = records[0].header if records else stretch.end
            spare = (padding, filler.alone) if record is filler.record else None
            for piece in _one(archive, record, limit, at, grid, contents.get(record.name), spare, layout.moved):
                if isinstance(piece, Span):
                    layout.carried[at - piece.offset] += piece.size
                layout.pieces.append(piece)
                at += size_of(piece)
    return layout._replace(size=at)


def _header_of(record: Record) -> int:
    return record.header


def _missing(layout: _Layout, unit: int) -> int:
    """The bytes by which most of what is carried over would have to move further to have moved by whole units.

    One number for all, but where a header crosses 4 GiB and grows: then what is fewer is copied.
    """
    residues: Counter[int] = Counter()
    for shift, size in layout.carried.items():
        residues[shift % unit] += size
    return -residues.most_common(1)[0][0] % unit if residues else 0


def _extra_size(archive: Archive, record: Record) -> int:
    """Bytes of extra fields in the local header, with room for another field and the least padding."""
    return int.from_bytes(archive.local(record).raw[28:30], "little") + 4 + alignment(archive)


def _name_size(raw: bytes) -> int:
    return int.from_bytes(raw[26:28], "little")


def _directory(archive: Archive, layout: _Layout) -> bytes:
    """The directory with the new places of the records."""
    base = archive.records[0].entry
    last = archive.records[-1]
    raw = bytearray(archive.source.read(base, last.entry + last.entry_size - base))
    for records, shift in layout.shifted:
        if shift:
            for record in records:
                _put_u32(raw, record.entry - base + _HEADER_AT, record.header + shift)
    changed = {new.record.entry: _entry(archive, new) for new in layout.moved}
    kept = bytes(raw[last.entry - base :])
    changed[last.entry] = without_note(changed.get(last.entry, kept))
    ends = {new.record.entry: new.record.entry + new.record.entry_size for new in layout.moved}
    parts: list[bytes] = []
    at = base
    for entry in sorted(changed):
        parts += [bytes(raw[at - base : entry - base]), changed[entry]]
        at = ends.get(entry, base + len(raw))
    return b"".join(parts)


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


def _is_usual(archive: Archive, record: Record, limit: int, grid: int) -> bool:
    """Does torch's own layout fill the bytes up to ``limit`` with this record?

    Its local header must lead to the payload as well: one flipped bit leads elsewhere.
    """
    if record.header + _torch_size(record, grid) != limit:
        return False
    raw = archive.near.read(record.header, LOCAL.size)
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
    archive: Archive,
    record: Record,
    limit: int,
    at: int,
    grid: int,
    content: bytes | None,
    spare: tuple[int, bool] | None,
    moved: list[_Moved],
) -> Iterator[Piece]:
    """Header, payload and descriptor of a record; ``spare`` for the filler: its padding, and whether it is alone."""
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
    header, wide = _header(new, local.raw, grid, content is not None, spare)
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


def _header(new: _Moved, raw: bytes, grid: int, anew: bool, spare: tuple[int, bool] | None) -> tuple[bytes, bool]:
    """The local header at the new place, and whether it carries a zip64 field.

    The padding is the least one in a record with a new content and in the filler, which has its own on top.
    """
    record = new.record
    name_size = _name_size(raw)
    name = raw[LOCAL.size : LOCAL.size + name_size]
    fields = extras(raw[LOCAL.size + name_size :])
    fixed = bytearray(raw[: LOCAL.size])
    if (new.crc, new.size, new.method) != (record.crc, record.size, record.method):
        fixed[8:10] = _u16(new.method)
        if any(fixed[14:26]):  # this writer puts the sizes here, not only into the descriptor
            fixed[14:26] = _u32(new.crc) + _u32(min(new.compressed, FULL32)) + _u32(min(new.size, FULL32))
    kinds = [kind for kind, _ in fields]
    if PADDING not in kinds or (spare and spare[1]):
        rest = raw[LOCAL.size + name_size :]
        if spare:
            rest = b"".join(_field(kind, data) for kind, data in fields if kind != PADDING)
            if spare[0]:
                rest += _field(PADDING, b"Z" * (spare[0] - 4 if spare[0] >= 4 else spare[0] - 4 + BLOCK))
            fixed[28:30] = _u16(len(rest))
        return bytes(fixed) + name + rest, _WIDE in kinds
    old_padding = next(data for kind, data in fields if kind == PADDING)
    wide = b""
    if new.size >= FULL32:
        # Torch leaves the compressed size 0 here.
        wide += _u64(new.size) + _u64(0)
    if new.header >= FULL32:
        wide += _u64(new.header)
    others = b"".join(_field(kind, data) for kind, data in fields if kind not in (PADDING, _WIDE))
    front = (_field(_WIDE, wide) if wide else b"") + others
    head = len(fixed) + len(name) + len(front) + 4
    old_head = len(raw) - len(old_padding)
    padding = len(old_padding)
    if anew or spare or padding == -(record.header + old_head) % grid:
        padding = -(new.header + head) % grid + (spare[0] if spare else 0)
    elif (record.header + len(raw)) % grid == 0:
        # More than the least padding, yet aligned: keep it so.
        padding = (padding // grid) * grid + -(new.header + head) % grid
    extra = front + _field(PADDING, b"Z" * padding)
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
    fixed[_HEADER_AT:46] = _u32(min(new.header, FULL32))
    return bytes(fixed) + raw[46:extra_at] + extra + raw[extra_at + extra_size :]


def ending(archive: Archive, count: int, directory: int, size: int, *, wide: bool = False) -> bytes:
    """The end records for ``count`` entries, with the directory of ``size`` bytes at ``directory``.

    With zip64 where the archive has it, the offsets need it or ``wide`` says so; the length of the comment as before.
    """
    parts = b""
    if wide or archive.end.zip64 >= 0 or directory >= FULL32 or count >= 0xFFFF:
        if archive.end.zip64 >= 0:
            head = archive.source.read(archive.end.zip64, 24)
        else:
            head = b"PK\x06\x06" + _u64(44) + _u16(45) + _u16(45) + bytes(8)
        parts += head[:4] + _u64(44) + head[12:24] + _u64(count) * 2 + _u64(size) + _u64(directory)
        parts += b"PK\x06\x07" + bytes(4) + _u64(directory + size) + _u32(1)
    counts = _u16(min(count, 0xFFFF)) * 2
    end = archive.source.read(archive.end.plain, 22)
    return parts + end[:8] + counts + _u32(min(size, FULL32)) + _u32(min(directory, FULL32)) + end[20:22]


# -- A new version of an archive behind the old one, for edits in place: no byte that is there changes


def appended(
    archive: Archive, contents: Mapping[str, bytes], dropped: Collection[str], edit: str, time: int
) -> Appending:
    """The bytes behind the archive that give records other contents, and take others out of the directory.

    ``contents`` and ``dropped`` go by whole names; ``edit`` and ``time`` are for the note (``versions``). Raises
    RefusedError where something stands behind the archive, which would no longer do so.
    """
    source = archive.source
    if archive.end.beyond:
        what = "the last edit in place of this file was not finished"
        raise RefusedError(what, path=source.name, next=f"take it back: {undo_step(source.name)}")
    if source.size != archive.end.tail:
        what = "bytes stand behind the archive, and would stand in the middle of it"
        raise RefusedError(what, path=source.name, next=_way_on(archive))
    body = b""
    entries = []
    base = archive.records[0].entry
    old = source.read(base, archive.records[-1].entry + archive.records[-1].entry_size - base)
    for record in archive.records:
        if record.name in dropped:
            continue
        content = contents.get(record.name)
        if content is None:
            begin = record.entry - base
            entries.append(without_note(old[begin : begin + record.entry_size]))
            continue
        new = Content(record.name, content, zlib.crc32(content), len(content))
        # As the record whose place it takes: archives by other writers have no padding.
        header, descriptor = around(new, source.size + len(body), padded=padding_of(archive, record) is not None)
        entries.append(listed(new, source.size + len(body)))
        assert isinstance(descriptor, bytes)
        body += header + content + descriptor
    # The locator in it leads to the old zip64 end record; a second copy of that would be taken for an archive.
    hold = source.read(archive.end.plain - 20, 42)[0 if archive.end.zip64 >= 0 else 20 :].rjust(42)
    note = hold + spelled(Note(source.size, zlib.crc32(source.read(source.size - ENDING, ENDING)), edit, time))
    directory = source.size + len(body)
    # The file ends with a page, and so with a sector: that holds all of the note and the end records.
    spare = -(directory + sum(map(len, entries)) + 4 + len(note) + ENDING) % BLOCK
    entries[-1] = _with_field(entries[-1], b" " * spare + note, source.name)
    listing = b"".join(entries)
    end = ending(archive, len(entries), directory, len(listing), wide=True)
    unsigned = end[:-UNSIGNED] + b"\0" + end[1 - UNSIGNED :]
    return Appending(source.size, body + listing[: -len(note)], note + unsigned, end)


def _way_on(archive: Archive) -> str:
    """What to do about bytes behind the archive."""
    source, tail = archive.source, archive.end.tail
    if not is_spare(source, tail):
        return "write a new file with -o: they come along"
    return f"they are zeros, as a loss of power leaves them: truncate -s {tail} {argument(source.name)} takes them off"


def _with_field(entry: bytes, data: bytes, path: str) -> bytes:
    """The directory entry with one more extra field; a comment behind it goes, since the field must be last."""
    size = int.from_bytes(entry[28:30], "little") + int.from_bytes(entry[30:32], "little")
    extra = int.from_bytes(entry[30:32], "little") + 4 + len(data)
    if extra > 0xFFFF:
        what = "the last entry of its directory has so many extra fields that a note does not fit in"
        raise RefusedError(what, path=path, next="write a new file with -o")
    front = entry[:30] + extra.to_bytes(2, "little") + bytes(2) + entry[34 : 46 + size]
    return front + EXTRA.to_bytes(2, "little") + len(data).to_bytes(2, "little") + data
