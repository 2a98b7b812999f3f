"""The members of a tar archive, by the rules of Python's ``tarfile``, which torch.load asks first of all.

Sources: ``Lib/tarfile.py`` of Python 3.10 to 3.14 (``TarInfo.frombuf``, ``_proc_*``, ``TarFile.next``), POSIX.1-2001
(ustar and pax), the manual of GNU tar. Not ``tarfile`` itself: its expressions for pax headers take quadratic time, its
headers of headers recurse, sizes below zero loop, and its rules changed with security releases. Where those rules or
other programs differ, a member is ``odd``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from posixpath import dirname, normpath
from typing import Final, NamedTuple

from ..base.errors import MalformedError
from ..base.limits import LIMITS
from .sources import Source

_BLOCK: Final = 512
#: Bytes of a header that names the next member: the longest path of Linux has 4,096.
_LONG: Final = 1 << 16
#: Headers in a row that describe one member: a name, a link and a pax header are three.
_HEADERS: Final = 16
#: Digits of a number in a pax header: a longer one is larger than any file.
_DIGITS: Final = 20
#: Headers that describe a member together: the long name and the long link of GNU tar, or one of pax.
_ALONE: Final = (b"L", b"K", b"LK", b"KL", b"x", b"X")
#: Types whose bytes follow: regular, regular in old archives, contiguous, sparse.
_FILES: Final = (b"0", b"\0", b"7", b"S")
#: Types without bytes: links, devices, folders, pipes. Every type that is not known is a file for ``tarfile``.
_BARE: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
_LINKS: Final = (b"1", b"2")
#: Where the numbers are in a header; all of them must be some.
_SIZE: Final = slice(124, 136)
_SUM: Final = slice(148, 156)
_NUMBERS: Final = (slice(100, 108), slice(108, 116), slice(116, 124), _SIZE, slice(136, 148), _SUM)
_DEVICES: Final = (slice(329, 337), slice(337, 345))
_OCTAL: Final = re.compile(rb" *[0-7]*[ \0]*")


class Member(NamedTuple):
    """A member: ``begin`` is where its bytes begin, ``size`` how many there are, ``end`` where the next header is.

    ``plain`` says that it is a file whose bytes are stored there as they are: no folder, link or sparse file. ``link``
    is what a link leads to, and ``hard`` says of which kind it is. ``odd`` says where programs differ about it.
    """

    name: str
    begin: int
    size: int
    plain: bool
    end: int
    link: str = ""
    hard: bool = False
    odd: str = ""


class _Next(NamedTuple):
    """What the headers in front of a member say of it; ``kinds`` are their types."""

    kinds: bytes = b""
    name: str | None = None
    link: str | None = None
    size: int | None = None
    sparse: bool = False
    odd: str = ""


def is_header(block: bytes) -> bool:
    """Is it a header for ``tarfile``? There need be no magic, but a sum of its bytes, and numbers in their places."""
    if len(block) < _BLOCK or not any(block):
        return False
    total = _number(block[_SUM])
    plain = sum(block[: _SUM.start]) + 8 * 32 + sum(block[_SUM.stop : _BLOCK])
    if total != plain:
        # Sun and NeXT took the bytes as signed numbers.
        high = sum(byte >> 7 for byte in (*block[: _SUM.start], *block[_SUM.stop : _BLOCK]))
        if total != plain - 256 * high:
            return False
    return all(_number(block[place]) is not None for place in (*_NUMBERS, *_DEVICES))


def members(source: Source) -> Iterator[Member]:
    """Every member, in the order of the archive; reads forward only, and stops where the file is cut.

    Raises MalformedError where a header is damaged, and beyond the limits.
    """
    at = 0
    ahead = _Next()
    for _ in range(LIMITS.members):
        block = source.read(at, _BLOCK)
        if len(block) < _BLOCK or not any(block):
            if ahead.kinds:  # tarfile gives up here (``TarInfo._proc_gnulong``, ``_proc_pax``)
                raise _broken("a header of a member that does not follow", at)
            return
        if not is_header(block):
            raise _broken("no header of a member where one must be", at)
        kind, begin, own = block[156:157], at + _BLOCK, _number(block[_SIZE]) or 0
        if own < 0:
            raise _broken("a member with a size below zero", at)
        if kind in (b"L", b"K", b"x", b"X", b"g"):
            if own > _LONG or len(ahead.kinds) >= _HEADERS:
                what = f"a header of {own:,} bytes for one name: the limit is {_LONG:,}"
                raise _broken(what if own > _LONG else f"more than {_HEADERS} headers for one member", at)
            ahead = _described(ahead, kind, source.read(begin, _whole(own)), own, at)
            at = begin + _whole(own)
            continue
        member = _member(block, ahead, begin, own)
        yield member
        at = member.end
        ahead = _Next()
    raise _broken(f"more than {LIMITS.members:,} members", at)


def resolved(found: list[Member], name: str) -> Member | None:
    """The member that ``tarfile.extractfile`` reads for a name: the last one called so, links followed.

    None where there is none, and for links in a circle or to nothing.
    """
    at = next((at for at in reversed(range(len(found))) if found[at].name == name), -1)
    for _ in range(LIMITS.nesting):
        if at < 0 or not found[at].link:
            break
        member = found[at]
        # A hard link leads to a member in front of it, a symbolic one to any.
        wanted = member.link if member.hard else "/".join(filter(None, (dirname(member.name), member.link)))
        places = range(at if member.hard else len(found))
        at = next((at for at in reversed(places) if normpath(found[at].name) == wanted), -1)
    return found[at] if at >= 0 and not found[at].link else None


def _member(block: bytes, ahead: _Next, begin: int, own: int) -> Member:
    kind, odd = block[156:157], ahead.odd
    name, prefix = _text(block[:100]), _text(block[345:500])
    folder = kind == b"5" or _is_folder(block)
    name = name.rstrip("/") if folder else name
    if prefix and kind != b"S":
        name = f"{prefix}/{name}"
        odd = odd or "" if block[257:263] == b"ustar\0" else "a name in two parts outside of the format that has them"
    name = name if ahead.name is None else ahead.name
    size = own if ahead.size is None else ahead.size
    link = "" if kind not in _LINKS else _text(block[157:257]) if ahead.link is None else ahead.link
    if kind == b"S":
        odd = odd or "a file with holes"
    elif kind not in _FILES and kind not in _BARE:
        odd = odd or f"a member of the type {kind!r}"
    if (kind in _BARE or folder) and size:
        odd = odd or "a link, folder or device with bytes"
    if not all(block[place][0] == 0x80 or _OCTAL.fullmatch(block[place]) for place in (_SIZE, _SUM)):
        odd = odd or "a number that is not octal"
    plain = not (folder or kind in _BARE or kind == b"S" or ahead.sparse)
    end = begin + (0 if kind in _BARE or folder else _whole(size))
    return Member(name.rstrip("/") if folder else name, begin, size, plain, end, link, kind == b"1", odd)


def _described(ahead: _Next, kind: bytes, data: bytes, size: int, at: int) -> _Next:
    """What is known of the next member with one more header, whose ``size`` bytes begin ``data``."""
    ahead = ahead._replace(kinds=ahead.kinds + kind)
    if kind != b"g" and ahead.kinds.replace(b"g", b"") not in _ALONE:
        # The outer one counts for ``tarfile``, the inner one for others.
        ahead = ahead._replace(odd="several headers for one member")
    if kind == b"L":
        return ahead._replace(name=_text(data))
    if kind == b"K":
        return ahead._replace(link=_text(data))
    records, odd = _records(data[:size])
    odd = odd or ("bytes behind the end of a pax header" if any(data[size:]) else "")
    sparse = any(key.startswith("GNU.sparse.") for key in records)
    if kind == b"g":
        if sparse or records.keys() & {"path", "linkpath", "size"}:
            raise _broken("a global header with the name or size of every member", at)
        return ahead._replace(odd=ahead.odd or odd)
    digits = records.get("size")
    length = ahead.size
    if digits is not None:
        number = digits.isdecimal() and digits.isascii() and len(digits) <= _DIGITS
        length, odd = (int(digits), odd) if number else (0, "a size in a pax header that is not a number")
    if sparse:
        odd = odd or "a file with holes"
    name = records.get("GNU.sparse.name", records.get("path"))  # the real name of a file with holes
    return _Next(
        ahead.kinds,
        ahead.name if ahead.name is not None else name if name is None else name.rstrip("/"),
        ahead.link if ahead.link is not None else records.get("linkpath"),
        length,
        ahead.sparse or sparse,
        ahead.odd or odd,
    )


def _broken(what: str, at: int) -> MalformedError:
    return MalformedError(what, where="tar archive", offset=at)


def _is_folder(block: bytes) -> bool:
    """Old archives have folders as files whose names end in a slash."""
    return block[156:157] == b"\0" and _text(block[:100]).endswith("/")


def _whole(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int | None:
    """A number of a header, as ``tarfile.nti`` reads it: octal text, or binary with the highest bit set."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.split(b"\0", 1)[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def _records(data: bytes) -> tuple[dict[str, str], str]:
    """The records of a pax header, ``<length> <key>=<value>\\n`` each, and what is odd about them.

    What does not parse ends them in some versions of ``tarfile``, and makes the header invalid in others.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(data):
        size, blank, _ = data[at : at + _DIGITS].partition(b" ")
        end = at + int(size) if blank and size.isdigit() else 0
        key, equals, value = data[at + len(size) + 1 : end - 1].partition(b"=")
        if not at + len(size) + 2 < end <= len(data) or not key or not equals or data[end - 1 : end] != b"\n":
            return found, "a pax header that is malformed"
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at = end
    return found, ""
