"""Policies of validate: sections for files by glob, and files that are found, which can only add requirements."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Said, program
from conftest import FIXTURES

import ckptool
from ckptool.cli.main import run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in a repository, with a checkpoint in it."""
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repo")
    put(tmp_path / "repo" / "bare.pth")
    return tmp_path / "repo"


def put(target: Path, fixture: str = "bare.pth") -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((FIXTURES / fixture).read_bytes())
    return target


def reports(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    run(["validate", *arguments, "--format", "json"])
    out = json.loads(capsys.readouterr().out)
    return [item for item in (out if isinstance(out, list) else [out]) if item["status"] != "skipped"]


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if check["status"] == "fail"]


#: A fixture, what a policy expects, and the settings of the command that makes it so.
REMEDIES = [
    ("ddp4_training.pth", {"layout": "bare"}, "--extract state_dict --to cpu"),
    ("bare.pth", {"layout": "wrapped"}, "--wrap state_dict"),
    ("model.safetensors", {"layout": "wrapped", "device": "cuda:0"}, "--wrap state_dict --to cuda:0 --include-cpu"),
    ("dcp4", {"device": "cuda:*"}, "--to cuda:0 --include-cpu"),
    ("module_twice.pth", {"prefix": "none"}, "strip-module --wrappers"),
    ("whole_parallel.pth", {"layout": "bare", "prefix": "none"}, "--sanitize --as-state-dict --to cpu"),
    ("cuda0.pth", {"device": ["cpu"], "prefix": "none"}, "--strip-module --to cpu"),
    ("bare.pth", {"dtype": "bfloat16", "prefix": "model."}, "--add-prefix model. --to-dtype bfloat16"),
    ("args_namespace.pth", {"safe": True, "layout": "bare"}, "--sanitize --extract model"),
]


@pytest.mark.parametrize(("name", "policy", "settings"), REMEDIES)
def test_the_next_step_makes_a_checkpoint_as_the_policy_expects(
    name: str, policy: dict[str, Any], settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (shutil.copytree if (FIXTURES / name).is_dir() else shutil.copy)(FIXTURES / name, name)
    path, words = name, []
    for _ in range(2):  # a pickled module is a state dict first, which may have a prefix
        line = shlex.split(ckptool.validate(path, policy)["next"])
        assert run(line[1:]) == 0
        path, words = line[-1], words + line
        if path != name and ckptool.validate(path, policy)["valid"]:
            break
    report = ckptool.validate(path, policy)
    assert report["valid"], report["checks"]
    assert all(word in words for word in settings.split())


@pytest.mark.parametrize("name", ["integer.pth", "tensor.pt", "tensor_list.pt", "no_tensors.pth", "gan.pth"])
def test_no_edit_is_printed_that_would_not_help(name: str) -> None:
    for policy in ({"prefix": "module"}, {"layout": "bare"}, {"dtype": "float16"}):
        step = ckptool.validate(FIXTURES / name, policy)["next"]
        assert "add-module" not in step or name == "gan.pth"
        assert "--extract" not in step and " extract " not in step


def test_a_section_adds_to_the_files_that_match(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(here / "models" / "detector" / "a.pth")
    put(here / "models" / "other" / "b.pth")
    policy = here / "models" / "strict.toml"
    policy.write_text('layout = "bare"\n[files."detector/*.pth"]\nmax-bytes = 1\nlayout = "wrapped"\n')
    found = {item["path"]: failed(item) for item in reports(capsys, "models", "--policy", str(policy))}
    assert found == {"models/detector/a.pth": ["layout", "max-bytes"], "models/other/b.pth": []}


@pytest.mark.parametrize("name", ["ckptool.toml", "pyproject.toml"])
def test_it_is_found_in_the_working_folder_and_above_up_to_the_repository(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = "" if name == "ckptool.toml" else "tool.ckptool."
    (here / name).write_text(f"{table}max-bytes = 1\n")
    below = here / "a" / "b"
    below.mkdir(parents=True)
    for folder, path in ((here, "bare.pth"), (below, "../../bare.pth")):
        monkeypatch.chdir(folder)
        [report] = reports(capsys, path)
        assert failed(report) == ["max-bytes"] and Path(report["policy"]).name == name
        assert failed(reports(capsys, path, "--no-policy")[0]) == []
        assert reports(capsys, path, "--no-policy")[0]["policy"] == ""
    # Neither above the repository, nor beside a checkpoint elsewhere.
    (here / ".git").rmdir()
    (below / ".git").mkdir()
    assert failed(reports(capsys, "../../bare.pth")[0]) == []
    (below / ".git").rmdir()
    assert failed(reports(capsys, "../../bare.pth")[0]) == [], "without a repository the working folder stands alone"


def test_a_project_without_a_table_for_it_is_no_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pyproject.toml").write_text('[project]\ndependencies = ["ckptool"]\n')
    assert reports(capsys, "bare.pth")[0]["policy"] == ""


def test_the_nearest_one_counts_and_a_named_one_instead(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pyproject.toml").write_text("[tool.ckptool]\nmax-bytes = 1\n")
    (here / "ckptool.toml").write_text('layout = "wrapped"\n')
    assert failed(reports(capsys, "bare.pth")[0]) == ["layout"]
    (here / "named.toml").write_text('forbid = ["fc.*"]\n')
    assert failed(reports(capsys, "bare.pth", "--policy", "named.toml")[0]) == ["forbid"]


def test_it_adds_to_the_options_and_loosens_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ckptool.toml").write_text('device = ["cuda:*"]\nmax-bytes = "1GB"\nprefix = "module"\n')
    [report] = reports(capsys, "bare.pth", "--device", "cpu", "--max-bytes", "1", "--prefix", "none")
    assert sorted(failed(report)) == ["device", "max-bytes", "prefix"]
    assert [check["name"] for check in report["checks"]].count("device") == 2
    assert report["next"] == ""


@pytest.mark.parametrize("line", ["load = true", 'torch = "2.0"', "strict = false", 'map-location = "cpu"'])
@pytest.mark.parametrize("section", ["", '[files."*"]\n'])
def test_whatever_could_do_more_is_an_error(
    line: str, section: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "ckptool.toml").write_text(f"{section}{line}\n")
    assert run(["validate", "bare.pth"]) == 2
    err = capsys.readouterr().err
    assert "ckptool.toml" in err and "can only add requirements" in err and "--no-policy" in err
    assert run(["validate", "bare.pth", "--no-policy"]) == 0


@pytest.mark.parametrize("text", ["not toml", "files = 3", 'colour = "red"', "max-bytes = []", "x" * (2 << 20)])
def test_one_that_is_wrong_is_an_error(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ckptool.toml").write_text(text)
    assert run(["validate", "bare.pth"]) == 2
    assert "ckptool.toml" in capsys.readouterr().err


def test_a_lock_in_a_section_is_relative_to_the_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(here / "release" / "plain.pth")
    put(here / "release" / "other.pth", "bare_module.pth")
    ckptool.write_lock(here / "bare.pth", here / "release" / "bare.lock.json")
    policy = here / "release" / "policy.toml"
    policy.write_text('[files."*.pth"]\nlock = "bare.lock.json"\n')
    found = {Path(item["path"]).name: failed(item) for item in reports(capsys, "release", "--policy", str(policy))}
    assert found["plain.pth"] == [] and "lock" in found["other.pth"][0]
    policy.write_text('[files."*.pth"]\nlock = "missing.json"\n')
    assert run(["validate", "release", "--policy", str(policy)]) == 2


# -- what is opened --------------------------------------------------------------------------------------------------


def hung(folder: Path, *words: str) -> Said:
    """Run validate in a folder, with a pipe for standard input that nobody writes to."""
    reading, writing = os.pipe()
    try:
        return program("validate", "model.pth", *words, cwd=folder, stdin=reading)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("lock", ["pipe", "/dev/stdin", "/dev/fd/0", "/dev/zero", "/dev/tty", "folder"])
def test_a_lock_of_a_policy_that_is_found_is_a_file(lock: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "bare_module.pth", tmp_path / "model.pth")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for policy in (f'lock = "{lock}"', f'[files."*.pth"]\nlock = "{lock}"'):
        (tmp_path / "ckptool.toml").write_text(policy)
        said = hung(tmp_path)
        assert said.code == 2, said
        assert "cannot be read" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize("option", ["--lock", "--policy"])
def test_a_pipe_with_a_name_is_no_lock_and_no_policy(option: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "bare_module.pth", tmp_path / "model.pth")
    os.mkfifo(tmp_path / "pipe")
    said = hung(tmp_path, option, "pipe")
    assert said.code == 2 and "a named pipe" in said.err, said


def test_a_policy_that_is_a_pipe_is_not_found(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "bare_module.pth", tmp_path / "model.pth")
    os.mkfifo(tmp_path / "ckptool.toml")
    assert hung(tmp_path).code == 0
