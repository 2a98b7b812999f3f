"""DeepSpeed files with numbers in their names, whose content must be what the name says; and pipelines made of them.

A pipeline without partitions, and without tensor parallelism, has a file for each layer. Where no file names the
parameters, the number and shapes of those that the optimizers list tell whether files are missing. Sources: DeepSpeed,
``runtime/pipe/module.py`` (``save_state_dict``, ``ckpt_layer_path``); torch/optim (``Optimizer.state_dict``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, TypeAlias

from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, quoted, step_words, words
from ...checkpoint.container import RankSave
from ...checkpoint.objects import list_items, mapping, values_of
from ...files.folders import Folder
from ...pickles.nodes import Ref
from ..joined.container import RankFile, RankFiles, rows
from ..names.deepspeed import EXPERT, EXPERT_OPTIMIZER, LAYER, MODEL, OPTIMIZER, whole_number
from ..names.ranks import MAX_RANKS, by_number
from ..pieces.copies import is_one_value
from .states import OF_PARTS, base_optimizer, group_states, parameter_shapes

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


class Lacking(NamedTuple):
    """How many listed parameters of each shape have no tensor, and how many in all. ``spare`` counts the tensors that
    are not listed, such as buffers and frozen parameters."""

    shapes: Counter[Shape]
    number: int
    spare: int


def listed_in(file: RankFile, values: Mapping[str, Ref]) -> Listed | None:
    """Return the parameters that the entry ``optimizer`` of a file lists; None if it has none, or flat vectors."""
    graph = file.graph
    own = values_of(graph, values["optimizer"]) if "optimizer" in values else {}
    if not own or own.keys() & _FLAT:
        return None
    base = own if {"state", "param_groups"} <= own.keys() else base_optimizer(graph, own)
    groups = list_items(graph.nodes[base["param_groups"]]) if base else ()
    params = [values_of(graph, group).get("params", -1) for group in groups]
    if not params or -1 in params:
        return None
    shapes = []
    for state in group_states(graph, base).values():
        ref = next((state[slot] for slot in _LIKE_PARAMETER if slot in state), -1)
        tensor = file.reader.tensor(ref) if ref >= 0 else None
        if tensor is not None:
            _, _, source, begin = rows(file, ref)
            constant = is_one_value(source, begin, tensor.own_bytes, tensor.own_bytes // max(tensor.numel, 1))
            shapes.append((tensor.shape, 0 if constant else file.container.stored(tensor.storage).crc or 0))
    return Listed(sum(len(list_items(graph.nodes[ref])) for ref in params), shapes)


def without_tensors(every: Iterable[Listed], there: Sequence[Shape]) -> Lacking:
    """Return the listed parameters that are not among the tensors that are there. The copies of a tied parameter on
    several stages count once: they have equal states."""
    wanted: Counter[Shape] = Counter()
    seen: set[tuple[Shape, int]] = set()
    number = 0
    for listed in every:
        own = [item for item in listed.shapes if not item[1] or item not in seen]
        wanted.update(shape for shape, _ in own)
        number += len(own) + listed.number - len(listed.shapes)
        seen.update(own)
    shapes = wanted - Counter(there)
    lost = max(shapes.total(), number - len(there))
    return Lacking(shapes, lost, len(there) - number + lost)


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
    values = values_of(file.graph, file.graph.root)
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
                for key, ref in values_of(file.graph, file.graph.root).items():
                    items[f"{number}.{key}"] = self.graft(file, ref)
                    tensor = file.reader.tensor(ref)
                    if tensor is not None:
                        shapes[f"{number}.{key}"] = tensor.shape
        if not items and self.errors:
            raise self.errors[0]
        root: list[tuple[str, Ref]] = [("module", self.builder.mapping(items.items()))]
        opened = [self.open_as(MODEL, name, (number,), stack) for number, name in models.items()]
        stages = [file for file in opened if file is not None]
        self._note_lost(layers, shapes, stages)
        ranks, steps = len(models), dict[int, str]()
        for stage in stages:
            graph, values = stage.graph, values_of(stage.graph, stage.graph.root)
            ranks = whole_number(graph, values["mp_world_size"]) if "mp_world_size" in values else ranks
            if "global_steps" in values:
                steps.setdefault(whole_number(graph, values["global_steps"]), stage.name)
            if stage is stages[0]:
                left = {"module", "optimizer", *OF_PARTS}
                root += [(name, self.graft(stage, ref)) for name, ref in values.items() if name not in left]
            if "optimizer" in values and graph.nodes[values["optimizer"]] is not None:
                optimizer = True
        if optimizer:
            what = "the state of the optimizer is not joined: its files number the parameters and do not name them"
            self.note("optimizer", "note", what)
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
        """Report parameters that the stages name or list but no file has, and gaps in the layer numbers. Functions and
        repeated tied layers have no files: a gap is no loss if the stages tell of all tensors."""
        rest = dict(shapes)
        listed: list[Listed] = []
        is_sure = bool(stages)
        for stage in stages:
            values = values_of(stage.graph, stage.graph.root)
            groups = parameter_shapes(stage, values["param_shapes"]) if "param_shapes" in values else ()
            for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
                own = rest.pop(name, None)
                if own != shape and (own is not None or _OF_LAYER.match(name)):
                    there = f"it is of the shape {list(own)}" if own is not None else "it is in no file"
                    what = f"{stage.name} names {quoted(name)} of the shape {list(shape)}, and {there}"
                    self.note_lost(what, stage.name)
            numbered = None if groups else listed_in(stage, values)
            listed += [numbered] if numbered is not None else []
            is_sure = is_sure and bool(groups or numbered)
        after = max(layers, default=-1) + 1
        lost = [number for number in range(after) if number not in layers]
        names = [f"layer_{number:02d}-model_states.pt" for number in (*lost, after)]
        lacking = without_tensors(listed, list(rest.values()))
        if lacking.number:
            of = [f"{count:,} of the shape {list(shape)}" for shape, count in lacking.shapes.items()]
            what = f"the optimizer has {pluralize(lacking.number, 'parameter')} that no layer has"
            what += f" ({join_limited(of, most=3)})" if of else ""
            what += f"; not there: {join_limited(names, most=4)} and later ones"
            self.note_lost(what, names[0])
        elif lost and not is_sure:
            what = f"not there: {join_limited(names[:-1], most=3)}; nothing says whether they had tensors"
            self.note_lost(what, names[0])
        elif lost and lacking.spare:
            what = f"not there: {join_limited(names[:-1], most=3)}; if they had tensors, these were frozen"
            self.note("no-layer", "warning", what, names[0])
