"""Build graphs from scratch: the tensors of other formats, as ``torch.save`` would write them.

This way every command sees one kind of checkpoint, whatever the container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, Final

from ..base.dtypes import Dtype
from ..base.records import NamedTuple
from ..pickles.nodes import Call, Dict, Global, Graph, List, Node, Persistent, Ref, Style, children, relocated
from ..pickles.opcodes import REDUCE
from .tensors import contiguous_strides

#: The protocol of torch.save, and the first protocol with FRAMEs.
_PROTOCOL: Final = 2
_FRAMED: Final = 4


class PlainTensor(NamedTuple):
    """A tensor and its storage.

    ``shape``, ``strides`` and ``offset`` are in elements. ``nbytes`` is the size in bytes of the whole storage ``key``.
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
    """Return a tensor that fills its storage in row-major order."""
    return PlainTensor(dtype, shape, contiguous_strides(shape), key, prod(shape) * dtype.itemsize)


class Constants:
    """Add nodes to an arena; equal constants and globals become one node, as through the pickler's memo."""

    def __init__(self) -> None:
        #: The nodes that were added.
        self.nodes: list[Node] = []
        self._known: dict[tuple[type, str | int], Ref] = {}
        #: What tensors share that differ only in their keys: the arguments, as references.
        self._alike: dict[tuple[object, ...], Any] = {}

    def add(self, node: Node) -> Ref:
        """Add a node to the arena."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def put(self, ref: Ref, node: Node) -> None:
        """Replace a node of the arena."""
        self.nodes[ref] = node

    def constant(self, value: bool | int | float | str | tuple[()] | None) -> Ref:
        """Return the reference of a constant, string or empty tuple."""
        key = (type(value), value if type(value) is int else repr(value))  # repr distinguishes 0.0 from -0.0
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.add(value)
        return known

    def named(self, module: str, name: str) -> Ref:
        """Return the reference of a global."""
        key = (Global, f"{module} {name}")
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.add(Global(module, name))
        return known

    def new_call(self, module: str, name: str, args: Iterable[Ref] = ()) -> Call:
        """Return a call of a function, without adding it."""
        return Call(REDUCE, self.named(module, name), self.group(args))

    def call(self, module: str, name: str, args: Iterable[Ref] = ()) -> Ref:
        """Add a call of a function."""
        return self.add(self.new_call(module, name, args))

    def group(self, refs: Iterable[Ref]) -> Ref:
        """Add a tuple."""
        parts = tuple(refs)
        return self.add(parts) if parts else self.constant(())

    def numbers(self, values: Iterable[int]) -> Ref:
        """Add a tuple of integers."""
        return self.group(self.constant(value) for value in values)

    def mapping(self, items: Iterable[tuple[str, Ref]]) -> Ref:
        """Add a dict. Each key becomes a new node, because equal strings elsewhere may be different objects."""
        return self.add(Dict([ref for key, value in items for ref in (self.add(key), value)]))

    def sequence(self, refs: Iterable[Ref]) -> Ref:
        """Add a list."""
        return self.add(List(list(refs)))

    def new_tensor(self, tensor: PlainTensor) -> Call:
        """Return a tensor: ``_rebuild_tensor_v2``, or v3 for dtypes without a storage class (torch/_tensor.py)."""
        alike = tensor[:3] + tensor[4:]
        if alike not in self._alike:
            dtype = tensor.dtype
            self._alike[alike] = (
                self._storage_parts(dtype, tensor.location, tensor.nbytes),
                self.constant(tensor.offset),
                tuple(map(self.constant, tensor.shape)),
                tuple(map(self.constant, tensor.strides)),
                self.constant(tensor.requires_grad),
                self.named("collections", "OrderedDict"),
                self.constant(()),
                self.named("torch._utils", f"_rebuild_tensor_v{2 if dtype.storage else 3}"),
                () if dtype.storage else (self.named("torch", dtype.name),),
            )
        parts, offset, shape, strides, grad, ordered, empty, function, rest = self._alike[alike]
        storage = self.add(Persistent(self.add((*parts[:2], self.add(tensor.key), *parts[2:]))))
        sizes = self.add(shape) if shape else empty
        steps = self.add(strides) if strides else empty
        hooks = self.add(Call(REDUCE, ordered, empty))
        return Call(REDUCE, function, self.add((storage, offset, sizes, steps, grad, hooks, *rest)))

    def tensor(self, tensor: PlainTensor) -> Ref:
        """Add a tensor."""
        return self.add(self.new_tensor(tensor))

    def storage(self, dtype: Dtype, key: str, location: str, nbytes: int) -> Ref:
        """Add a persistent id of a storage; dtypes without a storage class get an untyped storage."""
        parts = self._storage_parts(dtype, location, nbytes)
        return self.add(Persistent(self.add((*parts[:2], self.add(key), *parts[2:]))))

    def _storage_parts(self, dtype: Dtype, location: str, nbytes: int) -> tuple[Ref, ...]:
        """Return the parts of a persistent id without the key, which is the third part."""
        return (
            self.constant("storage"),
            self.named("torch", dtype.storage) if dtype.storage else self.named("torch.storage", "UntypedStorage"),
            self.constant(location),
            self.constant(nbytes // dtype.itemsize if dtype.storage else nbytes),
        )

    def graft(
        self,
        graph: Graph,
        root: Ref,
        places: dict[Ref, Ref] | None = None,
        copied_node: Callable[[Ref], Node] | None = None,
    ) -> Ref:
        """Copy everything reachable from ``root`` of another graph, and return its new reference.

        ``places`` maps references that were copied earlier to the new ones, and is extended. ``copied_node`` returns
        the node to add for a reference of the other graph.
        """
        places = {} if places is None else places
        copied: list[Ref] = []
        work = [root]
        while work:
            ref = work.pop()
            if ref not in places:
                places[ref] = self.add(None)
                copied.append(ref)
                work.extend(reversed(children(graph.nodes[ref])))
        for ref in copied:
            self.put(places[ref], copied_node(ref) if copied_node else relocated(graph.nodes[ref], places))
        return places[root]


class Builder(Constants):
    """An arena that becomes a graph."""

    def graph(self, root: Ref, protocol: int = 0) -> Graph:
        """Return the graph, in the style of ``torch.save`` but with at least this ``protocol``."""
        used = max(protocol, _PROTOCOL)
        return Graph(self.nodes, root, Style(used, framed=used >= _FRAMED))
