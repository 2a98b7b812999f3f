"""The stats command: show statistics of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import click

import ckptool

from ..base.errors import UnreadableError
from ..base.steps import salvage_step
from ..base.text import join_limited, pluralize, shape_text
from ..checkpoint.selection import select_entries
from ..formats.checkpoint_search import as_one
from ..reports.file_rows import FileVerdict
from ..reports.stats import SORTS, StatsReport, bytes_to_read, statistics_of
from .help import GroupedCommand
from .inputs import Inputs, input_options
from .options import (
    ALL_FORMATS,
    PLAIN_KINDS,
    Workers,
    dequantized_option,
    format_option,
    key_option,
    listing,
    sort_option,
    unmatched_lines,
)
from .render import ARROW, clean, problem_lines, table
from .runner import JSON, Answer, Columns, FileCommand, report_text, run
from .terminal import draws, progress_bar, watched

#: The characters of a chart from few to many, then its left and right edges.
_BLOCKS: Final = ("▁▂▃▄▅▆▇█", "▕", "▏")
_ASCII: Final = (".:-=+*#@", "|", "|")
#: The columns of a table between the name and the chart.
_HEADERS: Final = ("dtype", "shape", "min", "max", "mean", "std", "norm", "zeros")
#: Columns that a narrow terminal loses, first to last.
_SPARE: Final = ("norm", "shape", "zeros", "dtype", "min .. max", "mean", "std")


@click.command(cls=GroupedCommand)
@input_options
@listing
@sort_option(SORTS)
@dequantized_option
@key_option
@format_option(ALL_FORMATS)
def stats(inputs: Inputs, working: Workers, style: str, **how: Any) -> int:
    """Show statistics of every tensor: min, max, mean, std, norm, zeros, NaN, Inf, histogram.

    Bytes are streamed: memory does not grow with the file. Needs torch for arithmetic, never to load.
    Takes files, folders (searched for checkpoints by content) and globs. JSON is an object for one named file,
    otherwise a list.
    """
    inputs = inputs._replace(paths=as_one(inputs.paths))
    several = inputs.several
    headers = (("file",) if several else ()) + _COLUMNS
    numbers = range(len(headers) - len(_NUMBERS) - 1, len(headers) - 1)
    own_bar = working.alone and watched()
    each = FileCommand(
        "stats",
        style,
        partial(_measured, own_bar=own_bar, style=style, several=several, how=how),
        columns=Columns(headers, numbers) if style == "markdown" else None,
    )
    return run(each, inputs, inputs.checkpoints(), working, spaced=style == "table")


def _measured(path: str, *, own_bar: bool, style: str, several: bool, how: Mapping[str, Any]) -> Answer:
    key, everything, only = how["key"], how["everything"], how["only"]
    with ckptool.open(path) as checkpoint:
        if how["dequantized"]:
            from ..edits.dequantize import plain_of  # few models are quantized

            checkpoint = plain_of(checkpoint)
        total = bytes_to_read(select_entries(checkpoint, key, everything, only)) if own_bar else 0
        with progress_bar(total, "measuring", own_bar) as progress:
            report = statistics_of(
                checkpoint, key=key, everything=everything, globs=only, sort=how["sort"], progress=progress
            )
        remarks = problem_lines(checkpoint)
        if only and not report["tensors"]:
            remarks += unmatched_lines(checkpoint, only, key, everything)
    missing = report["summary"]["missing"]
    if missing:
        words = f"the bytes of {pluralize(len(missing), 'tensor')} are missing: {join_limited(missing, most=3)}"
        step = salvage_step(path).line
        remarks += [f"ckptool: {path}: {words}", *([ARROW + step] if step else [])]
    # A file with missing bytes counts as unreadable, although its other rows are shown.
    verdict = FileVerdict(path, "measured", UnreadableError.exit_code if missing else 0)
    if style in JSON:
        return Answer(verdict, report_text(report, style), remarks=tuple(remarks))
    if style == "table":
        drawn = [_sections(report), ""] if report["tensors"] else []
        text = "\n".join([*[clean(path)] * several, *drawn, *_summary(report, everything)])
        return Answer(verdict, text, remarks=tuple(remarks))
    rows = tuple(((path,) if several else ()) + _cells(row) for row in report["tensors"])
    return Answer(verdict, rows=rows, remarks=tuple(remarks))


_NUMBERS: Final = ("min", "max", "mean", "std", "norm", "zeros", "nans", "infs")
_COLUMNS: Final = ("state_dict", "key", "path", "dtype", "shape", *_NUMBERS, "reason")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of a Markdown table: always the same columns, and numbers with all their digits."""
    numbers = ("" if row[name] is None else str(row[name]) for name in _NUMBERS)
    names = row["state_dict"] or "", row["key"], row["path"]
    return *names, row["dtype"], shape_text(row["shape"]), *numbers, row["reason"] or ""


def _sections(report: StatsReport) -> str:
    """Return a table per state dict, and one for the tensors outside of them."""
    groups: dict[str | None, list[Mapping[str, Any]]] = {}
    for row in report["tensors"]:
        groups.setdefault(row["state_dict"], []).append(row)
    # Leave out the NaN and Inf columns if they would contain only zeros: the summary says so.
    summary: Mapping[str, Any] = report["summary"]
    bad = [(name, label) for name, label in (("nans", "NaN"), ("infs", "Inf")) if summary[name]]
    marks = _BLOCKS if draws("".join(_BLOCKS)) else _ASCII
    names = _shown(report)
    parts = []
    for place, entries in groups.items():
        label = "path" if place is None else "key"
        headers = [label, *_HEADERS, *(label for _, label in bad), "min .. max"]
        counts = ["zeros", *(name for name, _ in bad)]
        rows = [
            [str(row[label]) or ".", _dtype(row), *_line(row, counts), _chart(row, marks, names)] for row in entries
        ]
        spare = [headers.index(name) for name in _SPARE]
        drawn = table(headers, rows, right=range(3, len(headers) - 1), spare=spare)
        parts.append((f"{clean(place)}:\n" if place and len(groups) > 1 else "") + drawn)
    return "\n\n".join(parts)


def _shown(report: StatsReport) -> dict[str, str]:
    """Map paths to the names to show: keys if all tensors are in one state dict, otherwise paths."""
    rows = report["tensors"]
    single = len({row["state_dict"] for row in rows}) == 1
    return {row["path"]: (row["key"] if single else row["path"]) or "." for row in rows}


def _dtype(row: Mapping[str, Any]) -> str:
    if "sharding" in row:
        return f"{row['dtype']} ({row['sharding']} part)"
    return row["dtype"] if row["kind"] in PLAIN_KINDS else f"{row['dtype']} ({row['kind']})"


def _line(row: Mapping[str, Any], counts: list[str]) -> list[str]:
    numbers = (_short(row[name]) for name in ("min", "max", "mean", "std", "norm"))
    return [shape_text(row["shape"]), *numbers, *("" if row[name] is None else f"{row[name]:,}" for name in counts)]


def _short(value: object) -> str:
    """Format a number with four significant digits."""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) >= 1_000_000):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _chart(row: Mapping[str, Any], marks: tuple[str, str, str], names: dict[str, str]) -> str:
    """Return the histogram, one character per bin, or why it is missing, such as "(all zero)"."""
    levels, left, right = marks
    if row["reason"] is not None:
        return f"({row['reason']})"
    if row["same_as"] is not None:
        return f"= {names.get(row['same_as'], row['same_as'])}"
    if not row["finite"]:
        return "(empty)" if not row["numel"] else "(no finite number)"
    counts = row["histogram"]["counts"]
    if len(counts) == 1:
        return "(one number)" if row["finite"] == 1 else "(all zero)" if row["min"] == 0 else "(all the same)"
    most = max(counts)
    return left + "".join(levels[-(-count * len(levels) // most) - 1] if count else " " for count in counts) + right


def _summary(report: StatsReport, everything: bool) -> list[str]:
    """Return the totals, and the tensors with suspicious values."""
    summary: Mapping[str, Any] = report["summary"]
    names = _shown(report)
    rest = report["in_file"] - report["listed"]
    if not summary["tensors"]:
        return [f"no tensor matches; the file has {rest:,}" if rest else "no tensors"]
    tied = summary["tensors"] - summary["distinct"]
    lines = [
        f"{pluralize(summary['tensors'], 'tensor')}"
        + (f" ({tied:,} of them the same as another)" if tied else "")
        + f", {pluralize(summary['elements'], 'element')}, {summary['zeros']:,} zero"
        + (f"; {rest:,} more in the file" + ("" if everything else ": --all") if rest else "")
    ]
    for name, what in (("with_nan", "NaN in"), ("with_inf", "Inf in"), ("all_zero", "all zero:")):
        if summary[name]:
            lines.append(clean(f"{what} {_names(summary[name], names)}"))
    if summary["without_numbers"]:
        lines.append(clean(f"no numbers of {_names(summary['without_numbers'], names)}"))
    if not summary["with_nan"] + summary["with_inf"]:
        lines.append("no NaN, no Inf" + (" in the others" if summary["without_numbers"] else ""))
    return lines


def _names(paths: list[str], names: dict[str, str]) -> str:
    shown = join_limited([names[path] for path in paths])
    return shown if len(paths) == 1 else f"{pluralize(len(paths), 'tensor')}: {shown}"
