"""Files in which a loader of checkpoints runs nothing: text, pictures, sound, tables; and files that are code."""

from __future__ import annotations

import re
import struct
from codecs import getincrementaldecoder
from typing import Final

from ..files.sources import Source

#: (offset, magic, kind).
_MAGIC: Final = (
    (0, b"\x89PNG\r\n\x1a\n", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (0, b"GIF8", "image"),
    (8, b"WEBP", "image"),
    (0, b"II*\0", "image"),
    (0, b"MM\0*", "image"),
    (0, b"\0\0\1\0", "image"),
    (4, b"ftyp", "video"),
    (0, b"\x1aE\xdf\xa3", "video"),
    (8, b"WAVE", "audio file"),
    (8, b"AVI ", "video"),
    (0, b"fLaC", "audio file"),
    (0, b"OggS", "audio file"),
    (0, b"ID3", "audio file"),
    (0, b"PAR1", "table"),
    (0, b"ARROW1\0\0", "table"),
    (0, b"%PDF-", "document"),
    (0, b"wOF2", "font"),
    (0, b"\0\1\0\0\0", "font"),
    (0, b"OTTO", "font"),
)
_COMPILED: Final = "a compiled program or library"
#: Suffixes of code, which a program may run.
_CODE: Final = {
    ".py": "Python code",
    ".pyc": "compiled Python code",
    ".ipynb": "a notebook: code",
    **dict.fromkeys((".sh", ".bash", ".bat", ".cmd", ".ps1"), "a script"),
    **dict.fromkeys((".so", ".dll", ".dylib", ".pyd", ".jar", ".exe", ".whl", ".egg"), _COMPILED),
}
#: The first bytes of programs: scripts, ELF, PE, Mach-O (three kinds).
_PROGRAMS: Final = (
    (b"#!", "a script"),
    (b"\x7fELF", _COMPILED),
    (b"MZ", _COMPILED),
    (b"\xcf\xfa\xed\xfe", _COMPILED),
    (b"\xce\xfa\xed\xfe", _COMPILED),
    (b"\xca\xfe\xba\xbe", _COMPILED),
)
#: Text from which a loader makes objects, and what it says.
_ACTIVE: Final = (
    (
        rb"(?m)!!(?:python/|[pP]?%)|tag:yaml\.org,2002:|^%TAG",
        "YAML with tags, from which yaml.unsafe_load makes objects",
    ),
    (rb'"class_name"\s*:\s*"(?:(?:TFOp|SlicingOp)?Lambda"|[^"]*\\)', "a Keras model with a Lambda layer: code"),
    (rb'":serialized:"', "JSON with pickles in base64, which stable-baselines3 loads"),
)
#: Bytes of a text that are searched for those.
_SEARCHED: Final = 16 << 20


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text in UTF-8, of which a character may be cut at the end."""
    if any(byte < 32 and byte not in b"\t\n\r\f" for byte in head):
        return False
    try:
        getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def inert_kind(head: bytes, source: Source) -> str:
    """Return what bytes are in which no loader of checkpoints runs anything, in one word, "" for any others.

    ``head`` are 512 bytes or more, of which text and pictures are known; whether they are code is for ``code_kind``.
    """
    if not head:
        return "empty file"
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if len(head) > 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] <= min(100_000_000, source.size):
        return "safetensors"
    return "text file" if is_text(head) else ""


def code_kind(name: str, head: bytes, source: Source) -> str:
    """Return what kind of code a file is, or text from which a loader makes objects, in words; "" for any other."""
    for suffix, words in _CODE.items():
        if name.lower().endswith(suffix):
            return words
    for magic, words in _PROGRAMS:
        if head.startswith(magic):
            return words
    if is_text(head):
        data = source.read(0, min(source.size, _SEARCHED))
        for pattern, words in _ACTIVE:
            if re.search(pattern, data):
                return words
    return ""
