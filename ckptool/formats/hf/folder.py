"""Folders written by transformers and huggingface_hub: weights in one file, or in shards with an index.

The checkpoint is the union of the shards, in index order. Each shard is a complete file of its format, so shards share
no storages.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from ...base.errors import MalformedError, UnreadableError
from ...base.findings import INCOMPLETE, INNER, NO_INDEX, STALE_INDEX, Finding
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import Container, FoundPickle, Manifest, ShardLayout, StorageLocation, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, PlainTensor
from ...checkpoint.objects import mapping
from ...checkpoint.paths import key_text
from ...checkpoint.tensors import ID_PARTS, TensorReader
from ...files.folders import Folder
from ...files.sources import FolderSource, Source
from ...pickles.nodes import Graph, Persistent, Ref
from .. import folder_format
from ..folders import ShardedContainer, in_file, open_listing, opening, with_storage_keys
from ..foreign.identification import explain, explain_placeholder
from ..names.deepspeed import step_folder
from ..names.hf import Index, Weights, companions, index_name, is_checkpoint, read_index, side_files, weights_of
from ..names.training import fsdp_folders
from ..safetensors import reader as safetensors_reader
from ..safetensors.header import SHARDING_INFO, common_metadata, whole_metadata
from ..torch import legacy_reader, zip_reader

#: Module folders of a sentence-transformers model: ``1_Pooling``, ``2_Dense``.
_MODULE: Final = regex(r"\d{1,3}_[A-Z]\w*\Z")
#: The first bytes of a file, enough to identify its format.
_HEAD: Final = 1024


class ShardTensor(NamedTuple):
    """A tensor of a shard: ``plain`` for safetensors, else the ``ref`` of a tensor in the shard's graph. ``size`` is
    the size of its elements in bytes. ``storages`` maps the storages it reads to their full sizes in bytes."""

    plain: PlainTensor | None
    ref: Ref
    size: int
    storages: Mapping[str, int]


class Shard(NamedTuple):
    """A weight file and its tensors by name. Storage keys are its own container's."""

    name: str
    container: Container
    tensors: list[tuple[str, ShardTensor]]


#: The shard number of each tensor, and the tensor there.
Places = Mapping[str, tuple[int, ShardTensor]]


class HfFolder(ShardedContainer):
    """The weights of a folder as one checkpoint. The storages of shard 3 have keys like ``3/17``."""

    load_rule = safetensors_reader.load_rule

    def __init__(self, folder: Folder, weights: Weights, names: Collection[str], stack: ExitStack) -> None:
        super().__init__()
        self.folder, self.weights = folder, weights
        safe = weights.suffix == "safetensors"
        self.format = "hf-safetensors" if safe else "hf-torch"
        traits = safetensors_reader.TRAITS if safe else Traits(writes_as="torch", flat_names=True)
        self.traits, self.holds_texts = traits._replace(loads="each file", sharded=True), safe
        index = None
        if weights.index_name:
            listing = open_listing(folder, weights.index_name, stack, f"its index, {weights.index_name},")
            index = read_index(listing)
        wanted = list(dict.fromkeys(index.files.values())) if index else list(weights.files)
        gone = [name for name in wanted if name not in names]
        if index and gone and weights.is_complete:
            what = f"the index is of another save: it names missing files ({join_limited(gone, most=2)})"
            complete = f"the set of {pluralize(weights.shards, 'shard')} with {weights.files[0]} is complete"
            self.note(STALE_INDEX, "error", f"{what}; {complete}", weights.index_name)
            index, wanted = None, list(weights.files)
        self.shards = self._shards(wanted, names, stack)
        if index and weights.is_complete:
            wanted += self._unnamed_shards(index, wanted, names, stack)
        self.files += [listing] if index else []
        self._check_names(wanted, index, names)
        places = self._places(index, names)
        self.graph = self._united(places)
        self._check_size(index, places)
        containers = [shard.container for shard in self.shards]
        first = containers[0]
        if any(container.byteorder != first.byteorder for container in containers):
            what = "its shards are of both byte orders"
            raise UnreadableError(what, path=folder.path, next="convert them one by one")
        self.byteorder = first.byteorder
        headers = [container.metadata for container in containers]
        self.metadata: Mapping[str, str] = common_metadata([whole_metadata(first.metadata), *headers[1:]])
        self.others: Sequence[Graph] = [] if safe else [container.graph for container in containers]
        self.writer = f"{first.writer}, {pluralize(len(self.shards), 'file')}"
        self._note_the_rest(names)

    def _shards(self, wanted: list[str], names: Collection[str], stack: ExitStack) -> list[Shard]:
        shards = []
        for name in wanted:
            if name not in names:
                continue  # see ``_note_absent``
            shard = self._read_file(self.folder, name, stack, _shard, f"the shard {name}")
            if shard is not None:
                shards.append(shard)
                self.problems += [in_file(problem, name) for problem in shard.container.problems]
        if not shards:
            if self.errors:
                raise self.errors[0]
            what = f"none of its {pluralize(len(wanted), 'shard')} is there" if wanted else "its index names no shard"
            raise MalformedError(what, path=self.folder.path, next="get the missing files")
        return shards

    def _unnamed_shards(self, index: Index, wanted: list[str], names: Collection[str], stack: ExitStack) -> list[str]:
        """Read the shards of a complete set that the index does not name, if they have tensors that it names."""
        there = {name for shard in self.shards for name, _ in shard.tensors}
        unnamed = [name for name in self.weights.files if name not in wanted]
        if not unnamed or there >= index.files.keys():
            return []
        shards = self._shards(unnamed, names, stack)
        inside = [name for shard in shards for name, _ in shard.tensors if name in index.files and name not in there]
        if not inside:
            return []
        self.shards += shards
        what = f"the index names the wrong shard for {join_limited(inside)}, and does not name {join_limited(unnamed)}"
        self.note(STALE_INDEX, "error", f"{what}: transformers does not load it", unnamed[0])
        return unnamed

    def _note_absent(self, index: Index, names: Collection[str], places: Places) -> None:
        lost = {file for name, file in index.files.items() if name not in places}
        for file in dict.fromkeys(index.files.values()):
            if file in lost and file not in names:
                self.note_lost(f"the shard {file} is not there", file)
            elif file not in names:
                what = f"the index names {file}, which is not there, but its tensors are in the other shards"
                self.note(STALE_INDEX, "error", what, file)

    def _check_names(self, wanted: list[str], index: Index | None, names: Collection[str]) -> None:
        weights = self.weights
        if index is None and weights.shards and not weights.index_name:
            if weights.absent:
                verb = "is" if len(weights.absent) == 1 else "are"
                what = f"of {pluralize(weights.shards, 'shard')} {join_limited(list(weights.absent))} {verb} not there"
                self.note_lost(what, weights.absent[0])
            if weights.stem:
                name = index_name(weights.stem, weights.suffix, weights.variant)
                what = f"there is no index, {name}: transformers does not load the shards without it"
                self.note(NO_INDEX, "error", what, name)
            else:
                what = "its shards have no index and names of their own: transformers does not load them"
                self.note("in-pieces", "note", what)
                if "of" not in weights.files[0]:  # torchtune's hf_model_0001_0.pt
                    self.note_unrecorded(len(weights.files))
        elif index is not None and not index.described:
            what = f'{weights.index_name} has no object "metadata": transformers does not load the shards without it'
            self.note(NO_INDEX, "error", what, weights.index_name)
        stray = [name for name in weights.files if name not in wanted and name in names]
        if stray:
            self.note("stray-shard", "warning", f"the index does not name {join_limited(stray)}", stray[0])

    def _places(self, index: Index | None, names: Collection[str]) -> Places:
        copies: dict[str, dict[int, ShardTensor]] = {}
        for number, shard in enumerate(self.shards):
            for name, tensor in shard.tensors:
                copies.setdefault(name, {})[number] = tensor
        files = index.files if index else {}
        numbers = {shard.name: number for number, shard in enumerate(self.shards)}
        absent: dict[str, list[str]] = {}
        moved: list[tuple[str, str, str]] = []
        places: dict[str, tuple[int, ShardTensor]] = {}
        for name, file in files.items():
            owners, number = copies.get(name, {}), numbers.get(file, -1)
            if number in owners:
                places[name] = number, owners[number]
            elif owners:
                places[name] = next(iter(owners.items()))
                moved.append((name, file, self.shards[places[name][0]].name))
            elif number >= 0:
                absent.setdefault(file, []).append(name)
        if index:
            self._note_absent(index, names, places)
        for file, missing in absent.items():
            lacking = pluralize(len(missing), "tensor")
            self.note_lost(f"{file} lacks {lacking} that the index says are in it: {join_limited(missing)}", file)
        lost = [name for name, file in files.items() if file not in numbers and name not in places]
        if lost:
            what = f"{pluralize(len(lost), 'tensor')} of {len(files):,} are in files that cannot be read"
            self.note_lost(f"{what}: {join_limited(lost)}")
        if moved:
            name, listed, actual = moved[0]
            what = f"{pluralize(len(moved), 'tensor')} in another shard than the index says"
            self.note("wrong-shard", "warning", f"{what}: {quoted(name)} in {actual}, not {listed}", listed)
        twice = [name for name, owners in copies.items() if len(owners) > 1]
        if twice:
            shards = [self.shards[number].name for number in copies[twice[0]]]
            what = f"{pluralize(len(twice), 'tensor')} in more than one shard: {quoted(twice[0])} in "
            which = "; transformers takes the last" + ", other readers the one that the index names" * bool(index)
            self.note("tensor-twice", "error", what + join_limited(shards) + which, shards[0])
        extra = {name: next(iter(owners.items())) for name, owners in copies.items() if name not in places}
        if index and extra:
            what = f"{pluralize(len(extra), 'tensor')} in the shards that the index does not name"
            self.note("not-in-index", "warning", f"{what}: {join_limited(list(extra))}")
        return places | extra

    def _check_size(self, index: Index | None, places: Places) -> None:
        if index is None or index.total < 0 or any(problem.code == INCOMPLETE for problem in self.problems):
            return
        # Writers count a shared storage once or once per tensor: both totals are valid.
        parts = ((number, *part) for number, tensor in places.values() for part in tensor.storages.items())
        once = sum({(number, key): nbytes for number, key, nbytes in parts}.values())
        each = sum(tensor.size for _, tensor in places.values())
        pieces = [shard.name for shard in self.shards if SHARDING_INFO in shard.container.metadata]
        if pieces and each < index.total:
            what = f"one rank's pieces are in place of whole tensors in {join_limited(pieces)}"
            self.note_lost(f"{what}: the index says {index.total:,} bytes, there are {each:,}", pieces[0])
        elif index.total not in (once, each):
            what = f"the index says {index.total:,} bytes (total_size), the tensors have {each:,}"
            self.note("total-size", "warning", what)

    def _note_the_rest(self, names: Collection[str]) -> None:
        weights = self.weights
        if weights.variant:
            what = f"from_pretrained loads it with variant={weights.variant!r}: weights of no variant are not there"
            self.note("variant", "note", what)
        if weights.others:
            others = join_limited(list(weights.others))
            why = "as transformers chooses" if weights.stem else "the last set of shards"
            what = f"it is loaded from {weights.name}, {why}; skipped: {others}"
            self.note("other-weights", "note", what)
        beside: dict[str, list[str]] = {}
        for name, description in side_files(names):
            beside.setdefault(description, []).append(name)
        if beside:
            texts = "; ".join(f"{join_limited(files)} ({description})" for description, files in beside.items())
            self.note("side-files", "note", f"beside the weights: {texts}")
        # A sentence-transformers model stores later layers in separate folders.
        inner = [name for name in sorted(names) if _MODULE.match(name) and weights_of(self.folder.inner(name).names())]
        if inner:
            what = f"weights in {join_limited(inner)} are not shown here: the model has several modules, a folder each"
            self.note(INNER, "note", what, self.folder.join(inner[0]))
        step = step_folder(self.folder, names)
        is_whole = step is not None and folder_format(step.folder, by_names=True) is not None
        own = [(step.folder.path, "DeepSpeed")] if step is not None and is_whole else []
        for path, program in own + [(self.folder.join(name), "FSDP") for name in fsdp_folders(self.folder, names)]:
            what = f"{os.path.basename(path)} in it is a checkpoint of its own: all ranks of {program}"
            self.note(INNER, "note", what, path)

    @property
    def shard_layout(self) -> ShardLayout:  # type: ignore[override]
        """The shard layout. Its size limit is at least the size of the largest shard with several tensors; 0 if
        unknown."""
        sizes = [sum(tensor.size for _, tensor in shard.tensors) for shard in self.shards if shard.tensors[1:]]
        largest = max(sizes, default=0) if len(self.shards) > 1 else 0
        return ShardLayout(largest, self.weights.stem, self.weights.variant)

    def _united(self, places: Places) -> Graph:
        builder = Builder()
        graphs: dict[int, Graph] = {}
        grafted: dict[int, dict[Ref, Ref]] = {}
        items: list[tuple[str, Ref]] = []
        for name, (number, tensor) in places.items():
            if tensor.plain is not None:
                items.append((name, builder.tensor(tensor.plain._replace(key=f"{number}/{tensor.plain.key}"))))
                continue
            if number not in graphs:
                graphs[number] = self._numbered_graph(number)
            items.append((name, builder.graft(graphs[number], tensor.ref, grafted.setdefault(number, {}))))
        protocol = max((graph.style.protocol for graph in graphs.values()), default=0)
        return builder.graph(builder.mapping(items), protocol)

    def _numbered_graph(self, number: int) -> Graph:
        name, container, _ = self.shards[number]
        reader, nodes = TensorReader(container.graph), container.graph.nodes
        for ref, _ in reader.uses() if not container.traits.legacy_name else ():
            node = nodes[ref]
            pid = nodes[node.pid] if isinstance(node, Persistent) else ()
            if isinstance(pid, tuple) and len(pid) > ID_PARTS:
                what = f"{name}: a storage is described by {len(pid)} values, but torch takes {ID_PARTS}"
                self.note("id-parts", "error", what, name, refused=True)
        return with_storage_keys(reader, lambda key: f"{number}/{key}")

    def _shard_of(self, key: str) -> tuple[Container, str] | None:
        """Return the shard that holds a storage and the storage's key there, or None for an unknown key."""
        number, slash, rest = key.partition("/")
        if not slash or not number.isdigit() or int(number) >= len(self.shards):
            return None
        return self.shards[int(number)].container, rest

    def stored_size(self, key: str) -> int | None:
        shard = self._shard_of(key)
        return shard[0].stored_size(shard[1]) if shard else None

    def stored(self, key: str) -> StorageLocation:
        shard = self._shard_of(key)
        return shard[0].stored(shard[1]) if shard else StorageLocation(None, 0)

    def records(self) -> Iterator[StoredRecord]:
        for number, shard in enumerate(self.shards):
            for record in shard.container.records():
                key = f"{number}/{record.key}" if record.key else ""
                yield record._replace(name=f"{shard.name}: {record.name}", key=key)

    def manifest(self, *, checked: bool = False) -> Manifest:
        """Return each tensor's size by file and name. With ``checked``, each file also checks where its bytes are."""
        if checked:
            for shard in self.shards:
                shard.container.manifest(checked=True)
        return {f"{shard.name}: {name}": (tensor.size,) for shard in self.shards for name, tensor in shard.tensors}

    def audit(self, keys: Collection[str]) -> list[Finding]:
        problems = []
        for number, shard in enumerate(self.shards):
            own = [key.partition("/")[2] for key in keys if key.startswith(f"{number}/")]
            problems += [in_file(problem, shard.name) for problem in shard.container.audit(own)]
        return problems

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        for shard in self.shards:
            for pickle in shard.container.pickles(quick=quick):
                yield pickle._replace(where=f"{shard.name}: {pickle.where}")

    def texts(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for shard in self.shards:
            yield from ((shard.name, texts) for _, texts in shard.container.texts())


def _shard(source: Source, name: str) -> Shard:
    head = source.read(0, _HEAD)
    container: Container
    if zip_reader.sniff(head, source):
        container = zip_reader.read(source)
    elif legacy_reader.sniff(head, source):
        container = legacy_reader.read(source)
    elif (placeholder := explain_placeholder(source)) is not None:
        raise placeholder
    elif not safetensors_reader.sniff(head, source):
        raise explain(head, source)
    else:
        container = safetensors_reader.read(source)
        plain = [(key, ShardTensor(own, -1, own.nbytes, {own.key: own.nbytes})) for key, own in container.tensors]
        return Shard(name, container, plain)
    graph = container.graph
    items = mapping(graph, graph.root)
    if items is None:
        raise MalformedError("it holds no dict of tensors", path=source.name)
    reader = TensorReader(graph)
    tensors: list[tuple[str, ShardTensor]] = []
    for key_ref, value in items:
        tensor, key = reader.tensor(value), graph.nodes[key_ref]
        if tensor is None or not isinstance(key, str):
            label = quoted(key) if isinstance(key, str) else key_text(graph, key_ref) or "an object"
            what = f"{label} is not a tensor" if tensor is None else f"the key {label} is not a string"
            what += ", and folders are read by the names of tensors alone"
            raise UnreadableError(what, path=source.name, next="read its files one by one")
        used = (part.storage for part in reader.parts(tensor))
        storages = {storage: reader.storages[storage].nbytes for storage in used if storage in reader.storages}
        tensors.append((key, ShardTensor(None, value, tensor.own_bytes, storages)))
    return Shard(name, container, tensors)


def read(folder: Folder, named: str = "") -> tuple[FolderSource, Container]:
    """Read a folder; ``named`` is its index file if the user named that. Raises the errors of reading its files."""
    path = named or folder.path
    try:
        names = folder.names(strict=True)
    except UnreadableError as error:
        error.path = path
        raise
    weights = weights_of(names, os.path.basename(named))
    if weights is None:
        raise UnreadableError("there are no weights in it", path=path, next="name a file in it")
    with opening(folder.path) as stack:
        container = HfFolder(folder, weights, names, stack)
    own = {os.path.basename(file.name) for file in container.files}
    beside = [folder.join(name) for name in companions(names - own)]
    return FolderSource(path, container.files, beside), container


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder is one checkpoint by its file names."""
    return is_checkpoint(names)
