"""One side of a comparison: the values, containers and tensors in an object graph, and the paths that lead to them.

The survey enters each container once. Here a container counts at every place, because equal checkpoints may share their
objects differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError, TargetError
from ...base.limits import LIMITS
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import (
    called_constant,
    class_name,
    device_text,
    holds_constants,
    list_items,
    mapped_name,
    mapping,
)
from ...checkpoint.paths import Child, children, key_text, sequence, spell_key
from ...checkpoint.selection import selected
from ...checkpoint.survey import StateDict
from ...checkpoint.tensors import Tensor
from ...pickles.nodes import Buffer, ByteArray, Call, Extension, Global, List, Persistent, Ref

_CONSTANTS = frozenset((type(None), bool, int, float, str, bytes))


class TypedValue(NamedTuple):
    """A value that is not a container, and its type as a word."""

    type: str
    value: bool | int | float | complex | str | bytes | None


class Place(NamedTuple):
    """A tensor at one of its places; ``path`` is spelled as in ``inspect``, relative to the chosen root."""

    path: str
    ref: Ref
    tensor: Tensor


class Side:
    """The part of a checkpoint that is compared: the whole object, or the state dict ``chosen``."""

    def __init__(self, checkpoint: Checkpoint, chosen: StateDict | None = None) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.root = self.graph.root if chosen is None else chosen.ref
        #: The path of ``root`` in the file.
        self.base = "" if chosen is None else chosen.path
        self._storages: dict[Ref, Tensor] = {}

    def path_in_file(self, path: str) -> str:
        """Return the path in the file for a path relative to the root."""
        joint = "." if self.base and path and not path.startswith("[") else ""
        return self.base + joint + path

    def tensor(self, ref: Ref) -> Tensor | None:
        """Return the tensor at ``ref``, or None. A bare storage is a one-dimensional tensor of the kind "storage".

        A tensor of unknown kind is compared as an object, by its content.
        """
        tensor = self.reader.tensor(ref)
        if tensor is not None and tensor.kind == "unknown":
            return None
        if tensor is not None or type(self.graph.nodes[ref]) is not Persistent:
            return tensor
        if ref not in self._storages:
            storage = self.reader.storage(ref)
            if storage is None:
                return None
            name = storage.dtype.name if storage.dtype.name in BY_NAME else "uint8"
            self._storages[ref] = Tensor(
                "storage", name, (storage.numel,), (1,), 0, storage.key, storage.location, False
            )
        return self._storages[ref]

    def leaf(self, ref: Ref) -> TypedValue | None:
        """Return the value at ``ref``, or None for a container or tensor."""
        node = self.graph.nodes[ref]
        kind = type(node)
        if kind in _CONSTANTS:
            return TypedValue("None" if node is None else kind.__name__, node)  # type: ignore[arg-type]
        if isinstance(node, Call):
            device = device_text(self.graph, ref)
            if device is not None:
                return TypedValue("torch.device", device)
            value = called_constant(self.graph, ref)
            return None if value is None else TypedValue(type(value).__name__, value)
        if isinstance(node, Global):
            return TypedValue("global", mapped_name(node))
        if isinstance(node, ByteArray):
            return TypedValue("bytearray", node.data)
        if isinstance(node, Extension):
            return TypedValue("extension", node.code)
        return TypedValue("buffer", None) if isinstance(node, Buffer) and node.inner < 0 else None

    def type(self, ref: Ref) -> str:
        """Return the type of the object at ``ref``, as a word or a dotted name."""
        tensor = self.tensor(ref)
        if tensor is not None:
            return "storage" if tensor.kind == "storage" else "Tensor"
        leaf = self.leaf(ref)
        if leaf is not None:
            return leaf.type
        name, node = class_name(self.graph, ref), self.graph.nodes[ref]
        if name == "collections.deque" and isinstance(node, Call):
            # The elements are compared one by one; the capacity is treated as part of the type.
            args = list_items(self.graph.nodes[node.args])
            return f"{name}(maxlen={self.graph.nodes[args[1]]!r})" if len(args) > 1 else name
        return name

    def is_mapping(self, ref: Ref) -> bool:
        """Return whether an object is filled by key, so that its keys have an order."""
        return mapping(self.graph, ref) is not None

    def elements(self, ref: Ref) -> Sequence[Ref] | None:
        """Return the elements of a list or tuple in order, or None for other objects."""
        node = self.graph.nodes[ref]
        if isinstance(node, tuple | List):
            return node if isinstance(node, tuple) else node.items
        return None if self.is_set(ref) else sequence(self.graph, ref)

    def is_set(self, ref: Ref) -> bool:
        """Return whether an object is a set or frozenset, however it was pickled."""
        return class_name(self.graph, ref) in ("set", "frozenset")

    def children(self, ref: Ref) -> dict[str, Ref]:
        """Return the members of a container, by the steps that are appended to its path."""
        graph = self.graph
        if self.is_set(ref):
            # A set has no order, so members are named by their values if these have a text.
            members: dict[str, Ref] = {}
            for step, item, _ in children(graph, ref):
                text = key_text(graph, item)
                members[f"[{{{text}}}]" if text and f"[{{{text}}}]" not in members else step] = item
            return members
        return {self.step(child): child.ref for child in children(graph, ref)}

    def step(self, child: Child) -> str:
        """Return the step to a child. A key too long for a path keeps its text here, as in the other file."""
        name = self.graph.nodes[child.key] if child.key >= 0 and child.step[:2] == "[#" else None
        return spell_key(".", name)[1:] if isinstance(name, str) else child.step

    def tensors(self) -> Iterator[Place]:
        """Yield every tensor at every place, in file order.

        Raise MalformedError beyond ``LIMITS.places`` plus four places per node: n nested containers that share members
        can have 2**n places.
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
                raise MalformedError("its objects are at too many places to follow", path=self.checkpoint.path)
            tensor = self.tensor(ref)
            if tensor is not None:
                yield Place(path, ref, tensor)
                continue
            if ref in within or self.leaf(ref) is not None or holds_constants(self.graph, ref):
                continue
            within.add(ref)
            work.append(self._below(ref, path))

    def _below(self, ref: Ref, path: str) -> Iterator[tuple[Ref, str]]:
        """Yield the places below a container, then its complement, which means that the container is left."""
        elements = self.elements(ref)
        if elements is not None:
            yield from ((item, join_path(path, f"[{number}]")) for number, item in enumerate(elements))
        else:
            yield from ((child, join_path(path, step)) for step, child in self.children(ref).items())
        yield ~ref, ""


def join_path(base: str, step: str) -> str:
    """Return the path one step further. A very long one is cut, and a checksum keeps it unique."""
    path = base + step if base or step[:1] != "." else step[1:]
    if len(path) <= LIMITS.path_chars:
        return path
    from hashlib import sha256

    digest = sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{path[: LIMITS.path_chars]}...#{digest}"


def side_of(checkpoint: Checkpoint, key: str | None) -> Side:
    """Return the whole object, or with ``key`` the state dict at that path; raise TargetError if it does not exist."""
    if key is None:
        return Side(checkpoint)
    chosen = selected(checkpoint, key)
    if len(chosen) != 1:  # one object is at two paths
        raise TargetError(f"{key!r} names {len(chosen)} state dicts", path=checkpoint.path)
    return Side(checkpoint, chosen[0])
