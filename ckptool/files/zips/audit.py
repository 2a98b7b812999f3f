"""Find everything in a zip archive that two readers could see differently, beyond the findings of its directory.

Torch's reader looks only at the central directory (``reader``). Here every local header and descriptor is compared with
the directory, and every byte of the file must belong to something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, TypeAlias

from ...base.errors import MalformedError
from ...base.findings import Finding
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import pluralize, quoted
from ..sources import SliceSource, Source
from .reader import (
    FULL32,
    LOCAL,
    PADDING_ID,
    Archive,
    Record,
    Window,
    end_record_oddities,
    extra_fields,
    read_archive,
    walk_extra,
)
from .versions import versions

#: Called with (code, message, level) for an oddity of one record.
_Note: TypeAlias = Callable[..., None]

#: Bytes from the end of one record to the header of the next, and all bytes that are read around a header.
_BEFORE: Final = 64
_AROUND: Final = 64 + 1024
_SIZES: Final = Struct("<3I").unpack_from
_NO_SIZES: Final = bytes(12)
#: The lengths of the name and of the extra fields.
_LENGTHS: Final = Struct("<2H").unpack_from
_WINDOW: Final = 1 << 20
#: Directories of former versions are read until their total exceeds the file size plus this many bytes. The end records
#: of each version count 4 KiB.
_FORMER_BYTES: Final = 16 << 20
_END_COST: Final = 4096
#: A local header: magic, length of the name, length of the extra fields.
_LOCATION: Final = Struct("<4s22x2H")
_U16: Final = Struct("<H")
#: The head of an extra field.
_PADDED: Final = Struct("<2H").pack
_DESCRIPTOR: Final = Struct("<4s3I").pack
_DESCRIPTOR_MAGIC: Final = b"PK\x07\x08"
_LOCAL_MAGIC: Final = b"PK\x03\x04"
#: Fields of a local header, from one byte to another; in a directory entry they are two bytes later.
_SHARED_FIELDS: Final = (("version", 4, 6), ("flags", 6, 8), ("method", 8, 10), ("time", 10, 14))
#: The highest zip version that Python's zipfile supports (``MAX_EXTRACT_VERSION``).
_MAX_VERSION: Final = 63
#: The flag of a UTF-8 name.
_UTF8: Final = 0x800
#: Finds anything in a name that may be a flaw.
_SUSPICIOUS: Final = regex(r"(?s)[\udc80-\udcff\0\\]|\A.?:?/|\.\.|//|/\Z")


class Audit:
    """The oddities of an archive, and the offsets of local headers that its directory does not list (``hidden``).

    ``padded`` says whether its first record is padded like torch does; None for an archive without records.
    """

    def __init__(self, archive: Archive) -> None:
        self.entries = Window(archive.source)
        self.oddities: list[Finding] = []
        self.hidden: list[int] = []
        #: Records of former versions that the current version lacks, each with its archive.
        self.former: list[tuple[Archive, Record]] = []
        self.padded: bool | None = None

    def note(self, code: str, message: str, level: str = "error", where: str = "", offset: int = -1) -> None:
        """Add an oddity."""
        self.oddities.append(Finding(code, level, message, where, offset))

    def note_missing_header(self, record: Record) -> None:
        """Add the oddity of a record without a local header."""
        what = f"{quoted(record.name)}: there is no local header at byte {record.header:,}, where the directory says"
        self.note("no-local-header", what, where=record.name, offset=record.header)


def prefetch_headers(archive: Archive) -> None:
    """Announce that all local headers are read next, each with the end of the record before it."""
    archive.source.prefetch((max(record.header - _BEFORE, 0), _AROUND) for record in archive.records)


def audit(archive: Archive) -> Audit:
    """Check the archive for contradictions."""
    prefetch_headers(archive)
    result = Audit(archive)
    result.oddities.extend(_name_oddities(archive))
    _check_extents(archive, result)
    _check_end(archive, result)
    return result


def check_locations(archive: Archive) -> None:
    """Raise MalformedError if a record is not where the directory says, or if the end records contradict each other.

    A record is checked by its local header and its end. This is the part of an audit that takes only a microsecond per
    record.
    """
    prefetch_headers(archive)
    window, limit = archive.window, archive.end.directory
    unpack, padding_size = _LOCATION.unpack_from, _U16.unpack_from
    data, begin = b"", 0
    for record in archive.records:
        # Unpacked at once, because attribute access on twenty thousand named tuples takes longer than the checks.
        where, _, _, _, compressed, _, at, _, _ = record
        name = where.encode("utf-8", "surrogateescape")
        head = LOCAL.size + len(name)
        here = at - begin
        if here < 0 or here + head + 4 > len(data):
            data, begin = window.around(at, head + 4)
            here = at - begin
        magic, name_size, extra = unpack(data, here) if here + LOCAL.size <= len(data) else (b"", 0, 0)
        if magic != _LOCAL_MAGIC or name_size != len(name) or not data.startswith(name, here + LOCAL.size):
            raise MalformedError("another record or none is where the directory says", where=where, offset=at)
        # The padding is nearly always the only extra field.
        padded = here + head + 4 <= len(data) and extra == 4 + padding_size(data, here + head + 2)[0]
        if extra and not padded and walk_extra(fields := window.read(at + head, extra))[1] != len(fields):
            raise MalformedError("the extra fields of its local header do not parse", where=where, offset=at)
        if at + head + extra + compressed > limit:
            raise MalformedError("the record reaches into the directory", where=where, offset=at)
        archive.remember(record, at + head + extra)
    result = Audit(archive)
    _check_end(archive, result)
    for oddity in result.oddities:
        if oddity.level == "error":
            raise MalformedError(oddity.message, where=oddity.where, offset=oddity.offset)


def _name_oddities(archive: Archive) -> Iterator[Finding]:
    for record in archive.records:
        name = record.name
        unmarked = not name.isascii() and not record.flags & _UTF8
        if name and not unmarked and not _SUSPICIOUS.search(name):
            continue
        parts = name.split("/")
        flaws = [
            ("name-encoding", "is not UTF-8", any("\udc80" <= char <= "\udcff" for char in name)),
            ("name-flag", "is not marked as UTF-8: Python's zipfile decodes it differently", unmarked),
            ("name-backslash", "contains a backslash, a folder separator to some readers", "\\" in name),
            ("name-absolute", "is an absolute path", name.startswith("/") or name[1:3] == ":/"),
            ("name-parent", "leads out of its folder", ".." in parts),
            ("name-empty", "has an empty part", "" in parts[1:-1] or not name),
        ]
        for code, what, flawed in flaws:
            if flawed:
                yield Finding(code, "error", f"the name {quoted(name)} {what}", name, record.entry)
        if name.endswith("/"):
            yield Finding("directory-entry", "warning", f"{quoted(name)} is an entry for a folder", name)


def _check_extents(archive: Archive, result: Audit) -> None:
    """Walk the records in the order of the file; every byte must belong to exactly one of them."""
    new = tuple.__new__  # there are ten thousands of records
    current = [new(_Extent, (record.header, record.entry, archive, record)) for record in archive.records]
    extents = sorted([*current, *_former_extents(archive, result)], key=lambda extent: extent[:2])
    end, at = archive.end, 0
    for begin, last, owner, record in extents:
        is_current = record is not None and owner is archive
        if begin > at:
            place = f"before the record {quoted(record.name)}" if is_current and record else "before a former version"
            _note_gap(archive.source, at, begin, place, result)
        elif record and begin < at:
            if is_current:
                what = f"the record {quoted(record.name)} begins within the one before it"
                result.note("overlap", what, where=record.name, offset=begin)
                if archive.window.read(begin, 4) != _LOCAL_MAGIC:
                    result.note_missing_header(record)
            # Each byte is examined once, however many headers share it.
            at = max(at, min(begin + LOCAL.size + record.compressed, end.directory))
            continue
        at = max(at, _check_local_header(owner, record, result if is_current else Audit(owner)) if record else last)
    if at > end.directory:
        result.note("overlap", "the last record reaches into the directory", offset=end.directory)
    elif at < end.directory:
        _note_gap(archive.source, at, end.directory, "before the directory", result)
    result.hidden.extend(find_signatures(archive.source, end.directory + end.size, end.begin))


class _Extent(NamedTuple):
    """Bytes of a record, whose own header says where it ends; without a record, bytes up to ``last`` of a former
    version.
    """

    begin: int
    last: int
    archive: Archive
    record: Record | None = None


def _former_extents(archive: Archive, result: Audit) -> list[_Extent]:
    """Return the bytes that only former versions of a file edited in place list, and collect their records."""
    seen = {record.header for record in archive.records}
    extents = []
    left = archive.source.size + _FORMER_BYTES
    # After an unfinished edit, the archive is the version before it.
    for version in versions(archive.source, archive.end.tail)[2 if archive.end.unfinished else 1 :]:
        try:
            older = read_archive(SliceSource(archive.source, 0, version.size))
        except MalformedError:
            break  # then its bytes belong to nothing
        left -= older.end.size + _END_COST
        if left < 0:
            what = "there are so many former versions that some of them were not checked"
            result.note("not-checked", what, level="warning", offset=version.size)
            break
        for record in older.records:
            if record.header not in seen:
                seen.add(record.header)
                result.former.append((older, record))
                extents.append(_Extent(record.header, record.entry, older, record))
        extents.append(_Extent(older.end.directory, version.size, older))
    return extents


def _note_gap(source: Source, begin: int, end: int, place: str, result: Audit) -> None:
    """Report bytes that belong to no record: left over by an edit in place, or hidden there."""
    hidden = list(find_signatures(source, begin, end))
    result.hidden.extend(hidden)
    size = pluralize(end - begin, "byte")
    if hidden:
        what = f"{pluralize(len(hidden), 'record')} that the directory does not list in the {size} {place}"
        result.note("unlisted-record", what, offset=hidden[0])
    elif begin == 0:
        result.note("leading-bytes", f"{size} precede the first record", offset=0)
    else:
        result.note("dead-bytes", f"{size} {place} belong to no record", level="warning", offset=begin)


def find_signatures(source: Source, begin: int, end: int, signature: bytes = _LOCAL_MAGIC) -> Iterator[int]:
    """Yield the offsets of a signature between two offsets; the file is read in windows."""
    at, file = begin, source.local_file()
    while at < end:
        if file is not None:
            at = file.next_data(at)  # a hole of 64 GiB contains no record
            if at >= end:
                return
        window = source.read(at, min(_WINDOW, end - at))
        match = window.find(signature)
        while match >= 0:
            yield at + match
            match = window.find(signature, match + 1)
        if len(window) < _WINDOW:
            return
        at += len(window) - len(signature) + 1


def _check_local_header(archive: Archive, record: Record, result: Audit) -> int:
    """Report how the local header of a record differs from the directory; return where its descriptor ends."""
    source, near, name = archive.source, archive.window, record.name

    def note(code: str, what: str, level: str = "error") -> None:
        result.note(code, f"{quoted(name)}: {what}", level, name, record.header)

    raw = near.read(record.header, LOCAL.size + 0x300)
    if len(raw) < LOCAL.size or raw[:4] != _LOCAL_MAGIC:
        result.note_missing_header(record)
        return record.header
    name_size: int
    extra_size: int
    name_size, extra_size = _LENGTHS(raw, 26)
    head = LOCAL.size + name_size + extra_size
    if head > len(raw):
        raw = source.read(record.header, head + 4)
    payload = record.header + head
    end = payload + record.compressed
    if end > source.size:
        note("beyond-end", "it reaches beyond the end of the file")
        return source.size
    archive.remember(record, payload)
    extra = raw[LOCAL.size + name_size : head]
    if extra[:4] == _PADDED(PADDING_ID, (extra_size - 4) & 0xFFFF):  # nearly always the only field
        padding, filled = [extra[4:]], extra_size
    else:
        fields, filled = walk_extra(extra)
        padding = [data for kind, data in fields if kind == PADDING_ID]
    if result.padded is None:
        result.padded = bool(padding)
    if result.padded != bool(padding) or b"".join(padding).strip(b"Z"):
        note("padding", "its padding differs from the other records", "warning")
    if filled != extra_size:
        note("local-header", "the extra fields of its local header do not parse")
    local_name = raw[LOCAL.size : LOCAL.size + name_size].decode("utf-8", "surrogateescape")
    if local_name != name:
        note("local-name", f"its local header calls it {quoted(local_name)}")
    entry = result.entries.read(record.entry, 46)
    for field, begin, after in _SHARED_FIELDS if raw[4:14] != entry[6:16] else ():
        here, there = (int.from_bytes(data, "little") for data in (raw[begin:after], entry[begin + 2 : after + 2]))
        # The writers of torch 1.4 to 1.9 set the flags of an empty record to 0 in only one of the two places.
        if here != there and not (field == "flags" and not record.size):
            what = f"{field} {here} in its local header, {there} in the directory"
            note("local-header", what, "error" if field == "method" else "warning")
    if entry[6] > _MAX_VERSION:
        note("version-needed", f"it declares to need zip version {entry[6]}; Python's zipfile refuses the archive")
    if raw[14:26] != _NO_SIZES or not record.flags & 8:
        _check_sizes(record, raw, note)
    if record.flags & 8 and record.compressed:
        end = _check_descriptor(near, record, end, note)
    if raw[head : head + 4] == _LOCAL_MAGIC or (head + 4 > len(raw) and source.read(payload, 4) == _LOCAL_MAGIC):
        tail = source.read(max(end - 0x10100, payload), min(0x10100, record.compressed))
        if b"PK\x05\x06" in tail:
            note("nested-archive", "its content is a zip archive itself")
    return end


def _check_sizes(record: Record, raw: bytes, note: _Note) -> None:
    """Compare the checksum and sizes in a local header. Zeros may mean that the descriptor has them."""
    deferred = record.flags & 8
    crc, packed, plain = _SIZES(raw, 14)
    wide = dict(extra_fields(raw[LOCAL.size + int.from_bytes(raw[26:28], "little") :])).get(1, b"")
    if wide and plain == FULL32 and len(wide) >= 8:
        plain = int.from_bytes(wide[:8], "little")
    if wide and packed == FULL32 and len(wide) >= 16:
        packed = int.from_bytes(wide[8:16], "little")
    for what, here, there in (
        ("checksum", crc, record.crc),
        ("compressed size", packed, record.compressed),
        ("size", plain, record.size),
    ):
        if here != there and not (deferred and not here):
            note("local-header", f"{what} {here:,} in its local header, {there:,} in the directory")


def _check_descriptor(near: Window, record: Record, at: int, note: _Note) -> int:
    """Compare the descriptor at ``at`` with the directory; return where it ends."""
    raw = near.read(at, 24)
    if 0 < record.size < FULL32 and 0 < record.compressed < FULL32:
        usual = _DESCRIPTOR(_DESCRIPTOR_MAGIC, record.crc, record.compressed, record.size)
        if raw.startswith(usual):
            return at + len(usual)
    crc = record.crc.to_bytes(4, "little")
    packed, plain = record.compressed.to_bytes(8, "little"), record.size.to_bytes(8, "little")
    signed = 4 if raw[:4] == _DESCRIPTOR_MAGIC else 0
    body = raw[signed:]
    if body[:20] == crc + packed + plain:
        return at + signed + 20
    if body[:12] == crc + packed[:4] + plain[:4]:
        return at + signed + 12
    if not signed:
        note("no-descriptor", "the descriptor announced by its flags is missing", "warning")
        return at
    note("descriptor", "its descriptor has another checksum or size than the directory")
    return at + (24 if record.header >= FULL32 or record.size >= FULL32 else 16)


def _check_end(archive: Archive, result: Audit) -> None:
    """Check the end records, and the bytes after them."""
    source, end = archive.source, archive.end
    result.oddities.extend(end_record_oddities(archive))
    comment = int.from_bytes(source.read(end.plain + 20, 2), "little")
    rest = source.size - end.tail
    if comment:
        what = f"the archive has a comment of {pluralize(comment, 'byte')}"
        result.note("comment", what, level="warning", offset=end.tail)
    if rest != comment:
        what = f"{pluralize(rest, 'byte')} after the end of the archive"
        if comment:
            what = f"a comment of {pluralize(comment, 'byte')} is announced, but {pluralize(rest, 'byte')} follow"
        result.note("trailing-bytes", what, level="warning", offset=end.tail)
    trailing = list(find_signatures(source, end.tail, source.size))
    result.hidden.extend(trailing)
    if trailing:
        what = "a record of another archive follows the end of this one"
        result.note("second-archive", what, offset=trailing[0])
