"""Reading what is left of a damaged checkpoint: the pickle, and the storages whose bytes are whole.

A zip tells the checksum of every record; where its directory is lost or wrong, the local headers and descriptors
say the same (``zips.walk``). A legacy file is whole up to where it is cut, and nothing says more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..base.errors import MalformedError, PickleError, UnreadableError
from ..base.limits import LIMITS
from ..base.text import human_bytes
from ..checkpoint.container import Container, FoundPickle, Problem, StoredBytes, StoredRecord, Traits
from ..checkpoint.survey import survey
from ..checkpoint.tensors import Storage, TensorReader
from ..files.sources import Appending, Plan, Source, Span
from ..files.zips.reader import LOCAL, Archive, contents, folded, read_archive
from ..files.zips.recovery import Walked, walk
from ..pickles.decode import decode
from ..pickles.nodes import Graph


class Extent(NamedTuple):
    """How much of a cut archive is there: bytes of the file, bytes that it had (about), tensors whole and in all."""

    there: int
    about: int
    whole: int
    tensors: int


class Rescued(Container):
    """What is left of a checkpoint; a ``Container`` whose storages are the whole ones only.

    ``lost`` says for each other storage why.
    """

    others: Sequence[Graph] = ()
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        source: Source,
        root: str,
        graph: Graph,
        pickle: bytes,
        byteorder: str,
        format: str = "torch-zip",
        traits: Traits = Traits(),
    ) -> None:
        self.source = source
        self.format = format
        #: Whole or not, it is laid out anew.
        self.traits = traits
        self.root = root
        self.graph = graph
        self._pickle = pickle
        self.byteorder = byteorder
        self.writer = "torch 1.6 or later"
        self.problems: list[Problem] = []
        self.lost: dict[str, str] = {}
        self._places: dict[str, StoredBytes] = {}

    def keep(self, key: str, stored: StoredBytes) -> None:
        """Take a storage for whole."""
        self._places[key] = stored

    @property
    def pickle(self) -> bytes:
        return self._pickle

    def stored_size(self, key: str) -> int | None:
        found = self._places.get(key)
        return None if found is None else found.size

    def stored(self, key: str) -> StoredBytes:
        return self._places.get(key, StoredBytes(None, 0))

    def records(self) -> Iterator[StoredRecord]:
        for key, stored in self._places.items():
            assert stored.span is not None
            name = f"{self.root}/data/{key}"
            yield StoredRecord(name, stored.span, stored.size, stored.crc, stored.compressed, key)

    def audit(self, keys: Collection[str]) -> list[Problem]:
        return []

    def pickles(self) -> Iterable[FoundPickle]:
        return [FoundPickle("data.pkl", self.graph)]

    def plan(self, pickle: bytes | None) -> Plan:
        raise UnreadableError("the file is damaged and cannot be carried over as it is", path=self.source.name)

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        raise UnreadableError("the file is damaged and is not edited in place", path=self.source.name)


class _Walk:
    """The records of a zip from its start on, the sizes taken from the pickle once it is read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sizes: dict[str, int] = {}
        self.records: list[Walked] = []
        self.pickles: list[Walked] = []
        self.main: tuple[Walked, bytes, Graph] | None = None
        self.storages: dict[str, Storage] = {}
        self.reason = "there is no data.pkl in what is left"
        for record in walk(source, self.sizes):
            self.records.append(record)
            if _is_main(record.name):
                self.pickles.append(record)
                if self.main is None:
                    self._pickle(record)

    @property
    def folder(self) -> str:
        """What stands in front of the names of all records: the folder with its slash, or nothing."""
        return self.main[0].name[: -len("data.pkl")] if self.main else ""

    def _pickle(self, record: Walked) -> None:
        if not record.whole:
            self.reason = "it is cut within data.pkl, which says what the bytes are"
            return
        self.take(record)

    def take(self, record: Walked) -> None:
        """Read the pickle in a record, if its checksum agrees."""
        try:
            data = _content(record)
            if record.crc and zlib.crc32(data) != record.crc:
                self.reason = "data.pkl has another checksum than the one on record: its names and shapes are not to be"
                self.reason += " trusted"
                return
            graph = decode(data, where="data.pkl").graph
        except PickleError as error:
            self.reason = f"data.pkl cannot be read: {error}"
            return
        self.main = (record, data, graph)
        self.storages = TensorReader(graph).storages
        self.sizes.update({f"{self.folder}data/{key}": storage.nbytes for key, storage in self.storages.items()})


def extent_of_zip(source: Source) -> Extent | None:
    """How much of a cut zip checkpoint is there, without a look at its storages; None where nothing tells."""
    found = _Walk(source)
    if found.main is None:
        return None
    names = {record.name for record in found.records if record.whole}
    cut = {key for key in found.storages if f"{found.folder}data/{key}" not in names}
    looked = survey(found.main[2])
    tensors = [{part.storage for part in looked.reader.parts(entry.tensor)} for entry in looked.tensors]
    # Header, padding, descriptor and directory entry of a record take about 200 bytes.
    overhead = 200 * (len(found.storages) + 6) + len(found.main[1])
    about = overhead + sum(storage.nbytes for storage in found.storages.values())
    return Extent(source.size, max(about, source.size), sum(not keys & cut for keys in tensors), len(tensors))


def rescue_zip(source: Source, progress: Callable[[int], None] | None = None) -> Rescued:
    """Every storage whose bytes are there and whose checksum agrees.

    Raises MalformedError when not even the pickle is whole. Nothing of the directory is believed that a checksum
    does not confirm.
    """
    found = _Walk(source)
    archive = _directory(source)
    clear = archive is not None and not any(oddity.ambiguous for oddity in archive.oddities)
    record = archive.find("data.pkl") if archive is not None and clear else None
    there = _listed(archive).get(record.name) if archive is not None and record is not None else None
    if there is not None and (found.main is None or found.main[0].header != there.header):
        # An edit in place leaves the former pickle where it was: the directory tells which one counts.
        found.main = None
        found.take(there)
    elif len({(walked.crc, walked.size) for walked in found.pickles}) > 1:
        found.main = None
        found.reason = "there are two pickles data.pkl in it, and which one counts is not known"
    if found.main is None:
        raise MalformedError(f"nothing can be saved: {found.reason}", path=source.name, next="get another copy")
    _, data, graph = found.main
    folder = found.folder
    rescued = Rescued(source, folder.rstrip("/"), graph, data, _byteorder(found, folder))
    wanted = {folded(f"{folder}data/{key}") for key in found.storages}
    places = _places(found.records, archive, wanted)
    seen = {folded(record.name) for record in found.records}
    for key, storage in found.storages.items():
        if storage.location == "meta" and not storage.nbytes:
            continue
        # Torch finds records without regard to case.
        name = folded(f"{folder}data/{key}")
        reason = "its bytes are not in the file"
        if name in seen:
            reason = "its record is cut or damaged"
        for candidate in places.get(name, []):
            reason = _flaw(candidate, storage, progress)
            if not reason:
                rescued.keep(key, StoredBytes(candidate.span, candidate.size, candidate.method != 0, candidate.crc))
                break
        else:
            rescued.lost[key] = reason
    return rescued


def _directory(source: Source) -> Archive | None:
    try:
        return read_archive(source)
    except MalformedError:
        return None


def _is_main(name: str) -> bool:
    """Is it the name of the object's pickle, in a folder or in none?"""
    return "data.pkl" in (name.lower(), name.lower().partition("/")[2])


def _listed(archive: Archive) -> dict[str, Walked]:
    """The records as the directory tells.

    Of the local header only the two lengths are believed that lead to the payload: a checksum must confirm them.
    """
    found = {}
    source = archive.source
    for record in archive.records:
        raw = source.read(record.header, LOCAL.size)
        begin = record.header + LOCAL.size
        begin += int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
        if len(raw) == LOCAL.size and begin + record.compressed <= source.size:
            span = Span(source, begin, record.compressed)
            found[record.name] = Walked(record.name, record.header, span, record.size, record.crc, record.method, True)
    return found


def _places(walked: list[Walked], archive: Archive | None, wanted: Collection[str]) -> dict[str, list[Walked]]:
    """Where each name of ``wanted``, in lower case, may be: as the local headers say, then as the directory says.

    A name that two headers claim is nobody's; where header and directory dispute, the one counts that is wanted.
    """
    names = {record.header: folded(record.name) for record in archive.records} if archive else {}
    found: dict[str, list[Walked]] = {}
    for record in walked:
        here, there = folded(record.name), names.get(record.header, folded(record.name))
        claims = {here, there} & set(wanted) if here != there else {here}
        if record.whole and len(claims) == 1:
            found.setdefault(claims.pop(), []).append(record)
    found = {name: records for name, records in found.items() if len(records) == 1}
    for record in _listed(archive).values() if archive else ():
        # Without a checksum only both together are believed.
        if record.crc and folded(record.name) in wanted:
            found.setdefault(folded(record.name), []).append(record)
    return found


def _byteorder(found: _Walk, folder: str) -> str:
    """What the record 'byteorder' says, "little" where there was none.

    Its name or its text may be damaged, but hardly both; and of the two words one has three letters.
    """
    for record in found.records:
        if not record.whole or record.size not in (3, 6) or record.method:
            continue
        text = record.span.source.read(record.span.offset, record.span.size)
        if text in (b"big", b"little"):
            return text.decode()
        if record.name == f"{folder}byteorder":
            return "big" if record.size == 3 else "little"
    return "little"


def _flaw(record: Walked, storage: Storage, progress: Callable[[int], None] | None) -> str:
    """Why a record cannot be taken for this storage, or ""."""
    if record.size != storage.nbytes:
        return f"it has {human_bytes(record.size)} where the pickle says {human_bytes(storage.nbytes)}"
    if not record.crc and record.size:
        return ""
    crc = 0
    try:
        for data in contents(record.span, record.size, record.method != 0, record.name):
            crc = zlib.crc32(data, crc)
            if progress:
                progress(len(data))
    except MalformedError as error:
        return error.what
    return "" if crc == record.crc else "its bytes do not agree with the checksum on record"


def _content(record: Walked) -> bytes:
    """The whole content of a small record or a pickle, inflated."""
    if max(record.span.size, record.size) > LIMITS.pickle_bytes:
        raise PickleError(f"{record.size:,} bytes, the limit is {LIMITS.pickle_bytes:,}", where=record.name)
    if record.method not in (0, 8):
        raise PickleError(f"compression method {record.method}, which torch cannot read", where=record.name)
    try:
        return b"".join(contents(record.span, record.size, record.method != 0, record.name))
    except MalformedError as error:
        raise PickleError(error.what, where=record.name) from error
