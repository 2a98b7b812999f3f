"""The command scan: what code files from elsewhere could run."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Final

import click

from ..base.errors import CkptoolError, UnreadableError
from ..base.text import cut, join_limited, pluralize
from ..formats.checkpoint_search import SkippedFile, find_all
from ..reports.scan import FileScan, ScanLine, passed_over_words, scan_file, scan_report, skipped, unread
from ..safety.torch_lists import NEWEST, VERSIONS
from ..safety.verdict import VERDICTS, WEIGHTS_ONLY
from .jobs import answers, engine_options
from .options import format_option, paths, progress_option
from .render import clean, emit, say_error, tell
from .streams import Reports, progress_bar, report_text
from .terminal import judged, watched
from .working import Working

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
#: Reasons printed for a file.
_REASONS: Final = 3


@click.command(epilog=EPILOG)
@paths
@click.option(
    "--torch", metavar="VERSION", help="The torch version whose weights_only list applies.  [default: the newest]"
)
@engine_options
@format_option()
@click.option("-v", "--verbose", is_flag=True, help="Name every file that was passed over, and every reason.")
@progress_option
def scan(
    paths: tuple[str, ...], torch: str | None, working: Working, style: str, verbose: bool, no_progress: bool
) -> int:
    """Show what code a file could run when it is loaded.

    Looks at every file of a folder by its content: checkpoints, pickles of any kind, what is in archives and compressed
    data. Nothing in a file is run. What is not looked into is named. Exit 0: every file is weights-only; 1: one is
    not; 3: one cannot be read, or there is nothing to judge.
    """
    version = torch or NEWEST
    if version not in VERSIONS:
        raise click.BadParameter(f"known are {join_limited(VERSIONS, most=len(VERSIONS))}", param_hint="--torch")
    files = list(find_all(paths))
    shown = watched() and not no_progress
    reports = Reports(style, True)
    every: list[FileScan] = []
    with (
        progress_bar(len(files), "scanning", shown, "files") as step,
        closing(_scans(files, version, working)) as scans,
    ):
        for item in scans:
            every.append(item)
            if style == "jsonl":
                line: ScanLine = {"schema": "ckptool.scan-file/1", **item}
                reports.add(report_text(line, style))
            if step:
                step(1)
    report = scan_report(every, version)
    if style == "json":
        emit(report_text(report, style))
    elif style == "table":
        for item in every:
            lines = _lines(item, verbose)
            if lines:
                emit("\n".join(lines))
        over = passed_over_words(report["passed_over"])
        if over and not verbose:
            named = [os.path.basename(item["path"]) for item in every if item["passed_over"]]
            over += f": {join_limited(named, most=5)}"
        words = [item["verdict"] for item in every if item["verdict"] is not None]
        counts = [f"{words.count(word):,} {judged(word)}" for word in VERDICTS if word in words]
        sums = f"{pluralize(len(words), 'file')}: {', '.join(counts)}" if len(words) > 1 else ""
        if sums or over:
            emit("\n".join(filter(None, ("", sums, over))))
    for item in every:
        if item["error"] is not None:
            say_error(UnreadableError(item["error"], path=item["path"], next=item["next"]))
    if any(item["error"] is not None for item in every):
        return 3
    if report["verdict"] is None:
        tell("ckptool: there is nothing to judge in " + join_limited(list(paths)))
        return 3
    return 0 if report["verdict"] == WEIGHTS_ONLY else 1


def _scans(
    files: list[str | SkippedFile | UnreadableError], torch: str, working: Working
) -> Generator[FileScan, None, None]:
    """Yield the scans in the order of the files."""

    def lost(path: str, error: CkptoolError) -> FileScan:
        return unread(path, error)

    work = answers(
        partial(scan_file, torch=torch), (item for item in files if not isinstance(item, SkippedFile)), working, lost
    )
    with closing(work):
        for item in files:
            yield skipped(item) if isinstance(item, SkippedFile) else next(work)


def _lines(item: FileScan, verbose: bool) -> list[str]:
    """Return the verdict on a file in a line, and further reasons in lines of their own."""
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
