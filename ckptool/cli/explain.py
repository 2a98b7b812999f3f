"""The explain command: the meaning of an error message, and the command that helps."""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import closing
from functools import partial
from textwrap import indent, wrap
from typing import Final

import click

from ..base.addresses import is_remote
from ..base.errors import CkptoolError
from ..base.lazy import regex
from ..base.steps import STDIN, command
from ..base.suffixes import CHECKPOINTS, PICKLES
from ..files.archives import exists, open_any
from ..files.folders import folder_at
from ..reports.explaining.explanation import ExplainReport, explain_log
from .help import GroupedCommand
from .options import InputPath, format_option
from .render import clean, emit_report, step_lines

#: Names of text files that are a checkpoint or a part of one.
_CHECKPOINTS: Final = (*CHECKPOINTS, *PICKLES, ".json")
#: Bytes that logs do not have, unlike pickles and archives. Escape codes of terminals are left.
_BINARY: Final = frozenset({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})
#: The byte order mark of UTF-16, in which PowerShell redirects output.
_UTF_16: Final = b"\xff\xfe"
_WIDTH: Final = 80
#: The most bytes read from a log, from its end: a log may be long, and its last lines hold the error.
_MOST: Final = 1 << 20
#: A word that can only be the name of a file, so that a missing file is reported.
_FILE_NAME: Final = regex(r"\S+\.(?:txt|log|out|pth|pt|ckpt|bin|safetensors)")
_HOW: Final = (
    "Give it in quotes, in a log file, or through a pipe. Errors go to stderr, so pipe that, too:"
    " python train.py 2>&1 | ckptool explain"
)


@click.command(cls=GroupedCommand)
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
    emit_report(report, partial(_lines, report), style)
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
    unasked = not text and _piped()
    text = STDIN if unasked else text
    log = text if text == STDIN or is_log(text) or _FILE_NAME.fullmatch(text) else ""
    text = read_message(log, _MOST) if log else text
    if not path and not text.strip():
        where = "" if not log else " on standard input" if log == STDIN else f" in {clean(log)}"
        raise click.UsageError(f"There is no message{where}. {_HOW}")
    return text, log, path


def _piped() -> bool:
    """Return whether standard input is a pipe, or a file that nobody has begun to read, as ``while read`` does."""
    try:
        mode, number = os.fstat(sys.stdin.fileno()).st_mode, sys.stdin.fileno()
        begun = stat.S_ISREG(mode) and os.lseek(number, 0, os.SEEK_CUR) > 0
    except (AttributeError, OSError):
        return False
    return not (stat.S_ISCHR(mode) or begun)


def is_log(path: str) -> bool:
    """Return whether a path leads to text: a log, or a pipe such as ``<(command)``."""
    if path == STDIN or (is_remote(path) and (" " in path or path.lower().endswith(_CHECKPOINTS))):
        return False  # a message may begin so
    try:
        if not (is_remote(path) or os.path.isfile(path)):
            return stat.S_ISFIFO(os.stat(path).st_mode)
        with closing(open_any(path)) as file:
            head = file.read(0, 4096)
    except (OSError, ValueError, CkptoolError):
        return False
    return not path.lower().endswith(_CHECKPOINTS) and (head.startswith(_UTF_16) or not _BINARY & {*head})


def is_checkpoint(path: str) -> bool:
    """Return whether a path leads to a file or folder that is not a log."""
    return exists(path) and not is_log(path) and not (is_remote(path) and " " in path)


def read_message(path: str, most: int) -> str:
    """Return the last ``most`` bytes of a log as text, where the error is; ``-`` is standard input."""
    data = b""
    if path == STDIN and sys.stdin is None:
        return ""  # it is closed
    if path == STDIN or (os.path.exists(path) and not os.path.isfile(path)):
        with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as stream:
            while more := stream.read(most):
                data = (data + more)[-most:]
    else:
        with closing(open_any(path)) as source:
            begin = max(source.size - most, 0)
            data = source.read(begin, source.size - begin)
    # Without its zero bytes, English in UTF-16 is UTF-8.
    return data.removeprefix(_UTF_16).replace(b"\0", b"").decode("utf-8-sig", "replace")


def _wrapped(text: str) -> list[str]:
    """Wrap a text, but no command in it."""
    kept = re.sub("'ckptool [^']*'", lambda command: command[0].replace(" ", "\xa0"), text)
    lines = wrap(kept, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _lines(report: ExplainReport) -> list[str]:
    lines = [*wrap(report["message"], _WIDTH), ""] if report["message"] else []
    lines += _wrapped(report["why"])
    lines += ["", *step_lines(report["next"])] if report["next"] else []
    title = "In Python, with the file downloaded:" if is_remote(report["path"]) else "In Python:"
    return [*lines, "", title, indent(report["python"], "    ")] if report["python"] else lines
