"""Reading a zip archive the way torch's reader does.

``PyTorchFileReader`` (caffe2/serialize/inline_container.cc, on miniz) believes the last end record and
the directory it points to, takes offsets from the start of the file, finds records by their directory
name without regard to case, and looks at a local header only to skip it. Python's zipfile does none of
this, so the two can see different files; what they could see differently is reported in ``oddities``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from ..errors import MalformedError
from ..human import shown
from ..limits import LIMITS
from ..source import Source, Span
from .versions import note_at, unfinished_end
from .window import Window

__all__ = [
    "LOCAL",
    "Archive",
    "End",
    "Local",
    "Oddity",
    "Record",
    "contents",
    "extras",
    "folded",
    "parses",
    "read_archive",
    "search_begin",
]

DIRECTORY: Final = "central directory"
#: Of an entry, behind its signature: all but versions, time and internal attributes.
_ENTRY: Final = Struct("<8x2H4x3I4H2x2I")
_END: Final = Struct("<4s4H2IH")
_END64: Final = Struct("<4sQ2H2I4Q")
_LOCATOR: Final = Struct("<4sIQI")
LOCAL: Final = Struct("<4s5H3I2H")
FULL32: Final = 0xFFFFFFFF
#: Torch looks for the end record in chunks of 4,096 bytes, three of them twice, until so many bytes are searched.
_SEARCHED: Final = 0xFFFF + _END.size
_CHUNK_OF_SEARCH: Final = 4096
_STEP_OF_SEARCH: Final = _CHUNK_OF_SEARCH - 3
#: Bytes of a name that torch lists (``MZ_ZIP_MAX_ARCHIVE_FILENAME_SIZE`` less one).
LISTED_NAME: Final = 511
_ZIP64: Final = 1
#: Of Info-ZIP: the name in UTF-8, with the CRC-32 of the name that it replaces.
_UNICODE_NAME: Final = 0x7075
_SPOKEN_OF: Final = (_ZIP64, _UNICODE_NAME)
#: Compressed patched data, strong encryption, masked header values.
_SPECIAL: Final = 0x20 | 0x40 | 0x2000
_ODD_FLAGS: Final = _SPECIAL | 1
_header: Final = attrgetter("header")
#: Bytes read at once: they stay in the cache of the processor until they are summed.
_CHUNK: Final = 1 << 18
_FOLD: Final = {ord(letter): ord(letter.lower()) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
#: Up to so many bytes a pickle may be deflated as well as it likes.
_MODEST: Final = 64 << 20


class Record(NamedTuple):
    """One entry of the central directory; sizes and offsets in bytes.

    ``name`` is the whole name, root folder included; bytes that are no UTF-8 are surrogate escapes.
    ``crc`` 0 means "not computed" for a record that is not empty. ``entry`` and ``entry_size`` tell
    where the entry itself stands.
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


class Local(NamedTuple):
    """A local header: its raw bytes, and where the payload begins."""

    raw: bytes
    payload: int


class Oddity(NamedTuple):
    """Something two readers could see differently. ``ambiguous`` ones forbid an edit.

    ``level`` is "error" or "warning"; ``where`` a record, ``offset`` in bytes into the file, -1 for none.
    """

    code: str
    message: str
    ambiguous: bool = False
    level: str = "error"
    where: str = ""
    offset: int = -1


class End(NamedTuple):
    """The end records: what they say of the directory, and where they stand.

    ``zip64`` is the offset of the zip64 end record, -1 without one; ``plain`` that of the other. ``directory``
    and ``size`` are offset and bytes of the directory, ``entries`` what it counts. ``beyond`` are the bytes behind
    them that an edit in place left which was not finished. ``astray`` says that the locator of a zip64 end record
    leads to none.
    """

    zip64: int
    plain: int
    directory: int
    size: int
    entries: int
    beyond: int = 0
    astray: bool = False

    @property
    def begin(self) -> int:
        """Where the end records begin."""
        return self.zip64 if self.zip64 >= 0 else self.plain

    @property
    def tail(self) -> int:
        """The offset behind the plain end record: the comment, and whatever follows it."""
        return self.plain + _END.size + self.beyond


class Archive:
    """A zip archive: its directory, without the payloads.

    ``records`` in the order of the directory; ``root`` the folder of the first entry ("" for none).
    """

    def __init__(self, source: Source, records: list[Record], end: End) -> None:
        self.source = source
        self.records = records
        self.end = end
        self.oddities: list[Oddity] = []
        first = records[0].name if records else ""
        self.root = first.partition("/")[0] if "/" in first else ""
        self.by_name: dict[str, Record] = {}
        self._by_fold: dict[str, Record] | None = None
        #: Local headers and what stands around them: of small records many are read at once.
        self.near = Window(source)

    def find(self, name: str) -> Record | None:
        """The record of this name under the root folder, or None; exact case first, as torch ends up with."""
        if "\0" in name or (not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name)):
            return None  # torch looks for the bytes in UTF-8, and only up to a NUL
        full = f"{self.root}/{name}" if self.root else name
        found = self.by_name.get(full)
        if found is None:
            if self._by_fold is None:
                self._by_fold = {folded(record.name): record for record in reversed(self.records)}
            found = self._by_fold.get(folded(full))
        return found

    def local(self, record: Record) -> Local:
        """The local header of a record; raises MalformedError if there is none."""
        guess = LOCAL.size + len(record.name) + 96
        raw = self.near.read(record.header, guess)
        if len(raw) < LOCAL.size or raw[:4] != b"PK\x03\x04":
            raise MalformedError("no local header where the directory says", where=record.name, offset=record.header)
        size = LOCAL.size + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
        if size > len(raw):
            raw = self.source.read(record.header, size)
        payload = record.header + size
        if len(raw) < size or payload + record.compressed > self.source.size:
            raise MalformedError("the record reaches beyond the end of the file", where=record.name, offset=payload)
        return Local(raw[:size], payload)

    def payload(self, record: Record) -> Span:
        """The raw bytes of a record, compressed ones as they are."""
        return Span(self.source, self.local(record).payload, record.compressed)

    def read(self, record: Record, limit: int) -> bytes:
        """The content of a record, inflated; raises MalformedError beyond ``limit`` bytes."""
        if record.size > limit:
            raise MalformedError(f"{record.size:,} bytes, the limit is {limit:,}", where=record.name)
        if record.method not in (0, 8):
            raise MalformedError(f"compression method {record.method}, which torch cannot read", where=record.name)
        if record.method and record.size > max(LIMITS.inflation * record.compressed, _MODEST):
            what = f"{record.compressed:,} bytes would inflate to {record.size:,}: no pickle, but a bomb"
            raise MalformedError(what, where=record.name)
        return b"".join(contents(self.payload(record), record.size, record.method != 0, record.name))[: record.size]

    def text(self, name: str) -> bytes | None:
        """A small text record under the root folder, or None; at most ``limits.text_bytes`` bytes."""
        record = self.find(name)
        return None if record is None else self.read(record, LIMITS.text_bytes)


def folded(name: str) -> str:
    """The name as torch's reader compares it: A to Z and a to z are one, everything else is not (``MZ_TOLOWER``)."""
    return name.lower() if name.isascii() else name.translate(_FOLD)


def contents(span: Span, size: int, compressed: bool, name: str) -> Iterator[bytes]:
    """The bytes of a record in pieces, inflated where they are compressed; ``name`` is for errors.

    Raises MalformedError where they end too early, or do not inflate to ``size`` bytes.
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
    """Read the central directory; raises MalformedError where torch's reader would refuse the file."""
    end = _find_end(source)
    offset, size, count = end.directory, end.size, end.entries
    if offset + size > source.size:
        raise MalformedError("the directory reaches beyond the end of the file", where=DIRECTORY, offset=offset)
    # Each entry takes 46 bytes at least: a larger count is a lie, and nothing is allocated for it.
    if count * _ENTRY.size > size:
        raise MalformedError(f"{count:,} entries do not fit into {size:,} bytes", where=DIRECTORY, offset=offset)
    raw = source.read(offset, size)
    shift = end.begin - offset - size
    if shift > 0 and raw[:4] != b"PK\x01\x02" and source.read(offset + shift, 4) == b"PK\x01\x02":
        what = f"the last archive in it begins only at byte {shift:,}: torch refuses bytes in front of an archive"
        raise MalformedError(what, where=DIRECTORY, offset=offset)
    records, odd = _entries(raw, count, offset)
    archive = Archive(source, records, end)
    archive.oddities += odd
    last = records[-1].entry + records[-1].entry_size if records else offset
    _note_oddities(archive, offset + len(raw) - last)
    return archive


def _find_end(source: Source) -> End:
    at = start = -1
    tail = b""
    for begin in (max(source.size - _CHUNK_OF_SEARCH, 0), search_begin(source.size)):
        if at < 0 and begin != start:
            start, tail = begin, source.read(begin, source.size - begin)
            at = tail.rfind(b"PK\x05\x06", 0, max(len(tail) - _END.size + 4, 0))
    if at < 0:
        raise MalformedError("no end of the central directory: the file is cut or damaged", where=DIRECTORY)
    _, disk, first_disk, _, count, size, offset, _ = _END.unpack_from(tail, at)
    plain, zip64 = start + at, -1
    room = _LOCATOR.size + _END64.size
    locator = source.read(plain - _LOCATOR.size, _LOCATOR.size) if plain >= room else b""
    astray = locator[:4] == b"PK\x06\x07"
    if astray:
        _, _, there, _ = _LOCATOR.unpack(locator)
        raw = source.read(there, _END64.size) if there < source.size else b""
        if len(raw) == _END64.size and raw[:4] == b"PK\x06\x06":
            _, _, _, _, disk, first_disk, _, count, size, offset = _END64.unpack(raw)
            zip64, astray = there, False
    if disk or first_disk:
        raise MalformedError("an archive in several parts", where=DIRECTORY, offset=plain)
    # By what was read already: the edit may be finished in this very moment.
    unfinished = unfinished_end(source, plain + _END.size)
    beyond = max(unfinished - plain - _END.size, 0)
    return End(zip64, plain, offset, size, count, beyond, astray)


def search_begin(size: int) -> int:
    """From where on torch looks for the end record in a file of so many bytes (``mz_zip_reader_locate_header_sig``)."""
    begin = max(size - _CHUNK_OF_SEARCH, 0)
    while begin >= _STEP_OF_SEARCH and size - begin < _SEARCHED:
        begin -= _STEP_OF_SEARCH
    return begin


def _entries(raw: bytes, count: int, base: int) -> tuple[list[Record], list[Oddity]]:
    """The records, and what is odd about their entries."""
    records: list[Record] = []
    odd: list[Oddity] = []
    unpack, size, new = _ENTRY.unpack_from, _ENTRY.size, tuple.__new__
    at = 0
    for _ in range(count):
        if at + size > len(raw) or raw[at : at + 4] != b"PK\x01\x02":
            raise MalformedError("no directory entry where one must be", where=DIRECTORY, offset=base + at)
        flags, method, crc, packed, plain, name_size, extra_size, comment_size, disk, attributes, header = unpack(
            raw, at
        )
        name_at = at + size
        extra_at = name_at + name_size
        end = extra_at + extra_size + comment_size
        if end > len(raw):
            raise MalformedError("a directory entry reaches beyond the directory", where=DIRECTORY, offset=base + at)
        name = raw[name_at:extra_at].decode("utf-8", "surrogateescape")
        fields: Sequence[tuple[int, bytes]] = ()
        if extra_size:
            fields = extras(raw[extra_at : extra_at + extra_size])
            if not parses(raw[extra_at : extra_at + extra_size]) or any(kind in _SPOKEN_OF for kind, _ in fields):
                odd += _odd_fields(name, raw[name_at:extra_at], raw[extra_at : extra_at + extra_size], base + at)
        if plain == FULL32 or packed == FULL32 or header == FULL32:
            # Of two fields torch takes the first, as Python does (``mz_zip_file_stat_internal``, ``_decodeExtra``).
            wide = next((data for kind, data in fields if kind == _ZIP64), b"")
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
        if attributes & 0x10 or name_size > LISTED_NAME or (plain != packed and (not packed or not method)):
            odd += _odd_entry(record, attributes)
        elif plain and name[-1:] == "/":
            odd += _odd_entry(record, 0x10)
        if disk:
            # Torch refuses the file, but for disk 1; Python does not look.
            what = f"{shown(name)} is said to be on another disk"
            odd.append(Oddity("other-disk", what, True, where=name, offset=base + at))
        at = end
    return records, odd


def _odd_entry(record: Record, attributes: int) -> Iterator[Oddity]:
    name, packed, plain = record.name, record.compressed, record.size
    if attributes & 0x10 and (plain or not name.endswith("/")):
        # miniz takes it for a folder by this bit of MS-DOS or its slash, and torch hands out memory that nobody wrote.
        what = f"{shown(name)} is marked as a folder: torch does not read its bytes"
        yield Oddity("folder-attribute", what, True, where=name)
    if len(name) > LISTED_NAME or len(name.encode("utf-8", "surrogateescape")) > LISTED_NAME:
        what = f"the name {shown(name)} is longer than the {LISTED_NAME} bytes that torch's reader has room for"
        yield Oddity("name-long", what, True, where=name, offset=record.entry)
    if plain != packed and (not packed or not record.method):
        # Torch reads the one or the other number of bytes, or refuses the file; Python the other one.
        what = f"{shown(name)}: stored, yet {plain:,} bytes are said to take {packed:,}"
        yield Oddity("stored-size", what, True, where=name, offset=record.entry)


def _odd_fields(name: str, raw_name: bytes, extra: bytes, offset: int) -> Iterator[Oddity]:
    """What readers could see differently in the extra fields of a directory entry."""
    fields = extras(extra)
    if sum(kind == _ZIP64 for kind, _ in fields) > 1:
        what = f"{shown(name)} has two zip64 fields; torch takes the first"
        yield Oddity("zip64-twice", what, True, where=name, offset=offset)
    for kind, data in fields:
        if kind == _UNICODE_NAME and data[:5] == b"\1" + zlib.crc32(raw_name).to_bytes(4, "little"):
            other = data[5:]
            if other != raw_name:
                what = f"{shown(name)} is called {shown(other.decode('utf-8', 'replace'))} by an extra field"
                yield Oddity("name-twice", what, True, where=name, offset=offset)
    if not parses(extra):
        what = f"the extra fields of the directory's entry of {shown(name)} do not parse"
        yield Oddity("entry-fields", what, True, where=name, offset=offset)


def extras(raw: bytes) -> list[tuple[int, bytes]]:
    """The extra fields as (id, data); what does not parse is cut off, as every reader does."""
    found = []
    at = 0
    while at + 4 <= len(raw):
        size = int.from_bytes(raw[at + 2 : at + 4], "little")
        found.append((int.from_bytes(raw[at : at + 2], "little"), raw[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


def parses(extra: bytes) -> bool:
    """Do the extra fields fill their block?"""
    at = 0
    while at + 4 <= len(extra):
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    return at == len(extra)


def _note_oddities(archive: Archive, unused: int) -> None:
    """Structural ambiguity, as far as the directory alone shows it."""
    note = archive.oddities.append
    archive.by_name = {record[0]: record for record in archive.records}
    if not _is_plain(archive):
        _note_names(archive)
    if unused:
        note(Oddity("directory-rest", f"{unused:,} bytes of the directory belong to no entry", True))
    end = archive.end
    gap = end.begin - end.directory - end.size
    # Between the zip64 end record (56 bytes) and the plain one stands its locator (20 bytes).
    between = end.plain - end.zip64 - _END64.size - _LOCATOR.size if end.zip64 >= 0 else 0
    signature = archive.source.read(end.plain - _LOCATOR.size - _END64.size, 4) if between > 0 else b""
    if end.beyond:
        what = "an edit in place was not finished: torch reads the version before it"
        note(Oddity("unfinished-edit", what, level="warning", offset=end.tail))
    elif signature == b"PK\x06\x06" or (gap and archive.source.read(end.begin - end.size, 4) == b"PK\x01\x02"):
        note(Oddity("second-archive", "several archives stand one behind the other; torch reads the first", True))
    elif gap or between:
        what = f"the directory and the end records do not adjoin ({gap + between:+,} bytes)"
        note(Oddity("directory-gap", what, True))
    elif end.astray:
        what = "a locator leads to no zip64 end record: torch goes by the plain one, other readers refuse the file"
        note(Oddity("end-records", what, True, offset=end.plain - _LOCATOR.size))
    limit = archive.source.size
    for name, _, _, _, compressed, _, header, _, _ in archive.records:
        if header + compressed > limit - LOCAL.size:
            what = f"{shown(name)} reaches beyond the end of the file; torch refuses such a file"
            note(Oddity("beyond-end", what, where=name, offset=header))
    if len(archive.root.encode("utf-8", "surrogateescape")) >= LISTED_NAME:
        what = f"the folder {shown(archive.root)} has a longer name than torch's reader has room for"
        note(Oddity("long-root", what, where=archive.root))
    if archive.records:
        first = min(map(_header, archive.records))
        if first > 0 and note_at(archive.source, end.tail) is None:  # else a former version stands there
            note(Oddity("leading-bytes", f"{first:,} bytes stand before the first record"))


def _is_plain(archive: Archive) -> bool:
    """Is there nothing to note about any record? That is told by looking at all of them at once."""
    names = archive.by_name
    if len(names) < len(archive.records) or any(record[1] & _ODD_FLAGS for record in archive.records):
        return False
    everything = "\0".join(("", *names))
    if everything.count("\0") > len(names):
        return False
    if archive.root and everything.count(f"\0{archive.root}/") < len(names):
        return False
    return everything == everything.lower() or len({folded(name) for name in names}) == len(names)


def _note_names(archive: Archive) -> None:
    """The names and flags that readers could take in different ways; of records with one name the first counts."""
    note = archive.oddities.append
    archive.by_name.clear()
    folds: set[str] = set()
    for record in archive.records:
        name = record.name
        if name in archive.by_name:
            what = f"two records are called {shown(name)}; torch takes either one"
            note(Oddity("duplicate-record", what, True, where=name))
        else:
            fold = folded(name)
            if fold in folds:
                what = f"{shown(name)} differs from another record in case only; torch takes either"
                note(Oddity("case-twin", what, True, where=name))
            folds.add(fold)
            archive.by_name[name] = record
        if "\0" in name:
            what = f"the name {shown(name)} has a NUL byte in it, where some readers take it to end"
            note(Oddity("name-nul", what, True, where=name, offset=record.entry))
        if record.flags & _SPECIAL:
            what = f"{shown(name)} has flags of encryption or of patched data, which torch's reader refuses"
            note(Oddity("special-flags", what, True, where=name))
        if record.flags & 1:
            note(Oddity("encrypted", f"{shown(name)} is encrypted; torch cannot read it", True, where=name))
        if archive.root and not name.startswith(archive.root + "/"):
            what = f"{shown(name)} is outside of the folder {shown(archive.root)}; torch refuses the file"
            note(Oddity("second-root", what, where=name))
