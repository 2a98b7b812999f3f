"""A folder of ``torch.distributed.checkpoint`` (DCP): tensors in pieces, as many processes wrote them.

``.metadata`` says what there is; each piece is an archive of ``torch.save`` within a ``.distcp`` file. What a command
sees is the nested object that ``dcp_to_torch_save`` makes of it, each tensor with a storage of its own. A piece is
looked at only when its bytes are asked for. Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple

from ...base.errors import CkptoolError, MalformedError, RefusedError, UnreadableError
from ...base.limits import LIMITS
from ...base.text import human_bytes, pluralize, quoted
from ...checkpoint.container import (
    INCOMPLETE,
    UNCHECKED,
    Container,
    FoundPickle,
    Manifest,
    Problem,
    StoredBytes,
    StoredRecord,
    Traits,
)
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.objects import callable_name
from ...checkpoint.tensors import TensorReader
from ...files.pool import open_pooled
from ...files.sources import Appending, FileSource, FolderSource, Plan, Span
from ...pickles.nodes import Call, Global, Graph, Node, Persistent
from ..foreign.identification import explain_placeholder
from ..pickle_search import find_pickles
from .checks import Pieces, extra_files, is_whole, usable_items
from .chunks import Chunk, ChunkedSource
from .items import OpenedItem, item_source, open_item, record_crc, storage_span, tensor_rows
from .metadata import Item, Metadata, foreign_globals, merge_metadata, read_metadata
from .nesting import Nested

_OF_RANK: Final = re.compile(r"__(\d+)\.metadata\Z")
_DATA: Final = ".distcp"
_DATA_OF_RANK: Final = re.compile(r"__(\d+)_\d+\.distcp\Z")
#: A tensor with more bytes than this is hostile: torch counts in int64.
_TOO_LARGE: Final = 1 << 62


class _Looked(NamedTuple):
    """What a look at every item finds."""

    problems: list[Problem]
    pickles: list[FoundPickle]


class Dcp(Container):
    """A DCP folder; ``metadata`` are facts about it for people."""

    format = "dcp"
    traits = Traits(loads="converted", written="dcp", pieces=True)

    def __init__(
        self,
        folder: str,
        read: Metadata,
        files: Mapping[str, FileSource],
        own: Sequence[FoundPickle],
        closed: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.read = read
        self.files = files
        self.problems: list[Problem] = []
        self._own = own
        self._pieces = Pieces(read.values)
        #: Objects that could not be had: the first of each file with the reason, and how many.
        self._bad: dict[str, tuple[Item, str, int]] = {}
        self._mentioned = {(item.name, item.offset) for item in read.items}
        self._spans: dict[str, StoredBytes] = {}
        self._names: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        #: That of the objects' pickles: what they hold may need it.
        self._protocol = 0
        self._found_in_items: _Looked | None = None
        #: The item opened last: what asks for its records asks for its storage next.
        self._last: OpenedItem | None = None
        #: Storages of objects: the span of each.
        self._grafted: dict[str, StoredBytes] = {}
        for text in read.flaws:
            self._note("odd-metadata", "error", f".metadata: {text}")
        for pickle in own:
            foreign, relatives = foreign_globals(pickle.graph) if pickle.graph else ([], [])
            for name in foreign:
                what = (
                    f"{pickle.where} names {quoted(name)}, which torch never writes there: loading it imports or runs"
                )
                self._note("foreign-global", "error", f"{what} it", pickle.where)
            for name in relatives:
                what = (
                    f"{pickle.where} is of {quoted(name)}, a class of another library: DCP loads it where that is there"
                )
                self._note("foreign-class", "note", what, pickle.where)
        sizes = {name: file.size for name, file in files.items()}
        found = usable_items(read, sizes, self._note, closed)
        #: In the order of the files, so that each is opened once to look at all of them.
        self._usable = dict(sorted(found.items(), key=lambda one: (one[1].file, one[1].at)))
        self.graph = self._build()
        ranks = {match[1] for match in map(_DATA_OF_RANK.match, files) if match}
        chunks = sum(len(value.chunks) for value in read.values.values())
        self.metadata: Mapping[str, str] = MappingProxyType({})
        self.writer = f"torch.distributed.checkpoint {read.version}: " + ", ".join(
            (pluralize(len(ranks), "rank"), pluralize(len(files), "file"), pluralize(chunks, "piece"))
        )

    def stored_size(self, key: str) -> int | None:
        return self._sizes.get(key)

    def stored(self, key: str) -> StoredBytes:
        size = self._sizes.get(key)
        if size is None:
            return StoredBytes(None, 0)
        if key in self._grafted:
            return self._grafted[key]
        found = self._spans.get(key)
        if found is None:
            found = self._spans[key] = self._found(self._names[key], size)
        return found

    def records(self) -> Iterator[StoredRecord]:
        """Those of every item. What is no archive has none: ``audit`` says so."""
        keys = {name: key for key, name in self._names.items()}
        for (name, offset), item in self._usable.items():
            try:
                opened = self._open(item)
                alone = offset is not None and len(self.read.values[name].chunks) == 1
                # A storage that is one record, row by row, is known by its key.
                whole = self.stored(keys[name]).span if alone and name in keys else None
                for record in opened.zip.records():
                    span = Span(self.files[item.file], item.at + record.span.offset, record.span.size)
                    label = f"{item.place}, {name}: {record.name.partition('/')[2]}"
                    key = part = ""
                    if offset is None:
                        key = _storage_key(item, record.key) if record.key else ""
                    elif record.key and record.size:
                        key, part = (keys.get(name, ""), "") if span == whole else ("", keys.get(name, ""))
                    yield record._replace(name=label, span=span, key=key, part_of=part)
            except MalformedError:
                continue

    def manifest(self, *, checked: bool = False) -> Manifest:
        """The items; ``checked`` opens each."""
        for item in self._usable.values() if checked else ():
            self._rows(self._open(item), item)
        listed = self.read.values.items()
        return {name: (value.dtype.name if value.dtype else "", tuple(value.shape)) for name, value in listed}

    def audit(self, keys: Collection[str]) -> list[Problem]:
        """Look at every item as at a file of torch.save."""
        found = list(self._looked().problems)
        used: dict[str, int] = {}
        for item in self.read.items:
            used[item.file] = used.get(item.file, 0) + item.length
        for name, file in self.files.items():
            rest = file.size - used.get(name, 0)
            if rest > 0:
                what = f"{human_bytes(rest)} of {name} belong to no item of .metadata"
                found.append(Problem("unlisted-bytes", "warning", what, False, name))
        return found

    def pickles(self) -> Iterator[FoundPickle]:
        """Those of the items, which torch loads with ``weights_only=False`` where they are objects; ``.metadata``
        comes with them where it names more than it should."""
        return iter((*self._own, *self._looked().pickles))

    def _looked(self) -> _Looked:
        """What every item holds, and what is odd about it: each is opened once."""
        if self._found_in_items is not None:
            return self._found_in_items
        problems: list[Problem] = []
        pickles: list[FoundPickle] = []
        alike: dict[object, tuple[str, Graph, int]] = {}
        for item in self._usable.values():
            where = f"{item.place} ({item.name})"
            try:
                opened = self._open(item)
                self._rows(opened, item)
            except MalformedError as error:
                if item.offset is not None or item.file not in self._bad:  # else it is told with those of its file
                    problems.append(
                        Problem("bad-item", "error", f"{item.place}: {error.what}", False, item.file, item.at)
                    )
                inside = list(find_pickles(item_source(item, self.files[item.file])))
                pickles += [part._replace(where=f"{where}: {part.where}") for part in inside]
                pickles += [] if inside else [FoundPickle(where, None, error.what)]
                continue
            own = opened.zip
            for problem in (*own.problems, *own.audit(TensorReader(own.graph).storages)):
                if problem.level != "note" and len(problems) < LIMITS.listed:
                    what = f"{item.place} ({item.name}): {problem.message}"
                    problems.append(problem._replace(message=what, where=item.file, offset=item.at))
            first, *rest = own.pickles()
            pickles += [part._replace(where=f"{where}: {part.where}") for part in rest]
            if item.offset is None or own.graph.oddities or first.rest:
                pickles.append(first._replace(where=where))
                continue
            # Tensors by the thousand name and call the same: one speaks for those of its file.
            mark = (item.file, _named(own.graph))
            known, graph, count = alike.get(mark, (where, own.graph, 0))
            alike[mark] = (known, graph, count + 1)
        for known, graph, count in alike.values():
            more = "" if count == 1 else f" and {pluralize(count - 1, 'tensor')} like it"
            pickles.append(FoundPickle(known + more, graph))
        self._found_in_items = _Looked(problems, pickles)
        return self._found_in_items

    def plan(self, pickle: bytes | None) -> Plan:
        raise RefusedError("a DCP folder is written as a whole", path=self.folder, next="write it with -o")

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        what = "a DCP folder cannot be edited in place"
        raise RefusedError(what, path=self.folder, next="write a new folder with -o")

    # -- looking ------------------------------------------------------------------------------------------------

    def _note(self, code: str, level: str, message: str, where: str = "", offset: int = -1) -> None:
        if len(self.problems) < LIMITS.listed:
            self.problems.append(Problem(code, level, message, False, where, offset))

    def _note_ranks(self, metadata: Collection[str]) -> None:
        """Every rank that wrote data has metadata of its own, where there is no common one."""
        ranks = {match[1]: name for name in self.files if (match := _DATA_OF_RANK.match(name))}
        for rank, name in ranks.items():
            if f"__{rank}.metadata" not in metadata:
                what = f"there is {name}, and no __{rank}.metadata to say what is in it"
                self._note(INCOMPLETE, "error", what, f"__{rank}.metadata")

    def _build(self) -> Graph:
        builder = Builder()
        nested = Nested()
        for name, value in self.read.values.items():
            path = self.read.paths.get(name, (name,))
            if value.dtype is None:
                ref = self._object(builder, name)
                if ref is not None:
                    nested.put(name, path, ref)
                continue
            size = prod(value.shape) * value.dtype.itemsize
            if size >= _TOO_LARGE:
                self._note("odd-metadata", "error", f".metadata: {quoted(name)} is larger than any tensor can be")
                continue
            key = name  # so that what is said of a storage says which tensor's
            while not key or key in self._names:
                key += "'"  # of the empty name
            self._names[key] = name
            whole = is_whole(name, value, self._usable, self._mentioned, self._note)
            self._sizes[key] = size if whole else None
            nested.put(name, path, builder.tensor(contiguous(value.dtype, value.shape, key)))
        for item, why, count in self._bad.values():
            rest = f"; so it is with {pluralize(count - 1, 'more object')} of that file" if count > 1 else ""
            self._note("bad-item", "error", f"{item.place}: {why}{rest}", item.file, item.at)
        for name in nested.misfits:
            self._note("odd-metadata", "error", f".metadata: there is no room for {quoted(name)} where it belongs")
        root = nested.build(builder)
        for places, values in nested.sparse:
            what = f".metadata: a list of {places:,} places has values in {values:,}: its values are listed by number"
            self._note(UNCHECKED, "warning", f"{what}, the empty places were not made")
        return builder.graph(root, self._protocol)

    # -- items --------------------------------------------------------------------------------------------------

    def _open(self, item: Item) -> OpenedItem:
        if self._last is not None and self._last.item is item:
            return self._last
        opened = open_item(item, self.files[item.file])
        if opened.zip.byteorder == "big" and self.read.values[item.name].dtype is not None:
            what = f"{item.name!r}: its numbers are big-endian"
            raise MalformedError(what, path=self.folder, where=item.place, next="load it with torch")
        self._last = opened
        return opened

    def _rows(self, opened: OpenedItem, item: Item) -> Chunk | None:
        """The piece of a tensor that an item is; None for an object. Raises MalformedError where it is not as said."""
        value = self.read.values[item.name]
        if value.dtype is None or item.offset is None:
            return None
        box = self._pieces.box(item)
        if box is None:
            what = f"{item.name!r}: .metadata lists no piece at {list(item.offset)}"
            raise MalformedError(what, where=item.place)
        source, begin = tensor_rows(opened, value.dtype, box[1])
        return Chunk(box, source, begin)

    def _found(self, name: str, size: int) -> StoredBytes:
        value = self.read.values[name]
        assert value.dtype is not None
        chunks = []
        opened = None
        for box in value.chunks:
            item = self._usable.get((name, box[0]))
            if item is not None and 0 not in box[1]:
                opened = self._open(item)
                chunk = self._rows(opened, item)
                assert chunk is not None
                chunks.append(chunk)
        if len(chunks) == 1 and opened is not None:
            span = Span(chunks[0].source, chunks[0].begin, size)
            return StoredBytes(span, size, False, record_crc(opened, span))
        joined = ChunkedSource(value.shape, value.dtype.itemsize, chunks, f"{self.folder}: {name}")
        return StoredBytes(Span(joined, 0, size), size)

    def _object(self, builder: Builder, name: str) -> int | None:
        """An object, with what it leads to; None where it cannot be had, which is said."""
        item = self._usable.get((name, None))
        if item is None:
            if (name, None) not in self._mentioned:
                self._note("missing-item", "error", f".metadata does not say where {quoted(name)} is", name)
            return None
        try:
            opened = self._open(item)
        except MalformedError as error:
            first, why, count = self._bad.get(item.file, (item, error.what, 0))
            self._bad[item.file] = first, why, count + 1
            return None
        return self._graft(builder, opened)

    def _graft(self, builder: Builder, opened: OpenedItem) -> int:
        """The object of an item in our graph, its storages under keys of their own."""
        root = opened.graph.nodes[opened.graph.root]
        if root is None or isinstance(root, bool | int | float | str):
            return builder.constant(root)
        reader = TensorReader(opened.graph)
        changes: dict[int, Node] = {}
        added: list[Node] = []
        for ref, storage in reader.uses():
            key = _storage_key(opened.item, storage.key)
            if key not in self._grafted:
                try:
                    span, record = storage_span(opened, storage.key)
                    self._grafted[key] = StoredBytes(span, span.size, False, record.crc if record.size else None)
                    self._sizes[key] = span.size
                except MalformedError as error:
                    self._note("bad-item", "error", f"{opened.item.place}: {error.what}", opened.item.file)
            node = opened.graph.nodes[ref]
            assert isinstance(node, Persistent)
            pid = opened.graph.nodes[node.pid]
            assert isinstance(pid, tuple)
            changes[node.pid] = (*pid[:2], len(opened.graph.nodes) + len(added), *pid[3:])
            added.append(key)
        self._protocol = max(self._protocol, opened.graph.style.protocol)
        return builder.graft(opened.graph.edited(changes, added), opened.graph.root)


def _storage_key(item: Item, key: str) -> str:
    """What the storage of an object is called in the whole."""
    return f"{item.name}, storage {key}"


def _named(graph: Graph) -> frozenset[tuple[str, bool]]:
    """The globals of a pickle, and whether each is named or called."""
    named = {(f"{node.module} {node.name}", False) for node in graph.nodes if isinstance(node, Global)}
    return frozenset(
        named | {(callable_name(graph, node.func), True) for node in graph.nodes if isinstance(node, Call)}
    )


def sniff(names: Collection[str]) -> bool:
    if any(name.endswith(_DATA) for name in names):
        return True
    metadata = [name for name in names if name in (".metadata", ".metadata.tmp") or _OF_RANK.match(name)]
    return bool(metadata) and all(name.startswith(".") or name in metadata for name in names)


def _metadata_names(folder: str) -> list[str]:
    names = os.listdir(folder)
    if ".metadata" in names:
        return [".metadata"]
    ranks = sorted((int(found[1]), name) for name in names if (found := _OF_RANK.match(name)))
    return [name for _, name in ranks]


def read(path: str) -> tuple[FolderSource, Dcp]:
    """Open a DCP folder; raises MalformedError where nothing says what is in it."""
    opened: list[FileSource] = []
    names = sorted(os.listdir(path))
    wanted = _metadata_names(path)
    data = [name for name in names if name.endswith(_DATA)]
    if not wanted:
        unfinished = ".metadata.tmp" in names or any(name.endswith(".metadata.tmp") for name in names)
        what = (
            "the checkpoint is not finished: there is .metadata.tmp, and .metadata is written last"
            if unfinished
            else (
                f"{pluralize(len(data), 'file')} of torch.distributed.checkpoint, and no .metadata to say what they "
                "hold"
            )
        )
        step = "wait until it is saved" if unfinished else "get the folder again, with its hidden files"
        raise MalformedError(what, path=path, next=step)
    closed: dict[str, str] = {}
    files: dict[str, FileSource] = {}
    try:
        for name in data:
            # One that cannot be opened is told of like one that is missing: the others are there.
            try:
                files[name] = open_pooled(os.path.join(path, name))
            except UnreadableError as error:
                closed[name] = error.what
                continue
            opened.append(files[name])
            # A rank may have nothing to write: that file is empty.
            other = explain_placeholder(files[name]) if files[name].size else None
            if other is not None:
                closed[name] = other.what
                del files[name]
        found, own = [], []
        for name in wanted:
            try:
                listing = open_pooled(os.path.join(path, name))
            except UnreadableError as error:
                error.what = f"{name} cannot be read: {error.what}"
                raise
            opened.append(listing)
            other = explain_placeholder(listing)
            if other is not None:
                what = f"{name} is not there: {other.what.removeprefix('it is ')}"
                raise MalformedError(what, path=path, next=other.next)
            if listing.size > LIMITS.pickle_bytes:
                raise MalformedError(f"{name} has {human_bytes(listing.size)}: more than any metadata", path=path)
            one = read_metadata(listing.read(0, listing.size), name)
            found.append(one)
            # A million pieces have a large graph: it is kept where something is wrong with it.
            if one.foreign or one.subclasses or listing.size > one.end:
                own.append(FoundPickle(name, one.graph, "", listing.size - one.end))
            found[-1] = one._replace(graph=None)
            del one
        container = Dcp(path, merge_metadata(found), files, own, closed)
        if wanted != [".metadata"]:
            container._note_ranks(wanted)
        beside = extra_files(names)
        told = "; ".join(f"{name} ({words})" for name, words in beside.items() if words)
        if told:
            container._note("side-files", "note", f"beside the tensors: {told}")
        if ".metadata.tmp" in names:
            what = "there is a .metadata.tmp, too: saving over this checkpoint was begun and not finished"
            container._note("unfinished-save", "warning", what)
        strays = files.keys() - {item.file for item in container.read.items}
        return FolderSource(path, opened, [os.path.join(path, name) for name in beside], strays), container
    except BaseException as error:
        for source in opened:
            source.close()
        if isinstance(error, CkptoolError):
            error.path = error.path or path
        if isinstance(error, MalformedError):
            error.next = error.next or "it is damaged: get the folder again"
        raise
