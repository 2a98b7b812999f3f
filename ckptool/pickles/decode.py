"""From bytes to a graph: a stack machine that builds nodes and does nothing else.

It follows CPython's unpickler opcode by opcode (``Lib/pickle.py``, ``_Unpickler``), but where that one
imports or calls, this one makes a node. Every opcode that creates an object creates a node, also when
the object is popped again, so that nothing a pickle names can hide.
"""

from __future__ import annotations

import gc
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from ..errors import PickleError, TruncatedPickleError
from ..limits import LIMITS, Limits
from . import opcodes as op
from .filling import usual_steps
from .machine import Machine
from .nodes import Call, Dict, Global, Graph, Persistent, Ref, Style
from .phrase_reading import read
from .rare import RARE

__all__ = ["Decoded", "decode"]

_u32 = Struct("<I").unpack_from

#: Opcodes that only protocol 0 writes, only 0 and 1, and only 4 and later.
_TEXTUAL = frozenset((op.GET, op.PUT, op.LIST, op.DICT, op.UNICODE, op.STRING, op.FLOAT, op.PERSID))
_OLD = frozenset((op.INT, op.LONG))
_MODERN = frozenset((op.MEMOIZE, op.FRAME, op.STACK_GLOBAL, op.SHORT_BINUNICODE))


class Decoded(NamedTuple):
    """A graph, the offset just behind its STOP, and the largest number in its memo.

    CPython's unpickler in C keeps the memo in an array: it sets 16 bytes aside for each number up to the largest
    (``_Unpickler_MemoPut`` in Modules/_pickle.c), which a pickle of a few bytes can have run out of memory.
    """

    graph: Graph
    end: int
    memo: int


def decode(data: bytes, start: int = 0, *, where: str = "pickle", limits: Limits = LIMITS) -> Decoded:
    """Decode the pickle that begins at byte ``start`` of ``data``.

    Raises PickleError, which names the offset within ``data``, for anything that CPython's unpickler
    would refuse before it calls something.
    """
    # What is noted of the style depends on the protocol, which PROTO need not tell: protocols 0 and 1 have
    # none, and an edited or handmade pickle may declare one and use the opcodes of another.
    declared = data[start + 1] if data[start : start + 1] == b"\x80" and start + 1 < len(data) else 2
    guess = min(max(declared, 2), 5)
    machine, root = _run(data, start, where, limits, guess)
    shown = _dialect(machine, guess)
    if shown != guess:
        machine, root = _run(data, start, where, limits, shown)
    return Decoded(_graph(machine, root), machine.pos, max(machine.sparse, default=len(machine.memo)))


def _dialect(machine: Machine, guess: int) -> int:
    """The protocol that the opcodes show."""
    used = machine.refused.keys()
    if guess >= 4:
        return 3 if used.isdisjoint(_MODERN) else guess
    if machine.style.header:
        return guess
    return 4 if op.MEMOIZE in used else 2 if used.isdisjoint(_TEXTUAL | _OLD) else 1 if used.isdisjoint(_TEXTUAL) else 0


def _run(data: bytes, start: int, where: str, limits: Limits, dialect: int) -> tuple[Machine, Ref]:
    machine = Machine(data, start, where, limits, Style(min(dialect, 1), header=False, dialect=dialect))
    # Millions of fresh containers make the collector scan the arena over and over: it takes
    # a third of the whole time, and there is no garbage to find.
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
    """Run to STOP and return the object on top; ``machine.pos`` then stands behind it.

    Written for CPython 3.11 and later, where ``stack.append(...)`` on a local is as cheap as it gets.
    """
    data, nodes, memo, bare, tiny, single = (
        machine.data,
        machine.nodes,
        machine.memo,
        machine.bare,
        machine.tiny,
        machine.single,
    )
    consts, refused, forms, outer = machine.consts, machine.refused, machine.style.forms, machine.outer
    text_refs, text_places = machine.texts
    modern, plain = machine.dialect >= 4, machine.dialect in (2, 3)
    stack, fetched = machine.stack, machine.fetched
    at = pos = machine.start
    # A node takes one byte of pickle at least: only beyond so many bytes there can be too many.
    stop = pos + machine.most
    try:
        while True:
            if pos > stop:
                machine.at = pos
                stop = machine.look_around(pos)
            at = pos
            code = data[pos]
            pos += 1
            if code == 0x72:  # LONG_BINPUT
                index = _u32(data, pos)[0]
                pos += 4
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    machine.at = at
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
                    machine.short(size)
                ref = len(nodes)
                stack.append(ref)
                nodes.append(data[pos - size : pos].decode("utf-8", "surrogatepass"))
                text_refs.append(ref)
                text_places.append(at)
                if modern and size < 0x100:
                    forms[ref] = 0x58
            elif code == 0x28:  # MARK
                end = read(machine, stack[-1], at, stop) if plain and stack and data.startswith(b"((", at) else -1
                if end < 0:
                    outer.append(stack)
                    stack = []
                else:
                    stack[-1] = len(nodes) - 1
                    pos = end
            elif code == 0x4B:  # BININT1
                ref = tiny[data[pos]]
                stack.append(machine.tiny_int(data[pos]) if ref < 0 else ref)
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
                    # Not a node of its own: () is one object.
                    ref = single[0x74]
                    stack.append(machine.singleton(0x74) if ref < 0 else ref)
            elif code == 0x85:  # TUPLE1
                made: tuple[Ref, ...] = (stack[-1],)
                stack[-1] = len(nodes)
                nodes.append(made)
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                made = (stack[-1], last)
                stack[-1] = len(nodes)
                nodes.append(made)
            elif code == 0x4D or code == 0x4A:  # BININT2, BININT
                end = pos + 2 if code == 0x4D else pos + 4
                key = data[at:end]
                found = consts.get(key)
                stack.append(machine.small_int(code, key) if found is None else found)
                pos = end
            elif code == 0x29 or code == 0x89 or code == 0x4E or code == 0x88:
                # EMPTY_TUPLE, NEWFALSE, NONE, NEWTRUE
                ref = single[code]
                stack.append(machine.singleton(code) if ref < 0 else ref)
            elif code == 0x51:  # BINPERSID
                ref = len(nodes)
                nodes.append(Persistent(stack[-1]))
                bare.append(ref)
                stack[-1] = ref
            elif code == 0x71:  # BINPUT
                index = data[pos]
                pos += 1
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    machine.at = at
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
                made = (stack[-1], middle, last)
                stack[-1] = len(nodes)
                nodes.append(made)
            elif code == 0x7D and plain:  # EMPTY_DICT
                stack.append(len(nodes))
                nodes.append(Dict(()))
            elif code == 0x73:  # SETITEM
                last = stack.pop()
                pair = [stack.pop(), last]
                machine.set_pairs(stack[-1], pair, 0x73)
            elif code == 0x75:  # SETITEMS
                items = stack
                stack = outer.pop()
                machine.set_pairs(stack[-1], items, 0x75)
            elif code == 0x94 and not machine.gaps:  # MEMOIZE
                memo.append(stack[-1])
                refused[0x94] = refused.get(0x94, 0) + 1
            elif code == 0x8C and modern:  # SHORT_BINUNICODE
                end = pos + 1 + data[pos]
                if end > len(data):
                    machine.short(data[pos])
                stack.append(len(nodes))
                nodes.append(data[pos + 1 : end].decode("utf-8", "surrogatepass"))
                pos = end
                refused[0x8C] = refused.get(0x8C, 0) + 1
            elif code == 0x2E:  # STOP
                root = stack.pop()
                machine.at, machine.pos = at, pos
                if stack or outer:
                    machine.odd("values are left on the stack at STOP")
                if machine.frame_end > pos:
                    machine.odd("the last FRAME reaches beyond STOP")
                return root
            else:
                machine.at, machine.pos, machine.stack = at, pos, stack
                if code not in op.ACCEPTED:
                    if code not in op.NAMES:
                        machine.fail(f"byte 0x{code:02x} is no pickle instruction")
                    refused[code] = refused.get(code, 0) + 1
                RARE[code](machine, code)
                pos, stack = machine.pos, machine.stack
                if code == 0x95:  # FRAME: to be looked at where it ends
                    stop = min(stop, machine.frame_end - 1)
    except PickleError as error:
        error.offset = at
        raise
    except UnicodeDecodeError:
        raise PickleError("a text is not UTF-8", where=machine.where, offset=at) from None
    except (IndexError, StructError) as error:
        one_more = at < len(data) and data[at] in (op.BININT1, op.BINPUT, op.BINGET, op.SHORT_BINUNICODE)
        if isinstance(error, StructError) or at + one_more >= len(data):
            what = "the pickle ends in the middle of an instruction"
            raise TruncatedPickleError(what, where=machine.where, offset=at) from None
        what = "an instruction takes more from the stack than there is"
        raise PickleError(what, where=machine.where, offset=at) from None


def _graph(machine: Machine, root: Ref) -> Graph:
    """The graph of a machine that has stopped, with what is unusual about its style."""
    style, nodes, memo = machine.style, machine.nodes, machine.memo
    if memo and memo[0] < 0:
        style.memo_base = 1
    count = len(nodes)
    # By the policy the memo is all of the arena but the bare nodes. Equal sums do not prove it, but nearly: and
    # if they deceive, only the writing differs from what was read, not the graph.
    usual = len(memo) - style.memo_base + len(machine.bare) == count and not machine.sparse
    if not usual or sum(memo) + style.memo_base + sum(machine.bare) != count * (count - 1) // 2:
        put = {ref for ref in memo if ref >= 0} | set(machine.sparse.values())
        bare = set(machine.bare)
        style.put = frozenset(put & bare)
        style.unput = frozenset(ref for ref in range(count) if ref not in put and ref not in bare)
    for ref, steps in machine.steps.items():
        if steps != usual_steps(nodes[ref], style.dialect):
            style.steps[ref] = tuple(steps)
    return Graph(
        nodes, root, style, machine.refused, tuple(machine.oddities), machine.filled, machine.texts, machine.fetched
    )
