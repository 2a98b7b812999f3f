"""At most so much processor time and memory for a piece of work in this process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator

__all__ = ["MEMORY", "SECONDS", "TooLong", "bounded"]

SECONDS = 10.0
MEMORY = 512 << 20


class TooLong(BaseException):
    """More processor time than allowed; no ``except Exception`` may swallow it."""


def _too_long(_number: int, _frame: object) -> None:
    raise TooLong


@contextlib.contextmanager
def bounded(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Raises TooLong after so much processor time, MemoryError for so much more address space. Not to be nested."""
    signal.signal(signal.SIGPROF, _too_long)
    with open("/proc/self/statm") as lines:
        space = int(lines.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (space + memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
