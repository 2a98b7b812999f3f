"""The sequential ``torch.save`` format before 1.6, still written on request: five pickles, then the storages.

Source: ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, repeat
from typing import Final

from ...base.dtypes import storage_dtype
from ...base.errors import MalformedError, PickleError, RefusedError, TruncatedPickleError
from ...base.findings import CUT, DAMAGED, Finding
from ...base.limits import LIMITS
from ...base.steps import command, suggested_output
from ...base.text import human_bytes, pluralize
from ...checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord, Traits
from ...checkpoint.objects import list_items
from ...checkpoint.tensors import TensorReader, storage_mention
from ...files.sources import Plan, Source, Span, merge_pieces
from ...files.tars import is_header
from ...pickles.decode import Decoded, decode
from ...pickles.nodes import Global, Graph, List, Node, Persistent
from ...pickles.opcodes import NEXT_BUFFER

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
_MAGIC_BYTES = MAGIC.to_bytes(10, "little")
_MAGIC_TEXT = b"%d" % MAGIC
#: Possible first bytes of a pickled magic number: PROTO, LONG, INT, LONG1, LONG4 and MARK.
_BEGINNINGS = (b"\x80", b"L", b"I", b"\x8a", b"\x8b", b"(")
#: The size of the file end in which a zip archive's end record begins.
_ZIP_TAIL = 22 + 0xFFFF
_PARTS = ("magic number", "protocol version", "system info", "object pickle", "list of storage keys")


class TorchLegacy(Container):
    """A legacy checkpoint. The object's pickle spans ``begin`` to ``end``; the storages begin at ``storages``."""

    format = "torch-legacy"
    traits = Traits(no_checksums="the legacy format", legacy_name="legacy", storages_in_sequence=True)
    byteorder = "little"  # on every host: the writer swaps, and the reader ignores 'little_endian'

    def __init__(self, source: Source, parts: list[Decoded], bounds: list[int], pickle: bytes) -> None:
        self.source = source
        self.begin, self.end, self.storages = bounds[3], bounds[4], bounds[5]
        self.graph = parts[3].graph
        self._parts = parts
        self.others = [part.graph for number, part in enumerate(parts) if number != 3]
        self._pickle = pickle
        self.problems: list[Finding] = []
        self.writer = "torch 1.5 or earlier, or a later one on request"
        if self.graph.style.memo_base == 1:
            self.writer = "torch 1.4 or earlier, under Python 2"
        self._listed = _listed(parts[4].graph)
        self.keys = [str(key) for key in self._listed]
        #: Whether two different views have the same key.
        self._views_differ = False
        self._places: dict[str, StorageLocation] = {}
        #: The end of the last located storage.
        self.tail = self.storages
        self._locate()
        for offset, text in self.graph.oddities[: LIMITS.listed]:
            self._note("odd-pickle", "warning", f"object pickle at byte {offset:,}: {text}")
        if any(NEXT_BUFFER in other.refused for other in self.others):
            self._note(DAMAGED, "error", "a pickle beside the object's takes bytes from outside the file", True)

    def _note(self, code: str, level: str, message: str, refused: bool = False, offset: int = -1) -> None:
        self.problems.append(Finding(code, level, message, offset=offset, refused=refused))

    @property
    def pickle(self) -> bytes:
        return self._pickle

    def stored(self, key: str) -> StorageLocation:
        return self._places.get(key, StorageLocation(None, 0))

    def records(self) -> Iterator[StoredRecord]:
        for key, stored in self._places.items():
            if stored.span is not None:
                yield StoredRecord(f"storage {key}", stored.span, stored.size, None, False, key)

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        from ..search.pickle_search import bare_pickles, nested_pickles, tar_pickles  # not needed to read or edit

        for number in (3, 0, 1, 2, 4):
            graph = self._parts[number].graph
            yield FoundPickle(_PARTS[number], graph)
            yield from nested_pickles(graph, _PARTS[number])
        if self.tail < self.source.size:
            yield from bare_pickles(self.source, self.tail, "after the last storage")
        if is_header(self.source.read(0, 512)):
            yield from tar_pickles(self.source)  # torch first tests for a tar archive

    def plan(self, pickle: bytes) -> Plan:
        source = self.source
        if self._views_differ:
            what = "views of storages in it share a key, and torch takes whichever comes first"
            step = command("edit", source.name, output=suggested_output(source.name, "clean"), repack=True)
            raise RefusedError(what, path=source.name, next="make a zip of it first: " + step)
        rest = Span(source, self.end, source.size - self.end)
        return Plan(merge_pieces([Span(source, 0, self.begin), pickle, rest]))

    def _locate(self) -> None:
        """Locate the storages. They are in key list order, each an int64 count of elements and the raw bytes."""
        if any(node.text for _, node in self.graph.of_type(Persistent)):
            what = "saved with pickle protocol 0, which turns tensors into text that torch cannot read back"
            self._note(DAMAGED, "error", what, True)
            return
        reader = TensorReader(self.graph)
        storages = reader.storages
        mentioned = {storage_mention(self.graph, ref)[0] for ref, _ in reader.uses()}  # torch reads the dtype of each
        if any(storage_dtype(cls).name == "untyped" for cls in mentioned):
            what = "it holds UntypedStorage, which torch cannot read back from the legacy format"
            self._note("legacy-untyped", "error", what, True)
        ids = _Ids(self.graph)
        self._views_differ = ids.differ
        self.problems += ids.problems
        at, size = self.storages, self.source.size
        sizes = (8 + (storages[key].nbytes if key in storages else 0) for key in self.keys)
        self.source.prefetch(zip(accumulate(sizes, initial=at), repeat(8, len(self.keys))))
        for number, (key, listed) in enumerate(zip(self.keys, self._listed)):
            storage = storages.get(key) if listed in ids.roots else None
            if storage is None:
                what = f"storage {listed!r} is listed but no tensor uses it, so its element size is unknown"
                self._note("unreferenced-storage", "error", what, True)
                return
            count = int.from_bytes(self.source.read(at, 8), "little", signed=True)
            nbytes = storage.nbytes
            if at + 8 + nbytes > size:
                whole_size = at + sum(storages[key].nbytes + 8 for key in self.keys[number:] if key in storages)
                what = f"the file is cut at {human_bytes(size)} of {human_bytes(whole_size)}:"
                what += f" {number:,} of {pluralize(len(self.keys), 'storage')} whole"
                self._note(CUT, "error", what, True, size)
                return
            if count != storage.numel:
                # The next storages are in their places: each one's own count confirms it.
                what = f"storage {key!r} holds {count:,} elements where the pickle says {storage.numel:,}"
                self._note("storage-size", "error", what, True, at)
            else:
                if key in self._places:
                    what = f"storage {key!r} is listed twice: torch takes the bytes of the last one"
                    self._note("duplicate-record", "error", what, offset=at)
                self._places[key] = StorageLocation(Span(self.source, at + 8, nbytes), nbytes)
            at += 8 + nbytes
            self.tail = at
        if at < size:
            self._note("trailing-bytes", "warning", f"{size - at:,} bytes follow the last storage", offset=at)
            if b"PK\x05\x06" in self.source.read(max(at, size - _ZIP_TAIL), _ZIP_TAIL):
                what = "the end of a zip archive follows the last storage: other readers take the file for one"
                self._note("second-archive", "error", what, offset=at)
        missing = next((key for key in storages if key not in self._places), None)
        if missing is not None:
            what = f"storage {missing!r} is used but not in the list of storages: torch leaves it uninitialised"
            self._note("missing-storage", "error", what, True)


class _Ids:
    """The persistent ids of the object, resolved in order as torch does (``persistent_load`` in ``_legacy_load``).

    Storages and views share one dict, in which the first use of a key counts. Keys keep their type: 0 is not "0".
    ``roots`` maps storage keys to sizes in elements. ``problems`` lists ids that torch refuses or no writer makes.
    ``differ`` tells that two views with the same key differ.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.roots: dict[str | int, int] = {}
        self.problems: list[Finding] = []
        self.differ = False
        self._views: dict[str | int, tuple[str | int, int, int]] = {}
        for _, node in graph.of_type(Persistent):
            if len(self.problems) < LIMITS.listed:
                self._resolve(graph.nodes[node.pid])
        twins = {str(key) for key in self.roots if type(key) is int} & self.roots.keys()
        if twins:
            self._refuse(f"storages are called {min(twins)} and {min(twins)!r}, which torch tells apart")

    def _refuse(self, what: str) -> None:
        self.problems.append(Finding(DAMAGED, "error", what, refused=True))

    def _resolve(self, pid: Node) -> None:
        parts = [self.graph.nodes[ref] for ref in pid] if type(pid) is tuple else []
        if len(parts) == 4 and parts[0] in ("module", b"module"):
            return
        if len(parts) != 6 or parts[0] not in ("storage", b"storage") or not self._storage(*parts[1:]):
            self._refuse("a persistent id that torch refuses, or that no version of torch writes")

    def _storage(self, cls: Node, key: Node, location: Node, numel: Node, view: Node) -> bool:
        """Note a storage; return False if torch does not read its persistent id, or another id contradicts it."""
        is_place = type(location) is str or (type(location) is bytes and location.isascii())
        if type(cls) is not Global or not isinstance(key, str | int) or not _is_key(key) or not is_place:
            return False
        if type(numel) is not int or not 0 <= numel < 1 << 63 or key in self._views:
            return False
        if numel and not self.roots.setdefault(key, numel):
            return False  # described as empty first
        self.roots.setdefault(key, numel)
        return view is None or self._view(key, view)

    def _view(self, root: str | int, view: Node) -> bool:
        """Note a view of a storage; return False as ``_storage`` does."""
        parts = [self.graph.nodes[ref] for ref in view] if type(view) is tuple else []
        key, offset, size = parts if len(parts) == 3 else (None, None, None)
        if not isinstance(key, str | int) or not _is_key(key) or type(offset) is not int or type(size) is not int:
            return False
        if key in self.roots or offset < 0 or size < 0 or offset + size > self.roots[root]:
            return False
        known = self._views.setdefault(key, (root, offset, size))
        self.differ |= known != (root, offset, size)
        return known[0] == root


def _is_key(node: Node) -> bool:
    """Return whether a node is a string, or an integer in the range of addresses: torch writes no other keys."""
    return type(node) is str or (type(node) is int and abs(node) < 1 << 64)


def _listed(graph: Graph) -> list[str | int]:
    root = graph.nodes[graph.root]
    if type(root) is not tuple and type(root) is not List:
        raise PickleError("it is not a list", where=_PARTS[4])
    keys: list[str | int] = []
    for ref in list_items(root):
        key = graph.nodes[ref]
        if not isinstance(key, str | int) or not _is_key(key):
            raise PickleError("a storage key that is neither a string nor a number", where=_PARTS[4])
        keys.append(key)
    return keys


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a source begins with the magic number, which is a pickle with several possible spellings."""
    if head[:1] == b"\x80" and _MAGIC_BYTES in head[:32]:
        return True
    if head[:1] not in _BEGINNINGS or (_MAGIC_BYTES not in head and _MAGIC_TEXT not in head):
        return False
    try:
        graph = decode(head, where=_PARTS[0]).graph
    except PickleError:
        return False
    return graph.nodes[graph.root] == MAGIC


#: The bytes in which the pickles are looked for first: of a remote file, these are at hand.
_FIRST: Final = 256 << 10


def read(source: Source) -> TorchLegacy:
    """Read the five pickles; raise MalformedError if one is invalid."""
    parts: list[Decoded] = []
    bounds = [0]
    # Lengths are not stored: read ahead, and double the window if a pickle is longer.
    base, window = 0, source.read(0, _FIRST)
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
    magic, version = (part.graph.nodes[part.graph.root] for part in parts[:2])
    if magic != MAGIC:
        raise PickleError("it is not that of torch: 'Invalid magic number; corrupt file?'", where=_PARTS[0])
    if version != VERSION:
        shown = version if type(version) is int and abs(version) < MAGIC else "of another type"
        raise PickleError(f"protocol version {shown}, torch knows {VERSION} only", where=_PARTS[1])
    for number in (0, 1, 2, 4):
        if parts[number].graph.has(Persistent):
            raise PickleError("a persistent id, which torch takes in the object alone", where=_PARTS[number])
