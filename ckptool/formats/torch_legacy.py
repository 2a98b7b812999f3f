"""The sequential format of ``torch.save`` before 1.6, still written on request: five pickles, then the storages.

Source: ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from ..container import CUT, DAMAGED, FoundPickle, Problem, StoredBytes, StoredRecord, Traits
from ..errors import MalformedError, PickleError, RefusedError, TruncatedPickleError
from ..human import counted, human_bytes
from ..limits import LIMITS
from ..objects import elements
from ..pickles import Decoded, decode
from ..pickles.nodes import Node, Persistent
from ..source import Appending, Plan, Source, Span, merged
from ..tars import is_header
from ..tensors import TensorReader
from .pickles_in import bare_pickles, nested_pickles, tar_pickles

__all__ = ["MAGIC", "VERSION", "TorchLegacy", "read", "sniff"]

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
_MAGIC_BYTES = MAGIC.to_bytes(10, "little")
_PARTS = ("magic number", "protocol version", "system info", "object pickle", "list of storage keys")


class TorchLegacy:
    """A legacy checkpoint. ``begin`` and ``end`` bound the object's pickle, ``storages`` is where they begin."""

    format = "torch-legacy"
    traits = Traits(unsummed="the legacy format", former="legacy", in_a_row=True)
    root = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    byteorder = "little"  # on every host: the writer swaps, and the reader does not look at 'little_endian'

    def __init__(self, source: Source, parts: list[Decoded], bounds: list[int], pickle: bytes) -> None:
        self.source = source
        self.begin, self.end, self.storages = bounds[3], bounds[4], bounds[5]
        self.graph = parts[3].graph
        self._parts = parts
        self.others = [part.graph for number, part in enumerate(parts) if number != 3]
        self.pickle = pickle
        self.problems: list[Problem] = []
        self.writer = "torch 1.5 or earlier, or a later one on request"
        if self.graph.style.memo_base == 1:
            self.writer = "torch 1.4 or earlier, under Python 2"
        keys_graph = parts[4].graph
        listed = elements(keys_graph.nodes[keys_graph.root])
        self.keys = [_key(keys_graph.nodes[ref]) for ref in listed]
        self._places: dict[str, StoredBytes] = {}
        #: Where the last storage ends.
        self.tail = source.size
        self._locate()
        for offset, text in self.graph.oddities[: LIMITS.listed]:
            self.problems.append(Problem("odd-pickle", "warning", f"object pickle at byte {offset:,}: {text}"))

    def stored_size(self, key: str) -> int | None:
        found = self._places.get(key)
        return None if found is None else found.size

    def stored(self, key: str) -> StoredBytes:
        return self._places.get(key, StoredBytes(None, 0))

    def records(self) -> Iterator[StoredRecord]:
        for key, stored in self._places.items():
            if stored.span is not None:
                yield StoredRecord(f"storage {key}", stored.span, stored.size, None, False, key)

    def audit(self, keys: Collection[str]) -> list[Problem]:
        return []

    def pickles(self) -> Iterator[FoundPickle]:
        for number in (3, 0, 1, 2, 4):
            graph = self._parts[number].graph
            yield FoundPickle(_PARTS[number], graph)
            yield from nested_pickles(graph, _PARTS[number])
        if self.tail < self.source.size:
            yield from bare_pickles(self.source, self.tail, "behind the last storage")
        if is_header(self.source.read(0, 512)):
            yield from tar_pickles(self.source)  # torch asks for a tar archive first

    def plan(self, pickle: bytes | None) -> Plan:
        source = self.source
        if pickle is None:
            return Plan(merged([Span(source, 0, source.size)]))
        rest = Span(source, self.end, source.size - self.end)
        return Plan(merged([Span(source, 0, self.begin), pickle, rest]))

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        what = "in the legacy format the storages follow the pickle, which therefore cannot change in place"
        raise RefusedError(
            what, path=self.source.name, next="write a new file with -o, or make a zip of it first with ckptool repack"
        )

    def _locate(self) -> None:
        """Storages follow in the order of the key list, each an int64 count of elements and the raw bytes."""
        storages = TensorReader(self.graph).storages
        if any(isinstance(node, Persistent) and node.text for node in self.graph.nodes):
            what = "saved with pickle protocol 0, which turns tensors into text that torch cannot read back"
            self.problems.append(Problem(DAMAGED, "error", what, True))
            return
        if any(storage.dtype.name == "untyped" for storage in storages.values()):
            what = "it holds UntypedStorage, which torch cannot read back from the legacy format"
            self.problems.append(Problem("legacy-untyped", "error", what, True))
        at, size = self.storages, self.source.size
        for number, key in enumerate(self.keys):
            storage = storages.get(key)
            if storage is None:
                what = f"storage {key!r} is listed but no tensor uses it, so its element size is unknown"
                self.problems.append(Problem("unreferenced-storage", "error", what, True))
                return
            count = int.from_bytes(self.source.read(at, 8), "little", signed=True)
            nbytes = storage.nbytes
            if at + 8 + nbytes > size:
                sizes = [storages[key].nbytes + 8 for key in self.keys[number:] if key in storages]
                what = (
                    f"the file is cut at {human_bytes(size)} of {human_bytes(at + sum(sizes))}:"
                    f" {number:,} of {counted(len(self.keys), 'storage')} whole"
                )
                self.problems.append(Problem(CUT, "error", what, True, offset=size))
                return
            if count != storage.numel:
                # Those behind it stand where they stand: each has a count of its own to tell.
                what = f"storage {key!r} holds {count:,} elements where the pickle says {storage.numel:,}"
                self.problems.append(Problem("storage-size", "error", what, True, offset=at))
                at += 8 + nbytes
                continue
            self._places[key] = StoredBytes(Span(self.source, at + 8, nbytes), nbytes)
            at += 8 + nbytes
        self.tail = at
        if at < size:
            rest = f"{size - at:,} bytes stand behind the last storage"
            self.problems.append(Problem("trailing-bytes", "warning", rest, offset=at))
        missing_keys = [key for key in storages if key not in self._places]
        if missing_keys:
            what = f"storage {missing_keys[0]!r} is used but not in the list of storages"
            self.problems.append(Problem("missing-storage", "error", what, True))


def _key(node: Node) -> str:
    """A storage key: a string, in old files a number."""
    if isinstance(node, str) or (isinstance(node, int) and abs(node) < 1 << 64):
        return str(node)
    raise PickleError("a storage key that is neither a string nor a number", where=_PARTS[4])


def sniff(head: bytes, source: Source) -> bool:
    """The magic number is a pickle of its own, in one of five spellings."""
    if head[:1] == b"\x80":
        return _MAGIC_BYTES in head[:32]
    return head.startswith(b"L%dL\n" % MAGIC)


def read(source: Source) -> TorchLegacy:
    """Read the five pickles; raises MalformedError where one of them breaks."""
    parts: list[Decoded] = []
    bounds = [0]
    # There are no lengths: read ahead, and twice as much whenever a pickle is longer than that.
    base, window = 0, source.read(0, 1 << 20)
    for name in _PARTS:
        while True:
            begin = bounds[-1]
            try:
                part = decode(window, begin - base, where=name)
                break
            except TruncatedPickleError as error:
                if base + len(window) >= source.size:
                    what = f"the file is cut: it ends within the {name}"
                    raise MalformedError(what, path=source.name, next="get a whole copy of the file") from error
                if len(window) - (begin - base) >= LIMITS.pickle_bytes:
                    raise
                base, window = begin, source.read(begin, min(2 * len(window) + (1 << 20), LIMITS.pickle_bytes))
        parts.append(part)
        bounds.append(base + part.end)
        if name == _PARTS[3]:
            pickle = window[begin - base : part.end]
    _check_head(parts)
    return TorchLegacy(source, parts, bounds, pickle)


def _check_head(parts: list[Decoded]) -> None:
    version = parts[1].graph.nodes[parts[1].graph.root]
    if version != VERSION:
        raise PickleError(f"protocol version {version!r}, torch knows {VERSION} only", where="protocol version")
