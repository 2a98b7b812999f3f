"""The tree of objects in a checkpoint, for ``inspect --tree``."""

from __future__ import annotations

from itertools import chain, islice
from typing import Final, TypedDict

from ..base.text import pluralize, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import class_name, device_text, mapping
from ..checkpoint.paths import as_children, extra_children, sequence
from ..checkpoint.sharding import sharding
from ..pickles.nodes import Global, Graph, Ref, children
from .json_values import is_huge

#: Maximum number of children shown per container; the others are counted.
_MAX_CHILDREN: Final = 60


class BranchReport(TypedDict):
    """One line of the tree: depth, name of the step, type, short value, and bytes of the tensors below.

    A tensor at several paths counts at the first one.
    """

    depth: int
    name: str
    type: str
    value: str
    bytes: int


def tree_of(checkpoint: Checkpoint, depth: int, *, tensors: bool = True) -> list[BranchReport]:
    """Return the tree down to ``depth`` levels, with or without ``tensors``.

    An object that occurs again is named, but not opened again.
    """
    graph = checkpoint.graph
    branches: list[BranchReport] = []
    opened: dict[Ref, str] = {}
    sizes = _sizes(checkpoint)
    work: list[tuple[Ref, int, str, str]] = [(graph.root, 0, "(root)", "(root)")]
    while work:
        ref, level, name, path = work.pop()
        if ref < 0:
            branches.append({"depth": level, "name": "...", "type": "", "value": name, "bytes": 0})
            continue
        if not tensors and checkpoint.survey.reader.tensor(ref) is not None:
            continue
        leaf = _leaf(checkpoint, ref)
        cls, value = leaf or (class_name(graph, ref), f"the same object as {opened.get(ref)}")
        if leaf is None and ref not in opened:
            children, count = _children(graph, ref)
            value = pluralize(count, "entry")
            if children:
                opened[ref] = path
            if level < depth:
                if count > len(children):
                    work.append((-1, level + 1, f"and {count - len(children):,} more", ""))
                work += [(child, level + 1, step, f"{path} {step}") for step, child in reversed(children)]
        branches.append({"depth": level, "name": name, "type": cls, "value": value, "bytes": sizes.get(ref, 0)})
    return branches


def _sizes(checkpoint: Checkpoint) -> dict[Ref, int]:
    """Return the bytes of the tensors and of other storages below each object that has any."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    parents: dict[Ref, Ref] = {graph.root: -1}
    sizes: dict[Ref, int] = {}
    work = [graph.root]
    while work:
        ref = work.pop()
        tensor, storage = reader.tensor(ref), reader.storage(ref)
        if tensor is not None or storage is not None:
            sizes[ref] = tensor.own_bytes if tensor is not None else storage.nbytes if storage is not None else 0
            continue
        found = [child for child in children(graph.nodes[ref]) if child not in parents]
        parents.update(dict.fromkeys(found, ref))
        work += found
    # Each object comes after the one that contains it.
    for ref in reversed(parents):
        if ref in sizes and parents[ref] >= 0:
            sizes[parents[ref]] = sizes.get(parents[ref], 0) + sizes[ref]
    return sizes


def _leaf(checkpoint: Checkpoint, ref: Ref) -> tuple[str, str] | None:
    """Return the type and value of a node that is not opened; None for a container."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    node, tensor = graph.nodes[ref], reader.tensor(ref)
    if tensor is not None:
        kind = "" if tensor.kind == "dense" else f" {tensor.kind}"
        part = sharding(reader, ref, tensor)
        if part is not None:
            kind = f", {part.here} of it here: {part.words}"
        return tensor.cls or "Tensor", f"{tensor.dtype} {shape_text(tensor.shape)} {tensor.location}{kind}"
    cls = class_name(graph, ref)
    if node is None or isinstance(node, bool | int | float):
        huge = isinstance(node, int) and is_huge(node)
        return cls, "" if node is None else "a huge integer" if huge else str(node)
    if isinstance(node, str | bytes):
        return cls, repr(node[:200])
    if isinstance(node, Global):
        return "global", f"{node.module}.{node.name}"
    device, storage = device_text(graph, ref), reader.storage(ref)
    if storage is not None:
        return storage.cls, f"{storage.nbytes:,} bytes {storage.location}"
    return None if device is None else (cls, device)


def _children(graph: Graph, ref: Ref) -> tuple[list[tuple[str, Ref]], int]:
    """Return the first children with their names, and the number of all children."""
    inside = sequence(graph, ref)
    if inside is not None:
        return [(f"[{number}]", item) for number, item in enumerate(inside[:_MAX_CHILDREN])], len(inside)
    items = mapping(graph, ref)
    entries = as_children(graph, items or ())
    # If an object is filled by key, its constructor arguments are not content.
    rest = [child for child in extra_children(graph, ref, entries) if items is None or child.step[0] != "("]
    first: list[tuple[str, Ref]] = []
    for child in islice(chain(entries, rest), _MAX_CHILDREN):
        key = graph.nodes[child.key] if child.key >= 0 else None
        first.append((key if isinstance(key, str) else child.step, child.ref))
    return first, len(entries) + len(rest)
