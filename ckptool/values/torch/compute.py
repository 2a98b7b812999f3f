"""Computing with elements, piece by piece: little-endian bytes in, bytes or numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .loads import need_torch


def count_nonfinite(data: bytes, dtype: str) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    torch = need_torch("reading values")
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:
        # float8 types know few operations; what is no number in them is none in float32.
        values = values.to(torch.float32)
    wide = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    if bool(torch.isfinite(torch.sum(values, dtype=wide))):
        return 0, 0  # one of them would have shown in the sum; a sum that overflows is looked at closely
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


def cast_elements(data: bytes, dtype: str, target: str) -> tuple[bytes, int]:
    """Little-endian elements in another dtype, as ``Tensor.to`` has them, and how many finite values are none now.

    Between float32 and bfloat16, which is the upper half of it, integers do; NumPy starts ten times as fast as torch.
    """
    numpy = _numpy() if (dtype, target) in _HALVES else None
    if numpy is not None:
        return _lower_halves(numpy, data) if target == "float32" else _upper_halves(numpy, data)
    torch = need_torch("casting values")
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    out, made = _room(torch, values.numel(), getattr(torch, target))
    made.copy_(values)
    return bytes(out), _overflowed(torch, values, made)


#: Casts that cut the bits of a number or fill them up.
_HALVES: Final = frozenset((("float32", "bfloat16"), ("bfloat16", "float32")))
#: Magnitudes of float32, as bits: from here on bfloat16 rounds to infinity, infinity itself, and NaN of bfloat16 as the
#: vectorised code of torch gives it (ATen/cpu/vec, ``cvtfp32_bf16``), which every contiguous tensor goes through on an
#: x86 CPU. Its scalar code gives 0x7fc0 (c10/util/BFloat16.h, ``round_to_nearest_even``).
_ROUNDS_TO_INFINITY, _INFINITY, _NAN = 0x7F7F8000, 0x7F800000, 0xFFFF


def _numpy() -> Any:
    """The module numpy, None where it is not installed: torch does without it."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _upper_halves(numpy: Any, data: bytes) -> tuple[bytes, int]:
    """float32 to bfloat16: to the nearest, of two equally near ones to the even."""
    bits = numpy.frombuffer(data, "<u4")
    if not len(bits):
        return b"", 0
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    made = rounded.astype("<u2")
    magnitude = bits & 0x7FFFFFFF
    if int(magnitude.max()) < _ROUNDS_TO_INFINITY:
        return bytes(made.tobytes()), 0
    nans = magnitude > _INFINITY
    made[nans] = _NAN
    lost = (magnitude >= _ROUNDS_TO_INFINITY) & (magnitude < _INFINITY)
    return bytes(made.tobytes()), int(lost.sum())


def _lower_halves(numpy: Any, data: bytes) -> tuple[bytes, int]:
    """bfloat16 to float32, which has all of its values."""
    wide = numpy.frombuffer(data, "<u2").astype("<u4")
    wide <<= 16
    return bytes(wide.tobytes()), 0


def _overflowed(torch: Any, values: Any, made: Any) -> int:
    """How many elements were finite and are not any more."""
    if not (made.is_floating_point() or made.is_complex()):
        return 0
    values, made = (torch.view_as_real(part) if part.is_complex() else part for part in (values, made))
    if not values.is_floating_point():
        values = values.to(torch.float64)
    largest = torch.finfo(made.dtype).max
    if values.is_floating_point() and largest >= torch.finfo(values.dtype).max:
        return 0
    if values.element_size() == 1:
        values = values.to(torch.float32)
    # NaN and Inf show in the extremes; only then every value is looked at.
    low, high = torch.aminmax(values)
    if -largest <= float(low) and float(high) <= largest:
        return 0
    wide = made if made.element_size() > 1 else made.to(torch.float32)
    lost = torch.isfinite(values) & ~torch.isfinite(wide).reshape(values.shape)
    return int(lost.sum())


def mean_elements(parts: Sequence[bytes], weights: Sequence[float], dtype: str, wide: str) -> bytes:
    """The weighted mean of elements of a dtype, summed in the dtype ``wide`` in the order given, in their own dtype."""
    torch = need_torch("averaging values")
    kind = getattr(torch, dtype)
    sums: Any = None
    for data, weight in zip(parts, weights):
        values = torch.frombuffer(bytearray(data), dtype=kind).to(getattr(torch, wide))
        sums = values * weight if sums is None else sums.add_(values, alpha=weight)
    out, mean = _room(torch, sums.numel(), kind)
    mean.copy_(sums / sum(weights))
    return bytes(out)


def _room(torch: Any, count: int, dtype: Any) -> tuple[bytearray, Any]:
    """Memory for elements, and a tensor over it: the way to bytes where numpy is not installed."""
    out = bytearray(count * torch.empty((), dtype=dtype).element_size())
    return out, torch.frombuffer(out, dtype=dtype)


def distances(
    a: tuple[bytearray, str], b: tuple[bytearray, str], rtol: float, atol: float
) -> tuple[int, int, float, float, float]:
    """How far numbers are from each other: each side is its bytes and the name of its dtype.

    Gives the number of pairs that do not meet |a - b| <= atol + rtol * |b|, how many of these have no difference
    (NaN or infinite in one), the largest difference, the largest one relative to b, and the sum of all.
    """
    torch = need_torch("comparing values with a tolerance")
    left, right = (_wide(torch, *side) for side in (a, b))
    unequal = _unequal_integers(torch, a, b)
    size, difference = right.abs(), (left - right).abs_() if not left.is_complex() else (left - right).abs()
    if unequal is not None:
        # Large integers may be one number in float64, and are at least 1 apart.
        difference = torch.where(unequal & (difference < 1), 1.0, difference)
    lost = None
    if not bool(torch.isfinite(difference.sum())):
        equal = (left == right) | (torch.isnan(left) & torch.isnan(right))
        difference = torch.where(equal, 0.0, difference)
        lost = ~torch.isfinite(difference)
        difference = torch.where(lost, 0.0, difference)
    far = difference > size.mul(rtol).add_(atol)
    relative = torch.where(size > 0, difference / size, 0.0)
    if lost is not None:
        far |= lost
        relative = torch.where(torch.isfinite(relative), relative, 0.0)
    numbers = float(difference.max()), float(relative.max()), float(difference.sum())
    return int(far.sum()), 0 if lost is None else int(lost.sum()), *numbers


def _unequal_integers(torch: Any, a: tuple[bytearray, str], b: tuple[bytearray, str]) -> Any:
    """Which integers of one dtype differ, compared exactly; None for other numbers."""
    if a[1] != b[1] or a[1] not in ("int64", "uint64"):
        return None
    left, right = (torch.frombuffer(data, dtype=torch.int64) for data, _ in (a, b))
    return left != right


def _wide(torch: Any, data: bytearray, dtype: str) -> Any:
    """The numbers as float64, or complex128."""
    values = torch.frombuffer(data, dtype=getattr(torch, dtype))
    if values.is_complex():
        return values.to(torch.complex64).to(torch.complex128) if dtype == "complex32" else values.to(torch.complex128)
    # float8 types know few conversions.
    return values.to(torch.float32).to(torch.float64) if values.element_size() == 1 else values.to(torch.float64)
