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


def rewrite(rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Replace the figures of the rows that were run; the others keep theirs, if the page has any."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    former, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has lost the marks between which the figures stand")
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in former.splitlines() if line.startswith("| ")}
    remarks = {match[1]: match[0] for match in re.finditer(r"(?m)^- \*\*(.+?)\*\* \u2014 .*$", former)}
    for row, tally, seconds, skipped in results:
        amount = f"{tally.amount:,}" if not skipped else "not run"
        cells = (_cell(row.what), amount, _cell(row.passes), str(len(tally.broken)), f"{seconds:.0f}")
        lines[cells[0]] = f"| {' | '.join(cells)} |"
        notes = [*tally.notes, *filter(None, [skipped])]
        remarks[row.what] = f"- **{row.what}** \u2014 {'; '.join(notes)}." if notes else ""
    shown = [lines[_cell(row.what)] for row in rows if _cell(row.what) in lines]
    seconds = sum(int(line.rstrip("| ").rpartition(" ")[2]) for line in shown)
    when = time.strftime("%d %B %Y").lstrip("0")
    figures = [
        f"Run on {when} in {seconds / 60:.0f} minutes on {machine()}.",
        "",
        "| what happens | how often | what must hold | broken | seconds |",
        "|---|---:|---|---:|---:|",
        *shown,
        "",
        *filter(None, (remarks.get(row.what) for row in rows)),
    ]
    PAGE.write_text("\n".join([before + begin, *figures, end + after]), encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


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
