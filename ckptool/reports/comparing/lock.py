"""Lock files: what a checkpoint must hold, as a small JSON that reviews well. Made, read, and compared with a file.

Schema ``ckptool.lock/1``: ``layout`` and ``container`` of the root; ``state_dicts`` by path ("." for the root), each
with its keys in the order of the file; ``tensors`` outside of state dicts by path; ``entries``, the types of the top
level unless that is a state dict itself. A tensor is {"dtype", "shape", "device"}, with "kind" where it is not dense
and "hash" where content is locked (the digest of ``ckptool hash --each``); another value is {"type"}. The same
checkpoint gives the same bytes: no path, no time, no version of a tool.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from ...base.errors import MalformedError, RefusedError, TargetError
from ...base.text import argument, counted
from ...checkpoint.checkpoint import Checkpoint, layout_of
from ...checkpoint.programs import NO_WEIGHTS, program_of
from ...checkpoint.survey import TopEntry
from ..checks import FAIL, NOT_POSSIBLE, PASS, Check, Note
from .fingerprint import Digests
from .places import Place, Side

SCHEMA: Final = "ckptool.lock/1"
#: Bytes of a lock: 200,000 tensors with hashes have 40 MB.
_MOST: Final = 1 << 30


def lock_of(
    checkpoint: Checkpoint, *, content: bool = False, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """The lock of a checkpoint; with ``content`` every tensor is read and has its hash.

    Raises RefusedError for a program without weights, MalformedError where bytes are missing, with ``content``.
    """
    survey, graph = checkpoint.survey, checkpoint.graph
    if not survey.tensors and program_of(checkpoint) is not None:
        what = f"{NO_WEIGHTS}: a lock holds names and tensors, and would fit every such program"
        raise RefusedError(what, path=checkpoint.path, next=f"sha256sum {argument(checkpoint.path)}")
    side = Side(checkpoint)
    digests = Digests(side, progress)
    if content:
        digests.add(Place(entry.path, entry.ref, entry.tensor) for entry in survey.tensors)

    def described(ref: int) -> dict[str, Any]:
        tensor = side.tensor(ref)
        if tensor is None:
            return {"type": side.type(ref)}
        found: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "device": tensor.location}
        if tensor.kind not in ("dense", "storage"):
            found["kind"] = tensor.kind
        if content and tensor.kind != "storage":
            found["hash"] = digests.of(ref, tensor)
        return found

    state_dicts = {
        item.path or ".": {str(graph.nodes[key]): described(value) for key, value in item.items}
        for item in checkpoint.state_dicts
    }
    outside = {entry.path or ".": described(entry.ref) for entry in survey.tensors if entry.state_dict < 0}
    kind, container = layout_of(checkpoint)
    entries = {} if "." in state_dicts else {_entry_name(entry): side.type(entry.ref) for entry in survey.entries}
    return {
        "schema": SCHEMA,
        "layout": kind,
        "container": container,
        "state_dicts": state_dicts,
        "tensors": outside,
        "entries": entries,
    }


def _entry_name(entry: TopEntry) -> str:
    """The key where it is a string, else its step; a string that looks like a step is spelled as one, too."""
    return entry.path if entry.key[:1] in ("[", "(", "") else entry.key


def lock_text(lock: Mapping[str, Any]) -> str:
    """The lock as JSON with a line for each tensor and each entry, so that a review shows what changed. ASCII only."""
    head = ("schema", "layout", "container")
    lines = ["{", *(f"  {json.dumps(name)}: {json.dumps(lock[name])}," for name in head)]
    lines += _object("state_dicts", lock["state_dicts"], 2, last=False)
    lines += _object("tensors", lock["tensors"], 2, last=False)
    lines += _object("entries", lock["entries"], 2, last=True)
    return "\n".join([*lines, "}"]) + "\n"


def _object(name: str, values: Mapping[str, Any], indent: int, *, last: bool) -> Iterator[str]:
    """An object, with a line for each member; a state dict is one with such lines of its own."""
    space, end = " " * indent, "" if last else ","
    if not values:
        yield f"{space}{json.dumps(name)}: {{}}{end}"
        return
    yield f"{space}{json.dumps(name)}: {{"
    for number, (key, value) in enumerate(values.items(), 1):
        if name == "state_dicts" and indent == 2:
            yield from _object(key, value, 4, last=number == len(values))
        else:
            comma = "," if number < len(values) else ""
            yield f"{space}  {json.dumps(key)}: {json.dumps(value)}{comma}"
    yield f"{space}}}{end}"


def read_lock(path: str) -> dict[str, Any]:
    """A lock file; raises TargetError where it cannot be read, or is none."""
    try:
        status = os.stat(path)
        return _read_lock(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise TargetError(f"the lock cannot be read: {error.strerror}", path=path) from error


@lru_cache(maxsize=1)
def _read_lock(path: str, state: tuple[int, ...]) -> dict[str, Any]:
    """The lock in a file in this state: a folder of checkpoints is checked against one lock."""
    step = "make one with ckptool lock PATH -o FILE"
    try:
        if state[2] > _MOST:
            raise TargetError(f"it has {state[2]:,} bytes: that is no lock", path=path, next=step)
        with open(path, "rb") as file:
            found = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise TargetError(f"the lock is no JSON: {error}", path=path, next=step) from error
    wrong = _flaw(found)
    if wrong:
        raise TargetError(f"it is no lock: {wrong}", path=path, next=step)
    return dict(found)


def _flaw(lock: Any) -> str:
    """What makes it no lock, "" for nothing."""
    if not isinstance(lock, dict):
        return "it is no JSON object"
    if lock.get("schema") != SCHEMA:
        return f"its schema is {lock.get('schema')!r}, not {SCHEMA!r}"
    for name in ("layout", "container"):
        if not isinstance(lock.get(name), str):
            return f"{name!r} is not a string"
    for name in ("state_dicts", "tensors", "entries"):
        if not isinstance(lock.get(name), dict):
            return f"{name!r} is no object"
    for path, held in lock["state_dicts"].items():
        if not path:
            return "a state dict has no path: '.' is the whole file"
        if not isinstance(held, dict):
            return f"the state dict {path!r} is no object"
    for held in (*lock["state_dicts"].values(), lock["tensors"]):
        for name, value in held.items():
            if not isinstance(value, dict) or not _is_value(value):
                return f"what it says of {name!r} is neither a tensor nor a type"
    if not all(isinstance(value, str) for value in lock["entries"].values()):
        return "the types of 'entries' are no texts"
    return ""


def _is_value(value: Mapping[str, Any]) -> bool:
    if "dtype" not in value:
        return isinstance(value.get("type"), str)
    shape = value.get("shape")
    texts = [value["dtype"], value.get("device"), value.get("kind", ""), value.get("hash", "")]
    return isinstance(shape, list) and all(type(size) is int for size in shape) and all(type(t) is str for t in texts)


# -- a checkpoint against a lock -----------------------------------------------------------------------


def lock_checks(
    checkpoint: Checkpoint,
    lock: Mapping[str, Any],
    *,
    quick: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Check]:
    """The check "lock", and where the lock has hashes the check "lock-content", which ``quick`` leaves out.

    The order of keys does not count.
    """
    hashed = any("hash" in value for held in _held(lock).values() for value in held.values())
    error: MalformedError | None = None
    try:
        found = lock_of(checkpoint, content=hashed and not quick, progress=progress)
    except MalformedError as problem:
        error, found = problem, lock_of(checkpoint)
    notes = [*_moved(lock, found)]
    tensors = sum(len(held) for held in _held(lock).values())
    checks = [_check("lock", notes, f"as locked: {counted(tensors, 'value')}")]
    if not hashed:
        return checks
    if error is not None:
        note = Note("lock-content", "error", f"the content cannot be read: {error.what}")
        return [*checks, _check("lock-content", [note], "")]
    if quick:
        return [*checks, Check("lock-content", "expectations", NOT_POSSIBLE, "left out by --quick")]
    number = sum("hash" in value for held in _held(lock).values() for value in held.values())
    good = f"as locked: the content of {counted(number, 'tensor')}"
    return [*checks, _check("lock-content", [*_content(lock, found)], good)]


def _check(name: str, notes: list[Note], good: str) -> Check:
    if not notes:
        return Check(name, "expectations", PASS, good)
    more = f" (and {len(notes) - 1:,} more)" if len(notes) > 1 else ""
    return Check(name, "expectations", FAIL, notes[0].message + more, tuple(notes))


def _held(lock: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The values of a lock by where they stand: a state dict, or None for outside of them."""
    return {**lock["state_dicts"], "": lock["tensors"]}


def _moved(lock: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Note]:
    for name in ("layout", "container"):
        if lock[name] != found[name]:
            label = "the root" if name == "container" else "the layout"
            yield Note(f"lock-{name}", "error", f"{label} is {found[name]}, locked {lock[name]}")
    locked, there = _held(lock), _held(found)
    for place in (*locked, *(place for place in there if place not in locked)):
        if place not in there or place not in locked:
            word, code = ("missing", "lock-missing") if place in locked else ("new", "lock-added")
            yield Note(code, "error", f"the state dict {place!r} is {word}", place)
            continue
        ours, theirs = locked[place], there[place]
        for name in ours:
            if name not in theirs:
                yield Note("lock-missing", "error", f"{_name(place, name)} is missing", name)
        for name, value in theirs.items():
            if name not in ours:
                yield Note("lock-added", "error", f"{_name(place, name)} is new: {_words(value)}", name)
        for name, old in ours.items():
            if name in theirs:
                yield from _value(_name(place, name), name, old, theirs[name])
    for key, kind in lock["entries"].items():
        now = found["entries"].get(key)
        if now is None:
            yield Note("lock-entry", "error", f"the entry {key!r} is missing", key)
        elif now != kind:
            yield Note("lock-entry", "error", f"the entry {key!r} is {now}, locked {kind}", key)
    for key, kind in found["entries"].items():
        if key not in lock["entries"]:
            yield Note("lock-entry", "error", f"the entry {key!r} is new: {kind}", key)


def _value(label: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Note]:
    if ("dtype" in old) != ("dtype" in new):
        yield Note("lock-type", "error", f"{label} is {_words(new)}, locked {_words(old)}", name)
        return
    for what in ("type", "kind", "dtype", "shape", "device"):
        one, other = old.get(what, ""), new.get(what, "")
        if one != other:
            words = [_shape(value) if what == "shape" else value or "dense" for value in (other, one)]
            yield Note(f"lock-{what}", "error", f"{label}: {what} {words[0]}, locked {words[1]}", name)


def _content(lock: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Note]:
    there = _held(found)
    for place, held in _held(lock).items():
        for name, old in held.items():
            new = there.get(place, {}).get(name, {})
            if "hash" in old and "hash" in new and old["hash"] != new["hash"]:
                yield Note("lock-content", "error", f"{_name(place, name)} has another content", name)


def _name(place: str, name: str) -> str:
    return name if place in ("", ".") else f"{place}: {name}"


def _words(value: Mapping[str, Any]) -> str:
    return f"{value['dtype']} {_shape(value['shape'])}" if "dtype" in value else str(value["type"])


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"
