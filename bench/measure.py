"""Run jobs in turn, each a fresh process, and keep what each run cost."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import Job

ROOT = Path(__file__).resolve().parent.parent
_PROBE = Path(__file__).resolve().with_name("probe.py")
_BLOCK = 1 << 22


class JobError(Exception):
    """A command that was to be measured failed; the text holds the end of its stderr."""


@dataclass(frozen=True)
class Sample:
    """The cost of one run: `peak` in bytes is the largest ru_maxrss of the command and its children."""

    seconds: float
    cpu_seconds: float
    peak: int


@dataclass(frozen=True)
class Result:
    """All timed runs of one job on one file, in order."""

    job: str
    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        """The median of the wall times."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def peak(self) -> int:
        """The largest peak, in bytes."""
        return max(sample.peak for sample in self.samples)

    @property
    def noisy(self) -> bool:
        """Whether the slowest run took more than one and a half times as long as the fastest."""
        seconds = [sample.seconds for sample in self.samples]
        return max(seconds) > 1.5 * min(seconds)


def child_environment() -> dict[str, str]:
    """The environment without settings that slow Python down (no .pyc files, unbuffered output) or change it."""
    kept = ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") or name in kept}


def run_once(command: Sequence[str], log: Path) -> Sample:
    """Run one command in the repository's root, so that `-m ckptool` is this checkout; raises JobError if it fails."""
    probe = [sys.executable, "-I", "-S", str(_PROBE), str(log), *command]
    answer = subprocess.run(probe, env=child_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu_seconds, kibibytes, code = answer.stdout.split()
    if int(code):
        tail = log.read_text(errors="replace")[-2000:].strip()
        raise JobError(f"exit code {code} from: {' '.join(command)}\n{tail}")
    return Sample(float(seconds), float(cpu_seconds), int(kibibytes) * 1024)


def peak_floor(log: Path) -> int:
    """The smallest peak that can be seen, in bytes: what a command that needs nothing is charged with."""
    return run_once(["true"], log).peak


def rounds(
    jobs: Sequence[Job], source: Path, output: Path, repeat: int, repeat_slow: int, tell: Callable[[str], None]
) -> list[Result]:
    """Let the jobs take turns: round 0 is the warm-up and is thrown away, then `repeat` rounds are kept.

    Slow jobs stop after `repeat_slow` rounds. Each round starts one job further on, so that no job
    always runs behind the same other one. `tell` is called with the figures of each run.
    """
    samples: dict[str, list[Sample]] = {job.name: [] for job in jobs}
    for number in range(max(repeat, repeat_slow) + 1):
        start = number % len(jobs)
        for job in (*jobs[start:], *jobs[:start]):
            if number > (repeat_slow if job.slow else repeat):
                continue
            _settle(source, output)
            sample = run_once(job.command(source, output), output.with_suffix(".log"))
            tell(f"{'warm-up' if number == 0 else f'round {number}'}: {job.name}: {sample.seconds:.2f} s")
            if number:
                samples[job.name].append(sample)
    output.unlink(missing_ok=True)
    return [Result(job.name, tuple(samples[job.name])) for job in jobs]


def _settle(source: Path, output: Path) -> None:
    """Give each run the same start: no output, nothing left to write back, the input in the page cache."""
    output.unlink(missing_ok=True)
    os.sync()  # else one job would wait for the disk on behalf of the job before it
    buffer = bytearray(_BLOCK)
    with source.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
