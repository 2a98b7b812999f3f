"""The bytes of storages and tensors, in pieces: as they are stored, or as plain rows of elements.

What a tensor *is* does not depend on its strides, its offset or the byte order of its file: ``elements`` gives the
same bytes for equal tensors. No torch is needed for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from typing import Final, Literal

from .checkpoint import Body, Checkpoint
from .dtypes import BY_NAME, Dtype
from .errors import MalformedError
from .human import salvage_step
from .source import Computed, Span
from .tensors import Tensor, extent
from .zips import contents

__all__ = [
    "contiguous_strides",
    "dtype_of",
    "elements",
    "holds_rows",
    "stored_bytes",
    "swapped",
    "tensor_size",
    "whole_chunks",
]

#: Bytes looked at in one go.
_CHUNK: Final = 1 << 20
_CODES: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def dtype_of(tensor: Tensor) -> Dtype | None:
    """The dtype of a tensor's elements, None for one that torch does not know."""
    return BY_NAME.get(tensor.dtype)


def tensor_size(tensor: Tensor) -> int:
    """The bytes of a tensor's own elements, as ``elements`` gives them."""
    dtype = dtype_of(tensor)
    if dtype is None or not tensor.storage:
        return 0
    return -(-tensor.numel // dtype.packed) * dtype.itemsize


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without holes whose last dimension runs fastest."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def holds_rows(tensor: Tensor) -> bool:
    """Do its elements stand one after the other, in the order in which they count?"""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride)):
        if size != 1 and stride != step:
            return 0 in tensor.shape
        step *= size
    return True


def stored_bytes(checkpoint: Checkpoint, key: str, begin: int = 0, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a storage in pieces: ``size`` of them from ``begin``, inflated, in the byte order of the file.

    Raises MalformedError where they are not there.
    """
    body = checkpoint.body(key)
    if body is None or begin + (size or 0) > body.size:
        what = f"the bytes of storage {key!r} are not all in the file"
        raise MalformedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))
    left = body.size - begin if size is None else size
    if isinstance(body.piece, Span) and not body.compressed:
        while left:
            data = body.piece.source.read(body.piece.offset + begin, min(_CHUNK, left))
            if not data:
                raise MalformedError(f"storage {key!r} ends too early", path=checkpoint.path)
            yield data
            begin, left = begin + len(data), left - len(data)
        return
    for data in _sequential(body, key):
        if begin < len(data) and left:
            part = data[begin : begin + left]
            yield part
            left -= len(part)
        begin = max(begin - len(data), 0)
    if left:
        raise MalformedError(f"storage {key!r} ends too early", path=checkpoint.path)


def _sequential(body: Body, key: str) -> Iterable[bytes]:
    if isinstance(body.piece, Computed):
        return body.piece.chunks()
    if isinstance(body.piece, bytes):
        return (body.piece,)
    return contents(body.piece, body.size, body.compressed, f"storage {key}")


def whole_chunks(chunks: Iterable[bytes], width: int) -> Iterator[bytes]:
    """The same bytes in pieces of whole elements of ``width`` bytes; what is left at the end comes as it is."""
    rest = b""
    for data in chunks:
        data = rest + data if rest else data
        whole = len(data) - len(data) % width
        rest = data[whole:]
        if whole:
            yield data[:whole] if rest else data
    if rest:
        yield rest


def swapped(data: bytes, dtype: Dtype) -> bytes:
    """The other byte order; a complex number is two."""
    width = dtype.itemsize // 2 if dtype.name.startswith("complex") else dtype.itemsize
    if width == 1:
        return data
    numbers = array(_CODES[width], data)
    numbers.byteswap()
    return numbers.tobytes()


def elements(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[bytes]:
    """A tensor's elements, one after the other as they count, little-endian, in pieces of whole elements.

    Memory: a piece; for a view with other strides, what lies between its first and its last element. Nothing comes
    of a tensor that has no storage of its own, or is on meta. Raises MalformedError where bytes are missing or the
    dtype is not known.
    """
    dtype = dtype_of(tensor)
    if not tensor.storage or tensor.location == "meta" or 0 in tensor.shape:
        return
    if dtype is None:
        raise MalformedError(f"the dtype {tensor.dtype!r} is not known", path=checkpoint.path)
    width = dtype.itemsize
    if dtype.packed > 1 or holds_rows(tensor):
        begin = tensor.offset // dtype.packed * width
        chunks: Iterable[bytes] = whole_chunks(
            stored_bytes(checkpoint, tensor.storage, begin, tensor_size(tensor)), width
        )
    else:
        size = extent(tensor.shape, tensor.stride) * width
        data = b"".join(stored_bytes(checkpoint, tensor.storage, tensor.offset * width, size))
        chunks = (_rows(data, tensor.shape, tensor.stride, width),)
    if checkpoint.container.byteorder == "big":
        chunks = (swapped(data, dtype) for data in chunks)
    yield from chunks


def _rows(data: bytes, shape: tuple[int, ...], stride: tuple[int, ...], width: int) -> bytes:
    """The elements of a view, brought together: a strided copy along the longest dimension for each other place."""
    if width == 16:
        shape, stride, width = (*shape, 2), (*(step * 2 for step in stride), 1), 8
    code = _CODES[width]
    origin = memoryview(data).cast("B").cast(code)
    out = memoryview(bytearray(width * prod(shape))).cast(code)
    target = contiguous_strides(shape)
    longest = max(range(len(shape)), key=lambda axis: shape[axis])
    count, step, along = shape[longest], stride[longest], target[longest]
    others = [axis for axis in range(len(shape)) if axis != longest]
    for place in product(*(range(shape[axis]) for axis in others)):
        here = sum(index * stride[axis] for index, axis in zip(place, others))
        there = sum(index * target[axis] for index, axis in zip(place, others))
        if step:
            out[there : there + (count - 1) * along + 1 : along] = origin[here : here + (count - 1) * step + 1 : step]
        else:
            out[there : there + (count - 1) * along + 1 : along] = array(code, [origin[here]]) * count
    return out.tobytes()
