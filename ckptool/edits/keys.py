"""Rename the keys of state dicts: prefixes, wrappers, globs, regular expressions, tables. ``_metadata`` follows."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Final

from ..base.addresses import conceal
from ..base.errors import RefusedError, TargetError
from ..base.globs import MATCH_ALL, REGEX, Globs, Patterns, Renaming
from ..base.limits import LIMITS
from ..base.prefixes import common_prefix, unwrapper, wrapper_counts
from ..base.steps import AnyStep, command
from ..base.text import join_limited, pluralize, quoted, shown
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapping
from ..checkpoint.paths import spell_key
from ..checkpoint.selection import dotted, selected
from ..checkpoint.survey import StateDict
from ..formats.opening import takes_path
from ..pickles.nodes import Ref
from .optimizers import renamed_parameters

Rename = Callable[[str], str]

_REGEX_STEP: Final = r"write 's/^layers\.(\d+)/blocks.\1/'"
#: Maximum depth of nested modules that a rename table moves.
_DEPTH: Final = 64


@takes_path
def strip_prefix(
    checkpoint: Checkpoint,
    prefix: str = "module.",
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Strip a prefix of whole segments from the keys that have it.

    ``prefix`` "module." and "module" mean the same. ``key`` is the path of one state dict (default: all), ``include``
    and ``exclude`` choose keys. In ``_metadata`` the entry for the stripped module replaces the entry for "", as in
    torch's ``consume_prefix_in_state_dict_if_present``.

    Raise RefusedError if two keys would become one, TargetError if there is no state dict at ``key``.

    >>> with ckptool.open("training.pth") as checkpoint:
    ...     plain = ckptool.strip_module(checkpoint)
    ...     print(plain.changes[0].words)
    state_dict: prefix 'module.' removed from 14 keys
    """
    head, strip = _segments(prefix), stripping(prefix)
    words = f"prefix {head!r} removed from", f"no key has the prefix {head!r}"
    return _rename_keys(checkpoint, lambda _: strip, key, Globs(include, exclude), "strip-prefix", words)


def stripping(prefix: str) -> Rename:
    """Return a function that strips the prefix from a name, once."""
    return methodcaller("removeprefix", _segments(prefix))


@takes_path
def strip_wrappers(
    checkpoint: Checkpoint, *, key: str | None = None, include: Patterns = (), exclude: Patterns = ()
) -> Checkpoint:
    """Remove the segments of all known wrappers (``prefixes.WRAPPERS``) wherever they occur.

    Parameters and errors as for ``strip_prefix``.

    >>> list(ckptool.strip_wrappers("training.pth")["state_dict"])[-1]
    'head.bias'
    """
    words = "wrapper names removed from", "no key has the name of a wrapper in it"
    return _rename_keys(checkpoint, unwrapper, key, Globs(include, exclude), "strip-wrappers", words)


def strip(checkpoint: Checkpoint, *, wrappers: bool = False, **how: Any) -> Checkpoint:
    """Remove all wrappers, or a prefix."""
    return strip_wrappers(checkpoint, **how) if wrappers else strip_prefix(checkpoint, **how)


@takes_path
def add_prefix(
    checkpoint: Checkpoint,
    prefix: str = "module.",
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Put a prefix of whole segments before every key, even if the key already has it.

    In ``_metadata`` the entry for "" stays, and the model's own entries get the prefix. Parameters and errors as for
    ``strip_prefix``.

    >>> list(ckptool.add_module("model.pth"))[0]
    'module.conv1.weight'
    """
    head = _segments(prefix)
    words = f"prefix {head!r} added to", "no key is renamed"
    return _rename_keys(checkpoint, lambda _: head.__add__, key, Globs(include, exclude), "add-prefix", words)


def by_glob(
    checkpoint: Checkpoint, old: str, new: str, *, key: str | None = None, only: Globs = MATCH_ALL
) -> Checkpoint:
    """Rename the keys that match ``old`` to ``new``; each wildcard in ``new`` repeats the text matched in ``old``.

    For example ``backbone.*`` to ``encoder.*``, ``layer[45].*`` to ``block[45].*``, ``{module,model}.*`` to ``*``.
    Classes and braces may be omitted from ``new``. Raise RefusedError if no key matches or two would become one,
    TargetError if the wildcards differ.
    """
    if old.startswith(REGEX):
        raise TargetError(f"{quoted(old)} has no wildcards that the new name could repeat", next=_REGEX_STEP)
    renaming = Renaming(old, new)
    names = _all_names(checkpoint, key)
    if names and not any(map(renaming.matches, names)):
        from ..base.nearest import nearest_pattern

        near = nearest_pattern(old, names)
        message = f"no key matches {quoted(old)}" + (f"; did you mean {near!r}?" if near else "")
        raise RefusedError(message, path=checkpoint.path, next="what is there: " + command("keys", checkpoint.path))
    return _renamed(checkpoint, renaming.new_name, renaming.matches, f"{old}={new}", key, only)


def by_regex(
    checkpoint: Checkpoint,
    pattern: re.Pattern[str] | str,
    new: str,
    count: int = 1,
    *,
    key: str | None = None,
    only: Globs = MATCH_ALL,
) -> Checkpoint:
    """Replace the first ``count`` matches in each key (0: all); raise TargetError for an invalid expression."""
    try:
        compiled = re.compile(pattern)

        def rename(name: str) -> str:
            return compiled.sub(new, name, count=count)

        return _renamed(checkpoint, rename, lambda name: bool(compiled.search(name)), compiled.pattern, key, only)
    except (re.error, IndexError) as error:
        raise TargetError(f"not a regular expression: {error}", next=_REGEX_STEP) from error


def by_table(
    checkpoint: Checkpoint,
    table: Mapping[str, str],
    *,
    key: str | None = None,
    only: Globs = MATCH_ALL,
    label: str = "renamed by a table",
) -> Checkpoint:
    """Rename keys by a table, old to new; a module in ``_metadata`` moves where all its keys move.

    ``label`` begins the description of the change. Raise RefusedError if a key of the table does not exist, or two keys
    would become one.
    """
    names = set(_all_names(checkpoint, key))
    missing = [repr(name) for name in table if name not in names]
    if missing:
        step = command("keys", checkpoint.path)
        raise RefusedError(f"there is no key {join_limited(missing)}", path=checkpoint.path, next=step)
    return _renamed(checkpoint, _table_rename(table), lambda name: name in table, label, key, only)


def _all_names(checkpoint: Checkpoint, key: str | None) -> list[str]:
    return [name for state_dict in selected(checkpoint, key) for name in _names(checkpoint, state_dict)]


def _names(checkpoint: Checkpoint, state_dict: StateDict) -> list[str]:
    return [str(checkpoint.graph.nodes[ref]) for ref, _ in state_dict.items]


def _beside(checkpoint: Checkpoint, state_dict: StateDict) -> list[tuple[str, str]]:
    """Return the other entries of a root that holds more than a state dict, as renames to the same name."""
    whole = mapping(checkpoint.graph, state_dict.ref) or []
    if whole == state_dict.items:
        return []
    own = set(state_dict.items)
    names = [str(checkpoint.graph.nodes[item[0]]) for item in whole if item not in own]
    return [(name, name) for name in names]


def _renamed(
    checkpoint: Checkpoint, rename: Rename, matches: Callable[[str], bool], label: str, key: str | None, only: Globs
) -> Checkpoint:
    names = _all_names(checkpoint, key)
    if not any(map(matches, names)):
        message = f"no key matches {quoted(label)}" if names else "there is no state dict in it"
        raise RefusedError(message, path=checkpoint.path, next=command("keys", checkpoint.path))
    words = f"{label}:", f"{label}: the names are the same already"
    return _rename_keys(checkpoint, lambda _: rename, key, only, "rename", words)


def _table_rename(table: Mapping[str, str]) -> Rename:
    """Return a function that renames keys by a table. It also renames paths of modules, which end with a dot."""
    modules: dict[str, str] = {}
    for old, new in table.items():
        head, tail = old, new
        # Real modules are not nested deeper. All parents of a name with a million segments would fill the memory.
        for _ in range(_DEPTH if len(old) <= LIMITS.path_chars else 0):
            head, _, last = head.rpartition(".")
            tail, dot, other = tail.rpartition(".")
            if not head or last != other:
                break
            # A module whose keys move to different places stays.
            modules[head] = tail if modules.get(head, tail) == tail else head
            if not dot:
                break

    def rename(name: str) -> str:
        if not name.endswith("."):
            return table.get(name, name)
        head, rest = name[:-1], "."
        while head and head not in modules:
            # A module without keys moves with the module that contains it.
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return (modules[head] + rest).lstrip(".") if head else name

    return rename


def _rename_keys(
    checkpoint: Checkpoint,
    rename_for: Callable[[Sequence[str]], Rename],
    key: str | None,
    only: Globs,
    edit: str,
    words: tuple[str, str],
) -> Checkpoint:
    """Rename the keys of state dicts; ``only`` chooses the keys that may change.

    ``rename_for`` gets all names of one state dict and returns the function that renames one. ``words`` is a pair of
    messages: for renamed keys, and for no renamed key.

    ``_metadata`` follows: a module path is renamed as ``rename(path + ".")`` without the dot, and goes where the
    module's own keys go, to several places if necessary. Parameter names in optimizer states follow too. Raise
    RefusedError if two keys would become one.
    """
    only = dotted(only, checkpoint)
    editor = GraphEditor(checkpoint.graph)
    changes = []
    new_names: dict[str, str] = {}
    chosen_dicts = selected(checkpoint, key)
    for state_dict in chosen_dicts:
        names = _names(checkpoint, state_dict)
        chosen: Collection[str] = frozenset(names)
        if only:
            chosen = {name for name in names if only.match(name, spell_key(state_dict.path, name))}
        rename = rename_for(names)
        renamed = [rename(name) if name in chosen else name for name in names]
        pairs = list(zip(names, renamed))
        new_names.update(pairs)
        _refuse_collisions(checkpoint, state_dict, [*_beside(checkpoint, state_dict), *pairs])
        count = sum(old != new for old, new in pairs)
        # Other wrappers, or the same once more, are still there.
        inside = [repr(name) for name in wrapper_counts(renamed)] if edit == "strip-prefix" else []
        notes: tuple[AnyStep, ...] = (f"{join_limited(inside)} still inside: `--wrappers`",) if inside else ()
        if count:
            texts = {ref: editor.text(ref, new) for (ref, _), new in zip(state_dict.items, renamed)}
            whole = mapping(checkpoint.graph, state_dict.ref) or ()
            editor.refill(state_dict.ref, [(texts.get(ref, ref), value) for ref, value in whole])
            if state_dict.metadata >= 0:
                _rename_metadata(editor, state_dict.metadata, _module_rename(rename, only, names, chosen), pairs)
        elif shared := common_prefix(names):
            notes += (f"the keys begin with {shared!r}",)
        changes.append(Change(edit, state_dict.path, count, len(names) - count, words[not count], notes))
    others = [item for item in selected(checkpoint, None) if item not in chosen_dicts]
    changes += renamed_parameters(checkpoint, editor, new_names, others)
    edited = checkpoint.changed(editor.done(), changes)
    if checkpoint.survey.may_be_quantized:
        from ..checkpoint.quantized import refuse_torn  # few models are quantized

        refuse_torn(checkpoint, edited, edit)
    return edited


def _module_rename(rename: Rename, only: Globs, names: Sequence[str], chosen: Collection[str]) -> Rename:
    """Return the function that renames module paths; with a choice of keys, a module moves only if all its keys do."""
    if not only:
        return rename
    staying = sorted(name for name in names if name not in chosen)
    moving = sorted(chosen)

    def has(ordered: Sequence[str], path: str) -> bool:
        at = bisect_left(ordered, path)
        return at < len(ordered) and ordered[at].startswith(path)

    return lambda path: rename(path) if has(moving, path) and not has(staying, path) else path


def _rename_metadata(editor: GraphEditor, metadata: Ref, rename: Rename, pairs: Sequence[tuple[str, str]]) -> None:
    """Rename the module paths in ``_metadata``; ``pairs`` are the keys of the state dict, old and new."""
    items = mapping(editor.graph, metadata) or []
    paths = [editor.graph.nodes[ref] for ref, _ in items]
    if not all(type(path) is str for path in paths):
        return
    new_items = [
        (editor.text(items[place][0], path), items[source][1])
        for path, place, source in renamed_modules([str(path) for path in paths], rename, pairs)
    ]
    if new_items != items:
        editor.refill(metadata, new_items)


def renamed_modules(
    paths: Sequence[str], rename: Rename, pairs: Iterable[tuple[str, str]] = ()
) -> list[tuple[str, int, int]]:
    """Return each new module path with the index of the entry it replaces and the index of the entry with its value.

    If two paths become one, the later value takes the place of the earlier: the entry of ``module`` replaces the entry
    of "" when the prefix is stripped. ``pairs`` are keys, old and new. A module whose own keys move elsewhere goes with
    them: every place with one of its keys gets an entry, because ``load_state_dict`` looks for its version there.
    """
    homes: dict[str, dict[str, None]] = {}
    for old, new in pairs:
        (module, _, name), (home, _, other) = old.rpartition("."), new.rpartition(".")
        if name == other or old.count(".") == new.count("."):
            homes.setdefault(module, {})[home] = None
    whole = [rename(path + ".").removesuffix(".") if path else path for path in paths]
    # If all of a module's own keys are elsewhere, its renamed path does not count.
    first = [
        new if not path or new in homes.get(path, (new,)) else next(iter(homes[path]))
        for path, new in zip(paths, whole)
    ]
    taken = set(first)
    entries: dict[str, tuple[int, int]] = {}
    for number, (path, new) in enumerate(zip(paths, first)):
        entries[new] = (entries[new][0] if new in entries else number, number)
        for home in homes.get(path, ()):
            if home not in taken:
                entries[home] = (number, number)
    return [(path, place, source) for path, (place, source) in entries.items()]


def _refuse_collisions(checkpoint: Checkpoint, state_dict: StateDict, renames: Iterable[tuple[str, str]]) -> None:
    first: dict[str, str] = {}
    collisions = []
    for old, new in renames:
        other = first.setdefault(new, old)
        if other != old:
            collisions.append((other, old, new))
        if not new:
            raise RefusedError(f"the key {quoted(old)} would have no name left", path=checkpoint.path)
    if collisions:
        (other, old, new), *rest = collisions
        where = f" in {state_dict.path!r}" if state_dict.path else ""
        more = f", and {pluralize(len(rest), 'more pair')} likewise" if rest else ""
        pairs = [f"{quoted(other)} and {quoted(old)}" for other, old, _ in rest[: shown(0)]]
        more += f": {', '.join(pairs)}" if pairs else ""
        message = f"the keys {quoted(other)} and {quoted(old)}{where} would both be called {quoted(new)}{more}"
        raise RefusedError(message, path=checkpoint.path, next="take one of each pair out with drop")


def _segments(prefix: str) -> str:
    """Return the prefix with its closing dot; raise TargetError for an empty one."""
    head = prefix.rstrip(".") + "."
    if head == ".":
        raise TargetError("the prefix is empty", next="give a prefix such as 'module.'")
    return head


def is_sed(text: str) -> bool:
    """Return whether a text looks like ``s/OLD/NEW/``."""
    return re.match(r"s([/,#|]).+\1.*\1[gi]*$", text) is not None


def parse_rename(text: str) -> dict[str, Any]:
    """Parse ``OLD=NEW`` with wildcards, ``s/OLD/NEW/`` as in sed, or ``@FILE``; raise TargetError for other texts."""
    if text.startswith("@"):
        return {"table": conceal(text[1:])}
    if is_sed(text):
        return {"regex": parse_regex(text)}
    old, equals, new = text.partition("=")
    if not (equals and old and new):
        raise TargetError(f"{text!r} is not OLD=NEW", next=f"write 'backbone.*=encoder.*', or {_REGEX_STEP[6:]}")
    return {"glob": (old, new)}


def parse_regex(text: str) -> tuple[re.Pattern[str], str, int]:
    """Parse ``s/OLD/NEW/`` as in sed, with any separator for the slash and the flags ``g`` and ``i``.

    Return the expression, the replacement and how often to replace (0: always); raise TargetError for anything else.
    """
    separator = text[1:2]
    valid = text[:1] == "s" and separator and not separator.isalnum()
    parts = re.split(rf"(?<!\\){re.escape(separator)}", text) if valid else []
    if len(parts) != 4 or set(parts[3]) - set("gi") or not parts[1]:
        raise TargetError(f"{text!r} is not s/OLD/NEW/", next=_REGEX_STEP)
    old, new = (part.replace("\\" + separator, separator) for part in parts[1:3])
    try:
        return re.compile(old, re.IGNORECASE if "i" in parts[3] else 0), new, 0 if "g" in parts[3] else 1
    except re.error as error:
        raise TargetError(f"{old!r} is not a regular expression: {error}", next=_REGEX_STEP) from error


def parse_table(text: str, name: str) -> dict[str, str]:
    """Parse a JSON object, or lines with two columns: old name and new name. Raise TargetError for other texts."""
    if text.lstrip()[:1] == "{":
        import json

        try:
            renames = json.loads(text)
        except ValueError as error:
            raise TargetError(f"not JSON: {error}", path=name) from error
        if not all(isinstance(value, str) and value for value in renames.values()):
            raise TargetError("its values must be names", path=name, next='write {"old.name": "new.name"}')
        return dict(renames)
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
