"""DeepSpeed folders whose files hold whole tensors: universal checkpoints, pipeline layers, uncut models and experts.

The checkpoint is the union of the files. Sources: DeepSpeed, ``checkpoint/ds_to_universal.py``,
``runtime/pipe/module.py`` (``save_state_dict``, ``ckpt_layer_path``), ``runtime/engine.py`` (``_save_moe_checkpoint``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import prod
from typing import Final

from ...base.errors import ChangedError, MalformedError, NotACheckpointError
from ...base.findings import UNCHECKED
from ...base.steps import RENAME_BACK
from ...base.text import join_limited, pluralize, quoted, step_words
from ...checkpoint.container import RankSave
from ...checkpoint.objects import list_items, mapping, values_of
from ...files.folders import Folder
from ...files.sources import FolderSource
from ...pickles.nodes import Ref
from ..folders import opening, other_steps_problem, read_tag
from ..joined.container import RankFile, RankFiles, rows, whole_tensor
from ..names.deepspeed import (
    EXPERT,
    EXPERT_OPTIMIZER,
    LAYER,
    MODEL,
    OPTIMIZER,
    RANK_MODEL,
    other_steps,
    step_folder,
    whole_file,
    whole_number,
)
from ..names.ranks import MAX_RANKS, StepFolder
from ..names.training import training_folder
from ..pieces.chunks import Rows
from .folder import groups_with, name_like, state_dict_with
from .numbered import EXPERT_KEY, NumberedFiles, Pipeline, listed_in, without_tensors
from .states import MOST_UNLIKE, OF_PARTS, ModelState, number_of, read_model, unlike

_LATEST: Final = "latest_universal"
#: Holds one folder per parameter, with one file per state.
_PARAMETERS: Final = "zero"
_STATE: Final = "optimizer_state.pt"
_WEIGHTS: Final = "fp32.pt"
#: The conversion adds this to the model file of a model with experts; the expert parameters are not in that file.
_EXPERTS: Final = "expert_parameter_patterns"
_STEP: Final = "step.pt"
_EXPERT_OPTIMIZER: Final = "expp_rank_0_mp_rank_00_optim_states.pt"
_MODEL: Final = "mp_rank_00_model_states.pt"
#: Facts in a model file: the number of ranks, and the steps done.
_RUN: Final = ("dp_world_size", "global_steps")
#: The keys that may hold the optimizer's state in its files.
_OF_OPTIMIZER: Final = ("optimizer", "optimizer_state_dict")


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
        information = values_of(file.graph, model.values.get("universal_checkpoint_info", file.graph.root))
        self._experts = _EXPERTS in information
        refs: dict[str, Ref] = {}
        states: list[tuple[str, Ref]] = []
        parameters = _parameters(folder)
        self._slots = {slot for files in parameters.values() for slot in files}
        self._steps: dict[str, float] = {}
        #: Parameters that the optimizer has updated; the others were copied from the model.
        self._updated: set[str] = set()
        #: The first file with each dtype.
        self._dtypes: dict[str, str] = {}
        #: Weight files that were compared with the model, and those that are not its weights before rounding.
        self._compared, self._odd = 0, list[str]()
        for name, files in parameters.items():
            self._read(name, files, stack, refs, states)
        self.note_unlike(self._odd, self._compared, _MODEL)
        self._note_uneven(model, parameters)
        absent = [name for name in self._shapes if name not in refs]
        if absent:
            names = join_limited([quoted(name) for name in absent], most=3)
            self.note_lost(f"{names}: {_PARAMETERS}/{absent[0]}/{_WEIGHTS} is not there or cannot be read")
        items = []
        for name, ref in model.values.items():
            if name == "module":
                items.append((name, state_dict_with(self, file, model, refs, in_parts=False)))
            elif name == "optimizer":
                items.append((name, self._optimizer(model, states, stack)))
            elif name not in OF_PARTS:
                items.append((name, self.graft(file, ref)))
        self.build(self.builder.mapping(items))
        name = f"DeepSpeed {model.save.get('ds_version', '')}".rstrip()
        step = model.number("global_steps")
        self.writer = f"{name}, universal: {pluralize(len(refs), 'parameter')}{step_words(step)}"
        self.rank_save = RankSave(model.number("dp_world_size") or 1, step)

    def _read(
        self,
        parameter: str,
        files: Mapping[str, str],
        stack: ExitStack,
        refs: dict[str, Ref],
        states: list[tuple[str, Ref]],
    ) -> None:
        """Add a parameter's weights to ``refs`` and its optimizer state to ``states``. If the optimizer does not update
        it, the model's own tensor is used: the file has a copy of that."""
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
            values = values_of(file.graph, file.graph.root)
            if slot != _WEIGHTS or "cat_dim" in values:
                self._updated.add(parameter)
            ref = file.graph.root if slot == _STEP else values.get("param", -1)
            own = self._tensor(parameter, slot, file, ref)
            if own is None:
                continue
            if slot == _WEIGHTS:
                refs[parameter] = own
            else:
                entries.append((slot.removesuffix(".pt"), own))
            if slot == _STEP:
                self._steps[parameter] = number_of(file, ref)
        if entries:
            states.append((parameter, self.builder.mapping(entries)))

    def _compare(self, name: str, weights: Rows, place: str) -> None:
        file, module = self._module
        if name not in module:
            return
        with suppress(MalformedError):
            own = rows(file, module[name])
            different, count = unlike(weights, 0, own, 0, prod(own.shape)) if own.shape == weights.shape else (0, 0)
            self._compared += count > 0
            self._odd += [place] if different * MOST_UNLIKE > count else []

    def _note_uneven(self, model: ModelState, parameters: Mapping[str, Mapping[str, str]]) -> None:
        """Report parameters of one group whose states or steps differ, although one step updates them together."""
        for group in model.groups:
            own = {name: parameters[name] for name in group if name in self._updated}
            slots = {slot for there in own.values() for slot in there}
            steps = Counter(self._steps[name] for name in own if name in self._steps)
            common = steps.most_common(1)[0][0] if steps else 0
            for name, there in own.items():
                for place in (f"{_PARAMETERS}/{name}/{slot}" for slot in sorted(slots - there.keys())):
                    self.note_lost(f"{place} is not there, and others of its group have one", place)
                if self._steps.get(name, common) != common:
                    place = f"{_PARAMETERS}/{name}/{_STEP}"
                    what = f"{place} is of step {self._steps[name]:,g}, and others of its group of {common:,g}"
                    self.note_lost(what, place)

    def _tensor(self, name: str, slot: str, file: RankFile, ref: Ref) -> Ref | None:
        """Add a whole tensor from a file; report a problem and return None if it cannot be read."""
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
        if slot == _WEIGHTS and self._dtypes.setdefault(tensor.dtype.name, file.name) == file.name:
            dtype = next(iter(self._dtypes))
            if dtype != tensor.dtype.name:
                what = f"{file.name} is of {tensor.dtype.name}, {self._dtypes[dtype]} of {dtype}"
                self.note("odd-dtype", "warning", f"{what}: it is not of one save, or was changed", file.name)
        if slot == _WEIGHTS:
            self._compare(name, tensor, file.name)
        return self.add_tensor(key, whole_tensor(tensor))

    def _optimizer(self, model: ModelState, states: list[tuple[str, Ref]], stack: ExitStack) -> Ref:
        name = os.path.join(_PARAMETERS, _STATE)
        there = _STATE in self.folder.inner(_PARAMETERS).names()
        file = self.open_file(name, stack) if there else None
        if states and not there:
            self.note_lost(f"{name} is not there: the optimizer's groups are missing", name)
        groups: Sequence[Ref] = ()
        if file is not None:
            values = values_of(file.graph, file.graph.root)
            groups = list_items(file.graph.nodes[values.get("param_groups", file.graph.root)])
        own = self.builder.sequence(())
        if file is not None:
            names = iter((*model.groups, *([] for _ in groups)))
            own = groups_with(self, file, groups, lambda _: next(names))
        return self.builder.mapping([("state", self.builder.mapping(states)), ("param_groups", own)])


class WholeModel(NumberedFiles):
    """The file of an uncut model, with its experts' tensors in their places. Expert-parallel ranks number the
    optimizer's states, or have flat vectors with ZeRO. These parts are not joined: each is kept under its file name in
    ``optimizer``."""

    format = "deepspeed-union"

    def __init__(self, folder: Folder, step: StepFolder, stack: ExitStack) -> None:
        super().__init__(step.folder)
        names = step.names
        name = whole_file(names)
        file = self.open_as(MODEL, name, (0,), stack)
        if file is None:
            raise self.errors[0] if self.errors else MalformedError(self.problems[0].message, next=RENAME_BACK)
        graph, values = file.graph, values_of(file.graph, file.graph.root)
        if "module" not in values or mapping(graph, values["module"]) is None:
            raise MalformedError("it has no module: it is not a file of a model of DeepSpeed", where=name)
        experts = self.numbered(EXPERT, names)
        if not experts and graph.nodes[values.get("param_shapes", graph.root)] is not None and "param_shapes" in values:
            # The 32-bit weights were cut over ranks, and their files are missing.
            what = "it is a part of a DeepSpeed checkpoint"
            raise training_folder(folder) or NotACheckpointError(what, kind="deepspeed", path=folder.path)
        counts = [whole_number(graph, ref) for ref in list_items(graph.nodes[values.get("num_experts", graph.root)])]
        module = {str(graph.nodes[key]): self.graft(file, ref) for key, ref in mapping(graph, values["module"]) or ()}
        #: The number of an expert, and the shape of one of its tensors.
        self._of_experts: list[tuple[int, tuple[int, ...]]] = []
        inside = any(map(EXPERT_KEY.search, module))
        self._add_experts(experts, [] if inside else counts, module, stack)
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
        world, done = (whole_number(graph, values[name]) if name in values else 0 for name in _RUN)
        self.rank_save = RankSave(world or 1, done if "global_steps" in values else None)
        version = str(graph.nodes[values["ds_version"]]) if "ds_version" in values else ""
        partitioned = any(OPTIMIZER.match(name) for name in optimizers.values())
        more = f", {pluralize(len(experts), 'expert')}" if experts else ""
        zero = "with ZeRO" if partitioned else "without ZeRO"
        self.writer = f"{f'DeepSpeed {version}'.rstrip()}, {zero}{more}{step_words(self.rank_save.step)}"
        if partitioned:
            what = (
                "the weights are those in 16 bits: the weights in 32 bits and the state of the optimizer are cut over"
                f" groups of ranks, and stay flat vectors under 'optimizer' ({pluralize(len(optimizers), 'file')})"
            )
            self.note("optimizer", "warning", what)
        elif optimizers:
            parts = pluralize(len(optimizers), "part")
            what = f"the state of the optimizer is not joined: {parts} under 'optimizer', by the names of the files"
            self.note("optimizer", "note", what)

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
            for key, ref in values_of(file.graph, file.graph.root).items() if file is not None else ():
                expert = EXPERT_KEY.search(key)
                if expert is not None and int(expert[1]) != numbers[1]:
                    self.note_lost(f"{name} has {quoted(key)}: it is another expert's file", name)
                if key in module:
                    self.note_lost(f"{quoted(key)} is in {name} and in another file", name)
                elif file is not None:
                    module[key] = self.graft(file, ref)
                    tensor = file.reader.tensor(ref)
                    self._of_experts += [(numbers[1], tensor.shape)] if tensor else []

    def _writers(self, file: RankFile, values: Mapping[str, Ref], counts: Sequence[int]) -> int:
        """Return how many ranks have a file of the optimizer: all of them with ZeRO, else one for each share of the
        experts, whose optimizer has the parameters in the model file, too; 0 if unknown."""
        graph = file.graph
        world = whole_number(graph, values["dp_world_size"]) if "dp_world_size" in values else 0
        listed = listed_in(file, values)
        if listed is None:
            return world
        buffers = {graph.nodes[ref] for ref in list_items(graph.nodes[values.get("buffer_names", graph.root)])}
        module = values_of(graph, values["module"]).items()
        outside = [tensor.shape for name, ref in module if name not in buffers and (tensor := file.reader.tensor(ref))]
        for ranks in range(1, min(world, MAX_RANKS) + 1):
            share = max(counts, default=0) // ranks
            own = [*outside, *(shape for number, shape in self._of_experts if number < share)]
            if without_tensors([listed], own)[1:] == (0, 0):
                return ranks
        return 0

    def _optimizers(self, files: Mapping[tuple[int, ...], str], ranks: int, stack: ExitStack) -> Ref:
        """Build a mapping from file name to that file's part of the optimizer, saved by that many ranks (0 if
        unknown)."""
        parts = []
        same: list[tuple[str, Hashable, Sequence[Rows]]] = []
        for numbers, name in files.items():
            file = self.open_as(EXPERT_OPTIMIZER if EXPERT_OPTIMIZER.match(name) else OPTIMIZER, name, numbers, stack)
            if file is not None:
                sums = tuple(record.crc or 0 for record in file.container.records() if record.key)
                same.append((name, any(sums) and sums, ()))
                values = values_of(file.graph, file.graph.root)
                own = next(values[entry] for entry in _OF_OPTIMIZER if entry in values)
                parts.append((name.removesuffix(".pt"), self.graft(file, own)))
        self.note_same(same)
        there = {numbers[0]: name for numbers, name in files.items()}
        count = min(max([ranks, *(number + 1 for number in there)]), MAX_RANKS)
        like = next(iter(files.values()), _EXPERT_OPTIMIZER)
        self.note_ranks(pluralize(count, "rank"), range(count), there, partial(name_like, like))
        if not ranks:
            what = "nothing says how many ranks saved the optimizer: whether all its files are there is not checked"
            self.note(UNCHECKED, "note", what)
        return self.builder.mapping(parts)


def _parameters(folder: Folder) -> dict[str, dict[str, str]]:
    """Return the files of each parameter, weights first: paths relative to the folder, by state file name."""
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
    """Return whether the files are pipeline layers without tensor parallelism, experts or partitions."""
    layers = [match for match in map(LAYER.match, names) if match]
    others = any(EXPERT.match(name) or RANK_MODEL.match(name) for name in names)
    return bool(layers) and all(match[2] is None for match in layers) and not others


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder holds a checkpoint of such whole tensors, or names a step folder that does."""
    step = step_folder(folder, names)
    whole = step is not None and (_is_pipeline(step.names) or bool(whole_file(step.names)))
    return whole or _universal_folder(folder, names) is not None


def read(folder: Folder) -> tuple[FolderSource, Universal | Pipeline | WholeModel]:
    """Open a DeepSpeed folder of whole tensors. Raises NotACheckpointError if optimizer partitions are missing,
    MalformedError if the files cannot be read."""
    path, names = folder.path, folder.names()
    universal, step = _universal_folder(folder, names), step_folder(folder, names)
    with opening(path, "it is damaged: get the folder again") as stack:
        container: Universal | Pipeline | WholeModel
        if universal:
            container = Universal(universal, stack)
        elif step is not None and _is_pipeline(step.names):
            container = Pipeline(step.folder, step.names, stack)
        elif step is not None and whole_file(step.names):
            container = WholeModel(folder, step, stack)
        else:
            raise ChangedError("its files changed while they were read", path=path, next="try again")
    others = other_steps(step) if step is not None and not universal else []
    if step is not None and others:
        container.problems.append(other_steps_problem(step.folder.path, "latest", others))
    return FolderSource(path, container.files, folder=container.folder.path), container
