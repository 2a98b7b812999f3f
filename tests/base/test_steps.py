"""Next steps: what is printed as a command can be typed, whatever the name of the file."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool.base.errors import RefusedError
from ckptool.base.steps import (
    Command,
    NextStep,
    Step,
    as_step,
    command,
    option,
    salvage_step,
    suggested_output,
    undo_step,
)


@pytest.mark.parametrize(
    "name", ["-x.pth", "--all", "a\nb.pth", "a'b.pth", "\x1b[31m", "tab\there", "it's\n", "\udcff.pth"]
)
@pytest.mark.parametrize("step", [undo_step, salvage_step])
def test_a_shell_reads_the_name_in_a_next_step(step: Callable[[str], NextStep], name: str) -> None:
    words = str(step(name).commands[0]).partition(" -o ")[0].split(" ", 2)[2]
    assert words.isprintable()
    read = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, check=True).stdout
    assert read == os.fsencode(f"./{name}" if name.startswith("-") else name)


def test_a_step_is_data_and_text() -> None:
    step = "make it plain: " + command("remap", "a b.pth", to="cpu", output="-c.pth") + ", then load it"
    assert str(step) == "make it plain: ckptool remap 'a b.pth' --to cpu -o ./-c.pth, then load it"
    (remap,) = step.commands
    assert remap == Command("remap", ("a b.pth",), (Step("to", "cpu"),), "-c.pth")
    error = pickle.loads(pickle.dumps(RefusedError("no", next=step)))
    assert (error.next, error.step) == (str(step), step)
    assert not RefusedError("no").step


def test_python_gets_arguments_and_a_shell_gets_options() -> None:
    step = as_step(f"replace it with `--force`, or allow {option('allow_loss', 'a b')} with `-o=`")
    assert str(step) == "replace it with force=True, or allow allow_loss='a b' with ckptool.save"
    assert step.advice == "replace it with --force, or allow --allow-loss 'a b' with -o"
    both = as_step("allow it: `--key a` `--force`")
    assert (str(both), both.advice) == ("allow it: key='a', force=True", "allow it: --key a --force")
    (merge,) = command("merge", "x.pth", for_="inference", key="", include=["a", "b"], strict=True, slim=False).commands
    assert str(merge) == "ckptool merge x.pth --for inference --include a --include b --strict"


@pytest.mark.parametrize("path", [".", "./", "..", "../.", "inner/..", "../../run/inner/."])
def test_an_output_is_suggested_beside_the_folder_and_under_its_name(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run/inner/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run/inner")
    there = os.path.realpath(path)
    assert os.path.realpath(suggested_output(path, "cpu", ".pth")) == f"{there}.cpu.pth"
