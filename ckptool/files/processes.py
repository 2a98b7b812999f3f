"""A pool of processes on this machine that loses no work when one of them dies."""

from __future__ import annotations

import gc
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from time import monotonic
from typing import Any, Final

from ..base.errors import EngineError, WorkerDiedError
from ..base.steps import Setting, advice
from .executors import Engine, outcome

#: How to start the first processes, and later ones. A forked process starts in 2 ms; one that imports everything again
#: takes 100 ms. Forking is unsafe on macOS, because of the threads in its libraries. It is also unsafe here once a
#: process has died: the thread that starts the replacement does not know which locks other threads hold.
_START: Final = ("fork", "forkserver") if sys.platform.startswith("linux") else ("spawn", "spawn")
#: Once this library was used, a forked process cannot read remote files: the threads of the library are not in it.
_UNFORKABLE: Final = "obstore"
#: The most short tasks that a process holds: the one it is running, and the next one, so that it need not wait.
_AHEAD: Final = 2
#: A task is short up to this many seconds. It fits into a pipe up to this many bytes, so that sending it does not
#: block.
_SHORT: Final = 0.05
_FITS: Final = 1 << 14
#: Tasks between two garbage collections.
_TIDY: Final = 1000
#: Seconds that a terminated process has to end.
_PATIENCE: Final = 2.0
#: Signals for the parent, which then ends its workers. ^C reaches every process of a terminal.
_SIGNALS: Final = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Task:
    """A pickled call; ``deaths`` counts the processes that died while running it."""

    def __init__(self, future: Future[Any], function: int, call: bytes, arguments: bytes) -> None:
        self.future = future
        self.function = function
        self.call = call
        self.arguments = arguments
        self.begun = False
        self.deaths = 0


class _Worker:
    """A process, the pipe to it, and its unanswered tasks; ``function`` is the number of the last function sent."""

    def __init__(self, process: Any, pipe: Any) -> None:
        self.process = process
        self.pipe = pipe
        self.tasks: deque[_Task] = deque()
        self.function = -1
        self.begun = 0.0


class ProcessPool(Engine):
    """Up to ``workers`` processes. A task whose process died is run once more, by another process.

    Decoding is Python code, which threads would not speed up. If the second process also dies, the future of the task
    gets a WorkerDiedError.
    """

    def __init__(self, workers: int) -> None:
        self._most = workers
        # Held whenever a process is forked, and by the thread whenever it is not waiting. So a new process never starts
        # in the middle of a change.
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._tasks: deque[_Task] = deque()
        self._workers: list[_Worker] = []
        self._last: tuple[object, int, bytes] = (None, -1, b"")
        self._numbers = count()
        self._short = False
        self._ending = False
        self._thread: threading.Thread | None = None
        self._wake: Any = None
        self._stopped = False

    @property
    def workers(self) -> int:
        return self._most

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Run a call; the function and its arguments must be picklable."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ending:
                raise RuntimeError("the pool has ended")
            if self._last[0] is not function:
                self._last = function, next(self._numbers), pickle.dumps(function)
            _, number, call = self._last
            self._tasks.append(_Task(future, number, call, pickle.dumps((arguments, named))))
            self._give(_START[_UNFORKABLE in sys.modules])
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks; with ``wait``, return when all are done."""
        with self._lock:
            self._ending = True
            if cancel_futures:
                for task in self._tasks:
                    task.future.cancel()
            while wait and not self._stopped and (self._tasks or any(worker.tasks for worker in self._workers)):
                self._idle.wait()
        if wait:
            self.stop()

    def stop(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._ending = self._stopped = True
            left = [*self._tasks, *(task for worker in self._workers for task in worker.tasks)]
            self._tasks.clear()
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.process.terminate()
            if self._wake is not None:
                self._wake.send_bytes(b"")
            self._idle.notify_all()
        for task in left:
            if not task.future.cancel() and not task.future.done():
                task.future.set_exception(EngineError("the work was stopped before this was done"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for worker in workers:
            worker.process.join(_PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()

    # -- with the lock held

    def _give(self, start: str) -> None:
        """Send tasks to processes. Each process gets one task before any gets a second, so that large files are read in
        parallel.
        """
        while self._tasks:
            worker = min(self._workers, key=lambda worker: len(worker.tasks), default=None)
            if (worker is None or worker.tasks) and len(self._workers) < self._most:
                worker = None
            elif worker is not None and worker.tasks:
                fits = self._short and len(self._tasks[0].arguments) + len(self._tasks[0].call) <= _FITS
                if len(worker.tasks) >= _AHEAD or not fits:
                    return
            task = self._tasks.popleft()
            if not (task.begun or task.future.set_running_or_notify_cancel()):
                self._idle.notify_all()
                continue
            task.begun = True
            if worker is None:
                worker = self._start(start)
            if not worker.tasks:
                worker.begun = monotonic()
            worker.tasks.append(task)
            known = worker.function == task.function
            worker.function = task.function
            with suppress(OSError):  # it has died, which is noticed when reading from it
                worker.pipe.send_bytes(pickle.dumps((b"" if known else task.call, task.arguments)))

    def _start(self, start: str) -> _Worker:
        import multiprocessing

        context: Any = multiprocessing.get_context(start)
        ours, theirs = context.Pipe()
        # A forked process also inherits our ends of all pipes. Unless it closes them, the other processes never see
        # them closed.
        inherited = [ours, *(worker.pipe for worker in self._workers)] if start == "fork" else []
        process = context.Process(target=_serve, args=(theirs, inherited), daemon=True)
        # Signals are blocked until the worker has its own handlers, because it starts with the parent's.
        with signals_blocked(*_SIGNALS), _signals_kept_blocked():
            process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        if self._thread is None:
            ear, self._wake = context.Pipe(duplex=False)
            self._thread = threading.Thread(target=self._listen, args=(ear,), daemon=True)
            with signals_blocked(*_SIGNALS):  # signals are for the main thread
                self._thread.start()
        else:
            self._wake.send_bytes(b"")
        return worker

    # -- in the thread

    def _listen(self, ear: Any) -> None:
        """Receive answers, and send the next tasks, until the pool is stopped."""
        try:
            self._take_all(ear)
        except Exception as error:  # for example, no other process can be started
            with self._lock:
                left = [*self._tasks, *(task for worker in self._workers for task in worker.tasks)]
                self._tasks.clear()
                self._ending = True
            for task in left:
                if not task.future.cancel() and not task.future.done():
                    task.future.set_exception(error)
        finally:
            ear.close()

    def _take_all(self, ear: Any) -> None:
        from selectors import EVENT_READ, DefaultSelector

        with DefaultSelector() as selector:
            selector.register(ear, EVENT_READ)
            known: set[_Worker] = set()
            while True:
                with self._lock:
                    if self._stopped:
                        return
                    for worker in self._workers:
                        if worker not in known:
                            selector.register(worker.pipe, EVENT_READ, worker)
                            known.add(worker)
                for key, _ in selector.select():
                    if key.data is None:
                        ear.recv_bytes()
                    elif not self._take(key.data):
                        known.discard(key.data)
                        selector.unregister(key.data.pipe)
                        key.data.pipe.close()

    def _take(self, worker: _Worker) -> bool:
        """Receive the answer of a process; return whether the process is alive."""
        try:
            data = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            data = None
        with self._lock:
            if self._stopped:
                return data is not None
            if data is None:
                self._bury(worker)
                return False
            task = worker.tasks.popleft()
            now = monotonic()
            self._short = now - worker.begun < _SHORT
            worker.begun = now
            self._give(_START[1])
            succeeded, result = pickle.loads(data)
            self._idle.notify_all()
        if succeeded:
            task.future.set_result(result)
        else:
            task.future.set_exception(result)
        return True

    def _bury(self, worker: _Worker) -> None:
        """Requeue the tasks of a dead worker; retry the one it was running once, in a new process."""
        self._workers.remove(worker)
        worker.process.join(_PATIENCE)  # until then it holds the locks of its unfinished outputs
        task = worker.tasks.popleft() if worker.tasks else None
        self._tasks.extendleft(reversed(worker.tasks))
        if task is not None:
            task.deaths += 1
            if task.deaths == 1:
                self._tasks.appendleft(task)
            else:
                task.future.set_exception(_death(worker))
        self._give(_START[1])
        self._idle.notify_all()


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals, also in processes that start in this context; they are delivered afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_kept_blocked() -> Iterator[None]:
    """Keep the resource tracker of multiprocessing from unblocking signals in the thread that starts it.

    A signal that comes meanwhile would reach this thread, and the main thread would not wake up to handle it.
    """
    from multiprocessing import resource_tracker

    before = getattr(resource_tracker, "_HAVE_SIGMASK", False)
    setattr(resource_tracker, "_HAVE_SIGMASK", False)  # noqa: B010
    try:
        yield
    finally:
        setattr(resource_tracker, "_HAVE_SIGMASK", before)  # noqa: B010


def _death(worker: _Worker) -> WorkerDiedError:
    """Return the error for the task that a process was running when it died, most likely because memory ran out."""
    code = worker.process.exitcode or 0
    name = signal.Signals(-code).name if -code in {*signal.Signals} else ""
    how = f" by {name}" if name else f" with exit code {code}" if code else ""
    what = f"the process that read it was ended{how}: there may not be enough memory"
    return WorkerDiedError(what, next=advice("try it alone, without ", Setting("jobs", None)))


# -- in a process of the pool


def _serve(pipe: Any, inherited: Sequence[Any]) -> None:
    """Run calls until the parent ends this process, or ends itself. ``inherited`` are pipes of other workers, to be
    closed.
    """
    for other in inherited:
        other.close()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    gc.disable()  # millions of small tuples, and few cycles
    function: Any = None
    try:
        for number in count(1):
            if number % _TIDY == 0:
                gc.collect()
            call, packed = pickle.loads(pipe.recv_bytes())
            if call:
                function = pickle.loads(call)
            arguments, named = pickle.loads(packed)
            answer = outcome(_called(function, named), arguments)
            try:
                data = pickle.dumps(answer)
            except Exception as error:
                data = pickle.dumps((False, RuntimeError(f"the answer cannot be sent: {error}")))
            pipe.send_bytes(data)
    except (EOFError, OSError):
        return


def _called(function: Any, named: dict[str, Any]) -> Any:
    from functools import partial

    return partial(function, **named) if named else function
