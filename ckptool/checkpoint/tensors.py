"""Tensors and storages in a pickle graph: persistent ids are storages, nested ``_rebuild_*`` calls are tensors.

Sources: ``torch/_utils.py`` (the ``_rebuild`` functions), ``torch/_tensor.py`` (``Tensor.__reduce_ex__``),
``torch/serialization.py`` (``persistent_id`` and ``persistent_load`` in ``_save`` and ``_load``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME, Dtype, storage_dtype
from ..base.errors import MalformedError
from ..base.limits import LIMITS
from ..base.records import NamedTuple, new_tuple
from ..pickles.nodes import Call, Global, Graph, Node, Persistent, Ref
from .backends import (
    ARRAYS,
    BUFFERS,
    CONTAINERS,
    FROM_STORAGE,
    FROM_VALUES,
    array_layout,
    backend_arguments,
    unknown_call,
)
from .objects import by_name, callable_name, device_text, list_items, mapped_name, mapping, state_values

#: The number of elements in a storage's persistent id in a zip (torch/serialization.py, ``_load.persistent_load``).
#: Legacy ids also have a view.
ID_PARTS: Final = 5
#: Classes of tensors that are spread over ranks.
SHARDED_CLASSES: Final = ("DTensor", "ShardedTensor")


class Storage(NamedTuple):
    """A storage as its persistent ids describe it; if they disagree, the first one counts, as in torch.

    ``key`` names its bytes in the container. ``cls`` is the storage class. ``numel`` counts elements of ``dtype``
    (bytes for UntypedStorage). ``nbytes`` is the size in bytes.
    """

    key: str
    cls: str
    dtype: Dtype
    location: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Tensor(NamedTuple):
    """A tensor as the pickle describes it.

    ``kind`` is dense, sparse_coo, sparse_csr, sparse_csc, sparse_bsr, sparse_bsc, quantized, nested, jagged, meta,
    wrapper (a subclass that holds other tensors), array (made from a NumPy array) or unknown (made from storages or
    arrays by a function or class that ckptool does not know).

    ``shape``, ``stride`` and ``offset`` are in elements; ``offset`` counts from the start of the storage. ``stride`` is
    () for a tensor without strides. ``storage`` is the key of its storage, or "" if it has none of its own. ``cls`` is
    the subclass or "Parameter", "" for a plain tensor, and the function or class for an unknown kind. ``parts`` are the
    tensors inside.

    >>> tensor = ckptool.open("model.pth")["conv1.weight"].tensor
    >>> tensor.stride, tensor.offset, tensor.storage
    ((3, 1, 1, 1), 0, '0')
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str
    location: str
    requires_grad: bool
    cls: str = ""
    parts: tuple[Ref, ...] = ()
    own_bytes: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


#: Storage key, dtype, offset, shape, strides, and torch's lazy bits (negated, conjugated); a plain tuple, for speed.
ViewId: TypeAlias = tuple[str, str, int, tuple[int, ...], tuple[int, ...], tuple[bool, bool]]


def view_id(tensor: Tensor, lazy_bits: tuple[bool, bool] = (False, False)) -> ViewId:
    """Return the identity of a tensor as a view: equal ids mean the same elements in the same bytes."""
    return tensor.storage, tensor.dtype, tensor.offset, tensor.shape, tensor.stride, lazy_bits


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of storage elements from the first to the last element of a view; 0 for an empty view."""
    if 0 in shape:
        return 0
    return sum((size - 1) * step for size, step in zip(shape, stride)) + 1


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor in row-major order without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(tensor: Tensor) -> bool:
    """Return whether the elements lie in row-major order without gaps; an empty tensor is contiguous."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride)):
        if size != 1 and stride != step:
            return 0 in tensor.shape
        step *= size
    return True


def storage_mention(graph: Graph, ref: Ref) -> tuple[str, int]:
    """Return the class and number of elements in one mention of a storage, or ("", -1). Torch may use another."""
    node = graph.nodes[ref]
    pid = graph.nodes[node.pid] if isinstance(node, Persistent) else ()
    cls, numel = (graph.nodes[pid[1]], graph.nodes[pid[4]]) if type(pid) is tuple and len(pid) > 4 else (None, None)
    return (cls.name, numel) if type(cls) is Global and type(numel) is int else ("", -1)


#: Classes that torch 0.1 to 0.3 pickled as Parameter(data[, requires_grad]), built with (requires_grad, ...).
OLD_PARAMETERS: Final = frozenset(("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable"))
#: The function that makes a dense tensor; nearly all calls use it.
USUAL: Final = "torch._utils._rebuild_tensor_v2"
#: Functions that take (function, class, arguments, state); the call of the inner function is not a separate node.
_FROM_TYPE: Final = frozenset(("_rebuild_from_type_v2", "_rebuild_from_type"))
#: Functions that take (tensor, requires_grad, hooks[, state]), and the number of their arguments.
_PARAMETER_ARGS: Final = {"_rebuild_parameter": 2, "_rebuild_parameter_with_state": 4}


class RebuildCall(NamedTuple):
    """One of the nested calls that make a tensor.

    ``ref`` is the Call; ``name`` is the dotted name of its function. ``function`` and ``args_ref`` are the references
    of the function and its arguments. The node ``holder`` holds these two: it is the Call itself, or the arguments of
    the surrounding ``_rebuild_from_type_v2``.
    """

    ref: Ref
    holder: Ref
    name: str
    function: Ref
    args_ref: Ref
    args: tuple[Ref, ...]

    @property
    def short_name(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def is_parameter(self) -> bool:
        """Whether the call makes a Parameter from its first argument."""
        return self.short_name.startswith("_rebuild_parameter") or self.name in OLD_PARAMETERS

    @property
    def state(self) -> Ref:
        """The argument with attributes to set on the tensor, or -1."""
        stateful = self.short_name in _FROM_TYPE or self.short_name == "_rebuild_parameter_with_state"
        return self.args[3] if stateful and len(self.args) > 3 else -1


def typed_call(graph: Graph, args: tuple[Ref, ...]) -> tuple[str, Ref, Ref, tuple[Ref, ...]] | None:
    """Return the last four fields of a RebuildCall for the arguments of ``_rebuild_from_type_v2``; None if invalid."""
    function, inner = (graph.nodes[args[0]], graph.nodes[args[2]]) if len(args) > 2 else (None, None)
    if type(function) is not Global or type(inner) is not tuple or function.name in _FROM_TYPE:
        return None
    return mapped_name(function), args[0], args[2], inner


def rebuild_calls(graph: Graph, ref: Ref) -> Iterator[RebuildCall]:
    """Yield the calls that make a tensor, from the outermost wrapper to the call that makes its data."""
    for _ in range(LIMITS.tensor_depth):
        node = graph.nodes[ref]
        args = graph.nodes[node.args] if isinstance(node, Call) else None
        if not isinstance(node, Call) or type(args) is not tuple:
            return
        call = RebuildCall(ref, ref, callable_name(graph, node.func), node.func, node.args, args)
        yield call
        inner = typed_call(graph, args) if call.short_name in _FROM_TYPE else None
        if inner is not None:
            call = RebuildCall(ref, node.args, *inner)
            yield call
        if not call.args or not (call.is_parameter or backend_arguments(call.name) == FROM_VALUES):
            return
        ref = call.args[0]


#: Torch counts in int64. Larger numbers are hostile, and Python itself refuses to print very large ones.
_TOO_LARGE = 1 << 62
_INT64 = 1 << 63
#: The number of tensors within one tensor that are free. Further ones count against a limit per node of the graph,
#: because a hostile file can put the same thousand tensors into each of a thousand others.
_FREE_PARTS: Final = 64
_LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")

#: dtype, shape, strides, offset, bytes
_Layout: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], int, int]


class TensorReader:
    """Reads the tensors and storages of a graph, each reference once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._tensors: dict[Ref, Tensor | None] = {}
        self._more_parts = _FREE_PARTS * len(graph.nodes)
        self._uses: dict[Ref, Storage] = {}
        self._keys: dict[str, type] = {}
        self._functions: dict[Ref, str] = {}
        self._shapes: dict[tuple[Ref, ...], tuple[int, ...] | None] = {}
        self._layouts: dict[tuple[object, ...], _Layout | tuple[()]] = {}
        #: Every storage mentioned, by key, in the order of the pickle.
        self.storages: dict[str, Storage] = {}
        #: Persistent ids of the legacy format for modules: ('module', class, file, source).
        self.modules: list[Ref] = []
        self.disagreeing: set[str] = set()  # keys whose persistent ids disagree
        self._depth = 0
        #: How many nodes may still be searched for storages in the arguments of unknown calls.
        self._search = [4 * len(graph.nodes) + LIMITS.places]
        #: The views of legacy storages by view key; if two have the same key, torch uses the first.
        self._views: dict[tuple[type, Node], tuple[Ref, ...]] = {}
        nodes, last = graph.nodes, Storage("", "", storage_dtype(""), "", 0)
        usual: tuple[Ref, ...] = ()
        for ref, node in graph.of_type(Persistent):
            pid = nodes[node.pid]
            # Nearly every mention is of a new storage, of the same class as the one before.
            if type(pid) is tuple and len(pid) == ID_PARTS and pid[:2] == usual:
                key, place, numel = nodes[pid[2]], nodes[pid[3]], nodes[pid[4]]
                fits = type(numel) is int and 0 <= numel < _TOO_LARGE
                if type(key) is str and key not in self._keys and type(place) is str and fits:
                    self._keys[key] = str
                    self._uses[ref] = self.storages[key] = new_tuple(Storage, (key, last.cls, last.dtype, place, numel))
                    continue
            self._read_storage(ref, node)
            if ref in self._uses and type(pid) is tuple and len(pid) == ID_PARTS:
                last = self._uses[ref]
                usual = pid[:2] if last.cls == storage_mention(graph, ref)[0] else ()

    @cached_property
    def has_lazy_bits(self) -> bool:
        """Whether the names of torch's lazy bits occur anywhere in the graph; few files have them."""
        return "neg" in self.graph.nodes or "conj" in self.graph.nodes

    def storage(self, ref: Ref) -> Storage | None:
        """Return the storage of a Persistent; None for another node."""
        return self._uses.get(ref)

    def uses(self) -> list[tuple[Ref, Storage]]:
        """Return every mention of a storage as (reference of its Persistent, storage), in the order of the pickle."""
        return list(self._uses.items())

    def is_usual(self, call: Call) -> bool:
        """Return whether a call whose tensor was read is to ``_rebuild_tensor_v2``, which makes nearly every tensor."""
        return self._functions.get(call.func) == USUAL

    def tensor(self, ref: Ref) -> Tensor | None:
        """Return the tensor at a reference; None for another node."""
        tensors = self._tensors
        if ref in tensors:
            return tensors[ref]
        nodes = self.graph.nodes
        node = nodes[ref]
        if type(node) is not Call:
            return None
        name, args = self._functions.get(node.func), nodes[node.args]
        if name is None:
            name = self._functions[node.func] = callable_name(self.graph, node.func)
        if name == USUAL and type(args) is tuple and len(args) > 4 and self._depth < LIMITS.tensor_depth:
            plain = self._dense(args, nodes[args[4]] is True, None)  # nearly every tensor, and no other is inside
            if plain is not None:
                tensors[ref] = plain
                return plain
        tensors[ref] = None  # while the tensor is being read: a tensor that contains itself is invalid
        self._depth += 1
        if self._depth <= LIMITS.tensor_depth:
            tensor = self._rebuilt(name, args, node.states) if type(args) is tuple else None
            if tensor is None and self._owns_bytes and not name.startswith(CONTAINERS):
                tensor = self._unknown(node)
            tensors[ref] = tensor
        self._depth -= 1
        return tensors[ref]

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor and all tensors inside it; raise MalformedError if a hostile file repeats too many."""
        tensors = [tensor]
        seen: set[Ref] = set()
        for outer in tensors:
            for ref in outer.parts:
                part = self.tensor(ref) if ref not in seen else None
                seen.add(ref)
                if part is not None:
                    tensors.append(part)
            if len(seen) > _FREE_PARTS + self._more_parts:
                raise MalformedError("its tensors are made of too many tensors")
        self._more_parts -= max(len(seen) - _FREE_PARTS, 0)
        return tensors

    def _read_storage(self, ref: Ref, node: Persistent) -> None:
        nodes = self.graph.nodes
        pid = nodes[node.pid]
        if type(pid) is not tuple or not pid:
            return
        tag = nodes[pid[0]]
        if tag == "module" or tag == b"module":
            self.modules.append(ref)
            return
        if (tag != "storage" and tag != b"storage") or not ID_PARTS <= len(pid) <= ID_PARTS + 1:
            return
        cls, key, location, numel = nodes[pid[1]], nodes[pid[2]], nodes[pid[3]], nodes[pid[4]]
        if type(cls) is not Global or type(numel) is not int or not 0 <= numel < _TOO_LARGE:
            return
        if type(key) is not str and (type(key) is not int or abs(key) >= _TOO_LARGE):
            return
        text = location.decode("utf-8", "surrogateescape") if type(location) is bytes else location
        if type(text) is not str:
            return
        name = str(key)
        if self._keys.setdefault(name, type(key)) is not type(key):
            return  # for torch, these are two storages with the same bytes
        known = self.storages.get(name)
        if known is None:
            known = self.storages[name] = Storage(name, cls.name, storage_dtype(cls.name), text, numel)
        elif known.location != text or known.cls != cls.name or known.numel != numel:
            # A float8 tensor and a view of its bytes mention one storage under two classes.
            same_bytes = {known.cls, cls.name} == {"UntypedStorage", "ByteStorage"} and known.numel == numel
            if known.numel and known.location != "meta" and not (same_bytes and known.location == text):
                self.disagreeing.add(name)
            else:
                # Torch does not cache empty storages, so each mention counts for itself.
                known = Storage(name, cls.name, storage_dtype(cls.name), text, numel)
        view = nodes[pid[5]] if len(pid) == 6 else None
        if view is not None and known.cls != cls.name:
            # torch gives the view the dtype of the first mention, and counts the offset in elements of that dtype
            return
        self._uses[ref] = known
        if type(view) is tuple and len(view) == 3:
            view_key = nodes[view[0]]
            if type(view_key) is str or type(view_key) is int:
                self._views.setdefault((type(view_key), view_key), view)

    def view(self, ref: Ref) -> tuple[int, int | None]:
        """Return offset and size, in elements, of a legacy id's view; (0, None) without one, (-1, None) if invalid."""
        nodes = self.graph.nodes
        node = nodes[ref]
        pid = nodes[node.pid] if isinstance(node, Persistent) else ()
        view = nodes[pid[5]] if type(pid) is tuple and len(pid) == 6 else None
        if type(view) is not tuple or len(view) != 3:
            return 0, None
        view_key = nodes[view[0]]
        if type(view_key) is str or type(view_key) is int:
            view = self._views.get((type(view_key), view_key), view)
        offset, size = nodes[view[1]], nodes[view[2]]
        if type(offset) is not int or type(size) is not int or offset < 0 or max(offset, size) >= _TOO_LARGE:
            return -1, None
        return offset, size

    def _rebuilt(self, name: str, args: tuple[Ref, ...], states: Sequence[Ref] = ()) -> Tensor | None:
        module, _, function = name.rpartition(".")
        count = len(args)
        own = module in ("torch._utils", "torch._tensor", "torch.tensor")
        if own and function in _PARAMETER_ARGS and count >= _PARAMETER_ARGS[function]:
            inner = self.tensor(args[0])
            return inner and inner._replace(cls=inner.cls or "Parameter", requires_grad=self._flag(args, 1))
        backend = backend_arguments(name)
        if backend == FROM_VALUES:
            return self._device_tensor(args)
        usual = own and function in ("_rebuild_tensor_v2", "_rebuild_tensor")  # torch.tensor, old files
        if (usual or backend == FROM_STORAGE) and count >= 4:
            return self._dense(args, self._flag(args, 4), None)
        if not own:
            return self._other(name, args, states) if args else None
        if function == "_rebuild_tensor_v3" and count >= 7:
            return self._dense(args, self._flag(args, 4), self._dtype(args[6]))
        if function in _FROM_TYPE and count >= 3:
            return self._from_type(args)
        if function == "_rebuild_qtensor" and count >= 6:
            dense = self._dense(args, self._flag(args, 5), None)
            quantizer = self.graph.nodes[args[4]]
            parts = tuple(filter(self.tensor, quantizer)) if type(quantizer) is tuple else ()
            return dense and dense._replace(kind="quantized", parts=parts)
        if function == "_rebuild_sparse_tensor" and count >= 2:
            return self._sparse(args)
        if function == "_rebuild_nested_tensor" and count >= 4:
            return self._combined("nested", args, args[0])
        if function == "_rebuild_meta_tensor_no_storage" and count >= 4:
            shape, stride = self._shape(args[1]), self._ints(args[2])
            if shape is None or stride is None:
                return None
            return Tensor("meta", self._dtype(args[0]), shape, stride, 0, "", "meta", self._flag(args, 3))
        if function == "_rebuild_wrapper_subclass" and count >= 8:
            return self._wrapper(args, ())
        return None

    def _other(self, name: str, args: tuple[Ref, ...], states: Sequence[Ref]) -> Tensor | None:
        if name in OLD_PARAMETERS:
            inner = self.tensor(args[0])
            grad = self._flag(args, 1) if len(args) > 1 else True
            state = self.graph.nodes[states[0]] if states else ()
            grad = self._flag(state, 0) if type(state) is tuple and len(state) == 3 else grad
            return inner and inner._replace(cls=name.rpartition(".")[2], requires_grad=grad)
        if name == "torch.nested._internal.nested_tensor._rebuild_njt":
            items = mapping(self.graph, args[0]) or []
            parts = tuple(value for _, value in items if self.tensor(value))
            values = by_name(self.graph, items).get("_values", parts[0] if parts else -1)
            return self._combined("jagged", parts, values)
        return None

    def _dense(self, args: tuple[Ref, ...], grad: bool, dtype: str | None) -> Tensor | None:
        storage = self._uses.get(args[0])
        if storage is None:
            return None
        nodes = self.graph.nodes
        # Equal numbers are one node, so tensors with one layout have equal references.
        key = (args[1], nodes[args[2]], nodes[args[3]], dtype, storage.dtype.name)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(args, dtype, storage.dtype)
        if not layout:
            return None
        name, shape, stride, offset, size = layout
        if self._views:
            begin, numel = self.view(args[0])
            if begin < 0 or (numel is not None and offset + extent(shape, stride) > numel):
                return None
            offset += begin
        kind = "meta" if storage.location == "meta" else "dense"
        return new_tuple(Tensor, (kind, name, shape, stride, offset, storage.key, storage.location, grad, "", (), size))

    def _layout(self, args: tuple[Ref, ...], dtype: str | None, stored: Dtype) -> _Layout | tuple[()]:
        """Return dtype, shape, strides, offset and bytes of the elements; () if the arguments are invalid."""
        offset, shape, stride = self.graph.nodes[args[1]], self._shape(args[2]), self._ints(args[3])
        if type(offset) is not int or abs(offset) >= _TOO_LARGE or shape is None or stride is None:
            return ()
        dtype = dtype or ("uint8" if stored.name == "untyped" else None)  # as torch does
        known = BY_NAME.get(dtype, stored) if dtype else stored
        return dtype or known.name, shape, stride, offset, -(-prod(shape) // known.packed) * known.itemsize

    def _from_type(self, args: tuple[Ref, ...]) -> Tensor | None:
        call = typed_call(self.graph, args)
        if call is None:
            return None
        name, inner_args = call[0], call[3]
        if name == "torch._utils._rebuild_wrapper_subclass" and len(inner_args) >= 8:
            values = state_values(self.graph, args[3]) if len(args) > 3 else ()
            tensor = self._wrapper(inner_args, tuple(filter(self.tensor, values)))
        else:
            tensor = self._rebuilt(name, inner_args)
        cls = callable_name(self.graph, args[1])
        if tensor is None or cls in ("torch.Tensor", "torch._tensor.Tensor"):
            return tensor
        return tensor._replace(cls="Parameter" if cls == "torch.nn.parameter.Parameter" else cls)

    def _wrapper(self, args: tuple[Ref, ...], parts: tuple[Ref, ...]) -> Tensor | None:
        shape, stride, offset = self._shape(args[2]), self._ints(args[3]), self.graph.nodes[args[4]]
        if shape is None or stride is None or type(offset) is not int or abs(offset) >= _TOO_LARGE:
            return None
        dtype, device = self._dtype(args[1]), device_text(self.graph, args[6]) or ""
        cls = callable_name(self.graph, args[0])
        size = sum(part.own_bytes for part in map(self.tensor, parts) if part)
        return Tensor("wrapper", dtype, shape, stride, offset, "", device, self._flag(args, 7), cls, parts, size)

    def _sparse(self, args: tuple[Ref, ...]) -> Tensor | None:
        layout, data = self.graph.nodes[args[0]], self.graph.nodes[args[1]]
        name = layout.name if isinstance(layout, Global) else ""
        if isinstance(layout, Call):
            inner = list_items(self.graph.nodes[layout.args])
            text = self.graph.nodes[inner[0]] if inner else ""
            name = text.rpartition(".")[2] if type(text) is str else ""
        members = 2 if name == "sparse_coo" else 3
        if name not in _LAYOUTS or type(data) is not tuple or len(data) <= members:
            return None
        shape = self._shape(data[members])
        if shape is None:
            return None
        return self._combined(name, data[:members], data[members - 1], shape)

    def _combined(self, kind: str, refs: tuple[Ref, ...], values: Ref, shape: tuple[int, ...] = ()) -> Tensor | None:
        """Return a tensor made of tensors, which is like the part ``values``; None for another object."""
        main = self.tensor(values) if values >= 0 else None
        if main is None:
            return None
        parts = tuple(ref for ref in refs if self.tensor(ref))
        size = sum(part.own_bytes for part in map(self.tensor, parts) if part)
        grad, location = main.requires_grad, main.location
        return Tensor(kind, main.dtype, shape or main.shape, (), 0, "", location, grad, "", parts, size)

    def _device_tensor(self, args: tuple[Ref, ...]) -> Tensor | None:
        """Return a tensor of a backend without storages, given the arguments of FROM_VALUES."""
        device = self.graph.nodes[args[2]] if len(args) >= 4 else None
        if type(device) is not str:
            return None
        inner, grad = self.tensor(args[0]), self._flag(args, 3)
        if inner is None:
            shape, size = array_layout(self.graph, args[0]) or ((), 0)
            return Tensor("array", self._dtype(args[1]), shape, (), 0, "", device, grad, own_bytes=size)
        return inner._replace(location=device, requires_grad=grad, parts=(args[0],))

    @cached_property
    def _owns_bytes(self) -> bool:
        """Whether there is a storage or a NumPy array anywhere in the graph."""
        makers = (mapped_name(node) for _, node in self.graph.of_type(Global))
        return bool(self._uses) or any(name in (*ARRAYS, *BUFFERS) for name in makers)

    def _unknown(self, node: Call) -> Tensor | None:
        """Return a tensor of unknown kind, or None: a call of an unknown function that holds storages or arrays."""
        name, held, arrays = unknown_call(self.graph, node, self._uses.__contains__, self._search)
        if name.startswith(CONTAINERS):
            return None
        direct = [(ref, self.tensor(ref)) for ref in list_items(self.graph.nodes[node.args])]
        calls = {ref: tensor for ref, tensor in direct if tensor is not None and tensor.kind == "unknown"}
        if not (held or arrays or calls):
            return None
        inner = list(calls.values())
        storages = {storage.key: storage for storage in map(self._uses.__getitem__, held)}
        layouts = (array_layout(self.graph, ref) for ref in arrays)
        size = sum(storage.nbytes for storage in storages.values()) + sum(tensor.own_bytes for tensor in inner)
        size += sum(layout.nbytes for layout in layouts if layout)
        first = next(((storage.dtype.name, storage.location) for storage in storages.values()), None)
        dtype, location = first or next(((part.dtype, part.location) for part in inner), ("unknown", "cpu"))
        return Tensor("unknown", dtype, (), (), 0, "", location, False, name, tuple(calls), size)

    def _ints(self, ref: Ref) -> tuple[int, ...] | None:
        """Return the integers in a tuple or ``torch.Size``; None for another node."""
        nodes = self.graph.nodes
        refs = nodes[ref]
        if type(refs) is Call and callable_name(self.graph, refs.func) == "torch.Size":
            inner = list_items(nodes[refs.args])
            refs = nodes[inner[0]] if inner else None
        if type(refs) is not tuple:
            return None
        # Equal numbers are one node, so tensors with one shape have equal tuples of references.
        known = self._shapes.get(refs)
        if known is None:
            values = tuple([nodes[item] for item in refs])
            fit = len(values) <= LIMITS.dimensions and all(type(v) is int and abs(v) < _INT64 for v in values)
            known = self._shapes[refs] = values if fit else None  # type: ignore[assignment]
        return known

    def _shape(self, ref: Ref) -> tuple[int, ...] | None:
        """Return a shape, or None if it is invalid or has more elements than torch can count."""
        shape = self._ints(ref)
        return None if shape is None or abs(prod(shape)) >= _TOO_LARGE else shape

    def _flag(self, args: tuple[Ref, ...], index: int) -> bool:
        return len(args) > index and self.graph.nodes[args[index]] is True

    def _dtype(self, ref: Ref) -> str:
        node = self.graph.nodes[ref]
        if type(node) is not Global:
            return "unknown"
        known = BY_NAME.get(node.name)
        return known.name if known else node.name


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor or ShardedTensor."""
    module, _, name = tensor.cls.rpartition(".")
    return tensor.kind == "wrapper" and module.startswith("torch.distributed.") and name in SHARDED_CLASSES
