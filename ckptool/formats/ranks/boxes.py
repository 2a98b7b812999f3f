"""Place the parts of tensors: the blocks of a part, and whether all ranks' parts make the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

from ...base.errors import MalformedError
from ...base.text import pluralize
from ...checkpoint.sharding import Range
from ...checkpoint.tensors import contiguous_strides
from ..dcp.chunks import Chunk, Overlap, RowSource, region_missing, regions_overlapping
from ..dcp.metadata import Box
from .container import Rows

#: The most blocks of one part. An inner mesh dimension makes as many as it has ranks, along a tensor dimension.
_MAX_BLOCKS: Final = 1 << 12


def chunks_of(rows: Rows, ranges: Sequence[Sequence[Range]], name: str) -> list[Chunk]:
    """Return the blocks that a part fills in the whole tensor; ``ranges`` are its index ranges in each dimension.

    There are several blocks only if an outer mesh dimension cut a tensor dimension after an inner one. Raises
    MalformedError if the part has another shape than its ranges, or more blocks than any mesh makes.
    """
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


class Tiling(NamedTuple):
    """How boxes cover a tensor: two overlapping boxes, if any, and a part that no box covers, or None."""

    overlap: Overlap
    hole: Box | None

    @property
    def is_whole(self) -> bool:
        """Whether the boxes cover the tensor exactly, as far as known."""
        return self.overlap.boxes is None and self.hole is None


def tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> Tiling:
    """Return how the boxes, which lie within the tensor, cover it."""
    overlap = regions_overlapping(boxes)
    hole = None
    if overlap.boxes is None and 0 not in shape and (shape or not boxes):
        hole = region_missing(shape, boxes)
    return Tiling(overlap, hole)
