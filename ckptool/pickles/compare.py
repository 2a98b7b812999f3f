"""Are two pickles the same object? Equality of graphs: structure, types, order, state and identity."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, not_
from struct import Struct
from typing import Final, TypeAlias

from . import opcodes as op
from .nodes import (
    CONSTANTS,
    Buffer,
    ByteArray,
    Call,
    Extension,
    Global,
    Graph,
    Instance,
    Node,
    Persistent,
    Ref,
    children,
)

# -- Tensors at one go, when two pickles are compared: the nodes that ``phrase_reading`` makes of one, in one step

Refs: TypeAlias = tuple[Ref, ...]
#: What decides whether two persistent ids mean the same: of the references in both, those that must be equal. Raises
#: ValueError with words where they do not.
Outside: TypeAlias = Callable[[Refs, Refs], tuple[Refs, Refs]]

_Phrase: TypeAlias = tuple[Refs, Refs, Refs, Refs]

#: Nodes of a phrase before its call.
BEHIND: Final = 6
_UNMET: Final = [-1] * BEHIND


def twins(
    ours: Sequence[Node],
    theirs: Sequence[Node],
    left: Ref,
    right: Ref,
    forward: list[Ref],
    backward: list[Ref],
    outside: Outside | None,
) -> tuple[Refs, Refs] | None:
    """Pair the nodes of two phrases, whose calls are ``left`` and ``right``, and return what is left to compare.

    ``forward`` and ``backward`` are the pairs that are known. None, and nothing is paired, for anything unusual.
    """
    before, behind = left - BEHIND, right - BEHIND
    if before < 0 or behind < 0 or forward[before:left] != _UNMET or backward[behind:right] != _UNMET:
        return None
    here, there = _phrase(ours, before, left), _phrase(theirs, behind, right)
    if here is None or there is None:
        return None
    own, lengths, steps, rest = here
    other, sizes, strides, others = there
    if outside is not None:
        try:
            own, other = outside(own, other)
        except ValueError:
            return None
    if len(own) != len(other) or len(lengths) != len(sizes) or len(steps) != len(strides):
        return None
    forward[before:left] = range(behind, right)
    backward[behind:right] = range(before, left)
    one, two = (*rest, *lengths, *steps), (*others, *sizes, *strides)
    # Nearly all of these were met before: the function, dimensions, the empty hooks.
    return (own, other) if (*map(forward.__getitem__, one),) == two else ((*own, *one), (*other, *two))


def _phrase(nodes: Sequence[Node], begin: Ref, end: Ref) -> _Phrase | None:
    """The references of a persistent id, of a shape, of strides, and of all else in a phrase; None for no phrase."""
    pid, outer, lengths, steps, hooks, args, call = nodes[begin : end + 1]
    if (
        type(pid) is tuple
        and type(outer) is Persistent
        and type(lengths) is tuple
        and type(steps) is tuple
        and type(hooks) is Call
        and type(args) is tuple
        and type(call) is Call
        and len(args) == BEHIND
        and outer.pid == begin
        and not outer.text
        and outer.filling is None is hooks.filling
        and hooks.kwargs < 0
        and call.args == begin + 5
    ):
        outside, offset, first, second, flag, last = args
        if outside == begin + 1 and first == begin + 2 and second == begin + 3 and last == begin + 4:
            # An empty tuple has no identity.
            return (
                (pid, lengths, steps, (hooks.func, hooks.args, offset, flag, call.func)) if lengths and steps else None
            )
    return None


#: Kinds that hold nothing, or whose references are looked at all together.
_GROUPED: Final = frozenset((str, bytes, int, float, bool, type(None), tuple, Call, Persistent))


def difference(a: Graph, b: Graph, *, texts_by_value: bool = False, outside: Outside | None = None) -> str:
    """Where two graphs differ, in words; "" when they are equal.

    Equal means: a one-to-one map between the nodes that the roots lead to, under which every node has
    the same type, value and order of children. Numbers, None and ``()`` have no identity. How a node
    was written (opcode, memo, batches) does not count, nor do the strings that STACK_GLOBAL took. With
    ``texts_by_value`` strings have no identity either. ``outside`` compares persistent ids that are tuples.
    """
    known = _common(a.nodes, b.nodes) if outside is None and not texts_by_value else None
    if known is not None and not _walked(a, b, known, CONSTANTS, None):
        return ""
    unknown = [-1] * len(a.nodes), [-1] * len(b.nodes)
    return _walked(a, b, unknown, (*CONSTANTS, str) if texts_by_value else CONSTANTS, outside)


def _walked(
    a: Graph, b: Graph, pairs: tuple[list[Ref], list[Ref]], constants: Collection[type], outside: Outside | None
) -> str:
    """Where two graphs differ; ``pairs`` are the nodes that are known to be a pair, in both directions."""
    ours, theirs = a.nodes, b.nodes
    forward, backward = pairs
    lefts, rights = [a.root], [b.root]
    # Some hundred thousand nodes are compared before an output is put in place: the frequent kinds need no call.
    while lefts:
        left, right = lefts.pop(), rights.pop()
        known = forward[left]
        if known == right:
            continue
        node, twin = ours[left], theirs[right]
        kind = type(node)
        if kind is not type(twin):
            return f"{_name(node)} became {_name(twin)}"
        if kind in constants or node == ():
            if not _same_constant(node, twin):
                return f"{_shown(node)} became {_shown(twin)}"
            forward[left] = right
            continue
        if known >= 0 or backward[right] >= 0:
            return f"{_name(node)} is shared in one of them and not in the other"
        forward[left], backward[right] = right, left
        if kind is str:
            if node != twin:
                return f"{_name(node)} became {_name(twin)}"
        elif type(node) is tuple and type(twin) is tuple:
            if len(node) != len(twin):
                return f"{_name(node)} holds {len(node)} values, then {len(twin)}"
            lefts += node
            rights += twin
        elif (
            type(node) is Call
            and type(twin) is Call
            and node.filling is None is twin.filling
            and node.kwargs < 0
            and twin.kwargs < 0
        ):
            if node.op != twin.op:
                return f"{_name(node)} became {_name(twin)}"
            phrases = twins(ours, theirs, left, right, forward, backward, outside)
            lefts += (node.func, node.args) if phrases is None else phrases[0]
            rights += (twin.func, twin.args) if phrases is None else phrases[1]
        else:
            if not _same_head(node, twin):
                return f"{_name(node)} became {_name(twin)}"
            here, there = _compared(node), _compared(twin)
            if outside is not None and type(node) is Persistent and type(twin) is Persistent:
                one, other = ours[node.pid], theirs[twin.pid]
                if type(one) is tuple and type(other) is tuple and node.filling is None is twin.filling:
                    try:
                        here, there = outside(one, other)
                    except ValueError as error:
                        return str(error)
            if len(here) != len(there):
                return f"{_name(node)} holds {len(here)} values, then {len(there)}"
            lefts += here
            rights += there
    return ""


def _common(ours: Sequence[Node], theirs: Sequence[Node]) -> tuple[list[Ref], list[Ref]] | None:
    """Pair the very nodes that are in both under one number, as in the graph of an edit: a first guess.

    They are the same where all that they hold is the same, or a string with the same text. None where it is not so.
    """
    same = [*map(is_, ours, theirs)]
    if sum(same) < len(same) // 2:
        return None
    most = max(len(ours), len(theirs))
    others = compress(range(len(same)), map(not_, same))
    changed = {ref for ref in others if type(ours[ref]) is not str or ours[ref] != theirs[ref]}
    changed.update(range(len(same), most))
    shared = [*compress(ours, same)]
    calls = [node for node in shared if type(node) is Call]
    outside = [node for node in shared if type(node) is Persistent]
    rest = [node for node in shared if type(node) not in _GROUPED]
    rest += [node for node in calls if node.filling is not None or node.kwargs >= 0]
    rest += [node for node in outside if node.filling is not None]
    held = chain(
        chain.from_iterable([node for node in shared if type(node) is tuple]),
        map(attrgetter("func"), calls),
        map(attrgetter("args"), calls),
        map(attrgetter("pid"), outside),
        chain.from_iterable(map(children, rest)),
    )
    if not changed.isdisjoint(held):
        return None
    pairs = [*range(most)]
    for ref in changed:
        pairs[ref] = -1
    return pairs[: len(ours)], pairs[: len(theirs)]


def _same_constant(node: Node, twin: Node) -> bool:
    if isinstance(node, float) and isinstance(twin, float):
        return struct.pack(">d", node) == struct.pack(">d", twin)
    return node == twin


def _same_head(node: Node, twin: Node) -> bool:
    """Do two nodes of one type agree in what is not a child?"""
    if isinstance(node, str | bytes):
        return node == twin
    if isinstance(node, Instance) and isinstance(twin, Instance) and _shape(node) != _shape(twin):
        return False
    if isinstance(node, Global) and isinstance(twin, Global):
        return (node.module, node.name) == (twin.module, twin.name)
    if isinstance(node, Call) and isinstance(twin, Call):
        return (node.op, node.kwargs < 0) == (twin.op, twin.kwargs < 0)
    if isinstance(node, Persistent) and isinstance(twin, Persistent):
        return node.text == twin.text
    if isinstance(node, ByteArray) and isinstance(twin, ByteArray):
        return node.data == twin.data
    if isinstance(node, Buffer) and isinstance(twin, Buffer):
        return (node.inner < 0) == (twin.inner < 0)
    if isinstance(node, Extension) and isinstance(twin, Extension):
        return node.code == twin.code
    return True


def _shape(node: Instance) -> tuple[int, int, int]:
    return len(node.items), len(node.pairs), len(node.states)


def _compared(node: Node) -> Sequence[Ref]:
    """The children that count. A global is its name, from wherever that was taken."""
    return children(node)[2:] if isinstance(node, Global) and node.parts is not None else children(node)


def _shown(node: Node) -> str:
    """A constant, or a string that has no identity."""
    return _name(node) if isinstance(node, str) else repr(node)


def _name(node: Node) -> str:
    if isinstance(node, Global):
        return f"{node.module}.{node.name}"
    if isinstance(node, str):
        return repr(node if len(node) <= 60 else node[:57] + "...")
    return type(node).__name__.lower()


# -- A pickle that differs from another one in texts alone: its graph without a second run

_u32 = Struct("<I").unpack_from
#: The opcode and the length in front of a text.
_HEAD = 5


def respelled(graph: Graph, original: bytes, data: bytes) -> Graph | None:
    """Return the graph of ``data``, where ``graph`` is that of ``original``; None where more than texts differs.

    Texts are those that ``graph.texts`` has the places of. Nodes that do not differ are the same in both.
    """
    if op.STACK_GLOBAL in graph.refused:
        return None  # there a text decides what is named
    nodes: list[Node] = list(graph.nodes)
    at = begin = 0  # what is compared already, in each
    for ref, place in zip(*graph.texts):
        end = place + _HEAD + _u32(original, place + 1)[0]
        if data.startswith(original[at:end], begin):
            begin += end - at
            at = end
            continue
        if not data.startswith(original[at : place + 1], begin):
            return None
        begin += place - at
        if begin + _HEAD > len(data):
            return None
        stop = begin + _HEAD + _u32(data, begin + 1)[0]
        try:
            nodes[ref] = data[begin + _HEAD : stop].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None
        at, begin = end, stop
    if original[at:] != data[begin:]:
        return None
    return Graph(nodes, graph.root, graph.style, graph.refused, graph.oddities, graph.filled)
