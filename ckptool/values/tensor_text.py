"""A tensor as text, in the manner in which torch prints one: four decimals, long ones with their edges only.

Source: ``torch/_tensor_str.py``, which decides between plain and scientific numbers in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import isfinite, prod
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..base.text import cut
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Body
from ..checkpoint.sharding import Sharding, sharding
from ..checkpoint.tensors import Tensor
from ..files.sources import Span
from ..pickles.nodes import Ref
from .interpretation import Affine, Reading, numbers_in, reading, repeats
from .numbers import Number

#: Elements that are printed one and all.
_WHOLE: Final = 1_000
_EDGE: Final = 3
#: Dimensions that are shown as brackets in brackets.
_NESTED: Final = 32
_WIDTH: Final = 80
#: What the parts of composite tensors are called, in the order in which the pickle has them.
_PARTS: Final = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
    "nested": ("buffer", "sizes", "strides", "offsets"),
}

Nested: TypeAlias = "list[Nested] | Number | None"


def head_words(tensor: Tensor) -> str:
    """What it is: ``float32 4x3x1x1, cuda:0``."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    words = f"{tensor.dtype} {shape}, {tensor.location}" if tensor.location else f"{tensor.dtype} {shape}"
    if tensor.kind not in ("dense", "quantized", "meta"):
        words += f", {tensor.kind}"
    if tensor.cls:
        words += f", {tensor.cls}"
    return words + (", requires_grad" if tensor.requires_grad else "")


def tensor_lines(checkpoint: Checkpoint, ref: Ref) -> Iterator[str]:
    """The lines that show a tensor. Raises MalformedError where its bytes are missing."""
    tensor = checkpoint.survey.reader.tensor(ref)
    assert tensor is not None
    spread = sharding(checkpoint.survey.reader, ref, tensor)
    if spread is not None:
        yield from _spread_lines(checkpoint, spread, tensor)
        return
    yield head_words(tensor)
    if tensor.parts and tensor.kind != "quantized":
        for name, part in part_names(tensor):
            inner = checkpoint.survey.reader.tensor(part)
            if inner is None or (inner.parts and inner.kind != "quantized"):
                continue
            yield ""
            yield f"{name}:"
            yield from tensor_lines(checkpoint, part)
        return
    how = readable(checkpoint, ref)
    if isinstance(how, str):
        yield f"({how})"
        return
    if how.affine is not None:
        yield f"integers, to be read as (q - zero_point) * scale: {_affine_words(how.affine)}"
    if how.tensor.dtype.startswith(("bits", "float4")):
        yield "bytes as they are: torch gives them no value by themselves"
    body = checkpoint.body(how.tensor.storage)
    in_place = body is not None and _in_place(body, how.tensor)
    endless = "" if in_place else repeats(how.tensor.shape, how.tensor.stride)
    if endless:
        yield f"({endless})"
        return
    yield from _drawn(_picked(checkpoint, how, in_place), how.tensor.dtype)


def _spread_lines(checkpoint: Checkpoint, spread: Sharding, tensor: Tensor) -> Iterator[str]:
    """A tensor that is spread over ranks: what it is, and the parts of it that are here."""
    head = head_words(tensor._replace(kind="dense", cls=spread.kind))
    owner = f"rank {spread.rank}" if spread.rank >= 0 else "one rank"
    yield f"{head}: {spread.words}"
    if not spread.parts:
        yield f"({owner} had nothing of it)"
    for part in spread.parts:
        at = part.slices(tensor.shape)
        yield ""
        yield f"what {owner} had of it{', ' + at if at else ''}:"
        yield from tensor_lines(checkpoint, part.ref)


def part_names(tensor: Tensor) -> Iterator[tuple[str, Ref]]:
    """The tensors inside a composite one, by what torch calls them."""
    names = _PARTS.get(tensor.kind, ())
    for number, part in enumerate(tensor.parts):
        yield names[number] if number < len(names) else f"part {number}", part


def readable(checkpoint: Checkpoint, ref: Ref) -> Reading | str:
    """How to read it; bits are shown as integers, and what has no scale as well."""
    how = reading(checkpoint, ref)
    tensor = checkpoint.survey.reader.tensor(ref)
    if isinstance(how, str) and tensor is not None and tensor.storage and tensor.dtype in BY_NAME:
        return Reading(tensor, "elements") if tensor.dtype.startswith(("bits", "q")) else how
    return how


def _affine_words(affine: Affine) -> str:
    def told(values: Sequence[float]) -> str:
        return cut(", ".join(f"{value:g}" for value in values[:20]) + (", ..." if len(values) > 20 else ""))

    if affine.axis < 0:
        return f"scale {affine.scales[0]:g}, zero_point {affine.zero_points[0]:g}"
    return f"axis {affine.axis}, scales {told(affine.scales)}; zero_points {told(affine.zero_points)}"


def _picked(checkpoint: Checkpoint, how: Reading, in_place: bool) -> Nested:
    """The numbers to show, in lists in lists; None stands for those between. ``in_place``: each can be read alone."""
    tensor = how.tensor
    shape, strides = tensor.shape, tensor.stride
    if 0 in shape:
        return []
    edge = next((edge for edge in (3, 2, 1) if prod(min(size, 2 * edge) for size in shape) <= _WHOLE), 0)
    if len(shape) > _NESTED or not edge:  # even the edges are too many: as if it had one dimension
        edge, shape = 0, (tensor.numel,)
    if tensor.numel <= _WHOLE:
        values = [value for part in numbers_in(checkpoint, how) for value in part]
        return _nested(iter(values), [list(range(size)) for size in shape])
    chosen = [_edges(size, edge or _EDGE) for size in shape]
    wanted = [[index for index in axis if index is not None] for axis in chosen]
    if edge and in_place:
        values = []
        for place in product(*wanted[:-1]):
            at = tensor.offset + sum(index * step for index, step in zip(place, strides))
            for index in wanted[-1]:
                one = tensor._replace(shape=(), stride=(), offset=at + index * strides[-1])
                values += next(numbers_in(checkpoint, how._replace(tensor=one)))
    else:
        values = list(_found(numbers_in(checkpoint, how), _flat(wanted, shape)))
    return _nested(iter(values), chosen)


def _in_place(body: Body, tensor: Tensor) -> bool:
    """Can single elements be read where they stand?"""
    packed = BY_NAME[tensor.dtype].packed if tensor.dtype in BY_NAME else 1
    return isinstance(body.piece, Span) and not body.compressed and packed == 1


def _edges(size: int, edge: int) -> list[int | None]:
    """The first and the last indices of an axis, None for those between."""
    if size <= 2 * edge:
        return list(range(size))
    return [*range(edge), None, *range(size - edge, size)]


def _flat(wanted: list[list[int]], shape: tuple[int, ...]) -> Iterator[int]:
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for place in product(*wanted):
        yield sum(index * step for index, step in zip(place, steps))


def _found(pieces: Iterator[list[Number]], places: Iterator[int]) -> Iterator[Number]:
    """The numbers at the places, which ascend."""
    begin, piece = 0, next(pieces)
    for place in places:
        while place >= begin + len(piece):
            begin, piece = begin + len(piece), next(pieces)
        yield piece[place - begin]


def _nested(values: Iterator[Number], chosen: Sequence[Sequence[int | None]]) -> Nested:
    if not chosen:
        return next(values)
    return [None if index is None else _nested(values, chosen[1:]) for index in chosen[0]]


# -- drawing ----------------------------------------------------------------------------------------------------------


def _drawn(shown: Nested, dtype: str) -> Iterator[str]:
    texts = _texts([value for value in _flattened(shown) if value is not None], dtype)
    width = max(map(len, texts), default=0)
    yield from _lines(shown, iter(text.rjust(width) for text in texts), 0, width)


def _flattened(shown: Nested) -> Iterator[Number | None]:
    if isinstance(shown, list):
        for item in shown:
            yield from _flattened(item)
    else:
        yield shown


def _lines(shown: Nested, texts: Iterator[str], depth: int, width: int) -> list[str]:
    if not isinstance(shown, list):
        return [next(texts)]
    if not shown or not isinstance(next((item for item in shown if item is not None), None), list):
        return _row(["..." if item is None else next(texts) for item in shown], depth, width)
    lines: list[str] = []
    deeper = isinstance(shown[0], list) and bool(shown[0]) and isinstance(shown[0][0], list)
    for number, item in enumerate(shown):
        block = ["..."] if item is None else _lines(item, texts, depth + 1, width)
        if number == 0:
            block = [block[0], *(" " + line if line else "" for line in block[1:])]
            block[0] = "[" + block[0]
        else:
            block = [" " + line if line else "" for line in block]
            if deeper:
                lines.append("")
        block[-1] += "," if number < len(shown) - 1 else "]"
        lines += block
    return lines


def _row(texts: list[str], depth: int, width: int) -> list[str]:
    """One row of numbers, on as many lines as it takes."""
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
    """All in one manner: whole numbers with a dot, four decimals, or scientific where these would not tell."""
    sizes = [abs(value) for value in values if isfinite(value) and value]
    low, high = min(sizes, default=1.0), max(sizes, default=1.0)
    whole = all(size == int(size) for size in sizes)
    scientific = high / low > 1000 or high > 1e8 or (low < 1e-4 and not whole)
    form = "{:.4e}" if scientific else "{:.0f}." if whole else "{:.4f}"
    return [form.format(value) if isfinite(value) else str(value) for value in values]
