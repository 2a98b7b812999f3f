"""The scan command: show what code a file from elsewhere could run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain
from typing import Final

import click

from ..base.engines import Precomputed
from ..base.errors import CkptoolError, UnreadableError
from ..base.text import cut, join_limited, pluralize
from ..formats.checkpoint_search import SkippedFile, find_all
from ..reports.scan import (
    FileScan,
    ScanLine,
    not_scanned,
    passed_over_words,
    path_verdict,
    scan_path,
    scan_report,
    scan_verdict,
)
from ..safety.rules import VERDICTS, WEIGHTS_ONLY
from ..safety.torch_lists import DEFAULT, VERSIONS
from .help import GroupedCommand
from .inputs import Inputs, input_options
from .options import REPORT_FORMATS, Workers, format_option
from .render import clean, emit, emit_lines, tell
from .runner import KEPT, NAMED, ROWS, WHOLE, Answer, ErrorLog, FileCommand, FileItem, Totals, report_text, run
from .terminal import judged, on_terminal

#: The most reasons printed per file.
_REASONS: Final = 3


@click.command(cls=GroupedCommand)
@click.option(
    "--torch", metavar="VERSION", help="The torch version whose weights_only list applies.  [default: installed]"
)
@input_options
@format_option((*REPORT_FORMATS, ROWS))
@click.option("-v", "--verbose", is_flag=True, help="List every file, and every reason.")
def scan(inputs: Inputs, torch: str | None, working: Workers, style: str, verbose: bool) -> int:
    """Show what code a file could run when it is loaded.

    Looks at every file of a folder by its content: checkpoints, pickles of any kind, what is in archives and compressed
    data. Nothing in a file is run. What is not looked into is named. For a folder, only the files that are not
    weights-only are listed; -v lists all. Exit 0: every file is weights-only; 1: one is not; 3: one cannot be read, or
    there is nothing to judge.
    """
    version = torch or DEFAULT
    if version not in VERSIONS:
        raise click.BadParameter(f"known are {join_limited(VERSIONS, most=len(VERSIONS))}", param_hint="--torch")
    shown = None if verbose else frozenset(inputs.paths)
    each = FileCommand(
        "scan",
        WHOLE if style == "json" else style,
        partial(_scanned, torch=version, style=style, shown=shown),
        partial(_not_scanned, style),
    )
    files: Iterator[FileItem] = (
        Precomputed(_answer([not_scanned(item.path, item)], style, shown)) if isinstance(item, SkippedFile) else item
        for item in inputs.files(find_all)
    )
    return run(
        each,
        inputs,
        files,
        working,
        bar="scanning" if (style != "table" or not on_terminal()) else "",
        errors=ErrorLog(KEPT),
        finish=partial(_end, inputs, version, style, verbose),
    )


def _scanned(path: str, *, torch: str, style: str, shown: Collection[str] | None) -> Answer:
    return _answer(scan_path(path, torch), style, shown)


def _not_scanned(style: str, path: str, error: CkptoolError) -> Answer:
    return _answer([not_scanned(path, error)], style, ())


def _answer(scans: list[FileScan], style: str, shown: Collection[str] | None) -> Answer:
    """Return the answer for a path. Files without reasons get a line if they are in ``shown``, or it is None."""
    lines: list[str] = []
    if style == "jsonl":
        described: list[ScanLine] = [{"schema": "ckptool.scan-file/1", **item} for item in scans]
        lines = [report_text(item, style) for item in described]
    elif style == "table":
        lines = [line for item in scans for line in _lines(item, shown)]
    return Answer(
        path_verdict(scans),
        "\n".join(lines),
        errors=tuple(
            UnreadableError(item["error"], path=item["path"], next=item["next"])
            for item in scans
            if item["error"] is not None
        ),
        parts=tuple(map(scan_verdict, scans)),
        data=scans if style == "json" else None,
    )


def _end(inputs: Inputs, torch: str, style: str, verbose: bool, totals: Totals) -> int:
    """Write the report for JSON, or the numbers of files by verdict and the skipped files. Return the exit code."""
    words = {word: totals.words[word] for word in VERDICTS if totals.words[word]}
    if style == "json":
        emit(report_text(scan_report(chain.from_iterable(totals.data), torch), style))
    elif style == "table":
        files = sum(words.values())
        several = files > 1 or (files == 1 and inputs.several)
        counts = [f"{count:,} {judged(word)}" for word, count in words.items()]
        over = passed_over_words(dict(totals.skipped.most_common()))
        if over and not verbose:
            over += f": {join_limited(totals.named, totals.skipped.total(), most=NAMED)}"
        emit_lines([*([f"{pluralize(files, 'file')}: {', '.join(counts)}"] if several else []), *filter(None, [over])])
    totals.errors.close()
    if totals.errors.count:
        return UnreadableError.exit_code
    if not words:
        named = inputs.paths or (inputs.files_from or "",)
        tell("ckptool: there is nothing to judge in " + join_limited(list(named)))
        return UnreadableError.exit_code
    return 0 if set(words) == {WEIGHTS_ONLY} else 1


def _lines(item: FileScan, shown: Collection[str] | None) -> list[str]:
    """Return a line with the verdict on a file and the first reason, then a line per further reason."""
    path, verbose = clean(item["path"]), shown is None
    if item["verdict"] is None:
        return [f"{path}: skipped ({item['passed_over']})"] if verbose and item["passed_over"] else []
    reasons = [clean(reason) if verbose else cut(clean(reason)) for reason in item["reasons"]]
    if not reasons:
        if shown is not None and item["path"] not in shown:
            return []
        return [f"{path}: {judged(item['verdict'])}"]
    first, *rest = reasons
    lines = [f"{path}: {judged(item['verdict'])}: {first}"]
    most = len(rest) if verbose else _REASONS - 1
    lines += [f"  {reason}" for reason in rest[:most]]
    if len(rest) > most:
        lines.append(f"  and {len(rest) - most:,} more: --verbose")
    return lines
