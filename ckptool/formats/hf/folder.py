"""Folders as transformers and huggingface_hub write them: weights in one file or in shards, with an index.

One checkpoint is the union of its shards, in the order of the index. A shard is a file of its own format, so nothing
is shared between shards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from ...base.errors import CkptoolError, MalformedError, RefusedError, UnreadableError
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import (
    INCOMPLETE,
    NO_INDEX,
    Container,
    FoundPickle,
    Manifest,
    Problem,
    ShardLayout,
    StoredBytes,
    StoredRecord,
    Traits,
)
from ...checkpoint.graph_builder import Builder, PlainTensor
from ...checkpoint.objects import mapping
from ...checkpoint.paths import key_text
from ...checkpoint.tensors import ID_PARTS, TensorReader
from ...files.pool import open_pooled
from ...files.sources import Appending, FileSource, FolderSource
from ...pickles.nodes import Graph, Persistent, Ref
from ..foreign.identification import explain, explain_placeholder
from ..safetensors import reader as safetensors_reader
from ..safetensors.sharding_info import whole_metadata
from ..torch import legacy_reader, zip_reader
from .files import Index, Weights, companions, index_name, is_checkpoint, is_index, read_index, side_files, weights_of

#: Folders of the modules of a sentence-transformers model: ``1_Pooling``, ``2_Dense``.
_MODULE: Final = re.compile(r"\d{1,3}_[A-Z]\w*\Z")
#: Bytes of the head that tell a format.
_HEAD: Final = 1024


class Held(NamedTuple):
    """A tensor of a shard: a plain one, or the ``ref`` of one in the graph of the shard.

    ``size`` are the bytes of its elements, ``storages`` those of the whole storages that it reads, by their keys.
    """

    plain: PlainTensor | None
    ref: Ref
    size: int
    storages: Mapping[str, int]


class Shard(NamedTuple):
    """A file of weights, and the tensors in it by their names; storages by the keys of its own container."""

    name: str
    container: Container
    tensors: list[tuple[str, Held]]


class HfFolder(Container):
    """The weights of a folder as one checkpoint. The storages of shard 3 have keys like ``3/17``."""

    def __init__(self, folder: str, weights: Weights, names: Collection[str], stack: ExitStack) -> None:
        self.problems: list[Problem] = []
        #: How its files are called: an edit keeps that.
        self.stem, self.variant = weights.stem, weights.variant
        self.files: list[FileSource] = []
        safe = weights.suffix == "safetensors"
        self.format = "hf-safetensors" if safe else "hf-torch"
        unsummed = "safetensors" if safe else ""
        self.traits = Traits(
            not safe, unsummed, "each file", "safetensors" if safe else "torch", sharded=True, named=True
        )
        index = None
        if weights.index_name:
            try:
                listing = open_pooled(os.path.join(folder, weights.index_name))
            except UnreadableError as error:
                error.what = f"its index, {weights.index_name}, cannot be read: {error.what}"
                error.path = folder
                raise
            stack.callback(listing.close)
            other = explain_placeholder(listing)
            if other is not None:
                what = f"its index, {weights.index_name}, is not there: {other.what.removeprefix('it is ')}"
                raise MalformedError(what, path=folder, next=other.next)
            index = read_index(listing)
        wanted = list(dict.fromkeys(index.files.values())) if index else list(weights.files)
        self.shards = self._shards(folder, wanted, names, stack)
        self.files += [listing] if index else []
        self._check_names(weights, wanted, index, names)
        places = self._places(index)
        self.graph = self._united(places)
        self._check_size(index, places)
        first = self.shards[0].container
        orders = {shard.container.byteorder for shard in self.shards}
        if len(orders) > 1:
            raise UnreadableError("its shards are of both byte orders", path=folder, next="convert them one by one")
        self.byteorder = first.byteorder
        self.metadata: Mapping[str, str] = {
            name: text
            for name, text in whole_metadata(first.metadata).items()
            if all(shard.container.metadata.get(name) == text for shard in self.shards)
        }
        self.others: Sequence[Graph] = (
            [] if weights.suffix == "safetensors" else [shard.container.graph for shard in self.shards]
        )
        self.writer = f"{first.writer}, {pluralize(len(self.shards), 'file')}"
        self._tell_the_rest(folder, weights, names)

    def _note(self, code: str, level: str, message: str, refused: bool = False, where: str = "") -> None:
        self.problems.append(Problem(code, level, message, refused, where))

    def _shards(self, folder: str, wanted: list[str], names: Collection[str], stack: ExitStack) -> list[Shard]:
        shards = []
        errors: list[CkptoolError] = []
        for name in wanted:
            if name not in names:
                self._note(INCOMPLETE, "error", f"the shard {name} is not there", True, name)
                continue
            try:
                source = open_pooled(os.path.join(folder, name))
                stack.callback(source.close)
                shard = _shard(name, source)
            except CkptoolError as error:
                errors.append(error)
                self._note(INCOMPLETE, "error", f"the shard {name} cannot be read: {error.what}", True, name)
                continue
            self.files.append(source)
            shards.append(shard)
            self.problems += [
                problem._replace(message=f"{name}: {problem.message}", where=name)
                for problem in shard.container.problems
            ]
        if not shards:
            if errors:
                raise errors[0]
            what = f"none of its {pluralize(len(wanted), 'shard')} is there" if wanted else "its index names no shard"
            raise MalformedError(what, path=folder, next="get the missing files")
        return shards

    def _check_names(self, weights: Weights, wanted: list[str], index: Index | None, names: Collection[str]) -> None:
        """Shards that only their names tell of: without an index, or beside it."""
        if index is None and weights.shards:
            head, of, tail = weights.files[0].rpartition("-of-")
            every = (f"{head[:-5]}{number:05d}{of}{tail}" for number in range(1, weights.shards + 1))
            there = set(weights.files)
            gone = [name for name in every if name not in there]
            if gone:
                verb = "is" if len(gone) == 1 else "are"
                what = f"of {pluralize(weights.shards, 'shard')} {join_limited(gone)} {verb} not there"
                self._note(INCOMPLETE, "error", what, True, gone[0])
            name = index_name(weights.stem, weights.suffix, weights.variant)
            what = f"there is no index, {name}: transformers does not load the shards without it"
            self._note(NO_INDEX, "error", what, where=name)
        elif index is not None and not index.described:
            what = f'{weights.index_name} has no object "metadata": transformers does not load the shards without it'
            self._note(NO_INDEX, "error", what, where=weights.index_name)
        stray = [name for name in weights.files if name not in wanted and name in names]
        if stray:
            self._note("stray-shard", "warning", f"the index does not name {join_limited(stray)}", where=stray[0])

    def _places(self, index: Index | None) -> dict[str, tuple[int, Held]]:
        """Where every tensor is: in the order of the index, then of the shards."""
        held: dict[str, list[int]] = {}
        tensors: dict[tuple[int, str], Held] = {}
        for number, shard in enumerate(self.shards):
            for name, tensor in shard.tensors:
                held.setdefault(name, []).append(number)
                tensors[number, name] = tensor
        files = index.files if index else {}
        numbers = {shard.name: number for number, shard in enumerate(self.shards)}
        gone: dict[str, list[str]] = {}
        moved: list[tuple[str, str, str]] = []
        places = {}
        for name, file in files.items():
            at = held.get(name, [])
            if numbers.get(file) in at:
                places[name] = (numbers[file], tensors[numbers[file], name])
            elif at:
                moved.append((name, file, self.shards[at[0]].name))
                places[name] = (at[0], tensors[at[0], name])
            elif file in numbers:
                gone.setdefault(file, []).append(name)
        for file, missing in gone.items():
            what = (
                f"{file} lacks {pluralize(len(missing), 'tensor')} that the index says are in it: "
                f"{join_limited(missing)}"
            )
            self._note(INCOMPLETE, "error", what, True, file)
        lost = [name for name, file in files.items() if file not in numbers and name not in places]
        if lost:
            what = (
                f"{pluralize(len(lost), 'tensor')} of {len(files):,} are in files that cannot be read: "
                f"{join_limited(lost)}"
            )
            self._note(INCOMPLETE, "error", what, True)
        if moved:
            self._note("wrong-shard", "warning", _moved_words(moved), where=moved[0][1])
        twice = [name for name, at in held.items() if len(at) > 1]
        if twice:
            both = join_limited([self.shards[number].name for number in held[twice[0]]])
            what = f"{pluralize(len(twice), 'tensor')} in more than one shard: {quoted(twice[0])} in {both}"
            which = "; transformers takes the last" + ", other readers the one that the index names" * bool(index)
            self._note("tensor-twice", "error", what + which, where=self.shards[held[twice[0]][0]].name)
        extra = [name for name in held if name not in places]
        if index and extra:
            what = (
                f"{pluralize(len(extra), 'tensor')} in the shards that the index does not name: {join_limited(extra)}"
            )
            self._note("not-in-index", "warning", what)
        for name in extra:
            places[name] = (held[name][0], tensors[held[name][0], name])
        return places

    def _check_size(self, index: Index | None, places: Mapping[str, tuple[int, Held]]) -> None:
        if index is None or index.total < 0 or any(problem.code == INCOMPLETE for problem in self.problems):
            return
        # Writers count a storage once or each time: either is right.
        held = ((number, *part) for number, tensor in places.values() for part in tensor.storages.items())
        once = sum({(number, key): nbytes for number, key, nbytes in held}.values())
        each = sum(tensor.size for _, tensor in places.values())
        if index.total not in (once, each):
            what = f"the index says {index.total:,} bytes (total_size), the tensors have {each:,}"
            self._note("total-size", "warning", what)

    def _tell_the_rest(self, folder: str, weights: Weights, names: Collection[str]) -> None:
        if weights.variant:
            what = f"from_pretrained loads it with variant={weights.variant!r}: weights of no variant are not there"
            self._note("variant", "note", what)
        if weights.others:
            others = join_limited(list(weights.others))
            what = f"it is loaded from {weights.name}, as transformers chooses; passed over: {others}"
            self._note("other-weights", "note", what)
        beside: dict[str, list[str]] = {}
        for name, words in side_files(names):
            beside.setdefault(words, []).append(name)
        if beside:
            told = "; ".join(f"{join_limited(files)} ({words})" for words, files in beside.items())
            self._note("side-files", "note", f"beside the weights: {told}")
        # A model of sentence-transformers has its later layers in folders of their own.
        inner = [name for name in sorted(names) if _MODULE.match(name) and weights_of(_names(folder, name))]
        if inner:
            what = (
                f"weights in {join_limited(inner)} are not shown here: it is a model of several modules, a folder each"
            )
            self._note("inner-weights", "note", what, where=os.path.join(folder, inner[0]))

    @property
    def shard_layout(self) -> ShardLayout:  # type: ignore[override]
        """The bytes of the largest shard of several tensors are what the limit must have been at least; 0 for none."""
        sizes = [sum(tensor.size for _, tensor in shard.tensors) for shard in self.shards if shard.tensors[1:]]
        return ShardLayout(max(sizes, default=0) if len(self.shards) > 1 else 0, self.stem, self.variant)

    def originals(self) -> list[tuple[str, FileSource]]:
        """The files of the weights as they are, and their index."""
        return [(os.path.basename(file.name), file) for file in self.files]

    def _united(self, places: Mapping[str, tuple[int, Held]]) -> Graph:
        """One dict of the tensors of all shards, as they are: with their strides, flags and what they share."""
        builder = Builder()
        grafted: dict[int, dict[Ref, Ref]] = {}
        items: list[tuple[str, Ref]] = []
        protocol = 0
        for name, (number, held) in places.items():
            if held.plain is not None:
                items.append((name, builder.tensor(held.plain._replace(key=f"{number}/{held.plain.key}"))))
                continue
            graph, known = self.shards[number].container.graph, grafted.setdefault(number, {})
            protocol = max(protocol, graph.style.protocol)
            items.append((name, builder.graft(graph, held.ref, known)))
        for number, known in grafted.items():
            shard = self.shards[number]
            graph = shard.container.graph
            for ref, storage in TensorReader(graph).uses():
                node = graph.nodes[ref]
                own = graph.nodes[node.pid] if isinstance(node, Persistent) else ()
                if isinstance(own, tuple) and len(own) > ID_PARTS and not shard.container.traits.former:
                    what = f"{shard.name}: a storage is described by {len(own)} values, of which torch takes {ID_PARTS}"
                    self._note("id-parts", "error", what, refused=True, where=shard.name)
                place = builder.nodes[known[ref]] if ref in known else None
                pid = builder.nodes[place.pid] if isinstance(place, Persistent) else ()
                if isinstance(place, Persistent) and isinstance(pid, tuple):
                    builder.nodes[place.pid] = (*pid[:2], builder.add(f"{number}/{storage.key}"), *pid[3:])
        return builder.graph(builder.mapping(items), protocol)

    def _held(self, key: str) -> tuple[Container, str] | None:
        number, slash, rest = key.partition("/")
        if not slash or not number.isdigit() or int(number) >= len(self.shards):
            return None
        return self.shards[int(number)].container, rest

    def stored_size(self, key: str) -> int | None:
        held = self._held(key)
        return held[0].stored_size(held[1]) if held else None

    def stored(self, key: str) -> StoredBytes:
        held = self._held(key)
        return held[0].stored(held[1]) if held else StoredBytes(None, 0)

    def records(self) -> Iterator[StoredRecord]:
        for number, shard in enumerate(self.shards):
            for record in shard.container.records():
                key = f"{number}/{record.key}" if record.key else ""
                yield record._replace(name=f"{shard.name}: {record.name}", key=key)

    def manifest(self, *, checked: bool = False) -> Manifest:
        """The tensors of each file, whose own metadata say where their bytes are."""
        if checked:
            for shard in self.shards:
                shard.container.manifest(checked=True)
        return {f"{shard.name}: {name}": (held.size,) for shard in self.shards for name, held in shard.tensors}

    def audit(self, keys: Collection[str]) -> list[Problem]:
        found = []
        for number, shard in enumerate(self.shards):
            own = [key.partition("/")[2] for key in keys if key.startswith(f"{number}/")]
            found += [
                problem._replace(message=f"{shard.name}: {problem.message}", where=shard.name)
                for problem in shard.container.audit(own)
            ]
        return found

    def pickles(self) -> Iterator[FoundPickle]:
        for shard in self.shards:
            for found in shard.container.pickles():
                yield found._replace(where=f"{shard.name}: {found.where}")

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        raise RefusedError("it is a folder of several files", next="write a new folder with -o, or edit one file of it")


def _names(*path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(os.path.join(*path)))
    except OSError:
        return frozenset()


def _moved_words(moved: list[tuple[str, str, str]]) -> str:
    name, said, found = moved[0]
    pairs = {(said, found) for _, said, found in moved}
    what = (
        f"{pluralize(len(moved), 'tensor')} in another shard than the index says: {quoted(name)} in {found}, not {said}"
    )
    if (found, said) in pairs:
        what += f"; {said} and {found} may have been swapped"
    return what


def _shard(name: str, source: FileSource) -> Shard:
    """Read one file of weights in the format that its content tells."""
    head = source.read(0, _HEAD)
    container: Container
    if zip_reader.sniff(head, source):
        container = zip_reader.read(source)
    elif legacy_reader.sniff(head, source):
        container = legacy_reader.read(source)
    elif (other := explain_placeholder(source)) is not None:
        raise other
    elif not safetensors_reader.sniff(head, source):
        raise explain(head, source)
    else:
        container = safetensors_reader.read(source)
        plain = [(key, Held(own, -1, own.nbytes, {own.key: own.nbytes})) for key, own in container.tensors]
        return Shard(name, container, plain)
    graph = container.graph
    items = mapping(graph, graph.root)
    if items is None:
        raise MalformedError("it holds no dict of tensors", path=source.name)
    reader = TensorReader(graph)
    tensors: list[tuple[str, Held]] = []
    for key, value in items:
        found, called = reader.tensor(value), graph.nodes[key]
        if found is None or not isinstance(called, str):
            name = quoted(called) if isinstance(called, str) else key_text(graph, key) or "an object"
            what = f"{name} is not a tensor" if found is None else f"the key {name} is not a string"
            what += ", and folders are read by the names of tensors alone"
            raise UnreadableError(what, path=source.name, next="read its files one by one")
        keys = (part.storage for part in reader.parts(found))
        storages = {key: reader.storages[key].nbytes for key in keys if key in reader.storages}
        tensors.append((called, Held(None, value, found.own_bytes, storages)))
    return Shard(name, container, tensors)


def read(path: str) -> tuple[FolderSource, Container]:
    """Read a folder, or the folder of an index that is named instead of it; raises as reading a file does."""
    folder, index = (os.path.dirname(path) or os.curdir, os.path.basename(path)) if is_index(path) else (path, "")
    try:
        names = frozenset(os.listdir(folder))
    except OSError as error:
        raise UnreadableError(f"it cannot be listed: {error.strerror}", path=path) from error
    weights = weights_of(names, index)
    if weights is None:
        raise UnreadableError("there are no weights in it", path=path, next="name a file in it")
    with ExitStack() as stack:
        try:
            found = HfFolder(folder, weights, names, stack)
        except CkptoolError as error:
            error.path = error.path or folder
            raise
        stack.pop_all()
    own = {os.path.basename(file.name) for file in found.files}
    beside = [os.path.join(folder, name) for name in companions(names - own)]
    return FolderSource(path, found.files, beside), found


def sniff(names: Collection[str]) -> bool:
    """Return whether a folder is one checkpoint, by the names of its files."""
    return is_checkpoint(names)
