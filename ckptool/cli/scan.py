"""The scan command: show what code a file from elsewhere could run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

import click

from ..base.engines import Ready
from ..base.errors import CkptoolError, UnreadableError
from ..base.text import cut, join_limited, pluralize
from ..formats.checkpoint_search import SkippedFile, find_all
from ..reports.rows import PASSED_OVER, FileVerdict
from ..reports.scan import (
    FileScan,
    ScanLine,
    passed_over_words,
    path_verdict,
    scan_path,
    scan_report,
    scan_verdict,
    skipped,
    unread,
)
from ..safety.outcomes import VERDICTS, WEIGHTS_ONLY
from ..safety.torch_lists import NEWEST, VERSIONS
from .fleet import ROWS, Errors, Fleet, fleet_options
from .options import REPORT_FORMATS, format_option, progress_option
from .render import clean, emit, emit_lines, flush, tell
from .streams import Reports, report_text
from .terminal import judged, on_terminal

EPILOG = """\b
Examples:
  ckptool scan model.pth
  ckptool scan downloads/
  ckptool scan agent.zip weights.tar.gz --format json

\b
Verdicts:
  weights-only  nothing but what torch.load(weights_only=True) takes, or nothing that can run
  unsafe        something is run when it is unpickled, and what
  program       TorchScript and its like, or code: it runs by design
  unknown       it names classes that are not on torch's list, or it cannot be followed
"""
#: The most reasons printed per file, and the most skipped files named.
_REASONS: Final = 3
_NAMED: Final = 5


@click.command(epilog=EPILOG)
@click.option(
    "--torch", metavar="VERSION", help="The torch version whose weights_only list applies.  [default: the newest]"
)
@fleet_options
@format_option((*REPORT_FORMATS, ROWS))
@click.option("-v", "--verbose", is_flag=True, help="Name every file that was passed over, and every reason.")
@progress_option
def scan(
    paths: tuple[str, ...], torch: str | None, working: Fleet, style: str, verbose: bool, no_progress: bool
) -> int:
    """Show what code a file could run when it is loaded.

    Looks at every file of a folder by its content: checkpoints, pickles of any kind, what is in archives and compressed
    data. Nothing in a file is run. What is not looked into is named. Exit 0: every file is weights-only; 1: one is
    not; 3: one cannot be read, or there is nothing to judge.
    """
    version = torch or NEWEST
    if version not in VERSIONS:
        raise click.BadParameter(f"known are {join_limited(VERSIONS, most=len(VERSIONS))}", param_hint="--torch")
    working.begin("scan", style, {"torch": version})
    found: Iterator[str | SkippedFile | UnreadableError] = working.files(paths, find_all, str)
    files = (Ready([skipped(item)]) if isinstance(item, SkippedFile) else item for item in found)
    sums, reports = _Sums(), Reports(style, True)
    every: list[FileScan] = []
    work = partial(scan_path, torch=version)
    bar = not no_progress and (style != "table" or not on_terminal())
    with working.counted(files, "scanning", bar) as (items, step):
        for scans, verdict in working.results(work, items, _lost, path_verdict):
            if step:
                step(1)
            if scans is None:
                sums.add(verdict)
            for item in scans or ():
                sums.add(scan_verdict(item))
                if style == "json":
                    every.append(item)
                elif style == "jsonl":
                    line: ScanLine = {"schema": "ckptool.scan-file/1", **item}
                    reports.add(report_text(line, style))
                elif style == "table":
                    emit_lines(_lines(item, verbose))
                    flush()
                if item["error"] is not None:
                    sums.errors.add(UnreadableError(item["error"], path=item["path"], next=item["next"]))
    if style == "json":
        emit(report_text(scan_report(every, version), style))
    elif style == "table":
        lines = sums.lines(verbose)
        if lines:
            emit("\n".join(lines))
    sums.errors.say()
    if sums.errors.count:
        return 3
    if not sums.words:
        what = paths or (working.files_from or "",)
        tell("ckptool: there is nothing to judge in " + join_limited(list(what)))
        return 3
    return 0 if set(sums.words) == {WEIGHTS_ONLY} else 1


def _lost(path: str, error: CkptoolError) -> list[FileScan]:
    return [unread(path, error)]


class _Sums:
    """Totals over all files: verdicts, errors, and skipped files by reason."""

    def __init__(self) -> None:
        self.words: Counter[str] = Counter()
        self.errors = Errors()
        self._over: Counter[str] = Counter()
        self._named: list[str] = []

    def add(self, verdict: FileVerdict) -> None:
        if verdict.verdict in VERDICTS:
            self.words[verdict.verdict] += 1
        elif verdict.verdict == PASSED_OVER:
            self._over[verdict.message] += 1
            if len(self._named) < _NAMED:
                self._named.append(os.path.basename(verdict.path))

    def lines(self, verbose: bool) -> list[str]:
        """Return the lines that count the files by verdict, and the skipped files."""
        files = sum(self.words.values())
        counts = [f"{self.words[word]:,} {judged(word)}" for word in VERDICTS if word in self.words]
        over = passed_over_words(dict(self._over.most_common()))
        if over and not verbose:
            over += f": {join_limited(self._named, sum(self._over.values()), most=_NAMED)}"
        return list(filter(None, (f"{pluralize(files, 'file')}: {', '.join(counts)}" if files > 1 else "", over)))


def _lines(item: FileScan, verbose: bool) -> list[str]:
    """Return a line with the verdict on a file and the first reason, then a line per further reason."""
    path = clean(item["path"])
    if item["verdict"] is None:
        return [f"{path}: passed over ({item['passed_over']})"] if verbose and item["passed_over"] else []
    reasons = [clean(reason) if verbose else cut(clean(reason)) for reason in item["reasons"]]
    if not reasons:
        return [f"{path}: {judged(item['verdict'])}"]
    first, *rest = reasons
    lines = [f"{path}: {judged(item['verdict'])}: {first}"]
    most = len(rest) if verbose else _REASONS - 1
    lines += [f"  {reason}" for reason in rest[:most]]
    if len(rest) > most:
        lines.append(f"  and {len(rest) - most:,} more: --verbose")
    return lines
