"""The fuzzer itself: its inputs come again, clean ones show nothing, and what it once found stays mended."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.cases import KINDS, Case, built, known, parsed, planned
from fuzz.finds import Verdict
from fuzz.judging import judged
from fuzz.sandbox import contained

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


CLEAN = {
    "zip": ("made-plain.pth", "made-views.pth", "made-kinds.pth", "made-shared.pth"),
    "safetensors": ("made-few.safetensors", "made-many.safetensors"),
    "gguf": ("made-other.gguf", "made-llama.gguf"),
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
