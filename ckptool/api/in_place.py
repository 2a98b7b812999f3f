"""Edits that a file takes on itself, and the way back."""

from __future__ import annotations

import os
import time
from typing import Any

from ..base.errors import MalformedError, RefusedError
from ..base.text import argument, counted
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import open_any
from ..files.sources import ContainedSource, SliceSource, Source
from ..files.zips.reader import read_archive
from ..files.zips.versions import Version, is_spare, note_at, versions

Path = str | os.PathLike[str]


def save_in_place(checkpoint: Checkpoint) -> int:
    """Write an edited checkpoint into its own file: the new metadata is appended, no byte of a tensor moves.

    Takes milliseconds whatever the size, is crash-safe at every instant, and ``undo`` takes it back. Returns the number
    of bytes appended, 0 where nothing changed. Raises RefusedError for legacy files and for edits that make new bytes
    of tensors (cast, slim, average), OutputError when it cannot be written, ReadBackError where it would not read as it
    must, and then the file is what it was.
    """
    from ..saving import save_in_place as saved

    appending = saved(checkpoint).appending
    return 0 if appending is None else appending.size - appending.at


def history(path: Path) -> dict[str, Any]:
    """The versions in a file that was edited in place, the oldest first.

    Each with its number, its ``bytes``, what was done to get there (``edit``, None for the first), the ``time`` of
    that in ISO 8601 (UTC), and whether it was ``finished``: torch reads the last one that was.
    """
    name = os.fspath(path)
    source = open_any(name)
    try:
        found = versions(source, _end(source))[::-1]
    finally:
        source.close()
    listed = [{"version": number, **_told(version)} for number, version in enumerate(found)]
    return {"schema": "ckptool.history/1", "path": name, "bytes": source.size, "versions": listed}


def undo(path: Path, *, everything: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Take the last edit in place back, or with ``everything`` all of them: the exact former bytes.

    ``undone`` are the edits taken back, the newest first, none where the file was never edited in place. Raises
    RefusedError where the former version does not read, OutputError when the file cannot be written.
    """
    from ..files.write.in_place import shorten

    name = os.fspath(path)
    source = open_any(name)
    try:
        if isinstance(source, ContainedSource):
            what = "it is a file within an archive, which is not changed in place"
            raise RefusedError(what, path=name, next=source.unpack)
        end = _end(source)
        found = versions(source, end)
        if end < source.size and (found[0].finished or not is_spare(source, end)):
            what = f"{counted(source.size - end, 'byte')} stand behind the last edit in place, and would be cut off"
            step = f"if they are not needed: truncate -s {end} {argument(name)}, then undo"
            raise RefusedError(what, path=name, next=step)
        target = found[-1] if everything else found[min(1, len(found) - 1)]
        undone = found[: found.index(target)]
        if undone:
            _check(source, target)
            if not dry_run:
                shorten(source, target.size)
    finally:
        source.close()
    return {
        "schema": "ckptool.undo/1",
        "path": name,
        "bytes": source.size,
        "output_bytes": target.size,
        "dry_run": dry_run,
        "undone": [_told(version) for version in undone],
        "left": len(found) - len(undone) - 1,
    }


def _end(source: Source) -> int:
    """Where the last version ends: what stands behind it belongs to somebody else."""
    if note_at(source, source.size) is not None:
        return source.size
    try:
        tail = read_archive(source).end.tail
    except MalformedError:
        return source.size
    return source.size if note_at(source, tail) is None else tail


def _check(source: Source, version: Version) -> None:
    """Raise RefusedError unless an archive stands where the version ended."""
    try:
        read_archive(SliceSource(source, 0, version.size))
    except MalformedError as error:
        what = f"the version of {version.size:,} bytes does not read, so nothing is cut off: {error.what}"
        raise RefusedError(what, path=source.name) from error


def _told(version: Version) -> dict[str, Any]:
    note = version.note
    return {
        "bytes": version.size,
        "edit": note.edit if note else None,
        "time": _iso(note.time) if note else None,
        "finished": version.finished,
    }


def _iso(seconds: int) -> str | None:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return None  # no date: somebody wrote the note by hand
