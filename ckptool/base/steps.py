"""Next steps: what a message suggests, as data until it is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import chain, count
from shlex import quote
from typing import Final, NamedTuple, TypeAlias

#: The name of standard input; a file of this name is ``./-``.
STDIN: Final = "-"


#: What to do with files under the names of each other.
RENAME_BACK: Final = "give the files back the names under which they were saved"
#: What to do where copies of one tensor are not equal.
ONE_SAVE: Final = "which copy is right is not in the files: get those of one save, or have the job save whole tensors"


#: What stands for the numbers in a pattern of rank files, with the separator before it.
_PATTERN: Final = re.compile(r"[_.-]?(\*|\{[^{}]*\})")


class Command(NamedTuple):
    """A command of ckptool: its name, arguments, options with their values, and the file for -o ("" for none)."""

    name: str
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    output: str = ""

    def __str__(self) -> str:
        """Spell the command as it is typed; no other place does."""
        words = [argument(word) for word in (self.name, *self.arguments)] + [quote(option) for option in self.options]
        return " ".join(["ckptool", *words, *(("-o", argument(self.output)) if self.output else ())])


class Line(str):
    """A command line for a shell, whole and quoted."""


class NextStep:
    """Prose and commands in the order in which they are read; ``str()`` spells it. It is false if it is empty."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[str | Command, ...] = ()) -> None:
        self.parts: Final = parts

    @property
    def advice(self) -> str:
        """The prose in it, which belongs to the message: what is shown as a next step can be typed as it is."""
        return "".join(part for part in self.parts if type(part) is str).strip(" :;,")

    @property
    def line(self) -> str:
        """The command lines in it, "" for none."""
        return " && ".join(str(part) for part in self.parts if type(part) is not str)

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands in it."""
        return tuple(part for part in self.parts if isinstance(part, Command))

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NextStep) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __add__(self, other: str | NextStep) -> NextStep:
        return NextStep((*self.parts, *as_step(other).parts))

    def __radd__(self, other: str) -> NextStep:
        return NextStep((*as_step(other).parts, *self.parts))


#: What takes a step takes prose as well.
AnyStep: TypeAlias = str | NextStep


def as_step(step: AnyStep) -> NextStep:
    """Return prose as a step; a step as it is."""
    return step if isinstance(step, NextStep) else NextStep((step,) if step else ())


def advised(message: str, step: AnyStep) -> str:
    """Return a message with the advice of its next step."""
    advice = as_step(step).advice
    return f"{message}; {advice}" if advice else message


def command(name: str, *arguments: str, options: Sequence[str] = (), output: str = "") -> NextStep:
    """Return the step that is one command of ckptool."""
    return NextStep((Command(name, arguments, tuple(options), output),))


def salvage_step(path: str) -> NextStep:
    """Return the next step for a partly damaged file or folder."""
    if os.path.isdir(path):
        return as_step("get the files again that are missing or damaged")
    return "save what is intact: " + command("salvage", path, output=suggested_output(path, "saved"))


def tree_step(path: str) -> NextStep:
    """Return the command that shows every path in a checkpoint."""
    return command("inspect", path, options=("--tree",))


def undo_step(path: str) -> NextStep:
    """Return the command that takes back the last edit in place of a file."""
    return command("undo", path)


def rename_step(path: str, extension: str) -> NextStep:
    """Return the next step for a file whose extension belongs to another format."""
    return as_step(Line(f"mv {argument(path)} {argument(suggested_output(path, extension=extension))}"))


def folder_of(path: str) -> str:
    """Return the folder that a file or folder is in: ``.`` for a name alone, ``..`` for ``.``, ``../..`` for ``..``."""
    path = path.rstrip(os.sep) or path
    above, name = os.path.split(path)
    if name == os.curdir:
        return folder_of(above) if above else os.pardir
    return os.path.join(path, os.pardir) if name == os.pardir else above or os.curdir


def suggested_output(path: str, word: str = "", extension: str = "") -> str:
    """Return a free name beside the input: ``model.pth`` gives ``model.cpu.pth``, or ``model.cpu.2.pth`` if that is
    taken; ``x.pth.tar`` gives ``x.cpu.pth.tar``, the folder ``v1.5`` gives ``v1.5.cpu``, and ``.`` a name beside it.

    The pattern ``model_rank*.pth`` of rank files gives ``model_rank.cpu.pth``. An address within an archive,
    ``outer.zip!run/a.pth``, gives a name after its member: ``a.cpu.pth``.
    """
    path = "stdin.pth" if path == STDIN else path
    if "!" in path and not os.path.lexists(path):
        path = os.path.basename(path.rpartition("!")[2])
    path = os.path.normpath(path)
    folder, name = os.path.split(path)
    if _PATTERN.search(name) and not os.path.lexists(path):
        name, suffix = os.path.splitext(name)
        path = os.path.join(folder, (_PATTERN.sub("", name).strip("_.-") or "joined") + suffix)
    if os.path.basename(path) in (os.curdir, os.pardir):
        path = os.path.join(folder_of(path), os.path.basename(os.path.realpath(path)))
    stem, suffix = os.path.splitext(path)
    if os.path.isdir(path):
        stem, suffix = path, ""
    if suffix == ".tar" and stem.endswith((".pth", ".pt", ".ckpt")):
        stem, inner = os.path.splitext(stem)
        suffix = inner + suffix
    elif suffix == ".tar":
        suffix = ".pth"  # an edited torch 0.1 file becomes a zip
    stem = f"{stem}.{word}" if word else stem
    suffix = extension or suffix
    names = (f"{stem}.{number}{suffix}" for number in count(2))
    return next(name for name in chain((stem + suffix,), names) if not os.path.lexists(name))


def argument(path: str) -> str:
    """Quote a path as a command-line argument that can be pasted into a shell."""
    if path.startswith("-") and path != STDIN:
        path = f"./{path}"
    if path.isprintable():
        return quote(path)

    def octal(char: str) -> str:
        return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))

    # Control characters must not reach the terminal. Bash, zsh and POSIX 2024 read this form.
    return "$'" + "".join(char if char.isalnum() or char in " ./_-" else octal(char) for char in path) + "'"
