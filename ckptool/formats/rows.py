"""The bytes of one tensor for formats that hold plain rows of elements: safetensors, and the items of DCP."""

from __future__ import annotations

from functools import partial
from typing import Final

from ..base.errors import RefusedError
from ..base.text import salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import mapping
from ..checkpoint.tensors import Tensor, rebuild_calls
from ..files.sources import Computed, Piece, Span
from ..pickles.nodes import Call, Graph, Ref
from ..values.elements import dtype_of, elements, holds_rows, tensor_size, turned_width
from ..values.interpretation import Reading, lazy_bits, resolved

#: Classes of a tensor that are something about gradients.
_PARAMETERS: Final = frozenset(("", "Parameter", "Variable"))


def is_more(graph: Graph, ref: Ref, tensor: Tensor) -> bool:
    """Has the tensor a class other than Parameter, or attributes that somebody set on it?"""
    if tensor.cls not in _PARAMETERS:
        return True
    for call in rebuild_calls(graph, ref):
        node, state = graph.nodes[call.ref], graph.nodes[call.state] if call.state >= 0 else ()
        parts = state if isinstance(state, tuple) else (call.state,)
        if (isinstance(node, Call) and node.states) or any(mapping(graph, part) for part in parts):
            return True
    return False


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
    swapped = turned_width(checkpoint, tensor.storage) > 1
    negated, conjugated = lazy_bits(checkpoint, ref)
    if negated or conjugated:
        return Computed(size, partial(resolved, checkpoint, Reading(tensor, "elements", negated, conjugated)))
    if isinstance(body.piece, Span) and not body.compressed and in_rows and not swapped:
        return Span(body.piece.source, body.piece.offset + begin, size)
    return Computed(size, partial(elements, checkpoint, tensor))
