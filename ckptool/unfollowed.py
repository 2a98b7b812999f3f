"""What a pickle means to torch beyond what ckptool follows: no library writes it, and nothing is said of such values.

A tensor that BUILD changes after it was made, a mapping made of something that is no plain mapping, a container that
is changed after a call has copied it: ``TensorReader`` and ``objects.mapping`` would see other values than torch.load
gives. Whoever relies on them is refused (``Checkpoint.survey``); nothing is known to be unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView, Sequence
from itertools import chain
from typing import Final

from .objects import callable_name, elements, given_pairs, mapping
from .pickles import opcodes as op
from .pickles.nodes import (
    Buffer,
    Call,
    Dict,
    FrozenSet,
    Global,
    Graph,
    Instance,
    List,
    Node,
    Persistent,
    Ref,
    Set,
    children,
)
from .tensors import TensorReader

__all__ = ["unfollowed"]

#: Classes that copy their argument when they are called, and mappings among them.
_MAPPINGS: Final = frozenset(
    ("collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict")
)
_COPYING: Final = _MAPPINGS | {
    *("builtins.set", "builtins.frozenset", "builtins.list", "builtins.tuple", "builtins.bytearray"),
    *("torch.Size", "collections.deque"),
}
_PARAMETERS: Final = ("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable")
#: What makes a parameter of its first argument: of none it makes an empty one.
_OF_DATA: Final = frozenset(
    (*_PARAMETERS, "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
)
_CONTAINERS: Final = (List, Dict, Set, FrozenSet)
_USUAL: Final = "torch._utils._rebuild_tensor_v2"
_MOVED: Final = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
_WITH_ATTRIBUTES: Final = {
    "torch._tensor._rebuild_from_type_v2": 3,
    "torch._utils._rebuild_parameter_with_state": 3,
}
#: Attributes of a tensor that are more than names: to set one changes its values, or what it is.
_DESCRIPTORS: Final = frozenset(
    (
        *("data", "grad", "requires_grad", "names", "real", "imag", "grad_dtype", "volatile", "name", "H", "T", "mH"),
        *("mT", "_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_post_accumulate_grad_hooks", "_version"),
        *("device", "dtype", "grad_fn", "is_leaf", "is_nested", "is_quantized", "is_sparse", "itemsize", "layout"),
        *("nbytes", "ndim", "output_nr", "retains_grad", "shape"),
    )
)


def unfollowed(graph: Graph, reader: TensorReader) -> dict[Ref, str]:
    """What is not followed, in words, by reference; nothing for what a library wrote."""
    nodes, found = graph.nodes, dict[Ref, str]()
    names: dict[Ref, str] = {}  # of what is called, "" for what is not watched
    copies: list[tuple[Ref, Call]] = []
    # Ids of storages and arguments of what makes tensors: those that may be values as well.
    parts = set[Ref]()
    changed, fetched, storage = graph.filled.keys(), graph.fetched, reader.storage
    # Of hundreds of thousands of nodes nearly all are usual: what is asked of each costs as much as reading it.
    for ref, node in enumerate(nodes):
        if type(node) is Call:
            name = names.get(node.func)
            if name is None:
                name = callable_name(graph, node.func)
                name = names[node.func] = name if _is_watched(name) else ""
            if not name:
                continue
            args = nodes[node.args]
            if name not in _MAPPINGS:
                if name not in _COPYING and (fetched is None or node.args in fetched or type(args) is not tuple):
                    parts.add(node.args)
                usual = name == _USUAL and type(args) is tuple and len(args) > 0 and changed.isdisjoint(args)
            else:
                usual = args == ()
            if not usual or node.filling is not None:
                what = _of_call(graph, reader, ref, node, name, copies, changed)
                if what:
                    found[ref] = what
        elif type(node) is Persistent:
            if fetched is None or node.pid in fetched or type(nodes[node.pid]) is not tuple:
                parts.add(node.pid)
            if storage(ref) is None:
                if _is_unread(graph, node):
                    found[ref] = "a storage is named in a way that no torch writes"
            elif node.filling is not None and (node.items or node.pairs or node.states):
                found[ref] = "a storage is changed after it was made"
    if graph.refused.get(op.NEXT_BUFFER):
        what = "the pickle takes bytes from outside of the file"
        found.update((ref, what) for ref, node in enumerate(nodes) if type(node) is Buffer and node.inner < 0)
    if copies:
        found.update(_shared(graph, copies))
    # An edit gives a storage another id, and its tensors other arguments: a value must not change with them.
    values = "the id of a storage, or what a tensor is made of, is a value as well"
    if parts:
        found.update((ref, values) for ref in _values(nodes, parts) if nodes[ref] != ())
    return found


def _values(nodes: Sequence[Node], parts: set[Ref]) -> set[Ref]:
    """Those of ``parts`` that a container holds as well, or an object that is filled."""
    tuples = [node for node in nodes if type(node) is tuple]
    held = [children(node) for node in nodes if type(node) in _CONTAINERS]
    for node in nodes:
        if isinstance(node, Instance) and node.filling is not None:
            held += node.items, node.pairs, node.states
    return parts.intersection(chain(chain.from_iterable(tuples), chain.from_iterable(held)))


def _takes_apart(graph: Graph, reader: TensorReader, node: Call) -> bool:
    """``tuple(tensor)``, ``set(tensor)``: its members are tensors, which nobody but torch can make."""
    args = elements(graph.nodes[node.args])
    return bool(args) and isinstance(graph.nodes[args[0]], Call | Persistent) and reader.tensor(args[0]) is not None


def _is_cast(graph: Graph, reader: TensorReader, node: Call) -> bool:
    """``_rebuild_device_tensor_from_cpu_tensor(data, dtype, ...)``: is that another dtype than the tensor's?"""
    args = elements(graph.nodes[node.args])
    tensor = reader.tensor(args[0]) if len(args) > 1 else None
    dtype = graph.nodes[args[1]] if len(args) > 1 else None
    return tensor is not None and isinstance(dtype, Global) and dtype.name != tensor.dtype


def _is_unread(graph: Graph, node: Persistent) -> bool:
    """Is a persistent id that is no storage to the reader one to torch? What it uses is not known."""
    pid = graph.nodes[node.pid]
    kind = graph.nodes[pid[0]] if type(pid) is tuple and pid else None
    return isinstance(pid, Call) or isinstance(kind, Call) or kind == "storage" or kind == b"storage"


def _is_watched(name: str) -> bool:
    if name in _COPYING or name in _PARAMETERS:
        return True
    module, _, last = name.rpartition(".")
    if module in ("torch._utils", "torch._tensor", "torch.tensor"):
        return last.startswith("_rebuild")
    return module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse") and last.endswith("Tensor")


def _of_call(
    graph: Graph,
    reader: TensorReader,
    ref: Ref,
    node: Call,
    name: str,
    copies: list[tuple[Ref, Call]],
    changed: KeysView[Ref],
) -> str:
    """What of a call is not followed, or ""."""
    args = graph.nodes[node.args]
    if name == _MOVED and _is_cast(graph, reader, node):
        return "a tensor becomes one of another dtype when it is read"
    if name in _COPYING:
        if _takes_apart(graph, reader, node):
            return "a container is made of the elements of a tensor"
        if args and type(args) is tuple:
            copies.append((ref, node))
        if name in _MAPPINGS:
            return _of_mapping(graph, node, name, args)
        return ""
    if name in _OF_DATA and (not args or (type(args) is tuple and graph.nodes[args[0]] is None)):
        return "a parameter is made without a tensor"
    if name in _PARAMETERS:
        if node.filling is not None and (node.items or node.pairs or not _is_parameter_state(graph, node.states)):
            return "a parameter is changed after it was made"
        return ""
    if node.filling is not None and (node.items or node.pairs or node.states):
        return "a tensor is changed after it was made"
    if name.endswith("Tensor"):
        return f"a tensor is made by {name}"
    place = _WITH_ATTRIBUTES.get(name)
    if place is not None and type(args) is tuple and len(args) > place and _sets_more(graph, args[place]):
        return "an attribute of a tensor is set that is more than a name"
    if type(args) is not tuple or changed.isdisjoint(args):
        return ""
    late = any(graph.filled.get(arg, 0) > ref for arg in args)
    return "what a tensor is made of is changed afterwards" if late else ""


def _of_mapping(graph: Graph, node: Call, name: str, args: object) -> str:
    short = name.rpartition(".")[2]
    if args != () and given_pairs(graph, node) is None and not (short == "defaultdict" and _is_short(args)):
        return f"a mapping is made of something else than pairs: {short}(...)"
    if node.items:
        return f"a mapping is filled as a list: {short}"
    if node.states and short == "OrderedDict":
        if len(node.states) > 1:
            return "a mapping is built twice"
        state = graph.nodes[node.states[0]]
        if state is not None and mapping(graph, node.states[0]) is None:
            return "a mapping has a state that is no dict"
    return ""


def _is_short(args: object) -> bool:
    return type(args) is tuple and len(args) == 1


def _is_parameter_state(graph: Graph, states: Sequence[Ref]) -> bool:
    """Is it (requires_grad, volatile, hooks), as torch 0.1 to 0.3 wrote it?"""
    if not states:
        return True
    state = graph.nodes[states[0]]
    return len(states) == 1 and type(state) is tuple and len(state) == 3 and type(graph.nodes[state[0]]) is bool


def _sets_more(graph: Graph, state: Ref) -> bool:
    """Does the state of a tensor set what is no plain attribute (``_set_obj_state`` in torch/_utils.py)?"""
    node = graph.nodes[state]
    for part in node if type(node) is tuple else (state,):
        for key, _ in mapping(graph, part) or ():
            name = graph.nodes[key]
            if type(name) is str and (name in _DESCRIPTORS or name.startswith(("__", "is_"))):
                return True
    return False


def _shared(graph: Graph, copies: Sequence[tuple[Ref, Call]]) -> dict[Ref, str]:
    """Copies of containers that something else leads to, or that were changed after the call."""
    nodes = graph.nodes
    sources: dict[Ref, Ref] = {}
    opened: set[Ref] = set()
    for ref, node in copies:
        if node.op in (op.NEWOBJ, op.NEWOBJ_EX):
            continue
        for source in elements(nodes[node.args]):
            sources[source] = ref
            if source in opened or callable_name(graph, node.func) not in _MAPPINGS:
                continue
            opened.add(source)
            for inner in elements(nodes[source]):
                if type(nodes[inner]) is not tuple:
                    sources.setdefault(inner, ref)
    late = {
        ref: "a container is changed after a call copied it"
        for source, ref in sources.items()
        if graph.filled.get(source, 0) > ref
    }
    holders = {
        ref: elements(nodes[node.args])[-1]
        for ref, node in copies
        if callable_name(graph, node.func) in _MAPPINGS and node.op not in (op.NEWOBJ, op.NEWOBJ_EX)
    }
    wanted = {
        holder for holder in holders.values() if isinstance(nodes[holder], Dict | Call) or elements(nodes[holder])
    }
    times: Counter[Ref] = Counter()
    if wanted:
        for other in nodes:
            times.update(wanted.intersection(children(other)))
    shared = {
        ref: "a mapping is made of one that stands elsewhere too"
        for ref, holder in holders.items()
        if times[holder] > 1
    }
    return shared | late
