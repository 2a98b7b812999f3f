"""The pickle opcodes by name, and which of them CPython's pickler chooses for a value.

The numbers are those of CPython's ``Lib/pickle.py``; the functions follow the C pickler (``save_long`` and others in
``Modules/_pickle.c``), because ``torch.save`` pickles with it.
"""

from __future__ import annotations

from typing import Final

MARK: Final = 0x28
EMPTY_TUPLE: Final = 0x29
STOP: Final = 0x2E
POP: Final = 0x30
POP_MARK: Final = 0x31
DUP: Final = 0x32
BINBYTES: Final = 0x42
SHORT_BINBYTES: Final = 0x43
FLOAT: Final = 0x46
BINFLOAT: Final = 0x47
INT: Final = 0x49
BININT: Final = 0x4A
BININT1: Final = 0x4B
LONG: Final = 0x4C
BININT2: Final = 0x4D
NONE: Final = 0x4E
PERSID: Final = 0x50
BINPERSID: Final = 0x51
REDUCE: Final = 0x52
STRING: Final = 0x53
BINSTRING: Final = 0x54
SHORT_BINSTRING: Final = 0x55
UNICODE: Final = 0x56
BINUNICODE: Final = 0x58
EMPTY_LIST: Final = 0x5D
APPEND: Final = 0x61
BUILD: Final = 0x62
GLOBAL: Final = 0x63
DICT: Final = 0x64
APPENDS: Final = 0x65
GET: Final = 0x67
BINGET: Final = 0x68
INST: Final = 0x69
LONG_BINGET: Final = 0x6A
LIST: Final = 0x6C
OBJ: Final = 0x6F
PUT: Final = 0x70
BINPUT: Final = 0x71
LONG_BINPUT: Final = 0x72
SETITEM: Final = 0x73
TUPLE: Final = 0x74
SETITEMS: Final = 0x75
EMPTY_DICT: Final = 0x7D
PROTO: Final = 0x80
NEWOBJ: Final = 0x81
EXT1: Final = 0x82
EXT2: Final = 0x83
EXT4: Final = 0x84
TUPLE1: Final = 0x85
TUPLE2: Final = 0x86
TUPLE3: Final = 0x87
NEWTRUE: Final = 0x88
NEWFALSE: Final = 0x89
LONG1: Final = 0x8A
LONG4: Final = 0x8B
SHORT_BINUNICODE: Final = 0x8C
BINUNICODE8: Final = 0x8D
BINBYTES8: Final = 0x8E
EMPTY_SET: Final = 0x8F
ADDITEMS: Final = 0x90
FROZENSET: Final = 0x91
NEWOBJ_EX: Final = 0x92
STACK_GLOBAL: Final = 0x93
MEMOIZE: Final = 0x94
FRAME: Final = 0x95
BYTEARRAY8: Final = 0x96
NEXT_BUFFER: Final = 0x97
READONLY_BUFFER: Final = 0x98

NAMES: Final[dict[int, str]] = {
    value: name for name, value in list(globals().items()) if name.isupper() and isinstance(value, int)
}

#: The opcodes that torch's restricted unpickler executes (``Unpickler.load`` in torch/_weights_only_unpickler.py).
ACCEPTED: Final = (
    frozenset((MARK, EMPTY_TUPLE, STOP, BINFLOAT, BININT, BININT1, BININT2, NONE, BINPERSID, REDUCE, SHORT_BINSTRING))
    | {BINUNICODE, EMPTY_LIST, APPEND, BUILD, GLOBAL, APPENDS, BINGET, LONG_BINGET, BINPUT, LONG_BINPUT, SETITEM}
    | {TUPLE, SETITEMS, EMPTY_DICT, PROTO, NEWOBJ, TUPLE1, TUPLE2, TUPLE3, NEWTRUE, NEWFALSE, LONG1, EMPTY_SET}
)

#: The opcodes of a ``str`` of Python 2.
PYTHON2_STRINGS: Final = frozenset((STRING, BINSTRING, SHORT_BINSTRING))


def int_opcode(value: int, protocol: int) -> int:
    """Return the opcode for an int (not a bool)."""
    if not -0x80000000 <= value <= 0x7FFFFFFF:
        # LONG1 holds 255 bytes of two's complement.
        return LONG if protocol < 2 else LONG1 if value.bit_length() < 255 * 8 else LONG4
    if protocol == 0:
        return INT
    return BININT1 if 0 <= value < 0x100 else BININT2 if 0 <= value < 0x10000 else BININT


def text_opcode(size: int, protocol: int) -> int:
    """Return the opcode for a str of ``size`` bytes of UTF-8."""
    if protocol == 0:
        return UNICODE
    if protocol >= 4:
        return SHORT_BINUNICODE if size < 0x100 else BINUNICODE if size <= 0xFFFFFFFF else BINUNICODE8
    return BINUNICODE


def bytes_opcode(size: int) -> int:
    """Return the opcode for a bytes object (protocol 3 and later)."""
    return SHORT_BINBYTES if size < 0x100 else BINBYTES if size <= 0xFFFFFFFF else BINBYTES8


def float_opcode(protocol: int) -> int:
    """Return the opcode for a float."""
    return BINFLOAT if protocol else FLOAT


def extension_opcode(code: int) -> int:
    """Return the opcode for a code of the extension registry."""
    return EXT1 if code < 0x100 else EXT2 if code < 0x10000 else EXT4
