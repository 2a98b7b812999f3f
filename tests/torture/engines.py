"""Engines whose workers or scheduler are killed in the middle of their work."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .rows import FIXTURES, Options, Skipped, Tally
from .stage import ENVIRONMENT, Answer, answer

#: Seconds: to start a scheduler and its workers, and until a command must have ended.
_START, _PATIENCE = 30.0, 90.0
_DASK: Final = ("--engine", "dask", "--jobs", "2")
_POOL: Final = ("--jobs", "2")


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes of all files below, and their modes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in files}


class _Job:
    """A command whose work is shared, and what it gives where one process does it: JSON lines, or files in ``outputs``.

    It is disturbed at most ``delay`` seconds after its first result.
    """

    def __init__(self, words: list[str], outputs: Path | None = None, delay: float = 0.05) -> None:
        self.name, self.words, self.outputs, self.delay = words[0], words, outputs, delay
        self.alone = answer(words)
        self.lines = sorted(self.alone.out.splitlines())
        self.files = tree(outputs) if outputs else {}
        if self.alone.code > 1 or len(self.files or self.lines) < 20:
            raise AssertionError(f"{self.name} says {self.alone.out[:200]!r} {self.alone.err[:200]!r}")

    def start(self, scratch: Path, *engine: str) -> _Process:
        if self.outputs is not None:
            shutil.rmtree(self.outputs)
            self.outputs.mkdir()
        return _Process(scratch, [*self.words, *engine])

    def begun(self, process: _Process) -> bool:
        return bool(os.listdir(self.outputs)) if self.outputs else process.out.stat().st_size > 0

    def check(self, tally: Tally, done: Answer) -> None:
        """Each result is there once and is the right one; none is missing if the command says that it succeeded."""
        succeeded = done.code == self.alone.code
        if self.outputs is None:
            lines = [line for line in done.out.split("\n")[:-1] if line]  # the last line may be cut
            tally.check(len(lines) == len(set(lines)), f"{len(lines) - len(set(lines))} results are there twice")
            strange = sorted({*lines} - {*self.lines})
            tally.check(not strange, f"it prints {strange[:2]}")
            missing = f"{len(lines):,} of {len(self.lines):,} results"
            tally.check(not succeeded or sorted(lines) == self.lines, missing)
            return
        there = tree(self.outputs)
        temporary = {name.partition("/")[0] for name in there if name.startswith(".")}
        whole = {name: value for name, value in there.items() if not name.startswith(".")}
        tally.check(whole == self.files or not (succeeded or whole), f"it ends with {done.code}: {sorted(whole)}")
        tally.check(not temporary, f"left behind: {sorted(temporary)}")

    def check_again(self, tally: Tally, *more: str) -> None:
        """The same command again succeeds, and its output is the same as ever."""
        again = answer([*self.words, *more])
        tally.check(again.code == self.alone.code, f"the same again ends with {again.code}: {again.err.strip()}")
        if self.outputs is not None:
            tally.check(tree(self.outputs) == self.files, "the output of the same again is another one")


def _readings(options: Options) -> list[_Job]:
    """Two commands that read many files."""
    folder = options.scratch / "read"
    folder.mkdir()
    for number in range(150):
        name = ("ddp4_training.pth", "lightning.ckpt", "bare.pth")[number % 3]
        shutil.copyfile(FIXTURES / name, folder / f"{number:03}.pth")
    return [_Job([command, str(folder), "--format", "jsonl"]) for command in ("validate", "hash")]


def _edit(options: Options) -> _Job:
    """An edit of many files."""
    inputs, outputs = options.scratch / "edited", options.scratch / "edited-out"
    inputs.mkdir()
    for number in range(40):
        shutil.copyfile(FIXTURES / "ddp4_training.pth", inputs / f"{number:03}.pth")
    words = ["strip-module", *sorted(map(str, inputs.iterdir())), "--out-dir", str(outputs)]
    return _Job(words, outputs)


def _cast(options: Options) -> _Job:
    """A cast into a folder of files, each a task that takes a moment."""
    import torch

    path, outputs = options.scratch / "in.pth", options.scratch / "cast-out"
    outputs.mkdir()
    rows = torch.arange(24 << 20, dtype=torch.float32).reshape(24, -1)
    torch.save({f"layers.{number}": row.clone() for number, row in enumerate(rows)}, path)
    words = ["cast", str(path), "--to-dtype", "bfloat16", "--max-shard-size", "2.2MB", "-o", str(outputs / "o")]
    return _Job(words, outputs, delay=0.3)


class _Process:
    """A run of the command line as a process of its own, whose streams go to files."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [sys.executable, "-m", "ckptool", *words]
            self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=err)
        self.pid = self.process.pid
        self.seconds = 0.0

    def goes_on(self, job: _Job, delay: float) -> bool:
        """Wait until the work has begun, and a moment longer; return whether it still goes on."""
        until = time.monotonic() + _PATIENCE
        while self.process.poll() is None and not job.begun(self) and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(delay)
        return self.process.poll() is None

    def finish(self, tally: Tally) -> Answer:
        """Wait for the end, which must come."""
        since = time.monotonic()
        ended = True
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            ended = False
            for pid in [self.pid, *_descendants(self.pid)]:
                _kill(pid)
            self.process.wait()
        self.seconds = time.monotonic() - since
        tally.check(ended, f"it goes on for more than {_PATIENCE:.0f} s")
        text = self.err.read_text(errors="replace")
        tally.check("Traceback" not in text and "a bug in" not in text, f"it says {text.strip()[-400:]!r}")
        return Answer(self.process.returncode, self.out.read_text(errors="replace"), text)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            for child in map(int, children):
                found += [child, *_descendants(child)]
    return found


def _workers(pid: int) -> list[int]:
    """The processes that a command has for its work, but for those that start or watch others."""
    found = []
    for child in _descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
            if b"resource_tracker" not in words and not (b"forkserver" in words and parent == pid):
                found.append(child)
    return found


def _need_dask() -> None:
    if find_spec("distributed") is None:
        raise Skipped("dask is not installed")


def workers(tally: Tally, options: Options) -> None:
    """A worker killed while there is work, of the pool of this machine and of a cluster of Dask."""
    _need_dask()
    chance = random.Random(options.seed)
    for job in (_cast(options), _edit(options), *_readings(options)):
        for engine, amount in ((_POOL, options.amount(24, 4)), (_DASK, options.amount(12, 2))):
            for _ in range(amount):
                delay = chance.uniform(0, job.delay)
                tally.case(f"{job.name} {' '.join(engine)}, a worker killed {delay:.3f} s after the first result")
                process = job.start(options.scratch, *engine)
                there = _workers(process.pid) if process.goes_on(job, delay) else []
                if not (there and _kill(chance.choice(there))):
                    tally.count("workers had nothing to do any more")
                done = process.finish(tally)
                tally.check(done.code == job.alone.code, f"it ends with {done.code}: {done.err.strip()}")
                job.check(tally, done)


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[str, int]]:
    """A scheduler with two workers, all of them processes of their own: its address, and its process."""
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    scheduler = [*dask, "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file), "--no-dashboard"]
    started = []
    try:
        with (folder / "cluster.log").open("ab") as log:
            started.append(subprocess.Popen(scheduler, env=ENVIRONMENT, stdout=log, stderr=log, cwd=folder))
            until = time.monotonic() + _START
            while not (file.exists() and file.stat().st_size) and time.monotonic() < until:
                time.sleep(0.05)
            address = json.loads(file.read_text())["address"]
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1"]
            worker += [
                "--no-nanny",
                "--no-dashboard",
                "--death-timeout",
                "5",
                "--local-directory",
                str(folder / "dask"),
            ]
            started += [subprocess.Popen(worker, env=ENVIRONMENT, stdout=log, stderr=log, cwd=folder) for _ in range(2)]
        yield address, started[0].pid
    finally:
        for process in started:
            process.kill()
            process.wait()


def schedulers(tally: Tally, options: Options) -> None:
    """The scheduler of a cluster killed while there is work: an error in time, and the same command again."""
    _need_dask()
    chance = random.Random(options.seed)
    slowest = 0.0
    for job in (_cast(options), *_readings(options)):
        for _ in range(options.amount(4, 1)):
            delay = chance.uniform(0, job.delay)
            tally.case(f"{job.name} by dask, the scheduler killed {delay:.3f} s after the first result")
            with _cluster(options.scratch) as (address, pid):
                process = job.start(options.scratch, "--engine", f"dask={address}")
                going_on = process.goes_on(job, delay)
                if not (_kill(pid) and going_on):
                    tally.count("commands had ended before")
                done = process.finish(tally)
            slowest = max(slowest, process.seconds)
            job.check(tally, done)
            if done.code != job.alone.code:
                lost = ("the connection to the workers was lost", f"the scheduler at {address} cannot be reached")
                told = done.code in (3, 5) and any(text in done.err for text in lost)
                tally.check(told, f"it ends with {done.code}: {done.err.strip()}")
                tally.check(not (job.outputs and os.listdir(job.outputs)), "there is an output")
                with _cluster(options.scratch) as (address, _):
                    job.check_again(tally, "--engine", f"dask={address}")
    tally.notes.append(f"the last command ended {slowest:.0f} s after its scheduler")
