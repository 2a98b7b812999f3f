"""Search for every pickle in a file: a scanner that reads only one of them is fooled by another.

Pickles may be bare, one after the other, in any record of an archive, in a record that the directory does not list, in
an archive within an archive, and in the bytes that another pickle hands to ``pickle.loads``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Final, NamedTuple, cast

from ..base.errors import MalformedError, PickleError, TruncatedPickleError
from ..base.limits import LIMITS
from ..checkpoint.container import FoundPickle
from ..files.sources import BytesSource, SliceSource, Source, Span
from ..files.tars import is_header, members
from ..files.zips.audit import audit, find_signatures
from ..files.zips.reader import LOCAL, Archive, Record, end_search_start, read_archive
from ..pickles.decode import Decoded, decode
from ..pickles.nodes import ByteArray, Call, Extension, Global, Graph, Node, Style

#: Depth to which pickles within pickles are followed; a longer chain is not a checkpoint.
_MAX_DEPTH: Final = 8
#: The most bytes that are decoded on the mere chance of a pickle.
_MAX_GUESS: Final = 64 << 20
_ZIP: Final = b"PK\x03\x04"
#: Bytes that may be examined beyond those of the file: deflated ones, and ones examined from several offsets.
_SPARE: Final = 16 << 20
#: The cost of decoding a byte in relation to that of inflating it.
_INFLATE_RATIO: Final = 16
#: Bytes after the end of a tar archive that are examined: tar pads up to 10,240 with zeros.
_TAR_REST: Final = 1 << 16
#: The first bytes of gzip, bzip2, xz, lzma and zstd data.
_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x5d\0\0", b"\x28\xb5\x2f\xfd")


class _BudgetError(Exception):
    """More bytes would have to be examined than a file of this size may cost."""


class _Budget:
    """The bytes that may still be examined, and the spans that were: (file, offset, size, how it was read)."""

    def __init__(self, left: int) -> None:
        self.left = left
        #: The sources are kept alive, so that none of their ids is used again.
        self.seen: dict[tuple[int, int, int, object], Source] = {}

    def take(self, size: int) -> None:
        """Raise _BudgetError where fewer bytes are left."""
        self.left -= size
        if self.left < 0:
            raise _BudgetError

    def is_new(self, span: Span, how: object) -> bool:
        """Return whether a span was not yet examined in this way, under whatever name."""
        source, offset, size = span
        while isinstance(source, SliceSource):
            offset += source.offset
            source = source.source
        key = (id(source), offset, size, how)
        new = key not in self.seen
        self.seen[key] = source
        return new


class _Search(NamedTuple):
    """The depth within other files, and the budget that all of them share."""

    budget: _Budget
    depth: int = 0

    def deeper(self) -> _Search:
        return self._replace(depth=self.depth + 1)


def _limited(size: int, walk: Callable[[_Search], Iterator[FoundPickle]]) -> Iterator[FoundPickle]:
    """Yield what is found within the budget of a file of ``size`` bytes."""
    try:
        yield from walk(_Search(_Budget(size + _SPARE)))
    except _BudgetError:
        what = "files within files, or records that share their bytes, add up to many times the size of the file"
        yield FoundPickle("the rest of the file", None, what, unchecked=True)


def _decode_at(
    source: Source, begin: int, search: _Search, *, where: str, max_bytes: int = _MAX_GUESS
) -> tuple[Graph, int]:
    """Decode the pickle at an offset, whose length is unknown: (graph, offset after it). Raises PickleError."""
    size = 1 << 16
    while True:
        data = source.read(begin, min(size, max_bytes))
        search.budget.take(len(data))
        try:
            decoded: Decoded = decode(data, where=where)
            return decoded.graph, begin + decoded.end
        except TruncatedPickleError:
            if begin + len(data) >= source.size or size >= max_bytes:
                raise
            size *= 4


def find_pickles(source: Source) -> Iterator[FoundPickle]:
    """Yield every pickle in a file of any kind."""
    return _limited(source.size, lambda search: _in_file(source, search))


def _in_file(source: Source, search: _Search) -> Iterator[FoundPickle]:
    head = source.read(0, 512)
    # As torch does, look for the end of an archive.
    tail_begin = end_search_start(source.size)
    if head[:4] == _ZIP or b"PK\x05\x06" in source.read(tail_begin, source.size - tail_begin):
        try:
            archive = read_archive(source)
            search.budget.take(archive.end.size)
        except MalformedError:
            yield from _in_unlisted_records(source, find_signatures(source, 0, source.size), "", search)
        else:
            yield from _in_zip(archive, None, audit(archive).hidden, (), search)
    if is_header(head):
        yield from _in_tar(source, (), search)
    if head[:4] != _ZIP:
        yield from _bare(source, _npy_header_size(head), "", search)


def _npy_header_size(head: bytes) -> int:
    """Return where the pickle of an object array begins in a ``.npy`` file (numpy/lib/format.py), 0 in any other."""
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        return 0
    wide = head[6] > 1
    return 8 + (4 if wide else 2) + int.from_bytes(head[8 : 12 if wide else 10], "little")


def bare_pickles(source: Source, begin: int, where: str) -> Iterator[FoundPickle]:
    """Yield the pickles one after the other from an offset on."""
    return _limited(source.size, lambda search: _bare(source, begin, where, search))


def _bare(source: Source, begin: int, where: str, search: _Search) -> Iterator[FoundPickle]:
    number = 0
    while begin < source.size and number < LIMITS.listed:
        number += 1
        name = f"{where}: " * bool(where) + f"pickle {number}"
        try:
            graph, end = _decode_at(source, begin, search, where=name)
        except PickleError as error:
            # Bytes that happen to begin like a pickle name no globals.
            if any(type(node) is Global for node in error.seen):
                yield from _with_nested(_broken(name, error), search)
            return
        if len(graph.nodes) < 2 and source.read(begin, 1) != b"\x80":
            return
        yield from _with_nested(FoundPickle(name, graph), search)
        begin = end


def zip_pickles(
    archive: Archive, main: Record | None, hidden: Sequence[int], former: Sequence[tuple[Archive, Record]] = ()
) -> Iterator[FoundPickle]:
    """Yield every pickle of an archive except the record ``main``.

    ``hidden`` are the offsets of headers that are not listed, ``former`` records of versions before an edit in place.
    """
    return _limited(archive.source.size, lambda search: _in_zip(archive, main, hidden, former, search))


def _in_zip(
    archive: Archive,
    main: Record | None,
    hidden: Sequence[int],
    former: Sequence[tuple[Archive, Record]],
    search: _Search,
) -> Iterator[FoundPickle]:
    current = ((archive, record, "") for record in archive.records if record is not main)
    older = ((version, record, "former version: ") for version, record in former)
    for version, record, prefix in chain(current, older):
        try:
            for pickle in _in_record(version, record, search) if record.size else ():
                yield pickle._replace(where=prefix + pickle.where) if prefix else pickle
        except MalformedError as error:
            if _is_pickle_name(record.name):
                yield _broken(record.name, error)
    yield from _in_unlisted_records(archive.source, iter(hidden), "not listed: ", search)


def _in_record(archive: Archive, record: Record, search: _Search) -> Iterator[FoundPickle]:
    span = archive.payload(record)
    named = _is_pickle_name(record.name)
    storage = record.name.startswith((f"{archive.root}/data/", "data/"))
    if not search.budget.is_new(span, (record.method, record.size, named, storage)):
        return  # the same bytes under another name
    if record.method == 0:
        content: Source = SliceSource(archive.source, span.offset, span.size, record.name)
    elif named or record.size <= _MAX_GUESS:
        search.budget.take(record.size // _INFLATE_RATIO)
        content = BytesSource(archive.read(record, LIMITS.pickle_bytes), record.name)
    else:
        return
    yield from _in_content(content, record.name, storage, search)


def _in_content(content: Source, name: str, storage: bool, search: _Search) -> Iterator[FoundPickle]:
    """Yield the pickles in the content of a record: an archive, a pickle, or tensor bytes."""
    head = content.read(0, 4)
    nested: Iterator[FoundPickle] = iter(())
    if head == _ZIP and search.depth < _MAX_DEPTH:
        nested = _in_file(content, search.deeper())
    elif _is_pickle_name(name):
        yield from _whole_pickle(content, name, search)
    elif begin := _npy_header_size(content.read(0, 12)):
        yield from _bare(content, begin, name, search)
    elif storage:
        return
    elif head[:1] == b"\x80" and head[1:2] <= b"\x05":
        yield from _bare(content, 0, name, search)
    elif is_header(content.read(0, 512)) and search.depth < _MAX_DEPTH:
        nested = _in_tar(content, (), search.deeper())
    elif head.startswith(_COMPRESSED):
        yield FoundPickle(name, None, "it is compressed, and may hold anything", unchecked=True)
    else:
        # Protocol 0 has no magic byte: text that only happens to begin like a pickle calls nothing.
        for pickle in _bare(content, 0, name, search):
            if pickle.graph and any(type(node) is Call for node in pickle.graph.nodes):
                yield pickle
    for pickle in nested:
        yield pickle._replace(where=f"{name}: {pickle.where}")


def _whole_pickle(content: Source, name: str, search: _Search) -> Iterator[FoundPickle]:
    """Yield a record that is named like a pickle, and possibly more pickles after it."""
    try:
        graph, end = _decode_at(content, 0, search, where=name, max_bytes=LIMITS.pickle_bytes)
    except PickleError as error:
        yield from _with_nested(_broken(name, error), search)
        return
    yield from _with_nested(FoundPickle(name, graph, "", content.size - end), search)
    yield from _bare(content, end, f"{name}, after its end", search)


def _broken(where: str, error: MalformedError) -> FoundPickle:
    """Return a pickle that cannot be decoded to its end: a reader that executes it has executed it up to there."""
    seen = cast("list[Node]", error.seen) if isinstance(error, PickleError) else []
    # A view of the nodes only; there is no root.
    return FoundPickle(where, Graph(seen, 0, Style()) if seen else None, str(error))


def _with_nested(pickle: FoundPickle, search: _Search) -> Iterator[FoundPickle]:
    """Yield a pickle, and those in the bytes that it carries."""
    yield pickle
    if pickle.graph is not None:
        yield from _in_graph(pickle.graph, pickle.where, search)


def _is_pickle_name(name: str) -> bool:
    """Return whether a record is a pickle by its name.

    torch.export calls constants that are not tensors ``data/constants/opaque_obj_0`` and loads them with ``pickle``
    (torch/export/pt2_archive/_package.py).
    """
    return name.lower().endswith((".pkl", ".pickle")) or name.rpartition("/")[2].startswith("opaque_obj_")


def _in_unlisted_records(source: Source, offsets: Iterator[int], prefix: str, search: _Search) -> Iterator[FoundPickle]:
    """Yield the pickles in records that are found by their local headers, their sizes unknown."""
    for offset in islice(offsets, LIMITS.listed):
        raw = source.read(offset, LOCAL.size + 0x200)
        size = int.from_bytes(raw[26:28], "little")
        name = raw[LOCAL.size : LOCAL.size + size].decode("utf-8", "replace")
        payload = offset + LOCAL.size + size + int.from_bytes(raw[28:30], "little")
        if len(raw) < LOCAL.size or raw[8:10] not in (b"\0\0", b"\x08\0") or not _is_pickle_name(name):
            continue
        content: Source = SliceSource(source, payload, source.size - payload, name)
        if raw[8] == 8:
            try:
                data = zlib.decompressobj(-15).decompress(content.read(0, _MAX_GUESS), _MAX_GUESS)
            except zlib.error:
                data = b""
            search.budget.take(max(len(data), content.size) // _INFLATE_RATIO)
            content = BytesSource(data, name)
        yield from _whole_pickle(content, prefix + name, search)


def tar_pickles(source: Source, known: Collection[int] = ()) -> Iterator[FoundPickle]:
    """Yield the pickles in the members of a tar archive, whatever their names, except those that begin at ``known``."""
    return _limited(source.size, lambda search: _in_tar(source, known, search))


def _in_tar(source: Source, known: Collection[int], search: _Search) -> Iterator[FoundPickle]:
    at = 0
    with suppress(MalformedError):  # what precedes the damage is there
        for member in members(source):
            at = member.end
            size = min(member.size, source.size - member.begin)
            if size <= 0 or member.begin in known:
                continue
            content = SliceSource(source, member.begin, size, member.name)
            if content.read(0, 4) == _ZIP and search.depth < _MAX_DEPTH:
                yield from _in_content(content, member.name, False, search)
            else:
                yield from _bare(content, 0, member.name, search)
    rest = source.read(at, _TAR_REST)
    blank = len(rest) - len(rest.lstrip(b"\0"))
    if blank < len(rest) and search.depth < _MAX_DEPTH:
        header = at + blank // 512 * 512
        at = header if is_header(source.read(header, 512)) else at + blank
        for pickle in _in_file(SliceSource(source, at, source.size - at, source.name), search.deeper()):
            yield pickle._replace(where=f"after the archive: {pickle.where}")


def nested_pickles(graph: Graph, where: str) -> Iterator[FoundPickle]:
    """Yield the pickles in the bytes that a pickle hands to ``torch.storage._load_from_bytes`` or ``pickle.loads``."""
    return _limited(0, lambda search: _in_graph(graph, where, search))


def _in_graph(graph: Graph, where: str, search: _Search) -> Iterator[FoundPickle]:
    if search.depth >= _MAX_DEPTH:
        return
    name = f"{where}: bytes in it"
    for data, is_argument in _byte_strings(graph):
        if not search.depth:
            search.budget.left += len(data)
        content = BytesSource(data, name)
        if data[:4] == _ZIP:
            for pickle in _in_file(content, search.deeper()):
                yield pickle._replace(where=f"{name}: {pickle.where}")
            continue
        binary = data[:1] == b"\x80" and data[1:2] <= b"\x05"
        for pickle in _bare(content, 0, name, search.deeper()) if binary or is_argument else ():
            # Bytes that only happen to parse name no globals.
            if binary or (pickle.graph and any(type(node) in (Global, Extension) for node in pickle.graph.nodes)):
                yield pickle


def _byte_strings(graph: Graph) -> Iterator[tuple[bytes, bool]]:
    """Yield the bytes in a graph that may be a pickle, and whether they are arguments of a call."""
    nodes = graph.nodes
    loaders = {ref for ref, node in enumerate(nodes) if type(node) is Global and "load" in node.name}
    arguments = set()
    for node in nodes:
        args = nodes[node.args] if type(node) is Call else None
        if type(node) is not Call or type(args) is not tuple:
            continue
        for ref in args[:4]:
            kind = type(nodes[ref])
            # Python 2 has its bytes in str; torch's own calls take strings all the time.
            if kind is bytes or kind is ByteArray or (kind is str and node.func in loaders):
                arguments.add(ref)
    for ref, node in enumerate(nodes):
        if type(node) is bytes:
            data = node
        elif type(node) is ByteArray:
            data = node.data
        elif type(node) is str and (node[:1] == "\x80" or ref in arguments):
            data = node.encode("latin-1", "replace")
        else:
            continue
        if len(data) > 2:
            yield data, ref in arguments
