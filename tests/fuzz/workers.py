"""Processes that judge inputs, each its share, and are replaced when an input ends them."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import NamedTuple

from .cases import Case
from .finds import BOUNDS, VALID_FAILS, Find, Verdict

_SECONDS = 60  # of the clock, for a worker that neither answers nor ends
_CASES = 2000  # after so many a worker is replaced: what loads leave in memory must not count against later inputs
_FORK = get_context("fork")

Plan = Callable[[int], Case | None]
Judge = Callable[[Case, int, Callable[[str], None]], Verdict]


class Judged(NamedTuple):
    case: Case
    verdict: Verdict


@dataclass
class _Worker:
    """A process: the number of its next case, what it does with it and since when, and whether all is done."""

    number: int
    process: ForkProcess
    at: int
    step: str = ""
    since: float = 0.0
    done: bool = False


def work(plan: Plan, judge: Judge, *, workers: int, until: float = float("inf")) -> Iterator[Judged]:
    """Judge the cases ``plan(0)``, ``plan(1)``, ... until it gives None or the clock says ``until``."""
    running: dict[Connection, _Worker] = {}

    def start(number: int, first: int) -> None:
        answers, there = _FORK.Pipe(duplex=False)
        shares = range(first, first + _CASES * workers, workers)
        process = _FORK.Process(target=_serve, args=(plan, judge, shares, number, until, there))
        process.start()
        there.close()
        running[answers] = _Worker(number, process, first)  # type: ignore[index]

    for number in range(workers):
        start(number, number)
    while running:
        for answers in wait([*running], 1):
            worker = running[answers]  # type: ignore[index]
            try:
                message = answers.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):  # it ended: all was done, it is to be replaced, or an input ended it
                del running[answers]  # type: ignore[arg-type]
                worker.process.join()
                if worker.process.exitcode:
                    case = plan(worker.at)
                    assert case is not None
                    yield Judged(case, _ended(worker))
                    worker.at += workers
                if not worker.done:
                    start(worker.number, worker.at)
                continue
            if isinstance(message, Judged):
                worker.at, worker.step = worker.at + workers, ""
                yield message
            elif message is None:
                worker.done = True
            else:
                worker.since = worker.since if worker.step else time.monotonic()
                worker.step = message
        for worker in running.values():
            if worker.step and time.monotonic() - worker.since > _SECONDS:
                worker.process.kill()


def _ended(worker: _Worker) -> Verdict:
    """The verdict about an input that ended the process: whose fault is it?"""
    code = worker.process.exitcode or 0
    how = f"the process ended ({signal.Signals(-code).name if code < 0 else f'exit {code}'})"
    if worker.step.startswith(("ckptool", "edits", "values")):
        return Verdict(finds=(Find(BOUNDS, how, worker.step.partition(" ")[0]),))
    if "valid=True" in worker.step and "loads=False" not in worker.step:
        return Verdict(True, True, finds=(Find(VALID_FAILS, "valid", f"{how} in the reader"),))
    return Verdict(words=("a reader died",))


def _serve(plan: Plan, judge: Judge, shares: range, worker: int, until: float, answers: Connection) -> None:
    """The child: it never returns."""
    if not os.environ.get("FUZZ_TRACE"):  # what a load or a crash prints is of no interest
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    for at in shares:
        case = plan(at) if time.monotonic() < until else None
        if case is None:
            answers.send(None)
            break
        answers.send("building")
        try:
            verdict = judge(case, worker, answers.send)
        except BaseException as error:
            lines = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            told = f"the fuzzer failed: {type(error).__name__}: {str(error)[:150]} at {' '.join(lines[-4:])}"
            verdict = Verdict(words=(told,))
        answers.send(Judged(case, verdict))
    answers.close()
    os._exit(0)
