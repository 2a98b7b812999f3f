"""The steps that an edit is made of: each is an option of ``ckptool edit``, and a function of a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from shlex import quote
from typing import Final, NamedTuple

from ...base.errors import TargetError
from ...base.prefixes import unwrapping
from ..keys import stripping

Rename = Callable[[str], str]

#: Options that change where the state dict stands, not its names.
LAYOUT: Final = frozenset(("extract", "wrap", "drop"))

#: What a step costs: the simpler the better among those that reach the same.
_COSTS: Final = {
    "strip-module": 1.0,
    "wrappers": 1.1,
    "strip-prefix": 1.2,
    "add-prefix": 1.2,
    "rename": 1.5,
    "rename-regex": 2.0,
    "drop": 2.0,
    "extract": 1.0,
    "wrap": 1.0,
    "like": 4.0,
    "by-order": 5.0,
}


#: Options whose value is the target, which can have any length.
_NAMED: Final = frozenset(("like", "by-order"))


class Step(NamedTuple):
    """One step: ``option`` as ``ckptool edit`` has it, ``value`` "" for a flag.

    The options "like" and "by-order" take their names from the target. ``guess`` says that the order of the keys
    decided which name is which, because the names themselves do not say it.
    """

    option: str
    value: str = ""
    guess: bool = False


def cost(steps: Sequence[Step]) -> float:
    """What the steps cost together: first their number, then their kinds, their length last."""
    return sum(
        _COSTS[step.option] + step.guess + (len(step.value) / 1000 if step.option not in _NAMED else 0)
        for step in steps
    )


def renaming(step: Step, names: Iterable[str]) -> Rename:
    """The function of a name that a step is, for names that belong together.

    Raises TargetError for a step that is no such function.
    """
    if step.option == "strip-module":
        return stripping("module.")
    if step.option == "strip-prefix":
        return stripping(step.value)
    if step.option == "wrappers":
        return unwrapping(names)
    if step.option == "add-prefix":
        return partial(_added, step.value.rstrip(".") + ".")
    if step.option == "rename":
        old, _, new = step.value.partition("=")
        return _globbed(old, new)
    if step.option == "rename-regex":
        pattern, new = separators_in(step.value)
        return partial(re.compile(pattern).sub, new, count=1)
    raise TargetError(f"--{step.option} is no function of a name")


def _added(head: str, name: str) -> str:
    return head + name


def _globbed(old: str, new: str) -> Rename:
    """A renaming by glob; in what is made here there is one star at the end of each, or none."""
    head, star, _ = old.partition("*")
    into = new.partition("*")[0]

    def rename(name: str) -> str:
        if star:
            return into + name[len(head) :] if name.startswith(head) else name
        return into if name == head else name

    return rename


def separators_in(text: str) -> tuple[str, str]:
    """The pattern and the replacement of ``s/PATTERN/REPLACEMENT/``."""
    parts = text.split("/")
    if len(parts) != 4 or parts[0] != "s" or parts[3]:
        raise TargetError(f"{text!r} is not s/PATTERN/REPLACEMENT/")
    return parts[1], parts[2]


def pairs_of(steps: Sequence[Step]) -> list[tuple[str, str | bool]]:
    """(option, value) as ``ckptool edit`` and ``api.edit`` take them, True for a flag."""
    found: list[tuple[str, str | bool]] = []
    for step in steps:
        if step.option == "by-order":
            found += [("like", step.value), ("by-order", True)]
        else:
            found.append((step.option, step.value or True))
    return found


def command_words(path: str, steps: Sequence[Step], output: str, key: str | None) -> str:
    """The command line that does the steps, quoted for a shell."""
    words = ["ckptool edit", quote(path)]
    if key is not None:
        # It holds for the edits behind it.
        words += ["--key", quote(key or ".")]
    for option, value in pairs_of(steps):
        words.append(f"--{option}")
        if isinstance(value, str):
            words.append(quote(value))
    return " ".join([*words, "-o", quote(output)])
