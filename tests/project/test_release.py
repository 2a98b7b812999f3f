"""What a release needs beside the package: workflows, a container, a recipe, a citation; none of it may drift."""

from __future__ import annotations

import re
import shlex
from configparser import ConfigParser

import pytest
from conftest import ROOT

import ckptool
from ckptool.safety.torch_lists import NEWEST, VERSIONS

CONFIG = ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
WORKFLOWS = {path.name: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
RECIPE = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text("utf-8")
#: What ckptool needs but torch, without markers.
NEEDS = [line for line in CONFIG["options"]["install_requires"].split("\n") if line and not line.startswith("torch")]


def versions() -> list[str]:
    """The versions of Python in the classifiers."""
    return re.findall(r"Python :: (3\.\d+)$", CONFIG["metadata"]["classifiers"], re.M)


def test_the_tests_run_on_every_python_of_the_classifiers() -> None:
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", WORKFLOWS["tests.yml"], re.M)
    assert re.findall(r"[\d.]+", matrix) == versions()
    (systems,) = re.findall(r"^ +os: \[(.*)\]$", WORKFLOWS["tests.yml"], re.M)
    assert systems.split(", ") == ["ubuntu-latest", "macos-latest", "windows-latest"]


def test_they_run_with_the_oldest_and_the_newest_torch() -> None:
    told = re.findall(r'- \{python: "([\d.]+)", torch: "torch==([\d.]+)\.\*', WORKFLOWS["tests.yml"])
    (oldest,) = re.findall(r"torch>=([\d.]+)", CONFIG["options"]["install_requires"])
    assert told == [(versions()[0], oldest), (versions()[-1], NEWEST)]
    assert oldest in VERSIONS


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_what_a_workflow_runs_is_there(name: str) -> None:
    text = WORKFLOWS[name]
    assert "not run yet" in text.partition("name:")[0]
    paths = re.findall(r"(?:tests|fixtures)/[\w./]+\.\w+", text)
    assert all((ROOT / path).is_file() for path in paths)
    made = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert {*re.findall(r"run: make (\w+)", text)} <= {*made}
    # Rights are given job by job, and only to publish is an identity needed.
    assert "permissions: {}" in text
    assert ("id-token: write" in text) == (name == "release.yml")


def test_the_container_has_what_the_package_needs_but_torch() -> None:
    (line,) = re.findall(r"pip install --no-cache-dir ('.*) \\$", DOCKERFILE, re.M)
    assert shlex.split(line) == [need for need in NEEDS if ";" not in need]
    (python,) = {*re.findall(r"^FROM python:(\S+)-slim", DOCKERFILE, re.M)}
    assert python in versions() and python not in ("3.10",)  # which needs tomli, too
    assert "USER ckptool" in DOCKERFILE and 'ENTRYPOINT ["/opt/ckptool/bin/ckptool"]' in DOCKERFILE
    copied = [word for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.M) for word in line.split()]
    let_in = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), re.M)
    assert sorted(copied) == sorted(let_in)
    assert all((ROOT / name).exists() for name in copied)


def test_the_recipe_has_what_the_package_needs() -> None:
    assert f'version: "{ckptool.__version__}"' in RECIPE
    assert f'python_min: "{versions()[0]}"' in RECIPE
    run = re.findall(r"^    - (\S+) >=(\S+)$", RECIPE.partition("  run:")[2].partition("tests:")[0], re.M)
    needs = {f"{name.replace('pytorch', 'torch')}>={version}" for name, version in run if name != "python"}
    wanted = CONFIG["options"]["install_requires"].split("\n")
    assert needs == {line.partition(";")[0] for line in wanted if line}
    (setuptools,) = re.findall(r"setuptools >=(\S+)", RECIPE)
    assert f'"setuptools>={setuptools}"' in (ROOT / "pyproject.toml").read_text("utf-8")
