"""Tensors that are sharded over ranks: replace them by one rank's parts, change their dtype, and restore the tensors of
FSDP1 flat parameters by the names and shapes of another checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.steps import NextStep, command, suggested_output
from ..base.suffixes import SAFETENSORS
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_builder import contiguous
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import class_name, list_items, mapping, named_attributes
from ..checkpoint.selection import normal_path
from ..checkpoint.sharding import MESH_CLASS, Sharding, sharding, sharding_summary
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, is_contiguous, is_sharded, rebuild_calls
from ..files.sources import Span
from ..formats.opening import takes_path
from ..pickles.nodes import Call, Dict, List, Ref
from .recompute import Recomputation, copied_call

if TYPE_CHECKING:
    from .matching.targets import MatchTarget


def local_parts(checkpoint: Checkpoint) -> Checkpoint:
    """Replace each DTensor and ShardedTensor by the part in this file, as a plain tensor.

    A Parameter stays a Parameter. If a ShardedTensor has several parts here, its entry in a mapping becomes one entry
    per part: ``name.part0``, ``name.part1``; without any part the entry is dropped. In a list, or as the whole file, it
    becomes a list of its parts. Raise RefusedError if such a name is taken.
    """
    survey = checkpoint.survey
    editor = GraphEditor(checkpoint.graph)
    several: dict[Ref, Sharding] = {}
    spread_entries = []
    for entry in survey.tensors:
        shards = sharding(survey.reader, entry.ref, entry.tensor)
        if shards is None:
            continue
        spread_entries.append((entry, shards))
        inner = _innermost(checkpoint, entry.ref)
        if inner in editor.changed:
            continue
        if len(shards.parts) != 1:
            several[entry.ref] = shards
            editor.changed[entry.ref] = List([part.ref for part in shards.parts])
            continue
        part = shards.parts[0].ref
        node = checkpoint.graph.nodes[part]
        if shards.parameter:
            # _rebuild_parameter(data, requires_grad, hooks), as in Parameter.__reduce_ex__.
            args = (part, editor.constant(entry.tensor.requires_grad), editor.call("collections", "OrderedDict"))
            editor.changed[inner] = editor.new_call("torch._utils", "_rebuild_parameter", args)
        else:
            assert isinstance(node, Call)
            editor.changed[inner] = copied_call(node)
    if not spread_entries:
        return checkpoint
    if several:
        _expand(checkpoint, editor, several)
    overview = sharding_summary(survey.reader, [entry for entry, _ in spread_entries])
    owner = overview.owner if overview is not None else "one rank"
    split = [entry.path for entry, shards in spread_entries if len(shards.parts) > 1]
    empty = [entry.path for entry, shards in spread_entries if not shards.parts]
    notes: tuple[str, ...] = (f"in several parts: {join_limited(split, most=3)}",) if split else ()
    notes += (f"left out, without a part here: {join_limited(empty, most=3)}",) if empty else ()
    summary = f"{pluralize(len(spread_entries), 'tensor')} replaced by what {owner} had of them"
    change = Change("local-parts", "", len(spread_entries), 0, summary, notes)
    return checkpoint.changed(editor.done(), [change], needs_relayout=True)


def local_parts_step(checkpoint: Checkpoint) -> NextStep:
    """Return the command that writes the part of one rank in this file as plain tensors."""
    output = suggested_output(checkpoint.path, "plain", SAFETENSORS)
    step = command("convert", checkpoint.path, allow_loss="shards", output=output)
    return "plain tensors of what one rank had: " + step


def _innermost(checkpoint: Checkpoint, ref: Ref) -> Ref:
    return next(call.ref for call in rebuild_calls(checkpoint.graph, ref) if not call.is_parameter)


def _expand(checkpoint: Checkpoint, editor: GraphEditor, several: Mapping[Ref, Sharding]) -> None:
    """Replace each mapping entry that holds a sharded tensor by one entry per part."""
    graph = checkpoint.graph
    for ref in list(graph.reachable()):
        items = mapping(graph, ref) if isinstance(graph.nodes[ref], Call | Dict) else None
        if not items or not any(value in several for _, value in items):
            continue
        new_items = []
        names = {name for key, _ in items if type(name := graph.nodes[key]) is str}
        for key, value in items:
            name = graph.nodes[key]
            if value not in several or type(name) is not str:
                new_items.append((key, value))
                continue
            for number, part in enumerate(several[value].parts):
                part_name = f"{name}.part{number}"
                if part_name in names:
                    message = f"there is a key {quoted(part_name)} already, as a part of {quoted(name)} would be called"
                    raise RefusedError(message, path=checkpoint.path, next="rename it first")
                new_items.append((editor.add(part_name, key), part.ref))
        editor.refill(ref, new_items)


def recast_spread(checkpoint: Checkpoint, editor: GraphEditor, ref: Ref, dtype: str) -> None:
    """Change the dtype that a sharded tensor records, after its parts were cast."""
    graph = checkpoint.graph
    node = graph.nodes[_innermost(checkpoint, ref)]
    args = list_items(graph.nodes[node.args]) if isinstance(node, Call) else ()
    wrapper_args = list_items(editor.node(args[2])) if len(args) == 4 else ()
    if not wrapper_args:
        return
    named = editor.named("torch", dtype)
    editor.changed[args[2]] = (wrapper_args[0], named, *wrapper_args[2:])
    state = graph.nodes[args[3]]
    for part in state if type(state) is tuple else (args[3],):
        values = {name: value for key, value in mapping(graph, part) or () if type(name := graph.nodes[key]) is str}
        if "_spec" in values:
            _recast_spec(editor, values["_spec"], named)
        elif "tensor_properties" in (properties := named_attributes(graph, part)):
            _recast_properties(editor, properties["tensor_properties"], named)


def _recast_spec(editor: GraphEditor, spec: Ref, named: Ref) -> None:
    """Change ``TensorMeta(shape, stride, dtype)`` in a DTensorSpec, and clear the hash that torch caches in it."""
    graph = editor.graph
    meta = named_attributes(graph, spec).get("tensor_meta", -1)
    node = graph.nodes[meta] if meta >= 0 else None
    args = list_items(graph.nodes[node.args]) if isinstance(node, Call) else ()
    if isinstance(node, Call) and len(args) == 3:
        editor.changed[node.args] = (*args[:2], named)
    _reset(editor, spec, "_hash", editor.constant(None))


def _recast_properties(editor: GraphEditor, ref: Ref, named: Ref) -> None:
    """Change the dtype, the first value of TensorProperties (torch/distributed/_shard/sharded_tensor/metadata.py)."""
    node = editor.graph.nodes[ref]
    for state in node.states if isinstance(node, Call) else ():
        values = editor.graph.nodes[state]
        if type(values) is tuple and values:
            editor.changed[state] = (named, *values[1:])


def mesh_devices(checkpoint: Checkpoint) -> dict[Ref, str]:
    """Map the reference of each DeviceMesh to its device type."""
    graph = checkpoint.graph
    if not any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors):
        return {}
    devices = {}
    for ref, node in enumerate(graph.nodes):
        if type(node) is Call and class_name(graph, ref) == MESH_CLASS:
            device = graph.nodes[named_attributes(graph, ref).get("_device_type", ref)]
            if type(device) is str:
                devices[ref] = device
    return devices


def _reset(editor: GraphEditor, ref: Ref, name: str, value: Ref) -> None:
    """Set an attribute of an object, if the object's state is a dict that has it."""
    graph = editor.graph
    node = graph.nodes[ref]
    for state in node.states if isinstance(node, Call) else ():
        parts = graph.nodes[state]
        for part in parts if type(parts) is tuple else (state,):
            items = mapping(graph, part)
            if items and any(graph.nodes[key] == name for key, _ in items):
                editor.refill(part, [(key, value if graph.nodes[key] == name else old) for key, old in items])


def reset_meshes(editor: GraphEditor, meshes: Sequence[Ref], device: str) -> None:
    """Give these meshes another device type."""
    for ref in meshes:
        _reset(editor, ref, "_device_type", editor.constant(device))


# -- flat parameters
#
# ``FlatParamHandle`` (torch/distributed/fsdp/_flat_param.py) lays the parameters of a module end to end, in order.
# It omits shared parameters and those in nested flat parameters. With ``use_orig_params`` it aligns them to 16 bytes,
# and a local state dict also has the part of each parameter under its own name.

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
    plain = contiguous(_dtype(tensor), shape, tensor.storage)._replace(nbytes=size, offset=tensor.offset)
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
    dtype = _dtype(flat.tensor)
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


def _dtype(tensor: Tensor) -> Dtype:
    return BY_NAME[tensor.dtype]
