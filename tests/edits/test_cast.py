"""cast against ``Tensor.to``: the same values bit for bit, and everything else as it was."""

from __future__ import annotations

import copy
import math
import platform
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, Fixture, by_name
from output_checks import VIEWS, WHOLE, edited, saved
from tensor_storages import tensors
from torch import nn

import ckptool
from ckptool.base.errors import RefusedError, TargetError, UnreadableError
from ckptool.values.torch import compute

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: Torch writes these without a storage class, and cannot load such a tensor where it is a leaf with a gradient.
CLASSLESS = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("float16", "float64", "float8_e4m3fn")
Chosen = Callable[[str, torch.Tensor], bool]


def floating(_name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2


def everywhere(checkpoint: ckptool.Checkpoint, dtype: str, **how: Any) -> ckptool.Checkpoint:
    """The cast of every tensor, those of optimizers, too."""
    return ckptool.cast(checkpoint, dtype, optimizer=True, **how)


class Naive:
    """``x.to(dtype)`` for every chosen tensor of a loaded object, with whole storages: what shares goes on sharing."""

    def __init__(self, loaded: Any, dtype: str, chosen: Chosen = floating) -> None:
        self.dtype = getattr(torch, dtype)
        self.classless = dtype in CLASSLESS
        self.found = [(name, tensor) for name, tensor in tensors(loaded) if not tensor.is_quantized]
        self.wanted = {mark(tensor) for name, tensor in self.found if self.casts(name, tensor, chosen)}
        self.wanted -= {mark(tensor) for _, tensor in self.found if self.classless and self.unfit(tensor)}
        self.storages: dict[object, torch.Tensor] = {}
        self.made: dict[int, Any] = {}
        self.result = self.cast(loaded)

    def casts(self, name: str, tensor: torch.Tensor, chosen: Chosen) -> bool:
        return chosen(name, tensor) and tensor.dtype != self.dtype

    def unfit(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        return (tensor.requires_grad and not isinstance(tensor, nn.Parameter)) or tensor.is_neg() or tensor.is_conj()

    def cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.made:
                self.made[id(value)] = self.tensor(value) if mark(value) in self.wanted else value
            return self.made[id(value)]
        if isinstance(value, dict):
            for key in value:
                value[key] = self.cast(value[key])
        elif isinstance(value, list):
            value[:] = [self.cast(item) for item in value]
        elif type(value) is tuple:
            return tuple(self.cast(item) for item in value)
        return value

    def tensor(self, old: torch.Tensor) -> torch.Tensor:
        if old.layout is not torch.strided or old.is_nested:
            return old.to(self.dtype)
        if old.is_meta:
            new = torch.empty_strided(old.shape, old.stride(), dtype=self.dtype, device="meta")
        else:
            whole = self.storages.get(mark(old))
            if whole is None:
                count = old.untyped_storage().nbytes() // old.element_size()
                flat = torch.empty(0, dtype=old.dtype).set_(old.untyped_storage(), 0, (count,))
                whole = self.storages[mark(old)] = flat.to(self.dtype)
            new = whole.as_strided(old.shape, old.stride(), old.storage_offset())
            new = torch._neg_view(new) if old.is_neg() else new
            new = new.conj() if old.is_conj() and new.is_complex() else new
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=False)
        new.__dict__.update(old.__dict__)
        return new.requires_grad_(old.requires_grad)


def mark(tensor: torch.Tensor) -> object:
    """Tensors with one mark share a storage."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_meta
        or not tensor.untyped_storage().nbytes()
    ):
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def naive(path: Path, dtype: str, chosen: Chosen = floating) -> Any:
    return Naive(oracle.load(path), dtype, chosen).result


every = pytest.mark.parametrize("item", [item for item in WHOLE if item.path.name not in VIEWS], ids=by_name)


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_file(item: Fixture, dtype: str, out: Path) -> None:
    found = edited(item.path, out, lambda c: everywhere(c, dtype))
    assert oracle.difference(naive(item.path, dtype), found) == ""


@every
@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e5m2"])
def test_what_is_named_is_cast_whatever_it_is(item: Fixture, dtype: str, out: Path) -> None:
    """Every tensor is either what ``to`` makes of it, or as it was; and torch loads the output in every case."""
    found = edited(item.path, out, lambda c: everywhere(c, dtype, include=["*"]))
    kind = getattr(torch, dtype)
    for (_, old), (_, new) in zip(tensors(oracle.load(item.path)), tensors(found), strict=True):
        plain = old.layout is torch.strided and not old.is_nested and not old.is_meta
        assert new.dtype in (old.dtype, kind) and new.requires_grad == old.requires_grad and type(old) is type(new)
        if plain:
            left = old.is_quantized or "float4" in str(old.dtype) or "bits" in str(old.dtype)
            left = left or (old.is_complex() and not kind.is_complex) or (old.is_neg() and kind.is_complex)
            left = left or (old.requires_grad and not (kind.is_floating_point or kind.is_complex))
            assert left or new.dtype == kind or Naive([], dtype).unfit(old)
            assert oracle.difference(settled(old, new.dtype), settled(new, new.dtype)) == ""


def settled(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values alone."""
    tensor = tensor.detach() if tensor.dtype == dtype else tensor.detach().to(dtype)
    return tensor.resolve_conj().resolve_neg().contiguous().clone() if not tensor.is_quantized else tensor.int_repr()


def test_a_choice_of_keys(out: Path) -> None:
    path = FIXTURES / "bare_module.pth"
    found = edited(path, out, lambda c: everywhere(c, "float16", exclude=["*bn*"]))
    expected = naive(path, "float16", lambda name, tensor: "bn" not in name and tensor.is_floating_point())
    assert oracle.difference(expected, found) == ""


# -- every value of every dtype -----------------------------------------------------------------------------

WIDE = ("float16", "bfloat16")
EIGHT = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
OTHERS = ("float32", "float64", "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool")
COMPLEX = ("complex64", "complex128")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("source", [*WIDE, *EIGHT, *OTHERS, *COMPLEX])
def test_every_pair_of_dtypes(source: str, tmp_path: Path, out: Path) -> None:
    kind = getattr(torch, source)
    if source in WIDE:
        values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(kind)
    elif source in EIGHT:
        values = torch.arange(-128, 128).to(torch.int8).view(kind)
    else:
        values = torch.tensor([0, 1, 2.5, -3.75, 65504, 65520, 1e5, 448, 464, 480, -6e4, 3e38, 1e-8, 1e-40]).to(kind)
    path = saved({"x.weight": values}, tmp_path / "in.pth")
    for target in (*WIDE, *EIGHT, *OTHERS, *COMPLEX):
        if source in COMPLEX and target not in COMPLEX:
            continue
        try:
            expected = values.to(getattr(torch, target))
        except (RuntimeError, NotImplementedError):
            continue
        found = edited(path, out, lambda c, target=target: everywhere(c, target, include=["*"]))
        assert oracle.difference({"x.weight": expected}, found) == "", target


def test_large_tensors_are_cast_in_pieces(tmp_path: Path, out: Path) -> None:
    """More than one piece, more than one storage, a piece that ends within an element."""
    torch.manual_seed(0)
    values = {f"w{number}": torch.randn(700_001 + number) for number in range(4)} | {"n": torch.ones(1_500_001)}
    path = saved(values, tmp_path / "in.pth")
    for dtype in ("bfloat16", "float64"):
        found = edited(path, out, lambda c, dtype=dtype: everywhere(c, dtype))
        assert oracle.difference(Naive(copy.deepcopy(values), dtype).result, found) == ""


def test_a_dtype_that_the_installed_torch_is_too_old_for(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.0 has no float8, 2.13 no bcomplex32."""
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(UnreadableError, match=r"torch \S+ has no dtype float8_e4m3fn"):
        ckptool.save(ckptool.cast(FIXTURES / "dtypes_typed.pt", "float8_e4m3fn"), out)
    assert not out.exists()


def test_no_dtype_to_cast_to() -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        for name in ("float7", "quint8", "float4_e2m1fn_x2", ""):
            with pytest.raises(TargetError):
                everywhere(checkpoint, name)


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_with_numpy_and_without(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), dtype=torch.int32)
    edges = [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, -0x807FFF, 0x3F808000, 0x3F818000, 0x8000, 0x18000, 1, 0]
    values = torch.cat([bits, torch.tensor(edges, dtype=torch.int32)]).view(torch.float32)
    values = values[~torch.isnan(values)].to(getattr(torch, source))
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    fast = compute.cast_elements(data, source, target)
    monkeypatch.setattr(compute, "numpy_module", lambda: None)
    assert compute.cast_elements(data, source, target) == fast
    assert (fast[1] > 0) == (target == "bfloat16")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs give NaN other bits")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="so does torch without AVX")
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64"])
def test_every_nan_has_the_bits_that_torch_gives_it(target: str) -> None:
    """NaN of either sign, quiet or not, alone and among numbers."""
    codes = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7FA12345, 0x3F800000, 0x7F800000]
    for count in (1, 3, 8, 17, 64, 1000):
        data = b"".join(struct.pack("<I", codes[number * number % 8]) for number in range(count))
        theirs = torch.frombuffer(bytearray(data), dtype=torch.float32).to(getattr(torch, target))
        assert compute.cast_elements(data, "float32", target)[0] == theirs.view(torch.uint8).numpy().tobytes()


# -- overflow is refused or reported, whatever the dtype -------------------------------------------------------


OVERFLOWS = [
    (torch.tensor([100_000, 1]), "float16"),
    (torch.tensor([1e300 + 0j], dtype=torch.complex128), "complex64"),
    (torch.tensor([1e39], dtype=torch.float64), "complex64"),
    (torch.tensor([1e30]), "float16"),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("source", [*WIDE, *EIGHT, *OTHERS, *COMPLEX])
def test_overflow_is_counted_for_every_pair_of_dtypes(source: str) -> None:
    kind = getattr(torch, source)
    if kind.is_floating_point or kind.is_complex:
        real = torch.tensor([0, 1, torch.finfo(kind).max / 2, torch.finfo(kind).max, float("inf"), float("nan")])
        values = real.to(torch.float64).to(kind)
        if kind.is_complex:
            values = torch.complex(values.real, values.real.flip(0))
    else:
        values = torch.tensor([0, 1, 1 if kind is torch.bool else torch.iinfo(kind).max], dtype=kind)
    data = values.view(torch.uint8).numpy().tobytes()
    for target in (*WIDE, *EIGHT, *COMPLEX):
        try:
            cast = values.to(getattr(torch, target))
        except (RuntimeError, NotImplementedError):
            continue
        if values.is_complex() and not cast.is_complex():
            continue
        found, overflows = compute.cast_elements(data, source, target)
        assert found == cast.view(torch.uint8).numpy().tobytes() or values.isnan().any(), target
        assert overflows == sum(map(loses_a_finite_part, values.tolist(), wide(cast).tolist())), target


def wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.is_complex() else values.to(torch.float64)


def loses_a_finite_part(old: complex, new: complex) -> bool:
    """Whether the real or the imaginary part was finite before the cast and is not finite after it."""
    old, new = complex(old), complex(new)
    pairs = [(old.real, new.real), (old.imag, new.imag)]
    return any(math.isfinite(before) and not math.isfinite(after) for before, after in pairs)


@pytest.mark.parametrize(("tensor", "dtype"), OVERFLOWS, ids=["integer", "complex", "real to complex", "float"])
def test_overflow_of_any_dtype_is_refused_with_strict(tensor: torch.Tensor, dtype: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save({"a.w": tensor}, path)
    with ckptool.open(path) as checkpoint, pytest.raises(RefusedError):
        ckptool.save(ckptool.cast(checkpoint, dtype, include=["*"], no_overflow=True), out)
    assert not out.exists()


def test_the_overflow_of_a_cast_is_reported_after_a_merge(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a.w": torch.tensor([1e30])}, path)
    with ckptool.open(path) as one, ckptool.open(path) as other:
        merged = ckptool.merge(one, ckptool.cast(other, "float16"))
        ckptool.save(merged, tmp_path / "b.pth")
        assert [change.edit for tell in merged.deferred_changes for change in tell()] == ["overflow"]
