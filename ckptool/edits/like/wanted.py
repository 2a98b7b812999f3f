"""What a target wants: the names, shapes and dtypes of a state dict, from a checkpoint, a lock file or a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.errors import MalformedError, TargetError
from ...base.limits import LIMITS
from ...base.text import argument, listed, suggested_output
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import class_name
from ...checkpoint.selection import normal_path, selected
from ...checkpoint.survey import StateDict
from ...checkpoint.tensors import view_id
from ...files.archives import open_any
from .comparison import Shape, Shaped

_SCHEMA = "ckptool.lock/1"
#: Kinds of tensors whose shape is not in the pickle as torch tells it.
_SHAPELESS = frozenset(("opaque", "nested", "jagged"))


class Wanted(NamedTuple):
    """A state dict that something is to fit: ``path`` where it stands in its file ("" for the whole file).

    ``source`` is the file or the callable, ``kind`` "checkpoint", "lock", "model" or "names"; ``others`` are the paths
    of other state dicts in it, ``tied`` its tensors that are another one under a second name.
    """

    source: str
    kind: str
    path: str
    tensors: Mapping[str, Shaped]
    others: tuple[str, ...] = ()
    tied: Mapping[str, str] = MappingProxyType({})


def tied_of(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, str]:
    """Second names of tensors, each with the first: the same elements of the same storage."""
    reader, firsts, found = checkpoint.survey.reader, dict[object, str](), {}
    for key, value in state_dict.items:
        tensor = reader.tensor(value)
        if tensor is None or not tensor.storage or 0 in tensor.shape:
            continue
        name = str(checkpoint.graph.nodes[key])
        first = firsts.setdefault(view_id(tensor), name)
        if first != name:
            found[name] = first
    return found


def names_of(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, Shaped]:
    """Every key of a state dict with what stands there, tensors or not, in order."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    found = {}
    for key, value in state_dict.items:
        tensor = reader.tensor(value)
        if tensor is None:
            shaped = Shaped(None, class_name(graph, value))
        else:
            shaped = Shaped(None if tensor.kind in _SHAPELESS else tensor.shape, tensor.dtype)
        found[str(graph.nodes[key])] = shaped
    return found


def chosen_of(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """The state dicts that may be meant: the one at ``key``, else those of high confidence, else the others.

    Raises TargetError where there is none.
    """
    found = selected(checkpoint, key) or checkpoint.state_dicts
    if not found:
        modules = checkpoint.survey.modules
        if modules:
            what = f"it holds a pickled module at {modules[0] or 'the root'}, not a state dict"
            step = f"make it one: ckptool sanitize {argument(checkpoint.path)} --as-state-dict"
            step += f" -o {argument(suggested_output(checkpoint.path, 'plain'))}"
            raise TargetError(what, path=checkpoint.path, next=step)
        what = "there is no state dict in it"
        raise TargetError(what, path=checkpoint.path, next=f"ckptool inspect {quote(checkpoint.path)} --tree")
    return found


def wanted_of_checkpoint(checkpoint: Checkpoint, key: str | None = None, *, same: str | None = None) -> Wanted:
    """What the state dict at ``key`` holds; without a key the one at ``same`` where there is one, else the one with the
    most keys.

    Raises TargetError where there is none.
    """
    found = chosen_of(checkpoint, key)
    place = normal_path(same) if same is not None else None
    best = max(found, key=lambda item: (item.path == place, len(item.items)))
    others = tuple(item.path for item in found if item is not best)
    tied = tied_of(checkpoint, best)
    return Wanted(checkpoint.path, "checkpoint", best.path, names_of(checkpoint, best), others, tied)


def wanted_of_names(values: Mapping[str, Any], source: str, kind: str = "names") -> Wanted:
    """What a mapping of names to tensors, or to (shape, dtype), wants. Raises TargetError for another mapping."""
    found: dict[str, Shaped] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise TargetError(f"its key {name!r} is not a string", path=source)
        if isinstance(value, Shaped):
            found[name] = value
            continue
        dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        try:
            shape: Shape = tuple(int(size) for size in value.shape)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            # What is no tensor, and a parameter of a lazy module, which has no shape yet.
            shape = None
        found[name] = Shaped(shape, dtype)
    return Wanted(source, kind, "", found)


def is_lock(path: str) -> bool:
    """Is it text that begins like JSON, which no checkpoint does?"""
    if os.path.isdir(path):
        return False
    source = open_any(path)
    try:
        return source.read(0, min(source.size, 256)).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    finally:
        source.close()


def wanted_of_lock(path: str, key: str | None = None, *, same: str | None = None) -> Wanted:
    """What a lock file wants of the state dict at ``key``; without a key as ``wanted_of_checkpoint``.

    Raises MalformedError where it is no lock file as ``ckptool lock`` writes it, TargetError for a key that it has not.
    """
    import json

    source = open_any(path)
    try:
        if source.size > LIMITS.pickle_bytes:
            raise MalformedError("it is too large for a lock file", path=path)
        data = source.read(0, source.size)
    finally:
        source.close()
    try:
        told = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise MalformedError("it begins like JSON, and is none", path=path) from error
    schema = told.get("schema") if isinstance(told, dict) else None
    if schema != _SCHEMA:
        what = f"it is JSON, but no lock file: its schema is {schema!r} where {_SCHEMA!r} is wanted"
        raise MalformedError(what, path=path, next="ckptool lock CHECKPOINT -o LOCK makes one")
    dicts = told.get("state_dicts")
    if not isinstance(dicts, dict) or not all(isinstance(value, dict) for value in dicts.values()):
        raise MalformedError("it has no 'state_dicts'", path=path)
    if not dicts:
        raise TargetError("there is no state dict in it", path=path)
    places = {"" if name == "." else name: value for name, value in dicts.items()}
    if key is not None and normal_path(key) not in places:
        known = listed([repr(name or ".") for name in places])
        raise TargetError(f"no state dict at {key!r}; there is {known}", path=path)
    place = normal_path(same) if same is not None else None
    best = max(places, key=lambda name: (name == place, len(places[name]))) if key is None else normal_path(key)
    tensors = {name: _locked(path, name, value) for name, value in places[best].items()}
    return Wanted(path, "lock", best, tensors, tuple(name for name in places if name != best) if key is None else ())


def _locked(path: str, name: str, value: Any) -> Shaped:
    """One entry of a lock file."""
    if isinstance(value, dict) and isinstance(value.get("type"), str) and "shape" not in value:
        return Shaped(None, value["type"])
    shape = value.get("shape") if isinstance(value, dict) else None
    dtype = value.get("dtype") if isinstance(value, dict) else None
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or not isinstance(shape, list) or not isinstance(dtype, str):
        raise MalformedError(f"its entry for {name!r} is no dtype with a shape", path=path)
    return Shaped(tuple(shape), dtype)
