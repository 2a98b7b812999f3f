"""Save an edited checkpoint (plan, write, read back, rename), manage the versions in a file, and load tensors.

The library and the command line both write through this module.
"""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .base import lazy
from .base.addresses import conceal, is_remote
from .base.errors import (
    CkptoolError,
    MalformedError,
    OutputError,
    ReadBackError,
    RefusedError,
    refuse_file_uri,
    refuse_remote,
)
from .base.map_location import MapLocation
from .base.records import NamedTuple, TypedDict
from .base.steps import STDIN, argument, as_step, in_shell
from .base.text import cut, human_bytes, pluralize
from .checkpoint.checkpoint import Checkpoint, file_mode
from .checkpoint.paths import parse_path
from .checkpoint.selection import only_one, selected
from .edits.convert import Conversion
from .files.archives import open_any
from .files.downloads import expect_plan
from .files.sources import (
    FilePath,
    FileSource,
    FolderPlan,
    FolderSource,
    HeaderPlan,
    MemberSource,
    Plan,
    SliceSource,
    Source,
)
from .files.write.copying import rehearse
from .files.write.in_place import append, check_idle, shorten
from .files.write.output import check_folder_target, check_output, output_exists, write_file, write_folder
from .files.write.space import Shortage, can_reclaim, free_bytes, shortage, whole_blocks
from .files.zips.reader import read_archive
from .files.zips.versions import RECLAIMED, Version, is_leftover_growth, read_note, versions
from .formats.losses import Promise
from .formats.opening import CheckpointOrPath, file_of, open_checkpoint, path_text, takes_path
from .formats.planning import in_place_of, parts_of, plan_of, promise_in_place, promise_of, refuse_step_file
from .formats.readback import check_file, check_folder

if TYPE_CHECKING:
    import torch

    from .files.engine import OpenExecutor
    from .remote.publishing import Traffic

#: Called with the bytes written so far, and the total bytes to write.
OnProgress: TypeAlias = Callable[[int, int], None]

#: Maximum characters of a command in the note of a version.
_COMMAND_CHARS = 300


class Saved(NamedTuple):
    """An output: its ``path``, its ``size`` in bytes, and the ``plan`` that was executed.

    ``exact`` says whether the unedited pickle would be written byte for byte. After an edit in place, ``appended``
    counts the new bytes, and ``unused_bytes`` the bytes of dropped storages, which stay in the file. After a dry run,
    ``shortage`` says why the output would not fit on the disk ("" if it would). ``reclaimed`` counts the bytes that
    were returned to the disk, or would be after a dry run; it is None if the edit can be undone. ``traffic``
    counts what is read from or written to remote storage; it is None if nothing is. ``journal`` is the path of the file
    that holds the old header after an edit of a header in place, otherwise "".

    >>> saved = ckptool.save(ckptool.strip_module("training.pth"), "saved.pth")
    >>> saved.path, saved.exact
    ('saved.pth', True)
    """

    path: str
    size: int
    exact: bool
    plan: Plan | FolderPlan | None = None
    appended: int = 0
    unused_bytes: int = 0
    shortage: str = ""
    reclaimed: int | None = None
    traffic: Traffic | None = None
    journal: str = ""


# -- a new file


@takes_path
def save(
    checkpoint: Checkpoint,
    path: FilePath,
    *,
    force: bool = False,
    follow_links: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
    workers: OpenExecutor | None = None,
) -> Saved:
    """Write a checkpoint: the edited metadata and the untouched bytes of its tensors.

    A name with the suffix of another format is written in that format; ``convert`` has the options for this. An
    unedited checkpoint in its own format is copied byte for byte. The output appears as a whole or not at all, with the
    mode of the input, or with ``force`` the mode of the file it replaces. Links that lead out of a folder are written
    only with ``follow_links``. Before the output gets its name it is read back: structure, names, shapes, dtypes, sizes
    and sharing must match the checkpoint. With ``dry_run`` nothing is written, and the output may exist.

    If the output is a folder of several files, other processes can write them, a task for each: ``workers`` opens an
    executor of ``concurrent.futures``, on any machines that see all files under the same paths and have the same
    ckptool. This process does all other work, and reads what is in remote storage.

    Raise RefusedError if the output exists or is the input, or if something would be lost; OutputError if it cannot be
    written; ReadBackError if it does not read as promised. After an error there is no output.

    >>> with ckptool.open("training.pth") as checkpoint:
    ...     saved = ckptool.save(ckptool.strip_module(checkpoint), "stripped.pth")
    >>> saved.path, list(ckptool.open("stripped.pth")["state_dict"])[0]
    ('stripped.pth', 'stem.0.weight')
    """
    path = path_text(path)
    if checkpoint.target is None:
        checkpoint = Conversion().applied(checkpoint, path)
    if not dry_run and not os.path.isdir(path):
        # Fail before the work, not after it. Publishing looks at what is there, and keeps that for its conditions.
        check_new(path, checkpoint.sources, force=force or is_remote(path))
        refuse_step_file(path)
    plan, exact = plan_of(checkpoint, path, follow_links=follow_links)
    short = _shortage(checkpoint, plan, path)
    size, sources = plan.size, checkpoint.sources
    if dry_run:
        traffic = _traffic(plan, path, sources)
        if checkpoint.deferred_changes:
            rehearse(plan)
        return Saved(path, size, exact, plan, shortage=short, traffic=traffic)
    if short:
        raise OutputError(f"writing failed: {os.strerror(errno.ENOSPC)}: {short}", path=path)
    expect = partial(expect_plan, path=checkpoint.path)
    promise = promise_of(checkpoint, path)
    step = None if on_progress is None else _counting(on_progress, size)
    check_one = None if promise is None else partial(_check_file, checkpoint, promise)
    if is_remote(path):
        if isinstance(plan, FolderPlan):
            raise _no_folder(path)
        from .remote.publishing import publish

        traffic = publish(plan, path, sources, force=force, progress=step, check=check_one, expect=expect)
        return Saved(path, size, exact, plan, traffic=traffic)
    expect(plan)
    mode = file_mode(checkpoint.source)
    if isinstance(plan, Plan):
        written = write_file(plan, path, sources, force=force, mode=mode, progress=step, check=check_one)
        return Saved(written.path, size, exact, plan)
    fill = None
    # Other processes open neither standard input nor remote files, which take secrets.
    near = not any(source.name == STDIN or is_remote(source.name) for source in sources)
    if workers is not None and len(plan.files) > 1 and near:
        from .files.write.workers import write_by

        fill = partial(write_by, workers, progress=step)
    check = None if promise is None else partial(_check_folder, checkpoint, promise, path)
    written = write_folder(
        plan, path, sources, force=force, mode=mode, progress=step, parts=parts_of, check=check, fill=fill
    )
    return Saved(written.path, size, exact, plan)


def check_new(path: str, sources: Sequence[Source], *, folder: bool = False, force: bool = False) -> None:
    """Raise as ``save`` does if nothing may be written to a path."""
    if not is_remote(path):
        (check_folder_target if folder else check_output)(path, sources, force=force)
        return
    refuse_file_uri(path)
    if folder:
        raise _no_folder(path)
    from .remote.publishing import Target

    target = Target(path, sources)
    if not force and target.facts():
        raise output_exists(target.name)


def _no_folder(path: str) -> RefusedError:
    what, step = "a folder cannot be written to remote storage", "write it to a local folder, then upload that"
    return RefusedError(what, path=conceal(path), next=step)


def _traffic(plan: Plan | FolderPlan, path: str, sources: Sequence[Source]) -> Traffic | None:
    """Return what writing an output would move to or from remote storage, or None."""
    if not is_remote(path) and not any(is_remote(source.name) for source in sources):
        return None
    from .remote.publishing import planned_traffic, traffic_of

    if is_remote(path):
        if isinstance(plan, FolderPlan):
            raise _no_folder(path)
        return planned_traffic(plan, path, sources)
    return traffic_of([plan] if isinstance(plan, Plan) else [file for _, file in plan.files], sources)


def _shortage(checkpoint: Checkpoint, plan: Plan | FolderPlan, path: str) -> str:
    """Return why an output does not fit on the disk, and the space that the same edit needs in place; "" if it fits."""
    short = None if is_remote(path) else shortage(plan, path)
    if short is None:
        return ""
    if checkpoint.source.local_file() is None or not checkpoint.edited:
        return short.words
    try:
        appending = in_place_of(checkpoint, "", 0).appending
    except CkptoolError:
        return short.words
    if isinstance(appending, HeaderPlan) and not appending.fits:
        return short.words
    more = 0 if appending is None or isinstance(appending, HeaderPlan) else appending.size - appending.old_size
    return f"{short.words}; {in_shell('`--in-place`')} needs {human_bytes(more)}"


def _counting(on_progress: OnProgress, total: int) -> Callable[[int], None]:
    done, lock = 0, Lock()

    def step(size: int) -> None:
        nonlocal done
        with lock:  # several threads write
            done += size
            on_progress(done, total)

    on_progress(0, total)
    return step


# -- its own file


@takes_path
def save_in_place(
    checkpoint: Checkpoint, *, command: str = "", reclaim: bool = False, force: bool = False, dry_run: bool = False
) -> Saved:
    """Write an edited checkpoint into its own file: the new metadata is appended, and no tensor byte moves.

    This takes milliseconds for any size, is crash-safe at every instant, and ``undo`` can revert it. ``command`` is for
    the history. A header of safetensors is replaced where it is, and the old one kept in a file beside it; if the new
    one needs more room, the file is written again, but only with ``force``. The index of a shard gets its new names.

    With ``reclaim`` the whole blocks of dropped storages become holes once the edit is on the disk, which returns their
    space; then ``undo`` refuses. This needs Linux, and a filesystem that supports holes, otherwise RefusedError is
    raised.

    Raise RefusedError for legacy files, folders and members of archives, and for edits that compute new tensor bytes
    (cast, slim, average); OutputError if the file cannot be written; ReadBackError if it would not read as promised.
    After an error the file is unchanged.

    >>> with ckptool.open("edited.pth") as checkpoint:
    ...     saved = ckptool.save_in_place(ckptool.set(checkpoint, "epoch", 7))
    >>> ckptool.get("edited.pth", "epoch")
    7
    """
    source = checkpoint.source.local_file()
    if source is None or source.name == STDIN:
        kind = "folder" if isinstance(checkpoint.source, FolderSource) else "file within an archive"
        kind = "remote file" if is_remote(checkpoint.source.name) else kind
        kind = "stream" if checkpoint.source.name == STDIN else kind
        what = f"a {kind} cannot be edited in place"
        raise RefusedError(what, path=checkpoint.path, next="write a new one with `-o=`")
    done = "; ".join(change.words for change in checkpoint.changes)
    edit = cut(f"{command}: {done}" if command else done, _COMMAND_CHARS)
    if reclaim and not can_reclaim(source.name):
        what = "its space cannot be given back: that takes Linux, and a filesystem whose files can get holes"
        raise RefusedError(what, path=source.name, next="leave out `--reclaim=`, or write a new file with `-o=`")
    # Reproducible, like other tools: https://reproducible-builds.org/specs/source-date-epoch/
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = int(epoch) if epoch.isdigit() else int(time.time())
    try:
        appending, exact, unused, dropped = in_place_of(checkpoint, edit, now)
        given_back = whole_blocks(dropped) if reclaim else ()
        if given_back:
            # Only now is it known that the edit cannot be undone, so plan again with a note of it.
            appending = in_place_of(checkpoint, f"{RECLAIMED}{edit}", now).appending
    except RefusedError as error:
        check_idle(source)  # an edit that looks unfinished may still be running
        error.path = error.path or checkpoint.path
        raise
    if appending is None:
        return Saved(source.name, source.size, exact)
    if isinstance(appending, HeaderPlan):
        return _save_header(checkpoint, appending, source, force=force, dry_run=dry_run)
    more = appending.size - appending.old_size
    free = free_bytes(os.path.dirname(os.path.realpath(source.name)))
    words = Shortage(more, free).words if free is not None and more > free else ""
    if words and not dry_run:
        raise OutputError(f"writing failed: {os.strerror(errno.ENOSPC)}: {words}", path=source.name)
    freed = sum(span.size for span in given_back)
    if not dry_run:
        check = partial(_check_file, checkpoint, promise_in_place(checkpoint))
        freed = append(appending, source, check, given_back)
    reclaimed = freed if given_back else None
    return Saved(source.name, appending.size, exact, None, more, unused, words, reclaimed)


def _save_header(checkpoint: Checkpoint, plan: HeaderPlan, source: FileSource, *, force: bool, dry_run: bool) -> Saved:
    from .formats.headers import header_writer  # most files have no header to replace

    promise = promise_of(checkpoint, source.name)
    assert promise is not None and promise.manifest is not None
    write, journal = header_writer(plan, source, list(checkpoint.container.manifest()), list(promise.manifest), force)
    short = None if plan.fits else shortage(plan.whole, source.name)
    if short is not None and not dry_run:
        raise OutputError(f"writing failed: {os.strerror(errno.ENOSPC)}: {short.words}", path=source.name)
    if not dry_run:
        write(partial(_check_file, checkpoint, promise))
    size = source.size + len(plan.new) - len(plan.old)
    return Saved(source.name, size, True, shortage=short.words if short else "", journal=journal)


def _check_file(checkpoint: Checkpoint, promise: Promise, staged: Source) -> None:
    with _reporting(checkpoint, promise, staged.name):
        try:
            check_file(promise, staged)
        except ReadBackError:
            if not _is_contradictory(checkpoint):
                raise
            check_file(promise._replace(checked=False), staged)


def _is_contradictory(checkpoint: Checkpoint) -> bool:
    """Return whether the input places a record in two ways; an output that copies it does the same."""
    try:
        checkpoint.container.manifest(checked=True)
    except MalformedError:
        return True
    return False


def _check_folder(checkpoint: Checkpoint, promise: Promise, path: str, staged: str) -> None:
    with _reporting(checkpoint, promise, path):
        check_folder(promise, staged)


@contextmanager
def _reporting(checkpoint: Checkpoint, promise: Promise, path: str) -> Iterator[None]:
    """Complete a ReadBackError with the lines of a bug report, without paths."""
    try:
        yield
    except ReadBackError as error:
        error.path = path
        error.what = f"nothing was changed, since the output does not read as promised: {error.what}"
        error.step = as_step("this is a bug in ckptool, not in your file: please report it, with the lines below")
        edits = [change.head if change.notes else change.words for change in checkpoint.changes]
        error.report = (
            f"promised: {error.promised}",
            f"read:     {error.read}",
            f"formats:  {checkpoint.format} ({checkpoint.container.writer}) -> {promise.format}",
            *(f"edit:     {words}" for words in edits[:8]),
            f"Python:   {platform.python_version()} on {platform.system()} {platform.machine()}",
        )
        raise


# -- the versions in a file


class VersionReport(TypedDict):
    """A version of a file: ``bytes`` is its size; ``edit`` made it at ``time`` (UTC). Both are None for the first."""

    bytes: int
    edit: str | None
    time: str | None
    finished: bool


class NumberedVersion(VersionReport):
    """A version with its number; 0 is the original file."""

    version: int


class HistoryReport(TypedDict):
    """The report of ``history``, schema ``ckptool.undo/1``."""

    schema: Literal["ckptool.undo/1"]
    path: str
    bytes: int
    versions: list[NumberedVersion]


class UndoReport(TypedDict):
    """The report of ``undo``, schema ``ckptool.undo/1``: ``left`` counts the edits that can still be undone."""

    schema: Literal["ckptool.undo/1"]
    path: str
    bytes: int
    output_bytes: int
    dry_run: bool
    undone: list[VersionReport]
    left: int


_NO_VERSIONS = "remote files are never edited in place, so they have no former versions"


def history(path: CheckpointOrPath) -> HistoryReport:
    """Return the versions in a file that was edited in place, oldest first.

    Each has its number, its ``bytes``, the ``edit`` that made it (None for the first), the ``time`` of the edit in ISO
    8601 (UTC), and whether the edit was ``finished``: torch reads the last finished version.

    >>> [version["edit"] for version in ckptool.history("edited.pth")["versions"]]
    [None, 'set: epoch: 41 -> 42']
    """
    name = file_of(path)
    refuse_remote(name, _NO_VERSIONS, "")
    with closing(open_any(name)) as source:
        oldest_first = (_of_header(source) or versions(source, _end_of_versions(source)))[::-1]
    listed: list[NumberedVersion] = [
        {"version": number, **_version_facts(version)} for number, version in enumerate(oldest_first)
    ]
    return {"schema": "ckptool.undo/1", "path": source.name, "bytes": source.size, "versions": listed}


def undo(path: CheckpointOrPath, *, original: bool = False, dry_run: bool = False) -> UndoReport:
    """Undo the last edit in place, or with ``original`` all of them; the file has its exact former bytes again.

    ``undone`` lists the undone edits, newest first; it is empty if the file was never edited in place. Raise
    RefusedError if the former version cannot be read, OutputError if the file cannot be written.

    >>> len(ckptool.undo("edited.pth")["undone"])
    1
    """
    name = file_of(path)
    refuse_remote(name, _NO_VERSIONS, "")
    with closing(open_any(name)) as source:
        if isinstance(source, MemberSource):
            what = "it is a file within an archive, which cannot be changed in place"
            raise RefusedError(what, path=name, next=source.unpack)
        file = source.local_file()
        assert file is not None
        if newest_first := _of_header(file):
            times = len(newest_first) - 1 if original else 1
            for _ in range(0 if dry_run else times):
                lazy.module("formats.headers").undo_header(file.name)
            return _undo_report(source, newest_first, times, dry_run)
        end = _end_of_versions(source)
        newest_first = versions(source, end)
        if end < source.size and (newest_first[0].finished or not is_leftover_growth(source, end)):
            what = f"{pluralize(source.size - end, 'byte')} follow the last edit in place, and would be cut off"
            step = f"if they are not needed: truncate -s {end} {argument(name)}, then undo"
            raise RefusedError(what, path=name, next=step)
        target = newest_first[-1] if original else newest_first[min(1, len(newest_first) - 1)]
        undone = newest_first[: newest_first.index(target)]
        if any(version.finished and version.note is not None and version.note.reclaims for version in undone):
            what = "an edit gave the bytes that it dropped back to the disk, and cannot be undone"
            raise RefusedError(what, path=name)
        if undone:
            try:
                read_archive(SliceSource(source, 0, target.size))
            except MalformedError as error:
                what = f"the version of {target.size:,} bytes cannot be read, so nothing is cut off: {error.what}"
                raise RefusedError(what, path=source.name) from error
            if not dry_run:
                shorten(file, target.size)
    return _undo_report(source, newest_first, len(undone), dry_run)


def _of_header(source: Source) -> list[Version]:
    """Return the versions of a file whose header was edited in place, the newest first; [] for any other file."""
    found: list[Version] = [] if source.local_file() is None else lazy.module("files.write.headers").versions_of(source)
    return found


def _undo_report(source: Source, newest_first: Sequence[Version], times: int, dry_run: bool) -> UndoReport:
    return {
        "schema": "ckptool.undo/1",
        "path": source.name,
        "bytes": source.size,
        "output_bytes": newest_first[times].size,
        "dry_run": dry_run,
        "undone": [_version_facts(version) for version in newest_first[:times]],
        "left": len(newest_first) - times - 1,
    }


def _end_of_versions(source: Source) -> int:
    """Return the end of the last version in bytes; ckptool did not write anything after it."""
    if read_note(source, source.size) is not None:
        return source.size
    try:
        tail = read_archive(source).end.tail
    except MalformedError:
        return source.size
    return source.size if read_note(source, tail) is None else tail


def _version_facts(version: Version) -> VersionReport:
    note = version.note
    edit, time = (note.edit, _iso(note.time)) if note else (None, None)
    return {"bytes": version.size, "edit": edit, "time": time, "finished": version.finished}


def _iso(seconds: int) -> str | None:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return None  # not a date: the note was written by hand


# -- real tensors


def load(
    path: CheckpointOrPath, map_location: MapLocation = None, strip_prefix: str | None = None, key: str | None = None
) -> dict[str, torch.Tensor]:
    """Load the state dict of a checkpoint as real tensors, ready for ``model.load_state_dict``.

    This calls ``torch.load(weights_only=True, map_location=...)`` and extracts the state dict, wherever it is; ``key``
    chooses one of several. ``strip_prefix`` (such as "module.") is removed from the keys that have it. Raise
    TargetError if there is no state dict, or more than one and no ``key``.

    >>> state = ckptool.load("training.pth", map_location="cpu", strip_prefix="module.")
    >>> state["head.bias"].shape
    torch.Size([5])
    """
    from .edits.keys import renamed_modules, stripping
    from .reports.loads import load_whole

    with open_checkpoint(file_of(path)) as checkpoint:
        steps = parse_path(only_one(checkpoint, selected(checkpoint, key)).path)
    tensors: Any = load_whole(checkpoint.path, map_location)
    for step in steps:
        tensors = tensors[step]
    if strip_prefix is None:
        return tensors  # type: ignore[no-any-return]
    rename = stripping(strip_prefix)
    renamed = type(tensors)((rename(name), value) for name, value in tensors.items())
    if len(renamed) < len(tensors):
        first: dict[str, str] = {}
        a, b = next((first[rename(key)], key) for key in tensors if first.setdefault(rename(key), key) != key)
        what = f"the keys {a!r} and {b!r} would both be called {rename(a)!r}"
        raise RefusedError(what, path=checkpoint.path, next="load it without strip_prefix and choose")
    metadata = getattr(tensors, "_metadata", None)
    if metadata is not None:
        # load_state_dict reads the versions of the modules from it.
        values = list(metadata.values())
        moved = renamed_modules(list(metadata), rename)
        renamed._metadata = type(metadata)((path, values[source]) for path, _, source in moved)
    return renamed  # type: ignore[no-any-return]
