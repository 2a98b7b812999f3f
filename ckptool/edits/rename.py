"""Renaming keys: by globs, by regular expressions, by a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from shlex import quote

from ..base.errors import RefusedError, TargetError
from ..base.globs import EVERY, Glob, Globs
from ..base.limits import LIMITS
from ..base.text import listed, shown
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import selected
from .keys import rename_keys

_WILD = re.compile(r"[*?]")
#: Modules within modules that a table of names moves.
_DEPTH = 64


def by_glob(checkpoint: Checkpoint, old: str, new: str, *, key: str | None = None, only: Globs = EVERY) -> Checkpoint:
    """Rename the keys that match ``old`` to ``new``, whose wildcards stand for what those of ``old`` matched.

    ``backbone.*`` to ``encoder.*``; ``*`` is any text, dots included, ``?`` one character. Raises RefusedError where
    no key matches, or two would become one; TargetError where the wildcards differ.
    """
    wild = _WILD.findall(old)
    if wild != _WILD.findall(new):
        what = f"{new!r} needs the wildcards of {old!r}, in their order: {' '.join(wild) or 'none'}"
        raise TargetError(what, next="write OLD=NEW such as 'backbone.*=encoder.*'")
    glob = Glob(old)
    parts = _WILD.split(new)

    def rename(name: str) -> str:
        found = glob.wild(name)
        if found is None:
            return name
        return parts[0] + "".join(text + part for text, part in zip(found, parts[1:]))

    return _renamed(checkpoint, rename, glob.matches, f"{old}={new}", key, only)


def by_regex(
    checkpoint: Checkpoint,
    pattern: re.Pattern[str] | str,
    new: str,
    *,
    count: int = 1,
    key: str | None = None,
    only: Globs = EVERY,
) -> Checkpoint:
    """Replace what a regular expression finds in keys, the first ``count`` times (0: always), as ``re.sub`` does.

    Raises RefusedError where no key matches, or two would become one; TargetError for a wrong expression.
    """
    try:
        compiled = re.compile(pattern)

        def rename(name: str) -> str:
            return compiled.sub(new, name, count=count)

        return _renamed(checkpoint, rename, lambda name: bool(compiled.search(name)), compiled.pattern, key, only)
    except (re.error, IndexError) as error:
        raise TargetError(f"no regular expression: {error}", next=r"write s/^layers\.(\d+)/blocks.\1/") from error


def by_table(
    checkpoint: Checkpoint,
    table: Mapping[str, str],
    *,
    key: str | None = None,
    only: Globs = EVERY,
    told: str = "renamed by a table",
) -> Checkpoint:
    """Rename keys by a table, old to new; a module in ``_metadata`` goes where all of its keys go.

    ``told`` is how the account begins.

    Raises RefusedError where a key of the table is nowhere, or two keys would become one.
    """
    there = {name for item in selected(checkpoint, key) for name in _names(checkpoint, item.items)}
    missing = [repr(name) for name in table if name not in there]
    if missing:
        what = f"there is no key {listed(missing)}"
        raise RefusedError(what, path=checkpoint.path, next=f"what is there: ckptool keys {quote(checkpoint.path)}")
    rename = _of_table(table)
    return _renamed(checkpoint, rename, lambda name: name in table, told, key, only)


def _names(checkpoint: Checkpoint, items: Sequence[tuple[int, int]]) -> list[str]:
    return [str(checkpoint.graph.nodes[ref]) for ref, _ in items]


def _renamed(
    checkpoint: Checkpoint,
    rename: Callable[[str], str],
    matches: Callable[[str], bool],
    told: str,
    key: str | None,
    only: Globs,
) -> Checkpoint:
    names = [name for item in selected(checkpoint, key) for name in _names(checkpoint, item.items)]
    if not any(map(matches, names)):
        what = f"no key matches {shown(told)}" if names else "there is no state dict in it"
        raise RefusedError(what, path=checkpoint.path, next=f"what is there: ckptool keys {quote(checkpoint.path)}")
    return rename_keys(
        checkpoint, rename, key=key, only=only, what=f"{told}:", nothing=f"{told}: the names are so already"
    )


def _of_table(table: Mapping[str, str]) -> Callable[[str], str]:
    """The function of names that a table makes, and of the paths of modules, which end with a dot."""
    modules: dict[str, str] = {}
    for old, new in table.items():
        head, tail = old, new
        # No module is deeper; the modules that a name of a million segments is in fill the memory.
        for _ in range(_DEPTH if len(old) <= LIMITS.path_chars else 0):
            head, _, last = head.rpartition(".")
            tail, dot, other = tail.rpartition(".")
            if not head or last != other:
                break
            # Where keys of one module go to different places, the module stays.
            modules[head] = tail if modules.get(head, tail) == tail else head
            if not dot:
                break

    def rename(name: str) -> str:
        if not name.endswith("."):
            return table.get(name, name)
        head, rest = name[:-1], "."
        while head and head not in modules:
            # A module without keys of its own goes with the one that it is in.
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return (modules[head] + rest).lstrip(".") if head else name

    return rename


# -- as they stand on a command line ------------------------------------------------------------------


def parse_glob(text: str) -> tuple[str, str]:
    """``OLD=NEW`` with wildcards; raises TargetError for anything else."""
    old, equals, new = text.partition("=")
    if not (equals and old and new):
        raise TargetError(f"{text!r} is not OLD=NEW", next="write 'backbone.*=encoder.*'")
    return old, new


def parse_regex(text: str) -> tuple[re.Pattern[str], str, int]:
    """``s/OLD/NEW/`` as sed has it, with any sign for the slash and the flags ``g`` and ``i``.

    Gives the expression, the replacement and how often (0: always); raises TargetError for anything else.
    """
    step = r"write 's/^layers\.(\d+)/blocks.\1/'"
    sign = text[1:2]
    parts = re.split(rf"(?<!\\){re.escape(sign)}", text) if text[:1] == "s" and sign and not sign.isalnum() else []
    if len(parts) != 4 or set(parts[3]) - set("gi") or not parts[1]:
        raise TargetError(f"{text!r} is not s/OLD/NEW/", next=step)
    old, new = (part.replace("\\" + sign, sign) for part in parts[1:3])
    try:
        return re.compile(old, re.IGNORECASE if "i" in parts[3] else 0), new, 0 if "g" in parts[3] else 1
    except re.error as error:
        raise TargetError(f"{old!r} is no regular expression: {error}", next=step) from error


def parse_table(text: str, name: str) -> dict[str, str]:
    """A JSON object, or two columns a line: old name, new name. Raises TargetError for anything else."""
    if text.lstrip()[:1] == "{":
        import json

        try:
            found = json.loads(text)
        except ValueError as error:
            raise TargetError(f"no JSON: {error}", path=name) from error
        if not all(isinstance(value, str) and value for value in found.values()):
            raise TargetError("its values must be names", path=name, next='write {"old.name": "new.name"}')
        return dict(found)
    table: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("\t") if "\t" in line else line.split(",") if "," in line else line.split()
        words = [word.strip() for word in words]
        if not any(words):
            continue
        if len(words) != 2 or not all(words):
            raise TargetError(f"line {number} is not two names", path=name, next="write: old.name new.name")
        if table.get(words[0], words[1]) != words[1]:
            raise TargetError(f"line {number} renames {words[0]!r} a second time", path=name)
        table[words[0]] = words[1]
    if not table:
        raise TargetError("it is empty", path=name, next="write a line for each key: old.name new.name")
    return table
