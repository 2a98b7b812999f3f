"""Decode bytes to a graph, with a stack machine that only builds nodes.

It follows CPython's unpickler opcode by opcode (``_Unpickler`` in Lib/pickle.py). Where CPython imports or calls, this
machine makes a node. Every opcode that creates an object creates a node, even if the object is popped again, so a
pickle cannot hide the names it uses.
"""

from __future__ import annotations

import gc
from array import array
from struct import Struct
from struct import error as StructError

from ..base.errors import PickleError, TruncatedPickleError
from ..base.limits import LIMITS, Limits
from ..base.records import NamedTuple
from . import opcodes as op
from .batches import default_batches
from .fast_decode import read_pairs, read_pattern
from .machine import Foreign, Machine
from .nodes import Call, Dict, Global, Graph, Persistent, Ref, Style
from .uncommon_opcodes import HANDLERS

_u32 = Struct("<I").unpack_from

#: Opcodes that only protocol 0 writes, only 0 and 1, and only 4 and later.
_TEXTUAL = frozenset((op.GET, op.PUT, op.LIST, op.DICT, op.UNICODE, op.STRING, op.FLOAT, op.PERSID))
_OLD = frozenset((op.INT, op.LONG))
_MODERN = frozenset((op.MEMOIZE, op.FRAME, op.STACK_GLOBAL, op.SHORT_BINUNICODE))


class Decoded(NamedTuple):
    """A graph, the offset just after its STOP, and the largest index in its memo.

    CPython's C unpickler allocates 16 bytes for each index up to the largest (``_Unpickler_MemoPut`` in
    Modules/_pickle.c), so a pickle of a few bytes can make it run out of memory.
    """

    graph: Graph
    end: int
    memo: int


def decode(
    data: bytes, start: int = 0, *, where: str = "pickle", limits: Limits = LIMITS, foreign: Foreign | None = None
) -> Decoded:
    """Decode the pickle that begins at byte ``start`` of ``data``.

    ``foreign`` skips bytes within the pickle that an object reads itself. Raises PickleError, with the offset within
    ``data``, for everything that CPython's unpickler would refuse before calling anything.
    """
    # The recorded style depends on the protocol, but PROTO may be absent or misleading. Protocols 0 and 1 have no
    # PROTO, and an edited or handmade pickle may declare one protocol and use the opcodes of another.
    declared = data[start + 1] if data[start : start + 1] == b"\x80" and start + 1 < len(data) else 2
    guess = min(max(declared, 2), 5)
    machine, root = _run(data, start, where, limits, guess, foreign)
    dialect = _dialect(machine, guess)
    if dialect != guess:
        machine, root = _run(data, start, where, limits, dialect, foreign)
    return Decoded(_graph(machine, root), machine.pos, max(machine.sparse, default=len(machine.memo)))


def _dialect(machine: Machine, guess: int) -> int:
    """Return the protocol whose opcodes the pickle uses."""
    used = machine.refused.keys()
    if guess >= 4:
        return 3 if used.isdisjoint(_MODERN) else guess
    if machine.style.header:
        return guess
    return 4 if op.MEMOIZE in used else 2 if used.isdisjoint(_TEXTUAL | _OLD) else 1 if used.isdisjoint(_TEXTUAL) else 0


def _run(
    data: bytes, start: int, where: str, limits: Limits, dialect: int, foreign: Foreign | None
) -> tuple[Machine, Ref]:
    machine = Machine(data, start, where, limits, Style(min(dialect, 1), header=False, dialect=dialect))
    machine.foreign = foreign
    # Millions of new containers make the collector scan the arena again and again, which takes a third of the time.
    # There is no garbage to find.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return machine, _execute(machine)
    except PickleError as error:
        error.seen = list(machine.nodes)
        raise
    finally:
        if collecting:
            gc.enable()


def _execute(machine: Machine) -> Ref:
    """Run to STOP and return the object on top of the stack; ``machine.pos`` is then the offset after STOP.

    Written for CPython 3.11 and later, where ``stack.append(...)`` on a local is as cheap as possible.
    """
    data, nodes, memo, unmemoized = machine.data, machine.nodes, machine.memo, machine.unmemoized
    small_ints, singletons, stack = machine.small_ints, machine.singletons, machine.stack
    fetched = machine.fetched
    consts, refused, forms, outer = machine.consts, machine.refused, machine.style.forms, machine.outer
    text_refs, text_offsets = machine.texts
    modern, plain = machine.dialect >= 4, machine.dialect in (2, 3)
    at = pos = machine.start
    # A node takes at least one byte of pickle, so there cannot be too many before this offset.
    stop = pos + machine.max_nodes
    try:
        while True:
            if pos > stop:
                machine.op_start = pos
                stop = machine.check_progress(pos)
            at = pos
            code = data[pos]
            pos += 1
            if code == 0x72:  # LONG_BINPUT
                index = _u32(data, pos)[0]
                pos += 4
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    machine.op_start = at
                    machine.put(index, stack[-1])
            elif code == 0x68:  # BINGET
                index = data[pos]
                pos += 1
                ref = memo[index] if index < len(memo) else -1
                if ref < 0:
                    ref = machine.get(index)
                stack.append(ref)
                fetched.add(ref)
            elif code == 0x58:  # BINUNICODE
                size = _u32(data, pos)[0]
                pos += 4 + size
                if pos > len(data):
                    machine.fail_short(size)
                ref = len(nodes)
                stack.append(ref)
                nodes.append(data[pos - size : pos].decode("utf-8", "surrogatepass"))
                text_refs.append(ref)
                text_offsets.append(at)
                if modern and size < 0x100:
                    forms[ref] = 0x58
            elif code == 0x28:  # MARK
                end = read_pattern(machine, stack, at, stop) if plain and stack and data.startswith(b"((", at) else -1
                if end < 0:
                    outer.append(stack)
                    stack = []
                else:
                    pos = end
            elif code == 0x4B:  # BININT1
                ref = small_ints[data[pos]]
                stack.append(machine.new_small_int(data[pos]) if ref < 0 else ref)
                pos += 1
            elif code == 0x52:  # REDUCE
                args = stack.pop()
                func = stack[-1]
                if type(nodes[args]) is not tuple or type(nodes[func]) is not Global:
                    machine.check_call(func, args, 0x52)
                stack[-1] = len(nodes)
                nodes.append(Call(0x52, func, args))
            elif code == 0x74:  # TUPLE
                items = stack
                stack = outer.pop()
                if items:
                    if len(items) < 4 and machine.dialect >= 2:
                        forms[len(nodes)] = 0x74
                    stack.append(len(nodes))
                    nodes.append(tuple(items))
                else:
                    # No new node: () is one object.
                    ref = singletons[0x74]
                    stack.append(machine.new_singleton(0x74) if ref < 0 else ref)
            elif code == 0x85:  # TUPLE1
                parts: tuple[Ref, ...] = (stack[-1],)
                stack[-1] = len(nodes)
                nodes.append(parts)
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                parts = (stack[-1], last)
                stack[-1] = len(nodes)
                nodes.append(parts)
            elif code == 0x4D or code == 0x4A:  # BININT2, BININT
                end = pos + 2 if code == 0x4D else pos + 4
                key = data[at:end]
                known = consts.get(key)
                stack.append(machine.new_int(code, key) if known is None else known)
                pos = end
            elif code == 0x29 or code == 0x89 or code == 0x4E or code == 0x88:
                # EMPTY_TUPLE, NEWFALSE, NONE, NEWTRUE
                ref = singletons[code]
                stack.append(machine.new_singleton(code) if ref < 0 else ref)
            elif code == 0x51:  # BINPERSID
                ref = len(nodes)
                nodes.append(Persistent(stack[-1]))
                unmemoized.append(ref)
                stack[-1] = ref
            elif code == 0x71:  # BINPUT
                index = data[pos]
                pos += 1
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    machine.op_start = at
                    machine.put(index, stack[-1])
            elif code == 0x6A:  # LONG_BINGET
                index = _u32(data, pos)[0]
                pos += 4
                ref = memo[index] if index < len(memo) else -1
                if ref < 0:
                    ref = machine.get(index)
                stack.append(ref)
                fetched.add(ref)
            elif code == 0x87:  # TUPLE3
                last = stack.pop()
                middle = stack.pop()
                parts = (stack[-1], middle, last)
                stack[-1] = len(nodes)
                nodes.append(parts)
            elif code == 0x7D and plain:  # EMPTY_DICT
                end = read_pairs(machine, stack, at, stop)
                if end < 0:
                    stack.append(len(nodes))
                    nodes.append(Dict(()))
                else:
                    pos = end
            elif code == 0x73:  # SETITEM
                last = stack.pop()
                key_value = [stack.pop(), last]
                machine.fill(stack[-1], key_value, 0x73)
            elif code == 0x75:  # SETITEMS
                items = stack
                stack = outer.pop()
                machine.fill(stack[-1], items, 0x75)
            elif code == 0x94 and not machine.gaps:  # MEMOIZE
                memo.append(stack[-1])
                refused[0x94] = refused.get(0x94, 0) + 1
            elif code == 0x8C and modern:  # SHORT_BINUNICODE
                end = pos + 1 + data[pos]
                if end > len(data):
                    machine.fail_short(data[pos])
                stack.append(len(nodes))
                nodes.append(data[pos + 1 : end].decode("utf-8", "surrogatepass"))
                pos = end
                refused[0x8C] = refused.get(0x8C, 0) + 1
            elif code == 0x2E:  # STOP
                root = stack.pop()
                machine.op_start, machine.pos = at, pos
                if stack or outer:
                    machine.note_oddity("values are left on the stack at STOP")
                if machine.frame_end > pos:
                    machine.note_oddity("the last FRAME reaches beyond STOP")
                return root
            else:
                machine.op_start, machine.pos, machine.stack = at, pos, stack
                if code not in op.ACCEPTED:
                    if code not in op.NAMES:
                        machine.fail(f"byte 0x{code:02x} is not a pickle opcode")
                    refused[code] = refused.get(code, 0) + 1
                HANDLERS[code](machine, code)
                pos, stack = machine.pos, machine.stack
                if code == 0x95:  # FRAME: check again where it ends
                    stop = min(stop, machine.frame_end - 1)
    except PickleError as error:
        error.offset = at
        raise
    except UnicodeDecodeError:
        raise PickleError("a string is not UTF-8", where=machine.where, offset=at) from None
    except (IndexError, StructError) as error:
        one_more = at < len(data) and data[at] in (op.BININT1, op.BINPUT, op.BINGET, op.SHORT_BINUNICODE)
        if isinstance(error, StructError) or at + one_more >= len(data):
            message = "the pickle ends in the middle of an instruction"
            raise TruncatedPickleError(message, where=machine.where, offset=at) from None
        message = "an instruction takes more from the stack than there is"
        raise PickleError(message, where=machine.where, offset=at) from None


def _graph(machine: Machine, root: Ref) -> Graph:
    """Return the graph of a machine that has stopped, and complete the record of its style."""
    style, nodes, memo = machine.style, machine.nodes, machine.memo
    if memo and memo[0] < 0:
        style.memo_base = 1
    count = len(nodes)
    # A pickler memoizes every node except ``unmemoized``. Equal sums are near proof of that. If they mislead, the graph
    # is still correct; only the encoding may differ from the input.
    usual = len(memo) - style.memo_base + len(machine.unmemoized) == count and not machine.sparse
    if not usual or sum(memo) + style.memo_base + sum(machine.unmemoized) != count * (count - 1) // 2:
        memoized = {ref for ref in memo if ref >= 0} | set(machine.sparse.values())
        unmemoized = set(machine.unmemoized)
        style.memoized = frozenset(memoized & unmemoized)
        style.unmemoized = frozenset(range(count)) - memoized - unmemoized
    for ref, batches in machine.batches.items():
        if batches != default_batches(nodes[ref], style.dialect):
            style.batches[ref] = tuple(batches)
    texts, offsets = machine.texts
    if machine.start:
        offsets = array("Q", [offset - machine.start for offset in offsets])
    common = root, style, machine.refused, tuple(machine.oddities), machine.filled_at
    return Graph(nodes, *common, (texts, offsets), machine.fetched, machine.pos - machine.start)
