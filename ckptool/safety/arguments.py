"""Check the arguments of torch's functions and of the classes on its list, to predict which calls fail.

``RULES`` has one row per function: how many arguments it takes, the kind of each (see ``_KINDS``), and a check of all
together. Tested against torch 2.13 (``torch/_utils.py``, ``torch/_weights_only_unpickler.py``, the parsers of ``set_``
and ``empty``), with ``map_location="cpu"``, where no location tag is read. ``storages`` checks whether views fit in
their storages. The checks of sparse and nested tensors are from ``aten/src/ATen/native/sparse/SparseTensor.cpp``,
``aten/src/ATen/native/TensorFactories.cpp`` and ``aten/src/ATen/NestedTensorImpl.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..base.dtypes import BY_NAME, is_complex
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import words
from ..checkpoint.objects import list_items, mapped_name, mapping
from ..checkpoint.tensors import Tensor, TensorReader, is_contiguous
from ..pickles import opcodes as op
from ..pickles.nodes import ByteArray, Call, Dict, FrozenSet, Global, Graph, List, Node, Persistent, Ref, Set
from .torch_lists import qualified


class Refusal(NamedTuple):
    """The reason why torch fails at a call or key; ``certain`` is False if this was not tested with torch."""

    message: str
    certain: bool = True


#: Maximum nesting of tuples in a key. Python hashes them recursively, and crashes at some ten thousand levels.
_DEEP: Final = 1000
_INT64: Final = 1 << 63

_DEVICES: Final = (
    "cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone"
)
_DEVICE: Final = regex(rf"(?:{_DEVICES})(:(?:0|[1-9]\d{{0,8}}))?")
DEVICE_TYPES: Final = frozenset(_DEVICES.split("|"))
LAYOUTS: Final = qualified("torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn jagged")
_CODECS: Final = frozenset(("latin1", "latin-1", "iso-8859-1", "utf-8", "utf8", "ascii"))
_FLOATS: Final = ("float", "bfloat", "complex", "bcomplex")
_QUANTIZED: Final = ("qint", "quint")
#: The classes on the list, which NEWOBJ can create.
_CLASSES: Final = words("""
    collections.OrderedDict collections.Counter torch.nn.parameter.Parameter torch.Size torch.device torch.Tensor
    builtins.bytearray builtins.set builtins.complex torch.distributed._mesh_layout._MeshLayout
    torch.distributed._mesh_layout._FlatLayout
""")


def refused_calls(graph: Graph, reader: TensorReader, names: frozenset[str]) -> dict[Ref, Refusal]:
    """Return the calls of functions in ``names`` (torch's list) and the containers at which torch fails, by
    reference.
    """
    return _CallChecker(graph, reader).refused(names)


class _CallChecker:
    """One pass over a graph. Names are cached by the reference of the function."""

    def __init__(self, graph: Graph, reader: TensorReader) -> None:
        self.graph, self.nodes, self.reader = graph, graph.nodes, reader
        self.names: dict[Ref, str] = {}
        self.depths: dict[Ref, int] = {}
        self.holds_bytes: dict[Ref, bool] = {}  # thousands of calls may copy one list

    def refused(self, names: frozenset[str]) -> dict[Ref, Refusal]:
        nodes, refused = self.nodes, dict[Ref, Refusal | None]()
        for ref, node in self.graph.of_type(Call):
            name = self.name(node.func)
            if name == _V2 and node.op == op.REDUCE and self.is_usual(ref, node):
                continue
            if name == _DICTS[0] and node.filling is None and nodes[node.args] == ():
                continue
            refusal = self.call(ref, node, name) if name in names or name.startswith("torch._utils.") else None
            refused[ref] = refusal or self.callee(node, name) or self.filling(node, name)
        for ref, cls in self.graph.of_type(Global):
            # Other globals are unknown: a class may accept it.
            if cls.filling is not None and self.name(ref) in names:
                refused[ref] = Refusal(f"{self.name(ref)} itself is changed, not an object made by it")
        keyed = [(ref, mapping.pairs[::2]) for ref, mapping in self.graph.of_type(Dict)]
        keyed += [(ref, node.items) for kind in (Set, FrozenSet) for ref, node in self.graph.of_type(kind)]
        refused.update((ref, self.keys(keys)) for ref, keys in keyed)
        return {ref: refusal for ref, refusal in sorted(refused.items()) if refusal is not None}

    def name(self, func: Ref) -> str:
        name = self.names.get(func)
        if name is None:
            name = _global_name(self.nodes[func])
            if name.startswith("torch.tensor."):
                name = "torch._tensor." + name.rpartition(".")[2]
            self.names[func] = name
        return name

    def called(self, ref: Ref) -> str:
        """Return the name of the called function; "" if the node is not a call."""
        node = self.nodes[ref]
        return self.name(node.func) if isinstance(node, Call) else ""

    def dtype(self, ref: Ref) -> str:
        """Return the name of a dtype; "" for other nodes."""
        node = self.nodes[ref]
        return node.name if type(node) is Global and node.module == "torch" and node.name in BY_NAME else ""

    def is_usual(self, ref: Ref, node: Call) -> bool:
        """Return whether this is an ordinary tensor, which needs no further check."""
        args = self.nodes[node.args]
        if type(args) is not tuple or len(args) != 6:
            return False
        tensor = self.reader.tensor(ref)
        if tensor is None or tensor.requires_grad:
            return False
        return self.nodes[args[4]] is False and not tensor.dtype.startswith(("q", "untyped", "unknown"))

    # -- Calls

    def call(self, ref: Ref, node: Call, name: str) -> Refusal | None:
        args = self.nodes[node.args]
        if type(args) is not tuple:
            return Refusal(f"{name}: its arguments are not a tuple")
        if node.op not in (op.REDUCE, op.NEWOBJ) or node.kwargs >= 0:
            return None  # the opcode itself is refused
        if node.op == op.NEWOBJ and name not in _CLASSES:
            return Refusal(f"{name} is not a class that can be made")
        if node.op == op.NEWOBJ and name in _UNHASHABLE:
            return None  # __new__ of these classes accepts any arguments
        return self.rule(name, args, self.reader.tensor(ref))

    def callee(self, node: Call, name: str) -> Refusal | None:
        tensor = self.reader.tensor(node.func) if not name else None
        if not name and (self.reader.storage(node.func) is not None or (tensor and tensor.kind != "unknown")):
            return Refusal("a tensor or storage is called")
        return None

    def filling(self, node: Call, name: str) -> Refusal | None:
        if name == _DICTS[0] and any(self.nodes[state] is None for state in node.states):
            return Refusal(f"{name}: a state that is None")
        if node.states and name in _STATELESS:
            return Refusal(f"{name}: a state, which it cannot have")
        return self.keys(node.pairs[::2]) if node.filling is not None and node.pairs else None

    def rule(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        rule = RULES.get(name)
        if rule is None:
            if name.startswith(_OTHERS) or name == "torch._utils._rebuild_wrapper_subclass":
                return None  # their classes have their own rules
            if name.rpartition(".")[2].endswith("Storage") or name in _VALUES:
                return Refusal(f"{name} is called, which is not a function")
            return Refusal(f"{name} is called, which ckptool does not follow", False)
        if not rule.least <= len(args) <= len(rule.kinds):
            return Refusal(f"{name}: {len(args)} arguments")
        for number, (ref, kind) in enumerate(zip(args, rule.kinds), 1):
            if kind and not _KINDS[kind](self, ref):
                return Refusal(f"{name}: argument {number} is not a {kind}")
        if rule.needs_tensor and tensor is None:
            return Refusal(f"{name}: an impossible tensor")
        refusal = rule.check(self, args, tensor) if rule.check is not None else None
        return refusal and Refusal(f"{name}: {refusal.message}", refusal.certain)

    # -- Tensors: checks of all arguments together

    def dense(self, args: Sequence[Ref], tensor: Tensor) -> Refusal | None:
        return _scale(tensor.dtype)

    def tensor_v2(self, args: Sequence[Ref], tensor: Tensor) -> Refusal | None:
        flawed = self.metadata(args[6:], tensor) or self.dense(args, tensor)
        return flawed or _gradient(tensor.dtype, tensor.requires_grad)

    def tensor_v3(self, args: Sequence[Ref], tensor: Tensor) -> Refusal | None:
        if self.nodes[args[4]] is True:
            return Refusal("a tensor that requires a gradient is changed in place")
        return self.metadata(args[7:], tensor) or self.dense(args, tensor)

    def metadata(self, args: Sequence[Ref], tensor: Tensor) -> Refusal | None:
        """Check the flags in a tensor's metadata, the first of ``args``."""
        pairs = self.attributes(args[0]) if args else []
        names = {self.nodes[key] for key, _ in pairs or ()}
        flags = (self.nodes[value] for _, value in pairs or ())
        numbers = all(flag is None or isinstance(flag, bool | int | float) for flag in flags)
        if pairs is None or not numbers or ("conj" in names and not is_complex(tensor.dtype)):
            return Refusal("metadata that torch does not take")
        return None

    def attributes(self, ref: Ref) -> Sequence[tuple[Ref, Ref]] | None:
        """Return the items of a dict with string keys, () for an empty value, None for a refused node."""
        node = self.nodes[ref]
        if node in (None, 0, "", b"", ()) or (isinstance(node, List | Set) and not node.items):
            return ()
        pairs = mapping(self.graph, ref) if isinstance(node, Dict) or self.called(ref) in _DICTS else None
        return pairs if pairs is not None and all(type(self.nodes[key]) is str for key, _ in pairs) else None

    def state(self, ref: Ref) -> Refusal | None:
        """Check a state that is a dict of attributes or a pair of such dicts (``_set_obj_state``)."""
        node = self.nodes[ref]
        parts = node if type(node) is tuple else (ref,)
        if (type(node) is tuple and len(node) != 2) or any(self.attributes(part) is None for part in parts):
            return Refusal("a state that is not a dict of attributes")
        return None

    def parameter(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        """Check Parameter(data, requires_grad), whose dtype is the dtype of its data."""
        data = self.reader.tensor(args[0]) if args else None
        requires_grad = self.nodes[args[1]] is True if len(args) > 1 else True
        refusal = _gradient(data.dtype, requires_grad) if data is not None else None
        return refusal or (self.state(args[3]) if len(args) > 3 else None)

    def from_type(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        """Check the inner call of _rebuild_from_type_v2, its class, and its state."""
        inner, name = self.name(args[0]), _global_name(self.nodes[args[1]])
        if inner == _FROM_TYPE:
            return Refusal("it is nested in itself", False)
        refusal = self.rule(inner, list_items(self.nodes[args[2]]), tensor)
        if refusal is not None:
            return refusal
        if tensor is None:
            return _NOT_A_TENSOR
        if name in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return self.state(args[3])
        # A subclass defines its own state, and is on no list.
        if not name or _is_listed_non_tensor(name):
            return Refusal(f"{name or 'something else'} in place of a class of tensors")
        return None

    def sparse(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        layout, data = self.layout(args[0]), list_items(self.nodes[args[1]])
        coordinates = layout == "torch.sparse_coo"
        if not coordinates and layout not in BLOCK_DIMENSIONS:
            return Refusal(f"the layout {layout}")
        if len(data) != 4 and not (coordinates and len(data) == 3):
            return Refusal(f"{len(data)} parts")
        tensors = [self.reader.tensor(ref) for ref in data[: 2 if coordinates else 3]]
        parts = [part for part in tensors if part is not None]
        shape = self.ints(data[len(tensors)])
        if len(parts) < len(tensors):
            return _NOT_A_TENSOR
        if shape is None or min(shape, default=0) < 0 or (not coordinates and len(shape) < 2):
            return Refusal("a size that torch does not take")
        if not coordinates:
            return _refusal(compressed_problem(layout, parts, shape))
        if len(data) == 4 and type(self.nodes[data[3]]) is not bool and self.nodes[data[3]] is not None:
            return Refusal("is_coalesced is not a bool")
        return _refusal(coordinate_problem(parts, shape))

    def nested(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        parts = [part for ref in args if (part := self.reader.tensor(ref)) is not None]
        return _refusal(nested_problem(parts))

    def quantized(self, args: Sequence[Ref], tensor: Tensor) -> Refusal | None:
        nodes, parts = self.nodes, list_items(self.nodes[args[4]])
        scheme = _global_name(nodes[parts[0]]) if parts else ""
        if not tensor.dtype.startswith(_QUANTIZED):
            return Refusal(f"a quantized tensor of {tensor.dtype}")
        if nodes[args[5]] is not False:
            return _gradient(tensor.dtype, True)
        if scheme == "torch.per_tensor_affine" and len(parts) == 3:
            valid = type(nodes[parts[1]]) in (int, float, bool) and _is_int64(nodes[parts[2]])
            return None if valid else Refusal("a scale or zero point that is not a number")
        if scheme not in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams") or len(parts) != 4:
            return Refusal(f"quantized by {scheme or 'no scheme'} with {len(parts)} values")
        axis, scales, zeros = nodes[parts[3]], self.reader.tensor(parts[1]), self.reader.tensor(parts[2])
        if type(axis) is not int or not 0 <= axis < len(tensor.shape):
            return Refusal("an axis that the tensor does not have")
        if scales is not None and not scales.dtype.startswith(("float", "bfloat")):
            return Refusal(f"scales of {scales.dtype}")
        if scales is None or zeros is None:
            return Refusal("scales that are not a tensor", False)
        if scales.numel != tensor.shape[axis] or zeros.numel != tensor.shape[axis]:
            return Refusal("not one scale and zero point for each channel")
        if len(scales.shape) != 1 or len(zeros.shape) != 1:
            return Refusal(f"scales of {len(scales.shape)} dimensions")
        return None

    def meta(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        shape, strides, dtype = self.ints(args[1]), self.ints(args[2]), self.dtype(args[0])
        if shape is None or strides is None or len(shape) != len(strides) or min(shape, default=0) < 0:
            return Refusal("a shape and strides that do not go together")
        return _scale(dtype) or _gradient(dtype or "float32", self.nodes[args[3]] is True)

    def moved(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        return _gradient(self.dtype(args[1]), self.nodes[args[3]] is True)

    def layout(self, ref: Ref) -> str:
        node = self.nodes[ref]
        if not isinstance(node, Call) or self.name(node.func) != "torch.serialization._get_layout":
            return ""
        args = list_items(self.nodes[node.args])
        text = self.nodes[args[0]] if args else ""
        return text if type(text) is str else ""

    def ints(self, ref: Ref) -> tuple[int, ...] | None:
        """Return the numbers in a tuple, list or torch.Size; None for another node."""
        node = self.nodes[ref]
        if isinstance(node, Call) and self.name(node.func) == "torch.Size":
            args = list_items(self.nodes[node.args])
            node = self.nodes[args[0]] if args else ()
        values = [self.nodes[item] for item in list_items(node)]
        if not isinstance(node, tuple | List) or not all(map(_is_int64, values)):
            return None
        return tuple(values)  # type: ignore[arg-type]

    # -- Python's own classes and functions

    def device(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        first = self.nodes[args[0]]
        device = type(first) is str and _DEVICE.fullmatch(first) is not None
        if len(args) == 1:
            known = device or self.called(args[0]) == "torch.device"
            return None if known else Refusal(repr(first) if type(first) is str else "something other than a string")
        index = self.nodes[args[1]]
        fits = type(index) is int and 0 <= index < 1 << 31 and type(first) is str and first in DEVICE_TYPES
        return None if fits or (device and index is None) else Refusal("a type or index that it does not take")

    def size(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        node: Node = self.nodes[args[0]] if args else ()
        if isinstance(node, Call) and self.called(args[0]) == "builtins.set" and not node.items:
            args = list_items(self.nodes[node.args])
            node = self.nodes[args[0]] if args else ()
        if isinstance(node, bytes | ByteArray) or node == "" or (args and self.called(args[0]) in _NUMBERS):
            return None
        pairs = mapping(self.graph, args[0]) if args else None
        if pairs is None and not isinstance(node, tuple | List | Set | FrozenSet):
            return Refusal("something other than a list", not isinstance(node, Call))
        items: Sequence[Ref] = [key for key, _ in pairs or ()]
        if pairs is None:
            items = node.items if isinstance(node, Set | FrozenSet) else list_items(node)
        fits = all(isinstance(self.nodes[item], int) for item in items)
        return None if fits else Refusal("something other than integers")

    def encoded(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        text, codec = self.nodes[args[0]], self.nodes[args[1]] if len(args) > 1 else "utf-8"
        assert type(text) is str
        if type(codec) is not str or codec.lower() not in _CODECS or len(args) > 2:
            return Refusal("a codec that ckptool does not know", False)
        try:
            text.encode(codec)
        except UnicodeEncodeError:
            return Refusal(f"the string cannot be encoded in {codec}")
        return None

    def mutable_bytes(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        node = self.nodes[args[0]] if args else b""
        if len(args) == 2 and type(node) is str:
            return self.encoded(args, tensor)
        if len(args) > 1:
            return Refusal("something that it does not take", node is None)
        if isinstance(node, bytes | ByteArray) or self.called(args[0]) in ("_codecs.encode", "builtins.bytearray"):
            return None
        pairs = mapping(self.graph, args[0])
        if isinstance(node, tuple | List) or pairs is not None:
            if args[0] not in self.holds_bytes:
                items = list_items(node) if pairs is None else [key for key, _ in pairs]
                values = (self.nodes[item] for item in items)
                self.holds_bytes[args[0]] = all(isinstance(value, int) and 0 <= value < 256 for value in values)
            return None if self.holds_bytes[args[0]] else Refusal("something other than bytes")
        is_size = type(node) is int and 0 <= node < 1 << 20
        return None if is_size else Refusal("something that it does not take", node is None)

    def members(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        node = self.nodes[args[0]] if args else ()
        if isinstance(node, tuple | List | Set | FrozenSet):
            return self.keys(node if isinstance(node, tuple) else node.items)
        if isinstance(node, str | bytes | Dict) or self.called(args[0]) in _ITERABLE:
            return None
        return Refusal("something that has no members", not isinstance(node, Call))

    def number(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        values = [self.nodes[ref] for ref in args]
        if all(isinstance(value, int | float) for value in values):
            large = any(isinstance(value, int) and value.bit_length() > 1000 for value in values)
            return Refusal("a number that is too large") if large else None
        return Refusal("something other than a number", type(values[0]) is not str)

    def ordered_dict(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        """Check that the keys can be hashed; other arguments are unknown."""
        node = self.nodes[args[0]] if args else ()
        if isinstance(node, Dict):
            return None  # its keys are checked where it is created
        if not isinstance(node, tuple | List):
            known = self.called(args[0]) in _DICTS
            return None if known else Refusal("something other than a mapping", not isinstance(node, Call))
        pairs = [self.nodes[pair] for pair in list_items(node)]
        for pair in pairs:
            if len(list_items(pair)) != 2 and not (isinstance(pair, str | bytes) and len(pair) == 2):
                if isinstance(pair, Call | Dict | Set | FrozenSet):
                    return Refusal("something that ckptool does not follow", False)
                return Refusal("something other than pairs")
        return self.keys([list_items(pair)[0] for pair in pairs if list_items(pair)])

    def counter(self, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        node = self.nodes[args[0]] if args else None
        if isinstance(node, tuple | List):
            return self.keys(list_items(node))
        return self.ordered_dict(args, tensor) if node is not None else None

    # -- Keys

    def keys(self, refs: Sequence[Ref]) -> Refusal | None:
        """Refuse containers as keys, and tuples that are nested too deep to be hashed."""
        nodes = self.nodes
        if _HASHED.issuperset([type(nodes[ref]) for ref in refs]):
            return None
        for ref in refs:
            depth = self.depth(ref)
            if depth < 0:
                return Refusal("a key that cannot be hashed")
            if depth > _DEEP:
                return Refusal(f"a key of tuples nested {depth:,} deep, which crashes Python")
        return None

    def depth(self, ref: Ref) -> int:
        """Return how deep a tuple is nested: 0 for another key, -1 for an unhashable one. Each tuple is
        examined once.
        """
        nodes, depths = self.nodes, self.depths
        if type(nodes[ref]) is not tuple:
            unhashable = isinstance(nodes[ref], List | Dict | Set | ByteArray) or self.called(ref) in _UNHASHABLE
            return -1 if unhashable else 0
        work = [ref]
        while work:
            parts = nodes[work[-1]]
            assert type(parts) is tuple
            if work[-1] not in depths:
                missing = [part for part in parts if type(nodes[part]) is tuple and part not in depths]
                if missing:
                    work += missing
                    continue
                inner = [self.depth(part) for part in parts]
                depths[work[-1]] = -1 if -1 in inner else 1 + max(inner, default=0)
            work.pop()
        return depths[ref]


def _refusal(message: str) -> Refusal | None:
    return Refusal(message) if message else None


def _scale(dtype: str) -> Refusal | None:
    """Refuse a quantized dtype for a tensor without a scale."""
    return Refusal(f"a tensor of {dtype} without its scale") if dtype.startswith(_QUANTIZED) else None


def _gradient(dtype: str, requires_grad: bool) -> Refusal | None:
    """Refuse a gradient for a dtype that is not floating point."""
    allowed = not requires_grad or dtype.startswith(_FLOATS)
    return None if allowed else Refusal(f"a tensor of {dtype} that requires a gradient")


def _global_name(node: Node) -> str:
    """Return the name of a global; "" for another node."""
    return mapped_name(node) if type(node) is Global else ""


def _is_int64(value: Node) -> bool:
    return type(value) is int and -_INT64 <= value < _INT64


def _is_listed_non_tensor(name: str) -> bool:
    return name in _CLASSES | _VALUES or name.endswith("Storage") or "._rebuild" in name or name in RULES


_NOT_A_TENSOR: Final = Refusal("something that is not a tensor")
_V2: Final = "torch._utils._rebuild_tensor_v2"
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_DICTS: Final = ("collections.OrderedDict", "collections.Counter")
#: Functions on torch's list whose results have members that can all be hashed.
_ITERABLE: Final = frozenset((*_DICTS, "builtins.set", "builtins.bytearray", "_codecs.encode", "torch.Size"))
#: Functions among these whose members are numbers.
_NUMBERS: Final = frozenset(("builtins.bytearray", "_codecs.encode", "torch.Size"))
#: Classes without a __dict__ that BUILD could fill.
_STATELESS: Final = frozenset(("torch.Size", "torch.device", "builtins.set", "builtins.bytearray", "builtins.complex"))
_UNHASHABLE: Final = frozenset((*_DICTS, "builtins.set", "builtins.bytearray"))
_HASHED: Final = frozenset((str, int, bool, float, bytes, type(None), Global))
#: Prefixes of the remaining names on the list: classes of torch.distributed, and the exceptions of torch 2.14.
_OTHERS: Final = ("torch.distributed.", "builtins.", "traceback.")
#: Names on the list that are neither functions nor classes.
_VALUES: Final = frozenset(f"torch.{name}" for name in BY_NAME) | qualified(
    "torch",
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams",
)

_KINDS: Final[Mapping[str, Callable[[_CallChecker, Ref], bool]]] = {
    "bool": lambda checker, ref: type(checker.nodes[ref]) is bool,
    "string": lambda checker, ref: type(checker.nodes[ref]) is str,
    "tuple": lambda checker, ref: isinstance(checker.nodes[ref], tuple | List),
    "storage": lambda checker, ref: type(checker.nodes[ref]) is Persistent,
    "tensor": lambda checker, ref: checker.reader.tensor(ref) is not None,
    "dtype": lambda checker, ref: bool(checker.dtype(ref)),
    "size": lambda checker, ref: checker.ints(ref) is not None,
    "function": lambda checker, ref: type(checker.nodes[ref]) is Global,
    "layout": lambda checker, ref: checker.layout(ref) in LAYOUTS,
    "name of a layout": lambda checker, ref: type(node := checker.nodes[ref]) is str and node in LAYOUTS,
    "bool or None": lambda checker, ref: checker.nodes[ref] is None or type(checker.nodes[ref]) is bool,
    "tensor or None": lambda checker, ref: checker.nodes[ref] is None or checker.reader.tensor(ref) is not None,
    "dtype or None": lambda checker, ref: checker.nodes[ref] is None or bool(checker.dtype(ref)),
}


class _Rule(NamedTuple):
    """The ``kinds`` of the arguments ("" for any), the ``least`` number of them, and a ``check`` of all together.

    ``needs_tensor`` says that the call must make a tensor that ckptool can read.
    """

    least: int
    kinds: tuple[str, ...]
    check: Callable[..., Refusal | None] | None = None
    needs_tensor: bool = False


_VIEW: Final = ("storage", "", "size", "size")
_PARAMETER: Final = ("tensor or None", "bool")
_META: Final = ("dtype or None", "size", "size", "bool or None")
_V3: Final = ("bool or None", "", "dtype or None", "")
_MOVED: Final = ("tensor", "dtype", "", "bool")
RULES: Final[Mapping[str, _Rule]] = {
    "torch._utils._rebuild_tensor": _Rule(4, _VIEW, _CallChecker.dense, True),
    _V2: _Rule(6, (*_VIEW, "bool", "", ""), _CallChecker.tensor_v2, True),
    "torch._utils._rebuild_tensor_v3": _Rule(7, (*_VIEW, *_V3), _CallChecker.tensor_v3, True),
    "torch._utils._rebuild_qtensor": _Rule(7, (*_VIEW, "tuple", "bool", ""), _CallChecker.quantized, True),
    "torch._utils._rebuild_parameter": _Rule(3, (*_PARAMETER, ""), _CallChecker.parameter),
    "torch._utils._rebuild_parameter_with_state": _Rule(4, (*_PARAMETER, "", ""), _CallChecker.parameter),
    "torch.nn.parameter.Parameter": _Rule(0, _PARAMETER, _CallChecker.parameter),
    "torch._utils._rebuild_sparse_tensor": _Rule(2, ("layout", "tuple"), _CallChecker.sparse),
    "torch._utils._rebuild_nested_tensor": _Rule(4, ("tensor",) * 4, _CallChecker.nested),
    "torch._utils._rebuild_meta_tensor_no_storage": _Rule(4, _META, _CallChecker.meta),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Rule(4, _MOVED, _CallChecker.moved),
    _FROM_TYPE: _Rule(4, ("function", "", "tuple", ""), _CallChecker.from_type),
    "torch.nested._internal.nested_tensor._rebuild_njt": _Rule(1, ("",), None, True),
    "torch.serialization._get_layout": _Rule(1, ("name of a layout",)),
    "torch.Size": _Rule(0, ("",), _CallChecker.size),
    "torch.device": _Rule(1, ("", ""), _CallChecker.device),
    "_codecs.encode": _Rule(1, ("string", "", ""), _CallChecker.encoded),
    "builtins.bytearray": _Rule(0, ("", "", ""), _CallChecker.mutable_bytes),
    "builtins.set": _Rule(0, ("",), _CallChecker.members),
    "builtins.complex": _Rule(0, ("", ""), _CallChecker.number),
    "collections.OrderedDict": _Rule(0, ("",), _CallChecker.ordered_dict),
    "collections.Counter": _Rule(0, ("",), _CallChecker.counter),
}


#: By layout, the number of dimensions in the values that belong to a block.
BLOCK_DIMENSIONS: Final = {"torch.sparse_csr": 0, "torch.sparse_csc": 0, "torch.sparse_bsr": 2, "torch.sparse_bsc": 2}


def compressed_problem(layout: str, parts: Sequence[Tensor], shape: Sequence[int]) -> str:
    """Check the arguments of ``_sparse_compressed_tensor_unsafe``: two tensors of indices, values, and a shape."""
    rows, columns, values = parts
    for indices in (rows, columns):
        if indices.dtype not in ("int32", "int64"):
            return f"indices of {indices.dtype}"
    if rows.dtype != columns.dtype:
        return "indices of two dtypes"
    dimensions, block = len(rows.shape), BLOCK_DIMENSIONS[layout]
    if not dimensions or len(columns.shape) != dimensions or len(values.shape) < dimensions + block:
        return "indices and values of different numbers of dimensions"
    return f"a size of {len(shape)} dimensions" if len(shape) != len(values.shape) + 1 - block else ""


def coordinate_problem(parts: Sequence[Tensor], shape: Sequence[int]) -> str:
    """Check the arguments of ``_sparse_coo_tensor_unsafe``: indices, values, and a shape."""
    indices, values = parts
    if len(indices.shape) != 2 or indices.dtype != "int64":
        return f"indices of {indices.dtype} with {len(indices.shape)} dimensions"
    if not values.shape or values.shape[0] != indices.shape[1]:
        return "different numbers of values and indices"
    if indices.shape[0] + len(values.shape) - 1 != len(shape):
        return f"a size of {len(shape)} dimensions"
    return "values of another shape than its size" if values.shape[1:] != tuple(shape[indices.shape[0] :]) else ""


def nested_problem(parts: Sequence[Tensor]) -> str:
    """Check the arguments of ``_nested_view_from_buffer``."""
    if any(part.location == "meta" for part in parts):
        return "parts on meta, where torch makes none"
    buffer, sizes, strides, offsets = parts
    if len(buffer.shape) != 1 or any(part.dtype != "int64" for part in (sizes, strides, offsets)):
        return "tables that are not int64"
    if not all(map(is_contiguous, parts)):
        return "tables that are not contiguous"
    if len(sizes.shape) != 2 or sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        return "tables of different shapes"
    return ""
