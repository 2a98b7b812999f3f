"""Are two pickles the same object? Equality of graphs: structure, types, order, state and identity."""

from __future__ import annotations

import struct
from collections.abc import Sequence

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

__all__ = ["difference"]


def difference(a: Graph, b: Graph, *, texts_by_value: bool = False) -> str:
    """Where two graphs differ, in words; "" when they are equal.

    Equal means: a one-to-one map between the nodes that the roots lead to, under which every node has
    the same type, value and order of children. Numbers, None and ``()`` have no identity. How a node
    was written (opcode, memo, batches) does not count, nor do the strings that STACK_GLOBAL took. With
    ``texts_by_value`` strings have no identity either.
    """
    forward: dict[Ref, Ref] = {}
    backward: dict[Ref, Ref] = {}
    work = [(a.root, b.root)]
    while work:
        left, right = work.pop()
        node, twin = a.nodes[left], b.nodes[right]
        if type(node) is not type(twin):
            return f"{_name(node)} became {_name(twin)}"
        if isinstance(node, CONSTANTS) or node == () or (texts_by_value and type(node) is str):
            if not _same_constant(node, twin):
                return f"{node!r} became {twin!r}"
            continue
        known = forward.get(left)
        if known is not None or right in backward:
            if known != right or backward.get(right) != left:
                return f"{_name(node)} is shared in one of them and not in the other"
            continue
        forward[left], backward[right] = right, left
        if not _same_head(node, twin):
            return f"{_name(node)} became {_name(twin)}"
        ours, theirs = _compared(node), _compared(twin)
        if len(ours) != len(theirs):
            return f"{_name(node)} holds {len(ours)} values, then {len(theirs)}"
        work.extend(zip(ours, theirs))
    return ""


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


def _name(node: Node) -> str:
    if isinstance(node, Global):
        return f"{node.module}.{node.name}"
    if isinstance(node, str):
        return repr(node if len(node) <= 60 else node[:57] + "...")
    return type(node).__name__.lower()
