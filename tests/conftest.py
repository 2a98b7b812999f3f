"""What all tests share: the fixtures with their manifest, and the folder of real checkpoints where there is one."""

from __future__ import annotations

import copyreg
import csv
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures" / "files"
#: The scripts that write the fixtures, and the model of one of them.
GENERATORS = ROOT / "fixtures" / "generators"
#: Checkpoints by other people; they never go into the project, and tests that use them skip without them.
CORPUS = Path(os.environ.get("CKPTOOL_CORPUS", ROOT.parent / "shared" / "corpus"))

# A slow machine makes examples slow, and that is no failure. Fixtures are shared by the examples of a test on purpose.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("any machine")

# Started by nohup or in the background, the tests inherit signals that are ignored, and so would what they run.
for _signal in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_pickling() -> None:
    """Take back what Dask registers with ``copyreg``: it changes how exceptions are pickled."""
    for cls, function in list(copyreg.dispatch_table.items()):
        if str(function.__module__).startswith("tblib"):
            del copyreg.dispatch_table[cls]


class Fixture(NamedTuple):
    """A line of fixtures/files/MANIFEST.tsv."""

    path: Path
    container: str
    layout: str
    state_dicts: list[str]
    prefix: str
    locations: list[str]
    loads: bool
    why: str


def manifest() -> list[Fixture]:
    """Every committed fixture."""
    with (FIXTURES / "MANIFEST.tsv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Fixture(
            FIXTURES / row["file"],
            row["container"],
            row["layout"],
            json.loads(row["state_dicts"]),
            row["prefix"],
            row["locations"].split(),
            row["loads"] == "yes",
            row["why"],
        )
        for row in rows
    ]


class Real(NamedTuple):
    """A line of fixtures/files/real/MANIFEST.tsv: a file or folder that another library wrote."""

    path: Path
    kind: str
    made_with: str
    why: str


def real() -> list[Real]:
    """What other libraries wrote."""
    with (FIXTURES / "real" / "MANIFEST.tsv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [Real(FIXTURES / "real" / row["name"], row["kind"], row["made_with"], row["why"]) for row in rows]


MANIFEST = manifest()
REAL = real()
CHECKPOINTS = [item for item in MANIFEST if item.container in ("torch-zip", "torch-legacy")]
LOADABLE = [item for item in CHECKPOINTS if item.loads]


def by_name(item: Fixture | Real) -> str:
    return item.path.name


def corpus_files() -> list[Path]:
    """The real checkpoints, or nothing."""
    return sorted(path for path in CORPUS.glob("*") if path.name not in ("MANIFEST.tsv", "README.md"))


needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the folder of real checkpoints is not here")


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A name for an output."""
    yield tmp_path / "out.pth"
