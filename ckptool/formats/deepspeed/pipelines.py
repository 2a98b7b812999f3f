"""Pipelines of DeepSpeed without partitions, and without tensor parallelism: a file for each layer.

Source: DeepSpeed, ``runtime/pipe/module.py`` (``save_state_dict``, ``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from ...base.lazy import regex
from ...base.text import join_limited, pluralize, quoted, step_words
from ...checkpoint.container import RankSave
from ...checkpoint.objects import values_of
from ...files.folders import Folder
from ...pickles.nodes import Ref
from ..joined.container import RankFile
from ..names.deepspeed import LAYER, MODEL, OPTIMIZER, whole_number
from ..names.ranks import MAX_RANKS, by_number
from .listed import Listed, listed_in, without_tensors
from .numbered import NumberedFiles
from .states import OF_PARTS, parameter_shapes

#: A parameter name of a numbered layer; tied layers have a key instead of a number.
_OF_LAYER: Final = regex(r"\d+\.")


class Pipeline(NumberedFiles):
    """Pipeline layers: the model is their union, each layer under its number, as PipelineModule names it."""

    format = "deepspeed-union"

    def __init__(self, folder: Folder, names: Collection[str], stack: ExitStack) -> None:
        super().__init__(folder)
        layers, models = self._numbered(LAYER, names), self._numbered(MODEL, names)
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
        absent = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(ranks) if rank not in models]
        if absent:
            self.note_lost(f"{pluralize(ranks, 'stage')} saved it, and {join_limited(absent)} is not there")
        self.build(self.builder.mapping(root))
        self.rank_save = RankSave(ranks, min(steps, default=None))
        step = step_words(self.rank_save.step)
        self.writer = f"DeepSpeed, pipeline: {pluralize(len(layers), 'layer')} of {pluralize(ranks, 'stage')}{step}"

    def _numbered(self, kind: re.Pattern[str], names: Collection[str]) -> dict[int, str]:
        """Return the files of one kind by number, sorted."""
        files, twice = by_number((int(match[1]), name) for name in names if (match := kind.match(name)))
        self.note_twice(twice)
        return dict(sorted(files.items()))

    def _note_lost(
        self, layers: Collection[int], shapes: Mapping[str, tuple[int, ...]], stages: Sequence[RankFile]
    ) -> None:
        """Report parameters that the stages name or list but no file has, and gaps in the layer numbers.

        Functions and repeated tied layers have no files: a gap is no loss if the stages tell of all tensors.
        """
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
