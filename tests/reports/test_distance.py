"""diff: how far values are apart is what torch computes in float64 of the same tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_tensors import saved
from command_line import say
from conftest import examples
from every_dtype import DTYPES, EVERY, FLOAT8, any_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.values.torch.measure import STEP

FIGURES = ("max_abs", "mean_abs", "rel_l2", "cosine")


def compared(folder: Path, a: Any, b: Any, **how: Any) -> dict[str, Any]:
    report = ckptool.diff(saved(folder / "a.pth", a), saved(folder / "b.pth", b), **how)
    json.dumps(report, allow_nan=False)
    return dict(report)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as torch converts them to float64 or complex128."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    if tensor.is_complex():
        return tensor.to(torch.complex128).flatten()
    return (tensor.float() if tensor.dtype in FLOAT8 else tensor).double().flatten()


def close(row: Any, figures: dict[str, float | None]) -> bool:
    return all(
        row[name] is None if value is None else row[name] == pytest.approx(value, rel=1e-9, abs=1e-300)
        for name, value in figures.items()
    )


def numbers(dtype: torch.dtype, seed: int, size: int = 3000) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 40
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    if dtype == torch.bool:
        return values > 0
    return (values.abs() if dtype in (torch.uint8, torch.uint16, torch.uint32) else values).to(dtype)


FOUR = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of each element."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    data = parts.reshape(tensor.numel(), -1).contiguous()
    return data.view(torch.uint8).reshape(tensor.numel(), tensor.dtype.itemsize).numpy()


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numbers for numpy, in the widest type."""
    if tensor.dtype == torch.float4_e2m1fn_x2:
        codes = bytes_of(tensor)[:, 0]
        return FOUR[np.stack([codes & 15, codes >> 4], 1).flatten()]
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.float()
    return wide(tensor).numpy()


def by_numpy(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    left, right = array(a), array(b)
    finite = np.isfinite(left) & np.isfinite(right)
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    gaps = np.abs(left[finite] - right[finite])
    lengths = [float(np.linalg.norm(side[finite])) for side in (left, right)]
    dot = float(np.vdot(left[finite], right[finite]).real)
    return {
        "nonfinite": int((~finite & ~equal).sum()),
        "max_abs": float(gaps.max()) if len(gaps) else None,
        "mean_abs": float(gaps.mean()) if len(gaps) else None,
        "rel_l2": float(np.linalg.norm(gaps)) / lengths[1] if lengths[1] else None,
        "cosine": dot / lengths[0] / lengths[1] if all(lengths) else None,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(60, 83), ()], ids=str)
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_any_bits_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    a, b = any_bits(dtype, 1, shape), any_bits(dtype, 2, shape)
    if dtype == torch.bool and not shape:
        b = ~a
    if shape:
        b[:7], a[7, 3], b[7, 3] = a[:7].clone(), a[0, 0].clone(), a[0, 0].clone()
    [row] = compared(tmp_path, {"x": a}, {"x": b})["values"]
    figures, unequal = by_numpy(a, b), (bytes_of(a) != bytes_of(b)).any(1)
    assert close(row, figures), (row, figures)
    assert row["differing"] == int(unequal.sum())
    assert row["first"] == [int(place) for place in np.unravel_index(int(unequal.argmax()), shape)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_blocks_that_are_the_same_count_too(dtype: torch.dtype, tmp_path: Path) -> None:
    size = 2 * STEP + 5
    a = numbers(dtype, 1, size)
    if dtype != torch.int64:
        a[7], a[11], a[STEP + 1] = math.nan, math.inf, -math.inf
    b = a.clone()
    b[-3:] = 1 - b[-3:]
    [row] = compared(tmp_path, {"x": a}, {"x": b})["values"]
    assert close(row, by_numpy(a, b)), (row, by_numpy(a, b))
    assert (row["first"], row["differing"]) == ([size - 3], 3)
    alone = compared(tmp_path, {"x": torch.cat([b[-3:], a[:-3]])}, {"x": torch.cat([a[-3:], a[:-3]])})["values"][0]
    assert alone["differing"] == 3 and alone["max_abs"] == row["max_abs"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_dtypes_of_one_shape_are_compared_as_numbers(other: torch.dtype, tmp_path: Path) -> None:
    a, b = numbers(torch.float32, 1), numbers(other, 2)
    if other == torch.float32:
        b = b.double()
    report = compared(tmp_path, {"x": a}, {"x": b})
    [row] = report["values"]
    assert close(row, by_numpy(a, b)), (row, by_numpy(a, b))
    assert [item["what"] for item in report["changed"]] == ["dtype"]
    assert row["differing"] == int((wide(a) != wide(b)).sum()) and row["other_dtype"] == str(b.dtype)[6:]


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(*[st.floats(width=64) | st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf])] * 2), min_size=1)
)
@example([(0.0, 0.0), (1.0, 4.3133864041345703e-159)])
def test_any_numbers(tmp_path: Path, values: list[tuple[float, float]]) -> None:
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*values))
    rows = compared(tmp_path, {"x": a}, {"x": b})["values"]
    if not rows:
        assert a.numpy().tobytes() == b.numpy().tobytes()
        return
    figures = by_numpy(a, b)
    [row] = rows
    assert row["nonfinite"] == figures["nonfinite"]
    sizes = [abs(x) for pair in values for x in pair if math.isfinite(x)]
    peak, least = max([0.0, *sizes]), min([1.0, *filter(None, sizes)])
    if peak < 1e100:
        assert row["max_abs"] == figures["max_abs"]
    if least > 1e-100 and peak < 1e100:  # where torch's own sums of squares hold
        assert row["cosine"] is None or figures["cosine"] is None or abs(row["cosine"] - figures["cosine"]) < 1e-9
        assert close(row, {"mean_abs": figures["mean_abs"]})
        assert not 0 < (figures["rel_l2"] or 0) < 1e100 or close(row, {"rel_l2": figures["rel_l2"]})
    assert row["cosine"] is None or -1 <= row["cosine"] <= 1


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e307])
def test_figures_beyond_float64_are_left_out(scale: float, tmp_path: Path) -> None:
    a, b = torch.tensor([3.0, 4.0, 0.0]).double(), torch.tensor([4.0, 3.0, 0.0]).double()
    [row] = compared(tmp_path, {"x": a * scale}, {"x": b * scale})["values"]
    assert row["cosine"] is None and row["rel_l2"] is None and row["max_abs"] == pytest.approx(scale)
    [row] = compared(tmp_path, {"x": a * 4e307}, {"x": -a * 4e307})["values"]
    assert [row[name] for name in FIGURES] == [None] * 4


def test_large_integers_are_compared_exactly(tmp_path: Path) -> None:
    a = torch.tensor([2**62 + 1, -(2**62), 2**63 - 1], dtype=torch.int64)
    [row] = compared(tmp_path, {"x": a}, {"x": a - torch.tensor([1, 0, 0])})["values"]
    assert (row["max_abs"], row["mean_abs"], row["differing"]) == (1.0, 1 / 3, 1)
    ends = torch.tensor([2**63 - 1]), torch.tensor([-(2**63)])
    assert compared(tmp_path, {"x": ends[0]}, {"x": ends[1]})["values"][0]["max_abs"] == 2.0**64
    unsigned = torch.tensor([-1]).view(torch.uint64), torch.tensor([-2]).view(torch.uint64)
    assert compared(tmp_path, {"x": unsigned[0]}, {"x": unsigned[1]})["values"][0]["max_abs"] == 1.0
    small = torch.tensor([3, 5]).view(torch.uint64), torch.tensor([3, 4]).view(torch.uint64)
    [row] = compared(tmp_path, {"x": small[0]}, {"x": small[1]})["values"]
    assert (row["max_abs"], row["rel_l2"], row["max_rel"]) == (1.0, 0.2, 0.25)


def test_quantized_tensors_are_compared_as_what_they_stand_for(tmp_path: Path) -> None:
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    scales, zeros = torch.rand(5).double() + 0.1, torch.arange(5)
    one, other = (torch.quantize_per_tensor(x, 0.1, 3, torch.qint8) for x in (a, b))
    [row] = compared(tmp_path, {"x": one}, {"x": other})["values"]
    assert close(row, by_numpy(*((x.int_repr().double() - 3) * 0.1 for x in (one, other))))
    one, other = (torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8) for x in (a, b))
    [row] = compared(tmp_path, {"x": one}, {"x": other})["values"]
    assert close(row, by_numpy(*((x.int_repr().double() - zeros) * scales for x in (one, other))))


def test_the_total_is_that_of_the_tensors_together(tmp_path: Path) -> None:
    names = ["layers.0.w", "layers.0.b", "layers.1.w", "head.weight"]
    a, b = ({name: torch.randn(10, 10) for name in names} for _ in range(2))
    a["same"] = b["same"] = torch.randn(50)
    a["tied"], b["tied"] = a["head.weight"], b["head.weight"]
    report = compared(tmp_path, {"model": a}, {"model": b})
    together = [torch.cat([x[name].flatten() for name in names]) for x in (a, b)]
    assert close(report["total"], by_numpy(*together)) and report["total"]["tensors"] == 4


def test_counters_do_not_count_for_the_total(tmp_path: Path) -> None:
    """A batch norm that saw 1,000 more batches must not hide how little the weights changed, or how much."""
    a, b = (
        {
            "model": {"bn.weight": torch.full((4,), value), "bn.num_batches_tracked": torch.tensor(count)},
            "optimizer": {"state": {0: {"step": torch.tensor(float(count)), "exp_avg": torch.full((4,), value)}}},
        }
        for value, count in ((1.0, 1000), (1.5, 2000))
    )
    report = compared(tmp_path, a, b)
    assert (report["tensors"]["values_differ"], report["total"]["tensors"], report["counters"]) == (4, 2, 2)
    assert report["total"]["max_abs"] == 0.5
    said = say("diff", *map(str, (tmp_path / "a.pth", tmp_path / "b.pth")))[1]
    assert "4 of 4 tensors differ" in said and "in total, of 2 tensors that differ, without 2 counters: max" in said

    b["model"]["bn.weight"], b["optimizer"] = a["model"]["bn.weight"], a["optimizer"]
    alone = compared(tmp_path, a, b)
    assert (alone["total"]["tensors"], alone["total"]["max_abs"], alone["counters"]) == (1, 1000, 0)
