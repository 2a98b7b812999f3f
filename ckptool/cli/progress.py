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
#: Seconds between two drawings of a bar.
_REDRAWN: Final = 0.1


@contextmanager
def progress_bar(total: int, label: str, wanted: bool = True, unit: str = "bytes") -> Iterator[BarUpdate]:
    """Show a progress bar on stderr once the work has taken a second. Yield a function to call with the work done.

    Yield None if no bar is wanted, there is no work, or stderr is not a terminal. A negative ``total`` is unknown.
    """
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
