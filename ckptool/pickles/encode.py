"""From a graph to bytes.

A pickle that ``torch.save`` wrote comes out byte for byte, and one by another writer as near as it goes,
always equal as a graph. When things were filled that a call took is no part of the graph: what a call takes
is filled before it, as every pickler does it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct

from . import emit
from . import opcodes as op
from .batches import chunks
from .cycles import Knot, knots, shared
from .fast_encode import LOOSE, NEW, Phrases
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
    ingredients,
)

# -- Writing a graph as CPython's pickler would have written it: the work behind ``encode``

_u32 = Struct("<I").pack
_long_binput = Struct("<BI").pack

#: Bytes after which a FRAME is closed (``FRAME_SIZE_TARGET`` in _pickle.c).
_FRAME_TARGET = 64 * 1024

#: The mark of a node that is being made; NEW and LOOSE are the others that are no memo numbers.
_OPEN = -2

#: Made here once: to make an array is an event for an audit hook, to repeat one is not.
_UNMARKED = array("i", (NEW,))
#: In place of the node that a row of references makes: it makes none, it fills one.
_NOTHING = -1
#: Kinds that the pickler does not memoise.
_BARE = (*CONSTANTS, Persistent, Extension, Buffer)

_TUPLES = (b"", b"\x85", b"\x86", b"\x87")
_MANY = frozenset((op.APPENDS, op.SETITEMS, op.ADDITEMS))
_MAKERS = ((Persistent, b"Q"), (Global, b"\x93"), (Buffer, b"\x98"), (FrozenSet, b"\x91"), (List, b"l"), (Dict, b"d"))


class SharedError(Exception):
    """A node that the style does not memoise is needed twice."""


class TangledError(Exception):
    """A node is an ingredient of itself; to write that as the C pickler does would take POP, or too much time."""


class Writer:
    """One attempt at a graph.

    ``keep`` are nodes to memoise whatever the style says, None in the first attempt; ``tangled`` are the
    knots to tie beforehand. ``ready`` holds for each node that is written what to write in its place from
    then on; b"" stands for a GET of its number in ``marks`` that was not needed yet.
    """

    def __init__(self, graph: Graph, keep: frozenset[Ref] | None, tangled: Sequence[Knot] | None) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.style = graph.style
        self.dialect = graph.style.dialect
        self.tangled = tangled
        self.first = keep is None
        self.loose = graph.style.unput - (keep or frozenset())
        self.extra = graph.style.put | (keep or frozenset())
        self.out = bytearray()
        self.ready: list[bytes | None] = [None] * len(graph.nodes)
        self.marks = _UNMARKED * len(graph.nodes)
        # The next memo number. MEMOIZE always counts from 0.
        self.number = graph.style.memo_base if self.dialect < 4 else 0
        # What may be written twice, in nodes: see ``again``.
        self.patience = 4 * len(graph.nodes) + 100_000
        # While a knot is tied: what is to be filled later, and what of that is made by now.
        self.later: frozenset[Ref] = frozenset()
        self.unfilled: list[Ref] = []
        self.begun: set[Ref] = set()
        self.frames: list[tuple[int, int]] = []
        self.frame_start = 0

    def run(self) -> bytes:
        """Write everything."""
        out, nodes, ready, marks = self.out, self.nodes, self.ready, self.marks
        style, forms, loose, extra = self.style, self.style.forms, self.loose, self.extra
        dialect, framed, remade = self.dialect, style.framed, style.remade
        # In protocols 2 and 3, which torch.save writes, the frequent kinds need no call.
        plain, brief = dialect in (2, 3) and not framed, dialect >= 2
        phrases = Phrases(nodes, marks, ready)
        whole = plain and not (forms or loose or extra or style.steps or remade or self.tangled)
        if style.header:
            out += bytes((op.PROTO, style.protocol))
        self.frame_start = len(out)
        # The rows of references that wait, and for each the node that the row after it makes.
        todo: list[Iterator[Ref]] = []
        makes: list[Ref] = []
        row = self.beginning()
        while True:
            for ref in row:
                if framed and len(out) - self.frame_start >= _FRAME_TARGET:
                    self.cut()
                code = ready[ref]
                if code:
                    out += code
                    continue
                if code is not None:
                    code = ready[ref] = emit.get(marks[ref], dialect)
                    out += code
                    continue
                if marks[ref] != NEW:
                    self.again(ref)
                node = nodes[ref]
                if type(node) is str and plain and not (forms and ref in forms) and not (loose and ref in loose):
                    raw = node.encode("utf-8", "surrogatepass")
                    marks[ref] = number = self.number
                    self.number += 1
                    ready[ref] = b""
                    out += b"X%b%b" % (_u32(len(raw)), raw)
                    out += _long_binput(0x72, number) if number > 0xFF else bytes((0x71, number))
                    continue
                if whole and (phrase := phrases.write(ref, node, self.number)):
                    out += phrase
                    self.number = marks[ref] + 1
                    continue
                inner: Iterator[Ref] | None
                if type(node) is tuple and node:
                    marks[ref] = _OPEN
                    if len(node) > 3 or not brief or (forms and forms.get(ref) == 0x74):
                        out += b"("
                    inner = iter(node)
                elif type(node) is Call and node.op == 0x52 and not remade:
                    marks[ref] = _OPEN
                    inner = iter((node.func, node.args))
                elif type(node) is Persistent and not node.text:
                    marks[ref] = _OPEN
                    inner = iter((node.pid,))
                else:
                    inner = self.write(ref, node)
                    if inner is None:
                        continue
                todo.append(row)
                makes.append(ref if marks[ref] == _OPEN else _NOTHING)
                row = inner
                break
            else:
                # The row has ended: now the node can be made that it was for.
                if not todo:
                    break
                row = todo.pop()
                ref = makes.pop()
                if ref < 0:
                    continue
                node = nodes[ref]
                usual = plain and marks[ref] == _OPEN
                if type(node) is tuple and usual:
                    size = len(node)
                    out += b"t" if size > 3 or (forms and forms.get(ref) == 0x74) else _TUPLES[size]
                elif type(node) is Call and usual and node.op == 0x52 and node.filling is None:
                    out += b"R"
                elif type(node) is Persistent and usual and node.filling is None:
                    out += b"Q"
                    if not extra or ref not in extra:
                        marks[ref] = LOOSE
                        continue
                else:
                    filling = self.close(ref, node)
                    if filling is not None:
                        todo.append(row)
                        makes.append(_NOTHING)
                        row = filling
                    continue
                if loose and ref in loose:
                    marks[ref] = LOOSE
                    continue
                marks[ref] = number = self.number
                self.number += 1
                ready[ref] = b""
                out += _long_binput(0x72, number) if number > 0xFF else bytes((0x71, number))
        out += b"."
        if framed:
            self.cut()
            return emit.framed(out, self.frames)
        return bytes(out)

    def beginning(self) -> Iterator[Ref]:
        """The row of the root, before it the knots.

        A knot is tied in two rounds: its tuples and calls are made with empty lists, then these are filled. What
        is left stays on the stack below the root, because POP is no instruction of weights_only.
        """
        if self.tangled:
            self.out += b"("
            for knot in self.tangled:
                self.later = knot.members
                yield from knot.made
                unfilled, self.later, self.unfilled = self.unfilled, frozenset(), []
                for ref in unfilled:
                    yield ref
                    yield from self.filling(ref, self.nodes[ref])
            self.out += b"t"
        yield self.graph.root

    def again(self, ref: Ref) -> None:
        """A node without a memo number is met a second time: may it be written twice?"""
        inside = self.marks[ref] == _OPEN
        if self.first and not inside:
            raise SharedError
        # The C pickler writes it twice, too. But of a handmade tuple with very many lists that hold the tuple
        # it would write very many copies.
        self.patience -= 1 + len(children(self.nodes[ref]))
        pops = op.POP in self.graph.refused or op.POP_MARK in self.graph.refused
        if self.patience < 0 or (inside and not pops):
            if self.tangled is None:
                raise TangledError
            raise ValueError("an object is an ingredient of itself, and nothing between can be filled later")

    # -- the seldom kinds -----------------------------------------------------------------------------

    def write(self, ref: Ref, node: Node) -> Iterator[Ref] | None:
        """Write a node, or what comes before its ingredients; the row that has to follow, if any.

        Leaves the node marked as open if that row is its ingredients.
        """
        form = self.style.forms.get(ref, -1)
        if isinstance(node, str):
            self.emit(*emit.text(node, form, self.dialect))
        elif isinstance(node, bytes):
            self.emit(*emit.byte_string(node, form))
        elif isinstance(node, ByteArray):
            self.emit(*emit.byte_array(node.data))
        elif isinstance(node, CONSTANTS) or node == ():
            code = emit.constant(node, form, self.dialect)
            self.out += code
            if ref not in self.extra:
                self.ready[ref] = code
                return None
        elif isinstance(node, Call) and ref in self.style.remade and ref not in self.begun:
            return self.remake(ref)
        elif isinstance(node, List | Dict | Set) and not self.is_whole(form):
            return self.open_container(ref, node, form)
        elif isinstance(node, Global) and not self.has_parts(node):
            self.out += emit.name(node, op.GLOBAL) if node.parts is None else emit.stack_name(node, self.dialect)
        elif isinstance(node, Extension):
            self.out += emit.extension(node.code, form)
        elif isinstance(node, Persistent) and node.text:
            self.out += b"P%b\n" % str(self.nodes[node.pid]).encode("ascii")
        elif isinstance(node, Buffer) and node.inner < 0:
            self.out += b"\x97"
        else:
            return self.open(ref, node)
        return self.made(ref, node)

    def remake(self, ref: Ref) -> Iterator[Ref]:
        """The row of a call that leads to the object that it would make; then it is thrown away."""
        self.begun.add(ref)
        yield self.style.remade[ref]
        self.out += b"0"
        if self.marks[ref] >= 0:
            self.out += emit.get(self.marks[ref], self.dialect)
        else:
            yield ref

    def is_whole(self, form: int) -> bool:
        """Is a list or dict written as one LIST or DICT, with its elements before it?"""
        return form in (op.LIST, op.DICT) and self.tangled is None

    def has_parts(self, node: Global) -> bool:
        """Are there strings for STACK_GLOBAL, and do they still say what the node says?"""
        parts, nodes = node.parts, self.nodes
        return parts is not None and (nodes[parts[0]], nodes[parts[1]]) == (node.module, node.name)

    def open_container(self, ref: Ref, node: List | Dict | Set, form: int) -> Iterator[Ref] | None:
        """Write an empty container; the row that fills it."""
        if isinstance(node, Set):
            self.out += b"\x8f"
        else:
            short, long = (b"]", b"(l") if isinstance(node, List) else (b"}", b"(d")
            self.out += short if self.dialect or form in (op.EMPTY_LIST, op.EMPTY_DICT) else long
        return self.made(ref, node)

    def open(self, ref: Ref, node: Node) -> Iterator[Ref]:
        """Write what comes before the ingredients of a node; the row of these."""
        self.marks[ref] = _OPEN
        if isinstance(node, Call) and node.op in (op.OBJ, op.INST):
            args = self.nodes[node.args]
            if not isinstance(args, tuple):
                raise ValueError("the arguments of OBJ and INST are a tuple")
            self.out += b"("
            return iter(args) if node.op == op.INST else chain((node.func,), args)
        if isinstance(node, FrozenSet | List | Dict) or (isinstance(node, tuple) and self.is_long(ref, node)):
            self.out += b"("
        return iter(children(node) if isinstance(node, List | Dict) else ingredients(node))

    def is_long(self, ref: Ref, node: tuple[Ref, ...]) -> bool:
        """Is a tuple written with MARK and TUPLE?"""
        return len(node) > 3 or self.dialect < 2 or self.style.forms.get(ref) == op.TUPLE

    def close(self, ref: Ref, node: Node) -> Iterator[Ref] | None:
        """Write the instruction that makes a node of its ingredients; the row that fills it, if any."""
        if self.marks[ref] >= 0:
            self.drop(ref, node)
            return None
        if self.marks[ref] == LOOSE and self.first:
            # It was made inside of itself, and not memoised.
            raise SharedError
        long = isinstance(node, tuple) and self.is_long(ref, node)
        self.out += b"t" if long else self.maker(node)
        return self.made(ref, node)

    def maker(self, node: Node) -> bytes:
        """The instruction that makes a node, where that does not depend on its style."""
        if isinstance(node, tuple):
            return _TUPLES[len(node)]
        if isinstance(node, Call):
            cls = self.nodes[node.func]
            if node.op != op.INST:
                return bytes((node.op,))
            if not isinstance(cls, Global):
                raise ValueError("INST names a class")
            return emit.name(cls, op.INST)
        for kind, code in _MAKERS:
            if isinstance(node, kind):
                return code
        raise TypeError(f"no pickle node: {type(node).__name__}")

    def drop(self, ref: Ref, node: Node) -> None:
        """Throw the ingredients of a node away and fetch the node: while they were written, it was made.

        ``save_tuple``, ``save_frozenset`` and ``save_reduce`` in _pickle.c do the same.
        """
        if isinstance(node, tuple) and not self.is_long(ref, node):
            self.out += b"0" * len(node)
        elif isinstance(node, tuple | FrozenSet | List | Dict):
            self.out += b"1" if self.dialect else b"0" * (len(children(node)) + 1)
        else:
            self.out += self.maker(node) + b"0"
        self.out += emit.get(self.marks[ref], self.dialect)

    # -- memo and filling -----------------------------------------------------------------------------

    def made(self, ref: Ref, node: Node) -> Iterator[Ref] | None:
        """Memoise a node that was just made, as its kind and the style say; the row that fills it, if any."""
        if ref not in self.extra if isinstance(node, _BARE) else ref in self.loose:
            self.marks[ref] = LOOSE
        elif self.style.late and isinstance(node, Call) and node.op == op.NEWOBJ and node.filling is not None:
            self.marks[ref] = LOOSE
            return self.filled_first(ref, node)
        else:
            self.memoise(ref)
        if isinstance(node, Instance):
            empty = node.filling is None
        else:
            empty = not isinstance(node, List | Dict | Set) or self.is_whole(self.style.forms.get(ref, -1))
        if empty:
            return None
        if ref in self.later:
            self.unfilled.append(ref)
            return None
        return self.filling(ref, node)

    def memoise(self, ref: Ref) -> None:
        """Give the node on top of the stack the next number."""
        self.marks[ref] = number = self.number
        self.number += 1
        self.ready[ref] = b""
        self.out += emit.put(number, self.dialect)

    def filled_first(self, ref: Ref, node: Node) -> Iterator[Ref]:
        """The row that fills a node which is memoised only then."""
        yield from self.filling(ref, node)
        self.memoise(ref)

    def filling(self, ref: Ref, node: Node) -> Iterator[Ref]:
        """The row that fills a node: in the steps that were noted if they still fit, else in the usual ones."""
        for code, refs in chunks(node, self.style.steps.get(ref), self.dialect):
            if code in _MANY:
                self.out += b"("
            yield from refs
            self.out.append(code)

    # -- frames ---------------------------------------------------------------------------------------

    def emit(self, head: bytes, body: bytes) -> None:
        """Write a text or bytes; large ones stand outside of every FRAME (``_Pickler_write_bytes``)."""
        if self.style.framed and len(body) >= _FRAME_TARGET:
            self.cut()
            self.out += head
            self.out += body
            self.frame_start = len(self.out)
            return
        self.out += head + body

    def cut(self) -> None:
        """End a FRAME here; the next one begins."""
        self.frames.append((self.frame_start, len(self.out)))
        self.frame_start = len(self.out)


def encode(graph: Graph) -> bytes:
    """The pickle of a graph, PROTO and STOP included, in the style that the graph carries.

    Raises ValueError for a graph that no pickle can express, such as a tuple that holds itself, or a name
    that no opcode can spell; ``decode`` gives no such graph.
    """
    return _attempt(graph, None, None)


def _attempt(graph: Graph, keep: frozenset[Ref] | None, tangled: Sequence[Knot] | None) -> bytes:
    # A second and third attempt are seldom. The first goes without the walk over the graph that would tell
    # beforehand whether they are needed.
    try:
        return Writer(graph, keep, tangled).run()
    except SharedError:
        pass
    except TangledError:
        tangled = knots(graph)
    return _attempt(graph, shared(graph).union(*(knot.members for knot in tangled or ())), tangled)
