"""Running a command in this process."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

from ckptool.cli.main import run

__all__ = ["Said", "has_next_step", "say"]


class Said(NamedTuple):
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


def say(*arguments: str | Path) -> Said:
    """Run a command line, without the name of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Said(code, out.getvalue(), err.getvalue())


def has_next_step(said: Said) -> bool:
    """Return whether an error on stderr says what to do next: on a line of its own, or behind a semicolon."""
    return re.search(r"(?m)^ckptool: .*(; \w|\n *(\S.*\n *)*-> \S)", said.err) is not None
