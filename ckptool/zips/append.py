"""A new version of an archive behind the old one, for edits in place: no byte that is there changes.

It brings the records with a new content and a new directory. While it is written, a copy of the old end records
stands at the new end of the file, so that readers find the old directory at every instant; the last step puts the
new end records there, 98 bytes in one sector. Torch looks for the end records from the end of the file on, as every
reader of zip does, and takes the directory that they lead to (``PyTorchFileReader``, on miniz).
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

from ..errors import RefusedError
from ..human import undo_step
from ..source import BLOCK, Appending
from .fresh import Content, around, listed
from .layout import ending
from .read import Archive
from .versions import ENDING, EXTRA, Note, spelled, versions, without_note

__all__ = ["appended"]


def appended(
    archive: Archive, contents: Mapping[str, bytes], dropped: Collection[str], edit: str, time: int
) -> Appending:
    """The bytes behind the archive that give records other contents, and take others out of the directory.

    ``contents`` and ``dropped`` go by whole names; ``edit`` and ``time`` are for the note (``versions``). Raises
    RefusedError where something stands behind the archive, which would no longer do so.
    """
    source = archive.source
    if source.size != archive.end.tail:
        what = "bytes stand behind the archive, and would stand in the middle of it"
        raise RefusedError(what, path=source.name, next="write a new file with -o: they come along")
    if not versions(source)[0].finished:
        what = "the last edit in place of this file was not finished"
        raise RefusedError(what, path=source.name, next=f"take it back: {undo_step(source.name)}")
    body = b""
    entries = []
    for record in archive.records:
        if record.name in dropped:
            continue
        content = contents.get(record.name)
        if content is None:
            entries.append(without_note(source.read(record.entry, record.entry_size)))
            continue
        new = Content(record.name, content, zlib.crc32(content), len(content))
        header, descriptor = around(new, source.size + len(body))
        entries.append(listed(new, source.size + len(body)))
        assert isinstance(descriptor, bytes)
        body += header + content + descriptor
    last = source.read(archive.end.tail - ENDING, ENDING)
    note = spelled(Note(source.size, zlib.crc32(last), edit, time))
    directory = source.size + len(body)
    # The file ends with a page: so its last sector holds all of the end records, and its last page the note as well.
    spare = -(directory + sum(map(len, entries)) + 4 + len(note) + ENDING) % BLOCK
    entries[-1] = _with_field(entries[-1], b" " * spare + note)
    listing = b"".join(entries)
    end = ending(archive, len(entries), directory, len(listing), wide=True)
    # The locator in it still leads to the old zip64 end record; a second copy of that would be taken for an archive.
    hold = last[56:] if archive.end.zip64 >= 0 else last[76:]
    return Appending(source.size, body + listing[: -len(note)], note + hold.rjust(ENDING, b"\0"), end)


def _with_field(entry: bytes, data: bytes) -> bytes:
    """The directory entry with one more extra field; a comment behind it goes, since the field must be last."""
    size = int.from_bytes(entry[28:30], "little") + int.from_bytes(entry[30:32], "little")
    extra = int.from_bytes(entry[30:32], "little") + 4 + len(data)
    front = entry[:30] + extra.to_bytes(2, "little") + bytes(2) + entry[34 : 46 + size]
    return front + EXTRA.to_bytes(2, "little") + len(data).to_bytes(2, "little") + data
