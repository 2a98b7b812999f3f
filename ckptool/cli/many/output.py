"""The output of a command on many files, written while the work goes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...base.errors import CkptoolError
from ...base.records import NamedTuple
from ..render import clean, emit, emit_part, flush, say, say_error, table, tell, to_json
from ..terminal import cells, columns, elided, fitting

#: The formats that are JSON, and the format with one row per file.
JSON: Final = ("json", "jsonl")
ROWS: Final = "rows"
#: A table with a line per file, and a text about all files, which the command writes at the end.
OVERVIEW: Final = "overview"
WHOLE: Final = "whole"
#: The first rows decide the widths of the columns; later rows are written at once.
_FIRST: Final = 100


class Columns(NamedTuple):
    """The columns of a table: ``right`` are those with numbers, ``spare`` those that a narrow terminal loses."""

    headers: Sequence[str]
    right: Sequence[int] = ()
    spare: Sequence[int] = ()


def report_text(report: Mapping[str, Any], style: str) -> str:
    """Return a report as JSON: one line for ``jsonl``, indented for ``json``; "" for any other format."""
    return to_json(report, None if style == "jsonl" else 2) if style in JSON else ""


class ErrorLog:
    """Errors and remarks for stderr, written at once if ``most`` is 0, otherwise by ``close``.

    Beyond ``most`` errors it only counts them, and refers to the ``formats`` that have all of them.
    """

    def __init__(self, most: int = 0, formats: str = "jsonl or rows") -> None:
        self.count = 0
        self._most, self._formats = most, formats
        self._kept: list[CkptoolError | str] = []
        self._left = 0

    @classmethod
    def beside(cls, style: str, several: bool) -> ErrorLog:
        """Return a log that writes errors at once, or after the end of a JSON list, which they would interrupt."""
        return cls(sys.maxsize if style == "json" and several else 0)

    def add(self, item: CkptoolError | str) -> None:
        """Add an error, or a remark, which is a line."""
        self.count += isinstance(item, CkptoolError)
        if not self._most:
            _say(item)
        elif self.count <= self._most:
            self._kept.append(item)
        else:
            self._left += isinstance(item, CkptoolError)

    def close(self) -> None:
        """Write everything that was kept."""
        for item in self._kept:
            _say(item)
        self._kept.clear()
        if self._left:
            say(f"{self._left:,} more could not be read: --format {self._formats} says why")
        self._left = 0


def _say(item: CkptoolError | str) -> None:
    if isinstance(item, str):
        tell(item)
    else:
        say_error(item)


class Reports:
    """JSON reports, each written at once: ``jsonl`` one per line, ``json`` one object or, if ``several``, a list.

    So 100,000 reports take no more memory than one.
    """

    def __init__(self, style: str, several: bool) -> None:
        self._several = several and style == "json"
        self._any = False

    def add(self, text: str) -> None:
        """Write a report that ``report_text`` has formatted."""
        if not self._several:
            emit(text)
        else:
            # Strings in JSON contain no line breaks, so this indents only the layout.
            emit_part((",\n  " if self._any else "[\n  ") + text.replace("\n", "\n  "))
        self._any = True
        flush()

    def close(self) -> None:
        """Close the list, if there is one."""
        if self._several:
            emit("\n]" if self._any else "[]")


class Output:
    """The texts and rows of many files in one format; JSON, and the lines of a table, are written as they come."""

    def __init__(self, style: str, several: bool, columns: Columns | None = None, spaced: bool = False) -> None:
        self._style, self._columns, self._spaced = style, columns, spaced
        self._reports = Reports(style, several)
        self._lines = Rows(*columns) if style == OVERVIEW and columns else None
        self._rows: list[tuple[str, ...]] = []
        self._begun = False

    def add(self, text: str, rows: Sequence[tuple[str, ...]] = ()) -> None:
        """Write the text for one file. Rows become lines of an overview, or wait until the last file."""
        if self._lines is not None:
            for row in rows:
                self._lines.add(row)
            return
        self._rows += rows
        if not text:
            return
        if self._style in JSON:
            self._reports.add(text)
            return
        emit("\n" + text if self._begun and self._spaced else text)
        flush()
        self._begun = True

    def close(self) -> None:
        """Write the rest: the end of a list, or the table of all rows."""
        if self._lines is not None:
            self._lines.close()
        elif self._style in JSON:
            self._reports.close()
        elif self._columns is not None:
            emit(table(self._columns.headers, self._rows, self._style, self._columns.right))


class Rows:
    """A table written while its rows arrive.

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
