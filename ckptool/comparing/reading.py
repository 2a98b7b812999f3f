"""Reading the values of tensors for comparison: as they stand in the file, or made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..elements import dtype_of, elements, holds_rows, reblocked, tensor_size, turned_width
from ..source import FileSource, Span
from ..tensors import Tensor
from ..threads import BLOCK

__all__ = ["Mark", "Raw", "blocks_of", "has_values", "mark_of", "raw_of"]

#: What decides the elements of a tensor: storage, dtype, offset, shape, stride. Tied tensors have the same.
Mark = tuple[str, str, int, tuple[int, ...], tuple[int, ...]]


class Raw(NamedTuple):
    """Elements that stand in a file as they count: ``size`` bytes from ``offset``, little-endian or single bytes."""

    source: FileSource
    offset: int
    size: int


def mark_of(tensor: Tensor) -> Mark:
    """What two tensors of one file have in common if their elements are the same bytes."""
    return tensor.storage, tensor.dtype, tensor.offset, tensor.shape, tensor.stride


def raw_of(checkpoint: Checkpoint, tensor: Tensor) -> Raw | None:
    """Where the bytes that ``elements`` gives stand in the file; None where they must be made first.

    Bytes that are missing are left to ``elements``, which says so.
    """
    dtype = dtype_of(tensor)
    if dtype is None or tensor.offset < 0 or not (dtype.packed > 1 or holds_rows(tensor)):
        return None
    if turned_width(checkpoint, tensor.storage) > 1:
        return None
    body = checkpoint.body(tensor.storage)
    if body is None or body.compressed or not isinstance(body.piece, Span):
        return None
    begin, size = tensor.offset // dtype.packed * dtype.itemsize, tensor_size(tensor)
    source = body.piece.source
    if not isinstance(source, FileSource) or begin + size > min(body.size, body.piece.size):
        return None
    offset = body.piece.offset + begin
    return Raw(source, offset, size) if offset + size <= source.size else None


def has_values(tensor: Tensor) -> bool:
    """Has it elements of its own in the file?"""
    return bool(tensor.storage) and tensor.location != "meta" and 0 not in tensor.shape


def blocks_of(checkpoint: Checkpoint, tensor: Tensor, size: int = BLOCK) -> Iterator[bytes]:
    """A tensor's elements in pieces of ``size`` bytes."""
    return reblocked(elements(checkpoint, tensor), size)
