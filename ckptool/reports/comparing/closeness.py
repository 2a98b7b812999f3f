"""How far tensors are from each other: with tolerances, in float64, by torch, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor, is_contiguous
from ...files.sources import FileSource, Span
from ...files.threads import BLOCK
from ...values.elements import dtype_of, elements, reblocked, swapped_width, tensor_size

# -- Reading the values of tensors for comparison: as they stand in the file, or made


class Raw(NamedTuple):
    """Elements that stand in a file as they count: ``size`` bytes from ``offset``, little-endian or single bytes."""

    source: FileSource
    offset: int
    size: int


def raw_of(checkpoint: Checkpoint, tensor: Tensor) -> Raw | None:
    """Where the bytes that ``elements`` gives stand in the file; None where they must be made first.

    Bytes that are missing are left to ``elements``, which says so.
    """
    dtype = dtype_of(tensor)
    if dtype is None or tensor.offset < 0 or not (dtype.packed > 1 or is_contiguous(tensor)):
        return None
    if swapped_width(checkpoint, tensor.storage) > 1:
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


#: Elements looked at in one go: they stay in the cache, and torch starts no threads for so few.
_CHUNK: Final = 1 << 14
#: Kinds of numbers of which torch makes no float64.
_NO_NUMBERS: Final = ("q", "bits", "float4")


class Closeness(NamedTuple):
    """How far b is from a. ``far`` elements do not meet |a - b| <= atol + rtol * |b|, of which ``nonfinite`` have no
    difference: one of them is NaN or infinite, and the other one is something else. The largest and mean difference
    are over the other elements."""

    far: int
    nonfinite: int
    max_abs: float
    max_rel: float
    mean_abs: float

    @property
    def badness(self) -> tuple[float, float]:
        """The larger, the worse."""
        return (inf, self.nonfinite) if self.nonfinite else (self.max_abs, self.max_rel)


def has_numbers(tensor: Tensor) -> bool:
    """Has it elements that are numbers by themselves? Those of quantized tensors need a scale."""
    return tensor.dtype in BY_NAME and not tensor.dtype.startswith(_NO_NUMBERS)


def closeness(
    a: tuple[Checkpoint, Tensor],
    b: tuple[Checkpoint, Tensor],
    rtol: float,
    atol: float,
    progress: Callable[[int], None] | None = None,
) -> Closeness:
    """Compare two tensors of one shape by torch.allclose's rule, in float64 (complex128 for complex numbers).

    NaN is close to NaN, and an infinite number to itself. Raises UnreadableError where torch is not installed.
    """
    from ...values.torch.compute import distances

    one, other = BY_NAME[a[1].dtype], BY_NAME[b[1].dtype]
    far = nonfinite = elements = 0
    max_abs = max_rel = total = 0.0
    sides = (blocks_of(*a, _CHUNK * one.itemsize), blocks_of(*b, _CHUNK * other.itemsize))
    for ours, theirs in zip(*sides):
        count = len(ours) // one.itemsize
        elements += count
        if one.name == other.name and ours == theirs:
            continue
        found = distances((bytearray(ours), one.name), (bytearray(theirs), other.name), rtol, atol)
        far, nonfinite, total = far + found[0], nonfinite + found[1], total + found[4]
        max_abs, max_rel = max(max_abs, found[2]), max(max_rel, found[3])
        if progress:
            progress(len(ours))
    return Closeness(far, nonfinite, max_abs, max_rel, total / max(elements - nonfinite, 1))
