"""List the opcodes in some bytes one after another, without executing them.

A pickle has no jumps: an unpickler executes the opcodes in order, up to the first one that it refuses. So bytes in
which an invalid opcode comes before any opcode that names a global run nothing, even if a decoder is stricter than an
unpickler. STOP counts as an opcode without effect, because another pickle may follow it.
"""

from __future__ import annotations

import re
from collections.abc import Container
from struct import Struct
from typing import Final

from ..base.lazy import regex
from . import opcodes as op

#: Opcodes without a variable size: (opcodes, bytes of their argument). PROTO and FRAME change nothing here.
_FIXED: Final = (
    (b".(012N)t]lae}dsuQbRo\x81\x92" + bytes((*range(0x85, 0x8A), 0x8F, 0x90, 0x91, 0x94, 0x97, 0x98)), 0),
    (b"Kqh", 1),
    (b"M", 2),
    (b"Jrj", 4),
    (b"G\x95", 8),
)
_FIXED_RUN: Final = regex(
    rb"(?s)(?:\x80[\0-\5]|"
    + b"|".join(b"[%s]" % re.escape(codes) + b"." * size for codes, size in _FIXED)
    + b"){1,4096}"
)
_SIZES: Final = {op.PROTO: 1, **{code: size for codes, size in _FIXED for code in codes}}
#: The length field of each opcode that is followed by a length and as many bytes.
_COUNTED: Final = {
    **dict.fromkeys((op.SHORT_BINSTRING, op.SHORT_BINBYTES, op.LONG1, op.SHORT_BINUNICODE), Struct("<B")),
    **dict.fromkeys((op.BINSTRING, op.BINUNICODE, op.BINBYTES, op.LONG4), Struct("<I")),
    **dict.fromkeys((op.BINUNICODE8, op.BINBYTES8, op.BYTEARRAY8), Struct("<Q")),
}
#: Opcodes followed by a line.
_LINES: Final = b"ILFSVpgP"
_TEXTS: Final = frozenset(
    (op.STRING, op.UNICODE, *op.PYTHON2_STRINGS, op.BINUNICODE, op.SHORT_BINUNICODE, op.BINUNICODE8)
)
_EXTENSIONS: Final = {op.EXT1: 1, op.EXT2: 2, op.EXT4: 4}
#: Opcodes that call or change an object.
_CALLS: Final = regex(rb"[Ro\x81\x92baesu\x90]")
_MAX_NAME: Final = 1 << 16
#: Steps after which the search gives up, about a second of work.
_MAX_STEPS: Final = 500_000

NOTHING, NAMES, CALLS = "nothing", "names a global", "calls a global"
ENDS, TOO_LONG = "the bytes end first", "too long to tell"


def outcome(data: bytes, at: int = 0, modules: Container[str] | None = None) -> str:
    """Return the worst that an unpickler may do from byte ``at`` on, before it refuses an opcode.

    The result is NOTHING, NAMES (it may import a module), CALLS (it may also call or change an imported object), ENDS
    (no opcode is refused before the end of the bytes) or TOO_LONG. ``modules`` are the top-level modules that may be
    installed; None means any.
    """
    named = ""
    begin, texts = at, False
    for _ in range(_MAX_STEPS):
        run = _FIXED_RUN.match(data, at)
        if run is not None:
            if named and _CALLS.search(data, at, run.end()):
                return CALLS
            at = run.end()
            continue
        if at >= len(data):
            return named or ENDS
        code = data[at]
        at += 1
        counted = _COUNTED.get(code)
        if counted is not None:
            if at + counted.size > len(data):
                return named or ENDS
            size = counted.unpack_from(data, at)[0]
            at += counted.size + size
            if at > len(data):
                return named or ENDS
            texts = texts or (code in _TEXTS and size < _MAX_NAME and _is_module(data[at - size : at], modules))
        elif code in _LINES:
            end = data.find(b"\n", at)
            if end < 0:
                return named or ENDS
            line = data[at:end]
            # STRING has a quoted line. Escapes are not decoded, so a line with one may name anything.
            texts = texts or (code in _TEXTS and (b"\\" in line or _is_module(line.strip(b"\"'\r"), modules)))
            at = end + 1
        elif code in (op.GLOBAL, op.INST):
            middle = data.find(b"\n", at)
            end = data.find(b"\n", middle + 1)
            if middle < 0 or end < 0:
                return named or ENDS
            if not _is_module(data[at:middle], modules):
                break
            if code == op.INST:
                if data.find(b"(", begin, at) < 0:
                    break
                return CALLS
            named, at = NAMES, end + 1
        elif code in _EXTENSIONS and data[begin] == op.PROTO:  # only the loading program can register codes
            named, at = NAMES, at + _EXTENSIONS[code]
        elif code == op.STACK_GLOBAL and texts:
            named = NAMES
        elif at + _SIZES.get(code, 0) > len(data):
            return named or ENDS
        else:
            break
    else:
        return TOO_LONG
    return named or NOTHING


def _is_module(name: bytes, modules: Container[str] | None) -> bool:
    """Return whether a name can be a module; importing any other name fails."""
    try:
        parts = name.decode("utf-8").split(".")
    except UnicodeDecodeError:
        return False
    return all(part.isidentifier() for part in parts) and (modules is None or parts[0] in modules)
