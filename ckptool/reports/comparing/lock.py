"""Lock files: the expected content of a checkpoint as a small, reviewable JSON. Written, read, and checked.

Schema ``ckptool.lock/1``: ``layout`` and ``container`` of the root; ``state_dicts`` by path ("." for the root), each
with its keys in file order; ``tensors`` outside of state dicts by path; ``entries``, the types of the top-level entries
unless the root is a state dict. A tensor is {"dtype", "shape", "device"}, with "kind" if it is not dense and "hash" if
content is locked (the digest of ``ckptool hash --each``); another value is {"type"}. The same checkpoint always gives
the same bytes, because the lock has no path, time or tool version.

Schema ``ckptool.lock-folder/1``, for a folder of checkpoints: ``files`` has a lock for each name in the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, cast

from ...base.errors import MalformedError, RefusedError, TargetError, UnreadableError, refuse_remote
from ...base.findings import INCOMPLETE, Finding
from ...base.globs import MATCH_ALL, Globs
from ...base.records import NamedTuple, TypedDict
from ...base.steps import Line, argument, command
from ...base.text import pluralize, shape_text
from ...checkpoint.checkpoint import Checkpoint, layout_of
from ...checkpoint.paths import spell_key
from ...checkpoint.programs import NO_WEIGHTS, program_of
from ...checkpoint.selection import ChosenKeys, dotted
from ...checkpoint.survey import TopEntry
from ...files.archives import file_of, read_bytes
from ...files.sources import FilePath, Plan, open_error
from ...files.write.copying import Progress
from ...files.write.output import Written, check_output, write_file
from ...formats.checkpoint_search import find_checkpoints, is_folder_of_checkpoints
from ...formats.opening import CheckpointOrPath, open_checkpoint, opened, path_text
from ..checks import NOT_POSSIBLE, Check, judge
from .places import Place, Side

SCHEMA: Final = "ckptool.lock/1"
FOLDER_SCHEMA: Final = "ckptool.lock-folder/1"
#: The members of a lock by their types.
_MEMBERS: Final = {("layout", "container"): str, ("state_dicts", "tensors", "entries"): dict}
#: Maximum bytes of a lock file. One with 200,000 tensors and their hashes has 40 MB.
_MAX_BYTES: Final = 1 << 30


class LockedValue(TypedDict, total=False):
    """One value in a lock.

    ``type`` is for a value that is not a tensor. A tensor has dtype, shape and device, ``kind`` unless it is dense, and
    ``hash`` if its content is locked.
    """

    type: str
    dtype: str
    shape: list[int]
    device: str
    kind: str
    hash: str


class Lock(TypedDict):
    """The lock of a checkpoint, schema ``ckptool.lock/1``."""

    schema: Literal["ckptool.lock/1"]
    layout: str
    container: str
    state_dicts: dict[str, dict[str, LockedValue]]
    tensors: dict[str, LockedValue]
    entries: dict[str, str]


class FolderLock(TypedDict):
    """The lock of a folder, schema ``ckptool.lock-folder/1``: locks by name relative to the folder, with slashes."""

    schema: Literal["ckptool.lock-folder/1"]
    files: dict[str, Lock]


class Locked(NamedTuple):
    """The content of a lock file: a lock under "" for any checkpoint, or with ``folder`` one for each file name."""

    files: dict[str, Lock]
    folder: bool

    def of(self, path: str, roots: Sequence[str] = ()) -> Lock | None:
        """Return the lock of the checkpoint at ``path``, or None.

        Below one of the folders ``roots``, the name relative to it decides; elsewhere the longest name that the path
        ends with.
        """
        if not self.folder:
            return self.files[""]
        root = next((root for root in roots if _within(path, root)), None)
        if root is not None:
            return self.files.get(_name_in(path, root))
        parts = os.path.normpath(path).split(os.sep)
        ends = ("/".join(parts[at:]) for at in range(len(parts)))
        return next((self.files[end] for end in ends if end in self.files), None)

    def missing(self, paths: Collection[str], roots: Sequence[str]) -> list[str]:
        """Return the locked files that are not among ``paths``, as paths in the first of ``roots``."""
        if not self.folder or not roots:
            return []
        there = {_name_in(path, root) for root in roots for path in paths if _within(path, root)}
        return [os.path.join(roots[0], name) for name in self.files if name not in there]


def _within(path: str, root: str) -> bool:
    return _name_in(path, root).split("/")[0] != os.pardir


def _name_in(path: str, root: str) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def lock_of(
    checkpoint: Checkpoint,
    only: Globs = MATCH_ALL,
    *,
    content: bool = False,
    storages: bool = False,
    progress: Progress | None = None,
) -> Lock:
    """Return the lock of the chosen part of a checkpoint; with ``content`` every tensor is read and hashed.

    With ``storages``, storages without a tensor are locked like tensors. Raise RefusedError for a program without
    weights; with ``content``, MalformedError if bytes are missing.
    """
    survey, graph = checkpoint.survey, checkpoint.graph
    if not survey.tensors and program_of(checkpoint) is not None:
        message = f"{NO_WEIGHTS}: a lock covers names and tensors, and would match every such program"
        raise RefusedError(message, path=checkpoint.path, next=Line(f"sha256sum {argument(checkpoint.path)}"))
    side, chosen = Side(checkpoint), ChosenKeys(dotted(only, checkpoint))
    places = side.tensors() if storages else ()
    bare = [place for place in places if place.tensor.kind == "storage" and place.path in chosen]
    digests = None
    if content:
        from .fingerprint import Digests  # imported late: loads OpenSSL

        digests = Digests(side, progress)
        digests.add(Place(entry.path, entry.ref, entry.tensor) for entry in chosen.tensors(survey))
        digests.add(bare)

    def locked(ref: int) -> LockedValue:
        tensor = side.tensor(ref)
        if tensor is None:
            return {"type": side.type(ref)}
        value: LockedValue = {"dtype": tensor.dtype, "shape": list(tensor.shape), "device": tensor.location}
        if tensor.kind not in ("dense", "storage") or (storages and tensor.kind == "storage"):
            value["kind"] = tensor.kind
        if digests is not None and (storages or tensor.kind != "storage"):
            value["hash"] = digests.digest_of(ref, tensor)
        return value

    state_dicts = {
        item.path or ".": {
            str(graph.nodes[key]): locked(value)
            for key, value in item.items
            if chosen.key(item.path, str(graph.nodes[key]))
        }
        for item in checkpoint.state_dicts
    }
    outside = {entry.path or ".": locked(entry.ref) for entry in chosen.tensors(survey) if entry.state_dict < 0}
    named = {value for item in checkpoint.state_dicts for _, value in item.items}
    outside |= {place.path or ".": locked(place.ref) for place in bare if place.ref not in named}
    layout, container = layout_of(checkpoint)
    entries = {} if "." in state_dicts else {_entry_name(entry): side.type(entry.ref) for entry in survey.entries}
    lock: Lock = {
        "schema": SCHEMA,
        "layout": layout,
        "container": container,
        "state_dicts": state_dicts,
        "tensors": outside,
        "entries": entries,
    }
    return _part(lock, chosen)


def _part(lock: Lock, chosen: ChosenKeys) -> Lock:
    """Return the chosen part of a lock. A state dict stays if it, or a key in it, is chosen."""
    if not chosen.only:
        return lock
    state_dicts: dict[str, dict[str, LockedValue]] = {}
    for path, values in lock["state_dicts"].items():
        base = "" if path == "." else path
        part = {name: value for name, value in values.items() if chosen.key(base, name)}
        state_dicts |= {path: part} if part or base in chosen else {}
    tensors = {path: value for path, value in lock["tensors"].items() if ("" if path == "." else path) in chosen}
    entries = {
        name: kind
        for name, kind in lock["entries"].items()
        if (name if name[:1] in ("[", "(") else spell_key("", name)) in chosen
    }
    return {**lock, "state_dicts": state_dicts, "tensors": tensors, "entries": entries}


def _entry_name(entry: TopEntry) -> str:
    return entry.path if entry.key[:1] in ("[", "(", "") else entry.key


def lock_text(lock: Lock | FolderLock) -> str:
    """Return the lock as ASCII JSON with one line per tensor and entry, so that a review shows the changes."""
    return "\n".join(["{", *_member_lines(lock, 2, 4 if lock["schema"] == FOLDER_SCHEMA else 2), "}\n"])


def _member_lines(members: Mapping[str, Any], indent: int, levels: int) -> Iterator[str]:
    """Yield a line for each member. Level 4 is the lock of a folder, 3 its files, 2 a lock, and 1 its state dicts."""
    for number, (name, value) in enumerate(members.items(), 1):
        start, comma = f"{' ' * indent}{json.dumps(name)}: ", "," if number < len(members) else ""
        if levels and value and isinstance(value, dict):
            yield start + "{"
            nested = 0 if levels == 2 and name != "state_dicts" else levels - 1
            yield from _member_lines(value, indent + 2, nested)
            yield f"{' ' * indent}}}{comma}"
        else:
            yield f"{start}{json.dumps(value)}{comma}"


def read_lock(path: str) -> Locked:
    """Read a lock file; raise TargetError if it cannot be read or is not a lock."""
    try:
        refuse_remote(path)
        status = os.stat(file_of(path))
    except UnreadableError as error:
        raise TargetError(f"the lock cannot be read: {error.what}", path=error.path, next=error.step) from error
    except OSError as error:
        reason, step = open_error(error, path)
        raise TargetError(f"the lock cannot be read: {reason}", path=path, next=step) from error
    return _read_lock(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4)
def _read_lock(path: str, state: tuple[int, ...]) -> Locked:
    """Read the lock in a file with this ``state``; cached, because many checkpoints are checked against one lock."""
    step = f"make one with '{command('lock', 'CHECKPOINT', output='LOCK').line}'"
    try:
        lock = json.loads(read_bytes(path, _MAX_BYTES))
    except UnreadableError as error:
        raise TargetError(f"the lock cannot be read: {error.what}", path=path, next=error.step or step) from error
    except (ValueError, RecursionError) as error:
        raise TargetError(f"the lock is not JSON: {error}", path=path, next=step) from error
    folder = isinstance(lock, dict) and lock.get("schema") == FOLDER_SCHEMA
    files = lock.get("files") if folder else {"": lock}
    if not isinstance(files, dict):
        raise TargetError("it is not a lock: 'files' is not an object", path=path, next=step)
    for name, item in files.items():
        if not _is_lock(item):
            where = f"{name}: " if folder else ""
            raise TargetError(f"it is not a lock: {where}no object as {SCHEMA} describes it", path=path, next=step)
    return Locked(cast("dict[str, Lock]", files), folder)


def _is_lock(lock: Any) -> bool:
    if not isinstance(lock, dict) or lock.get("schema") != SCHEMA:
        return False
    if not all(isinstance(lock.get(name), cls) for names, cls in _MEMBERS.items() for name in names):
        return False
    groups = (*lock["state_dicts"].values(), lock["tensors"])
    return (
        all(isinstance(values, dict) and all(map(_is_value, values.values())) for values in groups)
        and "" not in lock["state_dicts"]  # "." is the whole file
        and all(isinstance(value, str) for value in lock["entries"].values())
    )


def _is_value(value: Any) -> bool:
    if not isinstance(value, dict) or "dtype" not in value:
        return isinstance(value, dict) and isinstance(value.get("type"), str)
    shape = value.get("shape")
    texts = [value["dtype"], value.get("device"), value.get("kind", ""), value.get("hash", "")]
    return isinstance(shape, list) and all(type(size) is int for size in shape) and all(type(t) is str for t in texts)


# -- a checkpoint against a lock


def lock_checks(
    checkpoint: Checkpoint,
    lock: Lock,
    only: Globs = MATCH_ALL,
    *,
    quick: bool = False,
    progress: Progress | None = None,
) -> list[Check]:
    """Return the check "lock", and if the lock has hashes also "lock-content", which ``quick`` skips.

    ``only`` chooses keys and entries. The order of keys does not matter.
    """
    of, only = f", of {only.words}" if only else "", dotted(only, checkpoint)
    lock = _part(lock, ChosenKeys(only))
    locked = [value for values in _groups(lock).values() for value in values.values()]
    hashes = sum("hash" in value for value in locked)
    error: MalformedError | None = None
    storages = any(value.get("kind") == "storage" for value in locked)
    try:
        actual = lock_of(checkpoint, only, content=bool(hashes) and not quick, storages=storages, progress=progress)
    except MalformedError as problem:
        error, actual = problem, lock_of(checkpoint, only, storages=storages)
    good = f"as locked: {pluralize(len(locked), 'value')}{of}"
    checks = [judge("lock", "expectations", [*_structure_notes(lock, actual)], good)]
    if not hashes:
        return checks
    if error is not None:
        note = Finding("lock-content", "error", f"the content cannot be read: {error.what}")
        return [*checks, judge("lock-content", "expectations", [note], "")]
    if quick:
        return [*checks, Check("lock-content", "expectations", NOT_POSSIBLE, "skipped by the quick check")]
    good = f"as locked: the content of {pluralize(hashes, 'tensor')}{of}"
    return [*checks, judge("lock-content", "expectations", [*_content_notes(lock, actual)], good)]


def _groups(lock: Lock) -> dict[str, dict[str, LockedValue]]:
    """Return the values in a lock by the path of their state dict; "" for values outside."""
    return {**lock["state_dicts"], "": lock["tensors"]}


def _structure_notes(lock: Lock, actual: Lock) -> Iterator[Finding]:
    for code, noun, now, then in (
        ("lock-layout", "layout", actual["layout"], lock["layout"]),
        ("lock-container", "root", actual["container"], lock["container"]),
    ):
        if now != then:
            yield Finding(code, "error", f"the {noun} is {now}, the lock says {then}")
    locked, present = _groups(lock), _groups(actual)
    for path in {**locked, **present}:
        if path not in present or path not in locked:
            word, code = ("missing", "lock-missing") if path in locked else ("new", "lock-added")
            yield Finding(code, "error", f"the state dict {path!r} is {word}", path)
            continue
        old, new = locked[path], present[path]
        for name in (name for name in old if name not in new):
            yield Finding("lock-missing", "error", f"{_label(path, name)} is missing", name)
        for name, value in new.items():
            if name not in old:
                yield Finding("lock-added", "error", f"{_label(path, name)} is new: {_value_text(value)}", name)
        for name, value in old.items():
            if name in new:
                yield from _value_notes(_label(path, name), name, value, new[name])
    kinds = actual["entries"]
    for key in {**lock["entries"], **kinds}:
        kind, before = kinds.get(key), lock["entries"].get(key)
        if kind != before:
            change = f"new: {kind}" if before is None else f"{kind}, the lock says {before}"
            yield Finding("lock-entry", "error", f"the entry {key!r} is {'missing' if kind is None else change}", key)


def _value_notes(label: str, name: str, old: LockedValue, new: LockedValue) -> Iterator[Finding]:
    if ("dtype" in old) != ("dtype" in new):
        yield Finding("lock-type", "error", f"{label} is {_value_text(new)}, the lock says {_value_text(old)}", name)
        return
    for field, one, other in (
        ("type", old.get("type"), new.get("type")),
        ("kind", old.get("kind", "dense"), new.get("kind", "dense")),
        ("dtype", old.get("dtype"), new.get("dtype")),
        ("shape", shape_text(old.get("shape", ())), shape_text(new.get("shape", ()))),
        ("device", old.get("device"), new.get("device")),
    ):
        if one != other:
            yield Finding(f"lock-{field}", "error", f"{label}: {field} {other}, the lock says {one}", name)


def _content_notes(lock: Lock, actual: Lock) -> Iterator[Finding]:
    present = _groups(actual)
    for path, values in _groups(lock).items():
        for name, old in values.items():
            new = present.get(path, {}).get(name, {})
            if "hash" in old and old["hash"] != new.get("hash"):
                what = "has other content" if "hash" in new else "is not there to compare"
                yield Finding("lock-content", "error", f"{_label(path, name)} {what}", name)


def _label(path: str, name: str) -> str:
    return name if path in ("", ".") else f"{path}: {name}"


def _value_text(value: LockedValue) -> str:
    return f"{value['dtype']} {shape_text(value['shape'])}" if "dtype" in value else value["type"]


def not_locked(path: str) -> Check:
    """Return the check of a checkpoint that its folder's lock does not name."""
    note = Finding("lock-file-added", "error", "the lock does not name this file")
    return judge("lock", "expectations", [note], path)


def lock(path: CheckpointOrPath, *, content: bool = False, progress: Progress | None = None) -> Lock | FolderLock:
    """Return the content of a lock file, schema ``ckptool.lock/1``: keys, shapes, dtypes, devices, types of entries.

    ``content`` adds a hash of each tensor's values. For a folder of checkpoints it is ``ckptool.lock-folder/1``: a lock
    for each, by its relative name. ``validate(path, {"lock": FILE})`` compares a checkpoint with it.

    >>> lock = ckptool.lock("model.pth")
    >>> sorted(lock)
    ['container', 'entries', 'layout', 'schema', 'state_dicts', 'tensors']
    """
    folder = _searched_folder(path)
    if folder:
        return _folder_lock(folder, content, progress)
    with opened(path) as checkpoint:
        return whole_lock(checkpoint, content, progress)


def whole_lock(checkpoint: Checkpoint, content: bool, progress: Progress | None = None) -> Lock:
    """Return the lock of a checkpoint; raise RefusedError if some of its files are missing or unreadable."""
    missing = next((one for one in checkpoint.container.problems if one.code == INCOMPLETE), None)
    if missing is not None:
        what = f"{missing.message}; a lock of the rest would pass for the whole"
        step = "get the files again that are missing or damaged, then lock it"
        raise RefusedError(what, path=checkpoint.path, next=step)
    return lock_of(checkpoint.in_full(), content=content, storages=content, progress=progress)


def _searched_folder(path: CheckpointOrPath) -> str:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return name if is_folder_of_checkpoints(name) else ""


def _folder_lock(folder: str, content: bool, progress: Progress | None) -> FolderLock:
    files: dict[str, Lock] = {}
    for item in find_checkpoints([folder]):
        if isinstance(item, UnreadableError):
            raise item
        with open_checkpoint(item.path) as checkpoint:
            files[_name_in(item.path, folder)] = whole_lock(checkpoint, content, progress)
    return {"schema": FOLDER_SCHEMA, "files": files}


def write_lock(
    path: CheckpointOrPath,
    output: FilePath,
    *,
    content: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the lock of a checkpoint, or of a folder of checkpoints, to a file, atomically.

    Parameters and errors are as for ``lock`` and ``save``.

    >>> written = ckptool.write_lock("model.pth", "model.lock.json", content=True)
    >>> ckptool.validate("model.pth", {"lock": "model.lock.json"})["valid"]
    True
    """
    name, folder = path_text(output), _searched_folder(path)
    if folder:
        check_output(name, (), force=force)
        return write_locks(_folder_lock(folder, content, progress)["files"], name, folder, force=force)
    with opened(path) as checkpoint:
        check_output(name, checkpoint.sources, force=force)
        lock = whole_lock(checkpoint, content, progress)
        return write_file(Plan((lock_text(lock).encode("ascii"),)), name, checkpoint.sources, force=force)


def write_locks(files: dict[str, Lock], output: FilePath, folder: str = os.curdir, *, force: bool = False) -> Written:
    """Write the locks of the checkpoints in a folder, by name, as its lock; errors are as for ``write_lock``."""
    name = path_text(output)
    check_output(name, (), force=force)
    inputs = [os.path.join(folder, file) for file in files] if os.path.exists(name) else []
    if any(os.path.exists(path) and os.path.samefile(path, name) for path in inputs):
        raise RefusedError("the output is one of the checkpoints", path=name, next="write to another file")
    text = lock_text({"schema": FOLDER_SCHEMA, "files": files})
    return write_file(Plan((text.encode("ascii"),)), name, (), force=force)
