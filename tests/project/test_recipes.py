"""The recipes of docs/tasks.md: each is run as the page has it, and the output is that of the command alone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import ROOT

import ckptool

#: The shares of the page that are too many for a test, and those that are made of them.
_MANY, _FEW = "100", "4"
#: Does what Slurm does with an array, and with what depends on it.
_SBATCH = """\
#!/bin/sh
for word in "$@"; do
    case $word in
    --wrap=*) exec sh -c "${word#--wrap=}" ;;
    *.sbatch)
        for i in $(seq "$(sed -n 's/^#SBATCH --array=1-//p' "$word")"); do
            SLURM_ARRAY_TASK_ID=$i bash "$word" >&2 || exit 1
        done
        echo 7
        ;;
    esac
done
"""


def recipe(name: str) -> list[tuple[str, str]]:
    """The blocks of code of a recipe: their languages and texts."""
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text.partition(f"\n##{'' if name == 'Recipes' else '#'} {name}\n")[2], flags=re.M)[0]
    return [(block[1], block[2]) for block in re.finditer(r"^```(\w+)\n(.*?)^```$", section, re.M | re.S)]


PLAN, COMMIT = recipe("Recipes")[0][1].splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what is planned, of which the command alone made ``alone.safetensors``."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.chdir(tmp_path)
    torch.save({f"layer.{number}": torch.arange(200.0) + number for number in range(9)}, "source.pth")
    with ckptool.open("source.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "dcp"), "checkpoint")
    assert say("convert", "checkpoint", "-o", "alone.safetensors").code == 0
    return tmp_path


def run(*words: str, **environment: str) -> None:
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def plan() -> None:
    run("sh", "-c", PLAN.replace(" --tasks ", " --task-size 400B --tasks "))


def commit_and_compare() -> None:
    """Put the output in place; every task was carried out once."""
    tasks = sum('"task":' in line for line in Path("tasks.jsonl").read_text().splitlines())
    done = Path("tasks.jsonl.journal").read_text().splitlines()
    assert len([line for line in done if '"task"' in line]) == tasks > 10
    run("sh", "-c", COMMIT)
    compare()


def compare() -> None:
    assert Path("model.safetensors").read_bytes() == Path("alone.safetensors").read_bytes()


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def imports(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.mark.parametrize("name", ["Shell", pytest.param("GNU parallel", marks=needs("parallel"))])
def test_lines_of_a_shell(name: str, folder: Path) -> None:
    plan()
    [(language, lines)] = recipe(name)
    assert language == "sh"
    run("sh", "-e", "-c", lines)
    commit_and_compare()


def test_slurm(folder: Path) -> None:
    programs = folder / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(_SBATCH)
    (programs / "sbatch").chmod(0o755)
    plan()
    [(_, script), (_, lines)] = recipe("Slurm")
    assert script.count(_MANY) == 2
    Path("tasks.sbatch").write_text(script.replace(_MANY, _FEW))
    run("sh", "-e", "-c", lines, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    compare()


def test_kubernetes(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    plan()
    [(_, text)] = recipe("Kubernetes")
    job = yaml.safe_load(text.replace(_MANY, _FEW))
    assert job["kind"] == "Job" and job["spec"]["completionMode"] == "Indexed"
    [container] = job["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$$(", "$(") for word in container["command"]]
    for index in range(job["spec"]["completions"]):
        run(*words, JOB_COMPLETION_INDEX=str(index))
    commit_and_compare()


@pytest.mark.parametrize(
    "name",
    [pytest.param("Ray", marks=imports("ray")), pytest.param("Spark", marks=[imports("pyspark"), needs("java")])],
)
def test_programs_that_run_shares(name: str, folder: Path) -> None:
    plan()
    [(_, program)] = recipe(name)
    few = program.replace(f"/{_MANY}", f"/{_FEW}").replace(f"range(1, {int(_MANY) + 1})", f"range(1, {int(_FEW) + 1})")
    Path("shares.py").write_text(few.replace(f"{int(_MANY) + 1}, {_MANY}", f"{int(_FEW) + 1}, {_FEW}"))
    run(sys.executable, "shares.py")
    commit_and_compare()


@imports("distributed")
@pytest.mark.parametrize("block", [0, 1])
def test_dask(block: int, folder: Path) -> None:
    language, text = recipe("Dask")[block]
    if language == "python":
        Path("carry.py").write_text(text)
    run(*((sys.executable, "carry.py") if language == "python" else ("sh", "-e", "-c", text)))
    compare()
