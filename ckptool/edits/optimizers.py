"""Optimizer states: find the parameters they belong to, and rename these in them.

Source: ``torch/optim/optimizer.py``, ``Optimizer.state_dict``. ``state`` maps the number of each parameter to its
values; ``param_groups`` has these numbers in ``params``, counted through all groups. Since torch 2.6 it also has names
in ``param_names`` if the optimizer was given named parameters. FullyShardedDataParallel writes names instead of numbers
(``torch/distributed/fsdp/_optim_utils.py``). Here the id of a parameter is its number or its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from ..base.prefixes import unwrapper
from ..base.records import NamedTuple
from ..base.steps import NextStep, command, suggested_output
from ..base.text import pluralize
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import by_name, list_items, mapping, values_of
from ..checkpoint.paths import as_children, bounded, joined, parse_steps
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, ViewId, view_id
from ..pickles.nodes import Call, Dict, Graph, List, Node, Ref

#: Last segments of the buffers that torch's own modules keep beside their parameters.
BUFFERS: Final = frozenset(("running_mean", "running_var", "num_batches_tracked"))


class Group(NamedTuple):
    """A parameter group: its mapping, the list of its parameter ids, and the list of their names (-1 if absent)."""

    ref: Ref
    params: Ref
    names: Ref


class Optimizer(NamedTuple):
    """An optimizer's state dict: its path, its mapping, the mapping of states, and its groups."""

    path: str
    ref: Ref
    state: Ref
    groups: list[Group]


def optimizers(graph: Graph) -> list[Optimizer]:
    """Return every mapping that has ``state`` and ``param_groups``, each once."""
    result: list[Optimizer] = []
    if "param_groups" not in graph.nodes:
        return result
    seen = bytearray(len(graph.nodes))
    work: list[tuple[Ref, str]] = [(graph.root, "")]
    while work:
        ref, path = work.pop()
        node = graph.nodes[ref]
        if seen[ref] or not isinstance(node, tuple | List | Dict | Call):
            continue
        seen[ref] = 1
        items = mapping(graph, ref)
        base = bounded(path, ref)
        if items is None:
            parts = enumerate(list_items(node))
            below = [(part, f"{base}[{number}]") for number, part in parts if _may_contain(graph, part)]
        else:
            optimizer = _optimizer(graph, ref, path, by_name(graph, items))
            if optimizer is not None:
                result.append(optimizer)
            children = [child for child in as_children(graph, items) if _may_contain(graph, child.ref)]
            below = [(child.ref, joined(base, child.step)) for child in children]
        work += reversed(below)
    return result


def _may_contain(graph: Graph, ref: Ref) -> bool:
    """Return whether a node can contain an optimizer; a tensor, an unfilled call with several arguments, cannot."""
    node = graph.nodes[ref]
    if type(node) is Call and node.filling is None:
        return len(list_items(graph.nodes[node.args])) == 1
    return isinstance(node, tuple | List | Dict | Call)


def _optimizer(graph: Graph, ref: Ref, path: str, by_name: Mapping[str, Ref]) -> Optimizer | None:
    if not {"state", "param_groups"} <= by_name.keys() or mapping(graph, by_name["state"]) is None:
        return None
    groups = []
    for group in list_items(graph.nodes[by_name["param_groups"]]):
        entries = {graph.nodes[name]: value for name, value in mapping(graph, group) or ()}
        if "params" not in entries:
            return None
        groups.append(Group(group, entries["params"], entries.get("param_names", -1)))
    return Optimizer(path, ref, by_name["state"], groups)


def parameter_states(graph: Graph, optimizer: Optimizer) -> dict[Ref, dict[str, Ref]]:
    """Return the values by name in the state of each parameter; empty states are left out, which torch fills in."""
    return {ref: own for _, ref in mapping(graph, optimizer.state) or () if (own := values_of(graph, ref))}


def entries_to_drop(checkpoint: Checkpoint, chosen: Sequence[Optimizer]) -> dict[str, str]:
    """Map the path of each optimizer to the outermost entry that holds it and no state dict; "" is the root."""
    dicts = [item.path for item in checkpoint.state_dicts if item.confidence == "high"]
    holding = {"", *(outer for path in dicts for outer in _outward(path))}
    return {each.path: min({*_outward(each.path)} - holding, key=len, default=each.path) for each in chosen}


def _outward(path: str) -> Iterable[str]:
    """Return the path of each entry that leads to a path, and the path itself."""
    return accumulate((step.step for step in parse_steps(path)), joined, initial="")


def drop_step(path: str, entries: Iterable[str]) -> NextStep:
    """Return the command that writes a file without these entries, or an empty step if no command can do that."""
    entries = list(dict.fromkeys(entries))
    if not entries or not all(entry and isinstance(parse_steps(entry)[-1].value, str) for entry in entries):
        return NextStep()
    return command("drop", path, *entries, output=suggested_output(path, "weights"))


def _values(graph: Graph, ref: Ref) -> list[Node]:
    return [graph.nodes[part] for part in list_items(graph.nodes[ref])]


def renamed_parameters(
    checkpoint: Checkpoint, editor: GraphEditor, new_names: Mapping[str, str], others: Sequence[StateDict] = ()
) -> list[Change]:
    """Rename parameters in optimizer states; ``new_names`` maps the old keys of the state dicts to the new ones.

    An optimizer with a name that is not in ``new_names`` belongs to another model and stays unchanged. So does one that
    may belong to a state dict in ``others``, which keep their keys.
    """
    graph, changes = checkpoint.graph, []
    if all(old == new for old, new in new_names.items()):
        return []
    staying = [{graph.nodes[name] for name, _ in item.items} for item in others]
    plain: dict[str, str] = {}
    for optimizer in optimizers(graph):
        lists = [ref for group in optimizer.groups for ref in (group.params, group.names) if ref >= 0]
        states = mapping(graph, optimizer.state) or []
        nodes = [node for ref in lists for node in _values(graph, ref)] + [graph.nodes[name] for name, _ in states]
        names = {node for node in nodes if type(node) is str}
        if not plain:
            # The optimizer may have been given names without the wrappers of the model.
            before, after = unwrapper(new_names), unwrapper(new_names.values())
            plain = {before(old): after(new) for old, new in new_names.items()}
        table = new_names if names <= new_names.keys() else plain
        moved = sum(table[name] != name for name in names if name in table)
        if not moved or not names <= table.keys():
            continue
        if any(names <= keys for keys in staying):
            summary = "its parameter names stay: it may belong to another state dict with the same names"
            changes.append(Change("rename-optimizer", optimizer.path, 0, len(names), summary))
            continue
        for ref in lists:
            old_parts = list_items(graph.nodes[ref])
            parts = [_renamed(editor, part, table) for part in old_parts]
            if parts != list(old_parts):
                editor.changed[ref] = List(parts) if isinstance(graph.nodes[ref], List) else tuple(parts)
        items = [(_renamed(editor, name, table), value) for name, value in states]
        if items != states:
            editor.refill(optimizer.state, items)
        summary = f"{pluralize(moved, 'parameter name')} in the state of the optimizer renamed likewise"
        changes.append(Change("rename-optimizer", optimizer.path, moved, len(names) - moved, summary))
    return changes


def _renamed(editor: GraphEditor, ref: Ref, new_names: Mapping[str, str]) -> Ref:
    text = editor.graph.nodes[ref]
    return editor.text(ref, new_names[text]) if type(text) is str and text in new_names else ref


def state_owners(checkpoint: Checkpoint) -> dict[Ref, tuple[StateDict, str]]:
    """Map each parameter's state to its state dict and key, where an optimizer fits only one state dict."""
    graph = checkpoint.graph
    owners: dict[Ref, tuple[StateDict, str]] = {}
    for optimizer in optimizers(graph):
        candidates = [item for item in checkpoint.state_dicts if item.confidence == "high"]
        by_names = [(item, keys) for item in candidates if (keys := _keys_by_name(graph, optimizer, item))]
        by_order = ((item, keys) for item in candidates if (keys := _keys_by_order(checkpoint, optimizer, item)))
        # Names prove the match, the order does not.
        likely = by_names or [*by_order]
        if len(likely) == 1:
            ((item, keys),) = likely
            for key, value in mapping(graph, optimizer.state) or ():
                if name := keys.get(graph.nodes[key]):
                    owners[value] = item, name
    return owners


def _keys_by_name(graph: Graph, optimizer: Optimizer, state_dict: StateDict) -> dict[Node, str]:
    """Return the key of each parameter by its id, as the names in an optimizer say it; {} if they are others."""
    ids = [node for group in optimizer.groups for node in _values(graph, group.params)]
    names = [node for group in optimizer.groups if group.names >= 0 for node in _values(graph, group.names)]
    if all(type(param) is str for param in ids):
        names = ids
    fit = len(names) == len(ids) and set(names) <= {graph.nodes[key] for key, _ in state_dict.items}
    return {param: str(name) for param, name in zip(ids, names)} if fit else {}


def _keys_by_order(checkpoint: Checkpoint, optimizer: Optimizer, state_dict: StateDict) -> dict[Node, str]:
    """Return the key of each parameter by its id, if one group has as many of these shapes; otherwise {}."""
    if len(optimizer.groups) != 1:
        return {}
    ids, shapes = _values(checkpoint.graph, optimizer.groups[0].params), _state_shapes(checkpoint, optimizer)
    for parameters in _parameters(checkpoint, state_dict):
        pairs = list(zip(ids, parameters))
        if len(parameters) == len(ids) and all(shape in shapes.get(param, (shape,)) for param, (_, shape) in pairs):
            return {param: name for param, (name, _) in pairs}
    return {}


def tied_keys(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, tuple[str, ...]]:
    """Map every key to all keys with the same tensor, in order."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    same: defaultdict[ViewId | Ref, list[str]] = defaultdict(list)
    for key, value in state_dict.items:
        same[_identity(value, reader.tensor(value))].append(str(graph.nodes[key]))
    return {name: tuple(names) for names in same.values() for name in names}


def _identity(ref: Ref, tensor: Tensor | None) -> ViewId | Ref:
    """Return a value that is equal for tied tensors only."""
    return view_id(tensor) if tensor and tensor.storage else ref


def _parameters(checkpoint: Checkpoint, state_dict: StateDict) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield the floating-point tensors in order, tied ones once; then the same without usual buffers."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    parameters: dict[object, tuple[str, tuple[int, ...]]] = {}
    for key, value in state_dict.items:
        tensor = reader.tensor(value)
        if tensor is not None and tensor.dtype.startswith(("float", "bfloat", "complex", "bcomplex")):
            parameters.setdefault(_identity(value, tensor), (str(graph.nodes[key]), tensor.shape))
    yield list(parameters.values())
    yield [item for item in parameters.values() if item[0].rpartition(".")[2] not in BUFFERS]


def _state_shapes(checkpoint: Checkpoint, optimizer: Optimizer) -> dict[Node, tuple[tuple[int, ...], ...]]:
    """Return the shapes of each parameter's state tensors, omitting states that do not reveal the parameter's shape."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    state_shapes = {}
    for key, value in mapping(graph, optimizer.state) or ():
        slots = [(name, tensor) for name, slot in mapping(graph, value) or () if (tensor := reader.tensor(slot))]
        all_shapes = [tensor.shape for _, tensor in slots]
        shapes = tuple(shape for shape in all_shapes if shape)
        # Factored moments (Adafactor) have one value per row and per column only.
        if shapes and not any({"row", "col"} & set(str(graph.nodes[name]).split("_")) for name, _ in slots):
            state_shapes[graph.nodes[key]] = (*shapes, ()) if len(shapes) < len(all_shapes) else shapes
    return state_shapes
