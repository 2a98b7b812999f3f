"""The versions of an archive that was edited in place; each is a prefix of the file.

An edit in place appends a new ``data.pkl`` and a new directory (``write.in_place``). The last entry of that directory
ends with ckptool's own extra field, right before the end records: the former size of the file, the CRC-32 of its end
records, the edit and its time. So the former version is found without a search, and restored by truncating the file.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Final

from ...base.records import NamedTuple
from ..sources import Source

#: The id of the extra field, "ck".
NOTE_FIELD: Final = 0x6B63
#: Bytes of the end records of each appended version: zip64 end record, locator, plain end record.
END_SIZE: Final = 56 + 20 + 22
#: Bytes of the plain end record, by which readers recognize an archive.
PLAIN_END_SIZE: Final = 22
#: Between the note and the end records: the size of the note, and a magic number.
_TRAILER: Final = Struct("<H8s")
_NOTE_MAGIC: Final = b"ckptool1"
#: Beginning of the description of an edit that cannot be undone.
RECLAIMED: Final = "[reclaimed] "
#: Bytes that a disk writes atomically.
_SECTOR: Final = 512
#: The most bytes by which an edit in place extends a file before it syncs.
_MAX_GROWTH: Final = 1 << 16
#: A note must fit into one sector, together with the end records and the part of the old ones that is kept before it.
_MAX_NOTE: Final = _SECTOR - END_SIZE - _TRAILER.size - 42


class EditNote(NamedTuple):
    """The note of an edit in place.

    ``former_size`` is the size of the file before the edit, ``end`` the CRC-32 of its end records, ``edit`` a
    description of the edit, and ``time`` its time in seconds since 1970 (UTC).
    """

    former_size: int
    end: int
    edit: str
    time: int

    @property
    def reclaims(self) -> bool:
        """Whether the edit returned bytes of the former version to the disk, so that it cannot be restored."""
        return self.edit.startswith(RECLAIMED)


class Version(NamedTuple):
    """The file as it was at ``size`` bytes.

    ``note`` describes the edit that made this version, or is None for the first version. If the edit is not
    ``finished``, torch still reads the version before it.
    """

    size: int
    note: EditNote | None
    finished: bool = True


def encode_note(note: EditNote) -> bytes:
    """Encode a note with its trailer; a description that does not fit is shortened."""
    import json  # few archives have a note

    edit = note.edit
    while len(text := json.dumps([note.former_size, note.end, edit, note.time]).encode("ascii")) > _MAX_NOTE:
        edit = edit[: len(edit) * 3 // 4] + "..."
    return text + _TRAILER.pack(len(text), _NOTE_MAGIC)


def read_note(source: Source, size: int) -> EditNote | None:
    """Return the note before the end records of the version with ``size`` bytes; None for a version without one."""
    at = size - END_SIZE - _TRAILER.size
    if at <= 0:
        return None
    length, magic = _TRAILER.unpack(source.read(at, _TRAILER.size).ljust(_TRAILER.size))
    if magic != _NOTE_MAGIC or not 0 < length <= min(_MAX_NOTE, at):
        return None
    import json  # few archives have a note

    try:
        former_size, end, edit, time = json.loads(source.read(at - length, length))
    except (ValueError, TypeError, RecursionError):
        return None
    if not all(type(value) is int for value in (former_size, end, time)) or type(edit) is not str:
        return None
    # The former version must end as it did then. Otherwise somebody changed it, or overwrote the file with another one.
    fits = END_SIZE < former_size < size - END_SIZE
    same = fits and zlib.crc32(source.read(former_size - END_SIZE, END_SIZE)) == end
    return EditNote(former_size, end, edit, time) if same else None


def unfinished_end(source: Source, end: int) -> int:
    """Return the size of the version of an unfinished edit after the end records that end at ``end``, or -1.

    Its note follows within the same sector. A file that was still growing has zeros after that version.
    """
    at = source.read(end, _SECTOR).find(_NOTE_MAGIC)
    size = end + at + len(_NOTE_MAGIC) + END_SIZE
    return size if at >= 0 and read_note(source, size) is not None else -1


def is_leftover_growth(source: Source, begin: int) -> bool:
    """Return whether all bytes from ``begin`` on are zeros, and no more than an edit in place leaves after a power
    loss.
    """
    return source.size - begin <= _MAX_GROWTH and not source.read(begin, _MAX_GROWTH).strip(b"\0")


def versions(source: Source, size: int | None = None) -> list[Version]:
    """Return every version in the file, the newest first; only one if it was never edited in place.

    ``size`` is the end of the newest version, if other bytes follow it.
    """
    result: list[Version] = []
    end: int | None = source.size if size is None else size
    while end is not None:
        note = read_note(source, end)
        # Before the very last step of an edit, the first byte of this signature is missing.
        finished = note is None or source.read(end - PLAIN_END_SIZE, 4) == b"PK\x05\x06"
        result.append(Version(end, note, finished))
        end = note and note.former_size
    return result


def strip_note(entry: bytes) -> bytes:
    """Return a directory entry without ckptool's extra field."""
    name, extra = int.from_bytes(entry[28:30], "little"), int.from_bytes(entry[30:32], "little")
    begin, end = 46 + name, 46 + name + extra
    at = begin
    while at + 4 <= end:
        size = 4 + int.from_bytes(entry[at + 2 : at + 4], "little")
        if int.from_bytes(entry[at : at + 2], "little") == NOTE_FIELD and entry[: at + size].endswith(_NOTE_MAGIC):
            rest = (extra - size).to_bytes(2, "little")
            return entry[:30] + rest + entry[32:at] + entry[at + size :]
        at += size
    return entry
