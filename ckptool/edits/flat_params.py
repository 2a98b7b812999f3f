"""Restore the tensors of FSDP1 flat parameters, using the names and shapes of another checkpoint.

Source: torch/distributed/fsdp/_flat_param.py. ``FlatParamHandle`` lays the parameters of a module end to end, in their
order. It omits shared parameters and those in nested flat parameters. With ``use_orig_params`` it aligns them to 16
bytes, and a local state dict also has the part of each parameter under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_builder import contiguous
from ..checkpoint.selection import normal_path
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, is_contiguous
from ..files.sources import Span
from ..formats.opening import takes_path
from ..pickles.nodes import Ref
from .recompute import Recomputation

if TYPE_CHECKING:
    from .matching.targets import MatchTarget

FLAT_PARAM: Final = "_flat_param"
_STEP: Final = (
    "convert it with `--unflatten OTHER`: a checkpoint of the same model that torch saved, or its lock file; or with"
    " `--model train:make_model`, if make_model in your train.py returns the model"
)


class _Flat(NamedTuple):
    """A flat parameter: the prefix of its names, the reference of its key, and its tensor."""

    prefix: str
    key: Ref
    tensor: Tensor


def flat_state_dicts(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the state dicts with flat parameters."""
    nodes = checkpoint.graph.nodes
    dicts = checkpoint.state_dicts
    return [item for item in dicts if any(_is_flat(nodes[key]) for key, _ in item.items)]


def refuse_flat(checkpoint: Checkpoint, key: str | None = None) -> None:
    """Raise RefusedError if there are flat parameters, which no model loads; ``key`` limits this to one state dict."""
    every = flat_state_dicts(checkpoint) if not checkpoint.traits.writes_as else []
    found = [item for item in every if key is None or item.path == normal_path(key)]
    if found:
        where = f" in {quoted(found[0].path)}" if found[0].path else ""
        what = f"the parameters{where} are flat vectors of FSDP1, without names or shapes"
        raise RefusedError(what, path=checkpoint.path, next=_STEP)


def _is_flat(key: object) -> bool:
    return isinstance(key, str) and (key == FLAT_PARAM or key.endswith("." + FLAT_PARAM))


@takes_path
def unflatten(checkpoint: Checkpoint, like: MatchTarget) -> Checkpoint:
    """Replace flat parameters of FSDP1 by the tensors of ``like``; raise RefusedError if the sizes do not fit."""
    found = flat_state_dicts(checkpoint)
    if not found:
        what = "there is no flat parameter of FSDP1 in it"
        raise RefusedError(what, path=checkpoint.path, next="leave `--unflatten=` out")
    work = Recomputation(checkpoint)
    return work.done([_unflatten(work, item, like) for item in found])


def unflatten_by(checkpoint: Checkpoint, other: Any, model: str | None = None) -> Checkpoint:
    """Replace flat parameters as ``unflatten`` does, by the target ``other`` or by the callable ``model``."""
    from .matching.targets import match_target  # imported late: few conversions need it

    return unflatten(checkpoint, match_target(other, model))


def _unflatten(work: Recomputation, state_dict: StateDict, like: MatchTarget) -> Change:
    graph, reader, editor = work.checkpoint.graph, work.reader, work.editor
    refs = {str(graph.nodes[key]): (key, value) for key, value in state_dict.items}
    flats = [
        _Flat(name.removesuffix(FLAT_PARAM), key, tensor)
        for name, (key, value) in refs.items()
        if _is_flat(name) and (tensor := reader.tensor(value))
    ]
    shapes = {name: shape for name, shape in like.shapes.items() if shape is not None and name not in like.tied}
    made: dict[str, Ref] = {}
    entries: dict[Ref, list[tuple[Ref, Ref]]] = {flat.key: [] for flat in flats}
    for name, (key, value) in refs.items():
        tensor = reader.tensor(value)
        shape = shapes.get(name)
        if tensor is not None and shape is not None and tensor.shape not in (shape, ()) and len(tensor.shape) == 1:
            made[name] = _shaped(work, name, tensor, shape)
            entries[key] = [(key, made[name])]
    prefixes = sorted((flat.prefix for flat in flats), key=len, reverse=True)
    owners = {name: next((start for start in prefixes if name.startswith(start)), None) for name in shapes}
    for flat in flats:
        inside = {name: shapes[name] for name, owner in owners.items() if owner == flat.prefix and name not in refs}
        if not inside and any(owner == flat.prefix for owner in owners.values()):
            continue  # each parameter is already there under its own name
        refs_of = _cut(work, flat, inside, like)
        made |= refs_of
        entries[flat.key] = [(editor.add(name), ref) for name, ref in refs_of.items()]
    for name, kept in like.tied.items():
        if kept in made and name not in refs and flats:
            entries[flats[0].key].append((editor.add(name), made[kept]))
    items = [new for key, value in state_dict.items for new in entries.get(key, [(key, value)])]
    editor.refill(state_dict.ref, items)
    numbers = pluralize(len(flats), "flat parameter"), pluralize(len(made), "tensor")
    what = f"{numbers[0]} of FSDP1 made into {numbers[1]} like {like.source}"
    trusted = f"{like.source} gives their order and shapes; only the number of elements can be checked"
    return Change("unflatten", state_dict.path, len(made), 0, what, (trusted,) if flats else ())


def _shaped(work: Recomputation, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Ref:
    if tensor.numel != prod(shape) or not is_contiguous(tensor) or not tensor.storage:
        what = f"{quoted(name)} has {pluralize(tensor.numel, 'element')}, and {prod(shape):,} in the other one"
        raise RefusedError(what, path=work.checkpoint.path, next=_STEP)
    size = work.reader.storages[tensor.storage].nbytes
    plain = contiguous(BY_NAME[tensor.dtype], shape, tensor.storage)._replace(nbytes=size, offset=tensor.offset)
    return work.editor.tensor(plain._replace(location=tensor.location))


def _cut(work: Recomputation, flat: _Flat, shapes: Mapping[str, tuple[int, ...]], like: MatchTarget) -> dict[str, Ref]:
    checkpoint = work.checkpoint
    name = flat.prefix + FLAT_PARAM
    # Alphabetical order suggests a safetensors file, whose order is not the model's order.
    by_name = like.kind in ("checkpoint", "lock") and len(shapes) > 1 and list(shapes) == sorted(shapes)
    if by_name or not like.in_order:
        order = "in alphabetical order, which is that of safetensors" if by_name else "in another"
        what = f"{quoted(name)} has the tensors in the order of the model, and {like.source} has them {order}"
        raise RefusedError(what, path=checkpoint.path, next=_STEP)
    count = sum(map(prod, shapes.values()))
    if count != flat.tensor.numel:
        names = join_limited(list(shapes), most=3) or "nothing"
        what = f"{quoted(name)} has {pluralize(flat.tensor.numel, 'element')}, and {count:,} in the other one: {names}"
        raise RefusedError(what, path=checkpoint.path, next=_STEP)
    body = checkpoint.body(flat.tensor.storage)
    dtype = BY_NAME[flat.tensor.dtype]
    if body is None or not isinstance(body.piece, Span) or body.compressed:
        raise RefusedError(f"the bytes of {quoted(name)} are not all there", path=checkpoint.path)
    refs = {}
    at = body.piece.offset + flat.tensor.offset * dtype.itemsize
    for own, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        piece = Span(body.piece.source, at, size)
        refs[own] = work.tensor(f"{own} of {name}", dtype, shape, piece, flat.tensor.location)
        at += size
    return refs
