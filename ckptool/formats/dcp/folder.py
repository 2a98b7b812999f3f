"""A folder of ``torch.distributed.checkpoint`` (DCP): tensors in pieces, written by several processes.

``.metadata`` lists the content. Each piece is a ``torch.save`` archive inside a ``.distcp`` file. Commands see the
nested object that ``dcp_to_torch_save`` would build, with one storage per tensor. A piece is opened only when its bytes
are read. Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain, islice
from math import prod
from typing import Final

from ...base.addresses import is_remote
from ...base.errors import CkptoolError, MalformedError
from ...base.findings import INCOMPLETE, UNCHECKED, UNJOINED, Finding
from ...base.limits import LIMITS
from ...base.text import human_bytes, join_limited, pluralize, quoted, step_words
from ...checkpoint.container import FoundPickle, Manifest, RankSave, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.tensors import TensorReader
from ...files.downloads import ahead, prefetch
from ...files.folders import Folder
from ...files.sources import FolderSource, SliceSource, Source, Span
from ...files.zips.reader import end_search_start
from ...pickles.nodes import Call, Graph, Ref
from ..folders import TOO_LARGE, grouped, open_listing, opening, other_steps_note, with_storage_keys
from ..joined import CopiedContainer
from ..names.hf import model_files, side_files, weights_of
from ..names.megatron import ITERATION, LATEST, latest_folder
from ..names.training import DATA, DATA_OF_RANK, OF_RANK, are_files, fsdp_folders
from ..pieces import RANK_VALUES, Box, CopyPair, Rows, is_own
from ..search.pickle_search import bare_pickles, find_pickles
from .items import KnownItems, OpenedItem, PiecesSource, SubclassError, TensorItem, open_item, open_tensor
from .listing import read_listing
from .metadata import Item, Metadata, Nested, Pieces, edges, extra_files, merged, metadata_names, open_data, origin_of

#: The most items that a quick scan opens; each takes half a millisecond.
_MOST_OPENED: Final = 5000
_ZIP: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"
#: Duplicate pieces that are compared when a folder is opened; the rest is compared on demand.
_MOST_COPIES: Final = 500
#: Unusable items (cut, overlapping or listed twice) whose pickles are examined.
_MOST_UNUSABLE: Final = 200
#: A trainer file next to accelerate's folders that does not describe the model.
_TRAINER: Final = "trainer_state.json"


class Dcp(CopiedContainer):
    """A DCP folder. ``closed`` maps the names of files that cannot be opened to the errors."""

    format = "dcp"
    traits = Traits(loads="converted", loader="torch.distributed.checkpoint", writes_as="dcp", assembled=True)
    only_loader = "torch.distributed.checkpoint loads it, at any number of ranks"
    reader: TensorReader

    def __init__(
        self,
        folder: Folder,
        read: Metadata,
        files: Mapping[str, Source],
        odd: Sequence[tuple[str, Source]],
        closed: Mapping[str, CkptoolError],
    ) -> None:
        super().__init__()
        self.folder, self.read, self._data = folder, read, files
        self.errors = list(closed.values())
        #: Metadata files with something besides what torch writes, by name.
        self._odd = odd
        self._pieces = Pieces(read.values)
        #: Unreadable objects by file, each with the reason.
        self._bad: dict[str, list[tuple[Item, str]]] = {}
        self._stored: dict[str, StorageLocation] = {}
        self._names: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        #: The highest pickle protocol of the objects: their content may need it.
        self._protocol = 0
        self._known = KnownItems()
        #: The item opened last, kept because a caller that reads its records reads its storage next.
        self._last: OpenedItem | None = None
        for text in read.flaws:
            self.note("odd-metadata", "error", f".metadata: {text}")
        for name in read.subclasses:
            what = f".metadata is of {quoted(name)}, a class of another library: DCP loads it where that is there"
            self.note("foreign-class", "note", what, ".metadata")
        #: In file order, so that each file is opened once to read all its items.
        self._usable = read.usable_items({name: file.size for name, file in files.items()}, self.note, closed)
        self.graph = self._build()
        self.reader = TensorReader(self.graph)
        self.storage_of = {name: key for key, name in self._names.items()}
        #: Duplicate pieces that have not been opened yet: each takes half a millisecond.
        self._closed_copies = list(read.copies)
        self._open_copies(_MOST_COPIES)
        self.note_copies()

    def compare_copies(self, storages: Collection[str] | None = None) -> None:
        self._open_copies(len(self._closed_copies))
        super().compare_copies(storages)

    def _open_copies(self, number: int) -> None:
        due, self._closed_copies = self._closed_copies[:number], self._closed_copies[number:]
        own: dict[str, None] = {}
        for one, other in ahead(due, lambda pair: (span for item in pair for span in edges(item, self._data))):
            value = self.read.values[one.name]
            try:
                first, second = map(self._copy, (one, other))
            except MalformedError as error:
                self.note("bad-item", "error", f"{other.place}: {error.what}", other.file, other.at)
                continue
            if first is not None and second is not None:
                may_differ = is_own(one.name, first.dtype.name, value.shape)
                if self.copies.add(CopyPair(one.name, first, second), own=may_differ):
                    own[one.name] = None
        if own:
            names = join_limited([quoted(name) for name in own], most=3)
            self.note(RANK_VALUES, "warning", f"ranks have different values: {names}; the first rank's are taken")

    def _copy(self, item: Item) -> Rows | None:
        """Return a piece's bytes for comparison; None if the file is missing or cut, or the item compressed."""
        if item.file not in self._data or item.at + item.length > self._data[item.file].size or item.transforms:
            return None
        piece, dtype = self._tensor(item), self.read.values[item.name].dtype
        if piece is None or dtype is None:
            return None
        return piece[1].rows(dtype, piece[0][1], item.file)

    @cached_property
    def _mentioned(self) -> set[tuple[str, tuple[int, ...] | None]]:
        return {(item.name, item.offset) for item in self.read.items}

    def stored_size(self, key: str) -> int | None:
        return self._sizes.get(key)

    def stored(self, key: str) -> StorageLocation:
        size = self._sizes.get(key)
        if size is None:
            return StorageLocation(None, 0)
        if key not in self._stored:
            self._stored[key] = StorageLocation(Span(self._assembled(self._names[key]), 0, size), size)
        return self._stored[key]

    def records(self) -> Iterator[StoredRecord]:
        """Yield the records of every item. An item that is not an archive yields nothing: ``audit`` reports it."""
        return self._records(self._usable.values())

    def outer_records(self, touched: object = None) -> Iterator[StoredRecord]:
        return self._records(item for item in self._usable.values() if item.offset is None)

    def _records(self, items: Iterable[Item]) -> Iterator[StoredRecord]:
        keys = {name: key for key, name in self._names.items()}
        for item in ahead(items, lambda item: edges(item, self._data)):
            try:
                opened = self._open(item)
                # A tensor in a single piece, stored row by row, gets the storage key.
                chunks = self.read.values[item.name].chunks
                piece = self._tensor(item, opened) if item.name in keys and len(chunks) == 1 else None
                whole = Span(piece[1].source, piece[1].begin, self._sizes[keys[item.name]] or 0) if piece else None
                for record in opened.zip.records():
                    span = opened.within(record.span)
                    label = f"{item.place}, {item.name}: {record.name.partition('/')[2]}"
                    key, part = "", tuple[str, ...]()
                    if item.offset is None:
                        key = _storage_key(item, record.key) if record.key else ""
                        # The storage reads from the same source, so its checksum also covers these bytes.
                        span = self._stored[key].span or span if key in self._stored else span
                    elif record.key and record.size:
                        own = keys.get(item.name, "")
                        key, part = (own, ()) if span == whole or not own else ("", (own,))
                    yield record._replace(name=label, span=span, key=key, part_of=part)
            except MalformedError:
                continue

    def manifest(self, *, checked: bool = False) -> Manifest:
        """Return dtype, shape and path of each value. With ``checked``, also open each item to check it."""
        for item in ahead(self._usable.values(), lambda item: edges(item, self._data)) if checked else ():
            if self._tensor(item) is None:
                self._open(item)
        return {
            name: (value.dtype.name if value.dtype else "", value.shape, self.read.paths.get(name, (name,)))
            for name, value in self.read.values.items()
        }

    def audit(self, keys: Collection[str]) -> list[Finding]:
        """Open every item and check it as a torch.save file; also report bytes that no item covers."""
        problems = list(self._content[0])
        used: dict[str, int] = {}
        for item in self.read.items:
            used[item.file] = used.get(item.file, 0) + item.length
        for name, file in self._data.items():
            rest = file.size - used.get(name, 0)
            if rest > 0:
                what = f"{human_bytes(rest)} of {name} belong to no item of .metadata"
                problems.append(Finding("unlisted-bytes", "warning", what, name))
        return problems

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        """Yield the pickles of the items, and ``.metadata`` if it holds more than torch writes there. With ``quick``,
        only the first ``_MOST_OPENED`` tensor pieces are opened: DCP loads pieces with ``weights_only=True``."""
        left = len(self._usable) - _MOST_OPENED
        if not quick or left <= 0 or "_content" in self.__dict__:
            return iter((*self._odd_pickles(), *self._content[1], *self._unusable, *self._unlisted()))
        pieces = islice((item for item in self._usable.values() if item.offset is not None), _MOST_OPENED)
        objects = (item for item in self._usable.values() if item.offset is None)
        what = f"{self.folder.path}: most of {len(self._usable):,} items"
        rest = FoundPickle(what, None, "not looked at; ckptool scan opens each", unchecked=True)
        return iter((*self._odd_pickles(), *self._opened(chain(objects, pieces))[1], *self._unusable, rest))

    def _odd_pickles(self) -> Iterator[FoundPickle]:
        for name, source in self._odd:
            for pickle in find_pickles(source):
                yield pickle._replace(where=f"{name}: {pickle.where}" if pickle.where else name)

    def _unlisted(self) -> Iterator[FoundPickle]:
        """Yield pickles that call something: after the last item of a file, or anywhere in a file without items."""
        ends: dict[str, int] = {}
        for item in self.read.items:
            ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
        for name, source in self._data.items():
            end = ends.get(name, 0)
            if end != source.size:
                for pickle in bare_pickles(source, end if end < source.size else 0, name):
                    if pickle.graph is not None and pickle.graph.has(Call):
                        yield pickle

    @cached_property
    def _unusable(self) -> list[FoundPickle]:
        """The pickles of items that are cut, overlap others or are listed twice: DCP loads the remaining bytes."""
        pickles: list[FoundPickle] = []
        seen: set[tuple[str, int]] = set()
        for item in self.read.items if len(self._usable) < len(self.read.items) else ():
            if self._usable.get((item.name, item.offset)) == item or (item.file, item.at) in seen:
                continue
            source, where = self._data.get(item.file), f"{item.place} ({item.name})"
            if source is None or item.at >= source.size:
                continue
            if len(seen) >= _MOST_UNUSABLE:
                pickles.append(FoundPickle(where, None, "not looked at, nor are more such items", unchecked=True))
                break
            seen.add((item.file, item.at))
            if item.transforms and not item.is_zstd:
                pickles.append(FoundPickle(where, None, f"it went through {item.transforms[0]}", unchecked=True))
                continue
            content = SliceSource(source, item.at, min(item.length, source.size - item.at), item.place)
            tail = end_search_start(content.size)
            if content.read(0, 4) == _ZIP and _ZIP_END not in content.read(tail, content.size - tail):
                continue  # no reader opens an archive without its directory
            inside = list(find_pickles(content))
            pickles += [part._replace(where=f"{where}: {part.where}") for part in inside]
            pickles += [] if inside else [FoundPickle(where, None, "it is cut, or overlaps another")]
        return pickles

    @cached_property
    def _content(self) -> tuple[list[Finding], list[FoundPickle]]:
        return self._opened(self._usable.values())

    def _opened(self, items: Iterable[Item]) -> tuple[list[Finding], list[FoundPickle]]:
        problems: list[Finding] = []
        return problems, list(grouped(self._pickles_in(items, problems), "tensor"))

    def _pickles_in(self, items: Iterable[Item], problems: list[Finding]) -> Iterator[tuple[Hashable, FoundPickle]]:
        """Yield each pickle with its file if one pickle may represent the tensors there, else with None."""
        for item in ahead(items, lambda item: edges(item, self._data)):
            where = f"{item.place} ({item.name})"
            try:
                opened = self._open(item)
                try:
                    self._tensor(item, opened)
                except SubclassError as error:  # a tensor of another class, which is sound
                    problems.append(Finding(UNJOINED, "warning", f"{item.place}: {error.what}", item.file, item.at))
            except MalformedError as error:
                if item.offset is not None or item.file not in self._bad:  # else reported once per file
                    problems.append(Finding("bad-item", "error", f"{item.place}: {error.what}", item.file, item.at))
                inside = list(find_pickles(SliceSource(self._data[item.file], item.at, item.length, item.place)))
                yield from ((None, part._replace(where=f"{where}: {part.where}")) for part in inside)
                yield from () if inside else [(None, FoundPickle(where, None, error.what))]
                continue
            own = opened.zip
            for problem in (*own.problems, *own.audit(TensorReader(own.graph).storages)):
                if problem.level != "note" and len(problems) < LIMITS.listed:
                    what = f"{where}: {problem.message}"
                    problems.append(problem._replace(message=what, where=item.file, offset=item.at))
            first, *rest = own.pickles()
            yield from ((None, part._replace(where=f"{where}: {part.where}")) for part in rest)
            yield None if item.offset is None else item.file, first._replace(where=where)

    def note_files(
        self, names: Collection[str], metadata: Collection[str], named: Collection[str], framework: str = ""
    ) -> None:
        """Report what the file names tell, and set ``writer``: the last step of opening. ``named`` are the data files
        that ``metadata`` lists. ``framework`` names the program that saved several folders at once, or is ""."""
        for match in map(DATA_OF_RANK.match, self._data) if any(map(OF_RANK.match, metadata)) else ():
            if match and (lost := f"__{match[1]}.metadata") not in metadata:
                self.note(INCOMPLETE, "error", f"there is {match[0]}, and no {lost} to say what is in it", lost)
        files = {**extra_files(names), **dict(side_files(names) if framework else ())}
        beside = "; ".join(f"{name} ({description})" for name, description in files.items() if description)
        if beside:
            self.note("side-files", "note", f"beside the tensors: {beside}")
        if ".metadata.tmp" in names:
            what = "there is a .metadata.tmp, too: saving over this checkpoint was begun and not finished"
            self.note("unfinished-save", "warning", what)
        data = {*self._data, *(name for name in named if DATA_OF_RANK.match(os.path.basename(name)))}
        writers = {match[1] for match in map(DATA_OF_RANK.match, map(os.path.basename, data)) if match}
        pieces = sum(len(value.chunks) for value in self.read.values.values())
        counts = ((len(writers), "rank"), (len(data), "file"), (pieces, "piece"))
        numbers = ", ".join(pluralize(count, noun) for count, noun in counts)
        origin = origin_of(self.folder, names, self.reader, self.stored)
        self.rank_save = RankSave(len(writers), origin.step)
        framework = framework or origin.framework
        by = f" for {framework}" if framework else ""
        writer = f"torch.distributed.checkpoint {self.read.version}{by}"
        self.writer = f"{writer}: {numbers}{step_words(origin.step)}, {self.completeness}"

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
            if size >= TOO_LARGE:
                self.note("odd-metadata", "error", f".metadata: {quoted(name)} is larger than any tensor can be")
                continue
            key = name  # so that messages about a storage name its tensor
            while not key or key in self._names:
                key += "'"  # the empty name needs a key
            self._names[key] = name
            whole = value.is_whole(name, self._usable, lambda: self._mentioned, self.note)
            self._sizes[key] = size if whole else None
            nested.put(name, path, builder.tensor(contiguous(value.dtype, value.shape, key)))
        for (item, reason), *others in self._bad.values():
            rest = f"; so it is with {pluralize(len(others), 'more object')} of that file" if others else ""
            self.note("bad-item", "error", f"{item.place}: {reason}{rest}", item.file, item.at)
        for name in nested.misfits:
            self.note("odd-metadata", "error", f".metadata: there is no room for {quoted(name)} where it belongs")
        root = nested.build(builder)
        for places, values in nested.sparse:
            what = f".metadata: a list of {places:,} places has values in {values:,}: its values are listed by number"
            self.note(UNCHECKED, "warning", f"{what}, the empty places were not made")
        return builder.graph(root, self._protocol)

    def _open(self, item: Item) -> OpenedItem:
        if self._last is not None and self._last.item is item:
            return self._last
        value = self.read.values[item.name]
        size = prod(value.shape) * value.dtype.itemsize if value.dtype is not None else 0
        self._last = open_item(item, self._data[item.file], self._known, size)
        return self._last

    def _tensor(self, item: Item, opened: OpenedItem | None = None) -> tuple[Box, TensorItem] | None:
        """Return the box and the elements of a tensor piece; None for an object."""
        value = self.read.values[item.name]
        if value.dtype is None or item.offset is None:
            return None
        box = self._pieces.box(item)
        if box is None:
            what = f"{item.name!r}: .metadata lists no piece at {list(item.offset)}"
            raise MalformedError(what, where=item.place)
        known = self._known.read(item, self._data[item.file], value.dtype, box[1]) if opened is None else None
        return box, known or open_tensor(opened or self._open(item), value.dtype, box[1], self._known)

    def _assembled(self, name: str) -> PiecesSource:
        value = self.read.values[name]
        assert value.dtype is not None
        boxes = [box for box in value.chunks if 0 not in box[1]]
        items = [self._usable[name, box[0]] for box in boxes]
        if len(boxes) < len(value.chunks):  # an empty piece may share its place; the first counts
            boxes = [self._pieces.box(item) or box for box, item in zip(boxes, items)]
        files = tuple({item.file: self._data[item.file] for item in items}.values())
        where = f"{self.folder.path}: {name}"
        return PiecesSource(where, value.dtype.name, value.shape, tuple(boxes), tuple(items), files)

    def _object(self, builder: Builder, name: str) -> Ref | None:
        """Add an object and everything it refers to; report a problem and return None if it cannot be read."""
        item = self._usable.get((name, None))
        if item is None:
            if (name, None) not in self._mentioned:
                self.note("missing-item", "error", f".metadata does not say where {quoted(name)} is", name)
            return None
        try:
            opened = self._open(item)
        except MalformedError as error:
            self._bad.setdefault(item.file, []).append((item, error.what))
            return None
        root = opened.graph.nodes[opened.graph.root]
        if root is None or isinstance(root, bool | int | float | str):
            return builder.constant(root)
        reader = TensorReader(opened.graph)
        for _, storage in reader.uses():
            key = _storage_key(item, storage.key)
            if key not in self._stored:
                try:
                    span, record = opened.storage(storage.key)
                    self._stored[key] = StorageLocation(span, span.size, False, record.crc if record.size else None)
                    self._sizes[key] = span.size
                except MalformedError as error:
                    self.note("bad-item", "error", f"{item.place}: {error.what}", item.file)
        self._protocol = max(self._protocol, opened.graph.style.protocol)
        graph = with_storage_keys(reader, lambda key: _storage_key(item, key))
        return builder.graft(graph, graph.root)


def _storage_key(item: Item, key: str) -> str:
    return f"{item.name}, storage {key}"


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder is a DCP folder by its file names, names one as its latest, or holds accelerate's FSDP
    folders."""
    if LATEST in names:
        inner = latest_folder(folder, names)
        return are_files(inner.names()) if inner else False
    return are_files(names) or (bool(fsdp_folders(folder, names)) and weights_of(names) is None)


def _read_listing(
    folder: Folder, wanted: Sequence[str], opened: list[Source], stack: ExitStack
) -> tuple[Metadata, list[tuple[str, Source]]]:
    """Read the metadata of a folder; return it with the files that hold more than torch writes."""
    ranks, odd = [], []
    if is_remote(folder.path):  # there it takes no request to open a file
        prefetch(Span(file, 0, file.size) for file in map(folder.open, wanted))
    for name in wanted:
        listing = open_listing(folder, name, stack, name)
        opened.append(listing)
        if listing.size > LIMITS.pickle_bytes:
            raise MalformedError(f"{name} has {human_bytes(listing.size)}: more than any metadata", path=folder.path)
        metadata = read_listing(listing.read(0, listing.size), name)
        if metadata.subclasses or listing.size > metadata.end:
            odd.append((name, listing))
        ranks.append(metadata)
    return merged(ranks, f"{pluralize(len(ranks), 'rank')}, each with its own metadata"), odd


def read(folder: Folder) -> tuple[FolderSource, Dcp]:
    """Open a DCP folder, the latest iteration of a Megatron-LM folder, or all folders of one save by accelerate. The
    folders of a save become one checkpoint with the entries ``model`` and ``optimizer``; further models get an entry
    named after their folder. Raises MalformedError if there is no readable metadata."""
    named, names, others = folder.path, sorted(folder.names(strict=True)), list[str]()
    if (latest := latest_folder(folder, names)) is not None:
        others = [name for name in names if ITERATION.match(name) and name != os.path.basename(latest.path)]
        folder, names = latest, sorted(latest.names())
    folders = [] if are_files(names) else fsdp_folders(folder, names)
    opened: list[Source] = []
    files: dict[str, Source] = {}
    closed: dict[str, CkptoolError] = {}
    parts: list[Metadata] = []
    odd: list[tuple[str, Source]] = []
    wanted: list[str] = []
    with opening(folder.path, "it is damaged: get the folder again") as stack:
        for part in folders or [""]:
            inner = folder.inner(part) if part else folder
            inside = sorted(inner.names()) if part else names
            prefix = f"{part}/" if part else ""
            metadata = [prefix + name for name in metadata_names(inner, inside)]
            listings: list[Source] = []
            read, more_odd = _read_listing(folder, metadata, listings, stack)
            if part:
                taken = {place[:1] for other in parts for place in other.paths.values()}
                read = read.placed(part, apart=any(place[:1] in taken for place in read.paths.values()))
            data = [prefix + name for name in inside if name.endswith(DATA)]
            more_files, more_closed = open_data(folder, data, read.items, opened, stack)
            opened += listings
            parts, odd, wanted = [*parts, read], [*odd, *more_odd], [*wanted, *metadata]
            files, closed = files | more_files, closed | more_closed
        container = Dcp(folder, merged(parts, parts[0].version), files, odd, closed)
    places = {item.file for item in container.read.items}
    beside = [name for name in names if name not in folders]
    listed = [*files, *closed, *beside] if folders else names
    container.note_files(listed, wanted, places, "accelerate" if folders else "")
    if others:
        container.problems.append(other_steps_note(folder.path, LATEST, others))
    own = [name for name in model_files(beside) if name != _TRAINER] if folders else extra_files(names)
    paths, place = [folder.join(name) for name in own], folder.path if folders else ""
    return FolderSource(named, opened, paths, files.keys() - places, folder=place), container
