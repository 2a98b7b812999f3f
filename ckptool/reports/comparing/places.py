"""Where things stand in an object graph: leaves, containers, tensors, and the paths that lead to them.

The survey enters each container once; here a container counts at every place, because two equal checkpoints may share
their objects differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError, TargetError
from ...base.limits import LIMITS
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import called_constant, class_name, device_text, elements, mapped_name, mapping, plain_parts
from ...checkpoint.paths import Child, children, key_text, sequence, spell_key
from ...checkpoint.selection import selected
from ...checkpoint.survey import StateDict
from ...checkpoint.tensors import Tensor
from ...pickles.nodes import Buffer, ByteArray, Call, Extension, Global, List, Persistent, Ref

_CONSTANTS = frozenset((type(None), bool, int, float, str, bytes))


class Leaf(NamedTuple):
    """A value that holds nothing: its type in a word, and what it is."""

    type: str
    value: bool | int | float | complex | str | bytes | None


class Place(NamedTuple):
    """A tensor where it stands; ``path`` from the root that was asked for, as ``inspect`` spells paths."""

    path: str
    ref: Ref
    tensor: Tensor


class Side:
    """A checkpoint as far as it is compared: from ``root`` on, which is the whole object or one state dict."""

    def __init__(self, checkpoint: Checkpoint, chosen: StateDict | None = None) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.root = self.graph.root if chosen is None else chosen.ref
        #: The path of ``root`` in the file.
        self.base = "" if chosen is None else chosen.path
        self._storages: dict[Ref, Tensor] = {}
        #: Containers of constants alone: one can be at a thousand places.
        self._barren: set[Ref] = set()

    def tensor(self, ref: Ref) -> Tensor | None:
        """The tensor that stands there. A bare storage is a tensor of the kind "storage", with one dimension."""
        found = self.reader.tensor(ref)
        if found is not None or type(self.graph.nodes[ref]) is not Persistent:
            return found
        if ref not in self._storages:
            storage = self.reader.storage(ref)
            if storage is None:
                return None
            name = storage.dtype.name if storage.dtype.name in BY_NAME else "uint8"
            self._storages[ref] = Tensor(
                "storage", name, (storage.numel,), (1,), 0, storage.key, storage.location, False
            )
        return self._storages[ref]

    def leaf(self, ref: Ref) -> Leaf | None:
        """The value that stands there, None for what holds others."""
        node = self.graph.nodes[ref]
        kind = type(node)
        if kind in _CONSTANTS:
            return Leaf("None" if node is None else kind.__name__, node)  # type: ignore[arg-type]
        if isinstance(node, Call):
            device = device_text(self.graph, ref)
            if device is not None:
                return Leaf("torch.device", device)
            value = called_constant(self.graph, ref)
            return None if value is None else Leaf(type(value).__name__, value)
        if isinstance(node, Global):
            return Leaf("global", mapped_name(node))
        if isinstance(node, ByteArray):
            return Leaf("bytearray", node.data)
        if isinstance(node, Extension):
            return Leaf("extension", node.code)
        return Leaf("buffer", None) if isinstance(node, Buffer) and node.inner < 0 else None

    def type(self, ref: Ref) -> str:
        """What stands there, in a word or a dotted name."""
        tensor = self.tensor(ref)
        if tensor is not None:
            return "storage" if tensor.kind == "storage" else "Tensor"
        leaf = self.leaf(ref)
        if leaf is not None:
            return leaf.type
        name, node = class_name(self.graph, ref), self.graph.nodes[ref]
        if name == "collections.deque" and isinstance(node, Call):
            # Its elements are compared one by one; how many it takes is a part of what it is.
            args = elements(self.graph.nodes[node.args])
            return f"{name}(maxlen={self.graph.nodes[args[1]]!r})" if len(args) > 1 else name
        return name

    def is_mapping(self, ref: Ref) -> bool:
        """Is it filled by key, and has an order of keys?"""
        return mapping(self.graph, ref) is not None

    def elements(self, ref: Ref) -> Sequence[Ref] | None:
        """The elements of a list or tuple in their order, None for anything else."""
        node = self.graph.nodes[ref]
        if isinstance(node, tuple | List):
            return node if isinstance(node, tuple) else node.items
        return None if self.is_set(ref) else sequence(self.graph, ref)

    def is_set(self, ref: Ref) -> bool:
        """Is it a set or frozenset, however it is written?"""
        return class_name(self.graph, ref) in ("set", "frozenset")

    def children(self, ref: Ref) -> dict[str, Ref]:
        """What a container holds: the references by the steps that are appended to its path."""
        graph = self.graph
        if self.is_set(ref):
            # A set has no order: what can be told by its value stands under it.
            found: dict[str, Ref] = {}
            for step, item, _ in children(graph, ref):
                text = key_text(graph, item)
                found[f"[{{{text}}}]" if text and f"[{{{text}}}]" not in found else step] = item
            return found
        return {self.step(one): one.ref for one in children(graph, ref)}

    def step(self, one: Child) -> str:
        """What leads to a child. A key that is too long for a path has its text here, which another file has, too."""
        name = self.graph.nodes[one.key] if one.key >= 0 and one.step[:2] == "[#" else None
        return spell_key(".", name)[1:] if isinstance(name, str) else one.step

    def tensors(self) -> Iterator[Place]:
        """Every tensor at every place, in the order of the file.

        Raises MalformedError for more than four places for each node and ``limits.places``: containers that hold each
        other can have 2**n of them.
        """
        left = LIMITS.places + 4 * len(self.graph.nodes)
        within: set[Ref] = set()
        work: list[Iterator[tuple[Ref, str]]] = [iter([(self.root, "")])]
        while work:
            place = next(work[-1], None)
            if place is None:
                work.pop()
                continue
            ref, path = place
            if ref < 0:
                within.discard(~ref)
                continue
            if type(self.graph.nodes[ref]) in _CONSTANTS:
                continue
            left -= 1
            if left < 0:
                raise MalformedError(
                    "what it holds stands at too many places to be followed", path=self.checkpoint.path
                )
            tensor = self.tensor(ref)
            if tensor is not None:
                yield Place(path, ref, tensor)
                continue
            if ref in within or ref in self._barren or self.leaf(ref) is not None:
                continue
            if plain_parts(self.graph, ref) is not None:
                self._barren.add(ref)
                continue
            within.add(ref)
            work.append(self._below(ref, path))

    def _below(self, ref: Ref, path: str) -> Iterator[tuple[Ref, str]]:
        """The places below a container, and then a mark that it was left."""
        inside, nodes = self.elements(ref), self.graph.nodes
        steps = self.children(ref).items() if inside is None else ((f"[{n}]", item) for n, item in enumerate(inside))
        barren = True
        for step, child in steps:
            if type(nodes[child]) not in _CONSTANTS:
                barren = False
                yield child, joined(path, step)
        if barren:
            self._barren.add(ref)
        yield ~ref, ""


def joined(base: str, step: str) -> str:
    """The path one step further on. One that nobody would write is cut, and a checksum keeps it apart from others."""
    path = base + step if base or step[:1] != "." else step[1:]
    if len(path) <= LIMITS.path_chars:
        return path
    from hashlib import sha256

    mark = sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{path[: LIMITS.path_chars]}...#{mark}"


def side_of(checkpoint: Checkpoint, key: str | None) -> Side:
    """The whole object, or with ``key`` the state dict at that path; raises TargetError where there is none."""
    if key is None:
        return Side(checkpoint)
    chosen = selected(checkpoint, key)
    if len(chosen) != 1:  # the same object at two places
        raise TargetError(f"{key!r} names {len(chosen)} state dicts", path=checkpoint.path)
    return Side(checkpoint, chosen[0])
