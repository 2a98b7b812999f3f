"""What belongs to a tensor beside its shape and its storage: flags, quantizer, members, hooks, attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...checkpoint.objects import attributes, callable_name, mapped_name
from ...checkpoint.paths import as_children
from ...checkpoint.sharding import spread_state
from ...pickles.nodes import Call, Global, Instance, Node, Ref
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
#: Parameters within parameters, as far as they are followed.
_DEPTH = 8
_OLD_PARAMETERS = frozenset(("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable"))
_COMPRESSED = ("compressed_indices", "plain_indices", "values")


def belongings(side: Side, ref: Ref) -> dict[str, Ref]:
    """What belongs to a tensor and is told nowhere else, by name."""
    nodes, node = side.graph.nodes, side.graph.nodes[ref]
    found: dict[str, Ref] = {}
    # A Parameter is made of the tensor that it is, a subclass of the call that makes a plain tensor.
    for _ in range(_DEPTH):
        if not isinstance(node, Call):
            return found
        name, args = callable_name(side.graph, node.func), nodes[node.args]
        if node.states and name not in _OLD_PARAMETERS:
            found.update(_state_of(side, node))
        while name.endswith(("_rebuild_from_type_v2", "_rebuild_from_type")) and type(args) is tuple and len(args) > 2:
            if len(args) > 3:
                tensor = side.tensor(ref)
                found.update(spread_state(side.reader, ref, tensor) if tensor is not None else {})
                found.update({} if found else {".state": args[3]})
            func, args = nodes[args[0]], nodes[args[2]]
            name = mapped_name(func) if isinstance(func, Global) else ""
        if type(args) is not tuple:
            return found
        short = name.rpartition(".")[2]
        if not args or not (short.startswith("_rebuild_parameter") or name in _OLD_PARAMETERS):
            return found | _arguments(side, ref, short, args)
        found.update(_labelled(nodes, args, {2: "hooks", 3: "state"} if short.startswith("_") else {}))
        node = nodes[args[0]]
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
