"""The values of a checkpoint as items of a DCP folder with flat names, and the nested object rebuilt from such names.

Source: ``traverse_state_dict`` and ``set_element`` (torch/distributed/checkpoint/_traverse.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import RefusedError
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.container import Manifest
from ...checkpoint.graph_builder import Builder
from ...checkpoint.graph_editor import without_views
from ...checkpoint.objects import class_name, mapping
from ...checkpoint.paths import as_children, joined
from ...checkpoint.tensors import Tensor, rebuild_calls
from ...pickles.nodes import Call, Graph, List, Ref

#: The most levels of nested mappings.
_DEPTH: Final = 200
_PLAIN_CALLS: Final = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
#: The arguments of ``_rebuild_tensor_v2`` without the dict of bits (conjugation, negation).
_PLAIN_ARGUMENTS: Final = 6

#: The most empty list places that are filled, as a base and per value, so that a large index cannot exhaust memory.
_GAPS: Final = 1000
_GAPS_PER_VALUE: Final = 4

Level = dict["str | int", "Level | Ref"]


class Leaf(NamedTuple):
    """A value that becomes an item: its flat name, its path in the object, and its path as ``inspect`` shows it.

    ``tensor`` is None for any other object. ``dtype`` is None for an item stored as an object, which may be a tensor.
    """

    name: str
    path: tuple[str | int, ...]
    where: str
    ref: Ref
    tensor: Tensor | None
    dtype: Dtype | None


class Items:
    """The values of an object that become items, and the containers and keys that are lost. Raises RefusedError if two
    values would have the same name, or a folder cannot hold the object."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.leaves: list[Leaf] = []
        #: Paths of containers that come back as another kind, or not at all.
        self.containers: list[str] = []
        #: Paths of entries whose keys give no name: tuples, bytes, objects.
        self.nameless: list[str] = []
        self._terminal: dict[Ref, bool] = {}
        if mapping(self.graph, self.graph.root) is None or self.reader.tensor(self.graph.root):
            what = f"a DCP folder holds a dict, and this is {class_name(self.graph, self.graph.root)}"
            raise RefusedError(what, path=checkpoint.path, next="torch.save holds any object")
        self._follow(self.graph.root, (), "", 0)
        names: dict[str, str] = {}
        for leaf in self.leaves:
            if leaf.name in names:
                what = f"{names[leaf.name]} and {leaf.where} would both be called {leaf.name!r}"
                raise RefusedError(what, path=checkpoint.path, next="rename one")
            names[leaf.name] = leaf.where

    def _check_depth(self, depth: int) -> None:
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)

    def _follow(self, ref: Ref, path: tuple[str | int, ...], where: str, depth: int) -> None:
        self._check_depth(depth)
        node = self.graph.nodes[ref]
        tensor = self.reader.tensor(ref)
        inner = None if tensor else mapping(self.graph, ref)
        if inner is not None:
            if not inner and path:
                self.containers.append(where)
            for step, value, key_ref in as_children(self.graph, inner):
                spelled = joined(where, step)
                key = self.graph.nodes[key_ref]
                if type(key) not in (str, int, float, bool, type(None)):
                    self.nameless.append(spelled)
                    continue
                if not isinstance(key, str):
                    self.containers.append(spelled)
                self._follow(value, (*path, str(key)), spelled, depth + 1)
        elif isinstance(node, List) and not self._is_terminal(ref, depth):
            for number, value in enumerate(node.items):
                place, spelled = (*path, number), f"{where}[{number}]"
                if mapping(self.graph, value) is not None and not self._has_items(value, depth):
                    self._leaf(value, place, spelled)  # no loader accepts a list with a missing place
                else:
                    self._follow(value, place, spelled, depth + 1)
        else:
            self._leaf(ref, path, where)

    def _leaf(self, ref: Ref, path: tuple[str | int, ...], where: str) -> None:
        tensor = self.reader.tensor(ref)
        self.leaves.append(Leaf(".".join(map(str, path)), path, where, ref, tensor, self._plain_dtype(ref)))

    def _plain_dtype(self, ref: Ref) -> Dtype | None:
        """Return the dtype of a tensor that DCP stores in pieces, or None: DCP copies elements, which some dtypes do
        not allow."""
        tensor = self.reader.tensor(ref)
        dtype = BY_NAME.get(tensor.dtype) if tensor and tensor.kind == "dense" and tensor.storage else None
        if dtype is None or dtype.packed > 1 or dtype.name.startswith(("q", "bits", "float4")):
            return None
        return dtype if self._is_bare(ref) else None

    def _is_bare(self, ref: Ref) -> bool:
        """Return whether a tensor has no attributes, no class of its own and no lazy bits: an object keeps them."""
        for call in rebuild_calls(self.graph, ref):
            node = self.graph.nodes[call.ref]
            if not isinstance(node, Call) or node.states:
                return False
            if call.short_name in _PLAIN_CALLS:
                return len(call.args) <= _PLAIN_ARGUMENTS or not mapping(self.graph, call.args[-1])
            if call.short_name != "_rebuild_parameter":
                return False
        return False

    def _is_terminal(self, ref: Ref, depth: int) -> bool:
        """Return whether a list is stored as one object: no mappings with items and no plain tensors are in it. A
        loader sees the list that the items make, without tensors stored as objects and empty mappings."""
        if ref in self._terminal:
            return self._terminal[ref]
        self._check_depth(depth)
        self._terminal[ref] = True  # for a list that contains itself
        node = self.graph.nodes[ref]
        terminal = True
        for part in node.items if isinstance(node, List) else ():
            inner = self.graph.nodes[part]
            if isinstance(inner, List):
                terminal = terminal and self._is_terminal(part, depth + 1)
            elif self._plain_dtype(part) or self._has_items(part, depth):
                terminal = False
        self._terminal[ref] = terminal
        return terminal

    def _has_items(self, ref: Ref, depth: int) -> bool:
        """Return whether a value is a mapping with anything except empty mappings in it."""
        self._check_depth(depth)
        inner = None if self.reader.tensor(ref) else mapping(self.graph, ref)
        return any(mapping(self.graph, value) is None or self._has_items(value, depth + 1) for _, value in inner or ())


def items_of(checkpoint: Checkpoint) -> Items:
    """Return the items of a checkpoint, computed once per graph."""
    key = ("items of dcp", checkpoint.graph.root)
    known: Items | None = checkpoint.graph.cache.get(key)
    if known is None or known.checkpoint.path != checkpoint.path:
        known = checkpoint.graph.cache[key] = Items(checkpoint)
    return known


def listed_items(checkpoint: Checkpoint) -> Manifest:
    """Return dtype, shape and path of each item by name; the dtype is "" and the shape () for an object."""
    return {
        leaf.name: (leaf.dtype.name, leaf.tensor.shape, leaf.path)
        if leaf.dtype and leaf.tensor
        else ("", (), leaf.path)
        for leaf in items_of(checkpoint).leaves
    }


def object_items(checkpoint: Checkpoint) -> dict[str, Graph]:
    """Return each object that is an item, by name."""
    graph = without_views(checkpoint.graph)
    objects = [leaf for leaf in items_of(checkpoint).leaves if not leaf.dtype]
    return {leaf.name: Graph(graph.nodes, leaf.ref, graph.style) for leaf in objects}


class Nested:
    """The object while it is rebuilt from flat names, like ``_EmptyStateDictLoadPlanner``: strings lead into dicts,
    numbers into lists.

    ``misfits`` are names whose place is taken by another value. ``sparse`` are lists with too many empty places to
    fill, as (places, values).
    """

    def __init__(self) -> None:
        self.root: Level = {}
        self.misfits: list[str] = []
        self.sparse: list[tuple[int, int]] = []
        self._gaps = _GAPS

    def put(self, name: str, path: Iterable[str | int], value: Ref) -> None:
        """Set the value at a path."""
        self._gaps += _GAPS_PER_VALUE
        *parents, last = path
        level = self.root
        for step, next_step in zip(parents, [*parents[1:], last]):
            inner = level.setdefault(step, {})
            if not isinstance(inner, dict) or (inner and type(next(iter(inner))) is not type(next_step)):
                self.misfits.append(name)
                return
            level = inner
        if last in level:
            self.misfits.append(name)
        else:
            level[last] = value

    def build(self, builder: Builder) -> Ref:
        """Build the graph of the object."""
        return self._build_level(builder, self.root, top=True)

    def _build_level(self, builder: Builder, level: Level, top: bool = False) -> Ref:
        refs = {
            step: self._build_level(builder, value) if isinstance(value, dict) else value
            for step, value in level.items()
        }
        by_index = {step: ref for step, ref in refs.items() if isinstance(step, int)}
        if not top and by_index:
            size = max(by_index) + 1
            gaps = size - len(by_index)
            if gaps <= self._gaps:
                self._gaps -= gaps
                return builder.sequence(by_index[n] if n in by_index else builder.constant(None) for n in range(size))
            self.sparse.append((size, len(by_index)))
        return builder.mapping((str(step), ref) for step, ref in refs.items())
