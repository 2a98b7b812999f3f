"""A pickle that differs from another one in texts alone: its graph without a second run.

The machine does the same whatever is in the texts that it is given. So where two pickles agree byte for byte but for
the contents of some BINUNICODE instructions, the graph of one is that of the other with those texts in their places.
What is read back behind an edit is nearly always such a pickle: names without a prefix, other devices.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final, cast

from . import opcodes as op
from .nodes import Graph, Node, Ref

__all__ = ["respelled"]

_u32 = Struct("<I").unpack_from
#: The opcode and the length in front of a text.
_HEAD = 5
#: Where the last answer is kept.
_LAST: Final = ("respelled", -1)


def respelled(graph: Graph, original: bytes, data: bytes) -> Graph | None:
    """Return the graph of ``data``, where ``graph`` is that of ``original``; None where more than texts differs.

    Texts are those that ``graph.texts`` has the places of. Nodes that do not differ are the same in both. The last
    answer is kept with the graph: what was planned is read back once more.
    """
    last = graph.memo.get(_LAST)
    if last is not None and last[0] == data:
        return cast(Graph, last[1])
    if op.STACK_GLOBAL in graph.refused:
        return None  # there a text decides what is named
    nodes: list[Node] = list(graph.nodes)
    changed: list[Ref] = []
    at = begin = 0  # what is compared already, in each
    try:
        for ref, place in zip(*graph.texts):
            there = begin + place - at
            old = place + _HEAD + _u32(original, place + 1)[0]
            new = there + _HEAD + _u32(data, there + 1)[0]
            # All that is in front of the text, and its opcode.
            if original[at : place + 1] != data[begin : there + 1]:
                return None
            text = data[there + _HEAD : new].decode("utf-8", "surrogatepass")
            if text != nodes[ref]:
                nodes[ref] = text
                changed.append(ref)
            at, begin = old, new
    except (StructError, UnicodeDecodeError):
        return None
    if original[at:] != data[begin:]:
        return None
    made = Graph(
        nodes,
        graph.root,
        graph.style,
        graph.refused,
        graph.oddities,
        graph.filled,
        fetched=graph.fetched,
        base=graph,
        changed=frozenset(changed),
    )
    graph.memo[_LAST] = data, made
    return made
