"""The value at a path as Python values. Tensors read their numbers on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ..base.errors import RefusedError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.paths import joined
from ..checkpoint.tensors import Tensor
from ..edits.lookup import Located, lookup
from ..edits.sanitize.numpy_values import with_plain_numpy
from ..files.sources import FilePath
from ..formats.opening import open_checkpoint
from ..pickles.nodes import Ref
from ..values.elements import elements, storage_reader
from ..values.interpretation import numbers_in
from ..values.npy import array_of
from ..values.numeric import Number
from ..values.python_values import ContainerValue, ScalarValue, python_key, python_value
from ..values.tensor_text import interpret_for_display, shape_text


class TensorValue:
    """A tensor of a checkpoint. Its numbers are read on demand; the file stays open as long as it lives.

    ``numpy.asarray(value)`` and ``torch.from_numpy(numpy.asarray(value))`` work, although ckptool imports neither;
    bfloat16 and float8 become float32 there, which has all their values.
    """

    def __init__(self, checkpoint: Checkpoint, ref: Ref, tensor: Tensor, path: str) -> None:
        self._checkpoint = checkpoint
        self._ref = ref
        #: Its description in the pickle: strides, storage, class.
        self.tensor = tensor
        self.path = path
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.location = tensor.location
        self.requires_grad = tensor.requires_grad

    def __repr__(self) -> str:
        return f"<TensorValue {self.path!r} {self.dtype} {shape_text(self.shape)} {self.location}>"

    @property
    def numel(self) -> int:
        return self.tensor.numel

    def numbers(self) -> Iterator[Number]:
        """Yield its elements as Python numbers, in row-major order; those of a quantized tensor are its integers.

        Raises RefusedError where it has none, MalformedError where the bytes are missing.
        """
        reading, name = interpret_for_display(self._checkpoint, self._ref), self.path or "the tensor"
        if isinstance(reading, str):
            raise RefusedError(f"{name}: {reading}", path=self._checkpoint.path)
        if reading.of in ("values", "part"):
            raise RefusedError(f"{name} is made of other tensors ({self.tensor.kind})", path=self._checkpoint.path)
        for piece in numbers_in(reading):
            yield from piece

    def tolist(self) -> Any:
        """Return lists in lists, or the number of a scalar, as torch's ``tolist()`` does."""
        return _nested(self.numbers(), self.shape)

    def tobytes(self) -> bytes:
        """Return its elements as they are stored, but in row-major order and little-endian."""
        return b"".join(elements(storage_reader(self._checkpoint, self.tensor.storage), self.tensor))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        array = array_of(self._checkpoint, self._ref, self.path)
        data = bytearray().join(array.elements.chunks())
        return {"version": 3, "shape": array.shape, "typestr": array.descr, "data": data}


class ObjectValue:
    """An object of a class that is not built in: the name of the class, and the attributes.

    Its members as a mapping or list have names such as "[key]", the arguments of its constructor such as "(0)".
    """

    def __init__(self, cls: str, attributes: dict[str, Any]) -> None:
        self.cls = cls
        self.attributes = attributes

    def __repr__(self) -> str:
        return f"<ObjectValue {self.cls} {len(self.attributes)} attributes>"


def find_value(checkpoint: Checkpoint, key: str) -> tuple[Checkpoint, Located]:
    """Return the checkpoint with NumPy's values made plain, and the place in it that ``key`` leads to.

    Raises UnreadableError where the pickle means something to torch that ckptool does not follow, TargetError where
    there is nothing at ``key``.
    """
    checkpoint = with_plain_numpy(checkpoint)
    _ = checkpoint.survey  # raises for what is not followed
    return checkpoint, lookup(checkpoint, key)


def value_of(checkpoint: Checkpoint, ref: Ref, path: str) -> Any:
    """Return the value at ``ref``: dicts, lists, tuples, sets and scalars as they are, a tensor as a TensorValue.

    Another object is an ObjectValue, a class or function its name. Shared objects stay shared; keys that need a
    module, such as dtypes, become distinct strings.
    """
    return _Values(checkpoint).value(ref, path)


_PENDING: Final = object()


class _Values:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.values: dict[Ref, Any] = {}
        #: Containers that are still empty.
        self.empty: list[tuple[Any, ContainerValue, str]] = []

    def value(self, ref: Ref, path: str) -> Any:
        value = self._ready(ref, path)
        while self.empty:
            self._fill(*self.empty.pop())
        return value

    def _ready(self, ref: Ref, path: str) -> Any:
        """Return the value, or a container still to be filled; tuples are built from the innermost."""
        work = [(ref, path)]
        while work:
            here, where = work[-1]
            if here in self.values and self.values[here] is not _PENDING:
                work.pop()
                continue
            inside = python_value(self.checkpoint, here)
            if not isinstance(inside, ContainerValue) or inside.cls not in ("tuple", "frozenset"):
                self.values[here] = self._convert(here, inside, where)
                work.pop()
                continue
            missing = [
                (member.ref, joined(where, member.step)) for member in inside.members if member.ref not in self.values
            ]
            if missing and self.values.get(here) is not _PENDING:
                self.values[here] = _PENDING
                work += missing
                continue
            # A tuple cannot be among its own elements: a hostile pickle gets None there.
            values = [
                None if self.values.get(member.ref) is _PENDING else self.values[member.ref]
                for member in inside.members
            ]
            self.values[here] = tuple(values) if inside.cls == "tuple" else _hashed(values, frozenset)
            work.pop()
        return self.values[ref]

    def _convert(self, ref: Ref, value: ScalarValue | ContainerValue | Tensor, path: str) -> Any:
        if isinstance(value, ScalarValue):
            return value.value
        if isinstance(value, Tensor):
            return TensorValue(self.checkpoint, ref, value, path)
        target: Any = [] if value.kind == "sequence" else {}
        if value.kind == "object":
            target = ObjectValue(value.cls, {})
        elif value.cls == "set":
            target = set()
        self.empty.append((target, value, path))
        return target

    def _fill(self, target: Any, container: ContainerValue, path: str) -> None:
        if isinstance(target, dict):
            keys = self._keys(container)
            target.update(
                (key, self._ready(member.ref, joined(path, member.step)))
                for key, member in zip(keys, container.members)
            )
            return
        for member in container.members:
            value = self._ready(member.ref, joined(path, member.step))
            if isinstance(target, ObjectValue):
                target.attributes[member.name] = value
            elif isinstance(target, set):
                target.update(_hashed([value], set))
            else:
                target.append(value)

    def _keys(self, container: ContainerValue) -> list[Any]:
        """Return the keys of a mapping, all distinct; those that need a module are strings."""
        graph = self.checkpoint.graph
        keys: list[Any] = []
        texts: list[int] = []
        for number, member in enumerate(container.members):
            try:
                keys.append(python_key(graph, member.key))
            except ValueError:
                keys.append(member.name)
                texts.append(number)
        as_text = set(texts)
        taken = {key for number, key in enumerate(keys) if number not in as_text} if texts else set()
        for number in texts:
            while keys[number] in taken:
                keys[number] += "'"
            taken.add(keys[number])
        return keys


def _hashed(values: list[Any], cls: type[set[Any]] | type[frozenset[Any]]) -> Any:
    """Return a set of the values; those that cannot be in member as their ``repr``."""
    kept = []
    for value in values:
        try:
            hash(value)
        except TypeError:
            kept.append(repr(value))
        else:
            kept.append(value)
    return cls(kept)


def _nested(values: Iterator[Number], shape: tuple[int, ...]) -> Any:
    if not shape:
        return next(values)
    if len(shape) == 1:
        return [next(values) for _ in range(shape[0])]
    return [_nested(values, shape[1:]) for _ in range(shape[0])]


def get(source: FilePath | Checkpoint, key: str) -> Any:
    """Return the value at ``key``, a path as ``inspect`` prints it ("" or "." for the whole file), as Python values.

    Scalars, bytes, dicts, lists, tuples and sets are Python's own. A tensor is a ``TensorValue``: dtype, shape,
    location, and ``tolist()``, ``tobytes()``, ``numbers()``, ``numpy.asarray(value)``, which read from the file. An
    object of another class is an ``ObjectValue`` with its attributes. Nothing is run, and neither torch nor NumPy is
    needed. Raises TargetError where there is nothing at ``key``.
    """
    # Tensors read from the file later: it is closed when the last of them goes.
    checkpoint, place = find_value(source if isinstance(source, Checkpoint) else open_checkpoint(source), key)
    return value_of(checkpoint, place.ref, place.path)
