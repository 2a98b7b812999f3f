"""Compare ckptool with torch, with cp and with a bare start of Python, in one run on one machine.

`python bench/run.py` makes its own checkpoints (kept in bench/scratch for the next time), checks with torch that
ckptool's output is right, measures, and prints one table. Only the ratios mean something elsewhere: each is
taken from runs that alternated on the same files. `--quick` takes small files, to see that the script works.
The exit code is 0 when everything ran, whatever the times were; 1 when a command failed or its output was wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import files
import machine
from jobs import Group, Job, Row, Target, groups, target
from measure import ROOT, JobError, Result, child_environment, peak_floor, rounds, run_once
from tabulate import tabulate

_COLUMNS = ("file", "ckptool", "s", "peak MB", "reference", "s", "peak MB", "ratio", "target")
_SLOW_ROUNDS = 3
_NOTES = """\
Seconds are medians of wall time, ~ where the slowest run took over 1.5 times as long as the fastest. Peaks are the
largest ru_maxrss, which counts mapped file pages; 1 MB = 10^6 bytes. ckptool and "cp && sync" leave the output on the
disk, torch.save leaves it to be written back later."""


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    work: Path
    quick: bool
    large: bool
    clean: bool
    repeat: int
    json: Path | None
    tool: list[str]
    only: str


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; ends the process on a usage error, as argparse does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "scratch", help="folder for the files")
    parser.add_argument("--quick", action="store_true", help="small files and 3 rounds: does the script work?")
    parser.add_argument("--large", action="store_true", help="also a file of 200,000 tensors (a quarter of an hour)")
    parser.add_argument("--repeat", type=int, metavar="N", help="timed rounds (default 5; at most 3 for torch)")
    parser.add_argument("--exe", nargs="?", const="ckptool", help="measure this console script, not python -m ckptool")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every run to FILE")
    parser.add_argument("--only", default="", metavar="TEXT", help="only groups with a job that has TEXT in its name")
    parser.add_argument("--clean", action="store_true", help="remove the files of earlier runs, and do nothing else")
    given = parser.parse_args(arguments)
    repeat = given.repeat if given.repeat is not None else 3 if given.quick else 5
    if repeat < 1:
        parser.error("--repeat must be at least 1")
    tool = [sys.executable, "-m", "ckptool"]
    if given.exe is not None:
        found = shutil.which(given.exe)
        if found is None:
            parser.error(f"--exe: no such program: {given.exe}")
        tool = [str(Path(found).absolute())]  # the jobs run in another folder
    return Options(given.work.absolute(), given.quick, given.large, given.clean, repeat, given.json, tool, given.only)


def tell(text: str) -> None:
    """Progress, on stderr: stdout has nothing but the result."""
    print(text, file=sys.stderr, flush=True)


def specs_of(options: Options) -> list[files.Spec]:
    """The files to measure on."""
    specs = [files.QUICK_BIG, files.QUICK_MANY] if options.quick else [files.BIG, files.MANY]
    return [*specs, files.LARGE] if options.large else specs


def clean(work: Path) -> None:
    """Remove what earlier runs made, by name, and the folder if nothing else is in it."""
    for spec in files.EVERY_SPEC:
        path = work / spec.name
        for leftover in (path, *(path.with_suffix(suffix) for suffix in (".unfinished", *files.SIDES))):
            leftover.unlink(missing_ok=True)
    for pattern in ("output.pt", "output.log", ".output.pt.*.ckptool-tmp"):
        for leftover in work.glob(pattern):
            leftover.unlink()
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def prepare(specs: Sequence[files.Spec], work: Path) -> None:
    """Check the room on the disk, then make the files that are missing; ends the process if that is too little."""
    missing = [spec for spec in specs if not (work / spec.name).exists()]
    need = sum(spec.size for spec in missing) + max(spec.size for spec in specs) * 17 // 10
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    tell(f"{work}: {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB needed for {len(missing)} new files and an output")
    if free < need:
        sys.exit("not enough room: free some, choose another folder with --work, or use --quick")
    for spec in missing:
        tell(f"making {spec.name}")
        files.make(spec, work / spec.name)


def verify(job: Job, source: Path, output: Path) -> None:
    """Run an editing job once and let torch check what it wrote; raises JobError if that is wrong."""
    output.unlink(missing_ok=True)
    run_once(job.command(source, output), output.with_suffix(".log"))
    checker = [sys.executable, str(Path(__file__).with_name("correctness.py")), job.edit, str(source), str(output)]
    answer = subprocess.run(checker, env=child_environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if answer.returncode:
        raise JobError(f"{job.name} wrote a wrong file: {answer.stderr.strip()}")
    tell(f"{job.name}: torch reads the output, and it is right")


def measure(group: Group, source: Path, options: Options) -> dict[str, Result]:
    """Check and time all jobs of a group on one file; the results by the names of the jobs."""
    output = options.work / "output.pt"
    for job in group.jobs:
        if job.edit:
            verify(job, source, output)
    results = rounds(group.jobs, source, output, options.repeat, min(options.repeat, _SLOW_ROUNDS), tell)
    return {result.job: result for result in results}


def verdict(goal: Target | None, ratio: float, peak: int) -> str:
    """The target and whether it was met; empty where there is none."""
    if goal is None:
        return ""
    met = ratio <= goal.ratio and (goal.peak is None or peak <= goal.peak * 1e6)
    memory = "" if goal.peak is None else f", <= {goal.peak:g} MB"
    return f"<= {goal.ratio:g}x{memory}: {'met' if met else 'missed'}"


def table_line(spec: files.Spec, row: Row, results: Mapping[str, Result], floor: int) -> tuple[str, ...]:
    """One line of the table."""
    mine, other = results[row.job], results[row.reference]
    ratio = mine.seconds / other.seconds

    def cost(result: Result) -> tuple[str, str]:
        # At the floor the probe itself is all that was seen: the command needed that much or less.
        memory = f"{result.peak / 1e6:,.0f}" if result.peak > floor * 1.05 else f"<{floor / 1e6 + 0.5:.0f}"
        return f"{'~' if result.noisy else ''}{result.seconds:.3f}", memory

    return (
        spec.label, row.job, *cost(mine), row.reference, *cost(other), f"{ratio:.2f}x",
        verdict(target(spec, row), ratio, mine.peak),
    )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Measure and print, or clean up."""
    options = parse(arguments)
    if options.clean:
        clean(options.work)
        return
    if not sys.platform.startswith("linux"):
        sys.exit("the figures of the operating system are read as Linux gives them; run this on Linux")
    specs = specs_of(options)
    prepare(specs, options.work)
    floor = peak_floor(options.work / "output.log")
    facts = machine.describe(options.work, {spec.label: (options.work / spec.name).stat().st_size for spec in specs})
    lines: list[tuple[str, ...]] = []
    raw: list[dict[str, object]] = []
    try:
        for spec in specs:
            tell(f"== {spec.label}")
            for group in groups(options.tool):
                if not any(options.only in job.name for job in group.jobs):
                    continue
                results = measure(group, options.work / spec.name, options)
                lines += [table_line(spec, row, results, floor) for row in group.rows]
                raw += [{"file": spec.label, **asdict(result)} for result in results.values()]
    except JobError as error:
        sys.exit(str(error))
    tool = "console script" if options.tool[0] != sys.executable else "python -m ckptool"
    facts.append(f"ckptool as: {tool}; {options.repeat} rounds after a warm-up, at most {_SLOW_ROUNDS} for torch")
    print(*facts, _NOTES, "", sep="\n")
    print(tabulate(lines, headers=_COLUMNS, tablefmt="github", disable_numparse=True))
    if options.json:
        document = {"schema": "ckptool.bench/1", "machine": facts, "peak_floor": floor, "results": raw}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
