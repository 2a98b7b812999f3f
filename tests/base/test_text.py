"""The next steps for a file whose name begins with a dash, or holds a line break, could not be typed as printed."""

from __future__ import annotations

import os
import subprocess

import pytest

from ckptool.base.text import salvage_step, undo_step


@pytest.mark.parametrize(
    "name", ["-x.pth", "--all", "a\nb.pth", "a'b.pth", "\x1b[31m", "tab\there", "it's\n", "\udcff.pth"]
)
@pytest.mark.parametrize("step", [undo_step, salvage_step])
def test_a_shell_reads_the_name(step: object, name: str) -> None:
    command = "ckptool" + step(name).partition(" -o ")[0].partition("ckptool")[2]  # type: ignore[operator]
    words = command.split(" ", 2)[2]
    assert words.isprintable()
    told = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, check=True).stdout
    assert told == os.fsencode(f"./{name}" if name.startswith("-") else name)
