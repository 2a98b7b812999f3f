"""The mean of several checkpoints of one model, computed storage by storage while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from shlex import quote
from typing import Literal, TypeAlias

from ..base.dtypes import BY_NAME, DTYPES, Dtype
from ..base.errors import MalformedError, RefusedError, TargetError
from ..base.globs import EVERY, Globs
from ..base.text import counted, shown
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Body
from ..checkpoint.paths import spell_key
from ..checkpoint.selection import selected
from ..checkpoint.sharding import is_sharded
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor
from ..files.sources import Computed
from ..values.elements import loaded_bytes, reblocked, swapped, swapped_width
from .storages import is_marked, storage_uses, with_plain_ids

#: What has a mean: floating numbers, one to an element.
_DTYPES = frozenset(dtype.name for dtype in DTYPES if dtype.floating and dtype.name != "float4_e2m1fn_x2")

#: Bytes of each checkpoint that are averaged in one go.
_STEP = 1 << 20

#: Gives the weighted mean of little-endian elements of one dtype: (parts, weights, dtype, dtype to sum in).
Averager: TypeAlias = "Callable[[Sequence[bytes], Sequence[float], str, str], bytes]"


def average(
    originals: Sequence[Checkpoint],
    averager: Averager,
    *,
    weights: Sequence[float] | None = None,
    dtype: Literal["float64", "float32"] = "float64",
    key: str | None = None,
    only: Globs = EVERY,
) -> Checkpoint:
    """The first checkpoint with the mean of all in place of its floating tensors in state dicts.

    The others must have the same state dicts with the same keys, shapes and dtypes. Sums are made in ``dtype``, with
    ``weights`` one for each checkpoint (default: equal). Tensors of integers stay those of the first, and so does
    everything that is no tensor of a state dict. Raises TargetError for weights that make no sense, RefusedError
    where the checkpoints do not go together.
    """
    factors = _factors(originals, weights)
    checkpoints = [with_plain_ids(checkpoint) for checkpoint in originals]
    first, *others = checkpoints
    reader = first.survey.reader
    uses = storage_uses(first.graph, reader)
    plan: dict[str, list[str]] = {}
    chosen: dict[str, set[object]] = {}
    integers = tensors = differing = 0
    for state_dict in selected(first, key):
        twins = [_twin(first, other, state_dict) for other in others]
        tables = [_tensors(other, twin) for other, twin in zip(others, twins)]
        for name, tensor in _tensors(first, state_dict).items():
            if not only.match(name, spell_key(state_dict.path, name)):
                continue
            partners = [_partner(first, other, table, name, tensor) for other, table in zip(others, tables)]
            if tensor.dtype not in _DTYPES or tensor.kind != "dense" or not tensor.storage:
                integers += 1
                continue
            keys = [tensor.storage, *(partner.storage for partner in partners)]
            if plan.setdefault(tensor.storage, keys) != keys:
                what = f"{shown(name)} shares its storage with others in one checkpoint and not in another"
                raise RefusedError(what, path=first.path, next="ckptool slim each of them first")
            differing += any(_layout(partner) != _layout(tensor) for partner in partners)
            chosen.setdefault(tensor.storage, set()).add(_layout(tensor))
            tensors += 1
    if differing:
        what = f"{counted(differing, 'tensor')} lie otherwise in their storages in another checkpoint"
        raise RefusedError(what, path=first.path, next="ckptool slim each of them first")
    added: dict[str, Body] = {}
    used = cache(lambda checkpoint: storage_uses(checkpoint.graph, checkpoint.survey.reader))
    for name, keys in plan.items():
        kind = BY_NAME[uses.tensors[name][0].tensor.dtype]
        if name in uses.pinned or any(_layout(use.tensor) not in chosen[name] for use in uses.tensors[name]):
            what = f"{_path_of(first, name)} shares its storage with what is not averaged"
            raise RefusedError(what, path=first.path, next="ckptool slim each of them first, or average both")
        marks = [
            sorted(is_marked(found.graph, use) for use in used(found).tensors[key])
            for found, key in zip(checkpoints, keys)
        ]
        if marks.count(marks[0]) < len(marks):
            what = f"{_path_of(first, name)} carries a negative bit in one checkpoint and not in another"
            raise RefusedError(what, path=first.path, next="leave it out: --exclude")
        if len({use.tensor.dtype for use in uses.tensors[name]}) > 1:
            raise RefusedError(
                f"storage {name!r} is read as two dtypes", path=first.path, next="leave it out: --exclude"
            )
        sizes = {None if body is None else body.size for body in map(Checkpoint.body, checkpoints, keys)}
        if len(sizes) != 1 or None in sizes:
            raise RefusedError(f"the storages {keys} differ in size", path=first.path, next="ckptool slim each of them")
        nbytes = reader.storages[name].nbytes
        added[name] = Body(
            Computed(nbytes, _averaging(checkpoints, keys, kind, nbytes, averager, factors, dtype)), nbytes
        )
    if not tensors:
        spread = any(is_sharded(entry.tensor) for entry in first.survey.tensors)
        step = f"ckptool sanitize {quote(first.path)} --local-parts makes plain tensors of what one rank had"
        what = "there is no floating tensor in a state dict to average"
        raise RefusedError(what, path=first.path, next=step if spread else "")
    what = f"{counted(tensors, 'tensor')} averaged over {len(checkpoints)} checkpoints in {dtype}"
    notes = (f"{counted(integers, 'tensor')} of another kind as in {first.path}",) if integers else ()
    changes = [Change("average", key or "", tensors, integers, what, notes)]
    sources = [source for other in others for source in other.sources]
    return first.changed(first.graph, changes, added, anew=True, also=sources)


def _path_of(checkpoint: Checkpoint, key: str) -> str:
    return next((entry.path for entry in checkpoint.survey.tensors if entry.tensor.storage == key), "a tensor")


def _factors(checkpoints: Sequence[Checkpoint], weights: Sequence[float] | None) -> list[float]:
    if len(checkpoints) < 2:
        raise TargetError("an average needs two checkpoints or more")
    factors = [1.0] * len(checkpoints) if weights is None else list(weights)
    if len(factors) != len(checkpoints):
        what = f"{counted(len(factors), 'weight')} for {counted(len(checkpoints), 'checkpoint')}"
        raise TargetError(what, next="give one for each: --weights 0.7,0.3")
    total = sum(factors)
    if not all(factor == factor and abs(factor) != float("inf") for factor in factors) or not total:
        raise TargetError("the weights must be numbers whose sum is not zero", next="--weights 0.7,0.3")
    return factors


def _twin(first: Checkpoint, other: Checkpoint, state_dict: StateDict) -> StateDict:
    """The state dict of another checkpoint at the same path, or the only one in either."""
    found = [item for item in other.state_dicts if item.path == state_dict.path]
    sure = [item for item in other.state_dicts if item.confidence == "high"]
    if not found and len(sure) == 1 and len(selected(first, None)) == 1:
        found = sure
    if not found:
        where = f" at {state_dict.path!r}" if state_dict.path else ""
        what = f"it has no state dict{where}"
        raise RefusedError(what, path=other.path, next="name the one to average with --key")
    return found[0]


def _tensors(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, Tensor]:
    reader, nodes = checkpoint.survey.reader, checkpoint.graph.nodes
    tensors = {str(nodes[name]): reader.tensor(value) for name, value in state_dict.items}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _partner(first: Checkpoint, other: Checkpoint, table: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    found = table.get(name)
    step = (
        f"leave it out: --exclude {quote(name)}, or see what else: ckptool diff {quote(first.path)} {quote(other.path)}"
    )
    if found is None:
        raise RefusedError(f"it has no tensor {shown(name)}", path=other.path, next=step)
    if (found.shape, found.dtype, found.kind) != (tensor.shape, tensor.dtype, tensor.kind):
        there = f"{found.dtype} {list(found.shape)}"
        what = f"{shown(name)} is {there} here and {tensor.dtype} {list(tensor.shape)} in {first.path}"
        raise RefusedError(what, path=other.path, next=step)
    return found


def _layout(tensor: Tensor) -> object:
    return tensor.offset, tensor.shape, tensor.stride


def _averaging(
    checkpoints: Sequence[Checkpoint],
    keys: Sequence[str],
    dtype: Dtype,
    nbytes: int,
    averager: Averager,
    factors: Sequence[float],
    wide: str,
) -> Callable[[], Iterator[bytes]]:
    width = swapped_width(checkpoints[0], keys[0])

    def chunks() -> Iterator[bytes]:
        streams = [
            reblocked(loaded_bytes(checkpoint, key, 0, nbytes), _STEP - _STEP % dtype.itemsize)
            for checkpoint, key in zip(checkpoints, keys)
        ]
        while True:
            parts = [next(stream, b"") for stream in streams]
            if not any(parts):
                return
            if len({len(part) for part in parts}) > 1:
                raise MalformedError("a storage ends too early", path=checkpoints[0].path)
            yield swapped(averager(parts, factors, dtype.name, wide), width)

    return chunks
