"""Search a file for every pickle: a scanner that reads only one pickle misses the others.

Pickles may stand alone or in sequence, in any record of an archive, in a record that the directory does not list, in a
nested archive, in compressed data, in an array of objects, and in bytes that another pickle passes to ``pickle.loads``.
Content that cannot be examined is reported as unchecked, so nothing is skipped silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, cast

from ...base.errors import CkptoolError, MalformedError, PickleError, PickleLimitError, UnreadableError, of_file
from ...base.findings import PROGRAM
from ...base.limits import LIMITS
from ...base.text import pluralize
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.container import FoundPickle
from ...files.compressed import Compression, compression_of, inflate, inflate_start
from ...files.sources import BytesSource, SliceSource, Source
from ...files.tars import is_header, members
from ...files.zips.audit import audit
from ...files.zips.reader import LOCAL, Archive, Record, end_search_start, read_archive
from ...pickles.nodes import Call, Extension, Global, Graph, Node
from ...safety.calls import STANDARD_LIBRARY
from .. import FORMATS, carried_pickles, read_container
from .budget import MAX_GUESS, Search, broken, decode_at, limited, outer_search, unchecked
from .graph_parts import NPY, ZIP, decoded, is_binary_pickle, may_begin_pickle, values
from .inert import active_parts, code_kind, encoding_of, hidden_kind, inert_kind, is_plain_record
from .numpy_arrays import npy_data

if TYPE_CHECKING:
    from ...safety.configuration import ActivePart

#: The most levels of nested files and pickles that are followed; a longer chain is not a checkpoint.
_MAX_DEPTH: Final = 8
#: Inflating this many bytes costs as much as decoding one.
_INFLATE_RATIO: Final = 16
#: Bytes that begin like compressed ones by chance inflate to less.
_INFLATES: Final = 1 << 20
#: Modules that a text would hardly name if it only happens to begin like a pickle.
_KNOWN: Final = STANDARD_LIBRARY | {"torch", "numpy", "__builtin__"}


def _in_checkpoint(content: Source, head: bytes, search: Search) -> list[FoundPickle] | None:
    """Return the pickles of a checkpoint nested in another file, and its ambiguities; None if it is not a
    checkpoint."""
    if not any(known.sniff(head, content) for known in FORMATS):
        return None
    token = outer_search.set(search.deeper()._replace(strict=False))
    try:
        container = read_container(content)
        found = [*container.pickles(), *carried_pickles(Checkpoint.of(content.name, content, container))]
    except CkptoolError as error:
        of_file(error)
        return None
    finally:
        outer_search.reset(token)
    return found + [
        unchecked(problem.where, problem.message)
        for problem in container.problems
        if problem.ambiguous or problem.check == "program"
    ]


def find_pickles(source: Source, *, strict: bool = True) -> Iterator[FoundPickle]:
    """Yield every pickle in a file of any kind, active configuration or code, and notes on unchecked content. Yields
    nothing for a whole file of unrecognised bytes that no unpickler accepts. ``strict``: report members of unrecognised
    type as unchecked."""
    return limited(source.size, lambda search: _in_content(source, "", search), strict=strict)


def active_pickles(findings: Iterable[ActivePart], where: str) -> Iterator[FoundPickle]:
    """Yield a result for each finding in a text: configuration that runs code, or may."""
    for finding in findings:
        program = finding.verdict == PROGRAM
        yield FoundPickle(where, None, program=finding.text) if program else FoundPickle(where, None, note=finding.text)


def is_followed(source: Source) -> bool:
    """Return whether ``find_pickles`` can look inside a file, or reports why not: archives, compressed data, arrays."""
    head = source.read(0, 512)
    compression = compression_of(head)
    known = head[:4] == ZIP or head[:6] == NPY or is_header(head)
    return known or (compression is not None and not compression.doubtful) or _is_zip(source)


def _is_zip(source: Source) -> bool:
    try:
        return _ends_like_zip(source) and bool(read_archive(source).records)
    except MalformedError:
        return False


def _ends_like_zip(source: Source) -> bool:
    begin = end_search_start(source.size)
    return b"PK\x05\x06" in source.read(begin, source.size - begin)


def _in_content(content: Source, name: str, search: Search) -> Iterator[FoundPickle]:
    """Yield the pickles in bytes that may be of several kinds at once."""
    if search.depth > _MAX_DEPTH:
        yield unchecked(name, f"files within files more than {_MAX_DEPTH} deep are not followed")
        return
    head = content.read(0, 512)
    zipped, arrays = head[:4] == ZIP, head[:6] == NPY
    active = [] if search.value else active_parts(name or content.name, head, content)
    if not (active or head) or (not search.value and is_plain_record(head, content) and not _is_pickle_name(name)):
        return
    yield from active_pickles(active, name)
    if not search.value and encoding_of(head):
        search.budget.take(content.size // _INFLATE_RATIO)
        # Some words decode to bytes that begin like a pickle. Only one with a call counts.
        yield from (p for p in _in_encoded(content, name, search) if active or (p.graph and p.graph.has(Call)))
    if search.strict and (hidden := hidden_kind(head, content)):
        yield unchecked(name, hidden)
    if search.strict and name and (found := _in_checkpoint(content, content.read(0, 1024), search)) is not None:
        yield from _within(name, iter(found))
        return
    compression = compression_of(head)
    tar = is_header(head)
    # Like torch, look for a zip directory at the end. In a tar archive it may belong to the last member, in a pickle to
    # bytes that it carries: both are examined separately.
    if zipped or (not tar and _ends_like_zip(content) and (search.strict or not _is_one_pickle(content, search))):
        zipped = zipped or _is_zip(content)
        yield from _within(name, _in_zip_file(content, search.deeper()))
    if tar:
        yield from _within(name, _in_tar(content, (), search.deeper()))
    if compression is not None:
        yield from _within(name, _in_compressed(content, compression, search.deeper()))
    if head[:4] == ZIP:
        return
    if _is_pickle_name(name):
        yield from _within("", _whole_pickle(content, name, search))
        return
    pickles = _in_arrays(content, name, search) if arrays else _bare(content, 0, name, search)
    pickles = _within("", pickles)
    if search.value:
        for pickle in pickles:
            # Bytes that parse by chance name no globals.
            if is_binary_pickle(head) or pickle.graph is None or pickle.graph.has(Global, Extension):
                yield pickle
        yield from _in_encoded(content, name, search)
        return
    first = next(pickles, None)
    if first is not None:
        yield first
        yield from pickles
    elif search.strict and name and not (zipped or tar or arrays or (compression and not compression.doubtful)):
        yield from () if active or inert_kind(head) else [unchecked(name, "unrecognised type")]


def _is_one_pickle(content: Source, search: Search) -> bool:
    try:
        return decode_at(content, 0, search.budget, where="pickle")[1] == content.size
    except PickleError:
        return False


def value_pickles(data: bytes, where: str) -> Iterator[FoundPickle]:
    """Yield the pickles in a value of a checkpoint, which may be compressed, or encoded as hex or base64."""
    return limited(len(data), lambda search: _in_value(data, where, search))


def _in_value(data: bytes, name: str, search: Search) -> Iterator[FoundPickle]:
    inner = search.deeper()._replace(strict=False, value=True)
    yield from _within(name, _in_content(BytesSource(data, name), "", inner))


def _in_encoded(content: Source, name: str, search: Search) -> Iterator[FoundPickle]:
    for part in decoded(content.read(0, content.size)):
        search.budget.take(len(part))
        yield from _in_value(part, f"{name}: decoded" if name else "decoded", search)


def _within(name: str, pickles: Iterator[FoundPickle]) -> Iterator[FoundPickle]:
    """Prefix pickles with the name of their container. An error of the file ends the search of this container."""
    try:
        for pickle in pickles:
            yield pickle._replace(where=f"{name}: {pickle.where}" if pickle.where else name) if name else pickle
    except UnreadableError as error:
        yield unchecked(name or "the rest of the file", of_file(error).what)


def _in_zip_file(content: Source, search: Search) -> Iterator[FoundPickle]:
    try:
        archive = read_archive(content)
        search.budget.take(archive.end.size)
        audited = audit(archive)
    except MalformedError as error:
        if content.read(0, 4) == ZIP:
            yield unchecked("the archive", error.what)
        return
    for oddity in (*archive.oddities, *audited.oddities) if search.strict else ():
        if oddity.ambiguous:
            yield unchecked("the archive", oddity.message)
    yield from _in_zip(archive, archive.records, search, audited.hidden)


def _in_compressed(content: Source, compression: Compression, search: Search) -> Iterator[FoundPickle]:
    """Yield the pickles in compressed data, such as joblib and pandas write."""
    why = ""
    limit = min(LIMITS.member_bytes, max(MAX_GUESS, LIMITS.inflation * content.size))
    try:
        data = inflate(content, compression, min(limit, search.budget.left * _INFLATE_RATIO))
    except UnreadableError as error:
        # A streaming reader reaches the pickles that precede the damage or the limit.
        why, data = error.what, inflate_start(content, compression)
    search.budget.take(len(data) // _INFLATE_RATIO)
    doubtful = why and compression.doubtful and len(data) < _INFLATES
    inner = search._replace(strict=False) if doubtful else search
    pickles = _in_content(BytesSource(data, content.name), "inflated", inner)
    first = next(pickles, None)
    if why and (first is not None or not doubtful):
        yield unchecked("the file", why)
    if first is not None:
        yield first
        yield from pickles


def _in_arrays(content: Source, name: str, search: Search) -> Iterator[FoundPickle]:
    at = 0
    while (array := npy_data(content, at)) is not None:
        search.budget.take(0)
        if array.pickled:
            pickles = _bare(content, array.begin, name, search)
            first = next(pickles, None)
            if first is None and search.strict:
                yield unchecked(name or "the array", "it is of a type that ckptool does not know")
            elif first is not None:
                yield first
                yield from pickles
            return
        at = array.begin + array.nbytes
        head = content.read(array.begin, min(array.nbytes, 512))
        if may_begin_pickle(head) or compression_of(head):
            yield from _in_value(content.read(array.begin, min(array.nbytes, LIMITS.member_bytes)), name, search)
    if at < content.size:
        yield from _bare(content, at, name, search)
        yield from _rest(content, at, name, search)


def _rest(content: Source, at: int, name: str, search: Search) -> Iterator[FoundPickle]:
    """Yield a note if nonzero bytes follow the last pickle or array."""
    if search.strict and at < content.size and content.read(at, MAX_GUESS).strip(b"\0"):
        yield unchecked(name or "the rest of the file", f"{pluralize(content.size - at, 'byte')} of unrecognised data")


def bare_pickles(source: Source, begin: int, where: str) -> Iterator[FoundPickle]:
    """Yield consecutive pickles, from an offset on."""
    return limited(source.size, lambda search: _bare(source, begin, where, search))


def _bare(source: Source, begin: int, where: str, search: Search) -> Iterator[FoundPickle]:
    """Yield consecutive pickles, from an offset on; nothing for bytes that fail to decode before they run anything.
    Text that happens to begin like a pickle may name globals, but calls nothing."""
    text = bool(inert_kind(source.read(begin, 512)))
    number, start = 0, begin
    certain = source.read(begin, 1) == b"\x80"
    while begin < source.size:
        number += 1
        name = f"{where}: " * bool(where) + f"pickle {number}"
        if number > LIMITS.listed:
            yield unchecked(name, "more pickles follow than are followed")
            return
        nested: list[FoundPickle] = []
        try:
            graph, end = decode_at(source, begin, search.budget, where=name, nested=nested)
        except PickleError as error:
            yield from nested
            yield from _failed(source, begin, name, error, text, search)
            if start or (certain and number > 1):
                yield from _rest(source, begin, where, search._replace(strict=not search.value))
            return
        certain = certain or len(graph.nodes) > 1 or (_imports(graph.nodes) if text else graph.has(Global, Extension))
        if certain:  # bytes such as "N." count only behind better pickles
            yield from _with_nested(FoundPickle(name, graph), search)
            yield from nested
        begin = end
    if certain and number > 1:
        yield from _rest(source, begin, where, search)


def _failed(
    source: Source, begin: int, name: str, error: PickleError, text: bool, search: Search
) -> Iterator[FoundPickle]:
    """Yield a pickle that cannot be decoded, if an unpickler may run part of it before it fails."""
    seen = cast("list[Node]", error.seen)
    evidence = (Call,) if text else (Global, Extension) if source.read(begin, 1) == b"\x80" else (Global,)
    if any(type(node) in evidence for node in seen) or (text and _imports(seen)):
        yield from _with_nested(broken(name, error), search)
        return
    if isinstance(error, PickleLimitError):
        yield unchecked(name, error.what)
        return
    from ...pickles.lexer import CALLS, ENDS, NAMES, TOO_LONG, outcome  # only for broken pickles

    # An unpickler may be less strict than this decoder, and continue.
    data = source.read(begin, MAX_GUESS)
    search.budget.take(len(data) // _INFLATE_RATIO)
    # A list of words may begin like a pickle, but names modules that do not exist.
    may = outcome(data, modules=_KNOWN if text else None)
    if may in (NAMES, CALLS, TOO_LONG) or (may == ENDS and begin + len(data) < source.size):
        yield broken(name, error)


def _imports(nodes: Sequence[Node]) -> bool:
    """Return whether text imports a module that is likely installed: importing runs its code."""
    return any(node.module.partition(".")[0] in _KNOWN for node in nodes if type(node) is Global)


def zip_pickles(
    archive: Archive,
    main: Record | None = None,
    hidden: Sequence[int] = (),
    former: Sequence[tuple[Archive, Record]] = (),
    *,
    storages: Collection[str] | None = None,
    records: Sequence[Record] | None = None,
) -> Iterator[FoundPickle]:
    """Yield every pickle of an archive except the record ``main``. ``hidden`` are the offsets of unlisted local
    headers; ``former`` are records of versions before in-place edits. ``storages`` are the record names of tensors, by
    default everything in the folder ``data``. ``records`` limits the search, by default to all records."""
    others = [record for record in (archive.records if records is None else records) if record is not main]
    return limited(archive.source.size, lambda search: _in_zip(archive, others, search, hidden, former, storages))


def _in_zip(
    archive: Archive,
    records: Sequence[Record],
    search: Search,
    hidden: Sequence[int],
    former: Sequence[tuple[Archive, Record]] = (),
    storages: Collection[str] | None = None,
) -> Iterator[FoundPickle]:
    current = ((archive, record, "") for record in records)
    older = ((version, record, "former version: ") for version, record in former)
    for version, record, prefix in chain(current, older):
        if storages is None:
            storage = record.name.startswith((f"{version.root}/data/", "data/")) and not search.strict
            storage = storage and not (search.value or _is_pickle_name(record.name))
        else:
            storage = record.name in storages
        if search.depth <= _MAX_DEPTH and _holds_nothing(version, record, storage):
            continue
        # What a former version held is only searched for pickles: no program reads it.
        inner = search._replace(strict=search.strict or not (storage or prefix))
        for pickle in _in_record(version, record, storage, inner):
            yield pickle._replace(where=prefix + pickle.where) if prefix else pickle
    for offset in hidden:
        search.budget.take(0)
        raw = archive.source.read(offset, LOCAL.size + 0x200)
        name = raw[LOCAL.size : LOCAL.size + int.from_bytes(raw[26:28], "little")].decode("utf-8", "replace")
        if search.strict or _is_pickle_name(name):
            yield unchecked(f"not listed: {name}", "a record that the directory of the archive does not list")
            return


def _holds_nothing(archive: Archive, record: Record, storage: bool) -> bool:
    """Return whether a record is quickly seen to hold no pickle: nearly all have numbers, or a word for torch."""
    if not (record.size or record.compressed):
        return True
    if record.method or record.flags & 1:
        return False
    if not storage and (record.compressed > 64 or _is_pickle_name(record.name) or code_kind(record.name, b"")):
        return False
    try:
        span = archive.payload(record)
    except MalformedError:
        return False
    head = span.source.read(span.offset, min(64, span.size))
    return head[:4] != ZIP and head[:6] != NPY if storage else is_plain_record(head, BytesSource(head))


def _in_record(archive: Archive, record: Record, storage: bool, search: Search) -> Iterator[FoundPickle]:
    is_pickle = _is_pickle_name(record.name)
    try:
        span = archive.payload(record)
        content: Source = SliceSource(archive.source, span.offset, span.size, record.name)
        if record.flags & 1:
            yield unchecked(record.name, "it is encrypted")
            return
        if record.method:
            search.budget.take(record.size // _INFLATE_RATIO)
            data = archive.read(record, LIMITS.pickle_bytes if is_pickle else LIMITS.member_bytes)
            content = BytesSource(data, record.name)
    except MalformedError as error:
        yield broken(record.name, error) if is_pickle else unchecked(record.name, error.what)
        return
    head = content.read(0, 6) if storage else b""
    if not storage or head[:4] == ZIP or head == NPY:  # other storages are searched as values of their tensors
        yield from _in_content(content, record.name, search._replace(value=search.value or storage))


def _whole_pickle(content: Source, name: str, search: Search) -> Iterator[FoundPickle]:
    """Yield a record with a pickle's name, and any pickles after its end."""
    try:
        graph, end = decode_at(content, 0, search.budget, where=name, max_bytes=LIMITS.pickle_bytes)
    except PickleError as error:
        yield from _with_nested(broken(name, error), search)
        return
    yield from _with_nested(FoundPickle(name, graph, "", content.size - end), search)
    yield from _bare(content, end, f"{name}, after its end", search)


def _with_nested(pickle: FoundPickle, search: Search) -> Iterator[FoundPickle]:
    yield pickle
    if pickle.graph is not None:
        yield from _in_graph(pickle.graph, pickle.where, search)


def _is_pickle_name(name: str) -> bool:
    """Return whether a record is a pickle by its name. torch.export names constants that are not tensors
    ``data/constants/opaque_obj_0``, and loads them with ``pickle`` (torch/export/pt2_archive/_package.py)."""
    return name.lower().endswith((".pkl", ".pickle")) or name.rpartition("/")[2].startswith("opaque_obj_")


def tar_pickles(source: Source, known: Collection[int] = ()) -> Iterator[FoundPickle]:
    """Yield the pickles in all members of a tar archive, except members that begin at ``known``."""
    return limited(source.size, lambda search: _in_tar(source, known, search))


def _in_tar(source: Source, known: Collection[int], search: Search) -> Iterator[FoundPickle]:
    at = 0
    try:
        for member in members(source):
            at = member.end
            size = min(member.size, source.size - member.begin)
            padding = source.read(member.begin + size, max(member.end - member.begin - size, 0)) if size > 0 else b""
            odd = member.odd or ("a link, not followed" if member.link else "data follows it" * any(padding))
            if search.strict and (odd or (size > 0 and not member.plain)):
                yield unchecked(member.name, odd or "it is a sparse file, or of a type of its own")
            if size <= 0 or member.begin in known:
                continue
            search.budget.take(0)
            yield from _in_content(SliceSource(source, member.begin, size, member.name), member.name, search)
    except MalformedError as error:  # members before the damage were examined
        if search.strict:
            yield unchecked("the rest of the archive", error.what)
    if source.read(at, MAX_GUESS).strip(b"\0"):
        yield unchecked("after the archive", "data follows the end of the archive")


def nested_pickles(graph: Graph, where: str) -> Iterator[FoundPickle]:
    """Yield the pickles in the bytes and strings of a pickle, which a program may unpickle."""
    return limited(0, lambda search: _in_graph(graph, where, search))


def _in_graph(graph: Graph, where: str, search: Search) -> Iterator[FoundPickle]:
    for data in values(graph):
        if not search.depth:
            search.budget.left += len(data)
        yield from _in_value(data, f"{where}: bytes in it", search)
