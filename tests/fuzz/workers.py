"""Processes that judge inputs, each its share, and are replaced when an input ends them."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .cases import Case
from .finds import BOUNDS, VALID_FAILS, Find, Verdict

__all__ = ["Judged", "work"]

_SECONDS = 60  # of the clock, for a worker that neither answers nor ends
_CASES = 2000  # after so many a worker is replaced: what loads leave in memory must not count against later inputs


class Judged(NamedTuple):
    case: Case
    verdict: Verdict


class Worker(NamedTuple):
    process: int
    answers: int
    step: mmap.mmap
    number: int


def work(
    plan: Callable[[int], Case | None],
    judge: Callable[[Case, int, Callable[[str], None]], Verdict],
    *,
    workers: int,
    until: float,
) -> Iterator[Judged]:
    """Judge the cases ``plan(0)``, ``plan(1)``, ... until it gives None or the clock says ``until``."""
    running: dict[int, Worker] = {}
    for number in range(workers):
        _start(running, number, number, workers, plan, judge, until)
    while running:
        ready, _, _ = select.select([worker.answers for worker in running.values()], [], [], 1)
        for number, worker in list(running.items()):
            if worker.answers in ready:
                found = _received(worker.answers)
                if found is not None:
                    yield from found
                    continue
                # It ended: all was done, it is to be replaced, or an input ended it.
                at, begun, words = _now(worker.step)
                _, status = os.waitpid(worker.process, 0)
                os.close(worker.answers)
                del running[number]
                if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
                    if at >= 0:
                        _start(running, number, at, workers, plan, judge, until)
                    continue
                case = plan(at)
                assert case is not None
                yield Judged(case, _ended(words, f"the process ended ({_reason(status)})"))
                _start(running, number, at + workers, workers, plan, judge, until)
            else:
                at, begun, _ = _now(worker.step)
                if begun and time.monotonic() - begun > _SECONDS:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.process, signal.SIGKILL)


def _reason(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _ended(words: str, how: str) -> Verdict:
    """The verdict about an input that ended the process: whose fault is it?"""
    if words.startswith(("ckptool", "edits", "values")):
        return Verdict(finds=(Find(BOUNDS, how, words.partition(" ")[0]),))
    if "valid=True" in words and "loads=False" not in words:
        return Verdict(True, True, finds=(Find(VALID_FAILS, "valid", f"{how} in the reader"),))
    return Verdict(words=("a reader died",))


def _start(
    running: dict[int, Worker],
    number: int,
    first: int,
    stride: int,
    plan: Callable[[int], Case | None],
    judge: Callable[[Case, int, Callable[[str], None]], Verdict],
    until: float,
) -> None:
    reader, writer = os.pipe()
    step = mmap.mmap(-1, 4096)
    process = os.fork()
    if not process:
        os.close(reader)
        with contextlib.suppress(BaseException):
            _serve(number, first, stride, plan, judge, until, writer, step)
        os._exit(3)
    os.close(writer)
    running[number] = Worker(process, reader, step, number)


def _serve(
    number: int,
    first: int,
    stride: int,
    plan: Callable[[int], Case | None],
    judge: Callable[[Case, int, Callable[[str], None]], Verdict],
    until: float,
    writer: int,
    step: mmap.mmap,
) -> None:
    """The child: it never returns."""
    # What a load or a crash prints is of no interest.
    quiet = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("FUZZ_TRACE"):
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    found: list[Judged] = []
    at = first
    sent = time.monotonic()
    for _ in range(_CASES):
        case = plan(at) if time.monotonic() < until else None
        if case is None:
            at = -1
            break
        begun = time.monotonic()
        _put(step, at, begun, "building")

        def tell(words: str, at: int = at, begun: float = begun) -> None:
            _put(step, at, begun, words)

        try:
            found.append(Judged(case, judge(case, number, tell)))
        except BaseException as error:
            found.append(
                Judged(
                    case,
                    Verdict(words=(f"the fuzzer failed: {type(error).__name__}: {str(error)[:150]} at {_line()}",)),
                )
            )
        at += stride
        if len(found) >= 50 or time.monotonic() - sent > 0.5:
            _send(writer, found)
            found, sent = [], time.monotonic()
    _send(writer, found)
    _put(step, at, 0.0, "")
    os._exit(0)


def _line() -> str:
    trace = sys.exc_info()[2]
    lines = []
    while trace is not None:
        lines.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(lines[-4:])


def _put(step: mmap.mmap, at: int, begun: float, words: str) -> None:
    text = words.encode()[:200]
    step.seek(0)
    step.write(struct.pack("<qdI", at, begun, len(text)) + text)


def _now(step: mmap.mmap) -> tuple[int, float, str]:
    at, begun, size = struct.unpack_from("<qdI", step, 0)
    return at, begun, step[20 : 20 + size].decode("utf-8", "replace")


def _send(fd: int, found: list[Judged]) -> None:
    data = pickle.dumps(found)
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(fd, view) :]


def _received(fd: int) -> list[Judged] | None:
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
