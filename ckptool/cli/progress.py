"""Progress bars on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from time import monotonic, time
from typing import Any, Final, TypeAlias

import click

from ..base.text import cut, human_bytes
from .render import clean, tell_part
from .terminal import watched

#: A function to call with the amount of work just done, or None without a progress bar.
BarUpdate: TypeAlias = "Callable[[int], None] | None"

#: Seconds before a bar appears.
_PATIENCE: Final = 1.0
#: Seconds between two checks of how many bytes were read.
_INTERVAL: Final = 0.2


@contextmanager
def progress_bar(total: int, label: str, wanted: bool = True, unit: str = "bytes") -> Iterator[BarUpdate]:
    """Show a progress bar on stderr once the work has taken a second. Yield a function to call with the work done.

    Yield None if no bar is wanted, there is no work, or stderr is not a terminal. A negative ``total`` is unknown.
    """
    if not wanted or not total or not watched():
        yield None
        return
    known: dict[str, Any] = {"length": total} if total > 0 else {"iterable": count()}
    done = 0
    begun, bar = monotonic(), None
    with ExitStack() as stack:

        def update(step: int) -> None:
            nonlocal done, bar
            done += step
            taken = monotonic() - begun
            if bar is None:
                if taken < _PATIENCE or done == total:
                    return
                shown: Any = click.progressbar(
                    **known, label=clean(label), file=sys.stderr, width=0, item_show_func=lambda text: text
                )
                bar, step = stack.enter_context(shown), done
                bar.start = bar.last_eta = time() - taken  # estimate the time left from the true beginning
            if unit == "bytes":
                rate = f"{human_bytes(done)} of {human_bytes(total)}, {human_bytes(int(done / taken))}/s"
            else:
                of = f" of {total:,}" if total > 0 else ""
                rate = f"{done:,}{of} {unit}, {done / taken:,.0f}/s"
            bar.update(step, rate)

        yield update


@contextmanager
def note(text: str, wanted: bool = True) -> Iterator[None]:
    """Show a clean text on stderr, if that is a terminal, until the work is done."""
    if not wanted or not watched():
        yield
        return
    width = 0
    with suppress(OSError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    # A line that wraps could not be erased.
    tell_part(cut(text, (width or 80) - 1))
    try:
        yield
    finally:
        tell_part("\r\x1b[K")


@contextmanager
def reading_bar(total: int, label: str, wanted: bool) -> Iterator[None]:
    """Show how many of ``total`` bytes this process has read, for a reader without callbacks. Works only on Linux."""
    with progress_bar(total, label, wanted and _bytes_read() is not None) as update:
        if update is None:
            yield
            return
        from threading import Event, Thread  # only inspect --load needs them

        ended = Event()
        before = _bytes_read() or 0

        def watch() -> None:
            shown = 0
            while not ended.wait(_INTERVAL):
                done = min((_bytes_read() or 0) - before, total - 1)
                if done > shown:
                    update(done - shown)
                    shown = done

        thread = Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _bytes_read() -> int | None:
    """Return the bytes that this process has read, or None if unknown.

    https://man7.org/linux/man-pages/man5/proc_pid_io.5.html
    """
    try:
        with open("/proc/self/io", encoding="ascii") as lines:
            return int(lines.readline().removeprefix("rchar:"))
    except (OSError, ValueError):
        return None


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
