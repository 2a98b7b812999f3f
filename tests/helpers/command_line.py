"""Running a command, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from conftest import ROOT

from ckptool.cli.main import run

__all__ = ["Said", "has_next_step", "program", "say", "typed"]


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


def program(*arguments: str | Path, code: str = "", env: dict[str, str] | None = None, **how: Any) -> Said:
    """Run a command line in a process of its own, or ``code`` in its place; ``how`` is for ``subprocess.run``."""
    words = [sys.executable, *(["-c", code] if code else ["-m", "ckptool"]), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (env or {})
    texts: dict[str, Any] = {"capture_output": True, "text": True, "errors": "surrogateescape"}
    done = subprocess.run(words, env=environment, timeout=600, check=False, **texts, **how)
    return Said(done.returncode, done.stdout, done.stderr)


def has_next_step(said: Said) -> bool:
    """Return whether an error on stderr says what to do next: on a line of its own, or behind a semicolon."""
    return re.search(r"(?m)^ckptool: .*(; \w|\n *(\S.*\n *)*-> \S)", said.err) is not None


def typed(line: str, out: Path) -> int:
    """Run a printed command line as a shell would, with another output."""
    words = shlex.split(line)
    assert words[0] == "ckptool" and words[-2] == "-o"
    return run([*words[1:-1], str(out), "--force", "-q"])
