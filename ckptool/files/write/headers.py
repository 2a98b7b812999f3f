"""Replace the header of a file where it stands, and keep the old one in a journal beside the file for ``undo``.

The journal, ``FILE.ckptool-undo``, has an entry for each edit: a line of JSON, the old header and the new one. There
are two steps, each synced before the next one starts. First the entry is written. Then one write replaces the header.
A header of more than a block could be written in part: so its first bytes are replaced by a mark that no reader takes
for a header, and are written last. If the process is killed or power is lost, the file has its old header, its new one,
or the mark, and ``undo`` restores the old one.

A header of another size does not go there: the file is written again beside itself, and renamed. Then ``undo`` writes
it once more.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from typing import Final

from ...base.errors import CkptoolError, OutputError, RefusedError
from ...base.records import NamedTuple
from ...base.steps import argument, undo_step
from ..sources import FILESYSTEM_BLOCK, JOURNAL, UNFINISHED, FileSource, HeaderPlan, Plan, Source, Span, open_source
from ..zips.versions import EditNote, Version
from .copying import READ_WRITE, as_output_failure
from .in_place import StagedFile, open_locked, write_at
from .output import sync_folder, write_file
from .planned import Check

#: The most bytes of an entry's line and of a header, and the most entries. No edit writes more.
_LINE, _HEADER, _ENTRIES = 4096, 1 << 28, 10_000

#: What a journal begins with: no pickle, no archive and no text.
_MAGIC: Final = b"\0ckptool-undo\n"


class Entry(NamedTuple):
    """An edit in a journal: a line, the old header and the new one, from the offset ``begin`` to ``end``. ``old`` and
    ``new`` are the sizes of the headers in bytes, ``crc`` is the CRC-32 of both."""

    begin: int
    end: int
    old: int
    new: int
    crc: int
    edit: str
    time: int


class Journal(NamedTuple):
    """The edits in a journal, oldest first, and both headers of the last one. ``state`` says which one the file has:
    "old", "new", a "part" of each, or "other" if another program wrote the file since."""

    entries: list[Entry]
    old: bytes
    new: bytes
    state: str


def journal_of(path: str) -> str:
    """Return the path of the journal of a file; a link has the journal of its target."""
    return (os.path.realpath(path) if os.path.islink(path) else path) + JOURNAL


def _entries(journal: Source) -> Iterator[Entry]:
    at = len(_MAGIC) if journal.read(0, len(_MAGIC)) == _MAGIC else journal.size
    while at < journal.size and (line := journal.read(at, _LINE).partition(b"\n"))[1]:
        try:
            old, new, crc, edit, time = json.loads(line[0])
        except (ValueError, TypeError, RecursionError):
            return
        numbers = all(type(value) is int and value >= 0 for value in (old, new, crc, time))
        if not numbers or type(edit) is not str or max(old, new) > _HEADER:
            return
        begin, at = at, at + len(line[0]) + 1 + old + new
        if at > journal.size:
            return  # a killed run did not finish it, so it did not touch the file
        yield Entry(begin, at, old, new, crc, edit, time)


def read_journal(source: Source) -> Journal | None:
    """Return the journal of a file whose header was edited in place, or None without a whole entry."""
    path = journal_of(source.name)
    if not os.path.lexists(path):
        return None
    with closing(open_source(path)) as journal:
        entries = [*islice(_entries(journal), _ENTRIES)]
        while entries:
            last = entries[-1]
            old = journal.read(last.end - last.new - last.old, last.old)
            new = journal.read(last.end - last.new, last.new)
            if zlib.crc32(old + new) == last.crc:
                return Journal(entries, old, new, _state(source, old, new))
            entries.pop()
    return None


def _state(source: Source, old: bytes, new: bytes) -> str:
    there = source.read(0, max(len(old), len(new)))
    if there.startswith((new, old)):
        return "new" if there.startswith(new) else "old"
    at = len(UNFINISHED) if there.startswith(UNFINISHED) else 0
    mixed = zip(there[at:], old[at:], new[at:])
    is_part = len(old) == len(new) == len(there) and all(byte in pair for byte, *pair in mixed)
    return "part" if is_part else "other"


def versions_of(source: Source) -> list[Version]:
    """Return every version of a file whose header was edited in place, the newest first; [] without such an edit."""
    journal = read_journal(source)
    if journal is None or journal.state == "other":
        return []
    last = journal.entries[-1]
    # A file with its old header still has the size that it had before the last edit, which is not finished.
    size = source.size + (last.new - last.old if journal.state == "old" else 0)
    result = []
    for entry in reversed(journal.entries):
        finished = entry is not last or journal.state == "new"
        result.append(Version(size, EditNote(0, entry.crc, entry.edit, entry.time), finished))
        size += entry.old - entry.new
    return [*result, Version(size, None)]


@as_output_failure()
def replace_header(plan: HeaderPlan, source: FileSource, check: Check, finish: Callable[[bool], object]) -> None:
    """Give the file of ``source`` the new header of a plan; the journal beside it gets the old one.

    ``check`` is called first, with the file as it will be; it raises ReadBackError if the file is wrong. ``finish`` is
    called with True once the new header is on the disk, and with False to take that back. Raises OutputError if
    something cannot be written, RefusedError if another process edits the file or an edit of it was not finished,
    ChangedError if it changed since it was read. After an error the file has its old header.
    """
    before, kept = read_journal(source), 0
    if before is not None and before.state == "part":
        what = "an edit in place was not finished: a part of the header is old"
        raise RefusedError(what, path=source.name, next=undo_step(source.name))
    if before is not None and before.state != "other":
        kept = before.entries[-1].begin if before.state == "old" else before.entries[-1].end
    both = plan.old + plan.new
    line = json.dumps([len(plan.old), len(plan.new), zlib.crc32(both), plan.edit, plan.time])
    with open_locked(source) as fd, _open_journal(source, kept) as journal:
        try:
            write_at(journal, kept, (b"" if kept else _MAGIC) + line.encode() + b"\n" + both)
            os.fsync(journal)
            sync_folder(os.path.dirname(journal_of(source.name)) or os.curdir)
            _exchange(fd, source, plan.old, plan.new, check)
            finish(True)
        except BaseException:
            _roll_back(fd, plan, source, finish)
            _forget(journal, source, kept)
            raise


def _exchange(fd: int, source: FileSource, old: bytes, new: bytes, check: Check | None = None) -> None:
    """Replace the old header of a file by a new one; a file whose header gets another size is written again."""
    if len(old) != len(new):
        rest = Span(source, len(old), source.size - len(old))
        write_file(Plan((new, rest) if rest.size else (new,)), source.name, (), force=True, check=check)
        return
    if check is not None:
        with closing(StagedFile(open_source(source.name), 0, len(old), new)) as staged:
            check(staged)
    if len(new) > FILESYSTEM_BLOCK:
        write_at(fd, 0, UNFINISHED)
        os.fsync(fd)
        write_at(fd, len(UNFINISHED), new[len(UNFINISHED) :])
        os.fsync(fd)
    write_at(fd, 0, new if len(new) <= FILESYSTEM_BLOCK else new[: len(UNFINISHED)])
    os.fsync(fd)


def _roll_back(fd: int, plan: HeaderPlan, source: FileSource, finish: Callable[[bool], object]) -> None:
    try:
        if not plan.fits:
            with closing(open_source(source.name)) as now:
                if now.read(0, len(plan.old)) != plan.old:
                    raise OutputError("the file was written again already")
        elif os.lseek(fd, 0, os.SEEK_SET) == 0 and os.read(fd, len(plan.old)) != plan.old:
            _exchange(fd, source, plan.new, plan.old)
            finish(False)
    except (OSError, CkptoolError) as error:
        what = f"a failed edit cannot be taken back ({error}): the header may be the new one, or a part of it"
        raise OutputError(what, path=source.name, next=undo_step(source.name)) from error


@as_output_failure()
def restore_header(source: FileSource, finish: Callable[[bool], object]) -> None:
    """Undo the last edit in the journal of a file: give it the old header, and take the entry off the journal.

    ``finish`` is called with True once the old header is on the disk. Raises the same errors as ``replace_header``,
    RefusedError also if another program wrote the file since. A killed run leaves a file that this function restores.
    """
    last = read_journal(source)
    if last is None or last.state == "other":
        what = f"its header is not the one in {os.path.basename(journal_of(source.name))}: it was written again since"
        step = f"if the edits before need no undo: rm {argument(journal_of(source.name))}"
        raise RefusedError(what, path=source.name, next=step)
    entry = last.entries[-1]
    with open_locked(source) as fd, _open_journal(source, entry.end) as journal:
        if last.state != "old":
            _exchange(fd, source, last.new, last.old)
        finish(True)
        _forget(journal, source, entry.begin)


@contextmanager
def _open_journal(source: FileSource, size: int) -> Iterator[int]:
    """Open the journal of a file for writing, cut to ``size`` bytes; it has the mode of the file."""
    # A link under this name could lead to any file.
    flags = READ_WRITE | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(journal_of(source.name), flags, os.fstat(source.fd).st_mode & 0o666)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        with suppress(OSError):  # fsync has already reported write errors
            os.close(fd)


def _forget(journal: int, source: FileSource, size: int) -> None:
    """Cut a journal to ``size`` bytes; remove an empty one."""
    path = journal_of(source.name)
    if size > len(_MAGIC):
        os.ftruncate(journal, size)
        os.fsync(journal)
    else:
        os.unlink(path)
        sync_folder(os.path.dirname(path) or os.curdir)
