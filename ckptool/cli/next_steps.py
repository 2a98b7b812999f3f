"""Next steps that run exactly as printed: the failed command line, corrected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from shlex import quote

from ..base.errors import CkptoolError
from ..base.steps import Line, NextStep, argument

#: Options that a command takes once, each with all its names. Any other option is appended.
_SINGLE = {name: names for names in (("-o", "--output"), ("--to-format",), ("--key",), ("--tied",)) for name in names}


def retype(error: CkptoolError, typed: object) -> None:
    """Set the next step of ``error`` to the whole corrected command, if the error has a correction.

    ``typed`` is the tuple of words after the program name. If nothing was typed it is no tuple, and nothing is set.
    """
    if error.again is None or not isinstance(typed, tuple):
        return
    words = list(typed)
    for wrong, right in error.again.words:
        if words.count(wrong) != 1:
            return
        words[words.index(wrong)] = right
    if error.again.suffix:
        output = next((value for name, value in pairwise(words) if name in _SINGLE["-o"]), "")
        if not output:
            return
        words = _with(words, "-o", os.path.splitext(output)[0] + error.again.suffix)
    for name, value in error.again.options:
        words = _with(words, name, value)
    error.step = NextStep((error.again.before, Line(retyped(words))))


def retyped(words: Sequence[str]) -> str:
    """Return a command line that a shell can run. Words with a leading dash stay options."""
    return " ".join(["ckptool", *map(_quoted, words)])


def _quoted(word: str) -> str:
    return quote(word) if word.startswith("-") and word.isprintable() else argument(word)


def _with(words: list[str], name: str, value: str) -> list[str]:
    """Add an option at the end of the words. If an option of ``_SINGLE`` is already there, replace its value instead.

    An option with an empty value is a flag, and is added only once.
    """
    for place, word in enumerate(words):
        if word in _SINGLE.get(name, ()) and place + 1 < len(words):
            return [*words[: place + 1], value, *words[place + 2 :]]
        long, equals, _ = word.partition("=")
        if equals and long in _SINGLE.get(name, ()) and long.startswith("--"):
            return [*words[:place], long, value, *words[place + 1 :]]
    if not value and name in words:
        return words
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], name, *([value] if value else []), *words[end:]]
