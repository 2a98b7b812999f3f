"""The package as an index shows it: its description, its metadata, its archives."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, WHOLE

import ckptool
from ckptool.cli.main import FIRST_WORDS, cli

_LINKS = re.compile(r"\[[^]]*\]\(([^)]*)\)")
CONFIG = ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
URL = CONFIG["metadata"]["url"]


def test_the_description_has_no_link_that_an_index_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert {*given["project_urls"]} == {"Source", "Issues", "Documentation", "Changelog"}
    assert all(url.startswith(URL) for url in given["project_urls"].values())
    readme, description = (ROOT / "README.md").read_text(encoding="utf-8"), given["long_description"]
    links = _LINKS.findall(readme)
    assert [link for link in links if link.startswith("https:")] == _LINKS.findall(description)
    assert all(f"`{link}`" in description for link in links if not link.startswith("https:"))


COMMANDS = re.findall(r"`(ckptool [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", sorted({line for line in COMMANDS if " " in line.removeprefix("ckptool ")}))
def test_the_commands_of_the_readme_parse(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    if name in FIRST_WORDS:
        name, *arguments = f"{name} {arguments[0]}", *arguments[1:]
    with cli.make_context("ckptool", [name]) as context:
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, arguments, parent=context)


# -- what is said in several places --------------------------------------------------------------------------------

_TEXTS = (".md", ".py", ".yml", ".yaml", ".cfg", ".toml", ".cff", ".json")


def tracked() -> list[str]:
    """The files of the repository; of an unpacked sdist there is no such list."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git repository")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    found = {
        (name, owner)
        for name in tracked()
        if name.endswith(_TEXTS)
        for owner in re.findall(r"(?:github\.com/|uses: )([\w{}.()-]+)/ckptool\b", (ROOT / name).read_text("utf-8"))
    }
    assert {owner for _, owner in found} == {URL.split("/")[-2]}
    assert {name for name, _ in found} >= {"README.md", "setup.cfg", "docs/ci.md"}


def test_the_version_is_written_in_one_place() -> None:
    assert CONFIG["metadata"]["version"] == "attr: ckptool.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", ckptool.__version__)


def test_the_changelog_has_the_form_that_it_names() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in versions[1:])
    kinds = {f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")}
    assert {line for line in lines if line.startswith("###")} <= kinds


# -- archives ------------------------------------------------------------------------------------------------------


def built(folder: Path, umask: int) -> Path:
    """The folder with the archives that are built of a copy of the repository."""
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
        (source / name).chmod((0o700 if os.access(ROOT / name, os.X_OK) else 0o600) | 0o055 & ~umask)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    environment = {name: value for name, value in os.environ.items() if name not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")}
    subprocess.run(command, umask=umask, env=environment, check=True, capture_output=True, timeout=300)
    return folder / "dist"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What is built of the same files twice, in other folders, with other modes and another umask."""
    for name in ("build", "setuptools"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the folder "build", which make makes, is not the package
            pytest.skip(f"{name} is not installed")
    tracked()
    return [built(tmp_path_factory.mktemp(f"{mask:o}"), mask) for mask in (0o022, 0o077)[: 2 if WHOLE else 1]]


@pytest.mark.sampled
@pytest.mark.skipif(not WHOLE, reason="make torture builds them twice")
def test_archives_are_the_same_wherever_they_are_built(archives: list[Path]) -> None:
    one, another = (
        {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} for folder in archives
    )
    assert one == another
    version = ckptool.__version__
    assert {*one} == {f"ckptool-{version}.tar.gz", f"ckptool-{version}-py3-none-any.whl"}


def test_the_sdist_has_everything(archives: list[Path]) -> None:
    with tarfile.open(next(archives[0].glob("*.tar.gz"))) as sdist:
        members = sdist.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert {*tracked()} - names == set()
    made = {name for name in names - {*tracked()} if not name.startswith("ckptool.egg-info/")}
    assert made == {"PKG-INFO"}
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(1580601600, 0, "")}
    assert {member.name for member in members if member.mode != 0o644} == {f"ckptool-{ckptool.__version__}/.ci/run"}


def test_the_wheel_has_the_package_alone(archives: list[Path]) -> None:
    with zipfile.ZipFile(next(archives[0].glob("*.whl"))) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert {name for name in tracked() if name.startswith("ckptool/")} == {n for n in names if n.startswith("ckptool/")}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ckptool"}
    said = Parser().parsestr(metadata)
    assert (said["Author"], said["License-Expression"], said["License"]) == ("ckptool developers", "MIT", None)
    assert said["Requires-Python"] == ">=3.10" and said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().startswith("# ckptool\n")
