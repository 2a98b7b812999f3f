"""Nodes of one arena in another."""

from __future__ import annotations

from collections.abc import Mapping

from .nodes import Buffer, Call, Dict, Extension, Filling, FrozenSet, Global, Instance, List, Node, Persistent, Ref, Set


def moved(node: Node, places: Mapping[Ref, Ref] | range) -> Node:
    """A node with other references, by ``places``."""
    if isinstance(node, tuple):
        return tuple(places[part] for part in node)
    if isinstance(node, List | Set | FrozenSet):
        return type(node)([places[part] for part in node.items])
    if isinstance(node, Dict):
        return Dict([places[part] for part in node.pairs])
    if not isinstance(node, Instance):
        return Buffer(places[node.inner]) if isinstance(node, Buffer) and node.inner >= 0 else node
    twin: Instance
    if isinstance(node, Call):
        kwargs = places[node.kwargs] if node.kwargs >= 0 else -1
        twin = Call(node.op, places[node.func], places[node.args], kwargs)
    elif isinstance(node, Persistent):
        twin = Persistent(places[node.pid], node.text)
    elif isinstance(node, Global):
        twin = Global(node.module, node.name, node.parts and (places[node.parts[0]], places[node.parts[1]]))
    else:
        assert isinstance(node, Extension)
        twin = Extension(node.code)
    if node.filling is not None:
        parts = ([places[ref] for ref in refs] for refs in (node.items, node.pairs, node.states))
        twin.filling = Filling(*parts)
    return twin
