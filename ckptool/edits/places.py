"""From a path as ``inspect`` prints it to the node there, and to the mapping that holds it."""

from __future__ import annotations

from shlex import quote
from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..errors import TargetError
from ..objects import attributes, elements, mapping, parse_path, spell_key
from ..pickles.nodes import Call, Graph, Ref

__all__ = ["Place", "place", "resolve"]


class Place(NamedTuple):
    """A node: its reference, that of what holds it (-1 for the root), and the last step."""

    ref: Ref
    holder: Ref
    step: str | int


def resolve(checkpoint: Checkpoint, path: str) -> Place:
    """The node at a path; raises TargetError, which names how far the path leads."""
    found = place(checkpoint.graph, [] if path in ("", ".") else parse_path(path))
    if isinstance(found, Place):
        return found
    reached = f"; {found!r} is there" if found else ""
    what = f"there is nothing at {path!r}{reached}"
    raise TargetError(what, path=checkpoint.path, next=f"ckptool inspect {quote(checkpoint.path)} --tree")


def place(graph: Graph, steps: list[str | int], start: Ref = -1) -> Place | str:
    """The node that the steps lead to from ``start`` (-1 for the root), or the path up to where they lead."""
    ref, holder = graph.root if start < 0 else start, -1
    last: str | int = ""
    path = ""
    for step in steps:
        below = _below(graph, ref, step)
        if below is None:
            return path
        ref, holder, last = below, ref, step
        path = spell_key(path, step)
    return Place(ref, holder, last)


def _below(graph: Graph, ref: Ref, step: str | int) -> Ref | None:
    """What one step leads to: a key, an element, or an attribute of an object."""
    nodes, node = graph.nodes, graph.nodes[ref]
    found: Ref | None = None
    for key, value in mapping(graph, ref) or ():
        # Of a key that is written twice the last one counts, as in a dict.
        if nodes[key] == step and type(nodes[key]) is type(step):
            found = value
    if found is not None:
        return found
    parts = elements(node)
    if isinstance(step, int) and -len(parts) <= step < len(parts):
        return parts[step]
    if isinstance(node, Call):
        named = [value for name, value in attributes(graph, node) if nodes[name] == step]
        return named[-1] if named else None
    return None
