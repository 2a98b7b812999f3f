"""Open members of zip, tar and gzipped tar archives by addresses such as ``outer.zip!policy.pth``.

Gzip data that is not a tar archive has one member, named like the data without ``.gz``: ``model.pth.gz!model.pth``. A
stored member is read in place. A deflated or gzipped member is inflated to memory, up to ``limits.member_bytes``; a
larger one must be unpacked first. A path that contains ``!`` and exists is an ordinary file.
"""

from __future__ import annotations

import os
import posixpath
import zlib
from collections.abc import Container, Iterator
from contextlib import closing, suppress
from itertools import islice
from shlex import quote
from typing import Any, Final, cast

from ..base import addresses, lazy
from ..base.addresses import conceal, is_remote
from ..base.errors import NO_FILE, MalformedError, RefusedError, UnreadableError, refuse_file_uri, refuse_one_slash
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.steps import STDIN, as_step, command
from ..base.suffixes import ARCHIVES, WEIGHTS
from ..base.text import human_bytes, join_limited, quoted
from .sources import BytesSource, FilePath, MemberSource, SliceSource, Source, open_error, open_source
from .tars import is_header, members
from .zips.reader import read_archive

#: Separates an archive from its member.
SEPARATOR: Final = "!"
#: The most separators to try in a path; a real address has fewer.
_MAX_SEPARATORS: Final = 64
#: The most bytes of a gzipped tar to inflate for a listing.
_PREVIEW_BYTES: Final = 64 << 20
#: The most members to list.
_PREVIEW_MEMBERS: Final = 10_000
_CHUNK: Final = 1 << 18
#: The most bytes of a JSON file that describes a model or an adapter.
_LONGEST_JSON: Final = 1 << 20
_GZIP_MAGIC: Final = b"\x1f\x8b"


class CheckpointMember(NamedTuple):
    """A member with the name of a checkpoint, and its size in bytes."""

    name: str
    size: int


def _split(path: str) -> tuple[str, str]:
    """Split an address into its file and the members after it; return ("", "") if the path is not an address.

    If several files on the disk fit, the longest name wins.
    """
    if SEPARATOR not in path:
        return "", ""
    if is_remote(path):
        return addresses.split_member(path)
    if os.path.lexists(path):
        return "", ""
    outer = next((start for start in _starts(path) if os.path.isfile(start)), "")
    return (outer, path[len(outer) + 1 :]) if outer else ("", "")


def _starts(path: str) -> Iterator[str]:
    """Yield the parts of a path before each of its separators, the longest first."""
    parts = path.split(SEPARATOR, _MAX_SEPARATORS)
    return (SEPARATOR.join(parts[:count]) for count in range(len(parts) - 1, 0, -1))


def is_address(path: str) -> bool:
    """Return whether the path names a member of an archive."""
    return bool(_split(path)[0])


def file_of(path: str) -> str:
    """Return the file on disk that a path leads to: the archive of an address, or the path itself."""
    return _split(path)[0] or path


def exists(path: str) -> bool:
    """Return whether the file or folder exists, or the archive that an address begins with.

    A remote file counts as existing: opening it says more.
    """
    return is_remote(path) or os.path.exists(file_of(path))


def beside(path: str, name: str) -> str:
    """Return the path or address of a file whose ``name`` in ``path`` is relative to the folder of ``path``."""
    if is_remote(name):
        return conceal(name)
    if is_remote(path):
        return conceal(addresses.join(addresses.parent(addresses.reveal(path)), name))
    archive, separator, member = path.rpartition(SEPARATOR) if is_address(path) else ("", "", path)
    if not separator or os.path.isabs(name):
        return os.path.join(os.path.dirname(path), name)
    return archive + separator + posixpath.normpath(posixpath.join(posixpath.dirname(member), name))


def read_bytes(path: str, limit: int) -> bytes:
    """Return the content of a small file, an archive member, or a pipe that a shell opened: ``<(command)``.

    Raises UnreadableError if it cannot be read, or has more than ``limit`` bytes. Never waits for a named pipe.
    """
    if not path.startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")):
        with closing(open_any(path)) as source:
            data = source.read(0, min(source.size, limit + 1))
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        except (OSError, ValueError) as error:
            reason, step = open_error(error, path)
            raise UnreadableError(reason, path=path, next=step) from error
    if len(data) > limit:
        raise UnreadableError(f"it has more than {human_bytes(limit)}", path=path)
    return data


def read_object(path: str, limit: int = _LONGEST_JSON) -> dict[str, Any] | None:
    """Return the JSON object in a small file; None for other contents, or if the file cannot be read."""
    try:
        return parsed_object(read_bytes(path, limit))
    except UnreadableError:
        return None


def parsed_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the object that a JSON text describes, or None for any other text."""
    import json  # few commands read a file of JSON

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def refuse_address(path: str) -> None:
    """Raise RefusedError if an output path is an archive member or a remote address, because neither can be written."""
    if is_remote(path):
        step = "write to a local path, then upload it"
        raise RefusedError("this output must be a local file", path=conceal(path), next=step)
    refuse_one_slash(path, RefusedError)
    if is_address(path):
        archive, name = file_of(path), file_name(path)
        step = f"write a file such as {quote(name)}, then add it with zip or tar"
        what = f"it is an address within {quoted(archive)}, and archives are not written into"
        raise RefusedError(what, path=path, next=step)


def file_name(path: str) -> str:
    """Return the file name after which to name an output: ``policy.pth`` for ``outer.zip!run/policy.pth``."""
    if path == STDIN:
        return "stdin.pth"
    if is_remote(path):
        return addresses.name(path)
    inner = _split(path)[1]
    return os.path.basename(inner.rpartition(SEPARATOR)[2] or inner or os.path.normpath(path))


def open_any(path: FilePath) -> Source:
    """Open a file, also a remote one, an archive member by its address, or standard input by the name ``-``.

    Raises UnreadableError if the file cannot be read, if there is no such archive or member, or if the member is too
    large to be inflated to memory. Raises MalformedError for a damaged archive.
    """
    name = os.fspath(path)
    if name == STDIN:
        from .write.spool import standard_input  # only streams need this import

        return standard_input()
    outer, rest = _split(name)
    refuse_one_slash(name, UnreadableError)
    file: Source
    if is_remote(name):
        refuse_file_uri(name)
        remote = lazy.module("remote.source")
        try:
            file = remote.open_remote(outer or name)
        except UnreadableError as error:
            if error.what != NO_FILE or not (outer and remote.is_file(name)):
                raise
            return cast(Source, remote.open_remote(name))  # its own name has the separator
    else:
        file = open_source(outer or name)
    if not outer:
        return file
    try:
        unpack = _unpack_command(file, rest.partition(SEPARATOR)[0])
        return MemberSource(_open_member(file, outer, rest), file, name, unpack)
    except BaseException as error:
        file.close()
        if isinstance(error, UnreadableError):
            error.path = name
            error.step = error.step or as_step(unpack)
        raise


def _open_member(source: Source, address: str, rest: str) -> Source:
    """Open the last of the nested members in ``rest``, archive by archive."""
    for _ in range(LIMITS.nesting):
        # Names may contain the separator, so the longest is tried first.
        names = [rest, *_starts(rest)]
        head = source.read(0, 1024)
        gzipped = head[:2] == _GZIP_MAGIC
        if head[:2] == b"PK":
            name, member = _from_zip(source, address, names)
        elif gzipped and not is_header(_GzipSource(source).read(0, 512)):
            name, member = _from_gzip(source, address, names)
        elif gzipped or is_header(head[:512]):
            name, member = _from_tar(source, gzipped, address, names)
        else:
            what = f"{quoted(address)} is not a zip or tar archive, so it has no members"
            raise UnreadableError(what, next=command("inspect", address))
        if len(name) == len(rest):
            return member
        source, rest, address = member, rest[len(name) + 1 :], address + SEPARATOR + name
    raise UnreadableError(f"more than {LIMITS.nesting} nested archives are not followed")


def _from_zip(source: Source, address: str, names: list[str]) -> tuple[str, Source]:
    archive = read_archive(source)
    name = _pick(names, archive.by_name, address, [record.name for record in archive.records])
    record = archive.by_name[name]
    if record.flags & 1:
        raise UnreadableError(f"{quoted(name)} is encrypted")
    if record.method == 0:
        span = archive.payload(record)
        return name, SliceSource(source, span.offset, span.size, name, record.crc)
    if record.method != 8:
        raise UnreadableError(f"{quoted(name)} is compressed by method {record.method}, which is not supported")
    _check_size(name, record.size, "deflated")
    data = archive.read(record, LIMITS.member_bytes)
    if record.crc and zlib.crc32(data) != record.crc:
        raise MalformedError("its checksum is not the recorded one: the archive is damaged", where=name)
    return name, BytesSource(data, name)


def _from_tar(source: Source, gzipped: bool, address: str, names: list[str]) -> tuple[str, Source]:
    plain = {name: name.removeprefix("./") for name in names}
    wanted = {*plain.values()} | {f"./{name}" for name in plain.values()}
    first: list[str] = []
    matches = {}
    for member in members(_GzipSource(source) if gzipped else source):
        if len(first) < _PREVIEW_MEMBERS:
            first.append(member.name)
        if member.name in wanted:
            matches[member.name.removeprefix("./")] = member  # of two members with one name the last counts, as in tar
    name = _pick(names, {name for name in names if plain[name] in matches}, address, first)
    member = matches[plain[name]]
    if not member.plain:
        raise UnreadableError(f"{quoted(name)} is not a regular file, or is a sparse one")
    content: Source = SliceSource(source, member.begin, member.size, name)
    if gzipped:
        _check_size(name, member.size, "gzipped")
        content = BytesSource(_GzipSource(source).read(member.begin, member.size), name)
    if content.size < member.size:
        raise MalformedError("the archive is cut: it ends within the member", where=name)
    return name, content


def gzip_name(path: str) -> str:
    """Return the name of the only member of gzip data: the name of the data without ``.gz``."""
    return os.path.basename(path.rpartition(SEPARATOR)[2]).removesuffix(".gz")


def _from_gzip(source: Source, address: str, names: list[str]) -> tuple[str, Source]:
    """Open the only member of gzip data that is not a tar archive."""
    own = [gzip_name(address)]
    name = _pick(names, own, address, own)
    data = _GzipSource(source).read(0, LIMITS.member_bytes + 1)
    if len(data) > LIMITS.member_bytes:
        raise UnreadableError(f"it has more than {human_bytes(LIMITS.member_bytes)}, which are not inflated to memory")
    return name, BytesSource(data, name)


def _check_size(name: str, size: int, how: str) -> None:
    if size > LIMITS.member_bytes:
        what = f"{quoted(name)} is {how} and has {human_bytes(size)}: more than {human_bytes(LIMITS.member_bytes)}"
        raise UnreadableError(f"{what} are not inflated to memory")


def _pick(names: list[str], members: Container[str], address: str, listed: list[str]) -> str:
    """Return the first of the names that is a member; else raise UnreadableError with suggestions from ``listed``."""
    for name in names:
        if name in members:
            return name
    from ..base.nearest import nearest

    what = f"there is no {quoted(names[-1])} in {quoted(address)}"
    last = posixpath.basename(names[-1])
    namesakes = [name for name in listed if last and posixpath.basename(name) == last]
    near = list(dict.fromkeys([*namesakes, *nearest(names[-1], listed)]))
    checkpoints = [name for name in listed if name.lower().endswith((*WEIGHTS, *ARCHIVES))]
    there = list(dict.fromkeys([*near, *checkpoints, *listed]))
    what += f", which contains {join_limited(list(map(quoted, there)), most=5) or 'nothing'}"
    meant = next((name for name in near if name in checkpoints), "") or ("" if near else next(iter(checkpoints), ""))
    raise UnreadableError(what, next=command("inspect", f"{address}{SEPARATOR}{meant}" if meant else address))


def _unpack_command(file: Source, member: str) -> str:
    """Return the command that unpacks a member of a file."""
    if file.local_file() is None:
        return "download the archive, then unpack it"
    head = file.read(0, 4)
    if head[:2] == b"PK":
        return f"unzip {quote(file.name)} {quote(member)}, then name the file inside"
    if head[:2] == _GZIP_MAGIC and member == gzip_name(file.name):
        return f"gunzip -c < {quote(file.name)} > {quote(member)}.unpacked, then name that"
    flags = "-xzf" if head[:2] == _GZIP_MAGIC else "-xf"
    return f"tar {flags} {quote(file.name)} {quote(member)}, then name the file inside"


def checkpoints_in(source: Source) -> list[CheckpointMember]:
    """Return the members of an archive with checkpoint names; of a damaged archive, the members before the damage."""
    matches: list[CheckpointMember] = []
    with suppress(MalformedError):  # keep the members that were found before the error
        files = islice(_files(source), _PREVIEW_MEMBERS)
        matches.extend(CheckpointMember(*file) for file in files if file[0].lower().endswith((*WEIGHTS, *ARCHIVES)))
    return matches


def _files(source: Source) -> Iterator[tuple[str, int]]:
    """Yield (name, size) of the members of an archive; ("", 0) for a member that is not a file."""
    head = source.read(0, 1024)
    if head[:2] == b"PK":
        yield from ((record.name, record.size) for record in read_archive(source).records)
        return
    gzipped = head[:2] == _GZIP_MAGIC
    # Other gzip data is skipped, because its only member may be anything.
    if is_header(_GzipSource(source, _PREVIEW_BYTES).read(0, 512) if gzipped else head[:512]):
        for member in members(_GzipSource(source, _PREVIEW_BYTES) if gzipped else source):
            yield (member.name, member.size) if member.plain else ("", 0)


class _GzipSource(Source):
    """The inflated content of a gzip file, read forward only; at most ``limit`` bytes are inflated.

    Raises MalformedError for damage, and beyond the limit.
    """

    def __init__(self, source: Source, limit: int = LIMITS.inflated_bytes) -> None:
        self.name = source.name
        self.size = limit
        self._chunks = self._inflated(source)
        #: Inflated bytes not yet consumed, and their offset.
        self._buffer, self._at = b"", 0

    def read(self, offset: int, size: int) -> bytes:
        while self._at + len(self._buffer) <= offset:
            self._at += len(self._buffer)
            self._buffer = next(self._chunks, b"")
            if not self._buffer:
                return b""
        parts = [self._buffer[offset - self._at :]]
        got = len(parts[0])
        while got < size and (data := next(self._chunks, b"")):
            parts.append(data)
            got += len(data)
        data = b"".join(parts)
        self._at, self._buffer = offset + min(size, got), data[size:]
        return data[:size]

    def _inflated(self, source: Source) -> Iterator[bytes]:
        """Yield the inflated bytes in chunks."""
        inflater, rest = zlib.decompressobj(31), b""
        read = total = 0
        while True:
            if not rest:
                rest = source.read(read, _CHUNK)
                read += len(rest)
            if inflater.eof:
                if rest[:1] != _GZIP_MAGIC[:1]:
                    return  # padding, or trailing bytes that gzip also ignores
                inflater = zlib.decompressobj(31)
            elif not rest:
                raise MalformedError("it is cut: it ends too early", where="gzip data")
            try:
                data = inflater.decompress(rest, _CHUNK)
            except zlib.error as error:
                raise MalformedError(f"damaged: {error}", where="gzip data") from error
            rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            total += len(data)
            if total > min(self.size, max(LIMITS.member_bytes, LIMITS.inflation * read)):
                raise MalformedError(f"it inflates to more than {human_bytes(total)}", where="gzip data")
            if data:
                yield data
