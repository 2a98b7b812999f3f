"""The items of a DCP folder are opened when the bytes of their tensor are read, and checked then."""

from __future__ import annotations

import re
import sys
import types
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import say
from dcp_folders import write_boxes, write_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.files.write import copying
from ckptool.formats.dcp import items
from ckptool.formats.pieces import Box, misfit

TARGETS = {
    "safetensors": ["convert", "--key", "."],
    "torch": ["convert", "--to-format", "torch"],
    "legacy": ["convert", "--to-format", "legacy"],
    "dcp": ["convert", "--to-format", "dcp"],
    "shards": ["convert", "--key", ".", "--to-format", "safetensors", "--max-shard-size", "1MB"],
    "cast": ["cast", "--to-dtype", "bfloat16"],
    "add-module": ["add-module"],
}
Boxes = list[tuple[tuple[int, int], tuple[int, int]]]
CUTS: dict[str, Boxes] = {
    "whole": [((0, 0), (600, 500))],
    "rows": [((0, 0), (200, 500)), ((200, 0), (400, 500))],
    "columns": [((0, 0), (600, 90)), ((0, 90), (600, 400)), ((0, 490), (600, 10))],
    "both": [((0, 0), (300, 100)), ((0, 100), (300, 400)), ((300, 0), (300, 499)), ((300, 499), (300, 1))],
}
SMALL: Boxes = [((0, 0), (3, 2)), ((0, 2), (3, 3))]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"big": torch.randn(600, 500), "small": torch.randn(3, 5)}


def written(folder: Path, cut: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of two tensors, and these."""
    state = tensors()
    return write_boxes(folder, {"big": (state["big"], CUTS[cut]), "small": (state["small"], SMALL)}), state


def command(target: str, folder: Path, out: Path) -> list[str]:
    name, *more = TARGETS[target]
    suffix = {"safetensors": ".safetensors", "torch": ".pth", "legacy": ".pth"}.get(target, "")
    return [name, *more, "-q", str(folder), "-o", str(out) + suffix]


def spoilt(folder: Path, part: torch.Tensor) -> None:
    """Let what comes before the elements of a piece be zeros."""
    path = folder / "__0_0.distcp"
    data, wanted = bytearray(path.read_bytes()), part.contiguous().numpy().tobytes()
    at = data.index(wanted)
    begin = data.rindex(b"data.pkl", 0, at) - 30
    data[begin:at] = bytes(at - begin)
    path.write_bytes(data)


def piece(value: torch.Tensor, box: tuple[tuple[int, int], tuple[int, int]]) -> torch.Tensor:
    (row, column), (rows, columns) = box
    return value[row : row + rows, column : column + columns]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("target", TARGETS)
def test_an_item_that_is_no_archive_is_named_before_there_is_an_output(target: str, cut: str, tmp_path: Path) -> None:
    folder, state = written(tmp_path / "in", cut)
    spoilt(folder, piece(state["big"], CUTS[cut][-1]))
    call = command(target, folder, tmp_path / "out")
    # No item is opened without need: what is computed is computed in a dry run, too.
    assert say(*call, "--dry-run").code == (3 if target == "cast" else 0)
    said = say(*call)
    assert said.code == 3 and "'big': no archive of torch.save is where .metadata says" in said.err
    assert str(folder / "__0_0.distcp") in said.err and [path.name for path in tmp_path.iterdir()] == ["in"]
    assert say("validate", str(folder)).code == 1


@pytest.mark.parametrize("cut", CUTS)
def test_each_piece_is_read_once(cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is that of what was copied, unless the filesystem could share it."""
    folder, state = written(tmp_path / "in", cut)
    again: list[int] = []
    whole = copying.checksum
    monkeypatch.setattr(copying, "checksum", lambda span, *more: (again.append(span.size), whole(span, *more))[1])
    monkeypatch.delattr("os.copy_file_range")
    assert say(*command("safetensors", folder, tmp_path / "out")).code == 0
    assert sum(again) == 0
    loaded = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_an_id_of_other_bytes_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_KNOWN", items.KnownItems())
    state = {name: torch.randn(8, 5) for name in "ab"}
    folder = write_ranks(tmp_path / "in", state, 1)
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    at = data.index(state["b"].numpy().tobytes())
    digits = re.compile(rb"\d{40}").search(data, at)
    assert digits is not None
    path.write_bytes(data[: digits.start()] + b"\xff" + data[digits.start() + 1 :])
    with ckptool.open(folder) as checkpoint:
        first, second = (checkpoint.container.stored(name).span for name in "ab")
        assert first is not None and second is not None and first.source.read(0, 4)
        with pytest.raises(MalformedError, match=r"'b': .*not UTF-8"):
            second.source.read(0, 4)


def test_a_tensor_of_another_class_is_sound_and_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchao's 8-bit optimizers save their states: torch loads them, and the weights beside them are edited."""
    library = types.ModuleType("library_of_optimizers")
    two: Any = type("TwoTensor", (TwoTensor,), {"__module__": library.__name__})
    monkeypatch.setattr(library, "TwoTensor", two, raising=False)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    folder, weights = tmp_path / "dcp", torch.randn(4, 3)
    state = {"model": {"w": weights}, "optim": {"s": two(torch.randn(4, 3), torch.randn(4, 3))}}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    report = ckptool.validate(folder)
    assert report["status"] == "valid"
    assert "TwoTensor" in str([check["message"] for check in report["checks"]])
    for number, call in enumerate((["extract", folder, "model"], ["drop", folder, "optim"], ["convert", folder])):
        out = tmp_path / f"{number}.pth"
        said = say(*call, "-o", out)
        assert (said.code, out.exists()) == ((3, False) if call[0] == "convert" else (0, True)), said.err
        if out.exists():
            loaded = torch.load(out)
            assert torch.equal((loaded.get("model") or loaded)["w"], weights)


# -- Pieces of DCP tensors: overlaps and gaps are found in linear time, and none is reported without proof.


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


# A thousand ranks cut a thousand tensors into a million pieces: whatever looks at each piece must find it at once.
# Steps are counted, not seconds.
