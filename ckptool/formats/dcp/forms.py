"""How torch writes ``.metadata`` and the tensors in items: what its plain ``pickle.load`` or ``torch.load`` fails at.

Both are written by few functions, so that everything of another form is told of. Sources: metadata.py and filesystem.py
of torch/distributed/checkpoint, ``_rebuild_tensor_v2`` in torch/_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ...base.dtypes import BY_NAME
from ...checkpoint.objects import callable_name, elements, initial_pairs, mapped_name
from ...checkpoint.tensors import ID_PARTS
from ...pickles.nodes import Buffer, Call, Dict, Extension, Global, Graph, List, Persistent, Ref, non_utf8_strings
from ...pickles.opcodes import NAMES, NEWOBJ, REDUCE

#: Objects that have only fields: made of a class alone, then given a dict.
_PLAIN: Final = frozenset(
    (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
        *("StorageMeta", "_StorageInfo", "SavePlan", "WriteItem", "TensorWriteData"),
    )
)
_LAYOUTS: Final = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
)
_LARGEST: Final = (1 << 63) - 1
_Test = Callable[[Graph, Call], bool]


def metadata_flaws(graph: Graph, expected: frozenset[str]) -> Iterator[str]:
    """What in a ``.metadata`` ends ``pickle.load`` with an error, each in words; ``expected`` are the names that are
    looked at, of other libraries nothing is known. Linear in the graph."""
    names: dict[Ref, str] = {}
    for node in graph.nodes:
        if isinstance(node, Persistent | Extension | Buffer):
            yield f"a {type(node).__name__.lower()} object, which pickle.load cannot make"
        elif isinstance(node, Global):
            if node.filling is not None:
                yield f"something is put into {mapped_name(node)}"
            if node.module == "__builtin__" and graph.style.protocol > 2:
                yield f"a module of Python 2, {node.module}"
        elif isinstance(node, Call):
            name = names.get(node.func)
            if name is None:
                name = names[node.func] = callable_name(graph, node.func)
            if type(graph.nodes[node.args]) is not tuple:
                yield f"arguments of {name or 'a call'} that are not a tuple"
            if node.op == NEWOBJ and name.startswith("torch.") and name[len("torch.") :] in BY_NAME:
                yield f"{name} as a class"
            test = _TESTS.get(name.rpartition(".")[2])
            if name in expected and test is not None and not test(graph, node):
                yield f"a {name.rpartition('.')[2]} that torch cannot make"


def _is_bare(graph: Graph, node: Call) -> bool:
    """Is it an object of a class without arguments, and not filled as a list or dict?"""
    return node.op == NEWOBJ and node.kwargs < 0 and graph.nodes[node.args] == () and not (node.items or node.pairs)


def _plain(graph: Graph, node: Call) -> bool:
    states = [graph.nodes[ref] for ref in node.states]
    if not _is_bare(graph, node) or not all(isinstance(state, Dict) for state in states):
        return False
    keys = [key for state in states if isinstance(state, Dict) for key in state.pairs[::2]]
    return all(type(graph.nodes[key]) is str for key in keys)


def _properties(graph: Graph, node: Call) -> bool:
    """``TensorProperties.__setstate__`` takes apart five values, and compares the fourth with its enumeration."""
    for state in node.states:
        parts = graph.nodes[state]
        if not isinstance(parts, tuple | List) or len(elements(parts)) != 5:
            return False
        encoding = graph.nodes[elements(parts)[3]]
        name = callable_name(graph, encoding.func) if isinstance(encoding, Call) else ""
        if not name.endswith("MEM_FORMAT_ENCODING") and name != "builtins.getattr":
            return False
    return _is_bare(graph, node)


def _called(graph: Graph, node: Call) -> list[object] | None:
    """The arguments of a call that only is one; None where it is more, or another."""
    if node.op != REDUCE or node.filling is not None:
        return None
    return [graph.nodes[ref] for ref in elements(graph.nodes[node.args])]


def _member(first: int, last: int) -> _Test:
    def test(graph: Graph, node: Call) -> bool:
        args = _called(graph, node)
        return args is not None and len(args) == 1 and type(args[0]) is int and first <= args[0] <= last

    return test


def _layout(graph: Graph, node: Call) -> bool:
    args = _called(graph, node)
    return args is not None and len(args) == 1 and args[0] in _LAYOUTS


def _path(graph: Graph, node: Call) -> bool:
    args = _called(graph, node)
    return args is not None and all(type(part) is str for part in args)


def _size(graph: Graph, node: Call) -> bool:
    args = _called(graph, node)
    if args is None or len(args) != 1 or not isinstance(args[0], tuple | List):
        return args == []
    numbers = [graph.nodes[ref] for ref in elements(args[0])]
    return all(type(number) is int and abs(number) <= _LARGEST for number in numbers)


def _ordered(graph: Graph, node: Call) -> bool:
    return initial_pairs(graph, node) is not None and not node.items and not node.states


_TESTS: Final[dict[str, _Test]] = {
    **dict.fromkeys(_PLAIN, _plain),
    "TensorProperties": _properties,
    "_MEM_FORMAT_ENCODING": _member(0, 2),
    "MEM_FORMAT_ENCODING": _member(0, 2),
    "WriteItemType": _member(1, 3),
    "_get_layout": _layout,
    **dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"), _path),
    "Size": _size,
    "OrderedDict": _ordered,
}

#: What makes a tensor, and of how many arguments at least: one more are metadata.
_MAKERS: Final = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
_DICT: Final = "collections.OrderedDict"
#: Flags in the metadata of a tensor: what torch does to its elements when it reads them.
_LAZY: Final = ("conj", "neg")
#: Types of their values, which are turned into a bool.
_FLAGS: Final = (bool, int, float, type(None))


def item_flaw(graph: Graph) -> str:
    """Why ``torch.load`` fails at the pickle of an item, also over what that throws away; "" where it may load."""
    nodes = graph.nodes
    for node in nodes:
        if type(node) is Persistent:
            pid = nodes[node.pid]
            if type(pid) is not tuple or len(pid) != ID_PARTS or nodes[pid[0]] not in ("storage", b"storage"):
                return "it describes a storage in a way that torch cannot read"
    return "a byte string of Python 2 in it is not UTF-8" if any(True for _ in non_utf8_strings(graph)) else ""


def tensor_flaw(graph: Graph) -> str:
    """Why ``torch.load(weights_only=True)`` does not take an item that is said to be a plain tensor, "" where it does.

    DCP loads each tensor so, and its writer saves none but detached ones.
    """
    if graph.refused:
        return f"it has the opcode {NAMES[next(iter(graph.refused))]}"
    for ref, node in enumerate(graph.nodes):
        if isinstance(node, Global):
            name = mapped_name(node)
            if name not in (*_MAKERS, _DICT) and not _is_kind(name):
                return f"it names {name}"
            if node.filling is not None:
                return f"something is put into {name}"
        elif isinstance(node, Persistent) and node.filling is not None:
            return "something is put into its storage"
        elif isinstance(node, Call) and ref != graph.root:
            name = callable_name(graph, node.func)
            if name != _DICT or not _ordered(graph, node):
                return f"it calls {name}"
    root = graph.nodes[graph.root]
    least = _MAKERS.get(callable_name(graph, root.func)) if isinstance(root, Call) and root.op == REDUCE else None
    if not isinstance(root, Call) or least is None:
        return "it is not written as torch.save writes a tensor"
    if root.filling is not None:
        return "something is put into the tensor"
    args = [graph.nodes[ref] for ref in elements(graph.nodes[root.args])]
    if not least <= len(args) <= least + 1:
        return f"its tensor is made of {len(args)} arguments"
    if type(args[4]) is not bool:
        return "its requires_grad is not a bool"
    if not isinstance(args[5], Call | Dict) or args[5].pairs:
        return "its hooks are not an empty dict"
    if len(args) > least:
        flags = args[least]
        if not isinstance(flags, Dict):
            return "its metadata is not a dict"
        if not all(graph.nodes[name] in _LAZY and type(graph.nodes[flag]) in _FLAGS for name, flag in _couples(flags)):
            return "its metadata is more than the flags conj and neg"
    return ""


def lazy_bits(graph: Graph) -> set[str]:
    """Return which of "conj" and "neg" are set on the tensor of an item that has no flaw: those that are there."""
    root = graph.nodes[graph.root]
    args = [graph.nodes[ref] for ref in elements(graph.nodes[root.args])] if isinstance(root, Call) else []
    flags = args[-1] if len(args) > 6 else None
    couples = _couples(flags) if isinstance(flags, Dict) else ()
    return {str(graph.nodes[name]) for name, _ in couples}


def _couples(node: Dict) -> Iterator[tuple[Ref, Ref]]:
    return zip(node.pairs[::2], node.pairs[1::2])


def _is_kind(name: str) -> bool:
    """Is it a class of storages or a dtype?"""
    return name.startswith("torch.") and (name.endswith("Storage") or name.removeprefix("torch.") in BY_NAME)
