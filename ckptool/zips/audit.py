"""Everything in a zip archive that two readers could see differently, beyond what its directory alone shows.

Torch's reader looks at the central directory only (``read``). Here every local header and descriptor is held
against it, and every byte of the file must belong to something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from ..errors import MalformedError
from ..human import counted, shown
from ..source import FileSource, SliceSource, Source
from .read import FULL32, LOCAL, Archive, Oddity, Record, extras, parses, read_archive
from .versions import versions
from .window import Window

__all__ = ["Audit", "audit", "check_places", "end_records", "signatures"]

#: (code, what is wrong with the record, level, ambiguous)
_Note: TypeAlias = Callable[..., None]

#: Of a local header: signature, size of the name, size of the extra fields.
_PLACE: Final = Struct("<4s22xHH")
_PADDING_SIZE: Final = Struct("<H")
_SIZES: Final = Struct("<3I").unpack_from
_END: Final = Struct("<4s4H2IH").unpack
_WINDOW: Final = 1 << 20
#: Bytes of directories of former versions that are read beyond those of the file, and what the end of each costs.
_SPARE: Final = 16 << 20
_ENDS: Final = 4096
_HEADER: Final = b"PK\x03\x04"
#: The newest version of zip that an entry may need for Python's zipfile (``MAX_EXTRACT_VERSION``).
_NEWEST: Final = 63
#: The flag of a name in UTF-8.
_UTF8: Final = 0x800
_PADDING: Final = 0x4246  # "FB", as torch pads
#: What a name without any flaw does not have.
_ODD_NAME: Final = re.compile(r"(?s)[\udc80-\udcff\0\\]|\A.?:?/|\.\.|//|/\Z").search


class Audit:
    """What is odd about an archive, and the offsets of local headers that its directory does not list.

    ``padded`` whether its first record is padded as torch does it, None for an archive without records.
    """

    def __init__(self, archive: Archive) -> None:
        self.entries = Window(archive.source)
        self.oddities: list[Oddity] = []
        self.hidden: list[int] = []
        #: Records of former versions that this one does not have, each with its archive.
        self.former: list[tuple[Archive, Record]] = []
        self.padded: bool | None = None


def audit(archive: Archive) -> Audit:
    """Hold the archive against itself."""
    found = Audit(archive)
    found.oddities.extend(_names(archive))
    _stretches(archive, found)
    _ends(archive, found)
    return found


def check_places(archive: Archive) -> None:
    """Raise MalformedError for a record that is not where the directory says, by its local header and its end, and for
    end records that contradict each other: the part of an audit that costs a microsecond a record."""
    near, limit, unpack = archive.near, archive.end.directory, _PLACE.unpack_from
    padding = _PADDING_SIZE.unpack_from
    data, begin = b"", 0
    # Taken apart at once: twenty thousand records have a hundred thousand attributes.
    for where, _, _, _, compressed, _, at, _, _ in archive.records:
        name = where.encode("utf-8", "surrogateescape")
        head = LOCAL.size + len(name)
        here = at - begin
        if here < 0 or here + head + 4 > len(data):
            data, begin = near.around(at, head + 4)
            here = at - begin
        signature, name_size, extra = unpack(data, here) if here + LOCAL.size <= len(data) else (b"", 0, 0)
        if signature != _HEADER or name_size != len(name) or not data.startswith(name, here + LOCAL.size):
            raise MalformedError("another record or none is where the directory says", where=where, offset=at)
        # Nearly always the padding is the only extra field.
        usual = here + head + 4 <= len(data) and extra == 4 + padding(data, here + head + 2)[0]
        if extra and not usual and not parses(near.read(at + head, extra)):
            raise MalformedError("the extra fields of its local header do not parse", where=where, offset=at)
        if at + head + extra + compressed > limit:
            raise MalformedError("the record reaches into the directory", where=where, offset=at)
    found = Audit(archive)
    _ends(archive, found)
    for oddity in found.oddities:
        if oddity.level == "error":
            raise MalformedError(oddity.message, where=oddity.where, offset=oddity.offset)


def _names(archive: Archive) -> Iterator[Oddity]:
    for record in archive.records:
        name = record.name
        unmarked = not name.isascii() and not record.flags & _UTF8
        if name and not unmarked and not _ODD_NAME(name):
            continue
        parts = name.split("/")
        flaws = [
            ("name-encoding", "is not UTF-8", any("\udc80" <= char <= "\udcff" for char in name)),
            ("name-flag", "is not marked as UTF-8: to Python's zipfile it has other letters", unmarked),
            ("name-backslash", "has a backslash in it, a folder to some readers", "\\" in name),
            ("name-absolute", "is an absolute path", name.startswith("/") or name[1:3] == ":/"),
            ("name-parent", "leads out of its folder", ".." in parts),
            ("name-empty", "has an empty part", "" in parts[1:-1] or not name),
        ]
        for code, what, found in flaws:
            if found:
                yield Oddity(code, f"the name {shown(name)} {what}", where=name, offset=record.entry)
        if name.endswith("/"):
            yield Oddity("directory-entry", f"{shown(name)} is an entry for a folder", level="warning", where=name)


def _stretches(archive: Archive, found: Audit) -> None:
    """Walk the records in the order of the file: no byte between them, none in two of them."""
    note = found.oddities.append
    listed = [_Stretch(record.header, record.entry, archive, record) for record in archive.records]
    at = 0
    for begin, last, owner, record in sorted([*listed, *_former(archive, found)], key=lambda stretch: stretch[:2]):
        current = record is not None and owner is archive
        if begin > at:
            place = f"before the record {shown(record.name)}" if current and record else "before a former version"
            _between(archive.source, at, begin, place, found)
        elif record and begin < at:
            if current:
                what = f"the record {shown(record.name)} begins within the one before it"
                note(Oddity("overlap", what, True, where=record.name, offset=begin))
                if archive.near.read(begin, 4) != _HEADER:
                    note(_no_header(record))
            # Each byte is looked at once, however many headers share it.
            at = max(at, min(begin + LOCAL.size + record.compressed, archive.end.directory))
            continue
        at = max(at, _local(owner, record, found if current else Audit(owner)) if record else last)
    end = archive.end
    if at > end.directory:
        what = "the last record reaches into the directory"
        note(Oddity("overlap", what, True, offset=end.directory))
    elif at < end.directory:
        _between(archive.source, at, end.directory, "before the directory", found)
    found.hidden.extend(signatures(archive.source, end.directory + end.size, end.begin))


class _Stretch(NamedTuple):
    """Bytes that belong to something: to a record of an archive, which says itself where it ends, or up to ``last`` to
    a former version."""

    begin: int
    last: int
    archive: Archive
    record: Record | None = None


def _former(archive: Archive, found: Audit) -> list[_Stretch]:
    """What only the former versions of a file that was edited in place list. Their pickles are looked at, too."""
    seen = {record.header for record in archive.records}
    stretches = []
    left = archive.source.size + _SPARE
    # An edit that was not finished leaves the version before it as this one.
    for version in versions(archive.source, archive.end.tail)[2 if archive.end.beyond else 1 :]:
        try:
            older = read_archive(SliceSource(archive.source, 0, version.size))
        except MalformedError:
            break  # then its bytes belong to nothing
        left -= older.end.size + _ENDS
        if left < 0:
            what = "there are so many former versions that not all of them were looked at"
            found.oddities.append(Oddity("not-checked", what, level="warning", offset=version.size))
            break
        for record in older.records:
            if record.header not in seen:
                seen.add(record.header)
                found.former.append((older, record))
                stretches.append(_Stretch(record.header, record.entry, older, record))
        stretches.append(_Stretch(older.end.directory, version.size, older))
    return stretches


def _between(source: Source, begin: int, end: int, place: str, found: Audit) -> None:
    """Bytes that belong to no record: left over by an edit in place, or hidden there."""
    hidden = list(signatures(source, begin, end))
    found.hidden.extend(hidden)
    size = counted(end - begin, "byte")
    if hidden:
        what = f"{counted(len(hidden), 'record')} that the directory does not list in the {size} {place}"
        found.oddities.append(Oddity("unlisted-record", what, offset=hidden[0]))
    elif begin == 0:
        found.oddities.append(Oddity("leading-bytes", f"{size} stand before the first record", offset=0))
    else:
        what = f"{size} {place} belong to no record"
        found.oddities.append(Oddity("dead-bytes", what, level="warning", offset=begin))


def signatures(source: Source, begin: int, end: int, signature: bytes = _HEADER) -> Iterator[int]:
    """The offsets at which a signature stands between two offsets; the file is read in windows."""
    at = begin
    while at < end:
        if isinstance(source, FileSource):
            at = source.next_data(at)  # a hole of 64 GiB holds no record
            if at >= end:
                return
        window = source.read(at, min(_WINDOW, end - at))
        found = window.find(signature)
        while found >= 0:
            yield at + found
            found = window.find(signature, found + 1)
        if len(window) < _WINDOW:
            return
        at += len(window) - len(signature) + 1


def _local(archive: Archive, record: Record, found: Audit) -> int:
    """Where a record ends, its descriptor included; notes how its local header differs from the directory."""
    source, near, name = archive.source, archive.near, record.name

    def note(code: str, what: str, level: str = "error", ambiguous: bool = False) -> None:
        found.oddities.append(Oddity(code, f"{shown(name)}: {what}", ambiguous, level, name, record.header))

    raw = near.read(record.header, LOCAL.size + 0x300)
    if len(raw) < LOCAL.size or raw[:4] != _HEADER:
        found.oddities.append(_no_header(record))
        return record.header
    name_size, extra_size = int.from_bytes(raw[26:28], "little"), int.from_bytes(raw[28:30], "little")
    head = LOCAL.size + name_size + extra_size
    if head > len(raw):
        raw = source.read(record.header, head + 4)
    payload = record.header + head
    end = payload + record.compressed
    if end > source.size:
        note("beyond-end", "it reaches beyond the end of the file")
        return source.size
    fields = extras(raw[LOCAL.size + name_size : head])
    padding = [data for kind, data in fields if kind == _PADDING]
    if found.padded is None:
        found.padded = bool(padding)
    if found.padded != bool(padding) or any(data.strip(b"Z") for data in padding):
        note("padding", "its padding is not as in the other records", "warning")
    if not parses(raw[LOCAL.size + name_size : head]):
        note("local-header", "the extra fields of its local header do not parse")
    local_name = raw[LOCAL.size : LOCAL.size + name_size].decode("utf-8", "surrogateescape")
    if local_name != name:
        note("local-name", f"its local header calls it {shown(local_name)}", ambiguous=True)
    entry = found.entries.read(record.entry, 46)
    compared = (
        ("version", raw[4:6], entry[6:8]),
        ("flags", raw[6:8], entry[8:10]),
        ("method", raw[8:10], entry[10:12]),
        ("time", raw[10:14], entry[12:16]),
    )
    for field, here, there in compared if raw[4:14] != entry[6:16] else ():
        # The writers of torch 1.4 to 1.9 put 0 for an empty record's flags in one of the places only.
        if here != there and not (field == "flags" and not record.size):
            values = [int.from_bytes(value, "little") for value in (here, there)]
            what = f"{field} {values[0]} in its local header, {values[1]} in the directory"
            note("local-header", what, "error" if field == "method" else "warning")
    if entry[6] > _NEWEST:
        note("version-needed", f"it is said to need version {entry[6]} of zip; Python's zipfile refuses the archive")
    _sizes(record, raw, note)
    if record.flags & 8 and record.compressed:
        end = _descriptor(near, record, end, note)
    if raw[head : head + 4] == _HEADER or (head + 4 > len(raw) and source.read(payload, 4) == _HEADER):
        tail = source.read(max(end - 0x10100, payload), min(0x10100, record.compressed))
        if b"PK\x05\x06" in tail:
            note("nested-archive", "its content is a zip archive itself")
    return end


def _no_header(record: Record) -> Oddity:
    what = f"{shown(record.name)}: there is no local header at byte {record.header:,}, where the directory says"
    return Oddity("no-local-header", what, where=record.name, offset=record.header)


def _sizes(record: Record, raw: bytes, note: _Note) -> None:
    """Checksum and sizes in a local header; zeros leave them to the descriptor."""
    if record.flags & 8 and not any(raw[14:26]):
        return
    crc, packed, plain = _SIZES(raw, 14)
    wide = dict(extras(raw[LOCAL.size + int.from_bytes(raw[26:28], "little") :])).get(1, b"")
    if wide and plain == FULL32 and len(wide) >= 8:
        plain = int.from_bytes(wide[:8], "little")
    if wide and packed == FULL32 and len(wide) >= 16:
        packed = int.from_bytes(wide[8:16], "little")
    deferred = record.flags & 8
    for what, here, there in (
        ("checksum", crc, record.crc),
        ("compressed size", packed, record.compressed),
        ("size", plain, record.size),
    ):
        if here != there and not (deferred and not here):
            note("local-header", f"{what} {here:,} in its local header, {there:,} in the directory")


def _descriptor(near: Window, record: Record, at: int, note: _Note) -> int:
    """The end of a record whose sizes follow it."""
    raw = near.read(at, 24)
    crc = record.crc.to_bytes(4, "little")
    short = record.compressed.to_bytes(8, "little")[:4] + record.size.to_bytes(8, "little")[:4]
    wide = record.compressed.to_bytes(8, "little") + record.size.to_bytes(8, "little")
    signed = 4 if raw[:4] == b"PK\x07\x08" else 0
    body = raw[signed:]
    if body[:20] == crc + wide:
        return at + signed + 20
    if body[:12] == crc + short:
        return at + signed + 12
    if not signed:
        note("no-descriptor", "the descriptor that its flags announce is not there", "warning")
        return at
    note("descriptor", "the descriptor behind it has another checksum or size than the directory")
    return at + (24 if record.header >= FULL32 or record.size >= FULL32 else 16)


def end_records(archive: Archive) -> Iterator[Oddity]:
    """How the end records contradict each other. Torch refuses nearly all such files, others take one of the two."""
    source, end = archive.source, archive.end
    _, _, _, here, total, size, offset, _ = _END(source.read(end.plain, 22))
    if here != total:
        what = f"the end record counts {here:,} entries here and {total:,} in all"
        yield Oddity("end-count", what, True, offset=end.plain)
    if end.zip64 >= 0:
        raw = source.read(end.zip64, 56)
        wide = [int.from_bytes(raw[i : i + 8], "little") for i in (24, 32, 40, 48)]
        if int.from_bytes(raw[4:12], "little") != 44:
            what = "the zip64 end record has another size than its fields"
            yield Oddity("end-records", what, True, offset=end.zip64)
        if wide[0] != wide[1]:
            what = f"the zip64 end record counts {wide[0]:,} entries here and {wide[1]:,} in all"
            yield Oddity("end-count", what, True, offset=end.zip64)
        for what, plain, true, full in (
            ("entries", total, wide[1], 0xFFFF),
            ("bytes of directory", size, wide[2], FULL32),
            ("as its offset", offset, wide[3], FULL32),
        ):
            if plain not in (full, true):
                text = f"the end record says {plain:,} {what}, the zip64 end record {true:,}"
                yield Oddity("end-records", text, True, offset=end.plain)
        locator = source.read(end.plain - 20, 20)
        if int.from_bytes(locator[16:20], "little") != 1:
            yield Oddity("end-records", "the archive is said to be in several parts", True, offset=end.plain - 20)


def _ends(archive: Archive, found: Audit) -> None:
    """The end records, and what stands behind them."""
    source, end, note = archive.source, archive.end, found.oddities.append
    found.oddities.extend(end_records(archive))
    comment = int.from_bytes(source.read(end.plain + 20, 2), "little")
    rest = source.size - end.tail
    if comment:
        what = f"the archive has a comment of {counted(comment, 'byte')}"
        note(Oddity("comment", what, level="warning", offset=end.tail))
    if rest != comment:
        what = (
            f"{counted(rest, 'byte')} stand behind the end of the archive"
            if not comment
            else f"a comment of {counted(comment, 'byte')} is announced, {counted(rest, 'byte')} stand there"
        )
        note(Oddity("trailing-bytes", what, level="warning", offset=end.tail))
    behind = list(signatures(source, end.tail, source.size))
    found.hidden.extend(behind)
    if behind:
        what = "a record of another archive stands behind the end of this one"
        note(Oddity("second-archive", what, True, offset=behind[0]))
