"""Find the calls that make tensors from storages, choose tensors, and give a tensor another storage."""

from __future__ import annotations

from collections.abc import Iterable

from ..base.errors import MalformedError, RefusedError
from ..base.globs import Globs
from ..base.records import NamedTuple, new_tuple
from ..base.text import quoted
from ..checkpoint.backends import FROM_STORAGE, backend_arguments
from ..checkpoint.checkpoint import Checkpoint, rescue_step
from ..checkpoint.graph_editor import GraphEditor, without_views
from ..checkpoint.objects import mapped_name, mapping
from ..checkpoint.selection import dotted, selected
from ..checkpoint.survey import StateDict, TensorEntry
from ..checkpoint.tensors import Storage, Tensor, TensorReader, contiguous_strides
from ..pickles.nodes import Call, Global, Graph, Persistent, Ref, children
from ..safety.storages import storage_flaws
from ..values.interpretation import lazy_bits

_REBUILDS = frozenset(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"))


class Use(NamedTuple):
    """A tensor's use of a storage, with references to the nodes involved.

    ``args`` is the tuple (storage, offset, shape, strides, ...), ``storage`` the Persistent in it, and ``func`` the
    rebuild function. ``holder`` is the node that refers to ``func``: the call itself, or the arguments of a
    ``_rebuild_from_type_v2`` call.
    """

    holder: Ref
    func: Ref
    args: Ref
    storage: Ref
    tensor: Tensor


class Uses(NamedTuple):
    """The uses of each storage by key, and the keys of storages that are also values themselves."""

    tensors: dict[str, list[Use]]
    pinned: frozenset[str]


def with_plain_ids(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with persistent ids as in zips; the same checkpoint if it already has these."""
    graph = without_views(checkpoint.graph)
    return checkpoint if graph is checkpoint.graph else checkpoint.changed(graph, [], needs_relayout=True)


def chosen_tensors(checkpoint: Checkpoint, key: str | None, only: Globs) -> list[TensorEntry]:
    """Return the tensors that match ``only``, in the state dict at ``key`` unless it is None."""
    survey = checkpoint.survey
    tensors = survey.tensors if key is None else survey.tensors_in([item.path for item in selected(checkpoint, key)])
    only = dotted(only, checkpoint)
    return [entry for entry in tensors if only.match(entry.key, entry.path)] if only else tensors


def tensors_of(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, Tensor]:
    """Return the tensors of a state dict by key."""
    reader, nodes = checkpoint.survey.reader, checkpoint.graph.nodes
    return {str(nodes[name]): tensor for name, ref in state_dict.items if (tensor := reader.tensor(ref)) is not None}


def chosen_storages(checkpoint: Checkpoint, key: str | None, only: Globs) -> set[str]:
    """Return the keys of the chosen tensors' storages; all storages if nothing narrows the choice."""
    reader = checkpoint.survey.reader
    if key is None and not only:
        return {*reader.storages}
    return {part.storage for entry in chosen_tensors(checkpoint, key, only) for part in reader.parts(entry.tensor)}


def storage_uses(graph: Graph, reader: TensorReader) -> Uses:
    """Return all storage uses that are reachable from the root."""
    uses: dict[str, list[Use]] = {}
    pinned: set[str] = set()
    known: set[Ref] = set()
    functions: dict[Ref, str] = {}
    for ref, function in graph.of_type(Global):
        module, _, name = mapped_name(function).rpartition(".")
        if module in ("torch._utils", "torch._tensor", "torch.tensor"):
            functions[ref] = name
        elif backend_arguments(mapped_name(function)) == FROM_STORAGE:
            functions[ref] = "_rebuild_tensor_v2"
    reachable = list(graph.reachable())
    for ref in reachable:
        node = graph.nodes[ref]
        if type(node) is not Call or node.func not in functions:
            continue
        name, holder, func, args = functions[node.func], ref, node.func, node.args
        outer = graph.nodes[args]
        if name.startswith("_rebuild_from_type") and type(outer) is tuple and len(outer) > 2:
            # (function, type, arguments, state): the inner function's call has no node of its own.
            name, holder, func, args = functions.get(outer[0], ""), node.args, outer[0], outer[2]
        parts = graph.nodes[args]
        tensor = reader.tensor(ref)
        if name not in _REBUILDS or type(parts) is not tuple or tensor is None or not tensor.storage:
            continue
        known.add(args)
        uses.setdefault(tensor.storage, []).append(new_tuple(Use, (holder, func, args, parts[0], tensor)))
    mentions = dict(reader.uses())
    in_use = {use.storage for group in uses.values() for use in group}
    # A reference that the pickle took only once has one parent: the arguments of its tensor. So nothing else holds it.
    if graph.fetched is not None and mentions.keys() <= in_use and mentions.keys().isdisjoint(graph.fetched):
        reachable = []
    for ref in reachable:
        node = graph.nodes[ref]
        inside = node if type(node) is tuple else () if type(node) is str else children(node)
        if mentions.keys().isdisjoint(inside):
            continue
        # The first argument of a rebuild call is the use itself.
        pinned.update(mentions[child].key for child in inside[1 if ref in known else 0 :] if child in mentions)
    if (storage := reader.storage(graph.root)) is not None:
        pinned.add(storage.key)
    return Uses(uses, frozenset(pinned))


def has_bits(graph: Graph, use: Use) -> bool:
    """Return whether the tensor has a conjugate or negative bit, which a dict in the last argument records."""
    args = graph.nodes[use.args]
    return type(args) is tuple and len(args) > 6 and bool(mapping(graph, args[-1]))


def refuse_bits(checkpoint: Checkpoint, ref: Ref, name: str) -> None:
    """Raise RefusedError for a tensor with a conjugate or negative bit: its values are not the bytes in its storage."""
    if any(lazy_bits(checkpoint.survey.reader, ref)):
        what = f"{quoted(name)} carries a conjugate or negative bit, so its values are not the bytes in the file"
        step = "load it with torch, and save it again after resolve_conj() and resolve_neg()"
        raise RefusedError(what, path=checkpoint.path, next=step)


def repointed(
    editor: GraphEditor,
    use: Use,
    key: str,
    numel: int,
    *,
    offset: int = -1,
    shape: tuple[int, ...] | None = None,
    cls: Ref = -1,
) -> tuple[Ref, ...]:
    """Return a use's arguments with another storage: ``key``, ``numel`` elements, class ``cls`` (-1: unchanged).

    ``offset`` is in elements (-1: unchanged). With a ``shape``, the tensor begins at the start of the storage, in
    row-major order. Call this for every use of a storage. It removes the old mention of the storage, because torch uses
    the first of two mentions that disagree.
    """
    graph = editor.graph
    persistent = graph.nodes[use.storage]
    assert isinstance(persistent, Persistent)
    pid = graph.nodes[persistent.pid]
    args = editor.node(use.args)
    assert type(pid) is tuple and type(args) is tuple
    new = (pid[0], cls if cls >= 0 else pid[1], editor.text(pid[2], key), pid[3], _number(editor, pid[4], numel))
    storage = editor.add(Persistent(editor.add(new, persistent.pid)), use.storage)
    editor.changed[use.storage] = None
    if shape is None:
        return (storage, args[1] if offset < 0 else _number(editor, args[1], offset), *args[2:])
    numbers = args[2] if shape == use.tensor.shape else editor.numbers(shape)
    strides = editor.numbers(contiguous_strides(shape))
    return (storage, _number(editor, args[1], 0), numbers, strides, *args[4:])


def _number(editor: GraphEditor, ref: Ref, value: int) -> Ref:
    return ref if editor.node(ref) == value else editor.constant(value)


def copied_call(node: Call, func: Ref = -1) -> Call:
    """Return a copy of a call, with another function unless ``func`` is -1."""
    call = Call(node.op, node.func if func < 0 else func, node.args, node.kwargs)
    return call.filled(node.items, node.pairs, node.states)


def misdescribed(checkpoint: Checkpoint) -> dict[Ref, str]:
    """Map references to paths of tensors and storages that the pickle describes in a way torch cannot read."""
    flaws = (flaw for flaw in storage_flaws(checkpoint) if flaw.code in ("geometry", "arguments"))
    return {flaw.ref: flaw.where or "a tensor" for flaw in flaws if flaw.refused_by_torch}


def check_bytes(checkpoint: Checkpoint, storages: Iterable[Storage]) -> None:
    """Raise MalformedError if the bytes of a storage are missing, or torch refuses their number."""
    for storage in storages:
        if storage.location == "meta" or not storage.nbytes or storage.dtype.name == "unknown":
            continue
        stored = checkpoint.body(storage.key)
        if stored is None:
            message = f"the bytes of storage {storage.key!r} are not in the file"
        elif checkpoint.container.keeps_format and stored.size != storage.nbytes:
            message = f"storage {storage.key!r} has {stored.size:,} bytes where the pickle says {storage.nbytes:,}"
        else:
            continue
        raise MalformedError(message, path=checkpoint.path, next=rescue_step(checkpoint))
