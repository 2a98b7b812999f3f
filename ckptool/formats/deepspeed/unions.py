"""DeepSpeed folders whose files hold whole tensors: universal checkpoints, pipeline layers, uncut models and experts.

The checkpoint is the union of the files. Sources: DeepSpeed, ``checkpoint/ds_to_universal.py``,
``runtime/pipe/module.py`` (``save_state_dict``, ``ckpt_layer_path``), ``runtime/engine.py`` (``_save_moe_checkpoint``).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import prod
from typing import Final, TypeAlias

from ...base.errors import ChangedError, MalformedError, NotACheckpointError
from ...base.findings import UNCHECKED
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.steps import RENAME_BACK
from ...base.text import join_limited, pluralize, quoted, step_words, words
from ...checkpoint.container import RankSave
from ...checkpoint.objects import list_items, mapping, values_of
from ...files.folders import Folder
from ...files.sources import FolderSource
from ...pickles.nodes import Ref
from ..folders import opening, other_steps_note, read_tag
from ..joined import RankFile, RankFiles, rows
from ..names.deepspeed import (
    EXPERT,
    EXPERT_OPTIMIZER,
    LAYER,
    MODEL,
    OPTIMIZER,
    RANK_MODEL,
    items_in,
    number_in,
    other_steps,
    step_folder,
    whole_file,
    whole_number,
)
from ..names.numbered import MAX_RANKS, StepFolder, by_number
from ..names.training import training_folder
from ..pieces import Rows
from .folder import groups_with, name_like, state_dict_with
from .states import MOST_ODD, OF_PARTS, ModelState, number_of, optimizer_in, read_model, shapes_in, states_of, unlike

Shape: TypeAlias = tuple[int, ...]

#: States that have the shape of their parameter.
_LIKE_PARAMETER: Final = words("exp_avg exp_avg_sq momentum_buffer square_avg sum state1")
#: Entries of optimizers that flatten the parameters of a group.
_FLAT: Final = words("fp32_groups_flat fp32_flat_groups single_partition_of_fp32_groups")


class Listed(NamedTuple):
    """The parameters of one file: their number, and the shapes of those that have a state, each with the checksum that
    is recorded for it (0 if none is, or if all its values are equal)."""

    number: int
    shapes: Sequence[tuple[Shape, int]]


def listed_in(file: RankFile, values: Mapping[str, Ref]) -> Listed | None:
    """Return the parameters that the entry ``optimizer`` of a file lists; None if it has none, or flat vectors."""
    graph = file.graph
    own = values_of(graph, values["optimizer"]) if "optimizer" in values else {}
    if not own or own.keys() & _FLAT:
        return None
    base = own if {"state", "param_groups"} <= own.keys() else optimizer_in(graph, own)
    groups = list_items(graph.nodes[base["param_groups"]]) if base else ()
    params = [values_of(graph, group).get("params", -1) for group in groups]
    if not params or -1 in params:
        return None
    shapes = []
    for state in states_of(graph, base).values():
        ref = next((state[slot] for slot in _LIKE_PARAMETER if slot in state), -1)
        tensor = file.reader.tensor(ref) if ref >= 0 else None
        if tensor is not None:
            place = rows(file, ref)
            shapes.append((place.shape, 0 if place.is_one_value() else place.crc))
    return Listed(sum(len(list_items(graph.nodes[ref])) for ref in params), shapes)


def without_tensors(every: Iterable[Listed], there: Sequence[Shape]) -> tuple[int, int]:
    """Return how many listed parameters have no tensor among those that are ``there``, and how many tensors are not
    listed, such as buffers. The copies of a tied parameter on several stages count once: they have equal states."""
    wanted: Counter[Shape] = Counter()
    seen: set[tuple[Shape, int]] = set()
    number = 0
    for listed in every:
        own = [item for item in listed.shapes if not item[1] or item not in seen]
        wanted.update(shape for shape, _ in own)
        number += len(own) + listed.number - len(listed.shapes)
        seen.update(own)
    lost = max((wanted - Counter(there)).total(), number - len(there))
    return lost, len(there) - number + lost


#: The expert number in a tensor name.
EXPERT_KEY: Final = regex(r"\.deepspeed_experts\.(\d{1,6})\.")


class NumberedFiles(RankFiles):
    """Files with numbers in their names, checked against the names under which they were saved."""

    def numbered(self, kind: re.Pattern[str], names: Collection[str]) -> dict[tuple[int, ...], str]:
        """Return the files of one kind by the numbers in their names, sorted; report two files with the same."""
        files, twice = by_number((_numbers_in(match), match[0]) for match in map(kind.match, names) if match)
        self.note_twice(twice)
        return dict(sorted(files.items()))

    def open_as(self, kind: re.Pattern[str], name: str, numbers: tuple[int, ...], stack: ExitStack) -> RankFile | None:
        """Open a file of one kind; None if it cannot be read or was saved with other numbers, reported as a problem."""
        file = self.open_file(name, stack)
        saved = kind.match(f"{file.container.root}.pt") if file is not None else None
        what = ""
        if saved and _numbers_in(saved) != numbers:
            what = f"it was saved as {saved[0]}: that of another place under this name"
        elif file is not None and (own := _kind_of(file)) is not kind:
            what = f"it holds {_KINDS[own]}, not {_KINDS[kind]}"
        if what:
            self.note_lost(f"{name}: {what}", name)
            return None
        return file


#: Content by the pattern of the file names that have it.
_KINDS: Final = {
    MODEL: "a model file of DeepSpeed",
    OPTIMIZER: "a partition of an optimizer",
    EXPERT_OPTIMIZER: "the state of an optimizer",
    EXPERT: "the tensors of one expert",
    LAYER: "the state dict of a layer",
    None: "no state dict",
}


def _kind_of(file: RankFile) -> re.Pattern[str] | None:
    """Return the pattern of the names that DeepSpeed gives to files with this content; None for other content."""
    values = file.values
    kinds = {"module": MODEL, "optimizer_state_dict": OPTIMIZER, "optimizer": EXPERT_OPTIMIZER}
    kind = next((kind for entry, kind in kinds.items() if entry in values), None)
    if kind is None and values and all(map(EXPERT_KEY.search, values)):
        return EXPERT
    return kind or (LAYER if mapping(file.graph, file.graph.root) is not None else None)


def _numbers_in(match: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(group or 0) for group in match.groups())


#: A parameter name of a numbered layer; tied layers have a key instead of a number.
_OF_LAYER: Final = regex(r"\d+\.")


class Pipeline(NumberedFiles):
    """Pipeline layers: the model is their union, each layer under its number, as PipelineModule names it."""

    format = "deepspeed-union"

    def __init__(self, folder: Folder, names: Collection[str], stack: ExitStack) -> None:
        super().__init__(folder)
        layers, models = ({at[0]: name for at, name in self.numbered(kind, names).items()} for kind in (LAYER, MODEL))
        optimizer = any(OPTIMIZER.match(name) for name in names)
        items: dict[str, Ref] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for number, name in layers.items():
            file = self.open_as(LAYER, name, (number, 0), stack)
            if file is not None:
                items |= {f"{number}.{key}": self.graft(file, ref) for key, ref in file.values.items()}
                tensors = ((key, file.reader.tensor(ref)) for key, ref in file.values.items())
                shapes |= {f"{number}.{key}": tensor.shape for key, tensor in tensors if tensor is not None}
        if not items and self.errors:
            raise self.errors[0]
        root: list[tuple[str, Ref]] = [("module", self.builder.mapping(items.items()))]
        opened = [self.open_as(MODEL, name, (number,), stack) for number, name in models.items()]
        stages = [file for file in opened if file is not None]
        self._note_lost(layers, shapes, stages)
        ranks, steps = len(models), dict[int, str]()
        for stage in stages:
            graph, values = stage.graph, stage.values
            ranks = number_in(graph, values, "mp_world_size", ranks)
            if "global_steps" in values:
                steps.setdefault(number_in(graph, values, "global_steps"), stage.name)
            if stage is stages[0]:
                left = {"module", "optimizer", *OF_PARTS}
                root += [(name, self.graft(stage, ref)) for name, ref in values.items() if name not in left]
            optimizer |= "optimizer" in values and graph.nodes[values["optimizer"]] is not None
        if optimizer:
            self.note_optimizer()
        if len(steps) > 1:
            words = join_limited([f"{name} is of step {number:,}" for number, name in steps.items()])
            self.note_lost(f"its files are of several saves: {words}", list(steps.values())[1])
        ranks = min(ranks, MAX_RANKS)
        self.note_ranks(pluralize(ranks, "stage"), range(ranks), models, "mp_rank_{:02d}_model_states.pt".format)
        self.build(self.builder.mapping(root))
        self.rank_save = RankSave(ranks, min(steps, default=None))
        step = step_words(self.rank_save.step)
        self.writer = f"DeepSpeed, pipeline: {pluralize(len(layers), 'layer')} of {pluralize(ranks, 'stage')}{step}"

    def _note_lost(
        self, layers: Collection[int], shapes: Mapping[str, tuple[int, ...]], stages: Sequence[RankFile]
    ) -> None:
        """Report parameters that no file has. Functions and repeated tied layers have none: a gap may be no loss."""
        rest = dict(shapes)
        listed: list[Listed] = []
        is_sure = bool(stages)
        for stage in stages:
            values = stage.values
            groups = shapes_in(stage, values["param_shapes"]) if "param_shapes" in values else ()
            for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
                own = rest.pop(name, None)
                if own != shape and (own is not None or _OF_LAYER.match(name)):
                    what = f"{stage.name} names {quoted(name)} of the shape {list(shape)}, and no layer has it"
                    self.note_lost(what, stage.name)
            numbered = None if groups else listed_in(stage, values)
            listed += [numbered] if numbered is not None else []
            is_sure = is_sure and bool(groups or numbered)
        after = max(layers, default=-1) + 1
        lost = [number for number in range(after) if number not in layers]
        names = [f"layer_{number:02d}-model_states.pt" for number in (*lost, after)]
        absent = join_limited(names[:-1], most=3)
        number, spare = without_tensors(listed, list(rest.values()))
        if number:
            what = f"the optimizer has {pluralize(number, 'parameter')} that no layer has"
            self.note_lost(f"{what}; not there: {join_limited(names, most=4)} and later ones", names[0])
        elif lost and not is_sure:
            self.note_lost(f"not there: {absent}; nothing says whether they had tensors", names[0])
        elif lost and spare:
            what = f"not there: {absent}; if they had tensors, these were frozen"
            self.note("no-layer", "warning", what, names[0])


_LATEST: Final = "latest_universal"
#: Holds one folder per parameter, with one file per state.
_PARAMETERS: Final = "zero"
_STATE: Final = "optimizer_state.pt"
_WEIGHTS: Final = "fp32.pt"
_STEP: Final = "step.pt"
_MODEL: Final = "mp_rank_00_model_states.pt"


class Universal(RankFiles):
    """A universal checkpoint: one file per parameter and state."""

    format = "deepspeed-union"

    def __init__(self, folder: Folder, stack: ExitStack) -> None:
        super().__init__(folder)
        file = self.open_file(_MODEL, stack)
        if file is None:
            raise self.errors[0]
        model = read_model(file)
        self._shapes = {name: shape for group in model.groups for name, shape in group.items()}
        self._module = file, values_of(file.graph, model.values["module"])
        conversion = values_of(file.graph, model.values.get("universal_checkpoint_info", file.graph.root))
        #: Whether the model has experts, whose parameters are not in the model file.
        self._experts = "expert_parameter_patterns" in conversion
        self._refs: dict[str, Ref] = {}
        self._states: list[tuple[str, Ref]] = []
        parameters = _parameters(folder)
        self._slots = {slot for files in parameters.values() for slot in files}
        self._steps: dict[str, float] = {}
        #: Parameters that the optimizer has updated; the others were copied from the model.
        self._updated: set[str] = set()
        #: The first file of weights, and its dtype.
        self._dtype = "", ""
        #: Weight files that are not the model's weights before rounding.
        self._odd: list[str] = []
        for name, files in parameters.items():
            self._read(name, files, stack)
        self.note_unlike(self._odd, _MODEL)
        self._note_uneven(model, parameters)
        absent = [name for name in self._shapes if name not in self._refs]
        if absent:
            names = join_limited([quoted(name) for name in absent], most=3)
            self.note_lost(f"{names}: {_PARAMETERS}/{absent[0]}/{_WEIGHTS} is not there or cannot be read")
        items = []
        for name, ref in model.values.items():
            if name == "module":
                items.append((name, state_dict_with(self, file, model, self._refs, in_parts=False)))
            elif name == "optimizer":
                items.append((name, self._optimizer(model, stack)))
            elif name not in OF_PARTS:
                items.append((name, self.graft(file, ref)))
        self.build(self.builder.mapping(items))
        name = f"DeepSpeed {model.save.get('ds_version', '')}".rstrip()
        step = model.number("global_steps")
        self.writer = f"{name}, universal: {pluralize(len(self._refs), 'parameter')}{step_words(step)}"
        self.rank_save = RankSave(model.number("dp_world_size") or 1, step)

    def _read(self, parameter: str, files: Mapping[str, str], stack: ExitStack) -> None:
        """Add a parameter's weights and state; the model's own tensor if the optimizer does not update it."""
        entries: list[tuple[str, Ref]] = []
        known = parameter in self._shapes or self._experts
        if not known and (parameter not in self._module[1] or files.keys() != {_WEIGHTS}):
            folder = os.path.join(_PARAMETERS, parameter)
            what = f"{folder} is of no parameter in {_MODEL}: it is left from another save, move it away"
            self.note_lost(what, folder)
            return
        for slot, name in files.items():
            file = self.open_file(name, stack)
            if file is None:
                continue
            saved = f"{file.container.root}.pt"
            if saved != slot and saved in self._slots:
                self.note_lost(f"{name} was saved as {saved}: it is another state", name)
                continue
            if not known:
                return
            values = file.values
            if slot != _WEIGHTS or "cat_dim" in values:
                self._updated.add(parameter)
            ref = file.graph.root if slot == _STEP else values.get("param", -1)
            own = self._tensor(parameter, slot, file, ref)
            if own is None:
                continue
            if slot == _WEIGHTS:
                self._refs[parameter] = own
            else:
                entries.append((slot.removesuffix(".pt"), own))
            if slot == _STEP:
                self._steps[parameter] = number_of(file, ref)
        if entries:
            self._states.append((parameter, self.builder.mapping(entries)))

    def _compare(self, name: str, weights: Rows, place: str) -> None:
        file, module = self._module
        if name not in module:
            return
        with suppress(MalformedError):
            own = rows(file, module[name])
            different, count = unlike(weights, 0, own, 0, prod(own.shape)) if own.shape == weights.shape else (0, 0)
            self._odd += [place] if different * MOST_ODD > count else []

    def _note_uneven(self, model: ModelState, parameters: Mapping[str, Mapping[str, str]]) -> None:
        for group in model.groups:
            own = {name: parameters[name] for name in group if name in self._updated}
            slots = {slot for there in own.values() for slot in there}
            steps = Counter(self._steps[name] for name in own if name in self._steps)
            common = max(steps, key=lambda step: steps[step], default=0)
            for name, there in own.items():
                for place in (f"{_PARAMETERS}/{name}/{slot}" for slot in sorted(slots - there.keys())):
                    self.note_lost(f"{place} is not there, and others of its group have one", place)
                if (step := self._steps.get(name, common)) != common:
                    place = f"{_PARAMETERS}/{name}/{_STEP}"
                    self.note_lost(f"{place} is of step {step:,g}, and others of its group of {common:,g}", place)

    def _tensor(self, name: str, slot: str, file: RankFile, ref: Ref) -> Ref | None:
        key = name if slot == _WEIGHTS else f"optimizer.state.{name}.{slot.removesuffix('.pt')}"
        try:
            if ref < 0:
                raise MalformedError("there is no parameter in it")
            if file.reader.tensor(ref) is None and slot == _STEP:
                return self.graft(file, ref)
            tensor = rows(file, ref)
        except MalformedError as error:
            self.note_lost(f"{file.name}: {error.what}", file.name)
            return None
        wanted = self._shapes.get(name)
        # A step may be a number in a tensor of any shape. Another state may be a single number.
        like = slot == _WEIGHTS or (slot != _STEP and tensor.shape not in ((), (1,)))
        if like and wanted is not None and tensor.shape != wanted:
            what = f"{quoted(name)} is of the shape {list(tensor.shape)}, in {_MODEL} it is {list(wanted)}"
            self.note_lost(f"{file.name}: {what}", file.name)
            return None
        if slot == _WEIGHTS:
            first, dtype = self._dtype = self._dtype if self._dtype[0] else (file.name, tensor.dtype.name)
            if dtype != tensor.dtype.name:
                what = f"{file.name} is of {tensor.dtype.name}, {first} of {dtype}"
                self.note("odd-dtype", "warning", f"{what}: it is not of one save, or was changed", file.name)
            self._compare(name, tensor, file.name)
        return self.add_rows(key, tensor)

    def _optimizer(self, model: ModelState, stack: ExitStack) -> Ref:
        name = os.path.join(_PARAMETERS, _STATE)
        there = _STATE in self.folder.inner(_PARAMETERS).names()
        file = self.open_file(name, stack) if there else None
        if self._states and not there:
            self.note_lost(f"{name} is not there: the optimizer's groups are missing", name)
        own = self.builder.sequence(())
        if file is not None:
            values = file.values
            groups = list_items(file.graph.nodes[values.get("param_groups", file.graph.root)])
            names = iter((*model.groups, *([] for _ in groups)))
            own = groups_with(self, file, groups, lambda _: next(names))
        return self.builder.mapping([("state", self.builder.mapping(self._states)), ("param_groups", own)])


class WholeModel(NumberedFiles):
    """The file of an uncut model, with its experts' tensors in their places. The optimizer's files are not joined: each
    is kept under its file name in ``optimizer``."""

    format = "deepspeed-union"

    def __init__(self, folder: Folder, step: StepFolder, stack: ExitStack) -> None:
        super().__init__(step.folder)
        names = step.names
        name = whole_file(names)
        file = self.open_as(MODEL, name, (0,), stack)
        if file is None:
            raise self.errors[0] if self.errors else MalformedError(self.problems[0].message, next=RENAME_BACK)
        graph, values = file.graph, file.values
        if "module" not in values or mapping(graph, values["module"]) is None:
            raise MalformedError("it has no module: it is not a file of a model of DeepSpeed", where=name)
        experts = self.numbered(EXPERT, names)
        if not experts and "param_shapes" in values and graph.nodes[values["param_shapes"]] is not None:
            # The 32-bit weights were cut over ranks, and their files are missing.
            what = "it is a part of a DeepSpeed checkpoint"
            raise training_folder(folder) or NotACheckpointError(what, kind="deepspeed", path=folder.path)
        counts = [whole_number(graph, ref) for ref in items_in(graph, values, "num_experts")]
        module = {str(graph.nodes[key]): self.graft(file, ref) for key, ref in mapping(graph, values["module"]) or ()}
        #: The number of an expert, and the shape of one of its tensors.
        self._of_experts: list[tuple[int, tuple[int, ...]]] = []
        self._add_experts(experts, [] if any(map(EXPERT_KEY.search, module)) else counts, module, stack)
        optimizers = self.numbered(EXPERT_OPTIMIZER, names) | self.numbered(OPTIMIZER, names)
        items = []
        for entry, ref in values.items():
            if entry == "module" and experts:
                items.append((entry, self.builder.mapping(module.items())))
            elif entry == "optimizer" and (experts or optimizers):
                items.append((entry, self._optimizers(optimizers, self._writers(file, values, counts), stack)))
            else:
                items.append((entry, self.graft(file, ref)))
        self.build(self.builder.mapping(items))
        done = number_in(graph, values, "global_steps") if "global_steps" in values else None
        self.rank_save = RankSave(number_in(graph, values, "dp_world_size") or 1, done)
        version = str(graph.nodes[values["ds_version"]]) if "ds_version" in values else ""
        partitioned = any(OPTIMIZER.match(name) for name in optimizers.values())
        more = f", {pluralize(len(experts), 'expert')}" if experts else ""
        zero = "with ZeRO" if partitioned else "without ZeRO"
        self.writer = f"{f'DeepSpeed {version}'.rstrip()}, {zero}{more}{step_words(self.rank_save.step)}"
        if partitioned:
            what = "the weights are those in 16 bits: those in 32 bits and the state of the optimizer are not joined"
            self.note("optimizer", "warning", f"{what}, and stay flat vectors under 'optimizer'")
        elif optimizers:
            self.note("optimizer", "note", "the state of the optimizer is not joined: each file is under 'optimizer'")

    def _add_experts(
        self, experts: Mapping[tuple[int, ...], str], counts: Sequence[int], module: dict[str, Ref], stack: ExitStack
    ) -> None:
        """Add the experts' tensors to ``module``; ``counts`` has the number of experts in each expert layer."""
        by_layer = next(iter(experts.values()), "").startswith("layer_")
        for layer, count in enumerate(counts):
            there = {number for other, number, _ in experts if other == layer or not by_layer}
            for number in [number for number in range(min(count, MAX_RANKS)) if number not in there]:
                name = f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"
                self.note_lost(f"{name} is not there: layer {layer} has {pluralize(count, 'expert')}", name)
        for numbers, name in experts.items():
            if by_layer and numbers[0] >= len(counts):
                self.note_lost(f"{name} is of no layer of experts that {_MODEL} names", name)
            file = self.open_as(EXPERT, name, numbers, stack)
            for key, ref in file.values.items() if file is not None else ():
                expert = EXPERT_KEY.search(key)
                if expert is not None and int(expert[1]) != numbers[1]:
                    self.note_lost(f"{name} has {quoted(key)}: it is another expert's file", name)
                if key in module:
                    self.note_lost(f"{quoted(key)} is in {name} and in another file", name)
                elif file is not None:
                    module[key] = self.graft(file, ref)
                    self._of_experts += [(numbers[1], tensor.shape)] if (tensor := file.reader.tensor(ref)) else []

    def _writers(self, file: RankFile, values: Mapping[str, Ref], counts: Sequence[int]) -> int:
        """Return how many ranks have a file of the optimizer: all of them with ZeRO, else one for each share of the
        experts, whose optimizer has the parameters in the model file, too; 0 if unknown."""
        graph = file.graph
        world = number_in(graph, values, "dp_world_size")
        listed = listed_in(file, values)
        if listed is None:
            return world
        buffers = {graph.nodes[ref] for ref in items_in(graph, values, "buffer_names")}
        module = values_of(graph, values["module"]).items()
        outside = [tensor.shape for name, ref in module if name not in buffers and (tensor := file.reader.tensor(ref))]
        for ranks in range(1, min(world, MAX_RANKS) + 1):
            share = max(counts, default=0) // ranks
            own = [*outside, *(shape for number, shape in self._of_experts if number < share)]
            if without_tensors([listed], own) == (0, 0):
                return ranks
        return 0

    def _optimizers(self, files: Mapping[tuple[int, ...], str], ranks: int, stack: ExitStack) -> Ref:
        """Build a mapping from file name to that file's part of the optimizer; ``ranks`` is 0 if unknown."""
        parts = []
        same: list[tuple[str, tuple[int, ...], Sequence[Rows]]] = []
        for numbers, name in files.items():
            file = self.open_as(EXPERT_OPTIMIZER if EXPERT_OPTIMIZER.match(name) else OPTIMIZER, name, numbers, stack)
            if file is not None:
                same.append((name, tuple(record.crc or 0 for record in file.container.records() if record.key), ()))
                entry = "optimizer" if "optimizer" in file.values else "optimizer_state_dict"
                parts.append((name.removesuffix(".pt"), self.graft(file, file.values[entry])))
        self.note_same(same)
        there = {numbers[0]: name for numbers, name in files.items()}
        count = min(max([ranks, *(number + 1 for number in there)]), MAX_RANKS)
        like = next(iter(files.values()), "expp_rank_0_mp_rank_00_optim_states.pt")
        self.note_ranks(pluralize(count, "rank"), range(count), there, partial(name_like, like))
        if not ranks:
            what = "nothing says how many ranks saved the optimizer: whether all its files are there is not checked"
            self.note(UNCHECKED, "note", what)
        return self.builder.mapping(parts)


def _parameters(folder: Folder) -> dict[str, dict[str, str]]:
    inner = folder.inner(_PARAMETERS)
    parameters = {}
    for name in sorted(inner.names()):
        files = [file for file in inner.inner(name).names() if file.endswith(".pt")]
        files.sort(key=lambda file: (file != _WEIGHTS, file))
        parameters[name] = {file: os.path.join(_PARAMETERS, name, file) for file in files}
    return {name: files for name, files in parameters.items() if files}


def _universal_folder(folder: Folder, names: Collection[str]) -> Folder | None:
    """Return the folder of a universal checkpoint: ``folder``, or the one that its latest file names; None if none."""
    tag = read_tag(folder, _LATEST) if _LATEST in names else ""
    folder = folder.inner(tag) if tag and tag in names else folder
    inside = folder.names()
    if _PARAMETERS not in inside:
        return None
    models = [name for name in inside if MODEL.match(name)]
    # Several model files mean that the model itself is cut.
    return folder if models == [_MODEL] and folder.inner(_PARAMETERS).names() else None


def _is_pipeline(names: Collection[str]) -> bool:
    layers = [match for match in map(LAYER.match, names) if match]
    others = any(EXPERT.match(name) or RANK_MODEL.match(name) for name in names)
    return bool(layers) and all(match[2] is None for match in layers) and not others


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder holds a checkpoint of such whole tensors, or names a step folder that does."""
    return _opener(folder, names) is not None


def read(folder: Folder) -> tuple[FolderSource, RankFiles]:
    """Open a DeepSpeed folder of whole tensors. Raises NotACheckpointError if optimizer partitions are missing,
    MalformedError if the files cannot be read."""
    names = folder.names()
    universal, step, opener = _universal_folder(folder, names), step_folder(folder, names), _opener(folder, names)
    if opener is None:
        raise ChangedError("its files changed while they were read", path=folder.path, next="try again")
    with opening(folder.path, "it is damaged: get the folder again") as stack:
        container = opener(stack)
    others = other_steps(step) if step is not None and not universal else []
    if step is not None and others:
        container.problems.append(other_steps_note(step.folder.path, "latest", others))
    return FolderSource(folder.path, container.files, folder=container.folder.path), container


def _opener(folder: Folder, names: Collection[str]) -> Callable[[ExitStack], RankFiles] | None:
    if universal := _universal_folder(folder, names):
        return partial(Universal, universal)
    step = step_folder(folder, names)
    if step is not None and _is_pipeline(step.names):
        return partial(Pipeline, step.folder, step.names)
    return partial(WholeModel, folder, step) if step is not None and whole_file(step.names) else None
