"""Differential fuzzing: mutated checkpoints in front of ckptool and of the real readers.

`make fuzz` takes ten minutes; FUZZ=60m, FUZZ=300s, or FUZZ='--kind tar --files 100000' say otherwise. A find is shown
with the command that shows it again. The exit code is 1 when there is one of a class of which there must be none.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz.cases import KINDS, SEEDS, Case, built, known, parsed, planned, put
from fuzz.finds import CLASSES, VALID_FAILS, Find, Verdict
from fuzz.judging import judged, prepared
from fuzz.workers import work

_MOST_FAILS = 0.005  # of the verdicts "valid" may be wrong about loading


class Tally:
    """What came out for one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.inputs = self.valid = self.opened = 0
        self.seconds = 0.0
        self.classes: Counter[str] = Counter()
        self.words: Counter[str] = Counter()
        self.groups: dict[tuple[str, str], tuple[Find, Case]] = {}  # the first of each cause
        self.times: Counter[tuple[str, str]] = Counter()

    def add(self, case: Case, verdict: Verdict) -> None:
        self.inputs += 1
        self.valid += verdict.valid
        self.opened += verdict.opened
        self.words.update(verdict.words)
        self.classes.update({find.kind for find in verdict.finds})
        for find in verdict.finds:
            name = (find.kind, find.cause)
            self.times[name] += 1
            self.groups.setdefault(name, (find, case))

    @property
    def bad(self) -> bool:
        """Whether the bounds of the fuzzer are broken."""
        if any(never and self.classes[name] for name, never in CLASSES.items()):
            return True
        return self.classes[VALID_FAILS] > _MOST_FAILS * self.valid


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("time", nargs="?", default="", help="how long: 10m (default), 1h, 300s; all kinds share it")
    parser.add_argument(
        "--kind",
        action="append",
        type=_counted,
        metavar="KIND[=N]",
        help=f"one kind of input (default: all), and how many of it: {', '.join(KINDS)}",
    )
    parser.add_argument("--files", type=int, metavar="N", help="so many inputs of each kind, however long it takes")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one gives other inputs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    parser.add_argument("--case", action="append", metavar="KIND:BASE:STEPS", help="show one input again")
    parser.add_argument(
        "--save", metavar="NAME", help="with --case: keep the input in tests/fuzz/seeds under this name"
    )
    given = parser.parse_args(arguments)
    kinds = given.kind or [(kind, None) for kind in KINDS]
    with tempfile.TemporaryDirectory(
        prefix="ckptool-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as scratch:
        if given.case:
            return _show(given.case, given.save, scratch)
        counts = [(kind, number or given.files) for kind, number in kinds]
        endless = not given.time and all(number for _, number in counts)
        seconds = float("inf") if endless else _seconds(given.time) / len(counts)
        tallies = []
        for kind, number in counts:
            tallies.append(_fuzzed(kind, given.seed, number, seconds, given.jobs, scratch))
            _report(tallies[-1])
    print("\n" + table(tallies))
    return int(any(tally.bad for tally in tallies))


def _counted(text: str) -> tuple[str, int | None]:
    """A kind, and how many inputs of it are asked for."""
    kind, _, number = text.partition("=")
    if kind not in KINDS or (number and not number.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(KINDS)}, with =N or without")
    return kind, int(number) if number else None


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text or "10m")
    if found is None:
        raise SystemExit(f"{text!r} is not a time: 10m, 1h, 300s")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "": 60}[found[2]]


def _folder(scratch: str, worker: int) -> str:
    folder = Path(scratch) / str(worker)
    (folder / "input").mkdir(parents=True, exist_ok=True)
    return str(folder / "input")


def _judge(scratch: str) -> Callable[[Case, int, Callable[[str], None]], Verdict]:
    def judge(case: Case, worker: int, tell: Callable[[str], None]) -> Verdict:
        folder = _folder(scratch, worker)
        tempfile.tempdir = folder
        os.fsync = _no_sync  # type: ignore[assignment]  # nothing here is about power failures
        return judged(case, built(case), folder, tell)

    return judge


def _no_sync(_fd: object) -> None:
    """In place of os.fsync."""


def _fuzzed(kind: str, seed: int, files: int | None, seconds: float, jobs: int, scratch: str) -> Tally:
    tally = Tally(kind)
    # Not for all kinds before the first: what torch takes depends on what is imported.
    prepared(kind, _folder(scratch, 0))
    begun = time.monotonic()
    seeds = [case for case in known() if case.kind == kind]

    def plan(number: int) -> Case | None:
        if number < len(seeds):
            return seeds[number]
        if files is not None and number >= files:
            return None
        return planned(kind, seed, number)

    for case, verdict in work(plan, _judge(scratch), workers=jobs, until=begun + seconds):
        tally.add(case, verdict)
    tally.seconds = time.monotonic() - begun
    return tally


def _alone(case: Case, scratch: str) -> list[Verdict]:
    """The verdict about one case, in a process of its own."""
    found = work(lambda number: case if number == 0 else None, _judge(scratch), workers=1, until=float("inf"))
    return [verdict for _, verdict in found]


def _show(texts: Sequence[str], save: str | None, scratch: str) -> int:
    bad, ready = 0, set[str]()
    for text in texts:
        case = parsed(text)
        if case.kind not in ready:
            ready.add(case.kind)
            prepared(case.kind, _folder(scratch, 0))
        if save is not None:
            put(SEEDS / case.kind / save, built(case))
        for verdict in _alone(case, scratch):
            print(f"{case}: {'valid' if verdict.valid else 'not valid'}; {'; '.join(verdict.words)}")
            for find in verdict.finds:
                print(f"  {find.kind}\n    ckptool: {find.says}\n    reader:  {find.reader}")
                bad = 1
    return bad


def _report(tally: Tally) -> None:
    """The finds of a kind by cause."""
    print(
        f"{tally.kind}: {tally.inputs:,} inputs in {tally.seconds:.0f} s"
        f" ({tally.inputs / max(tally.seconds, 0.1):.0f} a second)",
        flush=True,
    )
    for words, number in tally.words.most_common(12):
        print(f"  {number:,} {words}")
    order = sorted(tally.groups, key=lambda name: (list(CLASSES).index(name[0]), -tally.times[name]))
    for name in order:
        find, case = tally.groups[name]
        print(
            f"  {find.kind.upper()} ({tally.times[name]:,} times)\n"
            f"    ckptool: {find.says[:300]}\n    reader:  {find.reader[:300]}"
        )
        print(f"    make fuzz FUZZ='--case {case}'")


def table(tallies: Sequence[Tally]) -> str:
    """The figures, as a table of Markdown."""
    lines = ["| kind | inputs | valid | " + " | ".join(CLASSES) + " |", "|---|---:|---:|" + "---:|" * len(CLASSES)]
    for tally in tallies:
        cells = [tally.kind, f"{tally.inputs:,}", f"{tally.valid:,}"]
        for name in CLASSES:
            number = tally.classes[name]
            rate = f" ({number / tally.valid:.2%})" if name == VALID_FAILS and number and tally.valid else ""
            cells.append(f"{number:,}{rate}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
