"""Resolve paths from the command line to a node, an entry of a mapping, or the state dicts to edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..base.errors import TargetError
from ..base.globs import Globs
from ..base.steps import tree_step
from ..base.text import join_limited
from ..pickles.nodes import Call, Graph, Ref
from ..pickles.opcodes import REDUCE
from .checkpoint import Checkpoint
from .graph_editor import GraphEditor
from .objects import mapping
from .paths import PathStep, as_children, bounded, find, joined, match_step, parse_steps, spell_key
from .survey import StateDict, Survey, TensorEntry


class Place(NamedTuple):
    """A node: its reference, its path as ``inspect`` prints it, and the reference of its container (root: -1)."""

    ref: Ref
    path: str
    holder: Ref


class Slot(NamedTuple):
    """The place of an existing or possible entry in a mapping.

    ``holder`` is the mapping and ``items`` its (key, value) references. ``number`` is the position of the entry, or -1
    if it does not exist. ``key`` is the key as a Python value, or NO_VALUE if it has none.
    """

    holder: Ref
    items: list[tuple[Ref, Ref]]
    number: int
    key: Any


def resolve(checkpoint: Checkpoint, path: str) -> Place:
    """Return the node at a path; if there is none, raise TargetError with the part of the path that exists."""
    place = follow(checkpoint.graph, _steps(path))
    if isinstance(place, Place):
        return place
    reached = f"; {place!r} is there" if place else ""
    message = f"there is nothing at {path!r}{reached}"
    raise TargetError(message, path=checkpoint.path, next=tree_step(checkpoint.path))


def _steps(path: str) -> list[PathStep]:
    return [] if path in ("", ".") else parse_steps(path)


def follow(graph: Graph, steps: Sequence[PathStep], start: Ref = -1) -> Place | str:
    """Return the node that the steps lead to from ``start`` (-1: the root), or the path of the last node they reach."""
    path, ref, holder = "", graph.root if start < 0 else start, -1
    for step in steps:
        child = find(graph, step, ref)
        if child is None:
            return path
        anchored = step.step.startswith("(#")
        path = step.step if anchored else joined(bounded(path, ref), child.step)
        ref, holder = child.ref, -1 if anchored else ref
    return Place(ref, path, holder)


def slot(checkpoint: Checkpoint, path: str) -> Slot | None:
    """Return the slot of the entry at a path, whether or not the entry exists; None if no mapping would hold it.

    Raises TargetError for the path of the root.
    """
    steps = parse_steps(path)
    if not steps:
        raise TargetError("the whole checkpoint is not an entry", path=checkpoint.path, next="name an entry")
    graph, last = checkpoint.graph, steps[-1]
    holder = follow(graph, steps[:-1])
    items = mapping(graph, holder.ref) if isinstance(holder, Place) else None
    if not isinstance(holder, Place) or items is None:
        return None
    children = as_children(graph, items)
    entry = match_step(graph, children, last)
    return Slot(holder.ref, items, -1 if entry is None else children.index(entry), last.value)


def new_key(checkpoint: Checkpoint, rewrite: GraphEditor, path: str, key: Any) -> Ref:
    """Add a node for a key, as a pickler writes it; raise TargetError if the key is not made of plain values."""
    if key is None or isinstance(key, bool | int | float | str):
        return rewrite.add(key)
    if isinstance(key, bytes):
        if checkpoint.graph.style.protocol >= _BYTES:
            return rewrite.add(key)
        args = (rewrite.add(key.decode("latin-1")), rewrite.add("latin1"))
        return rewrite.add(Call(REDUCE, rewrite.named("_codecs", "encode"), rewrite.add(args)))
    if isinstance(key, tuple):
        return rewrite.add(tuple(new_key(checkpoint, rewrite, path, part) for part in key))
    message = f"no entry can be added at {path!r}: its key is not made of numbers, strings, bytes and tuples"
    raise TargetError(message, path=checkpoint.path)


#: The first protocol with bytes; earlier ones write a call (``_codecs.encode``).
_BYTES: Final = 3


def selected(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """Return the state dict at the path ``key``; for None, all state dicts of high confidence.

    Raises TargetError if there is no state dict at that path; the message lists the existing ones.
    """
    state_dicts = checkpoint.state_dicts
    if key is None:
        return [item for item in state_dicts if item.confidence == "high"]
    place = follow(checkpoint.graph, _steps(key))
    chosen = [item for item in state_dicts if isinstance(place, Place) and item.ref == place.ref]
    if not chosen:
        known = join_limited([repr(item.path) if item.path else "'.' (the whole file)" for item in state_dicts], most=8)
        message = f"no state dict at {key!r}" + (f"; there is {known}" if state_dicts else ", nor elsewhere")
        raise TargetError(message, path=checkpoint.path, next=tree_step(checkpoint.path))
    return chosen


class ChosenKeys:
    """The places in a checkpoint that patterns select: each match, with everything in it."""

    def __init__(self, only: Globs) -> None:
        self.only = only
        self._containers: dict[str, bool | None] = {"": not only.include}

    def __contains__(self, path: str) -> bool:
        """Return whether a path, as ``inspect`` spells it, is selected."""
        return not self.only or bool(self._state(path))

    def key(self, state_dict: str, key: str) -> bool:
        """Return whether a key of the state dict at a path is selected."""
        return not self.only or spell_key(state_dict, key) in self

    def tensors(self, survey: Survey) -> list[TensorEntry]:
        """Return the selected tensors."""
        dicts = survey.state_dicts
        return [
            entry
            for entry in survey.tensors
            if (entry.path in self if entry.state_dict < 0 else self.key(dicts[entry.state_dict].path, entry.key))
        ]

    def _state(self, path: str) -> bool | None:
        """Return whether a path is selected, or None if it or its container is excluded."""
        if path not in self._containers:
            outer, state = "", self._containers[""]
            for step in parse_steps(path):
                outer = joined(outer, step.step)
                if outer not in self._containers:
                    key = step.value if isinstance(step.value, str) else step.step
                    decided = self.only.decide(key, outer)
                    self._containers[outer] = None if state is None or decided is False else state or bool(decided)
                state = self._containers[outer]
            self._containers[path] = state
        return self._containers[path]


def selected_tensors(checkpoint: Checkpoint, key: str | None) -> list[TensorEntry]:
    """Return the tensors of the state dict at the path ``key``; for None, all tensors of the file.

    Raises TargetError if there is no state dict at that path.
    """
    survey = checkpoint.survey
    return survey.tensors if key is None else survey.tensors_in([item.path for item in selected(checkpoint, key)])


def normal_path(key: str) -> str:
    """Return the path as the survey spells it; "" and "." are the root."""
    path = ""
    for step in _steps(key):
        path = joined(path, step.step)
    return path
