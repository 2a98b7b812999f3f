"""The versions of an archive that was edited in place: each stands whole at the beginning of the file.

An edit in place appends a new ``data.pkl`` and a new directory (``append``). The last entry of that directory ends
with an extra field of ours, right before the end records: how long the file was, what its end records were, what was
done and when. So the former version is found without a search, and comes back when the file is cut to its length.
"""

from __future__ import annotations

import json
import zlib
from struct import Struct
from typing import Final, NamedTuple

from ..sources import Source

#: The id of the extra field, "ck".
EXTRA: Final = 0x6B63
#: Bytes of the end records that each appended version ends with: zip64 end record, locator, end record.
ENDING: Final = 56 + 20 + 22
#: How far from the end the end record begins, the one that tells readers of an archive at all.
UNSIGNED: Final = 22
#: What stands between the note and the end records: the bytes of the note, and a mark.
_TRAILER: Final = Struct("<H8s")
_MARK: Final = b"ckptool1"
#: What a disk writes whole or not at all.
_SECTOR: Final = 512
#: Bytes by which an edit in place at most lets a file grow before it is on the disk.
_SPARE: Final = 1 << 16
#: A note must fit into one sector of 512 bytes, with the end records and what of the old ones is kept before it.
_MOST: Final = _SECTOR - ENDING - _TRAILER.size - 42


class Note(NamedTuple):
    """What an edit in place left behind: the file's size in bytes before it, the CRC-32 of what it ended with, the
    edit in words, and its time in seconds since 1970 (UTC)."""

    was: int
    end: int
    edit: str
    time: int


class Version(NamedTuple):
    """The file as it was when it had ``size`` bytes. ``note`` tells of the edit that made it, None for the first one;
    ``finished`` whether that edit was: if not, torch still reads the version before."""

    size: int
    note: Note | None
    finished: bool = True


def spelled(note: Note) -> bytes:
    """The note as it stands in the file, with its trailer."""
    edit = note.edit
    while len(text := json.dumps([note.was, note.end, edit, note.time]).encode("ascii")) > _MOST:
        edit = edit[: len(edit) * 3 // 4] + "..."
    return text + _TRAILER.pack(len(text), _MARK)


def note_at(source: Source, size: int) -> Note | None:
    """The note in front of the end records of the version with ``size`` bytes; None for a version without one."""
    at = size - ENDING - _TRAILER.size
    if at <= 0:
        return None
    length, mark = _TRAILER.unpack(source.read(at, _TRAILER.size).ljust(_TRAILER.size))
    if mark != _MARK or not 0 < length <= min(_MOST, at):
        return None
    try:
        was, end, edit, time = json.loads(source.read(at - length, length))
    except (ValueError, TypeError, RecursionError):
        return None
    if not all(type(value) is int for value in (was, end, time)) or type(edit) is not str:
        return None
    # The former version ends as it did: nobody changed it or wrote another file over it.
    if not ENDING < was < size - ENDING or zlib.crc32(source.read(was - ENDING, ENDING)) != end:
        return None
    return Note(was, end, edit, time)


def unfinished_end(source: Source, end: int) -> int:
    """Return the size of the version whose edit was begun behind the end records before ``end``, and not finished.

    -1 for none. Its note follows within the same sector. A file that was still growing has zeros behind that version.
    """
    found = source.read(end, _SECTOR).find(_MARK)
    size = end + found + len(_MARK) + ENDING
    return size if found >= 0 and note_at(source, size) is not None else -1


def is_spare(source: Source, begin: int) -> bool:
    """Is all from ``begin`` on zeros, and no more than an edit in place that lost power leaves?"""
    return source.size - begin <= _SPARE and not source.read(begin, _SPARE).strip(b"\0")


def versions(source: Source, size: int | None = None) -> list[Version]:
    """Every version in the file, the newest first; one where it was never edited in place.

    ``size`` is where the newest one ends, if something else stands behind it.
    """
    found = [_version(source, source.size if size is None else size)]
    while note := found[-1].note:
        found.append(_version(source, note.was))
    return found


def _version(source: Source, size: int) -> Version:
    note = note_at(source, size)
    # Before the very last step of an edit the first byte of this signature is missing.
    return Version(size, note, note is None or source.read(size - UNSIGNED, 4) == b"PK\x05\x06")


def without_note(entry: bytes) -> bytes:
    """A directory entry without our extra field."""
    name, extra = int.from_bytes(entry[28:30], "little"), int.from_bytes(entry[30:32], "little")
    begin, end = 46 + name, 46 + name + extra
    at = begin
    while at + 4 <= end:
        size = 4 + int.from_bytes(entry[at + 2 : at + 4], "little")
        if int.from_bytes(entry[at : at + 2], "little") == EXTRA and entry[: at + size].endswith(_MARK):
            rest = (extra - size).to_bytes(2, "little")
            return entry[:30] + rest + entry[32:at] + entry[at + size :]
        at += size
    return entry
