"""An item of a ``.distcp`` file: a ``torch.save`` archive with one object, at some offset of the file."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import prod
from typing import Final, TypeVar
from weakref import ref as weakly

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError, NotACheckpointError, PickleError
from ...base.findings import DAMAGED
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...checkpoint.tensors import ID_PARTS, TensorReader
from ...files.compressed import ZstdSource
from ...files.downloads import prefetch
from ...files.sources import BytesSource, ExpectedChecksum, SliceSource, Source, Span
from ...files.zips.reader import Record, Window, checksum, nearby, read_archive
from ...pickles.nodes import Graph, Persistent, non_utf8_strings
from ...safety.arguments import CallChecker
from ...safety.torch_lists import NEWEST, ever_listed
from ...safety.weights_only import graph_blockers
from ..pieces import Box, Chunk, ChunkedSource, Layout, Rows, layout_of, tensor_rows
from ..torch.zip_reader import TorchZip, read_checkpoint
from .metadata import SMALL, Item, edges

#: The most pickles that are cached, and the most bytes of each: a model has tensors of a few dozen shapes.
_MAX_KNOWN: Final = 256
_MAX_PICKLE: Final = 4096
#: A record with digits that torch derives from all checksums.
_IDENTITY: Final = ".data/serialization_id"
#: Tensors whose items stay open.
_MOST_OPENED: Final = 16
_T = TypeVar("_T")
_Key = TypeVar("_Key")


class OpenedItem(NamedTuple):
    """An opened item and its torch.save archive, after all checks that need only this item. The archive begins at byte
    ``at`` of ``source``, which is the item's file, or the inflated item."""

    item: Item
    source: Source
    at: int
    zip: TorchZip

    @property
    def graph(self) -> Graph:
        """The object in the item."""
        return self.zip.graph

    def span(self, record: Record) -> Span:
        """Return the span of a record's bytes in the source."""
        return self.within(self.zip.archive.payload(record))

    def storage(self, key: str) -> tuple[Span, Record]:
        """Return the span of a storage's bytes in the source, and its record; raise MalformedError if they are
        missing."""
        record = self.zip.archive.find(f"data/{key}")
        if record is None or record.method != 0:
            what = f"{self.item.name!r}: the bytes of its storage are {'compressed' if record else 'missing'}"
            raise MalformedError(what, where=self.item.place)
        return self.span(record), record

    def within(self, span: Span) -> Span:
        """Convert a span of the archive to a span of the source."""
        return Span(self.source, self.at + span.offset, span.size)


class TensorItem(NamedTuple):
    """The elements of a tensor, row by row from byte ``begin`` of ``source``. ``span`` is the record that holds them,
    None for an empty tensor; ``crc`` its recorded CRC-32, 0 if not recorded."""

    source: Source
    begin: int
    span: Span | None
    crc: int

    def rows(self, dtype: Dtype, shape: tuple[int, ...], file: str) -> Rows:
        """Return the elements for comparison with copies in other files."""
        found, span = Rows(dtype, shape, self.source, self.begin, file), self.span
        if span is None or self.source is not span.source:
            return found  # assembled rows have no place in a record
        place = span.size, self.begin - span.offset
        return found._replace(crc=self.crc, place=place, is_whole=span.size == found.size)


class _Alike(NamedTuple):
    """The parts of an item that are equal for all tensors of one dtype and shape. ``head`` is followed by the record of
    the elements, which has ``size`` bytes, with the elements ``skipped`` bytes after its start. ``rest`` matches the
    ``length`` bytes after it; the first group is the checksum of the elements."""

    head: bytes
    size: int
    skipped: int
    length: int
    rest: re.Pattern[bytes]

    def read(self, item: Item, file: Window) -> TensorItem | None:
        """Return the elements of an item that matches this pattern, or None if it does not."""
        begin = len(self.head)
        if item.length != begin + self.size + self.length or file.read(item.at, begin) != self.head:
            return None
        match = self.rest.fullmatch(file.read(item.at + begin + self.size, self.length))
        if match is None:
            return None
        span = Span(file.source, item.at + begin, self.size)
        return TensorItem(file.source, span.offset + self.skipped, span, int.from_bytes(match["crc0"], "little"))


def _alike(opened: OpenedItem, span: Span, tensor: TensorItem) -> _Alike | None:
    """Return the pattern of an opened tensor item whose elements are at ``span``; None if torch did not write it so."""
    item, source = opened.item, span.source
    begin, end = span.offset + span.size, opened.item.at + opened.item.length
    if span.offset - item.at + end - begin > _MAX_PICKLE:
        return None
    head, tail = source.read(item.at, span.offset - item.at), source.read(begin, end - begin)
    #: What differs between items: its place, and an expression for it.
    free: list[tuple[int, int, bytes]] = []
    crcs = [tensor.crc]
    record = opened.zip.archive.find(_IDENTITY)
    if record is not None and record.crc != tensor.crc and not record.method:
        crcs.append(record.crc)
        at = opened.span(record).offset - begin
        free.append((at, at + record.size, b"\\d{%d}" % record.size))
        if at < 0 or not tail[at : at + record.size].isdigit():
            return None
    for number, crc in enumerate(crcs):
        before, *more = tail.split(crc.to_bytes(4, "little"))
        if len(more) != 2:  # each checksum is in the descriptor and in the directory
            return None
        second = len(before) + 4 + len(more[0])
        free.append((len(before), len(before) + 4, b"(?P<crc%d>.{4})" % number))
        free.append((second, second + 4, b"(?P=crc%d)" % number))
    expression, at = b"", 0
    for start, stop, part in sorted(free):
        if start < at:
            return None
        expression += re.escape(tail[at:start]) + part
        at = stop
    rest = re.compile(expression + re.escape(tail[at:]), re.DOTALL)
    return _Alike(head, span.size, tensor.begin - span.offset, len(tail), rest)


class KnownItems:
    """A cache of item patterns: tensors of one dtype and shape differ only in elements and checksum. ``read`` returns a
    tensor that matches a cached pattern. Calling the object returns the graph of a pickle seen before."""

    def __init__(self) -> None:
        self._graphs: dict[bytes, Graph] = {}
        self._last = b""
        self._window = nearby()  # the next item most probably follows the last one
        self._alike: dict[tuple[str, tuple[int, ...]], _Alike] = {}

    def read(self, item: Item, file: Source, dtype: Dtype, shape: tuple[int, ...]) -> TensorItem | None:
        """Return the elements of a tensor if its item matches the pattern for this dtype and shape, else None."""
        alike = self._alike.get((dtype.name, shape))
        if alike is None or item.transforms:
            return None
        return alike.read(item, self._window(file))

    def learn(self, opened: OpenedItem, dtype: Dtype, shape: tuple[int, ...], tensor: TensorItem) -> None:
        """Remember the pattern of a tensor's item."""
        span = tensor.span
        if span is None or tensor.source is not opened.source or opened.item.transforms or not tensor.crc:
            return
        alike = _alike(opened, span, tensor)
        if alike is not None:
            _keep(self._alike, (dtype.name, shape), alike)

    def __call__(self, data: bytes) -> Graph | None:
        self._last = data
        return self._graphs.get(data)

    def keep(self, graph: Graph, end: int) -> None:
        """Remember the graph of the pickle looked up last, if it ends at byte ``end``."""
        if end == len(self._last) <= _MAX_PICKLE and self._last not in self._graphs:
            _keep(self._graphs, self._last, graph)


def _keep(known: dict[_Key, _T], key: _Key, value: _T) -> None:
    if len(known) >= _MAX_KNOWN:
        del known[next(iter(known))]
    known[key] = value


def open_item(item: Item, file: Source, known: KnownItems, size: int = 0) -> OpenedItem:
    """Open an item, with the tensor's ``size`` in bytes; it bounds what a compressed item inflates to. Raises
    MalformedError, naming the item, unless it is an archive that torch.load accepts and all readers read alike, and for
    a tensor of big-endian numbers."""
    try:
        whole, at, length = file, item.at, item.length
        if item.transforms:
            whole = ZstdSource(file, at, length, LIMITS.member_bytes + size, item.place)
            at, length = 0, whole.size
        source: Source = SliceSource(whole, at, length, item.place)
        if length <= SMALL:
            source = BytesSource(source.read(0, length), item.place)
        opened = OpenedItem(item, whole, at, read_checkpoint(read_archive(source), known))
        for problem in opened.zip.problems:
            if problem.refused_by_torch or problem.ambiguous or problem.code == DAMAGED:
                raise MalformedError(problem.message, where=item.place)
        flaw = _cached(opened.graph, "load flaw of an item", _load_flaw)
        if flaw:
            raise MalformedError(f"torch does not load it: {flaw}", where=item.place)
        known.keep(opened.graph, opened.zip.end)
    except (MalformedError, NotACheckpointError) as error:
        why = MalformedError.__str__(error) if isinstance(error, PickleError) else error.what
        what = f"{item.name!r}: no archive of torch.save is where .metadata says ({why})"
        raise MalformedError(what, path=file.name, where=item.place) from error
    if item.offset is not None and opened.zip.byteorder == "big":
        what = f"{item.name!r}: its numbers are big-endian"
        raise MalformedError(what, path=file.name, where=item.place, next="load it with torch")
    return opened


class PiecesSource(ChunkedSource):
    """The rows of a tensor, read from its ``items`` at ``boxes``, which are opened and checked when the first bytes are
    read, and forgotten after other tensors were read, so that only the list stays in memory. ``files``: their files."""

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        boxes: Sequence[Box],
        items: Sequence[Item],
        files: Sequence[Source],
    ) -> None:
        super().__init__(shape, BY_NAME[dtype].itemsize, (), name)
        self.dtype, self.boxes, self.items, self.files = dtype, boxes, items, files
        self.has_crc = len(items) == 1
        #: The runs of the tensor, and the recorded checksums of its items.
        self._opened: tuple[Layout, Sequence[ExpectedChecksum]] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return PiecesSource, (self.name, self.dtype, self.shape, self.boxes, self.items, self.files)

    #: Unlike other sources, it does not tell where its bytes come from: it would have to open its items.
    origins = None  # type: ignore[assignment]

    def missing(self, ranges: Iterable[tuple[int, int]]) -> Iterable[Span]:
        """Return what is missing of all items, because finding out which ones have the ranges would open them."""
        places: dict[str, list[tuple[int, int]]] = {}
        for item in self.items:
            places.setdefault(os.path.basename(item.file), []).append((item.at, item.length))
        return chain.from_iterable(file.missing(places.get(os.path.basename(file.name), ())) for file in self.files)

    @property
    def layout(self) -> Layout:
        return self._pieces()[0]

    def checksums(self) -> Sequence[ExpectedChecksum]:
        return self._pieces()[1]

    def crc(self) -> int:
        (piece,), checksums = self.layout.runs, self.checksums()
        whole = Span(piece.source, piece.begin, self.size)
        return next((own.crc for own in checksums if own.span == whole and own.crc), 0) or checksum(
            Span(self, 0, self.size), self.size, False, self.name
        )

    def _pieces(self) -> tuple[Layout, Sequence[ExpectedChecksum]]:
        opened = self._opened  # another thread may replace it
        if opened is None:
            with _LOCK:
                opened = self._opened = self._opened or self._open()
                _RECENT.append(weakly(self))
                oldest = _RECENT.popleft()() if len(_RECENT) > _MOST_OPENED else None
                if oldest is not None and oldest is not self:
                    oldest._opened = None
        return opened

    def _open(self) -> tuple[Layout, Sequence[ExpectedChecksum]]:
        dtype, chunks, checksums = BY_NAME[self.dtype], [], []
        files = {os.path.basename(file.name): file for file in self.files}
        prefetch(chain.from_iterable(edges(item, files) for item in self.items))
        for box, item in zip(self.boxes, self.items):
            file, size = files[os.path.basename(item.file)], prod(box[1]) * dtype.itemsize
            try:
                tensor = _KNOWN.read(item, file, dtype, box[1])
                tensor = tensor or open_tensor(open_item(item, file, _KNOWN, size), dtype, box[1], _KNOWN)
            except MalformedError as error:
                error.path = error.path or file.name
                raise
            chunks.append(Chunk(box, tensor.source, tensor.begin))
            if tensor.span is not None and tensor.crc:
                where = f"the storage of {item.name}"
                checksums.append(ExpectedChecksum(tensor.span, tensor.span.size, False, tensor.crc, where))
        return layout_of(self.shape, self.width, chunks), checksums


#: The shared cache of item patterns. Only one thread at a time opens items.
_KNOWN: Final = KnownItems()
_LOCK: Final = threading.RLock()
#: The tensors whose items were opened last.
_RECENT: Final[deque[weakly[PiecesSource]]] = deque()


class SubclassError(MalformedError):
    """An item holds a tensor of another class, made of several tensors."""


def open_tensor(opened: OpenedItem, dtype: Dtype, shape: tuple[int, ...], known: KnownItems) -> TensorItem:
    """Return the elements of the tensor in an item. Raises MalformedError unless it has this dtype and shape, and all
    its bytes."""
    item, graph = opened.item, opened.graph
    reader = _cached(graph, "reader of an item", TensorReader)
    tensor = reader.tensor(graph.root)
    if tensor is not None and tensor.kind == "wrapper":
        what = f"a tensor of {tensor.cls}, which torch loads, and ckptool does not join"
        raise SubclassError(f"{item.name!r}: {what}", where=item.place)
    if tensor is not None and (tensor.dtype, tensor.shape) != (dtype.name, shape):
        wanted, actual = _tensor_text(dtype.name, shape), _tensor_text(tensor.dtype, tensor.shape)
        what = f"{item.name!r}: .metadata lists {wanted}, and the item holds {actual}"
        raise MalformedError(what, where=item.place)
    places: list[tuple[Span, Record]] = []

    def stored(key: str) -> Span:
        places.append(opened.storage(key))
        size, wanted = places[0][0].size, reader.storages[key].nbytes
        if size != wanted:
            raise MalformedError(f"its storage has {size:,} bytes, and should have {wanted:,}")
        return places[0][0]

    try:
        _, _, source, begin, *_ = tensor_rows(reader, graph.root, stored, item.place)
        flaw = _cached(graph, "tensor flaw of an item", _tensor_flaw)
        if flaw:
            raise MalformedError(f"torch does not load it: {flaw}")
    except MalformedError as error:
        raise MalformedError(f"{item.name!r}: {error.what}", where=item.place) from error
    # With further storages, the item has bytes beside the tensor's.
    span, record = places[0] if places and len(reader.storages) == 1 else (None, None)
    found = TensorItem(source, begin, span, record.crc if record else 0)
    known.learn(opened, dtype, shape, found)
    return found


def _cached(graph: Graph, name: str, function: Callable[[Graph], _T]) -> _T:
    key = (name, graph.root)
    if key not in graph.cache:
        graph.cache[key] = function(graph)
    value: _T = graph.cache[key]
    return value


def _tensor_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _load_flaw(graph: Graph) -> str:
    """Return why ``torch.load`` fails at an item's pickle, even in values that the pickle discards, or ""."""
    reader = _cached(graph, "reader of an item", TensorReader)
    ids = ((ref, graph.nodes[node.pid]) for ref, node in graph.of_type(Persistent))
    if any(type(pid) is not tuple or len(pid) != ID_PARTS or reader.storage(ref) is None for ref, pid in ids):
        return "it describes a storage in a way that torch cannot read"
    return "a byte string of Python 2 in it is not UTF-8" if any(True for _ in non_utf8_strings(graph)) else ""


def _tensor_flaw(graph: Graph) -> str:
    """Return why ``torch.load(weights_only=True)``, with which DCP loads every tensor, refuses an item; "" if not."""
    for blocker in graph_blockers(graph, NEWEST):
        return f"it names {blocker.name}" if blocker.name else blocker.rule
    reader = _cached(graph, "reader of an item", TensorReader)
    return next((refusal.message for refusal in CallChecker(graph, reader).refused(ever_listed()).values()), "")
