"""Edits of entries: take one out as a checkpoint of its own, wrap, drop, keep, set, unset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from math import inf, nan
from shlex import quote
from typing import Final

from ..base.errors import RefusedError, TargetError
from ..base.globs import EVERY, Globs
from ..base.text import counted, cut, listed, shown
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import GraphEditor, used_storages
from ..checkpoint.objects import class_name, mapping
from ..checkpoint.paths import entries as entries_of
from ..checkpoint.paths import joined
from ..checkpoint.selection import new_key, selected, slot
from ..pickles.nodes import Dict, Graph, Node, Ref
from .lookup import lookup
from .optimizers import prune_optimizers

Scalar = bool | int | float | str | None


def extract(checkpoint: Checkpoint, key: str) -> Checkpoint:
    """Make the entry at the path ``key`` the whole checkpoint; storages that only others use leave the file.

    Raises TargetError when there is nothing at ``key``.
    """
    found = lookup(checkpoint, key)
    graph = checkpoint.graph
    kind = _kind(checkpoint, found.ref)
    change = Change("extract", key, 1, 0, f"{kind} taken out as a checkpoint of its own")
    if found.ref == graph.root:
        return checkpoint.changed(graph, [change._replace(number=0, kept=1, what="it is the whole file already")])
    return _slimmer(checkpoint, graph.edited({}, root=found.ref), [change])


def wrap(checkpoint: Checkpoint, key: str) -> Checkpoint:
    """Put the whole checkpoint under ``key`` of a new dict: the reverse of ``extract``."""
    if not key:
        raise TargetError("the key to wrap in is empty", next="name one, such as state_dict")
    rewrite = GraphEditor(checkpoint.graph)
    root = rewrite.add(Dict([rewrite.add(key), checkpoint.graph.root]))
    graph = rewrite.done(root)
    return checkpoint.changed(graph, [Change("wrap", "", 1, 0, f"wrapped as {shown(key)}")])


def drop(
    checkpoint: Checkpoint,
    globs: Sequence[str],
    *,
    key: str | None = None,
    only: Globs = EVERY,
    prune_optimizer: bool = False,
) -> Checkpoint:
    """Take out the entries and keys that match.

    A pattern matches top-level entries by key, and keys of state dicts by key or by whole path. With ``key``, the path
    of a state dict, only keys in that are looked at; of what matches, ``only`` chooses. What shares a storage or an
    object with something dropped keeps it. ``prune_optimizer`` takes the states of dropped parameters out of the
    optimizers, too. Raises RefusedError for a pattern that nothing matches, or where nobody can tell which state is
    whose.
    """
    globs = [globs] if isinstance(globs, str) else globs
    matched = dict.fromkeys(globs, 0)
    compiled = [(glob, Globs([glob])) for glob in globs]

    def goes(name: str, path: str) -> bool:
        hits = [glob for glob, pattern in compiled if pattern.match(name, path)]
        for glob in hits:
            matched[glob] += 1
        return bool(hits) and only.match(name, path)

    inside = None if key is None else {item.path for item in selected(checkpoint, key)}
    edited = _filtered(checkpoint, "drop", goes if key is None else _never, goes, inside, prune_optimizer)
    _refuse_unmatched(checkpoint, matched)
    return edited


def _never(_name: str, _path: str) -> bool:
    return False


def keep(
    checkpoint: Checkpoint,
    globs: Sequence[str],
    *,
    key: str | None = None,
    only: Globs = EVERY,
    prune_optimizer: bool = False,
) -> Checkpoint:
    """Take out what does not match, at the level where something does: of the entries, or of the keys.

    Where a pattern matches top-level entries, the other entries go; where one matches keys of a state dict, its other
    keys go. With ``key``, the path of a state dict, only keys in that are looked at; of what does not match, ``only``
    chooses what goes. Raises RefusedError for a pattern that nothing matches.
    """
    survey, graph = checkpoint.survey, checkpoint.graph
    numbers = set(range(len(survey.state_dicts)))
    if key is not None:
        chosen = {item.path for item in selected(checkpoint, key)}
        numbers = {number for number in numbers if survey.state_dicts[number].path in chosen}
    globs = [globs] if isinstance(globs, str) else globs
    matched = dict.fromkeys(globs, 0)
    entries: set[int] = set()
    keys: set[str] = set()
    for glob in globs:
        pattern = Globs([glob])
        named = {
            number
            for number, entry in enumerate(survey.entries)
            if key is None and pattern.match(entry.key, entry.path)
        }
        bare = any(item.ref == graph.root for item in survey.state_dicts)
        inside = {e.path for e in survey.tensors if e.state_dict in numbers and pattern.match(e.key, e.path)}
        matched[glob] = len(named) + len(inside)
        # The entries of a bare state dict are its keys.
        entries |= set() if bare else named
        keys |= inside
    _refuse_unmatched(checkpoint, matched)
    holders = {e.state_dict for e in survey.tensors if e.path in keys}
    filtered = {survey.state_dicts[number].path for number in holders}
    held = entries | {e.top for e in survey.tensors if e.path in keys}
    staying = {survey.entries[number].path for number in held if number >= 0}

    def entry_goes(name: str, path: str) -> bool:
        return bool(entries) and path not in staying and only.match(name, path)

    def key_goes(name: str, path: str) -> bool:
        return path not in keys and only.match(name, path)

    return _filtered(checkpoint, "keep", entry_goes, key_goes, filtered, prune_optimizer)


def drop_entries(checkpoint: Checkpoint, gone: Collection[str], changes: Sequence[Change]) -> Checkpoint:
    """Take the entries with the keys ``gone`` out of the root, with the account of it.

    By their keys: two entries may hold one object, such as None.
    """
    rewrite = GraphEditor(checkpoint.graph)
    nodes = checkpoint.graph.nodes
    items = mapping(checkpoint.graph, checkpoint.graph.root) or []
    rewrite.refill(
        checkpoint.graph.root,
        [item for item in items if not (type(name := nodes[item[0]]) is str and name in gone)],
    )
    return _slimmer(checkpoint, rewrite.done(), list(changes))


def _refuse_unmatched(checkpoint: Checkpoint, matched: dict[str, int]) -> None:
    missing = [glob for glob, count in matched.items() if not count]
    if not missing:
        return
    survey = checkpoint.survey
    deeper = Globs([f"*.{missing[0]}"])
    step = f"what is there: ckptool inspect {quote(checkpoint.path)} --tree"
    near = get_close_matches(missing[0], [entry.key for entry in survey.entries], 1)
    if any(deeper.match(entry.key) for entry in survey.tensors):
        step = f"keys match {quote('*.' + missing[0])}"
    elif near:
        step = f"did you mean {near[0]!r}?"
    elif any(deeper.match(entry.path) for entry in survey.tensors):
        step = "patterns match entries and keys of state dicts; ckptool unset takes out what stands elsewhere"
    what = f"nothing matches {listed([repr(glob) for glob in missing])}"
    raise RefusedError(what, path=checkpoint.path, next=step)


def _filtered(
    checkpoint: Checkpoint,
    edit: str,
    entry_goes: Callable[[str, str], bool],
    key_goes: Callable[[str, str], bool],
    inside: set[str] | None = None,
    prune_optimizer: bool = False,
) -> Checkpoint:
    """Take entries out of the root and keys out of the state dicts; ``inside`` only the state dicts at these paths."""
    graph, survey = checkpoint.graph, checkpoint.survey
    rewrite = GraphEditor(graph)
    changes = []
    numbers = {item.ref: number for number, item in enumerate(survey.state_dicts)}
    refs = {item.ref: item.path for item in survey.state_dicts if inside is None or item.path in inside}
    dropped: dict[int, list[str]] = {}
    gone: set[Ref] = set()
    root = mapping(graph, graph.root)
    if root is not None and graph.root not in refs:
        kept, names = _split(graph, "", graph.root, entry_goes)
        if names:
            rewrite.refill(graph.root, kept)
            changes.append(Change(edit, "", len(names), len(kept), f"dropped {listed(names)}"))
            gone = {value for _, value in root} - {value for _, value in kept}
    for ref, path in refs.items():
        if ref in gone:
            continue
        kept, names = _split(graph, path, ref, key_goes)
        if names:
            rewrite.refill(ref, kept)
            dropped[numbers[ref]] = names
            what = f"dropped {counted(len(names), 'key')}: {listed(names, most=3)}"
            changes.append(Change(edit, path, len(names), len(kept), what))
    if prune_optimizer and dropped:
        changes += prune_optimizers(checkpoint, rewrite, dropped)
    if not changes:
        return checkpoint.changed(graph, [Change(edit, "", 0, 0, "nothing to drop")])
    return _slimmer(checkpoint, rewrite.done(), changes)


def _split(
    graph: Graph, base: str, ref: Ref, goes: Callable[[str, str], bool]
) -> tuple[list[tuple[Ref, Ref]], list[str]]:
    """The items of a mapping that stay, and the names of those that go."""
    kept, names = [], []
    for step, value, key in entries_of(graph, ref):
        name, path = graph.nodes[key], joined(base, step)
        text = name if isinstance(name, str) else step
        if goes(text, path):
            names.append(text)
        else:
            kept.append((key, value))
    return kept, names


def set_entry(checkpoint: Checkpoint, key: str, value: Scalar) -> Checkpoint:
    """Give the scalar entry at a path another value, or add one to a mapping that is there.

    Raises RefusedError where something stands that is no scalar, TargetError where there is no mapping to hold it.
    """
    if getattr(value, "ndim", 1) == 0 and hasattr(value, "item"):
        value = value.item()  # type: ignore[union-attr]  # a scalar of numpy or torch
    if not (value is None or isinstance(value, bool | int | float | str)):
        what = f"a {type(value).__name__} is no scalar"
        raise TargetError(what, path=checkpoint.path, next="a number, a text, True, False or None")
    found = slot(checkpoint, key)
    if found is None:
        raise TargetError(f"there is no mapping that could hold {key!r}", path=checkpoint.path)
    rewrite = GraphEditor(checkpoint.graph)
    new = rewrite.add(value)
    if found.number < 0:
        items = [*found.items, (new_key(checkpoint, rewrite, key, found.key), new)]
        rewrite.refill(found.holder, items)
        return checkpoint.changed(rewrite.done(), [Change("set", key, 1, 0, f"added, {_told(value)}")])
    name, old = found.items[found.number]
    before = checkpoint.graph.nodes[old]
    if not (before is None or isinstance(before, bool | int | float | str)):
        what = f"{key!r} is a {_kind(checkpoint, old)}, not a scalar"
        raise RefusedError(what, path=checkpoint.path, next="drop it first if it is to go")
    if type(before) is type(value) and repr(before) == repr(value):
        return checkpoint.changed(checkpoint.graph, [Change("set", key, 0, 1, f"it is {_told(value)} already")])
    rewrite.refill(found.holder, [*found.items[: found.number], (name, new), *found.items[found.number + 1 :]])
    return checkpoint.changed(rewrite.done(), [Change("set", key, 1, 0, f"{_told(before)} -> {_told(value)}")])


#: How Python spells what JSON spells otherwise.
_PYTHON: Final = {"True": True, "False": False, "None": None, "nan": nan, "inf": inf, "-inf": -inf}


def as_scalar(told: str) -> Scalar:
    """A JSON scalar, or the text as it stands; raises TargetError for a list or an object."""
    import json

    if told in _PYTHON:
        return _PYTHON[told]
    try:
        value = json.loads(told)
    except json.JSONDecodeError:
        return told
    except ValueError as error:
        raise TargetError(f"no number that Python reads: {error}") from error
    if isinstance(value, list | dict):
        raise TargetError(f"{told!r} is no scalar", next="a number, a text, true, false or null")
    return value  # type: ignore[no-any-return]


def unset(checkpoint: Checkpoint, key: str) -> Checkpoint:
    """Take out the entry at a path, whatever it is; raises TargetError when there is none."""
    found = lookup(checkpoint, key)
    there = slot(checkpoint, found.path) if found.path else None
    if there is None or there.number < 0:
        raise TargetError(f"{key!r} is no entry of a mapping", path=checkpoint.path)
    rewrite = GraphEditor(checkpoint.graph)
    rewrite.refill(there.holder, [item for number, item in enumerate(there.items) if number != there.number])
    change = Change("unset", key, 1, 0, f"dropped, {_kind(checkpoint, found.ref)}")
    return _slimmer(checkpoint, rewrite.done(), [change])


def _kind(checkpoint: Checkpoint, ref: Ref) -> str:
    """What an entry is, in words: a tensor by its dtype and shape, another object by its class."""
    tensor = checkpoint.survey.reader.tensor(ref)
    if tensor is None:
        return class_name(checkpoint.graph, ref)
    return f"tensor, {tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _told(value: Node) -> str:
    return cut(repr(value))


def _slimmer(checkpoint: Checkpoint, graph: Graph, changes: list[Change]) -> Checkpoint:
    """The edited checkpoint; laid out anew where storages are used no more, so that their bytes go, or are met in
    another order, which the layout contract of ``.format_version`` forbids (formats: ``zips.layout_holds``)."""
    before, after = list(used_storages(checkpoint.graph, checkpoint.path)), list(used_storages(graph, checkpoint.path))
    anew = len(after) < len(before) if checkpoint.traits.in_a_row else after != before
    return checkpoint.changed(graph, changes, anew=anew)
