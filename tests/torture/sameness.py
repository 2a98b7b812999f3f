"""The same bytes every time; and the tests of inertness, over all fixtures and real checkpoints there are."""

from __future__ import annotations

import csv
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from .rows import CORPUS, FIXTURES, ROOT, Options, Tally
from .stage import ENVIRONMENT, Stage, writing

__all__ = ["determinism", "inert", "terminal"]

#: More inputs than those of the commands themselves: sharing, sets of names, several state dicts.
_MORE = {"strip-module": ("gan.pth", "fsdp_wrapped.pth"), "remap": ("mixed_devices.pth", "lightning.ckpt")}


def determinism(tally: Tally, options: Options) -> None:
    """Five hash seeds, two runs each: the output file and what is printed."""
    for item in writing():
        for fixture in (item.fixture, *_MORE.get(item.command, ())):
            stage = Stage(options.scratch / f"{item.name}-{fixture}", item, FIXTURES / fixture)
            printed = set()
            for seed in range(options.amount(5, 2)):
                for turn in range(2):
                    stage.reset(force=False)
                    tally.case(f"{item.name} {fixture}, hash seed {seed}, run {turn + 1}")
                    command = stage.process("--format", "json")
                    environment = ENVIRONMENT | {"PYTHONHASHSEED": str(seed)}
                    done = subprocess.run(command, env=environment, capture_output=True, check=False)
                    printed.add(done.stdout)
                    tally.check(done.returncode == stage.code, f"it ends with {done.returncode}")
                    tally.check(stage.check_promise(tally, 0) == "new", f"the output holds {stage.holds()}")
            tally.check(len(printed) == 1, f"it prints {len(printed)} different texts")


def inert(tally: Tally, options: Options) -> None:
    """An audit hook over everything ckptool does with every file: tests/laws/test_inert.py has it."""
    _tested(tally, options, "nothing_is or no_module_that or the_watch_would")


def terminal(tally: Tally, options: Options) -> None:
    """Everything that is printed about every file, and about one made to provoke: the rest of test_inert.py."""
    _tested(tally, options, "not (nothing_is or no_module_that or the_watch_would)")


def _tested(tally: Tally, options: Options, which: str) -> None:
    report = options.scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/laws/test_inert.py", "-k", which]
    done = subprocess.run(
        [*command, f"--junitxml={report}"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    for case in cases:
        tally.case(f"tests/laws/test_inert.py, {case.get('name')}")
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        tally.check(wrong is None, "" if wrong is None else (wrong.get("message") or "")[:300])
    tally.case("tests/laws/test_inert.py as a whole")
    tally.amount = _files()
    tally.check(done.returncode == 0 and bool(cases), f"pytest ends with {done.returncode}: {done.stdout[-300:]}")
    tally.note(f"{len(cases)} tests over {_files() - _corpus()} fixtures and {_corpus()} real checkpoints")


def _files() -> int:
    with (FIXTURES / "MANIFEST.tsv").open(encoding="utf-8", newline="") as lines:
        return sum(1 for _ in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)) + _corpus()


def _corpus() -> int:
    return sum(path.name not in ("MANIFEST.tsv", "README.md") for path in CORPUS.glob("*"))
