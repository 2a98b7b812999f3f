"""Average several checkpoints of one model, or add their differences, storage by storage, while writing the output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import frexp, isfinite, ldexp
from typing import Any

from ..base.dtypes import DTYPES, Dtype
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.records import NamedTuple
from ..base.steps import AnyStep, command, option
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.objects import scalar, values_of
from ..checkpoint.paths import spell_key
from ..checkpoint.selection import dotted, selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor
from ..formats.opening import CheckpointOrPath, as_checkpoint
from ..formats.planning import blaming_damage
from ..values.elements import storage_reader
from ..values.torch import compute
from ..values.torch.loads import need_torch
from .recompute import Recomputation, quantized_refusal
from .storages import has_bits, tensors_of

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
    """Return the numbers at the top level that count training."""
    entries = values_of(checkpoint.graph, checkpoint.graph.root)
    values = {name: scalar(checkpoint.graph, entries[name]) for name in _COUNTS if name in entries}
    return {name: value for name, value in values.items() if isinstance(value, int | float) and value == value}


def average_with(checkpoint: Checkpoint, others: Sequence[str], base: str | None = None, **how: Any) -> Checkpoint:
    """Average a checkpoint with other files; if one is damaged, the error is about the damage."""
    opened = [as_checkpoint(path) for path in others]
    origin = None if base is None else as_checkpoint(base)
    with blaming_damage(*opened, *([] if origin is None else [origin])):
        return average([checkpoint, *opened], base=origin, **how)


def parse_weights(text: str) -> list[float]:
    """Parse ``0.7,0.3``; raise TargetError for other texts."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise TargetError(f"{text!r} is not a list of weights", next="write 0.7,0.3") from None


def one_for_each(number: int, noun: str, weights: Sequence[float] | None) -> list[float]:
    """Return one finite weight for each of ``number`` items, 1 by default; raise TargetError for other weights."""
    given = [1.0] * number if weights is None else list(weights)
    example = "give one for each: `--weights 0.7,0.3`"
    if not number or len(given) != number:
        raise TargetError(f"{pluralize(len(given), 'weight')} for {pluralize(number, noun)}", next=example)
    with suppress(OverflowError):
        factors = [float(weight) for weight in given]
        if all(map(isfinite, factors)):
            return factors
    raise TargetError("the weights must be finite numbers", next=example)


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
    """Return the tensor with this name in another checkpoint; raise RefusedError if it is missing or differs."""
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
    """How to average elements: the dtype, and one factor per checkpoint.

    ``from_base``: differences from the last checkpoint are added to the first, each times its factor.
    """

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
