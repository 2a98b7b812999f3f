"""Parts of a pickle that lead elsewhere: the storages that it names, and bytes in it that may be another pickle."""

from __future__ import annotations

from collections.abc import Iterator

from ..pickles.nodes import ByteArray, Call, Global, Graph, Persistent


def persistent_keys(graph: Graph) -> set[str]:
    """Return the keys of the storages that a pickle names."""
    nodes = graph.nodes
    ids = [nodes[node.pid] for node in nodes if type(node) is Persistent]
    keys = [nodes[pid[2]] for pid in ids if type(pid) is tuple and len(pid) > 2]
    return {key for key in keys if type(key) is str}


def byte_strings(graph: Graph) -> Iterator[tuple[bytes, bool]]:
    """Yield the bytes in a graph that may be a pickle, and whether they are arguments of a call."""
    nodes = graph.nodes
    kinds = set(map(type, nodes))
    loaders = {ref for ref, node in enumerate(nodes) if type(node) is Global and "load" in node.name}
    if not (loaders or bytes in kinds or ByteArray in kinds) and "\x80" not in {
        node[:1] for node in nodes if type(node) is str
    }:
        return
    arguments = set()
    for node in nodes:
        args = nodes[node.args] if type(node) is Call else None
        if type(node) is not Call or type(args) is not tuple:
            continue
        for ref in args[:4]:
            kind = type(nodes[ref])
            # Python 2 has its bytes in str; torch's own calls take strings all the time.
            if kind is bytes or kind is ByteArray or (kind is str and node.func in loaders):
                arguments.add(ref)
    for ref, node in enumerate(nodes):
        if type(node) is str:  # nearly all of them are names
            if node[:1] != "\x80" and ref not in arguments:
                continue
            data = node.encode("latin-1", "replace")
        elif type(node) is bytes:
            data = node
        elif type(node) is ByteArray:
            data = node.data
        else:
            continue
        if len(data) > 2:
            yield data, ref in arguments
