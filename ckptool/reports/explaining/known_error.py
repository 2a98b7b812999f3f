"""A known error: its message, how it is found in a text, and the commands that help."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...base.steps import Line, NextStep, argument, as_step, command, suggested_output
from .finders import Details, Finder


class KnownError(NamedTuple):
    """A known error. ``message`` is its text as the library prints it, shortened by "..."; ``name`` is its anchor.

    ``find`` returns the details if a text has the message, otherwise None. ``step`` returns the command for a
    checkpoint. ``python`` has lines that do the same, or "" if only another file helps. In ``why`` and ``python``,
    names of details in braces, such as ``{prefix}``, are filled in. ``alike`` are other messages with the same cause,
    for example from other versions. ``example`` is the file name to use if none is given.
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
        """Return the cause, with the details filled in."""
        return _filled(self.why, details)

    def python_for(self, path: str, details: Details) -> str:
        """Return the Python lines for a file, with the details filled in."""
        return _filled(self.python.replace(f'"{self.example}"', _quoted(path)), details)


def _filled(text: str, details: Details) -> str:
    """Return a text with names of details replaced by their values; other braces are Python code."""
    for name, value in details.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _quoted(path: str) -> str:
    """Return a path as a Python string, in double quotes if possible."""
    return f'"{path}"' if path.isprintable() and not set(path) & {'"', "\\"} else ascii(path)


def edited(name: str, *options: str, word: str) -> Callable[[str, Details], NextStep]:
    """Return a step that is one edit; ``{...}`` in an option stands for a detail."""

    def step(path: str, details: Details) -> NextStep:
        filled = tuple(_filled(option, details) for option in options)
        return command(name, path, options=filled, output=suggested_output(path, word))

    return step


def shown(name: str, *options: str) -> Callable[[str, Details], NextStep]:
    """Return a step that is a command which writes nothing."""
    return lambda path, details: command(name, path, options=options)


def shell(text: str) -> Callable[[str, Details], NextStep]:
    """Return a step that is another program's command; ``{path}`` stands for the file."""
    return lambda path, details: as_step(Line(text.format(path=argument(path))))


def dropped(path: str, details: Details) -> NextStep:
    """Return the step that drops the keys."""
    keys = tuple(details["keys"].split("\n"))
    return command("drop", path, *keys, output=suggested_output(path, "rest"))


def converted(path: str, details: Details) -> NextStep:
    """Return the step that converts to safetensors."""
    output = suggested_output(path, extension=".safetensors")
    return command("convert", path, output=output if output != path else suggested_output(path, "2"))
