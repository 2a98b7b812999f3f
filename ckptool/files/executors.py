"""What engines have in common: executors of ``concurrent.futures``, and how they call a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from ..base.errors import CkptoolError


class Engine(Executor):
    """An executor that says how work is given to it.

    ``workers`` is how many tasks run at once. A task gets up to ``count`` items, of ``nbytes`` in all. ``ordered`` says
    whether answers come in the order of the items unless one asks for it, ``blames`` whether a WorkerDiedError is that
    of a task alone, and not of another one beside it.
    """

    count: int = 1
    nbytes: int = 0
    ordered: bool = True
    blames: bool = True

    @property
    def workers(self) -> int:
        raise NotImplementedError

    def stop(self) -> None:
        """End at once, whatever is still to be done."""
        raise NotImplementedError


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outcome(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Return (True, what a function returns), or (False, what it raises), as an error that can be pickled."""
    try:
        return True, function(*arguments)
    except (CkptoolError, OSError, MemoryError) as error:
        return False, error  # these have exit codes of their own
    except Exception as error:
        return False, RuntimeError(f"{type(error).__name__}: {error}")
