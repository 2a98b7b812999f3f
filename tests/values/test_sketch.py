"""Sketches: quantiles within the stated error whatever the numbers, and those of parts add up to that of the whole."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.cli.main import run
from ckptool.files import threads
from ckptool.values.torch import measure as measure_module
from ckptool.values.torch.blocks import STEP, ElementRule, Layout, parts
from ckptool.values.torch.loads import one_thread
from ckptool.values.torch.measure import ERROR, Moments, Sketch, group_size, groups_of, measure

PERCENT = (1, 5, 25, 50, 75, 95, 99)
FLOAT8 = ("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu")
NARROW = (*FLOAT8, "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "bool")
WIDE = ("float32", "float64", "int32", "int64", "uint32", "uint64")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def measured(tensor: torch.Tensor, layout: Layout | None = None, size: int = 1000) -> Any:
    """What is measured of a tensor whose bytes come in pieces."""
    data = raw_bytes(tensor)
    pieces = [data[at : at + size * 8] for at in range(0, len(data), size * 8)]
    return measure(pieces, ElementRule(str(tensor.dtype)[6:]), layout or Layout(1, 1, tensor.numel()), 10)


def finite_numbers(tensor: torch.Tensor) -> list[Any]:
    wide = tensor.float() if str(tensor.dtype)[6:] in FLOAT8 else tensor
    return sorted(value for value in wide.flatten().tolist() if math.isfinite(value))


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few numbers be sketched like many."""
    monkeypatch.setattr(measure_module, "SORTED", 0)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_elements_are_counted_exactly(dtype: str, sketched: None) -> None:
    torch.manual_seed(0)
    width = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    codes = torch.arange(1 << 8 * width).repeat(2) if dtype != "bool" else torch.arange(2).repeat(50)
    codes = codes[torch.randperm(len(codes))]
    tensor = codes.to(torch.uint8 if width == 1 else torch.int16).view(getattr(torch, dtype))
    found, ordered = measured(tensor), finite_numbers(tensor)
    assert found.error == 0.0 and found.finite == len(ordered)
    assert found.zeros == ordered.count(0) and (found.low, found.high) == (ordered[0], ordered[-1])
    assert list(found.quantiles) == [ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENT]
    sizes = sorted(map(abs, ordered))
    assert list(found.magnitudes) == [sizes[-(-len(sizes) * percent // 100) - 1] for percent in (50, 99)]
    width_of_bin = (ordered[-1] - ordered[0]) / 10
    assert found.counts[0] == sum(value < ordered[0] + width_of_bin for value in ordered)
    wide = torch.tensor(ordered, dtype=torch.float64)
    bound = float(wide.abs().max())
    assert math.isclose(found.mean, float((wide / bound).mean()) * bound, rel_tol=1e-12, abs_tol=1e-13 * bound)
    assert math.isclose(found.std, float((wide / bound).std()) * bound, rel_tol=1e-12)
    assert math.isclose(found.norm, float((wide / bound).norm()) * bound, rel_tol=1e-12)


@settings(max_examples=examples(200))
@given(
    st.sampled_from(WIDE),
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.floats(width=32) | st.integers(-500, 500)),
    st.integers(1, 5),
)
def test_quantiles_are_within_the_stated_error(dtype: str, values: list[float], times: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "SORTED", 0)
        tensor = made(dtype, values * times)
        found, ordered = measured(tensor), finite_numbers(tensor)
        assert found.finite == len(ordered)
        if not ordered:
            assert found.quantiles == found.magnitudes == ()
            return
        assert found.error in (0.0, ERROR)
        sizes = sorted(map(abs, ordered))
        expected = [ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENT]
        expected += [sizes[-(-len(sizes) * percent // 100) - 1] for percent in (50, 99)]
        for mine, theirs in zip((*found.quantiles, *found.magnitudes), expected):
            # Subnormal float64 numbers have fewer bits.
            assert abs(mine - theirs) <= found.error * abs(theirs) or abs(theirs) < 2.0**-1022
        assert all(ordered[0] <= value <= ordered[-1] for value in found.quantiles)
        assert list(found.quantiles) == sorted(found.quantiles)
        assert sum(found.counts) == len(ordered) and found.zeros == ordered.count(0)


def made(dtype: str, values: list[float]) -> torch.Tensor:
    if "int" not in dtype:
        return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))
    bits = int(dtype.strip("uint"))
    low = 0 if dtype.startswith("u") else -(1 << bits - 1)
    whole = [int(value) % (1 << bits) if math.isfinite(value) else 0 for value in values]
    whole = [value - (1 << bits) if low and value >= -low else value for value in whole]
    return torch.tensor(whole, dtype=getattr(torch, dtype))


@settings(max_examples=examples(100))
@given(st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), min_size=1, max_size=5))
def test_sketches_and_moments_of_parts_are_those_of_the_whole(lists: list[list[float]]) -> None:
    rule = ElementRule("float64")
    whole, merged, moments = Sketch(torch, rule), Sketch(torch, rule), Moments()
    for values in lists:
        part = Sketch(torch, rule)
        numbers = torch.tensor(values, dtype=torch.float64)
        assert part.add(numbers) == values.count(0)
        merged.merge(part)
        exact = [Fraction(value) for value in values]
        moments = moments.plus(moments_of(exact))
    together = [value for values in lists for value in values]
    whole.add(torch.tensor(together, dtype=torch.float64))
    assert torch.equal(whole.counts, merged.counts) and whole.rare == merged.rare
    if together:
        exact = [Fraction(value) for value in together]
        mean = sum(exact) / len(exact)
        assert (moments.numel, moments.total) == (len(exact), sum(exact))
        assert moments.deviations == sum((value - mean) ** 2 for value in exact)
        assert moments.around(Fraction()) == sum(value**2 for value in exact)


def moments_of(values: list[Fraction]) -> Moments:
    center = values[0] if values else Fraction()
    return Moments(len(values), sum(values, Fraction()), center, sum(((v - center) ** 2 for v in values), Fraction()))


@settings(max_examples=examples(300))
@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 40), st.sampled_from([16, 100, 1000]))
def test_parts_are_the_tensor_in_order(outer: int, channels: int, inner: int, step: int) -> None:
    from ckptool.values.torch import blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "STEP", step)
        layout, group = Layout(outer, channels, inner), group_size(channels)
        found = list(parts(layout, group))
    assert sum(part.numel for part in found) == layout.numel and all(0 < part.numel <= step for part in found)
    places = torch.arange(layout.numel).view(outer, channels, inner)
    at = 0
    for part in found:
        here = places[:, part.first : part.first + part.channels].flatten()
        assert at in here.tolist()
        at += part.numel
        begins = part.first % group == 0
        assert outer > 1 or begins or part.first // group == (part.first + part.channels - 1) // group
    assert groups_of(channels) <= 64


def rows_of(tensor: torch.Tensor) -> tuple[int, list[float]]:
    """Dead channels, and root mean squares of groups, of torch."""
    rows = tensor.double().reshape(len(tensor), -1)
    groups = rows.split(group_size(len(tensor)))
    return int((rows == 0).all(1).sum()), [float(group.square().mean().sqrt()) for group in groups]


@pytest.mark.parametrize("shape", [(1, 5000), (130, 41), (64, 8000), (3, 200_000), (5000, 3), (7, 11, 13), (200, 50)])
@pytest.mark.parametrize("order", ["rows", "columns", "steps", "expanded", "expanded rows"])
def test_channels_of_any_strides(shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape)
    tensor[:: max(len(tensor) // 3, 2)] = 0
    if order == "columns":
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif order == "steps":
        tensor = tensor.repeat_interleave(2, 0)[::2, ..., 1:]
    elif order == "expanded":
        tensor = tensor[..., :1].expand(shape)
    elif order == "expanded rows":
        tensor = tensor[1:2].expand(shape) if len(tensor) > 1 else tensor.expand(9, *shape[1:])
    torch.save({"a": tensor, "zero": tensor * 0, "vector": tensor.flatten()}, tmp_path / "a.pth")
    row, zero, vector = ckptool.stats(tmp_path / "a.pth")["tensors"]
    assert vector["channels"] is None and row["channels"] is not None and zero["channels"] is not None
    dead, rms = rows_of(tensor)
    assert (row["channels"]["count"], row["channels"]["dead"]) == (len(tensor), dead)
    assert row["channels"]["rms"] == pytest.approx(rms, rel=1e-12)
    assert zero["channels"] == {"axis": 0, "count": len(tensor), "dead": len(tensor), "rms": [0.0] * len(rms)}


def test_a_channel_of_nan_is_not_dead(tmp_path: Path) -> None:
    tensor = torch.zeros(70, 4)
    tensor[1], tensor[2, 0], tensor[4, 3] = math.nan, math.inf, -0.0
    tensor[6] = 1e-45
    torch.save(tensor, tmp_path / "a.pth")
    [row] = ckptool.stats(tmp_path / "a.pth")["tensors"]
    assert row["channels"] is not None and row["channels"]["dead"] == 67
    assert row["channels"]["rms"][:4] == [0.0, 0.0, 0.0, pytest.approx(1e-45 / 2**0.5, rel=0.01)]
    assert ckptool.stats(tmp_path / "a.pth")["summary"]["with_dead_channels"] == [""]


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_root_mean_squares_at_the_ends_of_float64(scale: float, tmp_path: Path) -> None:
    torch.save(torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=torch.float64) * scale, tmp_path / "a.pth")
    [row] = ckptool.stats(tmp_path / "a.pth")["tensors"]
    assert row["channels"] is not None
    assert row["channels"]["rms"] == pytest.approx([12.5**0.5 * scale, 50**0.5 * scale], rel=1e-12)


def test_outliers_and_dead_channels_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(2)
    plain, odd = torch.randn(5000), torch.randn(5000)
    odd[17] = 90.0
    torch.save({"plain": plain, "odd": odd, "sparse": torch.eye(200), "pruned": torch.eye(3, 2)}, tmp_path / "a.pth")
    report = ckptool.stats(tmp_path / "a.pth")
    assert report["summary"]["with_outliers"] == ["odd"]
    assert report["summary"]["with_dead_channels"] == ["pruned"]
    assert [row["outlier_ratio"] is None for row in report["tensors"]] == [False, False, True, False]
    assert run(["stats", str(tmp_path / "a.pth")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "outliers in odd" in lines and "dead channels in pruned" in lines


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


def test_the_last_to_end_gives_torch_its_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    first, second = one_thread(torch), one_thread(torch)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
