"""Engines whose workers or scheduler are killed in the middle of their work, and commands that are ended then."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .rows import FIXTURES, Options, Skipped, Tally
from .stage import ENVIRONMENT, Answer, answer

__all__ = ["ended", "schedulers", "workers"]

#: Seconds: to start a scheduler and its workers, and until a command must have ended.
_START, _PATIENCE = 30.0, 90.0
_FILES: Final = 150
_EDITED: Final = 40
_DASK: Final = ("--engine", "dask", "--jobs", "2")
_POOL: Final = ("--jobs", "2")


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes of all files below, and their modes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in files}


class _Reading:
    """A command that reads many files, as JSON lines; ``expected`` are those of one process, sorted."""

    def __init__(self, folder: Path, command: str) -> None:
        folder.mkdir(parents=True)
        for number in range(_FILES):
            name = ("ddp4_training.pth", "lightning.ckpt", "bare.pth")[number % 3]
            shutil.copyfile(FIXTURES / name, folder / f"{number:03}.pth")
        self.name = command
        self.words = [command, str(folder), "--format", "jsonl"]
        self.alone = answer(self.words)
        self.expected = sorted(self.alone.out.splitlines())
        if len(self.expected) < _FILES:
            raise AssertionError(f"{command} on {_FILES} files says {self.alone.out[:200]!r} {self.alone.err[:200]!r}")


class _Editing:
    """An edit of many files."""

    def __init__(self, folder: Path) -> None:
        self.outputs = folder / "out"
        (folder / "in").mkdir(parents=True)
        for number in range(_EDITED):
            shutil.copyfile(FIXTURES / "ddp4_training.pth", folder / "in" / f"{number:03}.pth")
        inputs = sorted(map(str, (folder / "in").iterdir()))
        self.words = ["strip-module", *inputs, "--out-dir", str(self.outputs)]
        answer(self.words)
        self.expected = tree(self.outputs)

    def begun(self) -> bool:
        return self.outputs.is_dir() and bool(os.listdir(self.outputs))


class _Process:
    """A run of the command line as a process of its own, whose streams go to files."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [sys.executable, "-m", "ckptool", *words]
            self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=err)
        self.pid = self.process.pid
        self.seconds = 0.0

    def wait_until(self, begun: Callable[[], bool]) -> bool:
        """Wait until the work has begun; return whether it still goes on."""
        until = time.monotonic() + _PATIENCE
        while self.process.poll() is None and not begun():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
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

    def printed(self) -> bool:
        return self.out.stat().st_size > 0


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


def _readings(options: Options) -> list[_Reading]:
    return [_Reading(options.scratch / name, name) for name in ("validate", "hash")]


def _need_dask() -> None:
    if find_spec("distributed") is None:
        raise Skipped("dask is not installed")


def workers(tally: Tally, options: Options) -> None:
    """A worker killed while there is work, of the pool of this machine and of a cluster of Dask."""
    _need_dask()
    chance = random.Random(options.seed)
    late = 0
    folder, readings = _Folder(options.scratch / "folder"), _readings(options)
    for engine, amount in ((_POOL, options.amount(8, 2)), (_DASK, options.amount(4, 1))):
        for _ in range(4 * amount):
            folder.reset()
            delay = chance.uniform(0, 0.3)
            tally.case(f"cast {' '.join(engine)}, a worker killed {delay:.3f} s after the temporary folder")
            process = _Process(options.scratch, [*folder.words, *engine])
            late += not _kill_worker(process, folder.begun, delay, chance)
            done = process.finish(tally)
            tally.check(done.code == 0, f"it ends with {done.code}: {done.err.strip()}")
            tally.check(tree(folder.outputs) == folder.expected, f"there is {sorted(os.listdir(folder.outputs))}")
        for reading in readings:
            for _ in range(amount):
                delay = chance.uniform(0, 0.05)
                tally.case(f"{reading.name} {' '.join(engine)}, a worker killed {delay:.3f} s after the first result")
                process = _Process(options.scratch, [*reading.words, *engine])
                late += not _kill_worker(process, process.printed, delay, chance)
                done = process.finish(tally)
                tally.check(done.code == reading.alone.code, f"it ends with {done.code}: {done.err.strip()}")
                _check_results(tally, reading, done.out, whole=True)
        edit = _Editing(options.scratch / f"edit-{engine[0].strip('-')}")
        for _ in range(3 * amount):
            shutil.rmtree(edit.outputs, ignore_errors=True)
            delay = chance.uniform(0, 0.05)
            tally.case(f"strip-module --out-dir {' '.join(engine)}, a worker killed {delay:.3f} s after the first file")
            process = _Process(options.scratch, [*edit.words, *engine])
            late += not _kill_worker(process, edit.begun, delay, chance)
            done = process.finish(tally)
            tally.check(done.code == 0, f"it ends with {done.code}: {done.err.strip()}")
            tally.check(tree(edit.outputs) == edit.expected, f"there is {sorted(os.listdir(edit.outputs))}")
    tally.note(f"{late} workers had nothing to do any more")


def _kill_worker(process: _Process, begun: Callable[[], bool], delay: float, chance: random.Random) -> bool:
    if not process.wait_until(begun):
        return False
    time.sleep(delay)
    there = _workers(process.pid)
    return bool(there) and _kill(chance.choice(there))


def _check_results(tally: Tally, reading: _Reading, out: str, *, whole: bool) -> None:
    """Every result once, and none that is another one; not ``whole``: some are missing."""
    lines = [line for line in out.split("\n") if line]
    tally.check(len(lines) == len(set(lines)), f"{len(lines) - len(set(lines))} results are there twice")
    strange = sorted({*lines} - {*reading.expected})
    tally.check(not strange, f"it prints {strange[:2]}")
    if whole:
        tally.check(sorted(lines) == reading.expected, f"{len(lines):,} of {len(reading.expected):,} results")


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
    slowest, late = 0.0, 0
    folder = _Folder(options.scratch / "folder")
    for _ in range(options.amount(4, 1)):
        folder.reset()
        delay = chance.uniform(0, 0.3)
        tally.case(f"cast by dask, the scheduler killed {delay:.3f} s after the temporary folder")
        with _cluster(options.scratch) as (address, pid):
            process = _Process(options.scratch, [*folder.words, "--engine", f"dask={address}"])
            late += not _kill_after(process, folder.begun, delay, pid)
            done = process.finish(tally)
        slowest = max(slowest, process.seconds)
        _check_lost(tally, done, address)
        there, expected = tree(folder.outputs), {} if done.code else folder.expected
        tally.check(there == expected, f"it ends with {done.code}, there is {sorted(there)}")
        if done.code:
            with _cluster(options.scratch) as (address, _pid):
                again = answer([*folder.words, "--engine", f"dask={address}"])
            tally.check(not again.code, f"the same again ends with {again.code}: {again.err.strip()}")
            tally.check(tree(folder.outputs) == folder.expected, "the output of the same again is another one")
    for reading in _readings(options):
        for _ in range(options.amount(3, 1)):
            delay = chance.uniform(0, 0.05)
            tally.case(f"{reading.name} by dask, the scheduler killed {delay:.3f} s after the first result")
            with _cluster(options.scratch) as (address, pid):
                process = _Process(options.scratch, [*reading.words, "--engine", f"dask={address}"])
                late += not _kill_after(process, process.printed, delay, pid)
                done = process.finish(tally)
            slowest = max(slowest, process.seconds)
            whole = done.code == reading.alone.code
            if not whole:
                _check_lost(tally, done, address)
            _check_results(tally, reading, done.out, whole=whole)
    tally.note(f"the last command ended {slowest:.0f} s after its scheduler; {late} had ended before")


def _kill_after(process: _Process, begun: Callable[[], bool], delay: float, pid: int) -> bool:
    if not process.wait_until(begun):
        return False
    time.sleep(delay)
    going_on = process.process.poll() is None
    return _kill(pid) and going_on


def _check_lost(tally: Tally, done: Answer, address: str) -> None:
    lost = (f"the scheduler at {address} {end}" for end in ("was lost", "cannot be reached"))
    told = done.code == 0 or any(text in done.err for text in lost)
    tally.check(done.code in (0, 3, 5) and told, f"it ends with {done.code}: {done.err.strip()}")


class _Folder:
    """A cast into a folder of files, each a task that takes a moment."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.outputs = folder / "out"
        self.outputs.mkdir(parents=True)
        rows = torch.arange(24 << 20, dtype=torch.float32).reshape(24, -1)
        torch.save({f"layers.{number}": row.clone() for number, row in enumerate(rows)}, folder / "in.pth")
        self.words = ["cast", str(folder / "in.pth"), "--to-dtype", "bfloat16", "--max-shard-size", "2.2MB"]
        self.words += ["-o", str(self.outputs / "o")]
        done = answer(self.words)
        if done.code:
            raise AssertionError(f"cast ends with {done.code}: {done.err}")
        self.expected = tree(self.outputs)

    def reset(self) -> None:
        shutil.rmtree(self.outputs)
        self.outputs.mkdir()

    def begun(self) -> bool:
        return bool(os.listdir(self.outputs))


def ended(tally: Tally, options: Options) -> None:
    """SIGINT, SIGTERM and SIGKILL for a command whose work is done by workers, at random moments."""
    _need_dask()
    chance = random.Random(options.seed)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    readings = _readings(options)
    folder = _Folder(options.scratch / "folder")
    for turn in range(options.amount(30, 3)):
        number, engine = numbers[turn % 3], (_POOL, _DASK)[turn // 3 % 2]
        begun = chance.choice((True, True, False))
        delay = chance.uniform(0, 0.2) if begun else chance.uniform(0.2, 1.5)
        where = f"{number.name} {delay:.3f} s after {'the work began' if begun else 'the start'}"
        reading = readings[turn % 2]
        tally.case(f"{reading.name} {' '.join(engine)}, {where}")
        done = _end(tally, options, [*reading.words, *engine], None, delay if not begun else 1.0, number)
        whole = done.out.rpartition("\n")[0]  # the last line may be cut
        _check_results(tally, reading, whole, whole=done.code == reading.alone.code)
        folder.reset()
        tally.case(f"cast {' '.join(engine)}, {where}")
        done = _end(tally, options, [*folder.words, *engine], folder.begun if begun else None, delay, number)
        there, left = tree(folder.outputs), 1 if number == signal.SIGKILL else 0
        temporary = {name.partition("/")[0] for name in there if name.startswith(".o.")}
        whole = {name: value for name, value in there.items() if not name.startswith(".o.")}
        # A signal may come when the output has its name, and only the workers are still to be ended.
        tally.check(whole == folder.expected or (done.code != 0 and not whole), f"there is {sorted(whole)}")
        tally.check(len(temporary) <= left, f"left behind: {sorted(temporary)}")
        again = answer([*folder.words, *(["--force"] if whole else [])])
        tally.check(not again.code, f"the same again ends with {again.code}: {again.err.strip()}")
        tally.check(tree(folder.outputs) == folder.expected, "the output of the same again is another one")


def _end(
    tally: Tally,
    options: Options,
    words: Sequence[str],
    begun: Callable[[], bool] | None,
    delay: float,
    number: signal.Signals,
) -> Answer:
    """Send a signal to a command; it ends soon, and so do its workers."""
    process = _Process(options.scratch, words)
    if begun is not None:
        process.wait_until(begun)
    time.sleep(delay)
    there = _descendants(process.pid)
    process.process.send_signal(number)
    done = process.finish(tally)
    tally.check(done.code in (0, 1, 128 + number, -number), f"it ends with {done.code}: {done.err.strip()}")
    until = time.monotonic() + 10
    while (left := [pid for pid in there if _lives(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    tally.check(not left, f"{len(left)} of its {len(there)} processes go on")
    for pid in left:
        _kill(pid)
    return done


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
