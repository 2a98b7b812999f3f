"""What the legacy format writes into persistent ids and the zip format does not know: views, and modules."""

from __future__ import annotations

from ..pickles.nodes import Call, Global, Graph, Node, Persistent, Ref

__all__ = ["without_views"]


def without_views(graph: Graph) -> Graph:
    """The graph with persistent ids of storages alone, of five elements: the zip format knows no others.

    A legacy id ends with None or (view key, offset, size), the offset in elements; a tensor's own offset counts
    from there (torch/serialization.py, ``_legacy_load``).
    """
    nodes = graph.nodes
    changes: dict[Ref, Node] = {}
    added: list[Node] = []
    bases: dict[Ref, int] = {}
    for ref, node in enumerate(nodes):
        pid = nodes[node.pid] if type(node) is Persistent else None
        if type(node) is not Persistent or type(pid) is not tuple:
            continue
        if len(pid) == 4 and nodes[pid[0]] == "module":
            # (module, class, file, source): torch takes the class, and warns where the source is another one now.
            cls = nodes[pid[1]]
            if type(cls) is Global:
                changes[ref] = Global(cls.module, cls.name, cls.parts)
            continue
        if len(pid) != 6:
            continue
        view = nodes[pid[5]]
        offset = nodes[view[1]] if type(view) is tuple and len(view) == 3 else 0
        if type(offset) is int and offset:
            bases[ref] = offset
        changes[node.pid] = pid[:5]
    for node in nodes if bases else ():
        args = nodes[node.args] if type(node) is Call else ()
        if type(node) is Call and type(args) is tuple and len(args) > 3 and args[0] in bases:
            own = nodes[args[1]]
            if type(nodes[node.func]) is Global and type(own) is int:
                changes[node.args] = (args[0], len(nodes) + len(added), *args[2:])
                added.append(own + bases[args[0]])
    return graph.edited(changes, added) if changes else graph
