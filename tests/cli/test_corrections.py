"""Typing errors: the message names the option, the command or the name that was probably meant."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import torch
from command_line import say
from conftest import FIXTURES

from ckptool.cli import help
from ckptool.cli.main import COMMANDS, cli

#: What was typed, and the end of the message.
TYPED = {
    "info bare.pth": "Did you mean 'inspect'?",
    "isnpect bare.pth": "Did you mean 'inspect'?",
    "ls bare.pth": "Did you mean 'keys'?",
    "strip_module bare.pth --dry-run": "Did you mean 'strip-module'?",
    "bare.pth": "Did you mean: ckptool inspect bare.pth",
    "hepl": "Did you mean 'help'?",
    "help strip": "Did you mean 'strip-module'?",
    "check bare.pth --quik": "Did you mean 'validate'?",
    "validate bare.pth --quik": "Did you mean '--quick'?",
    "keys bare.pth --exclud fc.*": "Did you mean '--exclude'?",
    "keys bare.pth --largest 5": "Did you mean '--sort'?",
    "keys bare.pth --grep fc": "Did you mean '--include'?",
    "convert bare.pth --to safetensors": "Did you mean '--to-format'?",
    "remap bare.pth --map-location cpu": "Did you mean '--to'?",
    "inspect bare.pth --map_location cpu": "Did you mean '--map-location'?",
    "strip-module bare.pth -o new.pth --overwrite": "Did you mean '--force'?",
    "validate bare.pth --nan": "Did you mean '--finite'?",
    "strip-module bare.pth -o a.pth --to cpu": "It is an option of remap and edit. Did you mean '--to-format'?",
    "--vresion": "Did you mean '--version'?",
    "strip-module bare.pth": "say where to write, edit the file itself with --in-place, or try --dry-run.",
    "strip-module bare.pth lightning.ckpt -o made/": "Several inputs need --out-dir DIR instead of -o.",
    "validate bare.pth --map-location cpu": "--map-location is for --load.",
    "match whole.pth bare.pth -o z.pth": "-o and --force need --apply.",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("bare.pth", "lightning.ckpt"):
        shutil.copy(FIXTURES / name, tmp_path)
    for name in ("whole.pth", "third.pth"):
        shutil.copy(FIXTURES / "bare.pth", tmp_path / name)
    weights = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    state = {"state": {0: {"exp_avg": torch.zeros(3, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    averaged = {name: tensor / 2 for name, tensor in weights.items()}
    whole = {"model": weights, "model_ema": averaged, "optimizer": state, "epoch": 3}
    torch.save(whole, tmp_path / "training.pth")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "meant"), TYPED.items(), ids=TYPED)
def test_what_was_meant(typed: str, meant: str, folder: Path) -> None:
    said = say(*shlex.split(typed))
    assert said.code == 2 and not said.out
    assert said.err.endswith(f"{meant}\n"), said.err


@pytest.mark.parametrize(
    "typed",
    [
        "nothing",
        "nothing bare.pth",
        "keys bare.pth --xyzzy",
        "inspect",
        "keys bare.pth --sort x",
        "-x",
        "diff bare.pth",
    ],
)
def test_nothing_is_made_up(typed: str, folder: Path) -> None:
    said = say(*shlex.split(typed))
    assert said.code == 2
    assert "->" not in said.err and "Did you mean" not in said.err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("inspect bare", "is it 'bare.pth'?\n  -> ckptool inspect bare.pth"),
        ("keys checkpoint.pth", "is it 'checkpoint.pth.tar'?"),
        ("add-module bare.pth -o bare.pth", "write to another name, or use --in-place if the command has it"),
        ("drop lightning.ckpt optimizer_state -o z.pth", "did you mean 'optimizer_states'?"),
        ("convert lightning.ckpt -o made.onnx", "no suffix that means a format"),
        ("drop lightning.ckpt optimizer_states,epoch -o z.pth", "patterns are given one by one, without commas"),
        ("convert bare.pth -o whole.pth", "the output exists; replace it with --force, or choose another name"),
        ("rename bare.pth --rename fc=head -o z.pth", "did you mean 'fc.*'?"),
        ("keys training.pth --key optimizer", "no state dict at 'optimizer'; there is 'model' and 'model_ema'"),
        ("merge bare.pth 'who*e.pth' -o z.pth", "the shell expands a pattern without quotes"),
    ],
)
def test_a_refusal_names_what_was_meant(typed: str, says: str, folder: Path) -> None:
    shutil.copy("bare.pth", "checkpoint.pth.tar")
    said = say(*shlex.split(typed))
    assert said.code > 1 and says in said.err, said.err


@pytest.mark.parametrize(
    "typed",
    [
        "get training.pth ema",
        "extract training.pth ema -o z.pth",
        "drop training.pth ema -o z.pth",
        "edit training.pth --keep ema -o z.pth",
        "edit training.pth --extract ema -o z.pth",
        "edit bare.pth --merge-entry training.pth:ema -o z.pth",
        "convert training.pth --key ema -o z.safetensors",
        "strip-module training.pth --key ema -o z.pth",
        "cast training.pth --key ema --to-dtype bf16 -o z.pth",
        "cast training.pth --include ema --to-dtype bf16 -o z.pth",
        "average training.pth training.pth --key ema -o z.pth",
        "match training.pth bare.pth --key ema",
        "diff training.pth training.pth --key ema",
        "diff training.pth training.pth --include ema",
        "report training.pth training.pth --include ema -o z.html",
        "keys training.pth --key ema",
        "keys training.pth --include ema",
        "stats training.pth --include ema",
        "hash training.pth --include ema",
        "hash training.pth --key ema",
        "validate training.pth --require ema",
    ],
)
def test_a_part_of_the_name_of_an_entry_leads_to_the_entry(typed: str, folder: Path) -> None:
    said = say(*shlex.split(typed))
    assert "model_ema" in said.all, said.all


@pytest.mark.parametrize(
    "command",
    [
        "keys training.pth --include PATTERN",
        "stats training.pth --include PATTERN",
        "hash training.pth --include PATTERN",
        "diff training.pth training.pth --include PATTERN",
        "cast training.pth --to-dtype bf16 --include PATTERN -o z.pth",
        "drop training.pth PATTERN -o z.pth",
        "average training.pth training.pth --include PATTERN -o z.pth",
        "merge training.pth training.pth --include PATTERN -o z.pth",
        "validate training.pth --require PATTERN",
        "validate training.pth --forbid PATTERN",
        "validate training.pth --include PATTERN --dtype float32",
    ],
)
def test_a_dotted_path_is_a_pattern_in_every_command(command: str, folder: Path) -> None:
    """``model_ema.fc.weight``, as people type it, means what ``model_ema["fc.weight"]`` means."""

    def said(pattern: str) -> tuple[int, str, str]:
        result = say(*(pattern if word == "PATTERN" else word for word in command.split()))
        content = "" if "z.pth" not in command else say("hash", "z.pth").out
        (folder / "z.pth").unlink(missing_ok=True)
        return result.code, re.sub(r"\W+", "", result.all), content

    typed = said("model_ema.fc.weight")
    assert typed == said('model_ema["fc.weight"]') and (typed[0] == 0 or "--forbid" in command)
    assert typed != said("nothing")


def test_an_unknown_key_of_a_policy_is_corrected(folder: Path) -> None:
    Path("p.toml").write_text('devices = ["cpu"]\n')
    assert "did you mean 'device'?" in say("validate", "bare.pth", "--policy", "p.toml").err
    Path("p.toml").write_text("max-byte = 3\n")
    assert "did you mean 'max-bytes'?" in say("validate", "bare.pth", "--policy", "p.toml").err


def test_the_words_for_commands_and_options_lead_to_one_of_them() -> None:
    synonyms = json.loads(Path(help.__file__).with_name("synonyms.json").read_text())
    others = [word for words in synonyms["commands"].values() for word in words.split()]
    assert len(others) == len(set(others))
    assert not {*others} & {*COMMANDS}
    assert {*synonyms["commands"]} <= {*COMMANDS}
    have = {"--help"}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        have |= {option for param in command.params for option in param.opts}
    assert {option for meant in synonyms["options"].values() for option in meant.split()} <= have


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("first", ["--to", "--rename", "--drop", "--cast", "--strip-module"])
@pytest.mark.parametrize("second", ["--to", "--to-dtype", "--strip-module", "-o", "--nosuch"])
@pytest.mark.parametrize("command", ["slim", "drop", "strip-module", "keys"])
def test_options_without_their_values_are_no_bug(command: str, first: str, second: str, folder: Path) -> None:
    said = say(command, "bare.pth", first, second, "cpu")
    assert said.code in (0, 1, 2, 4) and "a bug in ckptool" not in said.err
