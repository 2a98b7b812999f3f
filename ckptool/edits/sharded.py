"""Tensors that are spread over ranks: what one rank had of them as plain tensors, and their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..base.errors import RefusedError
from ..base.text import counted, listed, shown
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import Rewrite
from ..checkpoint.objects import class_name, elements, mapping, named_attributes
from ..checkpoint.sharding import Sharding, is_sharded, sharding, sharding_summary
from ..checkpoint.tensors import rebuild_calls
from ..pickles.nodes import Call, Dict, List, Node, Ref
from ..pickles.opcodes import REDUCE

_MESH_CLASS: Final = "torch.distributed.device_mesh.DeviceMesh"


def local_parts(checkpoint: Checkpoint) -> Checkpoint:
    """Put the part that is in the file in the place of each DTensor and ShardedTensor, as a plain tensor.

    A Parameter stays one. Of a ShardedTensor in several parts, an entry of a mapping becomes one for each:
    ``name.part0``, ``name.part1``; without a part it goes. In a list, or as the whole file, a list takes its place.
    Raises RefusedError where such a name is taken.
    """
    survey = checkpoint.survey
    rewrite = Rewrite(checkpoint.graph)
    several: dict[Ref, Sharding] = {}
    spread_entries = []
    for entry in survey.tensors:
        found = sharding(survey.reader, entry.ref, entry.tensor)
        if found is None:
            continue
        spread_entries.append((entry, found))
        inner = _innermost(checkpoint, entry.ref)
        if inner in rewrite.changed:
            continue
        if len(found.parts) == 1 and found.parameter:
            rewrite.changed[inner] = _parameter(rewrite, found.parts[0].ref, entry.tensor.requires_grad)
        elif len(found.parts) == 1:
            rewrite.changed[inner] = _twin(checkpoint.graph.nodes[found.parts[0].ref])
        else:
            several[entry.ref] = found
            rewrite.changed[entry.ref] = List([part.ref for part in found.parts])
    if not spread_entries:
        return checkpoint
    if several:
        _expand(checkpoint, rewrite, several)
    overview = sharding_summary(survey.reader, [entry for entry, _ in spread_entries])
    owner = overview.owner if overview is not None else "one rank"
    split = [entry.path for entry, found in spread_entries if len(found.parts) > 1]
    empty = [entry.path for entry, found in spread_entries if not found.parts]
    notes: tuple[str, ...] = (f"in several parts: {listed(split, most=3)}",) if split else ()
    notes += (f"left out, without a part here: {listed(empty, most=3)}",) if empty else ()
    what = f"{counted(len(spread_entries), 'tensor')} replaced by what {owner} had of them"
    change = Change("local-parts", "", len(spread_entries), 0, what, notes)
    return checkpoint.changed(rewrite.done(), [change], anew=True)


def _twin(node: Node) -> Node:
    assert isinstance(node, Call)
    return Call(node.op, node.func, node.args, node.kwargs).filled(node.items, node.pairs, node.states)


def _parameter(rewrite: Rewrite, part: Ref, requires_grad: bool) -> Node:
    """``_rebuild_parameter(data, requires_grad, hooks)``, as ``Parameter.__reduce_ex__`` has it."""
    hooks = rewrite.add(Call(REDUCE, rewrite.named("collections", "OrderedDict"), rewrite.constant(())))
    args = rewrite.add((part, rewrite.constant(requires_grad), hooks))
    return Call(REDUCE, rewrite.named("torch._utils", "_rebuild_parameter"), args)


def _innermost(checkpoint: Checkpoint, ref: Ref) -> Ref:
    """The call that makes the spread tensor itself, in a Parameter or not."""
    return next(call.ref for call in rebuild_calls(checkpoint.graph, ref) if not call.is_parameter)


def _expand(checkpoint: Checkpoint, rewrite: Rewrite, several: Mapping[Ref, Sharding]) -> None:
    """Entries of mappings: one for each part."""
    graph = checkpoint.graph
    for ref in list(graph.reachable()):
        items = mapping(graph, ref) if isinstance(graph.nodes[ref], Call | Dict) else None
        if not items or not any(value in several for _, value in items):
            continue
        fresh = []
        names = {name for key, _ in items if type(name := graph.nodes[key]) is str}
        for key, value in items:
            name = graph.nodes[key]
            if value not in several or type(name) is not str:
                fresh.append((key, value))
                continue
            for number, part in enumerate(several[value].parts):
                made = f"{name}.part{number}"
                if made in names:
                    what = f"there is a key {shown(made)} already, as a part of {shown(name)} would be called"
                    raise RefusedError(what, path=checkpoint.path, next="rename it first: ckptool rename")
                fresh.append((rewrite.add(made, key), part.ref))
        rewrite.refill(ref, fresh)


def recast_spread(checkpoint: Checkpoint, rewrite: Rewrite, ref: Ref, dtype: str) -> None:
    """Let a spread tensor say another dtype, wherever it says one: its parts were cast."""
    graph = checkpoint.graph
    node = graph.nodes[_innermost(checkpoint, ref)]
    args = elements(graph.nodes[node.args]) if isinstance(node, Call) else ()
    made = elements(rewrite.node(args[2])) if len(args) == 4 else ()
    if not made:
        return
    named = rewrite.named("torch", dtype)
    rewrite.changed[args[2]] = (made[0], named, *made[2:])
    state = graph.nodes[args[3]]
    for part in state if type(state) is tuple else (args[3],):
        held = {graph.nodes[key]: value for key, value in mapping(graph, part) or () if type(graph.nodes[key]) is str}
        if "_spec" in held:
            _recast_spec(rewrite, held["_spec"], named)
        elif "tensor_properties" in (properties := named_attributes(graph, part)):
            _recast_properties(rewrite, properties["tensor_properties"], named)


def _recast_spec(rewrite: Rewrite, spec: Ref, named: Ref) -> None:
    """``TensorMeta(shape, stride, dtype)`` of a DTensorSpec, and the hash that torch keeps of all this."""
    graph = rewrite.graph
    meta = named_attributes(graph, spec).get("tensor_meta", -1)
    node = graph.nodes[meta] if meta >= 0 else None
    args = elements(graph.nodes[node.args]) if isinstance(node, Call) else ()
    if isinstance(node, Call) and len(args) == 3:
        rewrite.changed[node.args] = (*args[:2], named)
    _reset(rewrite, spec, "_hash", rewrite.constant(None))


def _recast_properties(rewrite: Rewrite, ref: Ref, named: Ref) -> None:
    """The dtype comes first in the state of TensorProperties (torch/distributed/_shard/sharded_tensor/metadata.py)."""
    node = rewrite.graph.nodes[ref]
    for state in node.states if isinstance(node, Call) else ():
        values = rewrite.graph.nodes[state]
        if type(values) is tuple and values:
            rewrite.changed[state] = (named, *values[1:])


def mesh_devices(checkpoint: Checkpoint) -> dict[Ref, str]:
    """The kind of device that each DeviceMesh names, by the reference of the mesh."""
    graph = checkpoint.graph
    if not any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors):
        return {}
    found = {}
    for ref, node in enumerate(graph.nodes):
        if type(node) is Call and class_name(graph, ref) == _MESH_CLASS:
            kind = graph.nodes[named_attributes(graph, ref).get("_device_type", ref)]
            if type(kind) is str:
                found[ref] = kind
    return found


def _reset(rewrite: Rewrite, ref: Ref, name: str, value: Ref) -> None:
    """Give an attribute of an object another value, where its state is a dict."""
    graph = rewrite.graph
    node = graph.nodes[ref]
    for state in node.states if isinstance(node, Call) else ():
        held = graph.nodes[state]
        for part in held if type(held) is tuple else (state,):
            items = mapping(graph, part)
            if items and any(graph.nodes[key] == name for key, _ in items):
                rewrite.refill(part, [(key, value if graph.nodes[key] == name else old) for key, old in items])


def reset_meshes(rewrite: Rewrite, meshes: Sequence[Ref], kind: str) -> None:
    """Let meshes name another kind of device."""
    for ref in meshes:
        _reset(rewrite, ref, "_device_type", rewrite.constant(kind))
