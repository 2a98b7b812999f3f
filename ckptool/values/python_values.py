"""Classify the value at a reference in a checkpoint as a Python value: scalar, mapping, list, object or tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from ..base.records import NamedTuple
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
from ..checkpoint.paths import as_children, extra_children, key_text, sequence
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Buffer, ByteArray, Call, Dict, Extension, Global, Graph, Persistent, Ref

#: Mappings that are shown as a dict, whatever else is written with them.
_DICTS: Final = frozenset(("dict", "OrderedDict", "collections.defaultdict", "collections.Counter"))
#: Arguments that are the class itself, by the function that creates the object.
_CLASS_ARGUMENTS: Final = {"copyreg.__newobj__": ("(0)",), "copyreg._reconstructor": ("(0)", "(1)", "(2)")}


class ScalarValue(NamedTuple):
    """A value that contains no others. ``kind`` is its type as a word.

    For a class or function ``kind`` is "name" and ``value`` its name; for a storage without a tensor ``kind`` is
    "storage" and ``value`` a description.
    """

    kind: str
    value: bool | int | float | complex | str | bytes | None


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
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return ScalarValue(class_name(graph, ref), node)
    if isinstance(node, ByteArray):
        return ScalarValue("bytearray", node.data)
    if isinstance(node, Global):
        return ScalarValue("name", mapped_name(node))
    inside = sequence(graph, ref)
    if inside is not None:
        cls = class_name(graph, ref).rpartition(".")[2]
        return ContainerValue("sequence", "tuple" if cls == "Size" else cls, _SequenceMembers(inside))
    if isinstance(node, Dict):
        return ContainerValue("mapping", "dict", _entries(graph, mapping(graph, ref) or ()))
    if isinstance(node, Persistent):
        storage = checkpoint.survey.reader.storage(ref)
        if storage is None:
            return ScalarValue("name", callable_name(graph, ref) or "an object outside of the pickle")
        words = f"{storage.key}: {storage.cls}, {storage.nbytes:,} bytes, {storage.location}"
        return ScalarValue("storage", words)
    if isinstance(node, Buffer | Extension):
        return ScalarValue("name", class_name(graph, ref))
    assert isinstance(node, Call), "everything else is above"
    return _call_result(checkpoint, ref, node)


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


def _call_result(checkpoint: Checkpoint, ref: Ref, node: Call) -> ScalarValue | ContainerValue | Tensor:
    graph = checkpoint.graph
    tensor = checkpoint.survey.reader.tensor(ref)
    if tensor is not None:
        return tensor
    device = device_text(graph, ref)
    if device is not None:
        return ScalarValue("torch.device", device)
    value = called_constant(graph, ref)
    if value is not None:
        return ScalarValue(type(value).__name__, value)
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
    return ContainerValue("object", cls, sorted(members, key=_attributes_first))


def _attributes_first(member: ValueMember) -> int:
    """Return a sort key for an object's members: attributes, then entries and elements, then arguments."""
    return 0 if member.name.startswith("(state") else {"[": 1, "(": 2}.get(member.name[:1], 0)


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
    for number, member in enumerate(container.members):
        try:
            keys.append(python_key(graph, member.key))
        except ValueError:
            keys.append(member.name)
            texts.append(number)
    as_text = set(texts)
    taken = {key for number, key in enumerate(keys) if number not in as_text} if texts else set()
    for number in texts:
        name = str(keys[number])
        while name in taken:
            name += "'"
        keys[number] = name
        taken.add(name)
    return dict(zip(keys, container.members))
