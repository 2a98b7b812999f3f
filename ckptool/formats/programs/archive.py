"""Zip archives of programs that are read but not rewritten: a graph of their weights, over their records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from ...base.dtypes import Dtype
from ...base.errors import MalformedError, PickleError
from ...base.findings import PROGRAM, Finding
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, PlainTensor
from ...checkpoint.programs import AttributeDevice, CodeDevice, Program, ProgramDevices, ProgramFacts
from ...checkpoint.tensors import TensorReader
from ...files.sources import SliceSource, Source
from ...files.zips.audit import audit
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Graph, Node, Ref, relocated
from ..folders import with_storage_keys
from ..search.pickle_search import zip_pickles
from ..torch.zip_reader import TorchZip, read_whole, stored_in, stored_records

#: The most bytes of JSON that describe weights: 200,000 weights take about 60 MB.
_MAX_JSON: Final = 256 << 20
#: The most bytes of source code that are searched for devices.
_MAX_SOURCES: Final = 32 << 20
_DEVICE_TYPES: Final = "cpu|cuda|mps|xpu|hpu|npu|mtia|xla|ipu|musa|vulkan|privateuseone|meta"
#: ``torch.device("cuda:0")``, or any other string that is a device. The string ``"cpu"`` alone may mean anything. Torch
#: keeps the index in eight bits.
_DEVICE: Final = regex(
    rf'torch\.device\("((?:{_DEVICE_TYPES})(?::\d{{1,3}})?)"|"((?!cpu)(?:{_DEVICE_TYPES})(?::\d{{1,3}})?)"'
)
#: Sizes and strides as a reader of JSON gives them.
Parse = Callable[[Any], int | None]


class ProgramArchive(Program):
    """The container that the program readers fill. ``builder`` collects the tensors. ``records_of`` maps storage keys
    to records; ``inner`` maps key prefixes to nested archives."""

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
        self.named_devices: list[CodeDevice] = []
        self.graph = Graph([None], 0, self.builder.graph(0).style)
        self.problems: list[Finding] = archive.oddities[: LIMITS.listed]

    def names(self) -> list[str]:
        """Return the record names without the archive's folder."""
        return [name.removeprefix(self.archive.prefix) for name in self.archive.by_name]

    def damaged(self, name: str, flaw: str) -> MalformedError:
        """Return the error for a damaged record; ``flaw`` follows its name."""
        return MalformedError(f"{quoted(name)}{flaw}", path=self.archive.source.name, where=name)

    def json(self, name: str) -> Any:
        """Return the value of a JSON record; raise MalformedError if it is invalid or too deeply nested."""
        record = self.archive.find(name)
        try:
            return None if record is None else json.loads(self.archive.read(record, _MAX_JSON))
        except (ValueError, RecursionError) as error:
            what = "it is not JSON" if isinstance(error, ValueError) else "it nests too deeply"
            raise self.damaged(name, f": {what}") from error

    def plain_tensor(
        self, where: str, dtype: Dtype | None, numbers: Sequence[Any], parse: Parse, key: str, record: Record | None
    ) -> PlainTensor:
        """Return the tensor in a record. ``numbers`` are its sizes, strides and offset in JSON, read by ``parse``.
        ``where`` names the description in errors. Raises MalformedError for an invalid one."""
        if record is None:
            raise self.damaged(where, ": its bytes are not in the archive")
        shape, strides = (_integers(values, parse) for values in numbers[:2])
        offset = parse(numbers[2])
        if dtype is None or shape is None or strides is None or offset is None or len(shape) != len(strides):
            raise self.damaged(where, ": its dtype, layout or sizes are invalid")
        self.records_of[key] = record
        return PlainTensor(dtype, shape, strides, key, record.size, offset)

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
        audited, tensors = audit(self.archive), [record.name for record in self.records_of.values()]
        return zip_pickles(self.archive, None, audited.hidden, audited.former, storages=tensors)

    def append_graph(self, graph: Graph, rename: Callable[[str], str] | None = None) -> Ref:
        """Add another graph to the arena; return its new root. ``rename`` returns new storage keys."""
        graph = with_storage_keys(TensorReader(graph), rename) if rename else graph
        places: dict[Ref, Ref] = {}

        def copied(ref: Ref) -> Node:
            node = graph.nodes[ref]
            if type(node) is not bytes:
                return relocated(node, places)
            # The arena has protocol 2, which has no bytes: pickle writes a call instead.
            text = self.builder.add(node.decode("latin-1")), self.builder.constant("latin1")
            return self.builder.new_call("_codecs", "encode", text)

        return self.builder.graft(graph, graph.root, places, copied)

    def nested_file(self, record: Record) -> TorchZip:
        """Read a record that is a complete torch.save file; raise MalformedError for anything else."""
        span = self.archive.payload(record)
        content: Source = SliceSource(self.archive.source, span.offset, span.size, record.name)
        if record.method or content.read(0, 4) != b"PK\x03\x04":
            raise self.damaged(record.name, " is not an uncompressed file of torch.save")
        inner = read_whole(content)
        pickle = inner.find("data.pkl")
        if pickle is None:
            raise self.damaged(record.name, " has no data.pkl")
        return TorchZip(inner, pickle, inner.read(pickle, LIMITS.pickle_bytes))

    def devices_in_sources(self, names: Iterable[str]) -> list[CodeDevice]:
        """Return the devices that source files name, searching up to ``_MAX_SOURCES`` bytes of code."""
        devices: list[CodeDevice] = []
        left = _MAX_SOURCES
        for name in names:
            record = self.archive.find(name)
            if record is None or record.size > left:
                continue
            left -= record.size
            try:
                text = self.archive.read(record, record.size).decode("utf-8", "replace")
            except MalformedError:
                continue  # the checksum check reports it
            devices += [code_device(name, device, number) for device, number in sorted(devices_in(text).items())]
        return devices


#: The facts that are contents beside the weights: the noun for one of them, and what follows the noun.
_CONTENTS: Final = {
    "code_files": ("file", " of code"),
    "compiled_files": ("file", " of compiled code"),
    "sources": ("file", " of Python source"),
    "attributes": ("tensor", " in plain attributes"),
    "constants": ("constant", ""),
    "reduced": ("object", " that only its own code rebuilds, here None"),
    "restored_by_code": ("module", " that only code restores"),
    "extern": ("external module", ""),
    "extra_files": ("extra file", ""),
}


def describe(
    program: Program,
    what: str,
    facts: ProgramFacts,
    others: Iterable[str] = (),
    attributes: list[AttributeDevice] | None = None,
) -> None:
    """Report that a file is a program and what it contains, and set its JSON-ready facts. ``others`` are contents that
    are no facts; ``attributes`` are devices of objects outside the code, None without any."""
    named = list(program.named_devices)
    devices: ProgramDevices = {"code": named} if attributes is None else {"attributes": attributes, "code": named}
    program.described = {"kind": program.kind, "executable": True, **facts, "devices": devices}
    program.problems.insert(0, Finding(PROGRAM, "warning", what, refused=True))
    beside = []
    for fact, (noun, rest) in _CONTENTS.items():
        value: Any = facts.get(fact, 0)
        beside += name_parts(noun, value, rest=rest) if isinstance(value, list) else []
        beside += [pluralize(value, noun) + rest] if isinstance(value, int) and value else []
    program.beside = [*beside, *others]
    if program.beside:
        program.problems.append(Finding("program-parts", "note", f"it also holds {'; '.join(program.beside)}"))
    counts, files = Counter[str](), dict[str, None]()
    for item in named:
        if item["device"] != "cpu":
            counts[item["device"]] += item["number"]
            files[item["where"]] = None
    if counts:
        names = [f"{device} ({pluralize(number, 'time')})" for device, number in counts.items()]
        places = f"{join_limited(names, most=3)} in {join_limited(list(files), most=3)}"
        what = f"its program names devices: {places}; neither remap nor map_location changes them"
        program.problems.append(Finding("code-devices", "warning", what))


def devices_in(text: str) -> Counter[str]:
    """Return how often a text of code names each device."""
    return Counter(match[1] or match[2] for match in _DEVICE.finditer(text))


def code_device(where: str, device: str, number: int, what: str = "the code") -> CodeDevice:
    """Return a device that a part of a program names ``number`` times."""
    return {"where": where, "device": device, "number": number, "what": what}


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


def _integers(values: Any, parse: Parse) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > LIMITS.dimensions:
        return None
    numbers = tuple(number for value in values if (number := parse(value)) is not None)
    return numbers if len(numbers) == len(values) else None
