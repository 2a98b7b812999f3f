"""Where things stand in an object graph: leaves, containers, tensors, and the paths that lead to them.

The survey enters each container once; here a container counts at every place, because two equal checkpoints may share
their objects differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..dtypes import BY_NAME
from ..edits.select import selected
from ..errors import MalformedError, TargetError
from ..limits import LIMITS
from ..objects import attributes, callable_name, class_name, device_text, mapped_name, mapping, spell_key
from ..pickles.nodes import Buffer, ByteArray, Call, Extension, FrozenSet, Global, List, Node, Persistent, Ref, Set
from ..survey import StateDict
from ..tensors import Tensor

__all__ = ["Leaf", "Place", "Side", "joined", "side_of", "spelled", "unique"]

_CONSTANTS = frozenset((type(None), bool, int, float, str, bytes))
#: Places that are gone to beyond four for each node: containers that hold each other can have 2**n of them.
_PLACES = 1_000_000


class Leaf(NamedTuple):
    """A value that holds nothing: its type in a word, and what it is."""

    type: str
    value: bool | int | float | str | bytes | None


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
            return self._bytes(node)
        if isinstance(node, Global):
            return Leaf("global", mapped_name(node))
        if isinstance(node, ByteArray):
            return Leaf("bytearray", node.data)
        if isinstance(node, Extension):
            return Leaf("extension", node.code)
        return Leaf("buffer", None) if isinstance(node, Buffer) and node.inner < 0 else None

    def _bytes(self, node: Call) -> Leaf | None:
        """Protocols before 3 write bytes as calls."""
        name = callable_name(self.graph, node.func)
        args = self.graph.nodes[node.args]
        if name == "builtins.bytes" and args == ():
            return Leaf("bytes", b"")
        if name != "_codecs.encode" or type(args) is not tuple or len(args) != 2:
            return None
        text, coding = self.graph.nodes[args[0]], self.graph.nodes[args[1]]
        if type(text) is not str or coding not in ("latin1", "latin-1") or any(ord(letter) > 255 for letter in text):
            return None
        return Leaf("bytes", text.encode("latin-1"))

    def type(self, ref: Ref) -> str:
        """What stands there, in a word or a dotted name."""
        tensor = self.tensor(ref)
        if tensor is not None:
            return "storage" if tensor.kind == "storage" else "Tensor"
        leaf = self.leaf(ref)
        return leaf.type if leaf is not None else class_name(self.graph, ref)

    def is_mapping(self, ref: Ref) -> bool:
        """Is it filled by key, and has an order of keys?"""
        return mapping(self.graph, ref) is not None

    def children(self, ref: Ref) -> dict[str, Ref]:
        """What a container holds: the references by the steps that are appended to its path.

        Of a key that is written twice the later value counts, as for Python.
        """
        graph, node = self.graph, self.graph.nodes[ref]
        found: dict[str, Ref] = {}
        if isinstance(node, tuple | List):
            items = node if isinstance(node, tuple) else node.items
            return {f"[{number}]": item for number, item in enumerate(items)}
        if isinstance(node, Set | FrozenSet):
            # A set has no order: what can be told by its value stands under it.
            for item in node.items:
                leaf = self.leaf(item)
                found[unique(found, "[{}]" if leaf is None or is_huge(leaf) else f"[{{{leaf.value!r}}}]")] = item
            return found
        for key, value in mapping(graph, ref) or ():
            step = self.step(key)
            found[unique(found, step) if step == "[?]" else step] = value
        if isinstance(node, Persistent):
            found["(id)"] = node.pid
        if isinstance(node, Buffer):
            found["(buffer)"] = node.inner
        if isinstance(node, Call):
            self._of_call(node, class_name(graph, ref) in ("OrderedDict", "dict"), found)
        return found

    def _of_call(self, node: Call, is_dict: bool, found: dict[str, Ref]) -> None:
        graph = self.graph
        args = graph.nodes[node.args]
        if not callable_name(graph, node.func):
            found["(function)"] = node.func
        if isinstance(args, tuple) and not is_dict:
            found.update({f"({number})": item for number, item in enumerate(args)})
        if node.kwargs >= 0:
            found["(keywords)"] = node.kwargs
        found.update({unique(found, f"[{number}]"): item for number, item in enumerate(node.items)})
        named = attributes(graph, node)
        for key, value in named:
            name = graph.nodes[key]
            found[unique(found, spelled(name))] = value
        if not named:
            found.update({f"(state {number})": state for number, state in enumerate(node.states)})

    def step(self, ref: Ref) -> str:
        """What a key adds to a path."""
        key = self.graph.nodes[ref]
        if type(key) is tuple:
            leaves = [self.leaf(item) for item in key]
            if all(leaf is not None and not is_huge(leaf) for leaf in leaves):
                return f"[({', '.join(repr(leaf.value) for leaf in leaves if leaf is not None)})]"
        return spelled(key)

    def tensors(self) -> Iterator[Place]:
        """Every tensor at every place, in the order of the file.

        Raises MalformedError where containers hold each other so often that the places cannot be counted.
        """
        left = _PLACES + 4 * len(self.graph.nodes)
        within: set[Ref] = set()
        work: list[tuple[Ref, str]] = [(self.root, "")]
        while work:
            ref, path = work.pop()
            if ref < 0:
                within.discard(~ref)
                continue
            left -= 1
            if left < 0:
                raise MalformedError(
                    "its containers hold each other too often to be followed", path=self.checkpoint.path
                )
            tensor = self.tensor(ref)
            if tensor is not None:
                yield Place(path, ref, tensor)
                continue
            if type(self.graph.nodes[ref]) in _CONSTANTS or ref in within or self.leaf(ref) is not None:
                continue
            below = self.children(ref)
            within.add(ref)
            work.append((~ref, ""))
            work += [(child, joined(path, step)) for step, child in reversed(below.items())]


def is_huge(leaf: Leaf) -> bool:
    """Is it a number that Python refuses to print?"""
    return isinstance(leaf.value, int) and leaf.value.bit_length() > LIMITS.int_digits * 3


def spelled(key: Node) -> str:
    """What the key of a mapping adds to a path."""
    step = spell_key("", key)
    return step if step[:1] == "[" else "." + step


def unique(found: dict[str, Ref], step: str) -> str:
    """The step, with marks behind it where there is one of that name."""
    if step not in found:
        return step
    number = len(found)
    while f"{step}#{number}" in found:
        number += 1
    return f"{step}#{number}"


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
