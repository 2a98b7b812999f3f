"""Output written while the work goes on: reports on many inputs, tables of many rows, progress bars."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from time import monotonic, time
from typing import Any, Final, TypeAlias

import click

from ..base.errors import CkptoolError
from ..base.text import human_bytes
from .next_steps import retype
from .options import worst
from .render import clean, emit, emit_part, failure, flush, say_error, to_json
from .terminal import cells, columns, elided, fitting, watched

#: A function to call with the amount of work just done, or None without a progress bar.
BarUpdate: TypeAlias = "Callable[[int], None] | None"

#: Seconds before a bar appears.
_PATIENCE: Final = 1.0
#: Seconds between two checks of how many bytes were read.
_INTERVAL: Final = 0.2
#: The first rows decide the widths of the columns; later rows are written at once.
_FIRST: Final = 100


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


def report_text(report: Mapping[str, Any], style: str) -> str:
    """Return a report as JSON: one line for ``jsonl``, otherwise indented."""
    return to_json(report, None if style == "jsonl" else 2)


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


class Reports:
    """JSON reports, each written at once: ``jsonl`` one per line, ``json`` one object or, if ``several``, a list.

    So 100,000 reports take no more memory than one.
    """

    def __init__(self, style: str, several: bool) -> None:
        self.style = style
        self.several = several
        self._any = False

    def add(self, text: str) -> None:
        """Write a report that ``report_text`` has formatted."""
        if self.style == "jsonl" or not self.several:
            emit(text)
        else:
            # Strings in JSON contain no line breaks, so this indents only the layout.
            emit_part((",\n  " if self._any else "[\n  ") + text.replace("\n", "\n  "))
        self._any = True
        flush()

    def close(self) -> None:
        """Close the list, if there is one."""
        if self.style == "json" and self.several:
            emit("\n]" if self._any else "[]")


class Outcomes:
    """The reports and exit codes of a command on several inputs.

    ``typed`` is the command line that next steps correct (see ``retype``), or None to leave next steps unchanged.
    ``several`` makes JSON a list; the default is whether there are several paths.
    """

    def __init__(
        self,
        command: str,
        paths: Sequence[str],
        style: str,
        quiet: bool = False,
        typed: object = None,
        several: bool | None = None,
    ) -> None:
        #: The number of inputs for each exit code.
        self.codes: Counter[int] = Counter()
        self._command, self._typed = command, typed
        several = len(paths) > 1 if several is None else several
        self._style = "" if quiet else style
        self._reports = Reports(style, several)
        #: Errors to print after the JSON list, so that they do not interrupt it.
        self._held: list[CkptoolError] = []
        self._holds = style == "json" and several and not quiet

    @contextmanager
    def input(self, path: str) -> Iterator[None]:
        """Work on one input. Print an error and add its report, so that the other inputs are still done."""
        try:
            yield
        except CkptoolError as error:
            retype(error, self._typed)
            if self._holds:
                self._held.append(error)
            else:
                say_error(error)
            self.add(failure(self._command, path, error), error.exit_code)

    def add(self, report: Mapping[str, Any], code: int = 0) -> None:
        """Count an exit code, and write the report if JSON is wanted."""
        self.codes[code] += 1
        if self._style in ("json", "jsonl"):
            self._reports.add(report_text(report, self._style))

    def finish(self) -> int:
        """Close the reports and print held errors. Return the worst exit code."""
        if self._style in ("json", "jsonl"):
            self._reports.close()
        for error in self._held:
            say_error(error)
        return worst(self.codes)


class Rows:
    """A table written while its rows arrive. ``right`` holds the columns of numbers.

    The first hundred rows decide the widths of the columns; a longer cell after them widens its column from there on.
    On a terminal, texts are cut to fit. Before they get too short, columns in ``spare`` are left out, first to last.
    """

    def __init__(self, headers: Sequence[str], right: Sequence[int] = (), spare: Sequence[int] = ()) -> None:
        # tabulate never makes a column narrower than this.
        self._widths = [len(header) + 2 for header in headers]
        self._right = frozenset(right)
        self._spare = spare
        self._shown = list(range(len(headers)))
        self._first: list[Sequence[str]] | None = []
        self._headers = headers
        self._most = columns()

    def add(self, cells: Sequence[str]) -> None:
        """Add a row."""
        row = [clean(cell) for cell in cells]
        if self._first is None:
            if not self._most:
                self._widen(row)
            emit(self._line(row))
            flush()
            return
        self._widen(row)
        self._first.append(row)
        if len(self._first) == _FIRST:
            self.close()

    def close(self) -> None:
        """Write the rows kept so far. Later rows are written at once."""
        if self._first:
            self._fit()
            rule = ["-" * width for width in self._widths]
            emit("\n".join([self._line(row) for row in (self._headers, rule, *self._first)]))
            flush()
        self._first = None

    def _widen(self, row: Sequence[str]) -> None:
        self._widths = [max(width, cells(text)) for width, text in zip(self._widths, row)]

    def _fit(self) -> None:
        if self._most:
            shown = fitting(self._widths, self._right, self._spare, self._most)
            self._shown = [number for number, _ in shown]
            for number, width in shown:
                self._widths[number] = width

    def _line(self, row: Sequence[str]) -> str:
        texts = []
        for number in self._shown:
            width = self._widths[number]
            text = elided(row[number], width) if self._most else row[number]
            space = " " * (width - cells(text))
            texts.append(space + text if number in self._right else text + space)
        return "  ".join(texts).rstrip()
