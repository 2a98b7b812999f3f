"""Checkpoints that went wrong in interesting ways: by bytes, by opcodes, by fields of a zip archive."""

from __future__ import annotations

import io
import pickletools
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["WIDE", "bytewise", "mutated", "pickled"]

#: Numbers at which something overflows, ends, or is taken for "unknown".
_EXTREME = (0, 1, 2, 45, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
WIDE = (*_EXTREME, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_NASTY_NAMES = (b"", b"/", b"../../x", b"archive/data.pkl", b"ARCHIVE/DATA.PKL", b"\xff\xfe", b"a\x1b[2J", b"x" * 300)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes after one to four mutations of a kind that fits their format."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [bytewise]
    if data[:4] == b"PK\x03\x04":
        ways = [bytewise, _zip_fields, _zip_fields, *[_zip_pickle] * 5]
    elif data[:1] == b"\x80":
        ways = [bytewise, _legacy_pickle, _legacy_pickle]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data = chance.choice(ways)(data, chance)[: 1 << 20]
    return data


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
    _laughs(40),
    b"(" * 3000,
    b")" + b"\x85" * 5000,
    b"](" * 2000 + b"e" * 2000,
    b"}q\x01h\x01h\x01s",
    b"]q\x01h\x01a",
    b"r\xff\xff\xff\xff",
    b"j\xff\xff\xff\xff",
    b"p99999999999999999999\n",
    b"g-1\n",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\xff",
    b"\x8b" + struct.pack("<I", 5000) + b"\x7f" * 5000,
    b"\x8a\xff" + b"\x7f" * 255,
    b"L" + b"9" * 5000 + b"L\n",
    b"I" + b"9" * 5000 + b"\n",
    b"F1e999\n",
    b"Fnan\n",
    b"\x8d" + struct.pack("<Q", 1 << 62),
    b"\x8e" + struct.pack("<Q", (1 << 64) - 1),
    b"\x96" + struct.pack("<Q", 1 << 40),
    b"X\xff\xff\xff\x7f",
    b"T\xff\xff\xff\xff",
    b"\x95" + struct.pack("<Q", 3),
    b"\x95" + struct.pack("<Q", 1 << 63),
    b"\x97\x98",
    b"\x82\x01",
    b"\x84\xff\xff\xff\x7f",
    b"cos\nsystem\n",
    b"c\x1b[2J\n\xe2\x80\xae\n",
    b"(S'x'\nios\nsystem\n",
    b"(cos\nsystem\nS'x'\no",
    _text(b"os") + _text(b"system") + b"\x93",
    b"cos\nsystem\n" + _text(b"id") + b"\x85R",
    b"\x81",
    b"\x92",
    b"b",
    b"R",
    b"Q",
    b"P7\n",
    b"0",
    b"1",
    b"2",
    b"\x94" * 50,
    b"\x90",
    b"\x91",
    b"\x8f(K\x01\x90",
    b"V\\ud800\\u0000\n",
    b"S'\\x1b[2J'\n",
    b"S'unbalanced\n",
    _text(b"\xff\xfe"),
    _text(b"\xed\xa0\x80"),
    _text(b"module." * 40_000),
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x01",
    b".",
    b"\x80\x09",
    b"\x80\x02",
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


def _legacy_pickle(data: bytes, chance: random.Random) -> bytes:
    """One of the five pickles in front of the storages, mostly that of the object."""
    parts = []
    rest = data
    for _ in range(5):
        try:
            end = max((at or 0) + 1 for _, _, at in pickletools.genops(rest))
        except Exception:  # as above
            return bytewise(data, chance)
        parts.append(rest[:end])
        rest = rest[end:]
    number = chance.choice((0, 1, 2, 3, 3, 3, 3, 4, 4))
    parts[number] = pickled(parts[number], chance)
    return b"".join(parts) + rest


# -- zip archives -------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    name: bytes
    content: bytes
    method: int


def _entries(data: bytes) -> list[_Entry]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [
                _Entry(info.filename.encode("utf-8", "replace"), archive.read(info), info.compress_type)
                for info in archive.infolist()
            ]
    except Exception:
        # An archive that an earlier mutation broke; zipfile has many ways to say so.
        return []


def _zip_pickle(data: bytes, chance: random.Random) -> bytes:
    """Another data.pkl, under a right checksum: nothing but its opcodes is wrong."""
    entries = _entries(data)
    if not entries:
        return bytewise(data, chance)
    changed = [
        entry._replace(content=pickled(entry.content, chance)) if entry.name.endswith(b"data.pkl") else entry
        for entry in entries
    ]
    return _archive(changed, random.Random(0), 0)


def _zip_fields(data: bytes, chance: random.Random) -> bytes:
    """Fields of headers, directory and end records that say something else; records that come and go."""
    entries = _entries(data)
    if not entries:
        return bytewise(data, chance)
    for _ in range(chance.choice((0, 0, 1, 2))):
        at = chance.randrange(len(entries))
        way = chance.randrange(5)
        if way == 0:
            entries[at] = entries[at]._replace(name=chance.choice(_NASTY_NAMES))
        elif way == 1:
            entries.insert(at, chance.choice(entries))
        elif way == 2 and len(entries) > 1:
            del entries[at]
        elif way == 3:
            entries[at] = entries[at]._replace(content=chance.randbytes(chance.choice((0, 1, 5, 5000))))
        else:
            entries[at] = entries[at]._replace(method=chance.choice((0, 8, 9, 12, 99)))
    return _archive(entries, chance, chance.choice((0.002, 0.01, 0.05)))


def _archive(entries: list[_Entry], chance: random.Random, rate: float) -> bytes:
    """An archive in which each field of each header is an extreme number instead, at the given rate."""

    def field(value: int, width: int) -> bytes:
        if rate and chance.random() < rate:
            value = chance.choice(WIDE)
        return (value & (1 << 8 * width) - 1).to_bytes(width, "little")

    out, directory = bytearray(), bytearray()
    for entry in entries:
        packer = zlib.compressobj(wbits=-15)
        packed = packer.compress(entry.content) + packer.flush() if entry.method == 8 else entry.content
        crc = zlib.crc32(entry.content)
        extra = b""
        if rate and chance.random() < rate:
            extra = field(1, 2) + field(24, 2) + field(len(entry.content), 8) + field(len(packed), 8) + field(0, 8)
        sizes = field(crc, 4) + field(len(packed), 4) + field(len(entry.content), 4)
        both = field(0, 2) + field(entry.method, 2) + bytes(4)
        header = len(out)
        out += b"PK\x03\x04" + field(20, 2) + both + sizes + field(len(entry.name), 2) + field(len(extra), 2)
        out += entry.name + extra + packed
        sizes = field(crc, 4) + field(len(packed), 4) + field(len(entry.content), 4)
        both = field(20, 2) + field(20, 2) + field(0, 2) + field(entry.method, 2) + bytes(4)
        directory += b"PK\x01\x02" + both + sizes + field(len(entry.name), 2) + field(len(extra), 2)
        directory += field(0, 2) + field(0, 2) + bytes(6) + field(header, 4) + entry.name + extra
    begin, count = len(out), len(entries)
    out += directory
    if rate and chance.random() < 4 * rate:
        end = len(out)
        out += b"PK\x06\x06" + field(44, 8) + field(45, 2) + field(45, 2) + field(0, 4) + field(0, 4)
        out += field(count, 8) + field(count, 8) + field(len(directory), 8) + field(begin, 8)
        out += b"PK\x06\x07" + field(0, 4) + field(end, 8) + field(1, 4)
    out += b"PK\x05\x06" + field(0, 2) + field(0, 2) + field(count, 2) + field(count, 2)
    return bytes(out + field(len(directory), 4) + field(begin, 4) + field(0, 2))
