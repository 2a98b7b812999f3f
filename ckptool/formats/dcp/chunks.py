"""Tensors in pieces, read as if they were whole: only the requested bytes are assembled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Final, NamedTuple

from ...checkpoint.container import StorageLocation
from ...checkpoint.tensors import contiguous_strides, extent
from ...files.sources import AssembledSource, Seen, Source, Span
from ...values.elements import gather
from .metadata import Box

#: The most bytes of a strided piece in memory at once.
_WINDOW: Final = 64 << 20
#: Runs of at least this many bytes are copied from their file rather than assembled in memory.
_LONG: Final = 1 << 18
#: The most comparisons per box, for boxes that differ in three or more dimensions and that no line separates. No real
#: sharding looks like that, and the time must stay linear in the file size.
_COMPARED: Final = 200


class Chunk(NamedTuple):
    """A piece of a tensor: the box that it fills, and its elements, row by row from byte ``begin`` of ``source``."""

    box: Box
    source: Source
    begin: int


class _ChunkRuns(NamedTuple):
    """A chunk as runs of bytes that are contiguous both in the chunk and in the tensor.

    ``counts`` and ``steps`` describe the outer dimensions: the number of runs, and their distance in the tensor in
    bytes. The first run begins at byte ``first`` of the tensor; each has ``length`` bytes.
    """

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


class _Layout(NamedTuple):
    """The runs of a tensor in order, the offset of the first run of each, and the highest end up to each.

    ``gaps``: some bytes may be filled by no piece, because pieces are missing or overlap.
    """

    runs: list[_ChunkRuns]
    firsts: list[int]
    reach: list[int]
    gaps: bool


class ChunkedSource(AssembledSource):
    """The rows of a tensor, from pieces cut along any dimension.

    A piece cut along the first dimension is a single run. The runs of other pieces are computed from their numbers, so
    a tensor of millions of short runs takes no memory.
    """

    def __init__(self, shape: tuple[int, ...], width: int, chunks: Sequence[Chunk], name: str) -> None:
        self.name = name
        self.shape, self.width, self.chunks = shape, width, chunks
        self.size = prod(shape) * width

    @cached_property
    def _layout(self) -> _Layout:
        runs = [_runs(self.shape, self.width, chunk) for chunk in self.chunks if prod(chunk.box[1])]
        runs.sort(key=lambda run: run.first)
        reach = list(accumulate((run.end for run in runs), max))
        gaps = sum(run.number * run.length for run in runs) != self.size
        return _Layout(runs, [run.first for run in runs], reach, gaps)

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
        runs, firsts, reach, gaps = self._layout
        if gaps:
            buffer[:] = bytes(len(buffer))
        # Skip pieces that end before the offset: for pieces cut along the first dimension, that is nearly all.
        for run in runs[bisect_right(reach, offset) : bisect_right(firsts, end - 1)]:
            _copy(run, offset, end, buffer, seen)

    def stretches(self, offset: int, size: int) -> Iterator[Span]:
        """Yield the bytes as spans; long runs are spans of their own sources."""
        end = offset + size
        runs, firsts, reach, _ = self._layout
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
        runs, firsts, reach, _ = self._layout
        for run in runs[bisect_right(reach, offset) : bisect_right(firsts, end - 1)]:
            yield Span(run.source, run.begin, run.number * run.length)

    def located(self, offset: int, size: int) -> Iterator[Span]:
        for stretch in self.stretches(offset, size):
            if stretch.source is not self:
                yield stretch
                continue
            end = stretch.offset + stretch.size
            places = byte_ranges(self.shape, self.width, (chunk.box for chunk in self.chunks))
            chunks = [chunk for chunk, (low, high) in zip(self.chunks, places) if low < end and high > stretch.offset]
            yield stretch._replace(source=ChunkedSource(self.shape, self.width, chunks, self.name))


def byte_ranges(shape: tuple[int, ...], width: int, boxes: Iterable[Box]) -> list[tuple[int, int]]:
    """Return, for each box, the offset of its first byte in the tensor and the offset after its last byte."""
    steps = [step * width for step in contiguous_strides(shape)]
    return [
        (first := sum(map(mul, offsets, steps)), first + sum(map(mul, sizes, steps)) - sum(steps) + width)
        for offsets, sizes in boxes
    ]


def joined(chunks: Sequence[Chunk], shape: tuple[int, ...], width: int, name: str) -> StorageLocation:
    """Return the bytes of a tensor: its only chunk, or a source that assembles the chunks."""
    size = prod(shape) * width
    if len(chunks) == 1:
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
    data = run.source.read(run.begin + start, (stop - 1) * length + tail - start)
    if seen:
        seen(run.source, run.begin + start, data)
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


class RowSource:
    """The elements of a strided view, row by row, such as a transposed tensor.

    ``begin`` is in bytes of ``source``, ``stride`` in elements of ``width`` bytes. A group of rows is in memory at a
    time.
    """

    def __init__(
        self, source: Source, begin: int, shape: tuple[int, ...], stride: tuple[int, ...], width: int, name: str
    ) -> None:
        self.name = name
        self.source, self.begin = source, begin
        self.shape, self.stride, self.width = shape, stride, width
        self.size = prod(shape) * width
        self._row = prod(shape[1:]) * width
        self._group_rows = max(_WINDOW // max(self._row, 1), 1)
        self._group: tuple[int, bytes] = (-1, b"")

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        parts = []
        while offset < end:
            group = offset // (self._row * self._group_rows)
            kept = self._group  # another thread may replace it
            if kept[0] != group:
                kept = self._group = (group, self._rows(group * self._group_rows))
            begin = group * self._group_rows * self._row
            part = kept[1][offset - begin : end - begin]
            if not part:
                break
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        yield Span(self.source, self.begin, extent(self.shape, self.stride) * self.width)

    def _rows(self, first: int) -> bytes:
        shape = (min(self._group_rows, self.shape[0] - first), *self.shape[1:])
        begin = self.begin + first * self.stride[0] * self.width
        data = self.source.read(begin, extent(shape, self.stride) * self.width)
        return gather(data, shape, self.stride, self.width)

    def close(self) -> None:
        pass


class SignSource:
    """The elements of a tensor, with the bits of ``signs`` flipped in each element.

    ``begin`` and ``size`` are in bytes of ``source``.
    """

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

    def close(self) -> None:
        pass


class Overlap(NamedTuple):
    """Two overlapping boxes, or None if none were found. ``sure`` tells whether all boxes were compared."""

    boxes: tuple[Box, Box] | None
    sure: bool = True


def regions_overlapping(boxes: Sequence[Box]) -> Overlap:
    """Look for two boxes with common elements; the result is never a guess.

    Lines across one dimension split the boxes into groups, then lines across another dimension split these: for every
    usual sharding each piece ends up alone, in the time of sorting. The remaining groups are swept along a dimension.
    If the boxes differ in two dimensions, a sweep also takes the time of sorting. Otherwise, after ``_COMPARED``
    comparisons per box the result is not sure.
    """
    full = [box for box in boxes if prod(box[1])]
    work = [full] if len(full) > 1 else []
    left = _COMPARED * len(full)
    while work:
        group = work.pop()
        axes = [axis for axis in range(len(group[0][0])) if _differs(group, axis)]
        if len(axes) == 2:
            pair = _two_in_plane(group, axes[0], axes[1])
            if pair is not None:
                return Overlap(pair)
            continue
        left -= len(group)  # boxes that split off one by one would be sorted each time
        if left < 0:
            return Overlap(None, sure=False)
        for axis in axes:
            parts = _separated(group, axis)
            if len(parts) > 1:
                work += [part for part in parts if len(part) > 1]
                break
        else:
            if len(axes) < 2:  # sorted neighbours overlap, or all boxes are equal
                one, two = sorted(group, key=lambda box: box[0])[:2]
                return Overlap((one, two))
            pair, left = _two_by_sweep(group, axes, left)
            if pair is not None:
                return Overlap(pair)
            if left < 0:
                return Overlap(None, sure=False)
    return Overlap(None)


def _differs(boxes: Sequence[Box], axis: int) -> bool:
    """Return whether the boxes differ along a dimension. If not, it distinguishes none of them."""
    at, size = boxes[0][0][axis], boxes[0][1][axis]
    return any(box[0][axis] != at or box[1][axis] != size for box in boxes)


def _separated(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    """Group the boxes so that extents in different groups do not overlap along a dimension."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        if box[0][axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return groups


def _two_in_plane(boxes: Sequence[Box], along: int, across: int) -> tuple[Box, Box] | None:
    """Return two overlapping boxes, or None, for boxes that differ in only two dimensions.

    A line sweeps along one of the dimensions. While no boxes overlap, the boxes that the line cuts lie side by side, so
    a new box is compared with its two neighbours only. Boxes behind the line are removed when they are met.
    """
    starts: list[int] = []  # of the boxes that the line cuts, sorted; some may already be behind the line
    cut: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        at, low, high = box[0][along], box[0][across], box[0][across] + box[1][across]
        place = bisect_right(starts, low)
        while place and cut[place - 1][0][along] + cut[place - 1][1][along] <= at:
            place -= 1
            del starts[place], cut[place]
        if place and starts[place - 1] + cut[place - 1][1][across] > low:
            return cut[place - 1], box
        while place < len(cut) and starts[place] < high:
            if cut[place][0][along] + cut[place][1][along] > at:
                return cut[place], box
            del starts[place], cut[place]
        starts.insert(place, low)
        cut.insert(place, box)
    return None


def _two_by_sweep(boxes: Sequence[Box], axes: Sequence[int], left: int) -> tuple[tuple[Box, Box] | None, int]:
    """Sweep along the dimension with most distinct starts; return two overlapping boxes or None, and the comparisons
    left.

    A negative number means that the comparisons did not suffice.
    """
    axis = max(axes, key=lambda dim: len({box[0][dim] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        active = [other for other in active if other[0][axis] + other[1][axis] > box[0][axis]]
        left -= len(active)
        if left < 0:
            return None, left
        for other in active:
            if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *other)):
                return (other, box), left
        active.append(box)
    return None, left


def region_missing(shape: tuple[int, ...], boxes: Sequence[Box]) -> Box | None:
    """Return a part of the tensor that no box covers, or None if everything is covered.

    The boxes lie in the tensor and do not overlap. Between two edges along a dimension, something is missing if the
    boxes there have too few elements; only that stretch is then examined along the next dimension.
    """
    here = [box for box in boxes if prod(box[1])]
    if sum(prod(sizes) for _, sizes in here) >= prod(shape):
        return None
    stretches: list[tuple[int, int]] = []
    for axis, size in enumerate(shape):
        room = prod(shape[axis + 1 :])
        changes = {0: 0, size: 0}
        for offsets, sizes in here:
            begin, end, across = offsets[axis], offsets[axis] + sizes[axis], prod(sizes[axis + 1 :])
            changes[begin] = changes.get(begin, 0) + across
            changes[end] = changes.get(end, 0) - across
        edges = sorted(changes)
        filled = accumulate(changes[edge] for edge in edges)
        # One must exist, because all boxes together have too few elements.
        low, high = next(stretch for stretch, there in zip(pairwise(edges), filled) if there < room)
        stretches.append((low, high - low))
        here = [box for box in here if box[0][axis] <= low < box[0][axis] + box[1][axis]]
    return tuple(low for low, _ in stretches), tuple(size for _, size in stretches)
