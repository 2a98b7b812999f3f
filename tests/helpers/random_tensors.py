"""Random tensors, for hypothesis."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e-310, -1.7e308, 1.7e308, 1e-200, 3e200, 1.5)

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(("float64", "float32", "float16", "bfloat16", "complex64", "bool", *INTEGERS)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * 2 + 3
    if dtype == "bool":
        flat = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    elif dtype in INTEGERS:
        width = torch.iinfo(getattr(torch, dtype))
        numbers = st.one_of(st.integers(width.min, width.max), st.sampled_from((width.min, width.max, 0, 1)))
        flat = torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=getattr(torch, dtype))
    else:
        floats = st.one_of(st.floats(width=64), st.sampled_from(SPECIAL), st.floats(-100, 100))
        wide = torch.tensor(draw(st.lists(floats, min_size=size, max_size=size)), dtype=torch.float64)
        flat = torch.complex(wide.float(), wide.float().flip(0)) if dtype == "complex64" else wide
        flat = flat.to(getattr(torch, dtype))
    offset = draw(st.integers(0, 2))
    step = draw(st.integers(0, 2))
    strides = [step * math.prod(shape[at + 1 :]) for at in range(len(shape))]
    order = draw(st.permutations(range(len(shape))))
    return flat.as_strided(shape, strides, offset).permute(order)
