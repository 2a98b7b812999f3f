"""Running a command in this process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

from ckptool.cli.main import run

__all__ = ["Said", "say"]


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
