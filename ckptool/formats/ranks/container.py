"""A checkpoint in the files of many ranks, each written by ``torch.save``, read as one.

Every tensor of the whole has a storage of its own, which is assembled from stretches of the files when its bytes are
asked for. Other objects are those of one of the files. How tensors were cut is for the modules beside this one to know.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError, RefusedError
from ...base.findings import INCOMPLETE, JOINED, Finding
from ...base.limits import LIMITS
from ...base.text import pluralize, quoted
from ...checkpoint.container import Container, FoundPickle, Manifest, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.sharding import read_mesh_ranks
from ...checkpoint.tensors import TensorReader, extent, is_contiguous, rebuild_calls
from ...checkpoint.views import without_views
from ...files.sources import AppendPlan, BytesSource, FileSource, Source
from ...pickles.nodes import Call, Dict, Graph, Ref
from .. import read_container
from ..dcp.chunks import Chunk, RowSource, joined
from ..folders import TOO_LARGE, ShardedContainer, in_file, with_storage_keys
from ..graph_parts import named_and_called
from .copies import Copies, Copy, copy_problems

_NOTHING: Final = BytesSource(b"")
#: Nodes of files that are kept in memory; files beyond them are read again when they are needed.
_KEPT_NODES: Final = 1 << 18


class RankFile(NamedTuple):
    """The file of a rank: its name in the folder, what ``torch.save`` wrote, and the reader of its tensors."""

    name: str
    container: Container
    reader: TensorReader

    @property
    def graph(self) -> Graph:
        """The object in it, with persistent ids as in a zip."""
        return self.reader.graph


class Rows(NamedTuple):
    """The elements of a tensor in a file, row by row from byte ``begin`` of ``source`` on."""

    dtype: Dtype
    shape: tuple[int, ...]
    source: Source
    begin: int


class JoinedTensor(NamedTuple):
    """A tensor of the whole. ``chunks()`` are its pieces: boxes in a tensor of the shape ``grid``, which has as many
    elements; it is the tensor's own shape unless that was cut as a vector."""

    dtype: Dtype
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    chunks: Callable[[], Sequence[Chunk]]

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize


class RankFiles(ShardedContainer):
    """The files as one checkpoint. A subclass opens them, builds the graph of the whole with ``builder``, and says its
    ``format`` and ``writer``."""

    traits = Traits(loads="converted", writer_key="torch", joined=True, pieces=True)
    #: The files in words, "" for the files of ranks.
    parts_words = ""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.builder = Builder()
        self._sources: dict[str, FileSource] = {}
        self._kept: dict[str, RankFile] = {}
        self._room = _KEPT_NODES
        #: The tensors by the keys of their storages; None for one with a part that is missing.
        self._tensors: dict[str, JoinedTensor | None] = {}
        self._joined: dict[str, StorageLocation] = {}
        #: The storages of grafted objects: the file, the key there, and what is stored.
        self._grafted: dict[str, tuple[str, str, StorageLocation]] = {}
        self._grafts: dict[str, tuple[Graph, dict[Ref, Ref]]] = {}
        self._protocol = 0
        self.copies = Copies()
        #: The storages of tensors by the names that messages have for them.
        self.storage_of: dict[str, str] = {}

    # -- for subclasses

    def note(self, code: str, level: str, message: str, where: str = "", *, refused: bool = False) -> None:
        """Add a problem of the whole."""
        if len(self.problems) < LIMITS.listed:
            self._note(code, level, message, where, refused)

    def note_twice(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Add a problem for each pair of files whose names say the same number, as those of two saves do."""
        for one, other in pairs:
            what = f"{one} and {other} are for one place: one of them is left from another save, move that away"
            self.note(INCOMPLETE, "error", what, other, refused=True)

    def open_file(self, name: str, stack: ExitStack) -> RankFile | None:
        """Open a file of the folder; None if it cannot be read, which becomes a problem.

        Few graphs are kept: thousands of ranks have thousands.
        """
        opened = self._read_file(self.folder, name, stack, _read, name)
        if opened is None:
            return None
        file, source = opened
        unchecked = file.container.traits.no_checksums
        if not self._sources or not unchecked:
            self.traits = self.traits._replace(no_checksums=unchecked)
        self._sources[name] = source
        if len(file.graph.nodes) <= self._room:
            self._room -= len(file.graph.nodes)
            self._kept[name] = file
        for problem in file.container.problems:
            if len(self.problems) < LIMITS.listed:
                self.problems.append(in_file(problem, name))
        return file

    def add_tensor(self, name: str, tensor: JoinedTensor, *, whole: bool = True) -> Ref:
        """Add a tensor with a storage named like it, and return its reference.

        Without ``whole`` its bytes are missing: the caller has added the problem that says why.
        """
        if tensor.size >= TOO_LARGE:
            raise MalformedError(f"{quoted(name)} is larger than any tensor can be", path=self.folder)
        key = self.storage_of[name] = self._new_key(name)
        self._tensors[key] = tensor if whole else None
        return self.builder.tensor(contiguous(tensor.dtype, tensor.shape, key))

    def alias(self, ref: Ref) -> Ref:
        """Add a second tensor with the elements of one that was added, as tied parameters are."""
        call = self.builder.nodes[ref]
        assert isinstance(call, Call)
        return self.builder.add(Call(call.op, call.func, call.args))

    def read_again(self, name: str) -> RankFile:
        """Return a file that was opened."""
        return self._kept.get(name) or _read(self._sources[name], name)[0]

    def graft(self, file: RankFile, ref: Ref) -> Ref:
        """Copy an object of a file with all that it leads to, its own tensors included."""
        graph, places = self._graft_of(file)
        self._protocol = max(self._protocol, graph.style.protocol)
        root = self.builder.graft(graph, ref, places)
        for use, storage in file.reader.uses():
            key = grafted_key(file.name, storage.key)
            if use in places and key not in self._grafted:
                self._grafted[key] = file.name, storage.key, file.container.stored(storage.key)
        return root

    def put(self, file: RankFile, ref: Ref, other: Ref) -> None:
        """Have all that is grafted from a file lead to ``other`` where it leads to ``ref`` there."""
        self._graft_of(file)[1][ref] = other

    def extend(self, ref: Ref, pairs: Sequence[Ref]) -> None:
        """Add alternating keys and values to a mapping that was grafted."""
        node = self.builder.nodes[ref]
        if isinstance(node, Dict):
            self.builder.put(ref, Dict([*node.pairs, *pairs]))
        elif isinstance(node, Call):
            self.builder.put(ref, node.filled(node.items, [*node.pairs, *pairs], node.states))

    def _graft_of(self, file: RankFile) -> tuple[Graph, dict[Ref, Ref]]:
        """Return the graph of a file with keys of the whole, and what was grafted of it."""
        if file.name not in self._grafts:
            self._grafts[file.name] = with_storage_keys(file.reader, lambda key: grafted_key(file.name, key)), {}
        return self._grafts[file.name]

    def build(self, root: Ref) -> None:
        """Set the graph of the whole: the last step."""
        self.graph = self.builder.graph(root, self._protocol)
        self.builder = Builder()
        self._grafts = {}
        self.problems += copy_problems(self.copies.different, self.storage_of)
        number = len(self._sources)
        files = "one per-rank file is" if number == 1 else f"{number:,} per-rank files are"
        files = f"{self.parts_words} are" if self.parts_words else files
        self._note(JOINED, "note", f"{files} read as one checkpoint; edits write a single file")

    def _new_key(self, name: str) -> str:
        key = name
        while not key or key in self._tensors:
            key += "'"  # for the empty name
        return key

    # -- the interface

    def stored_size(self, key: str) -> int | None:
        tensor = self._tensors.get(key)
        if tensor is not None:
            return tensor.size
        return super().stored_size(key)

    def stored(self, key: str) -> StorageLocation:
        if key in self._grafted:
            return self._grafted[key][2]
        tensor = self._tensors.get(key)
        if tensor is None:
            return StorageLocation(None, 0)
        if key not in self._joined:
            chunks = [chunk for chunk in tensor.chunks() if prod(chunk.box[1])]
            self._joined[key] = joined(chunks, tensor.grid, tensor.dtype.itemsize, f"{self.folder}: {key}")
        return self._joined[key]

    def records(self) -> Iterator[StoredRecord]:
        """Yield the records of every file."""
        begins = self._begins()
        grafted = {(file, key): own for own, (file, key, _) in self._grafted.items()}
        for name, container in self._containers():
            places = begins.get(self._sources[name].name, [])
            for record in container.records():
                own = grafted.get((name, record.key), "") if record.key else ""
                begin, end = record.span.offset, record.span.offset + record.span.size
                inside = places[bisect_left(places, (begin, "")) : bisect_left(places, (end, ""))]
                parts = () if own else tuple(key for _, key in inside)
                yield record._replace(name=f"{name}: {record.name}", key=own, part_of=parts)

    def _begins(self) -> dict[str, list[tuple[int, str]]]:
        """Return where the pieces of tensors begin in each file by its path, in order, with their storages."""
        begins: dict[str, list[tuple[int, str]]] = {}
        for key, tensor in self._tensors.items():
            for chunk in tensor.chunks() if tensor is not None else ():
                if prod(chunk.box[1]):
                    rows = chunk.source if isinstance(chunk.source, RowSource) else None
                    source, begin = (rows.source, rows.begin) if rows else (chunk.source, chunk.begin)
                    begins.setdefault(source.name, []).append((begin, key))
        for places in begins.values():
            places.sort()
        return begins

    def manifest(self, *, checked: bool = False) -> Manifest:
        return {
            f"{name}: {record}": value
            for name, container in self._containers()
            for record, value in container.manifest(checked=checked).items()
        }

    def compare_copies(self, storages: Collection[str] | None = None) -> None:
        names = [name for name, key in self.storage_of.items() if storages is None or key in storages]
        self.problems += copy_problems(self.copies.settle(names), self.storage_of)

    def audit(self, keys: Collection[str]) -> list[Finding]:
        """Look at every file by itself: what the whole does not use, such as padding, is no problem."""
        problems = []
        for name, container in self._containers():
            own = TensorReader(container.graph).storages
            problems += [in_file(problem, name) for problem in container.audit(own)]
        return problems

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        """Yield the pickles of every file, as torch would run them to load the whole.

        Those of thousands of ranks name and call the same: one represents them.
        """
        alike: dict[object, tuple[FoundPickle, int]] = {}
        for name, container in self._containers():
            for pickle in container.pickles(quick=quick):
                own = pickle._replace(where=f"{name}: {pickle.where}")
                if own.graph is None or own.graph.oddities or own.rest:
                    yield own
                    continue
                key = pickle.where, named_and_called(own.graph)
                first, count = alike.get(key, (own, 0))
                alike[key] = first, count + 1
        for pickle, count in alike.values():
            more = "" if count == 1 else f" and {pluralize(count - 1, 'file')} like it"
            yield pickle._replace(where=pickle.where + more)

    def _containers(self) -> Iterator[tuple[str, Container]]:
        """Yield the files."""
        for name in self._sources:
            yield name, self.read_again(name).container

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> AppendPlan:
        raise RefusedError("it is a folder of several files", path=self.folder, next="write one file of it with -o")


def _read(source: FileSource, name: str) -> tuple[RankFile, FileSource]:
    container = read_container(source)
    reader = TensorReader(without_views(container.graph))
    read_mesh_ranks(container, reader)
    return RankFile(name, container, reader), source


def grafted_key(file: str, key: str) -> str:
    """Return the key in the whole of a storage of a file's own object."""
    return f"{os.path.splitext(file)[0]}, storage {key}"


def rows(file: RankFile, ref: Ref) -> Rows:
    """Return where the elements of a plain tensor are in its file.

    Raises MalformedError if it is not one, or if its bytes are not there.
    """

    def malformed(what: str) -> MalformedError:
        return MalformedError(what, where=file.name)

    tensor = file.reader.tensor(ref)
    if tensor is None or tensor.kind != "dense":
        raise malformed("it is not a plain tensor")
    dtype, shape = BY_NAME.get(tensor.dtype), tensor.shape
    if dtype is None or dtype.packed > 1:
        raise malformed(f"its dtype is {tensor.dtype}")
    if file.container.byteorder == "big":
        raise malformed("its numbers are big-endian")
    data = list(rebuild_calls(file.graph, ref))[-1]
    flags = file.graph.nodes[data.args[6]] if len(data.args) > 6 and data.short_name == "_rebuild_tensor_v2" else None
    if isinstance(flags, Dict) and flags.pairs:
        raise malformed("it is negated or conjugated when it is read")
    if 0 in shape:
        return Rows(dtype, shape, _NOTHING, 0)
    span, _, compressed, _ = file.container.stored(tensor.storage)
    if span is None or compressed:
        raise malformed(f"the bytes of its storage are {'compressed' if compressed else 'missing'}")
    if min(tensor.stride, default=0) < 0 or tensor.offset < 0 or len(tensor.stride) != len(shape):
        raise malformed("its strides are invalid")
    reach = (tensor.offset + extent(shape, tensor.stride)) * dtype.itemsize
    if reach > span.size:
        raise malformed(f"it reaches to byte {reach:,} of its storage, which has {span.size:,}")
    begin = span.offset + tensor.offset * dtype.itemsize
    if is_contiguous(tensor):
        return Rows(dtype, shape, span.source, begin)
    return Rows(dtype, shape, RowSource(span.source, begin, shape, tensor.stride, dtype.itemsize, file.name), 0)


def copy_in(file: RankFile, ref: Ref, place: Rows) -> Copy:
    """Return a tensor of a file, whose elements are at ``place``, as a copy to be compared with others."""
    tensor = file.reader.tensor(ref)
    assert tensor is not None
    stored = file.container.stored(tensor.storage) if tensor.numel else StorageLocation(None, 0)
    where = stored.size, tensor.offset, tensor.stride
    return Copy(file.name, place.source, place.begin, stored.crc or 0, where, stored.size == tensor.own_bytes)


def whole_tensor(tensor: Rows) -> JoinedTensor:
    """Return a tensor that is whole in one file."""
    size = prod(tensor.shape)
    chunk = Chunk(((0,), (size,)), tensor.source, tensor.begin)
    return JoinedTensor(tensor.dtype, tensor.shape, (size,), lambda: (chunk,))
