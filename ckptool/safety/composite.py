"""Check that the parts of a sparse or nested tensor fit together, as torch does before it builds one.

Each function returns the reason why torch fails, or "". Sources: ``aten/src/ATen/native/sparse/SparseTensor.cpp``,
``aten/src/ATen/native/TensorFactories.cpp`` and ``aten/src/ATen/NestedTensorImpl.cpp``, tested against torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..checkpoint.tensors import Tensor, is_contiguous

#: By layout, the number of dimensions in the values that belong to a block.
BLOCK_DIMENSIONS: Final = {"torch.sparse_csr": 0, "torch.sparse_csc": 0, "torch.sparse_bsr": 2, "torch.sparse_bsc": 2}


def compressed_problem(layout: str, parts: Sequence[Tensor], shape: Sequence[int]) -> str:
    """Check the arguments of ``_sparse_compressed_tensor_unsafe``: two tensors of indices, values, and a shape."""
    rows, columns, values = parts
    for indices in (rows, columns):
        if indices.dtype not in ("int32", "int64"):
            return f"indices of {indices.dtype}"
    if rows.dtype != columns.dtype:
        return "indices of two dtypes"
    dimensions, block = len(rows.shape), BLOCK_DIMENSIONS[layout]
    if not dimensions or len(columns.shape) != dimensions or len(values.shape) < dimensions + block:
        return "indices and values of different numbers of dimensions"
    return f"a size of {len(shape)} dimensions" if len(shape) != len(values.shape) + 1 - block else ""


def coordinate_problem(parts: Sequence[Tensor], shape: Sequence[int]) -> str:
    """Check the arguments of ``_sparse_coo_tensor_unsafe``: indices, values, and a shape."""
    indices, values = parts
    if len(indices.shape) != 2 or indices.dtype != "int64":
        return f"indices of {indices.dtype} with {len(indices.shape)} dimensions"
    if not values.shape or values.shape[0] != indices.shape[1]:
        return "different numbers of values and indices"
    if indices.shape[0] + len(values.shape) - 1 != len(shape):
        return f"a size of {len(shape)} dimensions"
    return "values of another shape than its size" if values.shape[1:] != tuple(shape[indices.shape[0] :]) else ""


def nested_problem(parts: Sequence[Tensor]) -> str:
    """Check the arguments of ``_nested_view_from_buffer``."""
    if any(part.location == "meta" for part in parts):
        return "parts on meta, where torch makes none"
    buffer, sizes, strides, offsets = parts
    if len(buffer.shape) != 1 or any(part.dtype != "int64" for part in (sizes, strides, offsets)):
        return "tables that are not int64"
    if not all(map(is_contiguous, parts)):
        return "tables that are not contiguous"
    if len(sizes.shape) != 2 or sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        return "tables of different shapes"
    return ""
