"""Let other processes write the files of a staged folder: one task for each file, with its plan as a pickle.

The files have their full size from the start. A task writes the same bytes each time, however many processes run it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import BytesIO
from typing import Any

from ...base.errors import CkptoolError, OutputError
from ...base.records import NamedTuple
from ..engine import OpenExecutor, each_answer
from ..sources import Deferred, Plan
from .copying import Progress, as_output_failure, write_pieces
from .output import StagedFile


class _Task(NamedTuple):
    """A file to write: its place in the list of files, its path and size, and the pickle of its plan."""

    number: int
    path: str
    size: int
    plan: bytes


class _Written(NamedTuple):
    """A file that was written: its place in the list of files, and the values of the plan's deferred numbers."""

    number: int
    values: list[int]


class _Pickler(pickle.Pickler):
    """Keeps the deferred numbers of what it pickles, in their order."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.deferred: list[Deferred] = []

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Deferred):
            self.deferred.append(value)
        return NotImplemented


def _pickled(plan: Plan) -> tuple[bytes, list[Deferred]]:
    """Return the pickle of a plan and its deferred numbers, and these numbers."""
    file = BytesIO()
    pickler = _Pickler(file)
    pickler.dump((plan, pickler.deferred))  # the list is pickled after the plan, when it is complete
    return file.getvalue(), pickler.deferred


def write_by(workers: OpenExecutor, files: Sequence[StagedFile], progress: Progress | None = None) -> None:
    """Let ``workers`` write files that exist in their full size. They start here, so not for a refused output.

    Raises the errors of ``write_file``, and EngineError.
    """
    deferred: dict[int, list[Deferred]] = {}

    def tasks() -> Iterator[_Task]:
        for number, (path, plan) in enumerate(files):
            data, deferred[number] = _pickled(plan)
            yield _Task(number, path, plan.size, data)

    with closing(each_answer(workers, _write, tasks(), _lost)) as answers:
        for number, values in answers:
            for each, value in zip(deferred.pop(number), values, strict=True):
                each.value = value
            if progress is not None:
                progress(files[number].plan.size)


def _lost(task: _Task, error: CkptoolError) -> _Written:
    error.path = task.path
    raise error


@as_output_failure()
def _write(task: _Task) -> _Written:
    """Write a file, in a worker."""
    plan, deferred = pickle.loads(task.plan)
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(task.path, flags)
        try:
            write_pieces(plan, fd)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OutputError(f"writing failed: {error.strerror or error}", path=task.path) from error
    return _Written(task.number, [each.value for each in deferred])
