"""A Megatron-LM folder, with one file per tensor-parallel and pipeline rank, read as one checkpoint.

Each file holds one rank's slices under the model's names. The files do not record how a tensor was cut: the layer type
decides it. Each pipeline rank counts its layers from 0. Sources: Megatron-LM, ``megatron/training/checkpointing.py``
(``generate_state_dict``), ``megatron/core/tensor_parallel/layers.py``, ``tools/checkpoint/``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from math import prod
from typing import Final, TypeAlias

from ..base.errors import ChangedError, MalformedError, NotACheckpointError
from ..base.findings import OTHER_FILES, UNJOINED, Finding
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.steps import command
from ..base.text import join_limited, pluralize, quoted, step_words
from ..checkpoint.container import RankSave
from ..checkpoint.objects import mapping, values_of
from ..files.folders import Folder
from ..files.sources import FolderSource
from ..pickles.nodes import Ref
from .folders import opening, other_steps_note
from .joined import RankFile, RankFiles, rows
from .names.megatron import (
    ITERATION,
    LATEST,
    Arguments,
    Rank,
    arguments,
    files_of_ranks,
    iteration,
    name_like,
    number,
    ranks_in_words,
)
from .names.numbered import MAX_RANKS
from .pieces import Chunk, CopyPair, Rows

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
    def checksums(self) -> tuple[int, ...]:
        """The recorded checksums of the tensors that are cut over ranks, 0 if not recorded."""
        names = ((".".join(keys), ref) for keys, ref in self.values.items())
        cut = (self.file.reader.tensor(ref) for name, ref in names if _BY_ROWS.search(name) or _BY_COLUMNS.search(name))
        return tuple(self.file.container.stored(tensor.storage).crc or 0 for tensor in cut if tensor and tensor.storage)

    @property
    def layers(self) -> int:
        """The number of layers in this stage."""
        matches = (_LAYER.search(".".join(keys)) for keys in self.values)
        return max((int(match[2]) + 1 for match in matches if match), default=0)


class Megatron(RankFiles):
    """The files of one iteration. Values outside the model are taken from the first rank."""

    format = "megatron"

    def __init__(
        self, folder: Folder, files: Mapping[Rank, str], twice: Sequence[tuple[str, str]], stack: ExitStack
    ) -> None:
        super().__init__(folder)
        self._files = files
        self.note_twice(twice)
        parts = self._read_all(stack)
        first = parts[min(parts)]
        self._arguments = first.arguments
        version = first.save.get("checkpoint_version")
        self._is_reordered = isinstance(version, int | float) and version < _VERSION
        tensor, pipeline = self._sizes = self._counted()
        saved = ranks_in_words(self._sizes)
        self.note_ranks(saved, [*product(range(tensor), range(pipeline))], files, partial(name_like, files))
        # Without arguments, only the final layer norm tells that the last stage is there.
        last = [keys for (_, stage), part in parts.items() if stage == pipeline - 1 for keys in part.values]
        if not first.arguments and pipeline > 1 and not any(_END.search(".".join(keys)) for keys in last):
            what = f"there is no final layer norm in stage {pipeline - 1}: later ones may be missing"
            self.note("no-end", "warning", what)
        self._unknown: list[str] = []
        self._extra: list[str] = []
        root = self._whole(parts, first)
        if self._unknown:
            names = join_limited([quoted(name) for name in self._unknown], most=3)
            what = f"{names} cannot be joined: how Megatron-LM cuts them is not known"
            self.note(UNJOINED, "error", what, refused=True)
        self.note_own(self._extra, first.file.name, "note")
        self.build(root)
        step = first.save.get("iteration")
        self.rank_save = RankSave(prod(self._sizes), step if type(step) is int else None)
        self.writer = f"Megatron-LM: {saved}{step_words(self.rank_save.step)}, {self.completeness}"

    # -- the files

    def _read_all(self, stack: ExitStack) -> dict[Rank, _Part]:
        parts = self.read_all(self._files, self._read_part, stack)
        if not parts and self.errors:
            raise self.errors[0]
        if not parts:
            name = next(iter(self._files.values()))
            raise NotACheckpointError(f"there is no model in its files, such as {name}", kind="megatron")
        for rank in self.note_other_saves({rank: (part.file.name, part.save) for rank, part in parts.items()}):
            del parts[rank]
        # Megatron's own converter saves all ranks from one process, so every file records the same rank.
        said = {part.arguments.get("rank") for part in parts.values()}
        if len(parts) > 1 and (len(said) == 1 or not all(type(rank) is int for rank in said)):
            self.note("no-rank", "warning", "the files do not name their ranks: the names of their folders count")
        for rank, part in parts.items() if len(said) > 1 or len(parts) == 1 else ():
            saved = _saved_rank(part.arguments)
            if saved not in (None, rank):
                place = os.path.dirname(name_like(self._files, saved))
                self.note_lost(f"{part.file.name}: it was saved as {place}", part.file.name)
        self.note_same((part.file.name, part.checksums, ()) for part in parts.values())
        return parts

    def _read_part(self, file: RankFile) -> _Part | None:
        """Read one rank's file; report one without a model and return None."""
        graph = file.graph
        root = values_of(graph, graph.root)
        values = dict(_values(file, root["model"], (), set())) if "model" in root else {}
        what = ""
        if "model0" in root:
            what = "its ranks have several stages of a pipeline each (virtual_pipeline_model_parallel_size)"
        elif any("experts" in ".".join(keys).split(".") for keys in values):
            what = "its layers have experts"
        if what:
            raise NotACheckpointError(f"{what}: not joined", kind="megatron", path=file.name)
        if "model" not in root:
            self.note_lost(f"{file.name}: there is no model in it", file.name)
            return None
        own = arguments(graph)
        save = {name: own[name] for name in _SAVE if name in own}
        save |= {name: graph.nodes[root[name]] for name in ("iteration", "checkpoint_version") if name in root}
        return _Part(file, values, own, save)

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
                self.note_optimizer()
            else:
                items.append((name, self.graft(first.file, ref)))
        return self.builder.mapping(items)

    def _model(self, parts: Mapping[Rank, _Part]) -> Ref:
        made: dict[_Keys, Ref] = {}
        ranks_of: dict[_Keys, Sequence[_Part | None]] = {}
        for stage, begin in enumerate(self._first_layers(parts)):

            def moved(layer: re.Match[str], begin: int = begin) -> str:
                return f"{layer[1]}{int(layer[2]) + begin}"

            ranks = [parts.get((rank, stage)) for rank in range(self._sizes[0])]
            for keys in dict.fromkeys(keys for part in ranks if part is not None for keys in part.values):
                # Each stage counts its layers from 0.
                whole = tuple(_LAYER.sub(moved, key, count=1) for key in keys)
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
        return self._united(name, known[0], pieces) if known else self.graft(here.file, ref)

    def _slice(self, part: _Part, keys: _Keys, name: str) -> Rows | None:
        try:
            if keys not in part.values:
                raise MalformedError("it is not there")
            return rows(part.file, part.values[keys])
        except MalformedError as error:
            self.note_lost(f"{part.file.name}: {quoted(name)}: {error.what}", part.file.name)
            return None

    def _united(self, name: str, like: Rows, pieces: Sequence[Rows | None]) -> Ref:
        """Add a tensor, joined from the slices of the tensor-parallel ranks by the rule of its layer."""
        for piece in pieces:
            if piece is not None and piece[:2] != like[:2]:
                self._note_other_shape(name, piece.file, "the files before")
        pieces = [piece if piece is not None and piece[:2] == like[:2] else None for piece in pieces]
        shape, blocks = like.shape, len(pieces)
        axis = 0 if _BY_ROWS.search(name) else 1 if _BY_COLUMNS.search(name) else -1
        grouped = self._arguments.get("group_query_attention")
        groups = number(self._arguments, "num_query_groups") if grouped else 0
        # With fewer query groups than ranks, some ranks hold the same keys and values.
        repeated = bool(groups % blocks) and axis == 0 and ".linear_qkv." in name
        repeated |= self._is_reordered and _QKV.search(name) is not None
        first, *others = [piece for piece in pieces if piece is not None]
        pairs = [CopyPair(name, first, other) for other in others]
        alike = axis < 0 and _WHOLE.search(name) is not None
        if axis < 0 and not alike and (not like.is_one_value() or prod(shape) < 2):  # slices of ones are equal, too
            compared = ((pair, self.copies.compare(pair)) for pair in pairs)
            alike = all(pair.by_value() if equal is None else equal for pair, equal in compared)
        gated = _GATED.search(name) is not None and axis == 0 and self._is_gated(shape[0], blocks)
        if blocks > 1 and (repeated or gated is None or not (alike or axis in range(len(shape)))):
            self._unknown.append(name)
            return self.add_tensor(name, like.dtype, shape)
        if blocks == 1 or axis < 0:
            for pair in pairs:
                self.copies.add(pair)
            return self.add_rows(name, like)
        halves = 2 if gated else 1
        own = tuple(size // halves if dim == axis else size for dim, size in enumerate(shape))
        chunks = []
        for at, piece in enumerate(pieces):
            for half in range(halves) if piece is not None else ():
                assert piece is not None
                begin = tuple((half * blocks + at) * size if dim == axis else 0 for dim, size in enumerate(own))
                start = piece.begin + half * prod(own) * like.dtype.itemsize
                chunks.append(Chunk((begin, own), piece.source, start))
        whole = tuple(size * blocks if dim == axis else size for dim, size in enumerate(shape))
        return self.add_tensor(name, like.dtype, whole, None if None in pieces else lambda: chunks)

    def _note_other_shape(self, name: str, file: str, other: str) -> None:
        self.note_lost(f"{quoted(name)} has another shape or dtype in {file} than in {other}", file)

    def _is_gated(self, rows: int, blocks: int) -> bool | None:
        """Return whether the first MLP matrix, of ``rows`` rows on each rank, includes a gate; None if unknown."""
        own = self._arguments
        if own.get("swiglu") or own.get("gated_linear_unit"):
            return rows % 2 == 0
        inner = number(own, "ffn_hidden_size")
        if inner:
            return rows % 2 == 0 and rows * blocks == 2 * inner
        return False if "swiglu" in own else None

    def _compare(self, keys: _Keys, before: Sequence[_Part | None], ranks: Sequence[_Part | None]) -> None:
        name = ".".join(keys)
        for parts in zip(before, ranks):
            there = [
                piece
                for part in parts
                if part is not None and keys in part.values and part.file.reader.tensor(part.values[keys])
                if (piece := self._slice(part, keys, name)) is not None
            ]
            if len(there) == 2 and there[0][:2] == there[1][:2]:
                self.copies.add(CopyPair(name, there[0], there[1]))
            elif len(there) == 2:
                self._note_other_shape(name, there[1].file, there[0].file)


def _saved_rank(arguments: Arguments) -> Rank | None:
    own, world = arguments.get("rank"), number(arguments, "world_size")
    tensor, pipeline = (number(arguments, f"{way}_model_parallel_size") for way in ("tensor", "pipeline"))
    if type(own) is not int or not (tensor and pipeline and world) or world % (tensor * pipeline):
        return None
    if arguments.get("use_tp_pp_dp_mapping"):
        context = number(arguments, "context_parallel_size") or 1
        return own % tensor, own // (tensor * context) % pipeline
    return own % tensor, own // (world // pipeline)


def _values(file: RankFile, ref: Ref, keys: _Keys, entered: set[Ref]) -> Iterator[tuple[_Keys, Ref]]:
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
            container = Megatron(found.folder, *files, stack)
        except NotACheckpointError as error:
            step = "its files: " + command("inspect", found.folder.join("*/*.pt"))
            raise NotACheckpointError(error.what, kind="megatron", path=path, next=step) from None
    beside = sorted(found.above.names()) if found.above else []
    others = [name for name in beside if ITERATION.match(name) and name != os.path.basename(found.folder.path)]
    if others:
        container.problems.append(other_steps_note(found.folder.path, LATEST, others))
    if left := _left_out(found.folder, files[0].values()):
        container.problems.append(left)
    return FolderSource(path, container.files, folder=found.folder.path), container


def _left_out(folder: Folder, files: Collection[str]) -> Finding | None:
    """Return a note on unread files next to the weights, such as the distributed optimizer's state, or None."""
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
