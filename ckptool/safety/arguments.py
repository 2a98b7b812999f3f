"""Check the arguments of torch's functions and of the classes on its list, to predict which calls fail.

``RULES`` has one row per function: how many arguments it takes, the kind of each (see ``_KINDS``), and whether they fit
together. Tested against torch 2.13 (``torch/_utils.py``, ``torch/_weights_only_unpickler.py``, the parsers of ``set_``
and ``empty``), with ``map_location="cpu"``, where no location tag is read. ``storages`` checks whether views fit in
their storages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..base.dtypes import TORCH_NAMES
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..checkpoint.objects import list_items, mapped_name
from ..checkpoint.tensors import Tensor, TensorReader
from ..pickles import opcodes as op
from ..pickles.nodes import ByteArray, Call, Dict, FrozenSet, Global, Graph, List, Node, Persistent, Ref, Set
from .torch_lists import qualified


class Refusal(NamedTuple):
    """The reason why torch fails at a call or key; ``certain`` is False if it may take what it never writes."""

    message: str
    certain: bool = True


#: Maximum nesting of tuples in a key; Python crashes at some ten thousand levels.
_DEEP: Final = 50

_DEVICES: Final = (
    "cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone"
)
_DEVICE: Final = regex(rf"(?:{_DEVICES})(:(?:0|[1-9]\d{{0,8}}))?")
DEVICE_TYPES: Final = frozenset(_DEVICES.split("|"))
LAYOUTS: Final = qualified("torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn jagged")
_FLOATS: Final = ("float", "bfloat", "complex", "bcomplex")
_QUANTIZED: Final = ("qint", "quint")


class CallChecker:
    """One pass over a graph. Names are cached by the reference of the function."""

    def __init__(self, graph: Graph, reader: TensorReader) -> None:
        self.graph, self.nodes, self.reader = graph, graph.nodes, reader
        self.names: dict[Ref, str] = {}
        self.tuples: dict[Ref, Refusal | None] = {}  # as keys; many keys may share a tuple

    def refused(self, names: frozenset[str]) -> dict[Ref, Refusal]:
        """Return the calls of functions in ``names`` (torch's list) and the containers at which torch fails."""
        nodes, refused = self.nodes, dict[Ref, Refusal | None]()
        for ref, node in self.graph.of_type(Call):
            name = self.name(node.func)
            if name == _V2 and node.op == op.REDUCE and self.is_usual(ref, node):
                continue
            if name == _DICTS[0] and node.filling is None and nodes[node.args] == ():
                continue
            refusal = self.call(ref, node, name) if name in names or name.startswith("torch._utils.") else None
            refused[ref] = refusal or (self.keys(node.pairs[::2]) if node.pairs else None)
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

    def is_dtype(self, ref: Ref) -> bool:
        node = self.nodes[ref]
        return type(node) is Global and node.module == "torch" and node.name in TORCH_NAMES

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
        return self.rule(name, args, self.reader.tensor(ref))

    def rule(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refusal | None:
        rule = RULES.get(name)
        if rule is None:
            if name.startswith(_OTHERS) or name == "torch._utils._rebuild_wrapper_subclass":
                return None  # their classes have their own rules
            if name.rpartition(".")[2].endswith("Storage") or name in _VALUES:
                return Refusal(f"{name} is called, which is not a function")
            return Refusal(f"{name} is called, which ckptool does not follow", False)
        certain = name.startswith(("torch._", "torch.nn."))
        if not rule.least <= len(args) <= len(rule.kinds):
            return Refusal(f"{name}: {len(args)} arguments", certain)
        for number, (ref, kind) in enumerate(zip(args, rule.kinds), 1):
            if (kind.endswith(" or None") and self.nodes[ref] is None) or not kind:
                continue
            if not _KINDS[kind.removesuffix(" or None")](self, ref):
                return Refusal(f"{name}: argument {number} is not a {kind}", certain)
        if rule.needs_tensor and tensor is None:
            return Refusal(f"{name}: an impossible tensor")
        fits = rule.fits is None or rule.fits(self, args, tensor)
        return None if fits else Refusal(f"{name}: arguments that do not fit together", certain)

    # -- Whether all arguments of a function fit together

    def dense(self, args: Sequence[Ref], tensor: Tensor) -> bool:
        return not tensor.dtype.startswith(_QUANTIZED)

    def tensor_v2(self, args: Sequence[Ref], tensor: Tensor) -> bool:
        return self.dense(args, tensor) and _takes_gradient(tensor.dtype, tensor.requires_grad)

    def tensor_v3(self, args: Sequence[Ref], tensor: Tensor) -> bool:
        changed = self.nodes[args[4]] is True  # in place, which a tensor that requires a gradient does not allow
        return not changed and self.dense(args, tensor)

    def parameter(self, args: Sequence[Ref], tensor: Tensor | None) -> bool:
        """Check Parameter(data, requires_grad), whose dtype is the dtype of its data."""
        data = self.reader.tensor(args[0]) if args else None
        requires_grad = self.nodes[args[1]] is True if len(args) > 1 else True
        return data is None or _takes_gradient(data.dtype, requires_grad)

    def from_type(self, args: Sequence[Ref], tensor: Tensor | None) -> bool:
        """Check the inner call of _rebuild_from_type_v2 and its class; a subclass is on no list."""
        inner, name = self.name(args[0]), _global_name(self.nodes[args[1]])
        if inner == _FROM_TYPE or tensor is None or self.rule(inner, list_items(self.nodes[args[2]]), tensor):
            return False
        if name in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return True
        listed = name in _VALUES or name.endswith("Storage") or "._rebuild" in name or name in RULES
        return bool(name) and not listed

    def quantized(self, args: Sequence[Ref], tensor: Tensor) -> bool:
        return tensor.dtype.startswith(_QUANTIZED) and self.nodes[args[5]] is False

    def layout(self, ref: Ref) -> str:
        node = self.nodes[ref]
        if not isinstance(node, Call) or self.name(node.func) != "torch.serialization._get_layout":
            return ""
        text = next((self.nodes[ref] for ref in list_items(self.nodes[node.args])), "")
        return text if type(text) is str else ""

    def ints(self, ref: Ref) -> tuple[int, ...] | None:
        """Return the numbers in a tuple, list or torch.Size; None for another node."""
        node = self.nodes[ref]
        if isinstance(node, Call) and self.name(node.func) == "torch.Size":
            args = list_items(self.nodes[node.args])
            node = self.nodes[args[0]] if args else ()
        values = [self.nodes[item] for item in list_items(node)]
        if not isinstance(node, tuple | List) or not all(type(value) is int for value in values):
            return None
        return tuple(values)  # type: ignore[arg-type]

    # -- Keys

    def keys(self, refs: Sequence[Ref]) -> Refusal | None:
        """Refuse containers as keys, and tuples that are nested too deep."""
        if _HASHED.issuperset([type(self.nodes[ref]) for ref in refs]):
            return None
        return next((refusal for ref in refs if (refusal := self.key(ref, 0)) is not None), None)

    def key(self, ref: Ref, depth: int) -> Refusal | None:
        node = self.nodes[ref]
        if type(node) is not tuple:
            filled = self.name(node.func) in _UNHASHABLE if isinstance(node, Call) else False
            unhashable = filled or isinstance(node, List | Dict | Set | ByteArray)
            return Refusal("a key that cannot be hashed") if unhashable else None
        if depth > _DEEP:
            return Refusal(f"a key of tuples nested more than {_DEEP} deep", False)
        if ref not in self.tuples:
            refusals = (self.key(part, depth + 1) for part in node)
            self.tuples[ref] = next((refusal for refusal in refusals if refusal is not None), None)
        return self.tuples[ref]


def _takes_gradient(dtype: str, requires_grad: bool) -> bool:
    return not requires_grad or dtype.startswith(_FLOATS)


def _global_name(node: Node) -> str:
    return mapped_name(node) if type(node) is Global else ""


_V2: Final = "torch._utils._rebuild_tensor_v2"
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_DICTS: Final = ("collections.OrderedDict", "collections.Counter")
_UNHASHABLE: Final = frozenset((*_DICTS, "builtins.set", "builtins.bytearray"))
_HASHED: Final = frozenset((str, int, bool, float, bytes, type(None), Global))
#: Prefixes of the names whose arguments are not checked: Python's own, and classes of torch.distributed.
_OTHERS: Final = ("torch.distributed.", "builtins.", "collections.", "_codecs.", "traceback.")
#: Names on the list that are neither functions nor classes.
_VALUES: Final = frozenset(f"torch.{name}" for name in TORCH_NAMES) | qualified(
    "torch",
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams",
)

_KINDS: Final[Mapping[str, Callable[[CallChecker, Ref], bool]]] = {
    "bool": lambda checker, ref: type(checker.nodes[ref]) is bool,
    "string": lambda checker, ref: type(checker.nodes[ref]) is str,
    "device index": lambda checker, ref: type(node := checker.nodes[ref]) is int and 0 <= node < 1 << 31,
    "dict": lambda checker, ref: isinstance(node := checker.nodes[ref], Dict | Call) or not node,
    "tuple": lambda checker, ref: isinstance(checker.nodes[ref], tuple | List),
    "storage": lambda checker, ref: type(checker.nodes[ref]) is Persistent,
    "tensor": lambda checker, ref: checker.reader.tensor(ref) is not None,
    "dtype": CallChecker.is_dtype,
    "size": lambda checker, ref: checker.ints(ref) is not None,
    "function": lambda checker, ref: type(checker.nodes[ref]) is Global,
    "layout": lambda checker, ref: checker.layout(ref) in LAYOUTS,
    "name of a layout": lambda checker, ref: type(node := checker.nodes[ref]) is str and node in LAYOUTS,
    "name of a device": lambda checker, ref: type(node := checker.nodes[ref]) is str and bool(_DEVICE.fullmatch(node)),
}


class _Rule(NamedTuple):
    """The ``kinds`` of the arguments ("" for any), the ``least`` number of them, and whether all ``fits`` together.

    ``needs_tensor`` says that the call must make a tensor that ckptool can read.
    """

    least: int
    kinds: tuple[str, ...]
    fits: Callable[..., bool] | None = None
    needs_tensor: bool = False


_VIEW: Final = ("storage", "", "size", "size")
_PARAMETER: Final = ("tensor or None", "bool")
_META: Final = ("dtype or None", "size", "size", "bool or None")
_V3: Final = ("bool or None", "", "dtype or None", "dict or None")
_MOVED: Final = ("tensor", "dtype", "", "bool")
RULES: Final[Mapping[str, _Rule]] = {
    "torch._utils._rebuild_tensor": _Rule(4, _VIEW, CallChecker.dense, True),
    _V2: _Rule(6, (*_VIEW, "bool", "", "dict or None"), CallChecker.tensor_v2, True),
    "torch._utils._rebuild_tensor_v3": _Rule(7, (*_VIEW, *_V3), CallChecker.tensor_v3, True),
    "torch._utils._rebuild_qtensor": _Rule(7, (*_VIEW, "tuple", "bool", ""), CallChecker.quantized, True),
    "torch._utils._rebuild_parameter": _Rule(3, (*_PARAMETER, ""), CallChecker.parameter),
    "torch._utils._rebuild_parameter_with_state": _Rule(4, (*_PARAMETER, "", ""), CallChecker.parameter),
    "torch.nn.parameter.Parameter": _Rule(0, _PARAMETER, CallChecker.parameter),
    "torch._utils._rebuild_sparse_tensor": _Rule(2, ("layout", "tuple")),
    "torch._utils._rebuild_nested_tensor": _Rule(4, ("tensor",) * 4),
    "torch._utils._rebuild_meta_tensor_no_storage": _Rule(4, _META),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Rule(4, _MOVED),
    _FROM_TYPE: _Rule(4, ("function", "", "tuple", ""), CallChecker.from_type),
    "torch.nested._internal.nested_tensor._rebuild_njt": _Rule(1, ("",), None, True),
    "torch.serialization._get_layout": _Rule(1, ("name of a layout",)),
    "torch.Size": _Rule(0, ("size",)),
    "torch.device": _Rule(1, ("name of a device", "device index or None")),
}
