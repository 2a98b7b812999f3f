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
    all parts in elements, by which those of existing parts are replaced."""

    def __init__(self, parts: Sequence[Rows | None], sizes: Sequence[int]) -> None:
        self.parts = parts
        self.sizes = [size if part is None else part.shape[0] for part, size in zip(parts, sizes)]
        self.starts = [0, *accumulate(self.sizes)]
        #: The number of elements.
        self.size = self.starts[-1]

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


class Slices(NamedTuple):
    """The place of a parameter: from element ``begin`` on in the vector of its ``group``, or in the vectors of all
    ``ranks``. ``group`` is also the number of its flat tensor in each file."""

    shape: tuple[int, ...]
    group: int
    begin: int
    ranks: int = 0

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield where the parameter is in the vectors: (number of the vector, size, offset in the parameter)."""
        size = prod(self.shape)
        if not self.ranks:
            yield self.group, size, 0
            return
        part = -(-size // self.ranks)
        for rank in range(-(-size // part) if part else 0):
            yield rank, min(part, size - rank * part), rank * part

    def joined(self, vectors: Sequence[Vector], dtype: Dtype) -> JoinedTensor:
        """Return the tensor, read from vectors with this dtype."""

        def chunks() -> Iterator[Chunk]:
            for number, size, at in self.stretches():
                for offset, count, part, local in vectors[number].pieces(self.begin, size):
                    if (rows := vectors[number].parts[part]) is not None:
                        yield Chunk(((at + offset,), (count,)), rows.source, rows.begin + local * dtype.itemsize)

        return JoinedTensor(dtype, self.shape, (prod(self.shape),), lambda: list(chunks()))

    def is_whole(self, vectors: Sequence[Vector]) -> bool:
        """Return whether all elements are in files that exist."""
        return all(
            size
            == sum(
                count
                for _, count, part, _ in vectors[number].pieces(self.begin, size)
                if vectors[number].parts[part] is not None
            )
            for number, size, _ in self.stretches()
        )


def slices_of_vectors(
    groups: Sequence[Shapes], paddings: Sequence[Sequence[int]]
) -> tuple[dict[str, Slices], list[int]]:
    """Return each parameter's place with stages 1 and 2 (one vector per group), and the size of each vector.
    ``paddings`` has the elements after each parameter of a group, or [] if there are none."""
    slices: dict[str, Slices] = {}
    used = []
    for group, shapes in enumerate(groups):
        at = 0
        padding = paddings[group] if group < len(paddings) else ()
        for number, (name, shape) in enumerate(shapes.items()):
            slices[name] = Slices(shape, group, at)
            at += prod(shape) + (padding[number] if number < len(padding) else 0)
        used.append(at)
    return slices, used


def slices_of_ranks(groups: Sequence[Shapes], ranks: int, starts: Sequence[int]) -> tuple[dict[str, Slices], int]:
    """Return each parameter's place with stage 3 (one vector per rank), and the size of the vectors. ``starts`` are the
    elements of a rank's vector at which its flat tensors begin."""
    slices: dict[str, Slices] = {}
    at = 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        slices[name] = Slices(shape, max(bisect_right(starts, at) - 1, 0), at, ranks)
        at += -(-prod(shape) // ranks)
    return slices, at
