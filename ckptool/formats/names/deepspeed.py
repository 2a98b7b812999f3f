"""The files of a DeepSpeed folder: the rank and content of each, by file name.

Sources: DeepSpeed, ``runtime/engine.py`` (``_get_zero_ckpt_name``, ``_get_ckpt_name``, ``_get_expert_ckpt_name``),
``runtime/pipe/module.py`` (``ckpt_layer_path``), ``checkpoint/constants.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, product
from typing import Final, TypeAlias

from ...base.errors import NotACheckpointError
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.steps import AnyStep, command, suggested_output
from ...base.text import join_limited, pluralize
from ...checkpoint.objects import callable_name, list_items
from ...files.folders import Folder
from ...pickles.nodes import Call, Graph, List, Ref
from ..folders import read_tag
from .numbered import MAX_RANKS, StepFolder, by_number, numbered

OPTIMIZER: Final = regex(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states(?:\.pt)?\Z")
#: With stage 3, each rank writes its own model file.
RANK_MODEL: Final = regex(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states(?:\.pt)?\Z")
MODEL: Final = regex(r"mp_rank_(\d+)_model_states(?:\.pt)?\Z")
#: A pipeline layer; the name includes the rank if the layer is cut over several ranks.
LAYER: Final = regex(r"layer_(\d{1,6})(?:-model_(\d+))?-model_states\.pt\Z")
#: An expert: its layer, which early versions do not name, and its number there.
EXPERT: Final = regex(r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt\Z")
#: Without ZeRO, an expert-parallel rank's optimizer state.
EXPERT_OPTIMIZER: Final = regex(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
#: Every such name has this. Most folders are no DeepSpeed folder, and have thousands of other names.
_STATES: Final = "_states"
_TAG: Final = regex(r"global_step\d+\Z")

#: File names by the numbers in them: data-parallel and model-parallel rank.
_Ranks: TypeAlias = dict[tuple[int, ...], str]


class ZeroFiles(NamedTuple):
    """The files of one step by data-parallel rank. Below stage 3 there is a single model file, under rank 0.
    ``in_parts`` means stage 3, with one model file per rank. ``twice`` lists pairs of files for the same rank, such as
    a float16 file and a later bfloat16 file."""

    optimizers: dict[int, str]
    models: dict[int, str]
    in_parts: bool
    twice: list[tuple[str, str]]


def step_folder(folder: Folder, names: Collection[str]) -> StepFolder | None:
    """Return the folder with DeepSpeed's files: ``folder``, or the folder named by its ``latest`` file; None if
    neither."""
    if _are_files(names):
        return StepFolder(folder, frozenset(names), None)
    tag = read_tag(folder, "latest") if "latest" in names else ""
    inner = folder.inner(tag)
    inside = inner.names() if tag and tag in names else frozenset[str]()
    return StepFolder(inner, inside, folder) if _are_files(inside) else None


def other_steps(step: StepFolder) -> list[str]:
    """Return the other step folders next to the latest one."""
    own = os.path.basename(step.folder.path)
    return [name for name in sorted(step.above.names()) if _TAG.match(name) and name != own] if step.above else []


def _are_files(names: Collection[str]) -> bool:
    states = [name for name in names if _STATES in name]
    (optimizer, zero3, models), others = _by_kind(states), any(map(_is_other, states))
    return bool(optimizer or zero3 or (models and (others or len(models) == len(names))))


def zero_files(names: Collection[str]) -> ZeroFiles | None:
    """Return the files of a model whose partitions can be joined; None if the model is cut differently or not at all.
    Does not check that all files exist."""
    optimizer, zero3, models = _by_kind(names)
    parallel = {rank[-1] for ranks in (optimizer, zero3, models) for rank in ranks}
    if not optimizer or not (zero3 or models) or parallel != {0} or any(map(_is_other, names)):
        return None
    own = zero3 or models
    return ZeroFiles(
        {rank[0]: optimizer[rank] for rank in sorted(optimizer)},
        {rank[0]: own[rank] for rank in sorted(own)},
        bool(zero3),
        [pair for kind in (OPTIMIZER, RANK_MODEL if zero3 else MODEL) for pair in _by_rank(kind, names)[1]],
    )


def whole_file(names: Collection[str]) -> str:
    """Return the model file of a model that is not cut over ranks, or "". Its experts may have their own files. The
    names alone do not tell whether optimizer partitions are missing."""
    optimizer, zero3, models = _by_kind(names)
    cut = zero3 or any(LAYER.match(name) for name in names) or any(rank[1] for rank in optimizer)
    experts = any(EXPERT.match(name) for name in names)
    alone = models.keys() == {(0,)} and not cut and (experts or not optimizer)
    return models[0,] if alone else ""


def explain(folder: Folder, names: Collection[str]) -> NotACheckpointError | None:
    """Return the error that describes a DeepSpeed folder and its missing files by their names; None for any other
    folder."""
    if not _are_files(names):
        return None
    optimizer, zero3, models = _by_kind(names)
    layers = list(filter(None, map(LAYER.match, names)))
    experts = [name for name in names if EXPERT.match(name) or EXPERT_OPTIMIZER.match(name)]
    lacks = "" if zero3 or models else "the model's files, which have the names and shapes of the weights"
    lacks = lacks if optimizer or layers or experts else "the optimizer's files (zero_pp_rank_N_..._optim_states.pt)"
    missing = _missing(optimizer, zero3, models, layers) + _missing_experts(experts) + [lacks] * bool(lacks)
    counts = ((optimizer, "optimizer file"), (zero3 or models, "model file"), (layers, "layer file"))
    files = [pluralize(len(part), noun) for part, noun in (*counts, (experts, "expert file")) if part]
    what = f"it is a DeepSpeed checkpoint of {join_limited(files)}"
    what += f"; missing: {join_limited(missing)}" if missing else ""
    what += "" if lacks else "; its tensors are cut in ways that only the model knows: not joined"
    step: AnyStep = "its files: " + command("inspect", folder.join("*.pt"))
    if zero_files(names) is not None:
        step = "it is read as one: " + command("inspect", folder.path)
    elif len(models) == 1 and not zero3 and not layers and not any(rank[-1] for rank in (*optimizer, *models)):
        # Up to stage 2, the model file has all weights in the training dtype: mostly bfloat16 or float16.
        file, output = folder.join(*models.values()), suggested_output(folder.path, "module", ".pth")
        step = "the weights as they were trained are whole: " + command("extract", file, "module", output=output)
    elif lacks:
        step = "no part of it is of use without the other: get the folder again"
    return NotACheckpointError(what, kind="deepspeed", path=folder.path, next=step)


def _missing(optimizer: _Ranks, zero3: _Ranks, models: _Ranks, layers: Sequence[re.Match[str]]) -> list[str]:
    """Return the parts that other files of the ranks let expect."""
    parts = (*optimizer, *zero3)
    data = max((rank[0] + 1 for rank in parts), default=1)
    model = max([*(rank[-1] for rank in (*parts, *models)), *(int(layer[2] or 0) for layer in layers)], default=0) + 1
    grid = [*product(range(model), range(data))] if data * model <= MAX_RANKS else []
    missing = [
        f"the {part} state of rank {one}" + (f" of mp_rank {two:02d}" if model > 1 else "")
        for part, ranks in (("optimizer", optimizer), ("model", zero3))
        for two, one in (grid if ranks else ())
        if (one, two) not in ranks
    ]
    if models and not zero3:
        missing += [f"mp_rank_{two:02d}_model_states.pt" for two, one in grid if one == 0 and (two,) not in models]
    return missing


def _missing_experts(names: Collection[str]) -> list[str]:
    """Return the names of expert files with lower numbers than another file of the same layer."""
    last: dict[tuple[str, str], int] = {}
    for match in filter(None, map(EXPERT.match, names)):
        layer = f"layer_{match[1]}_" if match[1] else "", match[3]
        last[layer] = max(last.get(layer, 0), int(match[2]))
    files = (
        f"{layer}expert_{number}_mp_rank_{rank}_model_states.pt"
        for (layer, rank), end in last.items()
        for number in range(end)
    )
    return sorted({*islice(files, MAX_RANKS)}.difference(names))


def _by_kind(names: Iterable[str]) -> tuple[_Ranks, _Ranks, _Ranks]:
    """Return the files with partitions of optimizers, the model files of ranks, and the others of models."""
    optimizer, zero3, models = (_by_rank(kind, names)[0] for kind in (OPTIMIZER, RANK_MODEL, MODEL))
    return optimizer, zero3, models


def _by_rank(pattern: re.Pattern[str], names: Iterable[str]) -> tuple[_Ranks, list[tuple[str, str]]]:
    return by_number(numbered(pattern, (name for name in names if name.endswith(".pt"))))


def _is_other(name: str) -> bool:
    return any(kind.match(name) for kind in (LAYER, EXPERT, EXPERT_OPTIMIZER))


def number_in(graph: Graph, values: Mapping[str, Ref], name: str, default: int = 0) -> int:
    """Return the integer in an entry, as ``whole_number`` does; ``default`` if there is no such entry."""
    return whole_number(graph, values[name]) if name in values else default


def items_in(graph: Graph, values: Mapping[str, Ref], name: str) -> Sequence[Ref]:
    """Return the items of the list or tuple in an entry; () without one."""
    return list_items(graph.nodes[values[name]]) if name in values else ()


def whole_number(graph: Graph, ref: Ref) -> int:
    """Return an integer, or 0 for anything else. For a list, return its largest integer: DeepSpeed has one partition
    count per group. For an enum member such as the ZeRO stage, pickled as a call of its class, return its value."""
    node = graph.nodes[ref]
    inner = node.items if isinstance(node, List) else (ref,)
    if isinstance(node, Call) and callable_name(graph, node.func) == "deepspeed.runtime.zero.config.ZeroStageEnum":
        inner = list_items(graph.nodes[node.args])[:1]
    return max((value for item in inner if type(value := graph.nodes[item]) is int), default=0)
