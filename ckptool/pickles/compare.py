"""Are two pickles the same object? Equality of graphs: structure, types, order, state and identity."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Final

from .nodes import (
    CONSTANTS,
    Buffer,
    ByteArray,
    Call,
    Dict,
    Extension,
    FrozenSet,
    Global,
    Graph,
    Instance,
    List,
    Node,
    Persistent,
    Ref,
    Set,
    children,
)
from .phrase_comparing import BEHIND, Outside, twins

__all__ = ["difference"]

_CONTAINERS: Final = frozenset((List, Dict, Set, FrozenSet))


def difference(a: Graph, b: Graph, *, texts_by_value: bool = False, outside: Outside | None = None) -> str:
    """Where two graphs differ, in words; "" when they are equal.

    Equal means: a one-to-one map between the nodes that the roots lead to, under which every node has
    the same type, value and order of children. Numbers, None and ``()`` have no identity. How a node
    was written (opcode, memo, batches) does not count, nor do the strings that STACK_GLOBAL took. With
    ``texts_by_value`` strings have no identity either. ``outside`` compares persistent ids that are tuples.
    """
    common = _common(a, b) if outside is None and not texts_by_value else None
    if common is not None and not _walked(a, b, common, CONSTANTS, None):
        return ""
    nothing = bytes(max(len(a.nodes), len(b.nodes)))
    return _walked(a, b, nothing, (*CONSTANTS, str) if texts_by_value else CONSTANTS, outside)


def _walked(a: Graph, b: Graph, common: Sequence[int], constants: Collection[type], outside: Outside | None) -> str:
    """Where two graphs differ; ``common`` is 1 for references whose nodes are known to be the same in both."""
    ours, theirs = a.nodes, b.nodes
    # Which node is the other one's, in both directions.
    forward, backward = [-1] * len(ours), [-1] * len(theirs)
    lefts, rights = [a.root], [b.root]
    # Some hundred thousand nodes are compared before an output is put in place: the frequent kinds need no call.
    while lefts:
        left, right = lefts.pop(), rights.pop()
        known = forward[left]
        if known == right or (left == right and common[left]):
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
        if known >= 0 or backward[right] >= 0 or common[left] or common[right]:
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
            known_parts = 1 in common[left - BEHIND : left] or 1 in common[right - BEHIND : right]
            phrases = None if known_parts else twins(ours, theirs, left, right, forward, backward, outside)
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


def _common(a: Graph, b: Graph) -> bytearray | None:
    """Mark the nodes that two graphs have of one base, but for what changed and the containers that lead to it.

    None where they have none, or where more than containers holds what changed.
    """
    base = a.base
    if base is None or base is not b.base or base.fetched is None or base.root in base.fetched:
        return None
    nodes, ours, theirs = base.nodes, a.nodes, b.nodes
    texts = [ref for ref in a.changed & b.changed if type(ours[ref]) is str and ours[ref] == theirs[ref]]
    changed = (a.changed | b.changed).difference(texts)
    kinds = set(map(type, map(nodes.__getitem__, changed)))
    if not changed.isdisjoint(base.fetched) or not kinds.isdisjoint(CONSTANTS):
        return None
    # A node that the pickle took once is held once: where that is by one of these, no other leads to it.
    walked, work, left = [base.root], [base.root], set(changed - {base.root})
    while work:
        parts = children(nodes[work.pop()])
        left.difference_update(parts)
        for ref in parts:
            node = nodes[ref]
            # Keys and tensors are most of them.
            if type(node) is str or (type(node) is Call and node.filling is None) or ref in base.fetched:
                continue
            if type(node) in _CONTAINERS or (isinstance(node, Instance) and node.filling is not None):
                walked.append(ref)
                work.append(ref)
    if left:
        return None
    common = bytearray(b"\1") * len(nodes) + bytes(max(len(ours), len(theirs)) - len(nodes))
    for ref in chain(changed, walked):
        common[ref] = 0
    return common


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
