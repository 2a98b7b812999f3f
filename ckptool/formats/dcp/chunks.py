"""Tensors in pieces, read as if they were whole: only the bytes that are asked for are assembled."""

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

#: Bytes of a piece with unusual strides that are in memory at once.
_WINDOW: Final = 64 << 20
#: Bytes of a run that is copied from its file, not put together with others in memory.
_LONG: Final = 1 << 18
#: Comparisons for each box where three or more dimensions tell them apart and no line separates them: no one shards
#: like that, and the time should be linear in the size of the file.
_COMPARED: Final = 200


class Chunk(NamedTuple):
    """A piece of a tensor: the box that it fills, and its elements, row by row from byte ``begin`` of ``source`` on."""

    box: Box
    source: Source
    begin: int


class _ChunkRuns(NamedTuple):
    """A chunk as runs of bytes that are contiguous both in it and in the tensor.

    ``counts`` and ``steps`` of the outer dimensions: how many, and how far apart in the tensor in bytes; ``first`` is
    the byte of the tensor at which the first run begins, ``length`` the bytes of each.
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
        """Return where in the tensor a run begins, in bytes; it grows with the number."""
        at = self.first
        for count, step in zip(reversed(self.counts), reversed(self.steps)):
            number, index = divmod(number, count)
            at += index * step
        return at

    def first_after(self, at: int) -> int:
        """Return the number of the first run that ends after byte ``at`` of the tensor."""
        return bisect_right(range(self.number), at, key=lambda number: self.place(number) + self.length)


class _Layout(NamedTuple):
    """The runs of a tensor in order, the byte of the tensor at which each begins, and the end of those up to each.

    ``gaps`` says whether there may be bytes that nothing fills: where pieces are missing, or overlap.
    """

    runs: list[_ChunkRuns]
    firsts: list[int]
    reach: list[int]
    gaps: bool


class ChunkedSource(AssembledSource):
    """The rows of a tensor, from pieces that may be cut along any dimension.

    A piece that is cut along the first dimension is one run. The runs of others are computed from their numbers, so
    that a tensor of millions of short ones takes no memory.
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
        # Runs before the first one that reaches so far have none of it: along the first dimension, all but a few.
        for run in runs[bisect_right(reach, offset) : bisect_right(firsts, end - 1)]:
            _copy(run, offset, end, buffer, seen)

    def stretches(self, offset: int, size: int) -> Iterator[Span]:
        """Yield the bytes as spans: the long runs are those of their sources."""
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
    """Return the first byte of each box in its tensor, and the one after its last."""
    steps = [step * width for step in contiguous_strides(shape)]
    return [
        (first := sum(map(mul, offsets, steps)), first + sum(map(mul, sizes, steps)) - sum(steps) + width)
        for offsets, sizes in boxes
    ]


def joined(chunks: Sequence[Chunk], shape: tuple[int, ...], width: int, name: str) -> StorageLocation:
    """Return the bytes of a tensor: those of its only chunk, or a source that assembles them."""
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
    # All dimensions from ``axis`` on are whole, so the one before it is contiguous, too.
    axis = max(axis - 1, 0)
    outer = [(sizes[dim], steps[dim] * width) for dim in range(axis) if sizes[dim] != 1]
    counts, ways = tuple(count for count, _ in outer), tuple(step for _, step in outer)
    return _ChunkRuns(first, prod(sizes[axis:]) * width, counts, ways, prod(counts), chunk.source, chunk.begin)


def _copy(run: _ChunkRuns, begin: int, end: int, out: memoryview, seen: Seen | None) -> None:
    """Copy the part of a chunk that is in the bytes ``begin`` to ``end`` of the tensor to its places."""
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
    if head:  # of the first run only a part is wanted
        part = view[: length - head]
        out[: len(part)] = part
        first, at = first + 1, len(part)
    if tail < length and first < stop:  # of the last one, too
        here = run.place(stop - 1) - begin
        out[here : here + tail] = view[len(data) - tail :]
        stop -= 1
    for places in _places(run, first, stop):
        rows = range(at, at + len(places) * length, length)
        for here, row in zip(range(places.start - begin, places.stop - begin, places.step), rows):
            out[here : here + length] = view[row : row + length]
        at = rows.stop


def _places(run: _ChunkRuns, first: int, stop: int) -> Iterator[range]:
    """Yield the places of some runs, those along the innermost dimension as one range."""
    count, step = (run.counts[-1], run.steps[-1]) if run.counts else (1, 1)
    while first < stop:
        many = min(count - first % count, stop - first)
        place = run.place(first)
        yield range(place, place + many * step, step)
        first += many


class RowSource:
    """The elements of a view with other strides, row by row, such as those of a transposed tensor.

    ``begin`` is in bytes of ``source``, ``stride`` in elements of ``width`` bytes. Some rows are in memory at a time.
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
    """The elements of a tensor with the bits of ``signs`` flipped in each.

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
    """Two boxes that overlap, None if none were found; ``sure`` says that all were compared."""

    boxes: tuple[Box, Box] | None
    sure: bool = True


def regions_overlapping(boxes: Sequence[Box]) -> Overlap:
    """Look for two boxes that have elements in common; the result is never a guess.

    The boxes are split into groups by lines across one dimension, and these again across another one: the pieces of
    every way to shard end up alone, in the time of sorting. The groups that remain are swept along a dimension. Where
    two dimensions tell the boxes apart, that also takes the time of sorting; where it takes more, the answer is not
    sure once ``_COMPARED`` comparisons for each box did not suffice.
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
        left -= len(group)  # boxes that split off one by one would be sorted as often
        if left < 0:
            return Overlap(None, sure=False)
        for axis in axes:
            parts = _separated(group, axis)
            if len(parts) > 1:
                work += [part for part in parts if len(part) > 1]
                break
        else:
            if len(axes) < 2:  # in order, the second begins before the first one ends; or they are all the same
                one, two = sorted(group, key=lambda box: box[0])[:2]
                return Overlap((one, two))
            pair, left = _two_by_sweep(group, axes, left)
            if pair is not None:
                return Overlap(pair)
            if left < 0:
                return Overlap(None, sure=False)
    return Overlap(None)


def _differs(boxes: Sequence[Box], axis: int) -> bool:
    """Return whether the extents of the boxes differ along a dimension; if not, it tells none of them apart."""
    at, size = boxes[0][0][axis], boxes[0][1][axis]
    return any(box[0][axis] != at or box[1][axis] != size for box in boxes)


def _separated(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    """Return the boxes in groups whose extents along a dimension do not overlap."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        if box[0][axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return groups


def _two_in_plane(boxes: Sequence[Box], along: int, across: int) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, if only two dimensions tell them apart.

    A line sweeps along one of them. The boxes that it cuts lie side by side as long as none overlap, so a new one need
    only be compared with its two neighbours. Boxes behind the line are removed when they are met.
    """
    starts: list[int] = []  # of the boxes that the line cuts, in order, and of some behind it
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
    """Sweep along the dimension that tells most boxes apart; return two that overlap, and the comparisons left.

    Their number is negative if they did not suffice.
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
    """Return a box of the tensor that none of the boxes covers, None if all is covered.

    The boxes lie in the tensor and do not overlap. Between two edges along a dimension something is missing if the
    boxes there have fewer elements than fit; only that stretch is then examined along the next dimension.
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
        # There is one: the boxes together have too few elements.
        low, high = next(stretch for stretch, there in zip(pairwise(edges), filled) if there < room)
        stretches.append((low, high - low))
        here = [box for box in here if box[0][axis] <= low < box[0][axis] + box[1][axis]]
    return tuple(low for low, _ in stretches), tuple(size for _, size in stretches)
