"""Whether two tensors of one shape hold the same values, by a few rows of each.

Names and shapes do not show the order of rows (of heads, of gate and up), a square transpose, or another numbering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME
from ...base.errors import CkptoolError
from ...base.prefixes import unwrapper
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor
from ...formats.opening import as_checkpoint
from ...values.elements import elements, storage_reader

#: The most elements to read of one row, the most tensors to read rows of, and how many elements of a vector count as
#: a row.
_ROW: Final = 1_024
_MOST: Final = 20_000
_VECTOR: Final = 256
#: Rows and columns to compare with a possible transpose.
_CORNER: Final = 4
#: What other libraries call the same thing.
SYNONYMS: Final = (
    ("gamma", "weight"),
    ("beta", "bias"),
    ("moving_mean", "running_mean"),
    ("moving_variance", "running_var"),
    ("moving_var", "running_var"),
)
_PLAIN: Final = dict(SYNONYMS)

#: Tells whether our name surely means a name of the target.
Sure = Callable[[str, str], bool]


class Sample(NamedTuple):
    """A few rows of a tensor as little-endian bytes, with elements of ``width`` bytes."""

    dtype: str
    shape: tuple[int, ...]
    width: int
    rows: tuple[bytes, ...]

    def equals(self, other: Sample) -> bool:
        """Return whether dtype, size and these rows are equal; torch loads one element where a scalar is wanted."""
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
    """Samples of the tensors of one state dict, each read when it is first asked for.

    ``source`` is a path, which is opened then, or an open checkpoint; ``place`` is the path of the state dict.
    """

    def __init__(self, source: Checkpoint | str, place: str) -> None:
        self._source, self._place = source, place
        self._tensors: dict[str, Tensor] | None = None
        self._samples: dict[str, Sample | None] = {}

    def sample(self, name: str) -> Sample | None:
        """Return a few rows of a tensor; None if there are none, or if very many tensors were read before."""
        if name not in self._samples:
            self._samples[name] = self._read(name) if len(self._samples) < _MOST else None
        return self._samples[name]

    def _read(self, name: str) -> Sample | None:
        try:
            checkpoint = self._source = as_checkpoint(self._source)
            if self._tensors is None:
                entries = checkpoint.survey.tensors_in([self._place])
                self._tensors = {entry.key: entry.tensor for entry in entries}
            tensor = self._tensors.get(name)
            dtype = BY_NAME.get(tensor.dtype) if tensor is not None and tensor.kind == "dense" else None
            if tensor is None or dtype is None or dtype.packed > 1 or not tensor.storage or 0 in tensor.shape:
                return None
            reader = storage_reader(checkpoint, tensor.storage)
            rows = tuple(b"".join(elements(reader, row)) for row in _rows(tensor))
        except CkptoolError:
            return None  # damage is reported where the tensor is written
        return Sample(tensor.dtype, tensor.shape, dtype.itemsize, rows)


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of rows at the beginning and in between: a permutation of heads or halves moves some of them."""
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
    """Return the shape of the first elements of a view, about as many as are read of a row."""
    kept = []
    for axis, size in enumerate(shape):
        kept.append(min(size, max(_ROW // prod(shape[axis + 1 :]), 1)))
    return tuple(kept)


def names_agree(name: str, other: str) -> bool:
    """Return whether two names agree segment by segment, apart from a prefix, wrappers and known synonyms.

    A prefix is added, removed, or replaced by another without numbers before two equal segments or more.
    """
    ours, theirs = (_segments(text) for text in (name, other))
    end = next((at for at, (a, b) in enumerate(zip(ours[::-1], theirs[::-1])) if a != b), min(len(ours), len(theirs)))
    heads = ours[: len(ours) - end], theirs[: len(theirs) - end]
    if not all(heads):
        return end > 0
    return end > 1 and heads[0][0] != heads[1][0] and not any(part.isdigit() for head in heads for part in head)


def _segments(name: str) -> list[str]:
    parts = unwrapper([name])(name).split(".")
    return [*parts[:-1], _PLAIN.get(parts[-1], parts[-1])]


def sure_of(own: Values, target: Values | None) -> Sure:
    """Return a function that tells whether our name surely means one of the target.

    It does if a few rows are equal, or if the names agree and no transpose is seen.
    """

    def sure(name: str, other: str) -> bool:
        ours = own.sample(name) if target is not None else None
        theirs = target.sample(other) if target is not None and ours is not None else None
        if ours is not None and theirs is not None:
            return ours.equals(theirs) or (names_agree(name, other) and not ours.is_transpose_of(theirs))
        return names_agree(name, other)

    return sure
