"""The table of edits, from which come the commands that edit, the options of ``ckptool edit``, and their documentation.

The table is ``table.json``: the edits by name, with the fields of ``Edit`` that differ from their defaults, and with
texts as lists of lines. "shared" holds parameters of several edits. Functions are named as ``module.function`` of this
package and imported when an edit is applied, so that help and the parsing of a command line import no edit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from ..base import lazy
from ..base.records import NamedTuple


class Parameter(NamedTuple):
    """A parameter of an edit: ``name`` is the keyword argument of its function.

    The command of the edit has it as an option ``--step``, or as ``--name`` with dashes for underscores; an
    ``argument`` stands without dashes. Without a ``metavar`` it is a flag. ``many`` values make a tuple. ``parse`` is
    the function that turns the text, or the tuple of texts, into the value; without a ``name`` it returns several
    arguments. ``kind`` says what a text names, ``choices`` all valid texts. The parameters in ``excludes`` cannot be
    given together with this one. ``rest`` marks the parameter for all inputs after the first. A ``bare`` value may
    also stand after the paths of its command.

    A step of ``edit`` is the same option: ``step`` applies the edit with this value, unless another edit has that name,
    and a parameter without a step modifies the steps of its edit. ``ckptool edit`` has the steps that
    ``cli/headings.json`` lists.
    """

    name: str
    help: str = ""
    metavar: str = ""
    step: str = ""
    default: str = ""
    argument: bool = False
    many: bool = False
    rest: bool = False
    bare: bool = False
    kind: Literal["", "file", "device", "keys", "other_key"] = ""
    choices: tuple[str, ...] = ()
    parse: str = ""
    excludes: tuple[str, ...] = ()

    @property
    def spelled(self) -> str:
        """The name of the option, without its dashes."""
        return self.step or self.name.replace("_", "-")

    def parsed(self, typed: Any) -> dict[str, Any]:
        """Return the arguments that the typed text, or the tuple of texts, stands for."""
        value = function(self.parse)(typed) if self.parse else typed
        return {self.name: value} if self.name else dict(value)


class Edit(NamedTuple):
    """An edit: its name, its ``function``, its ``title`` (one line of help) and its parameters.

    ``scope`` names the parameters of the function that choose a state dict and keys. ``flag`` is true if ``ckptool
    edit`` applies it by ``--name`` alone. ``summary`` and ``examples`` are the help of its own command; without them it
    has none. ``in_place`` is false for edits that compute or move bytes, ``of_keys`` true for edits that rename keys,
    ``frees`` for edits that leave unused bytes in a file edited in place. ``in_order``: each option of the command is
    applied by itself, one after the other. ``splits`` is a function that names the folders of an output, if it is
    several; the function of the edit takes each as ``model``.
    """

    name: str
    function: str
    title: str
    parameters: tuple[Parameter, ...]
    scope: tuple[str, ...]
    flag: bool = False
    in_place: bool = True
    of_keys: bool = False
    frees: bool = False
    in_order: bool = False
    splits: str = ""
    summary: str = ""
    examples: str = ""


def _read() -> tuple[dict[str, Edit], dict[str, Parameter]]:
    """Return the edits in ``table.json``, and the parameters that several of them share."""
    with open(os.path.join(os.path.dirname(__file__), "table.json"), encoding="utf-8") as file:
        table: dict[str, dict[str, Any]] = json.load(file)
    shared = {name: _parameter(given) for name, given in table.pop("shared").items()}
    edits = {}
    for name, given in table.items():
        listed = given.get("parameters", ())
        parameters = (shared[each] if isinstance(each, str) else _parameter(each) for each in listed)
        given |= {field: "\n".join(given.get(field, ())) for field in ("summary", "examples")}
        given |= {"parameters": tuple(parameters), "scope": tuple(given.get("scope", ("key", "include", "exclude")))}
        edits[name] = Edit(name, **given)
    return edits, shared


def _parameter(given: Mapping[str, Any]) -> Parameter:
    fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    return Parameter(**fields)


_EDITS, _SHARED = _read()
#: The option of ``convert`` and of ``--to-names``.
CONFIG: Final = _SHARED["config"]
#: The edits by their names, in the order of the file.
EDITS: Final[Mapping[str, Edit]] = _EDITS

#: The options that apply an edit: the edit, and the parameter that takes the value, or None for a flag.
STEPS: Final[Mapping[str, tuple[Edit, Parameter | None]]] = {
    name: (edit, parameter)
    for edit in EDITS.values()
    for name, parameter in ((edit.name if edit.flag else "", None), *((each.step, each) for each in edit.parameters))
    if name == edit.name or (name and name not in EDITS)
}
#: The options that modify the steps of an edit, with their parameters. An option that is a step itself modifies none.
#: If several edits have an option with the same name, an edit with steps comes first.
MODIFIERS: Final[Mapping[str, Parameter]] = {
    each.spelled: each
    for edit in sorted(EDITS.values(), key=lambda edit: any(item.step for item in edit.parameters))
    for each in edit.parameters
    if not each.step and each.spelled not in STEPS
}


def function(name: str) -> Callable[..., Any]:
    """Import and return the function ``module.function`` of this package."""
    module, _, last = name.rpartition(".")
    found: Callable[..., Any] = getattr(lazy.module(f"edits.{module}"), last)
    return found
