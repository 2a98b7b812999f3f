"""Combine checkpoints: merge tensors or entries of one into another, average several of one model, or add
their differences.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from math import frexp, ldexp
from typing import Any

from ..base.addresses import is_remote
from ..base.dtypes import DTYPES, Dtype
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.prefixes import adapter_keys, unwrapper
from ..base.records import NamedTuple
from ..base.steps import AnyStep, command, option, suggested_output, tree_step
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.container import StorageData
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapping, scalar, values_of
from ..checkpoint.paths import literal_identity, spell_key
from ..checkpoint.quantized import quantization
from ..checkpoint.selection import dotted, lookup, new_key, only_one, selected, slot
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor
from ..files.sources import Computed
from ..formats.opening import CheckpointOrPath, as_checkpoint, takes_path
from ..formats.planning import blaming_damage
from ..pickles.nodes import Buffer, ByteArray, Extension, FrozenSet, Node, Persistent, Ref, Set, relocated
from ..values.elements import StorageReader, number_width, storage_reader, swapped, whole_chunks
from ..values.torch import compute
from ..values.torch.loads import need_torch
from .recompute import Recomputation, has_bits, one_for_each, quantized_refusal, tensors_of, with_plain_ids


@takes_path
def merge(
    checkpoint: Checkpoint,
    other: CheckpointOrPath,
    *,
    entry: Sequence[tuple[str, str]] = (),
    key: str | None = None,
    other_key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Merge tensors from another checkpoint's state dict into this one: equal keys are replaced, new ones are added.

    With ``entry``, pairs (path in the other, path in this one), whole entries are merged instead. ``other``, a path or
    a Checkpoint, must stay open until the result is saved.

    ``key`` and ``other_key`` are the paths of the state dicts. By default state dicts at the same path are merged, or
    the only one of each checkpoint. ``include`` and ``exclude`` choose keys of the other. Raise RefusedError if a shape
    differs or nothing is merged, TargetError if it is unclear which state dicts are meant.

    >>> with ckptool.open("model.pth") as one, ckptool.open("other.pth") as other:
    ...     print(ckptool.merge(one, other).changes[0].words)
    9 keys replaced from other.pth
    """
    other = as_checkpoint(other)
    if entry:
        return _merge_entries(checkpoint, other, entry)
    only = dotted(Globs(include, exclude), other)
    pairs = _pairs(checkpoint, other, key, other_key)
    for ours, theirs in pairs:
        _refuse_adapter(checkpoint, ours, other, theirs, only)
    graft = _Graft(with_plain_ids(checkpoint), with_plain_ids(other))
    changes = [change for pair in pairs if (change := _merge_dicts(graft, *pair, only)) is not None]
    if not changes:
        step = "find names that fit: " + command("match", other.path, checkpoint.path)
        raise RefusedError("nothing is taken: no key of it is chosen", path=other.path, next=step)
    return graft.done(changes)


def merge_file(checkpoint: Checkpoint, other: str, **how: Any) -> Checkpoint:
    """Merge from a file; if it is damaged, the error is about the damage."""
    opened = as_checkpoint(other)
    with blaming_damage(opened):
        return merge(checkpoint, opened, **how)


def parse_source(text: str) -> dict[str, Any]:
    """Parse ``OTHER:FROM[=TO]``: a file, an entry, and its new path; raise TargetError for other texts."""
    other, _, entry = text.rpartition(":")
    if not other or not entry or (is_remote(text) and not is_remote(other)):  # the colon is part of s3://
        raise TargetError(f"{text!r} is not FILE:ENTRY", next="write other.pth:ema=state_dict")
    origin, _, target = entry.partition("=")
    return {"other": other, "entry": [(origin, target or origin)]}


def _pairs(
    original: Checkpoint, other: Checkpoint, key: str | None, other_key: str | None
) -> list[tuple[StateDict, StateDict]]:
    ours, theirs = selected(original, key), selected(other, other_key)
    if key is None and other_key is None:
        there = {item.path: item for item in theirs}
        both = [(item, there[item.path]) for item in ours if item.path in there]
        if both:
            return both
    return [(only_one(original, ours), only_one(other, theirs, "other_key"))]


def _refuse_adapter(checkpoint: Checkpoint, ours: StateDict, other: Checkpoint, theirs: StateDict, only: Globs) -> None:
    names = [str(other.graph.nodes[name]) for name, _ in theirs.items]
    there = adapter_keys(name for name in names if not only or only.match(name, spell_key(theirs.path, name)))
    if there and not adapter_keys(str(checkpoint.graph.nodes[name]) for name, _ in ours.items):
        message = f"it is an adapter ({quoted(there[0])}): merge replaces tensors, and does not add W + BA"
        from .lora import merge_verdict  # only adapters need it

        by_peft = "use PEFT: model.merge_and_unload(), then model.save_pretrained()"
        raise RefusedError(message, path=other.path, next=merge_verdict(checkpoint, other)[0] or by_peft)


def _merge_dicts(graft: _Graft, ours: StateDict, theirs: StateDict, only: Globs) -> Change | None:
    here, there = graft.checkpoint, graft.foreign
    items = list(mapping(here.graph, ours.ref) or ())  # a root may hold more than the model
    places = {str(here.graph.nodes[name]): number for number, (name, _) in enumerate(items)}
    new: list[str] = []
    taken: set[str] = set()
    recast = 0
    for name, value in theirs.items:
        text = str(there.graph.nodes[name])
        if only and not only.match(text, spell_key(theirs.path, text)):
            continue
        taken.add(text)
        if text not in places:
            new.append(text)
            items.append((graft.ref(name), graft.ref(value)))
            continue
        number = places[text]
        old_tensor, tensor = here.survey.reader.tensor(items[number][1]), there.survey.reader.tensor(value)
        if old_tensor is not None and tensor is not None:
            if old_tensor.shape != tensor.shape:
                message = f"{quoted(text)} has the shape {list(tensor.shape)} there and {list(old_tensor.shape)} here"
                raise RefusedError(message, path=there.path, next=f"leave it out: {option('exclude', text)}")
            recast += old_tensor.dtype != tensor.dtype
        items[number] = (items[number][0], graft.ref(value))
    if not taken:
        return None
    replaced = len(taken) - len(new)
    for each, state_dict in ((here, ours), (there, theirs)):
        _refuse_torn(each, state_dict, taken)
    graft.editor.refill(ours.ref, items)
    _merge_metadata(graft, ours, theirs, new)
    parts = [f"{pluralize(replaced, 'key')} replaced"] if replaced else []
    parts += [f"{pluralize(len(new), 'key')} added"] if new else []
    summary = f"{' and '.join(parts)} from {there.path}"
    notes: tuple[str, ...] = (f"{pluralize(recast, 'key')} of another dtype now",) if recast else ()
    if not replaced and set(map(unwrapper(places), places)) & set(map(unwrapper(new), new)):
        step = command("match", there.path, here.path)
        notes += (f"apart from the names of wrappers these keys existed before, and now exist twice: {step}",)
    return Change("merge", ours.path, replaced + len(new), len(ours.items) - replaced, summary, notes)


def _refuse_torn(checkpoint: Checkpoint, state_dict: StateDict, taken: set[str]) -> None:
    number = next((at for at, item in enumerate(checkpoint.state_dicts) if item.path == state_dict.path), -1)
    for weight in quantization(checkpoint).weights:
        names = {entry.key for _, entry in weight.parts if entry.state_dict == number}
        if torn := sorted(names - taken if names & taken else ()):
            message = f"{quoted(weight.name)} is quantized ({weight.format}), and {quoted(torn[0])} would be of another"
            raise RefusedError(message, path=checkpoint.path, next="take all tensors of a weight, or none")


def _merge_entries(original: Checkpoint, other: Checkpoint, entries: Sequence[tuple[str, str]]) -> Checkpoint:
    """Merge whole entries, each as (path there, path here); raise TargetError for a path that leads nowhere."""
    checkpoint, foreign = with_plain_ids(original), with_plain_ids(other)
    graft = _Graft(checkpoint, foreign)
    # Changed mappings: all of their items, and the index of each new item by its key.
    filled: dict[Ref, list[tuple[Ref, Ref]]] = {}
    added: dict[Ref, dict[Hashable, int]] = {}
    changes = []
    for origin, target in entries:
        entry = lookup(foreign, origin)
        place = slot(checkpoint, target)
        if place is None:
            message = f"no mapping can hold {target!r}"
            raise TargetError(message, path=original.path, next=tree_step(original.path))
        items, new = filled.setdefault(place.holder, list(place.items)), added.setdefault(place.holder, {})
        key = literal_identity(place.key)
        number = place.number if place.number >= 0 else new.get(key, -1)
        value = graft.ref(entry.ref)
        if number < 0:
            new[key] = len(items)
            items.append((new_key(checkpoint, graft.editor, target, place.key), value))
        else:
            items[number] = (items[number][0], value)
        graft.editor.refill(place.holder, items)
        words = "added" if number < 0 else "replaced"
        changes.append(Change("merge", target, 1, 0, f"{words} by {origin!r} of {other.path}"))
    return graft.done(changes)


def _merge_metadata(graft: _Graft, ours: StateDict, theirs: StateDict, added: Sequence[str]) -> None:
    """Copy the ``_metadata`` entries of modules that have new keys."""
    if ours.metadata < 0 or theirs.metadata < 0 or not added:
        return
    graph, foreign = graft.checkpoint.graph, graft.foreign.graph
    here = mapping(graph, ours.metadata) or []
    modules = {name[:at] for name in added for at, char in enumerate(name) if char == "."}
    missing = modules - {graph.nodes[name] for name, _ in here}
    there = mapping(foreign, theirs.metadata) or []
    more = [(graft.ref(name), graft.ref(value)) for name, value in there if foreign.nodes[name] in missing]
    if more:
        graft.editor.refill(ours.metadata, [*here, *more])


class _Graft:
    """Copies nodes from another graph, each once, so that objects shared there are shared here."""

    def __init__(self, checkpoint: Checkpoint, foreign: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.foreign = foreign
        self.editor = GraphEditor(checkpoint.graph)
        self._copies: dict[Ref, Ref] = {}
        self._bodies: dict[str, StorageData] = {}
        self._keys: dict[str, str] = {}
        self._taken = {*checkpoint.survey.reader.storages, *checkpoint.added}

    def done(self, changes: Sequence[Change]) -> Checkpoint:
        """Return the checkpoint with everything that was copied."""
        return self.checkpoint.changed(
            self.editor.done(),
            changes,
            self._bodies,
            needs_relayout=True,
            others=(self.foreign,),
            deferred_changes=self.foreign.deferred_changes,
        )

    def ref(self, root: Ref) -> Ref:
        """Copy the other graph's node ``root`` and everything that it leads to; return the reference of the copy."""
        return self.editor.graft(self.foreign.graph, root, self._copies, self._copied)

    def _copied(self, ref: Ref) -> Node:
        graph = self.foreign.graph
        storage = self.foreign.survey.reader.storage(ref)
        node = graph.nodes[ref]
        if storage is not None and isinstance(node, Persistent):
            pid = graph.nodes[node.pid]
            assert type(pid) is tuple
            key = self._key(storage.key)
            copied = [self._copies[part] for part in pid]
            return Persistent(self.editor.add((*copied[:2], self.editor.constant(key), *copied[3:])))
        if graph.style.protocol != self.checkpoint.graph.style.protocol and isinstance(
            node, bytes | ByteArray | Buffer | Extension | Set | FrozenSet
        ):
            message = f"it is in pickle protocol {graph.style.protocol}, and holds what the other's does not know"
            output = suggested_output(self.foreign.path, "loadable")
            step = "sanitize it first: " + command("sanitize", self.foreign.path, output=output)
            raise RefusedError(message, path=self.foreign.path, next=step)
        return relocated(node, self._copies)

    def _key(self, key: str) -> str:
        """Return a new key here for a storage of the other checkpoint, and take over its bytes."""
        if key in self._keys:
            return self._keys[key]
        name = f"merged.{key}"
        while name in self._taken:
            name = f"merged.{name}"
        self._taken.add(name)
        self._keys[key] = name
        body = self.foreign.body(key)
        if body is not None:
            self._bodies[name] = self._in_our_byte_order(key, body)
        return name

    def _in_our_byte_order(self, key: str, body: StorageData) -> StorageData:
        if self.foreign.container.byteorder == self.checkpoint.container.byteorder:
            return body
        dtype = self.foreign.survey.reader.storages[key].dtype
        if dtype.name == "unknown":
            raise RefusedError(f"storage {key!r} has another byte order, and an unknown dtype", path=self.foreign.path)
        parameters = storage_reader(self.foreign, key), number_width(dtype)
        return StorageData(Computed(body.size, swapped_storage, parameters), body.size)


def swapped_storage(storage: StorageReader, width: int) -> Iterator[bytes]:
    return (swapped(data, width) for data in whole_chunks(storage.stored(), width))


# -- average

#: Dtypes that have a mean: floating point, one number per element.
_DTYPES = frozenset(dtype.name for dtype in DTYPES if dtype.floating and dtype.name != "float4_e2m1fn_x2")


def average(
    checkpoints: Sequence[CheckpointOrPath],
    *,
    weights: Sequence[float] | None = None,
    base: CheckpointOrPath | None = None,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Return the latest checkpoint with its floating-point tensors replaced by the mean over all checkpoints.

    The latest has the highest epoch or step at its top level; without any, it is the first. Only tensors in state dicts
    are averaged. The others must have the same state dicts with the same keys, shapes and dtypes. Sums are computed in
    float64, with one of ``weights`` per checkpoint (default: equal). With a ``base``, the result is task arithmetic
    instead: the first checkpoint, plus the difference of each other one from the base, times its weight (default: 1),
    rounded once. Integer tensors and everything else come from the latest checkpoint, with a ``base`` from the first.
    Raise TargetError for invalid weights and dtypes, RefusedError if the checkpoints do not match.

    >>> mean = ckptool.average(["model.pth", "other.pth"], weights=[0.9, 0.1])
    >>> mean.changes[0].words
    '8 tensors averaged over 2 checkpoints in float64; 1 tensor copied from model.pth (not floating-point)'
    """
    if isinstance(checkpoints, str | os.PathLike | Checkpoint):
        raise TypeError("a list of paths or Checkpoints is expected, not one of them")
    opened, only = [as_checkpoint(item) for item in checkpoints], Globs(include, exclude)
    need_torch("averaging values", opened[0].path if opened else "")
    if base is not None:
        factors = one_for_each(len(opened) - 1, "difference", weights)
    elif len(opened) > 1:
        factors = _scaled(one_for_each(len(opened), "checkpoint", weights))
    else:
        raise TargetError("an average needs two checkpoints or more")
    counts = [_counts(checkpoint) for checkpoint in opened]
    latest = max(range(len(opened)), key=lambda index: [counts[index].get(name, -1) for name in _COUNTS])
    if base is None and latest:
        opened.insert(0, opened.pop(latest))
        factors.insert(0, factors.pop(latest))
    opened += [] if base is None else [as_checkpoint(base)]
    works = [Recomputation(checkpoint) for checkpoint in opened]
    work, opened = works[0], [each.checkpoint for each in works]
    first, *others = opened
    only = dotted(only, first)

    def refusal(message: str, step: AnyStep = "") -> RefusedError:
        return RefusedError(message, path=first.path, next=step)

    plan: dict[str, list[str]] = {}
    layouts: dict[str, set[object]] = {}
    integers = tensors = 0
    apart = "slim each of them first"
    for state_dict in selected(first, key):
        tables = [tensors_of(other, _partner_dict(first, other, state_dict)) for other in others]
        for name, tensor in tensors_of(first, state_dict).items():
            if not only.match(name, spell_key(state_dict.path, name)):
                continue
            partners = [_partner(first, other, table, name, tensor) for other, table in zip(others, tables)]
            for each, own in zip(works, (tensor, *partners)):
                if own in each.quantized.tensors:
                    raise quantized_refusal(each.checkpoint, each.quantized, f"{quoted(name)} has no mean")
            if tensor.dtype not in _DTYPES or tensor.kind != "dense" or not tensor.storage:
                integers += 1
                continue
            keys = [tensor.storage, *(partner.storage for partner in partners)]
            if plan.setdefault(tensor.storage, keys) != keys or {*map(_layout, partners)} - {_layout(tensor)}:
                raise refusal(f"{quoted(name)} lies in its storage in another way than in another checkpoint", apart)
            layouts.setdefault(tensor.storage, set()).add(_layout(tensor))
            tensors += 1
    for name, keys in plan.items():
        path = next((entry.path for entry in first.survey.tensors if entry.tensor.storage == name), "a tensor")
        items = [each.storage(key, path) for each, key in zip(works, keys)]
        item = items[0]
        if (
            work.is_pinned(name)
            or item.dtype is None
            or any(_layout(use.tensor) not in layouts[name] for use in item.uses)
        ):
            raise refusal(f"{path} shares its storage with a tensor that is not averaged", f"{apart}, or average both")
        bits = [sorted(has_bits(each.graph, use) for use in one.uses) for each, one in zip(opened, items)]
        sizes = {None if body is None else body.size for body in map(Checkpoint.body, opened, keys)}
        if bits.count(bits[0]) < len(bits) or len(sizes) != 1 or None in sizes:
            raise refusal(f"{path} has a storage of another size, or a negative bit, in another checkpoint", apart)
        readers = tuple(map(storage_reader, others, keys[1:]))
        work.compute(item, Averaging(item.dtype, tuple(factors), base is not None), readers)
    if not tensors:
        raise refusal("there is no floating tensor in a state dict to average")
    summary = f"{pluralize(tensors, 'tensor')} averaged over {len(opened)} checkpoints in float64"
    if base is not None:
        terms = [f"{factor:+g} ({each.path} - {opened[-1].path})" for factor, each in zip(factors, others)]
        summary = f"{pluralize(tensors, 'tensor')} computed in float64: {first.path} {join_limited(terms)}"
    notes = [f"{pluralize(integers, 'tensor')} copied from {first.path} (not floating-point)"] if integers else []
    averaged = {state_dict.path for state_dict in selected(first, key)}
    kept = [entry.key for entry in first.survey.entries if "" not in averaged and entry.path not in averaged]
    if kept:
        highest = ", ".join(f"{name} {count:g}" for name, count in counts[latest].items()) if base is None else ""
        why = f", the latest ({highest})" if highest and any(each != counts[latest] for each in counts) else ""
        notes.append(f"also copied from {first.path}{why}: {join_limited(kept, most=6)}")
    changes = [Change("average", key or "", tensors, integers, summary, tuple(notes))]
    return work.done(changes, others=others)


#: Top-level entries that count training, the most telling first.
_COUNTS = ("epoch", "global_step", "step", "iteration", "iter")


def _counts(checkpoint: Checkpoint) -> dict[str, float]:
    entries = values_of(checkpoint.graph, checkpoint.graph.root)
    values = {name: scalar(checkpoint.graph, entries[name]) for name in _COUNTS if name in entries}
    return {name: value for name, value in values.items() if isinstance(value, int | float) and value == value}


def average_with(checkpoint: Checkpoint, others: Sequence[str], base: str | None = None, **how: Any) -> Checkpoint:
    """Average a checkpoint with other files; if one is damaged, the error is about the damage."""
    opened = [as_checkpoint(path) for path in others]
    origins = [as_checkpoint(path) for path in (base,) if path is not None]
    with blaming_damage(*opened, *origins):
        return average([checkpoint, *opened], base=next(iter(origins), None), **how)


def parse_weights(text: str) -> list[float]:
    """Parse ``0.7,0.3``; raise TargetError for other texts."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise TargetError(f"{text!r} is not a list of weights", next="write 0.7,0.3") from None


def _scaled(factors: list[float]) -> list[float]:
    """Return the weights of a mean, scaled to a magnitude of 1 or less; raise TargetError if their sum is zero.

    Only their ratio matters. Scaling by a power of two is exact, and then neither the sum nor a product overflows.
    """
    exponent = max(frexp(factor)[1] for factor in factors)
    factors = [ldexp(factor, -exponent) for factor in factors]
    if not sum(factors):
        raise TargetError("the weights must be numbers whose sum is not zero", next="`--weights 0.7,0.3`")
    return factors


def _partner_dict(first: Checkpoint, other: Checkpoint, state_dict: StateDict) -> StateDict:
    """Return another checkpoint's state dict at the same path, or the only one if both checkpoints have just one."""
    candidates = [item for item in other.state_dicts if item.path == state_dict.path]
    sure = [item for item in other.state_dicts if item.confidence == "high"]
    if not candidates and len(sure) == 1 and len(selected(first, None)) == 1:
        candidates = sure
    if not candidates:
        what = f"it has no state dict{f' at {state_dict.path!r}' if state_dict.path else ''}"
        raise RefusedError(what, path=other.path, next="name the one to average with `--key=`")
    return candidates[0]


def _partner(first: Checkpoint, other: Checkpoint, table: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    partner = table.get(name)
    if partner is None:
        message = f"it has no tensor {quoted(name)}"
    elif (partner.shape, partner.dtype, partner.kind) != (tensor.shape, tensor.dtype, tensor.kind):
        there = f"{partner.dtype} {list(partner.shape)}"
        message = f"{quoted(name)} is {there} here and {tensor.dtype} {list(tensor.shape)} in {first.path}"
    else:
        return partner
    step = f"leave it out: {option('exclude', name)}, or compare all: " + command("diff", first.path, other.path)
    raise RefusedError(message, path=other.path, next=step)


def _layout(tensor: Tensor) -> object:
    return tensor.offset, tensor.shape, tensor.stride


class Averaging(NamedTuple):
    """How to average elements. ``from_base``: differences from the last checkpoint are added to the first."""

    source: Dtype
    factors: tuple[float, ...]
    from_base: bool = False

    @property
    def target(self) -> Dtype:
        """The dtype of the means."""
        return self.source

    def results(self, pieces: Iterator[list[bytes]], path: str) -> Iterator[bytes]:
        """Yield the weighted means, or sums of differences."""
        operation = compute.add_differences if self.from_base else compute.mean_elements
        return (operation(parts, self.factors, self.source.name) for parts in pieces)
