"""Tie two names to one tensor, or give a tied tensor a storage of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import zip_longest
from typing import Final

from ..base.dtypes import BY_NAME
from ..base.errors import MalformedError, RefusedError, TargetError
from ..base.nearest import did_you_mean
from ..base.steps import command, salvage_step
from ..base.text import join_limited, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.checksums import checksum
from ..checkpoint.objects import mapping
from ..checkpoint.selection import selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, is_contiguous
from ..files.sources import Computed, Piece, Span
from ..pickles.nodes import Ref
from ..values.elements import as_in_file, elements, reblocked, storage_reader, tensor_size
from .recompute import Recomputation
from .storages import has_bits, refuse_bits

#: Bytes of two tensors that are compared at once.
_STEP: Final = 1 << 20


def tie(checkpoint: Checkpoint, names: tuple[str, str], *, key: str | None = None) -> Checkpoint:
    """Make the first name another name of the second one's tensor, with one storage for both.

    If both exist, they must be equal in dtype, shape and bytes; otherwise raise RefusedError. ``key`` is the path of
    the state dict.
    """
    name, kept = names
    work = Recomputation(checkpoint)
    changes = []
    for state_dict in _having(work.checkpoint, key, kept):
        items = mapping(work.checkpoint.graph, state_dict.ref) or []
        found, old = _value(work, state_dict, kept), _value(work, state_dict, name)
        assert found is not None
        if old is None:
            items = [*items, (work.editor.add(name), found[0])]
        else:
            for ref, own in ((old[0], name), (found[0], kept)):
                refuse_bits(work.checkpoint, ref, own)
            _refuse_different(work, name, old[1], kept, found[1])
            items = [(ref, found[0] if work.checkpoint.graph.nodes[ref] == name else held) for ref, held in items]
        work.editor.refill(state_dict.ref, items)
        changes.append(Change("tie", state_dict.path, 1, 0, f"{name} is {kept} now"))
    return work.done(changes)


def untie(checkpoint: Checkpoint, name: str, *, key: str | None = None) -> Checkpoint:
    """Give a tensor that shares its storage with others a storage of its own, with the same values.

    ``key`` is the path of the state dict. Raise RefusedError if nothing else uses the storage.
    """
    work = Recomputation(checkpoint)
    changes = []
    for state_dict in _having(work.checkpoint, key, name):
        found = _value(work, state_dict, name)
        assert found is not None
        tensor = found[1]
        same = [entry for entry in work.checkpoint.survey.tensors if entry.tensor.storage == tensor.storage]
        others = [entry.key for entry in same if entry.key != name]
        if not others:
            raise RefusedError(f"{quoted(name)} shares its storage with no other tensor", path=checkpoint.path)
        own = own_copy(work, name, tensor)
        items = mapping(work.checkpoint.graph, state_dict.ref) or []
        nodes = work.checkpoint.graph.nodes
        work.editor.refill(state_dict.ref, [(ref, own if nodes[ref] == name else held) for ref, held in items])
        what = f"{name} has a copy of its own; it was tied to {join_limited(others, most=3)}"
        changes.append(Change("untie", state_dict.path, 1, 0, what))
    return work.done(changes)


def parse_names(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Parse texts ``NAME=OTHER``; raise TargetError for others."""
    pairs = []
    for text in texts:
        name, _, other = text.partition("=")
        if not (name and other) or name == other:
            raise TargetError(f"{text!r} is not NAME=OTHER", next="write lm_head.weight=model.embed_tokens.weight")
        pairs.append((name, other))
    return pairs


def own_copy(work: Recomputation, name: str, tensor: Tensor) -> Ref:
    """Return a new tensor with the same values in row-major order, in a storage of its own."""
    dtype, body = BY_NAME.get(tensor.dtype), work.checkpoint.body(tensor.storage)
    bits = any(has_bits(work.checkpoint.graph, use) for use in work.storage(tensor.storage).uses)
    if tensor.kind != "dense" or tensor.cls not in ("", "Parameter") or dtype is None or body is None or bits:
        raise RefusedError(f"{quoted(name)} is not a plain tensor with values", path=work.checkpoint.path)
    begin, size = tensor.offset // dtype.packed * dtype.itemsize, tensor_size(tensor)
    piece: Piece = Computed(size, as_in_file, (storage_reader(work.checkpoint, tensor.storage), tensor))
    if isinstance(body.piece, Span) and not body.compressed and is_contiguous(tensor) and begin + size <= body.size:
        piece = Span(body.piece.source, body.piece.offset + begin, size)
    return work.tensor(name, dtype, tensor.shape, piece, tensor.location, tensor.requires_grad)


def _having(checkpoint: Checkpoint, key: str | None, name: str) -> list[StateDict]:
    """Return the state dicts with a key; raise TargetError if there are none."""
    nodes, found = checkpoint.graph.nodes, selected(checkpoint, key)
    having = [item for item in found if any(nodes[ref] == name for ref, _ in item.items)]
    if not having:
        near = did_you_mean(name, [str(nodes[ref]) for item in found for ref, _ in item.items])
        step = command("keys", checkpoint.path)
        raise TargetError(f"there is no key {quoted(name)}{near}", path=checkpoint.path, next=step)
    return having


def _value(work: Recomputation, state_dict: StateDict, name: str) -> tuple[Ref, Tensor] | None:
    """Return the reference of a tensor, and the tensor; None if there is no such key. Raise RefusedError for others."""
    nodes = work.checkpoint.graph.nodes
    ref = next((held for key, held in state_dict.items if nodes[key] == name), -1)
    if ref < 0:
        return None
    tensor = work.reader.tensor(ref)
    if tensor is None or not tensor.storage:
        raise RefusedError(f"{quoted(name)} is not a plain tensor with values", path=work.checkpoint.path)
    return ref, tensor


def _refuse_different(work: Recomputation, one: str, tensor: Tensor, other: str, kept: Tensor) -> None:
    """Raise RefusedError unless two tensors are equal in dtype, shape and bytes."""
    kinds = [f"{each.dtype} {list(each.shape)}" for each in (tensor, kept)]
    if kinds[0] != kinds[1]:
        what = f"{quoted(one)} is {kinds[0]} and {quoted(other)} {kinds[1]}"
        raise RefusedError(what, path=work.checkpoint.path)
    if not equal_values(work.checkpoint, tensor, kept):
        _refuse_damaged(work.checkpoint, {tensor.storage, kept.storage})
        what = f"{quoted(one)} and {quoted(other)} differ in their values, and tied tensors have the same"
        raise RefusedError(what, path=work.checkpoint.path)


def equal_values(checkpoint: Checkpoint, one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in dtype, shape and bytes; those that are one in memory are not read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if (one.storage, one.offset, one.stride) == (other.storage, other.offset, other.stride):
        return True
    streams = [reblocked(elements(storage_reader(checkpoint, each.storage), each), _STEP) for each in (one, other)]
    return all(mine == theirs for mine, theirs in zip_longest(*streams))


def _refuse_damaged(checkpoint: Checkpoint, keys: Collection[str]) -> None:
    """Raise MalformedError if a record of one of these storages does not match its recorded checksum."""
    for record in checkpoint.container.records():
        if record.key in keys and record.crc and checksum(record) != record.crc:
            what = f"record {record.name} does not match its checksum: it is damaged"
            raise MalformedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))
