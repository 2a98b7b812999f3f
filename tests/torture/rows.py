"""What a row of the matrix counts, and what every row is given."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FIXTURES = ROOT / "fixtures" / "files"
#: Real checkpoints by other people; rows that use them go without where they are not.
CORPUS = Path(os.environ.get("CKPTOOL_CORPUS", ROOT.parent / "shared" / "corpus"))


class Options(NamedTuple):
    """The command line. ``scratch`` is an empty folder for this row alone."""

    scratch: Path
    quick: bool
    seed: int

    def amount(self, whole: int, quick: int) -> int:
        """How many of something: fewer where only the script itself is tried."""
        return quick if self.quick else whole


class Skipped(Exception):
    """This machine cannot do what the row needs; the text says why."""


class Broken(NamedTuple):
    """A promise that was not kept: in which case, and how."""

    case: str
    words: str


class Tally:
    """Cases of a row, and the promises that were broken in them, in words that lead to the case."""

    def __init__(self) -> None:
        self.amount = 0
        self.broken: list[Broken] = []
        #: Things a reader of the table should know: how many of what, and what was left out.
        self.notes: list[str] = []
        #: How often something happened, by its words; these become notes.
        self.counts: Counter[str] = Counter()
        self._case = ""

    def case(self, words: str) -> None:
        """A new case begins; ``words`` are what is needed to find it again."""
        self.amount += 1
        self._case = words

    def check(self, holds: bool, words: str) -> bool:
        """One promise about the current case; returns whether it holds."""
        if not holds:
            self.broken.append(Broken(self._case, words))
        return holds

    def count(self, words: str) -> None:
        self.counts[words] += 1


class Row(NamedTuple):
    """A row: its name for ``--only``, what it does and what must hold in words for the table, and the function."""

    name: str
    what: str
    passes: str
    run: Callable[[Tally, Options], None]
