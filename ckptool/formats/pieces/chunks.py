"""Tensors in pieces, read as if they were whole: only the requested bytes are assembled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Final

from ...base.dtypes import BY_NAME, Dtype, is_complex
from ...base.errors import MalformedError
from ...base.records import NamedTuple
from ...base.text import pluralize
from ...checkpoint.container import StorageLocation
from ...checkpoint.sharding import Range
from ...checkpoint.tensors import TensorReader, contiguous_strides, extent, is_contiguous
from ...files.sources import AssembledSource, BytesSource, Seen, Source, Span
from ...files.threads import READ_SIZE
from ...pickles.nodes import Ref
from ...values.elements import gather_into
from ...values.interpretation import flipped_signs, lazy_bits
from .boxes import Box

_NOTHING: Final = BytesSource(b"")
#: The most bytes of a strided piece in memory at once, and the most that are read for them at once.
_WINDOW: Final = 4 << 20
#: Runs of at least this many bytes are copied from their file rather than assembled in memory.
_LONG: Final = 1 << 18
#: The most blocks of one part. An inner mesh dimension makes as many as it has ranks, along a tensor dimension.
_MAX_BLOCKS: Final = 1 << 12


class Rows(NamedTuple):
    """The elements of a tensor in a file, row by row from byte ``begin`` of ``source``."""

    dtype: Dtype
    shape: tuple[int, ...]
    source: Source
    begin: int


def tensor_rows(reader: TensorReader, ref: Ref, stored: Callable[[str], Span], name: str) -> Rows:
    """Return the elements of a plain tensor; ``stored`` returns the bytes of a storage. Raises MalformedError if it is
    not a plain tensor, or does not fit in its storage."""
    tensor = reader.tensor(ref)
    if tensor is None or tensor.kind != "dense":
        raise MalformedError("it is not a plain tensor")
    dtype, shape, stride = BY_NAME.get(tensor.dtype), tensor.shape, tensor.stride
    if dtype is None or dtype.packed > 1:
        raise MalformedError(f"its dtype is {tensor.dtype}")
    if 0 in shape:
        return Rows(dtype, shape, _NOTHING, 0)
    span = stored(tensor.storage)
    if min(stride, default=0) < 0 or tensor.offset < 0 or len(stride) != len(shape):
        raise MalformedError("its strides are invalid")
    reach = (tensor.offset + extent(shape, stride)) * dtype.itemsize
    if reach > span.size:
        raise MalformedError(f"it reaches to byte {reach:,} of its storage, which has {span.size:,}")
    source, begin = span.source, span.offset + tensor.offset * dtype.itemsize
    if not is_contiguous(tensor):
        source, begin = RowSource(source, begin, shape, stride, dtype.itemsize, name), 0
    negated, conjugated = lazy_bits(reader, ref)
    if (negated or conjugated) and not (is_complex(dtype.name) or (dtype.floating and not conjugated)):
        raise MalformedError(f"torch does not load it: {dtype.name} negated or conjugated")
    if signs := flipped_signs(dtype, negated, conjugated):
        source, begin = SignSource(source, begin, tensor.own_bytes, signs), 0
    return Rows(dtype, shape, source, begin)


class Chunk(NamedTuple):
    """A piece of a tensor: the box that it fills, and its elements, row by row from byte ``begin`` of ``source``."""

    box: Box
    source: Source
    begin: int


class _ChunkRuns(NamedTuple):
    """A chunk as runs of bytes that are contiguous both in the chunk and in the tensor. ``counts`` and ``steps``
    describe the outer dimensions: the number of runs, and their distance in the tensor in bytes. The first run begins
    at byte ``first`` of the tensor; each has ``length`` bytes."""

    first: int
    length: int
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    number: int
    source: Source
    begin: int

    @property
    def end(self) -> int:
        """The offset in the tensor after the last run."""
        return self.place(self.number - 1) + self.length

    def place(self, number: int) -> int:
        """Return the offset of a run in the tensor, in bytes; it grows with the number."""
        at = self.first
        for count, step in zip(reversed(self.counts), reversed(self.steps)):
            number, index = divmod(number, count)
            at += index * step
        return at

    def first_after(self, at: int) -> int:
        """Return the number of the first run that ends after byte ``at`` of the tensor."""
        return bisect_right(range(self.number), at, key=lambda number: self.place(number) + self.length)


class Layout(NamedTuple):
    """The runs of a tensor in order, the offset of the first run of each, and the highest end up to each. ``gaps``:
    some bytes may be filled by no piece, because pieces are missing or overlap."""

    runs: list[_ChunkRuns]
    firsts: list[int]
    reach: list[int]
    gaps: bool


def layout_of(shape: tuple[int, ...], width: int, chunks: Sequence[Chunk]) -> Layout:
    """Return the runs of a tensor's pieces."""
    runs = sorted((_runs(shape, width, chunk) for chunk in chunks if prod(chunk.box[1])), key=lambda run: run.first)
    reach = list(accumulate((run.end for run in runs), max))
    gaps = sum(run.number * run.length for run in runs) != prod(shape) * width
    return Layout(runs, [run.first for run in runs], reach, gaps)


class ChunkedSource(AssembledSource):
    """The rows of a tensor, from pieces cut along any dimension. A piece cut along the first dimension is a single run.
    The runs of other pieces are computed from their numbers, so a tensor of millions of short runs takes no memory."""

    def __init__(self, shape: tuple[int, ...], width: int, chunks: Sequence[Chunk], name: str) -> None:
        self.name = name
        self.shape, self.width, self.chunks = shape, width, chunks
        self.size = prod(shape) * width

    @cached_property
    def layout(self) -> Layout:
        """The runs of its pieces."""
        return layout_of(self.shape, self.width, self.chunks)

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        out = bytearray(end - offset)
        with memoryview(out) as buffer:
            self.read_into(offset, buffer)
        return bytes(out)

    def read_into(self, offset: int, buffer: memoryview, seen: Seen | None = None) -> None:
        end = offset + len(buffer)
        runs, firsts, reach, gaps = self.layout
        if gaps:
            buffer[:] = bytes(len(buffer))
        # Skip pieces that end before the offset: for pieces cut along the first dimension, that is nearly all.
        for run in runs[bisect_right(reach, offset) : bisect_right(firsts, end - 1)]:
            _copy(run, offset, end, buffer, seen)

    def stretches(self, offset: int, size: int) -> Iterator[Span]:
        """Yield the bytes as spans; long runs are spans of their own sources."""
        end = offset + size
        runs, firsts, reach, _ = self.layout
        long = []
        for run in runs[bisect_right(reach, offset) : bisect_right(firsts, end - 1)]:
            if run.length >= _LONG:
                long += [
                    (max(place, offset), min(place + run.length, end), run, number * run.length - place)
                    for number in range(run.first_after(offset), run.number)
                    if (place := run.place(number)) < end
                ]
        for begin, stop, run, shift in sorted(long, key=lambda item: item[:2]):
            if begin < offset or begin == stop:
                continue  # the runs of a damaged file may overlap
            if begin > offset:
                yield Span(self, offset, begin - offset)
            yield Span(run.source, run.begin + begin + shift, stop - begin)
            offset = stop
        if offset < end:
            yield Span(self, offset, end - offset)

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        end = offset + size
        runs, firsts, reach, _ = self.layout
        for run in runs[bisect_right(reach, offset) : bisect_right(firsts, end - 1)]:
            yield Span(run.source, run.begin, run.number * run.length)


def joined(chunks: Sequence[Chunk], shape: tuple[int, ...], width: int, name: str) -> StorageLocation:
    """Return the bytes of a tensor: its only chunk, or a source that assembles the chunks, with zeros in between."""
    size = prod(shape) * width
    if len(chunks) == 1 and prod(chunks[0].box[1]) == prod(shape):
        return StorageLocation(Span(chunks[0].source, chunks[0].begin, size), size)
    return StorageLocation(Span(ChunkedSource(shape, width, chunks, name), 0, size), size)


def _runs(shape: tuple[int, ...], width: int, chunk: Chunk) -> _ChunkRuns:
    offsets, sizes = chunk.box
    steps = contiguous_strides(shape)
    first = sum(at * step for at, step in zip(offsets, steps)) * width
    axis = len(shape)
    while axis > 0 and sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    # All dimensions from ``axis`` on are whole, so the dimension before them is also contiguous.
    axis = max(axis - 1, 0)
    outer = [(sizes[dim], steps[dim] * width) for dim in range(axis) if sizes[dim] != 1]
    counts, ways = tuple(count for count, _ in outer), tuple(step for _, step in outer)
    return _ChunkRuns(first, prod(sizes[axis:]) * width, counts, ways, prod(counts), chunk.source, chunk.begin)


def _copy(run: _ChunkRuns, begin: int, end: int, out: memoryview, seen: Seen | None) -> None:
    """Copy the part of a chunk within bytes ``begin`` to ``end`` of the tensor to its places."""
    length = run.length
    first = run.first_after(begin)
    stop = run.first_after(end)
    if stop < run.number and run.place(stop) < end:
        stop += 1
    if first >= stop:
        return
    head = max(begin - run.place(first), 0)
    tail = min(end - run.place(stop - 1), length)
    start = first * length + head
    data = _bytes(run.source, run.begin + start, (stop - 1) * length + tail - start, seen)
    view, at = memoryview(data), 0
    if head:  # only part of the first run is wanted
        part = view[: length - head]
        out[: len(part)] = part
        first, at = first + 1, len(part)
    if tail < length and first < stop:  # only part of the last run is wanted
        here = run.place(stop - 1) - begin
        out[here : here + tail] = view[len(data) - tail :]
        stop -= 1
    for places in _places(run, first, stop):
        rows = range(at, at + len(places) * length, length)
        for here, row in zip(range(places.start - begin, places.stop - begin, places.step), rows):
            out[here : here + length] = view[row : row + length]
        at = rows.stop


def _places(run: _ChunkRuns, first: int, stop: int) -> Iterator[range]:
    """Yield the places of some runs; runs along the innermost dimension make one range."""
    count, step = (run.counts[-1], run.steps[-1]) if run.counts else (1, 1)
    while first < stop:
        many = min(count - first % count, stop - first)
        place = run.place(first)
        yield range(place, place + many * step, step)
        first += many


class RowSource(AssembledSource):
    """The elements of a strided view, row by row, such as a transposed tensor. ``begin`` is in bytes of ``source``,
    ``stride`` in elements of ``width`` bytes. A group of rows is in memory at a time: as many as fit into a window
    along the first dimension where one row fits."""

    def __init__(
        self, source: Source, begin: int, shape: tuple[int, ...], stride: tuple[int, ...], width: int, name: str
    ) -> None:
        self.name = name
        self.source, self.begin = source, begin
        self.shape, self.stride, self.width = shape, stride, width
        self.size = prod(shape) * width
        self._axis = next(axis for axis in range(len(shape)) if prod(shape[axis + 1 :]) * width <= _WINDOW)
        self._row = prod(shape[self._axis + 1 :]) * width
        # A row whose bytes lie together needs no neighbours, so its group is small enough for the cache of a core.
        row = extent((1, *shape[self._axis + 1 :]), stride[self._axis :]) * width
        most = _WINDOW if row > self._row else min(READ_SIZE, _WINDOW)
        self._most_rows = max(most // max(self._row, 1), 1)
        self._group: tuple[int, bytearray] = (-1, bytearray())

    def read(self, offset: int, size: int) -> bytes:
        out = bytearray(max(min(size, self.size - offset), 0))
        with memoryview(out) as buffer:
            self.read_into(offset, buffer)
        return bytes(out)

    def read_into(self, offset: int, buffer: memoryview, seen: Seen | None = None) -> None:
        end, start = offset + len(buffer), offset
        while offset < end:
            block, at = divmod(offset, self.shape[self._axis] * self._row)
            first = at // (self._most_rows * self._row) * self._most_rows
            begin = (block * self.shape[self._axis] + first) * self._row
            size = min(self._most_rows, self.shape[self._axis] - first) * self._row
            here = buffer[offset - start : begin + size - start]
            if len(here) == size:
                self._rows(block, first, here, seen)
            else:
                kept = self._group  # another thread may replace it
                if kept[0] != begin:
                    kept = begin, bytearray(size)
                    with memoryview(kept[1]) as rows:
                        self._rows(block, first, rows, seen)
                    self._group = kept
                here[:] = memoryview(kept[1])[offset - begin : offset - begin + len(here)]
                if offset + len(here) == begin + size:
                    self._group = (-1, bytearray())  # read to its end, as copies do: it is not needed again
            offset += len(here)

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        yield Span(self.source, self.begin, extent(self.shape, self.stride) * self.width)

    def stretches(self, offset: int, size: int) -> Iterator[Span]:
        yield Span(self, offset, size)

    def _rows(self, block: int, first: int, out: memoryview, seen: Seen | None) -> None:
        """Fill ``out`` with a group of rows: ``block`` is the index of the dimensions before them, as one number."""
        axis = self._axis
        shape, stride = (min(self._most_rows, self.shape[axis] - first), *self.shape[axis + 1 :]), self.stride[axis:]
        place = first * stride[0]
        for size, step in zip(reversed(self.shape[:axis]), reversed(self.stride[:axis])):
            block, index = divmod(block, size)
            place += index * step
        begin, reach = self.begin + place * self.width, extent(shape, stride) * self.width
        if reach <= _WINDOW:
            # Bytes between the rows are read again for other rows, and must not count twice.
            data = _bytes(self.source, begin, reach, seen if reach == len(out) else None)
            gather_into(out, data, shape, stride, self.width)
        else:
            parts = ChunkedSource(shape, self.width, self._split(begin, shape, stride), self.name)
            parts.read_into(0, out)

    def _split(self, begin: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Chunk]:
        """Return a group that spans too many bytes as parts that span fewer, cut along its largest stride."""
        axis = max(range(len(shape)), key=lambda axis: (shape[axis] > 1, stride[axis]))
        step = stride[axis] * self.width
        rest = extent((*shape[:axis], 1, *shape[axis + 1 :]), stride) * self.width
        count = max((_WINDOW - rest) // step, 0) + 1
        chunks = []
        for at in range(0, shape[axis], count):
            sizes = (*shape[:axis], min(count, shape[axis] - at), *shape[axis + 1 :])
            offsets = (*(0 for _ in shape[:axis]), at, *(0 for _ in shape[axis + 1 :]))
            part = RowSource(self.source, begin + at * step, sizes, stride, self.width, self.name)
            chunks.append(Chunk((offsets, sizes), part, 0))
        return chunks


def _bytes(source: Source, offset: int, size: int, seen: Seen | None) -> bytes | bytearray:
    """Return bytes of a source; ``seen`` gets the bytes of the files that they come from."""
    if isinstance(source, AssembledSource):
        out = bytearray(size)
        with memoryview(out) as buffer:
            source.read_into(offset, buffer, seen)
        return out
    data = source.read(offset, size)
    if seen:
        seen(source, offset, data)
    return data


class SignSource(Source):
    """The elements of a tensor, with the bits of ``signs`` flipped in each element. ``begin`` and ``size`` are in bytes
    of ``source``."""

    def __init__(self, source: Source, begin: int, size: int, signs: bytes) -> None:
        self.name, self.size = source.name, size
        self.source, self.begin, self.signs = source, begin, signs

    def read(self, offset: int, size: int) -> bytes:
        width = len(self.signs)
        data = self.source.read(self.begin + offset, max(min(size, self.size - offset), 0))
        begin = offset % width
        mask = (self.signs * (len(data) // width + 2))[begin : begin + len(data)]
        flipped = int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")
        return flipped.to_bytes(len(data), "little")

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        yield Span(self.source, self.begin + offset, size)


def chunks_of(rows: Rows, ranges: Sequence[Sequence[Range]], name: str) -> list[Chunk]:
    """Return the blocks that a part fills in the whole tensor; ``ranges`` are its index ranges in each dimension. There
    are several blocks only if an outer mesh dimension cut a tensor dimension after an inner one. Raises MalformedError
    if the part has another shape than its ranges, or more blocks than any mesh makes."""
    shape = tuple(sum(end - begin for begin, end in part) for part in ranges)
    if shape != rows.shape:
        raise MalformedError(f"its part is of the shape {list(rows.shape)}, and its place has {list(shape)}")
    if 0 in shape:
        return []
    if prod(len(part) for part in ranges) > _MAX_BLOCKS:
        raise MalformedError(f"its part is in more than {pluralize(_MAX_BLOCKS, 'block')}")
    strides = contiguous_strides(shape)
    chunks = []
    for block in product(*map(_placed, ranges)):
        box = tuple(begin for begin, _, _ in block), tuple(size for _, size, _ in block)
        begin = rows.begin + sum(at * step for (_, _, at), step in zip(block, strides)) * rows.dtype.itemsize
        if _is_run(box[1], shape):
            chunks.append(Chunk(box, rows.source, begin))
        else:
            source = RowSource(rows.source, begin, box[1], strides, rows.dtype.itemsize, name)
            chunks.append(Chunk(box, source, 0))
    return chunks


def _placed(ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return ranges of the whole as (begin, size, begin in the part)."""
    sizes = [end - begin for begin, end in ranges]
    return [(begin, size, at - size) for (begin, _), size, at in zip(ranges, sizes, accumulate(sizes))]


def _is_run(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a block of these sizes is contiguous in a tensor of this shape."""
    rest = next((axis for axis, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[rest + 1 :] == shape[rest + 1 :]
