"""Every input of every command: how it is called with one path or address in place of a plain file."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click
from command_line import Said, say
from conftest import FIXTURES

from ckptool.cli.main import COMMANDS, cli
from ckptool.cli.options import InputPath

__all__ = ["INPUTS", "INPUT_NAMES", "REST", "make_files", "said_with"]

#: What commands need besides their inputs.
REST = {
    "cast": ["--to-dtype", "bfloat16"],
    "convert": ["--to-format", "safetensors"],
    **{"drop": ["fc.*"], "set": ["epoch=3"]},
    "edit": ["--to", "cpu"],
    "extract": ["."],
    "get": ["fc.bias"],
    "remap": ["--to", "cpu"],
    "rename": ["--rename", "fc.*=head.*"],
    "resize": ["--vocab", "16"],
}
#: Members that options read, where that is not a checkpoint; what is added to the path; and options that go without
#: those of ``REST``.
CONTENT = {"--lock": "lock.json", "--policy": "policy.toml"}
CONTENT |= {"--error": "train.log", "--recipe": "recipe.toml"}
ENTRY = {"--merge-entry": ":fc.bias=other"}
ALONE = {"--rename-like"}
#: Options in place of the second argument.
INSTEAD = {"--error"}
#: Inputs that need another model or another option than these tests have; their own tests give them addresses.
OTHERS = {"--base", "--config"}

#: Every parameter of a command that is the path of an input.
INPUTS = [
    (name, parameter)
    for name in COMMANDS
    for parameter in cli.get_command(click.Context(cli), name).params  # type: ignore[union-attr]
    # explain takes a message before the path. test_mesh_fixtures.py: --unflatten takes files of ranks and their model.
    if isinstance(parameter.type, InputPath)
    and parameter.opts[0] != "--unflatten"
    and name not in ("explain", "resize", "lora merge", "lora convert", "lora extract", "lora resize")
    and parameter.opts[0] not in OTHERS
]
INPUT_NAMES = [f"{name} {item.opts[0]}" for name, item in INPUTS]


def make_files(folder: Path) -> None:
    """Write the files that ``said_with`` names: in ``plain``, and in archives as ``outer.zip!run`` has them."""
    plain = folder / "plain"
    plain.mkdir()
    shutil.copy(FIXTURES / "bare.pth", plain)
    (plain / "lock.json").write_bytes(b"")
    assert say("lock", plain / "bare.pth", "-o", plain / "lock.json", "--force").code == 0
    (plain / "policy.toml").write_text('lock = "lock.json"\nrequire = ["fc.*"]\n')
    (plain / "table.txt").write_text("fc.weight head.weight\n")
    (plain / "recipe.toml").write_text('rest = "keep"\n[[rule]]\na = "fc.{weight|bias}"\nb = "head.{weight|bias}"\n')
    (plain / "train.log").write_text(
        'Missing key(s) in state_dict: "a". \n\tUnexpected key(s) in state_dict: "fc.bias". '
    )
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        tar.add(plain, "run")
    with zipfile.ZipFile(folder / "outer.zip", "w") as file:
        file.writestr("m.tar.gz", inner.getvalue())
        for path in plain.iterdir():
            file.write(path, f"run/{path.name}", zipfile.ZIP_DEFLATED)


def said_with(
    name: str, parameter: click.Parameter, start: str, folder: Path, end: str = "", more: Sequence[str] = ()
) -> Said:
    """Run a command whose input for the parameter is a name between ``start`` and ``end``; the others are plain files.

    ``more`` are options that are added if the command has them.
    """
    plain = str(folder / "plain" / "bare.pth")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    option = parameter.opts[0]
    arguments = [other for other in command.params if isinstance(other, click.Argument)]
    words = [
        name,
        *(
            f"{start}bare.pth{end}" if other is parameter else plain
            for other in arguments
            if isinstance(other.type, InputPath)
        ),
    ]
    words += words[1:] if name == "average" else []
    words = words[:2] if option in INSTEAD else words
    rest = REST.get(name, []) if option not in ALONE else []
    if isinstance(parameter, click.Option):
        text = start + CONTENT.get(option, "bare.pth") + end + ENTRY.get(option, "")
        words += [] if "--to" in rest else rest
        words += ["--wrap", "state_dict"] if option == "--merge-entry" else []
        words += [option, text]
    else:
        words += rest
    for flag in ("--dry-run", *more):
        if any(flag in other.opts for other in command.params):
            words.append(flag)
    if name == "report":
        words += ["-o", str(folder / "page.html"), "--force"]
    return say(*words)
