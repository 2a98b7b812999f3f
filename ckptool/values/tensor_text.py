"""Print a tensor as torch does: four decimals, and only the edges of a large tensor.

Source: ``torch/_tensor_str.py``, which chooses between plain and scientific numbers in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import isfinite, prod
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..base.text import cut, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sharding import Sharding, sharding
from ..checkpoint.tensors import Tensor, TensorReader
from ..files.sources import Span
from ..pickles.nodes import Ref
from .elements import storage_reader
from .interpretation import Affine, Reading, excessive_repeats, interpret, numbers_in
from .numeric import Number

#: Maximum number of elements of a tensor that is printed in full.
_WHOLE: Final = 1_000
_EDGE: Final = 3
#: Maximum number of dimensions shown as nested brackets.
_NESTED: Final = 32
_WIDTH: Final = 80
#: The names of the parts of composite tensors, in pickle order.
_PARTS: Final = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
    "nested": ("buffer", "sizes", "strides", "offsets"),
}

Nested: TypeAlias = "list[Nested] | Number | None"


def tensor_summary(tensor: Tensor) -> str:
    """Describe a tensor in one line: ``float32 4x3x1x1, cuda:0``."""
    kind = "" if tensor.kind in ("dense", "quantized", "meta") else tensor.kind
    facts = f"{tensor.dtype} {shape_text(tensor.shape)}", tensor.location, kind, tensor.cls
    return ", ".join(filter(None, (*facts, "requires_grad" if tensor.requires_grad else "")))


def tensor_lines(checkpoint: Checkpoint, ref: Ref) -> Iterator[str]:
    """Yield the lines that show a tensor. Raise MalformedError if bytes are missing."""
    reader = checkpoint.survey.reader
    tensor = reader.tensor(ref)
    assert tensor is not None
    shards = sharding(reader, ref, tensor)
    if shards is not None:
        yield from _sharded_lines(checkpoint, shards, tensor)
        return
    yield tensor_summary(tensor)
    if tensor.parts and tensor.kind != "quantized":
        for name, part, _ in shown_parts(reader, tensor):
            yield from ("", f"{name}:")
            yield from tensor_lines(checkpoint, part)
        return
    reading = interpret_for_display(checkpoint, ref)
    if isinstance(reading, str):
        yield f"({reading})"
        return
    if reading.affine is not None:
        yield f"integers, to be read as (q - zero_point) * scale: {_affine_words(reading.affine)}"
    if reading.tensor.dtype.startswith(("bits", "float4")):
        yield "bytes as they are: torch gives them no value by themselves"
    addressable = _is_addressable(checkpoint, reading.tensor)
    repeats = "" if addressable else excessive_repeats(reading.tensor.shape, reading.tensor.stride)
    if repeats:
        yield f"({repeats})"
        return
    shown = _displayed(checkpoint, reading, addressable)
    texts = _texts([value for value in _flattened(shown) if value is not None], reading.tensor.dtype)
    width = max(map(len, texts), default=0)
    yield from _lines(shown, iter(text.rjust(width) for text in texts), 0, width)


def _sharded_lines(checkpoint: Checkpoint, shards: Sharding, tensor: Tensor) -> Iterator[str]:
    """Yield the lines that show a tensor sharded over ranks: a summary, and the parts in this file."""
    summary = tensor_summary(tensor._replace(kind="dense", cls=shards.kind))
    owner = f"rank {shards.rank}" if shards.rank >= 0 else "one rank"
    yield f"{summary}: {shards.words}"
    if not shards.parts:
        yield f"({owner} had no part of it)"
    for part in shards.parts:
        slices = part.slices(tensor.shape)
        yield from ("", f"the part that {owner} had{', ' + slices if slices else ''}:")
        yield from tensor_lines(checkpoint, part.ref)


def shown_parts(reader: TensorReader, tensor: Tensor) -> Iterator[tuple[str, Ref, Tensor]]:
    """Yield the parts of a composite tensor that hold numbers: torch's name, the reference, the part."""
    names = _PARTS.get(tensor.kind, ())
    for number, ref in enumerate(tensor.parts):
        part = reader.tensor(ref)
        if part is not None and (not part.parts or part.kind == "quantized"):
            yield names[number] if number < len(names) else f"part {number}", ref, part


def interpret_for_display(checkpoint: Checkpoint, ref: Ref) -> Reading | str:
    """Return how to read a tensor as ``interpret`` does, but bits and quantized tensors without a scale as integers."""
    reading = interpret(checkpoint, ref)
    tensor = checkpoint.survey.reader.tensor(ref)
    if isinstance(reading, str) and tensor is not None and tensor.storage and tensor.dtype in BY_NAME:
        bare = tensor.dtype.startswith(("bits", "q"))
        return Reading(tensor, storage_reader(checkpoint, tensor.storage), "elements") if bare else reading
    return reading


def _affine_words(affine: Affine) -> str:
    def join(values: Sequence[float]) -> str:
        return cut(", ".join(f"{value:g}" for value in values[:20]) + (", ..." if len(values) > 20 else ""))

    if affine.axis < 0:
        return f"scale {affine.scales[0]:g}, zero_point {affine.zero_points[0]:g}"
    return f"axis {affine.axis}, scales {join(affine.scales)}; zero_points {join(affine.zero_points)}"


def _is_addressable(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether single elements can be read without reading everything before them."""
    body = checkpoint.body(tensor.storage)
    in_file = body is not None and isinstance(body.piece, Span) and not body.compressed
    return in_file and BY_NAME[tensor.dtype].packed == 1


def _displayed(checkpoint: Checkpoint, reading: Reading, addressable: bool) -> Nested:
    """Return the numbers to show as nested lists, with None for omitted numbers."""
    tensor = reading.tensor
    shape, strides = tensor.shape, tensor.stride
    if 0 in shape:
        return []
    edge = next((edge for edge in (3, 2, 1) if prod(min(size, 2 * edge) for size in shape) <= _WHOLE), 0)
    if len(shape) > _NESTED or not edge:  # even the edges are too many: show it like a one-dimensional tensor
        edge, shape = 0, (tensor.numel,)
    if tensor.numel <= _WHOLE:
        values = [value for part in numbers_in(reading) for value in part]
        return nested(iter(values), [range(size) for size in shape])
    axes = [_edges(size, edge or _EDGE) for size in shape]
    # One tuple of indices for each number to show.
    places = product(*([index for index in axis if index is not None] for axis in axes))
    if edge and addressable:
        values = []
        for place in places:
            offset = tensor.offset + sum(index * step for index, step in zip(place, strides))
            element = tensor._replace(shape=(), stride=(), offset=offset)
            values += next(numbers_in(reading._replace(tensor=element)))
    else:
        steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        numbers = (sum(index * step for index, step in zip(place, steps)) for place in places)
        values = list(_at(numbers_in(reading), numbers))
    return nested(iter(values), axes)


def _edges(size: int, edge: int) -> list[int | None]:
    """Return the first and last indices of an axis, with None for the indices between them."""
    if size <= 2 * edge:
        return list(range(size))
    return [*range(edge), None, *range(size - edge, size)]


def _at(pieces: Iterator[list[Number]], places: Iterator[int]) -> Iterator[Number]:
    """Yield the numbers at ascending places."""
    begin, piece = 0, next(pieces)
    for place in places:
        while place >= begin + len(piece):
            begin, piece = begin + len(piece), next(pieces)
        yield piece[place - begin]


def nested(values: Iterator[Number], axes: Sequence[Sequence[int | None]]) -> Nested:
    """Return numbers in row-major order as nested lists, given the indices of each axis; None stays None."""
    if not axes:
        return next(values)
    if len(axes) == 1:
        return [None if index is None else next(values) for index in axes[0]]
    return [None if index is None else nested(values, axes[1:]) for index in axes[0]]


# -- Drawing


def _flattened(shown: Nested) -> Iterator[Number | None]:
    if isinstance(shown, list):
        for item in shown:
            yield from _flattened(item)
    else:
        yield shown


def _lines(shown: Nested, texts: Iterator[str], depth: int, width: int) -> list[str]:
    if not isinstance(shown, list):
        return [next(texts)]
    if not any(isinstance(item, list) for item in shown):
        return _row(["..." if item is None else next(texts) for item in shown], depth, width)
    lines: list[str] = []
    gap = isinstance(shown[0], list) and bool(shown[0]) and isinstance(shown[0][0], list)
    for number, item in enumerate(shown):
        block = ["..."] if item is None else _lines(item, texts, depth + 1, width)
        if number and gap:
            lines.append("")
        block = [" " + line if line else "" for line in block]
        if number == 0:
            block[0] = "[" + block[0][1:]
        block[-1] += "," if number < len(shown) - 1 else "]"
        lines += block
    return lines


def _row(texts: list[str], depth: int, width: int) -> list[str]:
    """Return one row of numbers, on as many lines as needed."""
    room = max((_WIDTH - depth - 2) // (width + 2), 1)
    rows = [", ".join(texts[at : at + room]) for at in range(0, len(texts), room)] or [""]
    lines = ["[" + rows[0], *(" " + row for row in rows[1:])]
    return [line + "," for line in lines[:-1]] + [lines[-1] + "]"]


def _texts(values: list[Number], dtype: str) -> list[str]:
    if any(isinstance(value, complex) for value in values):
        pairs = [complex(value) for value in values]
        real, imaginary = _floats([value.real for value in pairs]), _floats([value.imag for value in pairs])
        return [f"{a}{'' if b.startswith('-') else '+'}{b}j" for a, b in zip(real, imaginary)]
    if dtype in BY_NAME and BY_NAME[dtype].floating and not dtype.startswith("float4"):
        return _floats([value.real for value in values])
    return [str(value) for value in values]


def _floats(values: Sequence[float]) -> list[str]:
    """Format all numbers alike: whole numbers with a dot, four decimals, or scientific if these would hide them."""
    sizes = [abs(value) for value in values if isfinite(value) and value]
    low, high = min(sizes, default=1.0), max(sizes, default=1.0)
    whole = all(size == int(size) for size in sizes)
    scientific = high / low > 1000 or high > 1e8 or (low < 1e-4 and not whole)
    form = "{:.4e}" if scientific else "{:.0f}." if whole else "{:.4f}"
    return [form.format(value) if isfinite(value) else str(value) for value in values]
