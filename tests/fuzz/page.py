"""The section of docs/reliability.md about fuzzing: the prose is written by hand, the figures come from a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torture.page import PAGE, machine

from .finds import VALID_FAILS

__all__ = ["rewrite"]

_BEGIN, _END = "<!-- fuzz: made by tests/fuzz/run.py --page -->", "<!-- end of fuzz -->"


def rewrite(tallies: Sequence[Any], table: str, seed: int) -> None:
    """Put the figures of a run in the place of the last ones."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has lost the marks between which the figures of fuzzing stand")
    PAGE.write_text(f"{before}{_BEGIN}\n{_figures(tallies, table, seed)}\n{_END}{after}", encoding="utf-8")


def _figures(tallies: Sequence[Any], table: str, seed: int) -> str:
    total = sum(tally.seconds for tally in tallies)
    inputs = sum(tally.inputs for tally in tallies)
    day = time.strftime("%d %B %Y").lstrip("0")
    lines = [f"{inputs:,} inputs of seed {seed}, run on {day} in {total / 60:.0f} minutes on {machine()}.", "", table]
    causes = [
        f"- {tally.kind}, {tally.times[name]:,} times: {_plain(group.find.reader)}"
        for tally in tallies
        for name, group in sorted(tally.groups.items(), key=lambda item: -tally.times[item[0]])
        if name[0] == VALID_FAILS
    ]
    if causes:
        lines += ["", "Called valid, and what the reader says:", "", *causes]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A message that may hold what an input made up, as text of Markdown."""
    safe = "".join(char if " " <= char <= "~" else "?" for char in text[:200])
    return "`" + safe.replace("`", "'") + "`"
