"""Read the members of a tar archive by the rules of Python's ``tarfile``, which torch.load tries first.

Sources: ``Lib/tarfile.py`` of Python 3.10 to 3.14 (``TarInfo.frombuf``, ``_proc_*``, ``TarFile.next``), POSIX.1-2001
(ustar and pax), the manual of GNU tar. ``tarfile`` itself is not used: its regular expressions for pax headers take
quadratic time, it recurses for headers of headers, loops for negative sizes, and its rules changed with security
releases. If these rules or other programs disagree about a member, the member is ``odd``.
"""

from __future__ import annotations

from collections.abc import Iterator
from posixpath import dirname, normpath
from typing import Final

from ..base.errors import MalformedError
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from .sources import Source

_TAR_BLOCK: Final = 512
#: The most bytes of a header that names the next member; the longest path on Linux has 4,096.
_MAX_HEADER: Final = 1 << 16
#: The most extension headers of one member; a long name, a long link and a pax header make three.
_MAX_HEADERS: Final = 16
#: The most digits of a number in a pax header; a longer number exceeds any file.
_MAX_DIGITS: Final = 20
#: Sequences of extension headers that every program understands: GNU tar's long name and long link, or one pax header.
_COMPATIBLE_HEADERS: Final = (b"L", b"K", b"LK", b"KL", b"x", b"X")
#: Types followed by data: regular, regular in old archives, contiguous, sparse.
_FILE_TYPES: Final = (b"0", b"\0", b"7", b"S")
#: Types without data: links, devices, folders, pipes. ``tarfile`` treats every unknown type as a file.
_EMPTY_TYPES: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
_LINK_TYPES: Final = (b"1", b"2")
#: The numeric fields of a header; ``tarfile`` requires all of them to be valid.
_SIZE: Final = slice(124, 136)
_SUM: Final = slice(148, 156)
_NUMBERS: Final = (slice(100, 108), slice(108, 116), slice(116, 124), _SIZE, slice(136, 148), _SUM)
_DEVICES: Final = (slice(329, 337), slice(337, 345))
_OCTAL: Final = regex(rb" *[0-7]*[ \0]*")


class Member(NamedTuple):
    """A member with ``size`` bytes of data at ``begin``; the next header is at ``end``.

    ``plain`` is True for a file stored unchanged, not for a folder, link or sparse file. ``link`` is the target of a
    link; ``hard`` says whether it is a hard link. ``odd`` gives the reason why programs disagree about the member, or
    "".
    """

    name: str
    begin: int
    size: int
    plain: bool
    end: int
    link: str = ""
    hard: bool = False
    odd: str = ""


class _Pending(NamedTuple):
    """The extension headers read so far for the next member; ``kinds`` are their types."""

    kinds: bytes = b""
    name: str | None = None
    link: str | None = None
    size: int | None = None
    sparse: bool = False
    odd: str = ""


def is_header(block: bytes) -> bool:
    """Return whether ``tarfile`` accepts a block as a header: it needs a checksum and valid numbers, but no magic."""
    if len(block) < _TAR_BLOCK or not any(block):
        return False
    total = _number(block[_SUM])
    if total is None:
        return False
    plain = sum(block[: _SUM.start]) + 8 * 32 + sum(block[_SUM.stop : _TAR_BLOCK])
    if total != plain:
        # Sun and NeXT summed signed bytes.
        rest = block[: _SUM.start] + block[_SUM.stop : _TAR_BLOCK]
        high = len(rest) - len(rest.translate(None, bytes(range(128, 256))))
        if total != plain - 256 * high:
            return False
    return all(_number(block[place]) is not None for place in (*_NUMBERS, *_DEVICES))


def members(source: Source) -> Iterator[Member]:
    """Yield every member, in the order of the archive; read forward only, and stop at the end of a truncated file.

    Raises MalformedError for a damaged header, and beyond the limits.
    """
    at = 0
    pending = _Pending()
    for _ in range(LIMITS.members):
        block = source.read(at, _TAR_BLOCK)
        if len(block) < _TAR_BLOCK or not any(block):
            if pending.kinds:  # tarfile gives up here (``TarInfo._proc_gnulong``, ``_proc_pax``)
                raise _malformed("an extension header without its member", at)
            return
        if not is_header(block):
            raise _malformed("no member header where one is expected", at)
        kind, begin, size = block[156:157], at + _TAR_BLOCK, _number(block[_SIZE]) or 0
        if size < 0:
            raise _malformed("a member with a negative size", at)
        if kind in (b"L", b"K", b"x", b"X", b"g"):
            if size > _MAX_HEADER:
                raise _malformed(f"a header of {size:,} bytes for one name: the limit is {_MAX_HEADER:,}", at)
            if len(pending.kinds) >= _MAX_HEADERS:
                raise _malformed(f"more than {_MAX_HEADERS} headers for one member", at)
            pending = _extend_pending(pending, kind, source.read(begin, _padded_size(size)), size, at)
            at = begin + _padded_size(size)
            continue
        member = _member(block, pending, begin, size)
        yield member
        at = member.end
        pending = _Pending()
    raise _malformed(f"more than {LIMITS.members:,} members", at)


def resolve_member(listing: list[Member], name: str) -> Member | None:
    """Return the member that ``tarfile.extractfile`` reads for a name: the last one with that name, with links
    followed.

    Return None if there is no such member, if links form a circle, or if a link has no target.
    """
    at = next((at for at in reversed(range(len(listing))) if listing[at].name == name), -1)
    for _ in range(LIMITS.nesting):
        if at < 0 or not listing[at].link:
            break
        member = listing[at]
        # A hard link leads to an earlier member, a symbolic link to any.
        target = member.link if member.hard else "/".join(filter(None, (dirname(member.name), member.link)))
        candidates = range(at if member.hard else len(listing))
        at = next((at for at in reversed(candidates) if normpath(listing[at].name) == target), -1)
    return listing[at] if at >= 0 and not listing[at].link else None


def _member(block: bytes, pending: _Pending, begin: int, own_size: int) -> Member:
    kind, odd = block[156:157], pending.odd
    name, prefix = _text(block[:100]), _text(block[345:500])
    # Old archives have folders as files whose names end with a slash.
    folder = kind == b"5" or (kind == b"\0" and name.endswith("/"))
    empty = folder or kind in _EMPTY_TYPES
    name = name.rstrip("/") if folder else name
    if prefix and kind != b"S":
        name = f"{prefix}/{name}"
        odd = odd or "" if block[257:263] == b"ustar\0" else "a name with a prefix, in a format without prefixes"
    name = name if pending.name is None else pending.name
    size = own_size if pending.size is None else pending.size
    link = "" if kind not in _LINK_TYPES else _text(block[157:257]) if pending.link is None else pending.link
    if kind == b"S":
        odd = odd or "a sparse file"
    elif kind not in _FILE_TYPES and kind not in _EMPTY_TYPES:
        odd = odd or f"a member of the type {kind!r}"
    if empty and size:
        odd = odd or "a link, folder or device with data"
    if not all(block[field][0] == 0x80 or _OCTAL.fullmatch(block[field]) for field in (_SIZE, _SUM)):
        odd = odd or "a number that is not octal"
    plain = not (empty or kind == b"S" or pending.sparse)
    end = begin + (0 if empty else _padded_size(size))
    return Member(name.rstrip("/") if folder else name, begin, size, plain, end, link, kind == b"1", odd)


def _extend_pending(pending: _Pending, kind: bytes, data: bytes, size: int, at: int) -> _Pending:
    """Return ``pending`` with one more extension header, the first ``size`` bytes of ``data``."""
    pending = pending._replace(kinds=pending.kinds + kind)
    if kind != b"g" and pending.kinds.replace(b"g", b"") not in _COMPATIBLE_HEADERS:
        # ``tarfile`` uses the outer header, other programs the inner one.
        pending = pending._replace(odd="several headers for one member")
    if kind == b"L":
        return pending._replace(name=_text(data))
    if kind == b"K":
        return pending._replace(link=_text(data))
    records, odd = _pax_records(data[:size])
    odd = odd or ("bytes after the end of a pax header" if any(data[size:]) else "")
    sparse = any(key.startswith("GNU.sparse.") for key in records)
    if kind == b"g":
        if sparse or records.keys() & {"path", "linkpath", "size"}:
            raise _malformed("a global header that sets the name or size of every member", at)
        return pending._replace(odd=pending.odd or odd)
    digits = records.get("size")
    if digits is not None:
        valid = digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS
        odd = odd if valid else "a size in a pax header that is not a number"
        pending = pending._replace(size=int(digits) if valid else 0)
    if sparse:
        odd = odd or "a sparse file"
    name = records.get("GNU.sparse.name", records.get("path"))  # the former is the real name of a sparse file
    return pending._replace(
        name=pending.name if pending.name is not None or name is None else name.rstrip("/"),
        link=pending.link if pending.link is not None else records.get("linkpath"),
        sparse=pending.sparse or sparse,
        odd=pending.odd or odd,
    )


def _malformed(what: str, at: int) -> MalformedError:
    return MalformedError(what, where="tar archive", offset=at)


def _padded_size(size: int) -> int:
    return -(-size // _TAR_BLOCK) * _TAR_BLOCK


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int | None:
    """Parse a header's number like ``tarfile.nti``: octal text, or binary with the highest bit set; None if invalid."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.split(b"\0", 1)[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def _pax_records(data: bytes) -> tuple[dict[str, str], str]:
    """Parse the records of a pax header, ``<length> <key>=<value>\\n`` each; return them and an oddity, or "".

    A malformed record ends the header in some versions of ``tarfile``, and invalidates it in others.
    """
    records: dict[str, str] = {}
    at = 0
    while at < len(data):
        size, blank, _ = data[at : at + _MAX_DIGITS].partition(b" ")
        end = at + int(size) if blank and size.isdigit() else 0
        key, equals, value = data[at + len(size) + 1 : end - 1].partition(b"=")
        if not at + len(size) + 2 < end <= len(data) or not key or not equals or data[end - 1 : end] != b"\n":
            return records, "a pax header that is malformed"
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at = end
    return records, ""
