"""What stands at a place of a checkpoint, in Python's terms: a scalar, a mapping, a list, an object, a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from .checkpoint import Checkpoint
from .objects import attributes, callable_name, class_name, device_text, mapped_name, mapping, spell_key
from .pickles.nodes import (
    Buffer,
    ByteArray,
    Call,
    Dict,
    Extension,
    FrozenSet,
    Global,
    Graph,
    List,
    Node,
    Persistent,
    Ref,
    Set,
)
from .tensors import Tensor

__all__ = ["Content", "Leaf", "Plain", "content", "key_text", "label"]

#: What is a value by itself.
Plain: TypeAlias = "bool | int | float | complex | str | bytes | None"

#: Mappings that are nothing but that, whatever else is written with them.
_DICTS: Final = frozenset(("dict", "OrderedDict", "collections.defaultdict", "collections.Counter"))
#: Calls that are given the elements of what they make.
_SEQUENCES: Final = {
    "builtins.set": "set",
    "builtins.frozenset": "frozenset",
    "builtins.list": "list",
    "builtins.tuple": "tuple",
    "torch.Size": "tuple",
    "collections.deque": "deque",
}


class Leaf(NamedTuple):
    """A value by itself; ``kind`` is its type in a word, "name" for a class or function (``value`` is its name),
    "storage" for one without a tensor (``value`` describes it)."""

    kind: str
    value: Plain


class Content(NamedTuple):
    """Something with something inside.

    ``kind``: "mapping", "sequence" or "object"; ``cls`` the class. ``members`` are (name, reference): keys of the
    mapping as Python values, numbers of the sequence, for an object the names of attributes, "[key]" for what it holds
    as a mapping or list, "(number)" for the arguments it was made with.
    """

    kind: str
    cls: str
    members: Sequence[tuple[Node, Ref]]


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
    if isinstance(node, Dict):
        return Content("mapping", "dict", _last(graph, mapping(graph, ref) or []))
    if isinstance(node, tuple | List | Set | FrozenSet):
        return _sequence(class_name(graph, ref), node if isinstance(node, tuple) else node.items)
    if isinstance(node, Persistent):
        return _outside(checkpoint, ref)
    if isinstance(node, Buffer | Extension):
        return Leaf("name", class_name(graph, ref))
    return _called(checkpoint, ref, node)


def _last(graph: Graph, pairs: Sequence[tuple[Ref, Ref]]) -> list[tuple[Node, Ref]]:
    """The entries of a mapping: of a key that is written twice the last value counts, at the first place."""
    found: dict[object, tuple[Node, Ref]] = {}
    for key, value in pairs:
        node = graph.nodes[key]
        plain = node is None or isinstance(node, bool | int | float | str | bytes)
        found[(type(node), node) if plain else key] = (node, value)
    return list(found.values())


def _sequence(cls: str, refs: Sequence[Ref]) -> Content:
    return Content("sequence", cls, list(enumerate(refs)))


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
    name = callable_name(graph, node.func)
    held = graph.nodes[node.args]
    args = held if type(held) is tuple else ()
    leaf = _made(graph, name, args)
    if leaf is not None:
        return leaf
    if name in _SEQUENCES and not node.states and not node.pairs:
        inner = graph.nodes[args[0]] if args else ()
        refs = inner if type(inner) is tuple else inner.items if isinstance(inner, List) else None
        if refs is not None:
            return _sequence(_SEQUENCES[name], [*refs, *node.items])
    cls = class_name(graph, ref)
    pairs = mapping(graph, ref)
    if pairs is not None and cls in _DICTS:
        return Content("mapping", cls.rpartition(".")[2], _last(graph, pairs))
    members: list[tuple[Node, Ref]] = [(_attribute(graph, key), value) for key, value in attributes(graph, node)]
    if not members:
        members += [("state", state) for state in node.states]
    members += [(f"[{key_text(graph, key)}]", value) for key, value in _last(graph, pairs or [])]
    members += [(f"[{number}]", item) for number, item in enumerate(node.items)]
    shown = args[1:] if name in ("copyreg.__newobj__",) else () if name == "copyreg._reconstructor" else args
    members += [(f"({number})", item) for number, item in enumerate(shown)]
    return Content("object", cls, members)


def _made(graph: Graph, name: str, args: tuple[Ref, ...]) -> Leaf | None:
    """Bytes and complex numbers, which old protocols write as calls."""
    values = [graph.nodes[arg] for arg in args]
    if name == "_codecs.encode" and len(values) == 2 and isinstance(values[0], str):
        try:
            return Leaf("bytes", values[0].encode("latin-1"))
        except UnicodeEncodeError:
            return None
    if name == "builtins.bytes" and not values:
        return Leaf("bytes", b"")
    if name == "builtins.complex" and len(values) == 2 and all(isinstance(value, int | float) for value in values):
        real, imag = values
        assert isinstance(real, int | float) and isinstance(imag, int | float)
        return Leaf("complex", complex(real, imag)) if max(abs(real), abs(imag)) < 1e308 else None
    return None


def _attribute(graph: Graph, key: Ref) -> str:
    node = graph.nodes[key]
    return node if type(node) is str else spell_key("", node)


def key_text(graph: Graph, key: Node) -> str:
    """A key of a mapping as a text: a tuple as Python writes it."""
    work = key
    if isinstance(work, str):
        return work
    if isinstance(work, tuple):
        parts = [graph.nodes[item] for item in work[:100]]
        return f"({', '.join(repr(part) if not isinstance(part, tuple) else '(...)' for part in parts)})"
    if isinstance(work, int) and not isinstance(work, bool) and work.bit_length() > 1 << 13:
        return "a huge integer"
    plain = work is None or isinstance(work, bool | int | float | bytes)
    return repr(work) if plain else f"a {type(work).__name__.lower()}"


def label(graph: Graph, base: str, found: Content, name: Node) -> str:
    """The path of a member."""
    if found.kind == "object" and isinstance(name, str):
        return f"{base}{name}" if name[:1] in "[(" else spell_key(base, name)
    return spell_key(base, name)
