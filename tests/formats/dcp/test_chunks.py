"""Pieces of DCP tensors: overlaps and gaps are found in linear time, and none is reported without proof."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import write_boxes
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.files.sources import BytesSource
from ckptool.formats.pieces import chunks as dcp_chunks
from ckptool.formats.pieces.boxes import Box, misfit
from ckptool.formats.pieces.chunks import Chunk, ChunkedSource

#: Five around a hole in the middle, which is the fifth: a line goes between no two of them.
RING: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


def common(one: Box, other: Box) -> bool:
    """Do they have elements in common?"""
    return bool(prod(one[1]) and prod(other[1])) and all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other))


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets))
        boxes.append((offsets, sizes))
    return shape, boxes


@given(some_boxes())
def test_overlaps_and_gaps_that_are_found_are_real(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    covers = [
        sum(common((element, (1,) * len(shape)), box) for box in boxes) for element in product(*map(range, shape))
    ]
    odd = misfit(shape, boxes)
    if odd is None:
        assert {*covers} == {1}
        return
    there = [box for box in boxes if common(odd.place, box)]
    assert prod(odd.place[1]) and len(there) != 1 and odd.boxes == there[:2]
    assert all(common(odd.place, one) and common(one, other) for one, other in pairwise(odd.boxes))


def test_pieces_that_no_line_separates(tmp_path: Path) -> None:
    """Five of them around a hole in the middle, in two dimensions and in three."""
    assert misfit((3, 3), RING) is None
    assert misfit((3, 3), RING[:4]) == (RING[4], [])
    odd = misfit((3, 3), [*RING[:4], ((1, 1), (1, 2))])
    assert odd is not None and len(odd.boxes) == 2
    whole = torch.arange(27.0).reshape(3, 3, 3)
    tall: list[Box] = [((0, *at), (3, *size)) for at, size in RING[:4]]
    tall += [((0, 1, 1), (2, 1, 1)), ((2, 1, 1), (1, 1, 1))]
    folder = write_boxes(tmp_path / "saved", {"w": (whole, tall)})
    report = ckptool.validate(folder)
    assert (report["valid"], report["coverage"]) == (True, "complete")
    with ckptool.open(folder) as checkpoint:
        (entry,) = checkpoint.survey.tensors
        held = checkpoint.container.stored(entry.tensor.storage).span
        assert held is not None and held.source.read(0, 108) == whole.numpy().tobytes()


# -- linear time -----------------------------------------------------------------------------------------------
# A thousand ranks cut a thousand tensors into a million pieces: whatever looks at each piece must find it at once.
# Steps are counted, not seconds.


def steps(call: Callable[[], Any]) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def grows(call: Callable[[int], Callable[[], Any]], small: int = 40) -> float:
    """How many times the steps of four times as much."""
    return steps(call(4 * small)) / steps(call(small))


def grid(count: int) -> list[Any]:
    return [((row * 2, column * 3), (2, 3)) for row in range(count) for column in range(count)]


@pytest.mark.parametrize("rest", [slice(None), slice(1, None)], ids=["whole", "hole"])
def test_a_grid_is_looked_at_in_linear_time(rest: slice) -> None:
    def call(count: int) -> Callable[[], Any]:
        boxes = grid(count // 4)[rest]
        return lambda: misfit((count // 4 * 2, count // 4 * 3), boxes)

    assert grows(call) < 16 * 1.5  # sixteen times as many
    assert misfit((60, 90), grid(30)) is None
    assert misfit((60, 90), [*grid(30), ((11, 11), (1, 1))]) is not None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_long_runs_are_copied_from_their_files(sizes: list[int], data: st.DataObject) -> None:
    shape = tuple(sizes)
    whole = bytes(range(prod(shape)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(1, shape[axis]))
    chunks = []
    elements = torch.tensor(list(whole), dtype=torch.uint8).reshape(shape)
    for begin, size in ((0, cut), (cut, shape[axis] - cut)):
        part = elements.narrow(axis, begin, size).contiguous()
        offsets = tuple(begin if dim == axis else 0 for dim in range(len(shape)))
        chunks.append(Chunk((offsets, tuple(part.shape)), BytesSource(b"#" + bytes(part.flatten().tolist())), 1))
    source = ChunkedSource(shape, 1, chunks, "")
    first = data.draw(st.integers(0, len(whole)))
    size = data.draw(st.integers(0, len(whole) - first))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_chunks, "_LONG", data.draw(st.integers(1, 9)))
        spans = list(source.stretches(first, size))
    assert b"".join(span.source.read(span.offset, span.size) for span in spans) == whole[first : first + size]
    assert all(span.size for span in spans)
