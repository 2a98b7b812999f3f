"""Recognise files that no checkpoint loader executes (text, pictures, sound, tables), and files that are code."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from ...base.lazy import regex, table
from ...base.text import human_bytes
from ...files.sources import Source

if TYPE_CHECKING:
    from ...safety.configuration import ActivePart

#: A ModelProto of SentencePiece begins with its pieces: text, score, type (sentencepiece_model.proto).
_SENTENCEPIECE: Final = rb"\n[\x08-\x7f]\n[\1-\x70][^\0]{1,112}?\x15.{4}(?:\x18[\1-\6])?\n[\x08-\x7f]\n"
_KINDS: Final[dict[str, dict[str, str]]] = {name: part["kinds"] for name, part in table("safety/kinds").items()}
#: (offset, first bytes, kind) of files in which no checkpoint loader runs anything.
_MAGIC: Final = tuple(
    (int(offset), bytes.fromhex(magic), kind)
    for kind, places in _KINDS["inert"].items()
    for offset, magic in (place.split() for place in places.split(", "))
)
#: The kinds of code by suffix, and by first bytes.
_CODE: Final = {suffix: kind for kind, suffixes in _KINDS["code"].items() for suffix in suffixes.split()}
_PROGRAMS: Final = {bytes.fromhex(magic): kind for kind, all_ in _KINDS["programs"].items() for magic in all_.split()}
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
#: The key of an extension type of Arrow, and its base64 at each of three offsets, as in Parquet.
_EXTENSION: Final = (b"ARROW:extension", b"QVJST1c6ZXh0ZW5zaW9u", b"FSUk9XOmV4dGVuc2lvb", b"BUlJPVzpleHRlbnNpb2")
#: The first bytes of byte order marks in UTF-8, UTF-16 and UTF-32.
_MARKS: Final = (b"\xef", b"\xff", b"\xfe")
_CONTROL: Final = regex(rb"[\x00-\x08\x0b\x0e-\x1f]")
#: A text up to this size in bytes may be a single word or number.
_WORD: Final = 64
#: Bytes of a text that are read. The largest vocabularies of published models have 35 MB.
_READ: Final = 40 << 20


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text by its first bytes, or "" for bytes that are not text. The last character may be
    cut. Without a byte order mark, UTF-16 and UTF-32 are recognised as in ``json.detect_encoding``, by the zeros next
    to the first character, and only if JSON or YAML may begin like that."""
    if head[:1] not in _MARKS and 0 not in head[:4] and _CONTROL.search(head):
        return ""  # neither mark nor zeros: only UTF-8 remains, where these bytes are control characters
    encoding = json.detect_encoding(head) if head else ""
    try:
        text = head.decode(encoding, "strict")
    except UnicodeDecodeError as error:
        # The error position does not count the three bytes of a UTF-8 mark.
        if error.start < len(head) - (7 if encoding == "utf-8-sig" else 4):
            return ""
        text = head[: error.start].decode(encoding, "ignore")
    if any(character < " " and character not in "\t\n\r\f" for character in text):
        return ""
    marked = encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32")
    return encoding if text and (marked or re.match(r"\s*[{\[\"'%!#-]|\s*\w+\s*[:=]", text)) else ""


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 text; the last character may be cut."""
    return encoding_of(head) in ("utf-8", "utf-8-sig")


def inert_kind(head: bytes) -> str:
    """Return the kind of bytes in which no checkpoint loader runs anything, such as "image", or "" for any other bytes.
    ``head`` are at least the first 512 bytes, enough to tell text and pictures. ``active_parts`` finds what makes a
    loader run code because of a text, ``hidden_kind`` what only looks inert."""
    if not head:
        return "empty file"
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if re.match(_SENTENCEPIECE, head, re.S):
        return "SentencePiece model"
    return "text file" if encoding_of(head) else ""


def hidden_kind(head: bytes, source: Source) -> str:
    """Return why a file must not count by its first bytes alone, or "". HDF5 may follow a user block of any content
    (HDF5 File Format Specification: the superblock is at 0, 512 or 512 doubled any number of times). Extension types of
    Arrow may hold a pickle (CVE-2023-47248)."""
    places = [512 << number for number in range(max(source.size // 512, 1).bit_length())]
    source.prefetch((place, len(_HDF5)) for place in places)
    if any(source.read(place, len(_HDF5)) == _HDF5 for place in places):
        return "HDF5 behind a user block"
    size = {b"PAR1": 8, b"ARRO": 10}.get(head[:4], 0)  # the footer's size and the magic bytes at the end
    if size:
        end = source.size - size
        footer = int.from_bytes(source.read(end, 4), "little")
        # A stream reader of Arrow takes the schema at the start instead.
        begin = min(int.from_bytes(head[12:16], "little"), _READ) if size > 8 else 0
        text = source.read(0, begin + 16) + source.read(max(end - footer, 0), min(footer, _READ))
        if footer > _READ or any(name in text for name in _EXTENSION):
            return "a table with extension types, which pyarrow may unpickle"
    return ""


def code_kind(name: str, head: bytes) -> str:
    """Return a description of a code file by its name and first bytes, or "" for any other file."""
    if kind := _CODE.get(f".{name.rpartition('.')[2].lower()}"):
        return kind
    return next((words for magic, words in _PROGRAMS.items() if head.startswith(magic)), "")


def is_plain_record(head: bytes, source: Source) -> bool:
    """Return whether a file holds what torch writes into small records: a number, or a byte order. No unpickler imports
    or calls anything for it."""
    word = head.strip()
    return source.size <= _WORD and (word.isdigit() or word in (b"little", b"big"))


def active_parts(name: str, head: bytes, source: Source) -> list[ActivePart]:
    """Return what makes a program run code from a file: that it is code, or keys, tags and lines of its text. ``head``
    are its first 512 bytes. Only 40 MiB of a text are read; a longer text adds a part with the verdict UNKNOWN."""
    kind, encoding = code_kind(name, head), encoding_of(head)
    word = source.size <= _WORD and head.strip().isalnum()  # as in the records of torch.save
    if not kind and (word or not (encoding or head.startswith(_HDF5))):
        return []
    from ...safety.configuration import ActivePart, keras_parts, text_findings  # only for texts
    from ...safety.rules import UNKNOWN

    if kind:
        return [ActivePart(kind)]
    if head.startswith(_HDF5):
        # Keras keeps its configuration as text in an attribute.
        return list(keras_parts(source.read(0, _READ).decode("latin-1")))
    text = source.read(0, min(source.size, _READ)).decode(encoding, "replace")
    limit = f"only {human_bytes(_READ)} of {human_bytes(source.size)} of text are read"
    return text_findings(text, name) + [ActivePart(limit, UNKNOWN)] * (source.size > _READ)
