"""safetensors files of ``torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)``.

Each rank writes what it has of the tensors, and says in the header where each piece belongs. Nothing says how large
the tensors are: as for torch, a tensor reaches as far as its pieces do. Sources in torch/distributed/checkpoint:
``_hf_utils.py`` (names, texts), ``hf_storage.py`` (``HuggingFaceStorageReader.read_metadata``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Final, NamedTuple

from ...base.dtypes import Dtype
from ...base.errors import CkptoolError, MalformedError, RefusedError
from ...base.text import counted, listed, shown
from ...checkpoint.container import (
    INCOMPLETE,
    UNCHECKED,
    Container,
    Problem,
    StoredBytes,
    StoredRecord,
    Traits,
)
from ...checkpoint.graph_builder import Builder, PlainTensor, contiguous
from ...files.pool import open_pooled
from ...files.sources import Appending, FileSource, FolderSource, Span
from ..dcp.checks import not_compared
from ..dcp.chunks import Chunk, ChunkedSource, region_missing, regions_overlapping
from ..dcp.metadata import Box, box_text
from ..safetensors import reader as safetensors_reader
from ..safetensors.sharding_info import PLACES, VERSION, saved_offsets
from .files import companions, weights_of

_NAME: Final = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors\Z")
#: A tensor with more bytes than this is hostile: torch counts in int64.
_TOO_LARGE: Final = 1 << 62


class Part(NamedTuple):
    """A piece of a tensor: the box that it fills, the number of its file, and its key there."""

    box: Box
    file: int
    tensor: PlainTensor


class HfRanks(Container):
    """Tensors in pieces, each as one: a storage has the name of its tensor as its key."""

    format = "dcp-safetensors"
    traits = Traits(False, "safetensors", "converted", "safetensors", sharded=True, named=True)
    #: How the files of an edit are called: as usual.

    def __init__(self, folder: str, names: Collection[str], stack: ExitStack) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.files: list[FileSource] = []
        #: The files that could be read, by their names.
        self.shards: dict[str, safetensors_reader.Safetensors] = {}
        self._parts: dict[str, list[Part]] = {}
        self._spans: dict[str, StoredBytes] = {}
        self._sizes: dict[str, int | None] = {}
        wanted = sorted(name for name in names if _NAME.match(name))
        self._read(wanted, stack)
        self._absent = self._gaps(wanted)
        builder = Builder()
        items = []
        for name, parts in self._parts.items():
            dtype, shape = parts[0].tensor.dtype, _shape(parts)
            if prod(shape) * dtype.itemsize >= _TOO_LARGE:
                last = max(parts, key=lambda part: part.box[0])
                what = f"{shown(name)} is larger than any tensor can be: {box_text(last.box)}"
                self._note(INCOMPLETE, "error", f"{what} in {list(self.shards)[last.file]}")
                continue
            self._sizes[name] = prod(shape) * dtype.itemsize if self._is_whole(name, dtype, shape, parts) else None
            items.append((name, builder.tensor(contiguous(dtype, shape, name))))
        self.graph = builder.graph(builder.mapping(items))
        first = next(iter(self.shards.values()))
        self.metadata: Mapping[str, str] = {
            name: text
            for name, text in first.metadata.items()
            if name not in (PLACES, VERSION) and all(one.metadata.get(name) == text for one in self.shards.values())
        }
        ranks = len({name.split("-")[1] for name in wanted})
        pieces = counted(sum(map(len, self._parts.values())), "piece")
        files = counted(len(wanted), "file")
        self.writer = f"HuggingFaceStorageWriter of torch: {counted(ranks, 'rank')}, {files}, {pieces}"
        what = (
            "each file has what a rank had of the tensors: transformers loads such a folder when convert made one of it"
        )
        self._note("in-pieces", "note", what)

    def _note(self, code: str, level: str, message: str, where: str = "") -> None:
        self.problems.append(Problem(code, level, message, level == "error", where))

    def _read(self, wanted: list[str], stack: ExitStack) -> None:
        errors: list[CkptoolError] = []
        for name in wanted:
            try:
                source = open_pooled(os.path.join(self.folder, name))
                stack.callback(source.close)
                shard = safetensors_reader.read(source)
                offsets = saved_offsets(shard.metadata, [(key, tensor.shape) for key, tensor in shard.tensors], name)
            except CkptoolError as error:
                errors.append(error)
                self._note(INCOMPLETE, "error", f"{name} cannot be read: {error.what}", name)
                continue
            for key, tensor in shard.tensors:
                part = Part((offsets[key], tensor.shape), len(self.files), tensor)
                self._parts.setdefault(key, []).append(part)
            self.files.append(source)
            self.shards[name] = shard
            for problem in shard.problems:
                if problem.code == "piece":
                    continue  # this is the folder that has the whole
                self.problems.append(problem._replace(message=f"{name}: {problem.message}", where=name))
        if not self.shards:
            raise errors[0]

    def _gaps(self, wanted: list[str]) -> list[str]:
        """The files that a rank before the last may have written and that are not there: it may have had nothing."""
        matches = [match for match in map(_NAME.match, wanted) if match]
        ranks, files = max(int(match[1]) for match in matches), max(int(match[3]) for match in matches)
        if ranks * files > 1 << 20:
            return []
        there = {(int(match[1]), int(match[2])) for match in matches}
        every = ((rank, file) for rank in range(1, ranks + 1) for file in range(1, files + 1))
        absent = [f"shard-{r:05d}-model-{f:05d}-of-{files:05d}.safetensors" for r, f in every if (r, f) not in there]
        if absent:
            what = f"{listed(absent, most=3)} not there: a rank with nothing to save writes no file"
            self._note("no-piece", "warning", what, absent[0])
        return absent

    def _is_whole(self, name: str, dtype: Dtype, shape: tuple[int, ...], parts: list[Part]) -> bool:
        files = list(self.shards)
        for part in parts:
            if part.tensor.dtype != dtype or len(part.box[0]) != len(shape):
                what = f"{shown(name)} is of another kind in {files[part.file]} than in {files[parts[0].file]}"
                self._note(INCOMPLETE, "error", what, files[part.file])
                return False
        at = {part.box: files[part.file] for part in reversed(parts)}
        overlap = regions_overlapping([part.box for part in parts])
        twice = overlap.boxes
        if twice:
            both = [files[part.file] for part in parts if part.box in twice]
            what = f"{shown(name)}: the pieces {box_text(twice[0])} and {box_text(twice[1])} overlap: {listed(both)}"
            self._note("chunk-overlap", "error", what, at[twice[0]])
            return False
        if not overlap.sure:
            self._note(UNCHECKED, "warning", not_compared(shown(name), len(parts)))
        hole = region_missing(shape, [part.box for part in parts])
        if hole and prod(shape):
            what = f"{shown(name)}: no file has {box_text(hole)}"
            what += f"; it may be in {listed(self._absent, most=3)}" if self._absent else ""
            self._note("chunk-hole", "error", what, self._absent[0] if self._absent else "")
            return False
        return True

    def stored_size(self, key: str) -> int | None:
        return self._sizes.get(key)

    def stored(self, key: str) -> StoredBytes:
        size = self._sizes.get(key)
        if size is None:
            return StoredBytes(None, 0)
        found = self._spans.get(key)
        if found is None:
            found = self._spans[key] = self._joined(key, size)
        return found

    def _joined(self, key: str, size: int) -> StoredBytes:
        shards = list(self.shards.values())
        chunks = []
        for part in self._parts[key]:
            span = shards[part.file].stored(part.tensor.key).span
            if span is not None and span.size:
                chunks.append(Chunk(part.box, span.source, span.offset))
        if len(chunks) == 1:
            return StoredBytes(Span(chunks[0].source, chunks[0].begin, size), size)
        first = self._parts[key][0].tensor
        joined = ChunkedSource(_shape(self._parts[key]), first.dtype.itemsize, chunks, f"{self.folder}: {key}")
        return StoredBytes(Span(joined, 0, size), size)

    def records(self) -> Iterator[StoredRecord]:
        for name, shard in self.shards.items():
            for record in shard.records():
                key = record.name if len(self._parts[record.name]) == 1 else ""
                yield record._replace(name=f"{name}: {record.name}", key=key)

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        raise RefusedError("it is a folder of several files", next="write a new folder with -o")


def _shape(parts: Sequence[Part]) -> tuple[int, ...]:
    """As far as the pieces reach."""
    return tuple(max(at + size for at, size in reach) for reach in zip(*(zip(*part.box) for part in parts)))


def sniff(names: Collection[str]) -> bool:
    """Pieces, and no weights that were made of them beside."""
    return any(map(_NAME.match, names)) and weights_of(names) is None


def read(path: str) -> tuple[FolderSource, HfRanks]:
    """Open such a folder; raises MalformedError where no file of it can be read."""
    with ExitStack() as stack:
        try:
            names = os.listdir(path)
            found = HfRanks(path, names, stack)
        except MalformedError as error:
            error.path = error.path or path
            raise
        stack.pop_all()
    return FolderSource(path, found.files, [os.path.join(path, name) for name in companions(names)]), found
