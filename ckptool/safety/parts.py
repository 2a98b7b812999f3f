"""How the tensors that a sparse or nested one is made of must fit together, as torch asks before it makes one.

Each function returns what torch fails over, "" for nothing. Sources: ``aten/src/ATen/native/sparse/SparseTensor.cpp``,
``aten/src/ATen/native/TensorFactories.cpp`` and ``aten/src/ATen/NestedTensorImpl.cpp``, tried against torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..checkpoint.tensors import Tensor

#: By layout, how many dimensions of the values are those of a block.
COMPRESSED: Final = {
    "torch.sparse_csr": 0,
    "torch.sparse_csc": 0,
    "torch.sparse_bsr": 2,
    "torch.sparse_bsc": 2,
}


def compressed(layout: str, rows: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> str:
    """Check what ``_sparse_compressed_tensor_unsafe`` is given; ``shape`` is in elements."""
    block = COMPRESSED[layout]
    for part in (rows, columns):
        if part.dtype not in ("int32", "int64"):
            return f"indices of {part.dtype}"
    if rows.dtype != columns.dtype:
        return "indices of two dtypes"
    batch = len(rows.shape) - 1
    if batch < 0 or len(columns.shape) != batch + 1 or len(values.shape) < batch + 1 + block:
        return "indices and values of different numbers of dimensions"
    if len(shape) != batch + 2 + len(values.shape) - batch - 1 - block:
        return f"a size of {len(shape)} dimensions"
    return ""


def coordinates(indices: Tensor, values: Tensor, shape: Sequence[int]) -> str:
    """Check what ``_sparse_coo_tensor_unsafe`` is given; ``shape`` is in elements."""
    if len(indices.shape) != 2 or indices.dtype != "int64":
        return f"indices of {indices.dtype} with {len(indices.shape)} dimensions"
    if not values.shape or values.shape[0] != indices.shape[1]:
        return "there must be as many values as indices"
    if indices.shape[0] + len(values.shape) - 1 != len(shape):
        return f"a size of {len(shape)} dimensions"
    if tuple(values.shape[1:]) != tuple(shape[indices.shape[0] :]):
        return "values of another shape than its size"
    return ""


def nested(buffer: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor) -> str:
    """Check what ``_nested_view_from_buffer`` is given."""
    if len(buffer.shape) != 1 or any(part.dtype != "int64" for part in (sizes, strides, offsets)):
        return "tables that are not int64"
    if any(part.numel and not _is_contiguous(part) for part in (buffer, sizes, strides, offsets)):
        return "tables that are not contiguous"
    if len(sizes.shape) != 2 or sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        return "tables of different shapes"
    return ""


def _is_contiguous(tensor: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
