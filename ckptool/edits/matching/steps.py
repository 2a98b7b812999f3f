"""The steps of a fix: options of ``ckptool edit``, each a function of a name or a change of the whole file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

from ...base.errors import TargetError
from ...base.globs import Globs
from ...base.patterns import escaped
from ...base.prefixes import unwrapper
from ...base.records import NamedTuple
from ...base.steps import NextStep, Step, command
from ..keys import Rename, parse_regex, stripping

#: Options that do not change names.
LAYOUT: Final = frozenset(
    ("extract", "wrap", "drop", "to", "sanitize", "as-state-dict", "drop-unknown", "local-parts", "merge-entry")
)
#: Options that apply to the whole file.
WHOLE: Final = LAYOUT - {"extract", "wrap", "drop"}
#: Options whose value is the target.
FROM_TARGET: Final = frozenset(("rename-like",))
#: The most patterns by which a fix drops keys: more are no shorter than the list of keys.
_DROPS: Final = 4


class FixStep(NamedTuple):
    """One step: an ``option`` of ``ckptool edit``, with ``value`` "" for a flag.

    The option "rename-like" takes its names from the target.
    """

    option: str
    value: str = ""


Steps: TypeAlias = tuple[FixStep, ...]


def renaming(step: FixStep, names: Iterable[str]) -> Rename:
    """Return the function by which a step renames one name, given all names in the state dict.

    Raise TargetError for a step that does not rename.
    """
    if step.option == "strip-module":
        return stripping("module.")
    if step.option == "strip-prefix":
        return stripping(step.value)
    if step.option == "wrappers":
        return unwrapper(names)
    if step.option == "add-prefix":
        return step.value.__add__
    if step.option == "rename" and step.value.startswith("s/"):
        pattern, replacement, count = parse_regex(step.value)
        return partial(pattern.sub, replacement, count=count)
    if step.option == "rename":  # made by this package: a prefix, and a star on both sides
        old, new = (side.removesuffix("*") for side in step.value.split("=", 1))
        return lambda name: new + name.removeprefix(old) if name.startswith(old) else name
    raise TargetError(f"{step.option!r} does not rename")


def edit_command(path: str, steps: Sequence[FixStep], output: str, key: str | None) -> NextStep:
    """Return the command that applies the steps."""
    settings: list[Step] = []
    keyed = key is None
    for step in steps:
        if step.option not in WHOLE and not keyed:
            settings.append(Step("key", key or "."))  # it applies to the edits after it
            keyed = True
        settings.append(Step(step.option, step.value or True))
    return command("edit", path, output=output, steps=settings)


def drop_steps(names: Collection[str], unexpected: Sequence[str]) -> Steps:
    """Return the steps that drop exactly the unexpected keys; empty if a few patterns cannot do that."""
    bad = set(unexpected)
    kept = [name for name in names if name not in bad]
    by_module = _module_patterns(kept, unexpected)
    ends = Counter(name.rpartition(".")[2] for name in unexpected)
    for name in kept:
        ends.pop(name.rpartition(".")[2], None)
    # What a profiler adds to every module has an end of its own.
    many = [end for end, count in ends.items() if count >= _DROPS]
    others = [name for name in unexpected if name.rpartition(".")[2] not in many]
    by_end = [*(f"*{escaped(end)}" for end in many), *_module_patterns(kept, others)]
    for patterns in (by_module, by_end):
        if len(patterns) <= _DROPS:
            match = Globs(patterns)
            if {name for name in names if match.match(name)} == bad:
                return tuple(FixStep("drop", pattern) for pattern in patterns)
    return ()


def _module_patterns(kept: Iterable[str], unexpected: Sequence[str]) -> list[str]:
    """Return the patterns of the modules that hold only unexpected keys, at most one more than a fix may have."""
    wanted = {name[:at] for name in kept for at, char in enumerate(name) if char == "."}
    patterns: dict[str, None] = {}
    for name in unexpected:
        # Use the shortest prefix that no wanted key has; for a name alone in its module, the whole name.
        ends = (at for at, char in enumerate(name) if char == ".")
        head = next((name[:at] for at in ends if name[:at] not in wanted), None)
        patterns[escaped(name) if head is None else escaped(head) + ".*"] = None
        if len(patterns) > _DROPS:
            break
    return list(patterns)
