"""The members of a tar archive: their headers alone, in any dialect. Bytes that stand elsewhere are never followed.

Sources: POSIX.1-2001 (ustar and pax), the manual of GNU tar (long names, sizes in base 256, sparse files).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from .errors import MalformedError
from .limits import LIMITS
from .source import Source

__all__ = ["Member", "is_header", "members"]

_BLOCK: Final = 512
#: Bytes of a header that names the next member: the longest path of Linux has 4,096.
_LONG: Final = 1 << 16
#: Digits of a size in a pax header: a longer one is larger than any file.
_DIGITS: Final = 20
#: Types whose bytes are the file: regular, regular in old archives, contiguous.
_FILES: Final = (b"0", b"\0", b"7")
_OCTAL: Final = re.compile(rb"[ \0]*([0-7]*)[ \0]*")


class Member(NamedTuple):
    """A member: ``begin`` is where its bytes begin, ``size`` how many they are.

    ``plain`` says that it is a file whose bytes stand there as they are: no folder, link or sparse file.
    """

    name: str
    begin: int
    size: int
    plain: bool


def is_header(block: bytes) -> bool:
    """Is it a header? There need be no magic, but there is a sum of its bytes."""
    if len(block) < _BLOCK:
        return False
    field = _OCTAL.fullmatch(block[148:156])
    if field is None or not field.group(1):
        return False
    return int(field.group(1), 8) == sum(block[:148]) + 8 * 32 + sum(block[156:_BLOCK])


def members(source: Source) -> Iterator[Member]:
    """Every member, in the order of the archive; reads forward only.

    Raises MalformedError where a header is damaged, and beyond ``limits.members``.
    """
    at = 0
    name, size, sparse = "", -1, False
    for _ in range(LIMITS.members):
        block = source.read(at, _BLOCK)
        if len(block) < _BLOCK or not any(block):
            return
        if not is_header(block):
            raise MalformedError("no header of a member where one must be", where="tar archive", offset=at)
        kind, begin, own = block[156:157], at + _BLOCK, _number(block[124:136], at)
        if kind in (b"L", b"x", b"g", b"K"):
            if kind in (b"L", b"x"):
                if own > _LONG:
                    what = f"a header of {own:,} bytes for one name: the limit is {_LONG:,}"
                    raise MalformedError(what, where="tar archive", offset=at)
                text = source.read(begin, own)
                if kind == b"L":
                    name = _text(text)
                else:
                    found = _records(text)
                    name = found.get("path", name)
                    digits = found.get("size", "")
                    size = int(digits) if digits.isdecimal() and len(digits) <= _DIGITS else size
                    sparse = sparse or any(key.startswith("GNU.sparse.") for key in found)
            at = begin + _whole(own)
            continue
        own = size if size >= 0 else own
        full = name or _name(block)
        plain = kind in _FILES and not sparse and not full.endswith("/")
        yield Member(full, begin, own, plain)
        at = begin + (_whole(own) if kind in (*_FILES, b"S") else 0)
        name, size, sparse = "", -1, False
    what = f"more than {LIMITS.members:,} members"
    raise MalformedError(what, where="tar archive", offset=at)


def _whole(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _name(block: bytes) -> str:
    """The name in a header; the prefix is one in the dialect of POSIX only."""
    name, prefix = _text(block[:100]), _text(block[345:500])
    return f"{prefix}/{name}" if prefix and block[257:263] == b"ustar\0" else name


def _number(field: bytes, at: int) -> int:
    """A size: octal digits, or binary with the highest bit set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    found = _OCTAL.fullmatch(field)
    if found is None:
        raise MalformedError("a size that is no number", where="tar archive", offset=at)
    return int(found.group(1) or b"0", 8)


def _records(data: bytes) -> dict[str, str]:
    """The records of a pax header, ``<length> <key>=<value>\\n`` each; what does not parse ends them."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data):
        size, blank, _ = data[at : at + 20].partition(b" ")
        if not blank or not size.isdigit() or not len(size) + 2 < int(size) <= len(data) - at:
            break
        key, _, value = data[at + len(size) + 1 : at + int(size) - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += int(size)
    return found
