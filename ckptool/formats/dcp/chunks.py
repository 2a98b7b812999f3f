"""A tensor in pieces, read as if it were whole: nothing is brought together but what is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import Final, NamedTuple

from ...checkpoint.tensors import contiguous_strides
from ...files.sources import Source
from .metadata import Box

#: Bytes of a piece with odd strides that are held at once.
_WINDOW: Final = 64 << 20


class Chunk(NamedTuple):
    """A piece of a tensor: the box that it fills, and its elements row by row from byte ``begin`` of ``source`` on."""

    box: Box
    source: Source
    begin: int


class _Runs(NamedTuple):
    """A chunk as runs of bytes that stand together in it and in the tensor.

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
        """The byte of the tensor behind the last run."""
        return self.place(self.number - 1) + self.length

    def place(self, number: int) -> int:
        """Where in the tensor a run begins, in bytes. It grows with the number."""
        at = self.first
        for count, step in zip(reversed(self.counts), reversed(self.steps)):
            number, index = divmod(number, count)
            at += index * step
        return at

    def from_(self, at: int) -> int:
        """The number of the first run that ends behind byte ``at`` of the tensor."""
        low, high = 0, self.number
        while low < high:
            middle = (low + high) // 2
            if self.place(middle) + self.length > at:
                high = middle
            else:
                low = middle + 1
        return low


class ChunkedSource:
    """The rows of a tensor, from pieces that may be cut along any dimension.

    A piece that is cut along the first dimension is one run. Of others runs are found by number, so that a tensor of
    millions of short ones takes no memory.
    """

    def __init__(self, shape: tuple[int, ...], width: int, chunks: Sequence[Chunk], name: str) -> None:
        self.name = name
        self.size = prod(shape) * width
        runs = [_runs(shape, width, chunk) for chunk in chunks if prod(chunk.box[1])]
        self._runs = sorted(runs, key=lambda run: run.first)
        self._firsts = [run.first for run in self._runs]
        #: How far the runs up to each reach, in bytes of the tensor.
        self._reach = list(accumulate((run.end for run in self._runs), max))

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        out = memoryview(bytearray(end - offset))
        # Those before the first one that reaches so far have nothing of it: along the first dimension, all but a few.
        first = bisect_right(self._reach, offset)
        for run in self._runs[first : bisect_right(self._firsts, end - 1)]:
            _copy(run, offset, end, out)
        return bytes(out)

    def close(self) -> None:
        pass


def _runs(shape: tuple[int, ...], width: int, chunk: Chunk) -> _Runs:
    offsets, sizes = chunk.box
    steps = contiguous_strides(shape)
    first = sum(at * step for at, step in zip(offsets, steps)) * width
    axis = len(shape)
    while axis > 0 and sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    # Everything from ``axis`` on is whole, so the dimension before it runs on, too.
    axis = max(axis - 1, 0)
    outer = [(sizes[dim], steps[dim] * width) for dim in range(axis) if sizes[dim] != 1]
    counts, ways = tuple(count for count, _ in outer), tuple(step for _, step in outer)
    return _Runs(first, prod(sizes[axis:]) * width, counts, ways, prod(counts), chunk.source, chunk.begin)


def _copy(run: _Runs, begin: int, end: int, out: memoryview) -> None:
    """Put what a chunk has of the bytes ``begin`` to ``end`` of the tensor in their places."""
    length = run.length
    one = run.from_(begin)
    stop = run.from_(end)
    if stop < run.number and run.place(stop) < end:
        stop += 1
    if one >= stop:
        return
    head = max(begin - run.place(one), 0)
    tail = min(end - run.place(stop - 1), length)
    start = one * length + head
    data = memoryview(run.source.read(run.begin + start, (stop - 1) * length + tail - start))
    if stop - one == 1:
        here = run.place(one) + head - begin
        out[here : here + len(data)] = data
        return
    at = 0
    for number, place in enumerate(_places(run, one, stop)):
        skip = head if number == 0 else 0
        take = (tail if number == stop - one - 1 else length) - skip
        here = place + skip - begin
        out[here : here + take] = data[at : at + take]
        at += take


def _places(run: _Runs, one: int, stop: int) -> Iterator[int]:
    """The places of some runs, the innermost dimension stepped through rather than computed."""
    count, step = run.counts[-1], run.steps[-1]
    while one < stop:
        many = min(count - one % count, stop - one)
        place = run.place(one)
        yield from range(place, place + many * step, step)
        one += many


class RowSource:
    """The elements of a view with other strides, row by row: what a transposed tensor looks like to a reader.

    ``begin`` is in bytes of ``source``, ``stride`` in elements of ``width`` bytes. Some rows are held at a time.
    """

    def __init__(
        self, source: Source, begin: int, shape: tuple[int, ...], stride: tuple[int, ...], width: int, name: str
    ) -> None:
        self.name = name
        self.source, self.begin = source, begin
        self.shape, self.stride, self.width = shape, stride, width
        self.size = prod(shape) * width
        self._row = prod(shape[1:]) * width
        self._most = max(_WINDOW // max(self._row, 1), 1)
        self._held: tuple[int, bytes] = (-1, b"")

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        parts = []
        while offset < end:
            group = offset // (self._row * self._most)
            if self._held[0] != group:
                self._held = (group, self._rows(group * self._most))
            begin = group * self._most * self._row
            part = self._held[1][offset - begin : end - begin]
            if not part:
                break
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _rows(self, first: int) -> bytes:
        width = self.width
        shape = (min(self._most, self.shape[0] - first), *self.shape[1:])
        extent = sum((size - 1) * step for size, step in zip(shape, self.stride)) + 1
        data = memoryview(self.source.read(self.begin + first * self.stride[0] * width, extent * width))
        # A strided copy along the longest dimension for each byte of an element and each other place.
        out = memoryview(bytearray(prod(shape) * width))
        target = contiguous_strides(shape)
        longest = max(range(len(shape)), key=lambda axis: shape[axis])
        others = [axis for axis in range(len(shape)) if axis != longest]
        count, step, along = shape[longest], self.stride[longest] * width, target[longest] * width
        for place in product(*(range(shape[axis]) for axis in others)):
            here = sum(index * self.stride[axis] for index, axis in zip(place, others)) * width
            there = sum(index * target[axis] for index, axis in zip(place, others)) * width
            for byte in range(width):
                stop = there + byte + (count - 1) * along + 1
                one = here + byte
                if step:
                    out[there + byte : stop : along] = data[one : one + (count - 1) * step + 1 : step]
                else:
                    out[there + byte : stop : along] = data[one : one + 1].tobytes() * count
        return bytes(out)

    def close(self) -> None:
        pass


class SignSource:
    """The elements of a tensor with the bits of ``signs``, those of one element, turned round.

    ``begin`` and ``size`` are in bytes of ``source``.
    """

    def __init__(self, source: Source, begin: int, size: int, signs: bytes) -> None:
        self.name, self.size = source.name, size
        self._source, self._begin, self._signs = source, begin, signs

    def read(self, offset: int, size: int) -> bytes:
        width = len(self._signs)
        data = self._source.read(self._begin + offset, max(min(size, self.size - offset), 0))
        begin = offset % width
        mask = (self._signs * (len(data) // width + 2))[begin : begin + len(data)]
        turned = int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")
        return turned.to_bytes(len(data), "little")

    def close(self) -> None:
        pass


class Overlap(NamedTuple):
    """Two boxes that have elements in common, None where none were found; ``sure`` says that all were compared."""

    boxes: tuple[Box, Box] | None
    sure: bool = True


def regions_overlapping(boxes: Sequence[Box]) -> Overlap:
    """Look for two boxes that have elements in common. What it names was seen to overlap, never guessed.

    They fall into groups that no line along a dimension goes through, and these again along another one: the pieces of
    every way to shard end up alone, in a time that grows as that of sorting. What is left is swept along a dimension:
    where two dimensions tell the boxes apart in a time that grows as that of sorting, too; where it takes more, as long
    as ``_COMPARED`` comparisons for each box suffice, and beyond that the answer is not sure.
    """
    full = [box for box in boxes if prod(box[1])]
    work = [full] if len(full) > 1 else []
    left = _COMPARED * len(full)
    while work:
        group = work.pop()
        axes = [axis for axis in range(len(group[0][0])) if _differs(group, axis)]
        if len(axes) == 2:
            found = _two_in_plane(group, axes[0], axes[1])
            if found is not None:
                return Overlap(found)
            continue
        left -= len(group)  # what peels off box by box would be sorted as often
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
            found, left = _two_of(group, axes, left)
            if found is not None:
                return Overlap(found)
            if left < 0:
                return Overlap(None, sure=False)
    return Overlap(None)


def _differs(boxes: Sequence[Box], axis: int) -> bool:
    """Do the boxes not all have the same stretch along a dimension? If they have, it tells none of them apart."""
    at, size = boxes[0][0][axis], boxes[0][1][axis]
    return any(box[0][axis] != at or box[1][axis] != size for box in boxes)


def _separated(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    """The boxes in groups whose stretches along a dimension have nothing in common."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        if box[0][axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return groups


def _two_in_plane(boxes: Sequence[Box], along: int, across: int) -> tuple[Box, Box] | None:
    """Two boxes that overlap, where two dimensions alone tell them apart.

    A line goes along one of them. The boxes that it cuts lie side by side as long as none overlap, so that a new one
    need only be compared with its two neighbours. What the line has left behind is taken out when it is met.
    """
    starts: list[int] = []  # of the boxes that the line cuts, in order, and of some that it has left
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


def _two_of(boxes: Sequence[Box], axes: Sequence[int], left: int) -> tuple[tuple[Box, Box] | None, int]:
    """Two boxes that overlap, swept along the dimension that tells most apart; and how many comparisons are left,
    fewer than none where they did not suffice."""
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
    """A box of the tensor that none of the boxes covers, which lie in it and do not overlap; None where all is covered.

    Between two edges along a dimension something is missing if the boxes there have fewer elements than it has room:
    that stretch alone is then looked at along the next dimension.
    """
    here = [box for box in boxes if prod(box[1])]
    if sum(prod(sizes) for _, sizes in here) >= prod(shape):
        return None
    found: list[tuple[int, int]] = []
    for axis, size in enumerate(shape):
        room = prod(shape[axis + 1 :])
        changes = {0: 0, size: 0}
        for offsets, sizes in here:
            begin, end, across = offsets[axis], offsets[axis] + sizes[axis], prod(sizes[axis + 1 :])
            changes[begin] = changes.get(begin, 0) + across
            changes[end] = changes.get(end, 0) - across
        edges = sorted(changes)
        filled = accumulate(changes[edge] for edge in edges)
        # There is such a stretch: all of them together have too few elements.
        low, high = next(stretch for stretch, there in zip(pairwise(edges), filled) if there < room)
        found.append((low, high - low))
        here = [box for box in here if box[0][axis] <= low < box[0][axis] + box[1][axis]]
    return tuple(low for low, _ in found), tuple(size for _, size in found)


#: Comparisons for each box where three dimensions and more tell them apart and no line separates them: nobody shards
#: like that, and the time should grow as the file does.
_COMPARED: Final = 200
