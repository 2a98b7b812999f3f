"""Files within zip, tar and gzipped tar archives, by addresses such as ``outer.zip!policy.pth``.

The one file in gzip data that is no tar has the name of the data without ``.gz``: ``model.pth.gz!model.pth``.
A stored member is read where it stands. A deflated or gzipped one is inflated to memory, up to ``limits.member_bytes``;
a larger one must be unpacked first. A path with ``!`` that exists is that file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from shlex import quote
from typing import Final, NamedTuple

from ..base.errors import MalformedError, UnreadableError
from ..base.limits import LIMITS
from ..base.text import cut, human_bytes, listed, shown
from .sources import BytesSource, ContainedSource, FileSource, SliceSource, Source, open_source
from .tars import is_header, members
from .zips.reader import read_archive

#: Stands between an archive and its member.
MARK: Final = "!"
#: Marks in a path that are looked at: more are no address.
_MARKS: Final = 64
#: Names of checkpoints, and of archives that may hold some.
_SUFFIXES: Final = (
    ".pth",
    ".pt",
    ".ckpt",
    ".bin",
    ".th",
    ".pth.tar",
    ".safetensors",
    ".zip",
    ".tar",
    ".tar.gz",
    ".tgz",
)
#: Bytes of a gzipped tar that are inflated only to say what is in it.
_LOOK: Final = 64 << 20
#: Members that are looked at to say what is in an archive.
_LOOKED: Final = 10_000
_CHUNK: Final = 1 << 18
_GZIP: Final = b"\x1f\x8b"


class Inside(NamedTuple):
    """A member that is called like a checkpoint: its name, and its size in bytes."""

    name: str
    size: int


def _split(path: str) -> tuple[str, str]:
    """(the file, the rest behind its mark): the longest beginning that is a file; ("", "") where there is none."""
    if MARK not in path or os.path.lexists(path):
        return "", ""
    parts = path.split(MARK, _MARKS)
    for count in range(len(parts) - 1, 0, -1):
        outer = MARK.join(parts[:count])
        if os.path.isfile(outer):
            return outer, path[len(outer) + 1 :]
    return "", ""


def is_address(path: str) -> bool:
    """Does the path name a file within an archive?"""
    return bool(_split(path)[0])


def file_name(path: str) -> str:
    """The name of the file itself, for an output beside others: ``policy.pth`` of ``outer.zip!run/policy.pth``."""
    inner = _split(path)[1]
    return os.path.basename(inner.rpartition(MARK)[2] or inner) if inner else os.path.basename(os.path.normpath(path))


def open_any(path: str | os.PathLike[str]) -> FileSource | ContainedSource:
    """Open a file, or a member of an archive by its address.

    Raises UnreadableError as ``open_source`` does, for what is no archive or has no such member, and for members that
    are too large to be inflated to memory; MalformedError for a damaged archive.
    """
    name = os.fspath(path)
    outer, rest = _split(name)
    if not outer:
        return open_source(name)
    file = open_source(outer)
    try:
        unpack = _unpack(file, rest.partition(MARK)[0])
        return ContainedSource(_member(file, outer, rest), file, name, unpack)
    except UnreadableError as error:
        file.close()
        error.path = name
        error.next = error.next or unpack
        raise
    except BaseException:
        file.close()
        raise


def _member(source: Source, address: str, rest: str) -> Source:
    """Step by step to the innermost member."""
    for _ in range(LIMITS.nesting):
        names = _candidates(rest)
        head = source.read(0, 1024)
        gzipped = head[:2] == _GZIP
        if head[:2] == b"PK":
            name, found = _from_zip(source, address, names)
        elif gzipped and not is_header(_Gzip(source).read(0, 512)):
            name, found = _from_gzip(source, address, names)
        elif gzipped or is_header(head[:512]):
            name, found = _from_tar(source, gzipped, address, names)
        else:
            what = f"{shown(address)} is no zip or tar archive, so there is nothing to name in it"
            raise UnreadableError(what, next=f"ckptool inspect {quote(address)}")
        if len(name) == len(rest):
            return found
        source, rest, address = found, rest[len(name) + 1 :], address + MARK + name
    raise UnreadableError(f"more than {LIMITS.nesting} archives in each other are not followed")


def _candidates(rest: str) -> list[str]:
    """What the member may be called, the longest first: names may have marks, too."""
    parts = rest.split(MARK, _MARKS)
    return [rest, *(MARK.join(parts[:count]) for count in range(len(parts) - 1, 0, -1))]


def _from_zip(source: Source, address: str, names: list[str]) -> tuple[str, Source]:
    archive = read_archive(source)
    name = next((name for name in names if name in archive.by_name), None)
    if name is None:
        raise _no_member(address, names[-1], [record.name for record in archive.records])
    record = archive.by_name[name]
    if record.flags & 1:
        raise UnreadableError(f"{shown(name)} is encrypted")
    if record.method == 0:
        span = archive.payload(record)
        return name, SliceSource(source, span.offset, span.size, name)
    if record.method != 8:
        raise UnreadableError(f"{shown(name)} is compressed by method {record.method}, which is not read")
    _check_size(name, record.size, "deflated")
    data = archive.read(record, LIMITS.member_bytes)
    if record.crc and zlib.crc32(data) != record.crc:
        raise MalformedError("its checksum is not the one on record: the archive is damaged", where=name)
    return name, BytesSource(data, name)


def _from_tar(source: Source, gzipped: bool, address: str, names: list[str]) -> tuple[str, Source]:
    wanted = set(names) | {f"./{name}" for name in names}
    first: list[str] = []
    found = {}
    for member in members(_Gzip(source) if gzipped else source):
        if len(first) < _LOOKED:
            first.append(member.name)
        if member.name in wanted:
            found[member.name.removeprefix("./")] = member  # of two with one name the last counts, as for tar
    name = next((name for name in names if name in found), None)
    if name is None:
        raise _no_member(address, names[-1], first)
    member = found[name]
    if not member.plain:
        raise UnreadableError(f"{shown(name)} is no file, or one with holes")
    if gzipped:
        _check_size(name, member.size, "gzipped")
        data = _Gzip(source).read(member.begin, member.size)
        if len(data) < member.size:
            raise MalformedError("the archive is cut: it ends within the member", where=name)
        return name, BytesSource(data, name)
    if member.begin + member.size > source.size:
        raise MalformedError("the archive is cut: it ends within the member", where=name)
    return name, SliceSource(source, member.begin, member.size, name)


def gzip_name(path: str) -> str:
    """Return the name of the one file that gzip data holds: that of the data itself, without ``.gz``."""
    return os.path.basename(path.rpartition(MARK)[2]).removesuffix(".gz")


def _from_gzip(source: Source, address: str, names: list[str]) -> tuple[str, Source]:
    """The one file that gzip data holds, where that is no tar archive."""
    name = gzip_name(address)
    if name not in names:
        raise _no_member(address, names[-1], [name])
    data = _Gzip(source, LIMITS.inflated_bytes).read(0, LIMITS.member_bytes + 1)
    if len(data) > LIMITS.member_bytes:
        raise UnreadableError(f"it has more than {human_bytes(LIMITS.member_bytes)}, which are not inflated to memory")
    return name, BytesSource(data, name)


def _check_size(name: str, size: int, how: str) -> None:
    if size > LIMITS.member_bytes:
        what = f"{shown(name)} is {how} and has {human_bytes(size)}: more than {human_bytes(LIMITS.member_bytes)}"
        raise UnreadableError(f"{what} are not inflated to memory")


def _no_member(address: str, wanted: str, names: list[str]) -> UnreadableError:
    what = f"there is no {shown(wanted)} in {shown(address)}"
    inside = [name for name in names if name.lower().endswith(_SUFFIXES)]
    if inside:
        return UnreadableError(what, next=f"ckptool inspect {quote(f'{address}{MARK}{inside[0]}')}")
    return UnreadableError(f"{what}, which holds {listed([repr(cut(name)) for name in names], most=3) or 'nothing'}")


def _unpack(file: FileSource, member: str) -> str:
    """The command that unpacks a member of a file."""
    head = file.read(0, 4)
    if head[:2] == b"PK":
        return f"unzip {quote(file.name)} {quote(member)}, then name the file inside"
    if head[:2] == _GZIP and member == gzip_name(file.name):
        return f"gunzip -c < {quote(file.name)} > {quote(member)}.unpacked, then name that"
    flags = "-xzf" if head[:2] == _GZIP else "-xf"
    return f"tar {flags} {quote(file.name)} {quote(member)}, then name the file inside"


def checkpoints_in(source: Source) -> list[Inside]:
    """The members of an archive that are called like checkpoints; as far as it can be read."""
    head = source.read(0, 1024)
    found: list[Inside] = []
    with suppress(MalformedError):
        found.extend(_listing(source, head))  # what stands before the damage is there
    return found


def _listing(source: Source, head: bytes) -> Iterable[Inside]:
    if head[:2] == b"PK":
        for record in read_archive(source).records[:_LOOKED]:
            if record.name.lower().endswith(_SUFFIXES):
                yield Inside(record.name, record.size)
    elif head[:2] == _GZIP and not is_header(_Gzip(source, _LOOK).read(0, 512)):
        return  # its one file may be anything
    elif head[:2] == _GZIP or is_header(head[:512]):
        inner = _Gzip(source, _LOOK) if head[:2] == _GZIP else source
        for number, member in enumerate(members(inner)):
            if number >= _LOOKED:
                return
            if member.plain and member.name.lower().endswith(_SUFFIXES):
                yield Inside(member.name, member.size)


class _Gzip:
    """What a gzip file inflates to, read forward only; ``most`` bounds what is inflated in bytes.

    Raises MalformedError for damage, and beyond the bound.
    """

    def __init__(self, source: Source, most: int = LIMITS.inflated_bytes) -> None:
        self.name = source.name
        self.size = most
        self._source = source
        self._read = 0
        self._inflater = zlib.decompressobj(31)
        self._rest = b""
        #: Bytes inflated and not yet taken, where the first of them stands, and how many were inflated in all.
        self._buffer = b""
        self._at = 0
        self._total = 0

    def read(self, offset: int, size: int) -> bytes:
        while self._at + len(self._buffer) <= offset:
            self._at += len(self._buffer)
            self._buffer = self._next()
            if not self._buffer:
                return b""
        parts = [self._buffer[offset - self._at :]]
        got = len(parts[0])
        while got < size:
            data = self._next()
            if not data:
                break
            parts.append(data)
            got += len(data)
        whole = b"".join(parts)
        self._at, self._buffer = offset + min(size, got), whole[size:]
        return whole[:size]

    def _next(self) -> bytes:
        """The next bytes, none at the end."""
        while True:
            if not self._rest:
                self._rest = self._source.read(self._read, _CHUNK)
                self._read += len(self._rest)
            if self._inflater.eof:
                if self._rest[:1] != _GZIP[:1]:
                    return b""  # blanks, or what gzip itself leaves alone
                self._inflater = zlib.decompressobj(31)
            elif not self._rest:
                raise MalformedError("it is cut: it ends too early", where="gzip data")
            try:
                data = self._inflater.decompress(self._rest, _CHUNK)
            except zlib.error as error:
                raise MalformedError(f"damaged: {error}", where="gzip data") from error
            self._rest = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            self._total += len(data)
            if self._total > min(self.size, max(LIMITS.member_bytes, LIMITS.inflation * self._read)):
                raise MalformedError(f"it inflates to more than {human_bytes(self._total)}", where="gzip data")
            if data:
                return data

    def close(self) -> None:
        pass
