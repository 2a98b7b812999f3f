"""How the bytes of a tensor are read: which elements, and the rule that turns them into numbers.

Sources: ``torch/_utils.py`` (``_rebuild_qtensor``, ``set_tensor_metadata``), ``torch/_tensor.py`` (``__reduce_ex__``).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final

from ..base.dtypes import BY_NAME, Dtype, is_block, is_complex
from ..base.errors import MalformedError, RefusedError
from ..base.records import NamedTuple, new_tuple
from ..base.steps import salvage_step
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import mapping, state_items
from ..checkpoint.tensors import Tensor, TensorReader, extent, is_contiguous, is_sharded, rebuild_calls
from ..files.sources import Computed, Piece, Span
from ..pickles.nodes import Call, Graph, Ref
from .elements import StorageReader, elements, storage_reader, swapped_width, tensor_size
from .numeric import Number, to_numbers

#: Maximum number of scales read for one tensor; there is one per channel.
_SCALES: Final = 1 << 20
#: A view with more than _LARGE elements that repeats each stored element more than _REPEATS times is refused, because
#: reading it would take hours.
_LARGE: Final = 1 << 28
_REPEATS: Final = 64
#: Bytes that become Python numbers at a time; each number takes a few dozen bytes.
_PIECE: Final = 1 << 18
#: Torch dtypes that group bits without giving them a value.
_BITS: Final = frozenset(("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"))


class Affine(NamedTuple):
    """The rule that turns quantized integers into numbers: (q - zero point) * scale.

    There is one scale and zero point for the tensor (``axis`` is -1), or one for each index of ``axis``.
    """

    scales: tuple[float, ...]
    zero_points: tuple[float, ...]
    axis: int = -1


class Reading(NamedTuple):
    """A tensor with bytes of its own, and their meaning.

    ``of`` is the role of the bytes in the requested tensor: its "elements", "dequantized" elements, the stored "values"
    of a sparse or nested tensor, or the "part" in a wrapper. ``negated`` and ``conjugated`` are torch's lazy bits.
    """

    tensor: Tensor
    storage: StorageReader
    of: str
    negated: bool = False
    conjugated: bool = False
    affine: Affine | None = None


def interpret(checkpoint: Checkpoint, ref: Ref) -> Reading | str:
    """Return how to read the numbers of the tensor ``ref``, or a short text that says why that is impossible."""
    part = _dense_part(checkpoint, ref)
    if isinstance(part, str):
        return part
    inner, of = part
    tensor = checkpoint.survey.reader.tensor(inner)
    if tensor is None or not tensor.storage:
        return "it is made of tensors that are made of tensors"
    if is_block(tensor.dtype):
        return f"blocks of {tensor.dtype}: `ckptool convert` computes their values"
    storage = storage_reader(checkpoint, tensor.storage)
    if tensor.kind == "quantized" or tensor.dtype.startswith(("qint", "quint")):
        affine = _affine(checkpoint, inner, tensor)
        if affine is None:
            return f"{tensor.dtype} without a scale that can be read"
        reading = Reading(tensor, storage, "dequantized", affine=affine)
    else:
        reading = Reading(tensor, storage, of, *lazy_bits(checkpoint.survey.reader, inner))
    if tensor.dtype in _BITS:
        return "bits without a value"
    if tensor.dtype not in BY_NAME:
        return f"the dtype {tensor.dtype} is not known"
    if len(tensor.shape) != len(tensor.stride) or min(*tensor.shape, *tensor.stride, tensor.offset, 0) < 0:
        return "its shape, strides and offset make no sense"
    if 0 < tensor.numel <= _LARGE:
        return reading
    # An expanded dimension (stride 0) costs nothing. The other dimensions must not overlap too often.
    shape, stride = (tuple(axis[part] for axis in zip(tensor.shape, tensor.stride) if axis[1]) for part in (0, 1))
    return excessive_repeats(shape, stride) or reading


def excessive_repeats(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Return why a view that repeats a few stored elements has too many to be read, or ""."""
    count, stored = prod(shape), extent(shape, stride)
    return f"its {count:,} elements are {stored:,} stored ones" if count > max(_LARGE, stored * _REPEATS) else ""


def numbers_in(reading: Reading) -> Iterator[list[Number]]:
    """Yield the numbers of a tensor in row-major order, in pieces; a quantized tensor gives its integers.

    Raise MalformedError if bytes are missing.
    """
    left = reading.tensor.numel
    for data in elements(reading.storage, reading.tensor):
        for at in range(0, len(data), _PIECE):
            # The last byte of a packed dtype may hold fewer numbers than it has room for.
            numbers = to_numbers(data[at : at + _PIECE], reading.tensor.dtype)[:left]
            left -= len(numbers)
            if reading.conjugated:
                numbers = [value.conjugate() for value in numbers]
            yield [-value for value in numbers] if reading.negated else numbers


def resolved_bytes(reading: Reading) -> Iterator[bytes]:
    """Yield the elements after torch's ``resolve_neg`` and ``resolve_conj``, little-endian, in whole elements.

    Raise MalformedError if bytes are missing.
    """
    dtype = BY_NAME[reading.tensor.dtype]
    signs = flipped_signs(dtype, reading.negated, reading.conjugated)
    for data in elements(reading.storage, reading.tensor):
        if signs:
            yield from (_flip(data[at : at + (1 << 20)], signs) for at in range(0, len(data), 1 << 20))
        elif reading.negated:
            width = dtype.itemsize
            numbers = (int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width))
            yield b"".join((-number % (1 << 8 * width)).to_bytes(width, "little") for number in numbers)
        else:
            yield data


def _flip(data: bytes, bits: bytes) -> bytes:
    pattern = int.from_bytes(bits * (len(data) // len(bits)), "little")
    return (int.from_bytes(data, "little") ^ pattern).to_bytes(len(data), "little")


def flipped_signs(dtype: Dtype, negated: bool, conjugated: bool) -> bytes:
    """Return the sign bits of one element that torch's lazy bits flip; b"" if none."""
    parts = 2 if is_complex(dtype.name) else 1
    width = dtype.itemsize // parts
    sign, same = b"\0" * (width - 1) + b"\x80", b"\0" * width
    if parts == 2:
        real, imaginary = negated, negated != conjugated
        return (sign if real else same) + (sign if imaginary else same) if real or imaginary else b""
    return sign if negated and dtype.floating else b""


def lazy_bits(reader: TensorReader, ref: Ref) -> tuple[bool, bool]:
    """Return (negated, conjugated): the operations that torch applies to the elements of a tensor on reading.

    They are "neg" and "conj" in the tensor's metadata. A flag is set by its presence, whatever its value: see
    torch/csrc/jit/serialization/pickler.h, ``setTensorMetadata``.
    """
    graph = reader.graph
    if not reader.has_lazy_bits:
        return False, False
    name, args = _data_call(graph, ref)
    index = {"_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}.get(name, len(args))
    metadata = mapping(graph, args[index]) or () if index < len(args) else ()
    bits = [graph.nodes[key] for key, _ in metadata]
    return "neg" in bits, "conj" in bits


def _dense_part(checkpoint: Checkpoint, ref: Ref) -> tuple[Ref, str] | str:
    """Return the tensor with the numbers (itself or a part) and its role, or a text that says why it has none."""
    reader = checkpoint.survey.reader
    tensor = reader.tensor(ref)
    if tensor is None:
        return "it is not a tensor"
    if tensor.kind == "meta" or tensor.location == "meta":
        return "on meta: no values"
    if tensor.storage:
        return ref, "elements"
    parts = [(part, inner) for part in tensor.parts if (inner := reader.tensor(part)) is not None]
    if is_sharded(tensor) and not parts:
        return "no part of it is in this file"
    if tensor.kind == "wrapper":
        if len(parts) == 1:
            return parts[0][0], "part"
        return f"a {tensor.cls.rpartition('.')[2] or 'wrapper'} of {len(parts)} tensors"
    if tensor.kind.startswith("sparse") and parts:
        return parts[-1][0], "values"
    if tensor.kind == "nested" and parts:
        return parts[0][0], "values"
    if tensor.kind == "jagged":
        for part, inner in parts:
            if (inner.dtype, inner.shape) == (tensor.dtype, tensor.shape):
                return part, "values"
    return f"a tensor of the kind {tensor.kind}"


def _data_call(graph: Graph, ref: Ref) -> tuple[str, tuple[Ref, ...]]:
    """Return the torch function that makes the data of a tensor, and its arguments; ("", ()) for another node."""
    *_, call = (None, *rebuild_calls(graph, ref))
    return ("", ()) if call is None else (call.short_name, call.args)


def _affine(checkpoint: Checkpoint, ref: Ref, tensor: Tensor) -> Affine | None:
    """Return the quantizer in ``_rebuild_qtensor``, or None if it cannot be read.

    It is (scheme, scale, zero point) or (scheme, scales, zero points, axis).
    """
    nodes = checkpoint.graph.nodes
    name, args = _data_call(checkpoint.graph, ref)
    parts = nodes[args[4]] if name == "_rebuild_qtensor" and len(args) > 4 else ()
    if type(parts) is not tuple or len(parts) < 3:
        return None
    if len(parts) == 3:
        scale, zero = nodes[parts[1]], nodes[parts[2]]
        if not isinstance(scale, int | float) or not isinstance(zero, int | float) or not abs(zero) < 1 << 53:
            return None
        return Affine((float(scale),), (float(zero),))
    axis = nodes[parts[3]]
    if type(axis) is not int or not 0 <= axis < len(tensor.shape):
        return None
    rows = []
    for part in parts[1:3]:
        inner = checkpoint.survey.reader.tensor(part)
        if inner is None or inner.numel != tensor.shape[axis] or inner.numel > _SCALES:
            return None
        try:
            pieces = numbers_in(Reading(inner, storage_reader(checkpoint, inner.storage), "elements"))
            values = [value for piece in pieces for value in piece]
        except MalformedError:
            return None
        row = tuple(float(value) for value in values if isinstance(value, int | float))
        if not len(row) == len(values) == inner.numel:
            return None
        rows.append(row)
    return Affine(rows[0], rows[1], axis)


#: Classes that only say how a tensor takes gradients.
_PARAMETERS: Final = frozenset(("", "Parameter", "Variable"))


def is_more(graph: Graph, ref: Ref, tensor: Tensor) -> bool:
    """Return whether a tensor has a class other than Parameter, or attributes set on it."""
    more = True
    for call in rebuild_calls(graph, ref) if tensor.cls in _PARAMETERS else ():
        node, state = graph.nodes[call.ref], call.state
        more = (isinstance(node, Call) and bool(node.states)) or (state >= 0 and bool(state_items(graph, state)))
        if more:
            break
    return more


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
