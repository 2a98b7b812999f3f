"""Next steps: what is printed as a command can be typed, whatever the name of the file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool.base.steps import NextStep, salvage_step, suggested_output, undo_step


@pytest.mark.parametrize(
    "name", ["-x.pth", "--all", "a\nb.pth", "a'b.pth", "\x1b[31m", "tab\there", "it's\n", "\udcff.pth"]
)
@pytest.mark.parametrize("step", [undo_step, salvage_step])
def test_a_shell_reads_the_name_in_a_next_step(step: Callable[[str], NextStep], name: str) -> None:
    words = str(step(name).commands[0]).partition(" -o ")[0].split(" ", 2)[2]
    assert words.isprintable()
    read = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, check=True).stdout
    assert read == os.fsencode(f"./{name}" if name.startswith("-") else name)


@pytest.mark.parametrize("path", [".", "./", "..", "../.", "inner/..", "../../run/inner/."])
def test_an_output_is_suggested_beside_the_folder_and_under_its_name(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run/inner/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run/inner")
    there = os.path.realpath(path)
    assert os.path.realpath(suggested_output(path, "cpu", ".pth")) == f"{there}.cpu.pth"
