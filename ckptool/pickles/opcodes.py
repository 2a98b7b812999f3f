"""The pickle opcodes by name, and the opcode that CPython's pickler chooses for a value.

The numbers come from CPython's ``Lib/pickle.py``. The functions follow the C pickler (``save_long`` and others in
``Modules/_pickle.c``), because ``torch.save`` pickles with it.
"""

from __future__ import annotations

from typing import Final

#: Most opcodes of protocols 0 and 1 are ASCII letters.
MARK, STOP, POP, POP_MARK, DUP, BUILD, GLOBAL, REDUCE, INST, OBJ = b"(.012bcRio"
NONE, INT, BININT, BININT1, BININT2, LONG, FLOAT, BINFLOAT = b"NIJKMLFG"
STRING, BINSTRING, SHORT_BINSTRING, UNICODE, BINUNICODE, BINBYTES, SHORT_BINBYTES = b"STUVXBC"
EMPTY_TUPLE, TUPLE, EMPTY_LIST, LIST, APPEND, APPENDS, EMPTY_DICT, DICT, SETITEM, SETITEMS = b")t]lae}dsu"
PERSID, BINPERSID, GET, BINGET, LONG_BINGET, PUT, BINPUT, LONG_BINPUT = b"PQghjpqr"

#: The opcodes of protocols 2 to 5 are numbered.
PROTO, NEWOBJ, EXT1, EXT2, EXT4, TUPLE1, TUPLE2, TUPLE3 = range(0x80, 0x88)
NEWTRUE, NEWFALSE, LONG1, LONG4, SHORT_BINUNICODE, BINUNICODE8, BINBYTES8, EMPTY_SET = range(0x88, 0x90)
ADDITEMS, FROZENSET, NEWOBJ_EX, STACK_GLOBAL, MEMOIZE, FRAME, BYTEARRAY8, NEXT_BUFFER = range(0x90, 0x98)
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

#: The opcodes of a Python 2 ``str``.
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


def extension_opcode(code: int) -> int:
    """Return the opcode for a code of the extension registry."""
    return EXT1 if code < 0x100 else EXT2 if code < 0x10000 else EXT4
