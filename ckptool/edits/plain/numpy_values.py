"""NumPy: scalars become Python numbers, arrays become tensors, their bytes a storage.

Sources: numpy's ``multiarray`` pickling (``scalar``, ``_reconstruct``, ``_frombuffer``, the state of ``dtype``).
"""

from __future__ import annotations

import struct
from array import array as machine_numbers
from math import prod
from typing import Final, NamedTuple

from ...pickles.nodes import Call, List, Node, Persistent, Ref
from .case import UNKNOWN, Case, Plain, Verdict, called, raw_bytes

__all__ = ["array", "numpy_scalar"]

SCALARS: Final = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
ARRAYS: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
BUFFERS: Final = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")

#: numpy code: (torch dtype, storage class or "" for UntypedStorage and _rebuild_tensor_v3, struct code)
_TYPES: Final = {
    "f8": ("float64", "DoubleStorage", "d"),
    "f4": ("float32", "FloatStorage", "f"),
    "f2": ("float16", "HalfStorage", "e"),
    "i8": ("int64", "LongStorage", "q"),
    "i4": ("int32", "IntStorage", "i"),
    "i2": ("int16", "ShortStorage", "h"),
    "i1": ("int8", "CharStorage", "b"),
    "u8": ("uint64", "", "Q"),
    "u4": ("uint32", "", "I"),
    "u2": ("uint16", "", "H"),
    "u1": ("uint8", "ByteStorage", "B"),
    "b1": ("bool", "BoolStorage", "?"),
    "c16": ("complex128", "ComplexDoubleStorage", "2d"),
    "c8": ("complex64", "ComplexFloatStorage", "2f"),
}


class _Dtype(NamedTuple):
    """A numpy dtype: its code ("f8", "U5", "O8"), bytes an element, and whether the bytes are big-endian."""

    code: str
    width: int
    big: bool


def numpy_scalar(case: Case) -> Verdict:
    """``scalar(dtype, bytes)`` as a Python number or string."""
    if case.name not in SCALARS:
        return None
    dtype = _dtype(case, case.args[0]) if len(case.args) == 2 else None
    if dtype is not None and dtype.code[:1] == "O":
        return UNKNOWN
    raw = raw_bytes(case.rewrite, case.args[1]) if len(case.args) == 2 else None
    value = _values(dtype, raw, 1) if dtype is not None and raw is not None else None
    if not value or len(value) != 1:
        return UNKNOWN
    return _number(case, value[0])


def _number(case: Case, value: object) -> Plain:
    if isinstance(value, complex):
        parts = (case.rewrite.constant(value.real), case.rewrite.constant(value.imag))
        return Plain(case.call("__builtin__", "complex", *parts), "complex")
    assert isinstance(value, bool | int | float | str | bytes)
    if isinstance(value, bytes):
        text, latin = case.rewrite.constant(value.decode("latin-1")), case.rewrite.constant("latin1")
        return Plain(case.call("_codecs", "encode", text, latin), "bytes")
    return Plain(value, type(value).__name__)


def array(case: Case) -> Verdict:
    """An array as a tensor; one of strings or objects as lists."""
    if case.name in BUFFERS and len(case.args) == 4:
        shape, data = _shape(case, case.args[2]), case.args[0]
        dtype, fortran = _dtype(case, case.args[1]), case.value(case.args[3]) == "F"
    elif case.name in ARRAYS:
        state = case.value(case.node.states[-1]) if case.node.states else ()
        if type(state) is not tuple or len(state) not in (4, 5):
            return UNKNOWN
        shape, dtype = _shape(case, state[-4]), _dtype(case, state[-3])
        fortran, data = case.value(state[-2]) is True, state[-1]
    else:
        return None
    if shape is None or dtype is None:
        return UNKNOWN
    if dtype.code[:1] == "O":
        held = case.current(data)
        return _nested(case, list(held.items), shape) if isinstance(held, List) else UNKNOWN
    raw = raw_bytes(case.rewrite, data)
    if raw is None or len(raw) != prod(shape) * dtype.width:
        return UNKNOWN
    if dtype.code[:1] in "US":
        texts = _values(dtype, raw, prod(shape)) or []
        if fortran and len(shape) > 1:
            return UNKNOWN
        return _nested(case, [_text(case, text) for text in texts], shape)
    code = "i8" if dtype.code in ("M8", "m8") else dtype.code
    if code not in _TYPES:
        return UNKNOWN
    return _tensor(case, dtype._replace(code=code), shape, fortran, raw)


def _text(case: Case, value: object) -> Ref:
    made = _number(case, value).node
    return case.rewrite.add(made)


def _nested(case: Case, items: list[Ref], shape: tuple[int, ...]) -> Verdict:
    """Lists in lists, the last dimension innermost."""
    if len(items) != prod(shape):
        return UNKNOWN
    words = f"list, {'x'.join(map(str, shape)) or 'one'} {'element' if len(items) == 1 else 'elements'}"
    if not shape:
        return Plain(List(items), words)
    for size in reversed(shape[1:]):
        groups = [items[at : at + size] for at in range(0, len(items), size)] if size else [[]] * prod(shape[:-1])
        items = [case.rewrite.add(List(group)) for group in groups]
    return Plain(List(items), words)


def _tensor(case: Case, dtype: _Dtype, shape: tuple[int, ...], fortran: bool, raw: bytes) -> Plain:
    name, storage, _ = _TYPES[dtype.code]
    rewrite = case.rewrite
    if dtype.big:
        raw = _swapped(raw, dtype)
    key = f"array-{len(case.storages)}"
    case.storages[key] = raw
    module = "torch" if storage else "torch.storage"
    count = prod(shape) if storage else len(raw)
    parts = (
        rewrite.constant("storage"),
        rewrite.named(module, storage or "UntypedStorage"),
        rewrite.add(key),
        rewrite.constant("cpu"),
        rewrite.constant(count),
    )
    steps: list[int] = []
    size = 1
    for length in shape if fortran else reversed(shape):
        steps.append(size)
        size *= max(length, 1)
    strides = steps if fortran else steps[::-1]
    args = [
        rewrite.add(Persistent(rewrite.add(parts))),
        rewrite.constant(0),
        _numbers(case, shape),
        _numbers(case, strides),
        rewrite.constant(False),
        rewrite.add(case.call("collections", "OrderedDict")),
    ]
    function = "_rebuild_tensor_v2"
    if not storage:
        function = "_rebuild_tensor_v3"
        args.append(rewrite.named("torch", name))
    words = f"tensor, {name} {'x'.join(map(str, shape)) or 'scalar'}"
    return Plain(case.call("torch._utils", function, *args), words)


def _numbers(case: Case, values: tuple[int, ...] | list[int]) -> Ref:
    refs = tuple(case.rewrite.constant(value) for value in values)
    return case.rewrite.add(refs) if refs else case.rewrite.constant(())


def _swapped(raw: bytes, dtype: _Dtype) -> bytes:
    width = dtype.width // 2 if dtype.code[:1] == "c" else dtype.width
    if width == 1:
        return raw
    swapped = machine_numbers({2: "H", 4: "I", 8: "Q"}[width], raw)
    swapped.byteswap()
    return swapped.tobytes()


def _shape(case: Case, ref: Ref) -> tuple[int, ...] | None:
    refs = case.current(ref)
    if type(refs) is not tuple:
        return None
    values = [case.current(part) for part in refs]
    sizes = tuple(value for value in values if type(value) is int and 0 <= value < 1 << 48)
    return sizes if len(sizes) == len(values) <= 64 and prod(sizes) < 1 << 48 else None


def _dtype(case: Case, ref: Ref) -> _Dtype | None:
    """``dtype(code, align, copy)`` and the byte order in its state."""
    node: Node = case.current(ref)
    if not isinstance(node, Call) or called(case.rewrite, node.func) != "numpy.dtype":
        return None
    args = case.current(node.args)
    code = case.current(args[0]) if type(args) is tuple and args else None
    if type(code) is not str:
        return None
    state = case.current(node.states[-1]) if node.states else ()
    order = case.current(state[1]) if type(state) is tuple and len(state) > 1 else "<"
    named = case.current(state[3]) if type(state) is tuple and len(state) > 3 else None
    digits = code[1:]
    if named is not None or not digits.isdigit() or len(digits) > 9:
        return None
    size = int(digits)
    return _Dtype(code, size * 4 if code[0] == "U" else size, order == ">")


def _values(dtype: _Dtype, raw: bytes, count: int) -> list[object] | None:
    """The elements as Python numbers or strings; None for a dtype that has none."""
    if len(raw) != dtype.width * count:
        return None
    if dtype.code[0] in "US":
        order = "utf-32-be" if dtype.big else "utf-32-le"
        pieces = (
            [raw[at : at + dtype.width] for at in range(0, len(raw), dtype.width)] if dtype.width else [b""] * count
        )
        if dtype.code[0] == "S":
            return [piece.rstrip(b"\0") for piece in pieces]
        return [piece.decode(order, "replace").rstrip("\0") for piece in pieces]
    code = "i8" if dtype.code in ("M8", "m8") else dtype.code
    if code not in _TYPES:
        return None
    kind = _TYPES[code][2]
    values = struct.unpack(f"{'>' if dtype.big else '<'}{count * (len(kind))}{kind[-1]}", raw)
    return [complex(*values[at : at + 2]) for at in range(0, len(values), 2)] if len(kind) == 2 else list(values)
