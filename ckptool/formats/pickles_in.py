"""Every pickle in a file, wherever it hides: scanners that look at one of them only are fooled by another.

A pickle may stand bare, one behind the other, in any record of an archive, in a record that the directory does
not list, in an archive within an archive, and in the bytes that another pickle hands to ``pickle.loads``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, cast

from ..base.errors import MalformedError, PickleError, TruncatedPickleError
from ..base.limits import LIMITS
from ..checkpoint.container import FoundPickle
from ..files.sources import BytesSource, SliceSource, Source, Span
from ..files.tars import is_header, members
from ..files.zips.audit import audit, signatures
from ..files.zips.reader import LOCAL, Archive, Record, read_archive, search_begin
from ..pickles.decode import Decoded, decode
from ..pickles.nodes import ByteArray, Call, Extension, Global, Graph, Node, Style

#: Pickles within pickles are followed so deep; a longer chain is not a checkpoint.
_DEPTH: Final = 8
#: Bytes of a stretch that is only supposed to be a pickle.
_GUESS: Final = 64 << 20
_HEADER: Final = b"PK\x03\x04"
#: Bytes that are looked at beyond those of the file: what is deflated, and what begins in several places.
_SPARE: Final = 16 << 20
#: Inflating a byte costs so many times less than following it.
_INFLATING: Final = 16
#: Bytes behind the end of a tar archive that are looked at: tar fills up to 10,240 with zeros.
_TAR_REST: Final = 1 << 16


class _Spent(Exception):
    """More bytes would have to be looked at than a file of this size may cost."""


class _Budget:
    """What is left to be looked at, in bytes, and what was: (file, offset, size, how it was taken)."""

    def __init__(self, left: int) -> None:
        self.left = left
        #: The sources are kept, so that no other one gets the number of one of them.
        self.seen: dict[tuple[int, int, int, object], Source] = {}

    def take(self, size: int) -> None:
        """Raise _Spent where so many bytes are not left."""
        self.left -= size
        if self.left < 0:
            raise _Spent

    def is_new(self, span: Span, how: object) -> bool:
        """Is it a stretch that was not looked at in this way before, by whatever name?"""
        source, offset, size = span
        while isinstance(source, SliceSource):
            offset += source.offset
            source = source.source
        key = (id(source), offset, size, how)
        new = key not in self.seen
        self.seen[key] = source
        return new


class _Look(NamedTuple):
    """How deep in other files, and what is left to be looked at in all of them."""

    budget: _Budget
    depth: int = 0

    def deeper(self) -> _Look:
        return self._replace(depth=self.depth + 1)


def _limited(size: int, walk: Callable[[_Look], Iterator[FoundPickle]]) -> Iterator[FoundPickle]:
    """What is found before as many bytes were looked at as ``size`` bytes of a file may cost."""
    try:
        yield from walk(_Look(_Budget(size + _SPARE)))
    except _Spent:
        what = "files within files, or records that share their bytes, add up to many times the size of the file"
        yield FoundPickle("the rest of the file", None, what, unchecked=True)


def decode_at(source: Source, begin: int, *, where: str, most: int = _GUESS, look: _Look | None = None) -> Decoded:
    """Decode the pickle at an offset whose length nothing tells; ``end`` counts from the start of the source.

    Raises PickleError; ``most`` bounds the bytes that are read.
    """
    size = 1 << 16
    while True:
        data = source.read(begin, min(size, most))
        if look is not None:
            look.budget.take(len(data))
        try:
            found = decode(data, where=where)
            return found._replace(end=begin + found.end)
        except TruncatedPickleError:
            if begin + len(data) >= source.size or size >= most:
                raise
            size *= 4


def pickles_in(source: Source) -> Iterator[FoundPickle]:
    """Every pickle in a file of whatever kind; nothing for one that holds none."""
    return _limited(source.size, lambda look: _in_file(source, look))


def _in_file(source: Source, look: _Look) -> Iterator[FoundPickle]:
    head = source.read(0, 512)
    if head[:4] == _HEADER or b"PK\x05\x06" in _tail(source):
        try:
            archive = read_archive(source)
            look.budget.take(archive.end.size)
        except MalformedError:
            yield from _unlisted(source, signatures(source, 0, source.size), "", look)
        else:
            yield from _in_zip(archive, None, audit(archive).hidden, (), look)
    if is_header(head):
        yield from _in_tar(source, (), look)
    if head[:4] != _HEADER:
        yield from _bare(source, _behind_npy(head), "", look)


def _behind_npy(head: bytes) -> int:
    """Where the pickle of an array of objects begins in a ``.npy`` file (numpy/lib/format.py), 0 in every other."""
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        return 0
    wide = head[6] > 1
    return 8 + (4 if wide else 2) + int.from_bytes(head[8 : 12 if wide else 10], "little")


def _tail(source: Source) -> bytes:
    """The bytes in which torch looks for the end of an archive."""
    begin = search_begin(source.size)
    return source.read(begin, source.size - begin)


def bare_pickles(source: Source, begin: int, where: str) -> Iterator[FoundPickle]:
    """Pickles one behind the other from an offset on."""
    return _limited(source.size, lambda look: _bare(source, begin, where, look))


def _bare(source: Source, begin: int, where: str, look: _Look) -> Iterator[FoundPickle]:
    number = 0
    while begin < source.size and number < LIMITS.listed:
        number += 1
        name = f"{where}: " * bool(where) + f"pickle {number}"
        try:
            found = decode_at(source, begin, where=name, look=look)
        except PickleError as error:
            # Bytes that happen to begin like one name nothing.
            if any(type(node) is Global for node in error.seen):
                yield from _followed(_broken(name, error), look)
            return
        if len(found.graph.nodes) < 2 and source.read(begin, 1) != b"\x80":
            return
        yield FoundPickle(name, found.graph)
        yield from _in_graph(found.graph, name, look)
        begin = found.end


def zip_pickles(
    archive: Archive,
    main: Record | None,
    hidden: Sequence[int],
    former: Sequence[tuple[Archive, Record]] = (),
) -> Iterator[FoundPickle]:
    """Every pickle of an archive but the record ``main``; ``hidden`` are offsets of headers that are not listed,
    ``former`` records of versions before an edit in place."""
    return _limited(archive.source.size, lambda look: _in_zip(archive, main, hidden, former, look))


def _in_zip(
    archive: Archive,
    main: Record | None,
    hidden: Sequence[int],
    former: Sequence[tuple[Archive, Record]],
    look: _Look,
) -> Iterator[FoundPickle]:
    for record in archive.records:
        if record is main or not record.size:
            continue
        try:
            yield from _record(archive, record, look)
        except MalformedError as error:
            if _named(record.name):
                yield _broken(record.name, error)
    for older, record in former:
        try:
            for found in _record(older, record, look) if record.size else ():
                yield found._replace(where=f"former version: {found.where}")
        except MalformedError as error:
            if _named(record.name):
                yield _broken(record.name, error)
    yield from _unlisted(archive.source, iter(hidden), "not listed: ", look)


def _record(archive: Archive, record: Record, look: _Look) -> Iterator[FoundPickle]:
    span = archive.payload(record)
    how = (record.method, record.size, _named(record.name), _is_storage(archive, record))
    if not look.budget.is_new(span, how):
        return  # the same bytes under another name
    if record.method == 0:
        inner: Source = SliceSource(archive.source, span.offset, span.size, record.name)
    elif _named(record.name) or record.size <= _GUESS:
        look.budget.take(record.size // _INFLATING)
        inner = BytesSource(archive.read(record, LIMITS.pickle_bytes), record.name)
    else:
        return
    yield from _content(inner, record.name, _is_storage(archive, record), look)


def _content(inner: Source, name: str, storage: bool, look: _Look) -> Iterator[FoundPickle]:
    """What the content of a record holds: an archive, a pickle, or tensor bytes."""
    head = inner.read(0, 4)
    if head == _HEADER and look.depth < _DEPTH:
        for found in _in_file(inner, look.deeper()):
            yield found._replace(where=f"{name}: {found.where}")
    elif _named(name):
        yield from _whole(inner, name, look)
    elif begin := _behind_npy(inner.read(0, 12)):
        yield from _bare(inner, begin, name, look)
    elif not storage and head[:1] == b"\x80" and head[1:2] <= b"\x05":
        yield from _bare(inner, 0, name, look)
    elif not storage and is_header(inner.read(0, 512)) and look.depth < _DEPTH:
        for found in _in_tar(inner, (), look.deeper()):
            yield found._replace(where=f"{name}: {found.where}")
    elif not storage and head.startswith(_PACKED):
        yield FoundPickle(name, None, "it is compressed, and may hold anything", unchecked=True)
    elif not storage:
        # Protocol 0 has no mark: text that only happens to begin like a pickle calls nothing.
        yield from (found for found in _bare(inner, 0, name, look) if found.graph and _calls(found.graph))


#: How gzip, bzip2, xz, lzma and zstd begin.
_PACKED: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x5d\0\0", b"\x28\xb5\x2f\xfd")


def _calls(graph: Graph) -> bool:
    return any(type(node) is Call for node in graph.nodes)


def _whole(inner: Source, name: str, look: _Look) -> Iterator[FoundPickle]:
    """A record that is called a pickle: one, and possibly more behind it."""
    try:
        found = decode_at(inner, 0, where=name, most=LIMITS.pickle_bytes, look=look)
    except PickleError as error:
        yield from _followed(_broken(name, error), look)
        return
    yield FoundPickle(name, found.graph, "", inner.size - found.end)
    yield from _in_graph(found.graph, name, look)
    yield from _bare(inner, found.end, f"{name}, behind its end", look)


def _broken(where: str, error: MalformedError) -> FoundPickle:
    """A pickle that cannot be followed to its end: a reader that executes has executed it up to there."""
    seen = cast("list[Node]", error.seen) if isinstance(error, PickleError) else []
    # A view of the nodes only; there is no root.
    return FoundPickle(where, Graph(seen, 0, Style()) if seen else None, str(error))


def _followed(found: FoundPickle, look: _Look) -> Iterator[FoundPickle]:
    """A pickle, and those in the bytes that it carries."""
    yield found
    if found.graph is not None:
        yield from _in_graph(found.graph, found.where, look)


def _named(name: str) -> bool:
    """Is it a pickle by its name? torch.export calls constants that are no tensors ``data/constants/opaque_obj_0``
    (torch/export/pt2_archive/_package.py), and loads them with ``pickle``."""
    return name.lower().endswith((".pkl", ".pickle")) or name.rpartition("/")[2].startswith("opaque_obj_")


def _is_storage(archive: Archive, record: Record) -> bool:
    return record.name.startswith((f"{archive.root}/data/", "data/"))


def _unlisted(source: Source, offsets: Iterator[int], prefix: str, look: _Look) -> Iterator[FoundPickle]:
    """Records found by their local headers, their sizes unknown."""
    for number, offset in enumerate(offsets):
        if number >= LIMITS.listed:
            return
        raw = source.read(offset, LOCAL.size + 0x200)
        size = int.from_bytes(raw[26:28], "little")
        name = raw[LOCAL.size : LOCAL.size + size].decode("utf-8", "replace")
        payload = offset + LOCAL.size + size + int.from_bytes(raw[28:30], "little")
        if len(raw) < LOCAL.size or raw[8:10] not in (b"\0\0", b"\x08\0") or not _named(name):
            continue
        inner: Source = SliceSource(source, payload, source.size - payload, name)
        if raw[8] == 8:
            data = _inflated(inner)
            look.budget.take(max(len(data), inner.size) // _INFLATING)
            inner = BytesSource(data, name)
        yield from _whole(inner, prefix + name, look)


def _inflated(source: Source) -> bytes:
    """What can be inflated from the start of a source on, up to a guess."""
    inflater = zlib.decompressobj(-15)
    try:
        return inflater.decompress(source.read(0, _GUESS), _GUESS)
    except zlib.error:
        return b""


def tar_pickles(source: Source, known: Collection[int] = ()) -> Iterator[FoundPickle]:
    """The pickles in the members of a tar archive, whatever they are called, but those that begin at ``known``."""
    return _limited(source.size, lambda look: _in_tar(source, known, look))


def _in_tar(source: Source, known: Collection[int], look: _Look) -> Iterator[FoundPickle]:
    at = 0
    with suppress(MalformedError):  # what stands before the damage is there
        for member in members(source):
            at = member.end
            size = min(member.size, source.size - member.begin)
            if size <= 0 or member.begin in known:
                continue
            inner = SliceSource(source, member.begin, size, member.name)
            if inner.read(0, 4) == _HEADER and look.depth < _DEPTH:
                yield from _content(inner, member.name, False, look)
            else:
                yield from _bare(inner, 0, member.name, look)
    rest = source.read(at, _TAR_REST)
    blank = len(rest) - len(rest.lstrip(b"\0"))
    if blank < len(rest) and look.depth < _DEPTH:
        header = at + blank // 512 * 512
        at = header if is_header(source.read(header, 512)) else at + blank
        for found in _in_file(SliceSource(source, at, source.size - at, source.name), look.deeper()):
            yield found._replace(where=f"behind the archive: {found.where}")


def nested_pickles(graph: Graph, where: str) -> Iterator[FoundPickle]:
    """Pickles in the bytes that a pickle carries, as ``torch.storage._load_from_bytes`` and ``pickle.loads`` take."""
    return _limited(0, lambda look: _in_graph(graph, where, look))


def _in_graph(graph: Graph, where: str, look: _Look) -> Iterator[FoundPickle]:
    if look.depth >= _DEPTH:
        return
    name = f"{where}: bytes in it"
    for data, handed in _carried(graph):
        if not look.depth:
            look.budget.left += len(data)
        inner = BytesSource(data, name)
        if data[:4] == _HEADER:
            yield from (found._replace(where=f"{name}: {found.where}") for found in _in_file(inner, look.deeper()))
            continue
        marked = data[:1] == b"\x80" and data[1:2] <= b"\x05"
        for found in _bare(inner, 0, name, look.deeper()) if marked or handed else ():
            # Bytes that only happen to parse name nothing.
            if marked or (found.graph is not None and _names_something(found.graph)):
                yield found


def _carried(graph: Graph) -> Iterator[tuple[bytes, bool]]:
    """The bytes in a graph that may be a pickle, and whether they are handed to a call."""
    nodes = graph.nodes
    loaders = {ref for ref, node in enumerate(nodes) if type(node) is Global and "load" in node.name}
    handed = set()
    for node in nodes:
        args = nodes[node.args] if type(node) is Call else None
        if type(node) is not Call or type(args) is not tuple:
            continue
        for ref in args[:4]:
            kind = type(nodes[ref])
            # Python 2 has its bytes in str; torch's own calls are given strings all the time.
            if kind is bytes or kind is ByteArray or (kind is str and node.func in loaders):
                handed.add(ref)
    for ref, node in enumerate(nodes):
        if type(node) is bytes or type(node) is ByteArray:
            data = node if type(node) is bytes else node.data  # type: ignore[union-attr]
        elif type(node) is str and (node[:1] == "\x80" or ref in handed):
            data = node.encode("latin-1", "replace")
        else:
            continue
        if len(data) > 2:
            yield data, ref in handed


def _names_something(graph: Graph) -> bool:
    return any(type(node) is Global or type(node) is Extension for node in graph.nodes)
