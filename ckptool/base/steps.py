"""Next steps that messages suggest, kept as data until they are shown."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Final, TypeAlias

from .addresses import conceal, is_folder, is_remote
from .addresses import name as name_of
from .addresses import parent as parent_of
from .lazy import regex
from .records import NamedTuple

#: The file name that means standard input; a file with this name is spelled ``./-``.
STDIN: Final = "-"
#: The advice for files whose names were swapped.
RENAME_BACK: Final = "give the files back the names under which they were saved"
#: The advice for a file that is cut.
WHOLE_COPY: Final = "get a whole copy of the file"
#: The advice where copies of one tensor differ.
ONE_SAVE: Final = "which copy is right is not in the files: get those of one save, or have the job save whole tensors"
#: The placeholder for the numbers in a pattern of rank files, with the separator before it.
_PATTERN: Final = regex(r"[_.-]?(\*|\{[^{}]*\})")
#: An option in the prose of a message: in backticks, as on a command line, ``--allow-loss entries``. A trailing ``=``
#: mentions a parameter without a value.
_OPTION: Final = regex(r"`(-o|--[a-z][a-z0-9-]*)(?:=| ([^`]*))?`")
#: Options with another name than their parameter, and parameters that are functions of the library.
_SHORT: Final = {"output": "-o"}
_FUNCTIONS: Final = {"o": "ckptool.save", "in_place": "ckptool.save_in_place"}


class Step(NamedTuple):
    """An edit or a parameter with its value, True for a flag: an option of ``ckptool edit`` or of another command."""

    name: str
    value: str | bool = True

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the option."""
        option = _SHORT.get(self.name) or f"--{self.name.replace('_', '-')}"
        return (option, self.value) if isinstance(self.value, str) else (option,)


def option(name: str, value: str | bool = True) -> str:
    """Return an option for the prose of a message."""
    return f"`{shlex.join(Step(name, value).words)}`"


def in_shell(prose: str) -> str:
    """Return prose with its options as typed in a shell: ``--allow-loss entries``."""
    return _OPTION.sub(lambda match: " ".join(filter(None, match.groups())), prose)


def in_python(prose: str) -> str:
    """Return prose with its options as arguments of a function: ``allow_loss='entries'``."""

    def spelled(match: re.Match[str]) -> str:
        name, value = match.groups()
        parameter = name.lstrip("-").replace("-", "_")
        if parameter in _FUNCTIONS:
            return _FUNCTIONS[parameter]
        if value is None:
            return parameter if match[0].endswith("=`") else f"{parameter}=True"
        return f"{parameter}={' '.join(shlex.split(value))!r}"

    return _OPTION.sub(spelled, prose.replace("` `", "`, `"))


class Command(NamedTuple):
    """A ckptool command: its name ("lora merge"), arguments and options, and the path of its output, or ""."""

    name: str
    arguments: tuple[str, ...] = ()
    options: tuple[Step, ...] = ()
    output: str = ""

    def __str__(self) -> str:
        """Return the command as typed in a shell; all other code calls this."""
        words = [*self.name.split(), *map(argument, self.arguments)]
        words += [shlex.quote(word) for step in self.options for word in step.words]
        return " ".join(["ckptool", *words, *(("-o", argument(self.output)) if self.output else ())])


class Line(str):
    """A complete, quoted command line for a shell."""


class NextStep(NamedTuple):
    """Prose and commands in reading order; an empty step is false.

    ``str()`` spells options for Python, ``advice`` and ``line`` for a shell.
    """

    parts: tuple[str | Command, ...] = ()

    @property
    def advice(self) -> str:
        """The prose of the step, which callers append to the message; the commands are shown ready to type."""
        return in_shell("".join(part for part in self.parts if type(part) is str)).strip(" :;,")

    @property
    def line(self) -> str:
        """The command lines of the step, joined by ``&&``; "" without any."""
        return " && ".join(str(part) for part in self.parts if type(part) is not str)

    @property
    def commands(self) -> tuple[Command, ...]:
        """The ckptool commands of the step."""
        return tuple(part for part in self.parts if isinstance(part, Command))

    def __str__(self) -> str:
        return in_python("".join(map(str, self.parts)))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __add__(self, other: str | NextStep) -> NextStep:  # type: ignore[override]
        return NextStep((*self.parts, *as_step(other).parts))

    def __radd__(self, other: str) -> NextStep:
        return NextStep((*as_step(other).parts, *self.parts))


#: A next step, or plain prose.
AnyStep: TypeAlias = str | NextStep


def as_step(step: AnyStep) -> NextStep:
    """Return prose as a step; return a step unchanged."""
    return step if isinstance(step, NextStep) else NextStep((step,) if step else ())


def advised(message: str, step: AnyStep) -> str:
    """Return a message, followed by the prose of its next step, if any."""
    advice = as_step(step).advice
    return f"{message}; {advice}" if advice else message


def command(
    name: str, *arguments: str, output: str = "", steps: Iterable[Step] = (), **more: str | bool | Sequence[str] | None
) -> NextStep:
    """Return the step that consists of one ckptool command.

    ``steps`` come first, then the keyword arguments in their order: an argument that is None, False or empty is left
    out, a sequence repeats its option. The parameter ``for`` is written ``for_``.
    """
    every = [*steps]
    for key, value in more.items():
        values = [value] if isinstance(value, str | bool) or value is None else value
        every += [Step(key.rstrip("_"), each) for each in values if each]
    return NextStep((Command(name, arguments, tuple(every), output),))


def by_place(path: str, local: str, stored: str, web: str = "") -> str:
    """Return the advice for the place of a file: on the disk, in a bucket or repository, or on a web server.

    ``web`` is ``stored`` by default.
    """
    return local if not is_remote(path) else web or stored if path.startswith("http") else stored


def salvage_step(path: str) -> NextStep:
    """Return the next step for a partly damaged file or folder."""
    if is_folder(path):
        return as_step("get the files again that are missing or damaged")
    return "save what is intact: " + command("salvage", path, output=suggested_output(path, "saved"))


def tree_step(path: str) -> NextStep:
    """Return the command that shows every path in a checkpoint."""
    return command("get", path, ".")


def undo_step(path: str) -> NextStep:
    """Return the command that reverts the last in-place edit of a file: a local copy of a remote file."""
    if is_remote(path):
        return "download it, then undo the edit: " + command("undo", suggested_output(path))
    return command("undo", path)


def rename_step(path: str, extension: str) -> NextStep:
    """Return the next step for a file whose extension belongs to another format."""
    if is_remote(path):
        return as_step(f"rename it to {os.path.basename(suggested_output(path, extension=extension))}")
    return as_step(Line(f"mv {argument(path)} {argument(suggested_output(path, extension=extension))}"))


def folder_of(path: str) -> str:
    """Return the folder that contains a path: ``.`` for a bare name, ``..`` for ``.``, ``../..`` for ``..``."""
    if is_remote(path):
        return parent_of(path)
    path = path.rstrip(os.sep) or path
    above, name = os.path.split(path)
    if name == os.curdir:
        return folder_of(above) if above else os.pardir
    return os.path.join(path, os.pardir) if name == os.pardir else above or os.curdir


def suggested_output(path: str, word: str = "", extension: str = "") -> str:
    """Return an unused name next to the input: ``model.cpu.pth`` for ``model.pth``, else ``model.cpu.2.pth``.

    ``x.pth.tar`` gives ``x.cpu.pth.tar``. The folder ``v1.5`` gives ``v1.5.cpu``; ``.`` gives a name next to the
    folder. The pattern ``model_rank*.pth`` of rank files gives ``model_rank.cpu.pth``. An address within an archive,
    ``outer.zip!run/a.pth``, gives a name after its member: ``a.cpu.pth``. A remote file gives a local name.
    """
    path = "stdin.pth" if path == STDIN else path
    whole = is_folder(path)
    path = name_of(path) if is_remote(path) else path
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
    if whole or os.path.isdir(path):
        stem, suffix = path, ""
    if suffix == ".tar" and stem.endswith((".pth", ".pt", ".ckpt")):
        stem, inner = os.path.splitext(stem)
        suffix = inner + suffix
    elif suffix == ".tar" or (suffix == ".safetensors" and _is_pickled(path)):
        suffix = ".pth"  # edits of a torch 0.1 file write a zip, and a suffix of another format would mean to convert
    stem = f"{stem}.{word}" if word else stem
    suffix = extension or suffix
    names = (f"{stem}.{number}{suffix}" for number in count(2))
    return next(name for name in chain((stem + suffix,), names) if not os.path.lexists(name))


def _is_pickled(path: str) -> bool:
    """Return whether a file begins as a zip or a pickle does, which no safetensors file can."""
    if not os.path.isfile(path):
        return False
    with suppress(OSError), open(path, "rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")
    return False


def argument(path: str) -> str:
    """Quote a path as a command-line argument that can be pasted into a shell."""
    if path.startswith("-") and path != STDIN:
        path = f"./{path}"
    path = conceal(path)
    if path.isprintable():
        return shlex.quote(path)

    def octal(char: str) -> str:
        return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))

    # Control characters must not reach the terminal. Bash, zsh and POSIX 2024 read this form.
    return "$'" + "".join(char if char.isalnum() or char in " ./_-" else octal(char) for char in path) + "'"
