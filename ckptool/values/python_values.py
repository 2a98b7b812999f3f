"""What stands at a place of a checkpoint, in Python's terms: a scalar, a mapping, a list, an object, a tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple, TypeAlias, overload

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
from ..checkpoint.paths import Child, as_children, extra_children, key_text, sequence
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Buffer, ByteArray, Call, Dict, Extension, Global, Graph, Persistent, Ref

#: What is a value by itself.
Plain: TypeAlias = "bool | int | float | complex | str | bytes | None"

#: Mappings that are nothing but that, whatever else is written with them.
_DICTS: Final = frozenset(("dict", "OrderedDict", "collections.defaultdict", "collections.Counter"))


class Leaf(NamedTuple):
    """A value by itself; ``kind`` is its type in a word, "name" for a class or function (``value`` is its name),
    "storage" for one without a tensor (``value`` describes it)."""

    kind: str
    value: Plain


class Member(NamedTuple):
    """Something in something: its name for people, the ``step`` to it in a path, its reference, and the key in a
    mapping, -1 elsewhere."""

    name: str
    step: str
    ref: Ref
    key: Ref = -1


class Content(NamedTuple):
    """Something with something inside.

    ``kind``: "mapping", "sequence" or "object"; ``cls`` the class. The names of ``members`` differ from each other:
    those of a mapping are its keys as texts, of a sequence numbers in brackets, of an object its attributes, keys and
    elements in brackets for what it holds as a mapping or list, and "(number)" for the arguments it was made with.
    """

    kind: str
    cls: str
    members: Sequence[Member]


class _Elements(Sequence[Member]):
    """The members of a sequence, each made when it is asked for: there may be millions."""

    def __init__(self, refs: Sequence[Ref]) -> None:
        self.refs = refs

    def __len__(self) -> int:
        return len(self.refs)

    @overload
    def __getitem__(self, index: int) -> Member: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...

    def __getitem__(self, index: int | slice) -> Member | Sequence[Member]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self.refs)))]
        step = f"[{index}]"
        return Member(step, step, self.refs[index])


def content(checkpoint: Checkpoint, ref: Ref) -> Leaf | Content | Tensor:
    """What the reference stands for."""
    graph = checkpoint.graph
    node = graph.nodes[ref]
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return Leaf(class_name(graph, ref), node)
    if isinstance(node, ByteArray):
        return Leaf("bytearray", node.data)
    if isinstance(node, Global):
        return Leaf("name", mapped_name(node))
    inside = sequence(graph, ref)
    if inside is not None:
        cls = class_name(graph, ref).rpartition(".")[2]
        return Content("sequence", "tuple" if cls == "Size" else cls, _Elements(inside))
    if isinstance(node, Dict):
        return Content("mapping", "dict", _entries(graph, as_children(graph, mapping(graph, ref) or ())))
    if isinstance(node, Persistent):
        return _outside(checkpoint, ref)
    if isinstance(node, Buffer | Extension):
        return Leaf("name", class_name(graph, ref))
    assert isinstance(node, Call), "everything else is above"
    return _called(checkpoint, ref, node)


def _entries(graph: Graph, held: Sequence[Child]) -> list[Member]:
    """The members of a mapping; a key that is no string has another name where a string is called like it."""
    nodes = graph.nodes
    taken: set[str] = {name for one in held if type(name := nodes[one.key]) is str}
    found = []
    for step, ref, key in held:
        name = nodes[key]
        if type(name) is not str:
            name = key_text(graph, key) if not step.startswith("[#") else step
            while name in taken:
                name += "'"
            taken.add(name)
        found.append(Member(name, step, ref, key))
    return found


def _outside(checkpoint: Checkpoint, ref: Ref) -> Leaf | Content:
    graph = checkpoint.graph
    storage = checkpoint.survey.reader.storage(ref)
    if storage is not None:
        return Leaf("storage", f"{storage.key}: {storage.cls}, {storage.nbytes:,} bytes, {storage.location}")
    name = callable_name(graph, ref)
    return Leaf("name", name or "an object outside of the pickle")


def _called(checkpoint: Checkpoint, ref: Ref, node: Call) -> Leaf | Content | Tensor:
    graph = checkpoint.graph
    tensor = checkpoint.survey.reader.tensor(ref)
    if tensor is not None:
        return tensor
    device = device_text(graph, ref)
    if device is not None:
        return Leaf("torch.device", device)
    value = called_constant(graph, ref)
    if value is not None:
        return Leaf(type(value).__name__, value)
    cls, pairs = class_name(graph, ref), mapping(graph, ref)
    entries = as_children(graph, pairs or ())
    if pairs is not None and cls in _DICTS:
        return Content("mapping", cls.rpartition(".")[2], _entries(graph, entries))
    held: dict[str, list[Member]] = {"": [], "[": [], "(": []}
    hidden = _HIDDEN.get(callable_name(graph, node.func), ())
    for one in (*extra_children(graph, ref, entries), *entries):
        if one.step in hidden or (one.key < 0 and one.step.startswith("(key ")):
            continue
        name = one.step.removeprefix(".")
        held[name[:1] if name[:1] in "[(" and not name.startswith("(state") else ""].append(Member(name, *one))
    return Content("object", cls, [*held[""], *held["["], *held["("]])


#: Arguments that are the class itself, of functions that make an object of one.
_HIDDEN: Final = {
    "copyreg.__newobj__": ("(0)",),
    "copyreg._reconstructor": ("(0)", "(1)", "(2)"),
}


def python_key(graph: Graph, ref: Ref) -> Hashable:
    """A key as a Python value where it is one; raises ValueError for a key that needs a module."""
    return _python(graph, ref, key_identity(graph, ref))


def _python(graph: Graph, ref: Ref, known: Hashable) -> Hashable:
    node = graph.nodes[ref]
    if isinstance(node, float) and node != node:
        return float("nan")  # an object of its own, so that several can be keys
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return node
    if isinstance(node, Call):
        value = called_constant(graph, ref)
        if value is not None:
            return value
    inside = sequence(graph, ref) if isinstance(known, tuple) and known[0] in ("tuple", "frozenset") else None
    if inside is None:
        raise ValueError
    parts = [_python(graph, part, key_identity(graph, part)) for part in inside]
    return frozenset(parts) if known[0] == "frozenset" else tuple(parts)  # type: ignore[index]
