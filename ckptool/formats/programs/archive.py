"""Zip archives of programs that are read and not written again: their weights as a graph, over their records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from ...base.errors import MalformedError, RefusedError
from ...base.limits import LIMITS
from ...base.text import counted, listed, shown
from ...checkpoint.container import Container, FoundPickle, Problem, StoredBytes, StoredRecord, Traits, of_records
from ...checkpoint.graph_builder import Builder
from ...checkpoint.programs import PROGRAM, NamedDevice, Program
from ...checkpoint.tensors import TensorReader
from ...files.sources import Appending, Plan, SliceSource, Source
from ...files.zips.audit import audit
from ...files.zips.layout import rewritten
from ...files.zips.reader import Archive, Record
from ...pickles.encode import encode
from ...pickles.nodes import Call, Graph, Persistent, Ref
from ...pickles.opcodes import REDUCE
from ...pickles.relocate import moved
from ..pickle_search import zip_pickles
from ..torch.zip_reader import TorchZip, problem_of, read_whole, stored_in
from .script_code import devices_in

#: Bytes of JSON that describes weights: 200,000 of them take about 60 MB.
_JSON: Final = 256 << 20
#: Bytes of code that is searched for devices.
_SOURCES: Final = 32 << 20


class ProgramArchive(Program):
    """What its readers fill: ``builder`` takes the tensors, ``records_of`` the record of each storage by its key,
    ``inner`` the archives within it, by what their keys begin with."""

    format = ""
    traits = Traits(written="program", named=True)
    kind = ""
    loader = ""
    edits: Collection[str] = frozenset()
    others: Sequence[Graph] = ()
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.root = archive.root
        self.builder = Builder()
        self.records_of: dict[str, Record] = {}
        self.inner: dict[str, Container] = {}
        self.byteorder = "big" if archive.text("byteorder") == b"big" else "little"
        self.writer = ""
        self.beside: list[str] = []
        self.described: dict[str, Any] = {}
        self.named_devices: list[NamedDevice] = []
        self.graph = Graph([None], 0, self.builder.graph(0).style)
        self.problems: list[Problem] = [problem_of(oddity) for oddity in archive.oddities[: LIMITS.listed]]

    def names(self) -> list[str]:
        """The names of its records within its folder."""
        return [name.removeprefix(f"{self.root}/") if self.root else name for name in self.archive.by_name]

    def tell_devices(self, stays: str) -> None:
        """Warn of devices that are not the processor; ``stays`` says what does not move them."""
        away = [item for item in self.named_devices if item.device != "cpu"]
        found = Counter[str]()
        for item in away:
            found[item.device] += item.number
        if found:
            places = listed([f"{device} ({counted(number, 'time')})" for device, number in found.items()], most=3)
            files = listed(list(dict.fromkeys(item.where for item in away)), most=3)
            what = f"its program names devices: {places} in {files}; {stays}"
            self.problems.append(Problem("code-devices", "warning", what))

    def tell(self, what: str) -> None:
        """Say that it is a program, and what it holds."""
        self.problems.insert(0, Problem(PROGRAM, "warning", what, True))
        if self.beside:
            weights = "beside its weights it holds " if self.records_of or self.inner else "it holds "
            words = weights + "; ".join(self.beside)
            self.problems.append(Problem("program-parts", "note", words))

    @property
    def pickle(self) -> bytes:
        """There is none: what ``torch.save`` would write for the same object."""
        return encode(self.graph)

    def stored_size(self, key: str) -> int | None:
        record = self.records_of.get(key)
        if record is not None:
            return record.size
        inner = self._inner(key)
        return None if inner is None else inner[0].stored_size(inner[1])

    def stored(self, key: str) -> StoredBytes:
        record = self.records_of.get(key)
        if record is not None:
            return stored_in(self.archive, record)
        inner = self._inner(key)
        return StoredBytes(None, 0) if inner is None else inner[0].stored(inner[1])

    def _inner(self, key: str) -> tuple[Container, str] | None:
        name, mark, rest = key.partition(":")
        found = self.inner.get(name) if mark else None
        return None if found is None else (found, rest)

    def records(self) -> Iterator[StoredRecord]:
        keys = {record.name: key for key, record in self.records_of.items()}
        for record in sorted(self.archive.records, key=lambda record: record.header):
            span, size, compressed, crc = stored_in(self.archive, record)
            assert span is not None
            yield StoredRecord(record.name, span, size, crc, compressed, keys.get(record.name, ""))

    manifest = of_records

    def audit(self, keys: Collection[str]) -> list[Problem]:
        known = {problem.code for problem in self.problems}
        return [problem_of(oddity) for oddity in audit(self.archive).oddities if oddity.code not in known]

    def pickles(self) -> Iterator[FoundPickle]:
        found = audit(self.archive)
        return zip_pickles(self.archive, None, found.hidden, found.former)

    def plan(self, pickle: bytes | None) -> Plan:
        if pickle is not None:
            raise AssertionError("a program is not written again")
        return rewritten(self.archive, {})

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        raise RefusedError(f"{self.kind} is read here, and not written again", path=self.archive.source.name)


def read_json(archive: Archive, record: Record) -> Any:
    """The content of a JSON record; raises MalformedError for what is none, or nests without end."""
    try:
        return json.loads(archive.read(record, _JSON))
    except (ValueError, RecursionError) as error:
        what = "it is no JSON" if isinstance(error, ValueError) else "it nests too deeply"
        raise MalformedError(f"{shown(record.name)}: {what}", path=archive.source.name, where=record.name) from error


def source_devices(archive: Archive, names: Iterable[str]) -> list[NamedDevice]:
    """The devices that files of code name, as far as ``_SOURCES`` bytes of them go."""
    found: list[NamedDevice] = []
    left = _SOURCES
    for name in names:
        record = archive.find(name)
        if record is None or record.size > left:
            continue
        left -= record.size
        try:
            text = archive.read(record, record.size).decode("utf-8", "replace")
        except MalformedError:
            continue  # its checksum says so
        found += [NamedDevice(name, device, number) for device, number in sorted(devices_in(text).items())]
    return found


def nested(archive: Archive, record: Record) -> TorchZip:
    """A record that is a whole file of torch.save itself; raises MalformedError for anything else."""
    span = archive.payload(record)
    inside: Source = SliceSource(archive.source, span.offset, span.size, record.name)
    if record.method or inside.read(0, 4) != b"PK\x03\x04":
        what = f"{shown(record.name)} is no file of torch.save, stored as it is"
        raise MalformedError(what, path=archive.source.name, where=record.name)
    inner = read_whole(inside)
    found = inner.find("data.pkl")
    if found is None:
        raise MalformedError(f"{shown(record.name)} has no data.pkl", path=archive.source.name, where=record.name)
    return TorchZip(inner, found, inner.read(found, LIMITS.pickle_bytes))


def tags_of(graph: Graph) -> Counter[str]:
    """How many storages of a graph have which tag."""
    return Counter(storage.location for storage in TensorReader(graph).storages.values())


def joined(builder: Builder, graph: Graph, named: Callable[[str], str] | None = None) -> Ref:
    """Another graph at the end of an arena: its root there. ``named`` gives its storages other keys."""
    base = len(builder.nodes)
    places = range(base, base + len(graph.nodes))
    builder.nodes += [moved(node, places) for node in graph.nodes]
    for ref in places:
        node = builder.nodes[ref]
        if type(node) is bytes:
            # Protocol 2, in which the graph is, has no bytes: pickle writes a call in their place.
            text = builder.group([builder.add(node.decode("latin-1")), builder.constant("latin1")])
            builder.nodes[ref] = Call(REDUCE, builder.named("_codecs", "encode"), text)
    done: set[Ref] = set()
    for node in graph.nodes if named is not None else ():
        pid = graph.nodes[node.pid] if type(node) is Persistent else None
        if named is None or type(node) is not Persistent or type(pid) is not tuple or len(pid) < 3 or node.pid in done:
            continue
        done.add(node.pid)
        whole = builder.nodes[base + node.pid]
        assert type(whole) is tuple
        builder.nodes[base + node.pid] = (*whole[:2], builder.add(named(str(graph.nodes[pid[2]]))), *whole[3:])
    return base + graph.root
