"""Pairs of tensors in one reading: the same numbers as of each by itself, and of their difference saved as a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.reports.stats import measure_pairs, reading_id, statistics
from ckptool.values.interpretation import interpret
from ckptool.values.torch.blocks import STEP


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> ckptool.Checkpoint:
    torch.save(tensors, path)
    return ckptool.open(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64], ids=str)
def test_a_pair_is_both_and_their_difference(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = {"small": (7, 9), "large": (130, 41), "larger": (3, STEP // 2 + 5), "row": (5000,)}
    a, b = ({name: (torch.randn(shape) * 9).to(dtype) for name, shape in shapes.items()} for _ in range(2))
    a["large"][3] = b["large"][3] = 0
    gap = {name: (a[name].double() - b[name].double()) for name in a}
    sides = [saved(tmp_path / f"{number}.pth", item) for number, item in enumerate((a, b, gap))]
    *alone, apart = (ckptool.stats(side)["tensors"] for side in sides)
    values = {row["path"]: row for row in ckptool.diff(sides[0], sides[1])["values"]}
    refs = [tuple(entry.ref for entry in pair) for pair in zip(*(side.survey.tensors for side in sides[:2]))]
    pairs = measure_pairs(sides[0], sides[1], refs)
    for number, nodes in enumerate(refs):
        compared = pairs.compared[nodes]
        readings = [interpret(side, ref) for side, ref in zip(sides, nodes)]
        for reading, known, rows in zip(readings, pairs.sides, alone):
            figures = statistics(reading, known[reading_id(reading)])
            assert figures == {name: rows[number][name] for name in figures}
        row = values[apart[number]["path"]]
        assert (row["max_abs"], row["rel_l2"]) == (compared.distance.max_abs, compared.distance.rel_l2)
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        unequal = (a[row["path"]].view(width) != b[row["path"]].view(width)).flatten()
        assert compared.bits == (int(unequal.nonzero()[0]), int(unequal.sum()))
        assert row["differing"] == compared.bits.differing


def test_a_pair_without_bytes_is_left_out(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "fixtures" / "files" / "zip_missing_storage.pth"
    with ckptool.open(path) as checkpoint:
        refs = [(entry.ref, entry.ref) for entry in checkpoint.survey.tensors]
        whole = [row["reason"] is None for row in ckptool.stats(checkpoint)["tensors"]]
        assert [nodes in measure_pairs(checkpoint, checkpoint, refs).compared for nodes in refs] == whole
        assert not all(whole)


def test_pairs_that_stats_reads_in_another_order_are_left_out(tmp_path: Path) -> None:
    state = {"turned": torch.arange(6.0).view(2, 3).t(), "empty": torch.zeros(0, 3), "plain": torch.ones(2)}
    checkpoint = saved(tmp_path / "a.pth", state)
    refs = [(entry.ref, entry.ref) for entry in checkpoint.survey.tensors]
    assert list(measure_pairs(checkpoint, checkpoint, refs).compared) == refs[2:]
