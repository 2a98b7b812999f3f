"""Edit files in place: existing bytes never change; a new version is appended and can be undone.

There are three steps, each synced before the next one starts. First, the new end of the file is written, which leads to
the old directory. Then everything before it is written. Last, a single byte changes, so that the end leads to the new
directory. If the process is killed or power is lost before the last step, the file is the former version; after it, the
new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Final

from ...base.errors import OutputError, RefusedError
from ...base.steps import undo_step
from ..sources import FILESYSTEM_BLOCK, AppendPlan, FileSource, Plan, Span, open_source
from .copying import READ_WRITE, as_output_failure, write_all
from .output import lock
from .planned import Check, PlanSource
from .space import reclaim

#: Part of the 65,557 bytes in which readers search the end record, which is in the last sector of a step.
_SEARCHED: Final = 15 * FILESYSTEM_BLOCK


class StagedFile(PlanSource):
    """The file as it will be after ``data`` replaces its bytes from ``begin`` to ``end``, as a source."""

    def __init__(self, file: FileSource, begin: int, end: int, data: bytes) -> None:
        super().__init__(Plan((Span(file, 0, begin), data, Span(file, end, file.size - end))), file.name)
        self._file = file

    def close(self) -> None:
        self._file.close()


@as_output_failure()
def append(
    append_plan: AppendPlan, source: FileSource, check: Check | None = None, given_back: Sequence[Span] = ()
) -> int:
    """Append a version to the file of ``source``; readers that have it open or mapped are not disturbed.

    ``check`` is called before the last step, with the file as that step will leave it; it raises ReadBackError if the
    file is wrong. Raises OutputError if the file cannot be written, RefusedError if another process edits it,
    ChangedError if it changed since it was read. Whatever happens, the file is the former version, byte for byte, or
    the new one.

    Once the new version is on disk, the bytes in ``given_back`` become holes, which cannot be undone. Return how many
    bytes that freed.
    """
    with open_locked(source) as fd:
        done = False
        try:
            end = append_plan.size
            for size in _growth_steps(append_plan.old_size, end):
                write_at(fd, size - len(append_plan.provisional_end), append_plan.provisional_end)
                os.fsync(fd)
            write_at(fd, append_plan.old_size, append_plan.body)
            os.fsync(fd)
            if check is not None:
                at, final = end - len(append_plan.final_end), append_plan.final_end
                with closing(StagedFile(open_source(source.name), at, end, final)) as staged:
                    check(staged)
            done = True
            write_at(fd, end - len(append_plan.final_end), append_plan.final_end)
            os.fsync(fd)
        except BaseException:
            _roll_back(fd, append_plan.old_size, source.name, done)
            raise
        return reclaim(fd, given_back) if given_back else 0


def _growth_steps(size: int, end: int) -> Iterator[int]:
    """Yield the sizes through which a file grows, in bytes.

    Readers look for the end records only in the last 64 KiB, and a disk may record a file's new size before its new
    bytes. So each step keeps the end records of the previous step within that range.
    """
    while size + _SEARCHED < end:
        size = (size + _SEARCHED) // FILESYSTEM_BLOCK * FILESYSTEM_BLOCK
        yield size
    yield end


@as_output_failure()
def shorten(source: FileSource, size: int) -> None:
    """Truncate the file of ``source`` to ``size`` bytes, which restores the version that ended there.

    Raises as ``append`` does.
    """
    with open_locked(source) as fd:
        os.ftruncate(fd, size)
        os.fsync(fd)


@as_output_failure()
def check_idle(source: FileSource) -> None:
    """Raise RefusedError if another process is editing the file in place, ChangedError if one has."""
    _lock(source.fd, source.name, "LOCK_SH")
    lock(source.fd, "LOCK_UN")
    source.check_unchanged()


@contextmanager
def open_locked(source: FileSource) -> Iterator[int]:
    """Open the file of a source for writing, and lock it; OSErrors become OutputErrors."""
    try:
        fd = os.open(source.name, READ_WRITE)
    except OSError as error:
        raise OutputError(f"it cannot be edited: {error.strerror or error}", path=source.name) from error
    try:
        _lock(fd, source.name)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != source.identity:
            raise RefusedError("another file has its name now", path=source.name, next="try again")
        source.check_unchanged()
        yield fd
    except OSError as error:
        raise OutputError(f"writing failed: {error.strerror or error}", path=source.name) from error
    finally:
        with suppress(OSError):  # fsync has already reported write errors
            os.close(fd)


def _lock(fd: int, path: str, how: str = "LOCK_EX") -> None:
    if lock(fd, how) is False:
        raise RefusedError("another process edits it in place", path=path, next="try again later")


def write_at(fd: int, at: int, data: bytes) -> None:
    """Write bytes to a file at an offset."""
    os.lseek(fd, at, os.SEEK_SET)
    write_all(fd, data)


def _roll_back(fd: int, size: int, path: str, done: bool) -> None:
    """Truncate the file after a failed edit; ``done`` says that readers may already see the edit."""
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        state = "may be the new one already" if done else "is the former one"
        what = f"a failed edit cannot be taken back ({error.strerror}): the version that torch reads {state}"
        raise OutputError(what, path=path, next=undo_step(path)) from error
    with suppress(OSError):  # should the edit reappear, it still leads to the former version
        os.fsync(fd)
