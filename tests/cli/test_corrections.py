"""Typing errors lead to the whole command that was meant, which runs as it is printed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
import torch
from command_line import say
from conftest import FIXTURES

from ckptool.cli import synonyms
from ckptool.cli.main import COMMANDS, cli

#: What was typed, and what was meant.
TYPED = {
    "strip bare.pth plain.pth": "strip-module bare.pth -o plain.pth",
    "info bare.pth": "inspect bare.pth",
    "show bare.pth": "inspect bare.pth",
    "bare.pth": "inspect bare.pth",
    "isnpect bare.pth": "inspect bare.pth",
    "ls bare.pth": "keys bare.pth",
    "check bare.pth --quik": "validate bare.pth --quick",
    "strip_module bare.pth --dry-run": "strip-module bare.pth --dry-run",
    "convert bare.pth --to safetensors": "convert bare.pth --to-format safetensors -o bare.safetensors",
    "convert bare.pth --to=safetensors -o m.st.safetensors": (
        "convert bare.pth --to-format=safetensors -o m.st.safetensors"
    ),
    "convert bare.pth --format safetensors": "convert bare.pth --to-format safetensors -o bare.safetensors",
    "convert bare.pth --to-dtype bf16 -o m.safetensors": "edit bare.pth --to-dtype bf16 -o m.safetensors",
    "convert bare.pth --dtype bf16 -o m.safetensors": "edit bare.pth --to-dtype bf16 -o m.safetensors",
    "get bare.pth fc.bias --save bias.npy": "get bare.pth fc.bias --output bias.npy",
    "get bare.pth fc.bias bias.npy": "get bare.pth fc.bias -o bias.npy",
    "keys bare.pth --top 5": "keys bare.pth --sort bytes",
    "keys bare.pth --sort size": "keys bare.pth --sort bytes",
    "stats bare.pth --sort params": "stats bare.pth --sort numel",
    "wrap bare.pth --name model -o wrapped.pth": "wrap bare.pth model -o wrapped.pth",
    "slim bare.pth --device cpu --dtype fp16 -o x.pth": "edit bare.pth -o x.pth --slim --to cpu --to-dtype fp16",
    "convert bare.pth m.safetensors": "convert bare.pth -o m.safetensors",
    "convert bare.pth": "convert bare.pth -o bare.safetensors",
    "remap bare.pth --to safetensors": "convert bare.pth --to-format safetensors -o bare.safetensors",
    "keys bare.pth --exclud fc.*": "keys bare.pth --exclude 'fc.*'",
    "keys bare.pth --fomat jsn": "keys bare.pth --format json",
    "strip-module bare.pth": "strip-module bare.pth -o bare.new.pth",
    "strip-module bare.pth -o": "strip-module bare.pth -o bare.new.pth",
    "strip-module bare.pth lightning.ckpt plain/": "strip-module bare.pth lightning.ckpt --out-dir plain/",
    "strip-module bare.pth lightning.ckpt": "strip-module bare.pth lightning.ckpt --out-dir edited",
    "convert bare.pth whole.pth": "convert bare.pth whole.pth --out-dir edited --to-format safetensors",
    "convert bare.pth whole.pth --out-dir made": "convert bare.pth whole.pth --out-dir made --to-format safetensors",
    "convert bare.pth whole.pth -o m.safetensors": "convert bare.pth whole.pth --out-dir m --to-format safetensors",
    "convert bare.pth whole.pth --to-format dcp -o made/": "convert bare.pth whole.pth --to-format dcp --out-dir made/",
    "convert bare.pth lightning.ckpt --to-format torch": (
        "convert bare.pth lightning.ckpt --to-format torch --out-dir edited"
    ),
    "strip-module bare.pth lightning.ckpt -o made/": "strip-module bare.pth lightning.ckpt --out-dir made/",
    "strip-module --output=made bare.pth lightning.ckpt": "strip-module bare.pth lightning.ckpt --out-dir made",
    "drop lightning.ckpt optimizer_states small.pth": "drop lightning.ckpt optimizer_states -o small.pth",
    "extract lightning.ckpt state_dict small.pth": "extract lightning.ckpt state_dict -o small.pth",
    "strip-module bare.pth -o new.pth --overwrite": "strip-module bare.pth -o new.pth --force",
    "remap bare.pth --device cpu --out 'my model.pth'": "remap bare.pth --to cpu --output 'my model.pth'",
    "load bare.pth": "inspect bare.pth",
    "remap bare.pth --cpu -o z.pth": "remap bare.pth --to cpu -o z.pth",
    "remap bare.pth --cuda": "remap bare.pth --to cuda:0 -o bare.new.pth",
    "remap lightning.ckpt cuda:0 cpu -o z.ckpt": "remap lightning.ckpt -o z.ckpt --map cuda:0=cpu",
    "strip-module bare.pth -o a.pth --to cpu": "edit bare.pth -o a.pth --strip-module --to cpu",
    "strip-module bare.pth --to=cpu": "edit bare.pth --strip-module --to=cpu -o bare.new.pth",
    "slim bare.pth --to cuda:1 -o a.pth": "edit bare.pth -o a.pth --slim --to cuda:1",
    "cast bare.pth --to-dtype bf16 --to cpu -o a.pth": "edit bare.pth --to-dtype bf16 -o a.pth --to cpu",
    "remap bare.pth cpu": "remap bare.pth --to cpu -o bare.new.pth",
    "remap lightning.ckpt cuda:0=cpu": "remap lightning.ckpt --map cuda:0=cpu -o lightning.new.ckpt",
    "remap lightning.ckpt --to \"{'cuda:0': 'cpu', 'cpu': 'cuda:1'}\"": (
        "remap lightning.ckpt --map cuda:0=cpu,cpu=cuda:1 -o lightning.new.ckpt"
    ),
    "remap bare.pth --map-location 'lambda storage, loc: storage'": "remap bare.pth --to cpu -o bare.new.pth",
    "remap bare.pth --to 'lambda s, l: s.cuda(1)' -o z.pth": "remap bare.pth --to cuda:1 -o z.pth",
    "remap bare.pth --map \"torch.device('cuda', 1)\" -o z.pth": "remap bare.pth --to cuda:1 -o z.pth",
    "remap bare.pth map_location=cpu": "remap bare.pth --to cpu -o bare.new.pth",
    "edit bare.pth --to \"torch.device('cpu')\" -o z.pth": "edit bare.pth --to cpu -o z.pth",
    "inspect bare.pth --map-location \"{'cuda:1': 'cpu'}\"": "inspect bare.pth --map-location cuda:1=cpu",
    "rename bare.pth fc.bias=head.bias": "rename bare.pth --rename fc.bias=head.bias -o bare.new.pth",
    "rename bare.pth fc.bias head.bias": "rename bare.pth --rename fc.bias=head.bias -o bare.new.pth",
    "rename bare.pth s/fc/head/": "rename bare.pth --rename-regex s/fc/head/ -o bare.new.pth",
    "cast bare.pth bf16": "cast bare.pth --to-dtype bf16 -o bare.new.pth",
    "cast bare.pth --to-dtype bf16 --in-place": "cast bare.pth --to-dtype bf16 -o bare.new.pth",
    "slim lightning.ckpt inference": "slim lightning.ckpt --for inference -o lightning.new.ckpt",
    "convert bare.pth safetensors": "convert bare.pth --to-format safetensors -o bare.safetensors",
    "drop bare.pth fc.weight fc.bias": "drop bare.pth fc.weight fc.bias -o bare.new.pth",
    "validate bare.pth --map-location cpu": "validate bare.pth --map-location cpu --load",
    "validate bare.pth --map-location \"{'cuda:1': 'cpu'}\"": "validate bare.pth --map-location cuda:1=cpu --load",
    "match whole.pth bare.pth -o z.pth": "match whole.pth bare.pth -o z.pth --apply",
    "add-module bare.pth --in-place -o z.pth": "add-module bare.pth -o z.pth",
    "add-module bare.pth --in-place --to-format safetensors": (
        "add-module bare.pth --to-format safetensors -o bare.safetensors"
    ),
    "drop lightning.ckpt optimizer_states --reclaim -o z.pth": "drop lightning.ckpt optimizer_states -o z.pth",
    "remap bare.pth --to device=cpu -o z.pth": "remap bare.pth --to cpu -o z.pth",
    "strip-optimizer lightning.ckpt": "drop lightning.ckpt optimizer_states -o lightning.new.ckpt",
    "remove-scheduler lightning.ckpt -o z.pth": "drop lightning.ckpt lr_schedulers -o z.pth",
    "remap lightning.ckpt --to cuda:0=cpu": "remap lightning.ckpt --map cuda:0=cpu -o lightning.new.ckpt",
    "edit lightning.ckpt --remap cuda:0=cpu -o z.pth": "edit lightning.ckpt --map cuda:0=cpu -o z.pth",
    "edit bare.pth --remap cpu -o z.pth": "edit bare.pth --to cpu -o z.pth",
    "remap bare.pth --map_location=cpu": "remap bare.pth --to=cpu -o bare.new.pth",
    "remap bare.pth --no-cuda -o z.pth": "remap bare.pth --to cpu -o z.pth",
    "validate bare.pth --no-cuda": "validate bare.pth --device cpu",
    "validate bare.pth --load --no-cuda": "validate bare.pth --load --map-location cpu",
    "validate bare.pth --nan": "validate bare.pth --finite",
    "cast bare.pth --to bf16": "cast bare.pth --to-dtype bf16 -o bare.new.pth",
    "cast bare.pth --half": "cast bare.pth --to-dtype float16 -o bare.new.pth",
    "cast bare.pth --fp16 -o z.pth": "cast bare.pth --to-dtype float16 -o z.pth",
    "convert bare.pth --bf16": "edit bare.pth --to-dtype bfloat16 -o bare.new.pth",
    "strip-module bare.pth --bf16": "edit bare.pth --strip-module --to-dtype bfloat16 -o bare.new.pth",
    "keys bare.pth --grep fc": "keys bare.pth --include '*fc*'",
    "drop lightning.ckpt --keys optimizer_states": "drop lightning.ckpt optimizer_states -o lightning.new.ckpt",
    "set lightning.ckpt --epoch 0": "set lightning.ckpt epoch=0 -o lightning.new.ckpt",
    "set lightning.ckpt --global-step=0 -o z.pth": "set lightning.ckpt global_step=0 -o z.pth",
    "set lightning.ckpt epoch=0 --drop loops": ("edit lightning.ckpt --set epoch=0 --drop loops -o lightning.new.ckpt"),
    "drop lightning.ckpt loops optimizer_states -o z.pth --strip-module": (
        "edit lightning.ckpt --drop loops --drop optimizer_states -o z.pth --strip-module"
    ),
    "remap bare.pth --to cpu --strip-module -o z.pth": "edit bare.pth --to cpu -o z.pth --strip-module",
    "drop optimizer_states lightning.ckpt": "drop lightning.ckpt optimizer_states -o lightning.new.ckpt",
    "merge bare.pth whole.pth third.pth": "edit bare.pth --merge whole.pth --merge third.pth -o bare.new.pth",
    "keys bare.pth fc": "keys bare.pth --include '*fc*'",
    "stats bare.pth fc.weight 'fc.b*' --no-fold": ("stats bare.pth --no-fold --include fc.weight --include 'fc.b*'"),
    "keys training.pth optimizer": "keys training.pth --all --include 'optimizer.*'",
    "keys training.pth optimizer fc.bias": "keys training.pth --all --include 'optimizer.*' --include fc.bias",
    "stats training.pth exp_avg": "stats training.pth --all --include exp_avg",
    "keys training.pth model_ema": "keys training.pth --key model_ema",
    "stats training.pth model.fc.weight": "stats training.pth --include model.fc.weight",
    "hash training.pth optimizer": "hash training.pth --include 'optimizer.*'",
    "cast training.pth --to-dtype bf16 model_ema -o z.pth": (
        "cast training.pth --to-dtype bf16 -o z.pth --key model_ema"
    ),
    "drop training.pth --include optimizer -o z.pth": "drop training.pth optimizer -o z.pth",
    "get training.pth --key epoch": "get training.pth epoch",
    "inspect bare.pth --map_location cpu": "inspect bare.pth --map-location cpu",
    "keys training.pth epoch": "get training.pth epoch",
    "redact bare.pth -o z.pth": "redact bare.pth -o z.pth --redact all",
    "inspect training.pth optimizer": "get training.pth optimizer",
    "validate training.pth optimizer": "get training.pth optimizer",
    "scan training.pth exp_avg": "keys training.pth --include exp_avg --all",
    "hepl": "--help",
    "versoin": "--version",
    "hepl drop": "drop --help",
    "help strip": "strip-module --help",
    "strip": "strip-module --help",
    "strip --help": "strip-module --help",
    "--vresion": "--version",
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


@pytest.mark.parametrize("option", ["-v", "--no-color"])
def test_options_before_the_command_change_no_suggestion(option: str, folder: Path) -> None:
    for typed in ("strip-module bare.pth nothing", "slim bare.pth fc.bias", "drop bare.pth --pattern fc.bias -o z.pth"):
        plain = say(*shlex.split(typed))
        assert say(option, *shlex.split(typed)).err == plain.err


@pytest.mark.parametrize(("typed", "meant"), TYPED.items(), ids=TYPED)
def test_the_command_that_was_meant(typed: str, meant: str, folder: Path) -> None:
    said = say(*shlex.split(typed))
    assert said.code == 2 and not said.out
    assert said.err.endswith(f"\n  -> ckptool {meant}\n")
    assert "Did you mean" not in said.err
    again = say(*shlex.split(meant))
    assert again.code == 0, again.all


@pytest.mark.parametrize(
    "typed",
    [
        "nothing",
        "nothing bare.pth",
        "keys bare.pth --xyzzy",
        "inspect",
        "keys bare.pth --sort xyzzy",
        "-x",
        "strip -x y",
        "stats bare.pth --nan",
        "keys missing.pth bare.pth --long",
        "diff bare.pth",
        "diff missing.pth",
    ],
)
def test_nothing_is_made_up(typed: str, folder: Path) -> None:
    said = say(*shlex.split(typed))
    assert said.code == 2
    assert "->" not in said.err and "Did you mean" not in said.err


def test_a_missing_file_is_named_in_the_form_of_the_command(folder: Path) -> None:
    assert say("diff", "bare.pth").err.endswith("\n  the form is: ckptool diff bare.pth B\n")


@pytest.mark.parametrize(
    ("typed", "says", "meant"),
    [
        ("inspect bare", "is it 'bare.pth'?", "inspect bare.pth"),
        ("keys bare.safetensors", "is it 'bare.pth'?", "keys bare.pth"),
        ("keys checkpoint.pth", "is it 'checkpoint.pth.tar'?", "keys checkpoint.pth.tar"),
        ("strip-module checkpoint.pth -o z.pth", "no such file", "strip-module checkpoint.pth.tar -o z.pth"),
        ("diff bare.pth checkpoint.pth", "no such file", "diff bare.pth checkpoint.pth.tar"),
        ("add-module bare.pth -o bare.pth", "undo takes back", "add-module bare.pth --in-place"),
        ("cast bare.pth --to-dtype bf16 -o bare.pth --force", "output is the input", "-o bare.new.pth"),
        ("drop lightning.ckpt optimizer_state", "did you mean 'optimizer_states'?", "-o lightning.new.ckpt"),
        ("convert lightning.ckpt -o made.onnx", "means no format", "convert lightning.ckpt -o made.safetensors"),
        ("drop lightning.ckpt optimizer_states,epoch", "separate", "optimizer_states epoch -o lightning.new.ckpt"),
        ("keep lightning.ckpt state_dict,epoch -o z.pth", "separate", "keep lightning.ckpt state_dict epoch -o z.pth"),
        ("edit lightning.ckpt --drop loops,epoch -o z.pth", "separate", "--drop loops --drop epoch -o z.pth"),
        ("get epoch lightning.ckpt", "no such file", "get lightning.ckpt epoch"),
        ("drop epoch lightning.ckpt -o z.pth", "no such file", "drop lightning.ckpt epoch -o z.pth"),
        ("unset lightning.ckpt optimizer_states,epoch", "separate", "unset lightning.ckpt optimizer_states epoch -o"),
        ("convert bare.pth -o whole.pth", "output exists", "convert bare.pth -o whole.pth --force"),
        ("rename bare.pth --rename s/fc/head/", "not OLD=NEW", "--rename-regex s/fc/head/ -o bare.new.pth"),
        ("rename bare.pth --rename fc=head", "'fc.*'", "--rename 'fc.*=head.*' -o bare.new.pth"),
        ("rename bare.pth fc head -o z.pth", "'fc.*'", "rename bare.pth -o z.pth --rename 'fc.*=head.*'"),
        ("rename bare.pth --rename x.fc.*=x.head.*", "'fc.*'", "--rename 'fc.*=head.*' -o bare.new.pth"),
        ("keys training.pth --key optimizer", "all tensors in it", "keys training.pth --key optimizer --all"),
        ("stats training.pth --key optimizer", "all tensors in it", "stats training.pth --key optimizer --all"),
        ("merge bare.pth 'who*e.pth' -o z.pth", "expands a pattern", "merge bare.pth whole.pth -o z.pth"),
        ("convert module.pt -o z.safetensors", "a pickled module", "--as-state-dict --to cpu --to-format safetensors"),
        ("convert script.pt -o z.pth", "the program", "convert script.pt -o z.pth --allow-loss entries"),
        ("convert outer.zip -o z.safetensors", "that holds", "convert 'outer.zip!policy.pth' -o z.safetensors"),
        ("rename bare.pth fc.wieght=head.weight", "did you mean 'fc.weight'?", "-o bare.new.pth"),
    ],
)
def test_a_refusal_leads_to_the_command_that_was_meant(typed: str, says: str, meant: str, folder: Path) -> None:
    shutil.copy("bare.pth", "checkpoint.pth.tar")
    shutil.copy(FIXTURES / "whole_model.pth", "module.pt")
    shutil.copy(FIXTURES / "torchscript.pt", "script.pt")
    with zipfile.ZipFile("outer.zip", "w") as archive:
        archive.write("bare.pth", "policy.pth")
        archive.writestr("version.txt", "1")
    said = say(*shlex.split(typed))
    step = said.err.rpartition("  -> ckptool ")[2].rstrip("\n")
    assert said.code > 1 and says in said.err and meant in step, said.err
    again = say(*shlex.split(step))
    assert again.code in (0, 1), again.all


@pytest.mark.parametrize(
    "typed",
    [
        "get training.pth ema",
        "extract training.pth ema -o z.pth",
        "drop training.pth ema -o z.pth",
        "keep training.pth ema -o z.pth",
        "unset training.pth ema -o z.pth",
        "edit training.pth --extract ema -o z.pth",
        "merge bare.pth training.pth --entry ema -o z.pth",
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
    if "  -> " in said.err:
        again = say(*shlex.split(said.err.rpartition("  -> ckptool ")[2]))
        assert again.code in (0, 1), again.all
    else:
        assert "did you mean 'model_ema'?" in said.all


@pytest.mark.parametrize("typed", ["epoc=4", "Epoch=4"])
def test_an_entry_with_a_similar_name_is_named(typed: str, folder: Path) -> None:
    said = say("set", "training.pth", typed, "-o", "z.pth")
    assert said.code == 0 and "'epoch' is another entry; to set that one: ckptool set training.pth epoch=4" in said.out


def test_a_file_is_not_compared_with_itself(folder: Path) -> None:
    said = say("diff", "bare.pth", "bare2.pth")
    assert said.code == 3 and "bare.pth bare.pth" not in said.err, said.err


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


@pytest.mark.parametrize(
    "typed", ["strip-module model.gguf", "show model.gguf", "convert tensor.pt", "sanitize array.npy"]
)
def test_no_command_is_printed_that_the_file_cannot_have_done(typed: str, folder: Path) -> None:
    shutil.copy(FIXTURES / typed.split()[1], folder)
    said = say(*typed.split())
    assert said.code == 2 and f"ckptool: {typed.split()[1]}: " in said.err
    for line in said.err.splitlines():
        assert not line.startswith("  -> ") or say(*shlex.split(line)[2:]).code == 0


def test_what_a_correction_says_does_not_repeat_itself(folder: Path) -> None:
    """Every suggestion is tried, and what it would say is not suggested again."""
    said = say("drop", "lightning.ckpt", "fc.weight", "fc.bias", "-o", "z.pth")
    assert said.err.count("did you mean") <= 1 and said.err.count("  -> ") == 1


def test_an_unknown_key_of_a_policy_is_corrected(folder: Path) -> None:
    Path("p.toml").write_text('devices = ["cpu"]\n')
    assert "did you mean 'device'?" in say("validate", "bare.pth", "--policy", "p.toml").err
    Path("p.toml").write_text("max-byte = 3\n")
    assert "did you mean 'max-bytes'?" in say("validate", "bare.pth", "--policy", "p.toml").err


def test_a_correction_leaves_the_help_as_it_is() -> None:
    """click keeps the names of the help option that a command is asked for first: so in a process of its own."""
    code = "from ckptool.cli.main import run; run(['strip', 'a.pth']); run(['strip-module', '--help'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "  -h, --help  " in said.stdout


def test_the_words_for_commands_are_no_commands_and_mean_one_each() -> None:
    others = [word for words in synonyms.COMMANDS.values() for word in words.split()]
    assert len(others) == len(set(others))
    assert not {*others} & {*COMMANDS}
    assert {*synonyms.COMMANDS} <= {*COMMANDS}


def test_the_words_for_options_lead_to_options() -> None:
    have = {"--help"}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        have |= {option for param in command.params for option in param.opts}
    assert {option for _, meant in synonyms.OPTIONS for option in meant} <= have


@pytest.mark.parametrize("kind", ["deepspeed", "shards"])
def test_parts_that_are_to_be_one_file_lead_to_their_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "deepspeed":
        shutil.copytree(FIXTURES / "ranks" / "zero3_bf16" / "global_step3", tmp_path / "in")
    else:
        options = ["--to-format", "safetensors", "--max-shard-size", "80"]
        assert say("convert", FIXTURES / "model.safetensors", "-o", tmp_path / "in", *options).code == 0
    monkeypatch.chdir(tmp_path / "in")
    parts = sorted(path.name for path in Path().iterdir() if path.suffix in (".pt", ".safetensors"))
    assert len(parts) > 1
    said = say("convert", *parts, "-o", "../whole.pth")
    assert said.code == 2 and said.err.endswith("\n  -> ckptool convert . -o ../whole.pth\n"), said.err
    assert say("convert", ".", "-o", "../whole.pth").code == 0


@pytest.mark.parametrize("command", ["keys", "stats"])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lightning.ckpt --include 'backbone.*'", "--include 'model.backbone.*'"),
        ("lightning.ckpt --include '*.exp_avg'", "--include '*.exp_avg' --all"),
    ],
)
def test_patterns_without_a_match_lead_to_patterns_that_match(
    command: str, typed: str, meant: str, folder: Path
) -> None:
    weights, state = torch.zeros(2), {"state": {0: {"exp_avg": torch.zeros(2)}}}
    torch.save({"state_dict": {"model.backbone.0.weight": weights}, "optimizer_states": [state]}, "lightning.ckpt")
    said = say(command, *shlex.split(typed))
    assert said.code == 0 and said.out.endswith("no tensor matches; the file has 2\n"), said.out
    step = f"ckptool {command} lightning.ckpt {meant}"
    assert said.err.endswith(f"\n  -> {step}\n"), said.err
    again = say(*shlex.split(step)[1:])
    assert again.code == 0 and not again.err and "no tensor" not in again.out


@pytest.mark.parametrize("command", ["diff", "match", "merge", "report"])
def test_a_missing_file_is_not_swapped_with_another_file(command: str, folder: Path) -> None:
    output = [] if command in ("diff", "match") else ["-o", "z.html"]
    said = say(command, "absent.xyz", "bare.pth", *output)
    assert said.code > 1 and "bare.pth absent.xyz" not in said.err


@pytest.mark.parametrize("first", ["--to", "--rename", "--drop", "--cast", "--strip-module"])
@pytest.mark.parametrize("second", ["--to", "--to-dtype", "--strip-module", "-o", "--nosuch"])
@pytest.mark.parametrize("command", ["slim", "drop", "strip-module", "keys"])
def test_options_without_their_values_are_no_bug(command: str, first: str, second: str, folder: Path) -> None:
    said = say(command, "bare.pth", first, second, "cpu")
    assert said.code in (0, 1, 2, 4) and "a bug in ckptool" not in said.err
