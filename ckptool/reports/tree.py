"""The tree of objects in a checkpoint, for ``inspect --tree``."""

from __future__ import annotations

from itertools import chain
from typing import Final, NamedTuple, TypedDict

from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import class_name, device_text, mapping
from ..checkpoint.paths import as_children, extra_children, sequence
from ..checkpoint.sharding import sharding
from ..pickles.nodes import Global, Persistent, Ref
from .json_values import is_huge

#: Children of one container that are shown; the rest is counted.
_MAX_CHILDREN: Final = 60


class Branch(NamedTuple):
    """One line of the tree: its depth, the name of the step, the type, and the value in a few words."""

    depth: int
    name: str
    type: str
    value: str

    @property
    def report(self) -> BranchReport:
        """The line as the report of ``inspect`` has it."""
        return {"depth": self.depth, "name": self.name, "type": self.type, "value": self.value}


class BranchReport(TypedDict):
    """A ``Branch``."""

    depth: int
    name: str
    type: str
    value: str


def tree_of(checkpoint: Checkpoint, depth: int) -> list[Branch]:
    """Return the tree down to ``depth`` levels. An object met again is named, but not opened again."""
    return _Tree(checkpoint, depth).lines()


class _Tree:
    def __init__(self, checkpoint: Checkpoint, depth: int) -> None:
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.depth = depth
        self.opened: dict[Ref, str] = {}

    def lines(self) -> list[Branch]:
        branches: list[Branch] = []
        work: list[tuple[Ref, int, str, str]] = [(self.graph.root, 0, "(root)", "(root)")]
        while work:
            ref, depth, name, path = work.pop()
            if ref < 0:
                branches.append(Branch(depth, "...", "", name))
                continue
            branch, children, count = self.describe(ref, depth, name, path)
            branches.append(branch)
            if depth >= self.depth:
                continue
            below = [(child, depth + 1, step, f"{path} {step}") for step, child in children]
            if count > len(children):
                below.append((-1, depth + 1, f"and {count - len(children):,} more", ""))
            work += reversed(below)
        return branches

    def describe(self, ref: Ref, depth: int, name: str, path: str) -> tuple[Branch, list[tuple[str, Ref]], int]:
        """Return the line of a node, its children that are shown, and how many it has."""
        node = self.graph.nodes[ref]
        tensor = self.reader.tensor(ref)
        if tensor is not None:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            kind = "" if tensor.kind == "dense" else f" {tensor.kind}"
            part = sharding(self.reader, ref, tensor)
            if part is not None:
                kind = f", {part.here} of it here: {part.words}"
            return Branch(depth, name, tensor.cls or "Tensor", f"{tensor.dtype} {shape} {tensor.location}{kind}"), [], 0
        kind = class_name(self.graph, ref)
        if node is None or isinstance(node, bool | int | float):
            huge = isinstance(node, int) and is_huge(node)
            return Branch(depth, name, kind, "" if node is None else "a huge integer" if huge else str(node)), [], 0
        if isinstance(node, str | bytes):
            return Branch(depth, name, kind, repr(node[:200])), [], 0
        if isinstance(node, Global):
            return Branch(depth, name, "global", f"{node.module}.{node.name}"), [], 0
        device = device_text(self.graph, ref)
        if device is not None:
            return Branch(depth, name, kind, device), [], 0
        storage = self.reader.storage(ref)
        if isinstance(node, Persistent) and storage is not None:
            return Branch(depth, name, storage.cls, f"{storage.nbytes:,} bytes {storage.location}"), [], 0
        known = self.opened.get(ref)
        if known is not None:
            return Branch(depth, name, kind, f"the same object as {known}"), [], 0
        children, count = self.children(ref)
        if children:
            self.opened[ref] = path
        return Branch(depth, name, kind, pluralize(count, "entry")), children, count

    def children(self, ref: Ref) -> tuple[list[tuple[str, Ref]], int]:
        """Return the first children by their names, and how many there are."""
        inside = sequence(self.graph, ref)
        if inside is not None:
            return [(f"[{number}]", item) for number, item in enumerate(inside[:_MAX_CHILDREN])], len(inside)
        items = mapping(self.graph, ref)
        held = as_children(self.graph, items or ())
        # The constructor arguments of an object filled by key are not its content.
        rest = (one for one in extra_children(self.graph, ref, held) if items is None or one.step[0] != "(")
        found: list[tuple[str, Ref]] = []
        count = 0
        for one in chain(held, rest):
            if len(found) < _MAX_CHILDREN:
                key = self.graph.nodes[one.key] if one.key >= 0 else None
                found.append((key if isinstance(key, str) else one.step, one.ref))
            count += 1
        return found, count
