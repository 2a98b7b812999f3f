"""``get`` for programs: what stands at a place as Python values; tensors read their numbers when they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ..base.errors import RefusedError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.paths import joined
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Ref
from ..values.elements import elements
from ..values.interpretation import numbers_in
from ..values.npy import array_of
from ..values.numeric import Number
from ..values.python_values import ContainerValue, ScalarValue, python_key, python_value
from ..values.tensor_text import interpret_for_display


class TensorValue:
    """A tensor of a checkpoint. Nothing is read before it is asked for; the file stays open as long as it lives.

    ``numpy.asarray(value)`` and ``torch.from_numpy(numpy.asarray(value))`` work without ckptool knowing of either;
    bfloat16 and float8 become float32 there, which holds every value of them.
    """

    def __init__(self, checkpoint: Checkpoint, ref: Ref, tensor: Tensor, path: str) -> None:
        self._checkpoint = checkpoint
        self._ref = ref
        #: What the pickle says of it: strides, storage, class.
        self.tensor = tensor
        self.path = path
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.location = tensor.location
        self.requires_grad = tensor.requires_grad

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"<TensorValue {self.path!r} {self.dtype} {shape} {self.location}>"

    @property
    def numel(self) -> int:
        return self.tensor.numel

    def numbers(self) -> Iterator[Number]:
        """Its elements as Python numbers, in row-major order, streamed; of a quantized tensor the integers.

        Raises RefusedError where it has none, MalformedError where the bytes are missing.
        """
        how = interpret_for_display(self._checkpoint, self._ref)
        if isinstance(how, str):
            raise RefusedError(f"{self.path or 'the tensor'}: {how}", path=self._checkpoint.path)
        if how.of in ("values", "part"):
            what = f"{self.path or 'the tensor'} is made of other tensors ({self.tensor.kind})"
            raise RefusedError(what, path=self._checkpoint.path)
        for piece in numbers_in(self._checkpoint, how):
            yield from piece

    def tolist(self) -> Any:
        """Lists in lists, or the number of a scalar, as torch's ``tolist()`` gives them."""
        return _nested(self.numbers(), self.shape)

    def tobytes(self) -> bytes:
        """Its elements as they are stored, but in row-major order and little-endian."""
        return b"".join(elements(self._checkpoint, self.tensor))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        array = array_of(self._checkpoint, self._ref, self.path)
        data = bytearray().join(array.chunks())
        return {"version": 3, "shape": array.shape, "typestr": array.descr, "data": data}


class ObjectValue:
    """An object of another class than Python's own: ``cls`` is its name, ``attributes`` what it holds.

    What it holds as a mapping or a list has names such as "[key]", the arguments it was made with "(0)".
    """

    def __init__(self, cls: str, attributes: dict[str, Any]) -> None:
        self.cls = cls
        self.attributes = attributes

    def __repr__(self) -> str:
        return f"<ObjectValue {self.cls} {len(self.attributes)} attributes>"


def value_of(checkpoint: Checkpoint, ref: Ref, path: str) -> Any:
    """What ``ref`` stands for: dicts, lists, tuples, sets and scalars as they are, a tensor as a TensorValue.

    Another object is an ObjectValue, a class or function its name. What is one object stays one; keys that need a
    module, such as dtypes, become texts, each another one.
    """
    return _Values(checkpoint).value(ref, path)


_LATER: Final = object()


class _Values:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.made: dict[Ref, Any] = {}
        #: Containers that exist and are still empty.
        self.empty: list[tuple[Any, ContainerValue, str]] = []

    def value(self, ref: Ref, path: str) -> Any:
        found = self._ready(ref, path)
        while self.empty:
            target, inside, where = self.empty.pop()
            self._fill(target, inside, where)
        return found

    def _ready(self, ref: Ref, path: str) -> Any:
        """The value, or a container that will be filled; tuples are built from the innermost."""
        work = [(ref, path)]
        while work:
            here, where = work[-1]
            if here in self.made and self.made[here] is not _LATER:
                work.pop()
                continue
            inside = python_value(self.checkpoint, here)
            if not isinstance(inside, ContainerValue) or inside.cls not in ("tuple", "frozenset"):
                self.made[here] = self._made(here, inside, where)
                work.pop()
                continue
            missing = [(one.ref, joined(where, one.step)) for one in inside.members if one.ref not in self.made]
            if missing and self.made.get(here) is not _LATER:
                self.made[here] = _LATER
                work += missing
                continue
            # A tuple that is among its own elements cannot be: a hostile pickle gets None there.
            values = [None if self.made.get(one.ref) is _LATER else self.made[one.ref] for one in inside.members]
            self.made[here] = tuple(values) if inside.cls == "tuple" else _hashed(values, frozenset)
            work.pop()
        return self.made[ref]

    def _made(self, ref: Ref, found: ScalarValue | ContainerValue | Tensor, path: str) -> Any:
        if isinstance(found, ScalarValue):
            return found.value
        if isinstance(found, Tensor):
            return TensorValue(self.checkpoint, ref, found, path)
        target: Any = [] if found.kind == "sequence" else {}
        if found.kind == "object":
            target = ObjectValue(found.cls, {})
        elif found.cls == "set":
            target = set()
        self.empty.append((target, found, path))
        return target

    def _fill(self, target: Any, found: ContainerValue, path: str) -> None:
        if isinstance(target, dict):
            keys = self._keys(found)
            target.update((key, self._ready(one.ref, joined(path, one.step))) for key, one in zip(keys, found.members))
            return
        for one in found.members:
            value = self._ready(one.ref, joined(path, one.step))
            if isinstance(target, ObjectValue):
                target.attributes[one.name] = value
            elif isinstance(target, set):
                target.update(_hashed([value], set))
            else:
                target.append(value)

    def _keys(self, found: ContainerValue) -> list[Any]:
        """The keys of a mapping, none equal to another: those that Python has without a module as they are."""
        graph = self.checkpoint.graph
        keys: list[Any] = []
        texts: list[int] = []
        for number, one in enumerate(found.members):
            try:
                keys.append(python_key(graph, one.key))
            except ValueError:
                keys.append(one.name)
                texts.append(number)
        taken = {key for number, key in enumerate(keys) if number not in set(texts)} if texts else set()
        for number in texts:
            while keys[number] in taken:
                keys[number] += "'"
            taken.add(keys[number])
        return keys


def _hashed(values: list[Any], kind: type[set[Any]] | type[frozenset[Any]]) -> Any:
    """A set of what can be in one; the rest as its text."""
    kept = []
    for value in values:
        try:
            hash(value)
        except TypeError:
            kept.append(repr(value))
        else:
            kept.append(value)
    return kind(kept)


def _nested(values: Iterator[Number], shape: tuple[int, ...]) -> Any:
    if not shape:
        return next(values)
    if len(shape) == 1:
        return [next(values) for _ in range(shape[0])]
    return [_nested(values, shape[1:]) for _ in range(shape[0])]
