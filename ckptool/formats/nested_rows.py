"""The bytes of one tensor for formats that store plain rows of elements: safetensors, and the items of DCP."""

from __future__ import annotations

from typing import Final

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError
from ..base.records import new_tuple
from ..base.steps import salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import callable_name, mapping
from ..checkpoint.tensors import Tensor, is_contiguous
from ..files.sources import Computed, Piece, Span
from ..pickles.nodes import Call, Graph, Ref
from ..values.elements import elements, storage_reader, swapped_width, tensor_size
from ..values.interpretation import Reading, lazy_bits, resolved_bytes

#: Classes that only say how a tensor takes gradients.
_PARAMETERS: Final = frozenset(("", "Parameter", "Variable"))
#: The deepest nesting of rebuild calls that torch writes.
_DEPTH: Final = 8
#: Torch's functions that rebuild a tensor with a state, and the state's place among their arguments (torch/_utils.py).
_STATES: Final = {"_rebuild_from_type_v2": 3, "_rebuild_parameter_with_state": 3}


def is_more(graph: Graph, ref: Ref, tensor: Tensor) -> bool:
    """Return whether a tensor has a class other than Parameter, or attributes set on it."""
    if tensor.cls not in _PARAMETERS:
        return True
    for _ in range(_DEPTH):
        node = graph.nodes[ref]
        if not isinstance(node, Call):
            return False
        if node.states:
            return True
        args = graph.nodes[node.args]
        name = callable_name(graph, node.func).rpartition(".")[2]
        if not isinstance(args, tuple) or not name.startswith(("_rebuild_parameter", "_rebuild_from_type")):
            return False
        place = _STATES.get(name, len(args))
        if place < len(args):
            state = graph.nodes[args[place]]
            parts = state if isinstance(state, tuple) else (args[place],)
            if any(mapping(graph, part) for part in parts):
                return True
        if name != "_rebuild_parameter" and name != "_rebuild_parameter_with_state":
            return False
        ref = args[0]
    return False


def rows(checkpoint: Checkpoint, where: str, ref: Ref, tensor: Tensor) -> tuple[Piece, int | None]:
    """Return the elements of the dense ``tensor`` at ``ref``, and their CRC-32 if recorded, else 0 or None.

    The elements are a span of the input if it stores them in this form. Otherwise they are computed, including the
    conjugation and negation that torch applies when reading. ``where`` names the tensor in errors. Raises RefusedError
    if bytes are missing.
    """
    size, dtype = tensor_size(tensor), BY_NAME.get(tensor.dtype)
    if not size or dtype is None:
        return b"", None
    body = checkpoint.body(tensor.storage)
    in_rows = is_contiguous(tensor)
    begin = tensor.offset * dtype.itemsize
    if body is None or tensor.location == "meta" or (in_rows and begin + size > body.size):
        what = f"the bytes of {where} are not in the file"
        raise RefusedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))
    negated, conjugated = lazy_bits(checkpoint.survey.reader, ref)
    as_stored = in_rows and swapped_width(checkpoint, tensor.storage) == 1 and not (negated or conjugated)
    if as_stored and isinstance(body.piece, Span) and not body.compressed:
        crc = body.crc if size == body.size else None
        source, offset, _ = body.piece
        return new_tuple(Span, (source, offset + begin, size)), crc  # made for each tensor
    if as_stored and isinstance(body.piece, Computed) and size == body.size == body.piece.size:
        return body.piece, None
    storage = storage_reader(checkpoint, tensor.storage)
    if negated or conjugated:
        return Computed(size, resolved_bytes, (Reading(tensor, storage, "elements", negated, conjugated),)), None
    return Computed(size, elements, (storage, tensor)), None
