"""Threads for work that releases the GIL: reading, checksumming, hashing and inflating large pieces; their signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar, cast

from ..base.errors import ChangedError
from .sources import Span

#: Bytes read at once: two such buffers fit into the cache of a core.
READ_SIZE: Final = 1 << 20
#: Beyond this many threads, memory bandwidth is the limit.
_MAX_THREADS: Final = 4
#: The number of bytes from which more threads pay off, in items that do not spend their time waiting for the GIL.
_MIN_PARALLEL: Final = 16 << 20
_MIN_ITEM: Final = 256 << 10

Work = TypeVar("Work")
Worker = TypeVar("Worker", bound="Background")

_local = threading.local()


def read_blocks(span: Span) -> Iterator[bytes | bytearray]:
    """Yield the bytes of a span that lies within its source; each chunk is valid until the next one is requested.

    Chunks of a file are read into one buffer per thread, because fresh memory for each costs more than its checksum. So
    one thread must not read two spans alternately. Raises ChangedError if the file shrank.
    """
    source, at, end = span.source, span.offset, span.offset + span.size
    file = source.local_file() if span.size > READ_SIZE else None
    if file is not None:
        block = reused_block()
        while end - at >= READ_SIZE:
            file.read_into(at, block)
            yield block
            at += READ_SIZE
    while at < end:
        data = source.read(at, min(READ_SIZE, end - at))
        if not data:
            raise ChangedError("the file shrank while it was read", path=source.name, next="try again")
        yield data
        at += len(data)


def reused_block() -> bytearray:
    """Return this thread's buffer of ``READ_SIZE`` bytes."""
    if not hasattr(_local, "block") or len(_local.block) != READ_SIZE:
        _local.block = bytearray(READ_SIZE)
    return cast(bytearray, _local.block)


def from_threads(progress: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return a function that several threads may call with numbers of bytes, which ``progress`` gets one by one."""
    lock = threading.Lock()

    def advance(size: int) -> None:
        if progress:
            with lock:
                progress(size)

    return advance


class Background:
    """Work that runs in a separate thread within the context if it is ``worth_it``; otherwise ``finish`` runs it.

    ``work`` is called with an event, and should return early once this is set: at the end of the context.
    """

    def __init__(self, work: Callable[[threading.Event], object], worth_it: bool = True) -> None:
        self._work = work
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._keep_error, daemon=True) if worth_it else None

    def __enter__(self: Worker) -> Worker:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def finish(self) -> None:
        """Wait until the work is done, and raise any error that it raised."""
        if self._thread:
            self._thread.join()
        else:
            self._keep_error()
        if self._error is not None:
            raise self._error

    def _keep_error(self) -> None:
        try:
            self._work(self._stopped)
        except BaseException as error:
            self._error = error


def run_in_threads(
    work: Iterable[Work], do: Callable[[Work], None], sizes: Iterable[int], watched: threading.Event | None = None
) -> None:
    """Call ``do`` for each item of ``work`` in order, in several threads if that pays for items of ``sizes`` bytes.

    Raises the error of a thread; after an error, the other threads stop at their next item. After ^C or another signal
    they are not joined, because an item may take minutes, unless ``watched`` is given: it is then set, and ``do`` must
    check it.
    """
    items = iter(work)
    lock = threading.Lock()
    errors: list[BaseException] = []
    stopped = watched or threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                with lock:
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                do(item)
            except BaseException as error:
                errors.append(error)
                stopped.set()
                if not isinstance(error, Exception):
                    return

    parallel = sum(size for size in sizes if size >= _MIN_ITEM)
    workers = min(_MAX_THREADS, os.cpu_count() or 1) if parallel >= _MIN_PARALLEL else 1
    others = [threading.Thread(target=run, daemon=True) for _ in range(workers - 1)]
    try:
        for thread in others:
            thread.start()
        run()
        for thread in others:
            if watched or all(isinstance(error, Exception) for error in errors):
                thread.join()
    finally:
        stopped.set()
        for thread in others if watched else ():
            if thread.ident:
                thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])


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
