"""The arguments that torch's functions and the classes on its list take: what a call of them fails over.

One row of ``_RULES`` for each: how many arguments, and what each must be, in the words of ``_KINDS``; then what they
must be together. Tried against torch 2.13 (``torch/_utils.py``, ``torch/_weights_only_unpickler.py``, the parsers of
``set_`` and ``empty``), with ``map_location="cpu"``, where no location tag is looked at. The geometry of views is
looked at elsewhere (``storages``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ..dtypes import BY_NAME
from ..objects import elements, mapped_name, mapping
from ..pickles import opcodes as op
from ..pickles.nodes import ByteArray, Call, Dict, FrozenSet, Global, Graph, List, Persistent, Ref, Set
from ..tensors import Tensor, TensorReader
from . import parts as parts_of

__all__ = ["Refused", "refused_calls"]


class Refused(NamedTuple):
    """Why torch fails at a call, or at a key; ``sure`` is False where it was not tried."""

    why: str
    sure: bool = True


#: Tuples in a key: Python hashes them by recursion, and crashes at some ten thousand levels.
_DEEP: Final = 1000
_INT64: Final = 1 << 63

_DEVICES: Final = (
    "cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone"
)
_DEVICE: Final = re.compile(rf"(?:{_DEVICES})(:(?:0|[1-9]\d{{0,8}}))?")
_DEVICE_TYPES: Final = frozenset(_DEVICES.split("|"))
_LAYOUTS: Final = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
)
_CODECS: Final = frozenset(("latin1", "latin-1", "iso-8859-1", "utf-8", "utf8", "ascii"))
_FLOATS: Final = ("float", "bfloat", "complex")
#: The classes among what is on the list: NEWOBJ makes those.
_CLASSES: Final = frozenset(
    (
        *("collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter", "torch.Size"),
        *("torch.device", "builtins.bytearray", "builtins.set", "builtins.complex", "torch.Tensor"),
        *("torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout"),
    )
)


def refused_calls(graph: Graph, reader: TensorReader, names: frozenset[str]) -> dict[Ref, Refused]:
    """Return the calls of ``names`` (torch's list) and the containers that torch fails at, by reference."""
    return _Calls(graph, reader).refused(names)


class _Calls:
    """One pass over a graph; names are cached by the reference of the function."""

    def __init__(self, graph: Graph, reader: TensorReader) -> None:
        self.graph, self.nodes, self.reader = graph, graph.nodes, reader
        self.names: dict[Ref, str] = {}
        self.depths: dict[Ref, int] = {}
        self.bytes_like: dict[Ref, bool] = {}  # thousands of calls may copy one list

    def refused(self, names: frozenset[str]) -> dict[Ref, Refused]:
        nodes, found = self.nodes, dict[Ref, Refused]()
        for ref, node in enumerate(nodes):
            if type(node) is Call:
                name = self.name(node.func)
                if name == _V2 and node.op == op.REDUCE and self.is_usual(ref, node):
                    continue
                if name == _DICTS[0] and node.filling is None and nodes[node.args] == ():
                    continue
                what = self.call(ref, node, name) if name in names or name.startswith("torch._utils.") else None
                if not name and (self.reader.storage(node.func) or self.reader.tensor(node.func)) is not None:
                    what = Refused("a tensor or storage is called")
                if what is None and name == _DICTS[0] and any(nodes[state] is None for state in node.states):
                    what = Refused(f"{name}: a state that is None")
                if what is None and node.states and name in _BARE:
                    what = Refused(f"{name}: a state, which it cannot have")
                if what is None and node.filling is not None and node.pairs:
                    what = self.keys(node.pairs[::2])
                if what is not None:
                    found[ref] = what
            elif type(node) is Global:
                # Of other globals nothing is known: a class may take it.
                if node.filling is not None and self.name(ref) in names:
                    found[ref] = Refused(f"{self.name(ref)} itself is changed, and nothing that is made of it")
            elif type(node) is Dict or type(node) is Set or type(node) is FrozenSet:
                what = self.keys(node.pairs[::2] if isinstance(node, Dict) else node.items)
                if what is not None:
                    found[ref] = what
        return found

    # -- nodes ------------------------------------------------------------------------------------

    def name(self, func: Ref) -> str:
        name = self.names.get(func)
        if name is None:
            node = self.nodes[func]
            name = self.names[func] = mapped_name(node) if type(node) is Global else ""
            if name.startswith("torch.tensor."):
                name = self.names[func] = "torch._tensor." + name.rpartition(".")[2]
        return name

    def called(self, ref: Ref) -> str:
        """Return the name of the callee, "" for anything but a call."""
        node = self.nodes[ref]
        return self.name(node.func) if isinstance(node, Call) else ""

    def dtype(self, ref: Ref) -> str:
        """Return the name of a dtype, "" for anything else."""
        node = self.nodes[ref]
        return node.name if type(node) is Global and node.module == "torch" and node.name in BY_NAME else ""

    def is_usual(self, ref: Ref, node: Call) -> bool:
        """Is it a tensor as all the others are? Then nothing more need be asked."""
        args = self.nodes[node.args]
        if type(args) is not tuple or len(args) != 6:
            return False
        tensor = self.reader.tensor(ref)
        if tensor is None or tensor.requires_grad:
            return False
        return self.nodes[args[4]] is False and not tensor.dtype.startswith(("q", "untyped", "unknown"))

    # -- calls ------------------------------------------------------------------------------------

    def call(self, ref: Ref, node: Call, name: str) -> Refused | None:
        args = self.nodes[node.args]
        if type(args) is not tuple:
            return Refused(f"{name} is called with arguments that are not a tuple")
        if node.op not in (op.REDUCE, op.NEWOBJ) or node.kwargs >= 0:
            return None  # an opcode that is refused as such
        if node.op == op.NEWOBJ:
            if name not in _CLASSES:
                return Refused(f"{name} is not a class that can be made")
            if name in _DICTS or name in ("builtins.bytearray", "builtins.set"):
                return None  # their __new__ takes anything
        return self.rule(name, args, self.reader.tensor(ref))

    def rule(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        rule = _RULES.get(name)
        if rule is None:
            if name.startswith("torch.distributed.") or name == "torch._utils._rebuild_wrapper_subclass":
                return None  # of classes that have rules of their own
            sure = name.rpartition(".")[2].endswith("Storage") or name in _VALUES
            return Refused(
                f"{name} is called, which {'is not a function' if sure else 'ckptool does not follow'}", sure
            )
        if not rule.least <= len(args) <= len(rule.kinds):
            return Refused(f"{name} with {len(args)} arguments")
        for number, (ref, kind) in enumerate(zip(args, rule.kinds)):
            if kind and not _KINDS[kind](self, ref):
                return Refused(f"{name}: argument {number + 1} is not a {kind}")
        if rule.tensor and tensor is None:
            return Refused(f"{name}: a tensor that cannot be")
        return rule.more(self, name, args, tensor) if rule.more is not None else None

    def grad(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """Only a tensor of floating point can require a gradient."""
        if tensor is not None and tensor.requires_grad and not tensor.dtype.startswith(_FLOATS):
            return Refused(f"{name}: a tensor of {tensor.dtype} that requires a gradient")
        return None

    def plain(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """_rebuild_tensor_v2: flags of the metadata, and that its storage is of no quantized dtype."""
        assert tensor is not None
        if len(args) > 6:
            flags = self.metadata(args[6])
            if flags is None or ("conj" in flags and not tensor.dtype.startswith("complex")):
                return Refused(f"{name}: metadata that torch does not take")
        return self.dense(name, args, tensor) or self.grad(name, args, tensor)

    def dense(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """A dtype that tensors without scales do not have."""
        assert tensor is not None
        if tensor.dtype.startswith(("qint", "quint")):
            return Refused(f"{name}: a tensor of {tensor.dtype} without its scale")
        return None

    def metadata(self, ref: Ref) -> list[str] | None:
        """The names of flags that are set, None for what is refused."""
        node = self.nodes[ref]
        if node is None or node is False or node == 0 or node == () or node == "":
            return []
        if isinstance(node, List | Set) and not node.items:
            return []
        held = mapping(self.graph, ref)
        if held is None or not (isinstance(node, Dict) or self.called(ref) in _DICTS):
            return None
        names = [self.nodes[key] for key, _ in held]
        flags = [self.nodes[value] for _, value in held]
        if not all(type(key) is str for key in names):
            return None
        if not all(flag is None or isinstance(flag, bool | int | float) for flag in flags):
            return None
        return [str(key) for key in names]

    def typed(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """_rebuild_tensor_v3: its tensor is changed in place, which one that requires a gradient is not."""
        assert tensor is not None
        if self.nodes[args[4]] is True:
            return Refused(f"{name}: a tensor that requires a gradient is changed in place")
        if len(args) > 7:
            flags = self.metadata(args[7])
            if flags is None or ("conj" in flags and not tensor.dtype.startswith("complex")):
                return Refused(f"{name}: metadata that torch does not take")
        return self.dense(name, args, tensor)

    def of_parameter(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """Parameter(data, requires_grad): what it is made of decides which dtype it has."""
        inner = self.reader.tensor(args[0]) if args else None
        asks = self.nodes[args[1]] is True if len(args) > 1 else True
        if inner is not None and asks and not inner.dtype.startswith(_FLOATS):
            return Refused(f"{name}: a parameter of {inner.dtype} that requires a gradient")
        if len(args) > 3 and not self.is_state(args[3]):
            return Refused(f"{name}: a state that is not a dict of attributes")
        return None

    def is_state(self, ref: Ref) -> bool:
        """A dict of attributes, or a pair of them (``_set_obj_state``); what is empty is left alone."""
        node = self.nodes[ref]
        if type(node) is tuple and len(node) != 2:
            return False
        for part in node if type(node) is tuple else (ref,):
            held = self.nodes[part]
            if held is None or held is False or held == 0 or held == "" or held == () or held == b"":
                continue
            if isinstance(held, List | Set) and not held.items:
                continue
            pairs = mapping(self.graph, part)
            if pairs is None or not (isinstance(held, Dict) or self.called(part) in _DICTS):
                return False
            if not all(type(self.nodes[key]) is str for key, _ in pairs):
                return False
        return True

    def from_type(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """_rebuild_from_type_v2: the call within it, its class, and its state."""
        inner = self.name(args[0])
        cls = self.nodes[args[1]]
        if inner == name:
            return Refused(f"{name} within itself", False)
        what = self.rule(inner, elements(self.nodes[args[2]]), tensor)
        if what is not None:
            return what
        if tensor is None:
            return Refused(f"{name} of something that is not a tensor")
        known = mapped_name(cls) if type(cls) is Global else ""
        if not known:
            return Refused(f"{name} with something other than a class")
        if known not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            # A subclass with a state of its own; of classes that are no tensors nobody knows it.
            return Refused(f"{name} with {known} as a class") if _is_no_tensor(known) else None
        return None if self.is_state(args[3]) else Refused(f"{name}: a state that is not a dict of attributes")

    def sparse(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        layout = self.layout(args[0])
        data = elements(self.nodes[args[1]])
        if layout == "torch.sparse_coo":
            return self.coo(name, data)
        if layout not in parts_of.COMPRESSED:
            return Refused(f"{name} of the layout {layout}")
        if len(data) != 4:
            return Refused(f"{name} with {len(data)} parts")
        parts = [self.reader.tensor(ref) for ref in data[:3]]
        shape = self.ints(data[3])
        if shape is None or min(shape, default=0) < 0 or len(shape) < 2:
            return Refused(f"{name} with a size that torch does not take")
        rows, columns, values = parts
        if rows is None or columns is None or values is None:
            return Refused(f"{name} of something that is not a tensor")
        return _refused(name, parts_of.compressed(layout, rows, columns, values, shape))

    def coo(self, name: str, data: Sequence[Ref]) -> Refused | None:
        if len(data) not in (3, 4):
            return Refused(f"{name} with {len(data)} parts")
        indices, values, shape = self.reader.tensor(data[0]), self.reader.tensor(data[1]), self.ints(data[2])
        if indices is None or values is None:
            return Refused(f"{name} of something that is not a tensor")
        if shape is None or min(shape, default=0) < 0:
            return Refused(f"{name} with a size that torch does not take")
        if len(data) == 4 and type(self.nodes[data[3]]) is not bool and self.nodes[data[3]] is not None:
            return Refused(f"{name}: is_coalesced is not a bool")
        return _refused(name, parts_of.coordinates(indices, values, shape))

    def layout(self, ref: Ref) -> str:
        if self.called(ref) != "torch.serialization._get_layout":
            return ""
        node = self.nodes[ref]
        args = elements(self.nodes[node.args]) if isinstance(node, Call) else ()
        text = self.nodes[args[0]] if args else ""
        return text if type(text) is str else ""

    def ints(self, ref: Ref) -> tuple[int, ...] | None:
        """The numbers of a size: a tuple, list or torch.Size of them."""
        node = self.nodes[ref]
        if self.called(ref) == "torch.Size" and isinstance(node, Call):
            args = elements(self.nodes[node.args])
            if not args:
                return ()
            node = self.nodes[args[0]]
        if type(node) is not tuple and not isinstance(node, List):
            return None
        values = [self.nodes[item] for item in elements(node)]
        if not all(type(value) is int and -_INT64 <= value < _INT64 for value in values):
            return None
        return tuple(values)  # type: ignore[arg-type]

    def quantized(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        parts = elements(self.nodes[args[4]])
        scheme = self.nodes[parts[0]] if parts else None
        kind = mapped_name(scheme) if type(scheme) is Global else ""
        assert tensor is not None
        if not tensor.dtype.startswith(("qint", "quint")):
            return Refused(f"{name}: a quantized tensor of {tensor.dtype}")
        if self.nodes[args[5]] is not False:
            return Refused(f"{name}: a tensor of {tensor.dtype} that requires a gradient")
        if kind == "torch.per_tensor_affine" and len(parts) == 3:
            scale, zero = self.nodes[parts[1]], self.nodes[parts[2]]
            if type(scale) in (int, float, bool) and type(zero) is int and -_INT64 <= zero < _INT64:
                return None
            return Refused(f"{name}: a scale or zero point that is not a number")
        if kind in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams") and len(parts) == 4:
            axis = self.nodes[parts[3]]
            if type(axis) is not int or not 0 <= axis < len(tensor.shape):
                return Refused(f"{name}: an axis that the tensor does not have")
            scales, zeros = self.reader.tensor(parts[1]), self.reader.tensor(parts[2])
            if scales is not None and not scales.dtype.startswith(("float", "bfloat")):
                return Refused(f"{name}: scales of {scales.dtype}")
            if scales is None or zeros is None:
                return Refused(f"{name}: scales that are not a tensor", False)
            if scales.numel != tensor.shape[axis] or zeros.numel != tensor.shape[axis]:
                return Refused(f"{name}: as many scales and zero points as channels are needed")
            if len(scales.shape) != 1 or len(zeros.shape) != 1:
                return Refused(f"{name}: scales of {len(scales.shape)} dimensions")
            return None
        return Refused(f"{name}: quantized by {kind or 'no scheme'} with {len(parts)} values")

    def nested(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        buffer, sizes, strides, offsets = (self.reader.tensor(ref) for ref in args)
        if buffer is None or sizes is None or strides is None or offsets is None:
            return Refused(f"{name} of something that is not a tensor")
        return _refused(name, parts_of.nested(buffer, sizes, strides, offsets))

    def meta(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        shape, strides = self.ints(args[1]), self.ints(args[2])
        if shape is None or strides is None or len(shape) != len(strides) or min(shape, default=0) < 0:
            return Refused(f"{name}: a shape and strides that do not go together")
        dtype = self.dtype(args[0])
        if dtype.startswith(("qint", "quint")):
            return Refused(f"{name}: a tensor of {dtype} without its scale")
        if self.nodes[args[3]] is True and not (dtype or "float32").startswith(_FLOATS):
            return Refused(f"{name}: a tensor of {dtype} that requires a gradient")
        return None

    def moved(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        if self.nodes[args[3]] is True and not self.dtype(args[1]).startswith(_FLOATS):
            return Refused(f"{name}: a tensor of {self.dtype(args[1])} that requires a gradient")
        return None

    def device(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        first = self.nodes[args[0]]
        if len(args) == 1:
            if self.called(args[0]) == "torch.device" or (type(first) is str and _is_device(first)):
                return None
            return Refused(f"torch.device({first!r})" if type(first) is str else "torch.device of a non-string")
        index = self.nodes[args[1]]
        fits = index is None or (type(index) is int and 0 <= index < 1 << 31)
        if type(first) is str and (first in _DEVICE_TYPES or (index is None and _is_device(first))) and fits:
            return None
        return Refused("torch.device with a type or index that it does not take")

    def size(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        if not args:
            return None
        node = self.nodes[args[0]]
        if type(node) is tuple or isinstance(node, List):
            items = [self.nodes[item] for item in elements(node)]
            if all(isinstance(item, int) and -_INT64 <= item < _INT64 for item in items):
                return None
            return Refused("torch.Size of something other than integers")
        sure = node != "" and isinstance(node, str | int | float | None)
        return None if self.called(args[0]) == "torch.Size" else Refused("torch.Size of a non-list", sure)

    def encoded(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        text = self.nodes[args[0]]
        coding = self.nodes[args[1]] if len(args) > 1 else "utf-8"
        assert type(text) is str
        if type(coding) is not str or coding.lower() not in _CODECS or len(args) > 2:
            return Refused("_codecs.encode with a codec that ckptool does not know", False)
        try:
            text.encode(coding)
        except UnicodeEncodeError:
            return Refused(f"_codecs.encode: the text has no form in {coding}")
        return None

    def mutable_bytes(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        if not args:
            return None
        node = self.nodes[args[0]]
        made = self.called(args[0]) in ("_codecs.encode", "builtins.bytearray")
        if len(args) == 1 and (made or isinstance(node, bytes | ByteArray)):
            return None
        held = mapping(self.graph, args[0])
        if len(args) == 1 and (type(node) is tuple or isinstance(node, List) or held is not None):
            if args[0] not in self.bytes_like:
                items = [self.nodes[item] for item in (elements(node) if held is None else [key for key, _ in held])]
                self.bytes_like[args[0]] = all(isinstance(item, int) and 0 <= item < 256 for item in items)
            return None if self.bytes_like[args[0]] else Refused("bytearray of something other than bytes")
        if len(args) == 1 and type(node) is int and 0 <= node < 1 << 20:
            return None
        if len(args) == 2 and type(node) is str:
            return self.encoded("bytearray", args, tensor)
        return Refused("bytearray of something that it does not take", len(args) > 3 or node is None)

    def members(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        if not args:
            return None
        node = self.nodes[args[0]]
        if type(node) is tuple or isinstance(node, List | Set | FrozenSet):
            return self.keys(node if type(node) is tuple else node.items)  # type: ignore[union-attr]
        if type(node) is str or isinstance(node, bytes | Dict) or self.called(args[0]) in _ITERABLE:
            return None
        return Refused("set of something that has no members", not isinstance(node, Call))

    def number(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        values = [self.nodes[ref] for ref in args]
        if all(isinstance(value, int | float) for value in values):
            large = any(isinstance(value, int) and value.bit_length() > 1000 for value in values)
            return Refused("complex of a number that is too large") if large else None
        return Refused("complex of something that is not a number", type(values[0]) is not str)

    def pairs(self, name: str, args: Sequence[Ref], tensor: Tensor | None) -> Refused | None:
        """OrderedDict and Counter: keys must have a hash. What else they are made of is not followed at all."""
        node = self.nodes[args[0]] if args else None
        if args and node is None and name == "collections.Counter":
            return None
        if not args:
            return None
        if isinstance(node, Dict):
            return None  # its keys are looked at where it is made
        couples = elements(node)
        if type(node) is tuple or isinstance(node, List):
            if name == "collections.Counter":
                return self.keys(couples)
            for couple in couples:
                inner = self.nodes[couple]
                if len(elements(inner)) != 2 and not (isinstance(inner, str | bytes) and len(inner) == 2):
                    if isinstance(inner, Call | Dict | Set | FrozenSet):
                        return Refused(f"{name} of what ckptool does not follow", False)
                    return Refused(f"{name} of something other than pairs")
            return self.keys([elements(self.nodes[couple])[0] for couple in couples if elements(self.nodes[couple])])
        if self.called(args[0]) in _DICTS:
            return None
        return Refused(f"{name} of something that is not a mapping", not isinstance(node, Call))

    # -- keys -------------------------------------------------------------------------------------

    def keys(self, refs: Sequence[Ref]) -> Refused | None:
        """What cannot be a key: containers, and tuples that are nested too deep to be hashed."""
        nodes = self.nodes
        if _HASHED.issuperset([type(nodes[ref]) for ref in refs]):
            return None
        for ref in refs:
            node = nodes[ref]
            if isinstance(node, List | Dict | Set | ByteArray):
                return Refused("a key that cannot be hashed")
            if isinstance(node, Call) and self.name(node.func) in _UNHASHED:
                return Refused("a key that cannot be hashed")
            if type(node) is tuple:
                depth = self.depth(ref)
                if depth > _DEEP:
                    return Refused(f"a key of tuples nested {depth:,} deep, which crashes Python")
                if depth < 0:
                    return Refused("a key that cannot be hashed")
        return None

    def depth(self, ref: Ref) -> int:
        """How deep a tuple is nested, -1 where something in it has no hash; each tuple once."""
        nodes, known = self.nodes, self.depths
        work = [ref]
        while work:
            at = work[-1]
            node = nodes[at]
            if at in known:
                work.pop()
                continue
            assert type(node) is tuple
            inner = [part for part in node if type(nodes[part]) is tuple]
            missing = [part for part in inner if part not in known]
            if missing:
                work += missing
                continue
            depths = [known[part] for part in inner]
            bare = any(
                isinstance(nodes[part], List | Dict | Set | ByteArray)
                or (isinstance(held := nodes[part], Call) and self.name(held.func) in _UNHASHED)
                for part in node
            )
            known[at] = -1 if bare or -1 in depths else 1 + max(depths, default=0)
            work.pop()
        return known[ref]


def _refused(name: str, why: str) -> Refused | None:
    return Refused(f"{name}: {why}") if why else None


def _is_no_tensor(name: str) -> bool:
    """Is it on torch's list, and no class of tensors?"""
    return name in _CLASSES | _VALUES or name.endswith("Storage") or "._rebuild" in name or name in _RULES


def _is_device(text: str) -> bool:
    return _DEVICE.fullmatch(text) is not None


_V2: Final = "torch._utils._rebuild_tensor_v2"
_DICTS: Final = ("collections.OrderedDict", "collections.Counter")
#: Calls of torch's list that give something with members, each of which has a hash.
_ITERABLE: Final = frozenset((*_DICTS, "builtins.set", "builtins.bytearray", "_codecs.encode", "torch.Size"))
#: What has no __dict__ that BUILD could fill.
_BARE: Final = frozenset(("torch.Size", "torch.device", "builtins.set", "builtins.bytearray", "builtins.complex"))
_UNHASHED: Final = frozenset((*_DICTS, "builtins.set", "builtins.bytearray"))
_HASHED: Final = frozenset((str, int, bool, float, bytes, type(None), Global))
#: On the list, and neither functions nor classes.
_VALUES: Final = frozenset(
    f"torch.{name}"
    for name in (
        *BY_NAME,
        *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
        "per_channel_affine_float_qparams",
    )
)

_Check = Callable[[_Calls, Ref], bool]
_KINDS: Final[Mapping[str, _Check]] = {
    "bool": lambda calls, ref: type(calls.nodes[ref]) is bool,
    "bool or None": lambda calls, ref: type(calls.nodes[ref]) is bool or calls.nodes[ref] is None,
    "string": lambda calls, ref: type(calls.nodes[ref]) is str,
    "tuple": lambda calls, ref: type(calls.nodes[ref]) is tuple or isinstance(calls.nodes[ref], List),
    "storage": lambda calls, ref: type(calls.nodes[ref]) is Persistent,
    "tensor": lambda calls, ref: calls.reader.tensor(ref) is not None,
    "tensor or None": lambda calls, ref: calls.reader.tensor(ref) is not None or calls.nodes[ref] is None,
    "dtype": lambda calls, ref: bool(calls.dtype(ref)),
    "dtype or None": lambda calls, ref: bool(calls.dtype(ref)) or calls.nodes[ref] is None,
    "size": lambda calls, ref: calls.ints(ref) is not None,
    "function": lambda calls, ref: type(calls.nodes[ref]) is Global,
    "layout": lambda calls, ref: calls.layout(ref) in _LAYOUTS,
    "name of a layout": lambda calls, ref: calls.nodes[ref] in _LAYOUTS if type(calls.nodes[ref]) is str else False,
}


class _Rule(NamedTuple):
    """``kinds`` of its arguments, "" for any; ``least`` of them; ``tensor`` where one must come of it."""

    least: int
    kinds: tuple[str, ...]
    tensor: bool = False
    more: Callable[[_Calls, str, Sequence[Ref], Tensor | None], Refused | None] | None = None


_VIEW: Final = ("storage", "", "size", "size")
_RULES: Final[Mapping[str, _Rule]] = {
    "torch._utils._rebuild_tensor": _Rule(4, _VIEW, True, _Calls.dense),
    _V2: _Rule(6, (*_VIEW, "bool", "", ""), True, _Calls.plain),
    "torch._utils._rebuild_tensor_v3": _Rule(7, (*_VIEW, "bool or None", "", "dtype or None", ""), True, _Calls.typed),
    "torch._utils._rebuild_qtensor": _Rule(7, (*_VIEW, "tuple", "bool", ""), True, _Calls.quantized),
    "torch._utils._rebuild_parameter": _Rule(3, ("tensor or None", "bool", ""), False, _Calls.of_parameter),
    "torch._utils._rebuild_parameter_with_state": _Rule(
        4, ("tensor or None", "bool", "", ""), False, _Calls.of_parameter
    ),
    "torch.nn.parameter.Parameter": _Rule(0, ("tensor or None", "bool"), False, _Calls.of_parameter),
    "torch._utils._rebuild_sparse_tensor": _Rule(2, ("layout", "tuple"), False, _Calls.sparse),
    "torch._utils._rebuild_nested_tensor": _Rule(4, ("tensor",) * 4, False, _Calls.nested),
    "torch._utils._rebuild_meta_tensor_no_storage": _Rule(
        4, ("dtype or None", "size", "size", "bool or None"), False, _Calls.meta
    ),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Rule(
        4, ("tensor", "dtype", "", "bool"), False, _Calls.moved
    ),
    "torch._tensor._rebuild_from_type_v2": _Rule(4, ("function", "", "tuple", ""), False, _Calls.from_type),
    "torch.nested._internal.nested_tensor._rebuild_njt": _Rule(1, ("",), True),
    "torch.serialization._get_layout": _Rule(1, ("name of a layout",)),
    "torch.Size": _Rule(0, ("",), False, _Calls.size),
    "torch.device": _Rule(1, ("", ""), False, _Calls.device),
    "_codecs.encode": _Rule(1, ("string", "", ""), False, _Calls.encoded),
    "builtins.bytearray": _Rule(0, ("", "", ""), False, _Calls.mutable_bytes),
    "builtins.set": _Rule(0, ("",), False, _Calls.members),
    "builtins.complex": _Rule(0, ("", ""), False, _Calls.number),
    "collections.OrderedDict": _Rule(0, ("",), False, _Calls.pairs),
    "collections.Counter": _Rule(0, ("",), False, _Calls.pairs),
}
