"""The tar format of torch 0.1: an object, its tensors and its storages in three members of a tar archive.

Source: ``torch/serialization.py`` (``legacy_load`` in ``_legacy_load``). Nobody writes it any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from posixpath import normpath
from struct import unpack
from types import MappingProxyType
from typing import Final, NamedTuple

from ...base.dtypes import Dtype, storage_dtype
from ...base.errors import MalformedError, NotACheckpointError, RefusedError, TruncatedPickleError
from ...base.limits import LIMITS
from ...base.text import counted, shown
from ...checkpoint.container import ODD_MEMBER, FoundPickle, Problem, StoredBytes, StoredRecord, Traits, of_records
from ...checkpoint.graph_builder import Builder, PlainTensor
from ...checkpoint.objects import elements
from ...checkpoint.tensors import extent
from ...files.sources import Appending, Plan, Source, Span, merged
from ...files.tars import Member, members, resolved
from ...pickles.decode import Decoded, decode
from ...pickles.encode import encode
from ...pickles.nodes import Call, Dict, Filling, FrozenSet, Global, Graph, Instance, List, Node, Persistent, Ref, Set
from ...pickles.uncommon_opcodes import not_utf8
from ..pickle_search import bare_pickles, nested_pickles, tar_pickles

# -- The object of a torch 0.1 archive with its tensors in place: one graph, as ``torch.save`` writes it today


def started(graph: Graph) -> Builder:
    """A builder whose nodes begin with those of a graph, so that its references stay what they are."""
    builder = Builder()
    builder.nodes.extend(graph.nodes)
    return builder


def redirected(graph: Graph, builder: Builder, places: Mapping[Ref, Ref]) -> Graph:
    """The graph over the builder's nodes in which whatever held a reference of ``places`` holds its new one."""
    count = len(graph.nodes)
    nodes = [_held(node, places) if ref < count else node for ref, node in enumerate(builder.nodes)]
    for ref in places:
        nodes[ref] = None  # nothing leads to it any more
    root = places.get(graph.root, graph.root)
    return Graph(nodes, root, graph.style, graph.refused, graph.oddities)


def _held(node: Node, places: Mapping[Ref, Ref]) -> Node:
    def moved(refs: Sequence[Ref]) -> list[Ref]:
        return [places.get(ref, ref) for ref in refs]

    if isinstance(node, tuple):
        return tuple(moved(node)) if any(ref in places for ref in node) else node
    if isinstance(node, List | Set | FrozenSet):
        return type(node)(moved(node.items))
    if isinstance(node, Dict):
        return Dict(moved(node.pairs))
    if not isinstance(node, Instance):
        return node
    twin: Instance = node
    if isinstance(node, Call):
        twin = Call(node.op, places.get(node.func, node.func), places.get(node.args, node.args), node.kwargs)
    elif isinstance(node, Persistent):
        twin = Persistent(places.get(node.pid, node.pid), node.text)
    elif isinstance(node, Global):
        twin = Global(node.module, node.name, node.parts)
    else:
        return node
    filling = node.filling
    if filling is not None:
        twin.filling = Filling(moved(filling.items), moved(filling.pairs), moved(filling.states))
    return twin


_OBJECT, _STORAGES, _TENSORS = "pickle", "storages", "tensors"
#: Read at once for the pickle of a storage or a tensor: a key, a location and a class.
_SMALL: Final = 512
#: Bytes of such a pickle, and of the system info, at most.
_MODEST: Final = 1 << 16
#: Zeros that an archive is filled up with at its end, at most: GNU tar has records of 10,240 bytes, others larger ones.
_PADDING: Final = 1 << 20
#: Modules of the classes of storages, and the dtypes of those that torch 0.1 had.
_MODULES: Final = ("torch", "torch.cuda")
_DTYPES: Final = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")


class _Storage(NamedTuple):
    """A storage: ``numel`` elements from byte ``begin`` of the file on."""

    dtype: Dtype
    location: str
    numel: int
    begin: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class _Part(NamedTuple):
    """All of a storage, or a view of ``numel`` elements from ``offset`` on; ``root`` is the key of the storage."""

    root: int
    offset: int
    numel: int


class _Tensor(NamedTuple):
    """A tensor over the storage or view ``part``; ``offset`` in elements counts from its beginning."""

    part: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class TorchTar:
    """A checkpoint of torch 0.1. Keys of storages are the numbers that the file has for them."""

    format = "torch-tar"
    traits = Traits(unsummed="the tar format", written="torch", former="tar")
    root = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    byteorder = "little"
    writer = "torch 0.1"

    def __init__(self, source: Source, found: Mapping[str, Member], odd: Sequence[Problem]) -> None:
        self.source = source
        self._known = {found[_OBJECT].begin}
        self.problems: list[Problem] = [
            Problem("torch-tar", "note", "it is in the tar format of torch 0.1, which needs weights_only=False", True),
            *odd,
        ]
        self._storages: dict[int, _Storage] = {}
        self._parts: dict[int, _Part] = {}
        self._tensors: dict[int, _Tensor] = {}
        for name in (_STORAGES, _TENSORS):
            small = _Reader(source, found[name])
            if name == _STORAGES:
                small.storages(self._storages, self._parts)
            else:
                small.tensors(self._parts, self._tensors)
            self._known.add(found[name].begin if small.at == small.end else 0)
            if small.at < small.end:
                what = f"{small.end - small.at:,} bytes in the member {name!r} behind what torch reads of it"
                self.problems.append(Problem("trailing-bytes", "warning", what, offset=small.at))
        reader = _Reader(source, found[_OBJECT], LIMITS.pickle_bytes)
        self._object = reader.pickle(LIMITS.pickle_bytes)
        self._rest = reader.end - reader.at
        self.others: list[Graph] = []  # nobody loads 'sys_info'
        self.graph = self._whole()
        for offset, text in self._object.oddities[: LIMITS.listed]:
            self.problems.append(Problem("odd-pickle", "warning", f"pickle at byte {offset:,}: {text}"))

    @property
    def pickle(self) -> bytes:
        """What ``torch.save`` would write for the same object: the one in the file has no tensors in it."""
        return encode(self.graph)

    def stored_size(self, key: str) -> int | None:
        found = self._storages.get(_number(key))
        return None if found is None else found.nbytes

    def stored(self, key: str) -> StoredBytes:
        found = self._storages.get(_number(key))
        if found is None:
            return StoredBytes(None, 0)
        return StoredBytes(Span(self.source, found.begin, found.nbytes), found.nbytes)

    def records(self) -> Iterator[StoredRecord]:
        for key, storage in sorted(self._storages.items(), key=lambda item: item[1].begin):
            span = Span(self.source, storage.begin, storage.nbytes)
            yield StoredRecord(f"storage {key}", span, storage.nbytes, None, False, str(key))

    manifest = of_records

    def audit(self, keys: Collection[str]) -> list[Problem]:
        return []

    def pickles(self) -> Iterator[FoundPickle]:
        # Those of storages and tensors hold numbers, strings and known classes: nothing else was let in.
        yield FoundPickle(_OBJECT, self._object, "", self._rest)
        yield from nested_pickles(self._object, _OBJECT)
        yield from tar_pickles(self.source, known=self._known)
        yield from bare_pickles(self.source, 0, "from the first byte")  # of a file that is of two formats at once

    def plan(self, pickle: bytes | None) -> Plan:
        if pickle is not None:
            raise AssertionError("a file of torch 0.1 is not written again: an edit makes a zip")
        return Plan(merged([Span(self.source, 0, self.source.size)]))

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        what = "the tar format of torch 0.1 is read only"
        raise RefusedError(what, path=self.source.name, next="write a new file with -o, which is a zip")

    def _whole(self) -> Graph:
        """The object with its tensors and storages in place of their numbers."""
        graph = self._object
        builder = started(graph)
        made: dict[int, Ref] = {}
        places: dict[Ref, Ref] = {}
        for ref, node in enumerate(graph.nodes):
            if not isinstance(node, Persistent):
                continue
            pid = graph.nodes[node.pid]
            if isinstance(pid, tuple) and len(pid) == 3 and isinstance(graph.nodes[pid[0]], Global):
                places[ref] = pid[0]  # (class, file, source): torch takes the class
                continue
            key = _number(pid)
            if node.filling is not None or not (key in self._tensors or key in self._parts):
                what = f"the object names a tensor {shown(str(key))} that is not in the file"
                raise MalformedError(what, where=_OBJECT, path=self.source.name)
            if key not in made:
                made[key] = self._tensor(builder, key) if key in self._tensors else self._storage(builder, key)
            places[ref] = made[key]
        return redirected(graph, builder, places)

    def _tensor(self, builder: Builder, key: int) -> Ref:
        tensor = self._tensors[key]
        part = self._parts[tensor.part]
        storage = self._storages[part.root]
        offset = part.offset + tensor.offset
        return builder.tensor(
            PlainTensor(
                storage.dtype,
                tensor.shape,
                tensor.strides,
                str(part.root),
                storage.nbytes,
                offset,
                storage.location,
            )
        )

    def _storage(self, builder: Builder, key: int) -> Ref:
        part = self._parts[key]
        storage = self._storages[part.root]
        if part.numel != storage.numel:
            # A storage of its own: no other format has storages that are parts of others.
            begin = storage.begin + part.offset * storage.dtype.itemsize
            storage = self._storages[key] = storage._replace(numel=part.numel, begin=begin)
            what = f"storage {key} is a part of another one, and becomes one of its own in an edited file"
            self.problems.append(Problem("storage-view", "warning", what))
        else:
            key = part.root
        return builder.storage(storage.dtype, str(key), storage.location, storage.nbytes)


def _number(value: Node) -> int:
    """The number of a tensor or storage: torch takes ``int()`` of it; -1 for what is none."""
    if type(value) is int:
        return value if 0 <= value < 1 << 64 else -1
    return int(value) if type(value) is str and len(value) <= 20 and value.isascii() and value.isdigit() else -1


def _of_class(cls: Node, kind: str) -> Dtype | None:
    """The dtype of a class of storages or tensors of torch 0.1, None for every other one: torch imports it."""
    if not isinstance(cls, Global) or cls.module not in _MODULES or not cls.name.endswith(kind):
        return None
    dtype = storage_dtype(cls.name.removesuffix(kind) + "Storage")
    return dtype if dtype.name in _DTYPES else None


class _Reader:
    """Reads one member from its beginning to its end: small pickles, and bytes between them."""

    def __init__(self, source: Source, member: Member, ahead: int = _SMALL) -> None:
        self.source, self.name = source, member.name
        self.at, self.end = member.begin, member.begin + member.size
        self.ahead = ahead
        if self.end > source.size:
            what = f"the file is cut: it ends within the member {member.name!r}"
            raise MalformedError(what, path=source.name, next="get a whole copy of the file")

    def pickle(self, most: int) -> Graph:
        """The pickle that begins here, of at most so many bytes."""
        size = min(self.ahead, most)
        while True:
            data = self.source.read(self.at, min(size, self.end - self.at))
            try:
                found: Decoded = decode(data, where=self.name)
            except TruncatedPickleError:
                if size >= most or len(data) < size:
                    raise
                size = min(size * 8, most)
                continue
            self.at += found.end
            if any(not_utf8(found.graph)):
                self.broken("a string of Python 2 that is not UTF-8")
            if found.memo > LIMITS.memo:
                self.broken(f"a memo of {found.memo:,} entries, for which pickle runs out of memory")
            return found.graph

    def record(self, most: int = _MODEST) -> list[Node]:
        """The elements of a tuple or list of numbers, strings and classes: nothing that calls is let in."""
        graph = self.pickle(most)
        for node in graph.nodes:
            known = not isinstance(node, Global) or (node.module in _MODULES and not node.filling)
            if not isinstance(node, int | str | tuple | Global) or not known:
                self.broken("something else than numbers, strings and classes of torch")
        return [graph.nodes[ref] for ref in elements(graph.nodes[graph.root])]

    def number(self) -> int:
        """The number of things that follow."""
        graph = self.pickle(_MODEST)
        count = graph.nodes[graph.root]
        if type(count) is not int or count < 0 or len(graph.nodes) > 1:
            self.broken("no number of entries")
        assert isinstance(count, int)
        return count

    def bytes(self, size: int) -> bytes:
        data = self.source.read(self.at, size) if self.at + size <= self.end else b""
        if len(data) < size:
            self.broken("it ends too early")
        self.at += size
        return data

    def broken(self, what: str) -> None:
        raise MalformedError(what, where=self.name, offset=self.at, path=self.source.name)

    def once(self, key: int, known: Mapping[int, object]) -> None:
        """Storages, views and tensors have their numbers from one series: torch keeps them in one dict."""
        if key in known:
            self.broken(f"the number {key} for two things")

    def storages(self, storages: dict[int, _Storage], parts: dict[int, _Part]) -> None:
        """Every storage with its bytes, then the list of views of them."""
        for _ in range(self.number()):
            key, location, cls = self._three()
            dtype = _of_class(cls, "Storage")
            if dtype is None or type(location) is not str:
                self.broken("a storage of a class that torch 0.1 did not have")
                continue
            (count,) = unpack("<q", self.bytes(8))
            if count < 0 or self.at + count * dtype.itemsize > self.end:
                self.broken(f"storage {key} of {count:,} elements does not fit into the member")
            self.once(key, parts)
            storages[key] = _Storage(dtype, location, count, self.at)
            parts[key] = _Part(key, 0, count)
            self.at += count * dtype.itemsize
        views = self._views()
        for view, root, offset, numel in views:
            whole = parts.get(root)
            if whole is None or offset < 0 or numel < 0 or offset + numel > whole.numel:
                self.broken(f"view {view} reaches beyond its storage, or has none")
                continue
            self.once(view, parts)
            parts[view] = _Part(whole.root, whole.offset + offset, numel)

    def _views(self) -> list[tuple[int, int, int, int]]:
        graph = self.pickle(LIMITS.pickle_bytes)
        if not all(isinstance(node, int | tuple | List) for node in graph.nodes):
            self.broken("something else than numbers in the list of views")
        if not isinstance(graph.nodes[graph.root], tuple | List):
            self.broken("the list of views is not a list")
        found = []
        for ref in elements(graph.nodes[graph.root]):
            values = [graph.nodes[item] for item in elements(graph.nodes[ref])]
            numbers = [value for value in values if type(value) is int and abs(value) < 1 << 64]
            if len(values) != 4 or len(numbers) != 4:
                self.broken("a view that is no four numbers")
            found.append((numbers[0], numbers[1], numbers[2], numbers[3]))
        return found

    def tensors(self, parts: Mapping[int, _Part], tensors: dict[int, _Tensor]) -> None:
        """Every tensor: the storage it is on, its shape, strides and offset."""
        for _ in range(self.number()):
            key, part, cls = self._three()
            if _of_class(cls, "Tensor") is None:
                self.broken("a tensor of a class that torch 0.1 did not have")
            if type(part) is not int or part not in parts:
                self.broken(f"tensor {key} is on no storage of the file")
                continue
            (dimensions, _unused) = unpack("<ii", self.bytes(8))
            if not 0 <= dimensions <= LIMITS.dimensions:
                self.broken(f"tensor {key} of {dimensions:,} dimensions")
            numbers = unpack(f"<{2 * dimensions + 1}q", self.bytes(16 * dimensions + 8))
            shape, strides = numbers[:dimensions], numbers[dimensions:-1]
            if min(*shape, *strides, 0, 0) < 0:
                self.broken(f"tensor {key} with a negative size or stride")
            # Of those that the object does not name, too: torch makes every one, and the storage larger for it.
            if numbers[-1] < 0 or numbers[-1] + extent(shape, strides) > parts[part].numel:
                self.broken(f"tensor {key} reaches beyond its storage of {counted(parts[part].numel, 'element')}")
            self.once(key, parts)
            self.once(key, tensors)
            tensors[key] = _Tensor(part, shape, strides, numbers[-1])

    def _three(self) -> tuple[int, Node, Node]:
        values = self.record()
        if len(values) != 3 or type(values[0]) is not int or not 0 <= values[0] < 1 << 64:
            self.broken("an entry that is no (number, ..., class)")
        key = values[0]
        assert isinstance(key, int)
        return key, values[1], values[2]


def sniff(head: bytes, source: Source) -> bool:
    """A tar archive with members that torch 0.1 wrote; head is that of one."""
    found, _ = _listed(source)
    return {_OBJECT, _STORAGES} <= {member.name for member in found}


def _listed(source: Source) -> tuple[list[Member], MalformedError | None]:
    """The members up to the end of the archive, or up to what is damaged in it."""
    found: list[Member] = []
    try:
        found.extend(members(source))
    except MalformedError as error:
        return found, error
    return found, None


def read(source: Source) -> TorchTar:
    """Read the members; raises MalformedError with the entry that breaks the format."""
    found, error = _listed(source)
    chosen = {name: resolved(found, name) for name in (_OBJECT, _STORAGES, _TENSORS)}
    there = {name: member for name, member in chosen.items() if member is not None}
    missing = [name for name in chosen if name not in there]
    if missing:
        what = (
            f"it looks like the tar format of torch 0.1 but has no member {missing[0]!r}: torch does not load it either"
        )
        raise NotACheckpointError(what, kind="torch-tar", path=source.name, next="get it from who wrote it")
    if found[-1].end > source.size:
        what = "the file is cut: it ends within its last member"
        raise MalformedError(what, path=source.name, next="get a whole copy of the file")
    return TorchTar(source, there, [*_odd(found, there), *_behind(source, found[-1].end, error)])


def _odd(found: Sequence[Member], chosen: Mapping[str, Member]) -> Iterator[Problem]:
    """Where programs would take other members, or other bytes, than tarfile does."""
    for name, member in chosen.items():
        named = [other for other in found if normpath(other.name) == name]
        if len(named) > 1:
            what = f"{len(named)} members are called {name!r}: torch takes the last one, other programs may not"
            yield Problem("duplicate-record", "error", what, where=name, offset=member.begin)
        elif not member.plain or named != [member]:
            what = f"the member {name!r} is a link, or a file with holes: programs differ about what they read for it"
            yield Problem(ODD_MEMBER, "error", what, where=name, offset=member.begin)
    odd = [member for member in found if member.odd]
    for member in odd[: LIMITS.listed]:
        what = f"{member.odd}, at the member {shown(member.name)}: programs differ about what that means"
        yield Problem(ODD_MEMBER, "error", what, where=member.name, offset=member.begin)


def _behind(source: Source, end: int, error: MalformedError | None) -> Iterator[Problem]:
    """What follows the last member, where there should be zeros."""
    if error is not None:
        what = f"{error.what}: torch takes that for the end of the archive, other programs do not"
        yield Problem(ODD_MEMBER, "error", what, offset=end)
    elif source.size - end > _PADDING or any(source.read(end, _PADDING)):
        what = f"{source.size - end:,} bytes behind the end of the archive"
        yield Problem("trailing-bytes", "warning", what, offset=end)
