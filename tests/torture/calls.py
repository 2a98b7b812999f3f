"""A run that ends, or meets an error, at each of its system calls."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

from .rows import FIXTURES, Options, Tally
from .stage import Stage, writing
from .straced import Hit, Point, inject, need_strace, points

__all__ = ["DISK", "ended", "errors", "interrupted", "kill"]

#: Of a large file: from here on a second thread brings the output to the disk while it grows.
_LARGE = 72 << 20
#: Calls that a disk can fail. Failing stat calls and random numbers are left to themselves.
DISK = (
    "openat read pread64 getdents64 flock copy_file_range sendfile write pwrite64 writev ftruncate fallocate fchmod"
    " fsync fdatasync close link linkat rename renameat renameat2 unlink unlinkat"
)
#: The manual gives EINTR for these, and says that the call is to be made again. (close is not among them.)
_INTERRUPTIBLE = "openat pread64 read copy_file_range write fsync fdatasync flock fchmod"


def kill(tally: Tally, options: Options) -> None:
    """SIGKILL at the entry of every call, the first one after the input is opened to the last one at all."""
    need_strace()
    for stage, force, found in _stages(options):
        for point in found if not options.quick else found[::6]:
            stage.reset(force)
            hit = inject(stage, options.scratch / "log", point.name, f"signal=KILL:when={point.number}")
            if not hit.call:  # fewer calls this time: what would have been tried does not exist
                continue
            tally.case(f"{_words(stage)}, killed at {point} {hit.call[:120]}")
            tally.check(hit.answer.code == -9, f"it was not killed, but ended with {hit.answer.code}")
            there = stage.check_promise(tally, leftovers=1)
            if stage.litter() or there != "new":
                stage.check_next_run(tally)


def errors(tally: Tally, options: Options) -> None:
    """ENOSPC and EIO, once at each call, and from a call on for good."""
    need_strace()
    for stage, force, found in _stages(options):
        places = [point for point in found if point.name in DISK.split()]
        begin = next((n for n, point in enumerate(places) if "O_CREAT" in point.text), 0)
        lasting = {point.name: point for point in reversed(places[begin:])}
        tried = [(point, f"when={point.number}") for point in places]
        tried += [(point, f"when={point.number}+") for point in lasting.values()]
        for point, when in tried if not options.quick else tried[::5]:
            for code in ("ENOSPC", "EIO"):
                # Reading does not need space, nor does taking away.
                if code == "ENOSPC" and point.name in ("read", "pread64", "getdents64", "unlink", "close"):
                    continue
                stage.reset(force)
                hit = inject(stage, options.scratch / "log", point.name, f"error={code}:{when}")
                if hit.call:
                    tally.case(f"{_words(stage)}, {code} at {point.name} {when} {hit.call[:120]}")
                    _check_error(tally, stage, hit, os.strerror(getattr(errno, code)), lasting=when.endswith("+"))


def _check_error(tally: Tally, stage: Stage, hit: Hit, reason: str, *, lasting: bool) -> None:
    # What cannot be taken away stays: the temporary file of a disk that fails for good, the former folder.
    unlink = hit.call.startswith("unlink") and (lasting or stage.item.folder)
    there = stage.check_promise(tally, leftovers=1 if unlink else 0)
    code, _, err = hit.answer
    if code == stage.code:  # another way was found
        tally.check(there == "new" and not err, f"it ends with {code}, but the output holds {there}: {err.strip()!r}")
    else:
        tally.check(code in (3, 5), f"it ends with {code}: {err.strip()!r}")
        others = [str(FIXTURES / name) for name in stage.item.others]
        told = ["stdout"] if hit.call.startswith("write(1,") else [str(stage.out), str(stage.source), *others]
        if not (lasting and hit.call.startswith("write")):  # a message is a write, too
            stage.check_message(tally, err, reason, told)
    if stage.litter():
        stage.check_next_run(tally)


def ended(tally: Tally, options: Options) -> None:
    """SIGINT, SIGTERM and SIGHUP at each call: each gap between two steps is hit, however short it is."""
    need_strace()
    left = 0
    for stage, force, found in _stages(options):
        begin = next((n for n, point in enumerate(found) if "O_CREAT" in point.text), 0)
        # Before the output exists, runs differ in nothing: a few calls stand for all.
        tried = [*found[: max(begin - 4, 0) : 8], *found[max(begin - 4, 0) :]]
        # SIGHUP is handled as SIGTERM is: one command shows it.
        first = stage.item == writing()[0]
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if first else (signal.SIGINT, signal.SIGTERM)
        for point in tried if not options.quick else tried[::6]:
            for number in numbers:
                if point.name == "exit_group":
                    continue
                stage.reset(force)
                what = f"signal={number.name.removeprefix('SIG')}:when={point.number}"
                code, _, err = inject(stage, options.scratch / "log", point.name, what).answer
                tally.case(f"{_words(stage)}, {number.name} at {point} {point.text[:120]}")
                # In the very last calls Python has taken its handlers down, and a signal ends it as it ends anything.
                tally.check(code in (128 + number, -number, stage.code), f"it ends with {code}: {err.strip()!r}")
                tally.check(not err, f"it says {err.strip()[-500:]!r}")
                there = stage.check_promise(tally, leftovers=1)
                tally.check(there == "new" or code != stage.code, f"it ends with {code}, the output holds {there}")
                if stage.litter():
                    left += 1
                    stage.check_next_run(tally)
    tally.note(f"{left} runs left their temporary file to the next one")


def interrupted(tally: Tally, options: Options) -> None:
    """EINTR: the call is made again, and nobody notices."""
    need_strace()
    chance = random.Random(options.seed)
    stages = [(stage, force, found) for stage, force, found in _stages(options) if not force]
    for _ in range(options.amount(50, 5)):
        stage, force, found = chance.choice(stages)
        point = chance.choice([point for point in found if point.name in _INTERRUPTIBLE.split()])
        stage.reset(force)
        hit = inject(stage, options.scratch / "log", point.name, f"error=EINTR:when={point.number}")
        tally.case(f"{_words(stage)}, EINTR at {point} {hit.call[:120]}")
        tally.check(bool(hit.call), "the call did not occur")
        tally.check(hit.answer.code == stage.code, f"it ends with {hit.answer.code}: {hit.answer.err.strip()!r}")
        tally.check(stage.check_promise(tally, 0) == "new", f"the output holds {stage.holds()}")


def _stages(options: Options) -> Iterator[tuple[Stage, bool, list[Point]]]:
    """Each command that writes, without an output and over an old one; once with a file for two threads."""
    for number, item in enumerate(writing(quickly=True)):
        stage = Stage(options.scratch / item.name, item)
        for force in (False, True):
            stage.reset(force)
            yield stage, force, points(stage, options.scratch / "log")
        if number == 0 and not options.quick:
            large = Stage(options.scratch / "large", item, _large(options.scratch / "large.pth"))
            large.reset(True)
            seen = points(large, options.scratch / "log")
            # The many calls that read are those of the small file.
            yield large, True, [point for point in seen if point.name not in ("pread64", "newfstatat", "lseek")]


def _large(path: Path) -> Path:
    import torch

    torch.save({"module.weight": torch.zeros(_LARGE // 4), "module.bias": torch.ones(3)}, path)
    return path


def _words(stage: Stage) -> str:
    size = " large" if len(stage.expected) > 1 << 20 else ""
    return f"{stage.item.name}{size}{' --force' if stage.force else ''}"
