"""The explain command: the meaning of an error message, and the command that helps."""

from __future__ import annotations

import os
import sys
from textwrap import indent, wrap
from typing import Final

import click

import ckptool

from ..base.steps import STDIN, argument, command
from ..reports.explaining.explanation import ExplainReport
from .help import GroupedCommand
from .options import InputPath, format_option
from .render import clean, emit, emit_json, say, step_lines

_WIDTH: Final = 80
#: The most characters read from a text, from its end: a log may be long, and its last lines hold the error.
_MOST: Final = 1 << 20

EPILOG = """\b
Examples:
  ckptool explain "invalid load key, 'v'."
  ckptool explain "failed finding central directory" model.pth
  python train.py 2>&1 | ckptool explain - model.pth
"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("text", metavar="MESSAGE")
@click.argument("path", metavar="[PATH]", type=InputPath(), required=False, default="")
@format_option()
def explain(text: str, path: str, style: str) -> int:
    """Explain an error of PyTorch, safetensors or transformers: why it comes, and the command that helps.

    MESSAGE is its text, or - for a traceback or a log on standard input. With PATH the file is opened, and the answer
    is about its own keys and tensors; a message that is not known is answered with what inspect finds in it.
    Exit 1: the message is not known, and the file is fine or was not named.
    """
    if text != STDIN and os.path.isfile(text):
        step = command("explain", STDIN, *([path] if path else []))
        say(f"{clean(text)} is a file, not a message; for its text: {step} < {argument(text)}")
        return 1
    report = ckptool.explain(sys.stdin.read()[-_MOST:] if text == STDIN else text, path)
    if style == "table":
        emit("\n".join(_lines(report)))
    else:
        emit_json([report], style, False)
    return 0 if report["name"] or report["cause"] == "file" else 1


def _lines(report: ExplainReport) -> list[str]:
    lines = [*wrap(report["message"], _WIDTH), "", *wrap(report["why"], _WIDTH)]
    lines += ["", *step_lines(report["next"])] if report["next"] else []
    return [*lines, "", "In Python:", indent(report["python"], "    ")] if report["python"] else lines
