"""The state of optimizers: which parameters it is about, and what becomes of it when these are renamed or go.

Source: ``torch/optim/optimizer.py``, ``Optimizer.state_dict``: ``state`` by the number of the parameter,
``param_groups`` with the numbers in ``params``, counted through all groups, and since torch 2.6 the names in
``param_names`` where the optimizer was given named parameters. FullyShardedDataParallel writes names in place of the
numbers (``torch/distributed/fsdp/_optim_utils.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..base.errors import RefusedError
from ..base.prefixes import unwrapping
from ..base.text import counted
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import Rewrite
from ..checkpoint.objects import elements, mapping
from ..checkpoint.paths import as_children, bounded, joined
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, TensorReader, view_id
from ..pickles.nodes import Call, Dict, Graph, List, Node, Ref

#: Last segments of buffers that torch's own modules keep in floating point beside their parameters.
_BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked"))


class Group(NamedTuple):
    """A parameter group: its mapping, the list of its parameters (numbers or names), that of their names or -1."""

    ref: Ref
    params: Ref
    names: Ref


class Optimizer(NamedTuple):
    """The state dict of an optimizer: its path, its mapping of states, and its groups."""

    path: str
    ref: Ref
    state: Ref
    groups: list[Group]


def optimizers(graph: Graph) -> list[Optimizer]:
    """Every mapping with ``state`` and ``param_groups``, each once."""
    found: list[Optimizer] = []
    if "param_groups" not in graph.nodes:
        return found
    seen = bytearray(len(graph.nodes))
    work: list[tuple[Ref, str]] = [(graph.root, "")]
    while work:
        ref, path = work.pop()
        node = graph.nodes[ref]
        if seen[ref] or not isinstance(node, tuple | List | Dict | Call):
            continue
        seen[ref] = 1
        items = mapping(graph, ref)
        if items is None:
            base = bounded(path, ref)
            held = [number for number, item in enumerate(elements(node)) if _may_hold(graph, item)]
            work += [(elements(node)[number], f"{base}[{number}]") for number in reversed(held)]
            continue
        by_name = {key: value for name, value in items if type(key := graph.nodes[name]) is str}
        optimizer = _optimizer(graph, ref, path, by_name)
        if optimizer is not None:
            found.append(optimizer)
        base = bounded(path, ref)
        work += [
            (one.ref, joined(base, one.step))
            for one in reversed(as_children(graph, items))
            if _may_hold(graph, one.ref)
        ]
    return found


def _may_hold(graph: Graph, ref: Ref) -> bool:
    """Can there be an optimizer in it? Not in a tensor: a call of several arguments that nothing was filled into."""
    node = graph.nodes[ref]
    if type(node) is Call and node.filling is None:
        args = graph.nodes[node.args]
        return type(args) is tuple and len(args) == 1
    return isinstance(node, tuple | List | Dict | Call)


def _optimizer(graph: Graph, ref: Ref, path: str, named: Mapping[str, Ref]) -> Optimizer | None:
    if not {"state", "param_groups"} <= named.keys() or mapping(graph, named["state"]) is None:
        return None
    groups = []
    for group in elements(graph.nodes[named["param_groups"]]):
        inside = {graph.nodes[name]: value for name, value in mapping(graph, group) or ()}
        params, names = inside.get("params", -1), inside.get("param_names", -1)
        if params < 0:
            return None
        groups.append(Group(group, params, names))
    return Optimizer(path, ref, named["state"], groups)


def renamed_parameters(
    checkpoint: Checkpoint, rewrite: Rewrite, known: Mapping[str, str], others: Sequence[StateDict] = ()
) -> list[Change]:
    """Let the names in the states of optimizers follow; ``known`` are the keys of the state dicts, old to new.

    An optimizer with a name that is none of these belongs to another model, and stays; so does one that may belong to
    one of ``others``, which keep their keys.
    """
    graph, changes = checkpoint.graph, []
    if all(old == new for old, new in known.items()):
        return []
    staying = [{graph.nodes[name] for name, _ in item.items} for item in others]
    plain: dict[str, str] = {}
    for optimizer in optimizers(graph):
        named = [ref for group in optimizer.groups for ref in (group.params, group.names) if ref >= 0]
        texts = {text for ref in named for part in elements(graph.nodes[ref]) if type(text := graph.nodes[part]) is str}
        states = mapping(graph, optimizer.state) or []
        texts |= {text for name, _ in states if type(text := graph.nodes[name]) is str}
        if not plain:
            # The optimizer was given the names of the model inside of its wrappers.
            before, after = unwrapping(known), unwrapping(known.values())
            plain = {before(old): after(new) for old, new in known.items()}
        table = known if texts <= known.keys() else plain
        moved = sum(table[text] != text for text in texts if text in table)
        if not moved or not texts <= table.keys():
            continue
        if any(texts <= names for names in staying):
            what = "its parameter names stay: it may belong to another state dict with the same names"
            changes.append(Change("rename-optimizer", optimizer.path, 0, len(texts), what))
            continue
        for ref in named:
            _renamed_list(rewrite, ref, table)
        items = [(_renamed(rewrite, name, table), value) for name, value in states]
        if items != states:
            rewrite.refill(optimizer.state, items)
        what = f"{counted(moved, 'parameter name')} in the state of the optimizer renamed likewise"
        changes.append(Change("rename-optimizer", optimizer.path, moved, len(texts) - moved, what))
    return changes


def _renamed(rewrite: Rewrite, ref: Ref, known: Mapping[str, str]) -> Ref:
    text = rewrite.graph.nodes[ref]
    return rewrite.text(ref, known[text]) if type(text) is str and text in known else ref


def _renamed_list(rewrite: Rewrite, ref: Ref, known: Mapping[str, str]) -> None:
    node = rewrite.graph.nodes[ref]
    parts = tuple(_renamed(rewrite, part, known) for part in elements(node))
    if parts != elements(node):
        rewrite.changed[ref] = List(parts) if isinstance(node, List) else parts


# -- parameters that go ---------------------------------------------------------------------------------


class Owner(NamedTuple):
    """A state dict that an optimizer may belong to: the keys of each parameter by its mark in ``params``, a number or
    a name. Tied parameters have several keys, the first one counts. ``sure`` says that names tell, not the order."""

    state_dict: StateDict
    keys: dict[Node, tuple[str, ...]]
    sure: bool


def prune_optimizers(checkpoint: Checkpoint, rewrite: Rewrite, dropped: Mapping[int, Collection[str]]) -> list[Change]:
    """Take the states of dropped parameters out of the optimizers, and number the others anew.

    ``dropped`` are names by the number of the state dict; what ``rewrite`` drops as a whole is left alone, and so is
    the optimizer of another model. Raises RefusedError where nobody can tell which parameter a state belongs to.
    """
    changes: list[Change] = []
    alive = set(rewrite.done().reachable())
    for optimizer in optimizers(checkpoint.graph):
        if optimizer.ref not in alive:
            continue
        owners: list[Owner] = []
        reason = ""
        for number, state_dict in enumerate(checkpoint.state_dicts):
            if state_dict.ref in alive and (number in dropped or state_dict.confidence == "high"):
                found = _owner(checkpoint, optimizer, state_dict)
                if isinstance(found, Owner):
                    owners.append(found)
                elif number in dropped:
                    reason = reason or found
        numbers = {item.ref: number for number, item in enumerate(checkpoint.state_dicts)}
        named = [owner for owner in owners if owner.sure] or owners
        gone = [(owner, dropped.get(numbers[owner.state_dict.ref], ())) for owner in named]
        lost = {frozenset(mark for mark, keys in owner.keys.items() if keys[0] in names) for owner, names in gone}
        if owners:
            paths = " and with ".join(repr(owner.state_dict.path or ".") for owner in named)
            reason = f"it goes with {paths}, which do not lose the same" if len(lost) > 1 else _moved_tie(gone)
        if reason:
            what = f"nobody can tell which states of {optimizer.path!r} belong to the dropped parameters: {reason}"
            step = f"drop the optimizer as well ({optimizer.path or 'the whole file'}), or leave out --prune-optimizer"
            raise RefusedError(what, path=checkpoint.path, next=step)
        for marks in filter(None, lost):
            changes += _pruned(checkpoint.graph, rewrite, optimizer, marks)
    return changes


def _moved_tie(gone: Sequence[tuple[Owner, Collection[str]]]) -> str:
    """A parameter that goes by its first key and stays by another, where it has another number; "" for none."""
    for owner, names in gone:
        for keys in owner.keys.values():
            staying = [key for key in keys if key not in names]
            if keys[0] in names and staying:
                return f"{keys[0]!r} goes, but it is tied to {staying[0]!r}, which stays"
    return ""


def _owner(checkpoint: Checkpoint, optimizer: Optimizer, state_dict: StateDict) -> Owner | str:
    """The optimizer's parameters in a state dict; or the reason why they are not there."""
    graph = checkpoint.graph
    marks = [graph.nodes[part] for group in optimizer.groups for part in elements(graph.nodes[group.params])]
    names: list[Node] = []
    for group in optimizer.groups:
        names += [graph.nodes[part] for part in elements(graph.nodes[group.names])] if group.names >= 0 else []
    if all(type(mark) is str for mark in marks):
        names = marks
    tied = _ties(checkpoint, state_dict)
    if len(names) == len(marks) and set(names) <= tied.keys():
        keys = {mark: (str(name), *(k for k in tied[str(name)] if k != name)) for mark, name in zip(marks, names)}
        return Owner(state_dict, keys, True)
    if len(optimizer.groups) != 1:
        return f"it has {len(optimizer.groups)} groups of parameters and no names"
    shapes = _shapes(checkpoint, optimizer, marks)
    for candidates in _parameters(checkpoint, state_dict):
        if len(candidates) == len(marks):
            wrong = [name for mark, (name, shape) in zip(marks, candidates) if shape not in shapes.get(mark, (shape,))]
            if not wrong:
                return Owner(state_dict, {mark: tied[name] for mark, (name, _) in zip(marks, candidates)}, False)
    return f"it has {counted(len(marks), 'parameter')} without names, which do not go with the keys in their order"


def _ties(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, tuple[str, ...]]:
    """Of every key all keys with the same tensor, in their order."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    same: dict[object, list[str]] = {}
    for key, value in state_dict.items:
        same.setdefault(_mark(value, reader.tensor(value)), []).append(str(graph.nodes[key]))
    return {name: tuple(names) for names in same.values() for name in names}


def _mark(ref: Ref, tensor: Tensor | None) -> object:
    """What tied tensors have in common."""
    return view_id(tensor) if tensor and tensor.storage else ref


def _parameters(checkpoint: Checkpoint, state_dict: StateDict) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The floating tensors of a state dict in order, tied ones once; then without the usual buffers."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    seen: set[object] = set()
    found = []
    for key, value in state_dict.items:
        tensor = reader.tensor(value)
        if tensor is None or not tensor.dtype.startswith(("float", "bfloat", "complex")):
            continue
        mark = _mark(value, tensor)
        if mark not in seen:
            seen.add(mark)
            found.append((str(graph.nodes[key]), tensor.shape))
    return [found, [item for item in found if item[0].rpartition(".")[2] not in _BUFFERS]]


def _shapes(
    checkpoint: Checkpoint, optimizer: Optimizer, marks: Sequence[Node]
) -> dict[Node, tuple[tuple[int, ...], ...]]:
    """The shapes of the tensors that an optimizer keeps for a parameter, where one could tell the parameter's."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    found = {}
    for key, value in mapping(graph, optimizer.state) or ():
        shapes = [tensor.shape for _, slot in mapping(graph, value) or () if (tensor := reader.tensor(slot))]
        told = tuple(shape for shape in shapes if shape)
        # Factored moments (Adafactor) have the rows and the columns alone.
        if told and not _factored(graph, value, reader):
            found[graph.nodes[key]] = (*told, ()) if len(told) < len(shapes) else told
    return found


def _factored(graph: Graph, ref: Ref, reader: TensorReader) -> bool:
    names = [graph.nodes[name] for name, value in mapping(graph, ref) or () if reader.tensor(value)]
    return any(isinstance(name, str) and {"row", "col"} & set(name.split("_")) for name in names)


def _pruned(graph: Graph, rewrite: Rewrite, optimizer: Optimizer, gone: Collection[Node]) -> list[Change]:
    numbers: dict[Node, Node] = {}
    for group in optimizer.groups:
        parts = elements(graph.nodes[group.params])
        kept = [part for part in parts if graph.nodes[part] not in gone]
        for part in kept:
            mark = graph.nodes[part]
            numbers[mark] = len(numbers) if type(mark) is int else mark
        fresh = [_numbered(rewrite, part, numbers) for part in kept]
        _relist(rewrite, group.params, fresh)
        if group.names >= 0:
            names = elements(graph.nodes[group.names])
            _relist(rewrite, group.names, [name for part, name in zip(parts, names) if part in kept])
    states = mapping(graph, optimizer.state) or []
    rewrite.refill(
        optimizer.state,
        [
            (_numbered(rewrite, name, numbers), value)
            for name, value in states
            if graph.nodes[name] not in gone  # what no group mentions stays
        ],
    )
    what = f"the state of {counted(len(gone), 'parameter')} dropped, {len(numbers):,} left, numbered anew"
    nameless = all(group.names < 0 for group in optimizer.groups) and all(type(mark) is int for mark in gone)
    notes = ("it names no parameters: they were taken in the order of the keys",) if nameless else ()
    return [Change("prune-optimizer", optimizer.path, len(gone), len(numbers), what, notes)]


def _numbered(rewrite: Rewrite, ref: Ref, numbers: Mapping[Node, Node]) -> Ref:
    mark = rewrite.graph.nodes[ref]
    new = numbers.get(mark, mark)
    return rewrite.constant(new) if type(new) is int and new != mark else ref


def _relist(rewrite: Rewrite, ref: Ref, parts: list[Ref]) -> None:
    old = rewrite.graph.nodes[ref]
    rewrite.changed[ref] = List(parts) if isinstance(old, List) else tuple(parts)
