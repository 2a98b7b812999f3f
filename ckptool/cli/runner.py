"""Run a command on many files: one loop for every command, format and engine, which writes while the work goes on."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from .. import __version__
from ..base.engines import LOCAL, Precomputed
from ..base.errors import CkptoolError, EngineError, UnreadableError
from ..base.records import NamedTuple
from ..base.text import BREVITY, Brevity, pluralize, shown
from ..reports.file_rows import PASSED_OVER, UNREADABLE, FileVerdict, file_row, size_of
from .options import Workers, worst
from .render import emit, emit_part, failure, flush, say, say_error, table, tell, to_json

if TYPE_CHECKING:
    from .inputs import Inputs

Result = TypeVar("Result")

#: The formats that are JSON, and the format with one row per file.
JSON: Final = ("json", "jsonl")
ROWS: Final = "rows"
#: A table with a line per file, and a text about all files, which the command writes at the end.
OVERVIEW: Final = "overview"
WHOLE: Final = "whole"
#: Garbage is collected once per this many files.
_TIDY: Final = 1000
#: Errors kept to be printed at the end; further errors are only counted.
KEPT: Final = 1000
#: The most skipped files named.
NAMED: Final = 5


class Answer(NamedTuple):
    """The answer of a command for one file: plain data that any process can make.

    ``text`` is for stdout, ``rows`` for a table of all files, ``remarks`` are lines for stderr. ``parts`` are the
    verdicts to count, if there is not just one; ``level`` is the gravest level of the findings, ``size`` counts bytes.
    ``data`` is kept for the end of the command. ``has_row`` is False unless the input is a file.
    """

    verdict: FileVerdict
    text: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    remarks: tuple[str, ...] = ()
    errors: tuple[CkptoolError, ...] = ()
    parts: tuple[FileVerdict, ...] | None = None
    level: str = ""
    size: int = 0
    data: Any = None
    has_row: bool = True


#: A file to answer for, or in its place an error or a known answer.
FileItem: TypeAlias = str | UnreadableError | Precomputed[Answer]


class Columns(NamedTuple):
    """The columns of a table: ``right`` are those with numbers, ``spare`` those that a narrow terminal loses."""

    headers: Sequence[str]
    right: Sequence[int] = ()
    spare: Sequence[int] = ()


class FileCommand(NamedTuple):
    """How a command answers for one file. Processes are sent it, so each function is a module's own, or a ``partial``.

    ``style`` is the output format. ``failed``, by default the function of this name, makes the answer for an error: of
    ``work``, of a path that leads to no file, or of a process that died.
    """

    name: str
    style: str
    work: Callable[[str], Answer]
    failed: Callable[[str, CkptoolError], Answer] | None = None
    columns: Columns | None = None

    def after(self, path: str, error: CkptoolError) -> Answer:
        """Return the answer for an error."""
        return self.failed(path, error) if self.failed else failed(self.name, self.style, path, error)


class ErrorLog:
    """Errors and remarks for stderr, written at once if ``most`` is 0, otherwise by ``close``.

    Beyond ``most`` errors it only counts them.
    """

    def __init__(self, most: int = 0) -> None:
        self.count = 0
        self._most = most
        self._kept: list[CkptoolError | str] = []

    def add(self, item: CkptoolError | str) -> None:
        """Add an error, or a remark, which is a line."""
        self.count += isinstance(item, CkptoolError)
        if not self._most or self.count <= self._most:
            self._kept.append(item)
        if not self._most:
            self.close()

    def close(self) -> None:
        """Write everything that was kept."""
        for item in self._kept:
            if isinstance(item, str):
                tell(item)
            else:
                say_error(item)
        self._kept.clear()
        if self._most and self.count > self._most:
            say(f"{self.count - self._most:,} more could not be read: reports in JSON say why")
            self._most = sys.maxsize


class Output:
    """The texts and rows of many files in one format: texts are written at once, rows as one table by ``close``.

    JSON is one object, or a list if there are ``several``; 100,000 reports take no more memory than one.
    """

    def __init__(self, style: str, several: bool, columns: Columns | None = None, spaced: bool = False) -> None:
        self._style, self._columns, self._spaced = style, columns, spaced and style not in JSON
        self._is_list = several and style == "json"
        self._rows: list[tuple[str, ...]] = []
        self._begun = False

    def add(self, text: str, rows: Sequence[tuple[str, ...]] = ()) -> None:
        """Write the text for one file, which ``report_text`` has formatted if it is JSON; keep the rows."""
        self._rows += rows if self._columns is not None else ()
        if not text:
            return
        if self._is_list:
            # Strings in JSON contain no line breaks, so this indents only the layout.
            emit_part((",\n  " if self._begun else "[\n  ") + text.replace("\n", "\n  "))
        else:
            emit("\n" + text if self._begun and self._spaced else text)
        flush()
        self._begun = True

    def close(self) -> None:
        """Write the rest: the end of a list, or the table of all rows."""
        if self._is_list:
            emit("\n]" if self._begun else "[]")
        elif self._columns is not None:
            headers, right, spare = self._columns
            style = "table" if self._style == OVERVIEW else self._style
            emit(table(headers, self._rows, style, right, spare=spare))


def report_text(report: Mapping[str, Any], style: str) -> str:
    """Return a report as JSON: one line for ``jsonl``, indented for ``json``; "" for any other format."""
    return to_json(report, None if style == "jsonl" else 2) if style in JSON else ""


class Totals:
    """Totals over all files: exit codes, bytes, verdicts, skipped files by reason, and the data kept for the end.

    ``verdicts`` counts files by verdict and ``words`` also the parts of files. ``partial`` counts incomplete coverage.
    ``named`` are the first skipped files, ``first`` is the first file with findings of each level.
    """

    def __init__(self, errors: ErrorLog) -> None:
        self.errors = errors
        self.codes: Counter[int] = Counter()
        self.verdicts: Counter[str] = Counter()
        self.words: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.named: list[str] = []
        self.first: dict[str, str] = {}
        self.data: list[Any] = []
        self.size = self.partial = 0

    def code(self) -> int:
        """Return the exit code: the gravest of all files."""
        return worst(self.codes)

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        self.codes[answer.verdict.code] += 1
        self.verdicts[answer.verdict.verdict] += answer.has_row
        self.size += answer.size
        if answer.level:
            self.first.setdefault(answer.level, answer.verdict.path)
        if answer.data is not None:
            self.data.append(answer.data)
        for part in answer.parts if answer.parts is not None else (answer.verdict,):
            self.partial += part.coverage != "complete"
            self.words[part.verdict] += 1
            if part.verdict == PASSED_OVER:
                self.skipped[part.message] += 1
                if len(self.named) < shown(NAMED):
                    self.named.append(os.path.basename(part.path))


def failed(name: str, style: str, path: str, error: CkptoolError, word: str = "failed") -> Answer:
    """Return the answer of a command for an error. ``word`` is the verdict on a file that could be read."""
    word = UNREADABLE if isinstance(error, UnreadableError) else word
    verdict = FileVerdict(path, word, error.exit_code, getattr(error, "kind", ""), message=error.what)
    text = report_text(failure(name, path, error), style) if style in JSON else ""
    return Answer(verdict, text, errors=(error,))


def reported(report: Any, style: str, lines: Callable[[Any], list[str]], code: int = 0) -> Answer:
    """Return the answer that is a report: as JSON, as lines for people, or without a text in any other style."""
    text = "\n".join(lines(report)) if style == "table" else report_text(report, style)
    return Answer(FileVerdict(report["path"], "done", code), text)


def run_each(command: FileCommand, paths: tuple[str, ...], how: Workers, **rest: Any) -> int:
    """Run a command on every path itself: folders are not searched, and globs are not expanded."""
    from .inputs import Inputs

    return run(command, Inputs(paths), iter(paths), how, several=len(paths) > 1, **rest)


def run(
    command: FileCommand,
    inputs: Inputs,
    files: Iterator[FileItem],
    how: Workers,
    *,
    several: bool | None = None,
    bar: str = "",
    errors: ErrorLog | None = None,
    spaced: bool = False,
    finish: Callable[[Totals], int] = Totals.code,
) -> int:
    """Run a command on every file, write its answers, and return the exit code. Memory does not grow with the files.

    ``several`` makes JSON a list; by default, if the inputs may be more than one file. ``bar`` labels a progress bar
    that counts files. ``errors`` are written at once by default, ``spaced`` puts an empty line between texts. The
    function ``finish`` writes what belongs at the end and returns the exit code.
    """
    style = command.style
    if several is None:
        several = style == "json" and inputs.several  # no other format asks, and a folder takes time to recognise
    output = Output(style, several, command.columns, spaced)
    # Errors would interrupt a JSON list, so they are written after its end.
    totals = Totals(errors or ErrorLog(sys.maxsize if style == "json" and several else 0))
    in_rows = style == ROWS
    with ExitStack() as stack:
        files, step = stack.enter_context(inputs.counted(files, bar))
        work = partial(_answer, command, in_rows)
        for answer in stack.enter_context(closing(answers(work, files, how, command.after))):
            totals.add(answer)
            if in_rows and answer.has_row:
                emit(to_json(file_row(command.name, __version__, answer.verdict), None))
                flush()
            for remark in answer.remarks:
                totals.errors.add(remark)
            output.add(answer.text, answer.rows)
            for error in answer.errors:
                totals.errors.add(error)
            if step:
                step(1)
    output.close()
    code = finish(totals)
    totals.errors.close()
    if in_rows or inputs.files_from is not None:
        counts = ", ".join(f"{count:,} {word}" for word, count in totals.verdicts.most_common() if count)
        tell(f"{pluralize(totals.verdicts.total(), 'file')}{': ' * bool(counts)}{counts}")
    if how.error is not None:
        say_error(how.error)
        code = worst((code, how.error.exit_code))
    return code


def _answer(command: FileCommand, in_rows: bool, path: str) -> Answer:
    size = size_of(path) if in_rows else -1
    try:
        answer = command.work(path)
    except CkptoolError as error:
        answer = command.after(path, error)
    return answer._replace(verdict=answer.verdict._replace(size=size)) if in_rows else answer


# -- the work, by this process or by others


def answers(
    work: Callable[[str], Result],
    files: Iterable[str | UnreadableError | Precomputed[Result]],
    how: Workers,
    lost: Callable[[str, CkptoolError], Result],
) -> Generator[Result, None, None]:
    """Yield the result of ``work`` for every file, in input order.

    ``lost`` makes the result for an error that stands in place of a file, and for a file whose process died. Errors of
    ``work`` are raised here. When the generator ends, the worker processes have ended. If the engine is lost, the
    generator ends and ``how.error`` holds the error.
    """

    def given(file: UnreadableError | Precomputed[Result]) -> Result:
        return file.answer if isinstance(file, Precomputed) else lost(file.path, file)

    rest = iter(files)
    # A single file does not need a pool.
    first = [] if how.alone or how.engine != LOCAL else list(islice(rest, 2))
    if how.alone or (how.engine == LOCAL and len(first) < 2):
        for number, file in enumerate(chain(first, rest), 1):
            if number % _TIDY == 0:
                gc.collect(0)  # ``main`` turns the collector off, but indented JSON leaves a few cycles
            yield work(file) if isinstance(file, str) else given(file)
        return

    from ..files.engine import each_answer  # only several files need an engine

    def died(path: str, error: CkptoolError) -> Result:
        error.path = path
        return lost(path, error)

    items: Iterable[str | Precomputed[Result]] = (
        file if isinstance(file, str) else Precomputed(given(file)) for file in chain(first, rest)
    )
    begun = False
    try:
        for answer in each_answer(how.open, partial(_as_here, work, BREVITY.get()), items, died):
            begun = True
            yield answer
    except EngineError as error:
        if not begun:
            raise
        how.error = error


def _as_here(work: Callable[[str], Result], brevity: Brevity, path: str) -> Result:
    BREVITY.set(brevity)
    return work(path)
