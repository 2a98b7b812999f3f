"""The vocabulary of the command line: commands in groups, and options that mean one thing wherever they occur."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from functools import partial

import click
import pytest
from command_line import say
from conftest import FIXTURES, ROOT
from docs_modules import docs_module

import ckptool
from ckptool.base.lazy import table
from ckptool.cli.help import GroupedCommand, headings
from ckptool.cli.main import COMMANDS, DAILY, GROUPS, cli, help_line
from ckptool.cli.options import AnyPath
from ckptool.edits.table import MODIFIERS, STEPS


def test_every_command_is_in_the_help_once_on_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    help_text = say("--help").out
    assert len(help_text.splitlines()) <= 50
    for name, text in ((name, help_line(name)) for name in COMMANDS):
        assert text[0].isupper() and text.endswith(".") and not text.split()[0].endswith("s"), text
        shown = re.findall(rf"^  {name} +{re.escape(text)}$", help_text, re.M)
        named = re.findall(rf"^  [A-Z][ \w]+  .*(?<!lora )\b{name}(?:,|$)", help_text, re.M)
        assert (len(shown), len(named)) == ((1, 0) if name in DAILY else (0, 1)), name
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_in_both_orders(name: str) -> None:
    assert say("help", name) == say(name, "--help")
    assert say("help", name).code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_fits_on_a_screen_and_edit_on_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(say(name, "--help").out.splitlines()) <= (100 if name == "edit" else 60)


def test_help_and_version_without_dashes() -> None:
    assert say("help") == say("--help")
    assert say("version") == say("--version")


#: Why the help of an option differs between commands: (option, command) and the reason.
DIFFERENT = {
    ("--config", "convert"): "it is for --recipe, too",
    ("--config", "lora convert"): "it is for the settings of an adapter",
    ("--map-location", "validate"): "it is for a load, where inspect shows where tags would go",
    ("--output", "get"): "the file is an array",
    ("--output", "lock"): "the file is no checkpoint, and its default is stdout",
    ("--output", "match"): "it needs --apply",
    ("--output", "report"): "the file is a page",
    ("--to-dtype", "dequantize"): "its default is another",
    ("--dequantize", "lora merge"): "it is about the base",
    ("--to-dtype", "lora extract"): "it is about the matrices",
    ("--to-dtype", "lora resize"): "the same",
    ("--rank", "lora resize"): "--keep chooses a rank, too",
    ("--keep", "lora resize"): "it keeps a part of the norm, where edit keeps keys",
    ("--config", "lora merge"): "it is about the adapter",
    ("--keep", "lora merge"): "it names a part of the model",
    ("--quiet", "validate"): "its answer for a bad file is not left out",
    ("--verbose", "inspect"): "what there is more to show is about the command",
    ("--verbose", "validate"): "the same",
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


def test_a_meaning_has_one_option() -> None:
    names: dict[str | None, set[str]] = {}
    for name, commands in options().items():
        for option in commands.values():
            names.setdefault(option.help, set()).add(max(option.opts, key=len) if name in option.opts else name)
    assert {text: same for text, same in names.items() if len(same) > 1} == {}


def test_an_option_is_written_alike_wherever_it_occurs() -> None:
    """The same names, short and long; the same metavar and kind of value; a flag everywhere or nowhere."""
    for name, commands in options().items():
        assert len({(*option.opts, *option.secondary_opts) for option in commands.values()}) == 1, name
        kinds = {(option.is_flag, option.metavar, type(option.type)) for option in commands.values()}
        assert len(kinds) == (3 if name == "--keep" else 1), name  # it keeps keys, a part of a norm, or of a model


def test_a_placeholder_means_one_thing() -> None:
    """Each is in the table of docs/commands.md, and stands for paths on the disk everywhere or nowhere."""
    kinds: dict[str, set[bool]] = {}
    for name in COMMANDS:
        command, ctx = _documented(name)
        for param in command.get_params(ctx):
            if isinstance(param, click.Option) and (param.is_flag or not param.metavar):
                continue
            words = re.findall(r"[A-Z]+", param.make_metavar(ctx))
            for word in words:
                alone = len({*words}) == 1
                kinds.setdefault(word, set()).update([isinstance(param.type, AnyPath)] * alone)
    assert kinds.keys() == docs_module("generate").PLACEHOLDERS.keys()
    assert {word for word, found in kinds.items() if len(found) > 1} == set()
    assert (kinds["PATH"], kinds["KEY"], kinds["GLOB"]) == ({True}, {False}, {False})


def test_steps_name_options() -> None:
    """The settings and commands that messages suggest have the names of options."""
    named = {command: {option[2:] for option, having in options().items() if command in having} for command in COMMANDS}
    every = set[str]().union(*named.values())
    own = {"output", "steps", "word", "extension", "help"}
    wrong = []
    for path in sorted((ROOT / "ckptool").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.args:
                continue
            first = call.args[0].value if isinstance(call.args[0], ast.Constant) else ""
            if call.func.id in ("Step", "option") and first and str(first).replace("_", "-") not in every:
                wrong.append((path.name, call.lineno, first))
            if call.func.id in ("command", "edited", "edit_step") and first in named:
                given = {word.arg.rstrip("_") for word in call.keywords if word.arg} - own
                wrong += [
                    (path.name, call.lineno, word) for word in given if word.replace("_", "-") not in named[str(first)]
                ]
        prose = re.findall(r"(?<!`)`--([a-z0-9-]+)(?:`| |=`)", path.read_text("utf-8"))
        wrong += [(path.name, 0, word) for word in prose if word not in every]
    assert wrong == []


def test_every_command_that_prints_a_report_prints_it_as_json() -> None:
    have = options()
    assert set(COMMANDS) - have["--format"].keys() == {"report", "completion"}
    assert have["--json"].keys() == have["--format"].keys()
    for name, option in have["--format"].items():
        # A lock is JSON, of all files.
        least = {"json"} if name == "lock" else {"table", "json", "jsonl"}
        assert isinstance(option.type, click.Choice) and least <= {*option.type.choices}


@pytest.mark.parametrize("words", ["inspect", "keys", "validate", "hash", "redact", "get epoch", "diff lightning.ckpt"])
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
    assert {*STEPS, *MODIFIERS} - named == {*("adapters", "merge-entry", "other", "others", "repack", "wrap")}


# -- the library: what a user types as an option is a parameter of the function that is called like the command

#: A command without a function of what it does.
WITHOUT_FUNCTION = {"completion"}
#: The functions by the commands that they are called like: ``merge_lora`` by "lora merge".
FUNCTIONS = {
    name: "_".join(reversed(name.replace("-", "_").split())) for name in COMMANDS if name not in WITHOUT_FUNCTION
}
#: Options of printing and of reading several inputs, and those of writing that are not parameters of ``save`` or
#: ``convert``: ``update_config`` is a function.
AROUND = {"format", "help_all", "json", "jobs", "no_color", "quiet", "verbose"}
AROUND |= {"endpoint_url", "anonymous", "profile", "max_download", "allow_unversioned"}  # of remote files
AROUND |= {"engine", "files_from", "slice"}
AROUND |= {"output", "out_dir", "in_place", "single", "update_config"}
#: The option and its parameter, by function, where the parameter has a shorter name.
MAIN = {
    "rename": ("rename", "glob"),
    "redact": ("redact", "kinds"),
    "strip_module": ("strip_prefix", "prefix"),
    "add_module": ("add_prefix", "prefix"),
}
WRITING = (ckptool.save, ckptool.save_in_place, ckptool.convert)
#: Parameters that are no options: command, parameter and the reason.
NOT_OPTIONS = {
    ("lora merge", "adapters"): "the paths after the first one",
    ("lora convert", "model"): "the command line writes a folder for each model",
    ("edit", "steps"): "options and their texts in an order, which keywords do not have",
    ("remap", "devices"): "the fields of DeviceMap are the options",
    ("rename", "regex"): "--rename takes every form",
    ("rename", "table"): "--rename takes every form",
    ("set", "value"): "a part of KEY=VALUE",
    ("undo", "original"): "undo is repeated",
    ("merge", "entry"): "edit --merge-entry does it",
    ("slim", "purpose"): "for is a keyword of Python",
}
#: Options that are no parameters.
NOT_PARAMETERS = {
    ("diff", "no_values"): "short for ignoring values",
    ("diff", "dequantized"): "ckptool.diff takes what ckptool.dequantize returns",
    ("stats", "dequantized"): "the same",
    ("lora merge", "dequantize"): "the same",
    ("convert", "model"): "unflatten takes a model",
    ("inspect", "load"): "ckptool.load does it",
    ("keys", "names"): "another form of the same",
    ("match", "apply"): "rename and edit do it",
    ("slim", "for"): "for is a keyword of Python",
    ("strip-module", "wrappers"): "strip_wrappers does it",
    ("rename", "weight_norm"): "edit does it",
    ("undo", "list"): "history does it",
    ("validate", "no_policy"): "a function searches for no policy",
}
#: Parameters whose value has the rest of the options: their names.
INSIDE = {
    "edit": {name.replace("-", "_") for name in (*STEPS, *MODIFIERS, "include", "exclude")},
    "remap": {*ckptool.DeviceMap._fields},
    "validate": {*ckptool.Policy._fields},
}


def test_parameters_are_called_like_options() -> None:
    """``rename --rename-like`` is ``rename(like=...)``. And no exception is listed in vain."""
    not_options, not_parameters = set(), set()
    for name, function in FUNCTIONS.items():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        arguments = {str(item.name) for item in command.params if isinstance(item, click.Argument)}
        given = {max(item.opts, key=len)[2:].replace("-", "_") for item in command.params} - {""}
        given = {option for option in given if f"--{option.replace('_', '-')}" in options()}
        # The first parameter is the checkpoint.
        parameters = [*inspect.signature(getattr(ckptool, function)).parameters][1:]
        option, main = MAIN.get(function, (function, None))
        within = {option: main, **{f"{function}_{item}": item for item in parameters}}
        given = {within.get(option, option) for option in given} - {None}
        not_options |= {(name, item) for item in parameters if item not in given | arguments | {"key", "progress"}}
        written = {item for write in WRITING if "output" in given for item in inspect.signature(write).parameters}
        left = given - {*parameters} - AROUND - written - INSIDE.get(name, set())
        not_parameters |= {(name, option) for option in left}
    assert not_options == set(NOT_OPTIONS)
    assert not_parameters == set(NOT_PARAMETERS)


def test_other_parameters_are_called_like_options_too() -> None:
    named = {name.removeprefix("--").replace("-", "_") for name in options()}
    for function in (ckptool.load, ckptool.save, ckptool.write_lock, ckptool.strip_wrappers):
        left = {*[*inspect.signature(function).parameters][1:]} - named
        assert left <= {"path", "on_progress", "progress", "workers"}, function


# -- help ------------------------------------------------------------------------------------------------------------


def _documented(name: str) -> tuple[GroupedCommand, click.Context]:
    with cli.make_context("ckptool", ["inspect"]) as outer:
        command = cli.get_command(outer, name)
        assert isinstance(command, GroupedCommand)
        return command, click.Context(command, outer, info_name=name)


def _described(write: Callable[[click.HelpFormatter], None]) -> tuple[list[str], str]:
    """The options that a part of a help text describes, and the part after them."""
    formatter = click.HelpFormatter(width=80)
    write(formatter)
    options, _, named = formatter.getvalue().partition("see --help-all:")
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)(?: |$)", options, re.M), named


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_help_all_has_every_option_once(name: str) -> None:
    command, ctx = _documented(name)
    every = sorted(option.opts[-1] for option in command.get_params(ctx) if isinstance(option, click.Option))
    shown, named = _described(partial(command.format_options, ctx))
    assert len(shown) <= 25 or name == "edit"
    assert sorted([*shown, *re.findall(r"--[\w-]+", named)]) == every
    whole = say(name, "--help-all")
    assert whole.code == 0 and all(f" {option}" in whole.out for option in every) and "see --help-all" not in whole.out


def test_the_headings_name_options_that_exist() -> None:
    options = {option.opts[-1] for name in COMMANDS for option in _documented(name)[0].get_params(_documented(name)[1])}
    named = {option for name in ("shared", "edit") for _, names in headings(name) for option in names}
    named |= {*table("cli/headings")["rare"].split()}
    assert named - options == set()


def test_the_report_is_last_and_edit_has_its_edits_by_purpose() -> None:
    for name in COMMANDS:
        command, ctx = _documented(name)
        titles = [*command.sections(ctx)]
        shared = [title for title, _ in headings("shared") if title in titles]
        assert titles[len(titles) - len(shared) :] == shared and titles[-1] == "Report"
    command, ctx = _documented("edit")
    edits = {option.opts[-1] for title, _ in headings("edit") for option in command.sections(ctx)[title]}
    assert edits <= {f"--{step}" for step in STEPS} and len(edits) <= 27
