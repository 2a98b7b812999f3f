"""docs/reliability.md: the prose is written by hand, the figures between two marks come from a run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from .rows import ROOT, Row, Tally

__all__ = ["PAGE", "Result", "machine", "rewrite"]

PAGE = ROOT / "docs" / "reliability.md"
_BEGIN, _END = "<!-- figures: made by tests/torture/run.py -->", "<!-- end of figures -->"


class Result(NamedTuple):
    """A row that was run. ``skipped`` says why it was not, "" when it was."""

    row: Row
    tally: Tally
    seconds: float
    skipped: str


def rewrite(results: Sequence[Result]) -> None:
    """Put the figures of a run in the place of the last ones."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has lost the marks between which the figures stand")
    PAGE.write_text(f"{before}{_BEGIN}\n{_figures(results)}\n{_END}{after}", encoding="utf-8")


def _figures(results: Sequence[Result]) -> str:
    lines = ["| what happens | how often | what must hold | broken | seconds |", "|---|---:|---|---:|---:|"]
    for row, tally, seconds, skipped in results:
        amount = f"{tally.amount:,}" if not skipped else "not run"
        cells = (row.what, amount, row.passes, str(len(tally.broken)), f"{seconds:.0f}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    remarks = [
        f"- **{row.what}** \u2014 {'; '.join([*tally.notes, skipped] if skipped else tally.notes)}."
        for row, tally, _, skipped in results
        if skipped or tally.notes
    ]
    total = sum(result.seconds for result in results)
    said = [f"Run on {time.strftime('%d %B %Y').lstrip('0')} in {total / 60:.0f} minutes on {machine()}."]
    return "\n".join([*said, "", *lines, "", *remarks])


def machine() -> str:
    """What a reader must know to judge the figures; nothing that identifies the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    parts = [
        f"{len(os.sched_getaffinity(0))} CPUs with {memory:.0f} GB of memory",
        f"Linux {platform.release().partition('-')[0]}",
        f"Python {platform.python_version()}",
        f"torch {_version('torch')}",
        _strace(),
    ]
    return ", ".join(part for part in parts if part)


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "(not installed)"


def _strace() -> str:
    try:
        told = subprocess.run(["strace", "-V"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
    found = re.search(r"version ([\d.]+)", told)
    return f"strace {found.group(1)}" if found else ""
