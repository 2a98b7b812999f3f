"""A pickle as a graph: an arena of nodes that refer to each other by number.

``graph.nodes[ref]`` is the node of reference ``ref``; identity is the number. Two places that hold
the same number hold the same object, and a cycle is just a number that leads back. An edit never
touches a node: it gives a new arena in which some numbers hold another node, so that sharing and
everything unnamed survive without being followed.

What a slot holds:

======================  ====================================================================
Python type             pickled object
======================  ====================================================================
None bool int float     the constant itself; never shared on purpose, so one slot per value
str bytes               the string itself (Python 2 byte strings are ``str``, see ``forms``)
tuple                   a tuple; its elements are references
List Set FrozenSet      ``items`` are references
Dict                    ``pairs`` are references: key, value, key, value ...
ByteArray Buffer        mutable bytes; an out-of-band buffer (protocol 5)
Global Call Persistent  a named object; the result of calling one; an object kept outside the pickle
Extension               a code of the copyreg extension registry
======================  ====================================================================

Nothing here knows torch, and nothing here runs or imports what a pickle names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias

__all__ = [
    "CONSTANTS",
    "Buffer",
    "ByteArray",
    "Call",
    "Dict",
    "Extension",
    "Filling",
    "FrozenSet",
    "Global",
    "Graph",
    "Instance",
    "List",
    "Node",
    "Persistent",
    "Ref",
    "Set",
    "Style",
    "children",
    "ingredients",
]

Ref: TypeAlias = int


class List:
    """A list; ``items`` are references."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Ref]) -> None:
        self.items = items


class Set:
    """A set made by EMPTY_SET; ``items`` are references in the order of the pickle."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Ref]) -> None:
        self.items = items


class FrozenSet:
    """A frozenset made by FROZENSET; ``items`` are references in the order of the pickle."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Ref]) -> None:
        self.items = items


class Dict:
    """An exact dict; ``pairs`` alternates keys and values, doubles included, as written."""

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
    """What an object got after it was made.

    ``items`` were appended, ``pairs`` were set (key, value, ...), ``states`` went to BUILD: nearly
    always none or one.
    """

    __slots__ = ("items", "pairs", "states")

    def __init__(self, items: Sequence[Ref] = (), pairs: Sequence[Ref] = (), states: Sequence[Ref] = ()) -> None:
        self.items = items
        self.pairs = pairs
        self.states = states


class Instance:
    """What may be filled after it exists; ``filling`` is None as long as nothing came."""

    # One slot, not three: hundreds of thousands of these are never filled.
    __slots__ = ("filling",)
    filling: Filling | None

    @property
    def items(self) -> Sequence[Ref]:
        """What was appended."""
        return self.filling.items if self.filling is not None else ()

    @property
    def pairs(self) -> Sequence[Ref]:
        """What was set: key, value, key, value ..."""
        return self.filling.pairs if self.filling is not None else ()

    @property
    def states(self) -> Sequence[Ref]:
        """What went to BUILD: nearly always nothing or one."""
        return self.filling.states if self.filling is not None else ()


class Global(Instance):
    """A module attribute named by the pickle, spelt as the pickle spells it.

    ``parts`` are the two string nodes that STACK_GLOBAL took (protocol 4 and later), or None.
    """

    __slots__ = ("module", "name", "parts")

    def __init__(self, module: str, name: str, parts: tuple[Ref, Ref] | None = None) -> None:
        self.module = module
        self.name = name
        self.parts = parts
        self.filling = None


class Call(Instance):
    """What comes of calling ``func`` with the tuple ``args``: REDUCE, NEWOBJ, NEWOBJ_EX, OBJ or INST (``op``).

    ``kwargs`` is the keyword mapping of NEWOBJ_EX, else -1.
    """

    __slots__ = ("args", "func", "kwargs", "op")

    def __init__(self, op: int, func: Ref, args: Ref, kwargs: Ref = -1) -> None:
        self.op = op
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.filling = None

    def filled(self, items: Sequence[Ref], pairs: Sequence[Ref], states: Sequence[Ref]) -> Call:
        """The same call, filled otherwise."""
        twin = Call(self.op, self.func, self.args, self.kwargs)
        if items or pairs or states:
            twin.filling = Filling(items, pairs, states)
        return twin


class Persistent(Instance):
    """An object that lives outside the pickle; ``pid`` refers to its persistent id.

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


#: Kinds that hold no references.
_LEAVES: Final = frozenset((str, bytes, int, float, bool, type(None)))
#: Kinds without identity, besides ``()``.
CONSTANTS: Final = (type(None), bool, int, float)


class Style:
    """How a pickle was written, as far as the default policy of CPython's pickler does not tell.

    ``protocol``  0 to 5, as PROTO declares it (``header`` True) or as the opcodes show;
    ``dialect``   the protocol whose opcodes are the defaults; it differs only where no pickler wrote it so;
    ``framed``    whether FRAMEs were used (4 and later);
    ``memo_base`` the first memo number: 0, or 1 from Python 2;
    ``forms``     nodes written with another opcode than the default one;
    ``unput``     nodes that were not memoised although the policy memoises their kind;
    ``put``       nodes that were memoised although the policy does not;
    ``steps``     how a container was filled, where not in the usual batches: (opcode, number of elements);
    ``remade``    for an object that is among its own arguments the call that was begun first and thrown away;
    ``late``      whether objects made by NEWOBJ are memoised behind their BUILD, as the pickler of TorchScript does.

    A node that none of these mentions is memoised and written with the default opcode.
    """

    __slots__ = (
        *("dialect", "forms", "framed", "header", "late", "memo_base", "protocol", "put", "remade", "steps", "unput"),
    )

    def __init__(
        self,
        protocol: int = 2,
        *,
        header: bool = True,
        framed: bool = False,
        memo_base: int = 0,
        dialect: int | None = None,
        late: bool = False,
    ) -> None:
        self.protocol = protocol
        self.late = late
        self.dialect = protocol if dialect is None else dialect
        self.header = header
        self.framed = framed
        self.memo_base = memo_base
        self.forms: dict[Ref, int] = {}
        self.unput: frozenset[Ref] = frozenset()
        self.put: frozenset[Ref] = frozenset()
        self.steps: dict[Ref, tuple[tuple[int, int], ...]] = {}
        self.remade: dict[Ref, Ref] = {}

    def extended(self, like: Mapping[Ref, Ref]) -> Style:
        """The style in which each new reference of ``like`` is written as its old one; itself if that says nothing."""
        forms = {new: self.forms[old] for new, old in like.items() if old in self.forms}
        unput = {new for new, old in like.items() if old in self.unput}
        put = {new for new, old in like.items() if old in self.put}
        if not (forms or unput or put):
            return self
        twin = self.later(self.late)
        twin.forms = self.forms | forms
        twin.unput, twin.put = self.unput | unput, self.put | put
        return twin

    def later(self, late: bool) -> Style:
        """The same style with another ``late``."""
        twin = Style(self.protocol, header=self.header, framed=self.framed, memo_base=self.memo_base, late=late)
        twin.dialect = self.dialect
        twin.forms, twin.unput, twin.put = self.forms, self.unput, self.put
        twin.steps, twin.remade = self.steps, self.remade
        return twin


class Graph:
    """One pickled object: an arena of nodes, the number of the root, and the style to write it in.

    ``refused`` counts the opcodes that ``torch.load(weights_only=True)`` does not know, by opcode;
    ``oddities`` are (offset in bytes, text) remarks of the decoder on what no pickler writes;
    ``filled`` says of a container how many nodes there were when the pickle last filled it: a call of a lower number
    that took it saw less of it; ``texts`` are references of strings and the offsets in bytes of their BINUNICODE;
    ``fetched`` are references that the pickle took a second time, from its memo or by DUP: any other node but a
    number, a truth value, None and ``()`` is held by one node at most. It is None where that is not known. ``base`` is
    the graph that this one was made from, and ``changed`` are the references of other nodes than it has there.
    Never changed once made: ``edited`` gives another graph.
    """

    __slots__ = (
        *("base", "changed", "fetched", "filled", "memo", "nodes", "oddities", "refused", "root", "style", "texts"),
    )

    def __init__(
        self,
        nodes: list[Node],
        root: Ref,
        style: Style,
        refused: Mapping[int, int] | None = None,
        oddities: Sequence[tuple[int, str]] = (),
        filled: Mapping[Ref, int] | None = None,
        texts: tuple[Sequence[Ref], Sequence[int]] = ((), ()),
        fetched: AbstractSet[Ref] | None = None,
        base: Graph | None = None,
        changed: frozenset[Ref] = frozenset(),
    ) -> None:
        self.nodes: Final = nodes
        self.root: Final = root
        self.style: Final = style
        self.refused: Final[Mapping[int, int]] = refused or {}
        self.oddities: Final = oddities
        self.filled: Final[Mapping[Ref, int]] = filled or {}
        self.texts: Final = texts
        self.fetched: Final = fetched
        self.base: Final = base
        self.changed: Final = changed
        #: What readers work out about single nodes, by a name of theirs and the reference; no part of the graph.
        self.memo: Final[dict[tuple[str, Ref], Any]] = {}

    def edited(
        self,
        changes: Mapping[Ref, Node],
        added: Sequence[Node] = (),
        root: Ref | None = None,
        like: Mapping[Ref, Ref] | None = None,
    ) -> Graph:
        """Another graph: the nodes of ``changes`` in place of the old ones, ``added`` behind the last.

        The first of ``added`` gets the number ``len(self.nodes)``. ``like`` names for a new reference the
        old one whose manner of writing it takes over; others are written as CPython's pickler would.
        """
        nodes = self.nodes + list(added)
        for ref, node in changes.items():
            nodes[ref] = node
        style = self.style.extended(like) if like else self.style
        base = self.base or self
        old = len(base.nodes)
        return Graph(
            nodes,
            self.root if root is None else root,
            style,
            self.refused,
            self.oddities,
            base=base,
            changed=self.changed.union([ref for ref in changes if ref < old]),
        )

    def reachable(self) -> Iterator[Ref]:
        """Every reference that the root leads to, each once, parents before children."""
        nodes, seen = self.nodes, bytearray(len(self.nodes))
        work = [self.root]
        while work:
            ref = work.pop()
            if seen[ref]:
                continue
            seen[ref] = 1
            yield ref
            node = nodes[ref]
            if type(node) is tuple:
                work += node[::-1]
            elif type(node) not in _LEAVES:  # most nodes are one of these
                work += children(node)[::-1]


def children(node: Node) -> Sequence[Ref]:
    """The references that a node holds, in the order in which a pickler would save them."""
    if isinstance(node, Instance):
        made_of, filling = ingredients(node), node.filling
        return (*made_of, *filling.items, *filling.pairs, *filling.states) if filling is not None else made_of
    if isinstance(node, Dict):
        return node.pairs
    if isinstance(node, List | Set):
        return node.items
    return ingredients(node)


def ingredients(node: Node) -> Sequence[Ref]:
    """The references that must exist before the node can: what it is made of, not what it is filled with.

    In a decoded graph they never lead back to the node, because a stack machine makes one thing after another.
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
