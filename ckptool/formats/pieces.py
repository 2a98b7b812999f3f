"""Tensors in pieces, read as if they were whole: only the requested bytes are assembled."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod
from random import Random
from typing import Final

from ..base.dtypes import BY_NAME, Dtype, is_complex
from ..base.errors import MalformedError
from ..base.findings import COPIES, Finding
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.container import StorageLocation
from ..checkpoint.sharding import Range
from ..checkpoint.tensors import TensorReader, contiguous_strides, extent, is_contiguous
from ..files.sources import AssembledSource, BytesSource, Seen, Source, Span
from ..files.threads import READ_SIZE
from ..pickles.nodes import Ref
from ..values.elements import gather_into
from ..values.interpretation import flipped_signs, lazy_bits

_NOTHING: Final = BytesSource(b"")
#: The most bytes of a strided piece in memory at once, and the most that are read for them at once.
_WINDOW: Final = 4 << 20
#: Runs of at least this many bytes are copied from their file rather than assembled in memory.
_LONG: Final = 1 << 18
#: The most blocks of one part. An inner mesh dimension makes as many as it has ranks, along a tensor dimension.
_MAX_BLOCKS: Final = 1 << 12
#: A piece's place in its tensor, in elements: (offsets, sizes), each with one number per dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: A prime. Two different sums of products modulo it are equal by chance once in 10^36 times at most.
_PRIME: Final = (1 << 127) - 1
#: Random numbers that no file can foresee.
_UNFORESEEN: Final = Random()


def box_text(box: Box) -> str:
    """Return a box as ``[0:4, 8:16]``, or "(a scalar)" without dimensions."""
    return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*box))}]" if box[0] else "(a scalar)"


class Misfit(NamedTuple):
    """A part of a tensor that no box covers, or that the first two of these ``boxes`` cover."""

    place: Box
    boxes: Sequence[Box]


def misfit(shape: tuple[int, ...], boxes: Sequence[Box]) -> Misfit | None:
    """Return a part of the tensor that not exactly one box covers; None if the boxes make the whole tensor.

    The boxes lie in the tensor. Every edge gets a random number, and a box the product of the differences between its
    edges. The products of boxes that make the whole add up to the product of the whole, whatever the numbers; other
    boxes do not. So the time is linear, for any sharding in any number of dimensions.
    """
    marks: list[defaultdict[int, int]] = [defaultdict(lambda: _UNFORESEEN.getrandbits(127)) for _ in shape]

    def weight(box: Box, first: int = 0) -> int:
        """Return the product over the dimensions from ``first`` on."""
        product = 1
        for axis in range(first, len(shape)):
            at, mark = box[0][axis], marks[axis]
            product = product * (mark[at + box[1][axis]] - mark[at]) % _PRIME
        return product

    here = [box for box in boxes if 0 not in box[1]]
    whole = (0,) * len(shape), shape
    if 0 in shape or sum(map(weight, here)) % _PRIME == weight(whole):
        return None
    stretches: list[tuple[int, int]] = []
    for axis, size in enumerate(shape):
        # Between two edges along this dimension, the boxes there have another sum than the whole.
        changes = {0: 0, size: 0}
        for box in here:
            begin, end, across = box[0][axis], box[0][axis] + box[1][axis], weight(box, axis + 1)
            changes[begin] = changes.get(begin, 0) + across
            changes[end] = changes.get(end, 0) - across
        edges, wanted = sorted(changes), weight(whole, axis + 1)
        sums = accumulate(changes[edge] for edge in edges)
        low, high = next(stretch for stretch, found in zip(pairwise(edges), sums) if (found - wanted) % _PRIME)
        stretches.append((low, high - low))
        here = [box for box in here if box[0][axis] <= low < box[0][axis] + box[1][axis]]
    place = tuple(low for low, _ in stretches), tuple(size for _, size in stretches)
    return Misfit(place, here[:2])


class Rows(NamedTuple):
    """The elements of a tensor in a file, row by row from byte ``begin`` of ``source``. To compare copies: ``crc`` is
    the recorded CRC-32 of the storage in ``file``, 0 if not recorded. ``place`` describes the elements' place in that
    storage: its size, the offset and the strides. ``is_whole``: it holds nothing else."""

    dtype: Dtype
    shape: tuple[int, ...]
    source: Source
    begin: int
    file: str = ""
    crc: int = 0
    place: Hashable = None
    is_whole: bool = False

    @property
    def size(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def equals(self, other: Rows) -> bool:
        """Return whether another tensor has the same bytes as this one."""
        return not _differ(self.source, self.begin, other.source, other.begin, self.size)

    def is_one_value(self) -> bool:
        """Return whether all elements are equal, like the zeros or ones of a new layer."""
        width = self.dtype.itemsize
        rest = self.size - width
        return rest <= 0 or not _differ(self.source, self.begin, self.source, self.begin + width, rest)


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
    """A chunk as runs of ``length`` bytes that are contiguous both in the chunk and in the tensor. The first run begins
    at byte ``first`` of the tensor. ``counts`` and ``steps``: the runs of outer dimensions, their distance there."""

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

    def between(self, begin: int, end: int) -> list[_ChunkRuns]:
        """Return the runs that may have some of these bytes. Pieces that end before are skipped: for pieces cut along
        the first dimension, that is nearly all."""
        return self.runs[bisect_right(self.reach, begin) : bisect_right(self.firsts, end - 1)]


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
        return bytes(_bytes(self, offset, max(min(size, self.size - offset), 0), None))

    def read_into(self, offset: int, buffer: memoryview, seen: Seen | None = None) -> None:
        end = offset + len(buffer)
        if self.layout.gaps:
            buffer[:] = bytes(len(buffer))
        for run in self.layout.between(offset, end):
            _copy(run, offset, end, buffer, seen)

    def stretches(self, offset: int, size: int) -> Iterator[Span]:
        """Yield the bytes as spans; long runs are spans of their own sources."""
        end = offset + size
        long = []
        for run in self.layout.between(offset, end):
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
        for run in self.layout.between(offset, offset + size):
            yield Span(run.source, run.begin, run.number * run.length)


def assembled(chunks: Sequence[Chunk], shape: tuple[int, ...], width: int, name: str) -> StorageLocation:
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
    count, step = (run.counts[-1], run.steps[-1]) if run.counts else (1, 1)
    while first < stop:
        many = min(count - first % count, stop - first)
        place = run.place(first)
        yield range(place, place + many * step, step)
        first += many


class RowSource(AssembledSource):
    """The elements of a strided view, row by row, such as a transposed tensor. ``begin`` is in bytes of ``source``,
    ``stride`` in elements of ``width`` bytes. As many rows are in memory at a time as fit into a window."""

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
        return bytes(_bytes(self, offset, max(min(size, self.size - offset), 0), None))

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
            offsets = tuple(at if dimension == axis else 0 for dimension in range(len(shape)))
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
    """Return the blocks that a part fills in the whole tensor; ``ranges`` are its index ranges in each dimension.
    Raises MalformedError if the part has another shape than its ranges, or more blocks than any mesh makes."""
    shape = tuple(sum(end - begin for begin, end in part) for part in ranges)
    if shape != rows.shape:
        raise MalformedError(f"its part is of the shape {list(rows.shape)}, and its place has {list(shape)}")
    if 0 in shape:
        return []
    if prod(len(part) for part in ranges) > _MAX_BLOCKS:
        raise MalformedError(f"its part is in more than {pluralize(_MAX_BLOCKS, 'block')}")
    strides, chunks = contiguous_strides(shape), []
    #: For each dimension, the ranges of the whole and where they begin in the part.
    placed = [list(zip(part, accumulate((end - at for at, end in part), initial=0))) for part in ranges]
    for block in product(*placed):
        box = tuple(at for (at, _), _ in block), tuple(end - at for (at, end), _ in block)
        begin = rows.begin + sum(at * step for (_, at), step in zip(block, strides)) * rows.dtype.itemsize
        chunks.append(strided_chunk(box, rows, begin, box[1], strides, name))
    return chunks


def strided_chunk(
    box: Box, rows: Rows, begin: int, shape: tuple[int, ...], stride: tuple[int, ...], name: str
) -> Chunk:
    """Return the piece at a box, whose elements are a view of a tensor's source from byte ``begin`` on."""
    steps = contiguous_strides(shape)
    if all(size == 1 or own == step for size, own, step in zip(shape, stride, steps)):
        return Chunk(box, rows.source, begin)
    return Chunk(box, RowSource(rows.source, begin, shape, stride, rows.dtype.itemsize, name), 0)


#: Finding code: values that differ between ranks.
RANK_VALUES: Final = "rank-values"
#: Statistics that a layer updates by itself: FULL_STATE_DICT and DeepSpeed take rank 0's values.
STATISTICS: Final = frozenset(("running_mean", "running_var", "num_batches_tracked"))
#: The most bytes of copies without a usable checksum that are read when a folder is opened.
_AT_ONCE: Final = 64 << 20
#: The most bytes in memory at once.
_BLOCK: Final = 1 << 20


_RANDOM: Final = regex(r"rng|random|generator|seed|cuda|cpu", re.I)


def is_own(path: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether ranks may have different values of a tensor: random generator states and running statistics."""
    random = dtype == "uint8" and len(shape) == 1 and _RANDOM.search(path) is not None
    return random or path.rpartition(".")[2] in STATISTICS


class CopyPair(NamedTuple):
    """Two copies of the tensor that messages call ``path``. ``by_chance``: two new layers may be equal by chance, so
    copies are one tensor only if they also have more than one value. ``why`` tells the user how two tensors may have
    got the same name, "" for copies."""

    path: str
    first: Rows
    other: Rows
    by_chance: bool = False
    why: str = ""

    def by_checksum(self) -> bool | None:
        """Return whether the recorded checksums prove the copies equal or different; None if they do not tell."""
        first, other = self.first, self.other
        if not first.size:
            return True
        if not (first.crc and other.crc) or first.place != other.place:
            return None
        if first.crc == other.crc:
            return None if self.by_chance else True
        return False if first.is_whole and other.is_whole else None

    def by_value(self) -> bool:
        """Read both copies; return whether they are equal."""
        return self.first.equals(self.other) and not (self.by_chance and self.first.is_one_value())


class Copies:
    """All copies in the files of one save."""

    def __init__(self) -> None:
        self.different: list[CopyPair] = []
        #: Pairs that have not been compared.
        self.open: list[CopyPair] = []
        self._left = _AT_ONCE

    def compare(self, pair: CopyPair) -> bool | None:
        """Return whether two copies are equal; None if comparing them would exceed the limit for opening."""
        equal = pair.by_checksum()
        if equal is None and pair.first.size <= self._left:
            self._left -= pair.first.size
            equal = pair.by_value()
        return equal

    def add(self, pair: CopyPair, *, own: bool = False) -> bool:
        """Add two copies that have to be equal, unless each rank may have its ``own``; return whether it has."""
        equal = self.compare(pair)
        if own:
            return equal is False
        if equal is None:
            self.open.append(pair)
        elif not equal:
            self.different.append(pair)
        return False

    def settle(self, paths: Iterable[str]) -> None:
        """Compare the pending pairs of these tensors by value."""
        wanted = {*paths} if self.open else set[str]()
        self.different += [pair for pair in self.open if pair.path in wanted and not pair.by_value()]
        self.open = [pair for pair in self.open if pair.path not in wanted]


def copy_problems(pairs: Iterable[CopyPair], storages: Mapping[str, str]) -> list[Finding]:
    """Return one problem per set of files whose copies differ; ``storages`` maps paths to storage keys."""
    others: dict[str, dict[str, None]] = {}
    firsts: dict[str, CopyPair] = {}
    for pair in pairs:
        firsts.setdefault(pair.path, pair)
        others.setdefault(pair.path, {})[pair.other.file] = None
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for path, pair in firsts.items():
        alike.setdefault((pair.first.file, pair.why, tuple(others[path])), []).append(path)
    problems = []
    for (first, why, files), paths in alike.items():
        names, where = join_limited([quoted(path) for path in paths], most=3), join_limited(list(files), most=3)
        verb = "is" if len(paths) == 1 else "are"
        message = f"{names} in {where} {verb} not the same as in {first}: {why or 'its copies have to be equal'}"
        keys = frozenset(storages[path] for path in paths if path in storages)
        problems.append(Finding(COPIES, "error", message, files[0], storages=keys or None))
    return problems


def _differ(one: Source, at: int, other: Source, there: int, size: int) -> bool:
    return any(
        one.read(at + begin, min(_BLOCK, size - begin)) != other.read(there + begin, min(_BLOCK, size - begin))
        for begin in range(0, size, _BLOCK)
    )
