"""Edits as steps, each an option and its text, which ``ckptool edit`` applies in one pass over the file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..base.errors import TargetError, UnreadableError
from ..base.globs import Globs, Patterns
from ..base.records import NamedTuple
from ..base.steps import Step, command
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import read_bytes
from ..formats.opening import CheckpointOrPath, takes_path
from .table import EDITS, MODIFIERS, STEPS, function

if TYPE_CHECKING:
    from .matching.targets import MatchTarget

#: Maximum bytes of a name table; a larger file cannot be one.
_TABLE: Final = 64 << 20


class Call(NamedTuple):
    """An edit of the table with the arguments of its function: plain data that other processes can take."""

    edit: str
    arguments: Mapping[str, Any]

    @property
    def files(self) -> list[str]:
        """The files that the edit reads besides the checkpoint."""
        given = [value for name, value in self.arguments.items() if name in _FILES]
        return [path for value in given for path in ([value] if isinstance(value, str) else value or ())]


#: The parameters that name files; ``@FILE`` of ``rename`` becomes its parameter ``table``.
_FILES: Final = {"table", *(each.name for edit in EDITS.values() for each in edit.parameters if each.kind == "file")}


@takes_path
def edit(checkpoint: Checkpoint, steps: Iterable[tuple[str, str | bool]]) -> Checkpoint:
    """Apply several edits in order: ``[("extract", "state_dict"), ("wrappers", True), ("to", "cpu")]``.

    A step is an option of ``ckptool edit`` without its dashes, and its text. ``key``, ``include`` and ``exclude`` apply
    to the steps after them; new patterns after a step replace the earlier ones. Raise TargetError for an unknown step,
    and the errors of the edits.

    >>> steps = [("extract", "state_dict"), ("strip-module", True), ("to", "cpu")]
    >>> list(ckptool.edit("training.pth", steps))[0]
    'stem.0.weight'
    """
    return applied(checkpoint, calls(steps))


def applied(checkpoint: Checkpoint, edits: Iterable[Call]) -> Checkpoint:
    """Apply edits one after the other."""
    for call in edits:
        checkpoint = function(EDITS[call.edit].function)(checkpoint, **call.arguments)
    return checkpoint


def calls(steps: Iterable[tuple[str, str | bool]]) -> list[Call]:
    """Return the edits that the steps stand for; raise TargetError for an unknown step or an invalid text.

    Patterns to keep that follow each other with the same choice of keys are one edit.
    """

    def scoped(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name != "globs"}

    found: list[Call] = []
    scope: dict[str, Any] = {"key": None, "include": (), "exclude": ()}
    given: dict[str, Any] = {}
    used = False
    for name, value in steps:
        if name == "key":
            scope["key"] = None if value == "*" else value
        elif name in ("include", "exclude"):
            if used:
                # Patterns after a step apply to the next steps only.
                scope |= {"include": (), "exclude": ()}
                used = False
            scope[name] += (value,)
        elif name in MODIFIERS:
            given[name] = (*given.get(name, ()), value) if MODIFIERS[name].many else value
        elif name in STEPS:
            (kind, parameter), used = STEPS[name], True
            arguments = {choice: scope[choice] for choice in kind.scope}
            for each in kind.parameters:
                apart = parameter is not None and each.name in parameter.excludes
                if not each.step and each.spelled in given and not apart:
                    arguments |= each.parsed(given[each.spelled])
            if parameter is not None:
                arguments |= parameter.parsed((value,) if parameter.many else value)
            before = found[-1].arguments if found and found[-1].edit == kind.name == "keep" else None
            if before is not None and scoped(before) == scoped(arguments):
                # The second of two edits in a row would drop what the first one kept.
                arguments["globs"] = (*found.pop().arguments["globs"], *arguments["globs"])
            found.append(Call(kind.name, arguments))
        else:
            raise TargetError(f"there is no edit {name!r}", next=command("edit", help=True))
    return found


@takes_path
def rename(
    checkpoint: Checkpoint,
    table: Mapping[str, str] | str | os.PathLike[str] | None = None,
    *,
    glob: tuple[str, str] | None = None,
    regex: tuple[re.Pattern[str] | str, str] | tuple[re.Pattern[str] | str, str, int] | None = None,
    like: CheckpointOrPath | None = None,
    by_order: bool = False,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Rename keys of state dicts in exactly one way.

    The ways are: a ``table`` of names, or its path; ``glob`` (old, new); ``regex`` (expression, replacement, and how
    often it is replaced in a key: 1, or 0 for always); or the names in the checkpoint ``like``, paired by name or
    ``by_order``. ``_metadata`` and parameter names in optimizers follow. Raise RefusedError if nothing matches or two
    keys would become one, TargetError for invalid patterns.

    >>> list(ckptool.rename("model.pth", glob=("conv1.*", "stem.*")))[0]
    'stem.weight'
    >>> list(ckptool.rename("model.pth", regex=("^fc[.]", "head.")))[-1]
    'head.bias'
    """
    from .keys import by_glob, by_regex, by_table  # imported late, as every edit

    if sum(way is not None for way in (table, glob, regex, like)) != 1:
        raise TargetError("one way to rename is needed", next="table, glob=, regex= or like=")
    only = Globs(include, exclude)
    if glob is not None:
        return by_glob(checkpoint, *glob, key=key, only=only)
    if regex is not None:
        return by_regex(checkpoint, *regex, key=key, only=only)
    if like is not None:
        from .matching.targets import match_target, rename_like  # imported late: few renames need it

        # A state dict at the same path in the other checkpoint is preferred.
        target = match_target(like, preferred=key)
        return rename_like(checkpoint, target, by_order=by_order, key=key, only=only)
    if isinstance(table, str | os.PathLike):
        path = os.fspath(table)
        return by_table(checkpoint, read_table(path), label=f"renamed by {path}", key=key, only=only)
    return by_table(checkpoint, table or {}, key=key, only=only)


def apply_fix(
    checkpoint: Checkpoint, steps: Sequence[Step], target: MatchTarget, *, key: str | None = None
) -> Checkpoint:
    """Return the checkpoint after the steps of ``match``; ``key`` is the state dict whose names they change.

    ``target`` has the names for "rename-like"; it may be a model, which no option can name. Raise the
    errors of the edits.
    """
    from .matching.candidates import WHOLE
    from .matching.targets import rename_like

    for step in steps:
        if step.name == "rename-like":
            checkpoint = rename_like(checkpoint, target, key=key)
            continue
        if step.name in MODIFIERS:
            continue  # its edit reads it
        scope = [] if key is None or step.name in WHOLE else [Step("key", key)]
        checkpoint = edit(checkpoint, [*scope, *(other for other in steps if other.name in MODIFIERS), step])
        if step.name == "extract":
            key = None  # the extracted entry is now the whole checkpoint
    return checkpoint


def read_table(path: str) -> dict[str, str]:
    """Return the name table in a file; raise UnreadableError if it cannot be read, TargetError if it is invalid."""
    from .keys import parse_table

    try:
        text = read_bytes(path, _TABLE).decode()
    except UnicodeDecodeError as error:
        step = "see what it is: " + command("inspect", path)
        raise UnreadableError("it is not a text file", path=path, next=step) from error
    return parse_table(text, path)
