"""Graphs of objects that no pickle describes: the tensors of other formats, as ``torch.save`` would write them.

So every command sees one kind of checkpoint, whatever the container.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final, NamedTuple

from ..base.dtypes import Dtype
from ..pickles.nodes import Call, Dict, Global, Graph, List, Node, Persistent, Ref, Style, children
from ..pickles.opcodes import REDUCE
from ..pickles.relocate import moved
from .tensors import contiguous_strides


class PlainTensor(NamedTuple):
    """A tensor and the storage that it reads.

    ``shape``, ``strides`` and ``offset`` in elements, ``nbytes`` those of the whole storage ``key``.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    key: str
    nbytes: int
    offset: int = 0
    location: str = "cpu"
    requires_grad: bool = False


def contiguous(dtype: Dtype, shape: tuple[int, ...], key: str) -> PlainTensor:
    """A tensor that is all of its storage, row by row."""
    return PlainTensor(dtype, shape, contiguous_strides(shape), key, prod(shape) * dtype.itemsize)


class Builder:
    """An arena of nodes that grows; equal constants and globals are one, as the pickler's memo makes them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple[type, str], Ref] = {}

    def add(self, node: Node) -> Ref:
        """A new node."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def constant(self, value: bool | int | float | str | tuple[()] | None) -> Ref:
        """A constant, string or empty tuple, one for each value."""
        return self._one((type(value), repr(value)), value)

    def named(self, module: str, name: str) -> Ref:
        """A global, one for each name."""
        mark = (Global, f"{module} {name}")
        known = self._known.get(mark)
        return self._one(mark, Global(module, name)) if known is None else known

    def _one(self, mark: tuple[type, str], node: Node) -> Ref:
        known = self._known.get(mark)
        if known is None:
            known = self._known[mark] = self.add(node)
        return known

    def call(self, module: str, name: str, args: Iterable[Ref] = ()) -> Ref:
        """What a function gives for arguments."""
        return self.add(Call(REDUCE, self.named(module, name), self.group(args)))

    def group(self, refs: Iterable[Ref]) -> Ref:
        """A tuple."""
        found = tuple(refs)
        return self.add(found) if found else self.constant(())

    def numbers(self, values: Iterable[int]) -> Ref:
        """A tuple of numbers."""
        return self.group(self.constant(value) for value in values)

    def mapping(self, items: Iterable[tuple[str, Ref]]) -> Ref:
        """An exact dict. Keys are strings of their own: a key may be the name of something else, too."""
        return self.add(Dict([ref for key, value in items for ref in (self.add(key), value)]))

    def sequence(self, refs: Iterable[Ref]) -> Ref:
        """A list."""
        return self.add(List(list(refs)))

    def tensor(self, tensor: PlainTensor) -> Ref:
        """``_rebuild_tensor_v2``, and v3 for dtypes without a storage class (torch/_tensor.py)."""
        dtype = tensor.dtype
        args = [
            self.storage(dtype, tensor.key, tensor.location, tensor.nbytes),
            self.constant(tensor.offset),
            self.numbers(tensor.shape),
            self.numbers(tensor.strides),
            self.constant(tensor.requires_grad),
            self.call("collections", "OrderedDict"),
        ]
        if dtype.storage:
            return self.call("torch._utils", "_rebuild_tensor_v2", args)
        return self.call("torch._utils", "_rebuild_tensor_v3", [*args, self.named("torch", dtype.name)])

    def pairs(self, refs: Sequence[Ref]) -> Ref:
        """An exact dict of references: key, value, key, value ..."""
        return self.add(Dict(list(refs)))

    def graft(self, graph: Graph, root: Ref, places: dict[Ref, Ref] | None = None) -> Ref:
        """A part of another graph: all that a reference of it leads to, with references of our own.

        ``places`` are those that parts of the same graph got before, which are taken for them, and gets the new ones.
        """
        known = {} if places is None else places
        places = {}
        work = [root]
        while work:
            ref = work.pop()
            if ref not in known:
                known[ref] = places[ref] = self.add(None)
                work.extend(reversed(children(graph.nodes[ref])))
        for ref, place in places.items():
            self.nodes[place] = moved(graph.nodes[ref], known)
        return known[root]

    def storage(self, dtype: Dtype, key: str, location: str, nbytes: int) -> Ref:
        """A persistent reference to a storage; an untyped one for dtypes without a storage class."""
        parts = (
            self.constant("storage"),
            self.named("torch", dtype.storage) if dtype.storage else self.named("torch.storage", "UntypedStorage"),
            self.add(key),
            self.constant(location),
            self.constant(nbytes // dtype.itemsize if dtype.storage else nbytes),
        )
        return self.add(Persistent(self.add(parts)))

    def graph(self, root: Ref, protocol: int = 0) -> Graph:
        """The graph, in the style of ``torch.save``; ``protocol`` is the least one to use."""
        used = max(protocol, _PROTOCOL)
        return Graph(self.nodes, root, Style(used, framed=used >= _FRAMED))


#: That of torch.save.
_PROTOCOL: Final = 2
#: The first whose pickles come in frames.
_FRAMED: Final = 4
