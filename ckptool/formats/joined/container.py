"""A checkpoint in per-rank files, each written by ``torch.save``, read as one.

Every joined tensor has its own storage, which is assembled from parts of the files when its bytes are read. Other
objects are taken from one of the files. The sibling modules know how tensors were cut.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Final, TypeVar

from ...base.dtypes import Dtype
from ...base.errors import MalformedError
from ...base.findings import JOINED, Finding
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import join_limited, quoted, shown
from ...checkpoint.container import Container, FoundPickle, Manifest, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.graph_editor import without_views
from ...checkpoint.sharding import read_mesh_ranks
from ...checkpoint.tensors import TensorReader
from ...files.folders import Folder
from ...files.sources import Source, Span, origins
from ...pickles.nodes import Call, Dict, Graph, Ref
from .. import read_container
from ..folders import TOO_LARGE, ShardedContainer, grouped, in_file, with_storage_keys
from ..pieces.chunks import Chunk, Rows, SignSource, joined, tensor_rows
from ..pieces.copies import RANK_VALUES, Copies, Copy, copy_problems, differ

#: The most graph nodes of files that stay in memory; further files are read again when needed.
_KEPT_NODES: Final = 1 << 18
#: Bytes of a tensor that are sampled for distinct values. With ``_FEW`` values or fewer, equal tensors prove no copy.
_SAMPLE: Final = 1 << 16
_FEW: Final = 4


_Rank = TypeVar("_Rank", bound=Hashable)


class RankFile(NamedTuple):
    """One rank's file: its name in the folder, its container, and the reader of its tensors."""

    name: str
    container: Container
    reader: TensorReader

    @property
    def graph(self) -> Graph:
        """The object in the file, with persistent ids as in a zip."""
        return self.reader.graph


class JoinedTensor(NamedTuple):
    """A joined tensor. ``chunks()`` returns its pieces, as boxes in a tensor of shape ``grid``. ``grid`` has as many
    elements as ``shape``; it differs only if the tensor was cut as a flat vector."""

    dtype: Dtype
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    chunks: Callable[[], Sequence[Chunk]]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class RankFiles(ShardedContainer):
    """Per-rank files as one checkpoint. A subclass opens the files, builds the joined graph with ``builder``, and sets
    ``format`` and ``writer``."""

    traits = Traits(loads="converted", loader="", writes_as="", assembled=True)
    #: A description of the files, for messages; "" for per-rank files.
    parts_words = ""

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self.folder = folder
        self.builder = Builder()
        self._sources: dict[str, Source] = {}
        self._kept: dict[str, RankFile] = {}
        self._room = _KEPT_NODES
        #: Joined tensors by storage key; None for a tensor with a missing part.
        self._tensors: dict[str, JoinedTensor | None] = {}
        self._joined: dict[str, StorageLocation] = {}
        #: The storages of grafted objects: file, key there, and location.
        self._grafted: dict[str, tuple[str, str, StorageLocation]] = {}
        self._grafts: dict[str, tuple[Graph, dict[Ref, Ref]]] = {}
        self._protocol = 0
        self.copies = Copies()
        #: Storage keys by the tensor names used in messages.
        self.storage_of: dict[str, str] = {}

    # -- for subclasses

    def note_twice(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Report each pair of files with the same rank in their names, as two saves leave them."""
        for one, other in pairs:
            what = f"{one} and {other} are for one place: one of them is left from another save, move that away"
            self.note_lost(what, other)

    def note_other_saves(self, saves: Mapping[_Rank, tuple[str, Mapping[str, object]]]) -> set[_Rank]:
        """Report the files whose facts are not those of most files; return their ranks. ``saves`` has file names and
        facts."""
        common = Counter(tuple(save.items()) for _, save in saves.values()).most_common(1)[0][0]
        like = next(name for name, save in saves.values() if tuple(save.items()) == common)
        odd = set()
        for rank, (name, save) in saves.items():
            own, there = (
                join_limited([f"{fact} {_words(value)}" for fact, value in one if (fact, value) not in other])
                for one, other in ((save.items(), common), (common, save.items()))
            )
            if own or there:
                odd.add(rank)
                what = f"{name} is of another save than {like}: {own or 'less'}"
                self.note_lost(f"{what}, there {there}" if there else what, name)
        return odd

    def note_ranks(
        self, saved: str, expected: Sequence[_Rank], files: Mapping[_Rank, str], name_of: Callable[[_Rank], str]
    ) -> None:
        """Report the expected ranks without a file, and the files of others. ``saved`` says how many ranks there are,
        ``name_of`` returns the file name of a rank."""
        absent = [rank for rank in expected if rank not in files]
        if absent:
            names = join_limited([name_of(rank) for rank in absent[: shown(3)]], len(absent), most=3)
            what = f"{saved} saved it, and {names} {'is' if len(absent) == 1 else 'are'} not there"
            self.note_lost(what, name_of(absent[0]))
        ranks = {*expected}
        for name in (name for rank, name in files.items() if rank not in ranks):
            self.note_lost(f"{name} is of another save: {saved} saved this one", name)

    def note_same(self, files: Iterable[tuple[str, Hashable, Sequence[Rows]]]) -> None:
        """Report files that have the tensors of another rank's file. ``files`` have a name, recorded checksums, and the
        tensors whose values must prove it, if any: those of untrained layers (zeros and ones) are equal anyway."""
        known: dict[Hashable, tuple[str, Sequence[Rows]]] = {}
        for name, checksums, tensors in files:
            first, others = known.setdefault(checksums, (name, tensors)) if checksums else (name, ())
            if first != name and (not tensors or are_equal(tensors, others)):
                self.note_lost(f"{name} has the tensors of {first}: one is a copy of the other", name)

    def note_unlike(self, odd: Sequence[str], number: int, model: str) -> None:
        """Report the files, of this ``number``, whose 32-bit weights differ from the model file."""
        if odd and len(odd) == number:
            what = f"the weights in {model} are not the rounded weights of the optimizer's files"
            self.note_lost(f"{what}: they are not of one run", model)
            return
        for name in odd:
            self.note_lost(f"the weights in {name} are not those of {model}, rounded: it is of another run", name)

    def note_own(self, names: Iterable[str], first: str, level: str = "warning") -> None:
        """Report values that differ between ranks by design, such as the states of random generators."""
        if own := join_limited(list(dict.fromkeys(names)), most=3):
            what = f"ranks have values of their own: {own}; those of {first} are taken"
            self.note(RANK_VALUES, level, what)

    def open_file(self, name: str, stack: ExitStack) -> RankFile | None:
        """Open a file of the folder; report a problem and return None if it cannot be read. Few graphs stay in memory,
        because there may be thousands of ranks."""
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
        """Add a tensor with a storage of the same name; return its reference. Without ``whole`` its bytes are missing,
        and the caller has reported why."""
        if tensor.size >= TOO_LARGE:
            raise MalformedError(f"{quoted(name)} is larger than any tensor can be", path=self.folder.path)
        key = name
        while not key or key in self._tensors:
            key += "'"  # the empty name needs a key
        self.storage_of[name] = key
        self._tensors[key] = tensor if whole else None
        return self.builder.tensor(contiguous(tensor.dtype, tensor.shape, key))

    def alias(self, ref: Ref) -> Ref:
        """Add a second tensor with the elements of an added one, for tied parameters."""
        call = self.builder.nodes[ref]
        assert isinstance(call, Call)
        return self.builder.add(Call(call.op, call.func, call.args))

    def read_again(self, name: str) -> RankFile:
        """Return a file that was opened before."""
        return self._kept.get(name) or _read(self._sources[name], name)[0]

    def graft(self, file: RankFile, ref: Ref) -> Ref:
        """Copy an object of a file with everything it refers to, including its tensors."""
        graph, places = self._graft_of(file)
        self._protocol = max(self._protocol, graph.style.protocol)
        root = self.builder.graft(graph, ref, places)
        for use, storage in file.reader.uses():
            key = grafted_key(file.name, storage.key)
            if use in places and key not in self._grafted:
                self._grafted[key] = file.name, storage.key, file.container.stored(storage.key)
        return root

    def put(self, file: RankFile, ref: Ref, other: Ref) -> None:
        """Replace ``ref`` by ``other`` in everything grafted from a file afterwards."""
        self._graft_of(file)[1][ref] = other

    def extend(self, ref: Ref, pairs: Sequence[Ref]) -> None:
        """Add alternating keys and values to a grafted mapping."""
        node = self.builder.nodes[ref]
        if isinstance(node, Dict):
            self.builder.put(ref, Dict([*node.pairs, *pairs]))
        elif isinstance(node, Call):
            self.builder.put(ref, node.filled(node.items, [*node.pairs, *pairs], node.states))

    def _graft_of(self, file: RankFile) -> tuple[Graph, dict[Ref, Ref]]:
        """Return the graph of a file with joined storage keys, and the places of its grafted nodes."""
        if file.name not in self._grafts:
            self._grafts[file.name] = with_storage_keys(file.reader, lambda key: grafted_key(file.name, key)), {}
        return self._grafts[file.name]

    def build(self, root: Ref) -> None:
        """Set the joined graph; this is the last step."""
        self.graph = self.builder.graph(root, self._protocol)
        self.builder = Builder()
        self._grafts = {}
        self.problems += copy_problems(self.copies.different, self.storage_of)
        number = len(self._sources)
        files = "one per-rank file is" if number == 1 else f"{number:,} per-rank files are"
        files = f"{self.parts_words} are" if self.parts_words else files
        self.note(JOINED, "note", f"{files} read as one checkpoint; edits write a single file")

    # -- the Container interface

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
            self._joined[key] = joined(chunks, tensor.grid, tensor.dtype.itemsize, f"{self.folder.path}: {key}")
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
        begins: dict[str, list[tuple[int, str]]] = {}
        for key, tensor in self._tensors.items():
            for chunk in tensor.chunks() if tensor is not None else ():
                size = prod(chunk.box[1]) * tensor.dtype.itemsize if tensor is not None else 0
                for span in origins(Span(chunk.source, chunk.begin, size)) if size else ():
                    begins.setdefault(span.source.name, []).append((span.offset, key))
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
        """Check every file separately: bytes that the joined checkpoint does not use, such as padding, are no
        problem."""
        problems = []
        for name, container in self._containers():
            own = TensorReader(container.graph).storages
            problems += [in_file(problem, name) for problem in container.audit(own)]
        return problems

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        """Yield the pickles of every file, as torch would run them to load the whole."""
        return grouped(
            (
                (pickle.where, pickle._replace(where=f"{name}: {pickle.where}"))
                for name, container in self._containers()
                for pickle in container.pickles(quick=quick)
            ),
            "file",
        )

    def _containers(self) -> Iterator[tuple[str, Container]]:
        for name in self._sources:
            yield name, self.read_again(name).container


def _read(source: Source, name: str) -> tuple[RankFile, Source]:
    container = read_container(source)
    reader = TensorReader(without_views(container.graph))
    read_mesh_ranks(container, reader)
    return RankFile(name, container, reader), source


def grafted_key(file: str, key: str) -> str:
    """Return the joined checkpoint's key for a storage of a file's own object."""
    return f"{os.path.splitext(file)[0]}, storage {key}"


def rows(file: RankFile, ref: Ref) -> Rows:
    """Return the elements of a plain tensor in its file. Raises MalformedError if it is not a plain tensor, or its
    bytes are missing."""

    def stored(key: str) -> Span:
        span, _, compressed, _ = file.container.stored(key)
        if span is None or compressed:
            raise MalformedError(f"the bytes of its storage are {'compressed' if compressed else 'missing'}")
        return span

    try:
        if file.container.byteorder == "big":
            raise MalformedError("its numbers are big-endian")
        return tensor_rows(file.reader, ref, stored, file.name)
    except MalformedError as error:
        error.where = file.name
        raise


def copy_in(file: RankFile, ref: Ref, place: Rows) -> Copy:
    """Return a file's tensor, with its elements at ``place``, as a copy for comparison."""
    tensor = file.reader.tensor(ref)
    assert tensor is not None
    stored = file.container.stored(tensor.storage) if tensor.numel else StorageLocation(None, 0)
    where = stored.size, tensor.offset, tensor.stride
    crc = stored.crc or 0 if not isinstance(place.source, SignSource) else 0
    return Copy(file.name, place.source, place.begin, crc, where, stored.size == tensor.own_bytes)


class Slice(NamedTuple):
    """The elements of a tensor in one file, also as a copy for comparison."""

    rows: Rows
    copy: Copy


def slice_of(file: RankFile, ref: Ref) -> Slice:
    """Return a tensor of a file; raises as ``rows`` does."""
    place = rows(file, ref)
    return Slice(place, copy_in(file, ref, place))


def whole_tensor(tensor: Rows) -> JoinedTensor:
    """Return a joined tensor that is whole in one file."""
    size = prod(tensor.shape)
    chunk = Chunk(((0,), (size,)), tensor.source, tensor.begin)
    return JoinedTensor(tensor.dtype, tensor.shape, (size,), lambda: (chunk,))


def _words(value: object) -> str:
    return join_limited([str(part) for part in value] or ["none"]) if isinstance(value, tuple) else str(value)


def are_equal(tensors: Sequence[Rows], others: Sequence[Rows]) -> bool:
    """Return whether all elements are equal, and have more than a few distinct values."""
    values: set[bytes] = set()
    for one, other in zip(tensors, others):
        size, step = prod(one.shape) * one.dtype.itemsize, one.dtype.itemsize
        if one[:2] != other[:2] or differ(one.source, one.begin, other.source, other.begin, size):
            return False
        data = one.source.read(one.begin, min(size, _SAMPLE))
        values.update(data[at : at + step] for at in range(0, len(data), step))
    return len(values) > _FEW
