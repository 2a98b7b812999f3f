"""A new version of an archive behind the old one, for edits in place: no byte that is there changes.

It brings the records with a new content and a new directory. Torch looks for the end record from the end of the file
on, as every reader of zip does, and takes the directory that it leads to (``PyTorchFileReader``, on miniz). So while
the version is written, a copy of the old end record stands in the last sector of the file, before a new one that lacks
the first byte of its signature. The last step is that byte: whatever is torn, readers find one of the two.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

from ..errors import RefusedError
from ..human import argument, undo_step
from ..source import BLOCK, Appending
from .fresh import Content, around, listed, padding_of
from .layout import ending
from .read import Archive
from .versions import ENDING, EXTRA, UNSIGNED, Note, is_spare, spelled, without_note

__all__ = ["appended"]


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
