"""The names and rules of ``torch.load(weights_only=True)``, by torch version: a base, and the changes in each version.

Source: ``torch/_weights_only_unpickler.py``, ``torch/storage.py`` (``_new_dtypes``), ``torch/serialization.py``,
``torch/nested/__init__.py`` and ``torch/distributed/device_mesh.py`` in the released wheels; ``make torch-lists``
compares them. A version is written "2.6", because releases within a minor version never differ here. CUDA and CPU
builds have the same lists.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from ..base.records import NamedTuple
from ..base.text import words
from ..pickles import opcodes as op


class ListChange(NamedTuple):
    """Names that a version added to or removed from the default list, and names that it ``registered`` separately.

    Registered names are on the user's own list after a plain ``import torch``; ``unregistered`` names no longer are.
    """

    version: str
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    registered: frozenset[str] = frozenset()
    unregistered: frozenset[str] = frozenset()


def qualified(module: str, names: str, suffix: str = "") -> frozenset[str]:
    """Return the names in ``names``, which spaces separate, with their module."""
    return frozenset(f"{module}.{name}{suffix}" for name in names.split())


_SPARSE = "Double Float Half BFloat16 Long Int Short Char Byte"
_TENSORS = f"{_SPARSE} Bool"
_STORAGES = f"{_TENSORS} ComplexDouble ComplexFloat"

#: torch 1.13, the first version with weights_only: 90 names.
_BASE = (
    frozenset(("collections.OrderedDict", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"))
    | qualified("torch", "Size Tensor")
    | qualified("torch", "complex32 complex64 complex128 float16 float32 float64 int8 int16 int32 int64")
    | qualified("torch", f"{_STORAGES} QInt8 QUInt8 QInt32 QUInt4x2 QUInt2x4", "Storage")
    | qualified("torch.cuda", _STORAGES, "Storage")
    | qualified("torch.storage", "TypedStorage UntypedStorage")
    | qualified("torch", _TENSORS, "Tensor")
    | qualified("torch.cuda", _TENSORS, "Tensor")
    | qualified("torch.sparse", _SPARSE, "Tensor")
    | qualified("torch.cuda.sparse", _SPARSE, "Tensor")
    | qualified("torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter _rebuild_sparse_tensor")
    | qualified("torch._utils", "_rebuild_sparse_csr_tensor _rebuild_meta_tensor_no_storage")
)

_JAGGED = qualified("torch.nested._internal.nested_tensor", "NestedTensor _rebuild_njt")

#: Names that only torch 2.14 registers (``torch/distributed/distributed_c10d.py``): two classes of traceback and the
#: built-in exceptions, here from Python 3.10. Later Python versions have a few more.
_EXCEPTIONS = qualified("traceback", "StackSummary FrameSummary") | frozenset(
    f"builtins.{name}"
    for name in words("""
    ArithmeticError AssertionError AttributeError BaseException BlockingIOError BrokenPipeError BufferError BytesWarning
    ChildProcessError ConnectionAbortedError ConnectionError ConnectionRefusedError ConnectionResetError
    DeprecationWarning EOFError EncodingWarning Exception FileExistsError FileNotFoundError FloatingPointError
    FutureWarning GeneratorExit ImportError ImportWarning IndentationError IndexError InterruptedError IsADirectoryError
    KeyError KeyboardInterrupt LookupError MemoryError ModuleNotFoundError NameError NotADirectoryError
    NotImplementedError OSError OverflowError PendingDeprecationWarning PermissionError ProcessLookupError
    RecursionError ReferenceError ResourceWarning RuntimeError RuntimeWarning StopAsyncIteration StopIteration
    SyntaxError SyntaxWarning SystemError SystemExit TabError TimeoutError TypeError UnboundLocalError
    UnicodeDecodeError UnicodeEncodeError UnicodeError UnicodeTranslateError UnicodeWarning UserWarning ValueError
    Warning ZeroDivisionError
    """)
)

#: All versions, from oldest to newest.
HISTORY: Final = (
    ListChange("1.13", added=_BASE),
    ListChange(
        "2.0",
        added=qualified("torch._tensor", "_rebuild_from_type_v2"),
        removed=qualified("torch._utils", "_rebuild_sparse_csr_tensor"),
    ),
    ListChange("2.1"),
    ListChange(
        "2.2",
        added=qualified("torch", "float8_e5m2 float8_e4m3fn")
        | qualified("torch._utils", "_rebuild_tensor_v3 _rebuild_nested_tensor"),
    ),
    ListChange("2.3", added=qualified("torch", "float8_e5m2fnuz float8_e4m3fnuz")),
    ListChange(
        "2.4",
        added=qualified("collections", "Counter")
        | qualified("torch", "device bool uint8 bfloat16 bits8 bits16 bits1x8 bits2x4 bits4x2")
        | qualified("torch", "qint8 qint32 quint8 quint4x2 quint2x4")
        | qualified("torch", "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric")
        | qualified("torch", "per_channel_affine_float_qparams")
        | qualified("torch._utils", "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_wrapper_subclass"),
    ),
    ListChange(
        "2.5",
        added=qualified("_codecs", "encode")
        | qualified("builtins", "bytearray")
        | qualified("torch._utils", "_rebuild_device_tensor_from_numpy"),
    ),
    ListChange(
        "2.6",
        added=qualified("builtins", "set complex")
        | qualified("torch", "uint16 uint32 uint64")
        | qualified("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
        registered=_JAGGED,
    ),
    ListChange(
        "2.7",
        added=qualified("torch", "float8_e8m0fnu int1 int2 int3 int4 int5 int6 int7")
        | qualified("torch", "uint1 uint2 uint3 uint4 uint5 uint6 uint7"),
    ),
    ListChange("2.8", added=qualified("torch", "float4_e2m1fn_x2")),
    ListChange("2.9"),
    ListChange("2.10", registered=qualified("torch.distributed._mesh_layout", "_MeshLayout")),
    ListChange("2.11"),
    ListChange("2.12"),
    ListChange("2.13", registered=qualified("torch.distributed._mesh_layout", "_FlatLayout")),
    ListChange("2.14", added=qualified("torch", "bcomplex32"), registered=_EXCEPTIONS),
    ListChange(
        "2.15",
        removed=qualified("torch._utils", "_rebuild_nested_tensor"),
        unregistered=_JAGGED | _EXCEPTIONS,
    ),
)

NEWEST: Final = "2.15"
VERSIONS: Final[tuple[str, ...]] = tuple(change.version for change in HISTORY)


class Rules(NamedTuple):
    """The rules, apart from lists, in which versions differ. In 2.15 all are true except two.

    ``default``: ``weights_only`` is true by default. ``newobj_listed``: NEWOBJ makes any listed class, not only
    Parameter. ``build_listed``: BUILD sets the state of any listed class, not only of Tensor, Parameter and
    OrderedDict. ``checks_setitem``: SETITEM and SETITEMS apply only to dict, OrderedDict and Counter, not to other
    objects that accept them (a list, a tensor, a bytearray). ``appends_registered``: APPEND and APPENDS also apply to a
    registered class that is a list (only in 2.14). ``calls_storages``: a storage class such as torch.FloatStorage can
    be called; in later versions it is only a tag, although TypedStorage and UntypedStorage are still classes.
    ``checks_record_size``: a storage in a zip file must have the size given in the pickle. ``reads_safetensors``: a
    file named .safetensors is read as safetensors.
    """

    default: bool
    newobj_listed: bool
    build_listed: bool
    checks_setitem: bool
    appends_registered: bool
    calls_storages: bool
    checks_record_size: bool
    reads_safetensors: bool


@cache
def allowed(version: str) -> frozenset[str]:
    """Return the globals ("module.name") that are allowed by default."""
    names: frozenset[str] = frozenset()
    for change in _history(version):
        names = (names - change.removed) | change.added
    return names


@cache
def registered(version: str) -> frozenset[str]:
    """Return the names that a plain ``import torch`` adds to the user's list."""
    names: frozenset[str] = frozenset()
    for change in _history(version):
        names = (names - change.unregistered) | change.registered
    return names


@cache
def ever_listed() -> frozenset[str]:
    """Return the names that any version lists or registers."""
    return frozenset().union(*(change.added | change.registered for change in HISTORY))


@cache
def refused_opcodes(version: str) -> frozenset[int]:
    """Return the opcodes that the restricted unpickler does not know; torch 1.13 cannot read a float."""
    return frozenset(op.NAMES) - op.ACCEPTED | (frozenset() if _since(version, "2.0") else {op.BINFLOAT})


def maps_python2(version: str, protocol: int = 2) -> bool:
    """Return whether Python 2 names (``__builtin__.set``) are replaced before they are looked up.

    torch 2.4 and 2.5 do this only in a pickle whose PROTO says 2; a pickle without PROTO counts as another protocol.
    """
    return _since(version, "2.6") or (protocol == 2 and _since(version, "2.4"))


def newobj_targets(version: str) -> frozenset[str]:
    """Return the names that NEWOBJ does not refuse by name; names that are not classes fail at run time."""
    if rules(version).newobj_listed:
        return allowed(version) | registered(version)
    return frozenset(("torch.nn.parameter.Parameter",))


@cache
def rules(version: str) -> Rules:
    """Return the rules apart from the lists."""
    return Rules(
        default=_since(version, "2.6"),
        newobj_listed=_since(version, "2.6"),
        build_listed=_since(version, "2.6"),
        checks_setitem=_since(version, "2.10"),
        appends_registered=version == "2.14",
        calls_storages=not _since(version, "2.2"),
        checks_record_size=_since(version, "2.10"),
        reads_safetensors=_since(version, "2.13"),
    )


def _since(version: str, first: str) -> bool:
    return len(_history(version)) >= len(_history(first))


def _history(version: str) -> tuple[ListChange, ...]:
    if version not in VERSIONS:
        raise ValueError(f"no lists for torch {version!r}; there are lists for {', '.join(VERSIONS)}")
    return HISTORY[: VERSIONS.index(version) + 1]
