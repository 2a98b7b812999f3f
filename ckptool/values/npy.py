"""A tensor as a NumPy file: magic, header, elements.

Source: ``numpy/lib/format.py``, which describes the format. Versions 1.0 and 2.0 differ in the width of one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from struct import pack
from typing import Final

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.steps import command
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..files.sources import Computed, Plan
from ..pickles.nodes import Ref
from .interpretation import Reading, excessive_repeats, interpret, resolved_bytes
from .numeric import to_numbers, widened_bfloat16

#: dtype -> NumPy's description of it.
_DESCRIPTIONS: Final = {
    **{"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex128": "<c16", "complex64": "<c8", "bool": "|b1"},
    **{"int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "|i1"},
    **{"uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "|u1"},
}
#: torch dtype that NumPy does not have -> a wider dtype that holds all its values; "" for two numbers in a byte.
WIDENED: Final = {
    "bfloat16": "float32",
    "complex32": "complex64",
    "bcomplex32": "complex64",
    "float4_e2m1fn_x2": "",
} | {f"float8_{kind}": "float32" for kind in ("e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e8m0fnu")}
_BOOLS: Final = bytes([0, *[1] * 255])
#: Maximum number of dimensions of an array in NumPy 2; in earlier versions it is 32.
_DIMENSIONS: Final = 64


class Array(NamedTuple):
    """A tensor as a NumPy array: ``descr`` is its type, ``elements`` its bytes in row-major order.

    ``dtype`` is the torch dtype. ``widened`` is the name of the type that replaces it if NumPy does not have it,
    otherwise "".
    """

    descr: str
    shape: tuple[int, ...]
    elements: Computed
    dtype: str
    widened: str


def array_of(checkpoint: Checkpoint, ref: Ref, name: str, view: Tensor | None = None) -> Array:
    """Return the tensor ``ref`` as an array; ``name`` is its path as the user gave it, ``view`` a slice of it.

    Raise RefusedError for anything but a dense tensor of numbers.
    """
    tensor = checkpoint.survey.reader.tensor(ref)
    reading = interpret(checkpoint, ref)
    label = name or "the tensor"
    place = checkpoint.path, name or "."
    as_json = command("get", *place, json=True)
    if tensor is None:
        raise RefusedError(f"{name or 'the whole file'} is not a tensor", path=checkpoint.path, next=as_json)
    if isinstance(reading, str):
        raise RefusedError(f"{label}: {reading}", path=checkpoint.path, next="see it with " + command("get", *place))
    if view is not None and reading.of == "elements":
        reading = reading._replace(tensor=view)
    dtype, shape = reading.tensor.dtype, reading.tensor.shape
    widened = WIDENED.get(dtype, "")
    if reading.of not in ("elements", "part") or (widened or dtype) not in _DESCRIPTIONS:
        kind = tensor.kind if tensor.kind != "dense" else tensor.dtype
        message = f"{label} is a tensor of the kind {kind}, which NumPy does not have"
        raise RefusedError(message, path=checkpoint.path, next="its parts: " + as_json)
    if len(shape) > _DIMENSIONS:
        message = f"{label} has {len(shape)} dimensions, an array at most {_DIMENSIONS}"
        raise RefusedError(message, path=checkpoint.path)
    repeats = excessive_repeats(shape, reading.tensor.stride)
    if repeats:
        raise RefusedError(f"{label}: {repeats}", path=checkpoint.path)
    descr = _DESCRIPTIONS[widened or dtype]
    size = reading.tensor.numel * int(descr[2:])
    return Array(descr, shape, Computed(size, _chunks, (reading,)), dtype, widened)


def npy_plan(array: Array) -> Plan:
    """Return the plan of the file: header and elements."""
    text = f"{{'descr': '{array.descr}', 'fortran_order': False, 'shape': {array.shape}, }}"
    # The elements begin at a multiple of 64, so that they can be memory-mapped.
    short = len(text) < 65_000
    start = 10 if short else 12
    text += " " * (-(start + len(text) + 1) % 64) + "\n"
    version = pack("<BBH", 1, 0, len(text)) if short else pack("<BBI", 2, 0, len(text))
    return Plan((b"\x93NUMPY" + version + text.encode(), array.elements))


def _chunks(reading: Reading) -> Iterator[bytes]:
    for data in resolved_bytes(reading):
        for at in range(0, len(data), 1 << 20):
            yield _numpy_bytes(data[at : at + (1 << 20)], reading.tensor.dtype)


def _numpy_bytes(data: bytes, dtype: str) -> bytes:
    """Return the same numbers in a type that NumPy has."""
    if dtype == "bool":
        return data.translate(_BOOLS)
    if dtype in ("bfloat16", "bcomplex32"):
        return widened_bfloat16(data)
    if dtype == "complex32":
        values = to_numbers(data, "float16")
        return pack(f"<{len(values)}f", *values)
    if dtype.startswith("float8"):
        wide = bytearray(4 * len(data))
        for place, table in enumerate(_float8_tables(dtype)):
            wide[place::4] = data.translate(table)
        return bytes(wide)
    return data


@cache
def _float8_tables(dtype: str) -> tuple[bytes, ...]:
    """Return four tables, one for each byte of the float32 that a code represents."""
    words = [pack("<f", value) for value in to_numbers(bytes(range(256)), dtype)]
    return tuple(bytes(word[place] for word in words) for place in range(4))
