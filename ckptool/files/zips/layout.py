"""Plan archives in which some records get new content and everything else is carried over.

A local header written by torch (``PyTorchStreamWriter``, caffe2/serialize/inline_container.cc) ends with an extra field
``FB`` that pads the payload to a multiple of the alignment. When records move, each is padded again by the same rule.
If all move by a multiple of the alignment, nothing changes, and the whole run is one span. Headers by other writers are
carried over unchanged.

A filesystem can share bytes between input and output if they move by a multiple of a block. So if torch's own layout
would move the storages by anything else, the last record before them is padded by the difference; torch accepts any
padding there. This depends only on the archive: the same input gives the same output everywhere, and the reverse edit
returns to torch's own layout, which is a multiple of a block away.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import lcm
from operator import attrgetter
from struct import Struct
from typing import Final

from ...base.errors import RefusedError
from ...base.records import NamedTuple
from ...base.steps import AnyStep, argument, undo_step
from ..sources import FILESYSTEM_BLOCK, AppendPlan, Piece, Plan, Span, merge_pieces, size_of
from .audit import prefetch_headers
from .reader import FULL32, LOCAL, PADDING_ID, ZIP64_ID, Archive, Record, extra_fields
from .versions import END_SIZE, NOTE_FIELD, PLAIN_END_SIZE, EditNote, encode_note, is_leftover_growth, strip_note
from .writer import (
    RecordContent,
    directory_entry,
    end_records,
    extra_field,
    header_and_descriptor,
    local_zip64_values,
    padding_field,
    zip64_field,
)

_MAX_EXTRA: Final = 0xFFFF
_HEADER: Final = attrgetter("header")
#: Position of the local header's offset in a directory entry.
_OFFSET_FIELD: Final = 42
_u16, _u32, _u64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack
_put_u32 = Struct("<I").pack_into


class _Run(NamedTuple):
    """Consecutive records up to ``end``: any number of records laid out ``as_torch`` does, or a single other record."""

    records: Sequence[Record]
    end: int
    as_torch: bool


class _Filler(NamedTuple):
    """The record that is padded to align the storages.

    ``alone`` says that no other record is padded, as in archives by other writers.
    """

    record: Record | None
    alone: bool


class _Layout(NamedTuple):
    """The pieces of an archive up to its directory, and the new places of its records.

    ``shifted`` lists runs of records with the number of bytes by which they moved; ``moved`` lists all other records,
    as they were and as the new directory describes them. ``carried`` counts the carried bytes by the distance that they
    moved.
    """

    pieces: list[Piece]
    size: int
    shifted: list[tuple[Sequence[Record], int]]
    moved: list[tuple[Record, Record]]
    carried: Counter[int]


def alignment(archive: Archive) -> int:
    """Return the alignment in bytes declared by the writer; torch's default is 64."""
    text = (archive.text(".storage_alignment") or b"64").strip()
    value = int(text) if text.isdigit() and len(text) < 6 else 64
    return value if 0 < value < 0x10000 else 64


def plan_rewrite(archive: Archive, contents: Mapping[str, bytes]) -> Plan:
    """Plan the archive with new contents for some records, by their full names.

    Without contents, the plan is the file itself. Bytes that belong to no record (left by an edit in place) are
    removed. Raises RefusedError if records are ambiguous or overlap.
    """
    source = archive.source
    if not contents:
        return Plan(merge_pieces([Span(source, 0, source.size)]))
    for oddity in archive.oddities:
        if oddity.ambiguous:
            raise RefusedError(f"the archive is ambiguous: {oddity.message}", path=source.name)
    prefetch_headers(archive)
    grid, filler = alignment(archive), _filler(archive)
    runs = list(_runs(archive, contents, filler, grid))
    layout = _layout(archive, runs, contents, grid, filler, 0)
    missing = _missing_padding(layout, FILESYSTEM_BLOCK if filler.alone else lcm(FILESYSTEM_BLOCK, grid))
    # There must be room in the filler's header, also for another field and the least padding.
    least = int.from_bytes(archive.local(filler.record)[28:30], "little") + 4 + grid if filler.record else _MAX_EXTRA
    if missing and missing + least <= _MAX_EXTRA:
        layout = _layout(archive, runs, contents, grid, filler, missing)
    directory = _directory(archive, layout)
    end = _end_records(archive, len(archive.records), layout.size, len(directory))
    # The comment, and the bytes after the archive.
    rest = Span(source, archive.end.tail, source.size - archive.end.tail)
    return Plan(merge_pieces([*layout.pieces, directory, end, rest]))


def _filler(archive: Archive) -> _Filler:
    data = f"{archive.root}/data/"
    storages = [record for record in archive.records if record.name.startswith(data)]
    first = min(storages, key=_HEADER, default=None)
    if first is None:
        return _Filler(None, False)
    before = [record for record in archive.records if record.header < first.header]
    return _Filler(max(before, key=_HEADER, default=None), padding_field(archive, first) is None)


def _runs(archive: Archive, contents: Mapping[str, bytes], filler: _Filler, grid: int) -> Iterator[_Run]:
    """Yield all records in the order of the file."""
    ordered = sorted(archive.records, key=_HEADER)
    limits = [record.header for record in ordered[1:]] + [archive.end.directory]
    run: list[Record] = []
    for record, limit in zip(ordered, limits):
        changed = record.name in contents or record is filler.record
        if not changed and _lies_as_torch(archive, record, limit, grid):
            run.append(record)
            continue
        if run:
            yield _Run(run, record.header, True)
            run = []
        yield _Run((record,), limit, False)
    if run:
        yield _Run(run, archive.end.directory, True)


def _layout(
    archive: Archive, runs: Sequence[_Run], contents: Mapping[str, bytes], grid: int, filler: _Filler, padding: int
) -> _Layout:
    """Place the runs one after another, with ``padding`` bytes more than needed in the header of the filler."""
    source = archive.source
    layout = _Layout([], 0, [], [], Counter())
    at = 0
    for run in runs:
        records = run.records
        while records:
            shift = at - records[0].header
            # A header beyond 4 GiB contains its own offset; all others can move unchanged.
            many = len(records) if shift <= 0 else bisect_left(records, FULL32 - shift, key=_HEADER)
            end = records[many].header if many < len(records) else run.end
            if run.as_torch and shift % grid == 0 and many:
                size = end - records[0].header
                layout.pieces.append(Span(source, records[0].header, size))
                layout.shifted.append((records[:many], shift))
                layout.carried[shift] += size
                at += size
                records = records[many:]
                continue
            record, records = records[0], records[1:]
            limit = records[0].header if records else run.end
            spare = (padding, filler.alone) if record is filler.record else None
            for piece in _record_pieces(
                archive, record, limit, at, grid, contents.get(record.name), spare, layout.moved
            ):
                if isinstance(piece, Span):
                    layout.carried[at - piece.offset] += piece.size
                layout.pieces.append(piece)
                at += size_of(piece)
    return layout._replace(size=at)


def _missing_padding(layout: _Layout, unit: int) -> int:
    """Return how many more bytes most of the carried bytes must move to have moved by whole units.

    The number is the same for all of them, unless a header grows because it crosses 4 GiB: then the minority is copied.
    """
    residues: Counter[int] = Counter()
    for shift, size in layout.carried.items():
        residues[shift % unit] += size
    return -residues.most_common(1)[0][0] % unit if residues else 0


def _directory(archive: Archive, layout: _Layout) -> bytes:
    """Return the directory with the new offsets of the records."""
    base = archive.records[0].entry
    last = archive.records[-1]
    raw = bytearray(archive.source.read(base, last.entry + last.entry_size - base))
    for records, shift in layout.shifted:
        if shift:
            for record in records:
                _put_u32(raw, record.entry - base + _OFFSET_FIELD, record.header + shift)
    changed = {record.entry: _entry(archive, record, new) for record, new in layout.moved}
    kept = bytes(raw[last.entry - base :])
    changed[last.entry] = strip_note(changed.get(last.entry, kept))
    ends = {record.entry: record.entry + record.entry_size for record, _ in layout.moved}
    parts: list[bytes] = []
    at = base
    for entry in sorted(changed):
        parts += [bytes(raw[at - base : entry - base]), changed[entry]]
        at = ends.get(entry, base + len(raw))
    return b"".join(parts)


def offsets_are_computed(archive: Archive, keys: Sequence[str]) -> bool:
    """Return whether the storages ``keys``, in the order of the pickle, are at the offsets that torch computes.

    With ``.format_version`` 1 torch computes offsets instead of reading them under ``map_location="meta"``, in
    FakeTensorMode and with ``calculate_storage_offsets`` (torch/serialization.py, ``_load._get_offset``).
    """
    grid = alignment(archive)
    records = [record for key in keys if (record := archive.find(f"data/{key}")) is not None]
    if not keys or keys[0] != "0" or len(records) < len(keys):
        return not keys
    return all(
        record.header + _torch_size(record, grid) == after.header or _torch_size(record, grid) < 0
        for record, after in pairwise(records)
    )


def _lies_as_torch(archive: Archive, record: Record, limit: int, grid: int) -> bool:
    """Return whether this record fills the bytes up to ``limit`` in torch's own layout.

    Its local header must also lead to the payload, because a flipped bit may lead elsewhere.
    """
    if record.header + _torch_size(record, grid) != limit:
        return False
    raw = archive.window.read(record.header, LOCAL.size)
    name = _name_size(record)
    extra = 4 + -(record.header + LOCAL.size + name + 4) % grid
    return raw[:4] == b"PK\x03\x04" and raw[26:30] == _u16(name) + _u16(extra)


def _name_size(record: Record) -> int:
    """Return the size of a record's name in bytes."""
    name = record.name
    return len(name) if name.isascii() else len(name.encode("utf-8", "surrogateescape"))


def _torch_size(record: Record, grid: int) -> int:
    """Return the bytes of a record in torch's own layout, from its header to the end of its descriptor.

    Return -1 if the record needs a zip64 field, or is compressed.
    """
    if record.header >= FULL32 or record.size >= FULL32 or record.method:
        return -1
    head = LOCAL.size + _name_size(record) + 4
    return head + -(record.header + head) % grid + record.size + (16 if record.size else 0)


def _record_pieces(
    archive: Archive,
    record: Record,
    limit: int,
    at: int,
    grid: int,
    content: bytes | None,
    spare: tuple[int, bool] | None,
    moved: list[tuple[Record, Record]],
) -> Iterator[Piece]:
    """Yield header, payload and descriptor of a record; ``spare`` is the filler's (padding, whether it is alone)."""
    raw = archive.local(record)
    payload = Span(archive.source, record.header + len(raw), record.compressed)
    if payload.offset + payload.size > limit:
        raise RefusedError(f"the record {record.name!r} overlaps what follows it", path=archive.source.name)
    tail = archive.source.read(payload.offset + payload.size, min(24, limit - payload.offset - payload.size))
    descriptor = _descriptor(record, tail)
    new = record._replace(header=at)
    if content is not None:
        # 0 for a record with a payload means that the writer computes no checksums, so ckptool also computes none.
        crc = zlib.crc32(content) if record.crc or not record.size else 0
        new = new._replace(crc=crc, size=len(content), compressed=len(content), method=0)
    moved.append((record, new))
    header, wide = _header(record, new, raw, grid, content is not None, spare)
    # An unchanged header is a span, so that it joins the next one.
    yield Span(archive.source, record.header, len(header)) if header == raw else header
    yield payload if content is None else content
    if content is None and len(descriptor) in (0, 24 if wide else 16):
        yield Span(archive.source, payload.offset + payload.size, len(descriptor))
    elif descriptor and (new.compressed or record.compressed == 0):
        pack = _u64 if wide else _u32
        yield b"PK\x07\x08" + _u32(new.crc) + pack(new.compressed) + pack(new.size)


def _descriptor(record: Record, tail: bytes) -> bytes:
    """Return the data descriptor at the start of ``tail``, or b""; torch writes only the form with a signature."""
    if not record.flags & 8 or tail[:8] != b"PK\x07\x08" + _u32(record.crc):
        return b""
    if tail[8:24] == _u64(record.compressed) + _u64(record.size):
        return tail[:24]
    return tail[:16]


def _header(
    record: Record, new: Record, raw: bytes, grid: int, repad: bool, spare: tuple[int, bool] | None
) -> tuple[bytes, bool]:
    """Return the local header at the new offset, and whether it has a zip64 field.

    The padding is minimal in a record with new content (``repad``), and in the filler, which adds its spare padding.
    """
    extra_at = LOCAL.size + int.from_bytes(raw[26:28], "little")
    fields = extra_fields(raw[extra_at:])
    fixed, name = bytearray(raw[: LOCAL.size]), raw[LOCAL.size : extra_at]
    if (new.crc, new.size, new.method) != (record.crc, record.size, record.method):
        fixed[8:10] = _u16(new.method)
        if any(fixed[14:26]):  # this writer also puts the sizes here, not only into the descriptor
            fixed[14:26] = _u32(new.crc) + _u32(min(new.compressed, FULL32)) + _u32(min(new.size, FULL32))
    old_padding = next((data for kind, data in fields if kind == PADDING_ID), None)
    if old_padding is None or (spare and spare[1]):
        rest = raw[extra_at:]
        if spare:
            rest = b"".join(extra_field(kind, data) for kind, data in fields if kind != PADDING_ID)
            if spare[0]:
                padding = spare[0] - 4 if spare[0] >= 4 else spare[0] - 4 + FILESYSTEM_BLOCK
                rest += extra_field(PADDING_ID, b"Z" * padding)
            fixed[28:30] = _u16(len(rest))
        return bytes(fixed) + name + rest, any(kind == ZIP64_ID for kind, _ in fields)
    wide = zip64_field(local_zip64_values(new.size, new.header))
    others = [extra_field(kind, data) for kind, data in fields if kind not in (PADDING_ID, ZIP64_ID)]
    front = wide + b"".join(others)
    least = -(new.header + len(fixed) + len(name) + len(front) + 4) % grid
    padding = len(old_padding)
    if repad or spare or padding == -(record.header + len(raw) - padding) % grid:
        padding = least + (spare[0] if spare else 0)
    elif (record.header + len(raw)) % grid == 0:
        # The record has more than the least padding, yet is aligned: keep that.
        padding = (padding // grid) * grid + least
    extra = front + extra_field(PADDING_ID, b"Z" * padding)
    fixed[28:30] = _u16(len(extra))
    return bytes(fixed) + name + extra, bool(wide)


def _entry(archive: Archive, record: Record, new: Record) -> bytes:
    """Return the directory entry of a moved record: the old entry with the changes, with zip64 if needed."""
    raw = archive.source.read(record.entry, record.entry_size)
    if new == record:
        return raw
    extra_at = 46 + int.from_bytes(raw[28:30], "little")
    extra_size = int.from_bytes(raw[30:32], "little")
    fields = extra_fields(raw[extra_at : extra_at + extra_size])
    extra = zip64_field(value for value in (new.size, new.compressed, new.header) if value >= FULL32)
    extra += b"".join(extra_field(kind, data) for kind, data in fields if kind != ZIP64_ID)
    fixed = bytearray(raw[:46])
    fixed[10:12] = _u16(new.method)
    fixed[16:20] = _u32(new.crc)
    fixed[20:28] = _u32(min(new.compressed, FULL32)) + _u32(min(new.size, FULL32))
    fixed[30:32] = _u16(len(extra))
    fixed[_OFFSET_FIELD:46] = _u32(min(new.header, FULL32))
    return bytes(fixed) + raw[46:extra_at] + extra + raw[extra_at + extra_size :]


def _end_records(archive: Archive, count: int, directory: int, size: int, *, wide: bool = False) -> bytes:
    """Return the end records for ``count`` entries, with a directory of ``size`` bytes at ``directory``.

    They include zip64 if the archive has it, if the offsets need it, or with ``wide``. The length of the comment stays.
    """
    fields, source = b"", archive.source
    if archive.end.zip64 >= 0:
        fields = source.read(archive.end.zip64 + 12, 12)
    elif wide or directory >= FULL32 or count >= 0xFFFF:
        fields = _u16(45) * 2 + bytes(8)
    end = source.read(archive.end.plain, 22)
    return end_records(count, directory, size, wide=fields, head=end[:8], comment=end[20:22])


def plan_append(
    archive: Archive, contents: Mapping[str, bytes], dropped: Collection[str], edit: str, time: int
) -> AppendPlan:
    """Plan an edit in place: append a new version, with new contents for some records and without others.

    No existing byte changes. ``contents`` and ``dropped`` use full names; ``edit`` and ``time`` are for the note
    (``versions``). Raises RefusedError if bytes follow the archive, because they would end up in the middle.
    """
    source = archive.source
    if archive.end.unfinished:
        what = "the last edit in place of this file was not finished"
        raise RefusedError(what, path=source.name, next="take it back: " + undo_step(source.name))
    if source.size != archive.end.tail:
        what = "bytes follow the archive, and would end up in the middle of it"
        raise RefusedError(what, path=source.name, next=_next_step(archive))
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
            entries.append(strip_note(old[begin : begin + record.entry_size]))
            continue
        new = RecordContent(record.name, content, zlib.crc32(content), len(content))
        # Padded like the record it replaces, because archives by other writers have no padding.
        padded, at = padding_field(archive, record) is not None, source.size + len(body)
        header, descriptor = header_and_descriptor(new, at, padded=padded)
        entries.append(directory_entry(new, at))
        assert isinstance(descriptor, bytes)
        body += header + content + descriptor
    # The locator points to the old zip64 end record. A second copy of that record would be mistaken for an archive.
    hold = source.read(archive.end.plain - 20, 42)[0 if archive.end.zip64 >= 0 else 20 :].rjust(42)
    old_end = zlib.crc32(source.read(source.size - END_SIZE, END_SIZE))
    note = hold + encode_note(EditNote(source.size, old_end, edit, time))
    directory = source.size + len(body)
    # The file ends at the end of a page, and so of a sector, which contains the whole note and the end records.
    spare = -(directory + sum(map(len, entries)) + 4 + len(note) + END_SIZE) % FILESYSTEM_BLOCK
    entries[-1] = _with_field(entries[-1], b" " * spare + note, source.name)
    listing = b"".join(entries)
    end = _end_records(archive, len(entries), directory, len(listing), wide=True)
    unsigned = end[:-PLAIN_END_SIZE] + b"\0" + end[1 - PLAIN_END_SIZE :]
    return AppendPlan(source.size, body + listing[: -len(note)], note + unsigned, end)


def _next_step(archive: Archive) -> AnyStep:
    """Return the next step for bytes after the archive."""
    source, tail = archive.source, archive.end.tail
    if not is_leftover_growth(source, tail):
        return "write a new file with `-o=`: it keeps them"
    return f"they are zeros, as left by a power loss: truncate -s {tail} {argument(source.name)} removes them"


def _with_field(entry: bytes, data: bytes, path: str) -> bytes:
    """Add an extra field to a directory entry; its comment is removed, because the field must be last."""
    name_size, extra_size = int.from_bytes(entry[28:30], "little"), int.from_bytes(entry[30:32], "little")
    extra = extra_size + 4 + len(data)
    if extra > _MAX_EXTRA:
        what = "the last entry of its directory has so many extra fields that a note does not fit in"
        raise RefusedError(what, path=path, next="write a new file with `-o=`")
    fixed = entry[:30] + _u16(extra) + bytes(2) + entry[34:46]
    return fixed + entry[46 : 46 + name_size + extra_size] + extra_field(NOTE_FIELD, data)
