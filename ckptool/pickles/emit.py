"""Encode single values.

A ``form`` is the opcode that the decoder recorded for a node, or -1 for the default of the dialect. If an edit has
replaced the value by one that does not fit the form, the default applies.
"""

from __future__ import annotations

from codecs import raw_unicode_escape_encode
from collections.abc import Sequence
from struct import Struct

from . import opcodes as op
from .nodes import Global

_u16 = Struct("<H").pack
_i32 = Struct("<i").pack
_u32 = Struct("<I").pack
_u64 = Struct("<Q").pack
_f64 = Struct(">d").pack

#: Bytes below which the pickler writes no FRAME (``FRAME_SIZE_MIN`` in _pickle.c).
_FRAME_MIN = 4

#: CPython converts at most 4,300 digits to or from decimals (``sys.set_int_max_str_digits``).
_DECIMAL_BITS = 14_000

#: The only NaNs that a line can express; it keeps nothing of a NaN except its sign.
_NAN_LINES = {b"\x7f\xf8" + bytes(6): b"Fnan\n", b"\xff\xf8" + bytes(6): b"F-nan\n"}

#: Characters that cannot be part of a line, with the pickler's escapes (``raw_unicode_escape`` in _pickle.c).
_LINE_ESCAPES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\\\0\n\r\x1a"})


def get(index: int, dialect: int) -> bytes:
    """Return the instruction that fetches the object with a memo index."""
    if dialect == 0:
        return b"g%d\n" % index
    return bytes((op.BINGET, index)) if index < 0x100 else b"j" + _u32(index)


def put(index: int, dialect: int) -> bytes:
    """Return the instruction that memoizes under an index; in protocol 4 and later, it is always the next index."""
    if dialect >= 4:
        return b"\x94"
    if dialect == 0:
        return b"p%d\n" % index
    return bytes((op.BINPUT, index)) if index < 0x100 else b"r" + _u32(index)


def constant(value: object, form: int, dialect: int) -> bytes:
    """Return the bytes of None, a bool, an int, a float or ``()``."""
    if isinstance(value, bool):
        if form == op.INT or (form < 0 and dialect < 2):
            return b"I01\n" if value else b"I00\n"
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _int(value, form) or _int(value, op.int_opcode(value, dialect))
    if isinstance(value, float):
        raw = _f64(value)
        if form not in (op.FLOAT, -1) or (form < 0 and dialect):
            return b"G" + raw
        return b"F%b\n" % repr(value).encode() if value == value else _NAN_LINES.get(raw, b"G" + raw)
    if value is None:
        return b"N"
    assert value == ()
    return b"(t" if form == op.TUPLE or (dialect == 0 and form != op.EMPTY_TUPLE) else b")"


def _int(value: int, form: int) -> bytes:
    """Return the bytes of an int in this form; b"" if it does not fit."""
    if form == op.INT or form == op.LONG:
        if value.bit_length() < _DECIMAL_BITS:
            digits = b"%d" % value
        else:
            digits = b"0x%x" % value if value > 0 else b"-0x%x" % -value
        return b"I%b\n" % digits if form == op.INT else b"L%bL\n" % digits
    if form == op.BININT1 and 0 <= value < 0x100:
        return bytes((form, value))
    if form == op.BININT2 and 0 <= value < 0x10000:
        return b"M" + _u16(value)
    if form == op.BININT and -0x80000000 <= value < 0x80000000:
        return b"J" + _i32(value)
    if form == op.LONG1 or form == op.LONG4:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) if value else b""
        if value < 0 and len(raw) > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
            raw = raw[:-1]
        if form == op.LONG4:
            return b"\x8b" + _i32(len(raw)) + raw
        if len(raw) < 0x100:
            return b"\x8a%c%b" % (len(raw), raw)
    return b""


def text(value: str, form: int, dialect: int) -> tuple[bytes, bytes]:
    """Return the head and the body of a str; a line has an empty body."""
    if form in op.PYTHON2_STRINGS and (parts := _python2(value, form)) is not None:
        return parts
    if form == op.UNICODE or (form < 0 and dialect == 0):
        return b"V%b\n" % raw_unicode_escape_encode(value.translate(_LINE_ESCAPES))[0], b""
    raw = value.encode("utf-8", "surrogatepass")
    size = len(raw)
    if form == op.SHORT_BINUNICODE and size < 0x100:
        return bytes((form, size)), raw
    if form == op.BINUNICODE8:
        return bytes((form,)) + _u64(size), raw
    if form != op.BINUNICODE:
        form = op.text_opcode(size, dialect or 1)
    return (bytes((form, size)) if form == op.SHORT_BINUNICODE else bytes((form,)) + _u32(size)), raw


def _python2(value: str, form: int) -> tuple[bytes, bytes] | None:
    """Return the head and body of a Python 2 byte string, or None if it must be written as unicode."""
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None
    if form == op.STRING:
        return b"S%b\n" % repr(raw)[1:].encode(), b""
    if form == op.SHORT_BINSTRING and len(raw) < 0x100:
        return bytes((form, len(raw))), raw
    if form == op.SHORT_BINSTRING and value.encode("utf-8", "replace") == raw:
        # The string grew in an edit. Torch's restricted unpickler refuses BINSTRING, but accepts the unicode form.
        # Bytes that are not UTF-8 have no unicode form.
        return None
    return b"T" + _i32(len(raw)), raw


def byte_string(value: bytes, form: int) -> tuple[bytes, bytes]:
    """Return the head and the body of a bytes object."""
    size = len(value)
    if form not in (op.BINBYTES, op.BINBYTES8):
        form = op.bytes_opcode(size)
    width = 1 if form == op.SHORT_BINBYTES else 4 if form == op.BINBYTES else 8
    return bytes((form,)) + size.to_bytes(width, "little"), value


def extension(code: int, form: int) -> bytes:
    """Return the bytes for a code of the extension registry."""
    least = op.extension_opcode(code)
    form = max(form, least) if form in (op.EXT1, op.EXT2, op.EXT4) else least
    return bytes((form,)) + code.to_bytes(1 if form == op.EXT1 else 2 if form == op.EXT2 else 4, "little")


def name(node: Global, code: int) -> bytes:
    """Return GLOBAL or INST (``code``) with its two lines; raise ValueError for a name with a line feed."""
    if "\n" in node.module or "\n" in node.name:
        raise ValueError("a name with a line feed needs STACK_GLOBAL")
    return b"%c%b\n%b\n" % (code, node.module.encode(), node.name.encode())


def stack_name(node: Global, dialect: int) -> bytes:
    """Return STACK_GLOBAL with its two strings."""
    return b"".join((*text(node.module, -1, dialect or 1), *text(node.name, -1, dialect or 1), b"\x93"))


def framed(code: bytearray, frames: Sequence[tuple[int, int]]) -> bytes:
    """Insert FRAMEs: ``frames`` are the (begin, end) offsets of each; bytes between them stay outside."""
    result, done = bytearray(), 0
    for begin, end in frames:
        result += code[done:begin]
        if end - begin >= _FRAME_MIN:
            result += b"\x95" + _u64(end - begin)
        result += code[begin:end]
        done = end
    return bytes(result)
