"""Parts of a pickle that lead elsewhere: its storages and globals, and bytes that may be another pickle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...checkpoint.objects import callable_name
from ...pickles.nodes import ByteArray, Call, Global, Graph, Persistent

#: The first bytes of a zip archive.
ZIP: Final = b"PK\x03\x04"


def persistent_keys(graph: Graph) -> set[str]:
    """Return the keys of the storages that a pickle names."""
    nodes = graph.nodes
    ids = [nodes[node.pid] for _, node in graph.of_type(Persistent)]
    keys = [nodes[pid[2]] for pid in ids if type(pid) is tuple and len(pid) > 2]
    return {key for key in keys if type(key) is str}


def named_and_called(graph: Graph) -> frozenset[tuple[str, bool]]:
    """Return the globals of a pickle as (name, whether it is called)."""
    named = {(f"{node.module} {node.name}", False) for _, node in graph.of_type(Global)}
    return frozenset(named.union((callable_name(graph, node.func), True) for _, node in graph.of_type(Call)))


def byte_strings(graph: Graph) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes that may be a pickle, whether they are arguments of a call)."""
    nodes = graph.nodes
    loaders = {ref for ref, node in graph.of_type(Global) if "load" in node.name}
    encode = {ref for ref, node in graph.of_type(Global) if (node.module, node.name) == ("_codecs", "encode")}
    binary = graph.has(bytes, ByteArray)
    if not (loaders or encode or binary) and "\x80" not in "".join(graph.strings):
        return
    arguments: set[int] = set()
    encoded: set[int] = set()
    for _, node in graph.of_type(Call):
        args = nodes[node.args]
        if node.func in encode and type(args) is tuple:
            encoded.update(args[:1])  # protocol 2 has no bytes: this call makes them from text
        for ref in args[:4] if type(args) is tuple else ():
            kind = type(nodes[ref])
            # Python 2 keeps bytes in str; torch's own calls often take strings.
            if kind is bytes or kind is ByteArray or (kind is str and node.func in loaders):
                arguments.add(ref)
    for ref, part in enumerate(nodes):
        if type(part) is str:  # nearly all strings are names
            if part[:1] != "\x80" and ref not in arguments and ref not in encoded:
                continue
            data = part.encode("latin-1", "replace")
        elif type(part) is bytes:
            data = part
        elif type(part) is ByteArray:
            data = part.data
        else:
            continue
        if len(data) > 2:
            yield data, ref in arguments


def may_hold_pickle(data: bytes) -> bool:
    """Return whether bytes in a pickle are searched for other pickles, even if they are no argument of a call."""
    return data[:4] == ZIP or is_binary_pickle(data) or may_run(data)


def is_binary_pickle(data: bytes) -> bool:
    """Return whether bytes begin like a pickle of protocol 2 or later."""
    return data[:1] == b"\x80" and data[1:2] <= b"\x05"


def may_run(data: bytes) -> bool:
    """Return whether an unpickler may import something from bytes that do not begin like a binary pickle."""
    from ...pickles.lexer import ENDS, NOTHING, outcome  # only for pickles that hold bytes

    return outcome(data) not in (NOTHING, ENDS)
