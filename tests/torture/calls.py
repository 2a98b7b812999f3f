"""A run that is killed, meets an error, or gets a signal at each of its system calls."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

from .rows import Options, Tally
from .stage import WRITING, Answer, Stage
from .straced import Point, inject, need_strace, points

#: Of a large file: from here on a second thread brings the output to the disk while it grows.
_LARGE = 72 << 20
#: Calls that a disk can fail. Failing stat calls and random numbers are left to themselves.
_DISK = (
    "openat read pread64 getdents64 flock copy_file_range sendfile write pwrite64 writev ftruncate fallocate fchmod"
    " fsync fdatasync close link linkat rename renameat renameat2 unlink unlinkat"
)
#: Reading does not need space, nor does taking away.
_NEED_NO_SPACE = ("read", "pread64", "getdents64", "unlink", "close", "flock")


class Subject(Protocol):
    """A run that is put to the test, with the promises that it makes.

    ``opening`` is a flag with which it opens its output, ``failing`` the errors of a disk that it is tried with, and
    ``lasting`` the calls that fail for good once they fail (none: all of them, from the opening on).
    """

    name: str
    source: Path
    opening: str
    failing: tuple[str, ...]
    lasting: tuple[str, ...]

    def process(self) -> list[str]: ...
    def reset(self) -> None: ...
    def check_killed(self, tally: Tally) -> None: ...
    def check_error(self, tally: Tally, done: Answer, call: str, reason: str, *, lasting: bool) -> None: ...
    def check_ended(self, tally: Tally, done: Answer, number: int) -> None: ...


#: The runs of a row, each with its calls.
Subjects: TypeAlias = Callable[[Options], Iterator[tuple[Subject, list[Point]]]]


def kill(subjects: Subjects, tally: Tally, options: Options) -> None:
    """SIGKILL at the entry of every call, the first one after the input is opened to the last one at all."""
    need_strace()
    for subject, found in subjects(options):
        for point in found if not options.quick else found[::6]:
            subject.reset()
            hit = inject(subject, options.scratch / "log", point.name, f"signal=KILL:when={point.number}")
            if hit.call:  # there may be fewer calls this time: then there is nothing to be tried
                tally.case(f"{subject.name}, killed at {point} {hit.call[:120]}")
                tally.check(hit.answer.code == -9, f"it was not killed, but ended with {hit.answer.code}")
                subject.check_killed(tally)


def errors(subjects: Subjects, tally: Tally, options: Options) -> None:
    """Errors of a disk, once at each call, and from a call on for good."""
    need_strace()
    for subject, found in subjects(options):
        places = [point for point in found if point.name in _DISK.split()]
        later = places[_opening(subject, places) :]
        lasting = {point.name: point for point in reversed(later) if point.name in (subject.lasting or _DISK.split())}
        tried = [(point, f"when={point.number}") for point in places]
        tried += [(point, f"when={point.number}+") for point in lasting.values()]
        for point, when in tried if not options.quick else tried[::5]:
            for code in subject.failing:
                if code != "EIO" and point.name in _NEED_NO_SPACE:
                    continue
                subject.reset()
                hit = inject(subject, options.scratch / "log", point.name, f"error={code}:{when}")
                if hit.call:
                    tally.case(f"{subject.name}, {code} at {point.name} {when} {hit.call[:120]}")
                    reason = os.strerror(getattr(errno, code))
                    subject.check_error(tally, hit.answer, hit.call, reason, lasting=when.endswith("+"))


def ended(subjects: Subjects, tally: Tally, options: Options) -> None:
    """SIGINT, SIGTERM and SIGHUP at each call: each gap between two steps is hit, however short it is."""
    need_strace()
    # SIGHUP is handled as SIGTERM is: one command shows it.
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    for subject, found in subjects(options):
        # Before the output is opened, runs differ in nothing: a few calls stand for all.
        begin = max(_opening(subject, found) - 4, 0)
        tried = [*found[:begin:8], *found[begin:]]
        for point in tried if not options.quick else tried[::6]:
            for number in numbers:
                if point.name == "exit_group":
                    continue
                subject.reset()
                what = f"signal={number.name.removeprefix('SIG')}:when={point.number}"
                done = inject(subject, options.scratch / "log", point.name, what).answer
                tally.case(f"{subject.name}, {number.name} at {point} {point.text[:120]}")
                tally.check(not done.err, f"it says {done.err.strip()[-500:]!r}")
                subject.check_ended(tally, done, number)
        numbers = numbers[:2]


def _opening(subject: Subject, found: list[Point]) -> int:
    return next((number for number, point in enumerate(found) if subject.opening in point.text), 0)


def outputs(options: Options) -> Iterator[tuple[Stage, list[Point]]]:
    """Each command that writes, without an output and over an old one; once with a file for two threads."""
    for number, item in enumerate(WRITING):
        stage = Stage(options.scratch / item.name, item)
        for force in (False, True):
            stage.reset(force)
            yield stage, points(stage, options.scratch / "log")
        if number == 0 and not options.quick:
            large = Stage(options.scratch / "large", item, _large(options.scratch / "large.pth"))
            large.reset(True)
            seen = points(large, options.scratch / "log")
            # The many calls that read are those of the small file.
            yield large, [point for point in seen if point.name not in ("pread64", "newfstatat", "lseek")]


def _large(path: Path) -> Path:
    import torch

    torch.save({"module.weight": torch.zeros(_LARGE // 4), "module.bias": torch.ones(3)}, path)
    return path
