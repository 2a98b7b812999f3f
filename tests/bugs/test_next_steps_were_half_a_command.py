"""What ``convert`` and edits said to type next was options alone, or ``--key a and b``: it is the whole command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES, ROOT

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
    "edit lightning.ckpt --extract state_dict --to cpu -o OUT/a.safetensors",
]


@pytest.mark.parametrize("line", TYPED)
def test_it_can_be_typed_as_it_is_printed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    said = say(*line.replace("OUT", str(tmp_path)).split())
    assert said.code in (2, 4), said.all
    step = said.err.rpartition("-> ")[2].rstrip("\n")
    for command in step[step.index("ckptool ") :].split(" && "):
        again = say(*shlex.split(command)[1:])
        assert again.code == 0, again.all
    assert list(tmp_path.iterdir())


def test_of_several_inputs_no_command_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    said = say("convert", "tied.pth", "bare.pth", "--to-format", "safetensors", "--out-dir", tmp_path)
    assert said.code == 4
    assert "-> if that may be lost (--tied clone copies them): --tied keep-first\n" in said.err


def test_odd_names_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-my model.pth").write_bytes((FIXTURES / "tied.pth").read_bytes())
    said = say("convert", "-o", "it's.safetensors", "--", "-my model.pth")
    step = said.err.rpartition("copies them): ")[2].rstrip("\n")
    words = [sys.executable, "-m", "ckptool", *shlex.split(step)[1:]]
    path = str(ROOT)
    subprocess.run(words, check=True, env={"PYTHONPATH": path}, capture_output=True)
    assert (tmp_path / "it's.safetensors").is_file()
