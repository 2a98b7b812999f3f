"""The fuzzer itself: its inputs come again, clean ones show nothing, and what it once found stays mended."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.cases import KINDS, Case, bases, built, known, parsed, planned
from fuzz.finds import RUNS, Verdict, cause_of
from fuzz.judging import judged
from fuzz.sandbox import contained
from fuzz.terms import dumps, loads

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    place = tmp_path / "input"
    place.mkdir()
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield str(place)


def verdict(case: Case, folder: str, edits: int = 2) -> Verdict:
    return judged(case, built(case), folder, lambda words: None, edits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_the_same_bytes_each_time(kind: str) -> None:
    for number in range(12):
        case = planned(kind, 7, number)
        assert parsed(str(case)) == case == planned(kind, 7, number)
        assert built(case) == built(case)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "safetensors"])
def test_mutations_change_something(kind: str) -> None:
    cases = [planned(kind, 7, number) for number in range(40)]
    changed = {hashlib.sha256(built(case)[""]).digest() for case in cases}
    assert len(changed) > 30


def test_a_pickle_is_read_and_written_with_its_meaning() -> None:
    for protocol in range(6):
        shared = [1, 2]
        value = {"a": shared, "b": (shared, 1.5, None, True, 1 << 80), "c": "\ud800"}
        if protocol >= 4:
            value["d"] = ({3}, frozenset([4]), b"x")
        root, end = loads(pickle.dumps(value, protocol) + b"more")
        again = pickle.loads(dumps(root, protocol))
        assert again == value
        assert again["a"] is again["b"][0]
        assert end == len(pickle.dumps(value, protocol))


CLEAN = {
    "zip": ("made-plain.pth", "made-views.pth", "made-kinds.pth", "made-shared.pth"),
    "safetensors": ("made-few.safetensors", "made-many.safetensors"),
    "legacy": ("made-training-legacy.pth",),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CLEAN for name in CLEAN[kind]])
def test_clean_files_show_nothing(kind: str, name: str, folder: str) -> None:
    found = verdict(Case(kind, name, ()), folder, edits=99)
    assert (found.valid, found.opened, found.finds) == (True, True, ())


@pytest.mark.parametrize("case", known(), ids=str)
def test_what_was_found_once_stays_mended(case: Case, folder: str) -> None:
    assert verdict(case, folder, edits=99).finds == ()


def test_what_a_pickle_would_run_is_stopped(folder: str) -> None:
    def run() -> None:
        pickle.loads(b"cposix\nsystem\n(S'touch " + folder.encode() + b"/ran'\ntR.")

    answer = contained(run, folder)
    assert answer.ran.startswith("os.system")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("what", ["write", "socket", "compile"])
def test_other_ways_to_run_are_stopped(what: str, folder: str) -> None:
    def run() -> None:
        if what == "write":
            open(folder + "/../outside", "w").close()
        elif what == "socket":
            socket.socket()
        else:
            compile("1", "x", "eval")

    assert contained(run, folder).ran
    assert not (Path(folder).parent / "outside").exists()


def test_a_load_that_is_harmless_comes_back(folder: str) -> None:
    assert contained(lambda: 3, folder).value == 3
    assert contained(lambda: 1 // 0, folder).error.startswith("ZeroDivisionError")
    assert contained(lambda: os._exit(5), folder).died


def test_causes_are_without_what_differs() -> None:
    assert cause_of("expected 4, got 17 at '/x'") == cause_of("expected 2, got 3 at 'y'")
    assert RUNS not in cause_of("x")
    assert bases("zip")
