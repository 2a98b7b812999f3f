"""Every command that inspect and validate print as the next step works: it is run, and what it writes is valid."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import CHECKPOINTS, FIXTURES, ROOT, by_name, corpus_files, needs_corpus

import ckptool
from ckptool.base.steps import suggested_output
from ckptool.cli.main import run

#: Damage that only ``validate`` sees, as it reads every byte: what ``inspect`` advises carries it on, and says nothing.
UNSEEN = ("zip_wrong_crc.pth",)
#: Of DCP, of Hugging Face in .bin, of DeepSpeed.
FOLDERS = (
    *("dcp4", "real/lightning_sharded", "real/megatron_core", "real/accelerate_bin", "real/lora_bin"),
    *("real/sentences", "real/zero3"),
)


def steps(text: str) -> list[str]:
    """The commands behind the arrows."""
    lines = (re.match(r"\s*-> .*?\b(ckptool .*)", line) for line in text.splitlines())
    return list(dict.fromkeys(found.group(1) for found in lines if found))


def check(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    (shutil.copytree if path.is_dir() else shutil.copy)(path, path.name)
    for command in (["inspect"], ["validate"], ["validate", "--weights-only"]):
        run([*command, path.name])
        told = capsys.readouterr()
        for step in steps(told.out + told.err):
            words = shlex.split(step)[1:]
            assert "OUT" not in words
            code = run(words)
            # Exit 1 of salvage: something was lost, and the rest is written.
            assert code == 0 or (words[0] == "salvage" and code == 1), (step, capsys.readouterr().err)
            if "-o" in words:
                out = Path(words[words.index("-o") + 1])
                assert run(["validate", str(out)]) == 0, (step, capsys.readouterr().out)
                shutil.rmtree(out) if out.is_dir() else out.unlink()
            capsys.readouterr()


@pytest.mark.parametrize("item", [item for item in CHECKPOINTS if item.path.name not in UNSEEN], ids=by_name)
def test_on_fixtures(
    item: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(item.path, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["fastai_learner.pkl", "fastai_model.pth", "ppo_policy.pt", "lightning_one.ckpt"])
def test_on_files_of_frameworks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(FIXTURES / "real" / name, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", FOLDERS)
def test_on_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(FIXTURES / name, tmp_path, monkeypatch, capsys)


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_on_real_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(path, tmp_path, monkeypatch, capsys)


def test_sizes_that_differ_are_not_rounded_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.zeros(401)
    torch.save({"weight": whole[:400], "bias": torch.zeros(2)}, tmp_path / "a.pth")
    assert run(["inspect", str(tmp_path / "a.pth")]) == 0
    assert "uses 1,600 bytes of a storage of 1,604 bytes" in capsys.readouterr().out


def test_a_name_that_is_taken_is_not_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.weight": torch.zeros(2)}, "a.pth")
    for name in ("a.plain.pth", "a.plain.2.pth"):
        assert run(["inspect", "a.pth"]) == 0
        (step,) = steps(capsys.readouterr().out)
        assert shlex.split(step)[-1] == name
        assert run(shlex.split(step)[1:]) == 0
        capsys.readouterr()


def test_a_suggested_folder_keeps_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert suggested_output(f"{tmp_path}/v1.5", "plain") == f"{tmp_path}/v1.5.plain"
    assert suggested_output("outer.zip!run/a.pth.tar", "cpu") == "a.cpu.pth.tar"


# -- diff and match: what to do about a difference -------------------------------------------------------------


def test_the_same_in_another_container_has_a_next_step(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    source = FIXTURES / "model.safetensors"
    assert say("convert", source, "-o", out).code == 0
    said = say("diff", source, out)
    assert said.code == 1
    step = said.out.rpartition("-> the rest is the same: ckptool ")[2]
    assert say(*shlex.split(step)).code == 0


def test_other_values_have_no_next_step(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    assert say("cast", FIXTURES / "bare.pth", "--dtype", "float16", "-o", out).code == 0
    said = say("diff", FIXTURES / "bare.pth", out)
    assert said.code == 1
    assert "the rest is the same" not in said.out


def test_diff_of_other_names_prints_a_whole_command(tmp_path: Path) -> None:
    out = tmp_path / "w.pth"
    assert say("wrap", FIXTURES / "bare.pth", "model", "-o", out).code == 0
    said = say("diff", FIXTURES / "bare.pth", out)
    step = next(line for line in said.out.splitlines() if "-> names agree: ckptool " in line)
    assert say(*shlex.split(step.partition(": ckptool ")[2])).code == 0


def test_a_tied_name_comes_with_its_tensor(tmp_path: Path) -> None:
    tied = FIXTURES / "tied.pth"
    out = tmp_path / "a.safetensors"
    assert say("convert", tied, "-o", out, "--tied", "keep-first").code == 0
    with ckptool.open(out) as written:
        ((other, kept),) = [pair for pair in written.container.metadata.items() if pair[0] != "format"]
    said = say("match", out, tied)
    assert said.code == 1
    assert f"{other} is {kept} under another name: it loads with that where the model ties them" in said.out
    assert "would keep" not in said.out


def test_match_says_how_many_keys_keep_their_values(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    assert say("drop", FIXTURES / "bare.pth", "fc.bias", "-o", out).code == 0
    assert "; 1 key of the model would keep its values" in say("match", out, FIXTURES / "bare.pth").out


def test_a_mistyped_key_is_corrected_in_the_same_command(tmp_path: Path) -> None:
    out = tmp_path / "x.pth"
    said = say("extract", FIXTURES / "ddp4_training.pth", "statedict", "-o", out)
    assert said.code == 2
    assert said.err.endswith(f"-> ckptool extract {FIXTURES / 'ddp4_training.pth'} state_dict -o {out}\n")
    said = say("get", FIXTURES / "bare.pth", "fc.bais")
    assert said.err.endswith(f"is it 'fc.bias'?\n  -> ckptool get {FIXTURES / 'bare.pth'} fc.bias\n")


# -- a next step is a whole command ----------------------------------------------------------------------------


#: What was typed, with OUT for the output; fixtures have their names.
TYPED = [
    "convert tied.pth -o OUT/a.safetensors",
    "convert wrapped.pth -o OUT/a.safetensors",
    "convert gan.pth -o OUT/a.safetensors --allow-loss entries --allow-loss devices",
    "convert bare.pth -o OUT/folder",
    "convert bare.pth -o OUT/model-1.5",
    "convert bare.pth -o OUT/a.st",
    "convert bare.pth --output=OUT/a.st --tied=clone",
    "convert bare.pth -o OUT/a.safetensors --to-format torch",
    "convert bare.pth -o OUT/a.safetensors --max-shard-size 80",
    "edit lightning.ckpt --to cpu -o OUT/a.safetensors",
    "strip-module gan.pth -o OUT/a.safetensors",
    "convert gan.pth --key netG -o OUT/a.pth",
    "set model.safetensors epoch=3 -o OUT/a.safetensors",
]


@pytest.mark.parametrize("line", TYPED)
def test_the_next_step_of_an_edit_can_be_typed_as_printed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FIXTURES)
    said = say(*line.replace("OUT", str(tmp_path)).split())
    assert said.code in (2, 4), said.all
    step = said.err.rpartition("-> ")[2].rstrip("\n")
    for command in step[step.index("ckptool ") :].split(" && "):
        again = say(*shlex.split(command)[1:])
        assert again.code == 0, again.all
    assert list(tmp_path.iterdir())


def test_no_command_is_made_up_for_several_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    said = say("convert", "tied.pth", "bare.pth", "--to-format", "safetensors", "--out-dir", tmp_path)
    assert said.code == 4
    assert "-> if that may be lost (--tied clone copies them): --tied keep-first\n" in said.err


def test_odd_names_are_quoted_in_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-my model.pth").write_bytes((FIXTURES / "tied.pth").read_bytes())
    said = say("convert", "-o", "it's.safetensors", "--", "-my model.pth")
    step = said.err.rpartition("copies them): ")[2].rstrip("\n")
    words = [sys.executable, "-m", "ckptool", *shlex.split(step)[1:]]
    path = str(ROOT)
    subprocess.run(words, check=True, env={"PYTHONPATH": path}, capture_output=True)
    assert (tmp_path / "it's.safetensors").is_file()
