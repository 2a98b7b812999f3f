"""How ZeRO cuts parameters: flat vectors over ranks, in which each parameter fills one or more stretches.

Stages 1 and 2 flatten all parameters of a group into one vector and cut it into equal partitions, so a parameter may
straddle ranks. Stage 3 cuts every parameter into equal parts, padding the last one, and each rank flattens its own
parts. Sources: DeepSpeed, ``utils/zero_to_fp32.py`` (``_zero2_merge_trainable_params``,
``_zero3_merge_trainable_params``), ``runtime/zero/stage_1_and_2.py`` (``state_dict``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from ...base.dtypes import Dtype
from ...base.records import NamedTuple
from ..joined.container import JoinedTensor
from ..pieces.chunks import Chunk, Rows

#: The shapes of a group's parameters by name, in flat vector order.
Shapes = Mapping[str, tuple[int, ...]]


class Vector:
    """One vector made of tensors in several files. ``parts`` has None for a missing file; ``sizes`` has the sizes of
    all parts in elements."""

    def __init__(self, parts: Sequence[Rows | None], sizes: Sequence[int]) -> None:
        self.parts = parts
        self.sizes = sizes
        self.starts = [0, *accumulate(sizes)]
        #: Whether no part is missing.
        self.complete = all(part is not None for part in parts)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.starts[-1]

    def pieces(self, begin: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the pieces of a range as (offset in the range, count, part number, offset in the part). Elements beyond
        the end of the vector are in no piece."""
        at, end = begin, min(begin + size, self.size)
        number = bisect_right(self.starts, at) - 1
        while at < end:
            count = min(self.starts[number + 1], end) - at
            if count > 0:
                yield at - begin, count, number, at - self.starts[number]
                at += count
            number += 1


class Stretch(NamedTuple):
    """``size`` elements of a vector from ``begin`` on, which are a parameter's elements from ``at`` on."""

    vector: int
    begin: int
    size: int
    at: int


class Slices(NamedTuple):
    """The place of a parameter: from element ``begin`` on in the vector of its ``group``, or in the vectors of all
    ``ranks``.

    ``group`` is also the number of its flat tensor in each file.
    """

    shape: tuple[int, ...]
    group: int
    begin: int
    ranks: int = 0

    @property
    def stretches(self) -> Iterator[Stretch]:
        """The parameter's stretches in the vectors."""
        size = prod(self.shape)
        if not self.ranks:
            yield Stretch(self.group, self.begin, size, 0)
            return
        part = -(-size // self.ranks)
        for rank in range(-(-size // part) if part else 0):
            yield Stretch(rank, self.begin, min(part, size - rank * part), rank * part)

    def joined(self, vectors: Sequence[Vector], dtype: Dtype) -> JoinedTensor:
        """Return the tensor, read from vectors with this dtype."""
        return JoinedTensor(dtype, self.shape, (prod(self.shape),), lambda: list(self._chunks(vectors, dtype)))

    def _chunks(self, vectors: Sequence[Vector], dtype: Dtype) -> Iterator[Chunk]:
        for number, begin, size, at in self.stretches:
            for offset, count, part, local in vectors[number].pieces(begin, size):
                rows = vectors[number].parts[part]
                if rows is not None:
                    yield Chunk(((at + offset,), (count,)), rows.source, rows.begin + local * dtype.itemsize)

    def is_whole(self, vectors: Sequence[Vector], reach: Sequence[int]) -> bool:
        """Return whether all elements are in files that exist. ``reach`` is ``reach_of(vectors)``.

        ``reach`` avoids checking thousands of ranks for each of thousands of parameters.
        """
        size = prod(self.shape)
        if not self.ranks:
            vector = vectors[self.group]
            pieces = vector.pieces(self.begin, size)
            return size == sum(count for _, count, part, _ in pieces if vector.parts[part] is not None)
        part = -(-size // self.ranks)
        last = -(-size // part) - 1 if part else -1
        rest = self.begin + size - last * part
        full = last < 1 or self.begin + part <= reach[last - 1]
        return last < 0 or (full and vectors[last].complete and rest <= vectors[last].size)


def reach_of(vectors: Sequence[Vector]) -> list[int]:
    """Return, for each vector, the smallest size up to it; -1 from the first incomplete vector on."""
    return list(accumulate((vector.size if vector.complete else -1 for vector in vectors), min))


def slices_of_vectors(
    groups: Sequence[Shapes], paddings: Sequence[Sequence[int]]
) -> tuple[dict[str, Slices], list[int]]:
    """Return each parameter's place with stages 1 and 2 (one vector per group), and the size of each vector.

    ``paddings`` has the elements after each parameter of a group, or [] if there are none.
    """
    slices: dict[str, Slices] = {}
    used = []
    for group, shapes in enumerate(groups):
        at = 0
        padding = paddings[group] if group < len(paddings) else ()
        for number, (name, shape) in enumerate(shapes.items()):
            size = prod(shape)
            slices[name] = Slices(shape, group, at)
            at += size + (padding[number] if number < len(padding) else 0)
        used.append(at)
    return slices, used


def slices_of_ranks(groups: Sequence[Shapes], ranks: int, starts: Sequence[int]) -> tuple[dict[str, Slices], int]:
    """Return each parameter's place with stage 3 (one vector per rank), and the size of the vectors.

    ``starts`` are the elements of a rank's vector at which its flat tensors begin.
    """
    slices: dict[str, Slices] = {}
    at = 0
    for shapes in groups:
        for name, shape in shapes.items():
            slices[name] = Slices(shape, max(bisect_right(starts, at) - 1, 0), at, ranks)
            at += -(-prod(shape) // ranks)
    return slices, at


def cut_evenly(
    shape: tuple[int, ...], parts: Mapping[int, Rows], ranks: int, dtype: Dtype
) -> tuple[JoinedTensor, bool]:
    """Return a tensor that stage 3 cut individually, as it does frozen parameters, and whether all parts exist.

    ``parts`` maps the ranks to their parts.
    """
    slices = Slices(shape, 0, 0, ranks)
    sizes = {rank: prod(rows.shape) for rank, rows in parts.items()}
    whole = all(size <= sizes.get(rank, -1) for rank, _, size, _ in slices.stretches)
    vectors = [Vector([parts[part.vector]], [part.size]) for part in slices.stretches] if whole else []
    return slices.joined(vectors, dtype), whole
