"""Compare two pickles as objects: structure, types, order, state and identity."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress, repeat
from itertools import count as count_from
from operator import is_, is_not, ne
from typing import Final, TypeAlias, cast

from . import opcodes as op
from .nodes import (
    CONSTANTS,
    CONTAINERS,
    Call,
    Dict,
    Global,
    Graph,
    Instance,
    Node,
    Persistent,
    Ref,
    children,
    own_value,
)

Refs: TypeAlias = tuple[Ref, ...]
#: Compares two persistent ids. Returns the references in both that must be equal, or raises ValueError with a message
#: that describes the difference.
CompareIds: TypeAlias = Callable[[Refs, Refs], tuple[Refs, Refs]]

#: The number of nodes that the pattern has before its call: see ``_pair_patterns``.
_BEFORE: Final = 6
_UNPAIRED: Final = [-1] * _BEFORE

_u32 = struct.Struct("<I").unpack_from
#: Bytes of a BINUNICODE before its text: the opcode and the length.
_TEXT_HEAD: Final = 5
#: The cache key of the last result of ``redecoded``.
_LAST: Final = ("redecoded", -1)


def difference(a: Graph, b: Graph, *, texts_by_value: bool = False, compare_ids: CompareIds | None = None) -> str:
    """Describe the first difference between two graphs; return "" if they are equal.

    Two graphs are equal if there is a one-to-one map between the nodes reachable from their roots, under which every
    node has the same type, value and order of children. Numbers, None and ``()`` have no identity. The way in which a
    node was written (opcode, memo, batches) does not count, nor do the strings that STACK_GLOBAL took. With
    ``texts_by_value``, strings have no identity either. ``compare_ids`` compares persistent ids that are tuples.
    """
    common = _common(a, b) if compare_ids is None and not texts_by_value else None
    if common is not None and not _difference(a, b, common, CONSTANTS, None):
        return ""
    nothing = bytes(max(len(a.nodes), len(b.nodes)))
    return _difference(a, b, nothing, (*CONSTANTS, str) if texts_by_value else CONSTANTS, compare_ids)


def _difference(
    a: Graph, b: Graph, common: Sequence[int], constants: Collection[type], compare_ids: CompareIds | None
) -> str:
    """Describe the first difference, or return "". ``common[ref]`` is 1 if node ``ref`` is known to be equal."""
    ours, theirs = a.nodes, b.nodes
    # The partner of each node, in both directions.
    forward, backward = [-1] * len(ours), [-1] * len(theirs)
    lefts, rights = [a.root], [b.root]
    # Several hundred thousand nodes are compared before an output is put in place, so frequent types need no call.
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
            if not (struct.pack(">d", node) == struct.pack(">d", twin) if kind is float else node == twin):
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
            paired = 1 in common[left - _BEFORE : left] or 1 in common[right - _BEFORE : right]
            rest = None if paired else _pair_patterns(ours, theirs, left, right, forward, backward, compare_ids)
            lefts += (node.func, node.args) if rest is None else rest[0]
            rights += (twin.func, twin.args) if rest is None else rest[1]
        else:
            if own_value(node) != own_value(twin):
                return f"{_name(node)} became {_name(twin)}"
            here, there = _compared(node), _compared(twin)
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


def _common(a: Graph, b: Graph) -> bytearray | None:
    """Return a byte per node: 1 for a node that is the same in both graphs, under the same number, with all its parts.

    ``a`` was edited. ``b`` is an edit of the same base, or was decoded from other bytes. Changed nodes and the
    containers that lead to them get 0. Return None if nothing is known to be common, or if anything other than a
    container holds a changed node.
    """
    base = a.base
    if base is None or base.fetched is None or base.root in base.fetched:
        return None
    nodes, ours, theirs = base.nodes, a.nodes, b.nodes
    fetched: AbstractSet[Ref] = base.fetched
    count, containers = len(nodes), set[Ref]()
    if base is b.base:
        texts = [ref for ref in a.changed & b.changed if type(ours[ref]) is str and ours[ref] == theirs[ref]]
        changed = set(a.changed | b.changed).difference(texts)
    elif b.base is None and b.fetched is not None:
        fetched = fetched | b.fetched
        count, changed, containers = _changed(nodes, theirs, fetched)
        changed.update([ref for ref in a.changed if ref < count])
    else:
        return None
    kinds = set(map(type, map(nodes.__getitem__, changed)))
    if not changed.isdisjoint(fetched) or not kinds.isdisjoint(CONSTANTS):
        return None
    # A node that the pickle took only once has one holder. If one of these containers holds it, no other node leads to
    # it.
    walked, work, left = [base.root], [base.root], set(changed - {base.root})
    keys: list[Ref] = []
    while work:
        node = nodes[work.pop()]
        parts = node.pairs if type(node) is Dict else children(node)
        left.difference_update(parts)
        for ref in parts:
            node = nodes[ref]
            kind = type(node)
            # Most children are keys, tensors and dicts of one pair.
            if kind is str:
                keys.append(ref)
            elif type(node) is Call and node.filling is None:
                continue
            elif (kind in CONTAINERS or (isinstance(node, Instance) and node.filling is not None)) and (
                ref not in fetched
            ):
                walked.append(ref)
                work.append(ref)
    if left or not all(_alike(nodes[ref], theirs[ref], count) for ref in containers.difference(walked)):
        return None
    common = bytearray(b"\1") * count + bytes(max(len(ours), len(theirs)) - count)
    # A key may have moved to the number of another one.
    moved = set(keys).difference(fetched) if base is not b.base else set[Ref]()
    for ref in moved.union(changed, walked):
        if ref < count:
            common[ref] = 0
    return common


def _alike(node: Node, other: Node, count: int) -> bool:
    """Return whether two nodes are equal, with the same references, all below ``count``."""
    parts = children(node)
    equal = type(node) is type(other) and own_value(node) == own_value(other) and [*parts] == [*children(other)]
    return equal and max(parts, default=-1) < count


def _changed(
    nodes: Sequence[Node], others: Sequence[Node], fetched: AbstractSet[Ref]
) -> tuple[int, set[Ref], set[Ref]]:
    """Compare the nodes of two decoded graphs by number, as far as they have the same types and constants.

    Return how many nodes were compared, the numbers of different ones, and the numbers of containers, which were not
    compared. A node in ``fetched`` ends the comparison if it is different. A decoded node other than a container leads
    to smaller numbers only.
    """
    changed, containers = set[Ref](), set[Ref]()
    count = min(len(nodes), len(others))
    kinds, other_kinds = list(map(type, nodes)), list(map(type, others))
    if kinds[:count] != other_kinds[:count]:
        count = next(compress(count_from(0), map(is_not, kinds, other_kinds)))
    if float in kinds:
        places = compress(range(count), map(is_, kinds, repeat(float)))
        count = next((ref for ref in places if repr(nodes[ref]) != repr(others[ref])), count)  # 0.0 is equal to -0.0
    for ref in compress(range(count), map(ne, nodes, others)):
        node, other = nodes[ref], others[ref]
        if type(node) is Call and type(other) is Call and node.filling is None is other.filling:
            same = node.args == other.args and node.func == other.func
            if same and node.op == other.op and node.kwargs == other.kwargs:
                continue
        elif type(node) is Persistent and type(other) is Persistent and node.filling is None is other.filling:
            if node.pid == other.pid and node.text == other.text:
                continue
        elif type(node) is Global and type(other) is Global and node.filling is None is other.filling:
            if node.module == other.module and node.name == other.name and node.parts == other.parts:
                continue
        elif type(node) in CONTAINERS or (isinstance(node, Instance) and node.filling is not None):
            containers.add(ref)
            continue
        if ref in fetched or type(node) in CONSTANTS:
            return ref, changed, {place for place in containers if place < ref}
        changed.add(ref)
    return count, changed, containers


def _compared(node: Node) -> Sequence[Ref]:
    """Return the children to compare. For a global they exclude its two name strings, because the name itself is
    compared.
    """
    return children(node)[2:] if isinstance(node, Global) and node.parts is not None else children(node)


def _shown(node: Node) -> str:
    """Return a constant, or a string without identity, as a message shows it."""
    return _name(node) if isinstance(node, str) else repr(node)


def _name(node: Node) -> str:
    if isinstance(node, Global):
        return f"{node.module}.{node.name}"
    if isinstance(node, str):
        return repr(node if len(node) <= 60 else node[:57] + "...")
    return type(node).__name__.lower()


# -- A peephole: compare in one step the nodes of the pattern that torch.save repeats per tensor (``fast_decode``)


def _pair_patterns(
    ours: Sequence[Node],
    theirs: Sequence[Node],
    left: Ref,
    right: Ref,
    forward: list[Ref],
    backward: list[Ref],
    compare_ids: CompareIds | None,
) -> tuple[Refs, Refs] | None:
    """Pair the nodes of two patterns, whose calls are ``left`` and ``right``, and return the references still to
    compare.

    For anything unusual, pair nothing and return None.
    """
    begin, start = left - _BEFORE, right - _BEFORE
    if begin < 0 or start < 0 or forward[begin:left] != _UNPAIRED or backward[start:right] != _UNPAIRED:
        return None
    here, there = _pattern(ours, begin, left), _pattern(theirs, start, right)
    if here is None or there is None:
        return None
    own_id, shape, strides, rest = here
    other_id, other_shape, other_strides, other_rest = there
    if compare_ids is not None:
        try:
            own_id, other_id = compare_ids(own_id, other_id)
        except ValueError:
            return None
    if len(own_id) != len(other_id) or len(shape) != len(other_shape) or len(strides) != len(other_strides):
        return None
    forward[begin:left] = range(start, right)
    backward[start:right] = range(begin, left)
    one, other = (*rest, *shape, *strides), (*other_rest, *other_shape, *other_strides)
    # Nearly all of these are already paired: the function, dimensions, the empty hooks.
    if (*map(forward.__getitem__, one),) != other:
        return (*own_id, *one), (*other_id, *other)
    return ((), ()) if (*map(forward.__getitem__, own_id),) == other_id else (own_id, other_id)


def _pattern(nodes: Sequence[Node], begin: Ref, end: Ref) -> tuple[Refs, Refs, Refs, Refs] | None:
    """Return the references of the persistent id, shape, strides and the rest of a pattern; None for other nodes."""
    pid, storage, shape, strides, hooks, args, call = nodes[begin : end + 1]
    if (
        type(pid) is tuple
        and type(storage) is Persistent
        and type(shape) is tuple
        and type(strides) is tuple
        and type(hooks) is Call
        and type(args) is tuple
        and type(call) is Call
        and len(args) == _BEFORE
        and storage.pid == begin
        and not storage.text
        and storage.filling is None is hooks.filling
        and hooks.kwargs < 0
        and call.args == begin + 5
    ):
        outside, offset, first, second, flag, last = args
        if outside == begin + 1 and first == begin + 2 and second == begin + 3 and last == begin + 4:
            # An empty tuple has no identity.
            return (
                (pid, shape, strides, (hooks.func, hooks.args, offset, flag, call.func)) if shape and strides else None
            )
    return None


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
    changed: list[Ref] = []
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
                nodes[ref] = text
                changed.append(ref)
            at, begin = old_end, new_end
    except (struct.error, UnicodeDecodeError):
        return None
    if original[at:] != data[begin:]:
        return None
    common = graph.root, graph.style, graph.refused, graph.oddities, graph.filled_at
    other = Graph(nodes, *common, fetched=graph.fetched, base=graph, changed=frozenset(changed))
    graph.cache[_LAST] = data, other
    return other
