"""Pairs of tensors in one reading: the same numbers as of each by itself, and of their difference saved as a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.reports.stats import measure_pairs, statistics
from ckptool.values.interpretation import Reading, interpret
from ckptool.values.torch.blocks import STEP


def readings(path: Path, tensors: dict[str, torch.Tensor]) -> list[Reading]:
    torch.save(tensors, path)
    checkpoint = ckptool.open(path)
    found = [interpret(checkpoint, entry.ref) for entry in checkpoint.survey.tensors]
    return [item for item in found if isinstance(item, Reading)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64], ids=str)
def test_a_pair_is_both_and_their_difference(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = {"small": (7, 9), "large": (130, 41), "larger": (3, STEP // 2 + 5), "row": (5000,)}
    a, b = ({name: (torch.randn(shape) * 9).to(dtype) for name, shape in shapes.items()} for _ in range(2))
    a["large"][3] = b["large"][3] = 0
    gap = {name: (a[name].double() - b[name].double()) for name in a}
    sides = [readings(tmp_path / f"{number}.pth", item) for number, item in enumerate((a, b, gap))]
    alone = ckptool.stats(tmp_path / "0.pth")["tensors"], ckptool.stats(tmp_path / "1.pth")["tensors"]
    apart = ckptool.stats(tmp_path / "2.pth")["tensors"]
    values = {row["path"]: row for row in ckptool.diff(tmp_path / "0.pth", tmp_path / "1.pth")["values"]}
    for number, pair in enumerate(measure_pairs(list(zip(sides[0], sides[1])))):
        assert not isinstance(pair, str)
        for side, measured, rows in zip(sides, (pair.a, pair.b, pair.difference), (*alone, apart)):
            figures = statistics(side[number], measured)
            assert figures == {name: rows[number][name] for name in figures}
        row = values[apart[number]["path"]]
        assert (row["max_abs"], row["rel_l2"]) == (pair.distance.max_abs, pair.distance.rel_l2)
        assert (row["p50_abs"], row["p99_abs"]) == pair.difference.magnitudes
        assert row["quantile_error"] == pair.difference.error
        ordered = torch.sort(gap[apart[number]["path"]].abs().flatten())[0]
        for mine, percent in (("p50_abs", 50), ("p99_abs", 99)):
            theirs = ordered[-(-len(ordered) * percent // 100) - 1].item()
            assert abs(row[mine] - theirs) <= row["quantile_error"] * theirs


def test_a_pair_without_bytes_says_so(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "fixtures" / "files" / "zip_missing_storage.pth"
    with ckptool.open(path) as checkpoint:
        found = [interpret(checkpoint, entry.ref) for entry in checkpoint.survey.tensors]
        pairs = [(item, item) for item in found if isinstance(item, Reading)]
        assert any(isinstance(pair, str) and "not all in the file" in pair for pair in measure_pairs(pairs))
