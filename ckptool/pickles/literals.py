"""Opcodes of ``decode`` that push a number, a text or bytes, but for the most frequent ones.

Each function is called with the machine and the opcode when ``machine.pos`` stands behind the opcode.
"""

from __future__ import annotations

import re
from codecs import raw_unicode_escape_decode
from collections.abc import Iterator
from math import isinf
from struct import Struct
from typing import Final

from . import opcodes as op
from .machine import Machine
from .nodes import ByteArray, Graph, Node, Ref

__all__ = [
    "PYTHON2",
    "binary_float",
    "binary_long",
    "byte_line",
    "byte_string",
    "not_ascii",
    "not_utf8",
    "raw_bytes",
    "text",
    "text_line",
    "text_number",
]

#: The opcodes of ``str`` of Python 2.
PYTHON2: Final = frozenset((op.STRING, op.BINSTRING, op.SHORT_BINSTRING))

_i32 = Struct("<i").unpack
_u64 = Struct("<Q").unpack
_f64 = Struct(">d").unpack

_STRAY = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|([^x0-7]))", re.DOTALL)
_ESCAPED = {b"\n": b"", b"b": b"\b", b"f": b"\f", b"t": b"\t", b"n": b"\n", b"r": b"\r", b"v": b"\v", b"a": b"\a"}
_ESCAPED |= {b"\\": b"\\", b"'": b"'", b'"': b'"'}


def binary_float(machine: Machine, code: int) -> None:
    """BINFLOAT."""
    raw = machine.take(8)
    _number(machine, code, raw, _f64(raw)[0], op.float_opcode(machine.dialect))


def binary_long(machine: Machine, code: int) -> None:
    """LONG1 and LONG4."""
    size = machine.take(1)[0] if code == op.LONG1 else _i32(machine.take(4))[0]
    if size < 0:
        machine.fail("LONG4 with a negative size")
    raw = machine.take(size)
    value = int.from_bytes(raw, "little", signed=True)
    _number(machine, code, raw, value, op.int_opcode(value, machine.dialect))


def text_number(machine: Machine, code: int) -> None:
    """INT, LONG and FLOAT."""
    raw, limit = machine.line(), machine.limits.int_digits
    if len(raw) > limit + 2:
        machine.fail(f"a number of {len(raw):,} digits; the limit is {limit:,} (limits.int_digits)")
    try:
        if code == op.FLOAT:
            value = float(raw)
            if isinf(value) and b"n" not in raw.lower():
                machine.fail("a number that is too large")  # as the unpickler of C says; that of Python takes it
            _number(machine, code, raw, value, op.float_opcode(machine.dialect))
        elif code == op.INT and raw in (b"00", b"01"):
            _number(machine, code, raw, raw == b"01", op.INT if machine.dialect < 2 else op.NEWTRUE)
        else:
            whole = int(raw[:-1] if code == op.LONG and raw.endswith(b"L") else raw, 0)
            _number(machine, code, raw, whole, op.int_opcode(whole, machine.dialect))
    except ValueError:
        machine.fail("a number that is no number")


def _number(machine: Machine, code: int, raw: bytes, value: Node, default: int) -> None:
    """Push a number: one node for each value and each way to write it."""
    key = b"%c%b" % (code, raw)
    ref = machine.consts.get(key)
    if ref is None:
        ref = machine.consts[key] = machine.add_bare(value, -1 if code == default else code)
    machine.stack.append(ref)


def text(machine: Machine, code: int) -> None:
    """SHORT_BINUNICODE and BINUNICODE8."""
    size = machine.take(1)[0] if code == op.SHORT_BINUNICODE else _u64(machine.take(8))[0]
    default = op.text_opcode(size, machine.dialect)
    machine.push(machine.take(size).decode("utf-8", "surrogatepass"), -1 if default == code else code)


def text_line(machine: Machine, code: int) -> None:
    """UNICODE."""
    try:
        # The method decode() would import a module for this codec, which is an event for an audit hook.
        machine.push(raw_unicode_escape_decode(machine.line())[0], code if machine.dialect else -1)
    except UnicodeDecodeError:
        machine.fail("a text with an escape that is none")


def byte_string(machine: Machine, code: int) -> None:
    """SHORT_BINSTRING and BINSTRING: the ``str`` of Python 2."""
    size = machine.take(1)[0] if code == op.SHORT_BINSTRING else _i32(machine.take(4))[0]
    if size < 0:
        machine.fail("BINSTRING with a negative size")
    machine.push(machine.take(size).decode("utf-8", "surrogateescape"), code)


def byte_line(machine: Machine, code: int) -> None:
    """STRING: the ``repr`` of a Python 2 ``str``."""
    raw = machine.line()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        machine.fail("STRING without its quotes")
    raw = raw[1:-1]
    if b"\\" in raw:
        if b"\\" in _ESCAPE.sub(b"", raw):
            machine.fail("STRING with an escape that is none")
        raw = _ESCAPE.sub(_unescaped, raw)
    machine.push(raw.decode("utf-8", "surrogateescape"), code)


def _unescaped(match: re.Match[bytes]) -> bytes:
    """One escape as ``codecs.escape_decode`` reads it, which CPython uses; an unknown one stays."""
    if match[1] is not None:
        return bytes((int(match[1], 16),))
    if match[2] is not None:
        return bytes((int(match[2], 8) & 0xFF,))
    return _ESCAPED.get(match[3], match[0])


def not_ascii(graph: Graph) -> Iterator[Ref]:
    """Yield the strings of Python 2 that are not ASCII, which ``pickle.load`` refuses without an encoding."""
    for ref, form in graph.style.forms.items():
        node = graph.nodes[ref] if form in PYTHON2 else None
        if type(node) is str and not node.isascii():
            yield ref


def not_utf8(graph: Graph) -> Iterator[Ref]:
    """The strings of Python 2 that are not UTF-8; their bytes are kept as lone surrogates."""
    return (ref for ref in not_ascii(graph) if _STRAY.search(str(graph.nodes[ref])) is not None)


def raw_bytes(machine: Machine, code: int) -> None:
    """SHORT_BINBYTES, BINBYTES, BINBYTES8 and BYTEARRAY8."""
    width = 1 if code == op.SHORT_BINBYTES else 4 if code == op.BINBYTES else 8
    size = int.from_bytes(machine.take(width), "little")
    raw = machine.take(size)
    if code == op.BYTEARRAY8:
        machine.push(ByteArray(raw))
    else:
        machine.push(raw, -1 if code == op.bytes_opcode(size) else code)
