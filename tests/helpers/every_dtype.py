"""Tensors of every dtype, of random bits."""

from __future__ import annotations

import math

import torch

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_") and name != "float8_e8m0fnu"]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
]
#: What no arithmetic of torch takes, too.
EVERY = [*DTYPES, torch.float8_e8m0fnu, torch.uint64, torch.float4_e2m1fn_x2]


def any_bits(dtype: torch.dtype, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bits, NaN, infinite and subnormal numbers among them; of 64 bits numbers that can be squared,
    and the odd ones beside them."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype in (torch.float64, torch.complex128):
        wide = torch.randn(count, 2 if dtype.is_complex else 1, generator=generator, dtype=torch.float64)
        for place, odd in enumerate((math.nan, math.inf, -math.inf, -0.0)):
            wide[place + seed :: 97] = odd
        return (torch.view_as_complex(wide) if dtype.is_complex else wide).reshape(shape)
    data = torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        data &= 1
    return data.flatten().view(dtype).reshape(shape)
