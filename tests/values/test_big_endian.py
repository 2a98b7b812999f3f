"""Big-endian files: torch turns the numbers of a storage round by its class, and untyped ones not at all."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import difference

import ckptool
from ckptool.checkpoint.checkpoint import Checkpoint

_TYPED = "float64 float32 float16 bfloat16 complex128 complex64 int64 int32 int16 int8 uint8 bool"
_UNTYPED = (
    "complex32 uint16 uint32 uint64 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu"
    " bits8 bits16 bits1x8 bits2x4 bits4x2"
)
DTYPES = (*_TYPED.split(), *_UNTYPED.split())


def big(path: Path, deflated: bool = False) -> Path:
    """The same file, which says that its numbers are big-endian."""
    made = path.with_name(f"big-{path.name}")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            data = b"big" if info.filename.endswith("byteorder") else old.read(info)
            packed = deflated and "/data/" in info.filename
            new.writestr(info.filename, data, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    return made


def tensor_of(dtype: str, shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = int(np.prod(shape)) * kind.itemsize
    if dtype == "bool":
        return torch.arange(count).remainder(2).bool().reshape(shape)
    return torch.arange(first, first + count).to(torch.uint8).view(kind).reshape(shape)


def raw(value: torch.Tensor) -> bytes:
    plain = torch.empty(value.shape, dtype=value.dtype)
    plain.copy_(value)
    return bytes(plain.flatten().view(torch.uint8).tolist()) if value.numel() else b""


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_that_torch_loads(dtype: str, tmp_path: Path) -> None:
    whole = tensor_of(dtype, (4, 6))
    value = {"rows": whole, "turned": whole.t(), "part": whole[1:, 2:4], "one": tensor_of(dtype, ()), "none": whole[:0]}
    torch.save(value, tmp_path / "t.pth")
    for deflated in (False, True):
        path = big(tmp_path / "t.pth", deflated)
        loaded = load(path)
        for name, expected in loaded.items():
            assert ckptool.get(path, name).tobytes() == raw(expected), name
        torch.save(loaded, tmp_path / "little.pth")
        assert ckptool.hash(path)["content"] == ckptool.hash(tmp_path / "little.pth")["content"]
        assert not ckptool.diff(path, tmp_path / "little.pth")["tensors"]["values_differ"]
        same = not ckptool.diff(path, tmp_path / "t.pth")["tensors"]["values_differ"]
        assert same == all(raw(value[name]) == raw(loaded[name]) for name in value)


def _saved(path: Path, edit: Callable[[Checkpoint], Checkpoint], out: str) -> Path:
    with ckptool.open(path) as checkpoint:
        ckptool.save(edit(checkpoint), path.with_name(out), force=True)
    return path.with_name(out)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_edits_keep_the_values_that_torch_loads(dtype: str, tmp_path: Path) -> None:
    whole = tensor_of(dtype, (64, 6))
    torch.save({"a.w": whole[:, ::3], "a.b": tensor_of(dtype, (3,), 9), "x": 1}, tmp_path / "t.pth")
    path = big(tmp_path / "t.pth")
    loaded = load(path)
    slim = load(_saved(path, ckptool.slim, "slim.pth"))
    prefixed = load(_saved(path, lambda it: ckptool.add_module(it, "m."), "prefixed.pth"))
    for name in ("a.w", "a.b"):
        assert raw(slim[name]) == raw(prefixed.get(f"m.{name}", prefixed.get(name))) == raw(loaded[name])
    torch.save({"c.w": tensor_of(dtype, (2, 2), 5)}, tmp_path / "little.pth")
    for first, second in ((path, tmp_path / "little.pth"), (tmp_path / "little.pth", path)):
        with ckptool.open(second) as other:
            merged = load(_saved(first, lambda it: ckptool.merge(it, other), "merged.pth"))
        expected = load(first) | load(second)
        for name in ("a.w", "c.w"):
            assert raw(merged[name]) == raw(expected[name]), (first, name)
    if dtype in _TYPED.split():
        legacy = _saved(path, lambda it: ckptool.convert(it, "legacy"), "legacy.pth")
        assert not difference(load(legacy)["a.w"].contiguous(), loaded["a.w"].contiguous())


@pytest.mark.parametrize(
    "dtype", [name for name in DTYPES if "complex" not in name and "bits" not in name and "fnuz" not in name]
)
def test_safetensors(dtype: str, tmp_path: Path) -> None:
    torch.save({"w": tensor_of(dtype, (3, 4)), "v": tensor_of(dtype, (4, 4)).t()}, tmp_path / "t.pth")
    path = big(tmp_path / "t.pth")
    made = _saved(path, lambda it: ckptool.convert(it, "safetensors", allow_loss=("strides",)), "t.safetensors")
    found = safetensors.torch.load_file(made)
    assert {name: raw(value) for name, value in found.items()} == {
        name: raw(value) for name, value in load(path).items()
    }


_NUMBERS = ("float64", "float32", "float16", "bfloat16", "int32", "int16", "uint16", "uint32", "float8_e5m2")


@settings(max_examples=examples(25))
@given(st.sampled_from(_NUMBERS), st.sampled_from(_NUMBERS[:4] + _NUMBERS[-1:]), st.integers(0, 255))
def test_casts(tmp_path_factory: pytest.TempPathFactory, dtype: str, target: str, first: int) -> None:
    folder = tmp_path_factory.mktemp("big")
    little = torch.arange(first, first + 12).to(getattr(torch, dtype))
    torch.save({"w": little.reshape(3, 4)}, folder / "t.pth")
    path = big(folder / "t.pth")
    made = load(_saved(path, lambda it: ckptool.cast(it, target, include="*"), "cast.pth"))
    expected = load(path)["w"].to(getattr(torch, target))
    if made["w"].dtype == expected.dtype:
        assert torch.equal(torch.isnan(made["w"].float()), torch.isnan(expected.float()))
        assert torch.equal(made["w"].float().nan_to_num(), expected.float().nan_to_num())


def test_averages(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 7)):
        torch.save({"w": torch.arange(first, first + 8).float()}, tmp_path / f"{name}.pth")
    path = big(tmp_path / "a.pth")
    for one, two in ((path, tmp_path / "b.pth"), (tmp_path / "b.pth", path)):
        with ckptool.open(one) as a, ckptool.open(two) as b:
            ckptool.save(ckptool.average([a, b]), tmp_path / "mean.pth", force=True)
        expected = (load(one)["w"].double() + load(two)["w"].double()) / 2
        assert torch.equal(load(tmp_path / "mean.pth")["w"], expected.float())


def test_arrays_of_numpy_become_tensors(tmp_path: Path) -> None:
    arrays = {"f": np.arange(4.0), "h": np.arange(3, dtype=np.uint16), "b": np.arange(3, dtype=">i4")}
    torch.save({**arrays, "t": torch.arange(3.0)}, tmp_path / "t.pth")
    path = big(tmp_path / "t.pth")
    for name, value in arrays.items():
        assert ckptool.get(path, name).tolist() == value.tolist()
    made = load(_saved(path, ckptool.sanitize, "plain.pth"))
    for name, value in arrays.items():
        assert made[name].tolist() == value.tolist()
    assert torch.equal(made["t"], torch.load(path, weights_only=False)["t"])
