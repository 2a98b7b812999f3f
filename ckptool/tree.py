"""The tree of objects in a checkpoint, for ``inspect --tree``."""

from __future__ import annotations

from typing import Final, NamedTuple

from .checkpoint import Checkpoint
from .human import counted
from .limits import LIMITS
from .objects import attributes, class_name, device_text, mapping, spell_key
from .pickles.nodes import Call, FrozenSet, Global, List, Node, Persistent, Ref, Set
from .sharding import sharding

__all__ = ["Branch", "tree_of"]

#: Children of one container that are shown; the rest is counted.
_SHOWN: Final = 60


class Branch(NamedTuple):
    """One line of the tree: its depth, the name of the step, the type, and the value in a few words."""

    depth: int
    name: str
    type: str
    value: str


def tree_of(checkpoint: Checkpoint, depth: int) -> list[Branch]:
    """The tree down to ``depth`` levels. What is met again is named once more and not opened again."""
    return _Tree(checkpoint, depth).lines()


class _Tree:
    def __init__(self, checkpoint: Checkpoint, depth: int) -> None:
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.depth = depth
        self.opened: dict[Ref, str] = {}

    def lines(self) -> list[Branch]:
        found: list[Branch] = []
        work: list[tuple[Ref, int, str, str]] = [(self.graph.root, 0, "(root)", "(root)")]
        while work:
            ref, depth, name, path = work.pop()
            if ref < 0:
                found.append(Branch(depth, "...", "", name))
                continue
            branch, children = self.describe(ref, depth, name, path)
            found.append(branch)
            if depth >= self.depth:
                continue
            below = [(child, depth + 1, step, f"{path} {step}") for step, child in children[:_SHOWN]]
            if len(children) > _SHOWN:
                below.append((-1, depth + 1, f"and {len(children) - _SHOWN:,} more", ""))
            work += reversed(below)
        return found

    def describe(self, ref: Ref, depth: int, name: str, path: str) -> tuple[Branch, list[tuple[str, Ref]]]:
        node = self.graph.nodes[ref]
        tensor = self.reader.tensor(ref)
        if tensor is not None:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            kind = "" if tensor.kind == "dense" else f" {tensor.kind}"
            part = sharding(self.reader, ref, tensor)
            if part is not None:
                kind = f", {part.here} of it here: {part.words}"
            return Branch(depth, name, tensor.cls or "Tensor", f"{tensor.dtype} {shape} {tensor.location}{kind}"), []
        kind = class_name(self.graph, ref)
        if node is None or isinstance(node, bool | int | float):
            huge = isinstance(node, int) and node.bit_length() > LIMITS.int_digits * 3
            return Branch(depth, name, kind, "" if node is None else "a huge integer" if huge else str(node)), []
        if isinstance(node, str | bytes):
            return Branch(depth, name, kind, repr(node[:200])), []
        if isinstance(node, Global):
            return Branch(depth, name, "global", f"{node.module}.{node.name}"), []
        device = device_text(self.graph, ref)
        if device is not None:
            return Branch(depth, name, kind, device), []
        storage = self.reader.storage(ref)
        if isinstance(node, Persistent) and storage is not None:
            return Branch(depth, name, storage.cls, f"{storage.nbytes:,} bytes {storage.location}"), []
        known = self.opened.get(ref)
        if known is not None:
            return Branch(depth, name, kind, f"the same object as {known}"), []
        children = self.children(ref)
        if children:
            self.opened[ref] = path
        return Branch(depth, name, kind, counted(len(children), "entry")), children

    def children(self, ref: Ref) -> list[tuple[str, Ref]]:
        nodes, node = self.graph.nodes, self.graph.nodes[ref]
        if isinstance(node, tuple | List | Set | FrozenSet):
            items = node if isinstance(node, tuple) else node.items
            return [(f"[{number}]", item) for number, item in enumerate(items)]
        pairs = mapping(self.graph, ref)
        found = [(_step(nodes[key]), value) for key, value in pairs or ()]
        if isinstance(node, Call):
            arguments = nodes[node.args]
            if pairs is None and isinstance(arguments, tuple):
                found += [(f"({number})", item) for number, item in enumerate(arguments)]
            found += [(f"[{number}]", item) for number, item in enumerate(node.items)]
            found += [("." + _step(nodes[key]), value) for key, value in attributes(self.graph, node)]
        return found


def _step(key: Node) -> str:
    return key if isinstance(key, str) else spell_key("", key)
