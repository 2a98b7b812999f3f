"""The places of a tensor's pieces as boxes, and whether the boxes make the whole tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Final

from ...base.records import NamedTuple

#: A piece's place in its tensor, in elements: (offsets, sizes), each with one number per dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: The most comparisons per box, for boxes that differ in three or more dimensions and that no line separates. No real
#: sharding looks like that, and the time must stay linear in the file size.
_COMPARED: Final = 200


def box_text(box: Box) -> str:
    """Return a box as ``[0:4, 8:16]``, or "(a scalar)" without dimensions."""
    return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*box))}]" if box[0] else "(a scalar)"


def not_compared(name: str, pieces: int) -> str:
    """Return the message about pieces that would take too long to compare."""
    what = f"{name}: {pieces:,} pieces that no line separates were not all compared"
    return f"{what}: whether they overlap, and which of them counts, is not known"


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
