"""Many files: the same answers in the same order whatever ``--jobs``, each as soon as it is there, and no process left
behind, however it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import program, say
from conftest import FIXTURES, ROOT

import ckptool
from ckptool.base.errors import CkptoolError, UnreadableError
from ckptool.cli import runner
from ckptool.cli.main import run
from ckptool.cli.options import Workers
from ckptool.cli.runner import Answer, answers
from ckptool.files import engine

NAMES = ["ddp4_training.pth", "lfs_pointer.pth", "legacy_bare.pth", "zip_wrong_crc.pth", "gan.pth", "truncated.pth"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints, and what went wrong with some; the one above it is the current one."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(NAMES * 3):
        place = tmp_path / "runs" / str(number % 4)
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(FIXTURES / name, place / f"{number:02d}.{name}")
        os.utime(place / f"{number:02d}.{name}", (1, 1))
    return tmp_path / "runs"


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    "call",
    [
        *(["inspect", "--format", style] for style in ("table", "json", "jsonl")),
        ["inspect", "-v"],
        *(["keys", "--format", style] for style in ("table", "jsonl", "markdown")),
        ["keys", "--names", "--include", "*weight"],
        *(["validate", "--format", style] for style in ("table", "json", "jsonl", "junit", "sarif", "github")),
    ],
    ids=" ".join,
)
def test_the_output_does_not_depend_on_jobs(call: list[str], runs: Path) -> None:
    one, four = (program(*call, "runs", "runs/nothing.pth", "--jobs", jobs) for jobs in ("1", "4"))
    assert one.code == 3
    assert one.out and "git lfs pull" in one.err
    assert one == four


def test_reports_come_in_the_order_of_the_paths(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = sorted(str(path.relative_to(runs.parent)) for path in runs.rglob("*.pth"))
    for command in ("inspect", "keys", "validate"):
        assert run([command, named[-1], "runs", "--format", "jsonl", "--jobs", "3"]) == 3
        told = [json.loads(line)["path"] for line in capsys.readouterr().out.splitlines()]
        assert told == [named[-1], *named[:-1]]


@pytest.mark.parametrize("command", ["inspect", "keys"])
def test_a_report_is_told_before_the_next_file_is_opened(
    command: str, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = ckptool.open, [0]

    def slow(path: str) -> Any:
        assert told[0] + len(capsys.readouterr().out.splitlines()) == told[0] + (1 if told[0] else 0)
        told[0] += 1
        return real(path)

    monkeypatch.setattr("ckptool.cli.show.open_checkpoint", slow)
    run([command, "runs", "--format", "jsonl"])
    assert told[0] == len(NAMES) * 3


# -- what is looked at ------------------------------------------------------------------------------------------------


def test_a_file_that_goes_meanwhile_is_one_that_is_not_there(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = sorted(runs.rglob("*.pth"))
    real = ckptool.open

    def opened(path: str) -> Any:
        second.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr("ckptool.cli.show.open_checkpoint", opened)
    assert run(["inspect", "runs/0", "-v"]) == 3
    told = capsys.readouterr()
    assert f"{second.relative_to(runs.parent)}: no such file" in told.err
    assert str(first.relative_to(runs.parent)) in told.out and "gan.pth" in told.out


def test_the_worst_code_counts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, other, pointer = (str(FIXTURES / name) for name in ("gan.pth", "bare.pth", "lfs_pointer.pth"))
    for jobs in ("1", "2"):
        assert run(["keys", good, other, "--jobs", jobs]) == 0
        assert run(["keys", good, other, "--key", "netG", "--jobs", jobs]) == 2
        assert run(["keys", good, other, pointer, "--key", "netG", "--jobs", jobs]) == 3
        assert run(["validate", good, str(FIXTURES / "zip_wrong_crc.pth"), "--jobs", jobs]) == 1
    capsys.readouterr()


# -- processes --------------------------------------------------------------------------------------------------------


def upper(path: str) -> str:
    if path.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if path.startswith("leave"):
        os._exit(7)
    return path.upper()


def lost(path: str, error: CkptoolError) -> str:
    return f"{path}: {error.what} -> {error.next}"


def no_process_is_left() -> bool:
    return multiprocessing.active_children() == []


@pytest.mark.parametrize("jobs", [1, 2, 3, 0])
def test_answers_come_in_order(jobs: int) -> None:
    names: list[str | UnreadableError] = [f"f{number}" for number in range(200)]
    names[7] = names[8] = UnreadableError("nothing there", path="folder", next="go")
    expected = [upper(name) if isinstance(name, str) else "folder: nothing there -> go" for name in names]
    for size in (0, 1, 2, 200):
        assert list(answers(upper, names[:size], Workers(jobs), lost)) == expected[:size]
    assert no_process_is_left()


@pytest.mark.parametrize("every", [2, 5, 100])
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_a_process_that_dies_costs_its_file_alone(every: int, how: str) -> None:
    names = [f"{how if number % every == 1 else 'f'}{number}" for number in range(20)]
    told = list(answers(upper, names, Workers(3), lost))
    assert len(told) == len(names)
    for name, answer in zip(names, told):
        died = name.startswith(how)
        assert answer.startswith(f"{name}: the process that read it was ended: " if died else name.upper())
    assert no_process_is_left()


def test_processes_that_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows."""
    monkeypatch.setattr(engine, "_START", "spawn")
    assert list(answers(os.path.basename, [f"a/{n}" for n in range(9)], Workers(2), lost)) == [str(n) for n in range(9)]
    assert no_process_is_left()


#: Two workers that say that they have begun, and never end.
STUCK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
import ckptool.cli.show
def stuck(path):
    os.write(1, b"begun\\n")
    while True:
        time.sleep(60)
ckptool.cli.show.open_checkpoint = stuck
from ckptool.cli.main import main
main(["inspect", "runs", "--jobs", "2", "--format", "jsonl"])
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups here")
@pytest.mark.parametrize("group", [True, False], ids=["terminal", "alone"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_them(number: signal.Signals, group: bool, runs: Path) -> None:
    words = [sys.executable, "-c", STUCK]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert [process.stdout.readline(), process.stdout.readline()] == [b"begun\n"] * 2
        (os.killpg if group else os.kill)(process.pid, number)
        # Both end when nobody has them open any more: a worker that lived on would hold them.
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")
        assert process.wait(300) == 128 + number


#: Two workers that have begun to write, and never end.
WRITING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from ckptool.files.write import output
def stuck(*args, **named):
    os.write(1, b"begun\\n")
    while True:
        time.sleep(60)
output.write_pieces = stuck
from ckptool.cli.main import main
main(["strip-module", *sorted(f"runs/{name}" for name in os.listdir("runs"))[:2], "--out-dir", "out", "--jobs", "2"])
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups here")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_unfinished_output(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("bare_module.pth", "ddp4_training.pth"):
        shutil.copy(FIXTURES / name, tmp_path / "runs")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", WRITING]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == [b"begun\n"] * 2
        assert len(os.listdir(tmp_path / "out")) == 2
        os.killpg(process.pid, number)
        assert process.wait(300) == 128 + number
    assert not os.listdir(tmp_path / "out")


#: A process of an edit is killed, once, when its output has its name. Another program may write to that before.
KILLED = """
import os, sys
from pathlib import Path
from ckptool.files.write import output
real = output.sync_folder
def killed(folder):
    real(folder)
    there = [path for path in Path("out").iterdir() if path.name[0] != "."]
    if not there or os.path.basename(folder) != "out":
        return
    try:
        os.open("killed", os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    for path in there if sys.argv[1] else []:
        path.write_text(sys.argv[1])
    os.kill(os.getpid(), 9)
output.sync_folder = killed
from ckptool.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(("style", "text"), [("torch", ""), ("dcp", ""), ("torch", "precious")])
def test_an_output_of_a_process_that_died_is_not_replaced(
    style: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        shutil.copy(FIXTURES / "ddp4_training.pth", name)
    words = ["convert", "a", "b", "--to-format", style, "--allow-loss", "all", "--json"]
    assert run([*words, "--out-dir", "alone"]) == 0
    said = program(text, *words, "--out-dir", "out", "--jobs", "2", code=KILLED)
    assert Path("killed").exists()
    assert said.code == 4, said.err
    reports = json.loads(said.out)
    alone = {path.relative_to("alone"): path.read_bytes() for path in Path("alone").rglob("*") if path.is_file()}
    there = {path.relative_to("out"): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert any("the output exists" in str(report.get("error")) for report in reports)
    if text:
        assert b"precious" in there.values() and {*there.values()} - {b"precious"} <= {*alone.values()}
        assert sorted(there) == sorted(alone)
    else:
        assert there == alone


@pytest.mark.parametrize("command", ["inspect", "keys", "stats", "validate", "scan", "hash", "lock"])
def test_a_command_and_its_answers_are_plain_data(command: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process can take the command, and send back the answers: nothing in them depends on this process."""
    real = runner.answers
    sent: list[Answer] = []

    def by_another(work: Any, files: Any, how: Any, lost: Any) -> Iterator[Answer]:
        for answer in real(*pickle.loads(pickle.dumps((work, [*files], how, lost)))):
            sent.append(pickle.loads(pickle.dumps(answer)))
            yield sent[-1]

    formats = {"inspect": "table json", "keys": "table markdown json", "stats": "table markdown", "lock": "rows"}
    for style in formats.get(command, "table jsonl rows").split():
        words = [command, "runs", "--format", style]
        expected = say(*words)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "answers", by_another)
            assert say(*words) == expected
    assert len(sent) > len(NAMES)
