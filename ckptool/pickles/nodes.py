"""A pickle as a graph: an arena of nodes that refer to each other by number.

``graph.nodes[ref]`` is the node with the reference ``ref``. The reference is its identity: two places with the same
number hold the same object, and a cycle is a number that leads back. An edit never changes a node. It returns a new
arena in which some numbers hold another node, so sharing and everything else survive untouched.

======================  ====================================================================
Python type             pickled object
======================  ====================================================================
None bool int float     the constant itself; without identity, so one node for each value
str bytes               the string itself (a byte string of Python 2 is a ``str``, see ``Style.forms``)
tuple                   a tuple; its elements are references
List Set FrozenSet      ``items`` are references
Dict                    ``pairs`` are references: key, value, key, value ...
ByteArray Buffer        mutable bytes; an out-of-band buffer (protocol 5)
Global Call Persistent  a named object; the result of calling one; an object stored outside the pickle
Extension               a code of the copyreg extension registry
======================  ====================================================================

Nothing here imports or calls anything that a pickle names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import compress
from operator import attrgetter, is_
from typing import Any, Final, TypeAlias, TypeVar, cast

from ..base.lazy import regex
from .opcodes import PYTHON2_STRINGS

Ref: TypeAlias = int
_T = TypeVar("_T")


class _Items:
    """A container of ``items``, which are references in the order of the pickle."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Ref]) -> None:
        self.items = items


class List(_Items):
    """A list."""

    __slots__ = ()


class Set(_Items):
    """A set made by EMPTY_SET."""

    __slots__ = ()


class FrozenSet(_Items):
    """A frozenset made by FROZENSET."""

    __slots__ = ()


class Dict:
    """An exact dict; ``pairs`` alternates keys and values as written, including duplicate keys."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[Ref]) -> None:
        self.pairs = pairs


class ByteArray:
    """A bytearray of protocol 5."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Buffer:
    """An out-of-band buffer of protocol 5; ``inner`` is the buffer that READONLY_BUFFER froze, or -1."""

    __slots__ = ("inner",)

    def __init__(self, inner: Ref = -1) -> None:
        self.inner = inner


class Filling:
    """The contents that an object received after its construction.

    ``items`` were appended, ``pairs`` (key, value, ...) were set, and ``states`` went to BUILD. There is rarely more
    than one state.
    """

    __slots__ = ("items", "pairs", "states")

    def __init__(self, items: Sequence[Ref] = (), pairs: Sequence[Ref] = (), states: Sequence[Ref] = ()) -> None:
        self.items = items
        self.pairs = pairs
        self.states = states


class Instance:
    """An object that can be filled after its construction; ``filling`` is None before that."""

    # One slot, not three, because hundreds of thousands of these are never filled.
    __slots__ = ("filling",)
    filling: Filling | None

    @property
    def items(self) -> Sequence[Ref]:
        """The appended items."""
        return self.filling.items if self.filling is not None else ()

    @property
    def pairs(self) -> Sequence[Ref]:
        """The pairs that were set: key, value, key, value ..."""
        return self.filling.pairs if self.filling is not None else ()

    @property
    def states(self) -> Sequence[Ref]:
        """The states that went to BUILD, rarely more than one."""
        return self.filling.states if self.filling is not None else ()


class Global(Instance):
    """A module attribute, spelled as in the pickle.

    ``parts`` are the two string nodes that STACK_GLOBAL took (protocol 4 and later), or None.
    """

    __slots__ = ("module", "name", "parts")

    def __init__(self, module: str, name: str, parts: tuple[Ref, Ref] | None = None) -> None:
        self.module = module
        self.name = name
        self.parts = parts
        self.filling = None


class Call(Instance):
    """The result of calling ``func`` with the tuple ``args`` by ``op``: REDUCE, NEWOBJ, NEWOBJ_EX, OBJ or INST.

    ``kwargs`` is the keyword mapping of NEWOBJ_EX, or -1.
    """

    __slots__ = ("args", "func", "kwargs", "op")

    def __init__(self, op: int, func: Ref, args: Ref, kwargs: Ref = -1) -> None:
        self.op = op
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.filling = None

    def filled(self, items: Sequence[Ref], pairs: Sequence[Ref], states: Sequence[Ref]) -> Call:
        """Return the same call with this filling."""
        twin = Call(self.op, self.func, self.args, self.kwargs)
        if items or pairs or states:
            twin.filling = Filling(items, pairs, states)
        return twin


class Persistent(Instance):
    """An object stored outside the pickle; ``pid`` refers to its persistent id.

    With PERSID (protocol 0, ``text`` True) the id is a line of text.
    """

    __slots__ = ("pid", "text")

    def __init__(self, pid: Ref, text: bool = False) -> None:
        self.pid = pid
        self.text = text
        self.filling = None


class Extension(Instance):
    """A code of the copyreg extension registry (EXT1, EXT2, EXT4)."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code
        self.filling = None


Node: TypeAlias = (
    "bool | int | float | str | bytes | tuple[int, ...] | List | Set | FrozenSet | Dict | ByteArray | Buffer"
    " | Global | Call | Persistent | Extension | None"
)


#: Types of nodes without identity; ``()`` also has no identity.
CONSTANTS: Final = (type(None), bool, int, float)
#: Types of nodes without references.
_LEAVES: Final = frozenset((*CONSTANTS, str, bytes))
#: Types of nodes for Python's containers, except tuples.
CONTAINERS: Final = (List, Dict, Set, FrozenSet)
#: Types of nodes that have a hash, as far as that is known without running code; a tuple depends on its elements.
HASHABLE: Final = _LEAVES | {FrozenSet, Global, Call, Persistent, Extension, Buffer}
UNHASHABLE: Final = (List, Dict, Set, ByteArray)
#: Types of nodes that ``Graph.of_type`` finds. The types of most nodes are missing, to keep the index small.
_INDEXED: Final = frozenset((List, Dict, Set, FrozenSet, Global, Call, Persistent, Extension, bytes, ByteArray, Buffer))


class Style:
    """The deviations of a pickle from the output of CPython's pickler.

    ``protocol``      0 to 5, as PROTO declares it (``header`` True) or as the opcodes show;
    ``dialect``       the protocol whose opcodes are the default: ``protocol``, except in files that no pickler wrote;
    ``framed``        whether there are FRAMEs (4 and later);
    ``memo_base``     the first memo index: 0, or 1 from Python 2;
    ``forms``         the opcode of each node that is not written with the default one;
    ``unmemoized``    nodes that were not memoized although the pickler memoizes their type;
    ``memoized``      nodes that were memoized although the pickler does not memoize their type;
    ``batches``       how a container was filled, unless in the default batches: (opcode, number of elements);
    ``discarded``     for an object among its own arguments, the first call, whose result the pickle discards;
    ``memoize_late``  whether results of NEWOBJ are memoized after their BUILD, as TorchScript's pickler does.
    """

    def __init__(self, protocol: int = 2, *, header: bool = True, framed: bool = False, dialect: int = -1) -> None:
        self.protocol = protocol
        self.dialect = protocol if dialect < 0 else dialect
        self.header = header
        self.framed = framed
        self.memo_base = 0
        self.memoize_late = False
        self.forms: dict[Ref, int] = {}
        self.unmemoized: frozenset[Ref] = frozenset()
        self.memoized: frozenset[Ref] = frozenset()
        self.batches: dict[Ref, tuple[tuple[int, int], ...]] = {}
        self.discarded: dict[Ref, Ref] = {}

    def extended(self, like: Mapping[Ref, Ref]) -> Style:
        """Return a style in which each new reference is written like the old one that ``like`` maps it to."""
        if not (self.forms or self.unmemoized or self.memoized):
            return self
        forms = {new: self.forms[old] for new, old in like.items() if old in self.forms}
        unmemoized = {new for new, old in like.items() if old in self.unmemoized}
        memoized = {new for new, old in like.items() if old in self.memoized}
        if not (forms or unmemoized or memoized):
            return self
        unmemoized, memoized = unmemoized | self.unmemoized, memoized | self.memoized
        return self.replaced(forms=self.forms | forms, unmemoized=frozenset(unmemoized), memoized=frozenset(memoized))

    def replaced(self, **attributes: Any) -> Style:
        """Return a style with other values of these attributes."""
        twin = Style()
        twin.__dict__.update(self.__dict__ | attributes)
        return twin


class Graph:
    """One pickled object: an arena of nodes, the reference of the root, and the style to write it in.

    ``refused``    the number of opcodes outside ``opcodes.ACCEPTED``, by opcode;
    ``oddities``   things that no pickler writes: (offset in bytes, description);
    ``filled_at``  for each container, the number of nodes when the pickle last filled it: a call made before that
                   (with a lower reference) got the container with fewer elements;
    ``texts``      the references of strings, and the offsets in bytes of their BINUNICODE within the pickle;
    ``fetched``    the references that the pickle took again, from its memo or by DUP; None if unknown; any other node
                   has at most one parent, unless it is a number, a bool, None or ``()``;
    ``size``       the number of bytes of the pickle, up to and with STOP; 0 if the graph was not decoded;
    ``cache``      results of readers about single nodes, by a name and the reference; not part of the graph.

    A graph is never changed: ``edited`` returns another one.
    """

    def __init__(
        self,
        nodes: list[Node],
        root: Ref,
        style: Style,
        refused: Mapping[int, int] | None = None,
        oddities: Sequence[tuple[int, str]] = (),
        filled_at: Mapping[Ref, int] | None = None,
        texts: tuple[Sequence[Ref], Sequence[int]] = ((), ()),
        fetched: AbstractSet[Ref] | None = None,
        size: int = 0,
    ) -> None:
        self.nodes: Final = nodes
        self.root: Final = root
        self.style: Final = style
        self.refused: Final[Mapping[int, int]] = refused or {}
        self.oddities: Final = oddities
        self.filled_at: Final[Mapping[Ref, int]] = filled_at or {}
        self.texts: Final = texts
        self.fetched: Final = fetched
        self.size: Final = size
        self.cache: Final[dict[tuple[str, Ref], Any]] = {}
        self._index: defaultdict[type, list[Ref]] | None = None
        self._strings: frozenset[str] | None = None

    def edited(
        self,
        changes: Mapping[Ref, Node],
        added: Sequence[Node] = (),
        root: Ref | None = None,
        like: Mapping[Ref, Ref] | None = None,
    ) -> Graph:
        """Return another graph, with ``changes`` in place of old nodes and ``added`` after the last one.

        The first node of ``added`` gets the number ``len(self.nodes)``. ``like`` maps a new reference to the old one
        whose style it takes over; other new nodes are written as CPython's pickler would.
        """
        nodes = self.nodes + list(added)
        for ref, node in changes.items():
            nodes[ref] = node
        root = self.root if root is None else root
        style = self.style.extended(like) if like else self.style
        return Graph(nodes, root, style, self.refused, self.oddities)

    def of_type(self, kind: type[_T]) -> Iterator[tuple[Ref, _T]]:
        """Yield the nodes of a type, with their references, in order; not for numbers, ``str`` and ``tuple``."""
        refs = self._by_type().get(kind, ())
        return zip(refs, cast("Iterator[_T]", map(self.nodes.__getitem__, refs)))

    def has(self, *kinds: type) -> bool:
        """Return whether any node has one of these types; not for numbers, ``str`` and ``tuple``."""
        return not self._by_type().keys().isdisjoint(kinds)

    @property
    def strings(self) -> frozenset[str]:
        """All strings of the graph, each once."""
        if self._strings is None:
            # A comparison in C is twice as fast as a comprehension, because most nodes are not strings.
            is_string = map(partial(is_, str), map(type, self.nodes))
            self._strings = frozenset(cast("Iterator[str]", compress(self.nodes, is_string)))
        return self._strings

    def _by_type(self) -> dict[type, list[Ref]]:
        """Return the references of the nodes of each indexed type that occurs."""
        index = self._index
        if index is None:
            index = self._index = defaultdict(list)
            types = list(map(type, self.nodes))
            # Most nodes have other types. ``compress`` skips them in C.
            for ref in compress(range(len(types)), map(_INDEXED.__contains__, types)):
                index[types[ref]].append(ref)
            index.default_factory = None
        return index

    def reachable(self, *roots: Ref, barred: Iterable[Ref] = ()) -> Iterator[Ref]:
        """Yield once each reference that the root, or ``roots``, leads to, parents first, without ``barred`` nodes."""
        nodes, seen = self.nodes, bytearray(len(self.nodes))
        for ref in barred:
            seen[ref] = 1
        work = [*reversed(roots)] if roots else [self.root]
        while work:
            ref = work.pop()
            if seen[ref]:
                continue
            seen[ref] = 1
            yield ref
            node = nodes[ref]
            # Most nodes are of these types, and need no call.
            if type(node) is tuple:
                work += node[::-1]
            elif type(node) is Call and node.filling is None and node.kwargs < 0:
                work += (node.args, node.func)
            elif type(node) is Persistent and node.filling is None:
                work.append(node.pid)
            elif type(node) not in _LEAVES:
                work += children(node)[::-1]


def children(node: Node) -> Sequence[Ref]:
    """Return the references that a node holds, in the order in which a pickler would save them."""
    if isinstance(node, Instance):
        parts, filling = dependencies(node), node.filling
        return (*parts, *filling.items, *filling.pairs, *filling.states) if filling is not None else parts
    if isinstance(node, Dict):
        return node.pairs
    if isinstance(node, List | Set):
        return node.items
    return dependencies(node)


def parts_of(node: Node) -> Sequence[Ref]:
    """Return the children of a node, without the strings of a global, whose name is its own value."""
    return children(node)[2:] if isinstance(node, Global) and node.parts is not None else children(node)


def own_value(node: Node) -> object:
    """Return the value of a node apart from its type and children; None for a string or constant."""
    value = _OWN_VALUES[type(node)](node) if type(node) in _OWN_VALUES else None
    return (value, len(node.items), len(node.pairs), len(node.states)) if isinstance(node, Instance) else value


_OWN_VALUES: Final[dict[type, Callable[[Any], object]]] = {
    bytes: bytes,
    ByteArray: attrgetter("data"),
    Buffer: lambda node: node.inner < 0,
    Global: attrgetter("module", "name"),
    Call: lambda node: (node.op, node.kwargs < 0),
    Persistent: attrgetter("text"),
    Extension: attrgetter("code"),
}


def dependencies(node: Node) -> Sequence[Ref]:
    """Return the references that must exist before the node can be constructed, without the ones that fill it later.

    In a decoded graph they never lead back to the node, because a stack machine makes one object after another.
    """
    if isinstance(node, tuple):
        return node
    if isinstance(node, Call):
        return (node.func, node.args) if node.kwargs < 0 else (node.func, node.args, node.kwargs)
    if isinstance(node, Persistent):
        return (node.pid,)
    if isinstance(node, FrozenSet):
        return node.items
    if isinstance(node, Global):
        return node.parts or ()
    if isinstance(node, Buffer) and node.inner >= 0:
        return (node.inner,)
    return ()


def relocated(node: Node, places: Mapping[Ref, Ref] | range) -> Node:
    """Return a node for another arena, in which the old reference ``ref`` is ``places[ref]``."""
    if isinstance(node, tuple):
        return tuple(places[part] for part in node)
    if isinstance(node, _Items):
        return type(node)([places[part] for part in node.items])
    if isinstance(node, Dict):
        return Dict([places[part] for part in node.pairs])
    if not isinstance(node, Instance):
        return Buffer(places[node.inner]) if isinstance(node, Buffer) and node.inner >= 0 else node
    twin: Instance
    if isinstance(node, Call):
        twin = Call(node.op, places[node.func], places[node.args], places[node.kwargs] if node.kwargs >= 0 else -1)
    elif isinstance(node, Persistent):
        twin = Persistent(places[node.pid], node.text)
    elif isinstance(node, Global):
        twin = Global(node.module, node.name, node.parts and (places[node.parts[0]], places[node.parts[1]]))
    else:
        assert isinstance(node, Extension)
        twin = Extension(node.code)
    if node.filling is not None:
        twin.filling = Filling(*([places[ref] for ref in refs] for refs in (node.items, node.pairs, node.states)))
    return twin


_SURROGATE: Final = regex("[\udc80-\udcff]")


def non_utf8_strings(graph: Graph) -> Iterator[Ref]:
    """Yield the Python 2 byte strings that are not UTF-8, which ``pickle.load`` refuses without an encoding.

    Their bytes are kept as lone surrogates.
    """
    for ref, form in graph.style.forms.items():
        node = graph.nodes[ref] if form in PYTHON2_STRINGS else None
        if type(node) is str and _SURROGATE.search(node) is not None:
            yield ref
