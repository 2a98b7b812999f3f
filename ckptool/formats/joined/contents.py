"""List the values in a rank's file by path, so that all ranks' values can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from ...base.records import NamedTuple
from ...checkpoint.objects import holds_constants, list_items, mapping
from ...checkpoint.paths import as_children, bounded, joined
from ...checkpoint.tensors import Tensor, TensorReader
from ...pickles.nodes import CONSTANTS, List, Persistent, Ref, own_value, parts_of

#: The most nodes that are visited to compare values, per node of the file: values may share most of their content.
_SHARED: Final = 4
#: Node types that are compared by value: which of them share an object depends on the process.
_BY_VALUE: Final = frozenset((*CONSTANTS, str))


class Value(NamedTuple):
    """A value at a path, with the path of its container and its key's reference (-1 in a list). ``tensor`` is None for
    any other value. ``inside`` tells whether it is a container that was entered."""

    path: str
    parent: str
    key: Ref
    ref: Ref
    tensor: Tensor | None
    inside: bool


def values_of(reader: TensorReader) -> Iterator[Value]:
    """Yield every value in mappings, and in lists with more than constants, from the root on, in order. Each container
    is entered at its first path."""
    graph = reader.graph
    entered: set[Ref] = set()
    work: list[Iterator[tuple[str, str, Ref, Ref]]] = [iter([("", "", -1, graph.root)])]
    while work:
        place = next(work[-1], None)
        if place is None:
            work.pop()
            continue
        path, parent, key, ref = place
        tensor = reader.tensor(ref)
        below = None if tensor or ref in entered else _below(reader, path, ref)
        yield Value(path, parent, key, ref, tensor, below is not None)
        if below is not None:
            entered.add(ref)
            work.append(below)


def _below(reader: TensorReader, path: str, ref: Ref) -> Iterator[tuple[str, str, Ref, Ref]] | None:
    """Return the places in a container, or None for a node that is not entered."""
    graph = reader.graph
    base = bounded(path, ref)
    items = mapping(graph, ref)
    if items is not None:
        return ((joined(base, child.step), path, child.key, child.ref) for child in as_children(graph, items))
    node = graph.nodes[ref]
    if isinstance(node, List | tuple) and not holds_constants(graph, ref):
        return ((f"{base}[{number}]", path, -1, part) for number, part in enumerate(list_items(node)))
    return None


class Digests:
    """Digests of the values in a file. Values that differ only in their tensors have equal digests."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._left = _SHARED * len(reader.graph.nodes)

    def digest(self, ref: Ref) -> Hashable:
        """Return a constant's value, or a digest of any other value; None if that would take too long."""
        nodes = self._reader.graph.nodes
        if type(nodes[ref]) in _BY_VALUE:
            return type(nodes[ref]).__name__, repr(nodes[ref])
        digest = hashlib.blake2b(digest_size=16)
        numbers: dict[Ref, int] = {}
        work = [ref]
        while work:
            ref = work.pop()
            self._left -= 1
            if self._left < 0:
                return None
            node = nodes[ref]
            below: Sequence[Ref] = ()
            if type(node) in _BY_VALUE:
                text = repr(node)
            elif ref in numbers:
                text = f"again {numbers[ref]}"
            elif self._reader.tensor(ref) is not None or isinstance(node, Persistent):
                text = "tensor"
            else:
                numbers[ref] = len(numbers)
                below = parts_of(node)
                text = f"{own_value(node)!r} {len(below)}"
            digest.update(f"{type(node).__name__} {text}\n".encode("utf-8", "surrogatepass"))
            work.extend(reversed(below))
        return digest.digest()
