"""From an edited checkpoint to its file - planned, written, read back, and only then in its place - and back to
tensors.

The one way to an output, for the library and for the command line.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .base.errors import MalformedError, ReadBackError, RefusedError, TargetError
from .base.map_location import MapLocation
from .base.text import argument, cut, pluralize
from .checkpoint.checkpoint import Checkpoint, file_mode
from .checkpoint.paths import parse_path
from .checkpoint.selection import selected
from .files.archives import open_any
from .files.sources import ContainedSource, FilePath, Files, FileSource, FolderSource, Plan, SliceSource, Source
from .files.write.copying import rehearse
from .files.write.in_place import append, check_idle, shorten
from .files.write.output import check_output, write_files, write_plan
from .files.zips.reader import read_archive
from .files.zips.versions import Version, is_leftover_growth, read_note, versions
from .formats.opening import open_checkpoint
from .formats.planning import in_place_of, parts_of, plan_of, promise_in_place, promise_of
from .formats.promises import Promise
from .formats.readback import check_file, check_folder

if TYPE_CHECKING:
    import torch

#: Called with the bytes that are written so far, and with those that there will be.
Progress: TypeAlias = Callable[[int, int], None]

#: Characters of a command that a version in a file keeps.
_COMMAND_CHARS = 300
#: Changes that a report of a failed read-back names.
_REPORTED = 8


class Saved(NamedTuple):
    """What was written: ``path`` as its content may have decided it, ``size`` in bytes, and ``exact``, whether the
    unedited pickle would be written byte for byte. ``plan`` is what was carried out. Of an edit in place, ``appended``
    is the number of new bytes, and ``unused_bytes`` those of storages that the edit left out: they stay in the file."""

    path: str
    size: int
    exact: bool
    plan: Plan | Files | None = None
    appended: int = 0
    unused_bytes: int = 0


# -- a new file


def save(
    checkpoint: Checkpoint,
    path: FilePath,
    *,
    force: bool = False,
    follow_links: bool = False,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> Saved:
    """Write a checkpoint: the edited metadata and the untouched bytes of its tensors.

    An unedited one is copied byte for byte. The output appears whole or not at all, with the mode of the input, or with
    ``force`` that of the file it replaces. Of a folder, links to files outside of it are written with ``follow_links``
    only. Before it takes its name it is read back: its structure, names, shapes, dtypes, sizes and sharing must be
    those of the checkpoint. With ``dry_run`` nothing is written, and nothing need be free.

    Raises RefusedError where the output exists or is the input, or something would be lost; OutputError where it cannot
    be written; ReadBackError where it does not read as it must: then there is none.
    """
    name = os.fspath(path)
    sources = checkpoint.sources
    if not dry_run and not os.path.isdir(name):
        # What cannot be written is said before the work, not after.
        check_output(name, sources, force=force)
    plan, exact = plan_of(checkpoint, name, follow_links=follow_links)
    if dry_run:
        if checkpoint.deferred_changes:
            rehearse(plan)
        return Saved(name, plan.size, exact, plan)
    promise = promise_of(checkpoint, name)
    progress = None if on_progress is None else _counting(on_progress, plan.size)
    mode = file_mode(checkpoint.source)
    if isinstance(plan, Files):
        check = None if promise is None else partial(_check_folder, checkpoint, promise, name)
        written = write_files(
            plan, name, sources, force=force, mode=mode, progress=progress, parts=parts_of, check=check
        )
    else:
        check_one = None if promise is None else partial(_check_file, checkpoint, promise)
        written = write_plan(plan, name, sources, force=force, mode=mode, progress=progress, check=check_one)
    return Saved(written.path, plan.size, exact, plan)


def _counting(on_progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def step(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, total)

    on_progress(0, total)
    return step


# -- its own file


def save_in_place(checkpoint: Checkpoint, *, command: str = "", dry_run: bool = False) -> Saved:
    """Write an edited checkpoint into its own file: the new metadata is appended, no byte of a tensor moves.

    Takes milliseconds whatever the size, is crash-safe at every instant, and ``undo`` takes it back. ``command`` is for
    the history. Raises RefusedError for legacy files, for what is no file, and for edits that make new bytes of tensors
    (cast, slim, average); OutputError where it cannot be written; ReadBackError where it would not read as it must.
    Then the file is what it was.
    """
    source = checkpoint.source
    if not isinstance(source, FileSource):
        kind = "folder" if isinstance(source, FolderSource) else "file within an archive"
        what = f"a {kind} cannot be edited in place"
        raise RefusedError(what, path=checkpoint.path, next="write a new one with -o")
    words = "; ".join(change.words for change in checkpoint.changes)
    edit = cut(f"{command}: {words}" if command else words, _COMMAND_CHARS)
    # As other tools that must be reproducible: https://reproducible-builds.org/specs/source-date-epoch/
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    try:
        appending, exact, unused = in_place_of(checkpoint, edit, int(epoch) if epoch.isdigit() else int(time.time()))
    except RefusedError:
        check_idle(source)  # what looks unfinished may be under way
        raise
    if appending is None:
        return Saved(source.name, source.size, exact)
    if not dry_run:
        append(appending, source, partial(_check_file, checkpoint, promise_in_place(checkpoint)))
    return Saved(source.name, appending.size, exact, None, appending.size - appending.at, unused)


def _check_file(checkpoint: Checkpoint, promise: Promise, staged: Source) -> None:
    try:
        try:
            check_file(promise, staged)
        except ReadBackError:
            if not _has_odd_places(checkpoint):
                raise
            check_file(promise._replace(checked=False), staged)
    except ReadBackError as error:
        _reported(error, checkpoint, promise, staged.name)
        raise


def _has_odd_places(checkpoint: Checkpoint) -> bool:
    """Does the input say in two ways where something is? Then so does what it is carried over to."""
    try:
        checkpoint.container.manifest(checked=True)
    except MalformedError:
        return True
    return False


def _check_folder(checkpoint: Checkpoint, promise: Promise, path: str, staged: str) -> None:
    try:
        check_folder(promise, staged)
    except ReadBackError as error:
        _reported(error, checkpoint, promise, path)
        raise


def _reported(error: ReadBackError, checkpoint: Checkpoint, promise: Promise, path: str) -> None:
    """Complete the error with what its report needs; no paths are in it."""
    error.path = path
    error.what = f"nothing was changed, for what was written does not read as it must: {error.what}"
    error.next = "this is a bug in ckptool, not in your file: please report it, with the lines below"
    done = [change.head if change.notes else change.words for change in checkpoint.changes]
    error.report = (
        f"promised: {error.promised}",
        f"read:     {error.read}",
        f"formats:  {checkpoint.format} ({checkpoint.container.writer}) -> {promise.format}",
        *(f"edit:     {words}" for words in done[:_REPORTED]),
        f"Python:   {platform.python_version()} on {platform.system()} {platform.machine()}",
    )


# -- the versions in a file


def history(path: FilePath) -> dict[str, Any]:
    """The versions in a file that was edited in place, the oldest first.

    Each with its number, its ``bytes``, what was done to get there (``edit``, None for the first), the ``time`` of
    that in ISO 8601 (UTC), and whether it was ``finished``: torch reads the last one that was.
    """
    name = os.fspath(path)
    source = open_any(name)
    try:
        found = versions(source, _end_of_versions(source))[::-1]
    finally:
        source.close()
    listed = [{"version": number, **_version_facts(version)} for number, version in enumerate(found)]
    return {"schema": "ckptool.history/1", "path": name, "bytes": source.size, "versions": listed}


def undo(path: FilePath, *, everything: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Take the last edit in place back, or with ``everything`` all of them: the exact former bytes.

    ``undone`` are the edits taken back, the newest first, none where the file was never edited in place. Raises
    RefusedError where the former version does not read, OutputError when the file cannot be written.
    """
    name = os.fspath(path)
    source = open_any(name)
    try:
        if isinstance(source, ContainedSource):
            what = "it is a file within an archive, which is not changed in place"
            raise RefusedError(what, path=name, next=source.unpack)
        end = _end_of_versions(source)
        found = versions(source, end)
        if end < source.size and (found[0].finished or not is_leftover_growth(source, end)):
            what = f"{pluralize(source.size - end, 'byte')} stand behind the last edit in place, and would be cut off"
            step = f"if they are not needed: truncate -s {end} {argument(name)}, then undo"
            raise RefusedError(what, path=name, next=step)
        target = found[-1] if everything else found[min(1, len(found) - 1)]
        undone = found[: found.index(target)]
        if undone:
            _check_version(source, target)
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
        "undone": [_version_facts(version) for version in undone],
        "left": len(found) - len(undone) - 1,
    }


def _end_of_versions(source: Source) -> int:
    """Where the last version ends: what stands behind it belongs to somebody else."""
    if read_note(source, source.size) is not None:
        return source.size
    try:
        tail = read_archive(source).end.tail
    except MalformedError:
        return source.size
    return source.size if read_note(source, tail) is None else tail


def _check_version(source: Source, version: Version) -> None:
    """Raise RefusedError unless an archive stands where the version ended."""
    try:
        read_archive(SliceSource(source, 0, version.size))
    except MalformedError as error:
        what = f"the version of {version.size:,} bytes does not read, so nothing is cut off: {error.what}"
        raise RefusedError(what, path=source.name) from error


def _version_facts(version: Version) -> dict[str, Any]:
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


# -- real tensors


def load(
    path: FilePath,
    map_location: MapLocation = None,
    strip_prefix: str | None = None,
    key: str | None = None,
) -> dict[str, torch.Tensor]:
    """The state dict of a checkpoint as real tensors, ready for ``model.load_state_dict``.

    Loads with ``torch.load(weights_only=True, map_location=...)`` and takes the one state dict out, wherever
    it is; ``key`` names it where there are several. ``strip_prefix`` (such as "module.") is taken off the
    keys that have it. Raises TargetError when there is no state dict, or more than one and no ``key``.
    """
    from .edits.keys import renamed_modules, stripping
    from .reports.loading import load_whole
    from .values.torch.loads import at_path

    with open_checkpoint(path) as checkpoint:
        chosen = selected(checkpoint, key)
        if len(chosen) != 1:
            there = ", ".join(repr(item.path) for item in chosen)
            what = f"there are {len(chosen)} state dicts: {there}" if chosen else "there is no state dict in it"
            raise TargetError(what, path=checkpoint.path, next="name one by key=..." if chosen else "torch.load it")
        steps = parse_path(chosen[0].path)
    found: Any = at_path(load_whole(checkpoint.path, map_location), steps)
    if strip_prefix is None:
        return found  # type: ignore[no-any-return]
    rename = stripping(strip_prefix)
    renamed = type(found)((rename(name), value) for name, value in found.items())
    if len(renamed) < len(found):
        first: dict[str, str] = {}
        one, other = next((first[rename(key)], key) for key in found if first.setdefault(rename(key), key) != key)
        what = f"the keys {one!r} and {other!r} would both be called {rename(one)!r}"
        raise RefusedError(what, path=checkpoint.path, next="load it without strip_prefix and choose")
    metadata = getattr(found, "_metadata", None)
    if metadata is not None:
        # load_state_dict reads the versions of modules from it.
        values = list(metadata.values())
        moved = renamed_modules(list(metadata), rename)
        renamed._metadata = type(metadata)((path, values[source]) for path, _, source in moved)
    return renamed  # type: ignore[no-any-return]
