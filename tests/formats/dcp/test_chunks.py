"""Many pieces that no line separates were said to overlap when a budget of comparisons was spent: two of them were
accused that had nothing in common, and the tensor counted as missing."""

from __future__ import annotations

from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.formats.dcp import chunks as dcp_chunks
from ckptool.formats.dcp.chunks import region_missing, regions_overlapping
from ckptool.formats.dcp.metadata import Box

#: Five around a hole in the middle, which is the fifth: a line goes between no two of them.
RING: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


def pinwheels(count: int) -> list[Box]:
    """A ring in the middle of a ring, and so on: the frame of each takes the place of the one in the middle."""
    boxes: list[Box] = []
    at, size = 0, 2 * count + 1
    for _ in range(count):
        boxes += [
            ((at, at), (1, size - 1)),
            ((at, at + size - 1), (size - 1, 1)),
            ((at + size - 1, at + 1), (1, size - 1)),
            ((at + 1, at), (size - 1, 1)),
        ]
        at, size = at + 1, size - 2
    return [*boxes, ((at, at), (1, 1))]


def deep(boxes: list[Box]) -> list[Box]:
    """The same in three dimensions: each twice, one behind the other, and not at the same place."""
    front: list[Box] = [((0, *at), (2, *size)) for at, size in boxes]
    return front + [((2, at[1], at[0]), (1, size[1], size[0])) for at, size in boxes]


def common(one: Box, other: Box) -> bool:
    """Do they have elements in common?"""
    return bool(prod(one[1]) and prod(other[1])) and all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other))


def test_two_dimensions_take_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_chunks, "_COMPARED", 0)
    boxes = pinwheels(300)
    assert regions_overlapping(boxes) == (None, True)
    assert region_missing((601, 601), boxes) is None
    assert region_missing((601, 601), boxes[:-1]) == boxes[-1]
    found = regions_overlapping([*boxes, ((300, 299), (1, 2))]).boxes
    assert found is not None and common(*found)


def test_of_three_dimensions_nothing_is_said_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regions_overlapping(deep(RING)) == (None, True)
    monkeypatch.setattr(dcp_chunks, "_COMPARED", 1)
    tall: list[Box] = [((number % 2, *at), (3 - number % 2, *size)) for number, (at, size) in enumerate(RING)]
    assert regions_overlapping(tall) == (None, False)


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
def test_what_is_found_is_so(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    answer = regions_overlapping(boxes)
    assert answer.sure
    if any(common(one, other) for one, other in combinations(boxes, 2)):
        assert answer.boxes is not None and common(*answer.boxes)
        return
    assert answer.boxes is None
    missing = region_missing(shape, boxes)
    elements = product(*map(range, shape))
    free = {one for one in elements if not any(common((one, (1,) * len(shape)), box) for box in boxes)}
    if missing is None:
        assert not free
    else:
        assert set(product(*(range(at, at + size) for at, size in zip(*missing)))) <= free and prod(missing[1])


def test_what_was_not_compared_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from dcp_folders import write_boxes

    from ckptool.cli.main import run

    whole = torch.arange(27.0).reshape(3, 3, 3)
    tall: list[Box] = [((0, *at), (3, *size)) for at, size in RING[:4]]
    tall += [((0, 1, 1), (2, 1, 1)), ((2, 1, 1), (1, 1, 1))]
    folder = write_boxes(tmp_path / "saved", {"w": (whole, tall)})
    assert ckptool.validate(folder)["valid"]
    monkeypatch.setattr(dcp_chunks, "_COMPARED", 1)
    report: dict[str, Any] = ckptool.validate(folder)
    assert (report["valid"], report["coverage"]) == (True, "partial")
    assert "structure" in report["not_checked"]
    with ckptool.open(folder) as checkpoint:
        (entry,) = checkpoint.survey.tensors
        held = checkpoint.container.stored(entry.tensor.storage).span
        assert held is not None and held.source.read(0, 108) == whole.numpy().tobytes()
    assert run(["convert", str(folder), "-o", str(tmp_path / "out.pth")]) == 4
    assert "not all compared" in capsys.readouterr().err
