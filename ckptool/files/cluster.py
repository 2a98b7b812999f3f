"""A Dask cluster as an engine: workers on this machine, or the workers of a running scheduler.

Workers import ckptool and see the same files under the same paths. Dask sends functions and data by pickle, so whoever
can reach a scheduler can run code on its workers. Run it only in a trusted network.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from typing import Any, Final

from ..base.errors import EngineError, WorkerDiedError
from ..base.steps import Setting, advice
from .executors import Engine, outcome
from .processes import signals_blocked

INSTALL: Final = "pip install 'ckptool[dask]'"
#: Seconds to wait for the first answer of a scheduler, and for its first worker.
_CONNECT: Final = 5
_WORKERS: Final = 30
#: Seconds between two checks of a scheduler, and until it counts as lost if it does not answer or has no workers.
_LOOK: Final = 5
_LOST: Final = 60
#: A task costs 5 ms, so each task reads up to this many files, or bytes.
_COUNT: Final = 64
_BYTES: Final = 64 << 20


class Cluster(Engine):
    """An executor that runs tasks on a Dask cluster.

    If the cluster is lost, all unfinished tasks fail with EngineError.
    """

    count = _COUNT
    nbytes = _BYTES
    ordered = False
    blames = False  # tasks that wait in a worker die with it

    def __init__(self, client: Any, address: str, held: ExitStack) -> None:
        self._client, self._address, self._held = client, address, held
        self._lock = threading.Lock()
        self._futures: dict[Future[Any], Any] = {}
        self._error: EngineError | None = None
        self._stopped = False
        self._workers: int = sum(client.nthreads().values())
        client.loop.add_callback(self._watch)

    @property
    def workers(self) -> int:
        return self._workers or 1

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Run a module-level function with plain data; if its worker dies, another one runs it again."""
        future: Future[Any] = Future()
        call = function, arguments, named, _version(), os.getcwd()
        with self._lock:
            if self._error is not None or self._stopped:
                raise self._error or EngineError("the engine was stopped")
            inner = self._client.submit(carry_out, *call, pure=False)
            self._futures[future] = inner
        self._client.loop.add_callback(self._pass_on, future, inner)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel unfinished tasks with ``cancel_futures``; with ``wait``, return when all tasks are done."""
        from concurrent.futures import wait as wait_for

        with self._lock:
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            wait_for(futures)
            self.stop()

    def stop(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._fail(EngineError("the work was stopped before this was done"))
        _close(self._client, 1)
        self._held.close()

    # -- in the client's thread

    async def _pass_on(self, future: Future[Any], inner: Any) -> None:
        """Pass the outcome of a Dask future on to the caller's future, once."""
        try:
            # A result may be lost with the worker that holds it; Dask then computes it again.
            succeeded, result = await inner._result()
        except (asyncio.CancelledError, CancelledError, OSError):  # errors of a task are results
            succeeded, result = False, self._lost("the connection to it was lost")
        except Exception as error:
            succeeded, result = False, _failure(error, self._address)
        with self._lock:
            if self._futures.pop(future, None) is None:
                return  # it has failed with the engine
        if not future.set_running_or_notify_cancel():
            return
        if succeeded:
            future.set_result(result)
        else:
            future.set_exception(result)
        if isinstance(result, EngineError):
            self._fail(result)

    async def _watch(self) -> None:
        """Detect a scheduler that no longer answers, or that has lost all its workers."""
        alone = 0.0
        while not self._stopped and self._error is None:
            await asyncio.sleep(_LOOK)
            try:
                self._workers = sum((await asyncio.wait_for(self._client.scheduler.ncores(), _LOST)).values())
            except (OSError, asyncio.TimeoutError):
                self._fail(self._lost("it does not answer"))
                return
            alone = 0.0 if self._workers else alone + _LOOK
            if alone >= _LOST:
                self._fail(self._lost("it has no workers any more"))

    def _lost(self, why: str) -> EngineError:
        what = f"the scheduler at {self._address} was lost: {why}; what was done so far counts"
        return self._error or EngineError(what, next="start it again, and the command")

    def _fail(self, error: EngineError) -> None:
        """Fail all unfinished tasks with this error."""
        with self._lock:
            if self._error is None and not self._stopped:
                self._error = error
            left = list(self._futures)
            self._futures.clear()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def open_cluster(address: str, jobs: int) -> Cluster:
    """Connect to a scheduler, or start workers on this machine if ``address`` is ""; raises EngineError."""
    with ExitStack() as stack:
        here = not address
        if here:
            _preload()
        try:
            import dask
            import distributed
        except ImportError as error:
            raise EngineError(f"dask is not installed: {error.name} is missing", next=INSTALL) from error
        settings = {
            # A task that kills its worker is retried once. Then the error names its file.
            "distributed.scheduler.allowed-failures": 1,
            "distributed.worker.multiprocessing-method": "forkserver",
            "distributed.comm.timeouts.connect": f"{_CONNECT}s",
            "distributed.admin.tick.limit": "60s",
        }
        stack.enter_context(dask.config.set(settings))
        _silence()
        try:
            if here:
                cluster = _local_cluster(distributed, jobs, stack)
                address, target = cluster.scheduler_address, cluster
            else:
                target = address
            client = _client(distributed, target)
        except Exception as error:  # the address may also be answered by another program
            raise EngineError(_unreachable(address, error), next="") from error
        held = stack.pop_all()
    try:
        if not here:
            client.wait_for_workers(1, timeout=_WORKERS)
    except (OSError, asyncio.TimeoutError) as error:
        _close(client, 1)
        held.close()
        what = f"the scheduler at {address} has had no workers for {_WORKERS} seconds"
        raise EngineError(what, next=f"dask worker {address} --nthreads 1") from error
    return Cluster(client, address, held)


def _client(distributed: Any, target: Any) -> Any:
    return distributed.Client(target, timeout=_CONNECT, set_as_default=False)


def _preload() -> None:
    """Start the process from which workers are forked, so that it imports modules while this process does."""
    from multiprocessing import forkserver, get_context, resource_tracker

    ours = [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]
    get_context("forkserver").set_forkserver_preload(["distributed.nanny", "distributed.worker", *ours])
    resource_tracker.ensure_running()  # it unblocks signals
    with signals_blocked(signal.SIGINT):  # ^C reaches every process of a terminal, and this process ends the others
        forkserver.ensure_running()


def _local_cluster(distributed: Any, jobs: int, stack: ExitStack) -> Any:
    from tempfile import TemporaryDirectory

    folder = stack.enter_context(TemporaryDirectory(prefix="ckptool-dask-", ignore_cleanup_errors=True))
    cluster = distributed.LocalCluster(
        n_workers=jobs,
        threads_per_worker=1,
        memory_limit=0,
        local_directory=folder,
        dashboard_address=None,
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},  # any free port: 8787 may be taken
        silence_logs=_CRITICAL,
    )
    stack.callback(_end, cluster)
    return cluster


def _end(cluster: Any) -> None:
    """Kill the workers of a cluster, even busy ones, because they have nothing to lose."""
    for nanny in list(cluster.workers.values()):
        nanny.auto_restart = False
        if nanny.pid:
            with suppress(OSError):
                os.kill(nanny.pid, signal.SIGKILL)
    _close(cluster, 5)


def _close(what: Any, seconds: float) -> None:
    """Close a client or a cluster whose other end may be gone or busy; it ends with this process at the latest."""
    with suppress(OSError, RuntimeError, asyncio.TimeoutError):
        what.close(timeout=seconds)


_CRITICAL: Final = 50


def _silence() -> None:
    """Silence Dask's logging; our errors report everything important."""
    import logging

    for name in ("distributed", "distributed.client", "distributed.core", "distributed.comm", "tornado.application"):
        logging.getLogger(name).setLevel(_CRITICAL)


def _unreachable(address: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
    if not address:
        return f"no workers could be started: {reason[0]}"
    return f"the scheduler at {address} cannot be reached: {reason[0]}"


def _failure(error: BaseException, address: str) -> Exception:
    """Return our error for a failure of Dask."""
    if type(error).__name__ == "KilledWorker":
        what = "the workers that read it were ended, one after the other: there may not be enough memory"
        return WorkerDiedError(what, next=advice("try it alone, without ", Setting("engine", None)))
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError) or "deserializ" in text:
        what = f"the work cannot be taken at {address}: the scheduler and its workers need ckptool {_version()}"
        return EngineError(what, next=f"pip install ckptool=={_version()}")
    return EngineError(f"the engine at {address} failed: {text}")


def _version() -> str:
    """Return the version of ckptool, whose package was imported before this module."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


# -- in a worker

_WORKING: Final = threading.Lock()


def carry_out(
    function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any], version: str, folder: str
) -> tuple[bool, Any]:
    """Run a call in the caller's working folder, so that relative paths have the same meaning; return its ``outcome``.

    A process has one working folder, so calls in several threads of a worker run one after another.
    """
    from functools import partial
    from platform import node

    if version != _version():
        what = f"a worker on {node()} has ckptool {_version()}, which is not {version}: install the same version"
        return False, EngineError(what, next=f"pip install ckptool=={version}")
    with _WORKING:
        try:
            if os.getcwd() != folder:
                os.chdir(folder)
        except OSError as error:
            what = f"a worker on {node()} has no folder {folder}: workers must see the same files ({error.strerror})"
            return False, EngineError(what)
        collects = gc.isenabled()
        gc.disable()  # millions of small tuples, and few cycles
        try:
            return outcome(partial(function, **named) if named else function, arguments)
        finally:
            if collects:
                gc.enable()
