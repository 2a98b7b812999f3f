"""Compare two pickles as objects: structure, types, order, state and identity."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import compress
from operator import is_not
from typing import Final, TypeAlias, cast

from . import opcodes as op
from .nodes import CONSTANTS, Call, Dict, Global, Graph, Node, Persistent, Ref, children, own_value, parts_of

Refs: TypeAlias = tuple[Ref, ...]
#: Compares two persistent ids. Returns the references in both that must be equal, or raises ValueError with a message
#: that describes the difference.
CompareIds: TypeAlias = Callable[[Refs, Refs], tuple[Refs, Refs]]

_u32 = struct.Struct("<I").unpack_from
_length = struct.Struct("<I").pack
#: Bytes of a BINUNICODE before its text: the opcode and the length.
_TEXT_HEAD: Final = 5
#: The cache key of the last result of ``redecoded``.
_LAST: Final = ("redecoded", -1)
#: The cache key of the graph from which this one differs only in strings, and of these strings.
_RESPELLED: Final = ("respelled", -1)


def difference(a: Graph, b: Graph, *, texts_by_value: bool = False, compare_ids: CompareIds | None = None) -> str:
    """Describe the first difference between two graphs; return "" if they are equal.

    Two graphs are equal if there is a one-to-one map between the nodes reachable from their roots, under which every
    node has the same type, value and order of children. Numbers, None and ``()`` have no identity. The way in which a
    node was written (opcode, memo, batches) does not count, nor do the strings that STACK_GLOBAL took. With
    ``texts_by_value``, strings have no identity either. ``compare_ids`` compares persistent ids that are tuples.
    """
    spelling = a.cache.get(_RESPELLED)
    if spelling is not None and spelling == b.cache.get(_RESPELLED):
        return ""
    ours, theirs = a.nodes, b.nodes
    constants = (*CONSTANTS, str) if texts_by_value else CONSTANTS
    # The partner of each node, in both directions.
    forward, backward = [-1] * len(ours), [-1] * len(theirs)
    lefts, rights = [a.root], [b.root]
    # Several hundred thousand nodes are compared before an output is put in place, so frequent types need no call.
    while lefts:
        left, right = lefts.pop(), rights.pop()
        known = forward[left]
        if known == right:
            continue
        node, twin = ours[left], theirs[right]
        kind = type(node)
        if kind is not type(twin):
            return f"{_name(node)} became {_name(twin)}"
        if kind in constants or (kind is tuple and not node):
            if not (struct.pack(">d", node) == struct.pack(">d", twin) if kind is float else node == twin):
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
        elif type(node) is Dict and type(twin) is Dict and len(node.pairs) == len(twin.pairs):
            lefts += node.pairs
            rights += twin.pairs
        elif (
            type(node) is Persistent
            and type(twin) is Persistent
            and node.filling is None is twin.filling
            and compare_ids is None
            and node.text == twin.text
        ):
            lefts.append(node.pid)
            rights.append(twin.pid)
        elif (
            type(node) is Call
            and type(twin) is Call
            and node.filling is None is twin.filling
            and node.kwargs < 0
            and twin.kwargs < 0
        ):
            if node.op != twin.op:
                return f"{_name(node)} became {_name(twin)}"
            lefts += (node.func, node.args)
            rights += (twin.func, twin.args)
        else:
            if own_value(node) != own_value(twin):
                return f"{_name(node)} became {_name(twin)}"
            here, there = parts_of(node), parts_of(twin)
            if compare_ids is not None and type(node) is Persistent and type(twin) is Persistent:
                one, other = ours[node.pid], theirs[twin.pid]
                if type(one) is tuple and type(other) is tuple and node.filling is None is twin.filling:
                    try:
                        here, there = compare_ids(one, other)
                    except ValueError as error:
                        return str(error)
            if len(here) != len(there):
                return f"{_name(node)} holds {len(here)} values, then {len(there)}"
            lefts += here
            rights += there
    return ""


def _shown(node: Node) -> str:
    """Return a constant, or a string without identity, as a message shows it."""
    return _name(node) if isinstance(node, str) else repr(node)


def _name(node: Node) -> str:
    if isinstance(node, Global):
        return f"{node.module}.{node.name}"
    if isinstance(node, str):
        return repr(node if len(node) <= 60 else node[:57] + "...")
    return type(node).__name__.lower()


# -- A pickle that differs from another one only in its strings


def redecoded(graph: Graph, original: bytes, data: bytes) -> Graph | None:
    """Return the graph of ``data`` if it differs from ``original``, the pickle of ``graph``, only in strings; else
    None.

    This saves a second run of ``decode``: unchanged nodes are shared by both graphs. The last result is cached in
    ``graph``, because a planned pickle is read back once more.
    """
    last = graph.cache.get(_LAST)
    if last is not None and last[0] == data:
        return cast(Graph, last[1])
    if op.STACK_GLOBAL in graph.refused:
        return None  # STACK_GLOBAL takes its name from strings, so a changed string could name another global
    nodes: list[Node] = list(graph.nodes)
    texts: dict[Ref, str] = {}
    at = begin = 0  # both pickles are compared up to these offsets
    try:
        # No byte after the last string may differ. A memo index there shows at once if an object is new or gone.
        for offset in graph.texts[1][-1:]:
            if not data.endswith(original[offset + _TEXT_HEAD + _u32(original, offset + 1)[0] :]):
                return None
        for ref, offset in zip(*graph.texts):
            start = begin + offset - at
            old_end = offset + _TEXT_HEAD + _u32(original, offset + 1)[0]
            new_end = start + _TEXT_HEAD + _u32(data, start + 1)[0]
            # The bytes before the text include its opcode.
            if original[at : offset + 1] != data[begin : start + 1]:
                return None
            text = data[start + _TEXT_HEAD : new_end].decode("utf-8", "surrogatepass")
            if text != nodes[ref]:
                nodes[ref] = texts[ref] = text
            at, begin = old_end, new_end
    except (struct.error, UnicodeDecodeError):
        return None
    if original[at:] != data[begin:]:
        return None
    common = graph.root, graph.style, graph.refused, graph.oddities, graph.filled_at
    other = Graph(nodes, *common, fetched=graph.fetched)
    graph.cache[_LAST] = data, other
    other.cache[_RESPELLED] = graph, texts
    return other


def respelled(graph: Graph, original: bytes, edited: Graph) -> bytes | None:
    """Return ``original``, the pickle of ``graph``, with the changed strings of ``edited`` in it.

    Return None if anything else changed, or a string has several parents. Most edits change names and devices only:
    then this takes a tenth of the time of ``encode``.
    """
    style, olds, news, count = graph.style, graph.nodes, edited.nodes, len(graph.nodes)
    unusual = op.STACK_GLOBAL in graph.refused or style.dialect not in (2, 3) or style.framed
    if unusual or graph.fetched is None or not graph.size or edited.root != graph.root:
        return None
    # A string that the pickle took only once has one parent, so an added one must have one, too.
    texts: dict[Ref, str] = {}
    used: set[Ref] = set()
    for ref in compress(range(count), map(is_not, olds, news)):
        old, new = olds[ref], news[ref]
        before, after = children(old), children(new)
        if type(old) is not type(new) or len(before) != len(after) or not before or own_value(old) != own_value(new):
            return None
        for one, other in zip(before, after):
            if one == other:
                continue
            text = news[other]
            if other < count or other in used or type(text) is not str or type(olds[one]) is not str:
                return None
            used.add(other)
            texts[one] = text
    if len(texts) != len(used) or not graph.fetched.isdisjoint(texts):
        return None
    edited.cache[_RESPELLED] = graph, dict(texts)
    pieces: list[bytes] = []
    at = 0
    for ref, offset in zip(*graph.texts):
        text = texts.pop(ref, None)
        if text is not None:
            raw = text.encode("utf-8", "surrogatepass")
            pieces += (original[at : offset + 1], _length(len(raw)), raw)
            at = offset + _TEXT_HEAD + _u32(original, offset + 1)[0]
    return None if texts else b"".join([*pieces, original[at : graph.size]])
