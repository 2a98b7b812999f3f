"""The pickle opcodes by name, and what CPython's pickler does with them by default.

The numbers are those of CPython's ``Lib/pickle.py``; the policy functions restate what the C pickler
(``Modules/_pickle.c``: ``save_long``, ``batch_list_exact``, ``batch_dict_exact``, ``batch_dict``) writes,
because ``torch.save`` pickles with it.
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

#: What ``torch.load(weights_only=True)`` executes (torch/_weights_only_unpickler.py, ``Unpickler.load``).
ACCEPTED: Final = (
    frozenset((MARK, EMPTY_TUPLE, STOP, BINFLOAT, BININT, BININT1, BININT2, NONE, BINPERSID, REDUCE, SHORT_BINSTRING))
    | {BINUNICODE, EMPTY_LIST, APPEND, BUILD, GLOBAL, APPENDS, BINGET, LONG_BINGET, BINPUT, LONG_BINPUT, SETITEM}
    | {TUPLE, SETITEMS, EMPTY_DICT, PROTO, NEWOBJ, TUPLE1, TUPLE2, TUPLE3, NEWTRUE, NEWFALSE, LONG1, EMPTY_SET}
)

#: Elements in one APPENDS, SETITEMS or ADDITEMS (``BATCHSIZE`` in _pickle.c).
BATCH: Final = 1000


def int_opcode(value: int, protocol: int) -> int:
    """The opcode for an int (not a bool)."""
    if not -0x80000000 <= value <= 0x7FFFFFFF:
        # LONG1 holds 255 bytes of two's complement.
        return LONG if protocol < 2 else LONG1 if value.bit_length() < 255 * 8 else LONG4
    if protocol == 0:
        return INT
    return BININT1 if 0 <= value < 0x100 else BININT2 if 0 <= value < 0x10000 else BININT


def text_opcode(size: int, protocol: int) -> int:
    """The opcode for a str of ``size`` bytes of UTF-8."""
    if protocol == 0:
        return UNICODE
    if protocol >= 4:
        return SHORT_BINUNICODE if size < 0x100 else BINUNICODE if size <= 0xFFFFFFFF else BINUNICODE8
    return BINUNICODE


def bytes_opcode(size: int) -> int:
    """The opcode for a bytes object (protocol 3 and later)."""
    return SHORT_BINBYTES if size < 0x100 else BINBYTES if size <= 0xFFFFFFFF else BINBYTES8


def float_opcode(protocol: int) -> int:
    """The opcode for a float."""
    return BINFLOAT if protocol else FLOAT


def extension_opcode(code: int) -> int:
    """The opcode for a code of the extension registry."""
    return EXT1 if code < 0x100 else EXT2 if code < 0x10000 else EXT4


def item_steps(count: int, protocol: int, exact: bool) -> list[tuple[int, int]]:
    """How ``count`` elements are appended: (opcode, number of elements) in order.

    ``exact`` for a plain list; other objects (a deque) take the path of an iterator, which writes a
    lone remainder as APPEND.
    """
    return _steps(count, protocol, APPEND, APPENDS, lone_remainder=not exact, closing_empty=False)


def pair_steps(count: int, protocol: int, exact: bool) -> list[tuple[int, int]]:
    """How ``count`` key-value pairs are set; ``exact`` for a plain dict, else a mapping such as OrderedDict."""
    return _steps(count, protocol, SETITEM, SETITEMS, lone_remainder=not exact, closing_empty=exact)


def member_steps(count: int) -> list[tuple[int, int]]:
    """How ``count`` members are added to a set: a full last batch is followed by an empty one (``save_set``)."""
    if not count:
        return []
    full, rest = divmod(count, BATCH)
    return [(ADDITEMS, BATCH)] * full + [(ADDITEMS, rest)]


def _steps(
    count: int, protocol: int, single: int, many: int, *, lone_remainder: bool, closing_empty: bool
) -> list[tuple[int, int]]:
    if protocol == 0:
        return [(single, 1)] * count
    if count <= 1:
        return [(single, 1)] * count
    full, rest = divmod(count, BATCH)
    steps = [(many, BATCH)] * full
    if rest == 1 and lone_remainder:
        steps.append((single, 1))
    elif rest or closing_empty:
        # The C loop over an exact dict learns that it is done only in the next, empty batch.
        steps.append((many, rest))
    return steps
