"""Tensors from other libraries: rebuild functions of device packages, NumPy arrays, and calls of unknown functions.

Sources: ``torch/_utils.py`` of torch 1.3 to 2.13, torch_npu ``utils/storage.py``, numpy's ``multiarray`` pickling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final

from ..base.records import NamedTuple
from ..pickles.nodes import ByteArray, Call, Dict, FrozenSet, Global, Graph, List, Ref, Set, children
from ..pickles.opcodes import REDUCE
from .objects import callable_name, list_items, mapped_name

#: The two signatures of functions that rebuild a tensor. FROM_STORAGE: (storage, offset, shape, strides, requires_grad,
#: hooks), then arguments specific to the device. FROM_VALUES: (CPU tensor or NumPy array, dtype, device,
#: requires_grad).
FROM_STORAGE: Final = "storage"
FROM_VALUES: Final = "values"

#: The signature of each function that rebuilds tensors of another device, by (package, function name).
_BACKENDS: Final = {
    # torch_npu/utils/storage.py of Ascend/pytorch: the seventh argument is the memory format on the NPU. The storage
    # holds the elements in the order of the strides.
    ("torch_npu", "_rebuild_npu_tensor"): FROM_STORAGE,
    # torch_xla's patch of torch 1.0: the seventh argument is the device.
    ("torch", "_rebuild_xlatensor"): FROM_STORAGE,
    # Devices whose tensors have no storage: XLA since torch 1.3, then ORT, MPS (torch 1.12), MTIA, Maia and DirectML.
    ("torch", "_rebuild_xla_tensor"): FROM_VALUES,
    ("torch", "_rebuild_device_tensor_from_numpy"): FROM_VALUES,
    ("torch", "_rebuild_device_tensor_from_cpu_tensor"): FROM_VALUES,
    # The same for ML Compute (torch 1.9 to 1.12) and Habana's HPU.
    ("torch", "_rebuild_mlc_tensor"): FROM_VALUES,
    ("torch", "_rebuild_hpu_tensor"): FROM_VALUES,
    ("habana_frameworks", "_rebuild_hpu_tensor"): FROM_VALUES,
}

#: Libraries whose tensor subclasses hold quantized values, which mean nothing without the class.
QUANTIZERS: Final = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "quanto": "optimum-quanto",
    "optimum": "optimum-quanto",
    "hqq": "hqq",
    "compressed_tensors": "compressed-tensors",
    "transformer_engine": "transformer-engine",
}

#: The functions that make a NumPy array. An ARRAYS function makes an empty array; BUILD then fills it with the state
#: (version, shape, dtype, Fortran order, data). A BUFFERS function takes (data, dtype, shape, order).
ARRAYS: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
BUFFERS: Final = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")

#: Packages whose classes hold storages and arrays without being tensors. Torch's own functions are recognised
#: elsewhere.
CONTAINERS: Final = (
    *("builtins.", "collections.", "numpy.", "functools.", "argparse.", "types.", "_codecs."),
    *("torch._utils.", "torch._tensor.", "torch.tensor.", "torch.storage."),
)
#: Functions of ``copyreg`` whose first argument is the class of the object.
_MAKERS: Final = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
#: The most nodes to search for storages and arrays in one call; a tensor has a few dozen.
_SEARCHED: Final = 256
_LARGEST: Final = 1 << 62


@lru_cache(maxsize=256)
def backend_arguments(name: str) -> str:
    """Return FROM_STORAGE or FROM_VALUES for a function that rebuilds tensors of a device, or "" for any other name."""
    return _BACKENDS.get((name.partition(".")[0], name.rpartition(".")[2]), "")


class ArrayLayout(NamedTuple):
    """The shape of an array, and the size of its data in bytes."""

    shape: tuple[int, ...]
    nbytes: int


def array_layout(graph: Graph, ref: Ref) -> ArrayLayout | None:
    """Return the layout of a NumPy array that holds its own data; None for an array of objects or another node."""
    node = graph.nodes[ref]
    name = callable_name(graph, node.func) if isinstance(node, Call) else ""
    if not isinstance(node, Call) or name not in (*ARRAYS, *BUFFERS):
        return None
    if name in BUFFERS:
        args = list_items(graph.nodes[node.args])
        shape, data = (args[2], args[0]) if len(args) > 2 else (-1, -1)
    else:
        state = list_items(graph.nodes[node.states[-1]]) if node.states else ()
        shape, data = (state[-4], state[-1]) if len(state) > 3 else (-1, -1)
    if shape < 0 or isinstance(graph.nodes[data], List):
        return None
    sizes = (graph.nodes[size] for size in list_items(graph.nodes[shape]))
    held = graph.nodes[data]
    if isinstance(held, Call):  # _codecs.encode(text, 'latin1')
        held = next((graph.nodes[arg] for arg in list_items(graph.nodes[held.args])), b"")
    stored = held.data if isinstance(held, ByteArray) else held
    nbytes = len(stored) if isinstance(stored, str | bytes | bytearray) else 0
    return ArrayLayout(tuple(n for n in sizes if type(n) is int and 0 <= n < _LARGEST), nbytes)


def unknown_call(
    graph: Graph, node: Call, is_storage: Callable[[Ref], bool], budget: list[int]
) -> tuple[str, list[Ref], list[Ref]]:
    """Return the name of the unknown function or class in a call, and the storages and arrays in what it is given.

    ``budget`` holds the number of nodes that may still be searched. Two kinds of array do not count, because objects of
    any class have them: attributes in a state, and arguments of ``__new__``, the fields of a named tuple.
    """
    nodes = graph.nodes
    name, given = callable_name(graph, node.func), [node.args, *([node.kwargs] if node.kwargs >= 0 else ())]
    maker = nodes[node.func]
    if not name and isinstance(maker, Call):
        # Protocol 2 writes the keyword arguments of ``__new__`` as functools.partial(cls.__new__, cls, ...)().
        given += maker.states
    held = list(_within(graph, given, budget))
    if not name or name in _MAKERS:
        classes = (nodes[ref] for ref in held)
        name = next((mapped_name(item) for item in classes if isinstance(item, Global)), name or "a call")
    storages = [ref for ref in (*held, *_within(graph, node.states, budget)) if is_storage(ref)]
    return name, storages, [ref for ref in held if node.op == REDUCE and array_layout(graph, ref) is not None]


def _within(graph: Graph, refs: Iterable[Ref], budget: list[int]) -> Iterator[Ref]:
    """Yield the values in some arguments or states. Enter tuples, lists, dicts and sets, but not calls."""
    nodes = graph.nodes
    work, seen = deque(refs), set[Ref]()
    while work and len(seen) < _SEARCHED and budget[0] > 0:
        ref = work.popleft()
        budget[0] -= 1
        if ref in seen:
            continue
        seen.add(ref)
        yield ref
        if isinstance(nodes[ref], tuple | List | Dict | Set | FrozenSet):
            work.extend(children(nodes[ref])[:_SEARCHED])
