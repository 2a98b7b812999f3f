"""Write the sequential ``torch.save`` format before 1.6: five pickles, then the storages.

It is for readers that know no other format: torch 1.5 and earlier, and tools written for it. The output is byte for
byte that of ``torch.save(..., _use_new_zipfile_serialization=False)`` (torch/serialization.py, ``_legacy_save``),
except for the storage keys: torch uses memory addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from ...base.errors import RefusedError
from ...base.steps import salvage_step
from ...base.text import quoted
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.graph_builder import Builder
from ...checkpoint.graph_editor import GraphEditor, prune, removed_with, used_storages
from ...checkpoint.tensors import Storage, TensorReader
from ...files.sources import Computed, Piece, Plan, merge_pieces
from ...pickles.encode import encode
from ...pickles.nodes import Global, Graph, Node, Persistent, Ref
from ...values.elements import StorageReader, storage_reader
from .. import repickled
from ..losses import Fit, Loss, Promise, refuse_texts, storage_facts
from .legacy_reader import MAGIC, VERSION

#: The key of the first storage, and the step to the next. Like addresses, all have the same length. Storages are
#: written in the text order of their keys, which is then the order in which the object mentions them.
_FIRST_KEY: Final = 94_000_000_000_000
_KEY_STEP: Final = 64
#: Builds a nested tensor (torch/_utils.py).
_NESTED: Final = "_rebuild_nested_tensor"
_SIZES: Final = (("short", 2), ("int", 4), ("long", 4))


def fit(checkpoint: Checkpoint, target: Target) -> Fit:
    """Return the content that torch cannot load from such a file, although it writes it. These are tensors over untyped
    storages (float8, uint16 ...), because ``UntypedStorage`` has no ``dtype``, and nested tensors: torch builds them
    from the values of their sizes, but reads storages only after building all objects."""
    refuse_texts(checkpoint, target)
    graph = checkpoint.graph
    uses = TensorReader(graph).uses()  # not from the survey, which takes much longer if nothing is lost
    lost = {"dtypes": {ref for ref, storage in uses if storage.dtype.name in ("untyped", "unknown")}, "layouts": set()}
    if any(node.name == _NESTED for _, node in graph.of_type(Global)):
        lost["layouts"] = {entry.ref for entry in checkpoint.survey.tensors if entry.tensor.kind == "nested"}
    losses = [Loss(kind, _names(checkpoint, refs), drops=True) for kind, refs in lost.items() if refs]
    # A legacy input keeps its pickles and storage keys if nothing is lost.
    relayout = not checkpoint.traits.storages_in_sequence or bool(losses)
    kept = partial(_without, checkpoint, lost["dtypes"] | lost["layouts"]) if losses else None
    return Fit("a legacy file that torch loads", target, losses, graph=kept, relayout=relayout)


def _without(checkpoint: Checkpoint, lost: set[Ref]) -> Graph:
    gone = removed_with(checkpoint.graph, lost)
    if checkpoint.graph.root in gone:
        raise RefusedError("nothing would be left of it", path=checkpoint.path)
    rewrite = GraphEditor(checkpoint.graph)
    prune(rewrite, gone)
    return rewrite.done()


def _names(checkpoint: Checkpoint, lost: set[Ref]) -> tuple[str, ...]:
    gone = removed_with(checkpoint.graph, lost)
    names = [entry.path for entry in checkpoint.survey.tensors if entry.ref in gone]
    names += [path for path, ref, _ in checkpoint.survey.storages if ref in gone]
    return tuple(names or [""])


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """Plan the file; an input already in this format is kept as far as possible."""
    if not checkpoint.needs_relayout:
        return repickled.plan(checkpoint, target)
    return file_plan(checkpoint), repickled.is_exact(checkpoint)


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the object, and its storages under other keys."""
    if not checkpoint.needs_relayout:
        return repickled.promise(checkpoint)
    storages = {key: (size, None) for key, (size, _) in storage_facts(checkpoint, checkpoint.graph).items()}
    return Promise("torch-legacy", checkpoint.graph, None, storages)


def file_plan(checkpoint: Checkpoint) -> Plan:
    """Return the file, with the storages that the object uses. Raises RefusedError if bytes are missing, or one storage
    is described in two ways."""
    twice = sorted(TensorReader(checkpoint.graph).disagreeing)
    if twice:
        what = f"storage {quoted(twice[0])} is used with two dtypes, which the legacy format cannot express"
        raise RefusedError(what, path=checkpoint.path)
    used = used_storages(checkpoint.graph, checkpoint.path)
    keys = {key: str(_FIRST_KEY + number * _KEY_STEP) for number, key in enumerate(used)}
    graph = _renamed(checkpoint.graph, keys)
    data = encode(graph)
    pieces: list[Piece] = [*_head(), data, _pickled(lambda to: to.sequence(to.add(key) for key in keys.values()))]
    for storage in used.values():
        pieces += [storage.numel.to_bytes(8, "little"), *_body(checkpoint, storage)]
    return Plan(merge_pieces(pieces))


def _head() -> Iterator[bytes]:
    yield _pickled(lambda to: to.add(MAGIC))
    yield _pickled(lambda to: to.add(VERSION))

    def system(to: Builder) -> Ref:
        sizes = to.mapping((name, to.constant(size)) for name, size in _SIZES)
        parts = (("protocol_version", to.constant(VERSION)), ("little_endian", to.constant(True)))
        return to.mapping([*parts, ("type_sizes", sizes)])

    yield _pickled(system)


def _pickled(make: Callable[[Builder], Ref]) -> bytes:
    builder = Builder()
    return encode(builder.graph(make(builder)))


def _renamed(graph: Graph, keys: dict[str, str]) -> Graph:
    """Return the graph with other keys, and persistent ids of six parts, as older versions had for views of
    storages."""
    reader = TensorReader(graph)
    nodes = graph.nodes
    changes: dict[Ref, Node] = {}
    added: list[Node] = [None]
    nothing = len(nodes)
    for ref, storage in reader.uses():
        node = nodes[ref]
        assert isinstance(node, Persistent)
        pid = nodes[node.pid]
        assert type(pid) is tuple
        if storage.key not in keys:
            continue  # nothing refers to it
        # A new string each time, like torch's conversion of an address.
        added.append(keys[storage.key])
        changes[node.pid] = (*pid[:2], nothing + len(added) - 1, *pid[3:5], *(pid[5:] or (nothing,)))
    return graph.edited(changes, added)


def _body(checkpoint: Checkpoint, storage: Storage) -> Iterator[Piece]:
    if not storage.nbytes:
        return
    body = checkpoint.body(storage.key)
    if body is None or body.size != storage.nbytes or storage.location == "meta":
        what = f"the bytes of storage {quoted(storage.key)} are not in the file"
        raise RefusedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))
    reader = storage_reader(checkpoint, storage.key)
    if body.compressed or reader.width > 1:
        yield Computed(body.size, StorageReader.loaded, (reader, 0, body.size))
    else:
        yield body.piece
