"""A DeepSpeed ZeRO folder (stages 1, 2 and 3, and BF16_Optimizer) read as one checkpoint.

The weights come from the optimizer's 32-bit partitions. Frozen parameters and buffers come from the model files. The
optimizer state is keyed by parameter name, as in ``FullyShardedDataParallel.optim_state_dict``. Source: DeepSpeed,
``runtime/engine.py`` (``_save_checkpoint``), ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate
from math import prod
from typing import Final, TypeVar

from ...base.errors import ChangedError, MalformedError, NotACheckpointError
from ...base.findings import INCOMPLETE, MISPLACED, OTHER_FILES
from ...base.steps import RENAME_BACK
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import RankSave, is_complete
from ...checkpoint.graph_builder import Builder
from ...checkpoint.objects import list_items, mapping, values_of
from ...checkpoint.tensors import ViewId, view_id
from ...files.folders import Folder
from ...files.sources import FolderSource
from ...pickles.nodes import Graph, Ref
from ..folders import opening, other_steps_problem
from ..joined.container import RankFile, RankFiles, grafted_key, rows, whole_tensor
from ..names.deepspeed import MODEL, OPTIMIZER, RANK_MODEL, ZeroFiles, other_steps, step_folder, zero_files
from ..names.hf import model_files
from ..names.ranks import MAX_RANKS, StepFolder
from ..pieces.chunks import Rows
from ..pieces.copies import RANK_VALUES, STATISTICS, CopyPair, differ
from .rounding import MOST_UNLIKE, unlike
from .slices import Slices, Vector, cut_evenly, reach_of, slices_of_ranks, slices_of_vectors
from .states import OF_PARTS, ModelState, ZeroState, base_optimizer, group_states, read_model, read_optimizer

#: Bytes of a partition that are sampled for distinct values. With ``_FEW`` distinct values or fewer, equal partitions
#: do not prove a copy.
_SAMPLE: Final = 1 << 16
_FEW: Final = 4
#: Samples per rank when its 32-bit weights are compared with the rounded weights in the model file.
_PIECES: Final = 16
#: A file next to the step folder that describes the training, not the model.
_PROGRESS: Final = "trainer_state.json"

_State = TypeVar("_State", ZeroState, ModelState)


class Deepspeed(RankFiles):
    """The files of one step. ``_states`` (optimizer files) and ``_models`` (model files) hold, by rank, the readable
    files that belong to this save. Objects that every rank saves are taken from the lowest rank."""

    format = "deepspeed"

    def __init__(self, path: str, step: StepFolder, files: ZeroFiles, stack: ExitStack) -> None:
        super().__init__(step.folder)
        self.path = path
        #: Files of ranks that this save does not have.
        self._left_over: set[str] = set()
        self.note_twice(files.twice)
        self._models = self._read_all(files.models, RANK_MODEL if files.in_parts else MODEL, read_model, stack)
        self._states = self._read_all(files.optimizers, OPTIMIZER, read_optimizer, stack)
        self._model, self._first = self._models[min(self._models)], self._states[min(self._states)]
        if self._first.in_parts != files.in_parts:
            stages = ("3", "1 or 2") if self._first.in_parts else ("1 or 2", "3")
            raise MalformedError(f"the optimizer's files are of stage {stages[0]}, the model's files of {stages[1]}")
        self._ranks = self._counted()
        self._note_absent(files)
        self._note_copies([(state.name, state.checksums, state.flats) for state in self._states.values()])
        self._note_copies(
            [(model.name, model.checksums, tuple(model.fragments.values())) for model in self._models.values()]
        )
        self._vectors = self._flats()
        self._slices = self._cut()
        self._note_steps()
        self._compare_files()
        self.build(self._whole(self.read_again(self._model.name), self.read_again(self._first.name)))
        self.writer = self._words()
        if not files.in_parts:
            # The model file is complete without the partitions.
            joined, self.whole_weights = frozenset(self._tensors), "module"
            self.problems = [
                problem._replace(storages=joined) if problem.code == INCOMPLETE else problem
                for problem in self.problems
            ]

    def _words(self) -> str:
        kind = f"ZeRO stage {self._first.stage}" if self._first.stage else "BF16_Optimizer"
        state = "all there" if is_complete(self.problems) else "incomplete"
        ranks, step = pluralize(self._ranks, "rank"), self._model.number("global_steps")
        self.rank_save = RankSave(self._ranks, step)
        return f"{f'DeepSpeed {self._first.version}'.rstrip()}, {kind}: {ranks}, step {step:,}, {state}"

    # -- the files

    def _read_all(
        self, names: Mapping[int, str], kind: re.Pattern[str], read: Callable[[RankFile, int], _State], stack: ExitStack
    ) -> dict[int, _State]:
        """Read the files of one kind; return their states by rank.

        An unreadable file, or a file from another save than the majority, becomes a problem. Raises MalformedError if
        no file is left.
        """
        states: dict[int, _State] = {}
        for rank, name in names.items():
            file = self.open_file(name, stack)
            if file is None:
                continue
            saved = kind.match(file.container.root)
            if saved and int(saved[1]) != rank:
                what = f"it was saved as {saved[0]}: that of another rank under this name"
                self.note(MISPLACED, "error", f"{name}: {what}", name, refused=True)
                continue
            try:
                states[rank] = read(file, rank)
            except MalformedError as error:
                self.errors.append(error)
                self.note_lost(f"{name}: {error.what}", name)
        if not states:
            what = next(problem.message for problem in self.problems if problem.where in names.values())
            raise MalformedError(what, next=self.errors[0].step if self.errors else RENAME_BACK)
        saves = Counter(tuple(state.save.items()) for state in states.values())
        common = dict(saves.most_common(1)[0][0])
        like = next(state.name for state in states.values() if state.save == common)
        for rank, state in list(states.items()):
            odd = [f"{name} {_value(value)}" for name, value in state.save.items() if common.get(name) != value]
            if odd and (ranks := str(common.get("ranks", ""))).isdigit() and rank >= int(ranks):
                what = f"{state.name} is left from another save, since this one has {ranks} ranks: it is not read"
                self.note(OTHER_FILES, "warning", what)
                self._left_over.add(state.name)
                del states[rank]
            elif odd:
                other = [f"{name} {_value(value)}" for name, value in common.items() if state.save.get(name) != value]
                what = f"{state.name} is of another save than {like}: {join_limited(odd)}, there {join_limited(other)}"
                self.note_lost(what, state.name)
                del states[rank]
        return states

    def _counted(self) -> int:
        """Return the number of ranks; raise NotACheckpointError if parameter groups have different numbers of ranks."""
        counts = self._first.counts or (self._model.number("dp_world_size"),)
        if len(set(counts)) > 1:
            what = f"its groups of parameters are cut over {join_limited([str(count) for count in counts])} ranks"
            step = "deepspeed/checkpoint/ds_to_universal.py joins them"
            raise NotACheckpointError(f"{what}, as those of experts are: not joined", kind="deepspeed", next=step)
        if not 0 < counts[0] <= MAX_RANKS:
            raise MalformedError(f"{self._first.name}: {counts[0]:,} ranks (partition_count)")
        return counts[0]

    def _note_absent(self, files: ZeroFiles) -> None:
        """Report ranks without a file, and files whose rank is beyond the number of ranks."""
        kinds = [("optimizer", files.optimizers)] + [("model", files.models)] * files.in_parts
        for kind, names in kinds:
            absent = [rank for rank in range(self._ranks) if rank not in names]
            if absent:
                name = re.sub(r"(pp_rank_)\d+", rf"\g<1>{absent[0]}", next(iter(names.values())))
                numbers = join_limited([str(rank) for rank in absent])
                ranks = f"{'rank' if len(absent) == 1 else 'ranks'} {numbers} of {self._ranks:,}"
                what = f"the {kind} state of {ranks} is not there: {name}"
                self.note_lost(what, name)
            for rank, name in names.items():
                if rank >= self._ranks and name not in self._left_over:
                    what = f"{name} is of rank {rank}, and the others are of {pluralize(self._ranks, 'rank')}"
                    self.note_lost(what, name)

    def _note_copies(self, files: Sequence[tuple[str, Sequence[int], Sequence[Rows]]]) -> None:
        """Report ranks with identical partitions. ``files``: (name, recorded checksums, partitions)."""
        known: dict[Sequence[int], tuple[str, Sequence[Rows]]] = {}
        for name, checksums, parts in files:
            first, others = known.setdefault(checksums, (name, parts)) if any(checksums) else (name, parts)
            if first != name and _is_copy(parts, others):
                what = f"{name} has the partitions of {first}: one is a copy of the other"
                self.note_lost(what, name)

    def _note_steps(self) -> None:
        """Warn if the step in the model file differs from the step that the optimizer has reached."""
        done = self._model.number("global_steps") - self._model.number("skipped_steps")
        odd = next((step for step in self._first.steps if step >= 0 and step != done), None)
        if odd is not None and "global_steps" in self._model.save:
            what = f"{self._model.name} is of step {done:,}, the optimizer's files of {odd:,g}"
            self.note(
                "other-step", "warning", f"{what}: of another save, or its state was not loaded", self._model.name
            )

    def _compare_files(self) -> None:
        """Compare the content that the files of one save share: configuration, buffers, 16-bit and 32-bit weights."""
        model, first = self._model, self._first
        configurations = {state.save["ds_config"] for state in (model, first) if "ds_config" in state.save}
        if len(configurations) > 1:
            what = f"{model.name} has another ds_config than {first.name}: they are not of one run"
            self.note_lost(what, model.name)
        if first.in_parts:
            self._compare_buffers()
        elif is_complete(self.problems):
            self._compare_weights()

    def _compare_buffers(self) -> None:
        """Compare the buffers, which stage 3 saves in full on every rank. Running statistics may differ between
        ranks."""
        own: list[str] = []
        others = [state for state in self._models.values() if state is not self._model]
        for name, (tensor, copy) in self._model.whole.items():
            self.storage_of[name] = grafted_key(copy.file, tensor.storage)
            for state in others:
                there = state.whole.get(name)
                if there is None or (there[0].dtype, there[0].shape) != (tensor.dtype, tensor.shape):
                    self.note_lost(f"{state.name} has no buffer {quoted(name)} like {copy.file}", state.name)
                    continue
                pair = CopyPair(name, copy, there[1], tensor.own_bytes)
                if name.rpartition(".")[2] not in STATISTICS:
                    self.copies.add(pair)
                elif self.copies.compare(pair) is False:
                    own.append(name)
        if own:
            names = join_limited([quoted(name) for name in dict.fromkeys(own)], most=3)
            what = f"ranks have values of their own: {names}; those of {self._model.name} are taken"
            self.note(RANK_VALUES, "warning", what)

    def _compare_weights(self) -> None:
        """Compare a sample of each rank's 32-bit weights, rounded, with the weights in the model file.

        DeepSpeed copies them there after each step: stage_1_and_2.py (``step``), bf16_optimizer.py.
        """
        file = self.read_again(self._model.name)
        module = values_of(file.graph, self._model.values["module"])
        own: dict[int, list[tuple[str, Rows, int, int, int]]] = {}
        for name, cut in self._slices.items():
            tensor = file.reader.tensor(module[name]) if name in module else None
            if tensor is None or tensor.shape != cut.shape:
                continue
            vector = self._vectors[cut.group]
            for at, count, rank, local in vector.pieces(cut.begin, prod(cut.shape)):
                if (flat := vector.parts[rank]) is not None:
                    own.setdefault(rank, []).append((name, flat, local, at, count))
        odd: list[int] = []
        for rank, pieces in own.items():
            unequal = looked = 0
            for name, flat, local, at, count in pieces[:: -(-len(pieces) // _PIECES)]:
                with suppress(MalformedError):
                    values = rows(file, module[name])
                    different, number = unlike(flat, local, values, at, count)
                    unequal, looked = unequal + different, looked + number
            if unequal * MOST_UNLIKE > looked:
                odd.append(rank)
        for rank in odd if len(odd) < len(own) else ():
            name = self._states[rank].name
            what = f"the weights in {name} are not those of {self._model.name}, rounded: it is of another run"
            self.note_lost(what, name)
        if odd and len(odd) == len(own):
            what = f"the weights in {self._model.name} are not the rounded weights of the optimizer's files"
            self.note_lost(f"{what}: they are not of one run", self._model.name)

    # -- the flat tensors

    def _flats(self) -> list[Vector]:
        """Return the weight vectors: one per parameter group, or one per rank with stage 3."""
        states = [self._states.get(rank) for rank in range(self._ranks)]
        groups = range(len(self._first.flats))
        if self._first.in_parts:
            own = [flat.shape[0] for flat in self._first.flats]
            absent = Vector([None] * len(own), own)
            return [absent if state is None else _vector(state.flats, own) for state in states]
        vectors = []
        for group in groups:
            parts = [None if state is None else state.flats[group] for state in states]
            largest = max(part.shape[0] for part in parts if part is not None)
            vectors.append(_vector(parts, [largest] * len(parts)))
        return vectors

    def _moments(self, name: str) -> list[Vector]:
        """Return the vectors of one optimizer state, in the same order as the weight vectors."""
        states = [self._states.get(rank) for rank in range(self._ranks)]
        if self._first.in_parts:
            pairs = zip(states, self._vectors)
            return [
                vector if state is None else _vector([own.get(name) for own in state.moments], vector.sizes)
                for state, vector in pairs
            ]
        return [
            _vector([None if state is None else state.moments[group].get(name) for state in states], vector.sizes)
            for group, vector in enumerate(self._vectors)
        ]

    def _cut(self) -> dict[str, Slices]:
        """Return the position of each parameter in the vectors; report sizes that do not fit."""
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
                    where = self._states[rank].name if rank in self._states else ""
                    self.note_lost(what, where)
            return slices
        if len(groups) != len(first.flats) or any(len(one) != len(two) for one, two in zip(groups, first.paddings)):
            what = f"{self._model.name} describes other groups of parameters than {first.name} has"
            raise MalformedError(what)
        self._check_shapes()
        slices, sizes = slices_of_vectors(groups, first.paddings)
        multiple = 2 * self._ranks
        for number, (vector, size) in enumerate(zip(self._vectors, sizes)):
            # The end is padded to a multiple of twice the ranks (of the ranks before 0.3.11). The padding may have been
            # stripped.
            if vector.size < size or -(-vector.size // multiple) != -(-size // multiple):
                there = "may have " if None in vector.parts else "have "
                what = f"the partitions of group {number} {there}{vector.size:,} elements, its parameters take {size:,}"
                if there == "have ":
                    self.note_lost(what)
                    continue
            parts = (multiple * -(-size // multiple) // self._ranks, -(-size // self._ranks))
            odd = min((list(self._odd_partitions(number, size, part)) for part in parts), key=len)
            for what, name in odd:
                self.note_lost(f"{name}: {what}", name)
        if not first.round_robin:  # else addresses follow the order before round robin
            self._check_addresses(slices)
        return slices

    def _odd_partitions(self, group: int, size: int, part: int) -> Iterator[tuple[str, str]]:
        """Yield (message, file) for each partition with an unexpected size: its elements would be read from the wrong
        places.

        Each partition should have ``part`` elements. Only the first ``size`` elements of the whole group are used; the
        rest is padding. Padding may be stripped, by old versions in the last rank only, but never in moments.
        """
        for rank, state in self._states.items():
            count, used = state.flats[group].shape[0], min(max(size - rank * part, 0), part)
            last = rank >= self._ranks - 1
            if count not in (part, used) and not (last and count < part):
                yield f"its partition of group {group} has {count:,} elements, those of others {part:,}", state.name
            for slot, moment in state.moments[group].items():
                if moment.shape[0] not in (part, count):
                    what = f"{slot} of group {group} has {moment.shape[0]:,} elements, its partition {part:,}"
                    yield what, state.name

    def _check_shapes(self) -> None:
        """Report parameters whose shape in the model file differs from its own ``param_shapes``."""
        file = self.read_again(self._model.name)
        module = values_of(file.graph, self._model.values["module"])
        for name, shape in ((name, shape) for group in self._model.groups for name, shape in group.items()):
            tensor = file.reader.tensor(module[name]) if name in module else None
            if tensor is not None and 0 not in tensor.shape and tensor.shape != shape:
                what = f"{quoted(name)} is of the shape {list(tensor.shape)}, and {list(shape)} in its param_shapes"
                self.note_lost(f"{file.name}: {what}", file.name)

    def _check_addresses(self, slices: Mapping[str, Slices]) -> None:
        """Report each rank whose file lists other parameter addresses than the computed ones."""
        if len(self._states) < self._ranks:
            return  # the sizes of missing partitions are unknown, so the computed addresses are a guess
        own: list[list[dict[str, tuple[int, int]]]] = [[{} for _ in self._vectors] for _ in range(self._ranks)]
        for name, cut in slices.items():
            for _, count, rank, local in self._vectors[cut.group].pieces(cut.begin, prod(cut.shape)):
                own[rank][cut.group][name] = local, count
        for rank, state in self._states.items():
            pairs = zip(state.addresses, own[rank]) if rank < self._ranks else ()
            odd = next((name for said, cut in pairs for name in said.keys() ^ cut.keys() | _other(said, cut)), None)
            if odd is not None:
                what = f"{state.name} says that it has another part of {quoted(odd)} than the model's file gives it"
                self.note_lost(what, state.name)

    # -- the object

    def _whole(self, model: RankFile, optimizer: RankFile) -> Ref:
        """Build the root object: the model file's entries, with joined tensors."""
        items = []
        values = {"module": -1, "optimizer": -1, **self._model.values}
        for name, ref in values.items():
            if name in OF_PARTS:
                continue
            own: Ref | None = None
            if name == "module":
                own = self._weights(model)
            elif name == "optimizer":
                own = self._optimizer(optimizer)
            elif ref >= 0:
                own = self.graft(model, ref)
            items += [] if own is None else [(name, own)]
        return self.builder.mapping(items)

    def _weights(self, file: RankFile) -> Ref:
        """Build the state dict: parameters from the partitions, all other entries from the model file."""
        model = self._model
        dtypes = [flat.dtype for flat in self._first.flats]
        refs: dict[str, Ref] = {}
        reach = reach_of(self._vectors)
        for name, cut in self._slices.items():
            tensor, whole = cut.joined(self._vectors, dtypes[cut.group]), cut.is_whole(self._vectors, reach)
            refs[name] = self.add_tensor(name, tensor, whole=whole)
        for name, shape in model.frozen.items() if self._first.in_parts else ():
            refs[name] = self._frozen(name, shape)
        return state_dict_with(self, file, model, refs, in_parts=self._first.in_parts)

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Ref:
        """Build a frozen parameter that is split over the per-rank model files."""
        parts = {rank: model.fragments[name] for rank, model in self._models.items() if name in model.fragments}
        dtypes = {part.dtype.name: part.dtype for part in parts.values()}
        if len(dtypes) != 1:
            raise MalformedError(f"the frozen parameter {quoted(name)} is not in the files of the model")
        tensor, whole = cut_evenly(shape, parts, self._ranks, *dtypes.values())
        if not whole:
            self.note_lost(f"parts of the frozen parameter {quoted(name)} are not there")
        return self.add_tensor(name, tensor, whole=whole)

    def _optimizer(self, file: RankFile) -> Ref | None:
        """Build the optimizer state keyed by parameter name; report why and return None if that is impossible."""
        graph, builder = file.graph, self.builder
        base = base_optimizer(graph, values_of(graph, values_of(graph, graph.root)["optimizer_state_dict"]))
        states = group_states(graph, base)
        odd = next((slot for number in states for slot in self._whole_slots(file, number, states[number])), "")
        if not base or odd:
            why = f"{odd} is of a whole group" if odd else "it is not as torch.optim writes it (elastic_checkpoint)"
            self.note("no-moments", "warning", f"without the state of the optimizer: {why}", file.name)
            return None
        moments: dict[str, list[Vector]] = {}
        reach: dict[str, list[int]] = {}
        items, names = [], dict[int, list[str]]()
        for name, cut in self._slices.items():
            names.setdefault(cut.group, []).append(name)
            entries = []
            for slot, ref in states.get(cut.group, {}).items():
                key = f"optimizer.state.{name}.{slot}"
                moment = self._first.moments[cut.group].get(slot)
                if moment is not None:
                    if slot not in moments:
                        moments[slot] = self._moments(slot)
                        reach[slot] = reach_of(moments[slot])
                    own = moments[slot]
                    part = self.add_tensor(key, cut.joined(own, moment.dtype), whole=cut.is_whole(own, reach[slot]))
                elif file.reader.tensor(ref) is not None:
                    part = self.add_tensor(key, whole_tensor(rows(file, ref)))  # torch counts steps per parameter
                else:
                    part = self.graft(file, ref)
                entries.append((slot, part))
            if entries:
                items.append((name, builder.mapping(entries)))
        groups = []
        for group in list_items(graph.nodes[base["param_groups"]]):
            fields = values_of(graph, group)
            numbers = [graph.nodes[ref] for ref in list_items(graph.nodes[fields.pop("params", graph.root)])]
            params = [name for number in numbers if type(number) is int for name in names.get(number, ())]
            own_fields = [(name, self.graft(file, ref)) for name, ref in fields.items()]
            own_fields.append(("params", builder.sequence(builder.add(name) for name in params)))
            groups.append(builder.mapping(own_fields))
        return builder.mapping([("state", builder.mapping(items)), ("param_groups", builder.sequence(groups))])

    def _whole_slots(self, file: RankFile, number: int, states: Mapping[str, Ref]) -> Iterator[str]:
        """Yield the states of a group that do not belong to single parameters, such as the scales of 8-bit
        optimizers."""
        for slot, ref in states.items():
            tensor = file.reader.tensor(ref)
            flat = number < len(self._first.moments) and slot in self._first.moments[number]
            if not flat and tensor is not None and prod(tensor.shape) != 1:
                yield slot

    def other_dtypes(self, name: str) -> Mapping[str, str]:
        if not self._first.in_parts:
            return {}
        # In place of each weight, stage 3 saves an empty tensor with the training dtype. After each step, the 32-bit
        # partitions are cast to it (stage3.py, ``_reassign_or_swap_out_partitioned``).
        file = self.read_again(self._model.name)
        module = values_of(file.graph, self._model.values["module"])
        tensors = {name: file.reader.tensor(ref) for name, ref in module.items() if name in self._slices}
        return {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}

    def other_weights(self, name: str) -> Graph:
        if name != "module":
            return super().other_weights(name)
        if self._first.in_parts:
            return self.graph  # the caller casts them: see ``other_dtypes``
        file = self.read_again(self._model.name)
        items = mapping(self.graph, self.graph.root) or []
        self.builder, self._grafts = Builder(), {}
        places: dict[Ref, Ref] = {}
        own = {str(self.graph.nodes[key]): value for key, value in items}
        module = self.graft(file, self._model.values["module"])
        parts = [
            (key, module if key == "module" else self.builder.graft(self.graph, ref, places))
            for key, ref in own.items()
        ]
        return self.builder.graph(self.builder.mapping(parts), self.graph.style.protocol)


def state_dict_with(
    container: RankFiles, file: RankFile, model: ModelState, refs: Mapping[str, Ref], *, in_parts: bool
) -> Ref:
    """Build the state dict of a model file, with the parameters ``refs`` and the parameters tied to them.

    With ``in_parts``, the file holds only the names of parameters. A name without a tensor becomes a problem.
    """
    nodes = file.graph.nodes
    module = {str(nodes[key]): ref for key, ref in mapping(file.graph, model.values["module"]) or ()}
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
            what = f"no file has {quoted(name)}; {model.name} has only its name"
            container.note_lost(what, model.name)
        else:
            items.append((name, container.graft(file, ref)))
    there = {name for name, _ in items}
    items += [(name, ref) for name, ref in refs.items() if name not in there]
    items += [
        (name, container.alias(refs[kept]))
        for name, kept in model.aliases.items()
        if name not in module and kept in refs
    ]
    return container.builder.mapping(items)


def _vector(parts: Sequence[Rows | None], sizes: Sequence[int]) -> Vector:
    """Return the vector of these tensors; ``sizes`` supplies the sizes of missing parts."""
    return Vector(parts, [size if part is None else part.shape[0] for part, size in zip(parts, sizes)])


def _is_copy(parts: Sequence[Rows], others: Sequence[Rows]) -> bool:
    """Return whether all elements are equal, with enough distinct values to rule out untrained layers (zeros and
    ones)."""
    values: set[bytes] = set()
    for part, other in zip(parts, others):
        size = prod(part.shape) * part.dtype.itemsize
        if part[:2] != other[:2] or differ(part.source, part.begin, other.source, other.begin, size):
            return False
        data, step = part.source.read(part.begin, min(size, _SAMPLE)), part.dtype.itemsize
        values.update(data[at : at + step] for at in range(0, len(data), step))
    return len(values) > _FEW


def _other(said: Mapping[str, tuple[int, int]], cut: Mapping[str, tuple[int, int]]) -> set[str]:
    return {name for name in said.keys() & cut.keys() if said[name] != cut[name]}


def _value(value: object) -> str:
    return join_limited([str(part) for part in value] or ["none"]) if isinstance(value, tuple) else str(value)


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder holds DeepSpeed files that can be joined, or a ``latest`` file that names such a
    folder."""
    step = step_folder(folder, names)
    return step is not None and zero_files(step.names) is not None


def read(folder: Folder) -> tuple[FolderSource, Deepspeed]:
    """Open a DeepSpeed ZeRO folder.

    Raises NotACheckpointError for a layout that cannot be joined, MalformedError if the files cannot be read.
    """
    path = folder.path
    step = step_folder(folder, folder.names())
    files = zero_files(step.names) if step is not None else None
    if step is None or files is None:
        raise ChangedError("its files changed while they were read", path=path, next="try again")
    with opening(path, "it is damaged: get the folder again") as stack:
        container = Deepspeed(path, step, files, stack)
    others = other_steps(step)
    if others:
        container.problems.append(other_steps_problem(step.folder.path, "latest", others))
    near = step.above or folder.outer()
    names = near.names()
    beside = model_files(names) if step.above or "latest" in names else []
    own = [near.join(name) for name in beside if name != _PROGRESS]
    return FolderSource(path, container.files, own), container
