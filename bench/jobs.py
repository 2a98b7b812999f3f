"""Parts of the benchmark: jobs to time, rows that compare them, targets, and groups of jobs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

WARM = "warm"
SPARSE = "metadata warm; the tensors are holes"


def nothing() -> None:
    """Do nothing: the `reset` of a job that needs only its input."""


def no_complaint() -> str:
    """Return "": the default `proof`, for a command that needs none."""
    return ""


class Check(NamedTuple):
    """A check of correctness.py: its name, the file before the edit, and the result."""

    name: str
    original: Path
    result: Path


class Job(NamedTuple):
    """One command, with the preparation and the checks of a run. Names are unique in a group.

    Before each run, `reads` are brought into the page cache, `writes` is removed, and `reset` is called. Before the
    first timed run, `proof` returns what is wrong with the command, or "", and the output must pass `check`. `most`
    limits the timed rounds (0: the warm-up counts), and `code` is the exit code of success. A failure ends the
    benchmark; with `may_fail` it only makes a row that says so.
    """

    name: str
    words: tuple[str, ...]
    reads: tuple[Path, ...] = ()
    writes: Path | None = None
    check: Check | None = None
    proof: Callable[[], str] = no_complaint
    reset: Callable[[], None] = nothing
    most: int = 99
    code: int = 0
    may_fail: bool = False


class Target(NamedTuple):
    """A promise: a ratio of times, seconds for the whole command or for each file, a peak in MB."""

    ratio: float | None = None
    seconds: float | None = None
    each: float | None = None
    peak: float | None = None


class Each(NamedTuple):
    """How to compute the time per file: the time of the whole, minus the time of `start`, divided by `files`."""

    start: str
    files: int


class Row(NamedTuple):
    """A comparison of two jobs, given by name. `reader` puts it into the README."""

    job: str
    against: str = ""
    target: Target | None = None
    each: Each | None = None
    reader: bool = False
    torch: bool = False  # the command needs torch, which would dominate any memory target


def always() -> str:
    """Return "": the `skip` of a group that can always run."""
    return ""


class Group(NamedTuple):
    """Jobs that take turns on the same file, and their rows. `setup` makes files, `leftovers` are removed at the end.

    `image` is the kind of filesystem to mount, or "" for the work folder. `skip` is called once it is mounted, and
    returns why the group cannot run, or "". `disk` also measures the blocks that each output takes. `during` is entered
    after `setup`, and left before the leftovers are removed.
    """

    name: str
    file: str
    jobs: tuple[Job, ...]
    rows: tuple[Row, ...]
    setup: tuple[Callable[[], None], ...] = ()
    leftovers: tuple[Path, ...] = ()
    cache: str = WARM
    image: str = ""
    skip: Callable[[], str] = always
    disk: bool = False
    during: Callable[[], AbstractContextManager[object]] = nullcontext


def mentions(group: Group, text: str) -> bool:
    """Return whether `text` occurs in the name of the group, of its file or of one of its jobs."""
    return any(text in name for name in (group.name, group.file, *(job.name for job in group.jobs)))
