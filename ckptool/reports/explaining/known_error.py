"""A known error: its message, how it is found in a text, and the commands that help, for a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...base.steps import Line, NextStep, argument, as_step, command, suggested_output
from .finders import Details, Finder


class KnownError(NamedTuple):
    """An error message. ``message`` is as the library prints it, shortened by "..."; ``name`` is its anchor.

    ``find`` returns the details of a text that has the message, None for another text. ``step`` is the command for a
    checkpoint, and ``python`` are the lines that do the same, "" where only another file helps. In ``why`` and
    ``python`` a detail in braces, ``{prefix}``, stands for what was found. ``alike`` are other messages with the same
    cause, of other versions for example; ``example`` is the file where none is named.
    """

    name: str
    message: str
    why: str
    find: Finder
    step: Callable[[str, Details], NextStep]
    python: str = ""
    alike: tuple[str, ...] = ()
    example: str = "model.pth"

    def why_of(self, details: Details) -> str:
        """Return why it comes, with the details filled in."""
        return _filled(self.why, details)

    def python_for(self, path: str, details: Details) -> str:
        """Return the lines of Python for a file, with the details filled in."""
        return _filled(self.python.replace(f'"{self.example}"', _quoted(path)), details)


def _filled(text: str, details: Details) -> str:
    """Return a text with the details in place of their names; other braces are Python."""
    for name, value in details.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _quoted(path: str) -> str:
    """Return a path as a string of Python, in double quotes where that is simple."""
    return f'"{path}"' if path.isprintable() and not set(path) & {'"', "\\"} else ascii(path)


def edited(name: str, *options: str, word: str) -> Callable[[str, Details], NextStep]:
    """Return the step that is one edit; ``{...}`` in an option stands for a detail."""

    def step(path: str, details: Details) -> NextStep:
        filled = tuple(_filled(option, details) for option in options)
        return command(name, path, options=filled, output=suggested_output(path, word))

    return step


def shown(name: str, *options: str) -> Callable[[str, Details], NextStep]:
    """Return the step that is a command which writes nothing."""
    return lambda path, details: command(name, path, options=options)


def shell(text: str) -> Callable[[str, Details], NextStep]:
    """Return the step that is a command of another program; ``{path}`` stands for the file."""
    return lambda path, details: as_step(Line(text.format(path=argument(path))))


def dropped(path: str, details: Details) -> NextStep:
    """Return the step that leaves the keys out."""
    keys = tuple(details["keys"].split("\n"))
    return command("drop", path, *keys, output=suggested_output(path, "rest"))


def converted(path: str, details: Details) -> NextStep:
    """Return the step that makes safetensors of it."""
    output = suggested_output(path, extension=".safetensors")
    return command("convert", path, output=output if output != path else suggested_output(path, "2"))
