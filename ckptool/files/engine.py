"""Engines run work on many files, as executors of ``concurrent.futures``: processes on this machine, or a Dask cluster.

Work is a module-level function and plain data, so it can be pickled. If a process dies, its work is run again.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

from ..base.engines import LOCAL, Precomputed, engine_address
from ..base.errors import CkptoolError, EngineError, WorkerDiedError
from .threads import signals_blocked

Item = TypeVar("Item")
Answer = TypeVar("Answer")
#: Opens the executor whose workers do the work. It is opened once more if a worker died and the executor with it.
OpenExecutor: TypeAlias = Callable[[], AbstractContextManager[Executor]]

#: Whether a call succeeded, and its result or error.
_Outcome: TypeAlias = tuple[bool, Any]

#: Answers per worker that may wait for an earlier one. This bounds memory, and lets many small files proceed while a
#: large file before them is still being read.
WAITING: Final = 64
#: How to start processes. A forked process starts in 2 ms, one that imports everything again in 100 ms. Forking is
#: unsafe on macOS, because of the threads in its libraries.
_START: Final = "fork" if sys.platform.startswith("linux") else "spawn"
#: Once this library was used, a forked process cannot read remote files: the threads of the library are not in it.
_UNFORKABLE: Final = "obstore"
#: Signals for the parent, which then ends its workers. ^C reaches every process of a terminal.
_SIGNALS: Final = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def open_engine(spec: str = LOCAL, jobs: int = 0) -> AbstractContextManager[Executor]:
    """Return the engine that ``spec`` names; ``jobs`` is the number of its own workers, 0 for one per core.

    When the context ends, unfinished work stops at once. Raises TargetError for an unknown spec, and EngineError for an
    engine that is not installed or cannot be reached.
    """
    address = engine_address(spec)
    if address is None:
        return _processes(jobs or cores())
    from .cluster import open_cluster  # importing dask takes half a second

    return open_cluster(address, jobs or cores())


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- processes on this machine


@contextmanager
def _processes(jobs: int) -> Iterator[Executor]:
    """Yield a pool of processes; decoding is Python code, which threads would not speed up."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    start = "forkserver" if _START == "fork" and _UNFORKABLE in sys.modules else _START
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context(start), _begin)
    try:
        # Signals are blocked until a worker ignores ^C, because it starts with the handlers of the parent. The threads
        # of the pool keep them blocked, so that the main thread gets them.
        with signals_blocked(*_SIGNALS):
            pool.submit(int)
        yield pool
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()  # it may be busy, and has nothing to lose
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Prepare a worker process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()
    gc.set_threshold(200_000)  # decoding makes millions of small tuples, and few cycles
    gc.enable()


def _end_with_parent() -> None:
    """End this worker when its parent is killed: the pipe that it waits for is also held by the other workers."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# -- answers in order


def each_answer(
    open_executor: OpenExecutor,
    work: Callable[[Item], Answer],
    items: Iterable[Item | Precomputed[Answer]],
    lost: Callable[[Item, CkptoolError], Answer],
) -> Generator[Answer, None, None]:
    """Yield the answer of ``work`` for every item, in order. Items may be endless; memory is bounded.

    If a worker dies, unanswered items are run again one at a time, and ``lost`` makes the answer for an item whose
    worker dies then. Errors of ``work`` and of the engine are raised here.
    """
    rest = iter(items)
    waiting: deque[tuple[Any, Future[_Outcome]]] = deque()
    with ExitStack() as stack:
        executor = stack.enter_context(open_executor())

        def given(item: Any) -> Future[_Outcome]:
            future: Future[_Outcome] = Future()
            if isinstance(item, Precomputed):
                future.set_result((True, item.answer))
                return future
            try:
                return executor.submit(_outcome, work, item)
            except (BrokenExecutor, EngineError) as error:  # answers that arrived earlier still count
                future.set_exception(error)
                return future

        room = WAITING * (getattr(executor, "workers", 0) or getattr(executor, "_max_workers", 0) or cores())
        while True:
            while len(waiting) < room and not (waiting and waiting[0][1].done()) and (more := [*islice(rest, 1)]):
                waiting.append((more[0], given(more[0])))
            if not waiting:
                return
            if not _has_died(waiting[0][1]):
                yield _result(waiting.popleft()[1])
                continue
            # Which item ended its worker is not known. Each of them is run alone, and the others wait.
            wait(future for _, future in waiting)
            while waiting:
                item, future = waiting.popleft()
                if _has_died(future):
                    if isinstance(future.exception(), BrokenExecutor):
                        stack.close()
                        executor = stack.enter_context(open_executor())
                    future = given(item)
                if _has_died(future):
                    what = "the process that read it was ended: there may not be enough memory"
                    yield lost(item, WorkerDiedError(what, next="try it alone, without `--jobs=`"))
                else:
                    yield _result(future)


def _has_died(future: Future[Any]) -> bool:
    """Wait for a task; return whether its worker died. Dask has an error of its own."""
    try:
        error = future.exception()
    except CancelledError:
        return False
    return isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker"


def _result(future: Future[_Outcome]) -> Any:
    """Return the result of a task that has ended, or raise its error."""
    try:
        succeeded, result = future.result()
    except (CancelledError, OSError) as error:  # an error of the work is an outcome
        what = "the connection to the workers was lost; what was done so far counts"
        raise EngineError(what, next="start them again, and the command") from error
    except CkptoolError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        what = f"the engine failed: {type(error).__name__}: {reason}"
        raise EngineError(what, next="its workers need the same version of ckptool") from error
    if not succeeded:
        raise result
    return result


def _outcome(work: Callable[[Item], Answer], item: Item) -> _Outcome:
    """Do the work in a worker; return (True, result) or (False, error)."""
    try:
        return True, work(item)
    except (CkptoolError, OSError, MemoryError) as error:
        return False, error  # these have their own exit codes
    except Exception as error:
        return False, RuntimeError(f"{type(error).__name__}: {error}")  # the error itself may not be picklable
