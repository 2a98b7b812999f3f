"""Carry out the tasks of an output, and finish the output once all tasks are done.

A staged file has its full size from the start, and each task writes its own bytes of it. A task writes the same bytes
each time, however many processes run it at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ...base.errors import OutputError, ReadBackError
from ...base.text import human_bytes
from ..sources import Computed, ExpectedChecksum, FolderPlan, Plan, Source, size_of
from ..tasks import Cutter, DoneJson, OutputFile, Task
from ..zips.writer import combined_crc
from .copying import Progress, as_output_failure, write_at, write_pieces, wrong_checksum
from .output import (
    STAGED,
    TEMPORARY,
    StagedFile,
    check_folder_target,
    check_output,
    create,
    discarded_on_error,
    remove_leftovers,
    remove_temporary,
    temporary_name,
)


@as_output_failure()
def carry_out(task: Task, progress: Progress | None = None) -> DoneJson:
    """Write the bytes of a task to its staged files, and sync them; return the checksums and counts for the journal.

    Raises OutputError if a staged file is missing or cannot be written, ChangedError if an input changed after the plan
    was made, and MalformedError if input bytes do not match their recorded checksum.
    """
    checksums: list[list[int]] = []
    for number, output in enumerate(task.outputs):
        with _staged(output) as fd:
            for write in task.writes:
                if write.output != number:
                    continue
                computed = write_pieces(write.plan, fd, progress, write.at)
                checks = [check for check in write.checks if check.expected.crc is not None]
                checksums += [
                    [check.number, check.begin, check.expected.size, crc]
                    for check, crc in zip(checks, computed, strict=True)
                ]
            os.fsync(fd)
    for file in task.inputs:
        file.check_unchanged()
    size = sum(size_of(piece) for write in task.writes for piece in write.pieces)
    deferred = [[number, at, length, value.value] for number, at, length, value in task.deferred]
    return {"task": task.id, "bytes": size, "checksums": checksums, "deferred": deferred}


@contextmanager
def _staged(output: OutputFile) -> Iterator[int]:
    """Open a staged file to write into it."""
    path = output["path"]
    if not is_staged(path):  # a task writes only to staged files
        raise OutputError("it is not the staged output of a plan", path=path, next="plan again")
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        what = "the staged output is not there: it was committed or aborted, or is on a disk that this machine lacks"
        raise OutputError(what, path=path, next="if it was aborted, plan again") from None
    except OSError as error:
        raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != output["size"]:
            what = f"the staged output has {human_bytes(status.st_size)}, not the {human_bytes(output['size'])} planned"
            raise OutputError(what, path=path, next="plan again")
        yield fd
    except OSError as error:
        raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error
    finally:
        os.close(fd)


def complete(cutter: Cutter, done: Iterable[DoneJson], staged: Sequence[StagedFile]) -> None:
    """Verify the checksums from the results of all tasks, and write the late pieces into the staged files.

    Raises MalformedError for a wrong checksum.
    """
    checks: dict[int, dict[int, tuple[int, int]]] = {}
    values: dict[int, dict[int, tuple[int, int]]] = {}
    for one in done:
        for number, begin, size, crc in one["checksums"]:
            checks.setdefault(number, {})[begin] = crc, size
        for number, begin, size, value in one["deferred"]:
            values.setdefault(number, {})[begin] = value, size
    for number, expected in enumerate(cutter.expected()):
        if expected.crc is not None:  # otherwise the tasks verified them
            _verify(expected, checks.get(number, {}))
    for number, deferred in enumerate(cutter.deferred):
        parts = values.get(number, {})
        deferred.value = deferred.combined(parts[begin] for begin in sorted(parts))
    for path, plan in staged:
        if any(isinstance(piece, Computed) and piece.late for piece in plan.pieces):
            with _staged({"path": path, "size": plan.size}) as fd:
                _write_late(plan, fd)


def _verify(expected: ExpectedChecksum, parts: dict[int, tuple[int, int]]) -> None:
    """Combine the partial checksums of some bytes.

    Raises MalformedError if the result is not the expected checksum, ReadBackError if the parts do not cover all bytes.
    """
    at = found = 0
    for begin, (crc, size) in sorted(parts.items()):
        if begin != at:
            break
        found, at = combined_crc(found, crc, size), at + size
    if at != expected.size:
        what = f"{expected.where}: the checksums of {at:,} of {expected.size:,} bytes were computed"
        raise ReadBackError(what, promised=f"{expected.size:,} bytes", read=f"{at:,} bytes")
    if found != expected.crc:
        raise wrong_checksum(expected)


def _write_late(plan: Plan, fd: int) -> None:
    """Write the pieces that depend on results of others, in order."""
    at = 0
    for piece in plan.pieces:
        if isinstance(piece, Computed) and piece.late:
            write_at(fd, b"".join(piece.chunks()), at)
        at += size_of(piece)


def is_staged(path: str) -> bool:
    """Return whether a path is a staged file or folder, or a file in a staged folder."""
    names = path.split(os.sep)[-2:]
    plain = os.path.isabs(path) and os.path.normpath(path) == path
    return plain and any(name.startswith(".") and name.endswith((STAGED, TEMPORARY)) for name in names)


def staged_name(path: str) -> str:
    """Return a name for the file, or the folder of files, to which tasks write an output."""
    return os.path.splitext(temporary_name(*os.path.split(os.path.realpath(path))))[0] + STAGED


def stage(plan: Plan | FolderPlan, path: str, staged: str, sources: Sequence[Source], *, force: bool = False) -> None:
    """Create the file, or the folder of files, to which tasks write an output, in full size and consisting of holes.

    ``staged`` is its path, from ``staged_name``. Raises as ``write_file`` and ``write_folder`` do.
    """
    check = check_folder_target if isinstance(plan, FolderPlan) else check_output
    check(path, sources, force=force)
    files = plan.files if isinstance(plan, FolderPlan) else (("", plan),)
    names = [name for name, _ in plan.files] if isinstance(plan, FolderPlan) else None
    with discarded_on_error(staged, path, names):
        if isinstance(plan, FolderPlan):
            os.mkdir(staged)
        for name, file in files:
            fd = create(os.path.join(staged, name) if name else staged)
            try:
                os.ftruncate(fd, file.size)
            finally:
                os.close(fd)


@contextmanager
def scratch_output(path: str) -> Iterator[str]:
    """Yield a path with the same name in a temporary folder next to an output; the file written there is removed."""
    folder, name = os.path.split(os.path.realpath(path))
    remove_leftovers(folder, name)
    scratch = temporary_name(folder, name)
    with discarded_on_error(scratch, path):
        os.mkdir(scratch)
        try:
            yield os.path.join(scratch, name)
        finally:
            remove_temporary(os.path.join(scratch, name))
            remove_temporary(scratch)
