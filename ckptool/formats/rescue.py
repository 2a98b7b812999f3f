"""Rescue a damaged checkpoint: its pickle, and the storages with intact bytes.

A zip records the checksum of every record. If its directory is lost or wrong, local headers and descriptors repeat the
checksums (``zips.recovery``). A legacy file has no checksums, and is intact up to its cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator

from ..base.errors import MalformedError, PickleError
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.text import human_bytes
from ..checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord
from ..checkpoint.survey import survey
from ..checkpoint.tensors import Storage, TensorReader
from ..files.sources import Source, Span
from ..files.zips.reader import LOCAL, Archive, content_chunks, fold_case, read_archive
from ..files.zips.recovery import RecoveredRecord, recover_records
from ..pickles.decode import decode
from ..pickles.nodes import Graph


class CutZip(NamedTuple):
    """The rest of a cut archive: its size and estimated original size in bytes; the number of whole tensors and of
    all."""

    size: int
    expected_size: int
    whole: int
    tensors: int


class Rescued(Container):
    """The rest of a damaged checkpoint: its intact storages. ``lost`` has the reasons for the other storages."""

    writer = "torch 1.6 or later"

    def __init__(self, source: Source, root: str, graph: Graph, pickle: bytes, byteorder: str) -> None:
        self.source, self.root, self.graph, self._pickle, self.byteorder = source, root, graph, pickle, byteorder
        self.format = "torch-zip"
        self.problems = []
        self.lost: dict[str, str] = {}
        #: The places of intact storages.
        self.intact: dict[str, StorageLocation] = {}

    @property
    def pickle(self) -> bytes:
        return self._pickle

    def stored(self, key: str) -> StorageLocation:
        return self.intact.get(key, StorageLocation(None, 0))

    def records(self) -> Iterator[StoredRecord]:
        for key, stored in self.intact.items():
            assert stored.span is not None
            name = f"{self.root}/data/{key}"
            yield StoredRecord(name, stored.span, stored.size, stored.crc, stored.compressed, key)

    def pickles(self, *, quick: bool = False) -> Iterable[FoundPickle]:
        return [FoundPickle("data.pkl", self.graph)]


class _ZipScan:
    """The records of a zip, read from its start. Once the pickle is read, it supplies the sizes."""

    def __init__(self, source: Source) -> None:
        self.sizes: dict[str, int] = {}
        self.records: list[RecoveredRecord] = []
        self.pickles: list[RecoveredRecord] = []
        self.main: tuple[RecoveredRecord, bytes, Graph] | None = None
        self.storages: dict[str, Storage] = {}
        self.reason = "there is no data.pkl in what is left"
        for record in recover_records(source, self.sizes):
            self.records.append(record)
            if "data.pkl" not in (record.name.lower(), record.name.lower().partition("/")[2]):
                continue
            self.pickles.append(record)
            if self.main is None and record.whole:
                self.read_pickle(record)
            elif self.main is None:
                self.reason = "it is cut within data.pkl, which describes the bytes"

    @property
    def folder(self) -> str:
        """The common prefix of record names: the folder with its slash, or ""."""
        return self.main[0].name[: -len("data.pkl")] if self.main else ""

    def read_pickle(self, record: RecoveredRecord) -> None:
        """Read the pickle in a record, if its checksum matches."""
        try:
            data = _content(record)
            if record.crc and zlib.crc32(data) != record.crc:
                self.reason = "data.pkl has another checksum than recorded: its names and shapes cannot be trusted"
                return
            graph = decode(data, where="data.pkl").graph
        except PickleError as error:
            self.reason = f"data.pkl cannot be read: {error}"
            return
        self.main = (record, data, graph)
        self.storages = TensorReader(graph).storages
        self.sizes.update({f"{self.folder}data/{key}": storage.nbytes for key, storage in self.storages.items()})

    def byteorder(self) -> str:
        """Return the text of the record 'byteorder', or "little" without one. Its name or its text may be damaged, but
        hardly both, and only "big" has three letters."""
        for record in self.records:
            if not record.whole or record.size not in (3, 6) or record.method:
                continue
            text = record.span.source.read(record.span.offset, record.span.size)
            if text in (b"big", b"little"):
                return text.decode()
            if record.name == f"{self.folder}byteorder":
                return "big" if record.size == 3 else "little"
        return "little"


def measure_cut_zip(source: Source) -> CutZip | None:
    """Return how much of a cut zip checkpoint is left, without reading its storages; None if its pickle is lost."""
    scan = _ZipScan(source)
    if scan.main is None:
        return None
    names = {record.name for record in scan.records if record.whole}
    cut = {key for key in scan.storages if f"{scan.folder}data/{key}" not in names}
    surveyed = survey(scan.main[2])
    tensors = [{part.storage for part in surveyed.reader.parts(entry.tensor)} for entry in surveyed.tensors]
    # The header, padding, descriptor and directory entry of a record take about 200 bytes.
    overhead = 200 * (len(scan.storages) + 6) + len(scan.main[1])
    expected = overhead + sum(storage.nbytes for storage in scan.storages.values())
    return CutZip(source.size, max(expected, source.size), sum(not keys & cut for keys in tensors), len(tensors))


def rescue_zip(source: Source, progress: Callable[[int], None] | None = None) -> Rescued:
    """Return every storage whose bytes exist and match their checksum. Directory content counts only if a checksum
    confirms it. Raises MalformedError if the pickle is not intact."""
    scan = _ZipScan(source)
    try:
        archive = read_archive(source)
    except MalformedError:
        archive = None
    clear = archive is not None and not any(oddity.ambiguous for oddity in archive.oddities)
    record = archive.find("data.pkl") if archive is not None and clear else None
    current = _directory_records(archive).get(record.name) if archive is not None and record is not None else None
    if current is not None and (scan.main is None or scan.main[0].header != current.header):
        # An in-place edit leaves the former pickle in the file: the directory says which one counts.
        scan.main = None
        scan.read_pickle(current)
    elif len({(pickle.crc, pickle.size) for pickle in scan.pickles}) > 1:
        scan.main = None
        scan.reason = "it has two pickles named data.pkl, and nothing says which one counts"
    if scan.main is None:
        raise MalformedError(f"nothing can be saved: {scan.reason}", path=source.name, next="get another copy")
    _, data, graph = scan.main
    rescued = Rescued(source, scan.folder.rstrip("/"), graph, data, scan.byteorder())
    # Torch ignores case in record names.
    names = {key: fold_case(f"{scan.folder}data/{key}") for key in scan.storages}
    candidates = _candidates(scan.records, archive, set(names.values()))
    seen = {fold_case(record.name) for record in scan.records}
    for key, storage in scan.storages.items():
        if storage.location == "meta" and not storage.nbytes:
            continue
        reason = "its record is cut or damaged" if names[key] in seen else "its bytes are not in the file"
        for candidate in candidates.get(names[key], []):
            reason = _flaw(candidate, storage, progress)
            if not reason:
                place = StorageLocation(candidate.span, candidate.size, candidate.method != 0, candidate.crc)
                rescued.intact[key] = place
                break
        else:
            rescued.lost[key] = reason
    return rescued


def _directory_records(archive: Archive) -> dict[str, RecoveredRecord]:
    """Return the records as listed in the directory, with two lengths from the local header that lead to the payload: a
    checksum must confirm them."""
    records = {}
    source = archive.source
    for record in archive.records:
        raw = source.read(record.header, LOCAL.size)
        begin = record.header + LOCAL.size
        begin += int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
        if len(raw) == LOCAL.size and begin + record.compressed <= source.size:
            name, span = record.name, Span(source, begin, record.compressed)
            records[name] = RecoveredRecord(name, record.header, span, record.size, record.crc, record.method, True)
    return records


def _candidates(
    walked: list[RecoveredRecord], archive: Archive | None, wanted: Collection[str]
) -> dict[str, list[RecoveredRecord]]:
    """Return the records that may hold each folded name in ``wanted``: by local headers first, then by the directory. A
    name that two headers claim is dropped. If header and directory disagree on a name, the wanted name counts."""
    names = {record.header: fold_case(record.name) for record in archive.records} if archive else {}
    by_name: dict[str, list[RecoveredRecord]] = {}
    for record in walked:
        name = fold_case(record.name)
        other = names.get(record.header, name)
        claims = {name, other} & set(wanted) if name != other else {name}
        if record.whole and len(claims) == 1:
            by_name.setdefault(claims.pop(), []).append(record)
    by_name = {name: records for name, records in by_name.items() if len(records) == 1}
    for record in _directory_records(archive).values() if archive else ():
        # A directory record without a checksum counts only if a local header confirms it.
        if record.crc and fold_case(record.name) in wanted:
            by_name.setdefault(fold_case(record.name), []).append(record)
    return by_name


def _flaw(record: RecoveredRecord, storage: Storage, progress: Callable[[int], None] | None) -> str:
    if record.size != storage.nbytes:
        return f"it has {human_bytes(record.size)} where the pickle says {human_bytes(storage.nbytes)}"
    if not record.crc and record.size:
        return ""
    crc = 0
    try:
        for data in content_chunks(record.span, record.size, record.method != 0, record.name):
            crc = zlib.crc32(data, crc)
            if progress:
                progress(len(data))
    except MalformedError as error:
        return error.what
    return "" if crc == record.crc else "its bytes do not agree with the checksum on record"


def _content(record: RecoveredRecord) -> bytes:
    if max(record.span.size, record.size) > LIMITS.pickle_bytes:
        raise PickleError(f"{record.size:,} bytes, the limit is {LIMITS.pickle_bytes:,}", where=record.name)
    if record.method not in (0, 8):
        raise PickleError(f"compression method {record.method}, which torch cannot read", where=record.name)
    try:
        return b"".join(content_chunks(record.span, record.size, record.method != 0, record.name))
    except MalformedError as error:
        raise PickleError(error.what, where=record.name) from error
