"""What belongs to a tensor beside its shape and its storage: flags, quantizer, members, hooks, attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...checkpoint.objects import attributes
from ...checkpoint.paths import as_children
from ...checkpoint.sharding import sharding_state
from ...checkpoint.tensors import OLD_PARAMETERS, rebuild_calls
from ...pickles.nodes import Call, Instance, Node, Ref
from .places import Side

#: Arguments of the functions that make tensors, by place, beside storage, offset, shape, stride and requires_grad.
_ARGUMENTS: dict[str, dict[int, str]] = {
    "_rebuild_tensor": {},
    "_rebuild_tensor_v2": {5: "hooks", 6: "flags"},
    "_rebuild_tensor_v3": {5: "hooks", 7: "flags"},
    "_rebuild_qtensor": {4: "quantizer", 6: "hooks"},
    "_rebuild_nested_tensor": {0: "buffer", 1: "sizes", 2: "strides", 3: "offsets"},
    "_rebuild_meta_tensor_no_storage": {},
    "_rebuild_wrapper_subclass": {},
}
_MEMBERS = {"sparse_coo": ("indices", "values", "", "is_coalesced")}
_COMPRESSED = ("compressed_indices", "plain_indices", "values")


def belongings(side: Side, ref: Ref) -> dict[str, Ref]:
    """What belongs to a tensor and is told nowhere else, by name."""
    nodes = side.graph.nodes
    found: dict[str, Ref] = {}
    # A Parameter is made of the tensor that it is, a subclass of the call that makes a plain tensor.
    for call in rebuild_calls(side.graph, ref):
        node = nodes[call.ref]
        if call.holder == call.ref and isinstance(node, Call) and node.states and call.name not in OLD_PARAMETERS:
            found.update(_state_of(side, node))
        if call.short_name.startswith("_rebuild_from_type"):
            tensor = side.tensor(ref)
            found.update(sharding_state(side.reader, ref, tensor) if tensor is not None and call.state >= 0 else {})
            found.update({} if found or call.state < 0 else {".state": call.state})
        elif call.is_parameter and call.args:
            labels = {} if call.name in OLD_PARAMETERS else {2: "hooks", 3: "state"}
            found.update(_labelled(nodes, call.args, labels))
        else:
            return found | _arguments(side, ref, call.short_name, call.args)
    return found


def _state_of(side: Side, node: Call) -> dict[str, Ref]:
    fields = as_children(side.graph, attributes(side.graph, node))
    if fields:
        return {field.step: field.ref for field in fields}
    return {f"(state {number})": state for number, state in enumerate(node.states)}


def _arguments(side: Side, ref: Ref, name: str, args: tuple[Ref, ...]) -> dict[str, Ref]:
    nodes = side.graph.nodes
    if name == "_rebuild_sparse_tensor" and len(args) >= 2:
        tensor, members = side.tensor(ref), nodes[args[1]]
        names = _MEMBERS.get(tensor.kind if tensor else "", _COMPRESSED)
        return _labelled(nodes, members if type(members) is tuple else (), dict(enumerate(names)))
    labels = _ARGUMENTS.get(name)
    if labels is None:
        return {f"({number})": item for number, item in enumerate(args)}
    found = _labelled(nodes, args, labels)
    # Flags that are not there are off: conj and neg, each by its name.
    flags = found.pop(".flags", -1)
    return found | ({} if flags < 0 else side.children(flags))


def _labelled(nodes: Sequence[Node], args: tuple[Ref, ...], labels: Mapping[int, str]) -> dict[str, Ref]:
    return {
        f".{label}": args[number]
        for number, label in labels.items()
        if label and number < len(args) and not _is_nothing(nodes, args[number])
    }


def _is_nothing(nodes: Sequence[Node], ref: Ref) -> bool:
    """An empty OrderedDict of hooks, or None."""
    node = nodes[ref]
    if isinstance(node, Instance):
        return isinstance(node, Call) and node.filling is None and nodes[node.args] == ()
    return node is None
