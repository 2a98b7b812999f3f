"""The command stats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import click

import ckptool

from ..base.errors import CkptoolError, UnreadableError
from ..base.globs import Globs
from ..base.steps import salvage_step
from ..base.text import join_limited, pluralize, shape_text
from ..formats.checkpoint_search import names_one_file
from ..reports.keys import select_entries, unmatched
from ..reports.stats import SORTS, StatsReport, bytes_to_read, statistics_of
from .jobs import each_input, jobs_option
from .options import ALL_FORMATS, PLAIN_KINDS, format_option, key_option, listing, paths, progress_option, sort_option
from .render import clean, emit, problem_lines, say, table, tell, tell_step
from .streams import Outcomes, progress_bar
from .terminal import draws, watched

STATS_EPILOG = """\b
Examples:
  ckptool stats model.pth
  ckptool stats model.pth --include '*.weight' --sort norm
  ckptool stats training.pth --all --sort nans
  ckptool stats model.pth --format json

\b
The numbers are about the finite elements; NaN, Inf and zeros are counted beside
them. std is that of a sample (divided by n - 1), norm is the L2 norm. Complex
numbers count by their absolute value, quantized ones as the numbers that they
stand for, sparse and nested tensors by the values that they store. The chart
goes from min to max in ten equal steps; --format json has its counts and edges,
and every number in full. A number beyond JSON is a text there: "nan", "inf".
"""

#: The characters of a chart from few to many, and its left and right edges.
_BLOCKS: Final = ("▁▂▃▄▅▆▇█", "▕", "▏")
_ASCII: Final = (".:-=+*#@", "|", "|")


@click.command(epilog=STATS_EPILOG)
@paths
@listing
@sort_option(SORTS)
@key_option
@jobs_option
@format_option(ALL_FORMATS)
@progress_option
def stats(paths: tuple[str, ...], jobs: int, style: str, no_progress: bool, **how: Any) -> int:
    """Show statistics of every tensor: min, max, mean, std, norm, zeros, NaN, Inf.

    Bytes are streamed: memory does not grow with the file. Needs torch for arithmetic, never to load. Takes
    files, folders (searched for checkpoints by content) and globs. JSON is an object for one named file, otherwise a
    list.
    """
    several = not names_one_file(paths)
    rows: list[tuple[str, ...]] = []
    outcomes = Outcomes("stats", paths, style, several=several)
    work = partial(_report, bar=not no_progress and jobs == 1 and watched(), **how)
    for number, (path, answer) in enumerate(each_input(work, paths, jobs)):
        with outcomes.input(path):
            if isinstance(answer, CkptoolError):
                raise answer
            report, remarks = answer
            for line in remarks:
                tell(line)
            outcomes.add(report, _code(path, report))
            if style == "table":
                title = [""] * (number > 0) + [clean(path)] * several
                drawn = [_sections(report), ""] if report["tensors"] else []
                emit("\n".join([*title, *drawn, *_summary(report, how["everything"])]))
            else:
                rows += [((path,) if several else ()) + _cells(row) for row in report["tensors"]]
    if style in ("csv", "markdown", "plain"):
        headers = (("file",) if several else ()) + _COLUMNS
        emit(table(headers, rows, style, right=range(len(headers) - len(_NUMBERS) - 1, len(headers) - 1)))
    return outcomes.finish()


def _report(
    path: str, *, bar: bool, key: str | None, everything: bool, only: Globs, sort: str
) -> tuple[StatsReport, list[str]]:
    with ckptool.open(path) as checkpoint:
        total = bytes_to_read(select_entries(checkpoint, key, everything, only)) if bar else 0
        with progress_bar(total, "measuring", bar) as progress:
            report = statistics_of(checkpoint, key=key, everything=everything, globs=only, sort=sort, progress=progress)
        remarks = problem_lines(checkpoint)
        if only and not report["tensors"]:
            remarks.append(f"ckptool: {path}: {unmatched(checkpoint, only, key, everything)}")
        return report, remarks


def _code(path: str, report: StatsReport) -> int:
    """Return the exit code: a file with missing bytes counts as unreadable, although its other rows are shown."""
    missing = report["summary"]["missing"]
    if not missing:
        return 0
    say(f"{path}: the bytes of {pluralize(len(missing), 'tensor')} are missing: {join_limited(missing, most=3)}")
    tell_step(salvage_step(path))
    return UnreadableError.exit_code


_NUMBERS: Final = ("min", "max", "mean", "std", "norm", "zeros", "nans", "infs")
_COLUMNS: Final = ("state_dict", "key", "path", "dtype", "shape", *_NUMBERS, "reason")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row for machines: always the same columns, numbers in full."""
    numbers = ("" if row[name] is None else str(row[name]) for name in _NUMBERS)
    names = row["state_dict"] or "", row["key"], row["path"]
    return *names, row["dtype"], shape_text(row["shape"]), *numbers, row["reason"] or ""


def _sections(report: StatsReport) -> str:
    """Return a table for each state dict, and one for the tensors outside of them."""
    groups: dict[str | None, list[Mapping[str, Any]]] = {}
    for row in report["tensors"]:
        groups.setdefault(row["state_dict"], []).append(row)
    # Columns of nothing but zeros are left to the summary.
    summary: Mapping[str, Any] = report["summary"]
    bad = [(name, label) for name, label in (("nans", "NaN"), ("infs", "Inf")) if summary[name]]
    marks = _BLOCKS if draws("".join(_BLOCKS)) else _ASCII
    names = _shown(report)
    parts = []
    for place, entries in groups.items():
        label = "path" if place is None else "key"
        headers = [label, "dtype", "shape", "min", "max", "mean", "std", "norm", "zeros", *(label for _, label in bad)]
        counts = ["zeros", *(name for name, _ in bad)]
        rows = [[row[label] or ".", _dtype(row), *_line(row, counts), _chart(row, marks, names)] for row in entries]
        drawn = table([*headers, "min .. max"], rows, right=range(3, len(headers)))
        parts.append((f"{clean(place)}:\n" if place and len(groups) > 1 else "") + drawn)
    return "\n\n".join(parts)


def _shown(report: StatsReport) -> dict[str, str]:
    """Return the names to show for paths: the keys, if there is one state dict."""
    rows = report["tensors"]
    single = len({row["state_dict"] for row in rows}) == 1
    return {row["path"]: (row["key"] if single else row["path"]) or "." for row in rows}


def _dtype(row: Mapping[str, Any]) -> str:
    if "sharding" in row:
        return f"{row['dtype']} ({row['sharding']} part)"
    return row["dtype"] if row["kind"] in PLAIN_KINDS else f"{row['dtype']} ({row['kind']})"


def _line(row: Mapping[str, Any], counts: list[str]) -> list[str]:
    numbers = [_short(row[name]) for name in ("min", "max", "mean", "std", "norm")]
    return [shape_text(row["shape"]), *numbers, *("" if row[name] is None else f"{row[name]:,}" for name in counts)]


def _short(value: object) -> str:
    """Format a number with four significant digits."""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) >= 1_000_000):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _chart(row: Mapping[str, Any], marks: tuple[str, str, str], names: dict[str, str]) -> str:
    """Return the histogram, one character per bin, or the reason why there is none."""
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
    """Return the totals, and what is suspicious."""
    summary: Mapping[str, Any] = report["summary"]
    names = _shown(report)
    rest = report["in_file"] - report["listed"]
    if not summary["tensors"]:
        return [f"no tensors; {rest:,} more in the file: --all" if rest and not everything else "no tensors"]
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
