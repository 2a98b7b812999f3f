"""Simulate how long work takes with 1 to 1,000 workers, event by event, from measured figures.

A scheduler gives tasks to workers, one after the other. A task first costs its worker some time, then it moves bytes.
All workers that move bytes share the storage: each gets its own bandwidth, or an equal part of what the storage gives.
Some workers are slow, and some tasks are lost and carried out again. A single process plans while tasks are given
out, and commits at the end. `python -m bench.simulation` prints the table of docs/scale.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

GB: Final = 1e9


class Figure(NamedTuple):
    """A figure and its source."""

    value: float
    unit: str
    source: str


class Costs(NamedTuple):
    """The figures from which everything is computed."""

    start: Figure
    dispatch: Figure
    listed: Figure
    opened: Figure
    planned: Figure
    begun: Figure
    committed: Figure
    checked: Figure
    bandwidth: Figure
    slow: Figure
    slowness: Figure
    lost: Figure
    restart: Figure


_MEASURED: Final = "measured by `python -m bench.prediction`"
#: Seconds are rounded up, and speeds are rounded down.
COSTS: Final = Costs(
    start=Figure(2.0, "s", f"from the command to the first task, with Dask; {_MEASURED}"),
    dispatch=Figure(0.005, "s", f"a task without work, with Dask; {_MEASURED}"),
    listed=Figure(0.00001, "s", f"a file found in a folder; {_MEASURED}"),
    opened=Figure(0.003, "s", f"a file opened and its metadata checked; {_MEASURED}"),
    planned=Figure(0.015, "s", f"a task of 1 GiB planned, in pieces of 5 MB; {_MEASURED}"),
    begun=Figure(0.005, "s", f"a task decoded, its files opened, synced and noted; {_MEASURED}"),
    committed=Figure(0.015, "s", "the same, because committing plans again"),
    checked=Figure(1.5 * GB, "bytes/s", f"read from memory and checked by one process; {_MEASURED}"),
    bandwidth=Figure(0.5 * GB, "bytes/s", "assumed: a worker with half of a link of 10 Gbit/s"),
    slow=Figure(0.05, "of the workers", "assumed"),
    slowness=Figure(4, "times", "assumed: how much slower these are"),
    lost=Figure(0.001, "of the tasks", "assumed: their worker dies at their end"),
    restart=Figure(30, "s", "assumed: until there is another worker"),
)


class Work(NamedTuple):
    """Tasks of equal size. ``moved`` counts the bytes of one task; the other costs are seconds per task.

    ``plan`` passes before the client can give out a task. ``dispatch`` is spent by the scheduler, and ``overhead`` by
    the worker. ``commit`` follows after all tasks are done.
    """

    label: str
    tasks: int
    moved: float
    plan: float
    dispatch: float
    overhead: float
    commit: float = 0.0


class Fleet(NamedTuple):
    """Workers that move ``bandwidth`` bytes/s each, together at most ``storage``. They begin ``start`` seconds late."""

    workers: int
    bandwidth: float
    storage: float = inf
    slow: float = 0.0
    slowness: float = 1.0
    lost: float = 0.0
    restart: float = 0.0
    start: float = 0.0

    @property
    def slow_workers(self) -> int:
        """The number of slow workers."""
        return int(self.workers * self.slow)


#: Stands in place of a task for the event that a lost worker is replaced.
_BACK: Final = -1


class Outcome(NamedTuple):
    """The seconds until all is committed, how often each task was done, and how many tasks were lost on the way."""

    seconds: float
    done: bytes
    lost: int


def simulate(work: Work, fleet: Fleet, seed: int = 0) -> Outcome:
    """Simulate some work. The same seed gives the same outcome."""
    chance = random.Random(seed)
    done = bytearray(work.tasks)
    again: list[int] = []
    idle: list[int] = []
    starts: list[tuple[float, int, int]] = []  # (time, worker, task)
    flows = _Flows(fleet)
    given = lost = finished = 0
    now = scheduler = fleet.start

    def give(worker: int, when: float) -> None:
        nonlocal given, scheduler
        if again:
            task, ready = again.pop(), when
        elif given < work.tasks:
            task, ready = given, fleet.start + (given + 1) * work.plan
            given += 1
        else:
            idle.append(worker)
            return
        scheduler = max(scheduler, when, ready) + work.dispatch
        heappush(starts, (scheduler + work.overhead * _times(fleet, worker), worker, task))

    for worker in range(fleet.workers):
        give(worker, now)
    while finished < work.tasks:
        at = flows.next()
        if starts and starts[0][0] <= at:
            now, worker, task = heappop(starts)
            if task == _BACK:
                give(worker, now)
                continue
            flows.begin(now, worker, task, work.moved)
            continue
        now = at
        worker, task = flows.end(now)
        if fleet.lost and chance.random() < fleet.lost:
            lost += 1
            again.append(task)
            if idle:
                give(idle.pop(), now)
            heappush(starts, (now + fleet.restart, worker, _BACK))
            continue
        done[task] += 1
        finished += 1
        give(worker, now)
    return Outcome(now + work.tasks * work.commit, bytes(done), lost)


def _times(fleet: Fleet, worker: int) -> float:
    return fleet.slowness if worker < fleet.slow_workers else 1.0


class _Flows:
    """The flows of bytes that run at the moment, in two classes: usual and slow workers.

    All flows of a class have the same speed. So a flow ends once its class has moved its size per flow.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._most = (fleet.bandwidth, fleet.bandwidth / fleet.slowness)
        self._moved = [0.0, 0.0]
        self._rates = [0.0, 0.0]
        self._ends: tuple[list[tuple[float, int, int]], ...] = ([], [])
        self._now = 0.0
        self._first = 0

    def next(self) -> float:
        """Return the time at which the next flow ends, or infinity without flows."""
        best, self._first = inf, 0
        for kind in (0, 1):
            if self._ends[kind]:
                when = self._now + max(self._ends[kind][0][0] - self._moved[kind], 0.0) / self._rates[kind]
                if when < best:
                    best, self._first = when, kind
        return best

    def begin(self, now: float, worker: int, task: int, size: float) -> None:
        """Begin a flow of ``size`` bytes."""
        self._move(now)
        kind = int(worker < self._fleet.slow_workers)
        heappush(self._ends[kind], (self._moved[kind] + size, worker, task))
        self._share()

    def end(self, now: float) -> tuple[int, int]:
        """End the flow that ``next`` found. Return its worker and its task."""
        self._move(now)
        _, worker, task = heappop(self._ends[self._first])
        self._share()
        return worker, task

    def _move(self, now: float) -> None:
        passed, self._now = now - self._now, now
        for kind in (0, 1):
            self._moved[kind] += passed * self._rates[kind]

    def _share(self) -> None:
        usual, slow = map(len, self._ends)
        fast, little = self._most
        total = self._fleet.storage
        if usual * fast + slow * little > total:
            equal = total / (usual + slow)
            little = min(little, equal)
            fast = min(fast, (total - slow * little) / usual) if usual else fast
        self._rates = [fast, little]


def parts(work: Work, fleet: Fleet) -> dict[str, float]:
    """Return the seconds that each possible limit takes by itself, in closed form: a lower bound each."""
    slow = fleet.slow_workers
    each = work.overhead + work.moved / fleet.bandwidth
    speed = (fleet.workers - slow) / each + slow / (each * fleet.slowness)
    return {
        "workers": work.tasks / speed,
        "storage": work.tasks * work.moved / fleet.storage,
        "scheduler": work.tasks * work.dispatch,
        "planning": work.tasks * (work.plan + work.commit),
        "slow workers": each * fleet.slowness if slow and work.tasks >= fleet.workers else 0.0,
    }


def limit(work: Work, fleet: Fleet) -> str:
    """Return the limit that takes longest by itself, or the first of several."""
    found = parts(work, fleet)
    return max(found, key=lambda name: found[name])


# -- the page

WORKERS: Final = (1, 2, 10, 100, 1000)
FILES: Final = Work(
    "100,000 files of 500 MB, `validate`", 100_000, 500e6,
    COSTS.listed.value, COSTS.dispatch.value, COSTS.opened.value,
)  # fmt: skip
#: Small files: a task checks 64 files, or 64 MB.
SMALL: Final = Work(
    "1,000,000 files of 1 MB, `validate`", 15_625, 64e6,
    64 * COSTS.listed.value, COSTS.dispatch.value, 64 * COSTS.opened.value,
)  # fmt: skip
#: A conversion reads and writes every byte, so it moves twice the size.
CONVERSION: Final = Work(
    "10 TB in tasks of 1 GiB, `convert`", int(10e12 / (1 << 30)) + 1, 2 * (1 << 30),
    COSTS.planned.value, COSTS.dispatch.value, COSTS.begun.value, COSTS.committed.value,
)  # fmt: skip
CASES: Final = ((FILES, 20), (FILES, 100), (SMALL, 100), (CONVERSION, 20), (CONVERSION, 200))


def fleet_of(workers: int, storage: float) -> Fleet:
    """Return a fleet with this many workers, the figures of ``COSTS``, and a storage of ``storage`` bytes/s."""
    return Fleet(
        workers, min(COSTS.bandwidth.value, COSTS.checked.value), storage, COSTS.slow.value, COSTS.slowness.value,
        COSTS.lost.value, COSTS.restart.value, COSTS.start.value,
    )  # fmt: skip


def table() -> str:
    """Return the time of each work by number of workers, and its limit, as a Markdown table."""
    head = ["work", "storage", *(f"{workers:,} {'worker' if workers == 1 else 'workers'}" for workers in WORKERS)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for work, storage in CASES:
        cells = [work.label, f"{storage} GB/s"]
        for workers in WORKERS:
            fleet = fleet_of(workers, storage * GB)
            cells.append(f"{duration(simulate(work, fleet).seconds)}, {limit(work, fleet)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def costs() -> str:
    """Return the figures that the simulation uses as a Markdown table."""
    rows = [f"| {name} | {_amount(figure)} | {figure.source} |" for name, figure in COSTS._asdict().items()]
    return "\n".join(["| name | value | what it is |", "| --- | --- | --- |", *rows])


def _amount(figure: Figure) -> str:
    if figure.unit == "bytes/s":
        return f"{figure.value / GB:g} GB/s"
    if figure.unit == "s" and figure.value < 1:
        return f"{figure.value * 1000:g} ms"
    return f"{figure.value:.1%} {figure.unit}" if figure.unit.startswith("of") else f"{figure.value:g} {figure.unit}"


def duration(seconds: float) -> str:
    """Return a time for people, with two digits.

    >>> [duration(seconds) for seconds in (8.32, 119, 5000, 99999)]
    ['8.3 s', '2.0 min', '83 min', '28 h']
    """
    for most, unit, name in ((100, 1, "s"), (100 * 60, 60, "min")):
        if seconds < most:
            return _digits(seconds / unit, name)
    return _digits(seconds / 3600, "h")


def _digits(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def lines() -> Iterator[str]:
    """Yield the lines to print."""
    yield table()
    yield ""
    yield costs()


if __name__ == "__main__":
    print(*lines(), sep="\n")
