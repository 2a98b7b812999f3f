"""Let other processes write the files of a staged folder: one task for each file, with its plan as a pickle.

The files have their full size from the start. A task writes the same bytes each time, however many processes run it.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import BytesIO
from typing import Any

from ...base.errors import CkptoolError, OutputError
from ..engine import OpenExecutor, each_answer
from ..sources import Deferred, Plan
from .copying import READ_WRITE, Progress, as_output_failure, write_pieces


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


def write_by(workers: OpenExecutor, files: Sequence[tuple[str, Plan]], progress: Progress | None = None) -> None:
    """Let ``workers`` write files, by their paths, that exist in their full size.

    The workers start here, so not for a refused output. Raises the errors of ``write_file``, and EngineError.
    """
    deferred: deque[list[Deferred]] = deque()

    def tasks() -> Iterator[tuple[str, bytes]]:
        for path, plan in files:
            data, numbers = _pickled(plan)
            deferred.append(numbers)
            yield path, data

    with closing(each_answer(workers, _write, tasks(), _lost)) as answers:
        for (_, plan), values in zip(files, answers, strict=True):
            for each, value in zip(deferred.popleft(), values, strict=True):
                each.value = value
            if progress is not None:
                progress(plan.size)


def _lost(task: tuple[str, bytes], error: CkptoolError) -> list[int]:
    error.path = task[0]
    raise error


@as_output_failure()
def _write(task: tuple[str, bytes]) -> list[int]:
    """Write a file, given by its path and the pickle of its plan, in a worker; return the plan's deferred numbers."""
    path, data = task
    plan, deferred = pickle.loads(data)
    try:
        fd = os.open(path, READ_WRITE)
        try:
            write_pieces(plan, fd)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error
    return [each.value for each in deferred]
