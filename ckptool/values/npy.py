"""A tensor as a NumPy file: magic, header, elements.

Source: ``numpy/lib/format.py``, which describes the format. Versions 1.0 and 2.0 differ in the width of one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from shlex import quote
from struct import pack
from typing import Final, NamedTuple

from ..base.errors import RefusedError
from ..checkpoint.checkpoint import Checkpoint
from ..files.sources import Computed, Plan
from ..pickles.nodes import Ref
from .interpretation import Reading, reading, repeats, resolved
from .numbers import numbers

#: torch dtype -> that of NumPy. What NumPy does not have becomes the next wider one, which holds every value of it.
_TYPES: Final = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<f4",
    "float8_e5m2": "<f4",
    "float8_e4m3fn": "<f4",
    "float8_e5m2fnuz": "<f4",
    "float8_e4m3fnuz": "<f4",
    "float8_e8m0fnu": "<f4",
    "complex128": "<c16",
    "complex64": "<c8",
    "complex32": "<c8",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
}
_NAMES: Final = {"<f4": "float32", "<c8": "complex64"}
_TRUE: Final = bytes([0, *[1] * 255])
#: Dimensions that an array of NumPy 2 can have; 32 before.
_DIMENSIONS: Final = 64


class Array(NamedTuple):
    """A tensor as NumPy has it: ``descr`` its type, ``size`` its bytes, ``chunks`` its elements in row-major order.

    ``dtype`` is that of torch, ``widened`` the name of the type that takes its place where NumPy does not have it, ""
    otherwise.
    """

    descr: str
    shape: tuple[int, ...]
    size: int
    chunks: Callable[[], Iterable[bytes]]
    dtype: str
    widened: str


def array_of(checkpoint: Checkpoint, ref: Ref, name: str) -> Array:
    """The tensor ``ref`` as an array; ``name`` is what the user calls it.

    Raises RefusedError for what is no dense tensor of numbers.
    """
    tensor = checkpoint.survey.reader.tensor(ref)
    how = reading(checkpoint, ref)
    step = f"ckptool get {quote(checkpoint.path)} {quote(name or '.')} --json"
    if tensor is None:
        raise RefusedError(f"{name or 'the whole file'} is no tensor", path=checkpoint.path, next=step)
    if isinstance(how, str):
        raise RefusedError(f"{name or 'the tensor'}: {how}", path=checkpoint.path, next=f"see it with {step[:-7]}")
    if how.of not in ("elements", "part") or how.tensor.dtype not in _TYPES:
        kind = tensor.kind if tensor.kind != "dense" else tensor.dtype
        what = f"{name or 'the tensor'} is a tensor of the kind {kind}, which NumPy does not have"
        raise RefusedError(what, path=checkpoint.path, next=f"its parts: {step}")
    if len(how.tensor.shape) > _DIMENSIONS:
        what = f"{name or 'the tensor'} has {len(how.tensor.shape)} dimensions, an array at most {_DIMENSIONS}"
        raise RefusedError(what, path=checkpoint.path)
    endless = repeats(how.tensor.shape, how.tensor.stride)
    if endless:
        raise RefusedError(f"{name or 'the tensor'}: {endless}", path=checkpoint.path)
    dtype = how.tensor.dtype
    descr = _TYPES[dtype]
    widened = _NAMES.get(descr, "") if _NAMES.get(descr, dtype) != dtype else ""
    size = how.tensor.numel * int(descr[2:])
    return Array(descr, how.tensor.shape, size, lambda: _chunks(checkpoint, how), dtype, widened)


def npy_plan(array: Array) -> Plan:
    """The file: header and elements."""
    return Plan((_header(array.descr, array.shape), Computed(array.size, array.chunks)))


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    spelled = f"({shape[0]},)" if len(shape) == 1 else f"({', '.join(map(str, shape))})"
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {spelled}, }}"
    # The elements begin at a multiple of 64, so that they can be mapped.
    short = len(text) < 65_000
    start = 10 if short else 12
    text += " " * (-(start + len(text) + 1) % 64) + "\n"
    return b"\x93NUMPY" + (pack("<BBH", 1, 0, len(text)) if short else pack("<BBI", 2, 0, len(text))) + text.encode()


def _chunks(checkpoint: Checkpoint, how: Reading) -> Iterator[bytes]:
    for data in resolved(checkpoint, how):
        for at in range(0, len(data), 1 << 20):
            yield _wide(data[at : at + (1 << 20)], how.tensor.dtype)


def _wide(data: bytes, dtype: str) -> bytes:
    """The same numbers in the type that NumPy has."""
    if dtype == "bool":
        return data.translate(_TRUE)
    if dtype == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        return bytes(wide)
    if dtype == "complex32":
        values = numbers(data, "float16")
        return pack(f"<{len(values)}f", *values)
    if dtype.startswith("float8"):
        wide = bytearray(4 * len(data))
        for place, table in enumerate(_tables(dtype)):
            wide[place::4] = data.translate(table)
        return bytes(wide)
    return data


@cache
def _tables(dtype: str) -> tuple[bytes, ...]:
    """The four bytes of the float32 of every code."""
    words = [pack("<f", value) for value in numbers(bytes(range(256)), dtype)]
    return tuple(bytes(word[place] for word in words) for place in range(4))
