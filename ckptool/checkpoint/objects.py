"""Apply Python's conventions to a pickle graph: global names, mappings, attributes, constants, keys."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # the tables of pickle and of torch's weights_only unpickler
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..pickles import opcodes as op
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, Instance, List, Node, Persistent, Ref, Set, children

Scalar: TypeAlias = "bool | int | float | str | None"

_COUNTER: Final = "collections.Counter"
#: Classes that copy a mapping or pairs when called, each with the position of that argument.
_SOURCE_ARGUMENT: Final = {"collections.OrderedDict": 0, "builtins.dict": 0, _COUNTER: 0, "collections.defaultdict": 1}
#: Python's mapping classes.
MAPPING_CLASSES: Final = frozenset(_SOURCE_ARGUMENT)
#: Calls of ``__new__``; for a dict it ignores all arguments.
_NEW: Final = (op.NEWOBJ, op.NEWOBJ_EX)
#: Types of keys that are equal only to the same string or number.
_DISTINCT: Final = frozenset((str, int))
#: The types of constants.
PLAIN: Final = frozenset((str, int, bool, float, bytes, type(None)))
#: The most levels to follow when mappings are made from other mappings.
_MAX_NESTED: Final = 4
#: The most parts of one key to compare; a larger key is equal only to itself.
_MAX_KEY_PARTS: Final = 1_000
#: Nodes whose key identity is computed from their parts.
_COMPOUND: Final = (tuple, FrozenSet, Global, Call)
#: Classes that are equal to a tuple or frozenset of the list that they are called with.
_OF_SEQUENCE: Final = {"torch.Size": "tuple", "builtins.tuple": "tuple", "builtins.frozenset": "frozenset"}
#: Aliases in torch of one object: ``torch.float is torch.float32``.
_ALIASES: Final = {f"torch.{name}": f"torch.{dtype.name}" for name, dtype in BY_NAME.items() if name != dtype.name}


def mapped_name(node: Global) -> str:
    """Return ``module.name`` as Python 3 resolves it, with Python 2 names replaced."""
    renamed = NAME_MAPPING.get((node.module, node.name))
    if renamed is not None:
        return f"{renamed[0]}.{renamed[1]}"
    return f"{IMPORT_MAPPING.get(node.module, node.module)}.{node.name}"


def callable_name(graph: Graph, ref: Ref) -> str:
    """Return the mapped name of a function or class, also in a legacy ('module', class, file, source); else ""."""
    node = graph.nodes[ref]
    if isinstance(node, Persistent):
        pid = graph.nodes[node.pid]
        node = graph.nodes[pid[1]] if type(pid) is tuple and len(pid) == 4 else None
    return mapped_name(node) if isinstance(node, Global) else ""


def class_name(graph: Graph, ref: Ref) -> str:
    """Return the class of a node, such as "dict", "str" or "argparse.Namespace"; tensors are not recognised here."""
    node = graph.nodes[ref]
    if isinstance(node, Call):
        name = callable_name(graph, node.func)
        args = list_items(graph.nodes[node.args])
        if args and name in ("copyreg._reconstructor", "copyreg.__newobj__"):
            return callable_name(graph, args[0]) or "object"
        if name == "_codecs.encode":
            return "bytes"
        return "OrderedDict" if name == "collections.OrderedDict" else name.removeprefix("builtins.") or "object"
    if isinstance(node, Global):
        return "global"
    return "None" if node is None else type(node).__name__.lower()


def mapping(graph: Graph, ref: Ref) -> list[tuple[Ref, Ref]] | None:
    """Return the (key, value) references of a mapping, or None for another node.

    A mapping is a dict, an OrderedDict or Counter in any form that ``initial_pairs`` follows (Python 2 writes
    ``OrderedDict([[k, v], ...])``), or another object that was filled by key, such as a dict subclass. As in Python, a
    key that is written twice keeps its first place and gets the last value.
    """
    node = graph.nodes[ref]
    if isinstance(node, Dict):
        return last_pairs(graph, node.pairs)
    if not isinstance(node, Call):
        return None
    initial = initial_pairs(graph, node)
    if initial is not None:
        return last_pairs(graph, [*initial, *node.pairs])
    is_ordered = callable_name(graph, node.func) == "collections.OrderedDict"
    return last_pairs(graph, node.pairs) if node.pairs or is_ordered else None


def plain_parts(graph: Graph, ref: Ref) -> list[Node] | None:
    """Return the alternating keys and values of a dict of constants, which may be frequent; None for another node."""
    node = graph.nodes[ref]
    if type(node) is not Dict:
        return None
    parts = [graph.nodes[part] for part in node.pairs]
    return parts if PLAIN.issuperset(map(type, parts)) else None


def holds_constants(graph: Graph, ref: Ref) -> bool:
    """Return whether the node is a container of constants only. Memoized, because it can be at thousands of paths."""
    known: bool | None = graph.cache.get(("constants", ref))
    if known is None:
        node = graph.nodes[ref]
        parts = children(node) if isinstance(node, tuple | List | Dict | Set | FrozenSet) else None
        known = parts is not None and PLAIN.issuperset([type(graph.nodes[part]) for part in parts])
        graph.cache["constants", ref] = known
    return known


def last_pairs(graph: Graph, pairs: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
    """Return alternating references as the entries of a dict: the first of equal keys, with the last value."""
    nodes = graph.nodes
    refs, values = pairs[::2], pairs[1::2]
    keys = [nodes[ref] for ref in refs]
    if _DISTINCT.issuperset(map(type, keys)) and len(set(keys)) == len(keys):
        return list(zip(refs, values))  # the usual case, and there may be a million mappings
    items: dict[Hashable, tuple[Ref, Ref]] = {}
    for ref, value in zip(refs, values):
        name = nodes[ref]
        key = name if type(name) is str else key_identity(graph, ref)
        items[key] = (items[key][0] if key in items else ref, value)
    return list(items.values())


def key_identity(graph: Graph, ref: Ref) -> Hashable:
    """Return a value that is equal for keys that are equal in Python: 1, True and 1.0 are one key, b"a" is not "a".

    NaNs, unhashable nodes and objects of unknown classes are equal only to themselves.
    """
    node = graph.nodes[ref]
    if not isinstance(node, _COMPOUND):
        return _plain_identity(node, ref)
    known = graph.cache.get(("key", ref))
    if known is None:
        try:
            known = _compound_identity(graph, ref, [_MAX_KEY_PARTS])
        except RecursionError:
            known = ("own", ref)
        graph.cache["key", ref] = known
    return known


def _plain_identity(node: Node, ref: Ref) -> Hashable:
    if isinstance(node, float) and node != node:
        return object()  # a new object each time, because a pickler never shares a float
    return node if node is None or isinstance(node, str | int | float | bytes) else ("own", ref)


def _compound_identity(graph: Graph, ref: Ref, budget: list[int]) -> Hashable:
    """Return the identity of a key; raise RecursionError if it nests too deeply, or has more parts than ``budget``."""
    node = graph.nodes[ref]
    budget[0] -= 1 if not isinstance(node, str | bytes) else 1 + (len(node) >> 10)
    if budget[0] < 0:
        raise RecursionError
    if isinstance(node, tuple):
        return ("tuple", *(_compound_identity(graph, part, budget) for part in node))
    if isinstance(node, FrozenSet):
        return ("frozenset", frozenset(_compound_identity(graph, part, budget) for part in node.items))
    if isinstance(node, Global) and node.filling is None:
        name = mapped_name(node)
        return ("global", _ALIASES.get(name, name))
    if not isinstance(node, Call) or node.op != op.REDUCE or node.filling is not None:
        return _plain_identity(node, ref)
    value = called_constant(graph, ref)
    if value is not None:
        return value if value == value else object()
    device = device_text(graph, ref)
    if device is not None:
        return ("torch.device", device)
    kind, args = _OF_SEQUENCE.get(callable_name(graph, node.func)), graph.nodes[node.args]
    source = graph.nodes[args[0]] if type(args) is tuple and len(args) == 1 else None
    if kind is None or not isinstance(source, List | tuple):
        return ("own", ref)
    parts = [_compound_identity(graph, part, budget) for part in list_items(source)]
    return ("tuple", *parts) if kind == "tuple" else ("frozenset", frozenset(parts))


def called_constant(graph: Graph, ref: Ref) -> bytes | complex | None:
    """Return the bytes (as protocols before 3 write them) or complex number of a call; None for another node."""
    node = graph.nodes[ref]
    if not isinstance(node, Call) or node.filling is not None:
        return None
    name, args = callable_name(graph, node.func), graph.nodes[node.args]
    values = [graph.nodes[arg] for arg in args[:3]] if type(args) is tuple else [None]
    if name == "builtins.bytes" and not values:
        return b""
    try:
        if name == "_codecs.encode" and len(values) == 2 and values[1] in ("latin1", "latin-1"):
            return values[0].encode("latin-1") if type(values[0]) is str else None
        if name == "builtins.complex" and len(values) == 2 and all(type(value) in (int, float) for value in values):
            return complex(*values)
    except (UnicodeEncodeError, OverflowError):
        pass
    return None


def initial_pairs(graph: Graph, node: Call, levels: int = _MAX_NESTED) -> Sequence[Ref] | None:
    """Return the alternating keys and values that a mapping class was called with and copies; None for another call.

    None also for an argument that is neither a list of pairs nor a mapping made in fewer than ``levels`` calls.
    """
    name = callable_name(graph, node.func)
    place, args = _SOURCE_ARGUMENT.get(name), graph.nodes[node.args]
    if place is None or type(args) is not tuple or not levels:
        return None
    if node.op in _NEW or len(args) <= place:
        return ()
    source = graph.nodes[args[place]] if len(args) == place + 1 and node.kwargs < 0 else None
    if isinstance(source, Dict):
        return source.pairs
    if isinstance(source, Call):
        inner = initial_pairs(graph, source, levels - 1)
        return None if inner is None else [*inner, *source.pairs]
    if not isinstance(source, List | tuple) or (name == _COUNTER and list_items(source)):
        return None
    known = "pairs", args[place]  # thousands of mappings can be made from one list
    if known not in graph.cache:
        pairs = [list_items(graph.nodes[pair]) for pair in list_items(source)]
        valid = all(len(pair) == 2 for pair in pairs)
        graph.cache[known] = [part for pair in pairs for part in pair] if valid else None
    flat: list[Ref] | None = graph.cache[known]
    return flat


def copied_argument(graph: Graph, node: Call) -> int:
    """Return the position of the argument whose entries a mapping copies when called, or -1."""
    place = _SOURCE_ARGUMENT.get(callable_name(graph, node.func), -1)
    has_source = node.op not in _NEW and 0 <= place < len(list_items(graph.nodes[node.args]))
    return place if has_source and initial_pairs(graph, node) is not None else -1


def pair_list(graph: Graph, node: Call) -> list[Ref] | None:
    """Return the references of the pairs in ``OrderedDict([[k, v], ...])``; None for another node."""
    args, name = list_items(graph.nodes[node.args]), callable_name(graph, node.func)
    is_called = name in ("collections.OrderedDict", "builtins.dict") and node.op not in _NEW and len(args) == 1
    source = graph.nodes[args[0]] if is_called else None
    is_list = isinstance(source, List | tuple) and initial_pairs(graph, node) is not None
    return list(list_items(source)) if is_list else None


def list_items(node: Node) -> tuple[Ref, ...]:
    """Return the references in a list or tuple; () for another node."""
    if type(node) is tuple:
        return node
    return tuple(node.items) if isinstance(node, List) else ()


def attributes(graph: Graph, node: Instance) -> list[tuple[Ref, Ref]]:
    """Return the (name, value) references that BUILD sets: from ``__dict__``, then from slots."""
    items: list[tuple[Ref, Ref]] = []
    parts: tuple[Ref, ...] = ()
    for state in node.states:
        value = graph.nodes[state]
        parts = value if type(value) is tuple and len(value) == 2 else (state,)
        for part in parts:
            items += mapping(graph, part) or []
    if len(node.states) < 2 and len(parts) < 2:
        return items
    return last_pairs(graph, [ref for pair in items for ref in pair])


#: What every nn.Module has among its attributes.
_MODULE_FIELDS: Final = frozenset(("_parameters", "_buffers", "_modules"))
#: Functions that make a module of the attributes in their first arguments, by the end of their names: torch.fx
#: (torch/fx/graph_module.py), and StyleGAN, which has them under "state" (torch_utils/persistence.py).
_MODULE_MAKERS: Final = (
    *("reduce_graph_module", "reduce_package_graph_module", "reduce_deploy_graph_module"),
    "_reconstruct_persistent_obj",
)
#: The class of torch.compile, called with the module that it wraps (torch/_dynamo/eval_frame.py).
COMPILED: Final = "torch._dynamo.eval_frame.OptimizedModule"


def module_fields(graph: Graph, call: Call) -> list[tuple[Ref, Ref]]:
    """Return the (name, value) references of the attributes of an nn.Module, or [] for another object."""
    given = [attributes(graph, call)] if call.states else []
    if not given and callable_name(graph, call.func).endswith(_MODULE_MAKERS):
        given = [mapping(graph, ref) or [] for ref in list_items(graph.nodes[call.args])]
        states = (by_name(graph, items).get("state", -1) for items in given)
        given += [mapping(graph, ref) or [] for ref in states if ref >= 0]
    return next((items for items in given if by_name(graph, items).keys() >= _MODULE_FIELDS), [])


def named_attributes(graph: Graph, ref: Ref) -> dict[str, Ref]:
    """Return the attributes of an object by name; {} for another node."""
    node = graph.nodes[ref]
    return by_name(graph, attributes(graph, node)) if isinstance(node, Call) else {}


def by_name(graph: Graph, items: Iterable[tuple[Ref, Ref]]) -> dict[str, Ref]:
    """Return the values of the (key, value) references with string keys, by key."""
    return {name: value for key, value in items if type(name := graph.nodes[key]) is str}


def values_of(graph: Graph, ref: Ref) -> dict[str, Ref]:
    """Return the values of a mapping with string keys, by key; {} for another node."""
    return by_name(graph, mapping(graph, ref) or [])


def scalar(graph: Graph, ref: Ref) -> Scalar:
    """Return the value of a number, bool or string; None for another node."""
    node = graph.nodes[ref]
    return node if isinstance(node, bool | int | float | str) else None


def device_text(graph: Graph, ref: Ref) -> str | None:
    """Return "cuda:1" for a ``torch.device`` call; None for another node."""
    node = graph.nodes[ref]
    if not isinstance(node, Call) or callable_name(graph, node.func) != "torch.device":
        return None
    args = list_items(graph.nodes[node.args])
    device = graph.nodes[args[0]] if 1 <= len(args) <= 2 else None
    if type(device) is not str:
        return None
    index = graph.nodes[args[1]] if len(args) == 2 else None
    # Torch keeps the index in eight bits; Python refuses to print very large numbers.
    return f"{device}:{index}" if type(index) is int and abs(index) < 1 << 31 else device if index is None else None


#: The class of a local shard in a ShardedTensor; torch 1.10 had it in another module.
_SHARDS: Final = frozenset(
    f"torch.distributed.{module}.Shard"
    for module in ("_shard.sharded_tensor.shard", "_sharded_tensor.api", "_shard.sharded_tensor.api")
)


def state_items(graph: Graph, state: Ref) -> list[tuple[Ref, Ref]]:
    """Return the (name, value) references in the state of a tensor, which is a dict or (dict, slots)."""
    node = graph.nodes[state]
    return [item for part in (node if type(node) is tuple else (state,)) for item in mapping(graph, part) or ()]


def state_values(graph: Graph, state: Ref) -> Iterator[Ref]:
    """Yield the possible tensors in the state of a wrapper: the values by name, or the local shards."""
    yield from (value for _, value in state_items(graph, state))
    yield from (shard["tensor"] for shard in local_shards(graph, state) if "tensor" in shard)


def local_shards(graph: Graph, state: Ref) -> list[dict[str, Ref]]:
    """Return the attributes of each shard in a ShardedTensor's state (shards, metadata, group, spec, rrefs)."""
    parts = graph.nodes[state]
    shards = list_items(graph.nodes[parts[0]]) if type(parts) is tuple and parts else ()
    return [named_attributes(graph, shard) for shard in shards if class_name(graph, shard) in _SHARDS]
