"""Make a checkpoint smaller without changing a value: shrink views, merge duplicates, drop training-only entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import TargetError
from ..base.globs import MATCH_ALL, Globs, Patterns
from ..base.text import human_bytes, join_limited, pluralize
from ..checkpoint.accounting import account
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import StorageData
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapping
from ..checkpoint.tensors import Storage, Tensor, extent, is_contiguous, view_id
from ..files.sources import Computed, Span
from ..files.threads import run_in_threads
from ..formats.opening import takes_path
from ..values.elements import (
    StorageReader,
    dtype_of,
    elements,
    part_stored,
    storage_reader,
    swapped,
    tensor_size,
    whole_chunks,
)
from .entries import drop_entries
from .storages import Use, chosen_storages, repointed, storage_uses, with_plain_ids

Purpose = Literal["inference"]

#: Bytes of overhead per record. A smaller gap between two views costs less than another record.
_RECORD: Final = 256

#: Top-level entries that only training needs, each with a name for reports.
_TRAINING: Final = (
    ("optimizer", re.compile(r"(?:\A|[_\-. ])[Oo]pt(?:im(?:i[sz]er)?)?s?(?=[_\-. A-Z0-9]|\Z)")),
    ("scheduler", re.compile(r"(?:\A|_)(?:lr_?)?sched(?:uler)?s?(?=_|\d*\Z)|\Alr_.*sched", re.I)),
    ("EMA", re.compile(r"(?:\A|[_\-.])ema(?=[_\-.\d]|\Z)", re.I)),
    ("gradient scaler", re.compile(r"\A(?:(?:grad_?|amp_?|loss_?)?scaler(?=_|\Z)|amp(?=_state|\Z))", re.I)),
)


@takes_path
def slim(
    checkpoint: Checkpoint,
    *,
    dedupe: bool = False,
    purpose: Purpose | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Remove the bytes that no tensor reads: each view gets a storage of its own size.

    Tensors that overlap or nearly touch still share a storage. A view with gaps becomes contiguous if no other tensor
    uses its storage. ``purpose`` "inference" first drops the entries of optimizers, schedulers and EMA. ``dedupe``
    merges storages with equal bytes. ``include`` and ``exclude`` choose the tensors whose storages are cut. No value
    changes.

    >>> ckptool.slim("training.pth", purpose="inference").changes[0].words
    'optimizer dropped: optimizer, 9.51 kB'
    """
    if purpose is not None:
        checkpoint = drop_for(checkpoint, purpose)
    only = Globs(include, exclude)
    checkpoint = _without_slack(checkpoint, only)
    return merged_doubles(checkpoint, only) if dedupe else checkpoint


class Cluster(NamedTuple):
    """Overlapping uses of a storage, which cover its bytes from ``begin`` to ``end``."""

    begin: int
    end: int
    uses: list[Use]


def _without_slack(original: Checkpoint, only: Globs) -> Checkpoint:
    """Cut storages to the bytes that tensors read."""
    checkpoint = with_plain_ids(original)
    reader = checkpoint.survey.reader
    uses = storage_uses(checkpoint.graph, reader)
    wanted = chosen_storages(checkpoint, None, only)
    editor = GraphEditor(checkpoint.graph)
    added: dict[str, StorageData] = {}
    before = after = cut = made_dense = 0
    for key, users in uses.tensors.items():
        storage = reader.storages[key]
        if key in uses.pinned or storage.location == "meta" or key not in wanted:
            continue
        clusters = _clusters(users, storage)
        if clusters is None or checkpoint.body(key) is None:
            continue
        bodies = [
            _gathered(checkpoint, cluster.uses[0].tensor) if _has_gaps(cluster) else _part(checkpoint, key, cluster)
            for cluster in clusters
        ]
        size = sum(body.size for body in bodies)
        if size >= storage.nbytes:
            continue
        for number, (cluster, body) in enumerate(zip(clusters, bodies)):
            name = key
            while number and (name in reader.storages or name in added):
                name = f"{name}.{number}"
            added[name] = body
            dense = _has_gaps(cluster)
            made_dense += dense
            for use in cluster.uses:
                _repoint(editor, use, name, body.size, cluster.begin, storage, dense)
        cut, before, after = cut + 1, before + storage.nbytes, after + size
    if not cut:
        change = Change("slim-views", "", 0, 0, "no view keeps more bytes than it reads")
        return original.changed(original.graph, [change])
    summary = f"{pluralize(cut, 'storage')} cut to what tensors read: {human_bytes(before)} -> {human_bytes(after)}"
    notes = (f"{pluralize(made_dense, 'view')} with gaps made contiguous",) if made_dense else ()
    change = Change("slim-views", "", cut, 0, summary, notes)
    return checkpoint.changed(editor.done(), [change], added, needs_relayout=True)


def _clusters(users: Sequence[Use], storage: Storage) -> list[Cluster] | None:
    """Group uses that overlap or nearly touch; return None if any of them is not understood."""
    spans = []
    for use in users:
        dtype = dtype_of(use.tensor)
        if dtype is None or dtype.packed > 1 or len(use.tensor.stride) != len(use.tensor.shape):
            return None
        size = extent(use.tensor.shape, use.tensor.stride) * dtype.itemsize
        begin = use.tensor.offset * dtype.itemsize if size else 0
        if begin + size > storage.nbytes:
            return None
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


def _has_gaps(cluster: Cluster) -> bool:
    """Return whether all uses are one view that skips bytes between its first and last element."""
    first = cluster.uses[0].tensor
    if len({view_id(use.tensor) for use in cluster.uses}) > 1:
        return False
    return not is_contiguous(first) and tensor_size(first) < cluster.end - cluster.begin


def _part(checkpoint: Checkpoint, key: str, cluster: Cluster) -> StorageData:
    body, size = checkpoint.body(key), cluster.end - cluster.begin
    assert body is not None
    if isinstance(body.piece, Span) and not body.compressed:
        return StorageData(Span(body.piece.source, body.piece.offset + cluster.begin, size), size)
    part = storage_reader(checkpoint, key), cluster.begin, size
    return StorageData(Computed(size, StorageReader.stored, part, part_stored), size)


def _gathered(checkpoint: Checkpoint, tensor: Tensor) -> StorageData:
    size = tensor_size(tensor)
    return StorageData(Computed(size, as_in_file, (storage_reader(checkpoint, tensor.storage), tensor)), size)


def as_in_file(storage: StorageReader, tensor: Tensor) -> Iterator[bytes]:
    """Yield the elements of a tensor, in the file's byte order."""
    for data in whole_chunks(elements(storage, tensor), storage.width):
        yield swapped(data, storage.width)


def _repoint(editor: GraphEditor, use: Use, key: str, nbytes: int, begin: int, storage: Storage, dense: bool) -> None:
    dtype = dtype_of(use.tensor)
    assert isinstance(dtype, Dtype)
    offset = 0 if dense or 0 in use.tensor.shape else use.tensor.offset - begin // dtype.itemsize
    numel = nbytes // storage.dtype.itemsize
    editor.changed[use.args] = repointed(editor, use, key, numel, offset=offset, dense=dense)


def merged_doubles(original: Checkpoint, only: Globs = MATCH_ALL) -> Checkpoint:
    """Merge storages of state dicts with equal bytes, class and device; their tensors are then tied.

    ``only`` chooses tensors. Scalars and optimizer states stay separate, because they are independent counters. Tensors
    of different state dicts stay separate too, because a model and its average will diverge.
    """
    checkpoint = with_plain_ids(original)
    reader = checkpoint.survey.reader
    uses = storage_uses(checkpoint.graph, reader)
    parts = [(entry, part) for entry in checkpoint.survey.tensors for part in reader.parts(entry.tensor)]
    apart = {part.storage for entry, part in parts if entry.state_dict < 0 or part.numel < 2}
    homes: dict[str, set[int]] = {}
    for entry, part in parts:
        homes.setdefault(part.storage, set()).add(entry.state_dict)
    wanted = chosen_storages(checkpoint, None, only)
    alike: dict[object, dict[int | None, list[str]]] = {}
    for key in uses.tensors:
        storage = reader.storages[key]
        if key in apart or key in uses.pinned or storage.location == "meta" or not storage.nbytes:
            continue
        if len(homes.get(key, ())) != 1 or key not in wanted:
            continue
        body = checkpoint.body(key)
        if body is not None:
            signature = (storage.cls, storage.numel, storage.location, *homes[key])
            alike.setdefault(signature, {}).setdefault(body.crc or None, []).append(key)
    same = dict(_duplicates(checkpoint, list(_candidates(alike.values()))))
    if not same:
        return original.changed(original.graph, [Change("dedupe", "", 0, 0, "no two storages hold the same bytes")])
    editor = GraphEditor(checkpoint.graph)
    paths = {part.storage: entry.path for entry, part in reversed(parts)}
    for key, first in same.items():
        for use in uses.tensors[key]:
            editor.changed[use.args] = repointed(editor, use, first, reader.storages[key].numel)
    size = sum(reader.storages[key].nbytes for key in same)
    summary = f"{pluralize(len(same), 'storage')} merged with another of the same bytes: {human_bytes(size)} less"
    pairs = [f"{paths[key]} with {paths[first]}" for key, first in same.items()]
    notes = (f"tied now: {join_limited(pairs, most=3)}",)
    return checkpoint.changed(editor.done(), [Change("dedupe", "", len(same), 0, summary, notes)], needs_relayout=True)


def _candidates(alike: Iterable[dict[int | None, list[str]]]) -> Iterator[list[str]]:
    """Yield groups of similar storages that may have equal bytes.

    They have equal checksums; if any of the storages has none, all are in one group.
    """
    for by_crc in alike:
        groups = [[key for keys in by_crc.values() for key in keys]] if None in by_crc else by_crc.values()
        yield from (keys for keys in groups if len(keys) > 1)


def _duplicates(checkpoint: Checkpoint, groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield (duplicate, first) for storages with equal bytes. Checksums only give candidates; the bytes decide.

    Each storage is read once, in file order.
    """
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
    run_in_threads(keys, digest, sum(reader.storages[key].nbytes for key in keys))
    for group in groups:
        first: dict[bytes, str] = {}
        for key in group:
            other = first.setdefault(digests[key], key)
            if other != key:
                yield key, other


def drop_for(checkpoint: Checkpoint, purpose: str) -> Checkpoint:
    """Drop the top-level entries that ``purpose`` does not need; the last state dict always stays.

    Raise TargetError for a purpose other than "inference".
    """
    if purpose != "inference":
        raise TargetError(f"{purpose!r} is not a known purpose", next="--for inference")
    survey = checkpoint.survey
    causes: dict[str, str] = {}
    items = mapping(checkpoint.graph, checkpoint.graph.root) or []
    for bare in survey.state_dicts:
        if bare.path == "":  # every key of a bare state dict is a parameter, whatever its name
            items = [item for item in items if item not in set(bare.items)]
    for key, _ in items:
        name = checkpoint.graph.nodes[key]
        if isinstance(name, str) and (cause := next((word for word, form in _TRAINING if form.search(name)), "")):
            causes[name] = cause
    weights = {entry.top for entry in survey.tensors if entry.state_dict >= 0}
    entries = survey.entries
    if weights and all(entries[number].key in causes for number in weights):
        # Keep the average: no other weights are left.
        causes = {name: cause for name, cause in causes.items() if cause != "EMA"}
    changes = []
    sizes = account(survey).entry_bytes
    for cause in dict.fromkeys(causes.values()):
        names = [name for name, other in causes.items() if other == cause]
        size = sum(size for entry, size in zip(entries, sizes) if entry.key in names)
        notes = (f"the weights without the average stay; ckptool extract takes {names[0]!r}",) if cause == "EMA" else ()
        summary = f"{cause} dropped: {join_limited(names)}, {human_bytes(size)}"
        changes.append(Change("drop", "", len(names), 0, summary, notes))
    if not changes:
        return checkpoint.changed(checkpoint.graph, [Change("drop", "", 0, 0, "nothing in it is for training alone")])
    return drop_entries(checkpoint, causes, changes)
