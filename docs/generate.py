"""Generated parts of README.md and docs/: output of real commands, and tables from the code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from textwrap import wrap
from typing import Final

import click
from tabulate import tabulate

from ckptool import __version__
from ckptool.base import dtypes
from ckptool.base.findings import Effect
from ckptool.base.findings import codes as finding_codes
from ckptool.base.prefixes import WRAPPERS
from ckptool.checkpoint import quantized
from ckptool.cli import main
from ckptool.formats import FOLDERS, FORMATS
from ckptool.formats.losses import KINDS
from ckptool.formats.recipes.recipe import built_in, built_in_names
from ckptool.formats.zip_kinds import ZIPS
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS, KnownError, command_line, explanation, filled
from ckptool.safety.torch_lists import VERSIONS

ROOT = Path(__file__).resolve().parent.parent

_CONFIG = ConfigParser()
_CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
#: The address of the repository.
URL = _CONFIG["metadata"]["url"]

#: The policy file that the examples use.
POLICY = """\
layout = "bare"
prefix = "none"
device = ["cpu"]
dtype = ["float32", "bfloat16"]
max-bytes = "2GB"
weights-only = true
"""


#: The model that the examples use. Its keys are the keys of the fixture.
NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        self.block = nn.Sequential(nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12))
        self.head = nn.Conv2d(12, 5, 1)
"""


class Session:
    """A folder with a fixture called ``name``, the policy and the model. Commands run in it one after the other."""

    def __init__(self, fixture: str = "ddp4_training.pth", name: str = "checkpoint.pth") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._names: dict[str, object] = {}
        (Path(self._folder.name) / name).write_bytes((ROOT / "fixtures" / "files" / fixture).read_bytes())
        (Path(self._folder.name) / "ckptool.toml").write_text(POLICY, encoding="utf-8")
        (Path(self._folder.name) / "net.py").write_text(NET, encoding="utf-8")

    def __call__(self, *commands: str) -> str:
        """Run commands. Return their output as a code block."""
        lines = []
        os.environ["SOURCE_DATE_EPOCH"] = "1790000000"  # fixes the time that an edit in place records
        with self._inside():
            for command in commands:
                lines += [f"$ {command}", _output(shlex.split(command)[1:]).rstrip()]
        return block("console", "\n".join(line for line in lines if line))

    def file(self, name: str, text: str) -> str:
        """Write a file. Return it as a code block."""
        (Path(self._folder.name) / name).write_text(text, encoding="utf-8")
        return block(name.rpartition(".")[2], text.rstrip())

    def python(self, *statements: str) -> str:
        """Run Python statements. Return their output as a code block. Also write an error to ``error.txt``."""
        printed = io.StringIO()
        with self._inside(), contextlib.redirect_stdout(printed):
            for statement in statements:
                print(f">>> {statement}")
                try:
                    exec(compile(statement, "<page>", "single"), self._names)
                except RuntimeError as error:
                    text = f"RuntimeError: {error}"
                    Path("error.txt").write_text(text, encoding="utf-8")
                    print("Traceback (most recent call last):", "    ...", text, sep="\n")
        return block("pycon", re.sub(r"[ \t]+$", "", printed.getvalue().expandtabs(4), flags=re.MULTILINE))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        here = Path.cwd()
        os.chdir(self._folder.name)
        sys.path.insert(0, self._folder.name)
        try:
            yield
        finally:
            sys.path.remove(self._folder.name)
            os.chdir(here)


def transcript(*commands: str, fixture: str = "ddp4_training.pth", name: str = "checkpoint.pth") -> str:
    """Run commands in a new folder. Return their output as a code block."""
    return Session(fixture, name)(*commands)


def _output(arguments: list[str]) -> str:
    """Return the output of a command. ``< FILE`` at its end gives it a file as standard input."""
    out, stdin = io.StringIO(), sys.stdin
    if "<" in arguments:
        *arguments, _, name = arguments
        sys.stdin = io.StringIO(Path(name).read_text(encoding="utf-8"))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main.run(arguments)
    finally:
        sys.stdin = stdin
    return out.getvalue()


def commands() -> str:
    """Return a table per group of commands. On the site, the help of each command follows."""
    lines = []
    for title, group in main.GROUPS.items():
        rows = [(f"`ckptool {name}`", main.help_line(name)) for name in group]
        lines += [f"## {title}", "", tabulate(rows, headers=("command", "what it does"), tablefmt="github"), ""]
        lines += ["<!-- site", "```{eval-rst}"]
        for name, (module, function, _) in group.items():
            lines += [f".. click:: ckptool.cli.{module}:{function}", f"   :prog: ckptool {name}"]
        lines += ["```", "-->", ""]
    return "\n".join(lines)


#: What the placeholders of arguments and values in help texts stand for.
PLACEHOLDERS: Final = {
    "A": "a checkpoint to describe or compare: a PATH",
    "B": "the checkpoint that is compared with A: a PATH",
    "CALLABLE": "a function or class in MODULE that makes a model without arguments",
    "DEVICE": "a device: `cpu`, `cuda:0`, `meta`",
    "DIR": "a folder to write to",
    "DTYPE": "a dtype: `bfloat16`, `float32`",
    "ENGINE": "where the work runs: `local`, `dask` or `dask=tcp://HOST:PORT`",
    "FORMAT": "a format of checkpoints: `torch`, `safetensors`, `dcp`, `legacy`",
    "FAMILY": "a library and a family of models: `hf:llama`",
    "FILE": "a file to read, other than a checkpoint: a policy, a lock, a table, a list, a log",
    "FROM": "the device that tensors are on; `cuda:*` is any",
    "GLOB": "a pattern that matches keys and entries: `head.*`, `re:REGEX`",
    "I": "the first of every N inputs to take, from 1",
    "KEY": "the path of an entry, a state dict or a tensor, as `inspect` prints it: `state_dict.fc.bias`",
    "KIND": "a kind of loss; `convert --help` lists them",
    "MESSAGE": "the text of an error",
    "LAYOUT": "a layout of LoRAs: `kohya`, `comfyui`, `diffusers` or `peft`",
    "MODULE": "a Python module that can be imported",
    "N": "a number",
    "NAME": "a name of your own: a new key, an entry in the header of safetensors",
    "NEW": "the new key, or its pattern",
    "NUMBER": "a number with decimals",
    "OLD": "the present key, or its pattern",
    "OTHER": "another checkpoint: a PATH",
    "OUT": "a file to write",
    "PATH": "a checkpoint: a file, a folder, an address in an archive, `outer.zip!policy.pth`, or a remote one, `s3://bucket/x.pth`",
    "PREFIX": "the beginning of keys: `module.`",
    "PROFILE": "a profile of the AWS command line",
    "SIZE": "a number of bytes: `500MB`, `5GB`",
    "SPEC": "what `map_location` of torch.load gets: `cpu`, or `cuda:1=cuda:0`",
    "TAG": "the device tag of a storage; `cuda:*` is any",
    "TARGET": "the checkpoint or lock file to fit",
    "TO": "the device to move them to",
    "VALUE": "a value: JSON, or text",
    "VERSION": "a torch version: `2.6`",
    "W": "a number, the weight of a checkpoint",
    "WORD": "one of the words that the option names",
    "WORDS": "words separated by commas, which the help of the option lists",
    "URL": "the address of a server: `https://minio.example.org`",
}


def placeholders() -> str:
    """Return the table of placeholders."""
    rows = [(word, text) for word, text in PLACEHOLDERS.items()]
    return tabulate(rows, headers=("placeholder", "what it stands for"), tablefmt="github")


def losses() -> str:
    """Return the table of the kinds of loss that ``--allow-loss`` accepts."""
    return tabulate(KINDS.items(), headers=("KIND", "what is lost"), tablefmt="github")


#: The most commands of an option that the table of options names.
_FEW: Final = 6


def options() -> str:
    """Return the list of options: the commands that have each, or their number, and its meaning."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in main.COMMANDS:
        command = main.cli.get_command(click.Context(main.cli), name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option):
                value = "" if option.is_flag or not option.metavar else f" {option.metavar}"
                names = ", ".join((*option.opts, *option.secondary_opts)) + value
                rows.setdefault((names, option.help or ""), []).append(name)
    return "\n".join(
        f"- `{names}` ({', '.join(having) if len(having) <= _FEW else len(having)}): {_cell(text)}"
        for (names, text), having in sorted(rows.items(), key=lambda row: row[0][0].rpartition("--")[2])
    )


def _cell(text: str) -> str:
    """Escape plain text for a cell of a Markdown table."""
    return re.sub(r"([\\*_`|\[\]<>])", r"\\\1", text)


def exit_codes() -> str:
    """Return the table of exit codes."""
    return tabulate(
        [(f"`{code}`", text) for code, text in main.EXIT_CODES], headers=("code", "meaning"), tablefmt="github"
    )


def formats() -> str:
    """Return the table of formats."""
    what = json.loads(Path(__file__).with_name("formats.json").read_text())
    rows = [(f"`{known.name}`", what[known.name]) for kinds in (FORMATS, ZIPS, FOLDERS) for known in kinds]
    return tabulate(rows, headers=("format", "what it is"), tablefmt="github")


def recipes() -> str:
    """Return the table of built-in recipes: a family, those that it leads to and back, and the files of parts."""
    rows: dict[str, dict[str, str]] = {}
    for each in sorted(map(built_in, built_in_names()), key=lambda recipe: (recipe.b, recipe.a)):
        rows.setdefault(each.b, {})[each.a] = f"`{each.a}`" + (f" (`{each.files}`)" if each.files else "")
    lines = [(f"`{family}`", ", ".join(others.values())) for family, others in rows.items()]
    return tabulate(lines, headers=("family", "and back (files of parts)"), tablefmt="github")


def quantized_formats() -> str:
    """Return which formats of quantized weights are turned back, and which are refused."""
    known = dict.fromkeys(form.name for form in quantized.formats() if form.values)
    others = dict.fromkeys(form.name for form in quantized.formats() if form.name not in known)
    return f"Turned back: {', '.join(known)}.\n\nNamed by `inspect`, and refused: {', '.join(others)}."


def torch_versions() -> str:
    """Return the torch versions whose weights_only list is known, separated by commas."""
    return ", ".join(VERSIONS)


def wrappers() -> str:
    """Return the table of wrapper segments."""
    rows = [(f"`{segment}.`", who) for segment, who in WRAPPERS.items()]
    return tabulate(rows, headers=("segment", "who puts it there"), tablefmt="github")


def dtype_names() -> str:
    """Return the dtypes that ckptool reads, separated by commas."""
    return ", ".join(f"`{dtype.name}`" for dtype in dtypes.DTYPES)


def pre_commit_config() -> str:
    """Return an example of a project's .pre-commit-config.yaml."""
    return f"""\
repos:
  - repo: {URL}
    rev: v{__version__}
    hooks:
      - id: ckptool-validate
        args: [--policy, ckptool.toml]
"""


def workflow() -> str:
    """Return the steps of a workflow that uses the action."""
    return f"""\
steps:
  - uses: actions/checkout@v6
    with:
      lfs: true
  - uses: {URL.removeprefix("https://github.com/")}@v{__version__}
    with:
      paths: checkpoints/
      policy: ckptool.toml
"""


def action_inputs() -> str:
    """Return the table of the action's inputs."""
    text = (ROOT / "action.yml").read_text(encoding="utf-8").partition("\ninputs:\n")[2].partition("\noutputs:\n")[0]
    rows = [(f"`{name}`", what) for name, what in re.findall(r"^  ([\w-]+):\n    description: (.+)$", text, re.M)]
    return tabulate(rows, headers=("input", "what it is"), tablefmt="github")


def block(language: str, text: str) -> str:
    """Return a text as a code block."""
    return f"```{language}\n{text.rstrip()}\n```"


#: Titles of the parts of the error list, by the first error of each part.
_PARTS = {
    "no-bytecode": "Programs and libraries that read checkpoints",
    "extra-state": "Loading a state dict",
    "no-such-device": "Devices",
    "lfs-pointer": "Damaged files, and files of other kinds",
    "old-torch": "Versions and classes",
    "safetensors-header": "safetensors, transformers, DeepSpeed and torch.distributed.checkpoint",
}


def codes() -> str:
    """Return the lists of all finding codes, by check."""
    by_check: dict[str, list[str]] = {}
    for name, code in sorted(finding_codes().items()):
        effects = [item.name.lower().replace("_", " ") for item in Effect if item in code.effect and item.name]
        effect = f" (*{', '.join(effects)}*)" if effects else ""
        by_check.setdefault(code.check, []).append(f"- `{name}`: {code.meaning}{effect}")
    return "\n\n".join("\n".join([f"## {check}", "", *items]) for check, items in sorted(by_check.items()))


def errors() -> str:
    """Return the errors that people search for: message, cause, command."""
    entries: list[str] = []
    for error in KNOWN_ERRORS:
        if part := _PARTS.get(error.name):
            entries += [f"## {part}", ""]
        entries.append(_error(error))
    return "\n".join(entries)


def _error(error: KnownError) -> str:
    found = explanation(error.message)
    assert found is not None
    assert found.error is error, error.name
    lines = [f"### {error.name}", "", f"    {_shortened(error.message, _LONGEST)}"]
    why, advised = filled(error.why, found.details), error.step != _LOOK
    why = _SENTENCE.split(why, maxsplit=1)[0] if advised else why
    lines += ["", *wrap(why, 118, break_on_hyphens=False)]
    if advised:
        lines += ["", f"    $ {command_line(error.step, error.example, found.details)}"]
    return "\n".join([*lines, ""])


#: The command of errors that only the file tells more about; the page names it once.
_LOOK: Final = "inspect {path}"
#: The end of a sentence. The page has the first one of each cause with a command; ``explain`` says the rest.
_SENTENCE: Final = re.compile(r"(?<=[.])\s+(?=[A-Z])")
#: The most characters of a message on the page, which is not wrapped, so that a search finds it.
_LONGEST: Final = 130


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip(" .") + " ..."
