"""Several threads for what leaves Python's lock alone: reading, summing, hashing, inflating large pieces."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from ..base.errors import ChangedError
from .sources import FileSource, Span

#: Bytes read in one go: two of them stay in the cache of a core.
BLOCK: Final = 1 << 20
#: More threads than these do not read faster than memory gives.
_THREADS: Final = 4
#: Bytes from which on another thread is worth its start.
_WORTH_IT: Final = 16 << 20

Work = TypeVar("Work")

_kept = threading.local()


def blocks(span: Span) -> Iterator[bytes | bytearray]:
    """The bytes of a span that is all there, in pieces; each is good until the next one is asked for.

    The pieces of a file are read into one buffer a thread: fresh memory for each costs more than a checksum of it.
    Two spans must not be read in turn by one thread. Raises ChangedError where the file shrank.
    """
    source, at, end = span.source, span.offset, span.offset + span.size
    if isinstance(source, FileSource) and span.size > BLOCK:
        if not hasattr(_kept, "block"):
            _kept.block = bytearray(BLOCK)
        while end - at >= BLOCK:
            source.read_into(at, _kept.block)
            yield _kept.block
            at += BLOCK
    while at < end:
        data = source.read(at, min(BLOCK, end - at))
        if not data:
            raise ChangedError("the file shrank while it was read", path=source.name, next="try again")
        yield data
        at += len(data)


def in_threads(work: Iterable[Work], do: Callable[[Work], None], nbytes: int) -> None:
    """Do all of the work, ``nbytes`` of reading, in its order; by several threads where that pays.

    Raises what a thread raised, and after an error the others stop at their next piece of work. They are not waited
    for after ^C or another signal: that piece may take minutes.
    """
    items = iter(work)
    lock = threading.Lock()
    failed: list[BaseException] = []
    stopped = threading.Event()

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
                failed.append(error)
                stopped.set()
                if not isinstance(error, Exception):
                    return

    workers = min(_THREADS, os.cpu_count() or 1) if nbytes >= _WORTH_IT else 1
    others = [threading.Thread(target=run, daemon=True) for _ in range(workers - 1)]
    try:
        for thread in others:
            thread.start()
        run()
        for thread in others:
            if all(isinstance(error, Exception) for error in failed):
                thread.join()
    finally:
        stopped.set()
    if failed:
        raise next((error for error in failed if not isinstance(error, Exception)), failed[0])
