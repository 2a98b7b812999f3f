"""stats against torch itself: every number of every tensor, whatever its dtype, strides and byte order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import CHECKPOINTS, FIXTURES, LOADABLE, Fixture, by_name, examples
from hypothesis import given, settings
from process_probe import command
from random_tensors import any_tensor
from zip_copies import rewritten

import ckptool
from ckptool.cli.main import run
from ckptool.safety.weights_only import weights_only
from ckptool.values.torch.measure import STEP

#: Torch 2.13 warns of its own when it makes quantized and nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore")


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a loaded object, in the order in which ckptool lists them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in tensors(inner)]
    return [t for inner in value for t in tensors(inner)] if isinstance(value, list | tuple) else []


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in a row: float64, or int64 where they are whole."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.resolve_conj().resolve_neg().flatten()
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs()
    if tensor.dtype is torch.uint64:
        return torch.tensor([float(value) for value in tensor.tolist()], dtype=torch.float64)
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    return tensor.to(torch.float32).double() if tensor.element_size() == 1 else tensor.double()


def near(mine: float | None, theirs: float, scale: float, tolerance: float = 1e-11) -> bool:
    return mine is not None and abs(mine - theirs) <= tolerance * scale


def check(row: dict[str, Any], tensor: torch.Tensor) -> None:
    numbers = plain(tensor)
    finite = numbers[torch.isfinite(numbers)] if numbers.is_floating_point() else numbers
    assert row["reason"] is None
    assert row["nans"] == int(torch.isnan(numbers).sum())
    assert row["infs"] == int(torch.isinf(numbers).sum())
    assert row["finite"] == len(finite)
    if not len(finite):
        assert {row[name] for name in ("min", "max", "mean", "std", "norm", "histogram")} == {None}
        return
    assert row["zeros"] == int((finite == 0).sum())
    if tensor.is_quantized:
        # dequantize() rounds to float32.
        assert near(row["min"], finite.min().item(), abs(row["min"]), 1e-6)
        assert near(row["max"], finite.max().item(), abs(row["max"]), 1e-6)
    elif tensor.dtype is torch.uint64:  # torch has no arithmetic for it
        assert (row["min"], row["max"]) == (min(tensor.flatten().tolist()), max(tensor.flatten().tolist()))
    else:
        assert (row["min"], row["max"]) == (finite.min().item(), finite.max().item())
    loose = 1e-6 if tensor.is_quantized else 1e-11
    wide = finite.double()
    bound = max(abs(row["min"]), abs(row["max"])) or 1.0
    if not 1e-130 < bound < 1e130:
        assert row["mean"] is None and row["norm"] is None
        return
    unit = wide / bound
    assert near(row["mean"] / bound, unit.mean().item(), 1, loose)
    if len(finite) > 1:
        assert near(row["std"] / bound, unit.std().item(), 1, loose)
    else:
        assert row["std"] is None
    norm = unit.norm().item()
    assert near(row["norm"] / bound, norm, norm, loose)
    counts, edges = row["histogram"]["counts"], row["histogram"]["edges"]
    assert sum(counts) == len(finite)
    assert (edges[0], edges[-1]) == (float(row["min"]), float(row["max"])) and edges == sorted(edges)
    assert len(counts) == (1 if row["min"] == row["max"] else 10) == len(edges) - 1
    if len(counts) == 10:
        assert counts[0] > 0 < counts[-1]
    # As many as bins have are below their edges, but for numbers that lie next to one.
    total, slack = 0, (loose + 1e-14) * max(abs(row["min"]), abs(row["max"]))
    for count, edge in zip(counts[:-1], edges[1:]):
        total += count
        assert int((finite < edge - slack).sum()) <= total <= int((finite <= edge + slack).sum())


def listed(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ckptool.stats(path, all=True)["tensors"]
    return rows


#: Torch reads another pickle of it than the one that counts.
WHOLE = [item for item in LOADABLE if item.path.name != "zip_two_pickles.pth"]


@pytest.mark.parametrize("item", WHOLE, ids=by_name)
def test_every_fixture(item: Fixture) -> None:
    compare(item.path)


def compare(path: Path) -> None:
    """Every tensor at a path that keys and numbers lead to."""
    loaded = oracle.load(path)
    compared = 0
    for row in listed(path):
        found = oracle.at(loaded, row["path"])
        if found is None:
            continue
        compared += 1
        if row["reason"] is None and "float4" not in row["dtype"]:
            check(row, found)
        else:
            assert found.device.type == "meta" or "bits" in row["dtype"] or "float4" in row["dtype"]
    assert compared or not tensors(loaded)


# -- values that are hard ---------------------------------------------------------------------------------------------

_BOUNDS = {"int64": (-(1 << 63), (1 << 63) - 1), "uint64": (0, (1 << 64) - 1)}


@settings(max_examples=examples(300))
@given(tensor=any_tensor())
def test_any_tensor(tensor: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "any.pth"
    torch.save(tensor, path)
    (row,) = listed(path)
    if tensor.is_complex() and tensor.numel():
        parts = torch.view_as_real(tensor.resolve_conj())
        nan = torch.isnan(parts).any(-1)
        assert row["nans"] == int(nan.sum())
        assert row["infs"] == int((torch.isinf(parts).any(-1) & ~nan).sum())
        return
    check(row, tensor)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_large_integers_are_exact(dtype: str, tmp_path: Path) -> None:
    low, high = _BOUNDS[dtype]
    tensor = torch.tensor([high, high - 1, high - 2], dtype=getattr(torch, dtype))
    torch.save({"w": tensor, "both": torch.tensor([low, high], dtype=getattr(torch, dtype))}, tmp_path / "a.pth")
    one, both = listed(tmp_path / "a.pth")
    assert (one["min"], one["max"], one["std"], one["mean"]) == (high - 2, high, 1.0, float(high - 1))
    assert (both["min"], both["max"], both["mean"]) == (low, high, (low + high) / 2)
    assert json.loads(json.dumps(one["max"])) == high


def test_many_pieces_are_one(tmp_path: Path) -> None:
    """A mean far from zero, and more than one step: the variance of the pieces is combined without loss."""
    torch.manual_seed(0)
    many = torch.randn(2 * STEP + 7, dtype=torch.float64) + 1e6
    bad = torch.randn(3 * STEP + 1)
    bad[::1000], bad[1::1000], bad[2::1000] = math.nan, math.inf, 0.0
    wide = torch.randn(1300, 1000).t()
    holes = torch.randn(3000, 1000)[:, 3:600:7]
    counts = torch.arange(STEP + 3) - 5
    names = {"many": many, "bad": bad, "wide": wide, "holes": holes, "counts": counts}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        names[f"far_{dtype.itemsize}_{len(names)}"] = (torch.randn(200, 100) + 50).to(dtype)
    names["one"] = many[:STEP].clone()
    names["expanded"] = torch.tensor([1.0, 2.0, math.nan]).expand(1000, 3)
    torch.save(names, tmp_path / "a.pth")
    rows = {row["key"]: row for row in listed(tmp_path / "a.pth")}
    for name, tensor in names.items():
        check(rows[name], tensor)
    assert math.isclose(rows["many"]["std"], many.std().item(), rel_tol=1e-13)
    counted = torch.histc(many[:STEP], 10).long().tolist()
    assert sum(abs(a - b) for a, b in zip(rows["one"]["histogram"]["counts"], counted)) < 10


def test_complex_numbers_of_torch_2_14(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bcomplex32 is two bfloat16; older torch reads them as such."""
    parts = torch.tensor([[3, 4], [0, 0], [math.nan, 1], [math.inf, 1], [-1, 0.5]], dtype=torch.bfloat16)
    torch.save(torch.view_as_complex(parts.half()).view(torch.complex32), tmp_path / "half.pth")

    def change(name: str, data: bytes) -> bytes:
        if name == "data/0":
            return parts.view(torch.uint8).numpy().tobytes()
        return data.replace(b"ctorch\ncomplex32\n", b"ctorch\nbcomplex32\n")

    path = rewritten(tmp_path / "half.pth", tmp_path / "a.pth", change)
    (row,) = listed(path)
    assert (row["dtype"], row["max"], row["min"], row["nans"], row["infs"]) == ("bcomplex32", 5.0, 0.0, 1, 1)
    assert (row["numel"], row["of"]) == (5, "absolute values")
    assert run(["validate", str(path), "--finite"]) == 1
    assert "1 NaN" in capsys.readouterr().out
    with ckptool.open(path) as checkpoint:
        verdict = {version: weights_only(checkpoint, [], version).loads for version in ("2.13", "2.14", "2.15")}
    assert verdict == {"2.13": False, "2.14": True, "2.15": True}


def test_quantized_tensors_are_the_numbers_they_stand_for(tmp_path: Path) -> None:
    torch.manual_seed(1)
    values = torch.randn(5, 7, 3) * 3
    scales, zeros = torch.rand(7).double() + 0.05, torch.arange(7) - 3
    floats = torch.quantize_per_channel(values, scales.float(), zeros.float(), 1, torch.quint4x2)
    made = {
        "tensor": torch.quantize_per_tensor(values, 0.03, 5, torch.quint8),
        "channel": torch.quantize_per_channel(values, scales, zeros, 1, torch.qint8),
        "last": torch.quantize_per_channel(values, scales[:3], zeros[:3], 2, torch.qint32),
        "view": torch.quantize_per_tensor(values, 0.03, 5, torch.qint8)[1:, ::2],
    }
    torch.save(made | {"halves": floats}, tmp_path / "a.pth")
    rows = {row["key"]: row for row in listed(tmp_path / "a.pth")}
    for name, tensor in made.items():
        check(rows[name], tensor)
    check(rows["halves"], floats)


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_summary_names_what_to_look_at(tmp_path: Path) -> None:
    bad = torch.tensor([1.0, math.nan, math.inf])
    torch.save({"a.nan": bad, "a.dead": torch.zeros(3), "a.good": torch.ones(2)}, tmp_path / "a.pth")
    summary = ckptool.stats(tmp_path / "a.pth")["summary"]
    assert summary["with_nan"] == summary["with_inf"] == ['["a.nan"]']
    assert summary["all_zero"] == ['["a.dead"]']
    assert (summary["elements"], summary["zeros"], summary["nans"], summary["infs"]) == (8, 3, 1, 1)


def test_missing_bytes_are_said_and_the_rest_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stats", str(FIXTURES / "zip_missing_storage.pth")]) == 3
    told = capsys.readouterr()
    assert "module.w" in told.out and "are missing" in told.err and "salvage" in told.err


def test_an_overlapping_view_of_endless_elements_is_not_counted(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 16).as_strided((1 << 15, 1 << 15), (1, 1))}, tmp_path / "a.pth")
    (row,) = listed(tmp_path / "a.pth")
    assert row["min"] is None and "are 65,535 stored ones" in row["reason"]


def test_without_torch_it_says_what_is_missing() -> None:
    found = command("stats", str(FIXTURES / "bare.pth"))
    assert (found.code, found.out) == (3, "")
    assert "needs torch, which is not installed" in found.err and "pip install torch" in found.err


@pytest.mark.parametrize("item", CHECKPOINTS, ids=by_name)
def test_no_file_is_too_odd(item: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Also what torch does not load, and what is damaged: an answer or a reason, never a bug."""
    for command_line in (["stats", "--all"], ["stats", "--format", "json"], ["get", "."], ["get", ".", "--json"]):
        assert run([command_line[0], str(item.path), *command_line[1:]]) in (0, 3, 4)
        told = capsys.readouterr()
        assert told.out or told.err
