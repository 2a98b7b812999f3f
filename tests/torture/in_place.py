"""Edits in place that end, or meet an error, at each of their system calls: the file is the old version or the new."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ckptool import history

from .calls import DISK
from .rows import FIXTURES, Options, Tally
from .stage import ENVIRONMENT, Answer, answer
from .straced import Point, inject, need_strace, points

__all__ = ["ended", "errors", "file_size_limit", "kill"]


class _Edit(NamedTuple):
    """A command that edits in place, its arguments, and its fixture, or "" for the file of ``_training``."""

    command: str
    arguments: tuple[str, ...]
    fixture: str

    @property
    def reclaims(self) -> bool:
        """Whether it makes holes of what it drops, once the new version is on the disk; there is no way back then."""
        return "--reclaim" in self.arguments

    @property
    def folder(self) -> str:
        return f"{self.command}-reclaim" if self.reclaims else self.command


_EDITS = (
    _Edit("strip-module", (), "bare_module.pth"),
    _Edit("add-module", (), "bare.pth"),
    _Edit("remap", ("--to", "cpu"), "cuda0.pth"),
    _Edit("rename", ("--rename", "conv1.*=stem.*"), "bare.pth"),
    _Edit("extract", ("state_dict",), "wrapped_module.pth"),
    _Edit("edit", ("--wrap", "inner"), "bare.pth"),
    _Edit("drop", ("optimizer",), "ddp4_training.pth"),
    _Edit("edit", ("--keep", "state_dict,epoch"), "ddp4_training.pth"),
    _Edit("edit", ("--set", "epoch=0"), "wrapped_module.pth"),
    _Edit("drop", ("netD",), "gan.pth"),
    _Edit("edit", ("--strip-module", "--wrap", "net"), "bare_module.pth"),
    _Edit("drop", ("optimizer", "--reclaim"), ""),
)
#: Names in a file whose new pickle is longer than readers look for an end record: it grows in several steps.
_MANY = 1200


class _InPlace:
    """A file that is edited in place, and what it holds before and after, as torch reads it.

    ``undoing``: what is put to the test is ``undo``, which goes back from the new version to the former one.
    """

    def __init__(self, folder: Path, item: _Edit, source: Path | None = None, *, undoing: bool = False) -> None:
        folder.mkdir(parents=True)
        self.item, self.undoing = item, undoing
        self.name = "undo" if undoing else item.folder + (" large" if source else "")
        self.source = folder / "in.pth"
        source = source or (None if item.fixture else _training(folder / "made.pth"))
        shutil.copyfile(source or FIXTURES / item.fixture, self.source)
        self.former = self.source.read_bytes()
        self.holds_former = held(self.source)
        code = answer(self.editing()).code
        self.new = self.source.read_bytes()
        self.holds_new = held(self.source)
        if code or self.new == self.former or self.holds_new == self.holds_former:
            raise AssertionError(f"{item.command} on {item.fixture} ends with {code} and changes nothing")

    def editing(self) -> list[str]:
        return [self.item.command, str(self.source), *self.item.arguments, "--in-place"]

    def process(self, *more: str) -> list[str]:
        call = ["undo", str(self.source)] if self.undoing else self.editing()
        return [sys.executable, "-m", "ckptool", *call, *more]

    def reset(self) -> None:
        self.source.write_bytes(self.new if self.undoing else self.former)

    def check(self, tally: Tally) -> str:
        """The promise: "former" or "new" as torch reads it, and every former byte is there."""
        data = self.source.read_bytes()
        if not self.item.reclaims:
            tally.check(data.startswith(self.former), "bytes of the former version changed")
        try:
            found = held(self.source)
        except RuntimeError as error:
            tally.check(False, f"torch does not read it: {str(error)[:200]}")
            return "nothing"
        state = {self.holds_former: "former", self.holds_new: "new"}.get(found, "something else")
        tally.check(state in ("former", "new"), "torch reads neither the former version nor the new one")
        if state == "new":
            tally.check(self._is_new(data), "torch reads the new version, and other bytes are behind it")
        elif self.item.reclaims:
            tally.check(data.startswith(self.former), "bytes of the former version changed")
        return state

    def _is_new(self, data: bytes) -> bool:
        """Whether it is the new version, in which the holes need not all be made yet."""
        if not self.item.reclaims or len(data) != len(self.new):
            return data == self.new
        there, new = np.frombuffer(data, np.uint8), np.frombuffer(self.new, np.uint8)
        former = np.frombuffer(self.former.ljust(len(data), b"\0"), np.uint8)
        return bool(((there == new) | ((new == 0) & (there == former))).all())

    def check_way_on(self, tally: Tally) -> None:
        """What ckptool says of a file that a killed run left, the way back, and that the next edit works."""
        data = self.source.read_bytes()
        listed = history(self.source)["versions"]
        tally.check(len(listed) == 1 + (data != self.former), f"history lists {len(listed)} versions")
        finished = listed[-1]["finished"]
        tally.check(finished is (data == self.former or self._is_new(data)), f"history says finished: {finished}")
        if not finished:
            refused = answer(self.editing())
            told = "was not finished" in refused.err and f"ckptool undo {self.source}" in refused.err
            tally.check(refused.code == 4 and told, f"another edit ends with {refused.code}: {refused.err.strip()!r}")
            tally.check(self.source.read_bytes() == data, "a refused edit changed the file")
        if finished and data != self.former and self.item.reclaims:
            done = answer(["undo", str(self.source)])
            tally.check(done.code == 4 and self.source.read_bytes() == data, f"undo ends with {done.code}")
            return
        if data != self.former:
            done = answer(["undo", str(self.source)])
            tally.check(done.code == 0, f"undo ends with {done.code}: {done.err.strip()!r}")
            tally.check(self.source.read_bytes() == self.former, "undo does not give the former bytes")
        done = answer(self.editing())
        tally.check(done.code == 0 and self.source.read_bytes() == self.new, f"the next edit ends with {done.code}")


def held(path: Path) -> frozenset[tuple[str, bytes]]:
    """Every record that torch's own reader finds, with its bytes."""
    reader = torch._C.PyTorchFileReader(str(path))
    return frozenset((name, reader.get_record(name)) for name in reader.get_all_records())


def kill(tally: Tally, options: Options) -> None:
    """SIGKILL at the entry of every call, the first one after the file is opened to the last one at all."""
    need_strace()
    states = dict.fromkeys(("former", "unfinished", "new"), 0)
    for stage, found in _stages(options):
        for point in found if not options.quick else found[::6]:
            stage.reset()
            hit = inject(stage, options.scratch / "log", point.name, f"signal=KILL:when={point.number}")
            if not hit.call:
                continue
            tally.case(f"{stage.name} --in-place, killed at {point} {hit.call[:120]}")
            tally.check(hit.answer.code == -9, f"it was not killed, but ended with {hit.answer.code}")
            state = stage.check(tally)
            if state == "former" and stage.source.read_bytes() != stage.former:
                state = "unfinished"
            states[state] = states.get(state, 0) + 1
            stage.check_way_on(tally)
    tally.note(", ".join(f"{number:,} {state}" for state, number in states.items()))


def errors(tally: Tally, options: Options) -> None:
    """ENOSPC, EDQUOT and EIO, once at each call, and from a call on for good."""
    need_strace()
    for stage, found in _stages(options):
        places = [point for point in found if point.name in DISK.split()]
        writes = {point.name: point for point in reversed(places) if point.name in ("write", "fsync", "pwrite64")}
        tried = [(point, f"when={point.number}") for point in places]
        tried += [(point, f"when={point.number}+") for point in writes.values()]
        for point, when in tried if not options.quick else tried[::5]:
            for code in ("ENOSPC", "EDQUOT", "EIO"):
                if code != "EIO" and point.name in ("read", "pread64", "close", "flock"):
                    continue
                stage.reset()
                hit = inject(stage, options.scratch / "log", point.name, f"error={code}:{when}")
                if hit.call:
                    tally.case(f"{stage.name} --in-place, {code} at {point.name} {when} {hit.call[:120]}")
                    reason = "" if point.name == "write" and when.endswith("+") else os.strerror(getattr(errno, code))
                    _check_error(tally, stage, hit.answer, reason, hit.call)


def _check_error(tally: Tally, stage: _InPlace, done: Answer, reason: str, call: str) -> None:
    state = stage.check(tally)
    there = stage.source.read_bytes()
    # With every write failing from the warning on, an edit that cannot be taken back fails itself.
    to_terminal = call.startswith("write(1,") or (call.startswith("write(2,") and not stage.item.reclaims)
    # The file without a name, or the library, by which it learns whether files here can get holes.
    if done.code == 4 and ("O_TMPFILE" in call or call.startswith(("read", "openat", "close"))):
        tally.check(state == "former" and "cannot be given back" in done.err, f"it says {done.err.strip()!r}")
        return
    if done.code == 0 or to_terminal:
        wanted = "former" if stage.undoing else "new"
        tally.check(state == wanted, f"it ends with {done.code}, torch reads the {state} version: {done.err!r}")
        return
    tally.check(done.code in (3, 5), f"it ends with {done.code}: {done.err.strip()!r}")
    if not (stage.undoing or (stage.item.reclaims and state == "new")):
        tally.check(there == stage.former, f"it ends with {done.code}, and the file has not its former bytes")
    if not reason:  # a message is a write, too
        return
    told = any(reason in line and str(stage.source) in line for line in done.err.splitlines())
    tally.check(told and "Traceback" not in done.err, f"path and reason are not told: {done.err.strip()!r}")


def ended(tally: Tally, options: Options) -> None:
    """SIGINT, SIGTERM and SIGHUP at each call."""
    need_strace()
    for stage, found in _stages(options):
        begin = next((n for n, point in enumerate(found) if "O_RDWR" in point.text), 0)
        tried = [*found[: max(begin - 4, 0) : 8], *found[max(begin - 4, 0) :]]
        for point in tried if not options.quick else tried[::6]:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if point.name == "exit_group":
                    continue
                stage.reset()
                what = f"signal={number.name.removeprefix('SIG')}:when={point.number}"
                code, _, err = inject(stage, options.scratch / "log", point.name, what).answer
                tally.case(f"{stage.name} --in-place, {number.name} at {point} {point.text[:120]}")
                tally.check(code in (128 + number, -number, 0), f"it ends with {code}: {err.strip()!r}")
                tally.check(not err, f"it says {err.strip()[-500:]!r}")
                state, there = stage.check(tally), stage.source.read_bytes()
                whole = there in (stage.former, stage.new) or (stage.item.reclaims and state == "new")
                tally.check(whole or code == -number, f"it ends with {code}, and left an edit that is not finished")
                wanted = "former" if stage.undoing else "new"
                tally.check(code != 0 or state == wanted, f"it ends with 0, torch reads the {state} version")


def file_size_limit(tally: Tally, options: Options) -> None:
    """``ulimit -f``: the file can grow by a part of what it needs, at every 128 bytes."""
    for number, item in enumerate(_EDITS):
        stages = [_InPlace(options.scratch / item.folder, item)]
        if not number:
            stages.append(_InPlace(options.scratch / "large", item, _large(options.scratch / "large.pth")))
        for stage in stages:
            step = 128 if len(stage.new) < 65_536 else 4096 + 128
            for limit in range(len(stage.former), len(stage.new) + step, step * options.amount(1, 12)):
                stage.reset()
                tally.case(f"{stage.name} --in-place with ulimit -f of {limit:,} of {len(stage.new):,} bytes")
                done = subprocess.run(
                    stage.process(),
                    env=ENVIRONMENT,
                    capture_output=True,
                    text=True,
                    check=False,
                    preexec_fn=lambda limit=limit: resource.setrlimit(  # type: ignore[misc]
                        resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)
                    ),
                )
                state = stage.check(tally)
                if limit >= len(stage.new):
                    tally.check(done.returncode == 0 and state == "new", f"it ends with {done.returncode}")
                    continue
                tally.check(done.returncode == 5, f"it ends with {done.returncode}: {done.stderr.strip()!r}")
                tally.check(stage.source.read_bytes() == stage.former, "the file has not its former bytes")
                tally.check(os.strerror(errno.EFBIG) in done.stderr, f"it says {done.stderr.strip()!r}")


def _stages(options: Options) -> Iterator[tuple[_InPlace, list[Point]]]:
    """Each command, once with a file that grows in several steps, and the way back."""
    for number, item in enumerate(_EDITS):
        stages = [_InPlace(options.scratch / item.folder, item)]
        if not number:
            stages.append(_InPlace(options.scratch / "large", item, _large(options.scratch / "large.pth")))
            stages.append(_InPlace(options.scratch / "undo", item, undoing=True))
        for stage in stages:
            stage.reset()
            found = points(stage, options.scratch / "log")
            if stage.name.endswith("large"):  # the many calls that read are those of the small file
                found = [point for point in found if point.name not in ("pread64", "newfstatat")]
            yield stage, found


def _training(path: Path) -> Path:
    """A checkpoint of which an optimizer is most, in whole blocks."""
    made = [torch.arange(4096.0) + number for number in range(3)]
    torch.save({"model": {"weight": torch.ones(9)}, "optimizer": made}, path)
    return path


def _large(path: Path) -> Path:
    torch.save({f"module.layer{number}.weight": torch.ones(1) for number in range(_MANY)}, path)
    return path
