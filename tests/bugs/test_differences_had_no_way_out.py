"""``diff`` and ``match`` said "they differ" of the same tensors in another format, and of tied weights, and no more."""

from __future__ import annotations

import shlex
from pathlib import Path

from command_line import say
from conftest import FIXTURES

import ckptool


def test_the_same_in_another_container_has_a_next_step(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    source = FIXTURES / "model.safetensors"
    assert say("convert", source, "-o", out).code == 0
    said = say("diff", source, out)
    assert said.code == 1
    step = said.out.rpartition("-> the rest is the same: ckptool ")[2]
    assert say(*shlex.split(step)).code == 0


def test_other_values_have_none(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    assert say("cast", FIXTURES / "bare.pth", "--dtype", "float16", "-o", out).code == 0
    said = say("diff", FIXTURES / "bare.pth", out)
    assert said.code == 1
    assert "the rest is the same" not in said.out


def test_names_that_agree_are_a_whole_command(tmp_path: Path) -> None:
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


def test_one_key_keeps_its_values(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    assert say("drop", FIXTURES / "bare.pth", "fc.bias", "-o", out).code == 0
    assert "; 1 key of the model would keep its values" in say("match", out, FIXTURES / "bare.pth").out


def test_a_mistyped_key_is_mended_in_the_same_command(tmp_path: Path) -> None:
    out = tmp_path / "x.pth"
    said = say("extract", FIXTURES / "ddp4_training.pth", "statedict", "-o", out)
    assert said.code == 2
    assert said.err.endswith(f"-> ckptool extract {FIXTURES / 'ddp4_training.pth'} state_dict -o {out}\n")
    said = say("get", FIXTURES / "bare.pth", "fc.bais")
    assert said.err.endswith(f"is it 'fc.bias'?\n  -> ckptool get {FIXTURES / 'bare.pth'} fc.bias\n")
