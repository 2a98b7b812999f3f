"""The explain command: the meaning of an error message, and the command that helps."""

from __future__ import annotations

from textwrap import indent, wrap
from typing import Final

import click

from ..base.lazy import regex
from ..base.steps import STDIN, command, is_remote
from ..files.archives import open_any
from ..files.folders import folder_at
from ..reports.explaining.explanation import ExplainReport, explain_log
from .help import GroupedCommand
from .messages import is_checkpoint, is_log, is_waited_for, piped, read_message
from .options import InputPath, format_option
from .render import clean, emit, emit_json, say, step_lines

_WIDTH: Final = 80
#: The most bytes read from a log, from its end: a log may be long, and its last lines hold the error.
_MOST: Final = 1 << 20
#: A word that can only be the name of a file, so that a missing file is reported.
_FILE_NAME: Final = regex(r"\S+\.(?:txt|log|out|pth|pt|ckpt|bin|safetensors)")
_HOW: Final = (
    "Give it in quotes, in a log file, or through a pipe. Errors go to stderr, so pipe that, too:"
    " python train.py 2>&1 | ckptool explain"
)

EPILOG = """\b
Examples:
  python train.py 2>&1 | ckptool explain model.pth
  ckptool explain train.log model.pth
  ckptool explain "failed finding central directory" model.pth
  ckptool explain "invalid load key, 'v'."
  ckptool explain model.pth
"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("text", metavar="[MESSAGE]", type=InputPath(), required=False, default="")
@click.argument("path", metavar="[FILE]", type=InputPath(), required=False, default="")
@format_option()
def explain(text: str, path: str, style: str) -> int:
    """Explain an error of PyTorch, safetensors or transformers: why it occurs, and the command that helps.

    MESSAGE is the text of the error, a log file, or - for standard input. Without MESSAGE, a pipe into ckptool is read;
    in a loop that reads a list from it, add < /dev/null.
    FILE is the checkpoint, a file or a folder. It is opened, and the answer is about its own keys and tensors. If the
    message is unknown or missing, the answer is what inspect finds in FILE.
    Exit 1: the message is unknown, or it is missing and inspect finds nothing in FILE.
    """
    text, log, path = _read(text, path)
    report = explain_log(text, path, log)
    if style == "table":
        emit("\n".join(_lines(report)))
    else:
        emit_json([report], style, False)
    return 0 if report["name"] or report["cause"] == "file" else 1


def _read(text: str, path: str) -> tuple[str, str, str]:
    """Return the message, the log that it was read from or "", and the path of the checkpoint or ""."""
    if is_checkpoint(text):
        if is_checkpoint(path):
            if is_remote(text) and folder_at(text) is None:
                open_any(text).close()  # raises an error if it does not exist
            step = command("explain", path)
            raise click.UsageError(f"{clean(text)} and {clean(path)} are checkpoints, and explain reads one: {step}")
        text, path = path, text
    unasked = not text and piped()
    text = STDIN if unasked else text
    log = text if text == STDIN or is_log(text) or _FILE_NAME.fullmatch(text) else ""
    if path and unasked and is_waited_for():
        say("reading the message from standard input; < /dev/null leaves it out")
    text = read_message(log, _MOST) if log else text
    if not path and not text.strip():
        where = "" if not log else " on standard input" if log == STDIN else f" in {clean(log)}"
        raise click.UsageError(f"There is no message{where}. {_HOW}")
    return text, log, path


def _lines(report: ExplainReport) -> list[str]:
    lines = [*wrap(report["message"], _WIDTH), ""] if report["message"] else []
    lines += wrap(report["why"], _WIDTH)
    lines += ["", *step_lines(report["next"])] if report["next"] else []
    title = "In Python, with the file downloaded:" if is_remote(report["path"]) else "In Python:"
    return [*lines, "", title, indent(report["python"], "    ")] if report["python"] else lines
