"""Make a checkpoint smaller without changing a value: shrink views, merge duplicates, tie and untie tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Final

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.nearest import did_you_mean
from ..base.records import NamedTuple
from ..base.steps import command
from ..base.text import human_bytes, join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.container import StorageData
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.objects import mapping
from ..checkpoint.selection import dotted, selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Storage, Tensor, extent, is_contiguous, view_id
from ..files.downloads import expect_reads
from ..files.sources import Computed, Piece, Span, size_of
from ..files.threads import run_in_threads
from ..formats.opening import takes_path
from ..formats.outputs import OUTPUTS
from ..pickles.nodes import Ref
from ..values.elements import StorageReader, as_in_file, elements, reblocked, storage_reader, tensor_size
from .averages import Purpose, fit_for
from .recompute import Recomputation, Use, chosen_storages, has_bits, refuse_bits, repointed

#: Bytes of overhead per record. A smaller gap between two views costs less than another record.
_RECORD: Final = 256


@takes_path
def slim(
    checkpoint: Checkpoint,
    *,
    dedupe: bool = False,
    purpose: Purpose | None = None,
    tie: Iterable[tuple[str, str]] = (),
    untie: Iterable[str] = (),
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Remove the bytes that no tensor reads: each view gets a storage of its own size.

    Tensors that overlap or nearly touch still share a storage. A view with gaps becomes contiguous if no other tensor
    uses its storage. ``purpose`` "inference" first drops the entries of optimizers, schedulers and EMA. Each pair in
    ``tie`` makes the first name another name of the second one's tensor, if both hold the same bytes; each name in
    ``untie`` gets a copy of its own. ``dedupe`` merges storages with equal bytes. ``key`` is the path of one state
    dict, ``include`` and ``exclude`` choose the tensors whose storages are cut. No value changes.

    >>> ckptool.slim("training.pth", purpose="inference").changes[0].words
    'optimizer dropped: optimizer, 9.51 kB'
    """
    if purpose is not None:
        checkpoint = fit_for(checkpoint, purpose)
    for names in tie:
        checkpoint = tied(checkpoint, names, key=key)
    for name in untie:
        checkpoint = untied(checkpoint, name, key=key)
    only = dotted(Globs(include, exclude), checkpoint)
    checkpoint = _without_slack(checkpoint, key, only)
    return merged_doubles(checkpoint, key=key, include=include, exclude=exclude) if dedupe else checkpoint


class Cluster(NamedTuple):
    """Overlapping uses of a storage, which cover its bytes from ``begin`` to ``end``."""

    begin: int
    end: int
    uses: list[Use]

    @property
    def has_gaps(self) -> bool:
        """Whether all uses are one view that skips bytes between its first and last element."""
        first = self.uses[0].tensor
        if len({view_id(use.tensor) for use in self.uses}) > 1:
            return False
        return not is_contiguous(first) and tensor_size(first) < self.end - self.begin


def _without_slack(original: Checkpoint, key: str | None, only: Globs) -> Checkpoint:
    work = Recomputation(original)
    cut = made_dense = before = after = 0
    for item in work.storages(chosen_storages(work.checkpoint, key, only)):
        storage, clusters = item.storage, _clusters(item.uses, item.storage)
        pieces = [_piece(work.checkpoint, item.key, cluster) for cluster in clusters]
        size = sum(map(size_of, pieces))
        if not clusters or size >= storage.nbytes:
            continue
        for number, (cluster, piece) in enumerate(zip(clusters, pieces)):
            key = work.free_key(f"{item.key}.{number}") if number else item.key
            work.added[key] = StorageData(piece, size_of(piece))
            made_dense += cluster.has_gaps
            for use in cluster.uses:
                tensor, numel = use.tensor, size_of(piece) // storage.dtype.itemsize
                start = 0 if 0 in tensor.shape else tensor.offset - cluster.begin // BY_NAME[tensor.dtype].itemsize
                shape = tensor.shape if cluster.has_gaps else None
                work.editor.changed[use.args] = repointed(work.editor, use, key, numel, offset=start, shape=shape)
        cut, before, after = cut + 1, before + storage.nbytes, after + size
    if not cut:
        return work.done([Change("slim-views", "", 0, 0, "no storage has unused bytes")])
    summary = f"unused bytes removed from {pluralize(cut, 'storage')}: {human_bytes(before)} -> {human_bytes(after)}"
    notes = (f"{pluralize(made_dense, 'view')} with gaps made contiguous",) if made_dense else ()
    return work.done([Change("slim-views", "", cut, 0, summary, notes)])


def _clusters(users: Sequence[Use], storage: Storage) -> list[Cluster]:
    """Group uses that overlap or nearly touch; return [] if any of them is not understood."""
    spans = []
    for use in users:
        dtype = BY_NAME.get(use.tensor.dtype)
        if dtype is None or dtype.packed > 1 or len(use.tensor.stride) != len(use.tensor.shape):
            return []
        size = extent(use.tensor.shape, use.tensor.stride) * dtype.itemsize
        begin = use.tensor.offset * dtype.itemsize if size else 0
        if begin + size > storage.nbytes:
            return []
        spans.append((begin, begin + size, use))
    spans.sort(key=lambda span: span[:2])
    # Tensors of several dtypes may share an untyped storage; offsets count elements of each dtype.
    width = max(BY_NAME[use.tensor.dtype].itemsize for use in users)
    clusters: list[Cluster] = []
    for begin, end, use in spans:
        begin, end = begin - begin % width, end + -end % storage.dtype.itemsize
        last = clusters[-1] if clusters else None
        if last is not None and last.begin == last.end:  # empty tensors read no bytes
            clusters[-1] = Cluster(begin, end, [*last.uses, use])
        elif last is not None and begin < last.end + _RECORD:
            clusters[-1] = Cluster(last.begin, max(last.end, end), [*last.uses, use])
        else:
            clusters.append(Cluster(begin, end, [use]))
    return clusters


def _piece(checkpoint: Checkpoint, key: str, cluster: Cluster) -> Piece:
    body, reader = checkpoint.body(key), storage_reader(checkpoint, key)
    assert body is not None
    if cluster.has_gaps:
        tensor = cluster.uses[0].tensor
        return Computed(tensor_size(tensor), as_in_file, (reader, tensor))
    size = cluster.end - cluster.begin
    if isinstance(body.piece, Span) and not body.compressed:
        return Span(body.piece.source, body.piece.offset + cluster.begin, size)
    return Computed(size, StorageReader.stored, (reader, cluster.begin, size))


def merged_doubles(
    original: Checkpoint, *, key: str | None = None, include: Patterns = (), exclude: Patterns = ()
) -> Checkpoint:
    """Merge storages of state dicts with equal bytes, class and device; their tensors are then tied.

    ``key``, ``include`` and ``exclude`` choose tensors. Scalars and optimizer states stay separate, because they are
    independent counters. Tensors of different state dicts stay separate too, because a model and its average will
    diverge.
    """
    work = Recomputation(original)
    checkpoint, reader = work.checkpoint, work.reader
    parts = [(entry, part) for entry in checkpoint.survey.tensors for part in reader.parts(entry.tensor)]
    apart = {part.storage for entry, part in parts if entry.state_dict < 0 or part.numel < 2}
    homes: dict[str, set[int]] = {}
    for entry, part in parts:
        homes.setdefault(part.storage, set()).add(entry.state_dict)
    wanted = chosen_storages(checkpoint, key, Globs(include, exclude))
    alike: dict[object, dict[int | None, list[str]]] = {}
    for item in work.storages(wanted - apart):
        storage, body = item.storage, checkpoint.body(item.key)
        if storage.nbytes and len(homes.get(item.key, ())) == 1 and body is not None:
            signature = (storage.cls, storage.numel, storage.location, *homes[item.key])
            alike.setdefault(signature, {}).setdefault(body.crc or None, []).append(item.key)
    # Storages with equal checksums may be equal; where a checksum is missing, all of them.
    sets = ([[key for keys in own.values() for key in keys]] if None in own else own.values() for own in alike.values())
    same = dict(_duplicates(checkpoint, [keys for groups in sets for keys in groups if len(keys) > 1]))
    if not same:
        return work.done([Change("dedupe", "", 0, 0, "no two storages hold the same bytes")])
    paths = {part.storage: entry.path for entry, part in reversed(parts)}
    for key, first in same.items():
        for use in work.storage(key).uses:
            work.editor.changed[use.args] = repointed(work.editor, use, first, reader.storages[key].numel)
    size = sum(reader.storages[key].nbytes for key in same)
    summary = f"{pluralize(len(same), 'storage')} merged with another of the same bytes: {human_bytes(size)} less"
    pairs = [f"{paths[key]} with {paths[first]}" for key, first in same.items()]
    return work.done([Change("dedupe", "", len(same), 0, summary, (f"tied now: {join_limited(pairs, most=3)}",))])


def _duplicates(checkpoint: Checkpoint, groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield (duplicate, first) for storages with equal bytes. Checksums only give candidates; the bytes decide."""
    from hashlib import sha256  # imported late: loading OpenSSL takes milliseconds

    digests: dict[str, bytes] = {}

    def digest(key: str) -> None:
        state = sha256()
        for data in storage_reader(checkpoint, key).stored():
            state.update(data)
        digests[key] = state.digest()

    def place(key: str) -> int:
        body = checkpoint.body(key)
        return body.piece.offset if body is not None and isinstance(body.piece, Span) else 0

    reader = checkpoint.survey.reader
    keys = sorted((key for group in groups for key in group), key=place)
    expect_reads((body.piece for key in keys if (body := checkpoint.body(key)) is not None), path=checkpoint.path)
    run_in_threads(keys, digest, [reader.storages[key].nbytes for key in keys])
    for group in groups:
        first: dict[bytes, str] = {}
        for key in group:
            other = first.setdefault(digests[key], key)
            if other != key:
                yield key, other


@takes_path
def repack(checkpoint: Checkpoint) -> Checkpoint:
    """Rewrite the file in torch's layout: only its own records, in its order, aligned and uncompressed.

    Unused storages, old versions and dead bytes are removed, so ``torch.load(mmap=True)`` works on every output. A file
    as torch 2.7 and later write it stays the same byte for byte. A legacy file becomes a zip.

    >>> ckptool.repack("training.pth").changes[0].words
    'rewritten in the layout of torch.save'
    """
    used = used_storages(checkpoint.graph, checkpoint.path)
    deflated = sum((body := checkpoint.body(key)) is not None and body.compressed for key in used)
    notes = [f"{pluralize(deflated, 'deflated storage')} inflated"] if deflated else []
    unused = [record for record in checkpoint.container.records() if record.key and record.key not in used]
    if unused:
        size = human_bytes(sum(record.span.size for record in unused))
        notes.append(f"{pluralize(len(unused), 'storage')} that nothing uses left out, {size}")
    layout = OUTPUTS[checkpoint.traits.writes_as or "torch"].layout
    change = Change("repack", "", 1, 0, f"rewritten in the layout of {layout}", tuple(notes))
    return checkpoint.changed(checkpoint.graph, [change], needs_relayout=True)


#: Bytes of two tensors that are compared at once.
_STEP: Final = 1 << 20


def tied(checkpoint: Checkpoint, names: tuple[str, str], *, key: str | None = None) -> Checkpoint:
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


def untied(checkpoint: Checkpoint, name: str, *, key: str | None = None) -> Checkpoint:
    """Give a tensor a storage of its own, with the same values; raise RefusedError if it shares with no other."""
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
    kinds = [f"{each.dtype} {list(each.shape)}" for each in (tensor, kept)]
    if kinds[0] != kinds[1]:
        what = f"{quoted(one)} is {kinds[0]} and {quoted(other)} {kinds[1]}"
        raise RefusedError(what, path=work.checkpoint.path)
    if not equal_values(work.checkpoint, tensor, kept):
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
