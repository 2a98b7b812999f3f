"""Engines run work on many files, as executors of ``concurrent.futures``.

``local`` is a pool of processes on this machine (``processes.py``), ``dask`` a Dask cluster (``cluster.py``). Work is a
module-level function and plain data, so it can be pickled. If a process dies, its work is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Final, TypeVar

from ..base.engines import LOCAL, Precomputed, engine_address
from ..base.errors import CkptoolError, EngineError, WorkerDiedError
from .executors import Engine, cores

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: Answers per worker that may wait for an earlier one. This bounds memory, and lets many small files proceed while a
#: large file before them is still being read.
WAITING: Final = 64


@contextmanager
def open_engine(spec: str = LOCAL, jobs: int = 0) -> Iterator[Engine]:
    """Yield the engine that ``spec`` names; ``jobs`` is the number of its own workers, 0 for one per core.

    When the context ends, all work is done; if it ends with an exception, work stops at once. Raises TargetError for an
    unknown spec, and EngineError for an engine that is not installed or cannot be reached.
    """
    address = engine_address(spec)
    if address is None:
        from .processes import ProcessPool

        engine: Engine = ProcessPool(jobs or cores())
    else:
        from .cluster import open_cluster  # importing dask takes half a second

        engine = open_cluster(address, jobs or cores())
    try:
        yield engine
        engine.shutdown()
    finally:
        engine.stop()


# -- answers as they arrive


def each_answer(
    engine: Executor,
    work: Callable[[Item], Answer],
    items: Iterable[Item | Precomputed[Answer]],
    lost: Callable[[Item, CkptoolError], Answer],
    *,
    ordered: bool = True,
    size_of: Callable[[Item], int] | None = None,
) -> Generator[Answer, None, None]:
    """Yield the answer of ``work`` for every item, with any executor. Items may be endless; memory is bounded.

    ``lost`` makes the answer for an item whose process died twice, the second time while running it alone. Errors of
    ``work`` and of the engine are raised here. ``size_of`` returns the bytes of an item, for engines that take several
    small items at once.
    """
    call = partial(_each, work)
    count, nbytes = getattr(engine, "count", 1), getattr(engine, "nbytes", 0)
    numbered = enumerate(items)
    given: dict[Future[list[Answer]], list[tuple[int, Item]]] = {}
    arrived: SimpleQueue[Future[list[Answer]]] = SimpleQueue()
    done: dict[int, Answer] = {}
    suspects: list[tuple[int, Item]] = []
    alone = False
    taken = yielded = 0

    def submit(batch: list[tuple[int, Item]]) -> None:
        try:
            future = engine.submit(call, [item for _, item in batch])
        except EngineError as error:  # answers that arrived earlier still count
            future = Future()
            future.set_exception(error)
        given[future] = batch
        future.add_done_callback(arrived.put)

    def next_batch(most: int) -> list[tuple[int, Item]]:
        nonlocal taken
        batch: list[tuple[int, Item]] = []
        held = 0
        for number, item in islice(numbered, most):
            taken += 1
            if isinstance(item, Precomputed):
                done[number] = item.answer
                continue
            batch.append((number, item))
            held += size_of(item) if size_of is not None and count > 1 else 0
            if len(batch) >= _size(count, taken, workers) or held >= nbytes:
                break
        return batch

    try:
        while True:
            workers = _workers(engine)
            room = WAITING * workers * (4 if count > 1 else 1)
            exhausted = False
            while taken < yielded + room and not exhausted:
                before = taken
                batch = next_batch(yielded + room - taken)
                if batch:
                    submit(batch)
                exhausted = taken == before
                if not arrived.empty():
                    break
            if ordered:
                while yielded in done:
                    yield done.pop(yielded)
                    yielded += 1
            else:
                for number in list(done):
                    yield done.pop(number)
                    yielded += 1
            if not given and suspects:
                alone = True
                submit([suspects.pop()])
            if not given:
                if exhausted and not done:
                    return
                continue
            future = arrived.get()
            batch = given.pop(future)
            try:
                done.update(zip([number for number, _ in batch], future.result(), strict=True))
            except WorkerDiedError as error:
                if len(batch) > 1:  # one of them is to blame
                    for one in batch:
                        submit([one])
                elif alone or getattr(engine, "blames", False):
                    done[batch[0][0]] = lost(batch[0][1], error)
                else:
                    suspects += batch
            alone = False
    finally:
        for future in given:
            future.cancel()


def _size(count: int, taken: int, workers: int) -> int:
    """Return how many items a task gets: few at first, so that a short list is spread over all workers."""
    return max(min(count, taken // (4 * workers)), 1)


def _workers(engine: Executor) -> int:
    """Return how many tasks an executor runs at once."""
    number = getattr(engine, "workers", None) or getattr(engine, "_max_workers", None)
    return number if isinstance(number, int) else cores()


def _each(work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    return [work(item) for item in items]
