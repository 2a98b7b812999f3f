"""The zip format of ``torch.save`` (torch 1.6 and later, 1.4 and 1.5 on request).

Sources: ``torch/serialization.py`` (``_save``, ``_load``), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from ...base.errors import MalformedError, PickleError
from ...base.findings import DAMAGED, DEFLATED, EDITED, Finding
from ...base.limits import LIMITS
from ...base.records import new_tuple
from ...base.steps import as_step
from ...base.text import human_bytes, pluralize, quoted
from ...checkpoint.container import ARCHIVE_RECORDS, Container, FoundPickle, Manifest, StorageLocation, StoredRecord
from ...checkpoint.tensors import TensorReader
from ...files.sources import AppendPlan, BytesSource, Plan, Source, Span
from ...files.zips.reader import Archive, Record, end_record_oddities, fold_case, read_archive
from ...files.zips.versions import versions
from ...pickles.decode import Decoded, decode
from ...pickles.nodes import Graph, Persistent
from ..zip_kinds import kind_of

if TYPE_CHECKING:
    from ...files.zips.audit import Audit

#: The records that torch.save writes besides the storages.
_OWN: Final = ("data.pkl", ".data/version", *ARCHIVE_RECORDS)
#: A record's padding must fit into an extra field of its local header.
_MOST_ALIGNMENT: Final = 0xFFFF
#: Bytes that are read with a small record: its header, and some after it.
_AROUND: Final = 4096
#: Bytes of a storage that are read together with its header, which comes before them.
_AT_ONCE: Final = 256 << 10
#: Returns the graph of a pickle that is known before decoding, as when an edit is read back, or None.
Known: TypeAlias = Callable[[bytes], Graph | None]


class TorchZip(Container):
    """A zip checkpoint: its directory and its ``data.pkl``."""

    format = "torch-zip"
    #: Whether its writer deflates records and every reader inflates them.
    deflates = False

    def __init__(self, archive: Archive, record: Record, data: bytes, known: Known | None = None) -> None:
        self.archive = archive
        self.root = archive.root
        self.record = record
        damaged = bool(record.crc) and zlib.crc32(data) != record.crc
        like = known(data) if known is not None else None
        try:
            decoded = decode(data, where="data.pkl") if like is None else Decoded(like, len(data), 0)
        except PickleError as error:
            if damaged:
                error.what = f"data.pkl is damaged, its checksum is not the one on record: {error.what}"
                error.step = as_step("get the file again: without data.pkl the meaning of its bytes is lost")
            raise
        self.graph = decoded.graph
        self.end = decoded.end
        self._wanted: set[str] = set()  # the first two storages that were asked for
        self._audited: Audit | None = None
        self.problems: list[Finding] = []
        self.byteorder = "little"
        if damaged:
            # Torch does not check it, and an edit would put a correct checksum on wrong content.
            self._note(DAMAGED, "error", "data.pkl has another checksum than the one on record: the file is damaged")
        self._check_records()
        if decoded.end < len(data):
            rest = len(data) - decoded.end
            self._note("after-stop", "warning", f"{rest:,} bytes after the end of the pickle in data.pkl")
        for offset, text in self.graph.oddities[: LIMITS.listed]:
            self._note("odd-pickle", "warning", f"data.pkl at byte {offset:,}: {text}")
        self.writer = self._writer()

    @property
    def pickle(self) -> bytes:
        """The bytes of data.pkl, read again on each use: only edits need them, and they are a tenth of all memory."""
        return self.archive.read(self.record, LIMITS.pickle_bytes)

    def storage_record(self, key: str) -> Record | None:
        """Return the record of a storage, or None. Everything that accesses its bytes uses this."""
        return self.archive.find(f"data/{key}")

    def stored_size(self, key: str) -> int | None:
        record = self.storage_record(key)
        return None if record is None else record.size

    def is_compressed(self, key: str) -> bool:
        record = self.storage_record(key)
        return record is not None and record.method != 0

    def stored(self, key: str) -> StorageLocation:
        record = self.storage_record(key)
        if len(self._wanted) < 2:
            self._wanted.add(key)
            if len(self._wanted) == 2:  # whoever asks for two storages asks for more
                self._ask_ahead()
            elif record is not None and record.compressed <= _AT_ONCE:  # the bytes are read next
                self.archive.source.prefetch([(record.header, record.compressed + _AROUND)])
        return StorageLocation(None, 0) if record is None else stored_in(self.archive, record)

    def _ask_ahead(self) -> None:
        from ...files.zips.audit import prefetch_headers  # lists of keys need no records

        prefetch_headers(self.archive)

    def records(self) -> Iterator[StoredRecord]:
        return self.outer_records()

    def outer_records(self, touched: Callable[[Span], bool] | None = None) -> Iterator[StoredRecord]:
        if touched is None:
            self._ask_ahead()
        return stored_records(self.archive, self._keys(), touched)

    @property
    def _data(self) -> str:
        """The prefix of storage names, in the case-folded form in which torch compares names."""
        return fold_case(f"{self.archive.prefix}data/")

    def _keys(self) -> dict[int, str]:
        """Return storage keys by the directory entries of their records. Used storages have the key of the pickle,
        which may differ in case; others have the key in the record name."""
        data, records = self._data, self.archive.records
        keys = {item.entry: item.name[len(data) :] for item in records if fold_case(item.name).startswith(data)}
        if not all(key.isdecimal() for key in keys.values()):
            used = ((key, self.storage_record(key)) for key in TensorReader(self.graph).storages)
            keys.update((record.entry, key) for key, record in used if record is not None)
        return keys

    def manifest(self, *, checked: bool = False) -> Manifest:
        if checked:
            from ...files.zips.audit import check_locations  # an edit reads its output back

            check_locations(self.archive)
        manifest = {name: (size, crc, method) for name, _, method, crc, _, size, _, _, _ in self.archive.records}
        manifest.pop(self.record.name, None)
        return manifest

    def audit(self, keys: Collection[str]) -> list[Finding]:
        from ...files.zips.layout import offsets_are_computed  # not needed to read a file

        archive = self.archive
        known = {problem.code for problem in self.problems}
        found = [oddity for oddity in self._audit().oddities if oddity.code not in known]
        root = archive.prefix
        used = {f"{root}data/{key}" for key in keys} | {root + name for name in _OWN} | {self.record.name}
        unused = [record for record in archive.records if record.name not in used and not record.name.endswith("/")]
        twins = {fold_case(name) for name in used} if unused else ()
        for record in unused:
            if fold_case(record.name) not in twins:
                what = f"the record {quoted(record.name)} ({human_bytes(record.size)}) is used by nothing"
                found.append(Finding("unreferenced-record", "warning", what, record.name, record.header))
        if (archive.text(".format_version") or b"") >= b"1" and not offsets_are_computed(archive, list(keys)):
            what = "the storages are not laid out as .format_version says: torch computes wrong offsets for"
            found.append(Finding("layout-contract", "warning", what + " map_location='meta'"))
        return found

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        # Not needed to read or edit.
        from ..search.pickle_search import bare_pickles, nested_pickles, zip_pickles

        yield FoundPickle("data.pkl", self.graph, "", self.record.size - self.end)
        yield from nested_pickles(self.graph, "data.pkl")
        if self.end < self.record.size:
            data = BytesSource(self.pickle, self.archive.source.name)
            yield from bare_pickles(data, self.end, "data.pkl, after its end")
        archive = self.archive
        if archive.end.tail < archive.source.size:
            yield from bare_pickles(archive.source, archive.end.tail, "after the archive")
        nodes, prefix = self.graph.nodes, f"{archive.prefix}data/"
        ids = [nodes[node.pid] for _, node in self.graph.of_type(Persistent)]
        keys = (nodes[pid[2]] for pid in ids if type(pid) is tuple and len(pid) > 2)
        storages = {prefix + key for key in keys if type(key) is str}
        if quick:
            known = storages | {archive.prefix + name for name in _OWN}
            others = [record for record in archive.records if record.name not in known]
            yield from zip_pickles(archive, self.record, records=others)
            return
        found = self._audit()
        yield from zip_pickles(archive, self.record, found.hidden, found.former, storages=storages)

    def _audit(self) -> Audit:
        if self._audited is None:
            from ...files.zips.audit import audit  # a thorough look

            self._audited = audit(self.archive)
        return self._audited

    def plan(self, pickle: bytes) -> Plan:
        from ...files.zips.layout import plan_rewrite  # not needed to read a file

        return plan_rewrite(self.archive, {self.record.name: pickle})

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> AppendPlan:
        from ...files.zips.layout import offsets_are_computed, plan_append  # not needed to read a file

        archive = self.archive
        dropped = {record.name for key in gone if (record := archive.find(f"data/{key}"))}
        contract = archive.find(".format_version")
        if contract and not offsets_are_computed(archive, [key for key in keys if archive.find(f"data/{key}")]):
            # Without the record, torch looks up every offset, as it did before torch 2.7.
            dropped.add(contract.name)
        return plan_append(archive, {self.record.name: pickle}, dropped, edit, time)

    def _note(self, code: str, level: str, message: str, refused: bool = False) -> None:
        self.problems.append(Finding(code, level, message, refused=refused))

    def _check_records(self) -> None:
        """Report what torch's reader refuses, and what readers may read differently."""
        archive = self.archive
        for oddity in [*end_record_oddities(archive), *archive.oddities[: LIMITS.listed]]:
            self.problems.append(oddity)
        if not archive.root:
            self._note("no-folder", "error", "the records are in no folder; torch refuses such a file", True)
        self.problems += [found for found in (version_problem(archive), _alignment_problem(archive)) if found]
        identity = archive.text(".data/serialization_id")
        if identity is not None and identity.decode("utf-8", "replace").encode() != identity:
            self._note("bad-id", "error", ".data/serialization_id is not UTF-8; torch refuses such a file", True)
        order = archive.text("byteorder")
        record = archive.find("byteorder")
        if record is not None and order is not None and record.crc and zlib.crc32(order) != record.crc:
            self._note(DAMAGED, "error", f"{record.name} does not match its checksum: the file is damaged")
        if order in (b"big", b"little"):
            self.byteorder = order.decode()
        elif order is not None:
            self._note("bad-byteorder", "error", f"byteorder is {_shown(order)}; torch takes 'little' or 'big'", True)
        deflated = [record.name for record in archive.records if record.method == 8 and record.size]
        storages = sum(fold_case(name).startswith(self._data) for name in deflated)
        if storages and not self.deflates:
            what = f"{pluralize(storages, 'storage')} deflated: torch.load(mmap=True) reads garbage from them"
            self._note(DEFLATED, "error", what)
        elif deflated and not self.deflates:
            self._note(DEFLATED, "warning", "records are deflated, which torch.save never does")
        foreign = next((record for record in archive.records if record.method not in (0, 8)), None)
        if foreign is not None:
            what = f"{foreign.name!r} is compressed by method {foreign.method}, which torch cannot read"
            self._note("bad-method", "error", what, True)
        if rest := archive.source.size - archive.end.tail:
            self._note("trailing-bytes", "warning", f"{pluralize(rest, 'byte')} after the end of the archive")
        if self.record.name.rpartition("/")[2] != "data.pkl":
            self._note("record-case", "warning", f"{self.record.name!r} is found because torch ignores case")
        found = versions(self.archive.source, self.archive.end.tail)
        if len(found) > 1 and not self.archive.end.unfinished:
            times = "once" if len(found) == 2 else f"{len(found) - 1:,} times"
            self._note(EDITED, "note", f"edited in place {times}: what it was before is still in it")

    def _writer(self) -> str:
        archive = self.archive
        if archive.find(".format_version"):
            return "torch 2.7 or later"
        if archive.find("byteorder"):
            return "torch 2.1 to 2.6" if archive.find(".data/serialization_id") else "torch 2.1 or another tool"
        if b"FB" not in archive.local(self.record)[30 + len(self.record.name) :]:
            return "not torch.save"
        keys = [name.rpartition("/")[2] for name in archive.by_name if "/data/" in name]
        pointers = any(len(key) > 9 for key in keys)
        return "torch 1.4 to 1.6" if pointers else "torch 1.6 to 2.0"


def stored_in(archive: Archive, record: Record) -> StorageLocation:
    """Return the place of a record's content. The checksum 0 of an empty stored record need not be checked."""
    crc = record.crc if record.size or record.crc or record.method else None
    return new_tuple(StorageLocation, (archive.payload(record), record.size, record.method != 0, crc))


def stored_records(
    archive: Archive, keys: Mapping[int, str], touched: Callable[[Span], bool] | None = None
) -> Iterator[StoredRecord]:
    """Yield the records in file order, those that are ``touched``; ``keys`` has the storage keys by directory entry."""
    # Made from plain tuples, because there are ten thousands of records.
    new = tuple.__new__
    records = sorted(archive.records, key=attrgetter("header"))
    if touched is not None:
        begins = [record.header for record in records]
        ends = [*begins[1:], archive.source.size]
        extents = [Span(archive.source, begin, end - begin) for begin, end in zip(begins, ends)]
        records = [record for record, extent in zip(records, extents) if touched(extent)]
    for record in records:
        name, _, method, crc, _, size, _, entry, _ = record
        known = crc if size or crc or method else None
        values = name, archive.payload(record), size, known, method != 0, keys.get(entry, ""), ()
        yield new(StoredRecord, values)


def version_problem(archive: Archive) -> Finding | None:
    """Return the problem of a missing or unsupported format version, or None."""
    # ``PyTorchStreamReader::init`` prefers .data/version, which archives with newer operators have.
    version, other = archive.text(".data/version"), archive.text("version")
    if version is not None and other is not None and version.strip() != other.strip():
        what = f"there are two records of the version, {_shown(version)} and {_shown(other)}; torch takes the first"
        return Finding("two-versions", "error", what)
    version = other if version is None else version
    if version is None:
        what = "the record 'version' is missing; torch refuses such a file"
        return Finding("no-version", "error", what, refused=True)
    text = version.strip()
    if text.isdigit() and 1 <= int(text) <= 10:
        return None
    return Finding("bad-version", "error", f"version is {_shown(text)}; torch takes 1 to 10", refused=True)


def _shown(text: bytes) -> str:
    return repr(text[:20].decode("ascii", "replace"))


def _alignment_problem(archive: Archive) -> Finding | None:
    text = archive.text(".storage_alignment")
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is not None and 0 < value <= _MOST_ALIGNMENT:
        return None
    what = f".storage_alignment is {_shown(text)}; torch takes a number from 1 to {_MOST_ALIGNMENT:,}"
    return Finding("bad-alignment", "error", what, refused=value is None)


def sniff(head: bytes, source: Source) -> bool:
    return head[:4] == b"PK\x03\x04"


def read(source: Source) -> TorchZip:
    """Read a zip checkpoint; raise the error that names any other zip archive."""
    return read_checkpoint(read_whole(source))


def read_whole(source: Source) -> Archive:
    """Return the directory of a zip; raise the error that describes its damage."""
    try:
        return read_archive(source)
    except MalformedError as error:
        from ..foreign import identification

        raise identification.explain_damaged_zip(source, error) from error


def read_checkpoint(archive: Archive, known: Known | None = None) -> TorchZip:
    """Read the zip checkpoint in an archive; raise the error that names any other archive."""
    record = archive.find("data.pkl") if kind_of(archive) is None else None
    if record is None:
        from ..foreign import identification

        error = identification.explain_zip(archive)
        assert error is not None
        raise error
    # All that is read to list the tensors: data.pkl, and some records of a few bytes.
    archive.source.prefetch(
        (item.header, item.compressed + _AROUND) for item in archive.records if "/data/" not in item.name
    )
    return TorchZip(archive, record, archive.read(record, LIMITS.pickle_bytes), known)
