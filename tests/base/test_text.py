"""Text for the user: what is printed as a command can be typed, whatever the name of the file."""

from __future__ import annotations

import os
import subprocess

import pytest

from ckptool.base.text import salvage_step, undo_step


@pytest.mark.parametrize(
    "name", ["-x.pth", "--all", "a\nb.pth", "a'b.pth", "\x1b[31m", "tab\there", "it's\n", "\udcff.pth"]
)
@pytest.mark.parametrize("step", [undo_step, salvage_step])
def test_a_shell_reads_the_name_in_a_next_step(step: object, name: str) -> None:
    command = "ckptool" + step(name).partition(" -o ")[0].partition("ckptool")[2]  # type: ignore[operator]
    words = command.split(" ", 2)[2]
    assert words.isprintable()
    told = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, check=True).stdout
    assert told == os.fsencode(f"./{name}" if name.startswith("-") else name)
