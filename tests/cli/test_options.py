"""The vocabulary of the command line: commands in groups, and options that mean one thing wherever they occur."""

from __future__ import annotations

import json
import re

import click
import pytest
from command_line import say
from conftest import FIXTURES

from ckptool.cli.main import COMMANDS, GROUPS, cli
from ckptool.edits.pipeline import MODIFIERS, STEPS


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


#: Why the help of an option differs between commands: (option, command) and the reason.
DIFFERENT = {
    ("--prefix", "validate"): "what is expected of a file, as --dtype and --device are, not what is done to it",
    ("--dtype", "cast"): "what is made; that of validate is what is expected",
    ("--map-location", "validate"): "it is for a load, where inspect shows where tags would go",
    ("--output", "lock"): "the file is no checkpoint, and its default is stdout",
    ("--output", "match"): "it needs --apply",
    ("--quiet", "validate"): "its answer for a bad file is not left out",
    ("--verbose", "validate"): "what there is more to show is about the command",
    ("--verbose", "scan"): "the same",
}


def options() -> dict[str, dict[str, click.Option]]:
    """The options by their names, and the commands that have them."""
    by_name: dict[str, dict[str, click.Option]] = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option):
                for spelled in (*option.opts, *option.secondary_opts):
                    by_name.setdefault(spelled, {})[name] = option
    return by_name


def test_an_option_says_the_same_wherever_it_occurs() -> None:
    different = set()
    for name, commands in options().items():
        if not name.startswith("--"):
            continue
        texts: dict[str | None, list[str]] = {}
        for command, option in commands.items():
            texts.setdefault(option.help, []).append(command)
        usual = max(texts.values(), key=len) if len(texts) > 1 else []
        if usual:
            different |= {(name, command) for command in commands if command not in usual}
    assert different == set(DIFFERENT)


def test_an_option_is_written_alike_wherever_it_occurs() -> None:
    """The same names, short and long; a flag everywhere or nowhere."""
    for name, commands in options().items():
        assert len({(*option.opts, *option.secondary_opts) for option in commands.values()}) == 1, name
        assert len({option.is_flag for option in commands.values()}) == 1, name


def test_every_command_that_prints_a_report_prints_it_as_json() -> None:
    have = options()
    assert set(COMMANDS) - have["--format"].keys() == {"lock", "completion"}, "their output is a file"
    assert have["--json"].keys() == have["--format"].keys()
    for option in have["--format"].values():
        assert isinstance(option.type, click.Choice) and {"table", "json", "jsonl"} <= {*option.type.choices}


@pytest.mark.parametrize(
    "words",
    [
        "inspect",
        "keys",
        "validate",
        "hash",
        "history",
        "redact",
        "wrap model --dry-run",
        "get epoch",
        "diff lightning.ckpt",
    ],
)
def test_json_is_short_for_the_format(words: str) -> None:
    command, *more = words.split()
    path = str(FIXTURES / "lightning.ckpt")
    more = [path if word == "lightning.ckpt" else word for word in more]
    short = say(command, path, *more, "--json")
    assert short == say(command, path, *more, "--format", "json")
    lines = say(command, path, *more, "--format", "jsonl").out.splitlines()
    assert [json.loads(short.out)] == [json.loads(line) for line in lines]


def test_steps_of_edit_are_named_after_commands_and_their_options() -> None:
    named = {*COMMANDS, *(name.removeprefix("--") for name, commands in options().items() if {*commands} - {"edit"})}
    #: An option of a command is called like it alone, or after its command.
    joined = {f"{command}-{option}" for command in ("rename", "merge") for option in named}
    assert {*STEPS, *MODIFIERS} - named - joined == {"strip-prefix", "add-prefix"}, "functions of the library"
