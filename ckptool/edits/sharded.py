"""Tensors that are sharded over ranks: replace them by one rank's parts, and change their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.errors import RefusedError
from ..base.steps import NextStep, command, suggested_output
from ..base.suffixes import SAFETENSORS
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import class_name, list_items, mapping, named_attributes
from ..checkpoint.sharding import MESH_CLASS, Sharding, sharding, sharding_summary
from ..checkpoint.tensors import is_sharded, rebuild_calls
from ..pickles.nodes import Call, Dict, List, Ref
from .recompute import copied_call


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
