"""Encode a graph to the bytes that CPython's pickler would have written.

A pickle from ``torch.save`` is reproduced byte for byte. A pickle from another writer is reproduced as closely as
possible, and is always equal as a graph. The graph does not record when a pickle filled the arguments of a call; they
are filled before the call, as every pickler does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import Final, TypeAlias, cast

from ..base.records import NamedTuple
from . import emit
from . import opcodes as op
from .batches import batched
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
    dependencies,
)

_Refs: TypeAlias = tuple[Ref, ...]
#: The bytes of a tensor: (head, base, step, size). ``head`` comes before its storage's key. The ``size`` bytes after
#: the key are the little-endian number ``base + index * step``; ``index`` is the memo index of the key.
_Template: TypeAlias = tuple[bytes, int, int, int]
_u32 = Struct("<I").pack
_long_binput = Struct("<BI").pack

#: Bytes after which a FRAME is closed (``FRAME_SIZE_TARGET`` in _pickle.c).
_FRAME_TARGET: Final = 64 * 1024

#: Values in place of a memo index: the node was not reached yet, is being written, or was written but not memoized.
_UNSEEN, _OPEN, _UNMEMOIZED = -1, -2, -3
#: The opcodes of tuples by length.
_TUPLES: Final = (b"", b"\x85", b"\x86", b"\x87")
#: A value in place of a node to construct: these references fill a node that exists already.
_NO_NODE: Final = -1
#: The cache key of the pickle of a graph.
_PICKLE: Final = ("pickle", -1)
#: Types of nodes that the pickler does not memoize.
_NEVER_MEMOIZED: Final = (*CONSTANTS, Persistent, Extension, Buffer)

_MANY: Final = frozenset((op.APPENDS, op.SETITEMS, op.ADDITEMS))
_CONSTRUCTORS: Final = {Persistent: b"Q", Global: b"\x93", Buffer: b"\x98", FrozenSet: b"\x91", List: b"l", Dict: b"d"}


class _ReusedError(Exception):
    """A node that the style does not memoize is needed twice."""


class _CyclicError(Exception):
    """A node depends on itself; writing it as the C pickler does would take POP, or too much time."""


class Cycle(NamedTuple):
    """Nodes that all lead to each other; ``dependent`` are the members that depend on another member."""

    members: frozenset[Ref]
    dependent: tuple[Ref, ...]


class _Writer:
    """One attempt to write a graph.

    ``keep`` are nodes to memoize whatever the style says, or None in the first attempt. ``written_first`` are the
    cycles to write before the root. ``memo`` holds the memo index of each node. ``codes`` holds the bytes to write for
    a node from its second use on, or None as long as they were not needed.
    """

    def __init__(self, graph: Graph, keep: frozenset[Ref] | None, written_first: Sequence[Cycle] | None) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.style = graph.style
        self.dialect = graph.style.dialect
        self.written_first = written_first
        self.first_attempt = keep is None
        self.unmemoized = graph.style.unmemoized - (keep or frozenset())
        self.memoized = graph.style.memoized | (keep or frozenset())
        self.out = bytearray()
        self.codes: list[bytes | None] = [None] * len(graph.nodes)
        self.templates: dict[tuple[_Refs, _Refs, _Refs, Ref | str], _Template] = {}
        self.memo = [_UNSEEN] * len(graph.nodes)
        # MEMOIZE always counts from 0.
        self.next_index = graph.style.memo_base if self.dialect < 4 else 0
        # How many nodes may still be written twice: see ``check_repeated``.
        self.repeat_budget = 4 * len(graph.nodes) + 100_000
        # In a cycle: the members to fill at its end, and the ones that exist by now.
        self.fill_later: frozenset[Ref] = frozenset()
        self.unfilled: list[Ref] = []
        self.discarded: set[Ref] = set()
        self.frames: list[tuple[int, int]] = []
        self.frame_start = 0

    def run(self) -> bytes:
        """Return the pickle."""
        out, nodes, codes, memo = self.out, self.nodes, self.codes, self.memo
        style, forms, unmemoized, memoized = self.style, self.style.forms, self.unmemoized, self.memoized
        dialect, framed, discarded = self.dialect, style.framed, style.discarded
        # In protocols 2 and 3, which torch.save writes, frequent types need no call.
        plain, binary = dialect in (2, 3) and not framed, dialect >= 2
        exceptions = forms.keys() | unmemoized | style.batches.keys()
        usual = plain and not exceptions and not memoized and not discarded
        if style.header:
            out += bytes((op.PROTO, style.protocol))
        self.frame_start = len(out)
        # A stack of suspended rows of references, and for each the node that the row entered after it constructs.
        waiting: list[Iterator[Ref]] = []
        constructs: list[Ref] = []
        row = self.start()
        while True:
            for ref in row:
                if framed and len(out) - self.frame_start >= _FRAME_TARGET:
                    self.end_frame()
                code = codes[ref]
                if code:
                    out += code
                    continue
                index = memo[ref]
                if index >= 0:
                    code = codes[ref] = emit.get(index, dialect)
                    out += code
                    continue
                if index != _UNSEEN:
                    self.check_repeated(ref)
                node = nodes[ref]
                if type(node) is Call and usual and self.write_tensor(ref, node):
                    continue
                if type(node) is str and plain and ref not in exceptions:
                    raw = node.encode("utf-8", "surrogatepass")
                    memo[ref] = index = self.next_index
                    self.next_index = index + 1
                    put = _long_binput(0x72, index) if index > 0xFF else bytes((0x71, index))
                    out += b"X%b%b%b" % (_u32(len(raw)), raw, put)
                    continue
                if type(node) is Dict and len(node.pairs) == 2 and plain:
                    key, value = codes[node.pairs[0]], codes[node.pairs[1]]
                    if key and value and ref not in exceptions:  # such as the version of a module
                        out += b"}"
                        self.memoize(ref)
                        out += key + value + b"s"
                        continue
                inner: Iterator[Ref] | None
                if type(node) is tuple and node:
                    memo[ref] = _OPEN
                    if len(node) > 3 or not binary or (forms and forms.get(ref) == 0x74):
                        out += b"("
                    inner = iter(node)
                elif type(node) is Call and node.op == 0x52 and not discarded:
                    memo[ref] = _OPEN
                    inner = iter((node.func, node.args))
                else:
                    inner = self.write(ref, node)
                    if inner is None:
                        continue
                waiting.append(row)
                constructs.append(ref if memo[ref] == _OPEN else _NO_NODE)
                row = inner
                break
            else:
                # The row has ended, so its node can be constructed.
                if not waiting:
                    break
                row = waiting.pop()
                ref = constructs.pop()
                if ref < 0:
                    continue
                node = nodes[ref]
                simple = plain and memo[ref] == _OPEN
                if type(node) is tuple and simple:
                    size = len(node)
                    out += b"t" if size > 3 or (forms and forms.get(ref) == 0x74) else _TUPLES[size]
                elif type(node) is Call and simple and node.op == 0x52 and node.filling is None:
                    out += b"R"
                else:
                    filling = self.construct(ref, node)
                    if filling is not None:
                        waiting.append(row)
                        constructs.append(_NO_NODE)
                        row = filling
                    continue
                if unmemoized and ref in unmemoized:
                    memo[ref] = _UNMEMOIZED
                    continue
                memo[ref] = index = self.next_index
                self.next_index += 1
                out += _long_binput(0x72, index) if index > 0xFF else bytes((0x71, index))
        out += b"."
        if framed:
            self.end_frame()
            return emit.framed(out, self.frames)
        return bytes(out)

    def start(self) -> Iterator[Ref]:
        """Yield the root, and before it the cycles.

        A cycle is written in two rounds: first its tuples and calls with empty lists, then the contents of these lists.
        The result stays on the stack below the root, because torch's restricted unpickler has no POP.
        """
        if self.written_first:
            self.out += b"("
            for cycle in self.written_first:
                self.fill_later = cycle.members
                yield from cycle.dependent
                unfilled, self.fill_later, self.unfilled = self.unfilled, frozenset(), []
                for ref in unfilled:
                    yield ref
                    yield from self.fill(ref, self.nodes[ref])
            self.out += b"t"
        yield self.graph.root

    def check_repeated(self, ref: Ref) -> None:
        """Raise an error unless a node without a memo index, met a second time, may be written twice."""
        inside = self.memo[ref] == _OPEN
        if self.first_attempt and not inside:
            raise _ReusedError
        # The C pickler also writes it twice. But for a handmade tuple with very many lists that hold the tuple, it
        # would write very many copies.
        self.repeat_budget -= 1 + len(children(self.nodes[ref]))
        has_pop = op.POP in self.graph.refused or op.POP_MARK in self.graph.refused
        if self.repeat_budget < 0 or (inside and not has_pop):
            if self.written_first is None:
                raise _CyclicError
            raise ValueError("an object depends on itself, and nothing between can be filled later")

    def write_tensor(self, ref: Ref, call: Call) -> bool:
        """Write a tensor in one step if it has the form that ``torch.save`` gives most tensors; else return False.

        Its storage's key, its tuples and its hooks are new; all other parts were written before. Tensors with the same
        other parts have the same bytes, except the key and the memo indices.
        """
        nodes, codes, memo, index = self.nodes, self.codes, self.memo, self.next_index
        args = nodes[call.args]
        if type(args) is not tuple or len(args) != 6 or index <= 0xFF or call.op != 0x52:
            return False
        storage, begin, shape, stride, flag, hooks = args
        saved, hook, sizes, steps = nodes[storage], nodes[hooks], nodes[shape], nodes[stride]
        if type(saved) is not Persistent or type(hook) is not Call or type(sizes) is not tuple:
            return False
        pid, filled = nodes[saved.pid], call.filling or saved.filling or hook.filling
        if type(steps) is not tuple or type(pid) is not tuple or len(pid) != 5:
            return False
        word, cls, name, place, numel = pid
        key, device = nodes[name], nodes[place]
        # If the storage, its id or the arguments were written before, so were their parts.
        unseen = memo[name] == memo[shape] == memo[stride] == memo[hooks] == _UNSEEN
        if type(key) is not str or not unseen or shape == stride or filled or saved.text or hook.op != 0x52:
            return False
        where: Ref | str = place
        if not codes[place]:
            if memo[place] != _UNSEEN or type(device) is not str or place == name:
                return False
            where = device
        parts = call.func, word, cls, numel, begin, flag, hook.func, hook.args
        template = self.templates.get((parts, sizes, steps, where)) or self.template(parts, sizes, steps, where)
        if template is None:
            return False
        head, base, step, size = template
        raw = key.encode("utf-8", "surrogatepass")
        self.out += b"%bX%b%b%b" % (head, _u32(len(raw)), raw, (base + index * step).to_bytes(size, "little"))
        memo[name], memo[storage] = index, _UNMEMOIZED
        if where is device:
            index += 1
            memo[place] = index
        memo[saved.pid], memo[shape], memo[stride] = index + 1, index + 2, index + 3
        memo[hooks], memo[call.args], memo[ref] = index + 4, index + 5, index + 6
        self.next_index = index + 7
        return True

    def template(self, parts: _Refs, sizes: _Refs, steps: _Refs, where: Ref | str) -> _Template | None:
        """Return the bytes of tensors with these parts, or None if one of them was not written before. ``where`` is
        their device: a string that was written before, or the text of a new one."""
        written = [code for code in map(self.codes.__getitem__, (*parts, *sizes, *steps)) if code]
        if len(written) < len(parts) + len(sizes) + len(steps) or not sizes or not steps:
            return None
        func, word, cls, numel, begin, flag, maker, nothing, *numbers = written
        shape, stride = (
            b"".join((*items, _TUPLES[len(items)]) if len(items) < 4 else (b"(", *items, b"t"))
            for items in (numbers[: len(sizes)], numbers[len(sizes) :])
        )
        # Each of these precedes the memo index of the object that it ends.
        ends = [b"", numel + b"t", b"Q" + begin + shape, stride, flag + maker + nothing + b"R", b"t", b"R"]
        if isinstance(where, str):
            raw = where.encode("utf-8", "surrogatepass")
            ends.insert(1, b"X%b%b" % (_u32(len(raw)), raw))
        else:
            ends[1] = (self.codes[where] or b"") + ends[1]
        tail, step = b"", 0
        for number, end in enumerate(ends):
            tail += end + b"r"
            step += 1 << 8 * len(tail)
            tail += _u32(number)
        template = func + b"((" + word + cls, int.from_bytes(tail, "little"), step, len(tail)
        self.templates[parts, sizes, steps, where] = template
        return template

    # -- uncommon nodes

    def write(self, ref: Ref, node: Node) -> Iterator[Ref] | None:
        """Write a node, or the bytes before its dependencies; return the references to write next, or None.

        If these references are its dependencies, the node stays open.
        """
        form = self.style.forms.get(ref, -1)
        if isinstance(node, str):
            self.write_sized(*emit.text(node, form, self.dialect))
        elif isinstance(node, bytes):
            self.write_sized(*emit.byte_string(node, form))
        elif isinstance(node, ByteArray):
            self.write_sized(b"\x96" + len(node.data).to_bytes(8, "little"), node.data)
        elif isinstance(node, CONSTANTS) or node == ():
            code = emit.constant(node, form, self.dialect)
            self.out += code
            if ref not in self.memoized:
                self.codes[ref] = code
                return None
        elif isinstance(node, Call) and ref in self.style.discarded and ref not in self.discarded:
            return self.write_discarded(ref)
        elif isinstance(node, Set):
            self.out += b"\x8f"
        elif isinstance(node, List | Dict) and not self.is_whole(form):
            empty, from_mark = (b"]", b"(l") if isinstance(node, List) else (b"}", b"(d")
            self.out += empty if self.dialect or form in (op.EMPTY_LIST, op.EMPTY_DICT) else from_mark
        elif isinstance(node, Global) and node.parts is None:
            self.out += emit.name(node, op.GLOBAL)
        elif isinstance(node, Global) and [self.nodes[part] for part in node.parts or ()] != [node.module, node.name]:
            self.out += emit.stack_name(node, self.dialect)  # an edit renamed it
        elif isinstance(node, Extension):
            self.out += emit.extension(node.code, form)
        elif isinstance(node, Persistent) and node.text:
            self.out += b"P%b\n" % str(self.nodes[node.pid]).encode("ascii")
        elif isinstance(node, Buffer) and node.inner < 0:
            self.out += b"\x97"
        else:
            return self.open(ref, node)
        return self.memoize_and_fill(ref, node)

    def write_discarded(self, ref: Ref) -> Iterator[Ref]:
        """Yield the call that leads to the object it would return, then discard its result."""
        self.discarded.add(ref)
        yield self.style.discarded[ref]
        self.out += b"0"
        if self.memo[ref] >= 0:
            self.out += emit.get(self.memo[ref], self.dialect)
        else:
            yield ref

    def is_whole(self, form: int) -> bool:
        """Return whether a list or dict is written as one LIST or DICT, after its elements."""
        return form in (op.LIST, op.DICT) and self.written_first is None

    def open(self, ref: Ref, node: Node) -> Iterator[Ref]:
        """Write the bytes before the dependencies of a node, and return the dependencies."""
        self.memo[ref] = _OPEN
        if isinstance(node, Call) and node.op in (op.OBJ, op.INST):
            args = self.nodes[node.args]
            if not isinstance(args, tuple):
                raise ValueError("the arguments of OBJ and INST are a tuple")
            self.out += b"("
            return iter(args) if node.op == op.INST else chain((node.func,), args)
        if isinstance(node, FrozenSet | List | Dict) or (isinstance(node, tuple) and self.has_mark(ref, node)):
            self.out += b"("
        return iter(children(node) if isinstance(node, List | Dict) else dependencies(node))

    def has_mark(self, ref: Ref, node: tuple[Ref, ...]) -> bool:
        """Return whether a tuple is written with MARK and TUPLE."""
        return len(node) > 3 or self.dialect < 2 or self.style.forms.get(ref) == op.TUPLE

    def construct(self, ref: Ref, node: Node) -> Iterator[Ref] | None:
        """Write the opcode that constructs a node from its dependencies; return the references to fill it, or None."""
        if self.memo[ref] >= 0:
            self.drop(ref, node)
            return None
        if self.memo[ref] == _UNMEMOIZED and self.first_attempt:
            # It was constructed within itself, and not memoized.
            raise _ReusedError
        self.out += b"t" if isinstance(node, tuple) and self.has_mark(ref, node) else self.constructor(node)
        return self.memoize_and_fill(ref, node)

    def constructor(self, node: Node) -> bytes:
        """Return the opcode that constructs a node, if its style does not matter."""
        if isinstance(node, tuple):
            return _TUPLES[len(node)]
        if isinstance(node, Call):
            cls = self.nodes[node.func]
            if node.op != op.INST:
                return bytes((node.op,))
            if not isinstance(cls, Global):
                raise ValueError("INST names a class")
            return emit.name(cls, op.INST)
        return _CONSTRUCTORS[type(node)]

    def drop(self, ref: Ref, node: Node) -> None:
        """Discard the dependencies of a node that was constructed while they were written, and fetch the node.

        ``save_tuple``, ``save_frozenset`` and ``save_reduce`` in _pickle.c do the same.
        """
        if isinstance(node, tuple) and not self.has_mark(ref, node):
            self.out += b"0" * len(node)
        elif isinstance(node, tuple | FrozenSet | List | Dict):
            self.out += b"1" if self.dialect else b"0" * (len(children(node)) + 1)
        else:
            self.out += self.constructor(node) + b"0"
        self.out += emit.get(self.memo[ref], self.dialect)

    # -- memo and filling

    def memoize_and_fill(self, ref: Ref, node: Node) -> Iterator[Ref] | None:
        """Memoize a new node, as its type and the style demand; return the references that fill it, or None."""
        if ref not in self.memoized if isinstance(node, _NEVER_MEMOIZED) else ref in self.unmemoized:
            self.memo[ref] = _UNMEMOIZED
        elif self.style.memoize_late and isinstance(node, Call) and node.op == op.NEWOBJ and node.filling is not None:
            self.memo[ref] = _UNMEMOIZED
            return self.fill(ref, node, memoize=True)
        else:
            self.memoize(ref)
        if isinstance(node, Instance):
            empty = node.filling is None
        else:
            empty = not isinstance(node, List | Dict | Set) or self.is_whole(self.style.forms.get(ref, -1))
        if not empty and ref in self.fill_later:
            self.unfilled.append(ref)
            return None
        return None if empty else self.fill(ref, node)

    def memoize(self, ref: Ref) -> None:
        """Give the node on top of the stack the next memo index."""
        self.memo[ref] = index = self.next_index
        self.next_index += 1
        self.out += emit.put(index, self.dialect)

    def fill(self, ref: Ref, node: Node, memoize: bool = False) -> Iterator[Ref]:
        """Yield the references that fill a node; memoize it afterwards if requested."""
        for code, refs in batched(node, self.style.batches.get(ref), self.dialect):
            if code in _MANY:
                self.out += b"("
            yield from refs
            self.out.append(code)
        if memoize:
            self.memoize(ref)

    # -- frames

    def write_sized(self, head: bytes, body: bytes) -> None:
        """Write a string or bytes; large ones are outside of every FRAME (``_Pickler_write_bytes`` in _pickle.c)."""
        unframed = self.style.framed and len(body) >= _FRAME_TARGET
        if unframed:
            self.end_frame()
        self.out += head
        self.out += body
        if unframed:
            self.frame_start = len(self.out)

    def end_frame(self) -> None:
        """End a FRAME here; the next one begins."""
        self.frames.append((self.frame_start, len(self.out)))
        self.frame_start = len(self.out)


def encode(graph: Graph) -> bytes:
    """Return the pickle of a graph, including PROTO and STOP, in the style that the graph carries.

    Raises ValueError for a graph that no pickle can express, such as a tuple that holds itself, or a name that no
    opcode can write. ``decode`` never returns such a graph. The result is cached in ``graph``.
    """
    keep, written_first = None, None
    while _PICKLE not in graph.cache:
        # Further attempts are rare, so the first one skips the walk that would show whether they are needed.
        try:
            graph.cache[_PICKLE] = _Writer(graph, keep, written_first).run()
            break
        except _ReusedError:
            pass
        except _CyclicError:
            written_first = cycles(graph)
        keep = shared_refs(graph).union(*(cycle.members for cycle in written_first or ()))
    return cast(bytes, graph.cache[_PICKLE])


# -- shared objects and cycles


def shared_refs(graph: Graph) -> frozenset[Ref]:
    """Return the nodes with identity that have several parents; without a memo index, a pickle would duplicate them."""
    nodes = graph.nodes
    seen, shared = bytearray(len(nodes)), set()
    seen[graph.root] = 1
    for ref in graph.reachable():
        for child in children(nodes[ref]):
            if not seen[child]:
                seen[child] = 1
            elif not isinstance(nodes[child], CONSTANTS) and nodes[child] != ():
                shared.add(child)
    return frozenset(shared)


def cycles(graph: Graph) -> list[Cycle]:
    """Return the cycles of a graph that contain a dependency, each after the cycles that it leads to.

    They are the strongly connected components (Tarjan, without recursion) in which a member depends on another one.
    """
    nodes = graph.nodes
    result = []
    order: dict[Ref, int] = {}
    lowest: dict[Ref, int] = {}
    waiting: list[Ref] = []
    settled = bytearray(len(nodes))
    path: list[tuple[Ref, Iterator[Ref]]] = []

    def enter(ref: Ref) -> None:
        order[ref] = lowest[ref] = len(order)
        waiting.append(ref)
        path.append((ref, iter(children(nodes[ref]))))

    enter(graph.root)
    while path:
        ref, rest = path[-1]
        for child in rest:
            if child not in order:
                enter(child)
                break
            if not settled[child]:
                lowest[ref] = min(lowest[ref], order[child])
        else:
            path.pop()
            if path:
                parent = path[-1][0]
                lowest[parent] = min(lowest[parent], lowest[ref])
            if lowest[ref] < order[ref]:
                continue
            component: set[Ref] = set()
            while ref not in component:
                member = waiting.pop()
                settled[member] = 1
                component.add(member)
            dependent = [member for member in component if not component.isdisjoint(dependencies(nodes[member]))]
            if dependent:
                result.append(Cycle(frozenset(component), tuple(sorted(dependent))))
    return result
