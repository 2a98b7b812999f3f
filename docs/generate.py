"""What README.md is generated from: real runs of the commands, and tables out of the code."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import tempfile
from pathlib import Path

from tabulate import tabulate

from ckptool import dtypes
from ckptool.cli import main
from ckptool.formats import FORMATS
from ckptool.prefixes import WRAPPERS

ROOT = Path(__file__).resolve().parent.parent


def transcript(*commands: str, fixture: str = "ddp4_training.pth", name: str = "checkpoint.pth") -> str:
    """Run commands in an empty folder that holds one fixture under ``name``; what they print, as a code block."""
    lines = []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path(name).write_bytes((ROOT / "fixtures" / fixture).read_bytes())
            for command in commands:
                lines.append(f"$ {command}")
                lines.append(_output(shlex.split(command)[1:]).rstrip())
        finally:
            os.chdir(here)
    return "```console\n" + "\n".join(line for line in lines if line) + "\n```"


def _output(arguments: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main.run(arguments)
    return out.getvalue()


def help_of(command: str) -> str:
    """The help text of a command."""
    return transcript(f"ckptool {command} --help")


def commands() -> str:
    """The table of commands."""
    rows = [(f"`ckptool {name}`", text) for name, (_, _, text) in main.COMMANDS.items()]
    return tabulate(rows, headers=("command", "what it does"), tablefmt="github")


def exit_codes() -> str:
    """The table of exit codes."""
    return tabulate(
        [(f"`{code}`", text) for code, text in main.EXIT_CODES], headers=("code", "meaning"), tablefmt="github"
    )


def formats() -> str:
    """The table of formats."""
    rows = [(f"`{known.name}`", known.words) for known in FORMATS]
    return tabulate(rows, headers=("format", "what it is"), tablefmt="github")


def wrappers() -> str:
    """The table of wrapper segments."""
    rows = [(f"`{segment}.`", who) for segment, who in WRAPPERS.items()]
    return tabulate(rows, headers=("segment", "who puts it there"), tablefmt="github")


def dtype_names() -> str:
    """Every dtype that is read, in a sentence."""
    return ", ".join(f"`{dtype.name}`" for dtype in dtypes.DTYPES)
