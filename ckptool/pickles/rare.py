"""Opcodes of ``decode`` that are not frequent enough for its loop: containers, calls, memo and stack.

Each function is called with the machine and the opcode when ``machine.pos`` stands behind the opcode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from . import literals
from . import opcodes as op
from .machine import Machine
from .nodes import (
    Buffer,
    ByteArray,
    Call,
    Dict,
    Extension,
    FrozenSet,
    Global,
    Instance,
    List,
    Persistent,
    Set,
)

__all__ = ["RARE"]


# -- containers -----------------------------------------------------------------------------------


def _empty(machine: Machine, code: int) -> None:
    """EMPTY_LIST, EMPTY_DICT and EMPTY_SET."""
    # Protocol 0 has LIST and DICT only.
    form = code if machine.dialect == 0 else -1
    machine.push(List(()) if code == op.EMPTY_LIST else Dict(()) if code == op.EMPTY_DICT else Set(()), form)


def _whole(machine: Machine, code: int) -> None:
    """LIST and DICT."""
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
    """FROZENSET."""
    items = machine.pop_mark()
    machine.check_keys(items)
    machine.push(FrozenSet(items))


def _append(machine: Machine, code: int) -> None:
    """APPEND."""
    item = machine.stack.pop()
    machine.add_items(machine.stack[-1], [item], code)


def _append_many(machine: Machine, code: int) -> None:
    """APPENDS and ADDITEMS."""
    items = machine.pop_mark()
    machine.add_items(machine.stack[-1], items, code)


def _build(machine: Machine, _: int) -> None:
    """BUILD."""
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)


# -- named objects and calls ----------------------------------------------------------------------


def _name(machine: Machine, _: int) -> None:
    """GLOBAL: the two lines are looked up as one."""
    begin = machine.pos
    end = machine.data.find(b"\n", machine.data.find(b"\n", begin) + 1)
    known = machine.names.get(machine.data[begin:end])
    if known is None:
        known = _word(machine), _word(machine)
        machine.names[machine.data[begin : machine.pos - 1]] = known
    else:
        machine.pos = end + 1
    machine.push(Global(*known))


def _word(machine: Machine) -> str:
    """A line of GLOBAL: one string for each, because a million globals may name the same."""
    raw = machine.line()
    known = machine.words.get(raw)
    if known is None:
        try:
            known = machine.words[raw] = raw.decode()
        except UnicodeDecodeError:
            machine.fail("a global whose name is not UTF-8")
    return known


def _stack_name(machine: Machine, _: int) -> None:
    """STACK_GLOBAL."""
    name_ref, module_ref = machine.stack.pop(), machine.stack.pop()
    name, module = machine.nodes[name_ref], machine.nodes[module_ref]
    if type(name) is not str or type(module) is not str:
        machine.fail("STACK_GLOBAL on something that is no string")
    machine.push(Global(module, name, (module_ref, name_ref)))


def _new(machine: Machine, code: int) -> None:
    """NEWOBJ and NEWOBJ_EX."""
    kwargs = machine.stack.pop() if code == op.NEWOBJ_EX else -1
    args, func = machine.stack.pop(), machine.stack.pop()
    machine.check_call(func, args, code)
    if kwargs >= 0 and not isinstance(machine.nodes[kwargs], Dict | Instance):
        machine.fail("NEWOBJ_EX with keyword arguments that are no dict")
    machine.push(Call(code, func, args, kwargs))


def _instance(machine: Machine, code: int) -> None:
    """OBJ and INST."""
    items = machine.pop_mark()
    # The pickler would memoise neither the class of INST nor the arguments, which are no tuple on the stack.
    func = items.pop(0) if code == op.OBJ else machine.add_bare(Global(_ascii(machine), _ascii(machine)), code)
    args = machine.add_bare(tuple(items), code)
    machine.check_call(func, args, code)
    machine.push(Call(code, func, args))


def _ascii(machine: Machine) -> str:
    try:
        return machine.line().decode("ascii")
    except UnicodeDecodeError:
        machine.fail("a name or id that is not ASCII")


def _extension(machine: Machine, code: int) -> None:
    """EXT1, EXT2 and EXT4."""
    size = 1 if code == op.EXT1 else 2 if code == op.EXT2 else 4
    value = int.from_bytes(machine.take(size), "little", signed=size == 4)
    if value <= 0:
        machine.fail("an extension code below 1")
    machine.stack.append(machine.add_bare(Extension(value), -1 if code == op.extension_opcode(value) else code))


def _persistent_text(machine: Machine, code: int) -> None:
    """PERSID."""
    pid = machine.add_bare(_ascii(machine), code)
    machine.stack.append(machine.add_bare(Persistent(pid, text=True)))


def _buffer(machine: Machine, code: int) -> None:
    """NEXT_BUFFER and READONLY_BUFFER."""
    inner = machine.stack.pop() if code == op.READONLY_BUFFER else -1
    if inner >= 0 and not isinstance(machine.nodes[inner], bytes | ByteArray | Buffer | Instance):
        machine.fail("READONLY_BUFFER on what is no buffer")
    machine.stack.append(machine.add_bare(Buffer(inner)))


# -- stack, memo and framing ----------------------------------------------------------------------


def _shuffle(machine: Machine, code: int) -> None:
    """POP, POP_MARK and DUP."""
    if code == op.DUP:
        machine.stack.append(machine.stack[-1])
        machine.fetched.add(machine.stack[-1])
    elif code == op.POP_MARK:
        machine.pop_mark()
    elif not machine.stack:
        if machine.dialect >= 2:
            machine.odd("POP takes a MARK")
        machine.pop_mark()
    else:
        machine.dropped(machine.stack.pop())


#: Places in a memo: as many as LONG_BINPUT can name. The unpickler of C makes a table as long as its largest number.
_MEMOS: Final = 1 << 32


def _text_memo(machine: Machine, code: int) -> None:
    """GET and PUT."""
    try:
        index = int(machine.line())
    except ValueError:
        machine.fail("a memo number that is no number")
    if index < 0:
        machine.fail("a negative memo number")
    if index >= _MEMOS:
        machine.fail("a memo number that is too large")
    if code == op.GET:
        machine.stack.append(machine.get(index))
    elif index == len(machine.memo):
        machine.memo.append(machine.stack[-1])
    else:
        machine.put(index, machine.stack[-1])


def _memoize(machine: Machine, _: int) -> None:
    """MEMOIZE."""
    machine.memoize(machine.stack[-1])


def _protocol(machine: Machine, _: int) -> None:
    """PROTO."""
    protocol = machine.take(1)[0]
    if protocol > 5:
        machine.fail(f"pickle protocol {protocol} is newer than any known (5)")
    if machine.style.header:
        machine.odd("a second PROTO")
    elif machine.at != machine.start:
        machine.odd("PROTO is not the first instruction")
    machine.style.protocol = protocol
    machine.style.header = True


def _frame(machine: Machine, _: int) -> None:
    """FRAME."""
    size = int.from_bytes(machine.take(8), "little")
    machine.style.framed = True
    if machine.at < machine.frame_end:
        machine.odd("a FRAME begins inside another")
    machine.frame_end = machine.pos + size
    if machine.frame_end > len(machine.data):
        machine.short(size)


_TABLE: dict[Callable[[Machine, int], None], tuple[int, ...]] = {
    _empty: (op.EMPTY_LIST, op.EMPTY_DICT, op.EMPTY_SET),
    _whole: (op.LIST, op.DICT),
    _frozen_set: (op.FROZENSET,),
    _append: (op.APPEND,),
    _append_many: (op.APPENDS, op.ADDITEMS),
    _build: (op.BUILD,),
    _name: (op.GLOBAL,),
    _stack_name: (op.STACK_GLOBAL,),
    _new: (op.NEWOBJ, op.NEWOBJ_EX),
    _instance: (op.OBJ, op.INST),
    _extension: (op.EXT1, op.EXT2, op.EXT4),
    _persistent_text: (op.PERSID,),
    _buffer: (op.NEXT_BUFFER, op.READONLY_BUFFER),
    _shuffle: (op.POP, op.POP_MARK, op.DUP),
    _text_memo: (op.GET, op.PUT),
    _memoize: (op.MEMOIZE,),
    _protocol: (op.PROTO,),
    _frame: (op.FRAME,),
    literals.binary_float: (op.BINFLOAT,),
    literals.binary_long: (op.LONG1, op.LONG4),
    literals.text_number: (op.INT, op.LONG, op.FLOAT),
    literals.text: (op.SHORT_BINUNICODE, op.BINUNICODE8),
    literals.text_line: (op.UNICODE,),
    literals.byte_string: (op.SHORT_BINSTRING, op.BINSTRING),
    literals.byte_line: (op.STRING,),
    literals.raw_bytes: (op.SHORT_BINBYTES, op.BINBYTES, op.BINBYTES8, op.BYTEARRAY8),
}

#: The function for each opcode that the loop of ``decode`` does not execute itself.
RARE: Final = {code: function for function, codes in _TABLE.items() for code in codes}
