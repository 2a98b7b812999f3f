"""The vocabulary of the command line: commands in groups, and options that mean one thing wherever they occur."""

from __future__ import annotations

import re

import pytest
from command_line import say

from ckptool.cli.main import COMMANDS, GROUPS


def test_every_command_is_in_the_help_once_in_one_imperative_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    help_text = say("--help").out
    for title, group in GROUPS.items():
        assert f"\n{title}:\n" in help_text
        for name, (_, _, text) in group.items():
            assert len(re.findall(rf"^  {name} +{re.escape(text)}$", help_text, re.M)) == 1, name
            assert text[0].isupper() and text.endswith(".") and not text.split()[0].endswith("s"), text
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_in_both_orders(name: str) -> None:
    assert say("help", name) == say(name, "--help")
    assert say("help", name).code == 0


def test_help_and_version_without_dashes() -> None:
    assert say("help") == say("--help")
    assert say("version") == say("--version")
