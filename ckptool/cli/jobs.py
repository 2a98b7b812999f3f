"""Work on many files, one after the other or several at once, with the answers in the order of the files."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, count, islice
from typing import Any, Final, NamedTuple, TypeVar

import click

from ..base.errors import CkptoolError, UnreadableError

Answer = TypeVar("Answer")
Command = TypeVar("Command", bound=Callable[..., Any])

#: Files given to a process at once: the one that it reads, and the next, so that it need not wait.
_AHEAD: Final = 2
#: Answers per process that may wait for an earlier one: this bounds memory, and a large file before many small ones
#: does not delay them.
_WAITING: Final = 64
#: A forked process starts in 2 ms, one that imports everything again in 100. Forking is unsafe on macOS only, because
#: of the threads of its libraries.
_START: Final = "fork" if sys.platform.startswith("linux") else "spawn"
#: Files between two garbage collections.
_TIDY: Final = 1000
#: Seconds that a terminated process has to end.
_PATIENCE: Final = 2.0


def jobs_option(command: Command) -> Command:
    # Measured with inspect, 2 cores, 1,000 checkpoints of 5 tensors: 0.49 s with one process, 0.38 s with two; of 60
    # tensors: 2.2 and 1.2 s. The default is one: most calls have a few files, and a tool should not take every core of
    # a shared machine unasked.
    text = "Files at once; 0: one per core."
    return click.option("--jobs", type=click.IntRange(min=0), default=1, show_default=True, help=text)(command)


def answers(
    work: Callable[[str], Answer],
    files: Iterable[str | UnreadableError],
    jobs: int,
    lost: Callable[[str, CkptoolError], Answer],
) -> Generator[Answer, None, None]:
    """Yield the answer of ``work`` for every file, in order, from up to ``jobs`` processes (0: one per core).

    ``lost`` makes the answer for an error in place of a file, and for a file whose process died. Errors of ``work`` are
    raised here. The processes have ended when the generator has.
    """
    jobs = jobs or _cores()
    rest = iter(files)
    first = list(islice(rest, 2 if jobs > 1 else 0))
    if len(first) == 2:
        yield from _at_once(work, chain(first, rest), jobs, lost)
        return
    for number, file in enumerate(chain(first, rest), 1):
        _tidy(number)
        yield work(file) if isinstance(file, str) else lost(file.path, file)


def each_input(
    work: Callable[[str], Answer], paths: Sequence[str], jobs: int
) -> Generator[tuple[str, Answer | CkptoolError], None, None]:
    """Yield the answer of ``work``, or its error, for every checkpoint of the files, folders and globs."""
    from ..formats.checkpoint_search import find_checkpoints

    files = (item if isinstance(item, UnreadableError) else item.path for item in find_checkpoints(paths))
    with closing(answers(partial(_attempt, work), files, jobs, lambda path, error: (path, error))) as every:
        yield from every


def _attempt(work: Callable[[str], Answer], path: str) -> tuple[str, Answer | CkptoolError]:
    try:
        return path, work(path)
    except CkptoolError as error:
        return path, error


def _tidy(number: int) -> None:
    """Collect garbage now and then: the collector is off (see ``main``), and indented JSON leaves a few cycles."""
    if number % _TIDY == 0:
        gc.collect()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class FolderFile(str):
    """A file of a folder that is no checkpoint by its content, nor named by the user: it is looked at, no more."""


class _Worker(NamedTuple):
    """A process, the pipe to it, and the files that it has not answered yet: (number, path)."""

    process: Any
    pipe: Any
    tasks: deque[tuple[int, str]]


def _at_once(
    work: Callable[[str], Answer],
    files: Iterable[str | UnreadableError],
    jobs: int,
    lost: Callable[[str, CkptoolError], Answer],
) -> Generator[Answer, None, None]:
    """Yield the answers of several processes: decoding is Python code, which threads would not speed up."""
    from multiprocessing.connection import wait

    numbered = enumerate(files)
    again: deque[tuple[int, str]] = deque()
    done: dict[int, Answer] = {}
    workers: list[_Worker] = []
    at = taken = 0

    def next_task() -> tuple[int, str] | None:
        """Return the next file to read, None if there is none or too many answers wait for the one at ``at``."""
        nonlocal taken
        while not again and taken < at + _WAITING * jobs:
            number, file = next(numbered, (-1, ""))
            if number < 0:
                return None
            taken += 1
            if isinstance(file, str):
                return number, file
            done[number] = lost(file.path, file)
        return again.popleft() if again else None

    try:
        while True:
            while True:
                # One file for each process before a second one for any: two large files are read at the same time.
                worker = min(workers, key=lambda worker: len(worker.tasks), default=None)
                if (worker is None or worker.tasks) and len(workers) < jobs:
                    worker = None
                elif worker is None or len(worker.tasks) >= _AHEAD:
                    break
                task = next_task()
                if task is None:
                    break
                if worker is None:
                    worker = _started(work)
                    workers.append(worker)
                worker.tasks.append(task)
                _send(worker, task[1])
            before = at
            while at in done:
                yield done.pop(at)
                at += 1
            busy = {worker.pipe: worker for worker in workers if worker.tasks}
            if not busy and at == before:
                return  # nothing is left to do
            if at > before:
                continue  # there is room for more
            for pipe in wait(list(busy)):
                worker = busy[pipe]
                number, path = worker.tasks.popleft()
                try:
                    succeeded, result = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    again.extend(worker.tasks)
                    done[number] = lost(path, _death(worker, path))
                    continue
                if not succeeded:
                    raise result
                done[number] = result
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.pipe.close()
        for worker in workers:
            worker.process.join(_PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


#: Signals for the parent, which then ends its workers: ^C reaches every process of a terminal.
_SIGNALS: Final = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _started(work: Callable[[str], Any]) -> _Worker:
    import multiprocessing

    context: Any = multiprocessing.get_context(_START)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs), daemon=True)
    # Signals are blocked until the worker has its own handlers: it starts with those of the parent.
    _mask_signals(signal.SIG_BLOCK)
    try:
        process.start()
    finally:
        _mask_signals(signal.SIG_UNBLOCK)
    theirs.close()
    return _Worker(process, ours, deque())


def _mask_signals(how: int) -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(how, _SIGNALS)


def _serve(work: Callable[[str], Any], pipe: Any) -> None:
    """Run a worker until its parent ends it, or has ended itself."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    _mask_signals(signal.SIG_UNBLOCK)
    gc.disable()  # as in the parent: see ``main``
    try:
        for number in count(1):
            _tidy(number)
            path = pipe.recv()
            try:
                answer = (True, work(path))
            except (CkptoolError, OSError, MemoryError) as error:
                answer = (False, error)  # these have exit codes of their own
            except Exception as error:
                answer = (False, RuntimeError(f"{type(error).__name__}: {error}"))
            pipe.send(answer)
    except (EOFError, OSError):
        return


def _send(worker: _Worker, path: str) -> None:
    try:
        worker.pipe.send(path)
    except OSError:
        return  # it has died, which is noticed when reading from it


def _death(worker: _Worker, path: str) -> CkptoolError:
    """Return the error for the file that a process was reading when it died, most likely for lack of memory."""
    worker.pipe.close()
    worker.process.join(_PATIENCE)
    code = worker.process.exitcode or 0
    name = signal.Signals(-code).name if -code in {*signal.Signals} else ""
    how = f" by {name}" if name else f" with exit code {code}" if code else ""
    what = f"the process that read it was ended{how}: there may not be enough memory"
    return UnreadableError(what, path=path, next="try it alone, without --jobs")
