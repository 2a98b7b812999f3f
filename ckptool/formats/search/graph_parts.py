"""Parts of a pickle that lead elsewhere: its storages and globals, and bytes that may be another pickle."""

from __future__ import annotations

from binascii import a2b_base64, a2b_hex
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from string import ascii_letters, digits, hexdigits, whitespace
from typing import Final

from ...base.lazy import regex
from ...files.compressed import compression_of
from ...pickles.lexer import ENDS, NOTHING, outcome
from ...pickles.nodes import ByteArray, Graph
from .budget import BudgetError
from .inert import is_text

#: The first bytes of a zip archive.
ZIP: Final = b"PK\x03\x04"
#: The most levels of hex and base64 that are decoded to see whether a value is searched.
_MAX_LEVELS: Final = 4
_SPACE: Final = whitespace.encode()
#: Tables that write each character of base64 as ``w``, and each hex digit as ``0``.
_TO_W: Final = bytes.maketrans(f"{ascii_letters}{digits}+/_-".encode(), b"w" * 66)
_TO_0: Final = bytes.maketrans(hexdigits.encode(), b"0" * 22)
#: Hex, possibly in words, and a word in base64 of either alphabet, with the lines that continue it. No shorter one
#: holds a call.
_HEX: Final = regex(rb"(?:[0-9a-fA-F]{2}\s*){12}[0-9a-fA-F\s]*")
_BASE64: Final = regex(rb"[0-9A-Za-z+/_-]{16,}")
_LINES: Final = regex(rb"[0-9A-Za-z+/_= \t\r\n-]+")
_TO_BASE64: Final = bytes.maketrans(b"-_", b"+/")


def values(graph: Graph) -> Iterator[bytes]:
    """Yield the bytes objects and strings of a pickle that may hold another one, as bytes."""
    arrays = (node.data for _, node in graph.of_type(ByteArray))
    return suspects(graph.strings, chain((node for _, node in graph.of_type(bytes)), arrays))


def suspects(texts: Collection[str], binary: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes objects and texts that may hold a pickle, as bytes."""
    yield from filter(may_hold_pickle, binary)
    if _is_suspect(".".join(texts)):
        yield from filter(may_hold_pickle, (text.encode("latin-1", "replace") for text in filter(_is_suspect, texts)))


def _is_suspect(text: str) -> bool:
    """Return whether a text may hold a pickle: it has control characters, or words that may be hex or base64."""
    return not (text.isascii() and text.isprintable()) or _has_words(text.encode())


def _has_words(data: bytes) -> bool:
    """Return whether bytes have a run that may be hex or base64."""
    return b"w" * 16 in data.translate(_TO_W) or b"0" * 24 in data.translate(_TO_0, _SPACE)


def may_hold_pickle(data: bytes, level: int = 0) -> bool:
    """Return whether bytes are searched for pickles: also archives, compressed bytes, and hex or base64 of any."""
    known = data[:4] == ZIP or is_binary_pickle(data) or compression_of(data[:16]) is not None
    if known or outcome(data) not in (NOTHING, ENDS):
        return True
    if level == _MAX_LEVELS or not _has_words(data):
        return _BASE64.search(data) is not None
    try:
        return any(True for _ in decoded(data, level + 1))
    except BudgetError:
        return True


def may_begin_pickle(head: bytes) -> bool:
    """Return whether longer bytes may hold a pickle or an encoded one, by the first of them."""
    compression = compression_of(head)
    known = head[:4] == ZIP or is_binary_pickle(head) or (compression is not None and not compression.doubtful)
    return known or outcome(head) != NOTHING or is_text(head)


def decoded(data: bytes, level: int = 0) -> Iterator[bytes]:
    """Yield what a text holds in hex or base64 at any place, if it may hold a pickle. Raises BudgetError if too many
    lines may begin one."""
    for match in _HEX.finditer(data):
        digits = match[0].translate(None, _SPACE)
        part = a2b_hex(digits[: len(digits) // 2 * 2])
        if may_hold_pickle(part, level):
            yield part
    left, text_end = 8 * len(data), 0
    for match in _BASE64.finditer(data):
        part = _from_base64(match[0])
        size, begin = len(match[0]), match.start()
        goes_on = begin >= text_end and data[begin + size : begin + size + 1] in (b"\n", b"\r")
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


def _from_base64(text: bytes) -> bytes:
    text = text.translate(_TO_BASE64, b" \t\r\n=")
    return a2b_base64(text[: len(text) - (len(text) % 4 == 1)] + b"==")


def is_binary_pickle(data: bytes) -> bool:
    """Return whether bytes begin like a pickle of protocol 2 or later."""
    return data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5")
