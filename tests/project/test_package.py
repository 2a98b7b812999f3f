"""The package as an index shows it."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

from ckptool.cli.main import cli

_LINKS = re.compile(r"\[[^]]*\]\(([^)]*)\)")


def test_the_description_has_no_link_that_an_index_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=given.update))
    runpy.run_path(str(ROOT / "setup.py"))
    readme, description = (ROOT / "README.md").read_text(encoding="utf-8"), given["long_description"]
    links = _LINKS.findall(readme)
    assert [link for link in links if link.startswith("https:")] == _LINKS.findall(description)
    assert all(f"`{link}`" in description for link in links if not link.startswith("https:"))


COMMANDS = re.findall(r"`(ckptool [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", sorted({line for line in COMMANDS if " " in line.removeprefix("ckptool ")}))
def test_the_commands_of_the_readme_parse(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    with cli.make_context("ckptool", [name]) as context:
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, arguments, parent=context)
