"""The values of a checkpoint as Python objects: made at once, or as views of mappings and lists, read on access."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from reprlib import Repr
from typing import Any, Final, overload

from ..base.records import NamedTuple
from ..base.text import pluralize, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import (
    callable_name,
    called_constant,
    class_name,
    device_text,
    key_identity,
    mapped_name,
    mapping,
)
from ..checkpoint.paths import as_children, extra_children, joined, key_text, sequence
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Buffer, ByteArray, Call, Dict, Extension, Global, Graph, Persistent, Ref
from .lazy_tensor import TensorValue

#: Mappings that are shown as a dict, whatever else is written with them.
_DICTS: Final = frozenset(("dict", "OrderedDict", "collections.defaultdict", "collections.Counter"))
#: Arguments that are the class itself, by the function that creates the object.
_CLASS_ARGUMENTS: Final = {"copyreg.__newobj__": ("(0)",), "copyreg._reconstructor": ("(0)", "(1)", "(2)")}


class ScalarValue(NamedTuple):
    """A value that contains no others. ``type`` is its type as a word.

    For a class or function ``type`` is "global" and ``value`` its name; for a storage without a tensor ``type`` is
    "storage" and ``value`` a description.
    """

    type: str
    value: bool | int | float | complex | str | bytes | None


def scalar_value(graph: Graph, ref: Ref) -> ScalarValue | None:
    """Return the value at a reference, or None for a container, tensor or storage."""
    node = graph.nodes[ref]
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return ScalarValue(class_name(graph, ref), node)
    if isinstance(node, Call):
        device = device_text(graph, ref)
        if device is not None:
            return ScalarValue("torch.device", device)
        value = called_constant(graph, ref)
        return None if value is None else ScalarValue(type(value).__name__, value)
    if isinstance(node, Global):
        return ScalarValue("global", mapped_name(node))
    if isinstance(node, ByteArray):
        return ScalarValue("bytearray", node.data)
    if isinstance(node, Extension):
        return ScalarValue("extension", node.code)
    return ScalarValue("buffer", None) if isinstance(node, Buffer) and node.inner < 0 else None


class ValueMember(NamedTuple):
    """A value inside another: a name for display, the ``step`` to it in a path, its reference, and its ``key``.

    ``key`` is the reference of the key in a mapping, -1 elsewhere.
    """

    name: str
    step: str
    ref: Ref
    key: Ref = -1


class ContainerValue(NamedTuple):
    """A value that contains others.

    ``kind`` is "mapping", "sequence" or "object"; ``cls`` is the class. The names of ``members`` are unique: keys as
    strings in a mapping, indices in brackets in a sequence. In an object they are attributes, keys and indices in
    brackets for its entries and elements, and "(number)" for the arguments it was made with.
    """

    kind: str
    cls: str
    members: Sequence[ValueMember]


class _SequenceMembers(Sequence[ValueMember]):
    """The members of a sequence, each made on demand, because there may be millions. Slices are not supported."""

    def __init__(self, refs: Sequence[Ref]) -> None:
        self.refs = refs

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, index: int) -> ValueMember:  # type: ignore[override]
        step = f"[{index}]"
        return ValueMember(step, step, self.refs[index])


def python_value(checkpoint: Checkpoint, ref: Ref) -> ScalarValue | ContainerValue | Tensor:
    """Return the value at a reference."""
    graph = checkpoint.graph
    node = graph.nodes[ref]
    if isinstance(node, Buffer | Extension):
        return ScalarValue("global", class_name(graph, ref))
    scalar = scalar_value(graph, ref)
    if scalar is not None:
        return scalar
    inside = sequence(graph, ref)
    if inside is not None:
        cls = class_name(graph, ref).rpartition(".")[2]
        return ContainerValue("sequence", "tuple" if cls == "Size" else cls, _SequenceMembers(inside))
    if isinstance(node, Dict):
        return ContainerValue("mapping", "dict", _entries(graph, mapping(graph, ref) or ()))
    if isinstance(node, Persistent):
        storage = checkpoint.survey.reader.storage(ref)
        if storage is None:
            return ScalarValue("global", callable_name(graph, ref) or "an object outside of the pickle")
        words = f"{storage.key}: {storage.cls}, {storage.nbytes:,} bytes, {storage.location}"
        return ScalarValue("storage", words)
    assert isinstance(node, Call), "everything else is above"
    tensor = checkpoint.survey.reader.tensor(ref)
    if tensor is not None:
        return tensor
    cls, items = class_name(graph, ref), mapping(graph, ref)
    if items is not None and cls in _DICTS:
        return ContainerValue("mapping", cls.rpartition(".")[2], _entries(graph, items))
    entries = as_children(graph, items or ())
    hidden = _CLASS_ARGUMENTS.get(callable_name(graph, node.func), ())
    members = [
        ValueMember(child.step.removeprefix("."), *child)
        for child in (*extra_children(graph, ref, entries), *entries)
        if child.step not in hidden and (child.key >= 0 or not child.step.startswith("(key "))
    ]
    # Attributes come first, then entries and elements, then arguments.
    members.sort(key=lambda member: {"[": 1, "(": 2 - 2 * member.name.startswith("(state")}.get(member.name[:1], 0))
    return ContainerValue("object", cls, members)


def _entries(graph: Graph, items: Sequence[tuple[Ref, Ref]]) -> list[ValueMember]:
    """Return the members of a mapping; a key that is not a string gets another name if a string is spelled alike."""
    nodes = graph.nodes
    taken: set[str] = {name for key, _ in items if type(name := nodes[key]) is str}
    members = []
    for step, ref, key in as_children(graph, items):
        name = nodes[key]
        if type(name) is not str:
            name = key_text(graph, key) if not step.startswith("[#") else step
            while name in taken:
                name += "'"
            taken.add(name)
        members.append(ValueMember(name, step, ref, key))
    return members


def python_key(graph: Graph, ref: Ref) -> Hashable:
    """Return a key as a Python value; raise ValueError if Python needs a module to have it."""
    node = graph.nodes[ref]
    if isinstance(node, float) and node != node:
        return float("nan")  # a new object, so that several NaNs can be keys
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return node
    if isinstance(node, Call):
        value = called_constant(graph, ref)
        if value is not None:
            return value
    identity, inside = key_identity(graph, ref), sequence(graph, ref)
    if not isinstance(identity, tuple) or identity[0] not in ("tuple", "frozenset") or inside is None:
        raise ValueError
    parts = [python_key(graph, part) for part in inside]
    return frozenset(parts) if identity[0] == "frozenset" else tuple(parts)


def members_by_key(graph: Graph, container: ContainerValue) -> dict[Hashable, ValueMember]:
    """Return the members of a mapping by keys as Python values; keys that need a module are strings."""
    keys: list[Hashable] = []
    texts: list[int] = []
    taken: set[Hashable] = set()
    for number, member in enumerate(container.members):
        try:
            keys.append(python_key(graph, member.key))
            taken.add(keys[-1])
        except ValueError:
            keys.append(member.name)
            texts.append(number)
    for number in texts:
        name = str(keys[number])
        while name in taken:
            name += "'"
        keys[number] = name
        taken.add(name)
    return dict(zip(keys, container.members))


#: Maximum number of members that the ``repr`` of a view shows.
_SHOWN: Final = 8
_REPR: Final = Repr()
_REPR.maxstring = 80


class _View:
    """The members of a container; the value of each is made at its first use."""

    def __init__(self, checkpoint: Checkpoint, members: Any, path: str) -> None:
        self._checkpoint = checkpoint
        self._members = members
        self._values: dict[Hashable, Any] = {}
        #: The path in the file, spelled as in ``inspect``.
        self.path = path

    def __len__(self) -> int:
        return len(self._members)

    def _value(self, key: Hashable) -> Any:
        if key not in self._values:
            member = self._members[key]
            where = joined(self.path, member.step)
            self._values[key] = value_of(self._checkpoint, member.ref, where, lazily=True)
        return self._values[key]


class MappingView(_View, Mapping[Any, Any]):
    """A read-only mapping in a checkpoint. Its values are made when they are read: see ``value_of``.

    The keys have the types in the file: 0 and "0" are two keys.

    >>> state = ckptool.open("training.pth")["state_dict"]
    >>> len(state), "module.head.bias" in state
    (14, True)
    >>> state["module.head.bias"]
    <TensorValue 'state_dict["module.head.bias"]' float32 5 cuda:0>
    """

    def __getitem__(self, key: Hashable) -> Any:
        return self._value(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members  # Mapping's own method would make the value

    def __repr__(self) -> str:
        shown = [key for key, _ in zip(self, range(_SHOWN))]
        return _enclosed("{}", [f"{_REPR.repr(key)}: {_short(self[key])}" for key in shown], len(self))

    def _ipython_key_completions_(self) -> list[Any]:
        return list(self)


class ListView(_View, Sequence[Any]):
    """A read-only list in a checkpoint. Its elements are made when they are read: see ``value_of``.

    >>> groups = ckptool.open("training.pth")["optimizer"]["param_groups"]
    >>> len(groups), groups[0]["lr"]
    (1, 0.001)
    """

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return self._value(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | ListView) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return _enclosed("[]", [_short(value) for value in self[:_SHOWN]], len(self))


class ObjectValue(Mapping[str, Any]):
    """An object whose class is not built in: ``cls`` is the name of the class, the mapping has its attributes.

    Entries and elements of the object have names such as "[key]", arguments of its constructor names such as "(0)".

    >>> args = ckptool.open("args.pth")["args"]
    >>> args
    <ObjectValue argparse.Namespace, 5 attributes>
    >>> args["lr"]
    0.01
    """

    def __init__(self, cls: str, attributes: Mapping[str, Any]) -> None:
        self.cls = cls
        self.attributes = attributes

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.attributes)

    def __len__(self) -> int:
        return len(self.attributes)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<ObjectValue {self.cls}, {pluralize(len(self), 'attribute')}>"


def _enclosed(brackets: str, shown: Iterable[str], total: int) -> str:
    texts = [*shown, *([f"... {total - _SHOWN:,} more"] if total > _SHOWN else [])]
    return brackets[0] + ", ".join(texts) + brackets[1]


def _short(value: Any) -> str:
    """Return the ``repr`` of a member of a view, without its own members."""
    if isinstance(value, TensorValue):
        return f"<{value.dtype} {shape_text(value.shape)} {value.device}>"
    if isinstance(value, MappingView | ListView):
        return f"<{pluralize(len(value), 'entry' if isinstance(value, MappingView) else 'element')}>"
    return repr(value) if isinstance(value, ObjectValue) else _REPR.repr(value)


def contents(checkpoint: Checkpoint) -> MappingView:
    """Return the members of the root by key; by index for a list, by name for an object's attributes.

    The mapping is empty if the root is a single value.
    """
    root = python_value(checkpoint, checkpoint.graph.root)
    return MappingView(checkpoint, _by_key(checkpoint, root) if isinstance(root, ContainerValue) else {}, "")


def _by_key(checkpoint: Checkpoint, container: ContainerValue) -> dict[Any, ValueMember]:
    if container.kind == "mapping":
        return members_by_key(checkpoint.graph, container)
    if container.kind == "object":
        return {member.name: member for member in container.members}
    return {place: container.members[place] for place in range(len(container.members))}


def value_of(checkpoint: Checkpoint, ref: Ref, path: str, *, lazily: bool = False) -> Any:
    """Return the value at ``ref``: dicts, lists, tuples, sets and scalars as such, a tensor as a TensorValue.

    Another object is an ObjectValue, a class or function its name. Shared objects stay shared. Keys that need a module,
    such as dtypes, become distinct strings. With ``lazily`` mappings are MappingViews, lists ListViews and sets
    frozensets.
    """
    return _Values(checkpoint, lazily).value(ref, path)


_PENDING: Final = object()


class _Values:
    """Makes values from the innermost, without recursion. With ``lazily`` mappings, lists and objects are views."""

    def __init__(self, checkpoint: Checkpoint, lazily: bool) -> None:
        self.checkpoint = checkpoint
        self.lazily = lazily
        #: Containers that must be made with their members, because they cannot be filled later.
        self.fixed = frozenset(("tuple", "frozenset", *(("set",) if lazily else ())))
        self.values: dict[Ref, Any] = {}
        #: Containers that are still empty.
        self.empty: list[tuple[Any, ContainerValue, str]] = []

    def value(self, ref: Ref, path: str) -> Any:
        value = self._ready(ref, path)
        while self.empty:
            self._fill(*self.empty.pop())
        return value

    def _ready(self, ref: Ref, path: str) -> Any:
        """Return the value, or a container to be filled later; tuples are built from the innermost."""
        work = [(ref, path)]
        while work:
            here, where = work[-1]
            if here in self.values and self.values[here] is not _PENDING:
                work.pop()
                continue
            inside = python_value(self.checkpoint, here)
            if not isinstance(inside, ContainerValue) or inside.cls not in self.fixed:
                self.values[here] = self._convert(here, inside, where)
                work.pop()
                continue
            missing = [(item.ref, joined(where, item.step)) for item in inside.members if item.ref not in self.values]
            if missing and self.values.get(here) is not _PENDING:
                self.values[here] = _PENDING
                work += missing
                continue
            # A tuple cannot be among its own elements: a hostile pickle gets None there.
            values = [self.values[member.ref] for member in inside.members]
            values = [None if value is _PENDING else value for value in values]
            self.values[here] = tuple(values) if inside.cls == "tuple" else _hashed(values, frozenset)
            work.pop()
        return self.values[ref]

    def _convert(self, ref: Ref, value: ScalarValue | ContainerValue | Tensor, path: str) -> Any:
        if isinstance(value, ScalarValue):
            return value.value
        if isinstance(value, Tensor):
            return TensorValue(self.checkpoint, ref, value, path)
        target: Any = set() if value.cls == "set" else [] if value.kind == "sequence" else {}
        if not self.lazily:
            self.empty.append((target, value, path))
        elif value.kind == "sequence":
            target = ListView(self.checkpoint, value.members, path)
        else:
            target = MappingView(self.checkpoint, _by_key(self.checkpoint, value), path)
        return ObjectValue(value.cls, target) if value.kind == "object" else target

    def _fill(self, target: Any, container: ContainerValue, path: str) -> None:
        if isinstance(target, dict):
            members = _by_key(self.checkpoint, container)
            target.update((key, self._ready(item.ref, joined(path, item.step))) for key, item in members.items())
            return
        for member in container.members:
            value = self._ready(member.ref, joined(path, member.step))
            if isinstance(target, set):
                target.update(_hashed([value], set))
            else:
                target.append(value)


def _hashed(values: list[Any], cls: type[set[Any]] | type[frozenset[Any]]) -> Any:
    """Return a set of the values; unhashable values are replaced by their ``repr``."""
    kept = []
    for value in values:
        try:
            hash(value)
        except TypeError:
            kept.append(repr(value))
        else:
            kept.append(value)
    return cls(kept)
