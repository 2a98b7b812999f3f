"""Output that is told as it comes: JSON of many reports, a table of many rows, and a bar for those who wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import click

from .render import clean, emit, emit_part, flush, to_json

#: From so many bytes on reading them is felt.
_BYTES_FELT: Final = 200_000_000
#: Rows that decide how wide the columns are; those behind them are told at once.
_FIRST: Final = 100


@contextmanager
def progress_bar(
    total: int, label: str, wanted: bool = True, least: int = _BYTES_FELT
) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr, as a function that takes what was done; None where nobody looks, or below ``least``."""
    if not wanted or total < least or not watched():
        yield None
        return
    with click.progressbar(length=total, label=clean(label), file=sys.stderr) as bar:
        yield bar.update


def report_text(report: Mapping[str, Any], style: str) -> str:
    """A report as JSON: one line for ``jsonl``, else indented."""
    return to_json(report, None if style == "jsonl" else 2)


def on_terminal() -> bool:
    """Does somebody watch the answers come?"""
    return sys.stdout is not None and sys.stdout.isatty()


@contextmanager
def copying_bar(label: str, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of ``save``, which tells how much there is once it has planned."""
    with ExitStack() as stack:
        step: Callable[[int], None] | None = None
        shown = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal step, shown
            if not done:
                step = stack.enter_context(progress_bar(total, label, wanted))
            elif step is not None:
                step(done - shown)
            shown = done

        yield on_progress


def watched() -> bool:
    """Does somebody see a bar?"""
    return sys.stderr is not None and sys.stderr.isatty()


class Reports:
    """JSON reports as they come: for ``jsonl`` one a line, for ``json`` an object or, for several, a list.

    Each is written as soon as it is there, so 100,000 of them take no more memory than one.
    """

    def __init__(self, style: str, several: bool) -> None:
        self.style = style
        self.several = several
        self._any = False

    def add(self, text: str) -> None:
        """Write what ``report_text`` gave."""
        if self.style == "jsonl" or not self.several:
            emit(text)
        else:
            # No string in JSON has a line break of its own.
            emit_part((",\n  " if self._any else "[\n  ") + text.replace("\n", "\n  "))
        self._any = True
        flush()

    def close(self) -> None:
        """End the list."""
        if self.style == "json" and self.several:
            emit("\n]" if self._any else "[]")


class Rows:
    """A table that is drawn while its rows come. The first hundred decide how wide the columns are; a longer cell
    behind them widens its column from there on. ``right`` are the columns of numbers."""

    def __init__(self, headers: Sequence[str], right: Sequence[int] = ()) -> None:
        # As wide as tabulate makes them.
        self._widths = [len(header) + 2 for header in headers]
        self._right = frozenset(right)
        self._first: list[Sequence[str]] | None = []
        self._headers = headers

    def add(self, cells: Sequence[str]) -> None:
        """One row more."""
        row = [clean(cell) for cell in cells]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row)]
        if self._first is None:
            emit(self._line(row))
            flush()
            return
        self._first.append(row)
        if len(self._first) == _FIRST:
            self.close()

    def close(self) -> None:
        """Draw what was kept back."""
        if self._first:
            rule = ["-" * width for width in self._widths]
            emit("\n".join([self._line(row) for row in (self._headers, rule, *self._first)]))
            flush()
        self._first = None

    def _line(self, row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if number in self._right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, self._widths))
        ]
        return "  ".join(cells).rstrip()
