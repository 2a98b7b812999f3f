"""Work done in a child process that may hang, die, or ask for too much memory, without taking the runner along."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Outcome", "farm"]

#: A child is replaced after so many cases: what Python keeps in memory must not count against a later case.
_CASES = 400


class Outcome(NamedTuple):
    """What became of a case: its number, the result of the function, or ``failed`` in words, and the seconds.

    ``where`` is the place in ckptool that failed, to tell one bug from another.
    """

    number: int
    result: Any
    failed: str
    where: str
    seconds: float


def farm(
    cases: Iterator[Any],
    work: Callable[[Any], Any],
    *,
    seconds: float = 1.0,
    memory: int = 256 << 20,
    until: float = float("inf"),
) -> Iterator[tuple[Any, Outcome]]:
    """Do ``work`` on each case in a child, in turn: at most ``seconds`` of CPU time and so much more memory for each.

    Ends with the cases, or when the clock says ``until``. A case that breaks a bound is an outcome like any other.
    """
    number = 0
    exhausted = False
    while not exhausted:
        requests, answers = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.close(requests[1])
            os.close(answers[0])
            _serve(requests[0], answers[1], work, seconds, memory)
        os.close(requests[0])
        os.close(answers[1])
        try:
            for _ in range(_CASES):
                case = None if time.monotonic() > until else next(cases, None)
                if case is None:
                    exhausted = True
                    break
                outcome = _ask(requests[1], answers[0], number, case, seconds)
                number += 1
                yield case, outcome
                if outcome.failed.startswith(("took", "died")):
                    break
        finally:
            os.close(requests[1])
            os.close(answers[0])
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _ask(requests: int, answers: int, number: int, case: Any, seconds: float) -> Outcome:
    _send(requests, (number, case))
    # The child stops itself after so much CPU time. This is for one that sleeps, or cannot be stopped.
    ready, _, _ = select.select([answers], [], [], 10 * seconds + 10)
    if not ready:
        return Outcome(number, None, f"took more than {10 * seconds + 10:g} s and did not answer", "", 10 * seconds)
    found = _receive(answers)
    if found is None:
        return Outcome(number, None, "died", "", 0)
    assert isinstance(found, Outcome)
    return found


class _TooLong(BaseException):
    """More CPU time than a case may take; no ``except Exception`` may swallow it."""


def _too_long(_number: int, _frame: object) -> None:
    raise _TooLong


def _serve(requests: int, answers: int, work: Callable[[Any], Any], seconds: float, memory: int) -> None:
    """The child: it never returns."""
    # CPU time, not that of the clock: other processes on this machine are no fault of a case.
    signal.signal(signal.SIGPROF, _too_long)
    limit = _address_space() + memory
    while (found := _receive(requests)) is not None:
        number, case = found
        begun = time.process_time()
        result, failed, where = None, "", ""
        try:
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                result = work(case)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except _TooLong as error:
            failed, where = f"took more than {seconds:g} s", _place(error)
        except MemoryError as error:
            failed, where = f"needs more than {memory >> 20} MiB", _place(error)
        except BaseException as error:
            failed, where = f"{type(error).__name__}: {str(error)[:200]}", _place(error)
        _send(answers, Outcome(number, result, failed, where, time.process_time() - begun))
    os._exit(0)


def _place(error: BaseException) -> str:
    """The innermost line of ckptool that is to blame: "pickles/machine.py:120"."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ckptool/" in frame.filename]
    if not lines:
        return "tests"
    return f"{lines[-1].filename.rpartition('/ckptool/')[2]}:{lines[-1].lineno}"


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _send(fd: int, value: Any) -> None:
    data = pickle.dumps(value)
    view = memoryview(len(data).to_bytes(8, "little") + data)
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(fd, view) :]


def _receive(fd: int) -> Any:
    """What the other side sent; None when it is gone."""
    head = _exactly(fd, 8)
    data = _exactly(fd, int.from_bytes(head, "little")) if head else b""
    return pickle.loads(data) if data else None


def _exactly(fd: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
