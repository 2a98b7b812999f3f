"""Make NumPy values plain: scalars become Python numbers, arrays become tensors with their bytes in a storage.

Sources: numpy's ``multiarray`` pickling (``scalar``, ``_reconstruct``, ``_frombuffer``, the state of ``dtype``).
"""

from __future__ import annotations

import struct
from math import prod
from typing import Final

from ...base.dtypes import BY_NAME
from ...base.records import NamedTuple
from ...base.text import cut
from ...checkpoint.backends import ARRAYS, BUFFERS, FROM_VALUES, backend_arguments
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.graph_builder import PlainTensor
from ...checkpoint.graph_editor import GraphEditor
from ...checkpoint.objects import callable_name, list_items, mapping
from ...checkpoint.tensors import TensorReader, contiguous_strides
from ...pickles.nodes import Call, Dict, Global, List, Node, Ref
from ...values.elements import added_storages, number_width, swapped
from .case import UNKNOWN, Case, Replacement, RuleResult, called_name, new_bytes, raw_bytes

SCALARS: Final = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")

#: (torch dtype, struct code) by numpy code.
_TYPES: Final = {
    "f8": ("float64", "d"),
    "f4": ("float32", "f"),
    "f2": ("float16", "e"),
    "i8": ("int64", "q"),
    "i4": ("int32", "i"),
    "i2": ("int16", "h"),
    "i1": ("int8", "b"),
    "u8": ("uint64", "Q"),
    "u4": ("uint32", "I"),
    "u2": ("uint16", "H"),
    "u1": ("uint8", "B"),
    "b1": ("bool", "?"),
    "c16": ("complex128", "2d"),
    "c8": ("complex64", "2f"),
}
#: Dates and durations are stored as int64.
_TIMES: Final = {"M8": "datetime64", "m8": "timedelta64"}

#: Maximum number of elements without bytes, and of lists without elements, that an array may ask for.
_EMPTY: Final = 100_000


class _Dtype(NamedTuple):
    """A numpy dtype: its code ("f8"; "U5" and "S5" for strings, "O8" for objects), and bytes per element."""

    code: str
    width: int
    big: bool
    unit: str = ""

    @property
    def number_code(self) -> str:
        """The code of the stored numbers in ``_TYPES``."""
        return "i8" if self.code in _TIMES else self.code

    @property
    def time_note(self) -> str:
        """The note on a date or duration; "" for other dtypes."""
        return f", a {_TIMES[self.code]}[{self.unit}]" if self.code in _TIMES else ""


def with_plain_numpy(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with NumPy values made plain in place, for readers; every reference stays the same.

    Arrays of structures have no plain form and stay unchanged. The result must not be saved, because its changes do not
    record this edit.
    """
    # Searching the pickle's bytes is fast; searching its nodes is slow.
    if not any(word in checkpoint.container.pickle for word in (b"multiarray", b"_frombuffer")):
        return checkpoint
    graph = checkpoint.graph
    editor = GraphEditor(graph)
    storages: dict[str, bytes] = {}
    for ref, node in enumerate(graph.nodes):
        name = callable_name(graph, node.func) if type(node) is Call else ""
        if type(node) is not Call or name not in (*SCALARS, *ARRAYS, *BUFFERS):
            continue
        case = Case(editor, ref, node, storages)
        result = numpy_scalar(case) if name in SCALARS else numpy_array(case)
        if isinstance(result, Replacement):
            editor.changed[ref] = result.node
    if not editor.changed or checkpoint.survey.reader.storages.keys() & storages.keys():
        return checkpoint
    edited = editor.done()
    return checkpoint.changed(edited, (), added_storages(checkpoint, storages, TensorReader(edited).storages))


def numpy_scalar(case: Case) -> RuleResult:
    """Replace ``scalar(dtype, bytes)`` by a Python number or string."""
    dtype = _dtype(case, case.args[0]) if len(case.args) == 2 else None
    if dtype is None or dtype.code[0] == "O":
        return UNKNOWN
    raw = raw_bytes(case.editor, case.args[1])
    values = _values(dtype, raw, 1) if raw is not None else None
    if not values or len(values) != 1:
        return UNKNOWN
    value, editor = values[0], case.editor
    if isinstance(value, complex):
        parts = (editor.constant(value.real), editor.constant(value.imag))
        return Replacement(editor.new_call("__builtin__", "complex", parts), shown="complex")
    return Replacement(_plain_node(case, value), shown=f"{type(value).__name__}{dtype.time_note}")


def _plain_node(case: Case, value: object) -> Node:
    assert isinstance(value, bool | int | float | str | bytes)
    return new_bytes(case.editor, case.editor.constant(value.decode("latin-1"))) if isinstance(value, bytes) else value


def numpy_array(case: Case, device: str = "cpu", requires_grad: bool = False, wanted: str = "") -> RuleResult:
    """Replace an array by a tensor (of the dtype ``wanted`` unless ""), or by lists of strings or objects."""
    axes: Ref | None = None
    if case.name in BUFFERS and len(case.args) in (4, 5):
        shape, data = _shape(case, case.args[2]), case.args[0]
        dtype, order = _dtype(case, case.args[1]), case.current(case.args[3])
        fortran = order == "F"
        axes = case.args[4] if len(case.args) == 5 and order == "K" else None
    elif case.name in ARRAYS:
        state = case.last_state()
        if len(state) not in (4, 5):
            return UNKNOWN
        shape, dtype = _shape(case, state[-4]), _dtype(case, state[-3])
        fortran, data = case.current(state[-2]) is True, state[-1]
    else:
        return None
    if shape is None or dtype is None:
        return UNKNOWN
    if dtype.code[0] == "O":
        objects = case.current(data)
        # Objects are pickled in index order, whatever the array's memory layout.
        return _nested(case, list(objects.items), shape) if isinstance(objects, List) else UNKNOWN
    raw = raw_bytes(case.editor, data)
    strides = contiguous_strides(shape[::-1])[::-1] if fortran else contiguous_strides(shape)
    if axes is not None and case.current(axes) is not None:
        # NumPy 2.4 gives the shape in memory; the axes are permuted.
        permutation = _shape(case, axes)
        if permutation is None or sorted(permutation) != list(range(len(shape))):
            return UNKNOWN
        shape, strides = (tuple(sizes[axis] for axis in permutation) for sizes in (shape, strides))
    if raw is None or len(raw) != prod(shape) * dtype.width:
        return UNKNOWN
    if dtype.code[0] in "US":
        if prod(shape) > max(len(raw), _EMPTY):
            return UNKNOWN
        strings = _values(dtype, raw, prod(shape)) or []
        refs = [case.editor.add(_plain_node(case, value)) for value in strings]
        return _nested(case, _in_index_order(refs, shape, strides), shape)
    if dtype.number_code not in _TYPES or prod(max(size, 1) for size in shape) >= 1 << 62:
        return UNKNOWN  # this includes empty arrays whose strides torch cannot count
    target = BY_NAME[_TYPES[dtype.number_code][0]]
    raw = swapped(raw, number_width(target)) if dtype.big else raw
    if wanted not in ("", target.name):
        if (target.name, wanted) != ("float32", "bfloat16") or any(raw[0::4]) or any(raw[1::4]):
            return UNKNOWN  # only torch can compute these values
        target, halves = BY_NAME[wanted], bytearray(len(raw) // 2)
        halves[0::2], halves[1::2] = raw[2::4], raw[3::4]
        raw = bytes(halves)
    key = f"array-{len(case.storages)}"
    case.storages[key] = raw
    tensor = PlainTensor(target, shape, strides, key, len(raw), 0, device, requires_grad)
    words = f"tensor, {target.name} {'x'.join(map(str, shape)) or 'scalar'}{dtype.time_note}"
    return Replacement(case.editor.new_tensor(tensor), shown=words)


def device_tensor(case: Case) -> RuleResult:
    """Replace ``_rebuild_device_tensor_from_numpy(...)``; NumPy has bfloat16 as float32 with empty lower halves."""
    if backend_arguments(case.name) != FROM_VALUES or len(case.args) < 4:
        return None
    node, dtype, device = (case.current(ref) for ref in case.args[:3])
    if not isinstance(node, Call) or not isinstance(dtype, Global) or not isinstance(device, str):
        return None
    return numpy_array(case.inner(case.args[0], node), device, case.current(case.args[3]) is True, dtype.name)


def numpy_dtype(case: Case) -> RuleResult:
    """Replace a dtype by its name."""
    dtype = _dtype_of(case.editor, case.node)
    if dtype is None:
        return UNKNOWN
    is_known = dtype.code in _TYPES and not dtype.big
    return Replacement(_TYPES[dtype.code][0] if is_known else f"{'<>'[dtype.big]}{dtype.code}")


def numpy_generator(case: Case) -> RuleResult:
    """Replace a random generator by its state: a dict, or the tuple that ``get_state`` returns."""
    # A generator without a state is only its bit generator, which has (state, seed sequence).
    ref = case.node.states[-1] if case.node.states else case.args[0] if case.args else -1
    state = case.current(ref) if ref >= 0 else None
    if type(state) is tuple and state and mapping(case.graph, state[0]) is not None:
        ref, state = state[0], case.current(state[0])
    if isinstance(state, Dict) or (type(state) is tuple and state and isinstance(case.current(state[0]), str)):
        return Replacement(state, ": its state")
    if case.node.states or not isinstance(state, Call) or not state.states:
        return UNKNOWN
    inner = case.inner(ref, state)
    return numpy_generator(inner) if inner.name.startswith("numpy.random.") else UNKNOWN


def _in_index_order(refs: list[Ref], shape: tuple[int, ...], strides: tuple[int, ...]) -> list[Ref]:
    places = [0]
    for size, stride in zip(shape, strides) if refs else ():
        places = [before + index * stride for before in places for index in range(size)]
    return [refs[place] for place in places] if refs else []


def _nested(case: Case, items: list[Ref], shape: tuple[int, ...]) -> RuleResult:
    """Return nested lists, the last dimension innermost; without dimensions the element itself, as ``tolist`` does."""
    if len(items) != prod(shape):
        return UNKNOWN
    words = f"list, {'x'.join(map(str, shape))} {'element' if len(items) == 1 else 'elements'}"
    if not shape:
        return Replacement(case.current(items[0]), shown="the element in it")
    for axis in range(len(shape) - 1, 0, -1):
        size, count = shape[axis], prod(shape[:axis])
        if count > max(len(items), _EMPTY):
            return UNKNOWN
        items = [case.editor.add(List(items[at * size : (at + 1) * size])) for at in range(count)]
    return Replacement(List(items), shown=words)


def _shape(case: Case, ref: Ref) -> tuple[int, ...] | None:
    refs = case.current(ref)
    if type(refs) is not tuple:
        return None
    sizes = tuple(size for part in refs if type(size := case.current(part)) is int and 0 <= size < 1 << 48)
    return sizes if len(sizes) == len(refs) <= 64 and prod(sizes) < 1 << 48 else None


def _dtype(case: Case, ref: Ref) -> _Dtype | None:
    """Read ``dtype(code, align, copy)`` and its byte order; None for another object or a structured dtype."""
    # Many arrays share one dtype, which may already have been made plain elsewhere: read the original node.
    node: Node = case.graph.nodes[ref] if ref < len(case.graph.nodes) else None
    if not isinstance(node, Call) or called_name(case.editor, node.func) != "numpy.dtype":
        return None
    return _dtype_of(case.editor, node)


def _dtype_of(editor: GraphEditor, node: Call) -> _Dtype | None:
    args = list_items(editor.node(node.args))
    code = editor.node(args[0]) if args else None
    parts = [editor.node(part) for part in list_items(editor.node(node.states[-1]))] if node.states else []
    digits = code[1:] if type(code) is str else ""
    # After the byte order come a shape within the element and the field names, which are not supported.
    if type(code) is not str or any(part is not None for part in parts[2:4]):
        return None
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
        return None
    size = int(digits)
    big = bool(parts[1:]) and parts[1] in (">", b">")
    return _Dtype(code, size * 4 if code[0] == "U" else size, big, _unit(editor, parts[8:9]))


def _unit(editor: GraphEditor, metadata: list[Node]) -> str:
    """Return the unit in the last element of a dtype's state, ({}, ('ns', 1, 1, 1)); "?" if it is unreadable."""
    pair = list_items(metadata[0]) if metadata else ()
    unit = list_items(editor.node(pair[1])) if len(pair) == 2 else ()
    if len(unit) < 2:
        return "?"
    raw, number = raw_bytes(editor, unit[0]), editor.node(unit[1])
    if raw is None or type(number) is not int:
        return "?"
    return f"{number if 1 < number < 1 << 31 else ''}{cut(raw.decode('latin-1'))}"


def _values(dtype: _Dtype, raw: bytes, count: int) -> list[object] | None:
    """Return the elements as Python numbers, strings or bytes; None if the size is wrong or the dtype unsupported."""
    width = dtype.width
    if len(raw) != width * count:
        return None
    if dtype.code[0] in "US":
        pieces = [raw[at : at + width] for at in range(0, len(raw), width)] if width else [b""] * count
        if dtype.code[0] == "S":
            return [piece.rstrip(b"\0") for piece in pieces]
        encoding = "utf-32-be" if dtype.big else "utf-32-le"
        return [piece.decode(encoding, "replace").rstrip("\0") for piece in pieces]
    if dtype.number_code not in _TYPES:
        return None
    form = _TYPES[dtype.number_code][1]
    values = struct.unpack(f"{'>' if dtype.big else '<'}{count * len(form)}{form[-1]}", raw)
    return [complex(*values[at : at + 2]) for at in range(0, len(values), 2)] if len(form) == 2 else list(values)
