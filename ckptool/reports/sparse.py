"""Check that the indices of sparse tensors are within the tensor's size, and in order if the file says so.

Torch 2.14 and later check this in ``torch.load(weights_only=True)``: ``_validate_loaded_sparse_tensors`` in
torch/_utils.py, which calls aten/src/ATen/native/sparse/SparseTensor.cpp and SparseCsrTensor.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

from ..base.errors import MalformedError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor, rebuild_calls
from ..pickles.nodes import Ref
from ..values.elements import storage_reader
from ..values.interpretation import Reading, excessive_repeats, numbers_in

#: Maximum number of indices checked in all tensors together, because they become Python numbers.
_MOST: Final = 1 << 20
#: Whether a layout is compressed along the rows, and whether its elements are blocks.
_COMPRESSED: Final = {
    "sparse_csr": (True, False),
    "sparse_csc": (False, False),
    "sparse_bsr": (True, True),
    "sparse_bsc": (False, True),
}


class IndexFlaws(NamedTuple):
    """The number of sparse ``tensors``, their flaws as (path, message), and the number of skipped tensors (``passed``).

    A tensor is skipped if it has too many indices, or if bytes are missing.
    """

    tensors: int
    flaws: list[tuple[str, str]]
    passed: int


def sparse_tensors(checkpoint: Checkpoint) -> dict[Ref, str]:
    """Return the sparse tensors, each with its first path."""
    kinds = ("sparse_coo", *_COMPRESSED)
    return {entry.ref: entry.path for entry in reversed(checkpoint.survey.tensors) if entry.tensor.kind in kinds}


def index_flaws(checkpoint: Checkpoint) -> IndexFlaws:
    """Check the indices of every sparse tensor, up to a total number of indices."""
    tensors = sparse_tensors(checkpoint)
    flaws: list[tuple[str, str]] = []
    left, passed = _MOST, 0
    for ref, path in sorted(tensors.items()):
        tensor = checkpoint.survey.reader.tensor(ref)
        parts = [checkpoint.survey.reader.tensor(part) for part in tensor.parts] if tensor is not None else []
        known = [part for part in parts if part is not None]
        count = sum(part.numel for part in known[:-1])
        if tensor is None or len(known) < len(parts) or len(known) < 2 or count > left:
            passed += 1
            continue
        left -= count
        try:
            flaw = next(_flaws(checkpoint, ref, tensor, known), "")
        except MalformedError:
            passed += 1
            continue
        if flaw:
            flaws.append((path, flaw))
    return IndexFlaws(len(tensors), flaws, passed)


def _flaws(checkpoint: Checkpoint, ref: Ref, tensor: Tensor, parts: Sequence[Tensor]) -> Iterator[str]:
    *indices, values = parts
    numbers = [_numbers(checkpoint, part) for part in indices]
    if tensor.kind == "sparse_coo":
        yield from coordinate_flaws(numbers[0], indices[0].shape, tensor.shape, _is_coalesced(checkpoint, ref))
    elif len(numbers) == 2:
        shapes = indices[0].shape, indices[1].shape, values.shape
        yield from compressed_flaws(tensor.kind, numbers[0], numbers[1], shapes, tensor.shape)


def _numbers(checkpoint: Checkpoint, tensor: Tensor) -> list[int]:
    repeats = excessive_repeats(tensor.shape, tensor.stride)
    if repeats:
        raise MalformedError(repeats, path=checkpoint.path)
    reading = Reading(tensor, storage_reader(checkpoint, tensor.storage), "elements")
    return [int(number.real) for numbers in numbers_in(reading) for number in numbers]


def _is_coalesced(checkpoint: Checkpoint, ref: Ref) -> bool:
    """Return whether the file says that the indices are in order without duplicates."""
    nodes = checkpoint.graph.nodes
    *_, call = (None, *rebuild_calls(checkpoint.graph, ref))
    data = nodes[call.args[1]] if call is not None and len(call.args) > 1 else ()
    return type(data) is tuple and len(data) > 3 and nodes[data[3]] is True


def coordinate_flaws(
    indices: Sequence[int], own: Sequence[int], shape: Sequence[int], is_coalesced: bool
) -> Iterator[str]:
    """Yield the flaws in the indices of a sparse COO tensor.

    ``indices`` has all indices of the first dimension, then of the next; ``own`` is their shape (dimensions, count).
    """
    dimensions, count = own
    rows = [indices[at * count : (at + 1) * count] for at in range(dimensions)]
    for dimension, row in enumerate(rows):
        bad = next((index for index in row if not 0 <= index < shape[dimension]), None)
        if bad is not None:
            yield f"an index of {bad:,} in dimension {dimension}, which has {shape[dimension]:,}"
    places = list(zip(*rows))
    if is_coalesced and any(one >= other for one, other in pairwise(places)):
        yield "its indices are not in order, or one comes twice, though the file says that it is coalesced"


def compressed_flaws(
    kind: str,
    compressed: Sequence[int],
    plain: Sequence[int],
    shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    shape: Sequence[int],
) -> Iterator[str]:
    """Yield the flaws in the indices of a compressed sparse tensor.

    ``shapes`` are the shapes of the compressed indices, the plain indices, and the values.
    """
    by_rows, blocks = _COMPRESSED[kind]
    batches = len(shapes[0]) - 1
    sizes = list(shape[batches : batches + 2])
    if blocks:
        block = shapes[2][batches + 1 : batches + 3]
        if any(not part or size % part for size, part in zip(sizes, block)):
            yield f"blocks of {block[0]}x{block[1]} do not fill {sizes[0]:,}x{sizes[1]:,}"
            return
        sizes = [size // part for size, part in zip(sizes, block)]
    outer, inner = sizes if by_rows else reversed(sizes)
    step, count = shapes[0][-1], shapes[1][-1]
    outside = {tuple(part[:batches]) for part in (*shapes, shape)}
    dense = tuple(shapes[2][batches + (3 if blocks else 1) :])
    if len(outside) > 1 or step != outer + 1 or count != shapes[2][batches] or dense != tuple(shape[batches + 2 :]):
        yield "its indices and values are not of the size of the tensor"
        return
    for batch in range(prod(shapes[0][:batches])):
        ends = compressed[batch * step : (batch + 1) * step]
        places = plain[batch * count : (batch + 1) * count]
        if ends[0] != 0 or ends[-1] != count or any(not 0 <= b - a <= inner for a, b in pairwise(ends)):
            yield f"its compressed indices do not divide {count:,} elements"
            return
        bad = next((index for index in places if not 0 <= index < inner), None)
        if bad is not None:
            yield f"an index of {bad:,} where there are {inner:,}"
            return
        if any(a >= b for begin, end in pairwise(ends) for a, b in pairwise(places[begin:end])):
            yield "its plain indices are not in order, or one comes twice"
            return
