"""Checks that read tensor values, with torch: NaN and Inf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..base.errors import MalformedError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor, ViewId, view_id
from ..values.elements import dtype_of, elements, unordered

#: float4_e2m1fn_x2 has no code for NaN or Inf.
_ALWAYS_FINITE: Final = frozenset(("float4_e2m1fn_x2",))


class Nonfinite(NamedTuple):
    """A tensor with ``nans`` and ``infs`` elements that are no number."""

    path: str
    nans: int
    infs: int


def nonfinite(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> list[Nonfinite]:
    """Every tensor that has a NaN or Inf, each view of a storage once, in the order of the file.

    Bytes that are not there are passed over: that they are missing is for other checks to say. Raises UnreadableError
    when torch is not installed.
    """
    reader = checkpoint.survey.reader
    found = []
    seen: set[ViewId] = set()
    for entry in checkpoint.survey.tensors:
        nans = infs = 0
        for part in reader.parts(entry.tensor):
            mark = view_id(part)
            if not _may_be_none(part) or mark in seen:
                continue
            seen.add(mark)
            more = _counted(checkpoint, part, progress)
            nans, infs = nans + more[0], infs + more[1]
        if nans or infs:
            found.append(Nonfinite(entry.path, nans, infs))
    return found


def _may_be_none(tensor: Tensor) -> bool:
    """Can there be a NaN or Inf in it?"""
    dtype = dtype_of(tensor)
    if not tensor.storage or tensor.location == "meta" or dtype is None or 0 in tensor.shape:
        return False
    return (dtype.floating or dtype.name.startswith("complex")) and dtype.name not in _ALWAYS_FINITE


def _counted(checkpoint: Checkpoint, tensor: Tensor, progress: Callable[[int], None] | None) -> tuple[int, int]:
    from ..values.torch.compute import count_nonfinite

    nans = infs = 0
    stored, times = unordered(tensor)
    try:
        for data in elements(checkpoint, stored):
            more = count_nonfinite(data, stored.dtype)
            nans, infs = nans + more[0] * times, infs + more[1] * times
            if progress:
                progress(len(data))
    except MalformedError:
        return nans, infs
    return nans, infs
