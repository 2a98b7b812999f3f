"""Which calls make tensors of which storages, and how they are given others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import Rewrite
from ..checkpoint.objects import mapped_name, mapping
from ..checkpoint.tensors import Tensor, TensorReader, typed_call
from ..checkpoint.views import without_views
from ..pickles.nodes import Call, Global, Graph, Persistent, Ref, children

_REBUILDS = frozenset(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"))


class Use(NamedTuple):
    """A tensor made of a storage.

    ``args`` is the tuple (storage, offset, shape, strides, ...); ``storage`` the reference of its Persistent, ``func``
    that of the rebuild function, which the node ``holder`` holds: the call itself, or the arguments of a call of
    ``_rebuild_from_type_v2``.
    """

    holder: Ref
    func: Ref
    args: Ref
    storage: Ref
    tensor: Tensor


class Uses(NamedTuple):
    """The uses of each storage by key, and the storages that are held otherwise, too: as values of their own."""

    tensors: dict[str, list[Use]]
    pinned: frozenset[str]


def with_plain_ids(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with persistent ids as the zip format has them; itself where they are so already."""
    graph = without_views(checkpoint.graph)
    return checkpoint if graph is checkpoint.graph else checkpoint.changed(graph, [], anew=True)


def storage_uses(graph: Graph, reader: TensorReader) -> Uses:
    """Every use of a storage that the root leads to."""
    found: dict[str, list[Use]] = {}
    pinned: set[str] = set()
    known: set[Ref] = set()
    functions: dict[Ref, str] = {}
    for ref, node in enumerate(graph.nodes):
        if type(node) is Global:
            module, _, name = mapped_name(node).rpartition(".")
            if module in ("torch._utils", "torch._tensor", "torch.tensor"):
                functions[ref] = name
    reachable = list(graph.reachable())
    for ref in reachable:
        node = graph.nodes[ref]
        if type(node) is not Call or node.func not in functions:
            continue
        name, holder, func, args = functions[node.func], ref, node.func, node.args
        outer = graph.nodes[args]
        inner = typed_call(graph, outer) if name.startswith("_rebuild_from_type") and type(outer) is tuple else None
        if inner is not None:
            name, holder, func, args = functions.get(inner[1], ""), node.args, inner[1], inner[2]
        parts = graph.nodes[args]
        tensor = reader.tensor(ref)
        if name not in _REBUILDS or type(parts) is not tuple or tensor is None or not tensor.storage:
            continue
        known.add(args)
        found.setdefault(tensor.storage, []).append(Use(holder, func, args, parts[0], tensor))
    for ref in reachable:
        # What such arguments begin with is the use itself.
        for child in children(graph.nodes[ref])[1 if ref in known else 0 :]:
            storage = reader.storage(child)
            if storage is not None:
                pinned.add(storage.key)
    if (storage := reader.storage(graph.root)) is not None:
        pinned.add(storage.key)
    return Uses(found, frozenset(pinned))


def is_marked(graph: Graph, use: Use) -> bool:
    """Does the tensor carry a conjugate or negative bit? They stand in a dict, the last argument."""
    args = graph.nodes[use.args]
    return type(args) is tuple and len(args) > 6 and bool(mapping(graph, args[-1]))


def repointed(
    rewrite: Rewrite,
    use: Use,
    key: str,
    numel: int,
    *,
    offset: int | None = None,
    strides: Sequence[int] | None = None,
    cls: Ref = -1,
) -> tuple[Ref, ...]:
    """The arguments of a use with another storage: ``key`` of ``numel`` elements, of the class ``cls`` (-1: its own).

    ``offset`` and ``strides`` are in elements; None leaves them. To be asked for all uses of a storage: what mentioned
    it goes, because of two mentions that disagree the first one counts.
    """
    graph = rewrite.graph
    persistent = graph.nodes[use.storage]
    assert isinstance(persistent, Persistent)
    pid = graph.nodes[persistent.pid]
    args = rewrite.node(use.args)
    assert type(pid) is tuple and type(args) is tuple
    new = (pid[0], cls if cls >= 0 else pid[1], rewrite.text(pid[2], key), pid[3], _number(rewrite, pid[4], numel))
    twin = rewrite.add(Persistent(rewrite.add(new, persistent.pid)), use.storage)
    rewrite.changed[use.storage] = None
    at = args[1] if offset is None else _number(rewrite, args[1], offset)
    steps = args[3] if strides is None else rewrite.add(tuple(rewrite.constant(step) for step in strides))
    return (twin, at, args[2], steps, *args[4:])


def _number(rewrite: Rewrite, ref: Ref, value: int) -> Ref:
    return ref if rewrite.node(ref) == value else rewrite.constant(value)
