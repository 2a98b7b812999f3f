"""Mutations of bytes, and of the opcodes of a pickle: how it is spelled."""

from __future__ import annotations

import pickletools
import random
import struct
from typing import NamedTuple

#: Numbers at which something overflows, ends, or is taken for "unknown".
_EXTREME = (0, 1, 2, 45, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
WIDE = (*_EXTREME, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


# -- bytes ------------------------------------------------------------------------------------------------


def bytewise(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3, 20))):
        at = chance.randrange(len(changed) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 64, 1000))
        way = chance.randrange(10)
        if way in (0, 7, 8):  # more often what leaves everything else in its place
            changed[at : at + 1] = bytes([chance.randrange(256)])
        elif way == 1:
            del changed[at : at + size]
        elif way == 2:
            changed[at:at] = chance.randbytes(size)
        elif way == 3:
            begin = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[begin : begin + size]
        elif way in (4, 9):
            width, form = chance.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
            changed[at : at + width] = struct.pack(form, chance.choice(WIDE) & (1 << 8 * width) - 1)
        elif way == 5:
            changed[at : at + size] = bytes(min(size, len(changed) - at))
        else:
            del changed[at:]
    return bytes(changed)


# -- pickles ----------------------------------------------------------------------------------------------


def _text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def _laughs(levels: int) -> bytes:
    """A list that holds the one before it ten times, and so on."""
    steps = [b"]q\x00(K\x01K\x02e"]
    steps += [b"](" + b"h%c" % level * 10 + b"eq%c" % (level + 1) for level in range(levels)]
    return b"".join(steps)


#: Pieces of pickles of every kind that anybody ever found trouble with.
_SNIPPETS: tuple[bytes, ...] = (
    *(_laughs(40), b"(" * 3000, b")" + b"\x85" * 5000, b"](" * 2000 + b"e" * 2000, b"}q\x01h\x01h\x01s"),
    *(b"]q\x01h\x01a", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"p99999999999999999999\n", b"g-1\n"),
    *(b"\x8b\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\xff", b"\x8b" + struct.pack("<I", 5000) + b"\x7f" * 5000),
    *(b"\x8a\xff" + b"\x7f" * 255, b"L" + b"9" * 5000 + b"L\n", b"I" + b"9" * 5000 + b"\n", b"F1e999\n", b"Fnan\n"),
    *(b"\x8d" + struct.pack("<Q", 1 << 62), b"\x8e" + struct.pack("<Q", (1 << 64) - 1)),
    *(b"\x96" + struct.pack("<Q", 1 << 40), b"X\xff\xff\xff\x7f", b"T\xff\xff\xff\xff"),
    *(b"\x95" + struct.pack("<Q", 3), b"\x95" + struct.pack("<Q", 1 << 63), b"\x97\x98", b"\x82\x01"),
    *(b"\x84\xff\xff\xff\x7f", b"cos\nsystem\n", b"c\x1b[2J\n\xe2\x80\xae\n", b"(S'x'\nios\nsystem\n"),
    *(b"(cos\nsystem\nS'x'\no", _text(b"os") + _text(b"system") + b"\x93"),
    *(b"cos\nsystem\n" + _text(b"id") + b"\x85R", b"\x81", b"\x92", b"b", b"R", b"Q", b"P7\n", b"0", b"1", b"2"),
    *(b"\x94" * 50, b"\x90", b"\x91", b"\x8f(K\x01\x90", b"V\\ud800\\u0000\n", b"S'\\x1b[2J'\n", b"S'unbalanced\n"),
    *(_text(b"\xff\xfe"), _text(b"\xed\xa0\x80"), _text(b"module." * 40_000), b"G\x7f\xf8\x00\x00\x00\x00\x00\x01"),
    *(b".", b"\x80\x09", b"\x80\x02"),
)


class _Op(NamedTuple):
    name: str
    raw: bytes


def _opcodes(data: bytes) -> tuple[list[_Op], bytes]:
    """The opcodes of a pickle as slices of its bytes, and what follows its STOP."""
    places = []
    try:
        places = [(op.name, at or 0) for op, _, at in pickletools.genops(data)]
    except Exception:
        # Broken from a place on: what is before it can still be cut to pieces. (genops raises all kinds.)
        return [], data
    ends = [at for _, at in places[1:]] + [places[-1][1] + 1]
    ops = [_Op(name, data[at:end]) for (name, at), end in zip(places, ends, strict=True)]
    return ops, data[ends[-1] :]


def pickled(data: bytes, chance: random.Random) -> bytes:
    ops, rest = _opcodes(data)
    if not ops:
        return bytewise(data, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(ops))
        way = chance.randrange(12)
        other = chance.randrange(len(ops))
        if way == 0:
            del ops[at : at + chance.choice((1, 1, 3))]
        elif way == 1:
            ops.insert(at, ops[other])
        elif way == 2:
            ops[at], ops[other] = ops[other], ops[at]
        elif way == 3:
            ops.insert(at, _Op("snippet", chance.choice(_SNIPPETS)))
        elif way == 4:
            ops[at] = _Op("snippet", chance.choice(_SNIPPETS))
        elif way == 5:
            ops[at:at] = ops[other : other + chance.randrange(1, 40)]
        elif way in (6, 7):  # made and thrown away: what follows is as good as before
            ops.insert(at, _Op("snippet", chance.choice(_SNIPPETS) + b"0"))
        else:
            ops[at] = _argued(ops[at], chance)
        if not ops:
            break
    return b"".join(op.raw for op in ops) + rest


def _argued(op: _Op, chance: random.Random) -> _Op:
    """The same opcode with another argument, as wide as it was."""
    width = len(op.raw) - 1
    if op.name in ("BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "GLOBAL") and chance.random() < 0.5:
        text = chance.choice((b"cuda:1", b"cpu", b"module.", b"", b"FloatStorage", b"storage", b"\xe2\x80\xae", b"0"))
        return _Op(op.name, b"c" + text + b"\n" + text + b"\n" if op.name == "GLOBAL" else _text(text))
    if width in (1, 2, 4, 8):
        value = chance.choice(WIDE) & (1 << 8 * width) - 1
        return _Op(op.name, op.raw[:1] + value.to_bytes(width, "little"))
    raw = bytearray(op.raw)
    raw[chance.randrange(len(raw))] = chance.randrange(256)
    return _Op(op.name, bytes(raw))
