"""From an edited checkpoint to its file: planned, written, read back, and only then in its place.

The one way to an output, for the library and for the command line.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

from .base.errors import MalformedError, ReadBackError, RefusedError
from .base.text import cut
from .checkpoint.checkpoint import Checkpoint, file_mode
from .files.sources import Files, FileSource, FolderSource, Plan, Source
from .files.write.copying import rehearse
from .files.write.folder import write_files
from .files.write.in_place import append, check_idle
from .files.write.output import check_output, write_plan
from .formats.planning import InPlace, in_place_of, parts_of, plan_of, promise_in_place, promise_of
from .formats.promises import Promise
from .formats.readback import check_file, check_folder

#: Given the number of bytes to come, what to call with those of each step, as long as it lasts.
Watch: TypeAlias = Callable[[int], AbstractContextManager[Callable[[int], None] | None]]

#: Characters of what was done that a version in a file keeps.
_WORDS = 300
#: Changes that a report names.
_TOLD = 8


class Saved(NamedTuple):
    """What was written: ``path`` as its content may have decided it, its plan, and whether the unedited pickle would be
    written byte for byte."""

    path: str
    planned: Plan | Files
    exact: bool


def _unwatched(size: int) -> AbstractContextManager[None]:
    return nullcontext()


def save(
    checkpoint: Checkpoint, path: str, *, force: bool = False, follow_links: bool = False, watch: Watch = _unwatched
) -> Saved:
    """Write a checkpoint. What was staged is read back before it takes the name.

    Raises what ``plan_of``, ``write_plan`` and ``write_files`` raise, ReadBackError where the output would not be what
    was promised: then there is none.
    """
    sources, mode = checkpoint.sources, file_mode(checkpoint.source)
    if not os.path.isdir(path):
        # What cannot be written is said before the work, not after.
        check_output(path, sources, force=force)
    planned, exact = plan_of(checkpoint, path, follow_links=follow_links)
    promise = promise_of(checkpoint, path)
    with watch(planned.size) as moving:
        if isinstance(planned, Files):
            written = write_files(
                planned,
                path,
                sources,
                force=force,
                mode=mode,
                progress=moving,
                parts=parts_of,
                check=None if promise is None else partial(_check_folder, checkpoint, promise, path),
            )
        else:
            check_one = None if promise is None else partial(_check_file, checkpoint, promise)
            written = write_plan(planned, path, sources, force=force, mode=mode, progress=moving, check=check_one)
    return Saved(written.path, planned, exact)


def preview(checkpoint: Checkpoint, path: str, *, follow_links: bool = False) -> Saved:
    """What ``save`` would write, and nothing is written; raises what that raises before it writes."""
    planned, exact = plan_of(checkpoint, path, follow_links=follow_links)
    if checkpoint.deferred_changes:
        rehearse(planned)
    return Saved(path, planned, exact)


def save_in_place(checkpoint: Checkpoint, command: str = "", *, dry_run: bool = False) -> InPlace:
    """Append a checkpoint to its own file. What was appended is read back before it counts.

    ``command`` is for the history. Raises RefusedError for what is no file or cannot be edited in place, ReadBackError
    as ``save`` does, OutputError when it cannot be written; then the file is what it was.
    """
    source = checkpoint.source
    if not isinstance(source, FileSource):
        kind = "folder" if isinstance(source, FolderSource) else "file within an archive"
        what = f"a {kind} cannot be edited in place"
        raise RefusedError(what, path=checkpoint.path, next="write a new one with -o")
    words = "; ".join(change.words for change in checkpoint.changes)
    edit = cut(f"{command}: {words}" if command else words, _WORDS)
    # As other tools that must be reproducible: https://reproducible-builds.org/specs/source-date-epoch/
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    try:
        found = in_place_of(checkpoint, edit, int(epoch) if epoch.isdigit() else int(time.time()))
    except RefusedError:
        check_idle(source)  # what looks unfinished may be under way
        raise
    if found.appending is not None and not dry_run:
        append(found.appending, source, partial(_check_file, checkpoint, promise_in_place(checkpoint)))
    return found


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
        *(f"edit:     {words}" for words in done[:_TOLD]),
        f"Python:   {platform.python_version()} on {platform.system()} {platform.machine()}",
    )
