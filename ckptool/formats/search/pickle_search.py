"""Search a file for every pickle: a scanner that reads only one pickle misses the others.

Pickles may stand alone or in sequence, in any record of an archive, in a record that the directory does not list, in a
nested archive, in compressed data, in an array of objects, and in bytes that another pickle passes to ``pickle.loads``.
Content that cannot be examined is reported as unchecked, so nothing is skipped silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, cast

from ...base.errors import CkptoolError, MalformedError, PickleError, PickleLimitError, UnreadableError, of_file
from ...base.findings import PROGRAM
from ...base.limits import LIMITS
from ...base.standard_library import STANDARD_LIBRARY
from ...base.text import pluralize
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.container import FoundPickle
from ...files.compressed import DEFLATE, Compression, compression_of, inflate, inflate_start
from ...files.sources import BytesSource, SliceSource, Source
from ...files.tars import is_header, members
from ...files.zips.audit import audit, find_signatures
from ...files.zips.reader import LOCAL, Archive, Record, end_search_start, read_archive
from ...pickles.nodes import Call, Extension, Global, Graph, Node
from ...pickles.opcodes import PROTO
from .. import FORMATS, carried_pickles, read_container
from .budget import MAX_GUESS, Search, broken, decode_at, limited, outer_search, unchecked
from .graph_parts import ZIP, decoded, is_binary_pickle, values
from .inert import active_parts, code_kind, hidden_kind, inert_kind, is_plain_record, is_text
from .numpy_arrays import npy_data

if TYPE_CHECKING:
    from ...safety.configuration import ActivePart

#: The most levels of nested files and pickles that are followed; a longer chain is not a checkpoint.
_MAX_DEPTH: Final = 8
#: Inflating this many bytes costs as much as decoding one.
_INFLATE_RATIO: Final = 16
#: Bytes that begin like compressed ones by chance inflate to less.
_INFLATES: Final = 1 << 20
#: Bytes after the end of a tar archive that are examined: tar pads with zeros, up to 10,240.
_TAR_REST: Final = 1 << 16
_NPY: Final = b"\x93NUMPY"
_NO_KIND: Final = "unrecognised type"
#: Modules that a text would hardly name if it only happens to begin like a pickle.
_KNOWN: Final = STANDARD_LIBRARY | {"torch", "numpy", "__builtin__"}
_TOO_DEEP: Final = f"files within files more than {_MAX_DEPTH} deep are not followed"


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
    """Yield every pickle in a file of any kind, active configuration or code, and notes on unchecked content.

    Yields nothing for a whole file of unrecognised bytes that no unpickler accepts. ``strict``: report members of
    unrecognised type as unchecked.
    """
    return limited(source.size, lambda search: _in_content(source, "", search), strict=strict)


def active_pickles(findings: Iterable[ActivePart], where: str) -> Iterator[FoundPickle]:
    """Yield results for findings in a text: configuration that runs code, and the pickles embedded in it."""
    size = sum(len(finding.payload) for finding in findings)
    return limited(size, lambda search: _active(findings, where, search))


def _active(findings: Iterable[ActivePart], where: str, search: Search) -> Iterator[FoundPickle]:
    for finding in findings:
        text = finding.text
        if finding.payload:
            inner = search.deeper()._replace(strict=False)
            pickles = _in_content(BytesSource(finding.payload, text), "", inner)
            yield from _within(f"{where}: {text}" if where else text, pickles)
        elif finding.verdict == PROGRAM:
            yield FoundPickle(where, None, program=text)
        else:
            yield FoundPickle(where, None, note=text)


def is_followed(source: Source) -> bool:
    """Return whether ``find_pickles`` can look inside a file, or reports why not: archives, compressed data, arrays."""
    head = source.read(0, 512)
    compression = compression_of(head)
    known = head[:4] == ZIP or head[:6] == _NPY or is_header(head)
    return known or (compression is not None and not compression.doubtful) or _is_zip(source)


def _is_zip(source: Source) -> bool:
    """Return whether the file ends in a readable zip directory."""
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
        yield unchecked(name, _TOO_DEEP)
        return
    head = content.read(0, 512)
    zipped, arrays = head[:4] == ZIP, head[:6] == _NPY
    active = [] if search.value else active_parts(name or content.name, head, content)
    if active:
        search.budget.take(content.size // _INFLATE_RATIO)
        yield from _active(active, name, search)
    elif not head or (not search.value and is_plain_record(head, content) and not _is_pickle_name(name)):
        return
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
    pickles = _in_arrays(content, name, search) if arrays else _bare(content, 0, name, search, further=not search.value)
    pickles = _within("", pickles)
    if search.value:
        # Bytes that parse by chance name no globals.
        yield from (pickle for pickle in pickles if is_binary_pickle(head) or _may_name(pickle))
        yield from _in_encoded(content.read(0, content.size), name, search)
        return
    first = next(pickles, None)
    if first is not None:
        yield first
        yield from pickles
    elif search.strict and name and not (zipped or tar or arrays or (compression and not compression.doubtful)):
        yield from () if active or inert_kind(head) else [unchecked(name, _NO_KIND)]


def _is_one_pickle(content: Source, search: Search) -> bool:
    try:
        return decode_at(content, 0, search.budget, where="pickle")[1] == content.size
    except PickleError:
        return False


def _may_name(pickle: FoundPickle) -> bool:
    return pickle.graph is None or pickle.graph.has(Global, Extension)


def value_pickles(data: bytes, where: str) -> Iterator[FoundPickle]:
    """Yield the pickles in a value of a checkpoint, which may be compressed, or encoded as hex or base64."""
    return limited(len(data), lambda search: _in_value(data, where, search))


def _in_value(data: bytes, name: str, search: Search) -> Iterator[FoundPickle]:
    inner = search.deeper()._replace(strict=False, value=True)
    yield from _within(name, _in_content(BytesSource(data, name), "", inner))


def _in_encoded(data: bytes, name: str, search: Search) -> Iterator[FoundPickle]:
    for part in decoded(data):
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
        if search.strict and search.depth > 1 and content.read(0, 4) == ZIP:
            yield unchecked("the archive", error.what)
        yield from _in_unlisted_records(content, find_signatures(content, 0, content.size), "", search)
        return
    for oddity in (*archive.oddities, *audited.oddities) if search.strict else ():
        if oddity.ambiguous:
            yield unchecked("the archive", oddity.message)
    yield from _in_zip(archive, archive.records, None, audited.hidden, (), search)


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
    """Yield the pickles in NumPy object arrays, for consecutive arrays."""
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
    if at < content.size:
        yield from _bare(content, at, name, search)
        yield from _rest(content, at, name, search)


def _rest(content: Source, at: int, name: str, search: Search) -> Iterator[FoundPickle]:
    """Yield a note if nonzero bytes follow the last pickle or array."""
    if search.strict and at < content.size and content.read(at, MAX_GUESS).strip(b"\0"):
        what = f"{pluralize(content.size - at, 'byte')} of unrecognised data"
        yield unchecked(f"{name}, after its end" if name else "the rest of the file", what)


def bare_pickles(source: Source, begin: int, where: str, *, after_damage: bool = True) -> Iterator[FoundPickle]:
    """Yield consecutive pickles, from an offset on.

    ``after_damage``: if one is damaged, also yield pickles that begin anywhere after the damage.
    """
    return limited(source.size, lambda search: _bare(source, begin, where, search, after_damage=after_damage))


def _bare(
    source: Source, begin: int, where: str, search: Search, further: bool = True, after_damage: bool = True
) -> Iterator[FoundPickle]:
    """Yield consecutive pickles, from an offset on; nothing for bytes that fail to decode before they run anything.

    Text that happens to begin like a pickle may name globals, but calls nothing. ``further``: also look for pickles
    that begin after the error.
    """
    text = bool(inert_kind(source.read(begin, 512)))
    trivial: list[FoundPickle] = []  # bytes such as "N." count only if better pickles follow
    number = 0
    certain = source.read(begin, 1) == b"\x80"
    damaged_at = -1
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
            damaged_at = begin + max(error.offset, 1)
            break
        calls = graph.has(Call)
        certain = certain or (calls or _imports(graph.nodes) if text else graph.has(Call, Global, Extension))
        certain = certain or len(graph.nodes) > 1
        if certain:
            for pickle in (*trivial, FoundPickle(name, graph)):
                yield from _with_nested(pickle, search)
            trivial.clear()
            yield from nested
        else:
            trivial.append(FoundPickle(name, graph))
        begin = end
    if certain and number > 1:
        yield from _rest(source, begin, where, search)
    if damaged_at >= 0 and after_damage and (certain or further):
        yield from _further(source, damaged_at, where, search)


def _further(source: Source, begin: int, where: str, search: Search) -> Iterator[FoundPickle]:
    """Yield pickles that call something and begin anywhere in damaged or unrecognised bytes.

    No loader reaches them by itself, but an unknown program may read such a file.
    """
    from ...pickles.lexer import beginnings  # only for damaged data

    data = source.read(begin, MAX_GUESS)
    search.budget.take(len(data) // _INFLATE_RATIO)
    text, end = is_text(data[:512]), begin
    for offset in beginnings(data):
        name = f"{where}: " * bool(where) + f"at byte {begin + offset:,}"
        if offset < 0:
            yield unchecked(where or "the rest of the file", "more pickles may begin in it than are followed")
            return
        # Words on separate lines look like globals of a text pickle.
        if begin + offset < end or (text and data[offset] != PROTO):
            continue
        nested: list[FoundPickle] = []
        try:
            graph, end = decode_at(source, begin + offset, search.budget, where=name, nested=nested)
            pickle = FoundPickle(name, graph)
        except PickleError as error:
            end = begin + offset + max(error.offset, 1)
            pickle = broken(name, error)
        if pickle.graph is not None and pickle.graph.has(Global) and pickle.graph.has(Call):
            yield from _with_nested(pickle, search)
            yield from nested


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
    short = may == ENDS and begin + len(data) < source.size
    if short or may in (NAMES, CALLS, TOO_LONG):
        yield broken(name, error)


def _imports(nodes: Sequence[Node]) -> bool:
    """Return whether text imports a module that is likely installed: importing runs its code."""
    return any(node.module.partition(".")[0] in _KNOWN for node in nodes if type(node) is Global)


def zip_pickles(
    archive: Archive,
    main: Record | None,
    hidden: Sequence[int] = (),
    former: Sequence[tuple[Archive, Record]] = (),
    *,
    storages: Collection[str] | None = None,
    records: Sequence[Record] | None = None,
) -> Iterator[FoundPickle]:
    """Yield every pickle of an archive except the record ``main``.

    ``hidden`` are the offsets of unlisted local headers; ``former`` are records of versions before in-place edits.
    ``storages`` are the record names of tensors, by default everything in the folder ``data``. ``records`` limits the
    search, by default to all records.
    """
    listed = archive.records if records is None else records
    return limited(archive.source.size, lambda search: _in_zip(archive, listed, main, hidden, former, search, storages))


def _in_zip(
    archive: Archive,
    records: Sequence[Record],
    main: Record | None,
    hidden: Sequence[int],
    former: Sequence[tuple[Archive, Record]],
    search: Search,
    storages: Collection[str] | None = None,
) -> Iterator[FoundPickle]:
    current = ((archive, record, "") for record in records if record is not main)
    older = ((version, record, "former version: ") for version, record in former)
    unknown: list[str] = []
    for version, record, prefix in chain(current, older):
        if storages is None:
            storage = record.name.startswith((f"{version.root}/data/", "data/")) and not search.strict
            storage = storage and not (search.value or _is_pickle_name(record.name))
        else:
            storage = record.name in storages
        if search.depth <= _MAX_DEPTH and _holds_nothing(version, record, storage):
            continue
        for pickle in _but_no_kind(_in_record(version, record, storage, search), unknown):
            yield pickle._replace(where=prefix + pickle.where) if prefix else pickle
    yield from _of_no_kind(unknown)
    yield from _in_unlisted_records(archive.source, iter(hidden), "not listed: ", search)


def _holds_nothing(archive: Archive, record: Record, storage: bool) -> bool:
    """Return whether a record is quickly seen to hold no pickle: nearly all have numbers, or a word for torch."""
    if not (record.size or record.compressed):
        return True
    small = record.compressed <= 64 and not (_is_pickle_name(record.name) or code_kind(record.name, b""))
    if record.method or record.flags & 1 or not (storage or small):
        return False
    try:
        span = archive.payload(record)
    except MalformedError:
        return False
    head = span.source.read(span.offset, min(64, span.size))
    return head[:4] != ZIP and head[:6] != _NPY if storage else is_plain_record(head, BytesSource(head))


def _but_no_kind(pickles: Iterator[FoundPickle], unknown: list[str]) -> Iterator[FoundPickle]:
    """Yield everything except notes on members of unrecognised type; collect the names of these in ``unknown``."""
    for pickle in pickles:
        if pickle.error == _NO_KIND:
            unknown.append(pickle.where)
        else:
            yield pickle


def _of_no_kind(names: list[str]) -> Iterator[FoundPickle]:
    """Yield one note for all members of unrecognised type."""
    if names:
        more = f" and {pluralize(len(names) - 1, 'other member')}" if len(names) > 1 else ""
        yield unchecked(names[0] + more, _NO_KIND)


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
        yield from _start_of(archive, record, search)
        return
    head = content.read(0, 6) if storage else b""
    if not storage or head[:4] == ZIP or head == _NPY:  # other storages are searched as values of their tensors
        yield from _in_content(content, record.name, search._replace(value=search.value or storage))


def _start_of(archive: Archive, record: Record, search: Search) -> Iterator[FoundPickle]:
    """Yield the pickles in the first megabytes of a deflated record that does not inflate to its recorded size."""
    try:
        span = archive.payload(record)
    except MalformedError:
        return
    if record.method == 8 and not record.flags & 1:
        data = inflate_start(SliceSource(archive.source, span.offset, span.size), DEFLATE)
        search.budget.take(len(data) // _INFLATE_RATIO)
        yield from _in_content(BytesSource(data, record.name), record.name, search._replace(strict=False))


def _whole_pickle(content: Source, name: str, search: Search) -> Iterator[FoundPickle]:
    """Yield a record with a pickle's name, and any pickles after its end."""
    try:
        graph, end = decode_at(content, 0, search.budget, where=name, max_bytes=LIMITS.pickle_bytes)
    except PickleError as error:
        yield from _with_nested(broken(name, error), search)
        yield from _further(content, max(error.offset, 1), name, search)
        return
    yield from _with_nested(FoundPickle(name, graph, "", content.size - end), search)
    yield from _bare(content, end, f"{name}, after its end", search)


def _with_nested(pickle: FoundPickle, search: Search) -> Iterator[FoundPickle]:
    """Yield a pickle, and the pickles in the bytes that it carries."""
    yield pickle
    if pickle.graph is not None:
        yield from _in_graph(pickle.graph, pickle.where, search)


def _is_pickle_name(name: str) -> bool:
    """Return whether a record is a pickle by its name.

    torch.export names constants that are not tensors ``data/constants/opaque_obj_0``, and loads them with ``pickle``
    (torch/export/pt2_archive/_package.py).
    """
    return name.lower().endswith((".pkl", ".pickle")) or name.rpartition("/")[2].startswith("opaque_obj_")


def _in_unlisted_records(source: Source, offsets: Iterator[int], prefix: str, search: Search) -> Iterator[FoundPickle]:
    """Yield the pickles in records found by local headers only; their sizes are unknown."""
    following = chain(offsets, (source.size,))
    unknown: list[str] = []
    for number, (offset, end) in enumerate(pairwise(following)):
        if number == LIMITS.listed:
            yield unchecked("the rest of the file", f"more than {LIMITS.listed:,} records that no directory lists")
            return
        raw = source.read(offset, LOCAL.size + 0x200)
        size = int.from_bytes(raw[26:28], "little")
        name = raw[LOCAL.size : LOCAL.size + size].decode("utf-8", "replace")
        payload = offset + LOCAL.size + size + int.from_bytes(raw[28:30], "little")
        if len(raw) < LOCAL.size or not (search.strict or _is_pickle_name(name)):
            continue
        if raw[8:10] not in (b"\0\0", b"\x08\0"):
            yield unchecked(prefix + name, "it is compressed in a way that torch cannot read")
            continue
        # A pickle ends itself. The size of other content may be in its header.
        size = int.from_bytes(raw[18:22], "little") or _directory_at(source, payload, end) - payload
        content: Source = SliceSource(source, payload, source.size - payload if _is_pickle_name(name) else size, name)
        if raw[8] == 8:
            data = inflate_start(content, DEFLATE)
            search.budget.take(max(len(data), content.size) // _INFLATE_RATIO)
            content = BytesSource(data, name)
        if _is_pickle_name(name):
            yield from _whole_pickle(content, prefix + name, search)
        else:
            yield from _but_no_kind(_in_content(content, prefix + name, search), unknown)
    yield from _of_no_kind(unknown)


def _directory_at(source: Source, begin: int, end: int) -> int:
    """Return the offset of a zip directory in a range of bytes, or ``end`` if the range has none."""
    at = source.read(begin, min(end - begin, MAX_GUESS)).find(b"PK\x01\x02")
    return end if at < 0 else begin + at


def tar_pickles(source: Source, known: Collection[int] = ()) -> Iterator[FoundPickle]:
    """Yield the pickles in all members of a tar archive, except members that begin at ``known``."""
    return limited(source.size, lambda search: _in_tar(source, known, search))


def _in_tar(source: Source, known: Collection[int], search: Search) -> Iterator[FoundPickle]:
    at = 0
    unknown: list[str] = []
    try:
        for member in members(source):
            at = member.end
            size = min(member.size, source.size - member.begin)
            if search.strict and (member.odd or member.link or (size > 0 and not member.plain)):
                what = "a link, not followed" if member.link else "it is a sparse file, or of a type of its own"
                yield unchecked(member.name, member.odd or what)
            if size <= 0 or member.begin in known:
                continue
            search.budget.take(0)
            content = SliceSource(source, member.begin, size, member.name)
            yield from _but_no_kind(_in_content(content, member.name, search), unknown)
    except MalformedError as error:  # members before the damage were examined
        if search.strict:
            yield unchecked("the rest of the archive", error.what)
            yield from _further(source, at, "the rest of the archive", search)
    yield from _of_no_kind(unknown)
    rest = source.read(at, _TAR_REST)
    blank = len(rest) - len(rest.lstrip(b"\0"))
    if blank < len(rest):
        header = at + blank // 512 * 512
        at = header if is_header(source.read(header, 512)) else at + blank
        after = SliceSource(source, at, source.size - at, source.name)
        yield from _within("after the archive", _in_content(after, "", search.deeper()))


def nested_pickles(graph: Graph, where: str) -> Iterator[FoundPickle]:
    """Yield the pickles in the bytes and strings of a pickle, which a program may unpickle."""
    return limited(0, lambda search: _in_graph(graph, where, search))


def _in_graph(graph: Graph, where: str, search: Search) -> Iterator[FoundPickle]:
    for data in values(graph):
        if not search.depth:
            search.budget.left += len(data)
        yield from _in_value(data, f"{where}: bytes in it", search)
