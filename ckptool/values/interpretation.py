"""What the elements of a tensor mean: where they stand, and by which rule its bytes are numbers.

Sources: ``torch/_utils.py`` (``_rebuild_qtensor``, ``set_tensor_metadata``), ``torch/_tensor.py`` (``__reduce_ex__``).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import MalformedError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import mapping
from ..checkpoint.sharding import is_sharded
from ..checkpoint.tensors import Tensor, extent, rebuild_calls
from ..pickles.nodes import Graph, Ref
from .elements import elements
from .numbers import Number, numbers

#: Scales of one tensor that are looked at: there is one for each channel.
_SCALES: Final = 1 << 20
#: Views of more elements than this that count each stored one more than so many times are not worth an hour.
_LARGE: Final = 1 << 28
_REPEATS: Final = 64
#: Bytes that become Python numbers in one go, each of which takes some dozen.
_PIECE: Final = 1 << 18
#: Bits that a dtype of torch groups without giving them a value.
_BITS: Final = frozenset(("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"))


class Affine(NamedTuple):
    """How quantized integers stand for numbers: (q - zero point) * scale.

    One scale and zero point for the tensor (``axis`` is -1), or one for each index of ``axis``.
    """

    scales: tuple[float, ...]
    zero_points: tuple[float, ...]
    axis: int = -1


class Reading(NamedTuple):
    """A tensor with bytes of its own, and what they stand for.

    ``of`` says what of the outer tensor these are: "elements", "dequantized" ones, the stored "values" of a sparse or
    nested tensor, the "part" that a wrapper holds. ``negated`` and ``conjugated`` are torch's lazy bits.
    """

    tensor: Tensor
    of: str
    negated: bool = False
    conjugated: bool = False
    affine: Affine | None = None


def reading(checkpoint: Checkpoint, ref: Ref) -> Reading | str:
    """How to read the numbers of the tensor ``ref``, or in a few words why it has none."""
    found = _reading(checkpoint, ref)
    if isinstance(found, str):
        return found
    tensor = found.tensor
    if tensor.dtype in _BITS:
        return "bits without a value"
    if tensor.dtype not in BY_NAME:
        return f"the dtype {tensor.dtype} is not known"
    if len(tensor.shape) != len(tensor.stride) or min(*tensor.shape, *tensor.stride, tensor.offset, 0) < 0:
        return "its shape, strides and offset make no sense"
    moving = [(size, step) for size, step in zip(tensor.shape, tensor.stride) if step]
    return repeats(*(tuple(part) for part in zip(*moving))) or found if moving else found


def repeats(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Why the elements of a view are too many to go through: few that are stored, counted again and again; or ""."""
    counted, reach = prod(shape), extent(shape, stride)
    return f"its {counted:,} elements are {reach:,} stored ones" if counted > max(_LARGE, reach * _REPEATS) else ""


def numbers_in(checkpoint: Checkpoint, how: Reading) -> Iterator[list[Number]]:
    """The numbers of a tensor in row-major order, in pieces: those of a quantized one are its integers.

    Raises MalformedError where bytes are missing.
    """
    left = how.tensor.numel
    pieces = (data[at : at + _PIECE] for data in elements(checkpoint, how.tensor) for at in range(0, len(data), _PIECE))
    for data in pieces:
        found = numbers(data, how.tensor.dtype)
        # The last byte of a packed dtype may hold less than it could.
        found = found[:left] if len(found) > left else found
        left -= len(found)
        if how.conjugated:
            found = [value.conjugate() for value in found]
        yield [-value for value in found] if how.negated else found


def resolved(checkpoint: Checkpoint, how: Reading) -> Iterator[bytes]:
    """The elements as torch's ``resolve_neg`` and ``resolve_conj`` give them, little-endian, in pieces of whole ones.

    Raises MalformedError where bytes are missing.
    """
    dtype = BY_NAME[how.tensor.dtype]
    signs = _signs(how, dtype)
    for data in elements(checkpoint, how.tensor):
        if signs:
            yield from (_turned(data[at : at + (1 << 20)], signs) for at in range(0, len(data), 1 << 20))
        elif how.negated:
            yield _minus(data, dtype.itemsize)
        else:
            yield data


def _turned(data: bytes, signs: bytes) -> bytes:
    pattern = int.from_bytes(signs * (len(data) // len(signs)), "little")
    return (int.from_bytes(data, "little") ^ pattern).to_bytes(len(data), "little")


def _minus(data: bytes, width: int) -> bytes:
    """The two's complement of every integer of ``width`` bytes."""
    numbers = (int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width))
    return b"".join((-number % (1 << 8 * width)).to_bytes(width, "little") for number in numbers)


def _signs(how: Reading, dtype: Dtype) -> bytes:
    """The sign bits that torch's lazy bits turn round, of one element; b"" where there are none."""
    parts = 2 if dtype.name.startswith("complex") else 1
    width = dtype.itemsize // parts
    sign, same = b"\0" * (width - 1) + b"\x80", b"\0" * width
    if parts == 2:
        real, imaginary = how.negated, how.negated != how.conjugated
        return (sign if real else same) + (sign if imaginary else same) if real or imaginary else b""
    return sign if how.negated and dtype.floating else b""


def lazy_bits(checkpoint: Checkpoint, ref: Ref) -> tuple[bool, bool]:
    """(negated, conjugated): what torch does to the elements of a tensor when it reads them."""
    bits = _bits(checkpoint.graph, *_maker(checkpoint.graph, ref))
    return "neg" in bits, "conj" in bits


def dense_part(checkpoint: Checkpoint, ref: Ref) -> tuple[Ref, str] | str:
    """The tensor with the numbers: (itself, "elements"), or a part of it and what that is; else why there is none."""
    reader = checkpoint.survey.reader
    tensor = reader.tensor(ref)
    if tensor is None:
        return "it is no tensor"
    if tensor.kind == "meta" or tensor.location == "meta":
        return "on meta: no values"
    if tensor.storage:
        return ref, "elements"
    parts = [(part, inner) for part in tensor.parts if (inner := reader.tensor(part)) is not None]
    if is_sharded(tensor) and not parts:
        return "nothing of it is in this file"
    if tensor.kind == "wrapper":
        if len(parts) == 1:
            return parts[0][0], "part"
        return f"a {tensor.cls.rpartition('.')[2] or 'wrapper'} of {len(parts)} tensors"
    if tensor.kind.startswith("sparse") and parts:
        return parts[-1][0], "values"
    if tensor.kind == "nested" and parts:
        return parts[0][0], "values"
    if tensor.kind == "jagged":
        same = [part for part, inner in parts if (inner.dtype, inner.shape) == (tensor.dtype, tensor.shape)]
        if same:
            return same[0], "values"
    return f"a tensor of the kind {tensor.kind}"


def _reading(checkpoint: Checkpoint, ref: Ref) -> Reading | str:
    found = dense_part(checkpoint, ref)
    if isinstance(found, str):
        return found
    inner, of = found
    tensor = checkpoint.survey.reader.tensor(inner)
    if tensor is None or not tensor.storage:
        return "it is made of tensors that are made of tensors"
    name, args = _maker(checkpoint.graph, inner)
    if tensor.kind == "quantized" or tensor.dtype.startswith(("qint", "quint")):
        affine = _affine(checkpoint, args, tensor) if name == "_rebuild_qtensor" and len(args) > 4 else None
        if affine is None:
            return f"{tensor.dtype} without a scale that can be read"
        return Reading(tensor, "dequantized", affine=affine)
    return Reading(tensor, of, *lazy_bits(checkpoint, inner))


def _maker(graph: Graph, ref: Ref) -> tuple[str, tuple[Ref, ...]]:
    """Return the name and the arguments of the function of torch that makes the data of a tensor."""
    calls = list(rebuild_calls(graph, ref))
    return (calls[-1].short_name, calls[-1].args) if calls else ("", ())


def _bits(graph: Graph, name: str, args: tuple[Ref, ...]) -> set[str]:
    """The lazy bits in the metadata of a tensor: "conj", "neg". A flag counts by being there, whatever its value.

    Source: torch/csrc/jit/serialization/pickler.h, ``setTensorMetadata``.
    """
    index = {"_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}.get(name)
    if index is None or len(args) <= index:
        return set()
    held = mapping(graph, args[index]) or []
    return {key for ref, _ in held if isinstance(key := graph.nodes[ref], str)}


def _affine(checkpoint: Checkpoint, args: tuple[Ref, ...], tensor: Tensor) -> Affine | None:
    """The quantizer of ``_rebuild_qtensor``: (scheme, scale, zero point), or (scheme, scales, zero points, axis)."""
    nodes = checkpoint.graph.nodes
    parts = nodes[args[4]]
    if type(parts) is not tuple or len(parts) < 3:
        return None
    if len(parts) == 3:
        scale, zero = nodes[parts[1]], nodes[parts[2]]
        if not isinstance(scale, int | float) or not isinstance(zero, int | float):
            return None
        return Affine((float(scale),), (float(zero),)) if abs(zero) < 1 << 53 else None
    axis = nodes[parts[3]]
    if type(axis) is not int or not 0 <= axis < len(tensor.shape):
        return None
    lists = []
    for ref in parts[1:3]:
        held = checkpoint.survey.reader.tensor(ref)
        if held is None or held.numel != tensor.shape[axis] or held.numel > _SCALES:
            return None
        try:
            values = [value for data in elements(checkpoint, held) for value in numbers(data, held.dtype)]
        except MalformedError:
            return None
        if len(values) != held.numel or not all(isinstance(value, int | float) for value in values):
            return None
        lists.append(tuple(float(value) for value in values if isinstance(value, int | float)))
    return Affine(lists[0], lists[1], axis)
