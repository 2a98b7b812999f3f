"""The simulation against this machine: what it predicts for one worker and for two of Dask, and what they took.

`python -m bench.prediction` measures what a prediction is made of with commands that use no engine, predicts, and
measures the same work with `--engine dask`. `--json` writes it to bench/prediction.json, which docs/scale.md shows.
"""

from __future__ import annotations

import argparse
import json
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
_NOOPS: Final = 500
#: Small files of 10 tensors, to see what opening one costs.
_SMALL: Final = 200


class Size(NamedTuple):
    """What is measured: so many files to check, one to convert, and the bytes of its tasks."""

    files: int
    each: Spec
    task: int


FULL: Final = Size(20, Spec("100 MB", 20, 1000, 1250), 64 << 20)
QUICK: Final = Size(4, Spec("4 MB", 4, 500, 500), 1 << 20)


class Row(NamedTuple):
    """Seconds of some work with so many workers."""

    what: str
    workers: int
    predicted: float
    measured: float


def _start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_TOOL, *map(str, words)], env=child_environment(), cwd=files.ROOT, stdout=subprocess.DEVNULL
    )


def seconds(*commands: Sequence[object]) -> float:
    """The time of commands that run at once; raises CalledProcessError if one fails."""
    begin = perf_counter()
    running = [_start(*words) for words in commands]
    for process in running:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return perf_counter() - begin


class Folder:
    """The files that are measured with."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.path, self.size = folder, size
        self.halves = [folder / "checked" / half for half in ("a", "b")]
        self.small, self.source = folder / "small", folder / "source.pt"
        folder.mkdir(parents=True)
        for half in self.halves:
            half.mkdir(parents=True)
        files.make(size.each, self.source)
        for number in range(size.files):
            shutil.copy(self.source, self.halves[number % 2] / f"{number}.pt")
        files.run_torch("small", self.small, _SMALL)
        self.merged = folder / "merged.pt"
        files.make(size.each._replace(tensors=size.each.tensors * size.files // 2), self.merged)

    @property
    def checked(self) -> int:
        """Bytes of the files to check."""
        return self.size.files * self.source.stat().st_size

    def plan(self, task_size: int, source: Path) -> tuple[Path, float]:
        """Plan to convert; the file of tasks, and how long it took."""
        sheet = self.path / "tasks.jsonl"
        words = ["plan", "--tasks", sheet, "--task-size", task_size, "convert", source, "--allow-loss", "all"]
        return sheet, seconds([*words, "-o", self.path / "out.safetensors", "--force", "-q"])

    def abort(self, sheet: Path) -> None:
        """Remove what was planned."""
        seconds(["commit", sheet, "--abort"])


def dispatch() -> float:
    """Seconds of a task without work, with Dask."""
    with open_engine("dask", 1) as engine:
        engine.submit(int).result()
        begin = perf_counter()
        wait([engine.submit(int) for _ in range(_NOOPS)])
        return (perf_counter() - begin) / _NOOPS


def listed(folder: Path) -> float:
    """Seconds of a file to be found in a folder."""
    begin = perf_counter()
    count = sum(path.is_file() for path in folder.rglob("*"))
    return (perf_counter() - begin) / count


def _speed(nbytes: float, spent: float) -> float:
    return nbytes / max(spent, 1e-3)  # in small files it is less than what starting varies by


def checking(folder: Folder, each: float) -> tuple[dict[str, float], list[Row]]:
    """Costs of checking files, and the rows."""
    one = folder.small / "epoch_0000.pth"
    dask = ("--engine", "dask", "--jobs")
    alone = seconds(["validate", one, "-q"])
    opened = (seconds(["validate", folder.small, "--jobs", 1, "-q"]) - alone) / (_SMALL - 1)
    halves = [["validate", half, "--jobs", 1, "-q"] for half in folder.halves]
    speed = _speed(folder.checked / 2, seconds(halves[0]) - alone)
    both = _speed(folder.checked, seconds(*halves) - alone)
    costs = {"listed": listed(folder.small), "opened": opened, "checked": speed, "checked by two": both}
    rows = []
    for workers in _WORKERS:
        start = seconds(["validate", one, "-q", *dask, workers])
        costs[f"start, {workers}"] = start
        work = Work("", folder.size.files, folder.checked / folder.size.files, 0, each, opened)
        predicted = simulate(work, Fleet(workers, speed, max(both, speed), start=start)).seconds
        taken = seconds(["validate", folder.path / "checked", "-q", *dask, workers])
        rows.append(Row(f"validate, {folder.size.files} files", workers, predicted, taken))
    return costs, rows


def converting(folder: Folder, each: float) -> tuple[dict[str, float], list[Row]]:
    """Costs of tasks, and the rows."""
    dask = ("--engine", "dask", "--jobs")
    small, _ = folder.plan(folder.size.each.columns * 4, folder.source)  # a row of a tensor each
    count = tasks_in(small)
    begun = seconds(["run", small, "-q"])
    start = {}
    for workers in _WORKERS:  # nothing is left to do
        start[workers] = seconds(["run", small, "-q", *dask, workers])
    alone = seconds(["run", small, "-q"])
    folder.abort(small)
    sheet, planned = folder.plan(folder.size.task, folder.merged)
    tasks, moved = tasks_in(sheet), folder.merged.stat().st_size
    overhead = max(begun - alone, 0) / count
    again, taken = [], {}
    for shares in ([""], ["1/2", "2/2"]):
        again.append(seconds(*(["run", sheet, "-q", *(("--task", share) if share else ())] for share in shares)))
        (folder.path / "tasks.jsonl.journal").unlink()
    speed, both = (_speed(moved, time - alone - tasks * overhead / number) for number, time in enumerate(again, 1))
    for workers in _WORKERS:
        taken[workers] = seconds(["run", sheet, "-q", *dask, workers])
        if workers != _WORKERS[-1]:
            (folder.path / "tasks.jsonl.journal").unlink()
    committed = seconds(["commit", sheet])
    rows = []
    for workers in _WORKERS:
        work = Work("", tasks, moved / tasks, 0, each, overhead)
        fleet = Fleet(workers, speed, max(both, speed), start=start[workers])
        rows.append(Row(f"run, {tasks} tasks", workers, simulate(work, fleet).seconds, taken[workers]))
    costs = {"planned": planned / tasks, "begun": overhead, "committed": committed / tasks, "moved": speed}
    return {**costs, "moved by two": both}, rows


def tasks_in(sheet: Path) -> int:
    """The number of tasks in a file of them."""
    with sheet.open(encoding="ascii") as lines:
        return sum(line.startswith('{"task":') for line in lines)


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The medians of rounds."""
    return [
        same[0]._replace(
            predicted=statistics.median(row.predicted for row in same),
            measured=statistics.median(row.measured for row in same),
        )
        for same in zip(*rounds)
    ]


def measure(work: Path, size: Size, rounds: int) -> dict[str, Any]:
    """Measure and predict, in rounds."""
    facts = machine.describe(work, size.files * size.each.size)
    folder = Folder(work / "prediction", size)
    try:
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
        shutil.rmtree(folder.path)
    return {
        "schema": SCHEMA,
        "machine": facts,
        "rounds": rounds,
        "costs": {name: statistics.median(values) for name, values in costs.items()},
        "rows": [row._asdict() for row in medians(found)],
    }


def table(document: dict[str, Any]) -> str:
    """Predicted against measured, as Markdown."""
    lines = ["| work | workers | predicted | measured | measured / predicted |", "| --- | --- | --- | --- | --- |"]
    for row in (Row(**row) for row in document["rows"]):
        times = f"{row.predicted:.2f} s | {row.measured:.2f} s | {row.measured / row.predicted:.2f}x"
        lines.append(f"| `{row.what.replace(',', '`,', 1)} | {row.workers} | {times} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure, and print or write it."""
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
