"""A Megatron-LM folder, with one file per tensor-parallel and pipeline rank, read as one checkpoint.

Each file holds one rank's slices under the model's names. The files do not record how a tensor was cut: the layer type
decides it. Each pipeline rank counts its layers from 0. Sources: Megatron-LM, ``megatron/training/checkpointing.py``
(``generate_state_dict``), ``megatron/core/tensor_parallel/layers.py``, ``tools/checkpoint/``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from math import prod
from typing import Final, TypeAlias

from ...base.errors import ChangedError, MalformedError, NotACheckpointError
from ...base.findings import OTHER_FILES, UNJOINED, Finding
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.steps import command
from ...base.text import join_limited, pluralize, quoted, step_words
from ...checkpoint.container import RankSave, is_complete
from ...checkpoint.objects import mapping, values_of
from ...files.folders import Folder
from ...files.sources import FolderSource
from ...pickles.nodes import Ref
from ..folders import opening, other_steps_problem
from ..joined.container import JoinedTensor, RankFile, RankFiles, Slice, slice_of, whole_tensor
from ..names.megatron import (
    ITERATION,
    LATEST,
    Rank,
    files_of_ranks,
    iteration,
    name_like,
    ranks_in_words,
    twice,
)
from ..names.ranks import MAX_RANKS
from ..pieces.chunks import Chunk, Rows
from ..pieces.copies import CopyPair, is_one_value
from .args import Arguments, arguments, number

#: Names of tensors that are cut along rows (ColumnParallelLinear, VocabParallelEmbedding) or along columns
#: (RowParallelLinear). Each pattern also has the names from before Megatron-core.
_BY_ROWS: Final = regex(
    r"(?:\A|\.)(?:word_embeddings|output_layer|lm_head|linear_qkv|linear_fc1|query_key_value|dense_h_to_4h)"
    r"\.(?:weight|bias)\Z"
)
_BY_COLUMNS: Final = regex(r"(?:\A|\.)(?:linear_proj|linear_fc2|dense_4h_to_h|(?:self_)?attention\.dense)\.weight\Z")
#: Gated units: each rank holds a slice of the gate and a slice of the up projection.
_GATED: Final = regex(r"(?:\A|\.)(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\Z")
#: Tensors that every rank saves in full.
_WHOLE: Final = regex(
    r"(?:(?<!mixer\.)norm\.|norm_)(?:weight|bias)\Z|(?:\A|\.)(?:position_embeddings|tokentype_embeddings)\.weight\Z"
    r"|(?:\A|\.)(?:linear_proj|linear_fc2|dense_4h_to_h|(?:self_)?attention\.dense)\.bias\Z"
)
#: The number of a layer. Layers for multi-token prediction (mtp) are not renumbered: they exist only in the last stage.
_LAYER: Final = regex(r"((?:\A|(?<!\Amtp)(?<!\.mtp)\.)layers\.)(\d{1,6})(?=\.)")
#: Below this ``checkpoint_version``, the rows of queries, keys and values were in another order.
_VERSION: Final = 2
_QKV: Final = regex(r"(?:\A|\.)(?:linear_qkv|query_key_value)\.(?:weight|bias)\Z")
#: Tensors that exist only in the last pipeline stage.
_END: Final = regex(r"(?:\A|\.)final_(?:layer_?)?norm\.")
#: Layer state other than tensors, such as FP8 scales.
_EXTRA: Final = "_extra_state"
#: Arguments and values that are the same in all files of one save.
_SAVE: Final = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "padded_vocab_size",
)
#: Nesting levels of state dicts that are followed.
_MAX_DEPTH: Final = 16

_Keys: TypeAlias = tuple[str, ...]


class _Part(NamedTuple):
    """One rank's file, its model values by key path (outermost key first), its arguments, and its facts about the
    save."""

    file: RankFile
    values: Mapping[_Keys, Ref]
    arguments: Arguments
    save: Mapping[str, object]

    @property
    def layers(self) -> int:
        """The number of layers in this stage."""
        matches = (_LAYER.search(".".join(keys)) for keys in self.values)
        return max((int(match[2]) + 1 for match in matches if match), default=0)


class Megatron(RankFiles):
    """The files of one iteration. Values outside the model are taken from the first rank."""

    format = "megatron"

    def __init__(self, folder: Folder, files: Mapping[Rank, str], stack: ExitStack) -> None:
        super().__init__(folder)
        self._files = files
        self.note_twice(twice(folder, folder.names()))
        parts = self._read_all(stack)
        first = parts[min(parts)]
        self._arguments = first.arguments
        version = first.save.get("checkpoint_version")
        self._is_reordered = isinstance(version, int | float) and version < _VERSION
        tensor, pipeline = self._sizes = self._counted()
        saved = ranks_in_words(self._sizes)
        self.note_ranks(saved, [*product(range(tensor), range(pipeline))], files, partial(name_like, files))
        # Without arguments, only the final layer norm tells that the last stage is there.
        ends = [part.values for (_, stage), part in parts.items() if stage == pipeline - 1]
        if (
            not first.arguments
            and pipeline > 1
            and not any(_END.search(".".join(keys)) for own in ends for keys in own)
        ):
            what = f"there is no final layer norm in stage {pipeline - 1}: later ones may be missing"
            self.note("no-end", "warning", what)
        self._unknown: list[str] = []
        self._extra: list[str] = []
        root = self._whole(parts, first)
        if self._unknown:
            names = join_limited([quoted(name) for name in self._unknown], most=3)
            self.note(
                UNJOINED, "error", f"{names} cannot be joined: how Megatron-LM cuts them is not known", refused=True
            )
        self.note_own(self._extra, first.file.name, "note")
        self.build(root)
        state = "all there" if is_complete(self.problems) else "incomplete"
        step = first.save.get("iteration")
        self.rank_save = RankSave(prod(self._sizes), step if type(step) is int else None)
        self.writer = f"Megatron-LM: {saved}{step_words(self.rank_save.step)}, {state}"

    # -- the files

    def _read_all(self, stack: ExitStack) -> dict[Rank, _Part]:
        """Read all files; return them by rank, without unreadable files and those of another save. Raises
        MalformedError if none is left, NotACheckpointError if no file has a model."""
        parts: dict[Rank, _Part] = {}
        for rank, name in self._files.items():
            file = self.open_file(name, stack)
            if file is None:
                continue
            try:
                part = _read_part(file)
                if part is None:
                    self.note_lost(f"{name}: there is no model in it", name)
                else:
                    parts[rank] = part
            except MalformedError as error:
                self.errors.append(error)
                self.note_lost(f"{name}: {error.what}", name)
        if not parts and self.errors:
            raise self.errors[0]
        if not parts:
            raise NotACheckpointError(f"there is no model in its files, such as {name}", kind="megatron")
        for rank in self.note_other_saves({rank: (part.file.name, part.save) for rank, part in parts.items()}):
            del parts[rank]
        # Megatron's own converter saves all ranks from one process, so every file records the same rank.
        said = {part.arguments.get("rank") for part in parts.values()}
        if len(parts) > 1 and (len(said) == 1 or not all(type(rank) is int for rank in said)):
            what = "the files do not name their ranks: the names of their folders count"
            self.note("no-rank", "warning", what)
        for rank, part in parts.items() if len(said) > 1 or len(parts) == 1 else ():
            saved = _saved_rank(part.arguments)
            if saved not in (None, rank):
                place = os.path.dirname(name_like(self._files, saved))
                self.note_lost(f"{part.file.name}: it was saved as {place}", part.file.name)
        self.note_same((part.file.name, tuple(_checksums(part)), ()) for part in parts.values())
        return parts

    def _counted(self) -> Rank:
        most = tuple(max(rank[place] for rank in self._files) + 1 for place in range(2))
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        tensor, pipeline = (number(self._arguments, name) or there for name, there in zip(names, most))
        if tensor * pipeline > MAX_RANKS:
            raise MalformedError(f"{tensor:,} x {pipeline:,} ranks saved it, as its arguments say")
        return tensor, pipeline

    # -- the object

    def _whole(self, parts: Mapping[Rank, _Part], first: _Part) -> Ref:
        graph = first.file.graph
        items = []
        for name, ref in values_of(graph, graph.root).items():
            if name == "model":
                items.append((name, self._model(parts)))
            elif name == "optimizer" and prod(self._sizes) > 1:
                what = "the state of the optimizer is not joined: its files number the parameters and do not name them"
                self.note("optimizer", "note", what)
            else:
                items.append((name, self.graft(first.file, ref)))
        return self.builder.mapping(items)

    def _model(self, parts: Mapping[Rank, _Part]) -> Ref:
        made: dict[_Keys, Ref] = {}
        ranks_of: dict[_Keys, Sequence[_Part | None]] = {}
        for stage, begin in enumerate(self._first_layers(parts)):
            ranks = [parts.get((rank, stage)) for rank in range(self._sizes[0])]
            for keys in dict.fromkeys(keys for part in ranks if part is not None for keys in part.values):
                whole = tuple(_counted_through(key, begin) for key in keys)
                if whole in made:  # with tied embeddings, the last stage also has them
                    self._compare(keys, ranks_of[whole], ranks)
                else:
                    made[whole] = self._value(keys, ".".join(whole), ranks)
                    ranks_of[whole] = ranks
        return self._nested(list(made.items()))

    def _nested(self, items: Sequence[tuple[_Keys, Ref]]) -> Ref:
        below: dict[str, list[tuple[_Keys, Ref]]] = {}
        for keys, ref in items:
            below.setdefault(keys[0], []).append((keys[1:], ref))
        return self.builder.mapping(
            (key, inner[0][1] if not inner[0][0] else self._nested([item for item in inner if item[0]]))
            for key, inner in below.items()
        )

    def _first_layers(self, parts: Mapping[Rank, _Part]) -> list[int]:
        """Return the number of the first layer of each pipeline stage."""
        pipeline, layers = self._sizes[1], number(self._arguments, "num_layers")
        counts = [-1] * pipeline
        for (_, stage), part in parts.items():
            if stage < pipeline:
                counts[stage] = max(counts[stage], part.layers)
        known, absent = sum(max(count, 0) for count in counts), counts.count(-1)
        if absent:
            each, rest = divmod(layers - known, absent)
            if not layers or each < 0 or rest:
                raise MalformedError(f"{pluralize(absent, 'stage')} of the pipeline are missing", path=self.folder.path)
            counts = [each if count < 0 else count for count in counts]
        elif layers and known != layers:
            self.note_lost(f"its files have {pluralize(known, 'layer')}, and the model has {layers:,}")
        return [sum(counts[:stage]) for stage in range(pipeline)]

    def _value(self, keys: _Keys, name: str, ranks: Sequence[_Part | None]) -> Ref:
        here = next(part for part in ranks if part is not None and keys in part.values)
        ref = here.values[keys]
        extra = keys[-1].rpartition(".")[2] == _EXTRA
        if extra and len(ranks) > 1 and here.file.graph.nodes[ref] is not None:
            self._extra.append(name)
        if extra or here.file.reader.tensor(ref) is None:
            return self.graft(here.file, ref)
        pieces = [None if part is None else self._slice(part, keys, name) for part in ranks]
        known = [piece for piece in pieces if piece is not None]
        return self._united(name, known[0].rows, pieces) if known else self.graft(here.file, ref)

    def _slice(self, part: _Part, keys: _Keys, name: str) -> Slice | None:
        """Return one rank's slice of a tensor; report a problem and return None if it is missing or unreadable."""
        try:
            if keys not in part.values:
                raise MalformedError("it is not there")
            return slice_of(part.file, part.values[keys])
        except MalformedError as error:
            self.note_lost(f"{part.file.name}: {quoted(name)}: {error.what}", part.file.name)
            return None

    def _united(self, name: str, like: Rows, pieces: Sequence[Slice | None]) -> Ref:
        """Add a tensor, joined from the slices of the tensor-parallel ranks by the rule of its layer."""
        for piece in pieces:
            if piece is not None and piece.rows[:2] != like[:2]:
                self._note_other_shape(name, piece.copy.file, "the files before")
        pieces = [piece if piece is not None and piece.rows[:2] == like[:2] else None for piece in pieces]
        shape, blocks = like.shape, len(pieces)
        axis = 0 if _BY_ROWS.search(name) else 1 if _BY_COLUMNS.search(name) else -1
        grouped = self._arguments.get("group_query_attention")
        groups = number(self._arguments, "num_query_groups") if grouped else 0
        # With fewer query groups than ranks, some ranks hold the same keys and values.
        repeated = bool(groups % blocks) and axis == 0 and ".linear_qkv." in name
        repeated |= self._is_reordered and _QKV.search(name) is not None
        first, *others = [piece.copy for piece in pieces if piece is not None]
        pairs = [CopyPair(name, first, other, prod(shape) * like.dtype.itemsize) for other in others]
        alike = axis < 0 and (_WHOLE.search(name) is not None or self._is_equal(like, pairs))
        gated = _GATED.search(name) is not None and axis == 0 and self._is_gated(shape[0], blocks)
        if blocks > 1 and (repeated or gated is None or not (alike or axis in range(len(shape)))):
            self._unknown.append(name)
            return self.add_tensor(name, JoinedTensor(like.dtype, shape, shape, tuple), whole=False)
        if blocks == 1 or axis < 0:
            for pair in pairs:
                self.copies.add(pair)
            return self.add_tensor(name, whole_tensor(like))
        halves = 2 if gated else 1
        own = tuple(size // halves if dim == axis else size for dim, size in enumerate(shape))
        chunks = []
        for at, piece in enumerate(pieces):
            for half in range(halves if piece is not None else 0):
                assert piece is not None
                begin = tuple((half * blocks + at) * size if dim == axis else 0 for dim, size in enumerate(own))
                start = piece.rows.begin + half * prod(own) * like.dtype.itemsize
                chunks.append(Chunk((begin, own), piece.rows.source, start))
        whole = tuple(size * blocks if dim == axis else size for dim, size in enumerate(shape))
        return self.add_tensor(name, JoinedTensor(like.dtype, whole, whole, lambda: chunks), whole=None not in pieces)

    def _note_other_shape(self, name: str, file: str, other: str) -> None:
        self.note_lost(f"{quoted(name)} has another shape or dtype in {file} than in {other}", file)

    def _is_gated(self, rows: int, blocks: int) -> bool | None:
        """Return whether the first MLP matrix, of ``rows`` rows on each of ``blocks`` ranks, includes a gate; None if
        unknown."""
        own = self._arguments
        if own.get("swiglu") or own.get("gated_linear_unit"):
            return rows % 2 == 0
        inner = number(own, "ffn_hidden_size")
        if inner:
            return rows % 2 == 0 and rows * blocks == 2 * inner
        return False if "swiglu" in own else None

    def _is_equal(self, like: Rows, pairs: Sequence[CopyPair]) -> bool:
        """Return whether all readable ranks have equal elements with more than one distinct value. Slices of a tensor
        of zeros or ones are also equal, so they prove nothing."""
        for pair in pairs:
            equal = self.copies.compare(pair)
            if not (pair.by_value() if equal is None else equal):
                return False
        width = like.dtype.itemsize
        return not is_one_value(like.source, like.begin, prod(like.shape) * width, width) or prod(like.shape) < 2

    def _compare(self, keys: _Keys, before: Sequence[_Part | None], ranks: Sequence[_Part | None]) -> None:
        name = ".".join(keys)
        for parts in zip(before, ranks):
            there = [
                piece
                for part in parts
                if part is not None and keys in part.values and part.file.reader.tensor(part.values[keys])
                if (piece := self._slice(part, keys, name)) is not None
            ]
            if len(there) < 2:
                continue
            one, other = there
            if one.rows[:2] == other.rows[:2]:
                size = prod(one.rows.shape) * one.rows.dtype.itemsize
                self.copies.add(CopyPair(name, one.copy, other.copy, size))
            else:
                self._note_other_shape(name, other.copy.file, one.copy.file)


def _saved_rank(arguments: Arguments) -> Rank | None:
    own, world = arguments.get("rank"), number(arguments, "world_size")
    tensor, pipeline = (number(arguments, f"{way}_model_parallel_size") for way in ("tensor", "pipeline"))
    if type(own) is not int or not (tensor and pipeline and world) or world % (tensor * pipeline):
        return None
    if arguments.get("use_tp_pp_dp_mapping"):
        context = number(arguments, "context_parallel_size") or 1
        return own % tensor, own // (tensor * context) % pipeline
    return own % tensor, own // (world // pipeline)


def _counted_through(key: str, begin: int) -> str:
    """Return the name of a value with its layer counted from the start of the model; its stage starts at layer
    ``begin``."""
    match = _LAYER.search(key)
    return f"{key[: match.start(2)]}{int(match[2]) + begin}{key[match.end() :]}" if match else key


def _checksums(part: _Part) -> Iterator[tuple[_Keys, int]]:
    """Yield (keys, recorded checksum) for each tensor that is cut over ranks and whose storage has a checksum."""
    for keys, ref in part.values.items():
        name = ".".join(keys)
        tensor = part.file.reader.tensor(ref) if _BY_ROWS.search(name) or _BY_COLUMNS.search(name) else None
        crc = part.file.container.stored(tensor.storage).crc if tensor and tensor.storage else None
        if crc:
            yield keys, crc


def _read_part(file: RankFile) -> _Part | None:
    """Read one rank's file; return None if it has no model. Raises MalformedError for a damaged file,
    NotACheckpointError for a model that cannot be joined."""
    graph = file.graph
    root = values_of(graph, graph.root)
    if "model0" in root:
        what = "its ranks have several stages of a pipeline each (virtual_pipeline_model_parallel_size)"
        raise NotACheckpointError(f"{what}: not joined", kind="megatron", path=file.name)
    if "model" not in root:
        return None
    values = dict(_values(file, root["model"], (), set()))
    if any("experts" in ".".join(keys).split(".") for keys in values):
        what = "its layers have experts, which are not joined"
        raise NotACheckpointError(what, kind="megatron", path=file.name)
    own = arguments(graph)
    save = {name: own[name] for name in _SAVE if name in own}
    for name in ("iteration", "checkpoint_version"):
        if name in root:
            save[name] = graph.nodes[root[name]]
    return _Part(file, values, own, save)


def _values(file: RankFile, ref: Ref, keys: _Keys, entered: set[Ref]) -> Iterator[tuple[_Keys, Ref]]:
    """Yield (key path, value) for a state dict and the state dicts nested in it; each node is entered once."""
    entered.add(ref)
    for key, value in mapping(file.graph, ref) or ():
        name = file.graph.nodes[key]
        if not isinstance(name, str):
            raise MalformedError("a key of its model is not a string", where=file.name)
        inner = (*keys, name)
        is_value = file.reader.tensor(value) is not None or mapping(file.graph, value) is None
        if is_value or value in entered or len(inner) >= _MAX_DEPTH:
            yield inner, value
        else:
            yield from _values(file, value, inner, entered)


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder holds per-rank files of Megatron-LM, or names such an iteration folder as its latest."""
    found = iteration(folder, names)
    return found is not None and files_of_ranks(found.folder, found.names) is not None


def read(folder: Folder) -> tuple[FolderSource, Megatron]:
    """Open a Megatron-LM folder. Raises NotACheckpointError for a model that cannot be joined, MalformedError if the
    files cannot be read."""
    path = folder.path
    found = iteration(folder, folder.names())
    files = files_of_ranks(found.folder, found.names) if found is not None else None
    if found is None or files is None:
        raise ChangedError("its files changed while they were read", path=path, next="try again")
    with opening(path, "it is damaged: get the folder again") as stack:
        try:
            container = Megatron(found.folder, files, stack)
        except NotACheckpointError as error:
            step = "its files: " + command("inspect", found.folder.join("*/*.pt"))
            raise NotACheckpointError(error.what, kind="megatron", path=path, next=step) from None
    beside = sorted(found.above.names()) if found.above else []
    others = [name for name in beside if ITERATION.match(name) and name != os.path.basename(found.folder.path)]
    if others:
        container.problems.append(other_steps_problem(found.folder.path, LATEST, others))
    if left := _left_out(found.folder, files.values()):
        container.problems.append(left)
    return FolderSource(path, container.files, folder=found.folder.path), container


def _left_out(folder: Folder, files: Collection[str]) -> Finding | None:
    """Return a note on unread files next to the weights, such as the distributed optimizer's state; None if there are
    none."""
    beside: dict[str, list[str]] = {}
    for file in files:
        rank, own = os.path.split(file)
        for name in sorted(folder.inner(rank).names() - {own}):
            beside.setdefault(name, []).append(folder.join(rank, name))
    if not beside:
        return None
    words = [f"mp_rank_*/{name} ({pluralize(len(paths), 'file')})" for name, paths in beside.items()]
    what = f"other files in this folder, not read here: {join_limited(words)}"
    return Finding(OTHER_FILES, "note", what, next(iter(beside.values()))[0])
