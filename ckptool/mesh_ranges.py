"""Which indices of a tensor a rank has, by its place in a mesh: chunks of chunks.

Source: ``_compute_local_shape_and_global_offset`` (torch/distributed/tensor/_utils.py), ``Shard`` and ``_StridedShard``
(placement_types.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

__all__ = ["Cut", "Range", "length", "ranges_of"]

#: (begin, end) in a dimension of the whole tensor.
Range: TypeAlias = tuple[int, int]

#: Stretches of one dimension that are followed; torch makes as many as an inner dimension of the mesh has ranks.
_STRETCHES: Final = 256
#: Dimensions of a mesh.
_MESH: Final = 64


class Cut(NamedTuple):
    """A placement: its text, and the dimension that it cuts, -1 for none; into how many pieces it is cut before."""

    words: str
    dim: int = -1
    pieces: int = 1


def ranges_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], cuts: Sequence[Cut]
) -> tuple[tuple[Range, ...], ...] | None:
    """The indices of each dimension that the rank at ``place`` of the mesh has; None where that cannot be said.

    Each placement cuts what those before it left over.
    """
    if not len(mesh) == len(place) == len(cuts) <= _MESH:
        return None
    found: list[list[Range]] = [[(0, size)] if size else [] for size in shape]
    for one, size, at in zip(cuts, mesh, place):
        if one.dim < 0:
            continue
        if one.dim >= len(shape) or not 0 <= at < size:
            return None
        ranges = found[one.dim]
        if not 0 < max(len(ranges), 1) * one.pieces <= _STRETCHES:
            return None
        pieces = [_chunk(ranges, one.pieces, number) for number in range(one.pieces)]
        found[one.dim] = _joined(stretch for piece in pieces for stretch in _chunk(piece, size, at))
    return tuple(tuple(ranges) for ranges in found)


def _chunk(ranges: list[Range], count: int, number: int) -> list[Range]:
    """Of some stretches, laid end to end, one of so many chunks, as ``torch.chunk`` cuts them."""
    total = length(ranges)
    size = -(-total // count)
    begin, end = min(size * number, total), min(size * (number + 1), total)
    found = []
    at = 0
    for low, high in ranges:
        first, last = max(begin, at), min(end, at + high - low)
        if first < last:
            found.append((low + first - at, low + last - at))
        at += high - low
    return found


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Stretches that touch as one."""
    found: list[Range] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def length(ranges: Iterable[Range]) -> int:
    """How many indices these are."""
    return sum(end - begin for begin, end in ranges)
