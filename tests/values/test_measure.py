"""Measured numbers are those of Python, in one block or many, and moments of parts add up to those of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.files import threads
from ckptool.values.torch import measure as measure_module
from ckptool.values.torch.measure import STEP, ElementRule, measure

FLOAT8 = ("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu")
NARROW = (*FLOAT8, "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "bool")


def measured(tensor: torch.Tensor, size: int = 1000) -> Any:
    """What is measured of a tensor whose bytes come in pieces."""
    data = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())

    def read() -> Iterable[bytes]:
        return [data[at : at + size * 8] for at in range(0, len(data), size * 8)]

    return measure(torch, read, ElementRule(str(tensor.dtype)[6:]), 10)


def finite_numbers(tensor: torch.Tensor) -> list[Any]:
    wide = tensor.float() if str(tensor.dtype)[6:] in FLOAT8 else tensor
    return sorted(value for value in wide.flatten().tolist() if math.isfinite(value))


@pytest.mark.parametrize("step", [100, STEP])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_narrow_element(dtype: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "STEP", step)
    torch.manual_seed(0)
    width = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    codes = torch.arange(1 << 8 * width).repeat(2) if dtype != "bool" else torch.arange(2).repeat(50)
    codes = codes[torch.randperm(len(codes))]
    tensor = codes.to(torch.uint8 if width == 1 else torch.int16).view(getattr(torch, dtype))
    found, ordered = measured(tensor), finite_numbers(tensor)
    assert found.finite == len(ordered) and found.finite + found.nans + found.infs == len(codes)
    assert found.zeros == ordered.count(0) and (found.low, found.high) == (ordered[0], ordered[-1])
    width_of_bin = (ordered[-1] - ordered[0]) / 10
    assert found.counts[0] == sum(value < ordered[0] + width_of_bin for value in ordered)
    wide = torch.tensor(ordered, dtype=torch.float64)
    bound = float(wide.abs().max())
    assert math.isclose(found.mean, float((wide / bound).mean()) * bound, rel_tol=1e-12, abs_tol=1e-13 * bound)
    assert math.isclose(found.std, float((wide / bound).std()) * bound, rel_tol=1e-12)
    assert math.isclose(found.norm, float((wide / bound).norm()) * bound, rel_tol=1e-12)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_figures_beyond_float64_are_left_out(size: float) -> None:
    found = measured(torch.tensor([size, -size, 3 * size], dtype=torch.float64))
    assert (found.mean, found.std, found.norm, found.counts) == (None, None, None, (3,))
    assert (found.low, found.high) == (-size, 3 * size)


def test_threads_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float16)
    tensors = {f"{n}": (torch.randn(STEP + n * 100, 3) * 50).to(dtypes[n % 5]) for n in range(10)}
    torch.save(tensors, tmp_path / "a.pth")
    monkeypatch.setattr(threads, "_MIN_PARALLEL", 0)
    before = torch.get_num_threads()
    reports = []
    for count, inner in ((1, 1), (4, 2), (4, 1)):
        monkeypatch.setattr(threads.os, "cpu_count", lambda count=count: count)
        torch.set_num_threads(inner)
        reports.append(ckptool.stats(tmp_path / "a.pth"))
        assert torch.get_num_threads() == inner
    torch.set_num_threads(before)
    assert reports[0] == reports[1] == reports[2]
