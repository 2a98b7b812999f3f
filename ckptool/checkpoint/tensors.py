"""Torch's conventions over a pickle graph: persistent ids become storages, ``_rebuild_*`` calls tensors.

Sources: ``torch/_utils.py`` (the ``_rebuild`` functions), ``torch/_tensor.py`` (``Tensor.__reduce_ex__``),
``torch/serialization.py`` (``persistent_id`` and ``persistent_load`` in ``_save`` and ``_load``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ..base.dtypes import BY_NAME, Dtype, storage_dtype
from ..base.limits import LIMITS
from ..pickles.nodes import Call, Global, Graph, Node, Persistent, Ref
from .objects import callable_name, device_text, held_values, mapped_name, mapping

#: Values in the persistent id of a storage in a zip (torch/serialization.py, ``_load.persistent_load``); those of the
#: legacy format have a view behind them.
ID_PARTS: Final = 5


class Storage(NamedTuple):
    """A storage as its persistent ids describe it; where they disagree the first one counts, as in torch.

    ``key`` names its bytes in the container; ``cls`` the storage class; ``numel`` counts elements of
    ``dtype`` (bytes for UntypedStorage); ``nbytes`` its size in bytes.
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

    ``kind``: dense, sparse_coo, sparse_csr, sparse_csc, sparse_bsr, sparse_bsc, quantized, nested, jagged,
    meta, wrapper (a subclass that holds other tensors) or opaque.
    ``shape`` and ``stride`` in elements; ``offset`` in elements into the storage; ``stride`` is () where
    there is none. ``storage`` is the key of its storage, "" where it has none of its own.
    ``cls`` is the subclass or "Parameter", "" for a plain tensor. ``parts`` are the tensors inside.
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


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last one that a view touches, 0 for an empty one."""
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
    """Tell whether the elements lie in row-major order without gaps; those of an empty tensor do."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride)):
        if size != 1 and stride != step:
            return 0 in tensor.shape
        step *= size
    return True


#: Torch counts in int64. Larger numbers are hostile, and Python itself refuses to print very large ones.
_TOO_LARGE = 1 << 62
_INT64 = 1 << 63

#: Tensors within a tensor that are looked at: a nested one has four, a sharded one a few.
_PARTS = 64
#: Wrappers within wrappers; torch never writes them deeper.
_DEPTH = 8
_LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


#: dtype, shape, strides, offset, bytes
_Layout: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], int, int]


def described(graph: Graph, ref: Ref) -> tuple[str, int]:
    """The class and the elements of a storage as this very mention has them, which need not be what torch takes."""
    node = graph.nodes[ref]
    pid = graph.nodes[node.pid] if isinstance(node, Persistent) else ()
    cls, numel = (graph.nodes[pid[1]], graph.nodes[pid[4]]) if type(pid) is tuple and len(pid) > 4 else (None, None)
    return (cls.name, numel) if type(cls) is Global and type(numel) is int else ("", -1)


class TensorReader:
    """Reads tensors and storages off a graph, each reference once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._tensors: dict[Ref, Tensor | None] = {}
        self._uses: dict[Ref, Storage] = {}
        self._keys: dict[str, type] = {}
        self._functions: dict[Ref, str] = {}
        self._shapes: dict[tuple[Ref, ...], tuple[int, ...] | None] = {}
        self._layouts: dict[tuple[object, ...], _Layout | tuple[()]] = {}
        #: Every storage mentioned, by key, in the order of the pickle.
        self.storages: dict[str, Storage] = {}
        #: Persistent ids of other kinds: the legacy format's ('module', class, file, source).
        self.modules: list[Ref] = []
        self.disagreeing: set[str] = set()  # keys whose persistent ids disagree
        self._depth = 0
        #: The views of legacy storages by their keys: of two with one key torch takes the first one.
        self._views: dict[tuple[type, Node], tuple[Ref, ...]] = {}
        for ref, node in enumerate(graph.nodes):
            if type(node) is Persistent:
                self._read_storage(ref, node)

    def storage(self, ref: Ref) -> Storage | None:
        """The storage that a persistent reference stands for, or None."""
        return self._uses.get(ref)

    def uses(self) -> list[tuple[Ref, Storage]]:
        """Every mention of a storage: the reference of its Persistent, in the order of the pickle."""
        return list(self._uses.items())

    def tensor(self, ref: Ref) -> Tensor | None:
        """The tensor that a reference stands for, or None when it is something else."""
        if type(self.graph.nodes[ref]) is not Call:
            return None
        if ref not in self._tensors:
            # Until it is read it is none: a tensor that contains itself is no tensor.
            self._tensors[ref] = None
            self._depth += 1
            if self._depth <= _DEPTH:
                self._tensors[ref] = self._read(ref)
            self._depth -= 1
        return self._tensors[ref]

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The tensor and the tensors inside it, some dozens at most."""
        found = [tensor]
        seen: set[Ref] = set()
        for outer in found:
            for ref in outer.parts:
                part = self.tensor(ref) if ref not in seen and len(found) < _PARTS else None
                seen.add(ref)
                if part is not None:
                    found.append(part)
        return found

    # -- storages -------------------------------------------------------------------------------

    def _read_storage(self, ref: Ref, node: Persistent) -> None:
        nodes = self.graph.nodes
        pid = nodes[node.pid]
        if type(pid) is not tuple or not pid:
            return
        kind = nodes[pid[0]]
        if kind == "module" or kind == b"module":
            self.modules.append(ref)
            return
        if (kind != "storage" and kind != b"storage") or not ID_PARTS <= len(pid) <= ID_PARTS + 1:
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
            return  # to torch these are two storages, with the same bytes
        known = self.storages.get(name)
        if known is None:
            known = self.storages[name] = Storage(name, cls.name, storage_dtype(cls.name), text, numel)
        elif known.location != text or known.cls != cls.name or known.numel != numel:
            # A float8 tensor and its bytes mention one storage in two ways.
            bare = {known.cls, cls.name} == {"UntypedStorage", "ByteStorage"} and known.numel == numel
            if known.numel and known.location != "meta" and not (bare and known.location == text):
                self.disagreeing.add(name)
            else:
                # Torch does not cache empty storages: each mention stands for itself.
                known = Storage(name, cls.name, storage_dtype(cls.name), text, numel)
        view = nodes[pid[5]] if len(pid) == 6 else None
        if view is not None and known.cls != cls.name:
            return  # to torch it has the dtype of the first mention of the view, at an offset in elements of that
        self._uses[ref] = known
        if type(view) is tuple and len(view) == 3:
            word = nodes[view[0]]
            if type(word) is str or type(word) is int:
                self._views.setdefault((type(word), word), view)

    def view(self, ref: Ref) -> tuple[int, int | None]:
        """Where the view of a storage begins that a legacy id stands for, and its size, both in elements.

        (0, None) for a whole storage, -1 for a view that is none.
        """
        node = self.graph.nodes[ref]
        pid = self.graph.nodes[node.pid] if isinstance(node, Persistent) else ()
        view = self.graph.nodes[pid[5]] if type(pid) is tuple and len(pid) == 6 else None
        if type(view) is not tuple or len(view) != 3:
            return 0, None
        word = self.graph.nodes[view[0]]
        view = self._views.get((type(word), word), view) if type(word) is str or type(word) is int else view
        offset, size = self.graph.nodes[view[1]], self.graph.nodes[view[2]]
        if type(offset) is not int or type(size) is not int or offset < 0 or max(offset, size) >= _TOO_LARGE:
            return -1, None
        return offset, size

    # -- tensors --------------------------------------------------------------------------------

    def _read(self, ref: Ref) -> Tensor | None:
        node = self.graph.nodes[ref]
        if not isinstance(node, Call):
            return None
        name = self._functions.get(node.func)
        if name is None:
            func = self.graph.nodes[node.func]
            name = self._functions[node.func] = mapped_name(func) if type(func) is Global else ""
        args = self.graph.nodes[node.args]
        return self._rebuilt(name, args, node.states) if type(args) is tuple else None

    def _rebuilt(self, name: str, args: tuple[Ref, ...], states: Sequence[Ref] = ()) -> Tensor | None:
        if name == "torch._utils._rebuild_tensor_v2" and len(args) >= 4:
            return self._dense(args, self._flag(args, 4), None)
        module, _, function = name.rpartition(".")
        if module not in ("torch._utils", "torch._tensor", "torch.tensor"):
            return self._other(name, args, states)
        count = len(args)
        if function in ("_rebuild_tensor_v2", "_rebuild_tensor") and count >= 4:  # torch.tensor, old files
            return self._dense(args, self._flag(args, 4), None)
        if function == "_rebuild_tensor_v3" and count >= 7:
            return self._dense(args, self._flag(args, 4), self._dtype(args[6]))
        if (function == "_rebuild_parameter" and count >= 2) or (
            function == "_rebuild_parameter_with_state" and count >= 4
        ):
            inner = self.tensor(args[0])
            if inner is None:
                return None
            return inner._replace(cls=inner.cls or "Parameter", requires_grad=self._flag(args, 1))
        if function in ("_rebuild_from_type_v2", "_rebuild_from_type") and count >= 3:
            return self._from_type(args)
        if function == "_rebuild_qtensor" and count >= 6:
            made = self._dense(args, self._flag(args, 5), None)
            parts = self.graph.nodes[args[4]]
            inner_refs = tuple(r for r in parts if self.tensor(r)) if type(parts) is tuple else ()
            return made and made._replace(kind="quantized", parts=inner_refs)
        if function == "_rebuild_sparse_tensor" and count >= 2:
            return self._sparse(args)
        if function == "_rebuild_nested_tensor" and count >= 4:
            return self._combined("nested", args, args[0], (), "")
        if function == "_rebuild_meta_tensor_no_storage" and count >= 4:
            shape, stride = self._shape(args[1]), self._ints(args[2])
            if shape is None or stride is None:
                return None
            return Tensor("meta", self._dtype(args[0]), shape, stride, 0, "", "meta", self._flag(args, 3))
        if function.startswith("_rebuild_device_tensor_from_") or function == "_rebuild_xla_tensor":
            return self._device_tensor(args)
        if function == "_rebuild_wrapper_subclass" and count >= 8:
            return self._wrapper(args, ())
        return None

    def _other(self, name: str, args: tuple[Ref, ...], states: Sequence[Ref]) -> Tensor | None:
        if name in ("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable") and args:
            # torch 0.1-0.3: Parameter(data[, requires_grad]), built with (requires_grad, ...).
            inner = self.tensor(args[0])
            grad = self._flag(args, 1) if len(args) > 1 else True
            state = self.graph.nodes[states[0]] if states else ()
            grad = self._flag(state, 0) if type(state) is tuple and len(state) == 3 else grad
            return inner and inner._replace(cls=name.rpartition(".")[2], requires_grad=grad)
        if name == "torch.nested._internal.nested_tensor._rebuild_njt" and args:
            held = mapping(self.graph, args[0]) or []
            parts = tuple(value for _, value in held if self.tensor(value))
            values = {key: value for ref, value in held if isinstance(key := self.graph.nodes[ref], str)}
            return self._combined("jagged", parts, values.get("_values", parts[0] if parts else -1), (), "")
        return None

    def _dense(self, args: tuple[Ref, ...], grad: bool, dtype: str | None) -> Tensor | None:
        storage = self._uses.get(args[0])
        if storage is None:
            return None
        nodes = self.graph.nodes
        # Numbers are one node each, so tensors of one layout have equal references.
        key = (args[1], nodes[args[2]], nodes[args[3]], dtype, storage.dtype.name)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(args, dtype, storage.dtype)
        if not layout:
            return None
        name, shape, stride, offset, size = layout
        if self._views:
            base, most = self.view(args[0])
            if base < 0 or (most is not None and offset + extent(shape, stride) > most):
                return None
            offset += base
        kind = "meta" if storage.location == "meta" else "dense"
        return Tensor(kind, name, shape, stride, offset, storage.key, storage.location, grad, "", (), size)

    def _layout(self, args: tuple[Ref, ...], dtype: str | None, stored: Dtype) -> _Layout | tuple[()]:
        """The dtype, shape, strides and offset of a tensor, and the bytes of its elements; () where it is none."""
        offset, shape, stride = self.graph.nodes[args[1]], self._shape(args[2]), self._ints(args[3])
        if type(offset) is not int or abs(offset) >= _TOO_LARGE or shape is None or stride is None:
            return ()
        dtype = dtype or ("uint8" if stored.name == "untyped" else None)  # torch takes it for that, too
        kind = BY_NAME.get(dtype, stored) if dtype else stored
        return dtype or kind.name, shape, stride, offset, -(-prod(shape) // kind.packed) * kind.itemsize

    def _from_type(self, args: tuple[Ref, ...]) -> Tensor | None:
        func, inner_args = self.graph.nodes[args[0]], self.graph.nodes[args[2]]
        if type(func) is not Global or type(inner_args) is not tuple:
            return None
        if func.name.startswith("_rebuild_from_type"):
            return None
        cls = self.graph.nodes[args[1]]
        name = mapped_name(cls) if type(cls) is Global else ""
        if mapped_name(func) == "torch._utils._rebuild_wrapper_subclass" and len(inner_args) >= 8:
            made = self._wrapper(inner_args, self._tensors_in(args[3]) if len(args) > 3 else ())
        else:
            made = self._rebuilt(mapped_name(func), inner_args)
        if made is None or name in ("torch.Tensor", "torch._tensor.Tensor"):
            return made
        short = "Parameter" if name == "torch.nn.parameter.Parameter" else name
        return made._replace(cls=short)

    def _tensors_in(self, ref: Ref) -> tuple[Ref, ...]:
        """The tensors in the state of a wrapper."""
        return tuple(value for value in held_values(self.graph, ref) if self.tensor(value))

    def _wrapper(self, args: tuple[Ref, ...], parts: tuple[Ref, ...]) -> Tensor | None:
        shape, stride, offset = self._shape(args[2]), self._ints(args[3]), self.graph.nodes[args[4]]
        if shape is None or stride is None or type(offset) is not int or abs(offset) >= _TOO_LARGE:
            return None
        cls = self.graph.nodes[args[0]]
        tensors = [self.tensor(ref) for ref in parts]
        return Tensor(
            "wrapper",
            self._dtype(args[1]),
            shape,
            stride,
            offset,
            "",
            device_text(self.graph, args[6]) or "",
            self._flag(args, 7),
            mapped_name(cls) if type(cls) is Global else "",
            parts,
            sum(tensor.own_bytes for tensor in tensors if tensor),
        )

    def _sparse(self, args: tuple[Ref, ...]) -> Tensor | None:
        layout, data = self.graph.nodes[args[0]], self.graph.nodes[args[1]]
        name = ""
        if isinstance(layout, Global):
            name = layout.name
        elif isinstance(layout, Call):
            inner = self.graph.nodes[layout.args]
            text = self.graph.nodes[inner[0]] if type(inner) is tuple and inner else ""
            name = text.rpartition(".")[2] if type(text) is str else ""
        if name not in _LAYOUTS or type(data) is not tuple:
            return None
        members = 2 if name == "sparse_coo" else 3
        if len(data) <= members:
            return None
        shape = self._shape(data[members])
        if shape is None:
            return None
        return self._combined(name, data[:members], data[members - 1], shape, "")

    def _combined(
        self, kind: str, refs: tuple[Ref, ...], values: Ref, shape: tuple[int, ...], cls: str
    ) -> Tensor | None:
        """A tensor made of tensors; dtype, location and gradient are those of its values."""
        main = self.tensor(values) if values >= 0 else None
        if main is None:
            return None
        parts = tuple(ref for ref in refs if self.tensor(ref))
        size = sum(part.own_bytes for part in map(self.tensor, parts) if part)
        grad, location = main.requires_grad, main.location
        return Tensor(kind, main.dtype, shape or main.shape, (), 0, "", location, grad, cls, parts, size)

    def _device_tensor(self, args: tuple[Ref, ...]) -> Tensor | None:
        """A tensor of a backend without storages: (cpu tensor or array, dtype, device, requires_grad)."""
        if len(args) < 4:
            return None
        device = self.graph.nodes[args[2]]
        if type(device) is not str:
            return None
        inner = self.tensor(args[0])
        if inner is None:
            return Tensor("opaque", self._dtype(args[1]), (), (), 0, "", device, self._flag(args, 3))
        return inner._replace(location=device, requires_grad=self._flag(args, 3), parts=(args[0],))

    def _ints(self, ref: Ref) -> tuple[int, ...] | None:
        nodes = self.graph.nodes
        refs = nodes[ref]
        if type(refs) is not tuple:
            return self._size(ref)
        # Numbers are one node each, so tensors of one shape have equal tuples of references.
        known = self._shapes.get(refs)
        if known is None:
            values = tuple([nodes[item] for item in refs])
            fit = len(values) <= LIMITS.dimensions and all(type(v) is int and abs(v) < _INT64 for v in values)
            known = self._shapes[refs] = values if fit else None  # type: ignore[assignment]
        return known

    def _shape(self, ref: Ref) -> tuple[int, ...] | None:
        """A shape whose number of elements torch can count."""
        shape = self._ints(ref)
        return None if shape is None or abs(prod(shape)) >= _TOO_LARGE else shape

    def _size(self, ref: Ref) -> tuple[int, ...] | None:
        """The shape in torch.Size((...,))."""
        nodes, node = self.graph.nodes, self.graph.nodes[ref]
        if not isinstance(node, Call) or callable_name(self.graph, node.func) != "torch.Size":
            return None
        inner = nodes[node.args]
        return self._ints(inner[0]) if type(inner) is tuple and inner and type(nodes[inner[0]]) is tuple else None

    def _flag(self, args: tuple[Ref, ...], index: int) -> bool:
        return len(args) > index and self.graph.nodes[args[index]] is True

    def _dtype(self, ref: Ref) -> str:
        node = self.graph.nodes[ref]
        if type(node) is not Global:
            return "unknown"
        known = BY_NAME.get(node.name)
        return known.name if known else node.name
