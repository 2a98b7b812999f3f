"""What the benchmark is made of: jobs that are timed, the rows drawn from them, the targets, and groups of all that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

WARM = "warm"
SPARSE = "metadata warm; the tensors are holes"


def nothing() -> None:
    """What a job needs that starts from its input alone."""


def no_complaint() -> str:
    """The proof of a job that writes nothing which could be wrong."""
    return ""


class Check(NamedTuple):
    """A check of correctness.py: its name, the file that was edited, as it was before, and the result."""

    name: str
    original: Path
    result: Path


class Job(NamedTuple):
    """One command and what surrounds a run of it. Names are unique in a group.

    `reads` is brought into the page cache before each run, `writes` is removed, then `reset` is called. The output
    must pass `check` before anything is timed; `proof` says, before that, what is wrong with the command itself.
    `most` limits the timed rounds (0: the warm-up counts), `code` is the exit code that counts as success. A failure
    ends the benchmark, but where `may_fail` is true it makes a row that says so.
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
    """What was promised: a ratio of times, seconds for the whole command or for each file, a peak in MB."""

    ratio: float | None = None
    seconds: float | None = None
    each: float | None = None
    peak: float | None = None


class Each(NamedTuple):
    """How the time for one of many files is found: the whole, less the time of `start`, by `files`."""

    start: str
    files: int


class Row(NamedTuple):
    """One comparison, by the names of the jobs; `reader` puts it into the README."""

    job: str
    against: str = ""
    target: Target | None = None
    each: Each | None = None
    reader: bool = False
    torch: bool = False  # the command needs torch, so a target for its memory means nothing


def always() -> str:
    """No reason to leave a group out."""
    return ""


class Group(NamedTuple):
    """Jobs that take turns on the same file, the rows, and what must be made before and removed afterwards.

    `image` is the filesystem to be mounted for it, empty for the work folder. `skip` says why the group cannot run,
    once its filesystem is there; `disk` asks for the blocks that each output takes.
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


def mentions(group: Group, text: str) -> bool:
    """Whether the name of the group, its file or one of its jobs has `text` in it."""
    return any(text in name for name in (group.name, group.file, *(job.name for job in group.jobs)))
