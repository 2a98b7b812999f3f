"""The header of an .npy file in a few words. Source: ``numpy/lib/format.py``."""

from __future__ import annotations

import re
from typing import Final

from ...base.text import cut
from ...files.sources import Source

_WORDS: Final = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_OTHERS: Final = {"b": "bool", "O": "objects (a pickle)", "S": "bytes", "U": "text", "V": "raw"}


def array_words(source: Source) -> str:
    """``float32 4x3``, for a file that begins as numpy.save begins one."""
    return header_words(source.read(0, 4096)) or "its header is damaged"


def header_words(head: bytes) -> str:
    """The same of the first bytes, "" where there is no header."""
    wide = head[6:7] != b"\x01"
    size = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    text = head[12 if wide else 10 :][: min(size, 4000)]
    kind = re.search(rb"'descr'\s*:\s*'([^']{1,20})'", text)
    shape = re.search(rb"'shape'\s*:\s*\(([\d, L]{0,400})\)", text)
    if shape is None:
        return ""
    sizes = "x".join(part.strip(" L") for part in shape.group(1).decode("ascii").split(",") if part.strip(" L"))
    name = _dtype(kind.group(1).decode("ascii", "replace")) if kind else "records"
    return f"{name} {sizes or 'scalar'}"


def _dtype(text: str) -> str:
    """``<f4`` is float32."""
    kind, size = text[1:2], text[2:]
    if kind in _WORDS and size.isdigit() and len(size) < 4:
        return f"{_WORDS[kind]}{8 * int(size)}" + (" (big-endian)" if text[:1] == ">" else "")
    return _OTHERS.get(kind, cut(text, 20))
