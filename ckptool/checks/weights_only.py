"""Will ``torch.load(weights_only=True)`` take it, and what stops it? Answered without torch.

The lists and rules are those of ``torch/_weights_only_unpickler.py`` in torch 2.13, as data: names are
matched, not objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..checkpoint import Checkpoint
from ..objects import mapped_name
from ..pickles import opcodes as op
from ..pickles.nodes import Call, Global, Graph, Persistent, Ref
from .storages import Flaw

__all__ = ["ALLOWED", "TORCH", "Blocker", "Verdict", "weights_only"]

#: The torch whose lists these are.
TORCH: Final = "2.13"

_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3"
    " int4 int5 int6 int7 float16 float32 float64 bfloat16 complex32 complex64 complex128 float8_e5m2 float8_e4m3fn"
    " float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2 qint8"
    " qint32 quint8 quint4x2 quint2x4"
)
_QSCHEMES = (
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams"
)
_KINDS = "Double Float Half BFloat16 Long Int Short Char Byte Bool"
_STORAGES = _KINDS + " ComplexDouble ComplexFloat"
_QUANTIZED = "QInt8 QUInt8 QInt32 QUInt4x2 QUInt2x4"
_REBUILD = (
    "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state"
    " _rebuild_qtensor _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor"
    " _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor"
)


def _names(module: str, names: str, suffix: str = "") -> set[str]:
    return {f"{module}.{name}{suffix}" for name in names.split()}


#: The globals that are allowed by default: 144 names.
ALLOWED: Final = frozenset(
    _names("collections", "OrderedDict Counter")
    | _names("builtins", "set bytearray complex")
    | {"_codecs.encode", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"}
    | _names("torch", "Size Tensor device")
    | _names("torch", _DTYPES)
    | _names("torch", _QSCHEMES)
    | _names("torch", f"{_STORAGES} {_QUANTIZED}", "Storage")
    | _names("torch.cuda", _STORAGES, "Storage")
    | _names("torch.storage", "TypedStorage UntypedStorage")
    | _names("torch", _KINDS, "Tensor")
    | _names("torch.cuda", _KINDS, "Tensor")
    | _names("torch.sparse", _KINDS.removesuffix(" Bool"), "Tensor")
    | _names("torch.cuda.sparse", _KINDS.removesuffix(" Bool"), "Tensor")
    | _names("torch._utils", _REBUILD)
    | {"torch._tensor._rebuild_from_type_v2"}
)

#: What a plain ``import torch`` adds to the list of the user.
REGISTERED: Final = frozenset(
    _names("torch.nested._internal.nested_tensor", "NestedTensor _rebuild_njt")
    | _names("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout")
)

_CALLABLE = ALLOWED | REGISTERED
_BLOCKED_MODULES = frozenset(("sys", "os", "posix", "nt"))


_FLAWS = {
    "missing-storage": "bytes of a storage are missing",
    "storage-size": "a storage has another size than the pickle says",
    "geometry": "a tensor reaches beyond its storage",
}


class Blocker(NamedTuple):
    """One thing that stops torch.load: a global that is not on its list, or a rule that is broken.

    Exactly one of ``name`` (as Python 3 resolves it) and ``rule`` is set. ``called`` says that loading
    without weights_only would call the global.
    """

    name: str
    rule: str
    number: int
    called: bool = False


class Verdict(NamedTuple):
    """``loads`` is the answer for torch ``torch``; ``blockers`` are the reasons against it."""

    torch: str
    loads: bool
    blockers: tuple[Blocker, ...]


def weights_only(checkpoint: Checkpoint, flaws: Sequence[Flaw], torch: str = TORCH) -> Verdict:
    """Predict ``torch.load(path, weights_only=True, map_location="cpu")``.

    ``flaws`` are those of ``storage_flaws``. What only shows at run time is not foreseen: a device that is
    absent, arguments that a function refuses.
    """
    blockers = globals_outside(checkpoint.graph)
    rules: Counter[str] = Counter()
    for code, count in checkpoint.graph.refused.items():
        rules[f"opcode {op.NAMES[code]}"] += count
    rules.update(_broken_rules(checkpoint.graph))
    rules.update(_container_rules(checkpoint, flaws))
    blockers += [Blocker("", rule, count) for rule, count in rules.items()]
    return Verdict(TORCH, not blockers, tuple(blockers))


def globals_outside(graph: Graph) -> list[Blocker]:
    """Every global of the pickle that is not on torch's list, popped ones included, most frequent first."""
    counts: Counter[str] = Counter()
    called: set[str] = set()
    outside: dict[Ref, str] = {}
    for ref, node in enumerate(graph.nodes):
        if type(node) is Global:
            name = mapped_name(node)
            if name not in _CALLABLE or node.module in _BLOCKED_MODULES:
                outside[ref] = name
                counts[name] += 1
                if node.states:
                    called.add(name)
    if outside:
        for node in graph.nodes:
            if type(node) is Call and node.func in outside:
                called.add(outside[node.func])
    return [Blocker(name, "", count, name in called) for name, count in counts.most_common()]


def _broken_rules(graph: Graph) -> Counter[str]:
    """The structural rules of the restricted unpickler, on every object that the pickle makes."""
    broken: Counter[str] = Counter()
    nodes = graph.nodes
    for node in nodes:
        if type(node) is Call:
            func = nodes[node.func]
            if type(func) is not Global:
                # An object of a 'module' record of the legacy format, or something made up.
                broken["call of what is no global"] += 1
            elif node.items or node.states or node.pairs:
                broken.update(_filling(mapped_name(func), node))
        elif type(node) is Persistent:
            pid = nodes[node.pid]
            first = nodes[pid[0]] if type(pid) is tuple and pid else None
            if first == "module" or first == b"module":
                broken["persistent id 'module': a class with its source"] += 1
            elif first != "storage" and first != b"storage":
                broken["persistent id that is no storage"] += 1
            if node.items or node.pairs or node.states:
                broken["filling of a storage"] += 1
        elif type(node) is Global and (node.items or node.pairs or node.states):
            broken["filling of a global"] += 1
    return broken


def _filling(name: str, node: Call) -> list[str]:
    broken = []
    if node.items:
        broken.append("APPENDS to what is no list")
    if node.pairs and name not in ("collections.OrderedDict", "collections.Counter"):
        broken.append("SETITEMS on what is no dict")
    if node.states and not _buildable(name):
        broken.append("BUILD of what is no tensor, parameter or OrderedDict")
    return broken


def _buildable(name: str) -> bool:
    if name.startswith("torch._utils._rebuild") or name == "torch._tensor._rebuild_from_type_v2":
        return True
    # A class outside of the list is a blocker by its name already.
    return name not in ALLOWED or name not in ("_codecs.encode", "torch.serialization._get_layout")


def _container_rules(checkpoint: Checkpoint, flaws: Sequence[Flaw]) -> Counter[str]:
    broken: Counter[str] = Counter()
    for problem in checkpoint.container.problems:
        if problem.refused:
            broken[problem.message] += 1
    if checkpoint.path.endswith(".safetensors"):
        # torch.load goes by this suffix alone (torch/serialization.py, ``load``).
        broken["the name ends in .safetensors, so torch.load reads it as that"] += 1
    for code in ("missing-storage", "storage-size", "geometry"):
        count = sum(flaw.code == code for flaw in flaws)
        if count:
            broken[_FLAWS[code]] += count
    legacy = checkpoint.format == "torch-legacy"
    for storage in checkpoint.survey.reader.storages.values():
        if storage.location == "meta" and not legacy:
            continue
        if legacy and storage.dtype.name == "untyped":
            broken["UntypedStorage in the legacy format, which torch 2.13 cannot read"] += 1
        if storage.dtype.name == "unknown" or storage.cls == "_UntypedStorage":
            broken[f"storage class {storage.cls}"] += 1
    return broken
