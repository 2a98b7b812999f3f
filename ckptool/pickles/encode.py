"""From a graph to bytes, the way CPython's pickler would have written it.

What the default policy decides is decided here as the C pickler decides it (``Modules/_pickle.c``);
where the decoder noted another choice in the graph's ``Style``, that choice is repeated. So a pickle
that ``torch.save`` wrote comes out byte for byte, and one by another writer as near as it goes, always
equal as a graph. There is no recursion: open containers wait on a work list.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from . import opcodes as op
from .nodes import (
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

__all__ = ["encode"]

_u16 = Struct("<H").pack
_i32 = Struct("<i").pack
_u32 = Struct("<I").pack
_u64 = Struct("<Q").pack
_f64 = Struct(">d").pack

#: Bytes after which a FRAME is closed (``FRAME_SIZE_TARGET``), and below which none is written.
_FRAME_TARGET = 64 * 1024
_FRAME_MIN = 4


class _Raw(NamedTuple):
    """Work: write these bytes."""

    code: bytes


class _Close(NamedTuple):
    """Work: everything that the node holds is written, now comes the instruction that makes it."""

    ref: Ref


class _Fill(NamedTuple):
    """Work: a call is made and memoised, now come its items, pairs and states."""

    ref: Ref


def encode(graph: Graph) -> bytes:
    """The pickle of a graph, PROTO and STOP included, in the style that the graph carries."""
    writer = _Writer(graph)
    return writer.run()


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.root = graph.root
        self.style = graph.style
        self.protocol = graph.style.protocol
        self.out = bytearray()
        self.memo: list[int] = [-1] * len(graph.nodes)
        self.count = graph.style.memo_base
        self.work: list[Ref | _Raw | _Close | _Fill] = []
        self.shared = _shared(graph) if graph.style.unput else frozenset[Ref]()
        self.fixed: dict[Ref, bytes] = {}
        self.frame = -1

    def run(self) -> bytes:
        out, nodes, memo, work, fixed = self.out, self.nodes, self.memo, self.work, self.fixed
        if self.style.header:
            out += bytes((op.PROTO, self.protocol))
        framed = self.style.framed
        work.append(self.root)
        while work:
            task = work.pop()
            if type(task) is not int:
                self.resume(task)
                continue
            if framed and self.frame >= 0 and len(out) - self.frame >= _FRAME_TARGET:
                self.close_frame()
            known = memo[task]
            if known >= 0:
                if known < 0x100 and self.protocol:
                    self.begin(2)
                    out += bytes((0x68, known))  # BINGET
                else:
                    self.emit(self.index(known, op.LONG_BINGET, op.GET))
                continue
            constant = fixed.get(task)
            if constant is not None:
                self.emit(constant)
                continue
            node = nodes[task]
            kind = type(node)
            if kind is str:
                self.text(task, node)  # type: ignore[arg-type]
            elif kind is tuple:
                if node:
                    self.open_tuple(task, node)  # type: ignore[arg-type]
                else:
                    self.constant(task, b")" if self.protocol else b"(t")
            elif kind is Call:
                self.open_call(task, node)  # type: ignore[arg-type]
            elif kind is Persistent:
                self.open_persistent(task, node)  # type: ignore[arg-type]
            elif kind is Global:
                self.name(task, node)  # type: ignore[arg-type]
            elif kind is Dict or kind is List or kind is Set or kind is FrozenSet:
                self.open_container(task, node)
            else:
                self.leaf(task, node)
        self.emit(b".")
        if framed:
            self.close_frame()
        return bytes(out)

    # -- writing ------------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Open a FRAME if one is due before the next ``size`` bytes."""
        if self.style.framed and self.frame < 0:
            self.out += b"\x95" + bytes(8)
            self.frame = len(self.out)

    def emit(self, code: bytes) -> None:
        if self.style.framed:
            self.begin(len(code))
        self.out += code

    def emit_large(self, head: bytes, body: bytes) -> None:
        """Large texts and bytes stand outside of every FRAME (``_Pickler_write_bytes``)."""
        if self.style.framed and len(body) >= _FRAME_TARGET:
            self.close_frame()
            self.out += head
            self.out += body
            return
        self.emit(head)
        self.out += body

    def close_frame(self) -> None:
        if self.frame < 0:
            return
        size = len(self.out) - self.frame
        if size >= _FRAME_MIN:
            self.out[self.frame - 8 : self.frame] = _u64(size)
        else:
            del self.out[self.frame - 9 : self.frame]
        self.frame = -1

    def index(self, value: int, binary: int, text: int) -> bytes:
        if self.protocol == 0:
            return b"%c%d\n" % (text, value)
        if value < 0x100:
            return bytes((binary - 1 if binary == op.LONG_BINPUT else op.BINGET, value))
        return bytes((binary,)) + _u32(value)

    def put(self, ref: Ref) -> None:
        if ref in self.style.unput and ref not in self.shared:
            return
        value = self.memo[ref] = self.count
        self.count += 1
        if self.protocol >= 4:
            self.emit(b"\x94")
        else:
            self.out += self.index(value, op.LONG_BINPUT, op.PUT)

    def constant(self, ref: Ref, code: bytes) -> None:
        if ref in self.style.put:
            self.emit(code)
            self.put(ref)
            return
        self.fixed[ref] = code
        self.emit(code)

    # -- leaves -------------------------------------------------------------------------------

    def text(self, ref: Ref, value: str) -> None:
        form = self.style.forms.get(ref, -1)
        if form in (op.SHORT_BINSTRING, op.BINSTRING, op.STRING):
            raw = value.encode("utf-8", "surrogateescape")
            if form == op.STRING:
                self.emit(b"S" + repr(raw)[1:].encode() + b"\n")
                self.put(ref)
                return
            if len(raw) < 0x100 or form == op.BINSTRING:
                self.emit(b"U" + bytes((len(raw),)) if form == op.SHORT_BINSTRING else b"T" + _u32(len(raw)))
                self.out += raw
                self.put(ref)
                return
            # Grown beyond 255 bytes: BINSTRING would shut out weights_only, the unicode form does not.
        if form == op.UNICODE or (form < 0 and self.protocol == 0):
            # The pickler's own escapes, so that a line break cannot end the line.
            for plain, escaped in (("\\", "\\u005c"), ("\0", "\\u0000"), ("\n", "\\u000a"), ("\r", "\\u000d")):
                value = value.replace(plain, escaped)
            self.emit(b"V" + value.replace("\x1a", "\\u001a").encode("raw-unicode-escape") + b"\n")
            self.put(ref)
            return
        raw = value.encode("utf-8", "surrogatepass")
        size = len(raw)
        usual = op.text_opcode(size, self.protocol)
        code = form if form in (op.BINUNICODE, op.BINUNICODE8) else usual
        if code == op.SHORT_BINUNICODE:
            head = bytes((code, size))
        else:
            head = bytes((code,)) + (_u64(size) if code == op.BINUNICODE8 else _u32(size))
        self.emit_large(head, raw)
        self.put(ref)

    def leaf(self, ref: Ref, node: Node) -> None:
        form = self.style.forms.get(ref, -1)
        if node is None:
            self.constant(ref, b"N")
        elif type(node) is bool:
            text = form == op.INT or self.protocol < 2
            self.constant(ref, (b"I01\n" if node else b"I00\n") if text else b"\x88" if node else b"\x89")
        elif type(node) is int:
            self.constant(ref, _int(node, op.int_opcode(node, self.protocol) if form < 0 else form))
        elif type(node) is float:
            text = form == op.FLOAT or (form < 0 and self.protocol == 0)
            self.constant(ref, b"F%s\n" % repr(node).encode() if text else b"G" + _f64(node))
        elif type(node) is bytes:
            size = len(node)
            if form < 0:
                form = op.SHORT_BINBYTES if size < 0x100 else op.BINBYTES if size <= 0xFFFFFFFF else op.BINBYTES8
            width = 1 if form == op.SHORT_BINBYTES else 8 if form == op.BINBYTES8 else 4
            self.emit_large(bytes((form,)) + size.to_bytes(width, "little"), node)
            self.put(ref)
        elif isinstance(node, ByteArray):
            self.emit_large(b"\x96" + _u64(len(node.data)), node.data)
            self.put(ref)
        elif isinstance(node, Buffer):
            if node.inner < 0:
                self.emit(b"\x97")
            else:
                self.work += [_Raw(b"\x98"), node.inner]
        elif isinstance(node, Extension):
            code = node.code
            size = 1 if 0 < code < 0x100 else 2 if 0 < code < 0x10000 else 4
            head = op.EXT1 if size == 1 else op.EXT2 if size == 2 else op.EXT4
            self.emit(bytes((head,)) + (_i32(code) if size == 4 else code.to_bytes(size, "little")))
            self.fill(ref, node)
        else:
            raise TypeError(f"no pickle node: {type(node).__name__}")

    def name(self, ref: Ref, node: Global) -> None:
        if node.parts is not None:
            self.work += [_Close(ref), node.parts[1], node.parts[0]]
            return
        self.emit(b"c" + node.module.encode() + b"\n" + node.name.encode() + b"\n")
        self.put(ref)
        self.fill(ref, node)

    # -- what holds other nodes ------------------------------------------------------------------

    def open_tuple(self, ref: Ref, items: tuple[Ref, ...]) -> None:
        self.work.append(_Close(ref))
        if len(items) > 3 or self.protocol < 2 or self.style.forms.get(ref) == op.TUPLE:
            self.emit(b"(")
        self.work.extend(items[::-1])

    def open_persistent(self, ref: Ref, node: Persistent) -> None:
        if node.text:
            self.emit(b"P" + str(self.nodes[node.pid]).encode("ascii", "surrogateescape") + b"\n")
            self.fill(ref, node)
            return
        self.work += [_Close(ref), node.pid]

    def open_call(self, ref: Ref, node: Call) -> None:
        self.work.append(_Close(ref))
        if node.op in (op.OBJ, op.INST):
            self.emit(b"(")
            self.work.extend(self.nodes[node.args][::-1])  # type: ignore[index, arg-type]
            if node.op == op.OBJ:
                self.work.append(node.func)
        elif node.kwargs >= 0:
            self.work += [node.kwargs, node.args, node.func]
        else:
            self.work += [node.args, node.func]

    def open_container(self, ref: Ref, node: Node) -> None:
        if isinstance(node, FrozenSet):
            self.emit(b"(")
            self.work.append(_Close(ref))
            self.work.extend(node.items[::-1])
            return
        form = self.style.forms.get(ref, -1)
        if isinstance(node, Dict):
            if form == op.DICT and ref not in self.style.steps:
                self.whole(ref, node.pairs)
                return
            self.emit(b"}" if self.protocol else b"(d")
            self.put(ref)
            self.steps(ref, (), node.pairs, (), op.pair_steps(len(node.pairs) >> 1, self.protocol, exact=True))
        elif isinstance(node, List):
            if form == op.LIST and ref not in self.style.steps:
                self.whole(ref, node.items)
                return
            self.emit(b"]" if self.protocol else b"(l")
            self.put(ref)
            self.steps(ref, node.items, (), (), op.item_steps(len(node.items), self.protocol, exact=True))
        elif isinstance(node, Set):
            self.emit(b"\x8f")
            self.put(ref)
            full, rest = divmod(len(node.items), op.BATCH)
            usual = [(op.ADDITEMS, op.BATCH)] * full + [(op.ADDITEMS, rest)] if node.items else []
            self.steps(ref, node.items, (), (), usual)

    def whole(self, ref: Ref, items: list[Ref] | tuple[Ref, ...] | object) -> None:
        """LIST or DICT with everything on the stack."""
        self.emit(b"(")
        self.work.append(_Close(ref))
        self.work.extend(tuple(items)[::-1])  # type: ignore[arg-type]

    def resume(self, task: _Raw | _Close | _Fill) -> None:
        if type(task) is _Raw:
            self.emit(task.code)
        elif type(task) is _Close:
            self.close(task.ref)
        else:
            self.fill(task.ref, self.nodes[task.ref])  # type: ignore[arg-type]

    def close(self, ref: Ref) -> None:
        node = self.nodes[ref]
        if self.memo[ref] >= 0:
            # What was just written led back here and wrote this object already: drop the parts,
            # fetch the object (save_tuple and save_reduce in _pickle.c do the same).
            self.drop_parts(node, ref)
            return
        if type(node) is tuple:
            size = len(node)
            plain = size > 3 or self.protocol < 2 or self.style.forms.get(ref) == op.TUPLE
            self.emit(b"t" if plain else bytes((op.TUPLE1 + size - 1,)))
            self.put(ref)
        elif isinstance(node, Call):
            if node.op == op.INST:
                cls = self.nodes[node.func]
                assert isinstance(cls, Global)
                self.emit(b"i" + cls.module.encode("ascii", "surrogateescape") + b"\n")
                self.out += cls.name.encode("ascii", "surrogateescape") + b"\n"
            else:
                self.emit(bytes((node.op,)))
            self.put(ref)
            self.fill(ref, node)
        elif isinstance(node, Persistent):
            self.emit(b"Q")
            if ref in self.style.put:
                self.put(ref)
            self.fill(ref, node)
        elif isinstance(node, Global):
            self.emit(b"\x93")
            self.put(ref)
            self.fill(ref, node)
        else:
            self.emit(b"\x91" if isinstance(node, FrozenSet) else b"l" if isinstance(node, List) else b"d")
            self.put(ref)

    def drop_parts(self, node: Node, ref: Ref) -> None:
        if type(node) is tuple and len(node) <= 3 and self.protocol >= 2 and self.style.forms.get(ref) != op.TUPLE:
            self.emit(b"0" * len(node))
        elif isinstance(node, Call) and node.op not in (op.OBJ, op.INST):
            self.emit(b"0" * (2 if node.kwargs < 0 else 3))
        elif isinstance(node, Persistent):
            self.emit(b"0")
        elif isinstance(node, Global):
            self.emit(b"00")
        elif self.protocol:
            self.emit(b"1")
        else:
            self.emit(b"0" * (len(children(node)) + 1))
        self.work.append(ref)

    def fill(self, ref: Ref, node: Instance) -> None:
        if not (node.items or node.pairs or node.states):
            if ref not in self.style.steps:
                return
        usual = op.item_steps(len(node.items), self.protocol, exact=False)
        usual += op.pair_steps(len(node.pairs) >> 1, self.protocol, exact=False)
        usual += [(op.BUILD, 1)] * len(node.states)
        self.steps(ref, node.items, node.pairs, node.states, usual)

    def steps(
        self,
        ref: Ref,
        items: object,
        pairs: object,
        states: object,
        usual: list[tuple[int, int]],
    ) -> None:
        """Queue the filling of a container: the noted steps if they still fit, else the usual ones."""
        sources = {op.APPEND: list(items), op.SETITEM: list(pairs), op.BUILD: list(states)}  # type: ignore[call-overload]
        noted = self.style.steps.get(ref)
        plan = list(noted) if noted is not None and _totals(noted) == _totals(usual) else usual
        queue: list[Ref | _Raw | _Close | _Fill] = []
        taken = dict.fromkeys(sources, 0)
        for code, count in plan:
            kind = _KIND[code]
            size = count * 2 if kind == op.SETITEM else count
            begin = taken[kind]
            taken[kind] = begin + size
            if code in (op.APPENDS, op.SETITEMS, op.ADDITEMS):
                queue.append(_Raw(b"("))
            queue += sources[kind][begin : begin + size]
            queue.append(_Raw(bytes((code,))))
        queue.reverse()
        self.work += queue


#: What each filling instruction takes: items, pairs or a state.
_KIND = {
    op.APPEND: op.APPEND,
    op.APPENDS: op.APPEND,
    op.ADDITEMS: op.APPEND,
    op.SETITEM: op.SETITEM,
    op.SETITEMS: op.SETITEM,
    op.BUILD: op.BUILD,
}


def _totals(steps: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> tuple[int, int, int]:
    totals = {op.APPEND: 0, op.SETITEM: 0, op.BUILD: 0}
    for code, count in steps:
        totals[_KIND[code]] += count
    return totals[op.APPEND], totals[op.SETITEM], totals[op.BUILD]


def _int(value: int, code: int) -> bytes:
    """One int in the form ``code``, or in the default one of protocol 2 if it does not fit that form."""
    if code == op.INT:
        return b"I%d\n" % value
    if code == op.LONG:
        return b"L%dL\n" % value
    if code == op.BININT1 and 0 <= value < 0x100:
        return bytes((code, value))
    if code == op.BININT2 and 0 <= value < 0x10000:
        return b"M" + _u16(value)
    if code == op.BININT and -0x80000000 <= value < 0x80000000:
        return b"J" + _i32(value)
    if code not in (op.LONG1, op.LONG4):
        return _int(value, op.int_opcode(value, 2))
    raw = b"" if value == 0 else value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if value < 0 and len(raw) > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
        raw = raw[:-1]
    return b"\x8a" + bytes((len(raw),)) + raw if code == op.LONG1 else b"\x8b" + _i32(len(raw)) + raw


def _shared(graph: Graph) -> frozenset[Ref]:
    """References that more than one place holds: they need a memo number, whatever the style says."""
    seen, twice = {graph.root}, set()
    for ref in graph.reachable():
        for child in children(graph.nodes[ref]):
            (twice if child in seen else seen).add(child)
    return frozenset(twice)
