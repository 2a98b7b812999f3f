"""Transfers that move less than was asked for: the bytes of the output are the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckptool.files import sources, threads, write

from .rows import FIXTURES, Options, Tally
from .stage import Stage, answer, writing

__all__ = ["short"]


def short(tally: Tally, options: Options) -> None:
    """Reads, writes and kernel copies that stop early, at random; with and without copies in the kernel."""
    chance = random.Random(options.seed)
    stages = [
        Stage(options.scratch / f"{item.name}{number}", item, extra)
        for item in writing()
        for number, extra in enumerate((None, FIXTURES / "align4096.pth"))
        if extra is None or item.command in ("strip-module", "add-module")
    ]
    for number in range(options.amount(50, 10)):
        stage = stages[number % len(stages)]
        force, kernel = bool(number & 1), chance.random() < 0.5
        stage.reset(force)
        tally.case(f"{stage.item.name}, short transfers no. {number}, {'with' if kernel else 'without'} kernel copies")
        with _short(chance, kernel) as counted:
            done = answer(stage.arguments(*(["--force"] if force else [])))
        tally.check(done.code == stage.code, f"it ends with {done.code}: {done.err.strip()!r}")
        tally.check(stage.check_promise(tally, 0) == "new", f"the output holds {stage.holds()}")
        tally.check(counted[0] > 0, "no transfer was short")


@contextmanager
def _short(chance: random.Random, kernel: bool) -> Iterator[list[int]]:
    """Puts functions in place of those of ``os`` that do only a part of what they are asked for."""
    counted = [0]
    most = chance.choice((1, 7, 64, 1000))

    def less(size: int) -> int:
        part = min(size, chance.randint(1, most))
        counted[0] += part < size
        return part

    real_write, real_pread = os.pwrite, sources._pread
    real_copy: Callable[..., int] = os.copy_file_range
    # A pause in which the kernel says that it cannot copy any further, as at the border of two file systems.
    gives_up = chance.random() < 0.3

    def copy(origin: int, fd: int, count: int, offset: int, at: int) -> int:
        if not kernel or (gives_up and chance.random() < 0.05):
            return 0
        return real_copy(origin, fd, less(count), offset, at)

    size = chance.choice((512, 4096, 1 << 20))
    replaced: list[tuple[Any, str, Any]] = [
        (os, "pwrite", lambda fd, data, at: real_write(fd, data[: less(len(data))], at)),
        (os, "copy_file_range", copy),
        (sources, "_pread", lambda fd, size, offset: real_pread(fd, less(size), offset)),
        (write.copying, "_COPY_SIZE", chance.choice((512, 4096, 1 << 24))),
        (write.copying, "READ_SIZE", size),
        (threads, "READ_SIZE", size),
        (write.copying, "_SMALL", chance.choice((0, 512, 1 << 14))),
        (write.copying, "_COLLECTED", chance.choice((512, 1 << 20))),
    ]
    old = [getattr(place, name) for place, name, _ in replaced]
    try:
        for place, name, value in replaced:
            setattr(place, name, value)
        yield counted
    finally:
        for (place, name, _), value in zip(replaced, old, strict=True):
            setattr(place, name, value)
