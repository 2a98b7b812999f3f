"""Read a zip archive the way torch's reader does.

``PyTorchFileReader`` (caffe2/serialize/inline_container.cc, on miniz) trusts the last end record and the directory it
points to, counts offsets from the start of the file, finds records by their directory name ignoring case, and reads a
local header only to skip it. Python's zipfile does none of this, so the two can see different files. All possible
differences are reported in ``oddities``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from struct import Struct
from typing import Final

from ...base.errors import MalformedError
from ...base.findings import Finding
from ...base.limits import LIMITS
from ...base.records import NamedTuple, new_tuple
from ...base.text import quoted
from ..sources import Source, Span
from ..threads import read_blocks
from .versions import read_note, unfinished_end

#: Bytes that a Window reads ahead.
_WINDOW: Final = 1 << 16
#: Bytes that it reads at least: the end of a record, the padding, and the header after it.
_STEP: Final = 1024
#: Reads this close together are steps of a walk: the next one is probably as close.
_NEARBY: Final = 1 << 12


class Window:
    """A source with read-ahead for many small reads close together.

    Walking an archive with small records reads a few dozen bytes every few hundred, each with a system call. So after
    three reads close together, a whole window is read, unless it would be downloaded. Later reads within it need no
    system call. Among large records, one read has the end of a record and the header of the next.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._buffer = (0, b"")
        self._last = 0
        #: The number of consecutive reads that were close to the previous one.
        self._close = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly ``size`` bytes from ``offset``, or fewer at the end of the source."""
        begin, data = self._buffer
        if not begin <= offset <= begin + len(data) - size:
            data, begin = self.around(offset, size)
        return data[offset - begin : offset - begin + size]

    def around(self, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes that contain the result of ``read``, and the offset of the first byte."""
        begin, data = self._buffer
        end = begin + len(data)
        close = 0 < offset - self._last < _NEARBY or (len(data) > 0 and -_NEARBY < offset - end < _NEARBY)
        self._close = self._close + 1 if close else 0
        self._last = offset
        if begin <= offset <= end - size:
            return data, begin
        # From the end of a large record to the next header is one short step, but then comes a long one.
        if size > _NEARBY:
            return self.source.read(offset, size), offset
        ahead = self._close >= 2 and not self.source.missing([(offset, _WINDOW)])
        data = self.source.read(offset, max(size, self.source.readily(offset, _WINDOW if ahead else _STEP)))
        self._buffer = (offset, data)
        return data, offset


def nearby() -> Callable[[Source], Window]:
    """Return a function that opens a source as a window, and keeps that window until it gets another source."""
    return lru_cache(maxsize=1)(Window)


DIRECTORY: Final = "central directory"
#: A directory entry: flags, method, CRC-32, sizes compressed and inflated, lengths of name, extra fields and comment,
#: disk, external attributes, offset of the local header.
_ENTRY: Final = Struct("<8x2H4x3I4H2x2I")
_END: Final = Struct("<4s4H2IH")
_END64: Final = Struct("<4sQ2H2I4Q")
_LOCATOR: Final = Struct("<4sIQI")
LOCAL: Final = Struct("<4s5H3I2H")
FULL32: Final = 0xFFFFFFFF
#: Torch searches this many bytes for the end record, in chunks of 4,096 bytes that overlap by three.
_END_SEARCH: Final = 0xFFFF + _END.size
_SEARCH_CHUNK: Final = 4096
_SEARCH_STEP: Final = _SEARCH_CHUNK - 3
#: Longest name in bytes that torch lists (``MZ_ZIP_MAX_ARCHIVE_FILENAME_SIZE`` less one).
MAX_NAME: Final = 511
ZIP64_ID: Final = 1
#: The id of the extra field with which torch pads, "FB".
PADDING_ID: Final = 0x4246
#: Info-ZIP's field for a UTF-8 name, with the CRC-32 of the name that it replaces.
_UNICODE_NAME: Final = 0x7075
_AMBIGUOUS_FIELDS: Final = (ZIP64_ID, _UNICODE_NAME)
#: Compressed patched data, strong encryption, masked header values.
_UNSUPPORTED_FLAGS: Final = 0x20 | 0x40 | 0x2000
_ODD_FLAGS: Final = _UNSUPPORTED_FLAGS | 1
#: Bytes read at once: they stay in the processor's cache until they are checksummed.
_CHUNK: Final = 1 << 18
_FOLD: Final = {ord(letter): ord(letter.lower()) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
#: A record up to this many bytes may be compressed by any factor.
_ALWAYS_INFLATED: Final = 64 << 20


class Record(NamedTuple):
    """One entry of the central directory; sizes and offsets in bytes.

    ``name`` is the full name, including the root folder; bytes that are not UTF-8 are surrogate escapes. ``crc`` 0
    means "not computed" unless the record is empty. The directory entry has ``entry_size`` bytes at ``entry``.
    """

    name: str
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    header: int
    entry: int
    entry_size: int


class EndRecords(NamedTuple):
    """The end records: where they are, and where they place the directory.

    ``zip64`` is the offset of the zip64 end record, or -1; ``plain`` is the offset of the other one. ``directory`` and
    ``size`` are the offset and size of the directory in bytes, ``entries`` the number of its entries. ``unfinished``
    counts the bytes after the end records left by an unfinished edit in place. ``dangling_locator`` is True for a
    locator that does not point to a zip64 end record.
    """

    zip64: int
    plain: int
    directory: int
    size: int
    entries: int
    unfinished: int = 0
    dangling_locator: bool = False

    @property
    def begin(self) -> int:
        """The offset of the first end record."""
        return self.zip64 if self.zip64 >= 0 else self.plain

    @property
    def tail(self) -> int:
        """The offset after the end records, where the comment starts."""
        return self.plain + _END.size + self.unfinished


class Archive:
    """A zip archive: its directory, without the payloads.

    ``records`` are in directory order. ``root`` is the folder of the first entry, or ""; ``prefix`` is the same with
    its slash.
    """

    def __init__(self, source: Source, records: list[Record], end: EndRecords) -> None:
        self.source = source
        self.records = records
        self.end = end
        self.oddities: list[Finding] = []
        self.root = next((record.name.partition("/")[0] for record in records[:1] if "/" in record.name), "")
        self.prefix = f"{self.root}/" if self.root else ""
        self.by_name: dict[str, Record] = {}
        self._payloads: dict[int, int] = {}
        self._folded_names = ""
        self._by_fold: dict[str, Record] = {}
        #: For local headers and descriptors: many of them are read at once if the records are small.
        self.window = Window(source)

    def find(self, name: str) -> Record | None:
        """Return the record with this name under the root folder, or None; like torch, prefer an exact match."""
        if "\0" in name or (not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name)):
            return None  # torch looks for the UTF-8 bytes, and only up to a NUL
        full = f"{self.root}/{name}" if self.root else name
        record = self.by_name.get(full)
        return self._find_folded(fold_case(full)) if record is None else record

    def _find_folded(self, name: str) -> Record | None:
        # Few names are found this way, and folding and searching all of them at once is much faster.
        self._folded_names = self._folded_names or fold_case("\0".join(self.by_name))
        if name not in self._folded_names:
            return None
        if not self._by_fold:
            self._by_fold = {fold_case(record.name): record for record in reversed(self.records)}
        return self._by_fold.get(name)

    def local(self, record: Record) -> bytes:
        """Return the local header of a record, which the payload follows; raises MalformedError if it has none."""
        raw = self.window.read(record.header, LOCAL.size + len(record.name) + 96)
        if len(raw) < LOCAL.size or raw[:4] != b"PK\x03\x04":
            raise MalformedError("no local header where the directory says", where=record.name, offset=record.header)
        size = LOCAL.size + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
        if size > len(raw):
            raw = self.source.read(record.header, size)
        payload = record.header + size
        if len(raw) < size or payload + record.compressed > self.source.size:
            raise MalformedError("the record reaches beyond the end of the file", where=record.name, offset=payload)
        return raw[:size]

    def remember(self, record: Record, payload: int) -> None:
        """Keep the offset of a payload whose local header was checked elsewhere."""
        self._payloads[record.entry] = payload

    def payload(self, record: Record) -> Span:
        """Return the raw bytes of a record; compressed bytes stay compressed."""
        at = self._payloads.get(record.entry)
        if at is None:
            at = self._payloads[record.entry] = record.header + len(self.local(record))
        return new_tuple(Span, (self.source, at, record.compressed))

    def read(self, record: Record, limit: int) -> bytes:
        """Return the content of a record, inflated; raises MalformedError beyond ``limit`` bytes."""
        if record.size > limit:
            raise MalformedError(f"{record.size:,} bytes, the limit is {limit:,}", where=record.name)
        if record.method not in (0, 8):
            raise MalformedError(f"compression method {record.method}, which torch cannot read", where=record.name)
        if record.method and record.size > max(LIMITS.inflation * record.compressed, _ALWAYS_INFLATED):
            what = f"{record.compressed:,} bytes would inflate to {record.size:,}: a decompression bomb, not a pickle"
            raise MalformedError(what, where=record.name)
        span = self.payload(record)
        if not record.method and span.size <= _CHUNK and span.offset + span.size <= self.source.size:
            return self.source.read(span.offset, span.size)[: record.size]
        return b"".join(content_chunks(span, record.size, record.method != 0, record.name))[: record.size]

    def text(self, name: str) -> bytes | None:
        """Return a small text record under the root folder, or None; raises beyond ``limits.text_bytes`` bytes."""
        record = self.find(name)
        return None if record is None else self.read(record, LIMITS.text_bytes)


def fold_case(name: str) -> str:
    """Fold a name as torch's reader compares it (``MZ_TOLOWER``): only A to Z are lowered."""
    return name.lower() if name.isascii() else name.translate(_FOLD)


def content_chunks(span: Span, size: int, compressed: bool, name: str) -> Iterator[bytes]:
    """Yield the content of a record in chunks, inflated if it is compressed; ``name`` is for errors.

    Raises MalformedError if the record ends too early, or does not inflate to ``size`` bytes.
    """
    inflater = zlib.decompressobj(-15) if compressed else None
    if compressed and size > LIMITS.inflated_bytes and size > LIMITS.inflation * span.size:
        raise MalformedError(f"{span.size:,} bytes would inflate to {size:,}, the limit is reached", where=name)
    at = done = 0
    while at < span.size:
        data = span.source.read(span.offset + at, min(_CHUNK, span.size - at))
        if not data:
            raise MalformedError("the record reaches beyond the end of the file", where=name)
        at += len(data)
        if inflater is None:
            yield data
            continue
        try:
            while data and not inflater.eof:
                plain = inflater.decompress(data, _CHUNK)
                done += len(plain)
                if done > size:
                    raise MalformedError("it inflates to more than the directory says", where=name)
                yield plain
                data = inflater.unconsumed_tail
        except zlib.error as error:
            raise MalformedError(f"damaged deflate stream: {error}", where=name, offset=span.offset) from error
    if inflater is not None:
        plain = inflater.flush()
        if done + len(plain) != size or not inflater.eof:
            raise MalformedError("it inflates to another size than the directory says", where=name)
        yield plain


def read_archive(source: Source) -> Archive:
    """Read the central directory; raises MalformedError if torch's reader would refuse the file."""
    end = _find_end(source)
    offset, size, count = end.directory, end.size, end.entries
    if offset + size > source.size:
        raise MalformedError("the directory reaches beyond the end of the file", where=DIRECTORY, offset=offset)
    # Each entry takes at least 46 bytes. A larger count is false, and nothing is allocated for it.
    if count * _ENTRY.size > size:
        raise MalformedError(f"{count:,} entries do not fit into {size:,} bytes", where=DIRECTORY, offset=offset)
    raw = source.read(offset, size)
    shift = end.begin - offset - size
    if shift > 0 and raw[:4] != b"PK\x01\x02" and source.read(offset + shift, 4) == b"PK\x01\x02":
        what = f"its last archive begins only at byte {shift:,}: torch refuses bytes before an archive"
        raise MalformedError(what, where=DIRECTORY, offset=offset)
    records, oddities = _read_entries(raw, count, offset)
    archive = Archive(source, records, end)
    archive.oddities += oddities
    last = records[-1].entry + records[-1].entry_size if records else offset
    _note_oddities(archive, offset + len(raw) - last)
    return archive


def _find_end(source: Source) -> EndRecords:
    at, start, tail = -1, -1, b""
    # Most archives end with the record. Before it, a planned archive may have bytes that are still to be computed.
    for begin in (max(source.size - _END.size, 0), max(source.size - _SEARCH_CHUNK, 0), end_search_start(source.size)):
        if at < 0 and begin != start:
            start, tail = begin, source.read(begin, source.size - begin)
            at = tail.rfind(b"PK\x05\x06", 0, max(len(tail) - _END.size + 4, 0))
    if at < 0:
        raise MalformedError("no end of the central directory: the file is cut or damaged", where=DIRECTORY)
    _, disk, first_disk, _, count, size, offset, _ = _END.unpack_from(tail, at)
    plain, zip64 = start + at, -1
    room = _LOCATOR.size + _END64.size
    locator = source.read(plain - _LOCATOR.size, _LOCATOR.size) if plain >= room else b""
    dangling = locator[:4] == b"PK\x06\x07"
    if dangling:
        _, _, there, _ = _LOCATOR.unpack(locator)
        raw = source.read(there, _END64.size) if there < source.size else b""
        if len(raw) == _END64.size and raw[:4] == b"PK\x06\x06":
            _, _, _, _, disk, first_disk, _, count, size, offset = _END64.unpack(raw)
            zip64, dangling = there, False
    if disk or first_disk:
        raise MalformedError("an archive in several parts", where=DIRECTORY, offset=plain)
    # Relative to the bytes read already, because the edit may be finished at this very moment.
    unfinished = max(unfinished_end(source, plain + _END.size) - plain - _END.size, 0)
    return EndRecords(zip64, plain, offset, size, count, unfinished, dangling)


def end_search_start(size: int) -> int:
    """Return where torch's search for the end record starts in a file of ``size`` bytes.

    Source: ``mz_zip_reader_locate_header_sig`` of miniz.
    """
    begin = max(size - _SEARCH_CHUNK, 0)
    while begin >= _SEARCH_STEP and size - begin < _END_SEARCH:
        begin -= _SEARCH_STEP
    return begin


def ends_in_directory(source: Source) -> bool:
    """Return whether a file ends with the directory of an archive.

    zipfile and similar readers accept such an archive, whatever bytes come before it.
    """
    begin = max(source.size - _END_SEARCH, 0)
    tail = source.read(begin, source.size - begin)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) < place + _END.size:
        return False
    _, _, _, _, count, size, _, comment = _END.unpack_from(tail, place)
    if count == 0 or place + _END.size + comment != len(tail):
        return False
    # A larger archive has its numbers in a record before this one.
    return size == 0xFFFFFFFF or source.read(begin + place - size, 4) == b"PK\x01\x02"


def end_record_oddities(archive: Archive) -> Iterator[Finding]:
    """Yield contradictions between the end records. Torch refuses most such files; others pick one record."""
    source, end = archive.source, archive.end
    _, _, _, here, total, size, offset, _ = _END.unpack(source.read(end.plain, _END.size))
    if here != total:
        what = f"the end record counts {here:,} entries here and {total:,} in all"
        yield Finding("end-count", "error", what, offset=end.plain)
    if end.zip64 < 0:
        return
    _, wide_size, _, _, _, _, wide_here, wide_total, wide_bytes, wide_offset = _END64.unpack(
        source.read(end.zip64, _END64.size)
    )
    if wide_size != 44:
        what = "the zip64 end record declares another size than its fields have"
        yield Finding("end-records", "error", what, offset=end.zip64)
    if wide_here != wide_total:
        what = f"the zip64 end record counts {wide_here:,} entries here and {wide_total:,} in all"
        yield Finding("end-count", "error", what, offset=end.zip64)
    for what, plain, wide, full in (
        ("entries", total, wide_total, 0xFFFF),
        ("bytes of directory", size, wide_bytes, FULL32),
        ("as its offset", offset, wide_offset, FULL32),
    ):
        if plain not in (full, wide):
            text = f"the end record says {plain:,} {what}, the zip64 end record {wide:,}"
            yield Finding("end-records", "error", text, offset=end.plain)
    if source.read(end.plain - 4, 4) != b"\1\0\0\0":  # the locator's number of disks
        yield Finding("end-records", "error", "the archive is declared to have several parts", offset=end.plain - 20)


def _read_entries(raw: bytes, count: int, base: int) -> tuple[list[Record], list[Finding]]:
    """Return the records of a directory at ``base``, and the oddities of its entries."""
    records: list[Record] = []
    odd: list[Finding] = []
    unpack, size, new = _ENTRY.unpack_from, _ENTRY.size, tuple.__new__
    at = 0
    for _ in range(count):
        if at + size > len(raw) or raw[at : at + 4] != b"PK\x01\x02":
            raise MalformedError("no directory entry where one is expected", where=DIRECTORY, offset=base + at)
        fixed = unpack(raw, at)
        flags, method, crc, packed, plain, name_size, extra_size, comment_size, disk, attributes, header = fixed
        name_at = at + size
        extra_at = name_at + name_size
        end = extra_at + extra_size + comment_size
        if end > len(raw):
            raise MalformedError("a directory entry reaches beyond the directory", where=DIRECTORY, offset=base + at)
        name = raw[name_at:extra_at].decode("utf-8", "surrogateescape")
        fields: Sequence[tuple[int, bytes]] = ()
        if extra_size:
            fields, filled = walk_extra(raw[extra_at : extra_at + extra_size])
            if filled != extra_size or any(kind in _AMBIGUOUS_FIELDS for kind, _ in fields):
                odd += _field_oddities(name, raw[name_at:extra_at], raw[extra_at : extra_at + extra_size], base + at)
        if plain == FULL32 or packed == FULL32 or header == FULL32:
            # Of two such fields torch takes the first, like Python (``mz_zip_file_stat_internal``, ``_decodeExtra``).
            wide = next((data for kind, data in fields if kind == ZIP64_ID), b"")
            values = [int.from_bytes(wide[i : i + 8], "little") for i in range(0, len(wide) - 7, 8)]
            try:
                plain = values.pop(0) if plain == FULL32 else plain
                packed = values.pop(0) if packed == FULL32 else packed
                header = values.pop(0) if header == FULL32 else header
            except IndexError:
                raise MalformedError("a zip64 size is missing", where=name, offset=base + at) from None
        if packed == plain:
            packed = plain  # one object for both
        record = new(Record, (name, flags, method, crc, packed, plain, header, base + at, end - at))
        records.append(record)
        if attributes & 0x10 or name_size > MAX_NAME or (plain != packed and (not packed or not method)):
            odd += _entry_oddities(record, attributes)
        elif plain and name[-1:] == "/":
            odd += _entry_oddities(record, 0x10)
        if disk:
            # Torch refuses the file, except for disk 1; Python does not look.
            what = f"{quoted(name)} is declared to be on another disk"
            odd.append(Finding("other-disk", "error", what, name, base + at))
        at = end
    return records, odd


def _entry_oddities(record: Record, attributes: int) -> Iterator[Finding]:
    name, packed, plain = record.name, record.compressed, record.size
    if attributes & 0x10 and (plain or not name.endswith("/")):
        # For miniz, this MS-DOS bit or a trailing slash means a folder, and torch returns uninitialized memory.
        what = f"{quoted(name)} is marked as a folder: torch does not read its bytes"
        yield Finding("folder-attribute", "error", what, name)
    if len(name) > MAX_NAME or len(name.encode("utf-8", "surrogateescape")) > MAX_NAME:
        what = f"the name {quoted(name)} is longer than the {MAX_NAME} bytes that torch's reader supports"
        yield Finding("name-long", "error", what, name, record.entry)
    if plain != packed and (not packed or not record.method):
        # Torch reads one of the two numbers of bytes, or refuses the file; Python reads the other number.
        what = f"{quoted(name)}: stored, yet {plain:,} bytes are declared to take {packed:,}"
        yield Finding("stored-size", "error", what, name, record.entry)


def _field_oddities(name: str, raw_name: bytes, extra: bytes, offset: int) -> Iterator[Finding]:
    """Yield the oddities in the extra fields of a directory entry that readers could see differently."""
    fields, filled = walk_extra(extra)
    if sum(kind == ZIP64_ID for kind, _ in fields) > 1:
        what = f"{quoted(name)} has two zip64 fields; torch takes the first"
        yield Finding("zip64-twice", "error", what, name, offset)
    for kind, data in fields:
        if kind == _UNICODE_NAME and data[:5] == b"\1" + zlib.crc32(raw_name).to_bytes(4, "little"):
            other = data[5:]
            if other != raw_name:
                what = f"{quoted(name)} is called {quoted(other.decode('utf-8', 'replace'))} by an extra field"
                yield Finding("name-twice", "error", what, name, offset)
    if filled != len(extra):
        what = f"the extra fields of the directory entry of {quoted(name)} do not parse"
        yield Finding("entry-fields", "error", what, name, offset)


def extra_fields(raw: bytes) -> list[tuple[int, bytes]]:
    """Parse extra fields into (id, data); a rest that does not parse is cut off, as every reader does."""
    return walk_extra(raw)[0]


def walk_extra(raw: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """Return the extra fields as (id, data), and the offset after the last."""
    fields = []
    at = 0
    while at + 4 <= len(raw):
        size = int.from_bytes(raw[at + 2 : at + 4], "little")
        fields.append((int.from_bytes(raw[at : at + 2], "little"), raw[at + 4 : at + 4 + size]))
        at += 4 + size
    return fields, at


def _note_oddities(archive: Archive, unused: int) -> None:
    """Report structural ambiguities that the directory alone shows."""
    note = archive.oddities.append
    archive.by_name = {record[0]: record for record in archive.records}
    if not _is_plain(archive):
        _note_name_oddities(archive)
    if unused:
        note(Finding("directory-rest", "error", f"{unused:,} bytes of the directory belong to no entry"))
    end = archive.end
    gap = end.begin - end.directory - end.size
    # Only its locator (20 bytes) belongs between the zip64 end record (56 bytes) and the plain one.
    between = end.plain - end.zip64 - _END64.size - _LOCATOR.size if end.zip64 >= 0 else 0
    signature = archive.source.read(end.plain - _LOCATOR.size - _END64.size, 4) if between > 0 else b""
    if end.unfinished:
        what = "an edit in place was not finished: torch reads the version before it"
        note(Finding("unfinished-edit", "warning", what, offset=end.tail))
    elif signature == b"PK\x06\x06" or (gap and archive.source.read(end.begin - end.size, 4) == b"PK\x01\x02"):
        note(Finding("second-archive", "error", "several archives follow one another; torch reads the first"))
    elif gap or between:
        what = f"the directory and the end records are not adjacent ({gap + between:+,} bytes)"
        note(Finding("directory-gap", "error", what))
    elif end.dangling_locator:
        what = "a locator points to no zip64 end record: torch uses the plain one, other readers refuse the file"
        note(Finding("end-records", "error", what, offset=end.plain - _LOCATOR.size))
    limit = archive.source.size
    for name, _, _, _, compressed, _, header, _, _ in archive.records:
        if header + compressed > limit - LOCAL.size:
            what = f"{quoted(name)} reaches beyond the end of the file; torch refuses such a file"
            note(Finding("beyond-end", "error", what, name, header))
    if len(archive.root.encode("utf-8", "surrogateescape")) >= MAX_NAME:
        what = f"the name of the folder {quoted(archive.root)} is longer than torch's reader supports"
        note(Finding("long-root", "error", what, archive.root))
    if archive.records:
        first = min(map(attrgetter("header"), archive.records))
        if first > 0 and read_note(archive.source, end.tail) is None:  # otherwise these bytes are a former version
            note(Finding("leading-bytes", "error", f"{first:,} bytes precede the first record"))


def _is_plain(archive: Archive) -> bool:
    """Return whether no name or flag is odd; a fast check of all records at once."""
    names = archive.by_name
    if len(names) < len(archive.records) or any(record[1] & _ODD_FLAGS for record in archive.records):
        return False
    everything = "\0".join(("", *names))
    if everything.count("\0") > len(names):
        return False
    if archive.root and everything.count(f"\0{archive.root}/") < len(names):
        return False
    return everything == everything.lower() or len({fold_case(name) for name in names}) == len(names)


def _note_name_oddities(archive: Archive) -> None:
    """Report names and flags that readers could interpret differently; of records with one name, the first counts."""
    note = archive.oddities.append
    archive.by_name.clear()
    folds: set[str] = set()
    for record in archive.records:
        name = record.name
        if name in archive.by_name:
            what = f"two records are called {quoted(name)}; torch takes either one"
            note(Finding("duplicate-record", "error", what, name))
        else:
            fold = fold_case(name)
            if fold in folds:
                what = f"{quoted(name)} differs from another record in case only; torch takes either"
                note(Finding("case-twin", "error", what, name))
            folds.add(fold)
            archive.by_name[name] = record
        if "\0" in name:
            what = f"the name {quoted(name)} contains a NUL byte, which ends it for some readers"
            note(Finding("name-nul", "error", what, name, record.entry))
        if record.flags & _UNSUPPORTED_FLAGS:
            what = f"{quoted(name)} has flags for encryption or patched data, which torch's reader refuses"
            note(Finding("special-flags", "error", what, name))
        if record.flags & 1:
            note(Finding("encrypted", "error", f"{quoted(name)} is encrypted; torch cannot read it", name))
        if archive.root and not name.startswith(archive.root + "/"):
            what = f"{quoted(name)} is outside of the folder {quoted(archive.root)}; torch refuses the file"
            note(Finding("second-root", "error", what, name))


def checksum(span: Span, size: int, compressed: bool, name: str, progress: Callable[[int], None] | None = None) -> int:
    """Compute the CRC-32 of a span that inflates to ``size`` bytes; ``name`` is for errors.

    ``progress`` is called with the bytes of each step. Raises MalformedError if the span does not inflate to its size,
    or exceeds the file.
    """
    crc = 0
    complete = not compressed and span.offset + span.size <= span.source.size
    for data in read_blocks(span) if complete else content_chunks(span, size, compressed, name):
        crc = zlib.crc32(data, crc)
        if progress:
            progress(len(data))
    return crc
