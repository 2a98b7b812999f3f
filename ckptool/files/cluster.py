"""A Dask cluster as an engine: workers on this machine, or the workers of a running scheduler.

Workers import ckptool and see the same files under the same paths. Dask sends functions and data by pickle, so whoever
can reach a scheduler can run code on its workers. Run it only in a trusted network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

from ..base.errors import EngineError
from .threads import signals_blocked

INSTALL: Final = "pip install 'ckptool[dask]'"
#: Seconds to wait for the first answer of a scheduler, and for its first worker.
_CONNECT: Final = 5
_WORKERS: Final = 30


class Cluster(Executor):
    """An executor whose tasks a Dask cluster runs, in the current folder of this process.

    Dask's own executor loses the errors of tasks.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        #: The number of tasks that run at once.
        self.workers: int = sum(client.nthreads().values()) or 1

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Run a module-level function with plain data; if its worker dies, another one runs it again."""
        future: Future[Any] = Future()
        call = partial(function, *arguments, **named)
        task = self._client.submit(carry_out, call, _version(), os.getcwd(), pure=False)
        self._client.loop.add_callback(_pass_on, future, task)
        return future


async def _pass_on(future: Future[Any], task: Any) -> None:
    """Pass the outcome of a task of Dask on, in the thread of the client."""
    try:
        # A result may be lost with the worker that holds it; Dask then computes it again.
        future.set_result(await task._result())
    except asyncio.CancelledError:
        future.set_exception(CancelledError())
    except Exception as error:
        future.set_exception(error)


@contextmanager
def open_cluster(address: str, jobs: int) -> Iterator[Cluster]:
    """Connect to a scheduler, or start workers on this machine if ``address`` is ""; raises EngineError."""
    with ExitStack() as stack:
        if not address:
            _preload()
        try:
            import dask
            import distributed
        except ImportError as error:
            raise EngineError(f"dask is not installed: {error.name} is missing", next=INSTALL) from error
        settings = {
            # A task that ends its worker is retried once.
            "distributed.scheduler.allowed-failures": 1,
            "distributed.worker.multiprocessing-method": "forkserver",
            "distributed.comm.timeouts.connect": f"{_CONNECT}s",
            "distributed.admin.tick.limit": "60s",
        }
        stack.enter_context(dask.config.set(settings))
        _silence()
        try:
            target = address or _local_cluster(distributed, jobs, stack)
            connect: Any = distributed.Client
            client = connect(target, timeout=_CONNECT, set_as_default=False)
        except Exception as error:  # the address may also be answered by another program
            reason = [*str(error).strip().splitlines(), type(error).__name__][0]
            what = f"the scheduler at {address} cannot be reached" if address else "no workers could be started"
            raise EngineError(f"{what}: {reason}") from error
        stack.callback(_close, client, 1)
        try:
            client.wait_for_workers(1, timeout=_WORKERS)
        except (OSError, asyncio.TimeoutError) as error:
            what = f"the scheduler at {address} has had no workers for {_WORKERS} seconds"
            raise EngineError(what, next=f"dask worker {address} --nthreads 1") from error
        yield Cluster(client)


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
        silence_logs=logging.CRITICAL,
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


def _silence() -> None:
    """Silence Dask's logging; our errors report everything important."""
    for name in ("distributed", "distributed.client", "distributed.core", "distributed.comm", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _version() -> str:
    """Return the version of ckptool, whose package was imported before this module."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


# -- in a worker

_WORKING: Final = threading.Lock()


def carry_out(call: Callable[[], Any], version: str, folder: str) -> Any:
    """Call a function in the caller's working folder, so that relative paths have the same meaning.

    A process has one working folder, so calls in several threads of a worker run one after another.
    """
    from platform import node

    if version != _version():
        what = f"a worker on {node()} has ckptool {_version()}, which is not {version}: install the same version"
        raise EngineError(what, next=f"pip install ckptool=={version}")
    with _WORKING:
        try:
            if os.getcwd() != folder:
                os.chdir(folder)
        except OSError as error:
            what = f"a worker on {node()} has no folder {folder}: workers must see the same files ({error.strerror})"
            raise EngineError(what) from error
        return call()
