"""Files of tasks: planned, carried out in shares, interrupted, resumed, committed as a whole, or aborted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES, ROOT, manifest, sample
from helpers.command_line import Said, say

import ckptool
from ckptool import tasks
from ckptool.files.write import tasks as write_tasks
from ckptool.files.write.journal import LineFile

TRAINING = FIXTURES / "ddp4_training.pth"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
#: Commands that write: one file, shards, a folder, several outputs.
COMMANDS = {
    "strip-module": "strip-module t.pth -o o.pth",
    "cast": "cast t.pth --to-dtype bfloat16 -o o.pth",
    "edit": "edit t.pth --strip-module --to cpu --to-dtype fp16 -o o.pth",
    "sanitize": "sanitize t.pth -o o.pth",
    "safetensors": "convert t.pth --key state_dict --allow-loss all -o o.safetensors",
    "dcp": "convert t.pth --to-format dcp --allow-loss all -o o",
    "shards": "convert t.pth --key state_dict --max-shard-size 2kB --allow-loss all -o o",
    "join": "convert zero --allow-loss all -o o.safetensors",
    "join to dcp": "convert dist --to-format dcp --allow-loss all -o o",
    "out-dir": "remap t.pth u.pth --to cpu --out-dir all",
    "hash8": "strip-module t.pth -o o-{hash8}.pth",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(TRAINING, tmp_path / "t.pth")
    shutil.copy(FIXTURES / "cuda1.pth", tmp_path / "u.pth")
    shutil.copytree(FIXTURES / "ranks" / "zero2_bf16", tmp_path / "zero")
    shutil.copytree(FIXTURES / "ranks" / "megatron_dist_tp2", tmp_path / "dist")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def planned(command: str, size: int = 300) -> tasks.TaskFile:
    """A sheet of small tasks of a command."""
    result = say("plan", "--tasks", "t.jsonl", "--task-size", str(size), *command.split())
    assert result.code == 0, result.all
    return tasks.read_sheet("t.jsonl", ckptool.__version__)


def outputs(folder: Path) -> dict[str, bytes]:
    """What there is but the inputs and the tasks."""
    own = ("t.pth", "u.pth", "zero", "dist", "t.jsonl", "t.jsonl.journal")
    return {name: data for name, data in files(folder).items() if name.split("/")[0] not in own}


@pytest.mark.parametrize("name", COMMANDS)
def test_plan_run_and_commit_make_what_the_command_makes(name: str, folder: Path) -> None:
    command = COMMANDS[name]
    result = say(*command.split())
    assert result.code == 0, result.all
    expected = outputs(folder)
    for path in expected:
        (folder / path).unlink()
    for path in [path for path in folder.iterdir() if path.is_dir() and path.name not in ("zero", "dist")]:
        shutil.rmtree(path)
    sheet = planned(command)
    assert sheet.tasks > 1 and all(b"\0" * 100 in data for data in outputs(folder).values() if len(data) > 1000)
    for share in (3, 1, 2, 1):
        assert say("run", "t.jsonl", "--task", f"{share}/3").code == 0
    committed = say("commit", "t.jsonl")
    assert committed == result
    assert outputs(folder) == expected
    again = say("commit", "t.jsonl")
    assert again.code == 0 and "committed before" in again.out
    assert outputs(folder) == expected
    assert say("plan", "--tasks", "t.jsonl", *command.split(), "--force").code == 0  # the name may be used again


def test_the_json_of_a_plan_is_that_of_the_command(folder: Path) -> None:
    command = ["strip-module", "t.pth", "-o", "o.pth", "--json"]
    plan = json.loads(say("plan", "--tasks", "t.jsonl", *command).out)
    assert plan.pop("planned") is True
    assert json.loads(say("run", "t.jsonl", "--json").out) == {
        "schema": "ckptool.run/1",
        "path": "t.jsonl",
        "tasks": 1,
        "done": 1,
        "before": 0,
        "bytes": plan["output_bytes"],
    }
    assert json.loads(say("commit", "t.jsonl").out) == plan


def test_a_quiet_commit_prints_nothing(folder: Path) -> None:
    planned("strip-module t.pth -o o.pth")
    assert say("run", "t.jsonl", "-q").code == 0
    for _ in range(2):
        assert say("commit", "t.jsonl", "-q") == Said(0, "", "")
    assert (folder / "o.pth").is_file()
    planned("strip-module t.pth -o p.pth --force")
    assert say("commit", "t.jsonl", "--abort", "--quiet") == Said(0, "", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_left_is_carried_out_after_an_interruption(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = planned(COMMANDS[name])
    carry_out, left = tasks.carry_out_line, 2

    def interrupted(line: str) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return carry_out(line)

    monkeypatch.setattr(tasks, "carry_out_line", interrupted)
    assert say("run", "t.jsonl").code == 130
    with open("t.jsonl.journal", "ab") as journal:  # as a process leaves it that is killed
        journal.write(b'{"task":"' + next(tasks.tasks_of(sheet))["task"].encode())
    refused = say("commit", "t.jsonl")
    assert refused.code == 4 and f"{sheet.tasks - 2:,} task" in refused.err
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    ran = json.loads(say("run", "t.jsonl", "--json").out)
    assert (ran["tasks"], ran["done"], ran["before"]) == (sheet.tasks, sheet.tasks - 2, 2)
    assert say("commit", "t.jsonl").code == 0


@pytest.mark.parametrize("name", ["strip-module", "shards", "out-dir", "hash8"])
@pytest.mark.parametrize("moment", ["before", "linked", "after"])
def test_a_commit_that_was_killed_is_completed(
    name: str, moment: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = COMMANDS[name]
    assert say(*command.split()).code == 0
    expected = outputs(folder)
    for path in expected:
        (folder / path).unlink()
    if name == "shards":
        (folder / "o").rmdir()
    planned(command)
    assert say("run", "t.jsonl").code == 0
    real = {call: getattr(os, call) for call in ("link", "rename", "unlink")}
    killed = False

    def kill(call: str, after: bool) -> None:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            nonlocal killed
            if killed or "ckptool-part" not in str(args[0]):
                return real[call](*args, **kwargs)
            killed = True
            if after:
                real[call](*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, call, wrapped)

    if moment == "before":
        kill("link", False)
        kill("rename", False)
    elif moment == "linked":
        kill("link", True)
        kill("rename", True)
    else:
        kill("unlink", True)
        kill("rename", True)
    assert say("commit", "t.jsonl").code == 130
    assert killed
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    result = say("commit", "t.jsonl")
    assert result.code == 0, result.all
    assert outputs(folder) == expected


def test_an_output_that_came_in_between_is_not_replaced(folder: Path) -> None:
    planned(COMMANDS["strip-module"])
    assert say("run", "t.jsonl").code == 0
    (folder / "o.pth").write_bytes(b"precious")
    assert say("commit", "t.jsonl").code == 4
    assert (folder / "o.pth").read_bytes() == b"precious"
    (folder / "o.pth").unlink()
    assert say("commit", "t.jsonl").code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_abort_removes_everything(name: str, folder: Path) -> None:
    before = files(folder)
    planned(COMMANDS[name])
    say("run", "t.jsonl", "--task", "1/2")
    assert say("commit", "t.jsonl", "--abort").code == 0
    assert files(folder) == before
    assert not list(folder.rglob("*.ckptool-*"))
    assert say("run", "t.jsonl").code == 3


@pytest.mark.parametrize("when", ["before run", "before commit"])
def test_a_changed_input_is_named(when: str, folder: Path) -> None:
    planned(COMMANDS["join"])
    if when == "before commit":
        assert say("run", "t.jsonl").code == 0
    changed = next((folder / "zero").rglob("*rank_1*"))
    os.utime(changed, ns=(5, 5))
    result = say("run", "t.jsonl") if when == "before run" else say("commit", "t.jsonl")
    assert result.code in (3, 5) and str(changed) in result.err and "changed since the plan" in result.err
    assert not (folder / "o.safetensors").exists()


def test_a_flipped_bit_ends_in_no_output(folder: Path) -> None:
    with ckptool.open("t.pth") as checkpoint:
        name = checkpoint.state_dicts[0].path
        storage = checkpoint.survey.tensors_in([name])[0].tensor.storage
        record = next(item for item in checkpoint.container.records() if item.key == storage)
    data = bytearray((folder / "t.pth").read_bytes())
    data[record.span.offset + 5] ^= 1
    (folder / "t.pth").write_bytes(data)
    planned(f"convert t.pth --key {name} --allow-loss all -o o.safetensors", 100)
    codes = {say("run", "t.jsonl").code, say("commit", "t.jsonl").code}
    assert codes & {3, 5} and 0 not in codes - {0}
    assert not (folder / "o.safetensors").exists()


def test_plan_refuses_what_is_not_planned(folder: Path) -> None:
    for command, code in (
        (["inspect", "t.pth"], 2),
        (["strip", "t.pth"], 2),
        (["strip-module", "t.pth"], 2),
        (["strip-module", "t.pth", "--in-place"], 2),
        (["strip-module", "t.pth", "-o", "o.pth", "--dry-run"], 2),
        (["strip-module", "none.pth", "-o", "o.pth"], 3),
        (["strip-module", "t.pth", "-o", "u.pth"], 4),
        (["strip-module", "t.pth", "-o", "none/o.pth"], 5),
    ):
        before = files(folder)
        result = say("plan", "--tasks", "t.jsonl", *command)
        assert result.code == code, (command, result.all)
        assert files(folder) == before, command


def test_tasks_that_are_not_committed_are_not_replaced(folder: Path) -> None:
    planned(COMMANDS["strip-module"])
    before = files(folder)
    result = say("plan", "--tasks", "t.jsonl", "strip-module", "t.pth", "-o", "p.pth")
    assert result.code == 4 and "commit t.jsonl --abort" in result.err
    assert files(folder) == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a file of tasks"),
        ("hello\n", "not a file of tasks"),
        ('{"schema":"ckptool.tasks/9"}\n', "its schema"),
        ('{"schema":"ckptool.tasks/1","ckptool":"0.0.0"}\n', "planned by ckptool 0.0.0"),
    ],
)
def test_a_file_that_is_not_of_tasks_is_refused(text: str, why: str, folder: Path) -> None:
    (folder / "t.jsonl").write_text(text)
    for command in ("run", "commit"):
        result = say(command, "t.jsonl")
        assert result.code == 3 and why in result.err, result.all


def test_a_sheet_that_ends_too_early_is_refused_and_can_be_aborted(folder: Path) -> None:
    planned(COMMANDS["strip-module"])
    lines = (folder / "t.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "t.jsonl").write_bytes(b"".join(lines[:-1]))
    result = say("run", "t.jsonl")
    assert result.code == 3 and "interrupted" in result.err
    assert say("commit", "t.jsonl", "--abort").code == 0
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("name", ["t.pth", "notes.txt", "other.jsonl", "zero", "none.jsonl"])
def test_abort_and_plan_leave_what_is_not_of_tasks(name: str, folder: Path) -> None:
    (folder / "notes.txt").write_text("hello\n")
    (folder / "other.jsonl").write_text('{"schema": "ckptool.file/1"}\n')
    (folder / "t.pth.journal").write_text('{"committed": []}\n')
    before = files(folder)
    result = say("commit", name, "--abort")
    assert result.code == 3 and (name == "none.jsonl" or "not a file of tasks" in result.err), result.all
    if name != "none.jsonl":
        result = say("plan", "--tasks", name, "strip-module", "t.pth", "-o", "p.pth")
        assert result.code == 4 and "not a file of tasks" in result.err and "abort" not in result.err, result.all
    assert files(folder) == before


@pytest.mark.parametrize("text", ["", '{"schema":"ckptool.ta', '{"schema":"ckptool.tasks/9"}\n{"sta'])
def test_what_an_interrupted_plan_left_can_be_aborted(text: str, folder: Path) -> None:
    (folder / "t.jsonl").write_text(text)
    assert say("commit", "t.jsonl", "--abort").code == 0
    assert not (folder / "t.jsonl").exists()


def test_abort_removes_staged_outputs_alone(folder: Path) -> None:
    planned(COMMANDS["strip-module"])
    with (folder / "t.jsonl").open("a") as file:
        file.write(json.dumps({"staged": str(folder / "u.pth")}) + "\n")
    before = files(folder)
    result = say("commit", "t.jsonl", "--abort")
    assert result.code == 3 and "u.pth" in result.err
    assert files(folder) == before


def test_shares_are_all_tasks_once(folder: Path) -> None:
    sheet = planned(COMMANDS["strip-module"])
    every = [task["task"] for task in tasks.tasks_of(sheet)]
    shares = [[task["task"] for task in tasks.tasks_of(sheet, (number, 4))] for number in range(1, 5)]
    assert sorted(chain.from_iterable(shares)) == sorted(every)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for wrong in ("0/4", "5/4", "1", "a/b", "1/0"):
        assert say("run", "t.jsonl", "--task", wrong).code == 2


#: A plan that is killed when it has made so many staged files.
KILLED = """
import os, sys
real, left = os.ftruncate, int(sys.argv[1])
def kill(fd, size):
    global left
    real(fd, size)
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)
os.ftruncate = kill
from ckptool.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(("name", "number"), [("strip-module", 1), ("shards", 1), ("shards", 2), ("out-dir", 2)])
def test_what_a_killed_plan_staged_is_removed_by_abort(name: str, number: int, folder: Path) -> None:
    before = files(folder)
    words = [sys.executable, "-c", KILLED, str(number), "plan", "--tasks", "t.jsonl", *COMMANDS[name].split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(words, cwd=folder, env=environment, check=False, timeout=600).returncode == -9
    assert list(folder.rglob("*.ckptool-part"))
    assert say("commit", "t.jsonl", "--abort").code == 0
    assert files(folder) == before
    assert not list(folder.rglob("*.ckptool-part"))


def test_abort_removes_no_other_file(folder: Path) -> None:
    (folder / "lines.jsonl").write_text('{"staged": "t.pth"}\n')
    before = files(folder)
    for name in ("t.pth", "lines.jsonl"):
        result = say("commit", name, "--abort")
        assert result.code == 3 and "not a file of tasks" in result.err
    assert files(folder) == before


def test_abort_by_a_link_removes_the_tasks_and_their_journal(folder: Path) -> None:
    planned(COMMANDS["strip-module"])
    assert say("run", "t.jsonl", "--task", "1/2").code == 0
    (folder / "link.jsonl").symlink_to("t.jsonl")
    assert say("commit", "link.jsonl", "--abort").code == 0
    assert sorted(os.listdir(folder)) == ["dist", "t.pth", "u.pth", "zero"]


def test_the_journal_of_former_tasks_says_nothing_of_these(folder: Path) -> None:
    planned(COMMANDS["strip-module"])
    assert say("run", "t.jsonl").code == say("commit", "t.jsonl").code == 0
    (folder / "t.jsonl").unlink()
    (folder / "o.pth").unlink()
    planned(COMMANDS["strip-module"])
    assert say("commit", "t.jsonl").code == 4
    assert say("run", "t.jsonl").code == say("commit", "t.jsonl").code == 0
    assert (folder / "o.pth").exists()


@pytest.mark.parametrize("name", ["strip-module", "shards"])
def test_a_plan_that_cannot_be_written_leaves_nothing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder)
    created = write_tasks.create

    def fails(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def full(path: str) -> int:
        fd = created(path)
        monkeypatch.setattr(os, "listdir", fails)
        os.close(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(write_tasks, "create", full)
    assert say("plan", "--tasks", "t.jsonl", *COMMANDS[name].split()).code == 5
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(LineFile, "add", fails)
    with pytest.raises(OSError):
        tasks.SheetWriter("t.jsonl", ["drop"], ckptool.__version__)
    assert files(folder) == before
    assert not list(folder.rglob("*.ckptool-*"))


#: Options of convert, one after the other for the fixtures.
TARGETS = (
    "-o o.safetensors",
    "--to-format torch -o o",
    "--to-format dcp -o o",
    "--to-format legacy -o o",
    "--to-format safetensors --max-shard-size 3kB -o o",
)
INPUTS = sorted(
    {str(fixture.path.relative_to(FIXTURES)) for fixture in manifest()}
    | {f"ranks/{path.name}" for path in (FIXTURES / "ranks").iterdir() if path.name != "MANIFEST.tsv"}
)


NUMBERED = [pytest.param(number, id=name) for number, name in enumerate(INPUTS)]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("number", NUMBERED)
def test_shares_make_what_convert_makes(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ckptool_in(folder: Path, *words: str) -> Said:
        monkeypatch.chdir(folder)
        return say(*words)

    def run_shares(folder: Path) -> list[int]:
        return [ckptool_in(folder, "run", "t.jsonl", "--task", share, "-q").code for share in ("1/2", "2/2")]

    check_shares(number, tmp_path, ckptool_in, run_shares)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("number", sample(NUMBERED, 12))
def test_separate_processes_make_what_convert_makes(number: int, tmp_path: Path) -> None:
    def ckptool_in(folder: Path, *words: str) -> Said:
        command = [sys.executable, "-m", "ckptool", *words]
        done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
        return Said(done.returncode, done.stdout, done.stderr)

    def run_shares(folder: Path) -> list[int]:
        run = [sys.executable, "-m", "ckptool", "run", "t.jsonl", "--task"]
        with (
            subprocess.Popen([*run, "1/2", "-q"], cwd=folder, env=ENVIRONMENT) as one,
            subprocess.Popen([*run, "2/2", "-q"], cwd=folder, env=ENVIRONMENT) as two,
        ):
            return [one.wait(600), two.wait(100)]

    check_shares(number, tmp_path, ckptool_in, run_shares)


def check_shares(
    number: int, tmp_path: Path, ckptool_in: Callable[..., Said], run_shares: Callable[[Path], list[int]]
) -> None:
    """Convert an input in one command, and by a plan in two shares; ``ckptool_in`` runs a command in a folder."""
    options = f"{TARGETS[number % len(TARGETS)]} --tied clone --allow-loss all".split()
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        folder.mkdir()
        (folder / "in").mkdir()
        source = FIXTURES / INPUTS[number]
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / "in" / source.name)
    command = ["convert", f"in/{Path(INPUTS[number]).name}", *options]
    whole = ckptool_in(tmp_path / "whole", *command)
    plan = ckptool_in(tmp_path / "parts", "plan", "--tasks", "t.jsonl", "--task-size", "4kB", *command)
    if plan.code:
        assert plan.code == whole.code, plan.err
        assert list(files(tmp_path / "parts")) == list(files(tmp_path / "whole"))
        return
    if whole.code:  # a wrong checksum, which is found when the bytes are read
        assert ckptool_in(tmp_path / "parts", "run", "t.jsonl").code == whole.code
        assert ckptool_in(tmp_path / "parts", "commit", "t.jsonl").code == 4
        assert ckptool_in(tmp_path / "parts", "commit", "t.jsonl", "--abort").code == 0
        assert list(files(tmp_path / "parts")) == list(files(tmp_path / "whole"))
        return
    assert run_shares(tmp_path / "parts") == [0, 0]
    commit = ckptool_in(tmp_path / "parts", "commit", "t.jsonl")
    assert (commit.code, commit.out) == (whole.code, whole.out), commit.err
    (tmp_path / "parts" / "t.jsonl").unlink()
    (tmp_path / "parts" / "t.jsonl.journal").unlink(missing_ok=True)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_abort_removes_nothing_of_a_file_that_is_not_of_tasks(folder: Path) -> None:
    (folder / "keep").mkdir()
    (folder / "keep" / "notes").write_bytes(b"precious")
    (folder / "lines").write_text(json.dumps({"staged": str(folder / "keep")}) + "\n")
    planned(COMMANDS["cast"])
    lines = (folder / "t.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "staged": str(folder / "keep")})
    (folder / "changed.jsonl").write_text("\n".join(lines))
    before = files(folder)
    for name in ("t.pth", "lines", "changed.jsonl", "none", "keep"):
        assert say("commit", name, "--abort").code == 3, name
    assert files(folder) == before
    (folder / "begun").write_text('{"schema":"ckp')  # of planning that was killed
    assert say("commit", "begun", "--abort").code == 0 and not (folder / "begun").exists()


@pytest.mark.parametrize("name", ["cast", "shards"])
def test_a_staged_output_that_was_replaced_is_not_committed(name: str, folder: Path) -> None:
    sheet = planned(COMMANDS[name])
    assert say("run", "t.jsonl").code == 0
    staged = Path(sheet.outputs[0]["staged"])
    staged.rename(folder / "kept")
    copy: Any = shutil.copytree if (folder / "kept").is_dir() else shutil.copy
    copy(folder / "kept", staged)
    result = say("commit", "t.jsonl")
    assert result.code != 0 and "not the one that was planned" in result.err
    assert not list(folder.glob("o*"))
    if name == "cast":
        (folder / "kept").replace(staged)
        os.truncate(staged, 100)
        assert "not the one that was planned" in say("commit", "t.jsonl").err


def test_an_output_that_another_program_made_is_not_taken_for_a_committed_one(folder: Path) -> None:
    """Not even with the inode of the staged one, which was removed before."""
    sheet = planned("strip-module t.pth -o o.pth")
    assert say("run", "t.jsonl").code == 0
    os.link(sheet.outputs[0]["staged"], folder / "o.pth")
    result = say("commit", "t.jsonl")
    assert result.code == 4 and "it exists now, and did not when it was planned; move it away" in result.err
    (folder / "o.pth").unlink()
    assert say("commit", "t.jsonl").code == 0


def test_numbers_that_a_task_did_not_find_out_are_refused(folder: Path) -> None:
    planned(COMMANDS["cast"])
    assert say("run", "t.jsonl").code == 0
    journal = folder / "t.jsonl.journal"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    number = next(number for number, line in enumerate(lines) if line["deferred"])
    for change in ([], [[7, 0, 1, 1]], lines[number]["deferred"][:-1]):
        lines[number]["deferred"] = change
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = say("commit", "t.jsonl")
        assert result.code != 0 and "commit t.jsonl --abort" in result.err, result.all
    assert not (folder / "o.pth").exists()


def test_tasks_in_the_place_of_the_output_are_refused(folder: Path) -> None:
    before = files(folder)
    for sheet, output in (("o.pth", "o.pth"), ("./o.pth", "o.pth"), ("x", "x.journal")):
        result = say("plan", "--tasks", sheet, "strip-module", "t.pth", "-o", output, "--force")
        assert result.code == 4 and "in the place of the output" in result.err
        assert files(folder) == before


@pytest.mark.parametrize("file", ["t.jsonl", "t.jsonl.journal"])
def test_a_line_of_wrong_types_is_refused(file: str, folder: Path) -> None:
    planned(COMMANDS["cast"])
    assert say("run", "t.jsonl").code == 0
    lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    for number in range(3 if file == "t.jsonl" else 1):
        for field in lines[number]:
            for value in (None, 5, [], [5], {"a": 1}):
                if isinstance(lines[number][field], int) and value == 5:
                    continue
                changed = [*lines[:number], {**lines[number], field: value}, *lines[number + 1 :]]
                (folder / file).write_text("".join(json.dumps(line) + "\n" for line in changed))
                for command in ("run", "commit"):
                    result = say(command, "t.jsonl")
                    assert result.code in (0, 3, 4, 5), (number, field, value, result.all)
                    if command == "commit" and result.code == 0:
                        return  # what was lost was carried out again
    assert file == "t.jsonl"
