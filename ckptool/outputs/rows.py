"""The bytes of one tensor for formats that hold plain rows of elements: safetensors, and the items of DCP."""

from __future__ import annotations

from functools import partial

from ..checkpoint import Checkpoint
from ..elements import dtype_of, elements, holds_rows, tensor_size
from ..errors import RefusedError
from ..human import salvage_step
from ..pickles.nodes import Ref
from ..readings import Reading, lazy_bits, resolved
from ..source import Computed, Piece, Span
from ..tensors import Tensor

__all__ = ["rows"]


def rows(checkpoint: Checkpoint, where: str, ref: Ref, tensor: Tensor) -> Piece:
    """The elements of the dense ``tensor`` at ``ref``: a stretch of the input where they stand there as they must,
    else computed. What torch would conjugate or negate when it reads them is so here; ``where`` is for errors.

    Raises RefusedError where bytes are missing.
    """
    size, dtype = tensor_size(tensor), dtype_of(tensor)
    if not size or dtype is None:
        return b""
    body = checkpoint.body(tensor.storage)
    in_rows = holds_rows(tensor)
    begin = tensor.offset * dtype.itemsize
    if body is None or tensor.location == "meta" or (in_rows and begin + size > body.size):
        what = f"the bytes of {where} are not in the file"
        raise RefusedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))
    swapped = checkpoint.container.byteorder == "big" and dtype.itemsize > 1
    negated, conjugated = lazy_bits(checkpoint, ref)
    if negated or conjugated:
        return Computed(size, partial(resolved, checkpoint, Reading(tensor, "elements", negated, conjugated)))
    if isinstance(body.piece, Span) and not body.compressed and in_rows and not swapped:
        return Span(body.piece.source, body.piece.offset + begin, size)
    return Computed(size, partial(elements, checkpoint, tensor))
