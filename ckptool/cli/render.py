"""Printing: the only module that prints. It escapes everything that comes from a file."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Final

import click

from .. import __version__
from ..base.errors import CkptoolError, ReadBackError
from ..base.lazy import regex
from ..base.records import TypedDict
from ..base.steps import NextStep, advised
from ..base.text import shortened, visible
from . import terminal
from .terminal import judged, painted

if TYPE_CHECKING:
    from typing import NotRequired

    from ..checkpoint.checkpoint import Checkpoint


_UNSAFE_JSON = regex("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")
#: Commands to the GitHub Actions runner: "##[" anywhere, "::" at the start of a line.
_COMMAND = regex(r"##(?=\[)|\A\s*:(?=:)")
#: The same commands within JSON, where a string may begin anywhere in a line.
_COMMAND_JSON = regex(r"(?<=##)\[|(?<=:):")

#: Characters that may take no cell of a terminal, or two, and colours. The punctuation and arrows of our own tables
#: take one.
_WIDE = regex("[^\x20-\u02ff\u2010-\u2027\u2190-\u2193]")
#: The colours that ``terminal.painted`` writes.
_COLOUR = regex("\x1b\\[[0-9;]*m")
#: Table rows drawn in one step.
_BLOCK = 1000


def clean(text: str) -> str:
    """Escape everything that a terminal could interpret, and on GitHub Actions also commands to its runner."""
    text = visible(text)
    if ("#" in text or ":" in text) and "GITHUB_ACTIONS" in os.environ:
        text = _COMMAND.sub(lambda match: f"{match.group()[:-1]}\\x{ord(match.group()[-1]):02x}", text)
    return text


def cleaned(texts: Sequence[str]) -> Sequence[str]:
    """Return the texts, each escaped by ``clean``. Usually nothing needs it, which a single check shows."""
    everything = "".join(texts)
    if everything.isascii() and everything.isprintable() and "GITHUB_ACTIONS" not in os.environ:
        return texts
    return [clean(text) for text in texts]


def emit(text: str) -> None:
    """Write a line to stdout. The text must be clean."""
    emit_part(text + "\n")


def emit_part(text: str) -> None:
    """Write text to stdout without a line break at its end. The text must be clean."""
    if sys.stdout is None:  # the parent process closed it
        raise StdoutError(errno.EBADF, "stdout is closed")
    with _stdout_errors():
        sys.stdout.write(text)


def flush() -> None:
    """Flush stdout. Raises StdoutError if that fails."""
    if sys.stdout is not None:
        with _stdout_errors():
            sys.stdout.flush()


@contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(error.errno, error.strerror) from error


class StdoutError(OSError):
    """Writing to stdout failed, for example because the disk is full."""


def emit_lines(lines: Sequence[str]) -> None:
    """Write clean lines to stdout, or nothing if there are none."""
    if lines:
        emit("\n".join(lines))


#: Pieces are collected until they have this many characters, then escaped and written at once.
_PIECES: Final = 1 << 16


def emit_pieces(pieces: Iterable[str]) -> None:
    """Write pieces of JSON, escaped as in ``to_json``, and end the line."""
    pending: list[str] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size > _PIECES:  # there may be a million pieces, one per number
            emit_part(_safe_json("".join(pending)))
            pending, size = [], 0
    emit_part(_safe_json("".join(pending)) + "\n")


def _safe_json(text: str) -> str:
    if not text.isascii() or "\x7f" in text:
        text = _UNSAFE_JSON.sub(_escape_json, text)
    if "GITHUB_ACTIONS" in os.environ:
        text = _COMMAND_JSON.sub(_escape_json, text)
    return text


def _escape_json(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return JSON with control characters, bidi marks and lone surrogates escaped."""
    import json

    return _safe_json(json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=True))


def emit_report(report: Mapping[str, Any], lines: Callable[[], Sequence[str]], style: str, quiet: bool = False) -> None:
    """Write one report as lines for people, or as a JSON object; ``jsonl`` has it on one line."""
    if quiet:
        return
    if style == "table":
        emit_lines(lines())
    else:
        emit(to_json(report, None if style == "jsonl" else 2))


def unreadable(command: str, path: str, error: CkptoolError, style: str, quiet: bool) -> int:
    """Report why an input of a command with one report cannot be read. Return the exit code."""
    say_error(error)
    emit_report(failure(command, error.path or path, error), list, style, quiet)
    return error.exit_code


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    style: str = "table",
    right: Sequence[int] = (),
    *,
    columns: Sequence[Sequence[str]] | None = None,
    verdicts: int = -1,
    prose: int = -1,
    spare: Sequence[int] = (),
    indent: int = 0,
) -> str:
    """Return rows of strings as a table. ``right`` holds the columns of numbers; ``style`` is "table" or "markdown".

    Give ``columns`` in place of rows to make no object per row. A "table" is made to fit the terminal, ``indent`` cells
    from the left. Columns in ``spare`` are removed first, then the column ``prose`` is wrapped and other columns are
    shortened in the middle. The column ``verdicts`` is coloured.
    """
    columns = list(zip(*rows, strict=True)) if columns is None else columns
    columns = [cleaned(column) for column in columns]
    if style == "table":
        shown = dict(enumerate(columns))
        most = terminal.columns() - indent
        if most > 0 and columns and columns[0]:
            shown = _fitted(headers, columns, [*right, verdicts], spare, prose, most)
        if verdicts in shown:
            shown[verdicts] = [judged(text) for text in shown[verdicts]]
        headers, columns = [headers[number] for number in shown], list(shown.values())
        right = [place for place, number in enumerate(shown) if number in right]
        return "\n".join(_drawn(headers, columns, right))
    return _markdown(headers, list(zip(*columns)), right)


def _fitted(
    headers: Sequence[str],
    columns: Sequence[Sequence[str]],
    fixed: Sequence[int],
    spare: Sequence[int],
    prose: int,
    most: int,
) -> dict[int, Sequence[str]]:
    """Map the columns that fit into ``most`` cells by their numbers. Texts outside ``fixed`` are cut or wrapped."""
    # Like tabulate, make a column at least two cells wider than its header.
    least = [len(header) + 2 for header in headers]
    widths = [max(width, *map(terminal.cells, column)) for width, column in zip(least, columns)]
    if prose >= 0:
        fixed = [number for number in range(len(columns)) if number != prose]
    result = {}
    for number, width in terminal.fitting(widths, fixed, spare, most):
        cut = terminal.broken if number == prose else terminal.elided
        narrow = max(width, least[number])
        whole = narrow >= widths[number]
        result[number] = columns[number] if whole else [cut(text, narrow) for text in columns[number]]
    return result


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    from tabulate import tabulate  # it takes longer to import than most commands run

    align = ["right" if number in right else "left" for number in range(len(headers))]
    rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    text = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True, colalign=align if rows else None)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _drawn(headers: Sequence[str], columns: Sequence[Sequence[str]], right: Sequence[int]) -> Iterator[str]:
    columns = [_stripped(column) for column in columns]
    if not columns or not columns[0]:
        columns, right = [()] * len(headers), ()
    narrow = [_narrow(column) for column in columns]
    if not all(narrow):
        columns = _single_lines(columns)
    heads = list(headers)
    widths, forms = [], []
    for number, column in enumerate(columns):
        # Like tabulate, make a column at least two cells wider than its header.
        width = max([len(heads[number]) + 2, *map(len if narrow[number] else _cells, column)])
        form = f"%{'' if number in right else '-'}{width}s"
        if not narrow[number]:  # the form counts characters, so add spaces here
            heads[number] = form % heads[number]
            columns[number] = [_padded(text, width, number in right) for text in column]
            form = "%s"
        widths.append(width)
        forms.append(form)
    line = "  ".join(forms)
    lines = [line % tuple(heads), "  ".join("-" * width for width in widths)]
    yield "\n".join([line.rstrip() for line in lines])
    rows = zip(*columns)
    for _ in range(0, len(columns[0]) if columns else 0, _BLOCK):
        yield "\n".join([(line % row).rstrip() for row in islice(rows, _BLOCK)])


def _single_lines(columns: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Give each line of a wrapped text a row of its own, with empty cells next to it."""
    rows = [row for cells in zip(*columns) for row in zip_longest(*[cell.split("\n") for cell in cells], fillvalue="")]
    return list(zip(*rows))


def _narrow(texts: Sequence[str]) -> bool:
    """Return whether every character surely takes one terminal cell, which lets ``len`` measure the texts."""
    everything = "".join(texts)
    return (everything.isascii() and everything.isprintable()) or not _WIDE.search(everything)


def _cells(text: str) -> int:
    return terminal.cells(_COLOUR.sub("", text))


def _padded(text: str, width: int, right: bool) -> str:
    spaces = " " * (width - _cells(text))
    return spaces + text if right else text + spaces


def _stripped(texts: Sequence[str]) -> Sequence[str]:
    """Strip spaces around each text, as tabulate does. Usually no text contains a space, so check all at once first."""
    everything = "".join(texts)
    return texts if everything.isascii() and " " not in everything else [text.strip() for text in texts]


def pairs(rows: Sequence[tuple[str, str]], verdict: str = "") -> str:
    """Return lines of a label and a text, with the texts aligned. A text that begins with ``verdict`` is coloured."""
    width = max((len(label) for label, _ in rows), default=0)
    lines = []
    for label, text in rows:
        text = terminal.wrapped(text, width + 2)
        if verdict and text.startswith(verdict):
            text = judged(verdict) + text.removeprefix(verdict)
        lines.append(f"{label:<{width}}  {text}")
    return "\n".join(lines)


def say_error(error: CkptoolError) -> None:
    """Write an error and its next step to stderr."""
    first, *rest = shortened(clean(str(error)), clean(error.step.advice), error.path).split("\n")
    say(first, "error")
    for line in rest:
        tell(line)
    tell_step(error.step)
    for line in report_lines(error):
        tell(f"     {line}")


def step_lines(step: str) -> list[str]:
    """Return a list with the line of a next step, or [] if ``step`` is "". The line is a command and nothing else."""
    return [ARROW + painted(clean(step), "command")] if step else []


def advised_step(advice: str, step: str) -> list[str]:
    """Return the lines of a next step: its prose and its command. Either may be ""."""
    return [*([shortened(clean(f"  {advice}{':' if step else ''}"))] if advice else []), *step_lines(step)]


#: The start of the line of a next step.
ARROW: Final = "  -> "


def tell_step(step: NextStep) -> None:
    """Write the command of a next step to stderr."""
    if step.line:
        tell(ARROW + step.line)


def report_lines(error: CkptoolError) -> list[str]:
    """Return the lines of a bug report, or [] if the error is not a bug in ckptool."""
    if not isinstance(error, ReadBackError):
        return []
    typed = click.get_current_context(silent=True)
    command = typed.info_name if typed is not None else None
    return [f"ckptool {__version__} {command or ''}".rstrip(), *error.report]


def say(text: str, level: str = "") -> None:
    """Write a message to stderr. ``level``, "error" or "warning", colours the program name."""
    _tell(f"{judged('ckptool:', level, sys.stderr)} {clean(text)}")


def tell(text: str) -> None:
    """Write a line to stderr, with next steps and warnings in colour."""
    text = clean(text) if ARROW in text else shortened(clean(text))
    if text.startswith(ARROW):
        text = ARROW + painted(text.removeprefix(ARROW), "command", sys.stderr)
    _tell(text.replace(_WARNING, judged(_WARNING, "warning", sys.stderr), 1) if text.startswith(_WARNING) else text)


def _tell(text: str) -> None:
    """Write a clean line to stderr. Ignore a full or closed stderr: the exit code still counts."""
    try:
        click.echo(text, err=True)
    except OSError:
        return


def say_model(model: str) -> None:
    """Announce on stderr that --model runs code. No other option does."""
    say(f"--model imports and runs {model}")


def say_problems(checkpoint: Checkpoint) -> None:
    """Write the problems of a file to stderr, for commands that continue despite them."""
    for line in problem_lines(checkpoint):
        tell(line)


#: The start of a warning on stderr.
_WARNING: Final = "ckptool: warning:"


def problem_lines(checkpoint: Checkpoint) -> list[str]:
    """Return a line per error of the file; for a checkpoint assembled from parts, also its warnings."""
    from ..base.findings import CUT, FLAT_PARAMETERS
    from ..base.steps import salvage_step

    lines = []
    for problem in checkpoint.container.problems_of_edits():
        if problem.code != FLAT_PARAMETERS:  # edits report flat parameters themselves
            lines.append(f"{_WARNING} {checkpoint.path}: {problem.message}")
        if problem.code == CUT:
            lines.append(ARROW + salvage_step(checkpoint.path).line)
    return lines


class FailureReport(TypedDict):
    """An input that cannot be read or edited. ``next`` is the command to type, or "".

    ``format`` names the kind of a file of another type, if known. ``report`` holds the lines of a bug report.
    """

    schema: str
    path: str
    error: str
    next: str
    format: NotRequired[str]
    report: NotRequired[list[str]]


def schema_of(command: str) -> str:
    """Return the name of the schema of a command's reports: ``ckptool.lora-merge/1``."""
    return f"ckptool.{command.replace(' ', '-')}/1"


def failure(command: str, path: str, error: CkptoolError) -> FailureReport:
    """Return the report on an input that cannot be read or edited, so that JSON has an object for every input."""
    what = advised(error.what, error.step)
    report: FailureReport = {"schema": schema_of(command), "path": path, "error": what, "next": error.step.line}
    kind = getattr(error, "kind", None)
    lines = report_lines(error)
    if kind:
        report["format"] = kind
    if lines:
        report["report"] = lines
    return report
