"""Folders that training frameworks write for themselves, one part per rank, with the parts that are missing.

They are named, not read: a tensor in them is split over many files in ways that only the framework knows. Sources:
DeepSpeed (``runtime/engine.py``, ``checkpoint/constants.py``, ``utils/zero_to_fp32.py``), Megatron-LM
(``megatron/training/checkpointing.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from itertools import product
from math import prod
from shlex import quote
from typing import Final, TypeAlias

from ...base.errors import CkptoolError, NotACheckpointError
from ...base.steps import NextStep, command
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.objects import callable_name, list_items, mapping
from ...files.sources import open_source
from ...pickles.nodes import Call, Graph, List, Ref
from .. import read_container

_OPTIMIZER: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
_ZERO3: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt\Z")
_MODEL: Final = re.compile(r"mp_rank_(\d+)_model_states\.pt\Z")
#: A layer of a pipeline; the rank is part of the name where a layer is cut over several.
_LAYER: Final = re.compile(r"layer_\d+(?:-model_(\d+))?-model_states\.pt\Z")
_RANK: Final = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?\Z")
_ITERATION: Final = re.compile(r"(?:iter_\d+|release)\Z")
_TAG: Final = re.compile(r"global_step\d+\Z")
#: Bytes of a file that names a step.
_MAX_TAG: Final = 200
#: The most ranks that are checked for completeness.
_MAX_RANKS: Final = 1 << 16


def training_folder(path: str) -> NotACheckpointError | None:
    """Return the error that names a folder of DeepSpeed or Megatron, or None.

    Reads names, and one file of each kind.
    """
    names = _names(path)
    if error := _deepspeed(path, names) or _megatron(path, names):
        return error
    if "latest" in names or "zero_to_fp32.py" in names:
        return _latest_step(path, names, "latest", _TAG, _deepspeed)
    if "latest_checkpointed_iteration.txt" in names:
        return _latest_step(path, names, "latest_checkpointed_iteration.txt", _ITERATION, _megatron)
    return None


def _names(path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return frozenset()


_Explain: TypeAlias = "Callable[[str, Collection[str]], NotACheckpointError | None]"


def _latest_step(
    path: str, names: Collection[str], tag_file: str, pattern: re.Pattern[str], explain: _Explain
) -> NotACheckpointError | None:
    """Explain the step that ``tag_file`` names as the latest, or the last one that is there."""
    steps = sorted((name for name in names if pattern.match(name)), key=lambda name: (len(name), name))
    tag = _read_tag(os.path.join(path, tag_file)) if tag_file in names else ""
    tag = f"iter_{int(tag):07d}" if tag.isascii() and tag.isdigit() and len(tag) < 12 else tag
    step = tag if tag in names else next(reversed(steps), "")
    error = explain(os.path.join(path, step), _names(os.path.join(path, step))) if step else None
    if error is not None:
        error.what += f"; the step is {quoted(step)}" + (f", one of {len(steps):,}" if len(steps) > 1 else "")
        error.what += f", and {tag_file} says {quoted(tag)}, which is not there" if tag and tag != step else ""
        error.path = path
    return error


def _read_tag(path: str) -> str:
    try:
        with closing(open_source(path)) as source:
            text = source.read(0, _MAX_TAG).decode("utf-8", "replace").strip()
    except CkptoolError:
        return ""
    return text if text == os.path.basename(text) else ""


def _deepspeed(path: str, names: Collection[str]) -> NotACheckpointError | None:
    optimizer, zero3, models = _ranks(_OPTIMIZER, names), _ranks(_ZERO3, names), _ranks(_MODEL, names)
    layers = [name for name in names if _LAYER.match(name)]
    if not (optimizer or zero3 or (models and (layers or len(models) == len(names)))):
        return None
    run = _run_facts(path, (*optimizer.values(), *zero3.values(), *models.values()))
    stage = 3 if zero3 else run.get("zero_stage", 0)
    parts = (*optimizer, *zero3)
    data = max([1, run.get("dp_world_size", 0), run.get("partition_count", 0), *(rank[0] + 1 for rank in parts)])
    model_ranks = (*(rank[1] + 1 for rank in parts), *(rank[0] + 1 for rank in models))
    model = max([1, run.get("mp_world_size", 0), *model_ranks])
    missing = _missing_parts(optimizer, zero3, models, data, model)
    zero = f"ZeRO stage {stage}" if stage else "ZeRO stage 1 or 2" if optimizer else "without ZeRO"
    what = f"it is a DeepSpeed checkpoint, {zero}, of {pluralize(data, 'data-parallel rank')}"
    if model > 1:
        what += f" x {pluralize(model, 'pipeline- and model-parallel rank' if layers else 'model-parallel rank')}"
    what += f", step {run['global_steps']:,}" if "global_steps" in run else ""
    files = [(len(optimizer), "optimizer file"), (len(zero3) or len(models), "model file"), (len(layers), "layer file")]
    what += f": {join_limited([pluralize(number, noun) for number, noun in files if number])}"
    what += f"; missing: {join_limited(missing)}" if missing else ", all there"
    step = NextStep()
    if (optimizer or zero3) and not missing and model == 1:
        parent, tag = os.path.split(os.path.normpath(path))
        script = "python -m deepspeed.utils.zero_to_fp32"
        step += f"make one file of it: {script} {quote(parent or os.curdir)} OUT -t {quote(tag)}; "
    if len(models) == 1 and model == 1 and not zero3 and not layers:
        # Up to stage 2 one file has all the weights, as they were trained: in bfloat16 or float16, mostly.
        whole = os.path.join(path, *models.values())
        step += "the weights as they were trained: " + command("inspect", whole)
    else:
        step += "its files: " + command("inspect", os.path.join(path, "*.pt"))
    return NotACheckpointError(what, kind="deepspeed", path=path, next=step)


#: File names by their ranks.
_Ranks: TypeAlias = dict[tuple[int, ...], str]


def _missing_parts(optimizer: _Ranks, zero3: _Ranks, models: _Ranks, data: int, model: int) -> list[str]:
    """Return which optimizer and model states are missing, in words."""
    grid = [(one, two) for two in range(model) for one in range(data)] if data * model <= _MAX_RANKS else []
    missing = [
        f"the {part} state of rank {one}" + (f" of mp_rank {two:02d}" if model > 1 else "")
        for part, ranks in (("optimizer", optimizer), ("model", zero3))
        for one, two in (grid if ranks else ())
        if (one, two) not in ranks
    ]
    if models and not zero3:
        missing += [f"mp_rank_{number:02d}_model_states.pt" for number in range(model) if (number,) not in models]
    elif not zero3:
        missing.append("the model states (mp_rank_00_model_states.pt)")
    return missing


def _ranks(pattern: re.Pattern[str], names: Iterable[str]) -> _Ranks:
    """Return the files that match a pattern by their ranks; numbers from a million on are not ranks."""
    ranks = {}
    for name in names:
        match = pattern.match(name)
        if match and all(len(group or "") < 7 for group in match.groups()):
            ranks[tuple(int(group) for group in match.groups() if group is not None)] = name
    return ranks


#: Numbers in a file of DeepSpeed, at the root or within the optimizer's state.
_FACTS: Final = ("zero_stage", "partition_count", "dp_world_size", "mp_world_size", "global_steps")


def _run_facts(path: str, files: Iterable[str]) -> dict[str, int]:
    """Return the facts about the run from the first file of each kind that can be read."""
    facts: dict[str, int] = {}
    for file in {re.sub(r"\d+", "", file): file for file in reversed(list(files))}.values():
        try:
            with closing(open_source(os.path.join(path, file))) as source:
                graph = read_container(source).graph
        except CkptoolError:
            continue
        for ref in (graph.root, *_values(graph, graph.root, ("optimizer_state_dict",)).values()):
            for name, value in _values(graph, ref, _FACTS).items():
                if 0 < (number := _number(graph, value)) < 1 << 20:
                    facts[name] = max(facts.get(name, 0), number)
    return facts


def _values(graph: Graph, ref: Ref, names: Collection[str]) -> dict[str, Ref]:
    items = mapping(graph, ref) or []
    return {str(graph.nodes[key]): value for key, value in items if graph.nodes[key] in names}


def _number(graph: Graph, ref: Ref) -> int:
    """Return a number, the largest of a list (DeepSpeed has a partition count for each group), or the value of an enum
    member such as the ZeRO stage, which is pickled as a call of its class."""
    node = graph.nodes[ref]
    inner = node.items if isinstance(node, List) else (ref,)
    if isinstance(node, Call) and callable_name(graph, node.func) == "deepspeed.runtime.zero.config.ZeroStageEnum":
        inner = list_items(graph.nodes[node.args])[:1]
    return max((value for item in inner if type(value := graph.nodes[item]) is int), default=0)


def _megatron(path: str, names: Collection[str]) -> NotACheckpointError | None:
    if ".metadata" in names:
        return None  # the distributed format of newer versions is torch's
    ranks = _ranks(_RANK, names)
    if not ranks or not any(os.path.isdir(os.path.join(path, name)) for name in ranks.values()):
        return None
    length = max(map(len, ranks))
    sizes = [max(rank[place] + 1 for rank in ranks if len(rank) > place) for place in range(length)]
    total = prod(sizes)
    grid = product(*map(range, sizes)) if total <= _MAX_RANKS else ()
    missing = [
        "mp_rank_" + "_".join(f"{number:0{3 if place else 2}d}" for place, number in enumerate(rank))
        for rank in grid
        if rank not in ranks
    ]
    empty = [name for name in sorted(ranks.values()) if not _WEIGHTS & _names(os.path.join(path, name))]
    words = [f"{size} {kind}-parallel" for size, kind in zip(sizes, ("tensor", "pipeline", "expert"))]
    what = f"it is a Megatron-LM checkpoint of {join_limited(words)} ranks: {len(ranks):,} of {total:,} folders"
    what += f"; missing: {join_limited(missing)}" if missing else ""
    what += f"; without a file of weights: {join_limited(empty)}" if empty else ""
    what += "" if missing or empty else ", all there"
    whole = "" if missing or empty else "tools/checkpoint/convert.py of Megatron-LM makes one of it; "
    step = f"{whole}its files: " + command("inspect", os.path.join(path, "*/*.pt"))
    return NotACheckpointError(what, kind="megatron", path=path, next=step)


_WEIGHTS: Final = frozenset(("model_optim_rng.pt", "model_rng.pt", "model_states.pt"))
