"""Run jobs in turn, each in a new process, and record the cost of each run."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import images, machine
from bench.jobs import Group, Job

ROOT = Path(__file__).resolve().parent.parent
_PROBE = Path(__file__).resolve().with_name("probe.py")
_BLOCK = 1 << 22
_LARGE = 1 << 28  # from this many input bytes on, an output may need memory that the host must first provide
_REASON = 80  # characters of a failure's reason that go into a table
#: Makes Python write the modules that it imports to stderr.
_TRACED = {"PYTHONPROFILEIMPORTTIME": "1"}
#: A line about a module of ckptool.
_IMPORTED = re.compile(r"^import time:.*\| +(ckptool[\w.]*)$", re.M)


class JobError(Exception):
    """A command to be measured failed, or wrote something wrong. The message says what."""


class Sample(NamedTuple):
    """The cost of one run: `peak` in bytes is the largest ru_maxrss of the command and its children."""

    seconds: float
    cpu_seconds: float
    peak: int


class Result(NamedTuple):
    """All timed runs of one job in order, or `fails` with the reason why there are none.

    `disk` counts the bytes that the first run took from the free space. `shared` is the share (0 to 1) of the output's
    blocks that belong to the input too. Both are None if they were not measured. `modules` of ckptool were imported.
    """

    job: str
    samples: tuple[Sample, ...] = ()
    fails: str = ""
    disk: int | None = None
    shared: float | None = None
    modules: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The median of the wall times."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def peak(self) -> int:
        """The largest peak, in bytes."""
        return max(sample.peak for sample in self.samples)


def child_environment() -> dict[str, str]:
    """Return the environment without settings that change Python or slow it down (no .pyc files, unbuffered output)."""
    kept = ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") or name in kept}


def run_once(command: Sequence[str], log: Path, expected: int = 0, settings: Mapping[str, str] = {}) -> Sample:
    """Run one command in the root of the repository, so that `-m ckptool` is this checkout.

    `settings` are further environment variables. Raises JobError if its exit code is not the expected one.
    """
    probe = [sys.executable, "-I", "-S", str(_PROBE), str(log), *command]
    answer = subprocess.run(
        probe, env={**child_environment(), **settings}, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, cpu_seconds, kibibytes, code = answer.stdout.split()
    if int(code) != expected:
        tail = log.read_text(errors="replace")[-2000:].strip()
        raise JobError(f"{tail or 'no word of why'}\nexit code {code} from: {' '.join(command)}")
    return Sample(float(seconds), float(cpu_seconds), int(kibibytes) * 1024)


def imported(log: str) -> tuple[str, ...]:
    """Return the modules of ckptool whose import was traced."""
    return tuple(sorted(set(_IMPORTED.findall(log))))


def peak_floor(log: Path) -> int:
    """Return the smallest measurable peak in bytes: the peak of a command that needs no memory."""
    return run_once(["true"], log).peak


def measure(group: Group, repeat: int, log: Path, tell: Callable[[str], None]) -> dict[str, Result]:
    """Let the jobs of a group take turns. Return the results by job name.

    First comes a warm-up. Its outputs are checked, and its times count only if `repeat` is 0. Then follow `repeat`
    timed rounds. Each round starts one job further on, so that no job always runs after the same other job. Jobs with
    fewer rounds than `repeat` have all of them before the other jobs: the gigabytes of memory that they free would
    slow down the runs between them.

    `tell` is called with the time of each run. Raises JobError if a job writes something wrong, or fails without
    `may_fail`.
    """
    results = {job.name: _warm_up(job, log, group.disk, tell) for job in group.jobs}
    jobs = [job for job in group.jobs if not results[job.name].fails]
    samples: dict[str, list[Sample]] = {job.name: [] for job in jobs}
    for turns in ([job for job in jobs if job.most < repeat], [job for job in jobs if job.most >= repeat]):
        for number in range(repeat):
            start = number % len(turns) if turns else 0
            for job in (*turns[start:], *turns[:start]):
                if number < job.most:
                    sample = _timed(job, log)
                    tell(f"round {number + 1}: {job.name}: {sample.seconds:.2f} s")
                    samples[job.name].append(sample)
    for job in jobs:
        _remove(job.writes)
        if job.most and repeat:  # otherwise the warm-up is the result
            results[job.name] = results[job.name]._replace(samples=tuple(samples[job.name]))
    return results


def _warm_up(job: Job, log: Path, disk: bool, tell: Callable[[str], None]) -> Result:
    """Run a job for the first time, with all its checks."""
    try:
        wrong = job.proof()
        if wrong:
            raise JobError(wrong)
        _settle(job)
        place = job.writes.parent if job.writes and disk else None
        before = images.free(place) if place else 0
        sample = run_once(job.words, log, job.code, _TRACED)
        modules = imported(log.read_text(errors="replace"))
        used = before - images.free(place) if place else None
        shared = images.shared(job.writes) if job.writes and disk else None
        if job.check:
            _check(job, log)
        tell(f"warm-up: {job.name}: {sample.seconds:.2f} s{'; the result is right' if job.check else ''}")
    except JobError as error:
        if not job.may_fail:
            raise
        reason = str(error).strip().splitlines()[0]
        for path in (*job.reads, *(Path(word) for word in job.words if word.startswith("/"))):
            reason = reason.replace(str(path), path.name)  # the figures are published, so no path may appear
        reason = reason if len(reason) <= _REASON else reason[: _REASON - 3] + "..."
        tell(f"{job.name} fails: {reason}")
        return Result(job.name, fails=reason)
    return Result(job.name, (sample,), disk=used, shared=shared, modules=modules)


def _check(job: Job, log: Path) -> None:
    """Check the output of a job with torch. Raises JobError if it is wrong."""
    assert job.check is not None
    checker = [sys.executable, "-m", "bench.correctness", *map(str, job.check)]
    with log.open("w") as errors:
        done = subprocess.run(checker, env=child_environment(), cwd=ROOT, stderr=errors, check=False)
    if done.returncode:
        tail = log.read_text(errors="replace").strip()[-2000:]
        raise JobError(f"{job.name} wrote a wrong file: {tail}")


def _timed(job: Job, log: Path) -> Sample:
    _settle(job)
    return run_once(job.words, log, job.code)


def _settle(job: Job) -> None:
    """Give each run the same start: no output, no pending writes, the input in the page cache, free memory."""
    _remove(job.writes)
    job.reset()
    os.sync()  # otherwise a job would wait for writes of the job before it
    buffer = bytearray(_BLOCK)
    for path in job.reads:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    if job.writes and sum(path.stat().st_size for path in job.reads) >= _LARGE:
        machine.touch_memory()


def _remove(path: Path | None) -> None:
    if path is not None and path.is_dir():
        shutil.rmtree(path)
    elif path is not None:
        path.unlink(missing_ok=True)
