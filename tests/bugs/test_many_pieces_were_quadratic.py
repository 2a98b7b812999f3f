"""A thousand ranks cut a thousand tensors into a million pieces: whatever looks at each piece must find it at once.

Counted are steps, not seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import write_ranks

import ckptool
from ckptool.base.limits import LIMITS
from ckptool.files.sources import BytesSource
from ckptool.formats.dcp import chunks as dcp_chunks
from ckptool.formats.dcp import items as dcp_items
from ckptool.formats.dcp.chunks import Chunk, ChunkedSource, regions_overlapping
from ckptool.formats.dcp.metadata import Item, Metadata, ValueMetadata, merge_metadata


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


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_along_both_dimensions(reverse: bool) -> None:
    def call(count: int) -> Callable[[], Any]:
        boxes = grid(count // 4)
        return lambda: regions_overlapping(boxes[::-1] if reverse else boxes)

    assert grows(call) < 16 * 1.5  # sixteen times as many
    assert regions_overlapping(grid(30)) == (None, True)
    assert regions_overlapping([*grid(30), ((11, 11), (1, 1))]).boxes is not None


def test_pieces_that_no_line_separates() -> None:
    """Five of them around a hole in the middle."""
    ring = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert regions_overlapping(ring) == (None, True)
    assert regions_overlapping([*ring[:4], ((1, 1), (1, 2))]).boxes is not None


def test_ranks_with_metadata_of_their_own() -> None:
    def call(ranks: int) -> Callable[[], Any]:
        found = []
        for rank in range(ranks):
            listed = {"w": ValueMetadata(None, (ranks,), (((rank,), (1,)),))}
            item = Item("w", (rank,), f"__{rank}_0.distcp", 0, 1)
            found.append(Metadata(None, 0, listed, {"w": ("w",)}, [item], "", [], [], []))
        return lambda: merge_metadata(found)

    assert grows(call) < 4 * 1.5


def test_reading_in_order_looks_at_a_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    real = dcp_chunks._copy
    monkeypatch.setattr(dcp_chunks, "_copy", lambda *arguments: (looked.append(arguments), real(*arguments))[1])
    data = bytes(range(200))
    chunks = [Chunk(((at,), (1,)), BytesSource(data), at) for at in range(200)]
    source = ChunkedSource((200,), 1, chunks, "t")
    assert b"".join(source.read(at, 2) for at in range(0, 200, 2)) == data
    assert len(looked) == 200


def test_a_piece_is_found_by_its_offset(tmp_path: Path) -> None:
    def call(ranks: int) -> Callable[[], Any]:
        folder = write_ranks(tmp_path / str(ranks), {"w": torch.zeros(ranks, 2)}, ranks)
        checkpoint = ckptool.open(folder)
        return lambda: checkpoint.container.audit(())

    assert grows(call, 20) < 4 * 1.5


def test_each_file_is_opened_once_to_look_at_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are listed tensor by tensor: in that order every one of them is in another file."""
    from ckptool.files import pool

    ranks = LIMITS.open_files * 2
    folder = write_ranks(tmp_path / "saved", {f"w{n}": torch.zeros(ranks, 2) for n in range(5)}, ranks)
    opened: list[str] = []
    real = pool.open_file
    monkeypatch.setattr(pool, "open_file", lambda name: (opened.append(name), real(name))[1])
    with ckptool.open(folder) as checkpoint:
        opened.clear()
        checkpoint.container.audit(())
        assert len(opened) <= ranks
        opened.clear()
        assert len(list(checkpoint.container.pickles()))
        assert len(opened) <= ranks


def test_a_small_item_is_read_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_ranks(tmp_path / "saved", {"w": torch.zeros(4, 2)}, 1)
    with ckptool.open(folder) as checkpoint:
        container: Any = checkpoint.container
        (item,) = container.read.items
        file = container.files[item.file]
        sizes: list[int] = []
        real = file.read
        monkeypatch.setattr(file, "read", lambda at, size: (sizes.append(size), real(at, size))[1])
        dcp_items.open_item(item, file)
        assert sizes == [item.length]
