"""What all tests share: the fixtures with their manifest, and the folder of real checkpoints where there is one."""

from __future__ import annotations

import copyreg
import csv
import gc
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from ckptool.files import engine

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures" / "files"
#: The scripts that write the fixtures, and the model of one of them.
GENERATORS = ROOT / "fixtures" / "generators"
#: Checkpoints by other people; they never go into the project, and tests that use them skip without them.
CORPUS = Path(os.environ.get("CKPTOOL_CORPUS", ROOT.parent / "shared" / "corpus"))

#: Whether tests of a sample take all their cases. ``make torture`` asks for it.
WHOLE = os.environ.get("CKPTOOL_TESTS") == "all"
T = TypeVar("T")


def sample(cases: Sequence[T], step: int, first: int = 0) -> list[T]:
    """Return every ``step``-th case, or all cases for ``make torture``. The test is marked ``sampled``."""
    return list(cases if WHOLE else cases[first % step :: step])


def part(cases: Sequence[str], every: int) -> set[str]:
    """Return one of ``every`` cases, at least one, chosen by a hash of their names.

    Tests of the same files take different ones, and a new case moves few others.
    """
    by_hash = sorted(cases, key=lambda case: sha256(case.encode()).digest())
    return set(by_hash[: -(-len(cases) // every)])


def examples(number: int) -> int:
    """Return how many examples Hypothesis tries: ``number`` in ``make torture``, otherwise a fifth, but at least 20.

    Tests with examples are marked ``sampled``.
    """
    return number if WHOLE else min(number, max(20, number // 5))


# A slow machine makes examples slow, and that is no failure. Fixtures are shared by the examples of a test on purpose.
settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("any machine")

# Tests patch modules for worker processes, which then must be forked, whatever the tests before them have imported.
engine._UNFORKABLE = ""  # type: ignore[misc]

# Started by nohup or in the background, the tests inherit signals that are ignored, and so would what they run.
for _signal in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Let ``fsync`` return at once in this process. Tests that follow the calls replace it, and processes do sync."""

    def checked(fd: int) -> None:
        os.fstat(fd)  # a closed descriptor is still an error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", checked)
        if hasattr(os, "fdatasync"):
            patch.setattr(os, "fdatasync", checked)
        yield


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


#: A test of more files, or of more combinations of parameters, runs with a part of them. All run in ``make torture``.
MANY = 12

#: Fixtures for every test of all checkpoints, each with what the others lack.
CHOSEN = {
    "bare.pth": "a state dict alone",
    "ddp4_training.pth": "wrapped, with the prefix, an optimizer, and tensors on cuda and cpu",
    "py2_views.pth": "torch's format before zip, written by Python 2, with views",
    "shared_views.pth": "views that share a storage",
    "dtypes_typed.pt": "every dtype",
    "sparse.pt": "tensors of several storages",
    "big_endian.pth": "the other byte order",
    "whole_model_legacy.pth": "a pickled module, on cuda",
    "hostile_stack_global.pth": "a pickle that runs code",
    "zip_deflated_pickle.pth": "a zip file that torch did not write",
    "truncated.pth": "cut",
    "model.safetensors": "no pickle",
}


def chosen(names: Iterable[str], test: str) -> set[str]:
    """Return the ``MANY`` files for a test: those of ``CHOSEN``, then others by a hash of the test and the name.

    So tests of the same files take different ones beside the chosen ones.
    """
    by_hash = sorted({*names}, key=lambda name: (name not in CHOSEN, sha256(f"{test} {name}".encode()).digest()))
    return {*by_hash[:MANY]}


def pairwise(cases: Mapping[str, Sequence[str]]) -> set[str]:
    """Return cases in which any two values of different parameters meet; with two parameters, every value occurs.

    ``cases`` maps the id of a case to the id of each parameter's value.
    """
    together = min(2, max(map(len, cases.values())) - 1)
    covered: set[tuple[tuple[int, str], ...]] = set()
    taken: set[str] = set()
    in_order = sorted(cases, key=lambda case: sha256(case.encode()).digest())
    for enough in (all, any):  # first the cases with nothing but new pairs: fewer are needed then
        for case in in_order:
            groups = [*combinations(enumerate(cases[case]), together)]
            if enough(group not in covered for group in groups):
                covered.update(groups)
                taken.add(case)
    return taken


def file_name(item: pytest.Function) -> str | None:
    """Return the name of the fixture or the real checkpoint that a case is about, or None."""
    for value in item.callspec.params.values():
        path = value.path if isinstance(value, Fixture) else value
        if isinstance(path, Path) and path.parent in (FIXTURES, CORPUS):
            return path.name
    return None


def kept(test: str, items: Sequence[pytest.Function]) -> set[str]:
    """Return the ids of the cases of a test that run by default."""
    mark = items[0].get_closest_marker("sampled")
    if mark and mark.kwargs:
        return part([item.nodeid for item in items], mark.kwargs["every"])
    names = {item.nodeid: file_name(item) for item in items}
    some = chosen((name for name in names.values() if name), test)
    # pytest has no public name for the ids of the single parameters.
    cases = {item.nodeid: item.callspec._idlist for item in items if (names[item.nodeid] or "") in {"", *some}}
    return pairwise(cases) if len(cases) > MANY and len(items[0].callspec._idlist) > 1 else {*cases}


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from the 25,000 tests themselves: one pass over them takes a second."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that Hypothesis gives their examples, and leave out cases of tests with many.

    A test of more than ``MANY`` files runs with the chosen ones, one with more combinations of parameters with a
    pairwise sample, and one with ``sampled(every=4)`` with a quarter of its cases: ``every=1`` keeps all. All run in
    ``make torture``, and if the test is named with ``::``.
    """
    named = {argument.partition("[")[0] for argument in config.args if "::" in argument}
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("sampled")
        if hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[str] = set()
    for test, cases in tests.items():
        if len(cases) > 1 and (others := {case.nodeid for case in cases} - kept(test, cases)):
            for case in cases:
                case.add_marker("sampled")
            if not WHOLE and not any(name.endswith(test) for name in named):
                left_out |= others
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
