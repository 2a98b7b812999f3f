"""Things that happen at some moment of a run: a signal, a reader that goes away, an input that is written to."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .rows import FIXTURES, Options, Tally
from .stage import ENVIRONMENT, SUFFIX, Answer, Stage, Writing, state, writing

Process: TypeAlias = "subprocess.Popen[str]"

#: Enough for a copy in several steps, with a second thread that brings the output to the disk.
_BYTES = 68 << 20
_MARKED = 1 << 20


def signals(tally: Tally, options: Options) -> None:
    """INT, TERM, HUP and PIPE at random moments, half of them while the output grows.

    SIGPIPE is not for programs that look at what write() says: Python ignores it, and so the run goes on.
    """
    chance = random.Random(options.seed)
    stages = _large_stages(options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        for turn in range(options.amount(50, 4)):
            stage, seconds = stages[turn % len(stages)]
            stage.reset(force=bool(turn & 1))
            growing = bool(turn & 2)
            delay = chance.uniform(0, seconds * (0.6 if growing else 1.1))
            words = f"{delay:.3f} s after {'the temporary file' if growing else 'the start'}"
            tally.case(f"{stage.item.name}, {number.name} {words}")
            done = _disturbed(stage, growing, delay, partial(_signal, number))
            if done.code != stage.code:
                tally.count(f"runs were ended by {number.name}")
            # Before ckptool runs, while Python still reads its modules, ^C is answered by Python: with a traceback.
            if "Traceback" in done.err and not re.search(r'cli/main\.py", line \d+, in main', done.err):
                tally.count("runs ended while Python still started")
                stage.check_killed(tally)
                continue
            tally.check(not done.err, f"it says {done.err.strip()[-300:]!r}")
            stage.check_ended(tally, done, number)


def pipes(tally: Tally, options: Options) -> None:
    """Readers that go away before, while and after something is printed; both of ckptool's streams are looked at."""
    chance = random.Random(options.seed)
    reading = [["keys", "--names"], ["keys"], ["inspect"], ["validate"]]
    files = [FIXTURES / "ddp4_training.pth", FIXTURES / "lightning.ckpt", FIXTURES / "legacy_cuda.pth"]
    for turn in range(options.amount(50, 6)):
        call, lines = chance.choice(reading), chance.choice((0, 0, 1, 2, 50))
        many = [str(chance.choice(files))] * chance.choice((1, 20, 200))
        tally.case(f"{' '.join(call)} with {len(many)} inputs | head -n {lines} (turn {turn})")
        command = [sys.executable, "-m", "ckptool", *call, *many]
        done = _head(command, lines, chance.uniform(0, 0.15) if lines == 0 else 0)
        tally.check(done.code in (0, 128 + signal.SIGPIPE), f"it ends with {done.code}")
        tally.check(done.err == "", f"it says {done.err.strip()!r}")
    for item in writing():
        stage = Stage(options.scratch / f"pipe-{item.name}", item)
        for force in (False, True):
            stage.reset(force)
            tally.case(f"{item.name} into a closed pipe")
            done = _head(stage.process(), 0, 0)
            tally.check(done.code in (stage.code, 128 + signal.SIGPIPE), f"it ends with {done.code}")
            tally.check(done.err == "", f"it says {done.err.strip()!r}")
            tally.check(stage.check_promise(tally, 0) == "new", f"the output holds {stage.holds()}")


def _head(command: list[str], lines: int, delay: float) -> Answer:
    """Some lines of what a command prints; then nobody reads on."""
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        time.sleep(delay)
        text = b"".join(process.stdout.readline() for _ in range(lines))
        process.stdout.close()
        said = process.stderr.read()
        return Answer(process.wait(), text.decode(), said.decode(errors="replace"))


def changing(tally: Tally, options: Options) -> None:
    """An input that shrinks, grows, is touched or written to while it is read, at random moments of the copy."""
    chance = random.Random(options.seed)
    stages = _large_stages(options)
    clean = {stage: stage.before for stage, _ in stages}
    kinds = ("shrinks", "is emptied", "grows", "is touched", "is written to", "is cut and filled up again")
    for turn in range(options.amount(50, 6)):
        stage, seconds = stages[turn % len(stages)]
        kind, force = kinds[turn % len(kinds)], bool(turn & 1)
        stage.source.write_bytes(clean[stage].data)
        os.utime(stage.source, ns=(clean[stage].mtime, clean[stage].mtime))
        stage.reset(force)
        delay = chance.uniform(0, seconds * 0.1)
        tally.case(f"{stage.item.name}, the input {kind} {delay:.3f} s after the temporary file")
        size = len(clean[stage].data)
        done = _disturbed(stage, True, delay, partial(_change, stage.source, kind, size, chance))
        stage.before = state(stage.source)  # what the test itself changed is not ckptool's doing
        there = stage.check_promise(tally, leftovers=0)
        if done.code == stage.code:  # the copy was done before
            tally.check(there == "new", f"it ends with {done.code}, but the output holds {there}")
            continue
        tally.count("changes came in time to be noticed")
        tally.check(done.code == 5, f"it ends with {done.code}")
        tally.check(there in ("old", "nothing"), f"it ends with {done.code}, but the output holds {there}")
        told = re.search("changed while|shrank while|ends before", done.err) and str(stage.folder.parent) in done.err
        tally.check(bool(told) and "Traceback" not in done.err, f"it says {done.err.strip()!r}")


def _signal(number: signal.Signals, process: Process) -> None:
    process.send_signal(number)


def _change(path: Path, kind: str, size: int, chance: random.Random, _process: Process) -> None:
    if kind == "shrinks":
        os.truncate(path, size - chance.randint(1, size // 2))
    elif kind == "is emptied":
        os.truncate(path, 0)
    elif kind == "grows":
        with path.open("ab") as file:
            file.write(b"more")
    elif kind == "is touched":
        os.utime(path)
    elif kind == "is written to":
        with path.open("r+b") as file:
            file.seek(chance.randrange(size))
            file.write(b"other bytes")
    else:
        os.truncate(path, size // 2)
        os.truncate(path, size)


def _large_stages(options: Options) -> list[tuple[Stage, float]]:
    """The commands that write, on a large file where they take any, with the seconds that a run takes."""
    found = []
    for item in writing():
        large = _large(options.scratch, item) if item.command in ("strip-module", "add-module", "remap") else None
        stage = Stage(options.scratch / f"stage-{item.name}", item, large)
        stage.reset(False)
        begun = time.monotonic()
        stage.run()
        found.append((stage, time.monotonic() - begun))
    return found


def _large(folder: Path, item: Writing) -> Path:
    """A checkpoint of one large tensor with marks in it: zeros alone would look the same wherever they are."""
    path = folder / f"large-{item.command}.pth"
    values = torch.zeros(_BYTES // 8, dtype=torch.int64)
    values[:: _MARKED // 8] = torch.arange(_BYTES // _MARKED)
    tree: dict[str, Any] = {"module.weight": values, "module.bias": torch.ones(3)}
    torch.save(tree, path, _use_new_zipfile_serialization=item.command != "add-module")
    if item.command == "remap":  # no GPU is needed to say that there was one
        from ckptool import open as open_checkpoint
        from ckptool import remap, save

        with open_checkpoint(path) as checkpoint:
            save(remap(checkpoint, {"cpu": "cuda:0"}), folder / "large-cuda.pth")
        path = folder / "large-cuda.pth"
    return path


def _disturbed(stage: Stage, growing: bool, delay: float, disturb: Callable[[Process], None]) -> Answer:
    """A run that is disturbed after a delay, counted from its start or from the moment the output begins to grow."""
    with subprocess.Popen(
        stage.process(), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        while growing and process.poll() is None:
            if any(name.endswith(SUFFIX) for name in os.listdir(stage.folder)):
                break
        time.sleep(delay)
        disturb(process)
        out, err = process.communicate(timeout=60)
        return Answer(process.returncode, out, err)
