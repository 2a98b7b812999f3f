"""Edit entries, and the texts of a header: extract one as a standalone checkpoint, drop, keep, set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf, nan
from typing import Final

from ..base.errors import RefusedError, TargetError, UnreadableError
from ..base.globs import REGEX, Glob, Globs, Patterns, is_pattern, split_globs
from ..base.steps import command, suggested_output, tree_step
from ..base.text import cut, join_limited, pluralize
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor, used_storages
from ..checkpoint.objects import class_name, mapping
from ..checkpoint.paths import entries as entries_of
from ..checkpoint.paths import joined
from ..checkpoint.selection import TEXTS, dotted, lookup, new_key, selected, slot, text_names
from ..files.archives import read_bytes
from ..formats.opening import takes_path
from ..pickles.nodes import Graph, Ref

Scalar = bool | int | float | str | None

#: The most bytes of a text from a file.
_LONGEST_TEXT: Final = 16 << 20
#: Python's spellings of constants that JSON spells differently.
_PYTHON: Final = {"True": True, "False": False, "None": None, "nan": nan, "inf": inf, "-inf": -inf}


@takes_path
def extract(checkpoint: Checkpoint, key: str | None = None) -> Checkpoint:
    """Make the entry at the path ``key`` the whole checkpoint; drop storages that only other entries use.

    Without ``key``, take the only state dict. Raise TargetError if nothing is at ``key``, or there is no such state
    dict, or more than one.

    >>> list(ckptool.extract("training.pth", "state_dict"))[:2]
    ['module.stem.0.weight', 'module.stem.1.weight']
    """
    dicts = [item.path or "." for item in checkpoint.state_dicts]
    if key is None and len(dicts) != 1:
        found, step = "it holds no state dict", command("inspect", checkpoint.path)
        if dicts:
            found = f"the state dicts are {join_limited(dicts)}"
            step = command("extract", checkpoint.path, dicts[0], output=suggested_output(checkpoint.path, "weights"))
        raise TargetError(f"say what to extract: {found}", path=checkpoint.path, next=step)
    key = dicts[0] if key is None else key
    entry = lookup(checkpoint, key)
    graph = checkpoint.graph
    if entry.ref == graph.root:
        return checkpoint.changed(graph, [Change("extract", key, 0, 1, "it is the whole file already")])
    change = Change("extract", key, 1, 0, f"{_description(checkpoint, entry.ref)} extracted as a standalone checkpoint")
    return _without_unused(checkpoint, graph.edited({}, root=entry.ref), [change], by_name=True)


@takes_path
def drop(
    checkpoint: Checkpoint,
    globs: Patterns,
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Drop the entries and keys that match.

    A pattern matches top-level entries by key, and keys of state dicts by key or by whole path; another entry goes by
    its exact path. Texts of a header go by ``__metadata__.NAME``, which may be a pattern, or by their names. With
    ``key``, the path of a state dict, only keys in it are considered. ``include`` and ``exclude`` narrow the matches. A
    storage or object that is also used elsewhere is kept there. Raise RefusedError if a pattern matches nothing.

    >>> list(ckptool.drop("training.pth", ["optimizer", "*.head.*"]))
    ['epoch', 'best_mIoU', 'state_dict']
    """
    only, named = dotted(Globs(include, exclude), checkpoint), [globs] if isinstance(globs, str) else globs
    if key is None and checkpoint.container.holds_texts:
        checkpoint, named = _without_texts(checkpoint, named, only)
        if not named:
            return checkpoint
    # The path of an entry may look like a pattern for other names, as [5] does, or like one that has no meaning.
    odd = [glob for glob in named if key is None and _is_odd(glob)]
    paths = [glob for glob in odd if is_entry(checkpoint, glob)]
    patterns = _patterns(checkpoint, [glob for glob in named if glob not in paths])
    matched = dict.fromkeys(patterns, 0)

    def goes(name: str, path: str) -> bool:
        hits = [glob for glob, pattern in patterns.items() if pattern.match(name, path)]
        for glob in hits:
            matched[glob] += 1
        return bool(hits) and only.match(name, path)

    inside = None if key is None else {item.path for item in selected(checkpoint, key)}
    by_name = not any(map(is_pattern, patterns))
    edited = _filtered(checkpoint, "drop", goes if key is None else None, goes, inside, by_name)
    deeper = [glob for glob, count in matched.items() if not count and key is None and is_entry(checkpoint, glob)]
    _refuse_unmatched(checkpoint, {glob: count for glob, count in matched.items() if glob not in deeper})
    if not any(matched.values()) and (paths or deeper):
        edited = checkpoint
    for path in (*paths, *deeper):
        edited = unset(edited, path)
    return edited


def _without_texts(checkpoint: Checkpoint, globs: Sequence[str], only: Globs) -> tuple[Checkpoint, list[str]]:
    """Drop the texts of the header that patterns name; return the other patterns, too.

    "format" goes only by its exact name, because libraries refuse a file without it.
    """
    texts, gone, others = checkpoint.metadata, dict[str, str | None](), list[str]()
    for glob in globs:
        found = [name for name in text_names(checkpoint, glob) or () if name in texts and glob != TEXTS]
        if not found and not glob.removeprefix(REGEX).removeprefix("^").startswith(TEXTS):
            others.append(glob)
            continue
        pattern = Glob(f"{TEXTS}.*" if glob == TEXTS else glob)
        found = found or [name for name in texts if name != "format" and pattern.matches(f"{TEXTS}.{name}")]
        if not found:
            what, step = f"nothing in the header matches {glob!r}", command("get", checkpoint.path, TEXTS)
            raise RefusedError(what, path=checkpoint.path, next=step)
        gone |= {name: None for name in found if only.match(name, f"{TEXTS}.{name}")}
    if not gone:
        return checkpoint, others
    names = [f"{TEXTS}.{name}" for name in gone]
    change = Change("drop", "", len(gone), len(texts) - len(gone), f"dropped {join_limited(names)}")
    return checkpoint.with_texts(gone, [change]), others


def is_entry(checkpoint: Checkpoint, path: str) -> bool:
    """Return whether a path leads to an entry of a mapping."""
    with suppress(TargetError):
        found = lookup(checkpoint, path)
        place = slot(checkpoint, found.path) if found.path else None
        return place is not None and place.number >= 0
    return False


def _is_odd(text: str) -> bool:
    """Return whether a path could be read as a pattern for other names, or is not one that has a meaning."""
    if is_pattern(text) or ("[" in text and '"' not in text):
        return True
    with suppress(TargetError):
        Globs([text])
        return False
    return True


def _patterns(checkpoint: Checkpoint, globs: Patterns) -> dict[str, Globs]:
    return {glob: dotted(Globs([glob]), checkpoint) for glob in ([globs] if isinstance(globs, str) else globs)}


@takes_path
def keep(
    checkpoint: Checkpoint,
    globs: Patterns,
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Drop what does not match: among the top-level entries, among the keys of a state dict, or both.

    If a pattern matches top-level entries, the other entries are dropped; if one matches keys of a state dict, its
    other keys are dropped. With ``key``, the path of a state dict, only keys in it are considered. ``include`` and
    ``exclude`` narrow what is dropped. Raise RefusedError for a pattern that matches nothing.

    >>> list(ckptool.keep("training.pth", ["state_dict", "epoch"]))
    ['epoch', 'state_dict']
    """
    graph, survey = checkpoint.graph, checkpoint.survey
    chosen = None if key is None else {item.path for item in selected(checkpoint, key)}
    candidates = [
        (_name(graph, step, name), joined(item.path, step), number)
        for number, item in enumerate(survey.state_dicts)
        if chosen is None or item.path in chosen
        for step, _, name in entries_of(graph, item.ref)
    ]
    # The entries of a bare state dict are its keys; they are matched as keys only.
    bare = any(item.ref == graph.root for item in survey.state_dicts)
    matched: dict[str, int] = {}
    entries: set[int] = set()
    keys: set[str] = set()
    filtered: set[int] = set()
    only = dotted(Globs(include, exclude), checkpoint)
    for glob, pattern in _patterns(checkpoint, globs).items():
        top = [] if key is not None else [n for n, e in enumerate(survey.entries) if pattern.match(e.key, e.path)]
        inside = {path: number for name, path, number in candidates if pattern.match(name, path)}
        matched[glob] = len(top) + len(inside)
        entries.update(() if bare else top)
        keys |= inside.keys()
        filtered |= {*inside.values()}
    _refuse_unmatched(checkpoint, matched)
    tops = {entry.top for entry in survey.tensors if entry.state_dict in filtered}
    staying = {survey.entries[number].path for number in entries | tops if number >= 0}

    def entry_goes(name: str, path: str) -> bool:
        return bool(entries) and path not in staying and only.match(name, path)

    def key_goes(name: str, path: str) -> bool:
        return path not in keys and only.match(name, path)

    paths = {survey.state_dicts[number].path for number in filtered}
    return _filtered(checkpoint, "keep", entry_goes, key_goes, paths, not any(map(is_pattern, matched)))


def drop_entries(checkpoint: Checkpoint, gone: Collection[str], changes: Sequence[Change]) -> Checkpoint:
    """Drop the entries with the keys ``gone`` from the root; ``changes`` describe the edit.

    Entries are identified by key, because two entries may hold one object, such as None.
    """
    graph = checkpoint.graph
    editor = GraphEditor(graph)
    items = mapping(graph, graph.root) or []
    editor.refill(graph.root, [item for item in items if type(n := graph.nodes[item[0]]) is not str or n not in gone])
    return _without_unused(checkpoint, editor.done(), changes)


def _refuse_unmatched(checkpoint: Checkpoint, matched: Mapping[str, int]) -> None:
    missing = [glob for glob, count in matched.items() if not count]
    if not missing:
        return
    from ..base.nearest import nearest_pattern

    survey = checkpoint.survey
    inside = [entry for entry in survey.tensors if entry.state_dict >= 0]
    keys, paths = [entry.key for entry in inside], [entry.path for entry in inside]
    tops = [entry.key for entry in survey.entries]
    # A dotted pattern means keys: the end of it could be the name of an entry that holds all weights.
    near = {glob: nearest_pattern(glob, keys if "." in glob else [*tops, *keys], paths) for glob in missing}
    texts = checkpoint.metadata if checkpoint.container.holds_texts else ()
    near |= {glob: f"{TEXTS}.{glob}" for glob in missing if any(map(Globs([glob]).match, texts))}
    message = f"nothing matches {join_limited([repr(glob) for glob in missing])}"
    if any("," in glob for glob in missing):
        message += "; patterns are given one by one, without commas"
    if any(near.values()):
        message += f"; did you mean {join_limited([repr(name) for name in near.values() if name])}?"
    raise RefusedError(message, path=checkpoint.path, next=tree_step(checkpoint.path))


def drop_keys(checkpoint: Checkpoint, path: str, gone: Collection[str]) -> Checkpoint:
    """Drop these keys of the state dict at ``path``."""
    keys = frozenset(gone)
    return _filtered(checkpoint, "drop", None, lambda name, _: name in keys, {path}, True)


def _filtered(
    checkpoint: Checkpoint,
    edit: str,
    entry_goes: Callable[[str, str], bool] | None,
    key_goes: Callable[[str, str], bool],
    inside: set[str] | None,
    by_name: bool,
) -> Checkpoint:
    """Drop entries of the root, and keys of the state dicts ``inside``; ``by_name``: the user gave no wildcards."""
    graph, survey = checkpoint.graph, checkpoint.survey
    editor = GraphEditor(graph)
    changes = []
    gone: set[Ref] = set()
    dicts = enumerate(survey.state_dicts)
    numbers = {item.ref: number for number, item in dicts if inside is None or item.path in inside}
    root = mapping(graph, graph.root)
    if root is not None and graph.root not in numbers and entry_goes is not None:
        kept, names = _split(graph, "", graph.root, entry_goes)
        if names:
            editor.refill(graph.root, kept)
            changes.append(Change(edit, "", len(names), len(kept), f"dropped {join_limited(names)}"))
            gone = {value for _, value in root} - {value for _, value in kept}
    for ref, number in numbers.items():
        if ref in gone:
            continue
        path = survey.state_dicts[number].path
        kept, names = _split(graph, path, ref, key_goes)
        if names:
            editor.refill(ref, kept)
            summary = f"dropped {pluralize(len(names), 'key')}: {join_limited(names, most=3)}"
            changes.append(Change(edit, path, len(names), len(kept), summary))
    if not changes:
        return checkpoint.changed(graph, [Change(edit, "", 0, 0, "nothing to drop")])
    edited = _without_unused(checkpoint, editor.done(), changes, by_name=by_name)
    if survey.may_be_quantized:
        from ..checkpoint.quantized import refuse_torn  # few models are quantized

        refuse_torn(checkpoint, edited, edit)
    return edited


def _split(
    graph: Graph, base: str, ref: Ref, goes: Callable[[str, str], bool]
) -> tuple[list[tuple[Ref, Ref]], list[str]]:
    kept, names = [], []
    for step, value, key in entries_of(graph, ref):
        text = _name(graph, step, key)
        if goes(text, joined(base, step)):
            names.append(text)
        else:
            kept.append((key, value))
    return kept, names


def _name(graph: Graph, step: str, key: Ref) -> str:
    """Return the name that patterns match: the entry's key if it is a string, otherwise its step in a path."""
    name = graph.nodes[key]
    return name if isinstance(name, str) else step


@takes_path
def set_entry(checkpoint: Checkpoint, key: str, value: Scalar) -> Checkpoint:
    """Set the scalar entry at a path, or add one to an existing mapping.

    ``__metadata__.NAME`` is a text of the header, and its value a string. Raise RefusedError if the existing value is
    not a scalar, TargetError if no mapping can hold the entry.

    >>> ckptool.set("training.pth", "epoch", 0)["epoch"]
    0
    """
    if getattr(value, "ndim", 1) == 0 and hasattr(value, "item"):
        value = value.item()  # type: ignore[union-attr]  # a scalar of numpy or torch
    if not isinstance(value, Scalar):
        message = f"a {type(value).__name__} is not a scalar"
        raise TargetError(message, path=checkpoint.path, next="a number, a text, True, False or None")
    if names := text_names(checkpoint, key):
        return _with_text(checkpoint, key, names[0], value)
    place = slot(checkpoint, key)
    if place is None:
        raise TargetError(f"no mapping can hold {key!r}", path=checkpoint.path)
    editor, items = GraphEditor(checkpoint.graph), list(place.items)
    new, words = editor.add(value), cut(repr(value))
    if place.number < 0:
        items.append((new_key(checkpoint, editor, key, place.key), new))
        summary = f"added, {words}"
    else:
        name, old = items[place.number]
        before = checkpoint.graph.nodes[old]
        if not isinstance(before, Scalar):
            message = f"{key!r} is a {_description(checkpoint, old)}, not a scalar"
            raise RefusedError(message, path=checkpoint.path, next="drop it first if it is to go")
        if type(before) is type(value) and repr(before) == repr(value):
            return checkpoint.changed(checkpoint.graph, [Change("set", key, 0, 1, f"it is {words} already")])
        items[place.number] = (name, new)
        summary = f"{cut(repr(before))} -> {words}"
    editor.refill(place.holder, items)
    return checkpoint.changed(editor.done(), [Change("set", key, 1, 0, summary)])


def _with_text(checkpoint: Checkpoint, key: str, name: str, value: Scalar) -> Checkpoint:
    if not isinstance(value, str) or key == TEXTS:
        what = f"{key!r} holds the texts of the header" if key == TEXTS else f"{key!r} holds a text, not {value!r}"
        raise TargetError(what, path=checkpoint.path, next=f"set {TEXTS}.NAME to a text")
    old, path = checkpoint.metadata.get(name), f"{TEXTS}.{name}"
    what = f"{cut(repr(old))} -> {cut(repr(value))}" if old is not None else f"added, {cut(repr(value))}"
    change = Change("set", path, 1, 0, what)
    change = change._replace(number=0, kept=1, what=f"it is {cut(repr(value))} already") if old == value else change
    return checkpoint.with_texts({name: value}, [change])


def set_spelled(checkpoint: Checkpoint, key: str, text: str) -> Checkpoint:
    """Set the entry at a path to the scalar that a text spells; a text of a header is set to the text itself.

    ``@FILE`` is the text of a file, and ``@@`` begins a text with @.
    """
    if text.startswith("@"):
        return set_entry(checkpoint, key, text[1:] if text[1:2] == "@" else _text_of(text[1:]))
    return set_entry(checkpoint, key, as_scalar(text) if text_names(checkpoint, key) is None else text)


def _text_of(path: str) -> str:
    try:
        return read_bytes(path, _LONGEST_TEXT).decode("utf-8")
    except (UnreadableError, UnicodeDecodeError) as error:
        what = getattr(error, "what", "it is not UTF-8")
        raise TargetError(what, path=path, next="a string that begins with @ is written with @@") from error


def parse_globs(text: str) -> tuple[str, ...]:
    """Parse patterns separated by commas."""
    return tuple(split_globs(text))


def parse_pair(text: str) -> dict[str, str]:
    """Parse ``KEY=VALUE``; raise TargetError for other texts."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TargetError(f"{text!r} is not KEY=VALUE", next="write epoch=0")
    return {"key": key.strip(), "text": value}


def as_scalar(text: str) -> Scalar:
    """Return the JSON scalar that a text spells, or the text itself; raise TargetError for a list or an object."""
    import json

    if text in _PYTHON:
        return _PYTHON[text]
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    except ValueError as error:
        raise TargetError(f"not a number that Python reads: {error}") from error
    if isinstance(value, list | dict):
        raise TargetError(f"{text!r} is not a scalar", next="a number, a text, true, false or null")
    return value  # type: ignore[no-any-return]


def unset(checkpoint: Checkpoint, key: str) -> Checkpoint:
    """Drop the entry at a path, whatever it holds; raise TargetError if nothing is there."""
    entry = lookup(checkpoint, key)
    place = slot(checkpoint, entry.path) if entry.path else None
    if place is None or place.number < 0:
        raise TargetError(f"{key!r} is not an entry of a mapping", path=checkpoint.path)
    editor = GraphEditor(checkpoint.graph)
    editor.refill(place.holder, [item for number, item in enumerate(place.items) if number != place.number])
    change = Change("drop", key, 1, 0, f"dropped, {_description(checkpoint, entry.ref)}")
    return _without_unused(checkpoint, editor.done(), [change], by_name=True)


def _description(checkpoint: Checkpoint, ref: Ref) -> str:
    """Describe an entry: a tensor by dtype and shape, any other object by its class."""
    tensor = checkpoint.survey.reader.tensor(ref)
    if tensor is None:
        return class_name(checkpoint.graph, ref)
    return f"tensor, {tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _without_unused(
    checkpoint: Checkpoint, graph: Graph, changes: Sequence[Change], *, by_name: bool = False
) -> Checkpoint:
    """Return the edited checkpoint without the bytes of unused storages.

    The file is also laid out again if a reader now meets its storages in another order, because ``.format_version``
    promises the order of the pickle (docs/formats.md).
    """
    before, after = (list(used_storages(version, checkpoint.path)) for version in (checkpoint.graph, graph))
    relayout = len(after) < len(before) if checkpoint.traits.storages_in_sequence else after != before
    return checkpoint.changed(graph, changes, needs_relayout=relayout, by_name=by_name)
