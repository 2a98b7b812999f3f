"""A checkpoint in per-rank files, each written by ``torch.save``, read as one.

Every joined tensor has its own storage, which is assembled from parts of the files when its bytes are read. Other
objects are taken from one of the files.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Final, TypeVar

from ..base.dtypes import Dtype
from ..base.errors import MalformedError
from ..base.findings import INCOMPLETE, JOINED, Finding
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted, shown
from ..checkpoint.container import Container, FoundPickle, Manifest, StorageLocation, StoredRecord, Traits
from ..checkpoint.graph_builder import Builder, contiguous
from ..checkpoint.graph_editor import without_views
from ..checkpoint.objects import attributes, callable_name, holds_constants, list_items, mapping, values_of
from ..checkpoint.paths import as_children, bounded, joined
from ..checkpoint.sharding import read_mesh_ranks
from ..checkpoint.tensors import Tensor, TensorReader
from ..files.folders import Folder, open_folder
from ..files.sources import FolderSource, Source, Span, origins
from ..formats import read_container
from ..pickles.nodes import CONSTANTS, Call, Dict, Global, Graph, List, Persistent, Ref, own_value, parts_of
from .folders import TOO_LARGE, ShardedContainer, grouped, in_file, opening, with_storage_keys
from .pieces import RANK_VALUES, Chunk, Copies, Rows, SignSource, assembled, copy_problems, tensor_rows

#: The most graph nodes of files that stay in memory; further files are read again when needed.
_KEPT_NODES: Final = 1 << 18
#: Bytes of a tensor that are sampled for distinct values. With ``_FEW`` values or fewer, equal tensors prove no copy.
_SAMPLE: Final = 1 << 16
_FEW: Final = 4


_Rank = TypeVar("_Rank", bound=Hashable)
_State = TypeVar("_State")


class RankFile(NamedTuple):
    """One rank's file: its name in the folder, its container, and the reader of its tensors."""

    name: str
    container: Container
    reader: TensorReader

    @property
    def graph(self) -> Graph:
        """The object in the file, with persistent ids as in a zip."""
        return self.reader.graph

    @property
    def values(self) -> dict[str, Ref]:
        """The values at the root, by name; {} for another object than a mapping."""
        return values_of(self.graph, self.graph.root)


class _Joined(NamedTuple):
    """A joined tensor: ``chunks()`` returns its pieces, as boxes in a tensor of shape ``grid``."""

    dtype: Dtype
    grid: tuple[int, ...]
    chunks: Callable[[], Sequence[Chunk]]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return prod(self.grid) * self.dtype.itemsize


class CopiedContainer(ShardedContainer):
    """A container of several files, which may have copies of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()
        #: Storage keys by the tensor names used in messages.
        self.storage_of: dict[str, str] = {}

    def note_copies(self) -> None:
        """Report the copies that were found to differ."""
        self.problems += copy_problems(self.copies.different, self.storage_of)
        self.copies.different = []

    def compare_copies(self, storages: Collection[str] | None = None) -> None:
        self.copies.settle([name for name, key in self.storage_of.items() if storages is None or key in storages])
        self.note_copies()


class RankFiles(CopiedContainer):
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
        self._tensors: dict[str, _Joined | None] = {}
        self._joined: dict[str, StorageLocation] = {}
        #: The storages of grafted objects: file, key there, and location.
        self._grafted: dict[str, tuple[str, str, StorageLocation]] = {}
        self._grafts: dict[str, tuple[Graph, dict[Ref, Ref]]] = {}
        self._protocol = 0

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
            facts = [fact for fact in {**save, **dict(common)} if (fact, save.get(fact)) not in common]
            if facts:
                odd.add(rank)
                values = ((fact, save.get(fact)) for fact in facts)
                own = [
                    f"{fact} {join_limited([*map(str, one)]) if type(one) is tuple else one}" for fact, one in values
                ]
                self.note_lost(f"{name} is of another save than {like}: {join_limited(own)}", name)
        return odd

    def note_ranks(
        self, saved: str, expected: Sequence[_Rank], files: Mapping[_Rank, str], name_of: Callable[[_Rank], str]
    ) -> None:
        """Report the expected ranks without a file, and the files of others. ``saved`` says how many ranks there are,
        ``name_of`` returns the file name of a rank."""
        absent = [rank for rank in expected if rank not in files]
        if absent:
            self.note_lost(lost_ranks(saved, absent, name_of), name_of(absent[0]))
        ranks = {*expected}
        for name in (name for rank, name in files.items() if rank not in ranks):
            self.note_lost(f"{name} is of another save: {saved} saved this one", name)

    def note_same(self, files: Iterable[tuple[str, tuple[int, ...], Sequence[Rows]]]) -> None:
        """Report files that have the tensors of another rank's file. ``files`` have a name, recorded checksums, and the
        tensors whose values must prove it, if any: those of untrained layers (zeros and ones) are equal anyway."""
        known: dict[Hashable, tuple[str, Sequence[Rows]]] = {}
        for name, checksums, tensors in files:
            first, others = known.setdefault(checksums, (name, tensors)) if any(checksums) else (name, ())
            if first != name and (not tensors or _are_equal(tensors, others)):
                self.note_lost(f"{name} has the tensors of {first}: one is a copy of the other", name)

    def note_unlike(self, odd: Sequence[str], model: str) -> None:
        """Report the files whose 32-bit weights differ from the model file."""
        if odd:
            names = join_limited(list(odd), most=3)
            self.note_lost(f"the weights in {names} are not those of {model}, rounded: they are not of one run", odd[0])

    def note_optimizer(self) -> None:
        """Report that an optimizer's state is left out."""
        what = "the state of the optimizer is not joined: its files number the parameters and do not name them"
        self.note("optimizer", "note", what)

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

    def read_all(
        self, names: Mapping[_Rank, str], read: Callable[[RankFile], _State | None], stack: ExitStack
    ) -> dict[_Rank, _State]:
        """Return what ``read`` makes of the file of each rank; report files that cannot be read, and leave them out.
        ``read`` raises MalformedError, or reports a problem and returns None."""
        states: dict[_Rank, _State] = {}
        for rank, name in names.items():
            file = self.open_file(name, stack)
            try:
                state = read(file) if file is not None else None
            except MalformedError as error:
                self.errors.append(error)
                self.note_lost(f"{name}: {error.what}", name)
            else:
                states |= {rank: state} if state is not None else {}
        return states

    def add_tensor(
        self,
        name: str,
        dtype: Dtype,
        shape: tuple[int, ...],
        chunks: Callable[[], Sequence[Chunk]] | None = None,
        grid: tuple[int, ...] | None = None,
    ) -> Ref:
        """Add a tensor with a storage of the same name; return its reference. ``chunks()`` returns its pieces, as boxes
        in a tensor of shape ``grid``; without ``chunks`` its bytes are missing, as the caller has reported."""
        if prod(shape) * dtype.itemsize >= TOO_LARGE:
            raise MalformedError(f"{quoted(name)} is larger than any tensor can be", path=self.folder.path)
        key = name
        while not key or key in self._tensors:
            key += "'"  # the empty name needs a key
        self.storage_of[name] = key
        self._tensors[key] = _Joined(dtype, grid or shape, chunks) if chunks else None
        return self.builder.tensor(contiguous(dtype, shape, key))

    def add_rows(self, name: str, tensor: Rows) -> Ref:
        """Add a tensor that is whole in one file."""
        size = (prod(tensor.shape),)
        chunk = Chunk(((0,), size), tensor.source, tensor.begin)
        return self.add_tensor(name, tensor.dtype, tensor.shape, lambda: (chunk,), size)

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
        if file.name not in self._grafts:
            self._grafts[file.name] = with_storage_keys(file.reader, lambda key: grafted_key(file.name, key)), {}
        return self._grafts[file.name]

    def build(self, root: Ref) -> None:
        """Set the joined graph; this is the last step."""
        self.graph = self.builder.graph(root, self._protocol)
        self.builder = Builder()
        self._grafts = {}
        self.note_copies()
        number = len(self._sources)
        files = "one per-rank file is" if number == 1 else f"{number:,} per-rank files are"
        files = f"{self.parts_words} are" if self.parts_words else files
        self.note(JOINED, "note", f"{files} read as one checkpoint; edits write a single file")

    # -- the Container interface

    def stored_size(self, key: str) -> int | None:
        tensor = self._tensors.get(key)
        return super().stored_size(key) if tensor is None else tensor.size

    def stored(self, key: str) -> StorageLocation:
        if key in self._grafted:
            return self._grafted[key][2]
        tensor = self._tensors.get(key)
        if tensor is None:
            return StorageLocation(None, 0)
        if key not in self._joined:
            chunks = [chunk for chunk in tensor.chunks() if prod(chunk.box[1])]
            self._joined[key] = assembled(chunks, tensor.grid, tensor.dtype.itemsize, f"{self.folder.path}: {key}")
        return self._joined[key]

    def records(self) -> Iterator[StoredRecord]:
        """Yield the records of every file."""
        begins: dict[str, list[tuple[int, str]]] = {}
        for key, tensor in self._tensors.items():
            for chunk in tensor.chunks() if tensor is not None else ():
                size = prod(chunk.box[1]) * tensor.dtype.itemsize if tensor is not None else 0
                for span in origins(Span(chunk.source, chunk.begin, size)) if size else ():
                    begins.setdefault(span.source.name, []).append((span.offset, key))
        grafted = {(file, key): own for own, (file, key, _) in self._grafted.items()}
        for name, container in self._containers():
            places = sorted(begins.get(self._sources[name].name, []))
            for record in container.records():
                own = grafted.get((name, record.key), "") if record.key else ""
                begin, end = record.span.offset, record.span.offset + record.span.size
                inside = places[bisect_left(places, (begin, "")) : bisect_left(places, (end, ""))]
                parts = () if own else tuple(key for _, key in inside)
                yield record._replace(name=f"{name}: {record.name}", key=own, part_of=parts)

    def manifest(self, *, checked: bool = False) -> Manifest:
        return {
            f"{name}: {record}": value
            for name, container in self._containers()
            for record, value in container.manifest(checked=checked).items()
        }

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


def lost_ranks(saved: str, absent: Sequence[_Rank], name_of: Callable[[_Rank], str]) -> str:
    """Return the message that some ranks have no file. ``saved`` says how many ranks saved the checkpoint."""
    names = join_limited([name_of(rank) for rank in absent[: shown(3)]], len(absent), most=3)
    return f"{saved} saved it, and {names} {'is' if len(absent) == 1 else 'are'} not there"


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
    place = StorageLocation(None, 0)

    def stored(key: str) -> Span:
        nonlocal place
        place = file.container.stored(key)
        if place.span is None or place.compressed:
            raise MalformedError(f"the bytes of its storage are {'compressed' if place.compressed else 'missing'}")
        return place.span

    try:
        if file.container.byteorder == "big":
            raise MalformedError("its numbers are big-endian")
        found = tensor_rows(file.reader, ref, stored, file.name)
    except MalformedError as error:
        error.where = file.name
        raise
    tensor = file.reader.tensor(ref)
    assert tensor is not None
    crc = place.crc or 0 if not isinstance(found.source, SignSource) else 0
    where = place.size, tensor.offset, tensor.stride
    return found._replace(file=file.name, crc=crc, place=where, is_whole=place.size == found.size)


def _are_equal(tensors: Sequence[Rows], others: Sequence[Rows]) -> bool:
    values: set[bytes] = set()
    for one, other in zip(tensors, others):
        if one[:2] != other[:2] or not one.equals(other):
            return False
        data, step = one.source.read(one.begin, min(one.size, _SAMPLE)), one.dtype.itemsize
        values.update(data[at : at + step] for at in range(0, len(data), step))
    return len(values) > _FEW


#: The most nodes that are visited to compare values, per node of the file: values may share most of their content.
_SHARED: Final = 4
#: Node types that are compared by value: which of them share an object depends on the process.
_BY_VALUE: Final = frozenset((*CONSTANTS, str))


class Value(NamedTuple):
    """A value at a path, with the path of its container and its key's reference (-1 in a list). ``tensor`` is None for
    any other value. ``inside`` tells whether it is a container that was entered."""

    path: str
    parent: str
    key: Ref
    ref: Ref
    tensor: Tensor | None
    inside: bool


def every_value(reader: TensorReader) -> Iterator[Value]:
    """Yield every value in mappings, and in lists with more than constants, from the root on, in order. Each container
    is entered at its first path."""
    graph = reader.graph
    entered: set[Ref] = set()
    work = [("", "", -1, graph.root)]
    while work:
        path, parent, key, ref = work.pop()
        tensor, node, base = reader.tensor(ref), graph.nodes[ref], bounded(path, ref)
        below: list[tuple[str, str, Ref, Ref]] | None = None
        if tensor is None and ref not in entered:
            items = mapping(graph, ref)
            if items is not None:
                children_of = as_children(graph, items)
                below = [(joined(base, child.step), path, child.key, child.ref) for child in children_of]
            elif isinstance(node, List | tuple) and not holds_constants(graph, ref):
                below = [(f"{base}[{number}]", path, -1, part) for number, part in enumerate(list_items(node))]
        yield Value(path, parent, key, ref, tensor, below is not None)
        if below is not None:
            entered.add(ref)
            work += reversed(below)


class Digests:
    """Digests of the values in a file. Values that differ only in their tensors have equal digests."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._left = _SHARED * len(reader.graph.nodes)

    def digest(self, ref: Ref) -> Hashable:
        """Return a constant's value, or a digest of any other value; None if that would take too long."""
        nodes = self._reader.graph.nodes
        if type(nodes[ref]) in _BY_VALUE:
            return type(nodes[ref]).__name__, repr(nodes[ref])
        digest = hashlib.blake2b(digest_size=16)
        numbers: dict[Ref, int] = {}
        work = [ref]
        while work:
            ref = work.pop()
            self._left -= 1
            if self._left < 0:
                return None
            node = nodes[ref]
            below: Sequence[Ref] = ()
            if type(node) in _BY_VALUE:
                text = repr(node)
            elif ref in numbers:
                text = f"again {numbers[ref]}"
            elif self._reader.tensor(ref) is not None or isinstance(node, Persistent):
                text = "tensor"
            else:
                numbers[ref] = len(numbers)
                below = parts_of(node)
                text = f"{own_value(node)!r} {len(below)}"
            digest.update(f"{type(node).__name__} {text}\n".encode("utf-8", "surrogatepass"))
            work.extend(reversed(below))
        return digest.digest()


#: The folder has the name of the file with this suffix.
TENSORS: Final = ".tensors"
_REFERENCE: Final = "TensorReference"


class Referenced(RankFiles):
    """The file, with its references replaced by the tensors that they name."""

    format = "xser"
    parts_words = "the file and the files of its tensors"

    def __init__(self, folder: Folder, name: str, stack: ExitStack) -> None:
        super().__init__(folder)
        main = self.open_file(name, stack)
        if main is None:
            raise self.errors[0]
        self.references = references(main.graph)
        if not self.references:
            return
        tensors: dict[int, RankFile | None] = {}
        for ref, tid in self.references.items():
            if tid not in tensors:
                tensors[tid] = self.open_file(f"{name}{TENSORS}/tensor_{tid}.pt", stack)
            file = tensors[tid]
            if file is not None:
                self.put(main, ref, self.graft(file, file.graph.root))
        self.build(self.graft(main, main.graph.root))
        self.writer = f"torch_xla's xser.save: {pluralize(len(tensors), 'tensor')} in {name}{TENSORS}"


def references(graph: Graph) -> dict[Ref, int]:
    """Return the references to tensors in other files, with the numbers of these files; {} for most graphs."""
    if not any(node.name == _REFERENCE for _, node in graph.of_type(Global)):
        return {}
    found: dict[Ref, int] = {}
    for ref, node in graph.of_type(Call):
        made = callable_name(graph, node.func)
        args = graph.nodes[node.args]
        if made.startswith("copyreg.") and type(args) is tuple and args:
            made = callable_name(graph, args[0])
        if made.rpartition(".")[2] == _REFERENCE:
            values = {graph.nodes[key]: graph.nodes[value] for key, value in attributes(graph, node)}
            tid = values.get("tid")
            if type(tid) is int and 0 <= tid < 1 << 48:
                found[ref] = tid
    return found


def missing_tensors(graph: Graph, path: str) -> list[Finding]:
    """Return the problem of a file whose folder of tensors is missing; [] for any other file."""
    tids = sorted(set(references(graph).values()))
    if not tids:
        return []
    files = join_limited([f"tensor_{tid}.pt" for tid in tids], most=3)
    what = f"its tensors are in {os.path.basename(path)}{TENSORS}, which is not there: {files}"
    return [Finding(INCOMPLETE, "error", what, refused=True)]


def read_referenced(path: str) -> tuple[FolderSource, Referenced] | None:
    """Open a file with its folder of tensors; return None for a file without references. Raises UnreadableError or a
    subclass if the file itself cannot be read. A missing tensor file becomes a problem of the container."""
    folder, name = os.path.split(path)
    with opening(path) as stack:
        container = Referenced(open_folder(folder), name, stack)
        if container.references:
            return FolderSource(path, container.files, folder=path + TENSORS), container
    stack.close()
    return None
