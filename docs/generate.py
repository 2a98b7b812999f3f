"""Sources of the generated parts of README.md and docs/: real runs of the commands, and tables from the code."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from configparser import ConfigParser
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap

import click
from tabulate import tabulate

from ckptool import __version__
from ckptool.base import dtypes
from ckptool.base.prefixes import WRAPPERS
from ckptool.cli import main
from ckptool.formats import FOLDERS, FORMATS
from ckptool.formats.zip_kinds import ZIPS
from ckptool.reports.explaining.explanation import explanation
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS, KnownError

ROOT = Path(__file__).resolve().parent.parent

_CONFIG = ConfigParser()
_CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
#: The address of the repository.
URL = _CONFIG["metadata"]["url"]

#: The policy file of the examples.
POLICY = """\
layout = "bare"
prefix = "none"
device = ["cpu"]
dtype = ["float32", "bfloat16"]
max-bytes = "2GB"
weights-only = true
"""


def transcript(*commands: str, fixture: str = "ddp4_training.pth", name: str = "checkpoint.pth") -> str:
    """Run commands in a folder with one fixture, as ``name``, and the policy; what they print, as a code block."""
    lines = []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path(name).write_bytes((ROOT / "fixtures" / "files" / fixture).read_bytes())
            Path("ckptool.toml").write_text(POLICY, encoding="utf-8")
            os.environ["SOURCE_DATE_EPOCH"] = "1790000000"  # the time in the history of a file
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
    rows = [
        (title.lower() if number == 0 else "", f"`ckptool {name}`", text)
        for title, group in main.GROUPS.items()
        for number, (name, (_, _, text)) in enumerate(group.items())
    ]
    return tabulate(rows, headers=("", "command", "what it does"), tablefmt="github")


def options() -> str:
    """The table of options: what each means, and the commands that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in main.COMMANDS:
        command = main.cli.get_command(click.Context(main.cli), name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option):
                rows.setdefault((", ".join((*option.opts, *option.secondary_opts)), option.help or ""), []).append(name)
    by_name = sorted(rows.items(), key=lambda row: row[0][0].rpartition("--")[2])
    lines = []
    for (names, text), commands in by_name:
        # A cell that is too wide for a screen goes on in the next row.
        cells = wrap(text, 50), wrap(", ".join(commands), 40)
        for number, row in enumerate(zip_longest(*cells, fillvalue="")):
            lines.append((f"`{names}`" if number == 0 else "", *row))
    return tabulate(lines, headers=("option", "what it means", "commands"), tablefmt="github")


def exit_codes() -> str:
    """The table of exit codes."""
    return tabulate(
        [(f"`{code}`", text) for code, text in main.EXIT_CODES], headers=("code", "meaning"), tablefmt="github"
    )


def formats() -> str:
    """The table of formats."""
    rows = [(f"`{known.name}`", known.words) for kinds in (FORMATS, ZIPS, FOLDERS) for known in kinds]
    return tabulate(rows, headers=("format", "what it is"), tablefmt="github")


def wrappers() -> str:
    """The table of wrapper segments."""
    rows = [(f"`{segment}.`", who) for segment, who in WRAPPERS.items()]
    return tabulate(rows, headers=("segment", "who puts it there"), tablefmt="github")


def dtype_names() -> str:
    """Every dtype that is read, in a sentence."""
    return ", ".join(f"`{dtype.name}`" for dtype in dtypes.DTYPES)


def pre_commit_config() -> str:
    """What goes into the .pre-commit-config.yaml of a project."""
    return f"""\
repos:
  - repo: {URL}
    rev: v{__version__}
    hooks:
      - id: ckptool-validate
        args: [--policy, ckptool.toml]
"""


def workflow() -> str:
    """The steps of a workflow that uses the action."""
    return f"""\
steps:
  - uses: actions/checkout@v4
    with:
      lfs: true
  - uses: {URL.removeprefix("https://github.com/")}@v{__version__}
    with:
      paths: checkpoints/
      policy: ckptool.toml
"""


def action_inputs() -> str:
    """The table of the action's inputs."""
    text = (ROOT / "action.yml").read_text(encoding="utf-8").partition("\ninputs:\n")[2].partition("\noutputs:\n")[0]
    rows = [(f"`{name}`", what) for name, what in re.findall(r"^  ([\w-]+):\n    description: (.+)$", text, re.M)]
    return tabulate(rows, headers=("input", "what it is"), tablefmt="github")


def block(language: str, text: str) -> str:
    """A code block."""
    return f"```{language}\n{text.rstrip()}\n```"


#: Details of the examples in the list of errors, where the message in it has none.
_DETAILS = {"prefix": "model.", "entry": "state_dict", "keys": "fc.weight fc.bias", "device": "CUDA", "name": "Net"}


def errors() -> str:
    """The errors that people search for, with a table of contents."""
    contents = [f"- [`` {_title(error)} ``](#{error.name})" for error in KNOWN_ERRORS]
    return "\n".join([*contents, "", *map(_error, KNOWN_ERRORS)])


def _title(error: KnownError) -> str:
    message = error.message.replace('"conv1.weight", ... ', "... ")
    return message if len(message) < 100 else message[:97].rstrip() + "..."


def _error(error: KnownError) -> str:
    found = explanation(error.message)
    details = {**_DETAILS, **(found.details if found and found.error is error else {})}
    step = error.step("model.pth", details)
    lines = [f'<a id="{error.name}"></a>', f"## {error.name}", "", block("text", "\n".join(wrap(error.message, 100)))]
    lines += ["", *wrap(error.why, 118), "", block("console", f"$ {step.line}")]
    if error.python:
        lines += ["", "In Python:", "", block("python", error.python)]
    return "\n".join([*lines, ""])
