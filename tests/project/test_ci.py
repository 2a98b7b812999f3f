"""The hooks of .pre-commit-hooks.yaml and the action of action.yml do what they say: their commands are run here."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import FIXTURES, ROOT

from ckptool import __version__

HOOKS = ROOT / ".pre-commit-hooks.yaml"
ACTION = ROOT / "action.yml"

yaml = pytest.importorskip("yaml")


def _loaded(path: Path) -> ModuleType:
    """A module by its file: the folder above ``docs`` need not be on the path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: What the examples of the README are made by.
generate = _loaded(ROOT / "docs" / "generate.py")


# -- pre-commit ---------------------------------------------------------------------------------------


def hooks() -> dict[str, dict[str, Any]]:
    return {hook["id"]: hook for hook in yaml.safe_load(HOOKS.read_text(encoding="utf-8"))}


def requirements() -> set[str]:
    """What ckptool needs but torch, by setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"].replace('"', "'").strip().splitlines()
    return {line.strip() for line in lines if not line.startswith("torch")}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for the PATH with a ``ckptool``."""
    folder = tmp_path / "tools"
    folder.mkdir()
    tool = folder / "ckptool"
    tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckptool "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A checkout."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def put(work: Path, fixture: str, name: str = "") -> str:
    target = work / (name or fixture)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((FIXTURES / fixture).read_bytes())
    return name or fixture


def test_the_hooks_are_told_apart_by_how_they_are_installed() -> None:
    found = hooks()
    assert {name: hook["language"] for name, hook in found.items()} == {
        "ckptool-validate": "python",
        "ckptool-validate-system": "system",
    }
    fields = ("entry", "args", "files", "types", "require_serial")
    one, other = ([hook[field] for field in fields] for hook in found.values())
    assert one == other
    assert set(found["ckptool-validate"]["additional_dependencies"]) == requirements()


@pytest.mark.parametrize("hook", ["ckptool-validate", "ckptool-validate-system"])
def test_the_entry_of_a_hook_runs(hook: str, tools: Path, work: Path) -> None:
    """As pre-commit calls it: entry, args, and the names of the files."""
    told = hooks()[hook]
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def called(*names: str) -> tuple[int, str, str]:
        words = [*shlex.split(told["entry"]), *told["args"], *names]
        done = subprocess.run(
            words, cwd=work, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, done.stdout, done.stderr

    good = [put(work, "bare.pth"), put(work, "legacy_bare.pth", "a folder/b c.pth")]
    assert called(*good) == (0, "", "")
    bad = put(work, "zip_wrong_crc.pth")
    code, out, err = called(*good, bad)
    assert (code, err) == (1, "")
    assert out.startswith("zip_wrong_crc.pth: INVALID")
    code, out, err = called(*good, bad, put(work, "lfs_pointer.pth"))
    assert code == 3
    assert "git lfs pull" in err


# -- the action ---------------------------------------------------------------------------------------


def action() -> dict[str, Any]:
    found = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


#: Stands in for python3: notes what pip is asked for, and puts links where pip would install.
PYTHON3 = """\
#!{python}
import json, os, sys
arguments = sys.argv[1:]
assert arguments[:4] == ["-I", "-m", "pip", "install"], arguments
with open({log!r}, "a") as log:
    print(json.dumps(arguments[4:]), file=log)
target = arguments[arguments.index("--target") + 1]
os.makedirs(os.path.join(target, "bin"))
os.symlink(os.path.join(os.environ["GITHUB_ACTION_PATH"], "ckptool"), os.path.join(target, "ckptool"))
script = os.path.join(target, "bin", "ckptool")
with open(script, "w") as file:
    file.write("#!{python}\\nfrom ckptool.cli.main import main\\nmain()\\n")
os.chmod(script, 0o755)
"""


class Job:
    """A job of a workflow that uses the action."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.work, self.temp, self.log, self.output = work, folder / "runner temp", folder / "pip", folder / "output"
        self.temp.mkdir()
        self.log.touch()
        fakes = folder / "fakes"
        fakes.mkdir()
        python = fakes / "python3"
        python.write_text(PYTHON3.format(python=sys.executable, log=str(self.log)), encoding="utf-8")
        python.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{fakes}:{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_OUTPUT": str(self.output),
        }
        self.environment.pop("PYTHONPATH", None)

    def uses(self, inputs: Mapping[str, str]) -> tuple[int, list[str]]:
        """Run the steps up to the first that fails; its code and the lines of stdout."""
        self.output.write_text("", encoding="utf-8")
        told = action()
        assert set(inputs) <= set(told["inputs"])
        values = {name: inputs.get(name, field.get("default", "")) for name, field in told["inputs"].items()}
        out = ""
        for step in told["runs"]["steps"]:
            environment = {}
            for name, expression in step.get("env", {}).items():
                matched = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", expression)
                assert matched
                environment[name] = values[matched[1]]
            assert "${{" not in step["run"]  # an expression in the text of a script is a way in
            script = self.temp / "step.sh"
            script.write_text(step["run"], encoding="utf-8")
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
                cwd=self.work,
                env=self.environment | environment,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            out += done.stdout
            if done.returncode:
                return done.returncode, out.splitlines()
        return 0, out.splitlines()

    def validate(self, **inputs: str) -> tuple[int, list[str]]:
        """The same, where the installation goes well; the output of the action agrees."""
        code, lines = self.uses(inputs)
        assert self.output.read_text(encoding="utf-8") == f"exit-code={code}\n"
        return code, lines


@pytest.fixture
def job(tmp_path: Path, work: Path) -> Job:
    return Job(tmp_path, work)


def test_the_action_installs_without_torch(job: Job) -> None:
    assert job.validate(paths=put(job.work, "bare.pth"))[0] == 0
    (call,) = [json.loads(line) for line in job.log.read_text(encoding="utf-8").splitlines()]
    assert "--no-deps" in call
    assert call[call.index("--target") + 1] == str(job.temp / "ckptool")
    asked = [word for word in call if not word.startswith("-") and word != str(job.temp / "ckptool")]
    assert asked[0] == str(ROOT)
    assert {word.replace('"', "'") for word in asked[1:]} == requirements()
    # Twice in one job.
    assert job.validate(paths="bare.pth")[0] == 0


def test_the_action_validates(job: Job) -> None:
    put(job.work, "bare.pth", "release/a b.pth")
    put(job.work, "wrapped_module.pth", "release/b.pth")
    put(job.work, "zip_wrong_crc.pth", "c.pth")
    code, lines = job.validate(paths="release\n")
    assert (code, lines) == (0, [])
    code, lines = job.validate(paths="\n  release/a*.pth\n\n  c.pth\n")
    assert code == 1
    assert [line.split("::")[1] for line in lines] == ["error file=c.pth,title=ckptool checksums"]
    code, lines = job.validate(paths="release/a b.pth", args="--layout wrapped\n  --require *.weight")
    assert code == 1
    assert len(lines) == 1 and "expected: the layout is wrapped; it is bare" in lines[0]
    assert job.validate(paths="missing.pth")[0] == 3
    assert job.validate(paths="release", args="--no-such-option")[0] == 2
    assert job.validate(paths="")[0] == 2


EVIL = ["$(touch bad)", "`touch bad`", "'; touch bad; '", '"; touch bad; "', "x\ntouch bad", "$HOME ; touch bad"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("text", EVIL)
def test_inputs_are_never_run(job: Job, text: str) -> None:
    assert job.validate(paths=text)[0] == 3
    assert job.validate(paths=text, policy=text, args=text)[0] == 2
    assert job.uses({"paths": text, "strict": text})[0] == 2
    assert list(job.work.iterdir()) == []


def test_a_path_is_no_option(job: Job) -> None:
    put(job.work, "zip_wrong_crc.pth", "--quick")
    assert job.validate(paths="--quick")[0] == 1
    assert job.validate(paths="--help")[0] == 3


def test_nothing_in_the_checkout_is_imported(job: Job) -> None:
    for name in ("ckptool", "click", "json", "torch", "sitecustomize"):
        (job.work / f"{name}.py").write_text("raise SystemExit(99)\n", encoding="utf-8")
    assert job.validate(paths=put(job.work, "bare.pth"))[0] == 0


# -- the examples of the README -----------------------------------------------------------------------


def test_the_examples_fit_the_files() -> None:
    (repository,) = yaml.safe_load(generate.pre_commit_config())["repos"]
    assert repository["rev"] == f"v{__version__}"
    assert {hook["id"] for hook in repository["hooks"]} <= set(hooks())
    steps = yaml.safe_load(generate.workflow())["steps"]
    used = [step for step in steps if step["uses"].endswith(f"/ckptool@v{__version__}")]
    assert used and all(set(step["with"]) <= set(action()["inputs"]) for step in used)
    told = generate.action_inputs()
    assert all(f"`{name}`" in told and field["description"] in told for name, field in action()["inputs"].items())
