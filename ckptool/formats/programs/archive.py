"""Zip archives of programs that are read but not rewritten: a graph of their weights, over their records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from ...base.errors import MalformedError, PickleError
from ...base.findings import PROGRAM, Finding
from ...base.limits import LIMITS
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder
from ...checkpoint.programs import AttributeDevice, CodeDevice, NamedDevice, Program, ProgramDevices, ProgramFacts
from ...checkpoint.tensors import TensorReader
from ...files.sources import SliceSource, Source
from ...files.zips.audit import audit
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Call, Graph, Persistent, Ref, relocated
from ...pickles.opcodes import REDUCE
from ..search.pickle_search import zip_pickles
from ..torch.zip_reader import TorchZip, read_whole, stored_in, stored_records
from .script_modules import devices_in

#: The most bytes of JSON that describe weights: 200,000 weights take about 60 MB.
_MAX_JSON: Final = 256 << 20
#: The most bytes of source code that are searched for devices.
_MAX_SOURCES: Final = 32 << 20


class ProgramArchive(Program):
    """The container that the program readers fill.

    ``builder`` collects the tensors. ``records_of`` maps storage keys to records; ``inner`` maps key prefixes to nested
    archives.
    """

    traits = Traits(writes_as="program", flat_names=True)
    kind = ""
    loader = ""
    edits: Collection[str] = frozenset()

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.root = archive.root
        self.builder = Builder()
        self.records_of: dict[str, Record] = {}
        self.inner: dict[str, Container] = {}
        self.byteorder = "big" if archive.text("byteorder") == b"big" else "little"
        self.writer = ""
        self.beside: list[str] = []
        self.named_devices: list[NamedDevice] = []
        self.graph = Graph([None], 0, self.builder.graph(0).style)
        self.problems: list[Finding] = archive.oddities[: LIMITS.listed]

    def names(self) -> list[str]:
        """Return the record names without the archive's folder."""
        return [name.removeprefix(self.archive.prefix) for name in self.archive.by_name]

    def describe(self, what: str, facts: ProgramFacts) -> None:
        """Add the problems and the facts of the program."""
        describe(self, what, facts, "beside its weights it holds" if self.records_of or self.inner else "it holds")

    def warn_of_devices(self, consequence: str) -> None:
        """Warn if the code names devices other than the CPU; ``consequence`` ends the message."""
        away = [item for item in self.named_devices if item.device != "cpu"]
        if away:
            what = f"its program names devices: {describe_devices(away, most=3)}; {consequence}"
            self.problems.append(Finding.of("code-devices", "warning", what))

    def stored_size(self, key: str) -> int | None:
        if record := self.records_of.get(key):
            return record.size
        name, _, rest = key.partition(":")
        return self.inner[name].stored_size(rest) if name in self.inner else None

    def stored(self, key: str) -> StorageLocation:
        if record := self.records_of.get(key):
            return stored_in(self.archive, record)
        name, _, rest = key.partition(":")
        return self.inner[name].stored(rest) if name in self.inner else StorageLocation(None, 0)

    def records(self) -> Iterator[StoredRecord]:
        return stored_records(self.archive, {record.entry: key for key, record in self.records_of.items()})

    def audit(self, keys: Collection[str]) -> list[Finding]:
        known = {problem.code for problem in self.problems}
        return [oddity for oddity in audit(self.archive).oddities if oddity.code not in known]

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        audited = audit(self.archive)
        return zip_pickles(self.archive, None, audited.hidden, audited.former)


def describe(
    program: Program, what: str, facts: ProgramFacts, beside: str, attributes: list[AttributeDevice] | None = None
) -> None:
    """Report that a file is a program and what it contains, and set its JSON-ready facts.

    ``beside`` introduces the content other than weights. ``attributes`` lists devices named by objects outside the
    code, None if the program has no such objects.
    """
    named: list[CodeDevice] = [
        {"where": item.where, "device": item.device, "number": item.number, "what": item.what}
        for item in program.named_devices
    ]
    devices: ProgramDevices = {"code": named} if attributes is None else {"attributes": attributes, "code": named}
    program.described = {"kind": program.kind, "executable": True, **facts, "devices": devices}
    program.problems.insert(0, Finding.of(PROGRAM, "warning", what, refused=True))
    if program.beside:
        program.problems.append(Finding.of("program-parts", "note", f"{beside} {'; '.join(program.beside)}"))


def describe_devices(devices: Sequence[NamedDevice], most: int = 5) -> str:
    """Return ``cuda:0 (2 times) in code/a.py``, with at most ``most`` devices."""
    counts = Counter[str]()
    for item in devices:
        counts[item.device] += item.number
    names = [f"{device} ({pluralize(number, 'time')})" for device, number in counts.items()]
    files = list(dict.fromkeys(item.where for item in devices))
    return f"{join_limited(names, most=most)} in {join_limited(files, most=3)}"


def damaged(archive: Archive, name: str, flaw: str) -> MalformedError:
    """Return the error for a damaged record; ``flaw`` follows its name."""
    return MalformedError(f"{quoted(name)}{flaw}", path=archive.source.name, where=name)


def graph_of(archive: Archive, name: str) -> Graph | None:
    """Return the graph of a pickle; None if it is missing or damaged (which is reported with the other pickles)."""
    record = archive.find(name)
    try:
        return decode(archive.read(record, LIMITS.pickle_bytes), where=record.name).graph if record else None
    except PickleError:
        return None


def name_parts(noun: str, names: Sequence[str], *, rest: str = "") -> list[str]:
    """Return ``2 extra files (a and b)`` as a one-element list, with ``rest`` after the noun; [] without names."""
    return [f"{pluralize(len(names), noun)}{rest} ({join_limited(names, most=3)})"] if names else []


def read_json(archive: Archive, record: Record) -> Any:
    """Return the value of a JSON record; raise MalformedError if it is invalid or too deeply nested."""
    try:
        return json.loads(archive.read(record, _MAX_JSON))
    except (ValueError, RecursionError) as error:
        what = "it is not JSON" if isinstance(error, ValueError) else "it nests too deeply"
        raise damaged(archive, record.name, f": {what}") from error


def integers(values: Any, parse: Callable[[Any], int | None]) -> tuple[int, ...] | None:
    """Return the sizes or strides in a JSON list, or None if it is invalid."""
    if not isinstance(values, list) or len(values) > LIMITS.dimensions:
        return None
    numbers = tuple(number for value in values if (number := parse(value)) is not None)
    return numbers if len(numbers) == len(values) else None


def devices_in_sources(archive: Archive, names: Iterable[str]) -> list[NamedDevice]:
    """Return the devices that source files name, searching up to ``_MAX_SOURCES`` bytes of code."""
    devices: list[NamedDevice] = []
    left = _MAX_SOURCES
    for name in names:
        record = archive.find(name)
        if record is None or record.size > left:
            continue
        left -= record.size
        try:
            text = archive.read(record, record.size).decode("utf-8", "replace")
        except MalformedError:
            continue  # the checksum check reports it
        devices += [NamedDevice(name, device, number) for device, number in sorted(devices_in(text).items())]
    return devices


def without_numbers(reader: TensorReader) -> set[str]:
    """Return the keys of the nonempty storages, without the numbers of the code.

    A number in traced code, such as ``x * 0.5``, is stored as a tensor of one float64, int64 or bool.
    """
    return {
        storage.key
        for storage in reader.storages.values()
        if storage.numel > 1 or (storage.numel and storage.dtype.name not in ("float64", "int64", "bool"))
    }


def nested_file(archive: Archive, record: Record) -> TorchZip:
    """Read a record that is a complete torch.save file; raise MalformedError for anything else."""
    span = archive.payload(record)
    content: Source = SliceSource(archive.source, span.offset, span.size, record.name)
    if record.method or content.read(0, 4) != b"PK\x03\x04":
        raise damaged(archive, record.name, " is not an uncompressed file of torch.save")
    inner = read_whole(content)
    pickle = inner.find("data.pkl")
    if pickle is None:
        raise damaged(archive, record.name, " has no data.pkl")
    return TorchZip(inner, pickle, inner.read(pickle, LIMITS.pickle_bytes))


def append_graph(builder: Builder, graph: Graph, rename: Callable[[str], str] | None = None) -> Ref:
    """Append another graph to an arena; return its new root. ``rename`` returns new storage keys."""
    base = len(builder.nodes)
    places = range(base, base + len(graph.nodes))
    builder.nodes += [relocated(node, places) for node in graph.nodes]
    for ref in places:
        node = builder.nodes[ref]
        if type(node) is bytes:
            # The graph has protocol 2, which has no bytes: pickle writes a call instead.
            text = builder.group([builder.add(node.decode("latin-1")), builder.constant("latin1")])
            builder.nodes[ref] = Call(REDUCE, builder.named("_codecs", "encode"), text)
    if rename is None:
        return base + graph.root
    pids = dict.fromkeys(node.pid for node in graph.nodes if type(node) is Persistent)
    for ref in pids:
        pid, copy = graph.nodes[ref], builder.nodes[base + ref]
        if type(pid) is tuple and len(pid) >= 3 and type(copy) is tuple:
            builder.nodes[base + ref] = (*copy[:2], builder.add(rename(str(graph.nodes[pid[2]]))), *copy[3:])
    return base + graph.root
