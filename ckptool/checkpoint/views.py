"""Replace views and modules in the persistent ids of the legacy format, which the zip format does not have."""

from __future__ import annotations

from ..base.errors import RefusedError
from ..pickles.nodes import Global, Graph, Node, Persistent, Ref, children
from .tensors import TensorReader


def without_views(graph: Graph) -> Graph:
    """Return the graph with the persistent ids of the zip format, which have five elements and describe only storages.

    A legacy id ends with None or (view key, offset, size), with the offset in elements; a tensor's own offset counts
    from there (torch/serialization.py, ``_legacy_load``). Raises RefusedError for a view outside of tensors, because no
    other format has a storage that is part of another.
    """
    nodes = graph.nodes
    changes: dict[Ref, Node] = {}
    added: list[Node] = []
    views: set[Ref] = set()
    for ref, node in graph.of_type(Persistent):
        pid = nodes[node.pid]
        if type(pid) is not tuple:
            continue
        if len(pid) == 6:
            changes[node.pid] = pid[:5]
            if nodes[pid[5]] is not None:
                views.add(ref)
        elif len(pid) == 4 and nodes[pid[0]] == "module" and type(cls := nodes[pid[1]]) is Global:
            # (module, class, file, source): torch takes the class, and warns if the source has changed since.
            changes[ref] = Global(cls.module, cls.name, cls.parts)
    if views:
        changes |= _with_whole_storages(graph, views, added)
    return graph.edited(changes, added) if changes else graph


def _with_whole_storages(graph: Graph, views: set[Ref], added: list[Node]) -> dict[Ref, Node]:
    """Return the arguments of tensors over views, with offsets that count from the beginning of the storage."""
    reader, nodes = TensorReader(graph), graph.nodes
    changes: dict[Ref, Node] = {}
    for ref, node in enumerate(nodes):
        # This includes the inner arguments of _rebuild_from_type_v2.
        if type(node) is tuple and len(node) > 3 and node[0] in views and type(own := nodes[node[1]]) is int:
            begin, _ = reader.view(node[0])
            changes[ref] = (node[0], len(nodes) + len(added), *node[2:])
            added.append(own + begin)
    for ref in graph.reachable():
        for place, child in enumerate(children(nodes[ref])):
            if child in views and not (place == 0 and ref in changes):
                raise RefusedError("it holds a view of a storage by itself, which no other format has")
    return changes
