"""From bytes to a graph: a stack machine that builds nodes and does nothing else.

It follows CPython's unpickler opcode by opcode (``Lib/pickle.py``, ``_Unpickler``), but where that one
imports or calls, this one makes a node. Every opcode that creates an object creates a node, also when
the object is popped again, so that nothing a pickle names can hide. Lengths are checked against the
bytes that are there before anything is allocated; there is no recursion.
"""

from __future__ import annotations

import gc
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, NoReturn

from ..errors import PickleError, TruncatedPickleError
from ..limits import LIMITS, Limits
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
    Style,
)

__all__ = ["Decoded", "decode"]

_u16 = Struct("<H").unpack_from
_i32 = Struct("<i").unpack_from
_u32 = Struct("<I").unpack_from
_u64 = Struct("<Q").unpack_from
_f64 = Struct(">d").unpack_from

_TEXTUAL = frozenset((op.GET, op.PUT, op.LIST, op.DICT, op.UNICODE, op.STRING, op.FLOAT, op.PERSID))

#: Kinds that the pickler memoises when it writes them; ``()`` is the exception among tuples.
_MEMOISED = frozenset((str, bytes, tuple, List, Set, FrozenSet, Dict, ByteArray, Global, Call))


class Decoded(NamedTuple):
    """A graph and the offset just behind its STOP."""

    graph: Graph
    end: int


def decode(data: bytes, start: int = 0, *, where: str = "pickle", limits: Limits = LIMITS) -> Decoded:
    """Decode the pickle that begins at byte ``start`` of ``data``.

    Raises PickleError, which names the offset within ``data``, for anything that CPython's unpickler
    would refuse before it calls something.
    """
    # Without PROTO it is protocol 0 or 1. Protocol 1 has none of these text instructions.
    decoded = _run(_Machine(data, start, where, limits, protocol=1))
    if not decoded.graph.style.header and not _TEXTUAL.isdisjoint(decoded.graph.refused):
        decoded = _run(_Machine(data, start, where, limits, protocol=0))
    return decoded


def _run(machine: _Machine) -> Decoded:
    # Millions of fresh containers make the collector scan the arena over and over: it takes
    # a third of the whole time, and there is no garbage to find.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return machine.run()
    except (IndexError, StructError) as error:
        if isinstance(error, StructError) or machine.at >= len(machine.data) - 1:
            what = "the pickle ends in the middle of an instruction"
            raise TruncatedPickleError(what, where=machine.where, offset=machine.at) from None
        machine.fail("an instruction takes more from the stack than there is")
    except UnicodeDecodeError:
        machine.fail("a text is not UTF-8")
    finally:
        if collecting:
            gc.enable()


class _Machine:
    """The state of one run. ``run`` holds the frequent opcodes, ``rare`` the others."""

    def __init__(self, data: bytes, start: int, where: str, limits: Limits, protocol: int) -> None:
        self.data = data
        self.pos = start
        self.at = start
        self.where = where
        self.limits = limits
        self.nodes: list[Node] = []
        self.stack: list[Ref] = []
        self.outer: list[list[Ref]] = []
        self.memo: list[Ref] = []
        self.sparse: dict[int, Ref] = {}
        self.consts: dict[bytes, Ref] = {}
        self.style = Style(protocol, header=False)
        self.steps: dict[Ref, list[tuple[int, int]]] = {}
        self.refused: dict[int, int] = {}
        self.oddities: list[tuple[int, str]] = []
        self.frame_end = -1

    def fail(self, what: str) -> NoReturn:
        raise PickleError(what, where=self.where, offset=self.at)

    def odd(self, what: str) -> None:
        if len(self.oddities) < self.limits.listed:
            self.oddities.append((self.at, what))

    def run(self) -> Decoded:
        data, nodes, memo, consts = self.data, self.nodes, self.memo, self.consts
        pos = self.pos
        stack, outer = self.stack, self.outer
        push, pop, add = stack.append, stack.pop, nodes.append
        modern = False  # protocol 4 and later: BINUNICODE is not the default for short texts
        while True:
            self.at = pos
            code = data[pos]
            pos += 1
            if code == 0x72:  # LONG_BINPUT
                (index,) = _u32(data, pos)
                pos += 4
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    self.put(index, stack[-1])
            elif code == 0x71:  # BINPUT
                index = data[pos]
                pos += 1
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    self.put(index, stack[-1])
            elif code == 0x68:  # BINGET
                index = data[pos]
                pos += 1
                push(memo[index] if index < len(memo) and memo[index] >= 0 else self.get(index))
            elif code == 0x6A:  # LONG_BINGET
                (index,) = _u32(data, pos)
                pos += 4
                push(memo[index] if index < len(memo) and memo[index] >= 0 else self.get(index))
            elif code == 0x28:  # MARK
                outer.append(stack)
                stack = []
                push, pop = stack.append, stack.pop
            elif code == 0x58:  # BINUNICODE
                (size,) = _u32(data, pos)
                pos += 4
                raw = data[pos : pos + size]
                pos += size
                if pos > len(data):
                    self.short(size)
                push(len(nodes))
                if modern and size < 0x100:
                    self.style.forms[len(nodes)] = 0x58
                add(raw.decode("utf-8", "surrogatepass"))
            elif code == 0x4B or code == 0x4D or code == 0x4A:  # BININT1, BININT2, BININT
                end = pos + (1 if code == 0x4B else 2 if code == 0x4D else 4)
                key = data[pos - 1 : end]
                found = consts.get(key)
                push(self.integer(code, key) if found is None else found)
                pos = end
            elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                last = pop()
                made: tuple[Ref, ...]
                if code == 0x85:
                    made = (last,)
                elif code == 0x86:
                    made = (pop(), last)
                else:
                    middle = pop()
                    made = (pop(), middle, last)
                push(len(nodes))
                add(made)
            elif code == 0x74:  # TUPLE
                items = stack
                stack = outer.pop()
                push, pop = stack.append, stack.pop
                if items:
                    push(len(nodes))
                    if len(items) < 4:
                        self.short_tuple(len(items))
                    add(tuple(items))
                else:
                    push(self.constant(data[pos - 1 : pos], ()))
            elif code == 0x29 or code == 0x89 or code == 0x88 or code == 0x4E:
                key = data[pos - 1 : pos]
                found = consts.get(key)
                if found is None:
                    # EMPTY_TUPLE, NEWFALSE, NEWTRUE, NONE
                    value = () if code == 0x29 else None if code == 0x4E else code == 0x88
                    found = self.constant(key, value)
                push(found)
            elif code == 0x51:  # BINPERSID
                pid = pop()
                push(len(nodes))
                add(Persistent(pid))
            elif code == 0x52:  # REDUCE
                args = pop()
                func = pop()
                self.check_args(args, "REDUCE")
                push(len(nodes))
                add(Call(0x52, func, args))
            elif code == 0x75:  # SETITEMS
                items = stack
                stack = outer.pop()
                push, pop = stack.append, stack.pop
                if len(items) & 1:
                    self.fail("SETITEMS with a key that has no value")
                self.set_pairs(stack[-1], items, 0x75)
            elif code == 0x73:  # SETITEM
                last = pop()
                items = [pop(), last]
                self.set_pairs(stack[-1], items, 0x73)
            elif code == 0x7D:  # EMPTY_DICT
                push(len(nodes))
                add(Dict([]))
            elif code == 0x63:  # GLOBAL
                module_end = data.find(b"\n", pos)
                name_end = data.find(b"\n", module_end + 1)
                if module_end < 0 or name_end < 0:
                    self.short(1)
                push(len(nodes))
                add(Global(data[pos:module_end].decode(), data[module_end + 1 : name_end].decode()))
                pos = name_end + 1
                if modern:
                    self.style.forms[len(nodes) - 1] = 0x63
            elif code == 0x2E:  # STOP
                root = pop()
                self.pos = pos
                if stack or outer:
                    self.odd("values are left on the stack at STOP")
                if self.frame_end > pos:
                    self.odd("the last FRAME reaches beyond STOP")
                return Decoded(self.finish(root), pos)
            else:
                self.pos, self.stack = pos, stack
                self.rare(code)
                pos = self.pos
                if stack is not self.stack:
                    stack = self.stack
                    push, pop = stack.append, stack.pop
                modern = self.style.protocol >= 4

    # -- parts of the frequent opcodes that are seldom needed ----------------------------------

    def short(self, size: int) -> NoReturn:
        what = f"{size:,} bytes are announced, but the pickle ends before"
        raise TruncatedPickleError(what, where=self.where, offset=self.at)

    def put(self, index: int, ref: Ref) -> None:
        memo = self.memo
        if index < len(memo):
            if memo[index] != ref:
                self.odd(f"memo {index} is written twice")
            memo[index] = ref
        elif index == 1 and not memo and not self.sparse:
            # Python 2 numbers its memo from 1.
            memo += [-1, ref]
        else:
            self.sparse[index] = ref

    def get(self, index: int) -> Ref:
        if index not in self.sparse:
            self.fail(f"memo {index} is read before it is written")
        return self.sparse[index]

    def line_end(self, pos: int) -> int:
        end = self.data.find(b"\n", pos)
        if end < 0:
            self.short(1)
        return end

    def line(self) -> bytes:
        end = self.line_end(self.pos)
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.pos:
            self.short(size)
        raw = self.data[self.pos : self.pos + size]
        self.pos += size
        return raw

    def constant(self, key: bytes, value: Node, form: int = -1) -> Ref:
        ref = self.consts[key] = len(self.nodes)
        self.nodes.append(value)
        if form >= 0:
            self.style.forms[ref] = form
        return ref

    def integer(self, code: int, key: bytes) -> Ref:
        if len(key) < (2 if code == op.BININT1 else 3 if code == op.BININT2 else 5):
            self.short(1)
        value = _i32(key, 1)[0] if code == op.BININT else int.from_bytes(key[1:], "little")
        default = op.int_opcode(value, self.style.protocol)
        return self.constant(key, value, -1 if default == code else code)

    def short_tuple(self, size: int) -> None:
        """Note a tuple of one to three elements that was not written as TUPLE1 to TUPLE3."""
        if self.style.protocol >= 2:
            self.style.forms[len(self.nodes)] = op.TUPLE

    def check_args(self, ref: Ref, what: str) -> None:
        node = self.nodes[ref]
        if type(node) is not tuple and not isinstance(node, Instance):
            self.fail(f"{what} with arguments that are no tuple")

    def note_step(self, ref: Ref, code: int, count: int, usual: bool, before: list[tuple[int, int]]) -> None:
        """Remember how a container was filled, unless it is the first and usual step."""
        steps = self.steps.get(ref)
        if steps is None:
            if usual:
                return
            self.steps[ref] = before
            steps = before
        steps.append((code, count))

    def set_pairs(self, ref: Ref, items: list[Ref], code: int) -> None:
        node = self.nodes[ref]
        count = len(items) >> 1
        if type(node) is Dict:
            pairs: list[Ref] = node.pairs  # type: ignore[assignment]
            usual = not pairs and (code == op.SETITEM or 2 <= count < op.BATCH)
            if not usual or ref in self.steps:
                had = len(pairs) >> 1
                before = [(op.SETITEM if had == 1 else op.SETITEMS, had)] if had else []
                self.note_step(ref, code, count, usual, before)
            pairs += items
        elif isinstance(node, Instance):
            usual = not node.pairs and not node.states and (code == op.SETITEM or 2 <= count <= op.BATCH)
            if not usual or ref in self.steps:
                self.note_step(ref, code, count, usual, _so_far(node))
            if node.pairs:
                node.pairs += items  # type: ignore[operator]
            elif items:
                node.pairs = items
        else:
            self.fail(f"{op.NAMES[code]} on a {type(node).__name__}")

    def add_items(self, ref: Ref, items: list[Ref], code: int) -> None:
        node = self.nodes[ref]
        if type(node) is List or (type(node) is Set and code == op.ADDITEMS):
            known: list[Ref] = node.items  # type: ignore[assignment]
            usual = not known and (code == op.APPEND or (2 if code == op.APPENDS else 1) <= len(items) <= op.BATCH)
            if code == op.ADDITEMS and len(items) == op.BATCH:
                usual = False
            if not usual or ref in self.steps:
                had = len(known)
                single = had == 1 and code != op.ADDITEMS
                many = op.ADDITEMS if code == op.ADDITEMS else op.APPENDS
                before = [(op.APPEND if single else many, had)] if had else []
                self.note_step(ref, code, len(items), usual, before)
            known += items
        elif isinstance(node, Instance):
            fresh = not (node.items or node.pairs or node.states)
            usual = fresh and (code == op.APPEND or (code == op.APPENDS and 2 <= len(items) <= op.BATCH))
            if not usual or ref in self.steps:
                self.note_step(ref, code, len(items), usual, _so_far(node))
            node.items = [*node.items, *items] if node.items else items
        else:
            self.fail(f"{op.NAMES[code]} on a {type(node).__name__}")

    def pop_mark(self) -> list[Ref]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def push(self, node: Node, form: int = -1) -> None:
        self.stack.append(len(self.nodes))
        if form >= 0:
            self.style.forms[len(self.nodes)] = form
        self.nodes.append(node)

    # -- the other opcodes --------------------------------------------------------------------

    def rare(self, code: int) -> None:
        if code not in op.ACCEPTED:
            if code not in op.NAMES:
                self.fail(f"byte 0x{code:02x} is no pickle instruction")
            self.refused[code] = self.refused.get(code, 0) + 1
        if code in (op.EMPTY_LIST, op.LIST):
            self.push(List(self.pop_mark() if code == op.LIST else []))
            if code == op.LIST and (self.style.protocol > 0 or self.nodes[-1].items):  # type: ignore[union-attr]
                self.style.forms[len(self.nodes) - 1] = op.LIST
        elif code == op.DICT:
            pairs = self.pop_mark()
            if len(pairs) & 1:
                self.fail("DICT with a key that has no value")
            self.push(Dict(pairs), op.DICT if pairs or self.style.protocol > 0 else -1)
        elif code == op.APPEND:
            item = self.stack.pop()
            self.add_items(self.stack[-1], [item], code)
        elif code in (op.APPENDS, op.ADDITEMS):
            items = self.pop_mark()
            self.add_items(self.stack[-1], items, code)
        elif code == op.BUILD:
            state = self.stack.pop()
            self.build(self.stack[-1], state)
        elif code == op.PROTO:
            self.protocol(self.take(1)[0])
        elif code == op.BINFLOAT:
            key = b"G" + self.take(8)
            found = self.consts.get(key)
            self.stack.append(self.constant(key, _f64(key, 1)[0]) if found is None else found)
        elif code in (op.NEWOBJ, op.NEWOBJ_EX):
            kwargs = self.stack.pop() if code == op.NEWOBJ_EX else -1
            args = self.stack.pop()
            self.check_args(args, "NEWOBJ")
            func = self.stack.pop()
            self.push(Call(code, func, args, kwargs))
        elif code in (op.OBJ, op.INST):
            self.instance(code)
        elif code in (op.FRAME, op.MEMOIZE, op.STACK_GLOBAL, op.EMPTY_SET, op.FROZENSET):
            self.modern(code)
        elif code in (op.POP, op.POP_MARK, op.DUP):
            self.shuffle(code)
        elif code in (op.GET, op.PUT):
            self.text_memo(code)
        elif code in (op.EXT1, op.EXT2, op.EXT4):
            self.push(Extension(int.from_bytes(self.take(1 << (code - op.EXT1)), "little", signed=code == op.EXT4)))
        elif code == op.PERSID:
            self.push(self.line().decode("ascii", "surrogateescape"))
            self.push(Persistent(self.stack.pop(), text=True))
        elif code in (op.NEXT_BUFFER, op.READONLY_BUFFER):
            self.push(Buffer(self.stack.pop() if code == op.READONLY_BUFFER else -1))
        elif code in (op.INT, op.LONG, op.LONG1, op.LONG4, op.FLOAT):
            self.number(code)
        else:
            self.text(code)

    def protocol(self, protocol: int) -> None:
        if protocol > 5:
            self.fail(f"pickle protocol {protocol} is newer than any known (5)")
        if self.style.header:
            self.odd("a second PROTO")
        elif self.nodes:
            self.odd("PROTO is not the first instruction")
        self.style.protocol = protocol
        self.style.header = True

    def build(self, ref: Ref, state: Ref) -> None:
        node = self.nodes[ref]
        if not isinstance(node, Instance):
            self.fail(f"BUILD on a {type(node).__name__}")
        if node.states:
            self.odd("an object is built twice")
        if ref in self.steps:
            self.steps[ref].append((op.BUILD, 1))
        node.states = (*node.states, state)

    def instance(self, code: int) -> None:
        items = self.pop_mark()
        if code == op.OBJ:
            func = items.pop(0)
        else:
            module, name = self.line().decode("ascii", "surrogateescape"), self.line().decode("ascii", "surrogateescape")
            func = len(self.nodes)
            self.nodes.append(Global(module, name))
            self.style.forms[func] = op.INST
        args = len(self.nodes)
        self.nodes.append(tuple(items))
        self.style.forms[args] = code
        self.push(Call(code, func, args))

    def modern(self, code: int) -> None:
        if code == op.FRAME:
            (size,) = _u64(self.data, self.pos)
            self.pos += 8
            self.style.framed = True
            if self.at < self.frame_end:
                self.odd("a FRAME begins inside another")
            self.frame_end = self.pos + size
            if self.frame_end > len(self.data):
                self.short(size)
        elif code == op.MEMOIZE:
            if not self.sparse:
                self.memo.append(self.stack[-1])
            else:
                self.odd("MEMOIZE in a memo with gaps")
                self.put(len(self.memo) + len(self.sparse), self.stack[-1])
        elif code == op.STACK_GLOBAL:
            name_ref, module_ref = self.stack.pop(), self.stack.pop()
            name, module = self.nodes[name_ref], self.nodes[module_ref]
            if type(name) is not str or type(module) is not str:
                self.fail("STACK_GLOBAL on something that is no string")
            self.push(Global(module, name, (module_ref, name_ref)))
        elif code == op.EMPTY_SET:
            self.push(Set([]))
        else:
            self.push(FrozenSet(tuple(self.pop_mark())))

    def shuffle(self, code: int) -> None:
        if code == op.DUP:
            self.stack.append(self.stack[-1])
        elif code == op.POP_MARK or not self.stack:
            self.pop_mark()
        else:
            self.stack.pop()

    def text_memo(self, code: int) -> None:
        text = self.line()
        try:
            index = int(text)
        except ValueError:
            self.fail("a memo number that is no number")
        if index < 0:
            self.fail("a negative memo number")
        if code == op.GET:
            memo = self.memo
            known = index < len(memo) and memo[index] >= 0
            self.stack.append(memo[index] if known else self.get(index))
        elif index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.put(index, self.stack[-1])

    def number(self, code: int) -> None:
        if code in (op.LONG1, op.LONG4):
            size = self.take(1)[0] if code == op.LONG1 else _i32(self.take(4))[0]
            if size < 0:
                self.fail("LONG4 with a negative size")
            raw = self.take(size)
            key = bytes((code,)) + raw
            value: Node = int.from_bytes(raw, "little", signed=True)
        else:
            raw = self.line()
            key = bytes((code,)) + raw
            value = self.text_number(code, raw)
        if key in self.consts:
            self.stack.append(self.consts[key])
            return
        if type(value) is int:
            default = op.int_opcode(value, self.style.protocol)
        elif type(value) is bool:
            default = op.INT if self.style.protocol < 2 else op.NEWTRUE
        else:
            default = op.FLOAT if self.style.protocol == 0 else op.BINFLOAT
        self.stack.append(self.constant(key, value, -1 if default == code else code))

    def text_number(self, code: int, raw: bytes) -> Node:
        if len(raw) > self.limits.int_digits + 2:
            self.fail(f"a number of {len(raw):,} digits; the limit is {self.limits.int_digits:,} (limits.int_digits)")
        try:
            if code == op.FLOAT:
                return float(raw)
            if code == op.INT and raw in (b"00", b"01"):
                return raw == b"01"
            return int(raw[:-1] if code == op.LONG and raw.endswith(b"L") else raw, 0)
        except ValueError:
            self.fail("a number that is no number")

    def text(self, code: int) -> None:
        if code in (op.SHORT_BINSTRING, op.BINSTRING):
            size = self.take(1)[0] if code == op.SHORT_BINSTRING else _i32(self.take(4))[0]
            if size < 0:
                self.fail("BINSTRING with a negative size")
            self.push(self.take(size).decode("utf-8", "surrogateescape"), code)
        elif code == op.STRING:
            self.push(self.quoted(self.line()).decode("utf-8", "surrogateescape"), code)
        elif code == op.UNICODE:
            self.push(self.line().decode("raw-unicode-escape"), code if self.style.protocol > 0 else -1)
        elif code in (op.SHORT_BINUNICODE, op.BINUNICODE8):
            size = self.take(1)[0] if code == op.SHORT_BINUNICODE else _u64(self.take(8))[0]
            default = op.text_opcode(size, self.style.protocol)
            self.push(self.take(size).decode("utf-8", "surrogatepass"), -1 if default == code else code)
        elif code == op.BYTEARRAY8:
            self.push(ByteArray(self.take(_u64(self.take(8))[0])))
        else:
            head = 1 if code == op.SHORT_BINBYTES else 8 if code == op.BINBYTES8 else 4
            size = int.from_bytes(self.take(head), "little")
            usual = op.SHORT_BINBYTES if size < 0x100 else op.BINBYTES if size <= 0xFFFFFFFF else op.BINBYTES8
            self.push(self.take(size), -1 if usual == code else code)

    def quoted(self, text: bytes) -> bytes:
        text = text.strip()
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
            self.fail("STRING without its quotes")
        try:
            return text[1:-1].decode("unicode-escape").encode("latin-1")
        except (UnicodeDecodeError, UnicodeEncodeError):
            self.fail("STRING with an escape that is none")

    def finish(self, root: Ref) -> Graph:
        style, nodes, memo = self.style, self.nodes, self.memo
        if memo and memo[0] < 0:
            style.memo_base = 1
        usual = sum(type(node) in _MEMOISED for node in nodes) - sum(node == () for node in self.empty_tuples())
        if self.sparse or len(memo) - style.memo_base != usual or memo != sorted(memo):
            put = {ref for ref in memo if ref >= 0} | set(self.sparse.values())
            kinds = {ref for ref, node in enumerate(nodes) if type(node) in _MEMOISED and node != ()}
            style.unput, style.put = frozenset(kinds - put), frozenset(put - kinds)
        for ref, steps in self.steps.items():
            if steps != _usual_steps(nodes[ref], style.protocol):
                style.steps[ref] = tuple(steps)
        return Graph(nodes, root, style, self.refused, tuple(self.oddities))

    def empty_tuples(self) -> list[Node]:
        """The nodes that may be ``()``: interned ones, and the arguments of OBJ and INST."""
        found = [self.nodes[ref] for ref in self.consts.values()]
        return found + [self.nodes[ref] for ref, code in self.style.forms.items() if code in (op.OBJ, op.INST)]


def _so_far(node: Instance) -> list[tuple[int, int]]:
    """The steps that filled an instance until now, which were the usual ones."""
    steps = []
    if node.items:
        steps.append((op.APPEND if len(node.items) == 1 else op.APPENDS, len(node.items)))
    if node.pairs:
        count = len(node.pairs) >> 1
        steps.append((op.SETITEM if count == 1 else op.SETITEMS, count))
    return steps + [(op.BUILD, 1)] * len(node.states)


def _usual_steps(node: Node, protocol: int) -> list[tuple[int, int]]:
    if isinstance(node, Dict):
        return op.pair_steps(len(node.pairs) >> 1, protocol, exact=True)
    if isinstance(node, List):
        return op.item_steps(len(node.items), protocol, exact=True)
    if isinstance(node, Set):
        full, rest = divmod(len(node.items), op.BATCH)
        return [(op.ADDITEMS, op.BATCH)] * full + [(op.ADDITEMS, rest)] if node.items else []
    if isinstance(node, Instance):
        steps = op.item_steps(len(node.items), protocol, exact=False)
        steps += op.pair_steps(len(node.pairs) >> 1, protocol, exact=False)
        return steps + [(op.BUILD, 1)] * len(node.states)
    return []
