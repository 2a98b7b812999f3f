"""Read the bytes of storages and tensors in pieces: as stored, or element by element in row-major order.

``elements`` gives equal bytes for equal tensors, whatever their strides, offsets and the byte order of their files. It
does not need torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Final, Literal, TypeAlias
from zlib import crc32

from ..base.dtypes import BY_NAME, Dtype, is_complex
from ..base.errors import MalformedError
from ..base.limits import LIMITS
from ..base.records import NamedTuple, new_tuple
from ..base.steps import salvage_step
from ..checkpoint.checkpoint import Checkpoint, ReadCache
from ..checkpoint.container import StorageData
from ..checkpoint.tensors import Storage, Tensor, contiguous_strides, extent, is_contiguous
from ..files.sources import Computed, Piece, Span
from ..files.zips.reader import content_chunks

#: Bytes read at a time.
_CHUNK: Final = 1 << 19
#: Maximum bytes of a strided view held at once, if it can be read in stretches.
_WINDOW: Final = 16 << 20
#: Maximum bytes of an inflated or computed storage that is cached for its next view.
_CACHED: Final = 64 << 20
#: Copying this many elements that lie together takes less time than one of them from each of so many places.
_RUN: Final = 32
_CODES: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def tensor_size(tensor: Tensor) -> int:
    """Return the size in bytes of a tensor's own elements, as yielded by ``elements``."""
    dtype = BY_NAME.get(tensor.dtype)
    if dtype is None or not tensor.storage:
        return 0
    return -(-tensor.numel // dtype.packed) * dtype.itemsize


def in_storage_order(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the stored elements of a tensor as a view in storage order, and how often each one counts.

    Use this for results that do not depend on the order: a transposed tensor is read from beginning to end, an expanded
    one only once.
    """
    dtype = BY_NAME.get(tensor.dtype)
    if dtype is None or dtype.packed > 1 or len(tensor.stride) != len(tensor.shape) or 0 in tensor.shape:
        return tensor, 1
    # The axes along which stored elements differ, those with large strides first.
    axes = [axis for axis, size in enumerate(tensor.shape) if size != 1 and tensor.stride[axis]]
    axes.sort(key=lambda axis: (tensor.stride[axis], tensor.shape[axis]), reverse=True)
    times = prod(size for size, step in zip(tensor.shape, tensor.stride) if size != 1 and step == 0)
    shape, stride = (tuple(part[axis] for axis in axes) for part in (tensor.shape, tensor.stride))
    return tensor._replace(shape=shape, stride=stride), times


class BitDifference(NamedTuple):
    """How two tensors with equal dtype and shape differ bit for bit.

    ``first`` is the row-major number of the first element that differs, or -1. ``differing`` is the number of such
    elements, or -1 if they were not counted.
    """

    first: int = -1
    differing: int = 0


#: Fills memory with the next bytes, and returns their number: 0 at the end.
Filling: TypeAlias = "Callable[[memoryview], int]"


class StorageReader(NamedTuple):
    """The bytes of a storage as plain data, with all that is needed to read them in this or another process.

    ``body`` is None if the bytes are missing. ``width`` is the size in bytes of the numbers that are byte-swapped, see
    ``swapped_width``. ``path`` is the checkpoint's path, for errors.
    """

    key: str
    body: StorageData | None
    width: int
    path: str
    cache: ReadCache

    def stored(self, begin: int = 0, size: int | None = None, step: int = _CHUNK) -> Iterator[bytes]:
        """Yield ``size`` bytes from ``begin`` in pieces, inflated, in the byte order of the file.

        ``step`` is the number of bytes to read at a time. Raise MalformedError if bytes are missing.
        """
        body = self.body
        if body is None or begin + (size or 0) > body.size:
            message = f"the bytes of storage {self.key!r} are not all in the file"
            raise MalformedError(message, path=self.path, next=salvage_step(self.path))
        left = body.size - begin if size is None else size
        if isinstance(body.piece, Span) and not body.compressed:
            sums, crc = self._sums(Span(body.piece.source, body.piece.offset + begin, left)), 0
            while left:
                data = body.piece.source.read(body.piece.offset + begin, min(step, left))
                if not data:
                    raise MalformedError(f"storage {self.key!r} ends too early", path=self.path)
                if sums is not None:
                    crc = crc32(data, crc)
                    if len(data) == left:
                        sums[body.piece] = crc
                yield data
                begin, left = begin + len(data), left - len(data)
            return
        for data in self._cached(body) if left < body.size else self._sequential(body):
            if begin < len(data) and left:
                part = data[begin : begin + left]
                yield part
                left -= len(part)
            begin = max(begin - len(data), 0)
        if left:
            raise MalformedError(f"storage {self.key!r} ends too early", path=self.path)

    def filling(self, begin: int, size: int) -> Filling | None:
        """Return a function that reads these bytes straight into memory, part by part.

        Return None if they are not in a file as torch has them in memory.
        """
        span = self.span(begin, size)
        file = None if span is None else span.source.local_file()
        if span is None or file is None:
            return None
        sums, at, end, crc = self._sums(span), span.offset, span.offset + size, 0

        def fill(buffer: memoryview) -> int:
            nonlocal at, crc
            part = buffer[: end - at]
            if part:
                file.read_into(at, part)
                at += len(part)
            if sums is not None:
                crc = crc32(part, crc)
                if at == end:
                    sums[span] = crc
            return len(part)

        return fill

    def span(self, begin: int, size: int) -> Span | None:
        """Return the place of these bytes in a file; None if they are not there as torch has them in memory."""
        body = self.body
        if body is None or self.width > 1 or body.compressed or not isinstance(body.piece, Span):
            return None
        source, start, stored = body.piece
        file = source.local_file()
        if file is None or start + begin + size > file.size or begin + size > stored:
            return None
        return Span(source, start + begin, size)

    def _sums(self, span: Span) -> dict[Span, int] | None:
        """Return where to keep the checksum of a span, or None unless it is wanted and the span is all bytes."""
        body, sums = self.body, self.cache.checksums
        return None if sums is None or body is None or body.piece != span or body.size != span.size else sums

    def loaded(self, begin: int = 0, size: int | None = None, step: int = _CHUNK) -> Iterator[bytes]:
        """Yield the bytes as torch has them in memory on a little-endian machine; otherwise like ``stored``."""
        width = self.width
        if width == 1:
            yield from self.stored(begin, size, step)
            return
        left = (0 if self.body is None else self.body.size - begin) if size is None else size
        first, end = begin - begin % width, begin + left
        for data in whole_chunks(self.stored(first, end + -end % width - first, step), width):
            part = swapped(data, width)[begin - first :][:left]
            yield part
            left -= len(part)
            first = begin

    def _cached(self, body: StorageData) -> Iterable[bytes]:
        """Return the bytes of a storage that many views may read. The last one is cached, unless it is large."""
        if body.size > _CACHED:
            return self._sequential(body)
        # Read the cache in one step, because another thread may replace it.
        piece, data = self.cache.last
        if piece != body.piece:
            data = b"".join(self._sequential(body))
            self.cache.last = body.piece, data
        return (data,)

    def _sequential(self, body: StorageData) -> Iterable[bytes]:
        if isinstance(body.piece, Computed):
            return body.piece.chunks()
        if isinstance(body.piece, bytes):
            return (body.piece,)
        return content_chunks(body.piece, body.size, body.compressed, f"storage {self.key}")


def storage_reader(checkpoint: Checkpoint, key: str, body: StorageData | None = None) -> StorageReader:
    """Return a reader for the storage ``key``, whether its bytes are in the file or made by an edit.

    ``body`` has its bytes if they are known.
    """
    width = swapped_width(checkpoint, key)
    return new_tuple(StorageReader, (key, body or checkpoint.body(key), width, checkpoint.path, checkpoint.cache))


def whole_chunks(chunks: Iterable[bytes], width: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of whole elements of ``width`` bytes; an incomplete last element is kept."""
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
    """Yield the same bytes in pieces of ``size`` bytes; the last one may be shorter."""
    rest = bytearray()
    for data in chunks:
        if len(data) == size and not rest:
            yield data
            continue
        rest += data
        whole = len(rest) - len(rest) % size
        if whole:
            ready = bytes(memoryview(rest)[:whole])
            rest = rest[whole:]
            yield from (ready[at : at + size] for at in range(0, whole, size))
    if rest:
        yield bytes(rest)


def swapped(data: bytes, width: int) -> bytes:
    """Return numbers of ``width`` bytes in the other byte order."""
    if width == 1:
        return data
    numbers = array(_CODES[width], data)
    numbers.byteswap()
    return numbers.tobytes()


def number_width(dtype: Dtype) -> int:
    """Return the width in bytes of the numbers that torch byte-swaps in a storage class, 1 for an untyped storage.

    A complex number is two numbers (torch/serialization.py, ``load_tensor`` in ``_load``; ``UntypedStorage.byteswap``).
    """
    return dtype.itemsize // 2 if is_complex(dtype.name) else dtype.itemsize


def swapped_width(checkpoint: Checkpoint, key: str) -> int:
    """Return the width in bytes of a storage's numbers that a little-endian machine must swap; 1 if it swaps none."""
    if checkpoint.container.byteorder != "big":
        return 1
    storage = checkpoint.survey.reader.storages.get(key)
    return 1 if storage is None else number_width(storage.dtype)


def added_storages(
    checkpoint: Checkpoint, contents_of: Mapping[str, bytes], storages: Mapping[str, Storage]
) -> dict[str, StorageData]:
    """Return new storages by key in the file's byte order, given their bytes in little-endian order."""
    swaps = storages if checkpoint.container.byteorder == "big" else {}
    widths = ((key, data, number_width(swaps[key].dtype) if key in swaps else 1) for key, data in contents_of.items())
    stored = ((key, swapped(data, width)) for key, data, width in widths)
    return {key: StorageData(data, len(data), crc32(data)) for key, data in stored}


def elements(storage: StorageReader, tensor: Tensor) -> Iterator[bytes]:
    """Yield a tensor's elements in row-major order, little-endian, in pieces of whole elements.

    A few pieces are in memory; for a strided view that cannot be read in stretches (transposed and large, or deflated)
    everything between its first and last element. Yield nothing for a tensor without a storage of its own, or on meta.
    Raise MalformedError if bytes are missing, the dtype is unknown, or shape and strides are impossible.
    """
    dtype = BY_NAME.get(tensor.dtype)
    if not tensor.storage or tensor.location == "meta" or 0 in tensor.shape:
        return
    if dtype is None:
        raise MalformedError(f"the dtype {tensor.dtype!r} is not known", path=storage.path)
    if len(tensor.shape) != len(tensor.stride) or min(*tensor.shape, *tensor.stride, tensor.offset, 0) < 0:
        raise MalformedError("a tensor whose shape, strides and offset make no sense", path=storage.path)
    width = dtype.itemsize
    if dtype.packed > 1 or is_contiguous(tensor):
        begin = tensor.offset // dtype.packed * width
        yield from whole_chunks(storage.loaded(begin, tensor_size(tensor)), width)
    else:
        yield from _strided_elements(storage, tensor, width)


def read_for(storage: StorageReader, tensor: Tensor) -> Piece | None:
    """Return what ``elements`` reads, at most: a part of the storage or all of it; None for missing bytes."""
    body, place = storage.body, _place(tensor)
    if body is None or body.compressed or place is None or not isinstance(body.piece, Span):
        return None if body is None else body.piece
    return Span(body.piece.source, body.piece.offset + place[0], place[1])


def filling(storage: StorageReader, tensor: Tensor) -> Filling | None:
    """Return a function that reads what ``elements`` yields into memory, or None if that takes more than reading."""
    place = _place(tensor)
    return None if place is None else storage.filling(*place)


def stored_span(storage: StorageReader, tensor: Tensor) -> Span | None:
    """Return where a file has the bytes that ``elements`` yields, or None if they must be computed or are missing."""
    place = _place(tensor)
    return None if place is None else storage.span(*place)


def _place(tensor: Tensor) -> tuple[int, int] | None:
    """Return the offset and size of contiguous elements in their storage, in bytes; None for other tensors."""
    dtype = BY_NAME.get(tensor.dtype)
    if dtype is None or dtype.packed > 1 or not tensor.storage or tensor.location == "meta" or 0 in tensor.shape:
        return None
    if len(tensor.shape) != len(tensor.stride) or tensor.offset < 0 or not is_contiguous(tensor):
        return None
    return tensor.offset * dtype.itemsize, tensor_size(tensor)


def _strided_elements(storage: StorageReader, tensor: Tensor, width: int) -> Iterator[bytes]:
    stride = tensor.stride
    origin, size = tensor.offset * width, extent(tensor.shape, stride) * width
    if tensor_size(tensor) > max(LIMITS.inflated_bytes, LIMITS.inflation * size):
        message = f"a tensor of {tensor.numel:,} elements over {size:,} bytes is too large to be read"
        raise MalformedError(message, path=storage.path)
    first_block = next(_blocks(tensor.shape, stride, _CHUNK // width))[1]
    body = storage.body
    in_stretches = body is not None and isinstance(body.piece, Span) and not body.compressed
    at_once = size <= _WINDOW or extent(first_block, stride) * width > _WINDOW or not in_stretches
    whole = bytearray()
    for data in storage.loaded(origin, size) if at_once else ():
        whole += data  # grow with the bytes that exist, because the strides may promise far more
    view = memoryview(whole)
    for offset, shape in _blocks(tensor.shape, stride, _CHUNK // width):
        begin, length = offset * width, extent(shape, stride) * width
        if at_once:
            yield gather(view[begin : begin + length], shape, stride, width)
        else:
            stretch = b"".join(storage.loaded(origin + begin, length))
            yield gather(stretch, shape, stride, width)


def _blocks(shape: tuple[int, ...], stride: tuple[int, ...], limit: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield parts of a view with at most ``limit`` elements, in row-major order: (offset in elements, shape)."""
    axis = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    if prod(shape) <= limit or axis == len(shape):
        yield 0, shape
        return
    step = max(limit // prod(shape[axis + 1 :]), 1)
    for begin in range(0, shape[axis], step):
        part = (*shape[:axis], min(step, shape[axis] - begin), *shape[axis + 1 :])
        for offset, block in _blocks(part, stride, limit) if step == 1 else ((0, part),):
            yield begin * stride[axis] + offset, block


def gather(data: bytes | memoryview, shape: tuple[int, ...], stride: tuple[int, ...], width: int) -> bytes:
    """Return the elements of a view in row-major order."""
    out = bytearray(width * prod(shape))
    with memoryview(out) as buffer:
        gather_into(buffer, data, shape, stride, width)
    return bytes(out)


def gather_into(
    buffer: memoryview,
    data: bytes | bytearray | memoryview,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    width: int,
) -> None:
    """Fill a buffer with the elements of a view in row-major order.

    One copy runs along a dimension for each index of the other dimensions: along the last one if its elements lie
    together and are many, else along the longest one.
    """
    if width == 16:
        shape, stride, width = (*shape, 2), (*(step * 2 for step in stride), 1), 8
    code = _CODES[width]
    source = memoryview(data).cast("B").cast(code)
    out = buffer.cast(code)
    target = contiguous_strides(shape)
    along = max(range(len(shape)), key=lambda axis: shape[axis])
    if stride[-1] == 1 and shape[-1] >= _RUN:
        along = len(shape) - 1
    count, step, out_step = shape[along], stride[along], target[along]
    others = [axis for axis in range(len(shape)) if axis != along]
    begins, out_begins = (
        map(sum, product(*([index * steps[axis] for index in range(shape[axis])] for axis in others)))
        for steps in (stride, target)
    )
    for begin, out_begin in zip(begins, out_begins):
        if step:
            line: memoryview | array[int] = source[begin : begin + (count - 1) * step + 1 : step]
        else:
            line = array(code, [source[begin]]) * count
        out[out_begin : out_begin + (count - 1) * out_step + 1 : out_step] = line


def as_in_file(storage: StorageReader, tensor: Tensor) -> Iterator[bytes]:
    """Yield the elements of a tensor, in the file's byte order."""
    for data in whole_chunks(elements(storage, tensor), storage.width):
        yield swapped(data, storage.width)
