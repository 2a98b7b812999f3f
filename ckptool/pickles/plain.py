"""Recognise a pickle of plain data in one quick pass, without making its graph.

Most small pickles hold dicts, lists, tuples, numbers, texts and bytes, as CPython's pickler writes them.
``plain_strings`` returns the texts and bytes of such a pickle: all that a search for code needs. Everything unusual is
left to ``decode``.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Final

from ..base.records import NamedTuple

_u32 = Struct("<I").unpack_from

#: The kinds of values on the stack: a constant or a tuple of constants, which may be a key; another tuple; a list; a
#: dict.
_KEY, _TUPLE, _LIST, _DICT = range(4)
#: The bytes that follow the opcode of a constant: NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE, BININT1, BININT2, BININT,
#: BINFLOAT.
_CONSTANTS: Final = {0x4E: 0, 0x88: 0, 0x89: 0, 0x29: 0, 0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8}
_FRAME_END: Final = 11


class PlainStrings(NamedTuple):
    """The strings and the bytes objects in a pickle, as often as they are written."""

    texts: list[str]
    binary: list[bytes]


def plain_strings(data: bytes) -> PlainStrings | None:
    """Return the strings in a pickle of plain data that takes up all of ``data``; None for any other bytes.

    The pickle has protocol 2 to 5 and at most one FRAME. It makes only None, bools, numbers, ASCII strings, bytes,
    tuples, lists and dicts, so it names, calls and refers to nothing. It is one that ``decode`` takes without any
    oddity.
    """
    if data[:1] != b"\x80" or data[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        return None
    pos = 2
    if data[2:3] == b"\x95":
        if int.from_bytes(data[3:_FRAME_END], "little") != len(data) - _FRAME_END:
            return None
        pos = _FRAME_END
    try:
        return _run(data, pos)
    except (IndexError, UnicodeDecodeError, error):
        return None


def _run(data: bytes, pos: int) -> PlainStrings | None:
    """Run from ``pos`` to STOP, with kinds in place of values; an IndexError means that the pickle is not plain."""
    stack: list[int] = []
    outer: list[list[int]] = []
    memo: list[int] = []
    texts: list[str] = []
    binary: list[bytes] = []
    constants = _CONSTANTS
    while True:
        code = data[pos]
        pos += 1
        if code == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif code == 0x71:  # BINPUT
            if data[pos] != len(memo):
                return None
            memo.append(stack[-1])
            pos += 1
        elif code in constants:
            stack.append(_KEY)
            pos += constants[code]
        elif code == 0x8C:  # SHORT_BINUNICODE
            begin = pos + 1
            pos = begin + data[pos]
            texts.append(str(data[begin:pos], "ascii"))
            stack.append(_KEY)
        elif code == 0x58:  # BINUNICODE
            begin = pos + 4
            pos = begin + _u32(data, pos)[0]
            texts.append(str(data[begin:pos], "ascii"))
            stack.append(_KEY)
        elif code == 0x68:  # BINGET
            stack.append(memo[data[pos]])
            pos += 1
        elif code == 0x28:  # MARK
            outer.append(stack)
            stack = []
        elif code == 0x7D:  # EMPTY_DICT
            stack.append(_DICT)
        elif code == 0x5D:  # EMPTY_LIST
            stack.append(_LIST)
        elif code == 0x75:  # SETITEMS
            items = stack
            stack = outer.pop()
            if stack[-1] != _DICT or len(items) & 1 or any(items[::2]):
                return None
        elif code == 0x65:  # APPENDS
            stack = outer.pop()
            if stack[-1] != _LIST:
                return None
        elif code == 0x73:  # SETITEM
            stack.pop()
            if stack.pop() or stack[-1] != _DICT:
                return None
        elif code == 0x61:  # APPEND
            stack.pop()
            if stack[-1] != _LIST:
                return None
        elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            kind = _TUPLE if stack[-1] else _KEY
            for _ in range(code - 0x85):
                stack.pop()
                kind = _TUPLE if stack[-1] else kind
            stack[-1] = kind
        elif code == 0x74:  # TUPLE
            kind = _TUPLE if any(stack) else _KEY
            stack = outer.pop()
            stack.append(kind)
        elif code == 0x43 or code == 0x42:  # SHORT_BINBYTES, BINBYTES
            begin = pos + (1 if code == 0x43 else 4)
            pos = begin + (data[pos] if code == 0x43 else _u32(data, pos)[0])
            binary.append(data[begin:pos])
            stack.append(_KEY)
        elif code == 0x8A:  # LONG1
            stack.append(_KEY)
            pos += 1 + data[pos]
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[_u32(data, pos)[0]])
            pos += 4
        elif code == 0x72:  # LONG_BINPUT
            if _u32(data, pos)[0] != len(memo):
                return None
            memo.append(stack[-1])
            pos += 4
        elif code == 0x2E:  # STOP
            stack.pop()
            return PlainStrings(texts, binary) if pos == len(data) and not stack and not outer else None
        else:
            return None
