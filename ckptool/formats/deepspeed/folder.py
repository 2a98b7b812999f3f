"""A DeepSpeed ZeRO folder (stages 1, 2 and 3, and BF16_Optimizer) read as one checkpoint.

The weights come from the optimizer's 32-bit partitions. Frozen parameters and buffers come from the model files. The
optimizer state is keyed by parameter name, as in ``FullyShardedDataParallel.optim_state_dict``. Source: DeepSpeed,
``runtime/engine.py`` (``_save_checkpoint``), ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate
from math import prod
from typing import Final, TypeVar

from ...base.dtypes import Dtype
from ...base.errors import ChangedError, MalformedError, NotACheckpointError
from ...base.findings import INCOMPLETE, MISPLACED, OTHER_FILES
from ...base.steps import RENAME_BACK
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import RankSave, is_complete
from ...checkpoint.graph_builder import Builder
from ...checkpoint.objects import list_items, mapping, values_of
from ...checkpoint.tensors import Tensor, ViewId, view_id
from ...files.folders import Folder
from ...files.sources import FolderSource
from ...pickles.nodes import Graph, Ref
from ..folders import opening, other_steps_note
from ..joined import RankFile, RankFiles, grafted_key, rows
from ..names.deepspeed import MODEL, OPTIMIZER, RANK_MODEL, ZeroFiles, other_steps, step_folder, zero_files
from ..names.hf import model_files
from ..names.numbered import MAX_RANKS, StepFolder
from ..pieces import STATISTICS, CopyPair, Rows
from .states import (
    MOST_ODD,
    OF_PARTS,
    ModelState,
    Slices,
    Vector,
    ZeroState,
    optimizer_in,
    read_model,
    read_optimizer,
    slices_of_ranks,
    slices_of_vectors,
    states_of,
    unlike,
)

#: Samples per rank when its 32-bit weights are compared with the rounded weights in the model file.
_PIECES: Final = 16
#: A file next to the step folder that describes the training, not the model.
_PROGRESS: Final = "trainer_state.json"

_State = TypeVar("_State", ZeroState, ModelState)


class Deepspeed(RankFiles):
    """The files of one step. ``_states`` (optimizer files) and ``_models`` (model files) hold, by rank, the readable
    files that belong to this save. Objects that every rank saves are taken from the lowest rank."""

    format = "deepspeed"

    def __init__(self, step: StepFolder, files: ZeroFiles, stack: ExitStack) -> None:
        super().__init__(step.folder)
        #: Files of ranks that this save does not have.
        self._left_over: set[str] = set()
        self.note_twice(files.twice)
        self._models = self._read_all(files.models, RANK_MODEL if files.in_parts else MODEL, read_model, stack)
        self._states = self._read_all(files.optimizers, OPTIMIZER, read_optimizer, stack)
        self._model, self._first = self._models[min(self._models)], self._states[min(self._states)]
        if self._first.in_parts != files.in_parts:
            raise MalformedError("of the optimizer's and the model's files, some are of ZeRO stage 3, and some are not")
        self._file = self.read_again(self._model.name)
        self._module = values_of(self._file.graph, self._model.values["module"])
        self._ranks = self._counted()
        for names in (files.optimizers, files.models) if files.in_parts else (files.optimizers,):
            there = {rank: name for rank, name in names.items() if name not in self._left_over}
            name_of = partial(name_like, next(iter(names.values())))
            self.note_ranks(pluralize(self._ranks, "rank"), range(self._ranks), there, name_of)
        self.note_same((own.name, own.checksums, own.flats) for own in self._states.values())
        self.note_same((own.name, own.checksums, [*own.fragments.values()]) for own in self._models.values())
        self._vectors = self._flats()
        self._slices = self._cut()
        self._compare_files()
        self.build(self._whole(self.read_again(self._first.name)))
        kind = f"ZeRO stage {self._first.stage}" if self._first.stage else "BF16_Optimizer"
        self.rank_save = RankSave(self._ranks, self._model.number("global_steps"))
        name, ranks = f"DeepSpeed {self._first.save['DeepSpeed']}".rstrip(), pluralize(self._ranks, "rank")
        self.writer = f"{name}, {kind}: {ranks}, step {self.rank_save.step:,}, {self.completeness}"
        if not files.in_parts:
            # The model file is complete without the partitions.
            joined = frozenset(self._tensors)
            for number, problem in enumerate(self.problems):
                self.problems[number] = problem._replace(storages=joined) if problem.code == INCOMPLETE else problem

    # -- the files

    def _read_all(
        self, names: Mapping[int, str], kind: re.Pattern[str], read: Callable[[RankFile], _State], stack: ExitStack
    ) -> dict[int, _State]:
        """Return the states of one kind of file by rank, without those of another save; raise if none is left."""

        def read_own(file: RankFile) -> _State | None:
            saved, own = kind.match(file.container.root), kind.match(file.name)
            if not (saved and own) or int(saved[1]) == int(own[1]):
                return read(file)
            what = f"it was saved as {saved[0]}: that of another rank under this name"
            self.note(MISPLACED, "error", f"{file.name}: {what}", file.name, refused=True)
            return None

        states = self.read_all(names, read_own, stack)
        if not states:
            what = next(problem.message for problem in self.problems if problem.where in names.values())
            raise MalformedError(what, next=self.errors[0].step if self.errors else RENAME_BACK)
        common = Counter(str(state.save.get("ranks", "")) for state in states.values()).most_common(1)[0][0]
        for rank in [rank for rank in states if common.isdigit() and rank >= int(common)]:
            if str(states[rank].save.get("ranks", "")) != common:
                name = states.pop(rank).name
                what = f"{name} is left from another save, since this one has {common} ranks: it is not read"
                self.note(OTHER_FILES, "warning", what)
                self._left_over.add(name)
        for rank in self.note_other_saves({rank: (state.name, state.save) for rank, state in states.items()}):
            del states[rank]
        return states

    def _counted(self) -> int:
        counts = self._first.counts or (self._model.number("dp_world_size"),)
        if len(set(counts)) > 1:
            what = f"its groups of parameters are cut over {join_limited([str(count) for count in counts])} ranks"
            step = "deepspeed/checkpoint/ds_to_universal.py joins them"
            raise NotACheckpointError(f"{what}, as those of experts are: not joined", kind="deepspeed", next=step)
        if not 0 < counts[0] <= MAX_RANKS:
            raise MalformedError(f"{self._first.name}: {counts[0]:,} ranks (partition_count)")
        return counts[0]

    def _compare_files(self) -> None:
        model, first = self._model, self._first
        configurations = {state.save["ds_config"] for state in (model, first) if "ds_config" in state.save}
        if len(configurations) > 1:
            what = f"{model.name} has another ds_config than {first.name}: they are not of one run"
            self.note_lost(what, model.name)
        done = model.number("global_steps") - model.number("skipped_steps")
        odd = next((step for step in first.steps if step >= 0 and step != done), None)
        if odd is not None and "global_steps" in model.save:
            what = f"{model.name} is of step {done:,}, the optimizer's files of {odd:,g}"
            self.note("other-step", "warning", f"{what}: of another save, or its state was not loaded", model.name)
        if first.in_parts:
            self._compare_buffers()
        elif is_complete(self.problems):
            self._compare_weights()

    def _compare_buffers(self) -> None:
        own: list[str] = []
        others = [state for state in self._models.values() if state is not self._model]
        for name, buffer in self._model.whole.items():
            tensor = self._tensor_in_model(name)
            self.storage_of[name] = grafted_key(buffer.file, tensor.storage if tensor is not None else "")
            for state in others:
                there = state.whole.get(name)
                if there is None or there[:2] != buffer[:2]:
                    self.note_lost(f"{state.name} has no buffer {quoted(name)} like {buffer.file}", state.name)
                    continue
                pair = CopyPair(name, buffer, there)
                own += [name] if self.copies.add(pair, own=name.rpartition(".")[2] in STATISTICS) else []
        self.note_own(map(quoted, own), self._model.name)

    def _compare_weights(self) -> None:
        """Compare a sample of each rank's 32-bit weights, rounded, with the model file, to which DeepSpeed copies them
        after each step (stage_1_and_2.py, ``step``; bf16_optimizer.py)."""
        own: dict[int, list[tuple[str, Rows, int, int, int]]] = {}
        for name, cut in self._slices.items():
            tensor, vector = self._tensor_in_model(name), self._vectors[cut.group]
            pieces_of = vector.pieces(cut.begin, prod(cut.shape)) if tensor and tensor.shape == cut.shape else ()
            for at, count, rank, local in pieces_of:
                if (flat := vector.parts[rank]) is not None:
                    own.setdefault(rank, []).append((name, flat, local, at, count))
        odd: list[str] = []
        for rank, pieces in own.items():
            unequal = looked = 0
            for name, flat, local, at, count in pieces[:: -(-len(pieces) // _PIECES)]:
                with suppress(MalformedError):
                    different, number = unlike(flat, local, rows(self._file, self._module[name]), at, count)
                    unequal, looked = unequal + different, looked + number
            if unequal * MOST_ODD > looked:
                odd.append(self._states[rank].name)
        self.note_unlike(odd, self._model.name)

    def _tensor_in_model(self, name: str) -> Tensor | None:
        return self._file.reader.tensor(self._module[name]) if name in self._module else None

    # -- the flat tensors

    def _flats(self) -> list[Vector]:
        groups = zip(*(state.flats for state in self._states.values()))
        sizes = [[max(flat.shape[0] for flat in flats)] * self._ranks for flats in groups]
        own = [[flat.shape[0] for flat in self._first.flats]] * self._ranks
        return self._stacked(lambda state: state.flats, own if self._first.in_parts else sizes)

    def _moments(self, name: str) -> list[Vector]:
        sizes = [vector.sizes for vector in self._vectors]
        return self._stacked(lambda state: [part.get(name) for part in state.moments], sizes)

    def _stacked(
        self, flats_of: Callable[[ZeroState], Sequence[Rows | None]], sizes: Sequence[Sequence[int]]
    ) -> list[Vector]:
        absent: Sequence[Rows | None] = [None] * len(self._first.flats)
        ranks = (self._states.get(rank) for rank in range(self._ranks))
        parts: Iterable[Sequence[Rows | None]] = [absent if state is None else flats_of(state) for state in ranks]
        return [Vector(own, size) for own, size in zip(parts if self._first.in_parts else zip(*parts), sizes)]

    def _cut(self) -> dict[str, Slices]:
        groups, first = self._model.groups, self._first
        wanted = sum(prod(shape) for group in groups for shape in group.values())
        if wanted and not any(vector.size for vector in self._vectors):
            self.note_lost("the partitions are empty: they were offloaded (to NVMe), and are not in the files")
        if first.in_parts:
            starts = list(accumulate((flat.shape[0] for flat in first.flats), initial=0))
            slices, size = slices_of_ranks(groups, self._ranks, starts[:-1])
            for rank, vector in enumerate(self._vectors):
                if vector.size != size:
                    what = f"the partitions of rank {rank} have {vector.size:,} elements, its parameters take {size:,}"
                    self.note_lost(what, self._states[rank].name if rank in self._states else "")
            return slices
        if len(groups) != len(first.flats) or any(len(one) != len(two) for one, two in zip(groups, first.paddings)):
            raise MalformedError(f"{self._model.name} describes other groups of parameters than {first.name} has")
        for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
            tensor = self._tensor_in_model(name)
            if tensor is not None and 0 not in tensor.shape and tensor.shape != shape:
                what = f"{quoted(name)} is of the shape {list(tensor.shape)}, and {list(shape)} in its param_shapes"
                self.note_lost(f"{self._model.name}: {what}", self._model.name)
        slices, sizes = slices_of_vectors(groups, first.paddings)
        multiple = 2 * self._ranks
        for number, (vector, size) in enumerate(zip(self._vectors, sizes)):
            # The end is padded to a multiple of twice the ranks (of the ranks before 0.3.11). The padding may have been
            # stripped. The size of a missing partition is a guess.
            fits = vector.size >= size and -(-vector.size // multiple) == -(-size // multiple)
            if not fits and None not in vector.parts:
                what = f"the partitions of group {number} have {vector.size:,} elements"
                self.note_lost(f"{what}, its parameters take {size:,}")
                continue
            parts = (multiple * -(-size // multiple) // self._ranks, -(-size // self._ranks))
            for what, name in min((list(self._odd_partitions(number, size, part)) for part in parts), key=len):
                self.note_lost(f"{name}: {what}", name)
        # Round robin: the addresses follow the order before. Missing partitions: their sizes are unknown.
        if not first.round_robin and len(self._states) >= self._ranks:
            self._check_addresses(slices)
        return slices

    def _odd_partitions(self, group: int, size: int, part: int) -> Iterator[tuple[str, str]]:
        """Yield (message, file) for each partition without ``part`` elements, except stripped padding."""
        for rank, state in self._states.items():
            count, used = state.flats[group].shape[0], min(max(size - rank * part, 0), part)
            last = rank >= self._ranks - 1
            if count not in (part, used) and not (last and count < part):
                yield f"its partition of group {group} has {count:,} elements, those of others {part:,}", state.name
            for slot, moment in state.moments[group].items():
                if moment.shape[0] not in (part, count):
                    what = f"{slot} of group {group} has {moment.shape[0]:,} elements, its partition {part:,}"
                    yield what, state.name

    def _check_addresses(self, slices: Mapping[str, Slices]) -> None:
        """Report each rank whose file lists other parameter addresses than the computed ones."""
        own: list[list[dict[str, tuple[int, int]]]] = [[{} for _ in self._vectors] for _ in range(self._ranks)]
        for name, cut in slices.items():
            for _, count, rank, local in self._vectors[cut.group].pieces(cut.begin, prod(cut.shape)):
                own[rank][cut.group][name] = local, count
        for rank, state in self._states.items():
            pairs = zip(state.addresses, own[rank]) if rank < self._ranks else ()
            odd = next((name for said, cut in pairs for name, _ in said.items() ^ cut.items()), None)
            if odd is not None:
                what = f"{state.name} says that it has another part of {quoted(odd)} than the model's file gives it"
                self.note_lost(what, state.name)

    # -- the object

    def _whole(self, optimizer: RankFile) -> Ref:
        items: dict[str, Ref | None] = {}
        for name, ref in {"module": -1, "optimizer": -1, **self._model.values}.items():
            if name == "module":
                items[name] = self._weights()
            elif name == "optimizer":
                items[name] = self._optimizer(optimizer)
            elif name not in OF_PARTS:
                items[name] = self.graft(self._file, ref)
        return self.builder.mapping((name, ref) for name, ref in items.items() if ref is not None)

    def _add(self, name: str, cut: Slices, vectors: Sequence[Vector], dtype: Dtype) -> Ref:
        chunks = (lambda: [*cut.chunks(vectors)]) if cut.is_whole(vectors) else None
        return self.add_tensor(name, dtype, cut.shape, chunks, (prod(cut.shape),))

    def _weights(self) -> Ref:
        model, dtypes = self._model, [flat.dtype for flat in self._first.flats]
        refs = {name: self._add(name, cut, self._vectors, dtypes[cut.group]) for name, cut in self._slices.items()}
        for name, shape in model.frozen.items() if self._first.in_parts else ():
            refs[name] = self._frozen(name, shape)
        return state_dict_with(self, self._file, model, refs, in_parts=self._first.in_parts)

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Ref:
        parts = {rank: model.fragments[name] for rank, model in self._models.items() if name in model.fragments}
        dtypes = {part.dtype for part in parts.values()}
        if len(dtypes) != 1:
            raise MalformedError(f"the frozen parameter {quoted(name)} is not in the files of the model")
        (dtype,) = dtypes
        cut = Slices(shape, 0, 0, self._ranks)
        if not all(rank in parts and size <= parts[rank].shape[0] for rank, size, _ in cut.stretches()):
            self.note_lost(f"parts of the frozen parameter {quoted(name)} are not there")
            return self.add_tensor(name, dtype, shape)
        return self._add(name, cut, [Vector([parts[rank]], [0]) for rank, _, _ in cut.stretches()], dtype)

    def _optimizer(self, file: RankFile) -> Ref | None:
        """Build the optimizer state keyed by parameter name; report why and return None if that is impossible."""
        graph, builder = file.graph, self.builder
        base = optimizer_in(graph, values_of(graph, values_of(graph, graph.root)["optimizer_state_dict"]))
        states = states_of(graph, base)
        moments_of = dict(enumerate(self._first.moments))
        odd = next(
            (
                slot  # of no single parameter, such as the scales of 8-bit optimizers
                for number, slots in states.items()
                for slot, ref in slots.items()
                if slot not in moments_of.get(number, ())
                if (tensor := file.reader.tensor(ref)) is not None and tensor.numel != 1
            ),
            "",
        )
        if not base or odd:
            why = f"{odd} is of a whole group" if odd else "it is not as torch.optim writes it (elastic_checkpoint)"
            self.note("no-moments", "warning", f"without the state of the optimizer: {why}", file.name)
            return None
        moments: dict[str, list[Vector]] = {}
        items, names = [], dict[int, list[str]]()
        for name, cut in self._slices.items():
            names.setdefault(cut.group, []).append(name)
            entries = []
            for slot, ref in states.get(cut.group, {}).items():
                key = f"optimizer.state.{name}.{slot}"
                moment = self._first.moments[cut.group].get(slot)
                if moment is not None:
                    moments[slot] = moments.get(slot) or self._moments(slot)
                    part = self._add(key, cut, moments[slot], moment.dtype)
                elif file.reader.tensor(ref) is not None:
                    part = self.add_rows(key, rows(file, ref))  # torch counts steps per parameter
                else:
                    part = self.graft(file, ref)
                entries.append((slot, part))
            if entries:
                items.append((name, builder.mapping(entries)))

        def params_of(fields: Mapping[str, Ref]) -> list[str]:
            numbers = [graph.nodes[ref] for ref in list_items(graph.nodes[fields.get("params", graph.root)])]
            return [name for number in numbers if type(number) is int for name in names.get(number, ())]

        groups = groups_with(self, file, list_items(graph.nodes[base["param_groups"]]), params_of)
        return builder.mapping([("state", builder.mapping(items)), ("param_groups", groups)])

    def other_dtypes(self, name: str) -> Mapping[str, str]:
        # In place of each weight, stage 3 saves an empty tensor with the training dtype. After each step, the 32-bit
        # partitions are cast to it (stage3.py, ``_reassign_or_swap_out_partitioned``).
        names = self._slices if self._first.in_parts else ()
        return {name: tensor.dtype for name in names if (tensor := self._tensor_in_model(name)) is not None}

    def other_weights(self, name: str) -> Graph:
        if name != "module":
            return super().other_weights(name)
        if self._first.in_parts:
            return self.graph  # the caller casts them: see ``other_dtypes``
        self.builder, self._grafts = Builder(), {}
        places: dict[Ref, Ref] = {}
        module = self.graft(self._file, self._model.values["module"])
        parts = [
            (key, module if key == "module" else self.builder.graft(self.graph, ref, places))
            for key, ref in values_of(self.graph, self.graph.root).items()
        ]
        return self.builder.graph(self.builder.mapping(parts), self.graph.style.protocol)


def groups_with(
    container: RankFiles, file: RankFile, groups: Sequence[Ref], params_of: Callable[[Mapping[str, Ref]], Iterable[str]]
) -> Ref:
    """Build the parameter groups of an optimizer, with the names of their parameters for the numbers in the file."""
    builder, built = container.builder, []
    for group in groups:
        fields = values_of(file.graph, group)
        own = [(key, container.graft(file, ref)) for key, ref in fields.items() if key != "params"]
        own.append(("params", builder.sequence(builder.add(name) for name in params_of(fields))))
        built.append(builder.mapping(own))
    return builder.sequence(built)


def state_dict_with(
    container: RankFiles, file: RankFile, model: ModelState, refs: Mapping[str, Ref], *, in_parts: bool
) -> Ref:
    """Build the state dict of a model file, with the parameters ``refs`` and the parameters tied to them. With
    ``in_parts``, the file holds only the names of parameters. A name without a tensor becomes a problem."""
    module = {str(file.graph.nodes[key]): ref for key, ref in mapping(file.graph, model.values["module"]) or ()}
    views: dict[ViewId, str] = {}
    for name, ref in module.items():
        found = file.reader.tensor(ref)
        if found is not None and found.storage and name in refs and 0 not in found.shape:
            views.setdefault(view_id(found), name)
    items = []
    for name, ref in module.items():
        tensor_there = file.reader.tensor(ref)
        kept = model.aliases.get(name, "")
        if name in refs:
            items.append((name, refs[name]))
            continue
        if not kept and tensor_there is not None and tensor_there.storage:
            kept = views.get(view_id(tensor_there), "")
        if kept in refs:
            items.append((name, container.alias(refs[kept])))
        elif kept and (kept == name or kept in model.aliases or kept not in module):
            what = f"{model.name}: {quoted(name)} is said to be {quoted(kept)}, which is no parameter of its own"
            container.note_lost(what, model.name)
        elif in_parts and tensor_there is not None and name not in model.buffers:
            container.note_lost(f"no file has {quoted(name)}; {model.name} has only its name", model.name)
        else:
            items.append((name, container.graft(file, ref)))
    items += [(name, ref) for name, ref in refs.items() if name not in module]
    for name, kept in model.aliases.items():
        if name not in module and kept in refs:
            items.append((name, container.alias(refs[kept])))
    return container.builder.mapping(items)


def name_like(name: str, rank: int) -> str:
    """Return the name of a rank's file, which is like another rank's."""
    return re.sub(r"(p_rank_)\d+", rf"\g<1>{rank}", name, count=1)


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder holds DeepSpeed files that can be joined, or a ``latest`` file that names such a
    folder."""
    step = step_folder(folder, names)
    return step is not None and zero_files(step.names) is not None


def read(folder: Folder) -> tuple[FolderSource, Deepspeed]:
    """Open a DeepSpeed ZeRO folder. Raises NotACheckpointError for a layout that cannot be joined, MalformedError if
    the files cannot be read."""
    path = folder.path
    step = step_folder(folder, folder.names())
    files = zero_files(step.names) if step is not None else None
    if step is None or files is None:
        raise ChangedError("its files changed while they were read", path=path, next="try again")
    with opening(path, "it is damaged: get the folder again") as stack:
        container = Deepspeed(step, files, stack)
    if others := other_steps(step):
        container.problems.append(other_steps_note(step.folder.path, "latest", others))
    near = step.above or folder.outer()
    names = near.names()
    beside = model_files(names) if step.above or "latest" in names else []
    return FolderSource(path, container.files, [near.join(name) for name in beside if name != _PROGRESS]), container
