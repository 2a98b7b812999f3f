"""The commands that write, and a folder in which one of them is put to the test."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from ckptool.cli.main import run

from .rows import FIXTURES, ROOT, Tally

SUFFIX = ".ckptool-tmp"
#: What stands at the output's place before a run with --force, and its mode: not one that any default gives.
OLD, OLD_MODE = b"the old bytes of the output, which must stay or go as a whole\n" * 40, 0o640
#: Without bytecode files every run makes the same system calls; an edit in place notes this time.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "SOURCE_DATE_EPOCH": "1700000000"}


class Writing(NamedTuple):
    """A command that writes, its options and further arguments, and the fixture it is tried on.

    ``others`` are the fixtures that it reads besides, named behind its input. ``folder`` says that the output is one.
    """

    command: str
    options: tuple[str, ...]
    fixture: str
    others: tuple[str, ...] = ()
    folder: bool = False

    @property
    def name(self) -> str:
        """The command; where there are several lines of it, they differ in their options."""
        same = [item for item in WRITING if item.command == self.command]
        return self.command if len(same) == 1 else f"{self.command}-{self.options[-1]}"


#: A line a command, or more. Those that compute import torch: they make too many system calls to be tried at each.
WRITING = (
    Writing("strip-module", (), "bare_module.pth"),
    Writing("add-module", (), "legacy_bare.pth"),
    Writing("remap", ("--to", "cpu"), "cuda0.pth"),
    Writing("extract", ("state_dict",), "wrapped_module.pth"),
    Writing("edit", ("--wrap", "inner"), "bare.pth"),
    Writing("drop", ("optimizer", "module.head.*"), "ddp4_training.pth"),
    Writing("edit", ("--keep", "state_dict,epoch"), "ddp4_training.pth"),
    Writing("edit", ("--set", "epoch=0"), "wrapped_module.pth"),
    Writing("drop", ("netD",), "gan.pth"),
    Writing("rename", ("--rename", "conv1.*=stem.*"), "bare.pth"),
    Writing("slim", ("--dedupe",), "slice_of_big.pth"),
    Writing("merge", (), "bare.pth", ("plain_dict.pth",)),
    Writing("redact", ("--redact", "all"), "lightning.ckpt"),
    Writing("edit", ("--strip-module", "--slim", "--wrap", "net"), "shared_views.pth"),
    Writing("convert", ("--to-format", "safetensors"), "plain_dict.pth"),
    Writing("convert", ("--to-format", "torch", "--max-shard-size", "300"), "bare.pth", folder=True),
    Writing("convert", ("--to-format", "dcp"), "bare.pth", folder=True),
    Writing("sanitize", (), "args_namespace.pth"),
    Writing("salvage", (), "truncated.pth"),
)


class State(NamedTuple):
    """What must not change about a file."""

    data: bytes
    mtime: int
    mode: int


def state(path: Path) -> State:
    """Of a folder, its files: each name before its bytes."""
    status = path.stat()
    if path.is_dir():
        data = b"".join(file.name.encode() + b"\n" + file.read_bytes() for file in sorted(path.iterdir()))
    else:
        data = path.read_bytes()
    return State(data, status.st_mtime_ns, stat.S_IMODE(status.st_mode))


class Answer(NamedTuple):
    """How a run of the command line ended, and what it said."""

    code: int
    out: str
    err: str


def answer(arguments: list[str]) -> Answer:
    """The command line, called in this process: a hundred times faster than a process of its own."""
    out, err = io.StringIO(), io.StringIO()
    os.environ.setdefault("SOURCE_DATE_EPOCH", ENVIRONMENT["SOURCE_DATE_EPOCH"])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return Answer(code, out.getvalue(), err.getvalue())


class Stage:
    """A folder with an input and a place for the output. ``expected`` is the right output, ``code`` the exit code
    that comes with it (a command may say with its code that not everything could be saved)."""

    opening, failing, lasting = "O_CREAT", ("ENOSPC", "EIO"), ()

    def __init__(self, folder: Path, item: Writing, source: Path | None = None) -> None:
        self.item = item
        self.folder = folder / "outputs"
        self.folder.mkdir(parents=True)
        # Beside the folder, not in it: everything in it but the output is litter.
        self.source = folder / "in.pth"
        shutil.copyfile(source or FIXTURES / item.fixture, self.source)
        self.source.chmod(0o644)
        suffix = ".safetensors" if "safetensors" in item.options else ".pth"
        self.out = self.folder / ("out" if item.folder else f"out{suffix}")
        self.code = answer(self.arguments()).code
        if not self.out.exists():
            raise AssertionError(f"{item.command} on {item.fixture} ends with {self.code} and writes nothing")
        self.expected = state(self.out).data
        #: A file of the old folder: a folder is replaced only if all its files are parts of a checkpoint.
        self.old = min(os.listdir(self.out)) if item.folder else ""
        #: The mode of a new output.
        self.mode = stat.S_IMODE(self.out.stat().st_mode) if item.folder else 0o644
        self.before = state(self.source)
        self.force = False

    @property
    def name(self) -> str:
        """The command in words: its name, and what else tells this case from others."""
        size = " large" if len(self.expected) > 1 << 20 else ""
        return f"{self.item.name}{size}{' --force' if self.force else ''}"

    def arguments(self, *more: str) -> list[str]:
        others = [str(FIXTURES / name) for name in self.item.others]
        return [self.item.command, str(self.source), *others, "-o", str(self.out), *self.item.options, *more]

    def process(self, *more: str) -> list[str]:
        """The same as a process of its own."""
        force = ["--force"] if self.force else []
        return [sys.executable, "-m", "ckptool", *self.arguments(*force, *more)]

    def reset(self, force: bool | None = None) -> None:
        """As before a run: no output, or with ``force`` an old one. None: as the last time."""
        self.force = force = self.force if force is None else force
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if force and self.item.folder:
            self.out.mkdir()
            (self.out / self.old).write_bytes(OLD)
        elif force:
            self.out.write_bytes(OLD)
        if force:
            self.out.chmod(OLD_MODE | (0o110 if self.item.folder else 0))

    def litter(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path != self.out)

    def holds(self) -> str:
        """What is at the output's path: "nothing", "old", "new", or what is wrong with it."""
        if not self.out.exists():
            return "nothing" if not self.force else "the old output is gone"
        data, _, mode = state(self.out)
        old, old_mode = (self.old.encode() + b"\n" + OLD, OLD_MODE | 0o110) if self.item.folder else (OLD, OLD_MODE)
        if data == old and self.force:
            return "old" if mode == old_mode else f"the old bytes with mode {mode:o}"
        wanted = old_mode if self.force else self.mode
        if data == self.expected:
            return "new" if mode == wanted else f"the new bytes with mode {mode:o}"
        return f"{len(data):,} bytes that are neither the old nor the new ones"

    def check_promise(self, tally: Tally, leftovers: int) -> str:
        """The promise under failure; ``leftovers`` is how many temporary files may be there. Returns ``holds()``."""
        found = self.holds()
        tally.check(found in ("nothing", "old", "new"), f"the output holds {found}")
        tally.check(state(self.source) == self.before, "the input is not what it was")
        litter = self.litter()
        names = all(name.endswith(SUFFIX) and name.startswith(f".{self.out.name}.") for name in litter)
        tally.check(len(litter) <= leftovers and names, f"left behind: {litter}")
        return found

    def check_next_run(self, tally: Tally) -> None:
        """The next run succeeds and takes away what the last one left. It needs --force only over an output."""
        done = answer(self.arguments(*(["--force"] if self.out.exists() else [])))
        tally.check(done.code == self.code, f"the next run ends with {done.code}: {done.err.strip()}")
        tally.check(self.holds() == "new", f"after the next run the output holds {self.holds()}")
        tally.check(not self.litter(), f"after the next run there still is {self.litter()}")

    def check_message(self, tally: Tally, err: str, reason: str, places: list[str]) -> None:
        """An error is one sentence that names one of the places and the reason; perhaps a next step follows it."""
        lines = err.splitlines()
        sentence = [line for line in lines if line.startswith("ckptool: ")]
        others = [line for line in lines if not line.startswith(("ckptool: ", "  -> "))]
        told = any(place in line and reason in line for line in sentence for place in places)
        tally.check(told and not others, f"the message does not name path and reason ({reason}): {err.strip()!r}")
        tally.check(
            not re.search("Traceback|a bug in|Exception ignored", err), f"no message for users: {err.strip()!r}"
        )

    def check_killed(self, tally: Tally) -> None:
        there = self.check_promise(tally, leftovers=1)
        if self.litter() or there != "new":
            self.check_next_run(tally)

    def check_error(self, tally: Tally, done: Answer, call: str, reason: str, *, lasting: bool) -> None:
        # What cannot be taken away stays: the temporary file of a disk that fails for good, the former folder.
        unlink = call.startswith("unlink") and (lasting or self.item.folder)
        there = self.check_promise(tally, leftovers=1 if unlink else 0)
        code, _, err = done
        if code == self.code:  # another way was found
            words = f"it ends with {code}, but the output holds {there}: {err.strip()!r}"
            tally.check(there == "new" and not err, words)
        else:
            tally.check(code in (3, 5), f"it ends with {code}: {err.strip()!r}")
            others = [str(FIXTURES / name) for name in self.item.others]
            told = ["stdout"] if call.startswith("write(1,") else [str(self.out), str(self.source), *others]
            if not (lasting and call.startswith("write")):  # a message is a write, too
                self.check_message(tally, err, reason, told)
        if self.litter():
            self.check_next_run(tally)

    def check_ended(self, tally: Tally, done: Answer, number: int) -> None:
        # In the very last calls Python has taken its handlers down, and a signal ends it as it ends anything.
        tally.check(done.code in (128 + number, -number, self.code), f"it ends with {done.code}: {done.err.strip()!r}")
        there = self.check_promise(tally, leftovers=1)
        tally.check(there == "new" or done.code != self.code, f"it ends with {done.code}, the output holds {there}")
        if self.litter():
            tally.count("runs left their temporary file to the next one")
            self.check_next_run(tally)
