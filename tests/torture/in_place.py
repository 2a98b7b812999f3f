"""Edits in place: after a failure, the file is the former version or the new one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ckptool import history

from .rows import FIXTURES, Options, Tally
from .stage import Answer, answer
from .straced import Point, points


class _Edit(NamedTuple):
    """A command that edits in place, its arguments, and its fixture, or "" for the file of ``_training``."""

    command: str
    arguments: tuple[str, ...]
    fixture: str

    @property
    def reclaims(self) -> bool:
        """Whether it makes holes of what it drops, once the new version is on the disk; there is no way back then."""
        return "--reclaim" in self.arguments


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

    opening, failing, lasting = "O_RDWR", ("ENOSPC", "EDQUOT", "EIO"), ("write", "fsync", "pwrite64")

    def __init__(self, folder: Path, item: _Edit, source: Path | None = None, *, undoing: bool = False) -> None:
        folder.mkdir(parents=True)
        self.item, self.undoing = item, undoing
        kind = f"{' large' if source else ''}{' undone' if undoing else ''} --in-place"
        self.name = " ".join([item.command, *item.arguments]) + kind
        self.wanted = "former" if undoing else "new"
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

    def check_killed(self, tally: Tally) -> None:
        state = self.check(tally)
        if state == "former" and self.source.read_bytes() != self.former:
            state = "unfinished"
        tally.count(state)
        self.check_way_on(tally)

    def check_error(self, tally: Tally, done: Answer, call: str, reason: str, *, lasting: bool) -> None:
        state, there = self.check(tally), self.source.read_bytes()
        # With every write failing from the warning on, an edit that cannot be taken back fails itself.
        to_terminal = call.startswith("write(1,") or (call.startswith("write(2,") and not self.item.reclaims)
        # The file without a name, or the library, by which it learns whether files here can get holes.
        if done.code == 4 and ("O_TMPFILE" in call or call.startswith(("read", "openat", "close"))):
            tally.check(state == "former" and "cannot be given back" in done.err, f"it says {done.err.strip()!r}")
            return
        if done.code == 0 or to_terminal:
            words = f"it ends with {done.code}, torch reads the {state} version: {done.err!r}"
            tally.check(state == self.wanted, words)
            return
        tally.check(done.code in (3, 5), f"it ends with {done.code}: {done.err.strip()!r}")
        if not (self.undoing or (self.item.reclaims and state == "new")):
            tally.check(there == self.former, f"it ends with {done.code}, and the file has not its former bytes")
        if not (lasting and call.startswith("write")):  # a message is a write, too
            told = any(reason in line and str(self.source) in line for line in done.err.splitlines())
            tally.check(told and "Traceback" not in done.err, f"path and reason are not told: {done.err.strip()!r}")

    def check_ended(self, tally: Tally, done: Answer, number: int) -> None:
        code = done.code
        tally.check(code in (128 + number, -number, 0), f"it ends with {code}: {done.err.strip()!r}")
        state, there = self.check(tally), self.source.read_bytes()
        whole = there in (self.former, self.new) or (self.item.reclaims and state == "new")
        tally.check(whole or code == -number, f"it ends with {code}, and left an edit that is not finished")
        tally.check(code != 0 or state == self.wanted, f"it ends with 0, torch reads the {state} version")


def held(path: Path) -> frozenset[tuple[str, bytes]]:
    """Every record that torch's own reader finds, with its bytes."""
    reader = torch._C.PyTorchFileReader(str(path))
    return frozenset((name, reader.get_record(name)) for name in reader.get_all_records())


def edits(options: Options) -> Iterator[tuple[_InPlace, list[Point]]]:
    """Each command with its calls."""
    for edited in _files(options):
        edited.reset()
        found = points(edited, options.scratch / "log")
        if "large" in edited.name:  # the many calls that read are those of the small file
            found = [point for point in found if point.name not in ("pread64", "newfstatat")]
        yield edited, found


def _files(options: Options) -> Iterator[_InPlace]:
    """A file for each command, one that grows in several steps, and one for the way back."""
    for number, item in enumerate(_EDITS):
        yield _InPlace(options.scratch / f"{number}-{item.command}", item)
        if not number:
            yield _InPlace(options.scratch / "large", item, _large(options.scratch / "large.pth"))
            yield _InPlace(options.scratch / "undo", item, undoing=True)


def _training(path: Path) -> Path:
    """A checkpoint of which an optimizer is most, in whole blocks."""
    made = [torch.arange(4096.0) + number for number in range(3)]
    torch.save({"model": {"weight": torch.ones(9)}, "optimizer": made}, path)
    return path


def _large(path: Path) -> Path:
    torch.save({f"module.layer{number}.weight": torch.ones(1) for number in range(_MANY)}, path)
    return path
