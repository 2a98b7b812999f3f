"""The simulation against this machine: what it predicts for one worker and for two of Dask, and what they took.

`python -m bench.prediction` measures the costs with commands that use no engine, and predicts from them. Then it
measures the same work with `--engine dask`. `--json` writes all to bench/prediction.json, which docs/scale.md shows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

from bench import files, machine
from bench.files import Spec
from bench.measure import child_environment
from bench.simulation import Fleet, Work, simulate
from ckptool.files.engine import open_engine

PATH: Final = Path(__file__).with_name("prediction.json")
SCHEMA: Final = "ckptool.prediction/1"
_TOOL: Final = (sys.executable, "-m", "ckptool")
_WORKERS: Final = (1, 2)
_DASK: Final = ("--engine", "dask", "--jobs")
_NOOPS: Final = 500
#: The number of small files with 10 tensors each that measure the cost of opening a file.
_SMALL: Final = 200


class Size(NamedTuple):
    """The files to measure with: `files` links to a checkpoint to check, one to convert in tasks, one to plan."""

    files: int
    each: Spec
    whole: Spec
    task: int
    planned: Spec


FULL: Final = Size(
    60, Spec("200 MB", 40, 1000, 1250), files.BIG, 64 << 20, Spec("100 GB", 20_000, 1000, 1250, sparse=True)
)
QUICK: Final = Size(4, Spec("4 MB", 4, 500, 500), files.QUICK_BIG, 16 << 20, Spec("", 200, 1000, 1250, sparse=True))


class Row(NamedTuple):
    """The predicted and the measured seconds of some work with a number of workers."""

    what: str
    workers: int
    predicted: float
    measured: float


def _start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_TOOL, *map(str, words)], env=child_environment(), cwd=files.ROOT, stdout=subprocess.DEVNULL
    )


def seconds(*commands: Sequence[object]) -> float:
    """Return the time of commands that run at the same time. Raises CalledProcessError if one fails."""
    os.sync()  # earlier writes must not slow these commands down
    begin = perf_counter()
    running = [_start(*words) for words in commands]
    for process in running:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return perf_counter() - begin


class Folder:
    """The files to measure with, made in a folder."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.path, self.size = folder, size
        self.halves = [folder / "checked" / half for half in ("a", "b")]
        self.small, self.source = folder / "small", folder / "source.pt"
        self.whole, self.planned = folder / "whole.pt", folder / "planned.pt"
        for half in self.halves:
            half.mkdir(parents=True)
        for spec, path in ((size.each, self.source), (size.whole, self.whole), (size.planned, self.planned)):
            files.make(spec, path)
        for number in range(size.files):
            (self.halves[number % 2] / f"{number}.pt").hardlink_to(self.source)
        files.run_torch("small", self.small, _SMALL)

    @property
    def checked(self) -> int:
        """The total bytes of the files to check."""
        return self.size.files * self.source.stat().st_size

    def plan(self, task_size: int, source: Path) -> tuple[Path, float]:
        """Plan a conversion. Return the file of tasks, and the seconds that planning took."""
        sheet = self.path / "tasks.jsonl"
        words = ["plan", "--tasks", sheet, "--task-size", f"{task_size}B", "convert", source, "--allow-loss", "all"]
        return sheet, seconds([*words, "-o", self.path / "out.safetensors", "--force", "-q"])

    def forget(self) -> None:
        """Delete the journal, so that all tasks are carried out again."""
        (self.path / "tasks.jsonl.journal").unlink()

    def abort(self) -> None:
        """Remove the plan and its staged outputs."""
        seconds(["commit", self.path / "tasks.jsonl", "--abort"])


def dispatch() -> float:
    """Return the seconds per task without any work, with Dask."""
    with open_engine("dask", 1) as engine:
        engine.submit(int).result()
        begin = perf_counter()
        wait([engine.submit(int) for _ in range(_NOOPS)])
        return (perf_counter() - begin) / _NOOPS


def listed(folder: Path) -> float:
    """Return the seconds per file to find the files of a folder."""
    begin = perf_counter()
    count = sum(path.is_file() for path in folder.rglob("*"))
    return (perf_counter() - begin) / count


def _speed(nbytes: float, spent: float) -> float:
    return nbytes / max(spent, 1e-3)  # with small files, the noise of starting a process may exceed the time spent


def checking(folder: Folder, each: float) -> tuple[dict[str, float], list[Row]]:
    """Return the measured costs of checking files, and the rows that compare prediction and measurement."""
    some = sorted(folder.small.iterdir())[:2]  # one file per worker, so that each imports its modules
    alone = seconds(["validate", *some, "--jobs", 1, "-q"])
    opened = (seconds(["validate", folder.small, "--jobs", 1, "-q"]) - alone) / (_SMALL - len(some))
    halves = [["validate", half, "--jobs", 1, "-q"] for half in folder.halves]
    speed = _speed(folder.checked / 2, seconds(halves[0]) - alone)
    both = _speed(folder.checked, seconds(*halves) - alone)
    costs = {"listed": listed(folder.small), "opened": opened, "checked": speed, "checked by two": both}
    rows = []
    for workers in _WORKERS:
        start = seconds(["validate", *some, "-q", *_DASK, workers])
        costs[f"start, {workers}"] = start
        work = Work("", folder.size.files, folder.checked / folder.size.files, 0, each, opened)
        predicted = simulate(work, Fleet(workers, speed, max(both, speed), start=start)).seconds
        taken = seconds(["validate", folder.path / "checked", "-q", *_DASK, workers])
        rows.append(Row(f"validate, {folder.size.files} files", workers, predicted, taken))
    return costs, rows


def converting(folder: Folder, each: float) -> tuple[dict[str, float], list[Row]]:
    """Return the measured costs of tasks, and the rows that compare prediction and measurement."""
    sheet, alone = folder.plan(1 << 30, folder.small / "epoch_0000.pth")
    folder.abort()
    _, planned = folder.plan(1 << 30, folder.planned)
    costs = {"planned": (planned - alone) / tasks_in(sheet)}
    folder.abort()
    folder.plan(1000, folder.small / "epoch_0000.pth")  # a few tasks, so that every worker gets at least one
    alone = seconds(["run", sheet, "-q"])
    start = {}
    for workers in _WORKERS:
        folder.forget()
        start[workers] = seconds(["run", sheet, "-q", *_DASK, workers])
    folder.abort()
    folder.plan(100_000, folder.source)
    overhead = costs["begun"] = max(seconds(["run", sheet, "-q"]) - alone, 0) / tasks_in(sheet)
    folder.abort()
    folder.plan(folder.size.task, folder.whole)
    tasks, moved = tasks_in(sheet), folder.whole.stat().st_size
    taken = []
    ways: Sequence[Sequence[Sequence[object]]] = (
        [[]],
        [["--task", "1/2"], ["--task", "2/2"]],
        *([[*_DASK, workers]] for workers in _WORKERS),
    )
    for commands in ways:
        taken.append(seconds(*(["run", sheet, "-q", *words] for words in commands)))
        folder.forget()
    folder.abort()
    speed, both = (_speed(moved, time - alone - tasks * overhead / n) for n, time in enumerate(taken[:2], 1))
    rows = []
    for workers, time in zip(_WORKERS, taken[2:]):
        work = Work("", tasks, moved / tasks, 0, each, overhead)
        predicted = simulate(work, Fleet(workers, speed, max(both, speed), start=start[workers])).seconds
        rows.append(Row(f"run, {tasks} tasks", workers, predicted, time))
    return {**costs, "moved": speed, "moved by two": both}, rows


def tasks_in(sheet: Path) -> int:
    """Return the number of tasks in a file of tasks."""
    with sheet.open(encoding="ascii") as lines:
        return sum(line.startswith('{"task":') for line in lines)


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows with the medians over all rounds."""
    return [
        same[0]._replace(
            predicted=statistics.median(row.predicted for row in same),
            measured=statistics.median(row.measured for row in same),
        )
        for same in zip(*rounds)
    ]


def measure(work: Path, size: Size, rounds: int) -> dict[str, Any]:
    """Measure and predict in several rounds. Return the medians as a JSON document."""
    facts = machine.describe(work, size.files * size.each.size)
    place = work / "prediction"
    try:
        folder = Folder(place, size)
        found: list[list[Row]] = []
        costs: dict[str, list[float]] = {}
        for _ in range(rounds):
            each = dispatch()
            some, rows = checking(folder, each)
            more, others = converting(folder, each)
            found.append([*rows, *others])
            for name, value in {"dispatch": each, **some, **more}.items():
                costs.setdefault(name, []).append(value)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {
        "schema": SCHEMA,
        "machine": facts,
        "rounds": rounds,
        "costs": {name: statistics.median(values) for name, values in costs.items()},
        "rows": [row._asdict() for row in medians(found)],
    }


def table(document: dict[str, Any]) -> str:
    """Return predicted against measured times as a Markdown table."""
    lines = ["| work | workers | predicted | measured | measured / predicted |", "| --- | --- | --- | --- | --- |"]
    for row in (Row(**row) for row in document["rows"]):
        times = f"{row.predicted:.2f} s | {row.measured:.2f} s | {row.measured / row.predicted:.2f}x"
        lines.append(f"| `{row.what.replace(',', '`,', 1)} | {row.workers} | {times} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure and print the table. With --json, also write the file."""
    parser = argparse.ArgumentParser(prog="python -m bench.prediction", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "scratch", help="folder for the files")
    parser.add_argument("--quick", action="store_true", help="small files, one round: does it work?")
    parser.add_argument("--json", action="store_true", help=f"write {PATH.name}")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    document = measure(given.work.absolute(), QUICK if given.quick else FULL, 1 if given.quick else 3)
    if given.json:
        PATH.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document), "", json.dumps(document["costs"], indent=1), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
