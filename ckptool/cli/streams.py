"""Output that is written as it comes: reports on many inputs, tables of many rows, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeAlias

import click

from ..base.errors import CkptoolError
from .next_steps import retype
from .options import worst
from .render import clean, emit, emit_json, emit_part, failure, flush, say_error, to_json

#: Called with the work just done; None without a progress bar.
BarUpdate: TypeAlias = "Callable[[int], None] | None"

#: Bytes from which reading takes a noticeable time.
_BYTES_FELT: Final = 200_000_000
#: Rows that decide the widths of the columns; later ones are written at once.
_FIRST: Final = 100


@contextmanager
def progress_bar(total: int, label: str, wanted: bool = True, least: int = _BYTES_FELT) -> Iterator[BarUpdate]:
    """Show a progress bar on stderr: yield a function to call with the work done.

    Yields None without a terminal, or for a ``total`` below ``least``.
    """
    if not wanted or total < least or not watched():
        yield None
        return
    with click.progressbar(length=total, label=clean(label), file=sys.stderr) as bar:
        yield bar.update


def report_text(report: Mapping[str, Any], style: str) -> str:
    """Return a report as JSON: one line for ``jsonl``, otherwise indented."""
    return to_json(report, None if style == "jsonl" else 2)


def on_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


@contextmanager
def copying_bar(label: str, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of ``save``, which knows the total only once it has planned."""
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


def watched() -> bool:
    """Return whether stderr is a terminal, so that a bar is seen."""
    return sys.stderr is not None and sys.stderr.isatty()


class Reports:
    """JSON reports, written as they come: ``jsonl`` one per line, ``json`` an object or, if ``several``, a list.

    So 100,000 of them take no more memory than one.
    """

    def __init__(self, style: str, several: bool) -> None:
        self.style = style
        self.several = several
        self._any = False

    def add(self, text: str) -> None:
        """Write a report formatted by ``report_text``."""
        if self.style == "jsonl" or not self.several:
            emit(text)
        else:
            # Strings in JSON contain no line breaks.
            emit_part((",\n  " if self._any else "[\n  ") + text.replace("\n", "\n  "))
        self._any = True
        flush()

    def close(self) -> None:
        """End the list."""
        if self.style == "json" and self.several:
            emit("\n]" if self._any else "[]")


class Outcomes:
    """The reports and exit codes of a command on several inputs.

    ``typed`` is the command line to correct in next steps (see ``retype``), None to leave them as they are. ``several``
    says whether JSON is a list, by default if there are several paths.
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
        self.reports: list[Mapping[str, Any]] = []
        self.codes: list[int] = []
        self._command, self._typed = command, typed
        self._several = len(paths) > 1 if several is None else several
        self._style = "" if quiet else style

    @contextmanager
    def input(self, path: str) -> Iterator[None]:
        """Work on one input: an error becomes its report and is printed, so that the others are still done."""
        try:
            yield
        except CkptoolError as error:
            retype(error, self._typed)
            say_error(error)
            self.add(failure(self._command, path, error), error.exit_code)

    def add(self, report: Mapping[str, Any], code: int = 0) -> None:
        self.reports.append(report)
        self.codes.append(code)

    def finish(self) -> int:
        """Write the reports if they are wanted as JSON; return the worst exit code."""
        if self._style in ("json", "jsonl"):
            emit_json(self.reports, self._style, self._several)
        return worst(self.codes)


class Rows:
    """A table that is written while its rows come. The first hundred decide the widths of the columns; a longer cell
    after them widens its column from there on. ``right`` are the columns of numbers."""

    def __init__(self, headers: Sequence[str], right: Sequence[int] = ()) -> None:
        # The least width in tabulate.
        self._widths = [len(header) + 2 for header in headers]
        self._right = frozenset(right)
        self._first: list[Sequence[str]] | None = []
        self._headers = headers

    def add(self, cells: Sequence[str]) -> None:
        """Add a row."""
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
        """Write the rows kept so far."""
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
