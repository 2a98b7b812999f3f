"""Parts of a pickle that lead elsewhere: its storages and globals, and bytes that may be another pickle."""

from __future__ import annotations

import warnings
from _codecs import escape_decode
from binascii import a2b_base64, a2b_hex
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from string import ascii_letters, digits, hexdigits, whitespace
from typing import Final

from ...base.lazy import regex
from ...files.compressed import compression_of
from ...files.tars import is_header
from ...pickles.lexer import ENDS, NOTHING, outcome
from ...pickles.nodes import ByteArray, Graph
from .budget import BudgetError
from .inert import is_text

#: The first bytes of a zip archive, and of a NumPy array.
ZIP: Final = b"PK\x03\x04"
NPY: Final = b"\x93NUMPY"
#: The most levels of hex, escapes and base64 that are decoded to see whether a value is searched.
_MAX_LEVELS: Final = 4
#: What may stand between the digits of two bytes, and around a line of base64.
_BETWEEN: Final = f"{whitespace}:-,_%=".encode()
#: Tables that write each character of base64 as ``w``, and each hex digit as ``0``.
_TO_W: Final = bytes.maketrans(f"{ascii_letters}{digits}+/_-".encode(), b"w" * 66)
_TO_0: Final = bytes.maketrans(hexdigits.encode(), b"0" * 22)
#: Hex, possibly in words, and a word in base64 of either alphabet, with the lines that continue it. No shorter one
#: holds a call, except a line that begins a pickle, a zip archive or gzip data.
_HEX: Final = regex(rb"(?:(?:0[xX])?[0-9a-fA-F]{2}[\s:,_%=-]*){12}[0-9a-fA-FxX\s:,_%=-]*")
_BASE64: Final = regex(rb"[0-9A-Za-z+/_-]{16,}|(?:gA[I-Z]|UEsDB|H4sI)[0-9A-Za-z+/_-]*")
_LINES: Final = regex(rb"[0-9A-Za-z+/_=,\s-]+")
_NOT_BYTES: Final = regex("[^\0-\xff\udc80-\udcff]")
#: The quotes that end a string in which they are escaped.
_QUOTES: Final = (regex(rb'(?<!\\)"'), regex(rb"(?<!\\)'"))


def values(graph: Graph) -> Iterator[bytes]:
    """Yield the bytes objects and strings of a pickle that may hold another one, as bytes."""
    arrays = (node.data for _, node in graph.of_type(ByteArray))
    return suspects(graph.strings, chain((node for _, node in graph.of_type(bytes)), arrays))


def suspects(texts: Collection[str], binary: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes objects and texts that may hold a pickle, as bytes."""
    yield from filter(may_hold_pickle, binary)
    if _is_suspect(".".join(texts)):
        yield from filter(may_hold_pickle, map(as_bytes, filter(_is_suspect, texts)))


def as_bytes(text: str) -> bytes:
    """Return the bytes that a text stands for: one for each character of Latin-1, or that ``surrogateescape`` made."""
    return _NOT_BYTES.sub("?", text).encode("latin-1", "surrogateescape")


def _is_suspect(text: str) -> bool:
    """Return whether a text may hold a pickle: it has control characters, or may encode one."""
    return not (text.isascii() and text.isprintable()) or _may_encode(text.encode())


def _may_encode(data: bytes) -> bool:
    """Return whether bytes have a run that may be hex or base64, or escapes."""
    words = b"w" * 16 in data.translate(_TO_W) or b"0" * 24 in data.translate(_TO_0, _BETWEEN + b"xX")
    return words or b"\\" in data or b"gA" in data or b"UEsDB" in data or b"H4sI" in data


def _is_known(head: bytes) -> bool:
    return head.startswith((ZIP, NPY)) or is_binary_pickle(head) or is_header(head[:512])


def may_hold_pickle(data: bytes, level: int = 0) -> bool:
    """Return whether bytes are searched for pickles: also archives, compressed bytes, and hex or base64 of any."""
    if _is_known(data) or compression_of(data[:16]) is not None or outcome(data) not in (NOTHING, ENDS):
        return True
    if level == _MAX_LEVELS:
        return _BASE64.search(data) is not None
    try:
        return _may_encode(data) and any(True for _ in decoded(data, level + 1))
    except BudgetError:
        return True


def may_begin_pickle(head: bytes) -> bool:
    """Return whether longer bytes may hold a pickle or an encoded one, by the first of them."""
    inflates = (compression := compression_of(head)) is not None and not compression.doubtful
    return inflates or _is_known(head) or outcome(head) != NOTHING or is_text(head)


def decoded(data: bytes, level: int = 0) -> Iterator[bytes]:
    """Yield what a text holds in hex, escapes or base64, if it may hold a pickle. Raises BudgetError for many lines."""
    hexes = (match[0].lower().replace(b"0x", b"").translate(None, _BETWEEN + b"x") for match in _HEX.finditer(data))
    plain = (a2b_hex(digits[: len(digits) // 2 * 2]) for digits in hexes)
    strings = (part for quote in _QUOTES for part in quote.split(data) if len(part) > 12 and b"\\" in part)
    yield from (part for part in chain(plain, _unescaped(strings)) if may_hold_pickle(part, level))
    left, text_end = 8 * len(data), 0
    for match in _BASE64.finditer(data):
        part = _from_base64(match[0])
        size, begin = len(match[0]), match.start()
        goes_on = begin >= text_end and data[begin + size : begin + size + 1] in _BETWEEN
        while goes_on and (may_begin_pickle(part) or compression_of(part)):
            size *= 4
            left -= size
            if left < 0:
                raise BudgetError
            lines = data[begin : begin + size]
            goes_on = len(lines) == size and _LINES.fullmatch(lines) is not None
            part = _from_base64(_LINES.findall(lines)[0])
            text_end = begin + size if is_text(part) else 0
        if may_hold_pickle(part, level):
            yield part


def _unescaped(strings: Iterable[bytes]) -> list[bytes]:
    """Return each string that has escapes of Python or JSON, without them."""
    plain = [part.rstrip(b"\\").replace(b"\\u00", b"\\x") for part in strings if part.isascii()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an escape that means nothing stays
        return [new for part in plain if (new := escape_decode(part, "replace")[0]) != part]


def _from_base64(text: bytes) -> bytes:
    text = text.translate(bytes.maketrans(b"-_", b"+/"), f"{whitespace},=".encode())
    return a2b_base64(text[: len(text) - (len(text) % 4 == 1)] + b"==")


def is_binary_pickle(data: bytes) -> bool:
    """Return whether bytes begin like a pickle of protocol 2 or later."""
    return data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5")
