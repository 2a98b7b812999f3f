"""The tar format of torch 0.1: an object, its tensors and its storages in three members of a tar archive.

Source: ``torch/serialization.py`` (``legacy_load`` in ``_legacy_load``). Torch no longer writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from posixpath import normpath
from struct import unpack
from typing import Final

from ...base.dtypes import Dtype, storage_dtype
from ...base.errors import MalformedError, NotACheckpointError, TruncatedPickleError
from ...base.findings import ODD_MEMBER, Finding
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import pluralize, quoted
from ...checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, PlainTensor
from ...checkpoint.objects import list_items
from ...checkpoint.tensors import extent
from ...files.sources import Source, Span
from ...files.tars import Member, members, resolve_member
from ...pickles.decode import Decoded, decode
from ...pickles.nodes import Global, Graph, List, Node, Persistent, Ref, non_utf8_strings, relocated
from ..search.pickle_search import bare_pickles, nested_pickles, tar_pickles

_OBJECT, _STORAGES, _TENSORS = "pickle", "storages", "tensors"
#: Bytes read at first for the pickle of a storage or tensor: a key, a location and a class.
_SMALL: Final = 512
#: The most bytes of such a pickle.
_MAX_SMALL: Final = 1 << 16
#: The most zeros that pad the end of an archive: GNU tar has records of 10,240 bytes, other programs larger ones.
_MAX_PADDING: Final = 1 << 20
#: The modules of torch 0.1's storage classes, and their dtypes.
_MODULES: Final = ("torch", "torch.cuda")
_DTYPES: Final = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")


class _TarStorage(NamedTuple):
    """A storage: ``numel`` elements from byte ``begin`` of the file."""

    dtype: Dtype
    location: str
    numel: int
    begin: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class _StorageView(NamedTuple):
    """A storage, or a view of ``numel`` of its elements from ``offset`` on. ``root`` is the key of the storage."""

    root: int
    offset: int
    numel: int


class _TarTensor(NamedTuple):
    """A tensor over a storage or view; ``offset`` counts elements from the start of that storage or view."""

    view: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class TorchTar(Container):
    """A checkpoint of torch 0.1. Storage keys are the storages' numbers in the file."""

    format = "torch-tar"
    traits = Traits(no_checksums="the tar format", writes_as="torch", legacy_name="tar")
    writer = "torch 0.1"

    def __init__(self, source: Source, chosen: Mapping[str, Member], problems: Sequence[Finding]) -> None:
        self.source = source
        what = "it is in the tar format of torch 0.1, which needs weights_only=False"
        self.problems: list[Finding] = [Finding("torch-tar", "note", what, refused=True), *problems]
        self._storages: dict[int, _TarStorage] = {}
        self._views: dict[int, _StorageView] = {}
        self._tensors: dict[int, _TarTensor] = {}
        #: The start of each member that is read to its end.
        self._known = {chosen[_OBJECT].begin}
        for name in (_STORAGES, _TENSORS):
            reader = _MemberReader(source, chosen[name])
            if name == _STORAGES:
                reader.storages(self._storages, self._views)
            else:
                reader.tensors(self._views, self._tensors)
            if reader.at < reader.end:
                what = f"{reader.end - reader.at:,} bytes in the member {name!r} follow what torch reads of it"
                self.problems.append(Finding("trailing-bytes", "warning", what, offset=reader.at))
            else:
                self._known.add(chosen[name].begin)
        reader = _MemberReader(source, chosen[_OBJECT], LIMITS.pickle_bytes)
        self._object = reader.pickle(LIMITS.pickle_bytes)
        self._rest = reader.end - reader.at
        self.others: list[Graph] = []  # nothing loads 'sys_info'
        self.graph = self._with_tensors()
        for offset, text in self._object.oddities[: LIMITS.listed]:
            self.problems.append(Finding("odd-pickle", "warning", f"pickle at byte {offset:,}: {text}"))

    def stored(self, key: str) -> StorageLocation:
        storage = self._storages.get(_number(key))
        span = Span(self.source, storage.begin, storage.nbytes) if storage else None
        return StorageLocation(span, span.size if span else 0)

    def records(self) -> Iterator[StoredRecord]:
        for key, storage in sorted(self._storages.items(), key=lambda item: item[1].begin):
            span = Span(self.source, storage.begin, storage.nbytes)
            yield StoredRecord(f"storage {key}", span, storage.nbytes, None, False, str(key))

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        # The pickles of storages and tensors hold only numbers, strings and known classes.
        yield FoundPickle(_OBJECT, self._object, "", self._rest)
        yield from nested_pickles(self._object, _OBJECT)
        yield from tar_pickles(self.source, known=self._known)
        yield from bare_pickles(self.source, 0, "from the first byte")  # for a file that is also of another format

    def _with_tensors(self) -> Graph:
        graph = self._object
        builder = Builder()
        builder.nodes.extend(graph.nodes)
        refs: dict[int, Ref] = {}
        replaced: dict[Ref, Ref] = {}
        for ref, node in enumerate(graph.nodes):
            if not isinstance(node, Persistent):
                continue
            pid = graph.nodes[node.pid]
            if isinstance(pid, tuple) and len(pid) == 3 and isinstance(graph.nodes[pid[0]], Global):
                replaced[ref] = pid[0]  # (class, file, source): torch uses the class
                continue
            key = _number(pid)
            if node.filling is not None or not (key in self._tensors or key in self._views):
                what = f"the object names a tensor {quoted(str(key))} that is not in the file"
                raise MalformedError(what, where=_OBJECT, path=self.source.name)
            if key not in refs:
                refs[key] = self._tensor(builder, key) if key in self._tensors else self._storage(builder, key)
            replaced[ref] = refs[key]
        places = {ref: replaced.get(ref, ref) for ref in range(len(graph.nodes))}
        own = [relocated(node, places) for node in graph.nodes]
        for ref in replaced:
            own[ref] = None  # nothing refers to it now
        nodes = own + builder.nodes[len(own) :]
        return Graph(nodes, places[graph.root], graph.style, graph.refused, graph.oddities)

    def _tensor(self, builder: Builder, key: int) -> Ref:
        _, shape, strides, offset = tensor = self._tensors[key]
        root, begin, _ = self._views[tensor.view]
        dtype, location, _, _ = storage = self._storages[root]
        plain = PlainTensor(dtype, shape, strides, str(root), storage.nbytes, begin + offset, location)
        return builder.tensor(plain)

    def _storage(self, builder: Builder, key: int) -> Ref:
        view = self._views[key]
        storage = self._storages[view.root]
        if view.numel != storage.numel:
            # It becomes a separate storage: no other format has storages that are parts of others.
            begin = storage.begin + view.offset * storage.dtype.itemsize
            storage = self._storages[key] = storage._replace(numel=view.numel, begin=begin)
            what = f"storage {key} is a part of another one, and becomes one of its own in an edited file"
            self.problems.append(Finding("storage-view", "warning", what))
        else:
            key = view.root
        return builder.storage(storage.dtype, str(key), storage.location, storage.nbytes)


def _number(value: Node) -> int:
    if type(value) is int:
        return value if 0 <= value < 1 << 64 else -1
    return int(value) if type(value) is str and len(value) <= 20 and value.isascii() and value.isdigit() else -1


def _dtype_of_class(cls: Node, suffix: str) -> Dtype | None:
    """Return the dtype of a torch 0.1 storage or tensor class; None for any other class, which torch would import."""
    if not isinstance(cls, Global) or cls.module not in _MODULES or not cls.name.endswith(suffix):
        return None
    dtype = storage_dtype(cls.name.removesuffix(suffix) + "Storage")
    return dtype if dtype.name in _DTYPES else None


class _MemberReader:
    def __init__(self, source: Source, member: Member, read_ahead: int = _SMALL) -> None:
        self.source, self.name = source, member.name
        self.at, self.end = member.begin, member.begin + member.size
        self.read_ahead = read_ahead
        if self.end > source.size:
            what = f"the file is cut: it ends within the member {member.name!r}"
            raise MalformedError(what, path=source.name, next="get a whole copy of the file")

    def pickle(self, max_bytes: int = _MAX_SMALL) -> Graph:
        """Read the pickle at the current place, of at most ``max_bytes``."""
        size = min(self.read_ahead, max_bytes)
        while True:
            data = self.source.read(self.at, min(size, self.end - self.at))
            try:
                decoded: Decoded = decode(data, where=self.name)
            except TruncatedPickleError:
                if size >= max_bytes or len(data) < size:
                    raise
                size = min(size * 8, max_bytes)
                continue
            self.at += decoded.end
            if any(non_utf8_strings(decoded.graph)):
                raise self.broken("a string of Python 2 that is not UTF-8")
            if decoded.memo > LIMITS.memo:
                raise self.broken(f"a memo of {decoded.memo:,} entries, for which pickle runs out of memory")
            return decoded.graph

    def entry(self) -> tuple[int, Node, Node]:
        """Read a tuple or list (number, ..., class) of numbers, strings and classes; refuse anything that calls."""
        graph = self.pickle()
        for node in graph.nodes:
            known = not isinstance(node, Global) or (node.module in _MODULES and not node.filling)
            if not isinstance(node, int | str | tuple | Global) or not known:
                raise self.broken("something other than numbers, strings and classes of torch")
        values = [graph.nodes[ref] for ref in list_items(graph.nodes[graph.root])]
        key = values[0] if len(values) == 3 else None
        if type(key) is not int or not 0 <= key < 1 << 64:
            raise self.broken("an entry that is not (number, ..., class)")
        return key, values[1], values[2]

    def count(self) -> int:
        """Read the number of entries that follow."""
        graph = self.pickle()
        count = graph.nodes[graph.root]
        if type(count) is not int or count < 0 or len(graph.nodes) > 1:
            raise self.broken("an invalid number of entries")
        return count

    def bytes(self, size: int) -> bytes:
        data = self.source.read(self.at, size) if self.at + size <= self.end else b""
        if len(data) < size:
            raise self.broken("it ends too early")
        self.at += size
        return data

    def broken(self, what: str) -> MalformedError:
        return MalformedError(what, where=self.name, offset=self.at, path=self.source.name)

    def check_new(self, key: int, known: Mapping[int, object]) -> None:
        """Raise MalformedError for a number in use: torch keeps storages, views and tensors in one dict."""
        if key in known:
            raise self.broken(f"the number {key} for two things")

    def storages(self, storages: dict[int, _TarStorage], views: dict[int, _StorageView]) -> None:
        """Read every storage with its bytes, then the list of views."""
        for _ in range(self.count()):
            key, location, cls = self.entry()
            dtype = _dtype_of_class(cls, "Storage")
            if dtype is None or type(location) is not str:
                raise self.broken("a storage of a class that torch 0.1 did not have")
            (numel,) = unpack("<q", self.bytes(8))
            if numel < 0 or self.at + numel * dtype.itemsize > self.end:
                raise self.broken(f"storage {key} of {numel:,} elements does not fit into the member")
            self.check_new(key, views)
            storages[key] = _TarStorage(dtype, location, numel, self.at)
            views[key] = _StorageView(key, 0, numel)
            self.at += numel * dtype.itemsize
        for key, root, offset, numel in self._views():
            whole = views.get(root)
            if whole is None or offset < 0 or numel < 0 or offset + numel > whole.numel:
                raise self.broken(f"view {key} reaches beyond its storage, or has none")
            self.check_new(key, views)
            views[key] = _StorageView(whole.root, whole.offset + offset, numel)

    def _views(self) -> list[list[int]]:
        graph = self.pickle(LIMITS.pickle_bytes)
        root = graph.nodes[graph.root]
        found = [[graph.nodes[item] for item in list_items(graph.nodes[ref])] for ref in list_items(root)]
        views = [[value for value in view if type(value) is int and abs(value) < 1 << 64] for view in found]
        plain = isinstance(root, tuple | List) and all(isinstance(node, int | tuple | List) for node in graph.nodes)
        if not plain or {*map(len, found), *map(len, views)} - {4}:
            raise self.broken("a list of views that are not four numbers each")
        return views

    def tensors(self, views: Mapping[int, _StorageView], tensors: dict[int, _TarTensor]) -> None:
        """Read every tensor: its storage or view, shape, strides and offset."""
        for _ in range(self.count()):
            key, view, cls = self.entry()
            if _dtype_of_class(cls, "Tensor") is None:
                raise self.broken("a tensor of a class that torch 0.1 did not have")
            if type(view) is not int or view not in views:
                raise self.broken(f"tensor {key} has no storage in the file")
            (dimensions, _unused) = unpack("<ii", self.bytes(8))
            if not 0 <= dimensions <= LIMITS.dimensions:
                raise self.broken(f"tensor {key} of {dimensions:,} dimensions")
            numbers = unpack(f"<{2 * dimensions + 1}q", self.bytes(16 * dimensions + 8))
            shape, strides, offset = numbers[:dimensions], numbers[dimensions:-1], numbers[-1]
            if min(*shape, *strides, 0, 0) < 0:
                raise self.broken(f"tensor {key} with a negative size or stride")
            # This also covers unused tensors: torch builds each one, and would enlarge its storage.
            if offset < 0 or offset + extent(shape, strides) > views[view].numel:
                size = pluralize(views[view].numel, "element")
                raise self.broken(f"tensor {key} reaches beyond its storage of {size}")
            self.check_new(key, views)
            self.check_new(key, tensors)
            tensors[key] = _TarTensor(view, shape, strides, offset)


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a tar archive has the members that torch 0.1 wrote. ``head`` was already recognised as tar."""
    entries, _ = _members(source)
    return {_OBJECT, _STORAGES} <= {member.name for member in entries}


def _members(source: Source) -> tuple[list[Member], MalformedError | None]:
    """Return the members up to the end of the archive or the first damage, and the error for the damage or None."""
    entries: list[Member] = []
    try:
        entries.extend(members(source))
    except MalformedError as error:
        return entries, error
    return entries, None


def read(source: Source) -> TorchTar:
    """Read the members; raise MalformedError with the entry that breaks the format."""
    entries, error = _members(source)
    resolutions = {name: resolve_member(entries, name) for name in (_OBJECT, _STORAGES, _TENSORS)}
    chosen = {name: member for name, member in resolutions.items() if member is not None}
    missing = [name for name in resolutions if name not in chosen]
    if missing:
        what = f"it looks like the tar format of torch 0.1 but has no member {missing[0]!r}: torch cannot load it"
        raise NotACheckpointError(what, kind="torch-tar", path=source.name, next="get it from who wrote it")
    if entries[-1].end > source.size:
        what = "the file is cut: it ends within its last member"
        raise MalformedError(what, path=source.name, next="get a whole copy of the file")
    return TorchTar(source, chosen, [*_ambiguous(entries, chosen), *_trailing(source, entries[-1].end, error)])


def _ambiguous(entries: Sequence[Member], chosen: Mapping[str, Member]) -> Iterator[Finding]:
    """Yield problems where other programs would read other members, or other bytes, than Python's tarfile."""
    for name, member in chosen.items():
        same = [other for other in entries if normpath(other.name) == name]
        if len(same) > 1:
            what = f"{len(same)} members are called {name!r}: torch takes the last one, other programs may not"
            yield Finding("duplicate-record", "error", what, name, member.begin)
        elif not member.plain or same != [member]:
            what = f"the member {name!r} is a link, or a file with holes: programs differ about what they read for it"
            yield Finding(ODD_MEMBER, "error", what, name, member.begin)
    for member in [member for member in entries if member.odd][: LIMITS.listed]:
        what = f"{member.odd}, at the member {quoted(member.name)}: programs differ about what that means"
        yield Finding(ODD_MEMBER, "error", what, member.name, member.begin)


def _trailing(source: Source, end: int, error: MalformedError | None) -> Iterator[Finding]:
    if error is not None:
        what = f"{error.what}: torch takes that for the end of the archive, other programs do not"
        yield Finding(ODD_MEMBER, "error", what, offset=end)
    elif source.size - end > _MAX_PADDING or any(source.read(end, _MAX_PADDING)):
        what = f"{source.size - end:,} bytes after the end of the archive"
        yield Finding("trailing-bytes", "warning", what, offset=end)
