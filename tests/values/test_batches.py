"""Small tensors measured together: the same numbers as of each by itself, whatever its neighbours are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.reports import stats as stats_module
from ckptool.reports.comparing import values as values_module
from ckptool.values.torch import batches as batches_module
from ckptool.values.torch.batches import Kind, distance_rows, kind_of, measure_rows
from ckptool.values.torch.blocks import ElementRule
from ckptool.values.torch.measure import Measured, measure

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool")
SIZES = (1, 2, 7, 210, 300, 4096)


def tensors(dtype: str, count: int) -> list[torch.Tensor]:
    """Ordinary numbers, constants, few different numbers, outliers, and what no batch can measure."""
    torch.manual_seed(4)
    plain = torch.randn(count, dtype=torch.float64) * 5
    outlier = plain.clone()
    outlier[0] = 300.0
    mixed = [plain, plain * 0, plain * 0 + 3, plain.round(), outlier, plain.abs(), -plain.abs() - 2]
    if dtype in ("float32", "float64", "bfloat16"):
        for index, odd in enumerate((math.nan, math.inf, -math.inf)):
            mixed.append(plain.clone())
            mixed[-1][index % count] = odd
        mixed += [plain * 1e-320, plain * 1e300] if dtype == "float64" else []
    whole = [torch.tensor([1 << 60, -(1 << 62)]).repeat(count)[:count]] if dtype == "int64" else []
    return [part.to(getattr(torch, dtype)) for part in (*mixed, *whole)]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def assert_alike(mine: Any, other: Any) -> None:
    """Both have the same fields; sums may be rounded differently."""
    if isinstance(mine, tuple):
        assert len(mine) == len(other)
        for one, two in zip(mine, other):
            assert_alike(one, two)
    elif isinstance(mine, float) and isinstance(other, float):
        assert mine == other or math.isclose(mine, other, rel_tol=1e-12, abs_tol=1e-13)
    else:
        assert mine == other and type(mine) is type(other)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_tensor_by_itself(dtype: str, count: int) -> None:
    rule = ElementRule(dtype)
    kind = kind_of([rule], count)
    assert kind is not None
    data = [raw_bytes(tensor) for tensor in tensors(dtype, count)]
    found = measure_rows([(row,) for row in data], kind, 10)
    assert sum(row is not None for row in found) >= 7
    for row, elements in zip(found, data):
        expected = measure(lambda elements=elements: [elements], rule, 10)
        assert measure_rows([(elements,)], kind, 10) == [row]
        if row is None:
            assert expected.finite < count or dtype in ("float64", "int64")
        else:
            exact = ("low", "high", "zeros", "counts", "edges")
            assert [getattr(row, name) for name in exact] == [getattr(expected, name) for name in exact]
            assert_alike(row, expected)


@pytest.mark.parametrize("tolerance", [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("int64", "int64"), ("int8", "bool")]
)
def test_distances_in_rows_are_those_of_each_pair(
    dtypes: tuple[str, str], tolerance: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = []
    for number, dtype in enumerate(dtypes):
        state = {
            f"{place}.{index}": tensor
            for place, count in enumerate(SIZES)
            for index, tensor in enumerate(tensors(dtype, count))
        }
        turned = dict(zip(state, (tensor.flip(0) if number else tensor for tensor in state.values())))
        torch.save(turned, tmp_path / f"{number}.pth")
        sides.append(tmp_path / f"{number}.pth")
    options: dict[str, Any] = {"ignore": ["dtype"], "sort": "file"}
    if any(tolerance):
        options |= {"rtol": tolerance[0], "atol": tolerance[1]}
    together = ckptool.diff(*sides, **options)
    monkeypatch.setattr(values_module, "kind_of_pair", lambda *_: None)
    alone = ckptool.diff(*sides, **options)
    assert len(together["values"]) > 20
    for name in ("values", "within_tolerance"):
        assert len(together[name]) == len(alone[name])
        for mine, other in zip(together[name], alone[name]):
            assert mine.keys() == other.keys()
            for field in mine:
                assert_alike(mine[field], other[field])


def test_no_small_tensor_is_measured_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    state = {f"{n}": torch.randn((1, 9, 64)[n % 3]) for n in range(300)}
    other = {name: tensor + 1 for name, tensor in state.items()}
    torch.save(state, tmp_path / "a.pth")
    torch.save(other, tmp_path / "b.pth")
    calls: list[Kind] = []

    def counted(data: Any, kind: Kind, *rest: Any) -> list[Measured | None]:
        calls.append(kind)
        return measure_rows(data, kind, *rest)

    def counted_distance(data: Any, kind: Kind) -> Any:
        calls.append(kind)
        return distance_rows(data, kind)

    def never(*_: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(stats_module, "measure_rows", counted)
    monkeypatch.setattr(values_module, "distance_rows", counted_distance)
    for module, name in ((stats_module, "measure"), (values_module, "distance"), (stats_module, "measure_pair")):
        monkeypatch.setattr(module, name, never)
    assert ckptool.stats(tmp_path / "a.pth")["summary"]["tensors"] == 300
    assert len(ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth")["values"]) == 300
    assert len(calls) == 6
    assert batches_module.batches([None, calls[0], calls[0], None]) == [[0], [3], [1, 2]]
