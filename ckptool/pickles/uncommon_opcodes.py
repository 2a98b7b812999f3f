"""Execute the opcodes that are too rare for the loop of ``decode``.

Each handler is called with the machine and the opcode; ``machine.pos`` is then the offset after the opcode. The table
at the end says which opcodes a handler executes.
"""

from __future__ import annotations

import re
from codecs import raw_unicode_escape_decode
from collections.abc import Callable
from math import isinf
from struct import Struct
from typing import Final

from ..base.lazy import regex
from . import opcodes as op
from .machine import Machine
from .nodes import Buffer, ByteArray, Call, Dict, Extension, FrozenSet, Global, Instance, List, Node, Persistent, Set

_f64 = Struct(">d").unpack

#: Bytes of the length after an opcode; opcodes not listed have one byte.
_WIDTHS: Final = {op.BINUNICODE8: 8, op.BINBYTES: 4, op.BINBYTES8: 8, op.BYTEARRAY8: 8, op.BINSTRING: 4, op.LONG4: 4}

_ESCAPE = regex(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|([^x0-7]))", re.DOTALL)
_ESCAPES = {b"\n": b"", b"b": b"\b", b"f": b"\f", b"t": b"\t", b"n": b"\n", b"r": b"\r", b"v": b"\v", b"a": b"\a"}
_ESCAPES |= {b"\\": b"\\", b"'": b"'", b'"': b'"'}


def _sized(machine: Machine, code: int) -> bytes:
    """Read a length and as many bytes. The length is signed in BINSTRING and LONG4."""
    size = int.from_bytes(machine.take(_WIDTHS.get(code, 1)), "little", signed=code in (op.BINSTRING, op.LONG4))
    if size < 0:
        machine.fail(f"{op.NAMES[code]} with a negative size")
    return machine.take(size)


def _binary_float(machine: Machine, code: int) -> None:
    raw = machine.take(8)
    _number(machine, code, raw, _f64(raw)[0], op.BINFLOAT if machine.dialect else op.FLOAT)


def _binary_long(machine: Machine, code: int) -> None:
    raw = _sized(machine, code)
    value = int.from_bytes(raw, "little", signed=True)
    _number(machine, code, raw, value, op.int_opcode(value, machine.dialect))


def _text_number(machine: Machine, code: int) -> None:
    raw, limit = machine.line(), machine.limits.int_digits
    if len(raw) > limit + 2:
        machine.fail_limit(f"a number of {len(raw):,} digits; the limit is {limit:,} (limits.int_digits)")
    try:
        if code == op.FLOAT:
            value = float(raw)
            if isinf(value) and b"n" not in raw.lower():
                machine.fail("a number that is too large")  # like the C unpickler; the Python one accepts it
            _number(machine, code, raw, value, op.BINFLOAT if machine.dialect else op.FLOAT)
        elif code == op.INT and raw in (b"00", b"01"):
            _number(machine, code, raw, raw == b"01", op.INT if machine.dialect < 2 else op.NEWTRUE)
        else:
            whole = int(raw[:-1] if code == op.LONG and raw.endswith(b"L") else raw, 0)
            _number(machine, code, raw, whole, op.int_opcode(whole, machine.dialect))
    except ValueError:
        machine.fail("a number that cannot be parsed")


def _number(machine: Machine, code: int, raw: bytes, value: Node, default: int) -> None:
    """Push a number; equal bytes become the same node."""
    key = b"%c%b" % (code, raw)
    ref = machine.consts.get(key)
    if ref is None:
        ref = machine.consts[key] = machine.add_unmemoized(value, -1 if code == default else code)
    machine.stack.append(ref)


def _text(machine: Machine, code: int) -> None:
    raw = _sized(machine, code)
    default = op.text_opcode(len(raw), machine.dialect)
    machine.push(raw.decode("utf-8", "surrogatepass"), -1 if default == code else code)


def _text_line(machine: Machine, code: int) -> None:
    try:
        # The method decode() would import a module for this codec, which is an event for an audit hook.
        machine.push(raw_unicode_escape_decode(machine.line())[0], code if machine.dialect else -1)
    except UnicodeDecodeError:
        machine.fail("a string with an invalid escape")


def _byte_string(machine: Machine, code: int) -> None:
    """Execute SHORT_BINSTRING or BINSTRING, a Python 2 ``str``."""
    machine.push(_sized(machine, code).decode("utf-8", "surrogateescape"), code)


def _byte_line(machine: Machine, code: int) -> None:
    """Execute STRING, the ``repr`` of a Python 2 ``str``."""
    raw = machine.line()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        machine.fail("STRING without its quotes")
    raw = raw[1:-1]
    if b"\\" in raw:
        if b"\\" in _ESCAPE.sub(b"", raw):
            machine.fail("STRING with an invalid escape")
        raw = _ESCAPE.sub(_unescaped, raw)
    machine.push(raw.decode("utf-8", "surrogateescape"), code)


def _unescaped(match: re.Match[bytes]) -> bytes:
    """Return the bytes of an escape, like CPython's ``codecs.escape_decode``; an unknown escape stays."""
    if match[1] is not None:
        return bytes((int(match[1], 16),))
    if match[2] is not None:
        return bytes((int(match[2], 8) & 0xFF,))
    return _ESCAPES.get(match[3], match[0])


def _raw_bytes(machine: Machine, code: int) -> None:
    raw = _sized(machine, code)
    if code == op.BYTEARRAY8:
        machine.push(ByteArray(raw))
    else:
        machine.push(raw, -1 if code == op.bytes_opcode(len(raw)) else code)


# -- containers


def _empty(machine: Machine, code: int) -> None:
    # Protocol 0 has only LIST and DICT.
    form = code if machine.dialect == 0 else -1
    machine.push(List(()) if code == op.EMPTY_LIST else Dict(()) if code == op.EMPTY_DICT else Set(()), form)


def _list_or_dict(machine: Machine, code: int) -> None:
    items = machine.pop_mark()
    form = code if items or machine.dialect else -1
    if code == op.LIST:
        machine.push(List(items), form)
        return
    if len(items) & 1:
        machine.fail("DICT with a key that has no value")
    machine.check_keys(items[::2])
    machine.push(Dict(items), form)


def _frozen_set(machine: Machine, _: int) -> None:
    items = machine.pop_mark()
    machine.check_keys(items)
    machine.push(FrozenSet(items))


def _fill(machine: Machine, code: int) -> None:
    items = [machine.stack.pop()] if code == op.APPEND else machine.pop_mark()
    machine.fill(machine.stack[-1], items, code)


def _build(machine: Machine, _: int) -> None:
    state = machine.stack.pop()
    built = machine.stack[-1]
    machine.build(built, state)
    if machine.foreign is not None:
        machine.pos = machine.foreign(machine.nodes, built, machine.pos)


# -- named objects and calls


def _global(machine: Machine, _: int) -> None:
    """Execute GLOBAL; its two lines are looked up together."""
    begin = machine.pos
    end = machine.data.find(b"\n", machine.data.find(b"\n", begin) + 1)
    known = machine.global_names.get(machine.data[begin:end])
    if known is None:
        known = _global_line(machine), _global_line(machine)
        machine.global_names[machine.data[begin : machine.pos - 1]] = known
    else:
        machine.pos = end + 1
    _push_global(machine, Global(*known))


def _push_global(machine: Machine, node: Global) -> None:
    machine.names += 1
    if machine.names > machine.limits.names:
        machine.fail_limit(f"globals are named more than {machine.limits.names:,} times, which is the limit")
    machine.push(node)


def _global_line(machine: Machine) -> str:
    """Read a line of GLOBAL. Equal lines share one string, because a million globals may have the same name."""
    raw = machine.line()
    known = machine.strings.get(raw)
    if known is None:
        try:
            known = machine.strings[raw] = raw.decode()
        except UnicodeDecodeError:
            machine.fail("a global whose name is not UTF-8")
    return known


def _stack_global(machine: Machine, _: int) -> None:
    name_ref, module_ref = machine.stack.pop(), machine.stack.pop()
    name, module = machine.nodes[name_ref], machine.nodes[module_ref]
    if type(name) is not str or type(module) is not str:
        machine.fail("STACK_GLOBAL on something that is not a string")
    _push_global(machine, Global(module, name, (module_ref, name_ref)))


def _new(machine: Machine, code: int) -> None:
    kwargs = machine.stack.pop() if code == op.NEWOBJ_EX else -1
    args, func = machine.stack.pop(), machine.stack.pop()
    machine.check_call(func, args, code)
    if kwargs >= 0 and not isinstance(machine.nodes[kwargs], Dict | Instance):
        machine.fail("NEWOBJ_EX with keyword arguments that are not a dict")
    machine.push(Call(code, func, args, kwargs))


def _instance(machine: Machine, code: int) -> None:
    items = machine.pop_mark()
    # The pickler memoizes neither the class of INST nor the arguments, because they are not a tuple on the stack.
    func = items.pop(0) if code == op.OBJ else machine.add_unmemoized(Global(_ascii(machine), _ascii(machine)), code)
    args = machine.add_unmemoized(tuple(items), code)
    machine.check_call(func, args, code)
    machine.push(Call(code, func, args))


def _ascii(machine: Machine) -> str:
    try:
        return machine.line().decode("ascii")
    except UnicodeDecodeError:
        machine.fail("a name or id that is not ASCII")


def _extension(machine: Machine, code: int) -> None:
    size = 1 if code == op.EXT1 else 2 if code == op.EXT2 else 4
    value = int.from_bytes(machine.take(size), "little", signed=size == 4)
    if value <= 0:
        machine.fail("an extension code below 1")
    machine.stack.append(machine.add_unmemoized(Extension(value), -1 if code == op.extension_opcode(value) else code))


def _persistent_text(machine: Machine, code: int) -> None:
    pid = machine.add_unmemoized(_ascii(machine), code)
    machine.stack.append(machine.add_unmemoized(Persistent(pid, text=True)))


def _buffer(machine: Machine, code: int) -> None:
    inner = machine.stack.pop() if code == op.READONLY_BUFFER else -1
    if inner >= 0 and not isinstance(machine.nodes[inner], bytes | ByteArray | Buffer | Instance):
        machine.fail("READONLY_BUFFER on something that is not a buffer")
    machine.stack.append(machine.add_unmemoized(Buffer(inner)))


# -- stack, memo and framing


def _pop_or_dup(machine: Machine, code: int) -> None:
    machine.discards += 1
    if machine.discards > machine.limits.discards:
        machine.fail_limit(f"more than {machine.limits.discards:,} values are dropped or repeated, which is the limit")
    if code == op.DUP:
        machine.stack.append(machine.stack[-1])
        machine.fetched.add(machine.stack[-1])
    elif code == op.POP_MARK:
        machine.pop_mark()
    elif not machine.stack:
        if machine.dialect >= 2:
            machine.note_oddity("POP takes a MARK")
        machine.pop_mark()
    else:
        machine.note_discarded(machine.stack.pop())


#: One more than the largest index that LONG_BINPUT can express.
_MEMO_LIMIT: Final = 1 << 32


def _text_memo(machine: Machine, code: int) -> None:
    try:
        index = int(machine.line())
    except ValueError:
        machine.fail("a memo index that is not a number")
    if index < 0:
        machine.fail("a negative memo index")
    if index >= _MEMO_LIMIT:
        machine.fail("a memo index that is too large")
    if code == op.GET:
        machine.stack.append(machine.get(index))
    elif index == len(machine.memo):
        machine.memo.append(machine.stack[-1])
    else:
        machine.put(index, machine.stack[-1])


def _memoize(machine: Machine, _: int) -> None:
    machine.memoize(machine.stack[-1])


def _protocol(machine: Machine, _: int) -> None:
    protocol = machine.take(1)[0]
    if protocol > 5:
        machine.fail(f"pickle protocol {protocol} is newer than any known (5)")
    if machine.style.header:
        machine.note_oddity("a second PROTO")
    elif machine.op_start != machine.start:
        machine.note_oddity("PROTO is not the first instruction")
    machine.style.protocol = protocol
    machine.style.header = True


def _frame(machine: Machine, _: int) -> None:
    size = int.from_bytes(machine.take(8), "little")
    machine.style.framed = True
    if machine.op_start < machine.frame_end:
        machine.note_oddity("a FRAME begins inside another")
    machine.frame_end = machine.pos + size
    if machine.frame_end > len(machine.data):
        machine.fail_short(size)


_TABLE: dict[Callable[[Machine, int], None], tuple[int, ...]] = {
    _empty: (op.EMPTY_LIST, op.EMPTY_DICT, op.EMPTY_SET),
    _list_or_dict: (op.LIST, op.DICT),
    _frozen_set: (op.FROZENSET,),
    _fill: (op.APPEND, op.APPENDS, op.ADDITEMS),
    _build: (op.BUILD,),
    _global: (op.GLOBAL,),
    _stack_global: (op.STACK_GLOBAL,),
    _new: (op.NEWOBJ, op.NEWOBJ_EX),
    _instance: (op.OBJ, op.INST),
    _extension: (op.EXT1, op.EXT2, op.EXT4),
    _persistent_text: (op.PERSID,),
    _buffer: (op.NEXT_BUFFER, op.READONLY_BUFFER),
    _pop_or_dup: (op.POP, op.POP_MARK, op.DUP),
    _text_memo: (op.GET, op.PUT),
    _memoize: (op.MEMOIZE,),
    _protocol: (op.PROTO,),
    _frame: (op.FRAME,),
    _binary_float: (op.BINFLOAT,),
    _binary_long: (op.LONG1, op.LONG4),
    _text_number: (op.INT, op.LONG, op.FLOAT),
    _text: (op.SHORT_BINUNICODE, op.BINUNICODE8),
    _text_line: (op.UNICODE,),
    _byte_string: (op.SHORT_BINSTRING, op.BINSTRING),
    _byte_line: (op.STRING,),
    _raw_bytes: (op.SHORT_BINBYTES, op.BINBYTES, op.BINBYTES8, op.BYTEARRAY8),
}

#: The handler of each opcode that the loop of ``decode`` does not execute itself.
HANDLERS: Final = {code: handler for handler, codes in _TABLE.items() for code in codes}
