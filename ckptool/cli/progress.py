"""Progress bars on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from time import monotonic, time
from typing import Any, Final, TypeAlias

import click

from ..base import lazy
from ..base.steps import is_folder, is_remote
from ..base.text import human_bytes
from .render import clean
from .terminal import watched

#: A function to call with the amount of work just done, or None without a progress bar.
BarUpdate: TypeAlias = "Callable[[int], None] | None"

#: Seconds before a bar appears.
_PATIENCE: Final = 1.0
#: Seconds between two checks of how many bytes were read.
_INTERVAL: Final = 0.2
#: Seconds between two drawings of a bar.
_REDRAWN: Final = 0.1


@contextmanager
def progress_bar(total: int, label: str, wanted: bool = True, unit: str = "bytes") -> Iterator[BarUpdate]:
    """Show a progress bar on stderr once the work has taken a second. Yield a function to call with the work done.

    Yield None if no bar is wanted, there is no work, or stderr is not a terminal. A negative ``total`` is unknown.
    If a remote file is open, bytes count as soon as they arrive: many are downloaded before the first is worked on.
    """
    with _bar(total, label, wanted, unit) as update:
        if update is None or unit != "bytes" or not lazy.is_loaded("remote.store"):
            yield update
            return
        before, worked = _bytes_arrived(), 0

        def work(step: int) -> None:
            nonlocal worked
            worked += step

        with _watching(lambda: max(worked, _bytes_arrived() - before), update, total):
            yield work


@contextmanager
def _bar(total: int, label: str, wanted: bool, unit: str) -> Iterator[BarUpdate]:
    if not wanted or not total or not watched():
        yield None
        return
    known: dict[str, Any] = {"length": total} if total > 0 else {"iterable": count()}
    done = drawn = 0
    begun, last, bar = monotonic(), -_REDRAWN, None
    with ExitStack() as stack:

        def update(step: int) -> None:
            nonlocal done, drawn, last, bar
            done += step
            now = monotonic()
            taken = now - begun
            if bar is None:
                if taken < _PATIENCE or done == total:
                    return
                shown: Any = click.progressbar(
                    **known, label=clean(label), file=sys.stderr, width=0, item_show_func=lambda text: text
                )
                bar = stack.enter_context(shown)
                bar.start = bar.last_eta = time() - taken  # estimate the time left from the true beginning
            if now - last < _REDRAWN and done != total:
                return
            if unit == "bytes":
                of = f" of {human_bytes(total)}" if total > 0 else ""
                rate = f"{human_bytes(done)}{of}, {human_bytes(int(done / taken))}/s"
            else:
                of = f" of {total:,}" if total > 0 else ""
                rate = f"{done:,}{of} {unit}, {done / taken:,.0f}/s"
            bar.update(done - drawn, rate)
            drawn, last = done, now

        yield update


def work_size(path: str) -> int:
    """Return the bytes of a file for its progress bar: 0 for a missing file, a negative number for a remote folder."""
    if is_remote(path):
        return -1 if is_folder(path) else int(lazy.module("remote.source").size_at(path))
    return os.path.getsize(path) if os.path.isfile(path) else 0


@contextmanager
def _watching(count: Callable[[], int], update: Callable[[int], None], total: int) -> Iterator[None]:
    """Move a bar to ``count()`` from time to time. It reaches ``total`` only at the end; below 0 it is unknown."""
    from threading import Event, Thread  # most commands need none

    ended = Event()
    shown = 0

    def show(most: int) -> None:
        nonlocal shown
        done = min(count(), most) if total > 0 else count()
        if done > shown:
            update(done - shown)
            shown = done

    def watch() -> None:
        while not ended.wait(_INTERVAL):
            show(total - 1)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        ended.set()
        thread.join()
        show(total)
    finally:
        ended.set()
        thread.join()


def _bytes_arrived() -> int:
    """Return the bytes of remote files that have arrived in this process."""
    return lazy.module("remote.store").ARRIVED.nbytes if lazy.is_loaded("remote.store") else 0


@contextmanager
def copying_bar(label: str, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of ``save``, which knows the total only after planning. Yield its callback."""
    with ExitStack() as stack:
        step: BarUpdate = None
        shown = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal step, shown
            if not done:
                step = stack.enter_context(progress_bar(total, label, wanted))
            elif step is not None:
                step(done - shown)
            shown = done

        yield on_progress
