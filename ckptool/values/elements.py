"""The bytes of storages and tensors, in pieces: as they are stored, or as plain rows of elements.

What a tensor *is* does not depend on its strides, its offset or the byte order of its file: ``elements`` gives the
same bytes for equal tensors. No torch is needed for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Final, Literal
from zlib import crc32

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import MalformedError
from ..base.limits import LIMITS
from ..base.text import salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Body
from ..checkpoint.tensors import Storage, Tensor, extent
from ..files.sources import Computed, Span
from ..files.zips.reader import contents

#: Bytes looked at in one go.
_CHUNK: Final = 1 << 19
#: Bytes of a view with other strides that are held at once, where it can be read in stretches.
_WINDOW: Final = 16 << 20
#: Bytes of a storage that is inflated or computed, and kept for the next view of it.
_KEPT: Final = 64 << 20
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


def unordered(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements of a tensor in the order in which they are stored, and how often each counts.

    For what does not depend on the order: a transposed tensor is read from its beginning to its end, an expanded
    one once.
    """
    dtype = dtype_of(tensor)
    if dtype is None or dtype.packed > 1 or len(tensor.stride) != len(tensor.shape) or 0 in tensor.shape:
        return tensor, 1
    axes = sorted(((step, size) for size, step in zip(tensor.shape, tensor.stride) if size != 1), reverse=True)
    times = prod(size for step, size in axes if step == 0)
    shape = tuple(size for step, size in axes if step != 0)
    return tensor._replace(shape=shape, stride=tuple(step for step, _ in axes if step != 0)), times


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
    for data in _kept(checkpoint, body, key) if left < body.size else _sequential(body, key):
        if begin < len(data) and left:
            part = data[begin : begin + left]
            yield part
            left -= len(part)
        begin = max(begin - len(data), 0)
    if left:
        raise MalformedError(f"storage {key!r} ends too early", path=checkpoint.path)


def _kept(checkpoint: Checkpoint, body: Body, key: str) -> Iterable[bytes]:
    """The bytes of a storage that many views are read from: the last one is kept, where it is not large."""
    if body.size > _KEPT:
        return _sequential(body, key)
    inflated = checkpoint.inflated
    if inflated.piece != body.piece:
        inflated.piece, inflated.data = body.piece, b"".join(_sequential(body, key))
    return (inflated.data,)


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


def reblocked(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of ``size``; the last one may be shorter."""
    rest = bytearray()
    for data in chunks:
        rest += data
        whole = len(rest) - len(rest) % size
        if whole:
            ready = bytes(memoryview(rest)[:whole])
            rest = rest[whole:]
            yield from (ready[at : at + size] for at in range(0, whole, size))
    if rest:
        yield bytes(rest)


def swapped(data: bytes, width: int) -> bytes:
    """Numbers of ``width`` bytes in the other byte order."""
    if width == 1:
        return data
    numbers = array(_CODES[width], data)
    numbers.byteswap()
    return numbers.tobytes()


def number_width(dtype: Dtype) -> int:
    """The bytes of the numbers of a storage class that torch turns round; a complex number is two.

    1 where it turns none: an untyped storage is bytes, whatever its tensors are (torch/serialization.py,
    ``load_tensor`` in ``_load``; ``UntypedStorage.byteswap``).
    """
    return dtype.itemsize // 2 if dtype.name.startswith("complex") else dtype.itemsize


def turned_width(checkpoint: Checkpoint, key: str) -> int:
    """The bytes of the numbers of a storage that are in the other order in the file than torch has them on a
    little-endian machine; 1 where none are."""
    if checkpoint.container.byteorder != "big":
        return 1
    storage = checkpoint.survey.reader.storages.get(key)
    return 1 if storage is None else number_width(storage.dtype)


def loaded_bytes(checkpoint: Checkpoint, key: str, begin: int = 0, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a storage as torch has them in memory on a little-endian machine; else like ``stored_bytes``."""
    width = turned_width(checkpoint, key)
    if width == 1:
        yield from stored_bytes(checkpoint, key, begin, size)
        return
    body = checkpoint.body(key)
    left = (0 if body is None else body.size - begin) if size is None else size
    first = begin - begin % width
    for data in whole_chunks(
        stored_bytes(checkpoint, key, first, begin + left + -(begin + left) % width - first), width
    ):
        part = swapped(data, width)[begin - first :][:left]
        yield part
        left -= len(part)
        first = begin


def added_storages(
    checkpoint: Checkpoint, made: Mapping[str, bytes], storages: Mapping[str, Storage]
) -> dict[str, Body]:
    """New storages by their keys, from their bytes on a little-endian machine: in the byte order of the file."""
    big = checkpoint.container.byteorder == "big"
    bodies = {}
    for key, data in made.items():
        if big and key in storages:
            data = swapped(data, number_width(storages[key].dtype))
        bodies[key] = Body(data, len(data), crc32(data))
    return bodies


def elements(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[bytes]:
    """A tensor's elements, one after the other as they count, little-endian, in pieces of whole elements.

    Memory: some pieces; for a view with other strides that cannot be read in stretches (transposed and large, or in
    a deflated storage) what lies between its first and its last element. Nothing comes of a tensor that has no storage
    of its own, or is on meta. Raises MalformedError where bytes are missing, the dtype is not known, or the shape and
    strides cannot be.
    """
    dtype = dtype_of(tensor)
    if not tensor.storage or tensor.location == "meta" or 0 in tensor.shape:
        return
    if dtype is None:
        raise MalformedError(f"the dtype {tensor.dtype!r} is not known", path=checkpoint.path)
    if len(tensor.shape) != len(tensor.stride) or min(*tensor.shape, *tensor.stride, tensor.offset, 0) < 0:
        raise MalformedError("a tensor whose shape, strides and offset make no sense", path=checkpoint.path)
    width = dtype.itemsize
    if dtype.packed > 1 or holds_rows(tensor):
        begin = tensor.offset // dtype.packed * width
        yield from whole_chunks(loaded_bytes(checkpoint, tensor.storage, begin, tensor_size(tensor)), width)
    else:
        yield from _gathered(checkpoint, tensor, width)


def _gathered(checkpoint: Checkpoint, tensor: Tensor, width: int) -> Iterator[bytes]:
    """The elements of a view with other strides, in pieces."""
    stride = tensor.stride
    origin, size = tensor.offset * width, extent(tensor.shape, stride) * width
    if tensor_size(tensor) > max(LIMITS.inflated_bytes, LIMITS.inflation * size):
        what = f"a tensor of {tensor.numel:,} elements over {size:,} bytes is too large to be read"
        raise MalformedError(what, path=checkpoint.path)
    blocks = _blocks(tensor.shape, stride, _CHUNK // width)
    first = extent(next(_blocks(tensor.shape, stride, _CHUNK // width))[1], stride) * width
    body = checkpoint.body(tensor.storage)
    in_stretches = body is not None and isinstance(body.piece, Span) and not body.compressed
    if size <= _WINDOW or first > _WINDOW or not in_stretches:
        # Grown with what is there, not made as large as the strides say.
        read = bytearray()
        for data in loaded_bytes(checkpoint, tensor.storage, origin, size):
            read += data
        whole = memoryview(read)
        for at, shape in blocks:
            yield _rows(whole[at * width : (at + extent(shape, stride)) * width], shape, stride, width)
        return
    for at, shape in blocks:
        wanted = extent(shape, stride) * width
        data = b"".join(loaded_bytes(checkpoint, tensor.storage, origin + at * width, wanted))
        yield _rows(data, shape, stride, width)


def _blocks(shape: tuple[int, ...], stride: tuple[int, ...], most: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Parts of a view with at most so many elements, in row-major order: (offset in elements, shape)."""
    axis = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    if prod(shape) <= most or axis == len(shape):
        yield 0, shape
        return
    inner = prod(shape[axis + 1 :])
    step = max(most // inner, 1)
    for begin in range(0, shape[axis], step):
        part = (*shape[:axis], min(step, shape[axis] - begin), *shape[axis + 1 :])
        for at, block in _blocks(part, stride, most) if step == 1 else ((0, part),):
            yield begin * stride[axis] + at, block


def _rows(data: bytes | memoryview, shape: tuple[int, ...], stride: tuple[int, ...], width: int) -> bytes:
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
