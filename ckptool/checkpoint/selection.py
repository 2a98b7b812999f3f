"""Which state dicts an edit is about."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import Any, Final, NamedTuple

from ..base.errors import TargetError
from ..base.text import listed
from ..pickles.nodes import Call, Graph, Ref
from ..pickles.opcodes import REDUCE
from .checkpoint import Checkpoint
from .graph_editor import Rewrite
from .objects import key_identity, mapping
from .paths import NO_VALUE, PathStep, bounded, entries, find, joined, literal_identity, parse_steps
from .survey import StateDict, TensorEntry

# -- From a path as ``inspect`` prints it to the node there, and to the mapping that holds it


class Place(NamedTuple):
    """A node: its reference, its path as ``inspect`` prints it, and the reference of what holds it, -1 for the root."""

    ref: Ref
    path: str
    holder: Ref


class Slot(NamedTuple):
    """Where an entry of a mapping is or would be: the mapping, its entries as (key, value), and the number of the one
    under that key, -1 where there is none; ``key`` as a Python value, NO_VALUE for one that has none."""

    holder: Ref
    items: list[tuple[Ref, Ref]]
    number: int
    key: Any


def resolve(checkpoint: Checkpoint, path: str) -> Place:
    """The node at a path; raises TargetError, which names how far the path leads."""
    found = place(checkpoint.graph, [] if path in ("", ".") else parse_steps(path))
    if isinstance(found, Place):
        return found
    reached = f"; {found!r} is there" if found else ""
    what = f"there is nothing at {path!r}{reached}"
    raise TargetError(what, path=checkpoint.path, next=f"ckptool inspect {quote(checkpoint.path)} --tree")


def place(graph: Graph, steps: Sequence[PathStep], start: Ref = -1) -> Place | str:
    """The node that the steps lead to from ``start`` (-1 for the root), or the path up to where they lead."""
    path, ref, holder = "", graph.root if start < 0 else start, -1
    for step in steps:
        found = find(graph, step, ref)
        if found is None:
            return path
        anchored = step.step.startswith("(#")
        path = step.step if anchored else joined(bounded(path, ref), found.step)
        ref, holder = found.ref, -1 if anchored else ref
    return Place(ref, path, holder)


def slot(checkpoint: Checkpoint, path: str) -> Slot | None:
    """Where the entry at a path is or would be; None where there is no mapping to hold it."""
    steps = parse_steps(path)
    if not steps:
        raise TargetError("the whole checkpoint is not an entry", path=checkpoint.path, next="name an entry")
    graph, last = checkpoint.graph, steps[-1]
    holder = place(graph, steps[:-1])
    items = mapping(graph, holder.ref) if isinstance(holder, Place) else None
    if not isinstance(holder, Place) or items is None:
        return None
    return Slot(holder.ref, items, entry_number(graph, holder.ref, last), last.value)


def entry_number(graph: Graph, ref: Ref, step: PathStep) -> int:
    """The number of the entry of a mapping that a step leads to, -1 for none."""
    wanted = literal_identity(step.value)
    equal = -1
    for number, one in enumerate(entries(graph, ref)):
        if one.step == step.step:
            return number
        if step.value is not NO_VALUE and equal < 0 and key_identity(graph, one.key) == wanted:
            equal = number
    return equal


def new_key(checkpoint: Checkpoint, rewrite: Rewrite, path: str, key: Any) -> Ref:
    """A new node for a key, as a pickler writes it; raises TargetError for one that is not made of plain values."""
    if key is None or isinstance(key, bool | int | float | str):
        return rewrite.add(key)
    if isinstance(key, bytes):
        if checkpoint.graph.style.protocol >= _BYTES:
            return rewrite.add(key)
        args = (rewrite.add(key.decode("latin-1")), rewrite.add("latin1"))
        return rewrite.add(Call(REDUCE, rewrite.named("_codecs", "encode"), rewrite.add(args)))
    if isinstance(key, tuple):
        return rewrite.add(tuple(new_key(checkpoint, rewrite, path, part) for part in key))
    what = f"no entry can be added at {path!r}: its key is not made of numbers, strings, bytes and tuples"
    raise TargetError(what, path=checkpoint.path)


#: The first protocol that has bytes; before it they are a call (``_codecs.encode``).
_BYTES: Final = 3


def selected(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """The state dict at the path ``key``, or with None all that are found with high confidence.

    Raises TargetError when there is no state dict at that path; the message lists those there are.
    """
    found = checkpoint.state_dicts
    if key is None:
        return [item for item in found if item.confidence == "high"]
    there = place(checkpoint.graph, [] if key in ("", ".") else parse_steps(key))
    chosen = [item for item in found if isinstance(there, Place) and item.ref == there.ref]
    if not chosen:
        known = listed([repr(item.path) if item.path else "'.' (the whole file)" for item in found], most=8)
        what = f"no state dict at {key!r}; there is {known}" if found else f"no state dict at {key!r}, nor elsewhere"
        raise TargetError(what, path=checkpoint.path, next=f"ckptool inspect {quote(checkpoint.path)} --tree")
    return chosen


def selected_tensors(checkpoint: Checkpoint, key: str | None) -> list[TensorEntry]:
    """Return the tensors of the state dict at the path ``key``, with None all tensors of the file.

    Raises TargetError as ``selected`` does.
    """
    survey = checkpoint.survey
    return survey.tensors if key is None else survey.tensors_in([item.path for item in selected(checkpoint, key)])


def normal_path(key: str) -> str:
    """The path as the survey spells it; "" and "." are the root."""
    if key in ("", "."):
        return ""
    path = ""
    for step in parse_steps(key):
        path = joined(path, step.step)
    return path
