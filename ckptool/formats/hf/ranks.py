"""safetensors files of ``torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)``.

Each rank writes its pieces of the tensors, with their offsets in the header. Tensor sizes are not stored: as in torch,
a tensor reaches as far as its pieces. Sources in torch/distributed/checkpoint: ``_hf_utils.py`` (names, texts),
``hf_storage.py`` (``HuggingFaceStorageReader.read_metadata``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import prod
from typing import Final

from ...base.dtypes import Dtype
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import RankSave, StorageLocation, StoredRecord
from ...checkpoint.graph_builder import Builder, PlainTensor, contiguous
from ...files.folders import Folder
from ...files.sources import FolderSource, Source
from ..folders import TOO_LARGE, ShardedContainer, in_file, opening
from ..names.hf import companions, weights_of
from ..pieces import Box, Chunk, assembled, box_text, misfit
from ..safetensors import reader as safetensors_reader
from ..safetensors.header import common_metadata, saved_offsets, without_sharding

_NAME: Final = regex(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors\Z")


class TensorPiece(NamedTuple):
    """A piece of a tensor: the box that it fills, its file, and the tensor in that file."""

    box: Box
    file: str
    tensor: PlainTensor


class HfRanks(ShardedContainer):
    """Tensors in pieces, each read as one tensor. A storage key is the name of its tensor."""

    format = "dcp-safetensors"
    traits = safetensors_reader.TRAITS._replace(
        loads="converted", loader="torch.distributed.checkpoint with HuggingFaceStorageReader", sharded=True
    )
    load_rule = safetensors_reader.load_rule

    def __init__(self, folder: Folder, names: Collection[str], stack: ExitStack) -> None:
        super().__init__()
        self.folder = folder
        #: The readable files by name.
        self.shards: dict[str, safetensors_reader.Safetensors] = {}
        self._pieces: dict[str, list[TensorPiece]] = {}
        self._joined: dict[str, StorageLocation] = {}
        self._sizes: dict[str, int | None] = {}
        wanted = sorted(name for name in names if _NAME.match(name))
        self._read(wanted, stack)
        self._absent = self._absent_files(wanted)
        builder = Builder()
        items = []
        for name, pieces in self._pieces.items():
            dtype, shape = pieces[0].tensor.dtype, _shape(pieces)
            size = prod(shape) * dtype.itemsize
            if size >= TOO_LARGE:
                last = max(pieces, key=lambda piece: piece.box[0])
                what = f"{quoted(name)} is larger than any tensor can be: {box_text(last.box)} in {last.file}"
                self.note_lost(what)
                continue
            self._sizes[name] = size if self._is_whole(name, dtype, shape, pieces) else None
            items.append((name, builder.tensor(contiguous(dtype, shape, name))))
        self._note_open_ends()
        self.graph = builder.graph(builder.mapping(items))
        self.metadata = without_sharding(common_metadata([shard.metadata for shard in self.shards.values()]))
        self.rank_save = RankSave(len({name.split("-")[1] for name in wanted}), recorded=False)
        ranks = pluralize(self.rank_save.ranks, "rank")
        number = pluralize(sum(map(len, self._pieces.values())), "piece")
        self.writer = f"HuggingFaceStorageWriter of torch: {ranks}, {pluralize(len(wanted), 'file')}, {number}"
        what = "each file has one rank's pieces of the tensors: transformers loads such a folder once convert merged it"
        self.note("in-pieces", "note", what)

    def texts(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for name, shard in self.shards.items():
            yield from ((name, texts) for _, texts in shard.texts())

    def _read(self, wanted: list[str], stack: ExitStack) -> None:
        for name in wanted:
            content = self._read_file(self.folder, name, stack, _read_pieces, name)
            if content is None:
                continue
            self.shards[name], pieces = content
            for key, piece in pieces:
                self._pieces.setdefault(key, []).append(piece)
            # A finding that the file holds pieces is no problem here: the folder has all of them.
            problems = (problem for problem in self.shards[name].problems if problem.code != "piece")
            self.problems += [in_file(problem, name) for problem in problems]
        if not self.shards:
            raise self.errors[0]

    def _absent_files(self, wanted: list[str]) -> list[str]:
        """Return the names of missing files that a rank may have written: a rank with nothing to save writes none."""
        matches = [match for match in map(_NAME.match, wanted) if match]
        ranks, files = max(int(match[1]) for match in matches), max(int(match[3]) for match in matches)
        if ranks * files > 1 << 20:
            return []
        there = {(int(match[1]), int(match[2])) for match in matches}
        return [
            f"shard-{rank:05d}-model-{file:05d}-of-{files:05d}.safetensors"
            for rank, file in product(range(1, ranks + 1), range(1, files + 1))
            if (rank, file) not in there
        ]

    def _note_open_ends(self) -> None:
        """Report the tensors that may go on in a missing file: nothing records their shapes."""
        numbers = {name.split("-")[3] for name in self._absent}
        suspects = [
            name
            for name, pieces in self._pieces.items()
            if not numbers.isdisjoint(piece.file.split("-")[3] for piece in pieces) and not _ends(pieces)
        ]
        if suspects:
            files = join_limited(self._absent, most=3)
            what = f"{files} not there: a rank with nothing to save writes no file; if one is lost, so are parts of"
            self.note("no-piece", "error", f"{what} {join_limited(suspects)}", self._absent[0], refused=True)

    def _is_whole(self, name: str, dtype: Dtype, shape: tuple[int, ...], pieces: list[TensorPiece]) -> bool:
        for piece in pieces:
            if piece.tensor.dtype != dtype or len(piece.box[0]) != len(shape):
                first = pieces[0].file
                what = f"{quoted(name)} has another dtype or number of dimensions in {piece.file} than in {first}"
                self.note_lost(what, piece.file)
                return False
        odd = misfit(shape, [piece.box for piece in pieces])
        if odd and odd.boxes:
            files = [piece.file for piece in pieces if piece.box in odd.boxes]
            what = f"{quoted(name)}: the pieces {' and '.join(map(box_text, odd.boxes))} overlap: {join_limited(files)}"
            self.note("chunk-overlap", "error", what, files[0], refused=True)
            return False
        if odd:
            what = f"{quoted(name)}: no file has {box_text(odd.place)}"
            what += f"; it may be in {join_limited(self._absent, most=3)}" if self._absent else ""
            self.note("chunk-hole", "error", what, self._absent[0] if self._absent else "", refused=True)
            return False
        return True

    def stored_size(self, key: str) -> int | None:
        return self._sizes.get(key)

    def stored(self, key: str) -> StorageLocation:
        size = self._sizes.get(key)
        if size is None:
            return StorageLocation(None, 0)
        if key not in self._joined:
            self._joined[key] = self._join(key, size)
        return self._joined[key]

    def _join(self, key: str, size: int) -> StorageLocation:
        pieces = self._pieces[key]
        chunks = []
        for piece in pieces:
            span = self.shards[piece.file].stored(piece.tensor.key).span
            if span is not None and span.size:
                chunks.append(Chunk(piece.box, span.source, span.offset))
        width = pieces[0].tensor.dtype.itemsize
        return assembled(chunks, _shape(pieces), width, f"{self.folder.path}: {key}")

    def records(self) -> Iterator[StoredRecord]:
        for name, shard in self.shards.items():
            for record in shard.records():
                key = record.name if len(self._pieces[record.name]) == 1 else ""
                yield record._replace(name=f"{name}: {record.name}", key=key)


def _read_pieces(source: Source, name: str) -> tuple[safetensors_reader.Safetensors, list[tuple[str, TensorPiece]]]:
    shard = safetensors_reader.read(source)
    offsets = saved_offsets(shard.metadata, [(key, tensor.shape) for key, tensor in shard.tensors], name)
    return shard, [(key, TensorPiece((offsets[key], tensor.shape), name, tensor)) for key, tensor in shard.tensors]


def _shape(pieces: Sequence[TensorPiece]) -> tuple[int, ...]:
    return tuple(max(at + size for at, size in reach) for reach in zip(*(zip(*piece.box) for piece in pieces)))


def _ends(pieces: Sequence[TensorPiece]) -> bool:
    """Return whether the pieces show where the tensor ends: it is a scalar, or the last piece is smaller than others,
    which are equal."""
    first, last = (edge(piece.box for piece in pieces)[1] for edge in (min, max))
    return not first or any(here < there for here, there in zip(last, first))


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether there are pieces, and no merged weights next to them."""
    return any(map(_NAME.match, names)) and weights_of(names) is None


def read(folder: Folder) -> tuple[FolderSource, HfRanks]:
    """Open a folder of pieces; raise MalformedError if none of its files can be read."""
    with opening(folder.path) as stack:
        names = folder.names(strict=True)
        container = HfRanks(folder, names, stack)
    return FolderSource(folder.path, container.files, [folder.join(name) for name in companions(names)]), container
