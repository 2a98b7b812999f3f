"""The places of a tensor's pieces as boxes, and whether the boxes make the whole tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Final

from ...base.records import NamedTuple

#: A piece's place in its tensor, in elements: (offsets, sizes), each with one number per dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: A prime. Two different sums of products modulo it are equal by chance once in 10^36 times at most.
_PRIME: Final = (1 << 127) - 1
#: Random numbers that no file can foresee.
_RANDOM: Final = Random()


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
    marks: list[defaultdict[int, int]] = [defaultdict(lambda: _RANDOM.getrandbits(127)) for _ in shape]

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
