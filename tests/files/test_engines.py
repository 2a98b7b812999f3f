"""Engines: every item has one answer, whatever dies; memory is bounded, and nothing is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from ckptool.base.engines import Precomputed, engine_address
from ckptool.base.errors import EngineError, TargetError, UnreadableError
from ckptool.files import cluster
from ckptool.files.engine import WAITING, each_answer, open_engine

pytest.importorskip("distributed")

#: What other processes need to import this module.
PATH = (ROOT, Path(__file__).parent, ROOT / "tests", ROOT / "tests" / "helpers")


def worked(item: str) -> str:
    """Do what the item says."""
    word, _, rest = item.partition(":")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "once" and not os.path.exists(rest):
        Path(rest).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "sleep":
        time.sleep(float(rest))
    if word == "refuse":
        raise UnreadableError("it is a song", path=rest)
    if word == "pid":
        return str(os.getpid())
    return item.upper()


def lost(item: str, error: Exception) -> str:
    return f"{item} {type(error).__name__}"


def all_of(engine: Any, items: Any) -> list[str]:
    return list(each_answer(lambda: nullcontext(engine), worked, items, lost))


@pytest.fixture(params=["local", "dask"])
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- what an engine is called


@pytest.mark.parametrize("spec", ["", "spark", "local=", "local=tcp://a:1", "dask=", "dask=a", "dask=a:1", "Dask"])
def test_an_unknown_engine_is_a_usage_error(spec: str) -> None:
    with pytest.raises(TargetError, match="there is no engine"):
        engine_address(spec)
    with pytest.raises(TargetError), open_engine(spec):
        pass


def test_without_dask_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(EngineError, match="dask is not installed") as caught, open_engine("dask", 1):
        pass
    assert caught.value.next == "pip install 'ckptool[dask]'"
    assert caught.value.exit_code == 3


# -- answers


def test_every_item_has_one_answer(spec: str) -> None:
    items = [f"f{number}" for number in range(700)]
    with open_engine(spec, 2) as engine:
        assert all_of(engine, items) == [item.upper() for item in items]
        assert all_of(engine, []) == []
    assert multiprocessing.active_children() == []


def test_any_executor_will_do() -> None:
    items: list[Any] = ["a", Precomputed("given"), "b"]
    assert list(each_answer(partial(ThreadPoolExecutor, 3), worked, items, lost)) == ["A", "given", "B"]


def test_items_may_be_endless(spec: str) -> None:
    taken = [0]

    def endless() -> Iterator[str]:
        for number in count():
            taken[0] = number + 1
            yield f"f{number}"

    answers = each_answer(partial(open_engine, spec, 2), worked, endless(), lost)
    for number in range(1000):
        assert next(answers) == f"F{number}"
        assert taken[0] <= number + 1 + WAITING * 2 * 16
    answers.close()
    assert multiprocessing.active_children() == []


def test_an_error_of_the_work_is_raised_here(spec: str) -> None:
    with pytest.raises(UnreadableError) as caught, open_engine(spec, 2) as engine:
        all_of(engine, ["a", "refuse:p", "b"])
    assert (caught.value.what, caught.value.path) == ("it is a song", "p")
    assert multiprocessing.active_children() == []


# -- what dies


def test_a_killer_costs_itself_alone(spec: str) -> None:
    items = [f"kill:{number}" if number in (3, 40) else f"f{number}" for number in range(80)]
    expected = [f"{item} WorkerDiedError" if item.startswith("kill") else item.upper() for item in items]
    assert list(each_answer(partial(open_engine, spec, 2), worked, items, lost)) == expected


def test_work_is_done_again_where_its_process_died(spec: str, tmp_path: Path) -> None:
    items = [f"once:{tmp_path / 'mark'}" if number == 7 else f"f{number}" for number in range(20)]
    assert list(each_answer(partial(open_engine, spec, 2), worked, items, lost)) == [item.upper() for item in items]


def test_a_worker_killed_from_outside(spec: str) -> None:
    answers = each_answer(partial(open_engine, spec, 2), worked, ["pid", *["sleep:0.05"] * 40], lost)
    os.kill(int(next(answers)), signal.SIGKILL)
    assert list(answers) == ["SLEEP:0.05"] * 40


def test_an_exception_ends_what_still_works(spec: str) -> None:
    with pytest.raises(KeyError), open_engine(spec, 2) as engine:
        futures = [engine.submit(worked, "sleep:600") for _ in range(8)]
        raise KeyError
    assert all(future.cancelled() or future.exception() for future in futures)  # none of them slept to its end
    assert multiprocessing.active_children() == []


#: A pool whose processes have all worked, and wait for more when their parent is killed.
KILLED = """
import os, sys, time
from ckptool.files.engine import open_engine
with open_engine("local", 3) as pool:
    for future in [pool.submit(time.sleep, 0.1) for _ in range(9)]:
        future.result()
    os.write(1, b"done")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_processes_end_with_a_parent_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # It ends when nobody has its output open any more: a process that lived on would hold it.
    words = [sys.executable, "-c", KILLED]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=False, timeout=300)
    assert done.stdout == b"done"
    assert done.returncode == -9


# -- a scheduler elsewhere


@contextmanager
def scheduler(tmp_path: Path, path: tuple[Path, ...] = PATH) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scheduler and its workers in processes of their own."""
    file = tmp_path / "scheduler.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    common = ["--no-dashboard", "--scheduler-file", str(file)]
    python = [sys.executable, "-m"]
    first = [*python, "distributed.cli.dask_scheduler", "--port", "0", "--host", "127.0.0.1", *common]
    second = [*python, "distributed.cli.dask_worker", "--nworkers", "2", "--nthreads", "1", *common]
    how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    how["start_new_session"] = True
    with (
        subprocess.Popen(first, env=environment, **how) as one,
        subprocess.Popen(second, env=environment, **how) as two,
    ):
        try:
            while not file.exists() or not file.read_text("utf-8"):
                assert one.poll() is None
                time.sleep(0.05)
            yield json.loads(file.read_text("utf-8"))["address"], one
        finally:
            os.killpg(two.pid, signal.SIGKILL)  # its nannies, too: they would wait for the scheduler
            one.kill()


def test_a_scheduler_elsewhere(tmp_path: Path) -> None:
    items = [f"f{number}" for number in range(300)]
    with scheduler(tmp_path) as (address, process):
        opener = partial(open_engine, f"dask={address}")
        for _ in range(2):  # a client may leave and come again
            assert list(each_answer(opener, worked, items, lost)) == [item.upper() for item in items]
        answers = each_answer(opener, worked, ["sleep:0.05"] * 10_000, lost)
        assert next(answers) == "SLEEP:0.05"
        process.kill()
        with pytest.raises(EngineError, match="was lost"):
            list(answers)


def test_workers_without_what_is_needed(tmp_path: Path) -> None:
    with (
        scheduler(tmp_path, (ROOT,)) as (address, _),
        open_engine(f"dask={address}") as engine,
        pytest.raises(EngineError, match=r"the engine failed: .*deserialization") as caught,
    ):
        all_of(engine, ["a", "b"])
    assert caught.value.next == "its workers need the same version of ckptool"


def test_workers_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_version", lambda: "0.0.1")
    with open_engine("dask", 1) as engine, pytest.raises(EngineError, match="install the same version"):
        all_of(engine, ["a", "b"])


def test_workers_that_see_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with open_engine("dask", 1) as engine:
        assert all_of(engine, ["a"]) == ["A"]
        monkeypatch.setattr(os, "getcwd", lambda: "/no/such/folder")
        with pytest.raises(EngineError, match="has no folder /no/such/folder: workers must see the same files"):
            all_of(engine, ["a"])
