"""The object of a torch 0.1 archive with its tensors in place: one graph, as ``torch.save`` writes it today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..building import Builder
from ..pickles.nodes import Call, Dict, Filling, FrozenSet, Global, Graph, Instance, List, Node, Persistent, Ref, Set

__all__ = ["redirected", "started"]


def started(graph: Graph) -> Builder:
    """A builder whose nodes begin with those of a graph, so that its references stay what they are."""
    builder = Builder()
    builder.nodes.extend(graph.nodes)
    return builder


def redirected(graph: Graph, builder: Builder, places: Mapping[Ref, Ref]) -> Graph:
    """The graph over the builder's nodes in which whatever held a reference of ``places`` holds its new one."""
    count = len(graph.nodes)
    nodes = [_held(node, places) if ref < count else node for ref, node in enumerate(builder.nodes)]
    for ref in places:
        nodes[ref] = None  # nothing leads to it any more
    root = places.get(graph.root, graph.root)
    return Graph(nodes, root, graph.style, graph.refused, graph.oddities)


def _held(node: Node, places: Mapping[Ref, Ref]) -> Node:
    def moved(refs: Sequence[Ref]) -> list[Ref]:
        return [places.get(ref, ref) for ref in refs]

    if isinstance(node, tuple):
        return tuple(moved(node)) if any(ref in places for ref in node) else node
    if isinstance(node, List | Set | FrozenSet):
        return type(node)(moved(node.items))
    if isinstance(node, Dict):
        return Dict(moved(node.pairs))
    if not isinstance(node, Instance):
        return node
    twin: Instance = node
    if isinstance(node, Call):
        twin = Call(node.op, places.get(node.func, node.func), places.get(node.args, node.args), node.kwargs)
    elif isinstance(node, Persistent):
        twin = Persistent(places.get(node.pid, node.pid), node.text)
    elif isinstance(node, Global):
        twin = Global(node.module, node.name, node.parts)
    else:
        return node
    filling = node.filling
    if filling is not None:
        twin.filling = Filling(moved(filling.items), moved(filling.pairs), moved(filling.states))
    return twin
