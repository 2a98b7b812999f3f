"""NumPy: scalars become Python numbers, arrays become tensors, their bytes a storage.

Sources: numpy's ``multiarray`` pickling (``scalar``, ``_reconstruct``, ``_frombuffer``, the state of ``dtype``).
"""

from __future__ import annotations

import struct
from array import array as machine_numbers
from math import prod
from typing import Final, NamedTuple

from ...base.text import counted, cut
from ...checkpoint.graph_editor import GraphEditor
from ...checkpoint.objects import mapping
from ...pickles.nodes import Call, Dict, List, Node, Persistent, Ref
from .case import UNKNOWN, Case, Plain, Verdict, called, raw_bytes

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


#: Elements without bytes, and lists without elements, that an array may ask for.
_EMPTY: Final = 100_000


class _Dtype(NamedTuple):
    """A numpy dtype: its code ("f8", "U5", "O8"), bytes an element, and whether the bytes are big-endian.

    ``unit`` is that of a date or duration: "ns", "25s".
    """

    code: str
    width: int
    big: bool
    unit: str = ""


def numpy_scalar(case: Case) -> Verdict:
    """``scalar(dtype, bytes)`` as a Python number or string."""
    if case.name not in SCALARS:
        return None
    dtype = _dtype(case, case.args[0]) if len(case.args) == 2 else None
    if dtype is not None and dtype.code[:1] == "O":
        return UNKNOWN
    raw = raw_bytes(case.rewrite, case.args[1]) if len(case.args) == 2 else None
    value = _values(dtype, raw, 1) if dtype is not None and raw is not None else None
    if dtype is None or not value or len(value) != 1:
        return UNKNOWN
    made = _number(case, value[0])
    return made._replace(words=f"{made.words}{_unit(dtype)}")


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
    axes: Ref | None = None
    if case.name in BUFFERS and len(case.args) in (4, 5):
        shape, data = _shape(case, case.args[2]), case.args[0]
        dtype, fortran = _dtype(case, case.args[1]), case.value(case.args[3]) == "F"
        axes = case.args[4] if len(case.args) == 5 and case.value(case.args[3]) == "K" else None
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
        # Objects are pickled in the order of their indices, however the array lies in memory.
        return _nested(case, list(held.items), shape) if isinstance(held, List) else UNKNOWN
    raw, steps = raw_bytes(case.rewrite, data), _steps(shape, fortran)
    if axes is not None and case.value(axes) is not None:
        # NumPy 2.4: the shape is that of the memory, and its axes were exchanged.
        order = _shape(case, axes)
        if order is None or sorted(order) != list(range(len(shape))):
            return UNKNOWN
        shape, steps = tuple(shape[axis] for axis in order), [steps[axis] for axis in order]
    if raw is None or len(raw) != prod(shape) * dtype.width:
        return UNKNOWN
    if dtype.code[:1] in "US":
        if prod(shape) > max(len(raw), _EMPTY):
            return UNKNOWN
        texts = _values(dtype, raw, prod(shape)) or []
        refs = [_text(case, text) for text in texts]
        return _nested(case, _ordered(refs, shape, steps), shape)
    code = "i8" if dtype.code in ("M8", "m8") else dtype.code
    if code not in _TYPES:
        return UNKNOWN
    if prod(max(size, 1) for size in shape) >= 1 << 62:
        return UNKNOWN  # an empty array whose strides torch cannot count
    made = _tensor(case, dtype._replace(code=code), shape, steps, raw)
    return made._replace(words=f"{made.words}{_unit(dtype)}")


def _steps(shape: tuple[int, ...], fortran: bool) -> list[int]:
    """The strides in elements; an axis without elements counts as one."""
    steps: list[int] = []
    size = 1
    for length in shape if fortran else reversed(shape):
        steps.append(size)
        size *= max(length, 1)
    return steps if fortran else steps[::-1]


def numpy_object(case: Case) -> Verdict:
    """Dtypes by their name; generators of random numbers by their state."""
    if case.name == "numpy.dtype":
        dtype = _dtype_of(case.rewrite, case.node)
        if dtype is None:
            return UNKNOWN
        name = _TYPES[dtype.code][0] if dtype.code in _TYPES and not dtype.big else f"{'<>'[dtype.big]}{dtype.code}"
        return Plain(name, f"str {name!r}")
    if not case.name.startswith("numpy.random."):
        return None
    # A generator without a state is no more than its bit generator; that has (state, seed sequence).
    state = case.node.states[-1] if case.node.states else case.args[0] if case.args else -1
    held = case.current(state) if state >= 0 else None
    if type(held) is tuple and held and mapping(case.graph, held[0]) is not None:
        state, held = held[0], case.current(held[0])
    if isinstance(held, Dict):
        return Plain(held, f"its state, a dict of {counted(len(held.pairs) // 2, 'entry')}")
    if type(held) is tuple and held and isinstance(case.current(held[0]), str):
        return Plain(held, f"its state, a tuple of {counted(len(held), 'element')}")  # as get_state gives it
    if case.node.states or not isinstance(held, Call) or not held.states:
        return UNKNOWN
    return numpy_object(Case(case.rewrite, state, held, case.storages))


def _unit(dtype: _Dtype) -> str:
    names = {"M8": "datetime64", "m8": "timedelta64"}
    return f", a {names[dtype.code]}[{dtype.unit}]" if dtype.code in names else ""


def _ordered(refs: list[Ref], shape: tuple[int, ...], steps: list[int]) -> list[Ref]:
    """The elements in the order of their indices."""
    order = [0]
    for size, step in zip(shape, steps) if refs else ():
        order = [before + index * step for before in order for index in range(size)]
    return [refs[place] for place in order] if refs else []


def _text(case: Case, value: object) -> Ref:
    made = _number(case, value).node
    return case.rewrite.add(made)


def _nested(case: Case, items: list[Ref], shape: tuple[int, ...]) -> Verdict:
    """Lists in lists, the last dimension innermost."""
    if len(items) != prod(shape):
        return UNKNOWN
    words = f"list, {'x'.join(map(str, shape))} {'element' if len(items) == 1 else 'elements'}"
    if not shape:
        # As ``tolist`` has it: no list, but the element.
        return Plain(case.current(items[0]), "the element in it")
    for place in range(len(shape) - 1, 0, -1):
        size, count = shape[place], prod(shape[:place])
        if count > max(len(items), _EMPTY):
            return UNKNOWN
        items = [case.rewrite.add(List(items[at * size : (at + 1) * size])) for at in range(count)]
    return Plain(List(items), words)


def _tensor(case: Case, dtype: _Dtype, shape: tuple[int, ...], steps: list[int], raw: bytes) -> Plain:
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
    args = [
        rewrite.add(Persistent(rewrite.add(parts))),
        rewrite.constant(0),
        _numbers(case, shape),
        _numbers(case, steps),
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
    # One dtype is in many arrays, and may have been made plain at another place: what it was counts.
    node: Node = case.graph.nodes[ref] if ref < len(case.graph.nodes) else None
    if not isinstance(node, Call) or called(case.rewrite, node.func) != "numpy.dtype":
        return None
    return _dtype_of(case.rewrite, node)


def _dtype_of(rewrite: GraphEditor, node: Call) -> _Dtype | None:
    args = rewrite.node(node.args)
    code = rewrite.node(args[0]) if type(args) is tuple and args else None
    state = rewrite.node(node.states[-1]) if node.states else ()
    parts = [rewrite.node(part) for part in state] if type(state) is tuple else []
    digits = code[1:] if type(code) is str else ""
    # What follows the byte order are a shape within the element, and the names of its fields.
    if type(code) is not str or any(part is not None for part in parts[2:4]):
        return None
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
        return None
    size = int(digits)
    big = bool(parts[1:]) and parts[1] in (">", b">")
    return _Dtype(code, size * 4 if code[0] == "U" else size, big, _unit_of(rewrite, parts[8:9]))


def _unit_of(rewrite: GraphEditor, metadata: list[Node]) -> str:
    """The unit in the last element of a dtype's state: ({}, ('ns', 1, 1, 1))."""
    pair = metadata[0] if metadata else ()
    unit = rewrite.node(pair[1]) if type(pair) is tuple and len(pair) == 2 else ()
    raw = raw_bytes(rewrite, unit[0]) if type(unit) is tuple and len(unit) > 1 else None
    number = rewrite.node(unit[1]) if type(unit) is tuple and len(unit) > 1 else None
    if raw is None or type(number) is not int:
        return "?"
    return f"{number if 1 < number < 1 << 31 else ''}{cut(raw.decode('latin-1'))}"


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
