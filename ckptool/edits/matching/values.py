"""A few rows of the tensors in one state dict, to find out whether those of another hold the same values.

Where the dtypes of the two sides differ, all values are compared in the coarsest one. Arithmetic is not recognised:
norms that one library stores minus 1 look like another training run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import copysign, inf, prod
from struct import pack, unpack
from typing import Final

from ...base.dtypes import BY_NAME
from ...base.errors import CkptoolError
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor, extent
from ...files.sources import Span
from ...formats.opening import as_checkpoint
from ...values.elements import StorageReader, elements, storage_reader

#: The most elements that are read of one row, and along an axis, where each may be a read of its own: a second for a
#: large model.
_ROW: Final = 1_024
_LINE: Final = 1 << 15
#: The most bytes that are read for one row or line: of a compressed or computed storage, which is read whole, and of
#: the rows between the elements of a column, which are otherwise read one by one.
_WHOLE: Final = 16 << 20
#: Distinct elements that identify a tensor. Fewer may be equal by chance, as in norms that were never trained.
TELLING: Final = 4

#: Floating-point dtypes from the finest to the coarsest, with the codes by which ``struct`` knows them.
_PRECISION: Final = {"float64": "d", "float32": "f", "float16": "e", "bfloat16": ""}


class Sample(NamedTuple):
    """A few rows of a tensor, as little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def is_telling(self) -> bool:
        """Whether the values differ enough from each other to identify the tensor."""
        dtype, seen = BY_NAME[self.dtype], set[bytes]()
        for at in range(0, len(self.data), dtype.itemsize) if dtype.floating else ():
            seen.add(self.data[at : at + dtype.itemsize])
            if len(seen) >= TELLING:
                return True
        return False

    def equals(self, other: Sample) -> bool:
        """Return whether dtype, size and rows are equal; as for torch, one element and a scalar are of equal size."""
        same_size = self.shape == other.shape or prod(self.shape) == prod(other.shape) == 1
        return self.dtype == other.dtype and same_size and self.data == other.data


class Values:
    """Samples of the tensors in one state dict, each read on first use.

    ``source`` is an open checkpoint, or a path that is opened on first use; ``place`` is the path of the state dict.
    Floating-point values are rounded to the dtype ``rounding``, "" for their own. Storages that an edit computes are
    read whole only for ``costly`` names.
    """

    def __init__(self, source: Checkpoint | str, place: str, rounding: str = "", costly: Collection[str] = ()) -> None:
        self._source, self._place, self.rounding, self._costly = source, place, rounding, costly
        self._tensors: dict[str, Tensor] | None = None
        self._samples: dict[str, Sample | None] = {}
        self._by_content: dict[Sample, list[str]] | None = None

    def sample(self, name: str) -> Sample | None:
        """Return a few rows of a tensor; None if it cannot be sampled, or if the maximum number of tensors was read."""
        if name not in self._samples:
            self._samples[name] = self._read(name) if len(self._samples) < 20_000 else None
        return self._samples[name]

    def rounded(self, rounding: str) -> Values:
        """Return the same values, rounded to a dtype."""
        return self if rounding == self.rounding else Values(self._source, self._place, rounding)

    def by_content(self) -> Mapping[Sample, list[str]]:
        """Map each sample to the names with these values."""
        if self._by_content is None:
            self._by_content = {}
            for name in self._by_name():
                if (sample := self.sample(name)) is not None:
                    self._by_content.setdefault(sample, []).append(name)
        return self._by_content

    def lines(self, name: str) -> list[list[bytes]]:
        """Return the elements along each axis of a tensor, at index 0 of all other axes; none for an axis too long to
        read. The list is empty if the tensor cannot be read.
        """
        try:
            tensor = self._tensor(name)
            if tensor is None or not _is_cheap(reader := storage_reader(self._opened(), tensor.storage)):
                return []
            views = (tensor._replace(shape=(size,), stride=(step,)) for size, step in zip(tensor.shape, tensor.stride))
            width = BY_NAME[self._dtype(tensor)].itemsize
            read = [self._bytes(reader, view) if view.shape[0] <= _LINE else b"" for view in views]
            return [[data[at : at + width] for at in range(0, len(data), width)] for data in read]
        except CkptoolError:
            return []  # damage is reported when the tensor is written

    def _read(self, name: str) -> Sample | None:
        try:
            tensor = self._tensor(name)
            if tensor is None:
                return None
            reader = storage_reader(self._opened(), tensor.storage)
            if not _is_cheap(reader) and name not in self._costly:
                return None
            read = b"".join(self._bytes(reader, row) for row in _rows(tensor))
        except CkptoolError:
            return None  # damage is reported when the tensor is written
        return Sample(self._dtype(tensor), tensor.shape, read)

    def _bytes(self, reader: StorageReader, view: Tensor) -> bytes:
        parts = [view]
        between = view.shape[0] * view.stride[0] if len(view.shape) == 1 else 0
        if between * BY_NAME[view.dtype].itemsize > _WHOLE:  # a column is not read with all its rows
            places = range(view.offset, view.offset + between, view.stride[0])
            parts = [view._replace(shape=(), stride=(), offset=place) for place in places]
        data = b"".join(piece for part in parts for piece in elements(reader, part))
        return _rounded(data, view.dtype, self._dtype(view))

    def _dtype(self, tensor: Tensor) -> str:
        return self.rounding if self.rounding and tensor.dtype in _PRECISION else tensor.dtype

    def _opened(self) -> Checkpoint:
        checkpoint = self._source = as_checkpoint(self._source)
        return checkpoint

    def _by_name(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            entries = self._opened().survey.tensors_in([self._place])
            self._tensors = {entry.key: entry.tensor for entry in entries}
        return self._tensors

    def _tensor(self, name: str) -> Tensor | None:
        """Return a tensor whose elements can be read one by one, or None."""
        tensor = self._by_name().get(name)
        dtype = BY_NAME.get(tensor.dtype) if tensor is not None and tensor.kind == "dense" else None
        if tensor is None or dtype is None or dtype.packed > 1 or not tensor.storage or 0 in tensor.shape:
            return None
        return tensor


def _is_cheap(reader: StorageReader) -> bool:
    """Return whether parts of a storage can be read without reading everything before, or the storage is small."""
    body = reader.body
    return body is None or body.size <= _WHOLE or (isinstance(body.piece, Span) and not body.compressed)


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield rows at the beginning and in between, so that any permutation moves some; all rows of a small tensor."""
    shape, stride = tensor.shape, tensor.stride
    if extent(shape, stride) <= _ROW:
        yield tensor
        return
    if len(shape) < 2:
        size, step = prod(shape), stride[0] if stride else 0
        width = size if size <= _ROW else _ROW // 4
        shape, stride = (size // width, width), (step * width, step)
    count = shape[0]
    some = (0, 1, 2, 3, count // 3, count // 2 - 1, count * 2 // 3, count - 2)
    for number in range(count) if prod(tensor.shape) <= _ROW else dict.fromkeys(some):
        if 0 <= number < count:
            offset = tensor.offset + number * stride[0]
            inside = tuple(min(size, max(_ROW // prod(shape[at + 1 :]), 1)) for at, size in enumerate(shape) if at)
            yield tensor._replace(shape=inside, stride=stride[1:], offset=offset)


# -- rounding


def common_precision(ours: Iterable[str], theirs: Iterable[str]) -> str:
    """Return the coarsest floating-point dtype of two sides, to which both are rounded; "" if they have the same."""
    sides = [{dtype for dtype in side if dtype in _PRECISION} for side in (ours, theirs)]
    return "" if sides[0] == sides[1] else max(sides[0] | sides[1], key=list(_PRECISION).index)


def _rounded(data: bytes, dtype: str, rounding: str) -> bytes:
    """Return little-endian numbers as torch converts them to a coarser dtype: to the nearest, ties to even."""
    if dtype == rounding:
        return data
    numbers = unpack(f"<{len(data) // BY_NAME[dtype].itemsize}{_PRECISION[dtype]}", data)
    if rounding != "bfloat16":
        return b"".join(_packed(_PRECISION[rounding], number) for number in numbers)
    bits = unpack(f"<{len(numbers)}I", b"".join(_packed("f", number) for number in numbers))
    return pack(f"<{len(bits)}H", *((each + 0x7FFF + (each >> 16 & 1)) >> 16 & 0xFFFF for each in bits))


def _packed(code: str, number: float) -> bytes:
    try:
        return pack(f"<{code}", number)
    except OverflowError:
        return pack(f"<{code}", copysign(inf, number))
