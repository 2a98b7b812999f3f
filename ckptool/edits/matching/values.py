"""Find out from a few rows whether two tensors of equal shape hold the same values.

Names and shapes do not reveal another order of rows (of heads, of gate and up), a square transpose, or another
numbering. Values do, if both sides come from one training run. Where the dtypes of the sides differ, all values are
compared in the coarsest one. Arithmetic is not recognised: norms that one library stores minus 1 look like another run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import copysign, inf, prod
from struct import pack, unpack
from typing import Final, TypeAlias

from ...base.dtypes import BY_NAME
from ...base.errors import CkptoolError
from ...base.prefixes import unwrapper
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor
from ...files.sources import Span
from ...formats.opening import as_checkpoint
from ...values.elements import StorageReader, elements, storage_reader
from .names import family_of, is_dotless, old_weight_norm

#: Limits: elements read from one row, tensors whose rows are read, elements of a vector that count as a row.
_ROW: Final = 1_024
_MOST: Final = 20_000
_VECTOR: Final = 256
#: Rows and columns that are compared to detect a transpose.
_CORNER: Final = 4
#: Distinct elements needed to recognise a tensor in another place. Fewer may be equal by chance, as in norms that were
#: never trained.
_TELLING: Final = 4
#: To detect moved rows or columns, one line along each axis is read whole. Limits: tensors per family (names that
#: differ only in numbers), tensors in total, elements in a line.
_OF_FAMILY: Final = 2
_LOOKS: Final = 64
_LINE: Final = 1 << 15
#: Maximum bytes read to get a line in one piece; otherwise each element is read separately. Larger compressed or
#: computed storages are not read.
_WINDOW: Final = 16 << 20
#: Pairs of words that mean the same in different libraries.
SYNONYMS: Final = (
    ("gamma", "weight"),
    ("beta", "bias"),
    ("moving_mean", "running_mean"),
    ("moving_variance", "running_var"),
    ("moving_var", "running_var"),
)
_PLAIN: Final = dict(SYNONYMS)
_LAST: Final = ("weight", "bias")

#: Floating-point dtypes from the finest to the coarsest, with the codes by which ``struct`` knows them.
_PRECISION: Final = {"float64": "d", "float32": "f", "float16": "e", "bfloat16": ""}

#: A function that returns whether our name surely means a name in the target.
Sure: TypeAlias = Callable[[str, str], bool]


class Sample(NamedTuple):
    """A few rows of a tensor as little-endian bytes; each element has ``width`` bytes."""

    dtype: str
    shape: tuple[int, ...]
    width: int
    rows: tuple[bytes, ...]

    @property
    def is_telling(self) -> bool:
        """Whether the values differ enough from each other to identify the tensor."""
        dtype = BY_NAME[self.dtype]
        heads = {row[at : at + self.width] for row in self.rows for at in range(0, _CORNER * self.width, self.width)}
        return dtype.floating and len(heads) >= _TELLING

    @property
    def is_whole(self) -> bool:
        """Whether the rows are the whole tensor."""
        return sum(map(len, self.rows)) == prod(self.shape) * self.width

    def equals(self, other: Sample) -> bool:
        """Return whether dtype, size and rows are equal; like torch, treat one element and a scalar as
        equal in size.
        """
        same_size = self.shape == other.shape or prod(self.shape) == prod(other.shape) == 1
        return self.dtype == other.dtype and same_size and self.rows == other.rows

    def is_transpose_of(self, other: Sample) -> bool:
        """Return whether the corner of a square matrix equals the transposed corner of the other matrix."""
        if len(self.shape) != 2 or self.shape[0] != self.shape[1] or self.dtype != other.dtype:
            return False
        ours, theirs = self._corner(), other._corner()
        return len(ours) > 1 and ours == [list(column) for column in zip(*theirs)]

    def _corner(self) -> list[list[bytes]]:
        size = min(_CORNER, self.shape[0])
        return [[row[at * self.width :][: self.width] for at in range(size)] for row in self.rows[:size]]


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
            self._samples[name] = self._read(name) if len(self._samples) < _MOST else None
        return self._samples[name]

    def rounded(self, rounding: str) -> Values:
        """Return the same values, rounded to a dtype."""
        return self if rounding == self.rounding else Values(self._source, self._place, rounding)

    def by_content(self) -> Mapping[Sample, list[str]]:
        """Map each sample that identifies its tensor to the names with these values."""
        if self._by_content is None:
            self._by_content = {}
            for name in self._tensor_names():
                sample = self.sample(name)
                if sample is not None and sample.is_telling:
                    self._by_content.setdefault(sample, []).append(name)
        return self._by_content

    def lines(self, name: str) -> list[list[bytes]]:
        """Return the elements along each axis of a tensor, at index 0 of all other axes; none for an axis too long to
        read.

        The list is empty if the tensor cannot be read.
        """
        try:
            tensor = self._tensor(name)
            return [self._line(tensor, axis) for axis in range(len(tensor.shape))] if tensor is not None else []
        except CkptoolError:
            return []  # damage is reported when the tensor is written

    def piece(self, name: str, at: Sequence[int], begin: int, count: int) -> list[bytes]:
        """Return ``count`` elements along the last axis from ``begin`` on, at an index of the other axes; an empty list
        if they cannot be read.
        """
        try:
            tensor = self._tensor(name)
            if tensor is None or not _is_cheap(reader := storage_reader(self._opened(), tensor.storage)):
                return []
            offset = tensor.offset + sum(index * step for index, step in zip((*at, begin), tensor.stride))
            view = tensor._replace(shape=(count,), stride=tensor.stride[-1:], offset=offset)
            return self._elements(reader, view)
        except CkptoolError:
            return []  # damage is reported when the tensor is written

    def _line(self, tensor: Tensor, axis: int) -> list[bytes]:
        size, step = tensor.shape[axis], tensor.stride[axis]
        reader = storage_reader(self._opened(), tensor.storage)
        if size > _LINE or not _is_cheap(reader):
            return []
        view = tensor._replace(shape=(size,), stride=(step,))
        if size * step * BY_NAME[tensor.dtype].itemsize <= _WINDOW:
            return self._elements(reader, view)
        one = tensor._replace(shape=(), stride=())
        places = range(tensor.offset, tensor.offset + size * step, step)
        return [element for place in places for element in self._elements(reader, one._replace(offset=place))]

    def _elements(self, reader: StorageReader, view: Tensor) -> list[bytes]:
        dtype = self._dtype(view)
        return cut_elements(_rounded(b"".join(elements(reader, view)), view.dtype, dtype), BY_NAME[dtype].itemsize)

    def _dtype(self, tensor: Tensor) -> str:
        """Return the dtype in which the values of a tensor are compared."""
        return self.rounding if self.rounding and tensor.dtype in _PRECISION else tensor.dtype

    def _opened(self) -> Checkpoint:
        checkpoint = self._source = as_checkpoint(self._source)
        return checkpoint

    def _tensor_names(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            entries = self._opened().survey.tensors_in([self._place])
            self._tensors = {entry.key: entry.tensor for entry in entries}
        return self._tensors

    def _tensor(self, name: str) -> Tensor | None:
        """Return a tensor whose elements can be read one by one, or None."""
        tensor = self._tensor_names().get(name)
        dtype = BY_NAME.get(tensor.dtype) if tensor is not None and tensor.kind == "dense" else None
        if tensor is None or dtype is None or dtype.packed > 1 or not tensor.storage or 0 in tensor.shape:
            return None
        return tensor

    def _read(self, name: str) -> Sample | None:
        try:
            tensor = self._tensor(name)
            if tensor is None:
                return None
            reader = storage_reader(self._opened(), tensor.storage)
            if not _is_cheap(reader) and name not in self._costly:
                return None
            rows = tuple(b"".join(self._elements(reader, row)) for row in _rows(tensor))
        except CkptoolError:
            return None  # damage is reported when the tensor is written
        dtype = self._dtype(tensor)
        return Sample(dtype, tensor.shape, BY_NAME[dtype].itemsize, rows)


def _is_cheap(reader: StorageReader) -> bool:
    """Return whether parts of a storage can be read without reading everything before, or the storage is small."""
    body = reader.body
    return body is None or body.size <= _WINDOW or (isinstance(body.piece, Span) and not body.compressed)


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of rows at the beginning and in between. Any permutation of heads or halves moves some of them."""
    shape, stride = tensor.shape, tensor.stride
    whole = prod(shape) <= _ROW
    if len(shape) < 2 and whole:
        shape, stride = (1, *shape), (0, *stride)
    elif len(shape) == 1:
        shape, stride = (shape[0] // _VECTOR, _VECTOR), (stride[0] * _VECTOR, stride[0])
    count = shape[0]
    some = (0, 1, 2, 3, count // 3, count // 2 - 1, count * 2 // 3, count - 2)
    for number in range(count) if whole else dict.fromkeys(some):
        if 0 <= number < count:
            offset = tensor.offset + number * stride[0]
            yield tensor._replace(shape=_beginning(shape[1:]), stride=stride[1:], offset=offset)


def _beginning(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the first elements of a view, limited to about one row's maximum."""
    kept = []
    for axis, size in enumerate(shape):
        kept.append(min(size, max(_ROW // prod(shape[axis + 1 :]), 1)))
    return tuple(kept)


def names_agree(name: str, other: str) -> bool:
    """Return whether two names agree segment by segment, apart from a prefix, wrappers and known synonyms.

    A prefix may be added or removed. It may also be replaced by another, if neither has numbers and at least two equal
    segments follow. A name of averaged weights without dots agrees with the name that it stands for, and names that
    differ only in dots agree, such as ``norm.1`` and ``norm1`` of torchvision's DenseNet.
    """
    if is_dotless(name, other):
        return True
    ours, theirs = (_segments(text) for text in (name, other))
    end = next((at for at, (a, b) in enumerate(zip(ours[::-1], theirs[::-1])) if a != b), min(len(ours), len(theirs)))
    heads = ours[: len(ours) - end], theirs[: len(theirs) - end]
    if not all(heads):
        return end > 0
    return end > 1 and heads[0][0] != heads[1][0] and not any(part.isdigit() for head in heads for part in head)


def _segments(name: str) -> list[str]:
    parts = old_weight_norm(unwrapper([name])(name)).split(".")
    # A live PEFT model has the name of the adapter after each part of it: lora_A.default.weight.
    parts = [part for before, part in zip(("", *parts), parts) if not before.startswith("lora_") or part in _LAST]
    return [*parts[:-1], _PLAIN.get(parts[-1], parts[-1])]


class Agreement(NamedTuple):
    """What the values say of a mapping of names: the number of tensors that are equal on both sides, leaving out
    constants, which prove nothing, and the names in the target whose values contradict the mapping.
    """

    equal: int
    contradicted: tuple[str, ...]


class Pairing:
    """Decides whether our names surely mean names in the target; ``target`` is None if its values are unknown."""

    def __init__(self, own: Values, target: Values | None) -> None:
        self._own, self._target = own, target
        self._rearranged: dict[tuple[str, str], bool] = {}
        self._looks: dict[str, list[bool]] = {}

    def sure(self, name: str, other: str) -> bool:
        """Return whether a few rows are equal, or the names agree and no values contradict them.

        Equal constants count only if other tensors show that both sides come from one training run.
        """
        samples = self._samples(name, other)
        if samples is not None and samples[0].equals(samples[1]) and (samples[0].is_telling or self._is_related()):
            return True
        return names_agree(name, other) and not self.rearranged(name, other)

    def agreement(self, pairs: Iterable[tuple[str, str]]) -> Agreement:
        """Compare our names with the names that they get in the target."""
        equal, contradicted = 0, []
        for name, other in pairs:
            samples = self._samples(name, other)
            equal += samples is not None and samples[0].is_telling and samples[0].equals(samples[1])
            contradicted += [other] if self.rearranged(name, other) else []
        return Agreement(equal, tuple(contradicted))

    def rearranged(self, name: str, other: str) -> bool:
        """Return whether our tensor has the target's values in another order, or the values of another tensor there."""
        pair = (name, other)
        if pair not in self._rearranged:
            samples = self._samples(name, other)
            differ = samples is not None and samples[0].dtype == samples[1].dtype and not samples[0].equals(samples[1])
            self._rearranged[pair] = differ and samples is not None and self._contradicts(pair, *samples)
        return self._rearranged[pair]

    def _samples(self, name: str, other: str) -> tuple[Sample, Sample] | None:
        ours = self._own.sample(name) if self._target is not None else None
        theirs = self._target.sample(other) if self._target is not None and ours is not None else None
        return (ours, theirs) if ours is not None and theirs is not None else None

    def _contradicts(self, pair: tuple[str, str], ours: Sample, theirs: Sample) -> bool:
        """Return whether two samples that differ come from one training run, so that values are in the wrong place."""
        if ours.is_transpose_of(theirs):
            return True
        if not ours.is_telling or self._target is None:
            return False
        if ours.is_whole and theirs.is_whole:
            if _same_elements(*(cut_elements(b"".join(side.rows), side.width) for side in (ours, theirs))):
                return True
        elif self._is_related() and self._lines_moved(*pair):
            return True
        return self._is_elsewhere(pair[0], ours)

    def _lines_moved(self, name: str, other: str) -> bool:
        """Return whether lines of two tensors moved, judging from the few members of their family that are read."""
        assert self._target is not None
        looks = self._looks.setdefault(family_of(name), [])
        if True not in looks and len(looks) < _OF_FAMILY and sum(map(len, self._looks.values())) < _LOOKS:
            looks.append(_lines_moved(self._own.lines(name), self._target.lines(other)))
        return True in looks  # all layers of a family are arranged alike

    def _is_elsewhere(self, name: str, ours: Sample) -> bool:
        """Return whether the target has these values under a name that agrees with no equal tensor of ours."""
        assert self._target is not None
        same = [own for own in self._own.by_content().get(ours, ()) if own != name]
        there = self._target.by_content().get(ours, ())
        return any(not any(names_agree(own, other) for own in same) for other in there)

    def _is_related(self) -> bool:
        """Return whether any of our tensors can be recognised in the target."""
        assert self._target is not None
        return not self._own.by_content().keys().isdisjoint(self._target.by_content())


def _lines_moved(ours: Sequence[list[bytes]], theirs: Sequence[list[bytes]]) -> bool:
    """Return whether a line of one side is on the other with its elements in another order, or along another axis."""
    for (axis, one), (other_axis, other) in product(enumerate(ours), enumerate(theirs)):
        if axis == other_axis and _same_elements(one, other):
            return True
        if axis != other_axis and one == other and len(set(one)) >= _TELLING:
            return True
    return False


def _same_elements(one: Sequence[bytes], other: Sequence[bytes]) -> bool:
    """Return whether two sides have the same elements in different orders."""
    if one == other or len(one) != len(other):
        return False
    return len(set(one)) >= _TELLING and sorted(one) == sorted(other)


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


def cut_elements(data: bytes, width: int) -> list[bytes]:
    """Split data into elements of ``width`` bytes."""
    return [data[at : at + width] for at in range(0, len(data), width)]
