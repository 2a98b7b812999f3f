"""Tell whether a safetensors file is also a pickle: an unpickler reads the header size as its first instructions.

An unpickler stops at the first instruction that it refuses, nearly always in the header. Only a hostile file, or one in
thousands, continues into the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...base.errors import PickleError, PickleLimitError, TruncatedPickleError
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...files.sources import Source
from ...pickles import opcodes as op
from ...pickles.decode import decode
from ...pickles.lexer import CALLS, NAMES, NOTHING, outcome
from ...pickles.nodes import Global

#: The first bytes to examine, which a remote source has already, and the most that are examined at all.
_FIRST, _MOST = 1 << 18, 64 << 20
#: The most strings to pass over whose ends lie beyond the examined bytes.
_MAX_JUMPS: Final = 8
#: A line with a number that ends at a NUL: the C unpickler skips the rest of the line, the decoder refuses it.
_NUMBER: Final = regex(rb"[ILFgp][\w.+ \t\r\v\f-]*\0")


def names_global(source: Source, header: int, *, whole: bool = False) -> bool | None:
    """Return whether an unpickler that reads the file from its start reaches a global that it would import. ``header``
    is the offset of the values. Examines only bytes that were read to open the file, and returns None if they do not
    tell; with ``whole``, continues in the values, up to 64 MiB, and returns None if these do not tell."""
    most = min(max(header, _FIRST), _MOST)
    found = _within(source, most, jump=whole)
    while whole and found is None and most < min(_MOST, source.size):
        most = min(most * 4, _MOST)
        found = _within(source, most, jump=True)
    return found


def _within(source: Source, most: int, *, jump: bool) -> bool | None:
    """Return what the first bytes tell, or None. ``jump``: read on after long strings that end elsewhere."""
    data = source.read(0, most)
    at, end, jumps = 0, len(data), 0
    for _ in range(LIMITS.listed):
        if at >= len(data):
            return None if end < source.size else False
        try:
            graph, at, _ = decode(data, at)
        except TruncatedPickleError as error:
            if _imports(error.seen):
                return True
            target = end - len(data) + error.offset + _string_size(data, error.offset)
            if end >= source.size or target >= source.size or _is_odd_id(data, error.offset):
                return False
            if target < end or jumps == _MAX_JUMPS or not jump:
                return None
            more = source.read(target, _FIRST)
            data, end, jumps = data[: error.offset] + b"N" + more, target + len(more), jumps + 1
        except PickleError as error:
            if _imports(error.seen):
                return True
            if not isinstance(error, PickleLimitError) and not _NUMBER.match(data, error.offset):
                return False
            may = outcome(data, at)
            return True if may in (NAMES, CALLS) else False if may == NOTHING or end >= source.size else None
        else:
            if _imports(graph.nodes):
                return True
    return None


def _string_size(data: bytes, at: int) -> int:
    """Return the bytes of an instruction with a string and its length of 4 bytes; 0 for any other instruction."""
    if data[at] not in (op.BINUNICODE, op.BINBYTES, op.BINSTRING) or at + 5 > len(data):
        return 0
    return 5 + int.from_bytes(data[at + 1 : at + 5], "little")


def _is_odd_id(data: bytes, at: int) -> bool:
    return data[at] == op.PERSID and not data[at:].isascii()


def _imports(nodes: Iterable[object]) -> bool:
    return any(type(node) is Global and node.module.replace(".", "_").isidentifier() for node in nodes)
