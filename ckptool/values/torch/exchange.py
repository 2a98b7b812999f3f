"""Tensors in a checkpoint as NumPy arrays and torch tensors, in new memory."""

from __future__ import annotations

from typing import Any

from ..interpretation import Reading, resolved_bytes
from ..npy import Array
from .loads import need_torch, torch_dtype


def numpy_array(array: Array, dtype: Any = None) -> Any:
    """Return a NumPy array, converted to ``dtype`` unless it is None."""
    import numpy

    result = numpy.ndarray(array.shape, array.descr, bytearray().join(array.elements.chunks()))
    return result if dtype is None else result.astype(dtype, copy=False)


def torch_tensor(reading: Reading) -> Any:
    """Return a contiguous tensor on the CPU, in its own dtype."""
    torch = need_torch("making a tensor of it")
    dtype, shape = torch_dtype(torch, reading.tensor.dtype), reading.tensor.shape
    data = bytearray().join(resolved_bytes(reading))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
