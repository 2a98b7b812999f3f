"""Checks that read tensor values, with torch: NaN and Inf."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from .checkpoint import Checkpoint, StoredBytes
from .dtypes import BY_NAME, Dtype
from .tensors import Tensor, extent
from .zips import contents

__all__ = ["Nonfinite", "nonfinite"]

#: Elements looked at in one go.
_CHUNK: Final = 1 << 22
#: float4_e2m1fn_x2 has no code for NaN or Inf.
_ALWAYS_FINITE: Final = frozenset(("float4_e2m1fn_x2",))


class Nonfinite(NamedTuple):
    """A tensor with ``nans`` and ``infs`` elements that are no number."""

    path: str
    nans: int
    infs: int


def nonfinite(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> list[Nonfinite]:
    """Every tensor that has a NaN or Inf, each view of a storage once, in the order of the file.

    Raises UnreadableError when torch is not installed.
    """
    from .runtime import count_nonfinite

    reader = checkpoint.survey.reader
    found = []
    seen: set[tuple[object, ...]] = set()
    for entry in checkpoint.survey.tensors:
        nans = infs = 0
        for part in reader.parts(entry.tensor):
            dtype = BY_NAME.get(part.dtype)
            mark = (part.storage, part.offset, part.shape, part.stride)
            if not part.storage or part.location == "meta" or dtype is None or mark in seen or 0 in part.shape:
                continue
            if not (dtype.floating or dtype.name.startswith("complex")) or dtype.name in _ALWAYS_FINITE:
                continue
            seen.add(mark)
            stored = checkpoint.container.stored(part.storage)
            dense = _is_dense(part)
            for data in _elements(stored, part, dtype, dense):
                if checkpoint.container.byteorder == "big":
                    data = _swapped(data, dtype)
                view = None if dense else (part.shape, part.stride)
                more = count_nonfinite(data, dtype.name, view)
                nans, infs = nans + more[0], infs + more[1]
                if progress:
                    progress(len(data))
        if nans or infs:
            found.append(Nonfinite(entry.path, nans, infs))
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Does it read every element from its first to its last?"""
    return not tensor.stride or tensor.numel == extent(tensor.shape, tensor.stride)


def _elements(stored: StoredBytes, tensor: Tensor, dtype: Dtype, dense: bool) -> Iterator[bytearray]:
    """The bytes of a tensor, in pieces of whole elements; a view with holes or repeats in one."""
    if stored.span is None:
        return
    width = dtype.itemsize
    begin = tensor.offset * width
    size = extent(tensor.shape, tensor.stride) * width
    if stored.compressed:
        whole = b"".join(contents(stored.span, stored.size, True, f"storage {tensor.storage}"))
        yield bytearray(whole[begin : begin + size])
        return
    step = _CHUNK * width if dense else size
    for at in range(0, size, step):
        yield bytearray(stored.span.source.read(stored.span.offset + begin + at, min(step, size - at)))


def _swapped(data: bytearray, dtype: Dtype) -> bytearray:
    """The other byte order; a complex number is two."""
    width = dtype.itemsize // 2 if dtype.name.startswith("complex") else dtype.itemsize
    if width == 1:
        return data
    numbers = array({2: "H", 4: "I", 8: "Q"}[width], bytes(data))
    numbers.byteswap()
    return bytearray(numbers.tobytes())
