"""Arithmetic on elements, piece by piece: little-endian bytes in, bytes or numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .loads import need_torch, torch_dtype


def count_nonfinite(data: bytes, dtype: str) -> tuple[int, int]:
    """Return how many elements are NaN, and how many are infinite."""
    torch = need_torch("reading values")
    parts = "bfloat16" if dtype == "bcomplex32" else dtype  # older versions of torch can also read its pairs
    values = torch.frombuffer(bytearray(data), dtype=torch_dtype(torch, parts))
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:
        # float8 dtypes support few operations; float32 keeps their NaNs and infinities.
        values = values.to(torch.float32)
    wide = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    if bool(torch.isfinite(torch.sum(values, dtype=wide))):
        return 0, 0  # NaN or infinity would have made the sum non-finite; an overflowing sum is counted below
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


def cast_elements(data: bytes, dtype: str, target: str) -> tuple[bytes, int]:
    """Cast little-endian elements as ``Tensor.to`` does; return them and the number of finite values that became
    non-finite.

    Casts between float32 and bfloat16, its upper half, use integers, because NumPy starts ten times faster than torch.
    """
    numpy = numpy_module() if {dtype, target} == {"float32", "bfloat16"} else None
    if numpy is not None and target == "float32":
        return bytes((numpy.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()), 0
    if numpy is not None:
        return _round_to_bfloat16(numpy, data)
    torch = need_torch("casting values")
    writable = bytearray(data) if isinstance(data, bytes) else data  # torch warns about other memory
    values = torch.frombuffer(writable, dtype=torch_dtype(torch, dtype))
    out, result = _empty(torch, values.numel(), torch_dtype(torch, target))
    result.copy_(values)
    return bytes(out), _overflow_count(torch, values, result)


#: Magnitudes of float32, as bits: the first that bfloat16 rounds to infinity, infinity itself, and the bfloat16 NaN of
#: torch's vectorised code (ATen/cpu/vec, ``cvtfp32_bf16``), which handles every contiguous tensor on an x86 CPU.
#: Torch's scalar code gives 0x7fc0 (c10/util/BFloat16.h, ``round_to_nearest_even``).
_ROUNDS_TO_INFINITY, _INFINITY, _NAN = 0x7F7F8000, 0x7F800000, 0xFFFF
#: The number of elements that are rounded at once.
_BLOCK = 1 << 16


def numpy_module() -> Any:
    """Return the module numpy, or None if it is not installed; torch works without it."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _round_to_bfloat16(numpy: Any, data: bytes) -> tuple[bytes, int]:
    """Round float32 to the nearest bfloat16, ties to even; return the bytes and the number of overflows.

    Blocks share their memory, because the kernel must clear new memory, which takes longer than the arithmetic.
    """
    bits = numpy.frombuffer(data, "<u4")
    result = numpy.empty(len(bits), "<u2")
    scratch = numpy.empty(min(_BLOCK, len(bits)), "<u4")
    overflows = 0
    for begin in range(0, len(bits), _BLOCK):
        block = bits[begin : begin + _BLOCK]
        rounded = scratch[: len(block)]
        numpy.right_shift(block, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += block
        rounded >>= 16
        target = result[begin : begin + _BLOCK]
        target[:] = rounded
        # The largest reveals NaN and infinity.
        magnitude = numpy.bitwise_and(block, 0x7FFFFFFF, out=rounded)
        if numpy.maximum.reduce(magnitude) >= _ROUNDS_TO_INFINITY:
            target[magnitude > _INFINITY] = _NAN
            overflows += int(((magnitude >= _ROUNDS_TO_INFINITY) & (magnitude < _INFINITY)).sum())
    return bytes(result.tobytes()), overflows


def _overflow_count(torch: Any, values: Any, result: Any) -> int:
    """Return how many elements have a part that was finite before the cast and is not finite afterwards."""
    if not (result.is_floating_point() or result.is_complex()):
        return 0
    real_to_complex = result.is_complex() and not values.is_complex()
    values, result = (torch.view_as_real(part) if part.is_complex() else part for part in (values, result))
    if real_to_complex:
        result = result[:, 0]  # the imaginary parts are 0
    if not values.is_floating_point():
        values = values.to(torch.float64)
    largest = torch.finfo(result.dtype).max
    if values.is_floating_point() and largest >= torch.finfo(values.dtype).max:
        return 0
    if values.element_size() == 1:
        values = values.to(torch.float32)
    # The extremes reveal NaN and infinity. Only then is every value read.
    low, high = torch.aminmax(values)
    if -largest <= float(low) and float(high) <= largest:
        return 0
    wide = result if result.element_size() > 1 else result.to(torch.float32)
    lost = torch.isfinite(values) & ~torch.isfinite(wide)
    return int((lost if lost.dim() == 1 else lost.any(dim=1)).sum())


def mean_elements(parts: Sequence[bytes], weights: Sequence[float], dtype: str) -> bytes:
    """Return the weighted mean of elements in their own dtype, summed in float64 in the given order."""
    torch = need_torch("averaging values")
    own = torch_dtype(torch, dtype)
    total: Any = None
    for data, weight in zip(parts, weights):
        values = torch.frombuffer(bytearray(data), dtype=own).double()
        total = values * weight if total is None else total.add_(values, alpha=weight)
    return as_bytes(torch, total / sum(weights), own)


def add_differences(parts: Sequence[bytes], weights: Sequence[float], dtype: str) -> bytes:
    """Return the first elements plus the weighted differences of the others from the last, in their own dtype.

    The sum is computed in float64 in the given order, and rounded once.
    """
    torch = need_torch("adding differences")
    own = torch_dtype(torch, dtype)
    total, *others, base = (torch.frombuffer(bytearray(data), dtype=own).to(torch.float64, copy=True) for data in parts)
    for values, weight in zip(others, weights):
        total += (values - base) * weight  # not add_(alpha=): some processors would skip the rounding of the product
    return as_bytes(torch, total, own)


def mean_row(blocks: Iterable[bytes], length: int, dtype: str) -> bytes:
    """Return the mean of rows of ``length`` elements, in their own dtype; each block has whole rows.

    The rows are summed in float64, block after block.
    """
    torch = need_torch("computing a mean")
    own = torch_dtype(torch, dtype)
    total, number = torch.zeros(length, dtype=torch.float64), 0
    for data in blocks:
        rows = torch.frombuffer(bytearray(data), dtype=own).to(torch.float64).view(-1, length)
        total, number = total.add_(rows.sum(0)), number + len(rows)
    return as_bytes(torch, total / number, own)


def normalized(
    direction: bytes, magnitude: bytes, shape: Sequence[int], norms: Sequence[int], axis: int, dtype: str
) -> bytes:
    """Return a weight from the direction and the magnitude of its norm, of the shapes ``shape`` and ``norms``."""
    torch = need_torch("folding weight norms")
    own = torch_dtype(torch, dtype)
    v, g = (torch.frombuffer(bytearray(data), dtype=own) for data in (direction, magnitude))
    return as_bytes(torch, torch._weight_norm(v.view(tuple(shape)), g.view(tuple(norms)), axis), own)


def as_bytes(torch: Any, values: Any, dtype: Any) -> bytes:
    """Return the elements of a tensor, rounded to a dtype, as bytes; without NumPy."""
    out, result = _empty(torch, values.numel(), dtype)
    result.copy_(values.reshape(-1))
    return bytes(out)


def rounded_number(value: float, dtype: str) -> tuple[bytes, float]:
    """Return the little-endian element of a dtype for a number, and the number that it is."""
    torch = need_torch("computing a number")
    data = as_bytes(torch, torch.tensor([value], dtype=torch.float64), torch_dtype(torch, dtype))
    return data, float(torch.frombuffer(bytearray(data), dtype=torch_dtype(torch, dtype))[0])


def _empty(torch: Any, count: int, dtype: Any) -> tuple[bytearray, Any]:
    """Return memory for elements, and a tensor over it."""
    out = bytearray(count * torch.empty((), dtype=dtype).element_size())
    return out, torch.frombuffer(out, dtype=dtype) if out else torch.empty(0, dtype=dtype)
