"""Code that engines share: the base class of the executors, and how they call a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from ..base.errors import CkptoolError


class Engine(Executor):
    """An executor with hints for how to give it work.

    ``workers`` is the number of tasks that run at once. A task gets up to ``count`` items, and stops at ``nbytes``
    bytes in total. ``ordered`` is the default for returning answers in the order of the items. ``blames`` says that a
    WorkerDiedError is always due to its own task, not to another task in the same worker.
    """

    count: int = 1
    nbytes: int = 0
    ordered: bool = True
    blames: bool = True

    @property
    def workers(self) -> int:
        raise NotImplementedError

    def stop(self) -> None:
        """Stop at once, even if work is left."""
        raise NotImplementedError


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outcome(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Call a function; return (True, its result), or (False, its error) with an error that can be pickled."""
    try:
        return True, function(*arguments)
    except (CkptoolError, OSError, MemoryError) as error:
        return False, error  # these have their own exit codes
    except Exception as error:
        return False, RuntimeError(f"{type(error).__name__}: {error}")
