"""Folders that training frameworks write for themselves, a part a rank: what is there, and whether all of it is.

They are named, not read: a tensor in them is cut over many files in ways that only the framework knows. Sources:
DeepSpeed (``runtime/engine.py``, ``checkpoint/constants.py``, ``utils/zero_to_fp32.py``), Megatron-LM
(``megatron/training/checkpointing.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from shlex import quote
from typing import Final

from ...base.errors import CkptoolError, NotACheckpointError
from ...base.text import counted, listed, shown
from ...checkpoint.objects import callable_name, elements, mapping
from ...files.sources import open_source
from ...pickles.nodes import Call, Graph, List, Ref
from .. import read_container

_OPTIMIZER: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
_ZERO3: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt\Z")
_MODEL: Final = re.compile(r"mp_rank_(\d+)_model_states\.pt\Z")
#: Of a pipeline; the rank stands in it where a layer is cut over several.
_LAYER: Final = re.compile(r"layer_\d+(?:-model_(\d+))?-model_states\.pt\Z")
_RANK: Final = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?\Z")
_ITERATION: Final = re.compile(r"(?:iter_\d+|release)\Z")
_TAG: Final = re.compile(r"global_step\d+\Z")
#: Bytes of a text that names a step.
_MOST_TAG: Final = 200


def training_folder(path: str) -> NotACheckpointError | None:
    """The error that names a folder of DeepSpeed or Megatron, or None.

    Looks at names, and into one file of each kind.
    """
    names = _names(path)
    found = _deepspeed(path, names) or _megatron(path, names)
    if found is not None:
        return found
    if "latest" in names or "zero_to_fp32.py" in names:
        return _inner(path, names, "latest", _TAG, _deepspeed)
    if "latest_checkpointed_iteration.txt" in names:
        return _inner(path, names, "latest_checkpointed_iteration.txt", _ITERATION, _megatron)
    return None


def _names(path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return frozenset()


def _inner(
    path: str,
    names: Collection[str],
    mark: str,
    pattern: re.Pattern[str],
    named: Callable[[str, Collection[str]], NotACheckpointError | None],
) -> NotACheckpointError | None:
    """The step that the folder says is the latest, or the last one of those that are there."""
    steps = sorted((name for name in names if pattern.match(name)), key=lambda name: (len(name), name))
    tag = _text(os.path.join(path, mark)) if mark in names else ""
    tag = f"iter_{int(tag):07d}" if tag.isascii() and tag.isdigit() and len(tag) < 12 else tag
    step = tag if tag in names else next(reversed(steps), "")
    found = named(os.path.join(path, step), _names(os.path.join(path, step))) if step else None
    if found is not None:
        found.what += f"; the step is {shown(step)}" + (f", one of {len(steps):,}" if len(steps) > 1 else "")
        found.what += f", and {mark} says {shown(tag)}, which is not there" if tag and tag != step else ""
        found.path = path
    return found


def _text(path: str) -> str:
    try:
        source = open_source(path)
    except CkptoolError:
        return ""
    try:
        text = source.read(0, _MOST_TAG).decode("utf-8", "replace").strip()
    finally:
        source.close()
    return text if text == os.path.basename(text) else ""


def _deepspeed(path: str, names: Collection[str]) -> NotACheckpointError | None:
    optimizer = _ranks(_OPTIMIZER, names)
    zero3, models = _ranks(_ZERO3, names), _ranks(_MODEL, names)
    layers = [name for name in names if _LAYER.match(name)]
    if not (optimizer or zero3 or (models and (layers or len(models) == len(names)))):
        return None
    told = _facts(path, (*optimizer.values(), *zero3.values(), *models.values()))
    stage = 3 if zero3 else told.get("zero_stage", 0)
    data, model = (
        max([told.get(fact, 0), *(rank[place] + 1 for rank in (*optimizer, *zero3) if len(rank) > place)])
        for fact, place in (("dp_world_size", 0), ("mp_world_size", 1))
    )
    model = max(model, max((rank[0] + 1 for rank in models), default=0), 1)
    data = max(data, told.get("partition_count", 0), 1)
    grid = [(one, two) for two in range(model) for one in range(data)] if data * model <= 1 << 16 else []
    gone = []
    if optimizer:
        gone += [
            f"the optimizer state of rank {one}" + _of(two, model) for one, two in grid if (one, two) not in optimizer
        ]
    if zero3:
        gone += [f"the model state of rank {one}" + _of(two, model) for one, two in grid if (one, two) not in zero3]
    elif models:
        gone += [f"mp_rank_{number:02d}_model_states.pt" for number in range(model) if (number,) not in models]
    else:
        gone.append("the model states (mp_rank_00_model_states.pt)")
    kind = f"ZeRO stage {stage}" if stage else "ZeRO stage 1 or 2" if optimizer else "without ZeRO"
    what = f"it is a DeepSpeed checkpoint, {kind}, of {counted(data, 'data-parallel rank')}"
    what += f" x {counted(model, 'pipeline- and model-parallel rank' if layers else 'model-parallel rank')}" * (
        model > 1
    )
    what += _written(told)
    parts = [(len(optimizer), "optimizer file"), (len(zero3) or len(models), "model file"), (len(layers), "layer file")]
    what += f": {listed([counted(number, noun) for number, noun in parts if number])}"
    what += f"; missing: {listed(gone)}" if gone else ", all there"
    above, tag = os.path.split(os.path.normpath(path))
    tool = (
        f"make one file of it: python -m deepspeed.utils.zero_to_fp32 {quote(above or os.curdir)} OUT -t {quote(tag)}"
    )
    each = f"its files: ckptool inspect {quote(os.path.join(path, '*.pt'))}"
    tool = tool if (optimizer or zero3) and not gone and model == 1 else ""
    if len(models) == 1 and model == 1 and not zero3 and not layers:
        # Up to stage 2 one file has all the weights, as they were trained: in bfloat16 or float16, mostly.
        whole = os.path.join(path, *models.values())
        each = f"the weights as they were trained: ckptool inspect {quote(whole)}"
    return NotACheckpointError(what, kind="deepspeed", path=path, next="; ".join(filter(None, (tool, each))))


def _of(rank: int, size: int) -> str:
    return f" of mp_rank {rank:02d}" if size > 1 else ""


def _written(told: dict[str, int]) -> str:
    return f", step {told['global_steps']:,}" if "global_steps" in told else ""


def _ranks(pattern: re.Pattern[str], names: Iterable[str]) -> dict[tuple[int, ...], str]:
    """The files of a kind by their ranks. Ranks of a million are no ranks."""
    found = {}
    for name in names:
        match = pattern.match(name)
        if match and all(len(group or "") < 7 for group in match.groups()):
            found[tuple(int(group) for group in match.groups() if group is not None)] = name
    return found


#: Numbers that a file of DeepSpeed holds, at the root or within the optimizer's state.
_FACTS: Final = ("zero_stage", "partition_count", "dp_world_size", "mp_world_size", "global_steps")


def _facts(path: str, files: Iterable[str]) -> dict[str, int]:
    """What the first file of each kind says of the run; nothing where it cannot be read."""
    told: dict[str, int] = {}
    seen: set[str] = set()
    for file in files:
        kind = re.sub(r"\d+", "", file)
        if kind in seen:
            continue
        seen.add(kind)
        try:
            source = open_source(os.path.join(path, file))
        except CkptoolError:
            continue
        try:
            graph = read_container(source).graph
        except CkptoolError:
            continue
        finally:
            source.close()
        for ref in (graph.root, *_values(graph, graph.root, ("optimizer_state_dict",)).values()):
            for name, value in _values(graph, ref, _FACTS).items():
                number = _number(graph, value)
                if 0 < number < 1 << 20:
                    told[name] = max(told.get(name, 0), number)
    return told


def _values(graph: Graph, ref: Ref, names: Collection[str]) -> dict[str, Ref]:
    items = mapping(graph, ref) or []
    return {str(graph.nodes[key]): value for key, value in items if graph.nodes[key] in names}


def _number(graph: Graph, ref: Ref) -> int:
    """A number, the largest of a list (DeepSpeed has a partition count for each group), or the value of an enum's
    member, which is pickled as a call of its class: the stage of ZeRO is one."""
    node = graph.nodes[ref]
    inner = node.items if isinstance(node, List) else (ref,)
    if isinstance(node, Call) and callable_name(graph, node.func) == "deepspeed.runtime.zero.config.ZeroStageEnum":
        inner = elements(graph.nodes[node.args])[:1]
    return max((value for item in inner if type(value := graph.nodes[item]) is int), default=0)


def _megatron(path: str, names: Collection[str]) -> NotACheckpointError | None:
    if ".metadata" in names:
        return None  # the distributed format of newer versions is that of torch
    ranks = _ranks(_RANK, names)
    if not ranks or not any(os.path.isdir(os.path.join(path, name)) for name in ranks.values()):
        return None
    length = max(map(len, ranks))
    sizes = [max(rank[place] + 1 for rank in ranks if len(rank) > place) for place in range(length)]
    total = 1
    for size in sizes:
        total *= size
    gone = []
    if total <= 1 << 16:
        every: list[tuple[int, ...]] = [()]
        for size in sizes:
            every = [(*rank, number) for rank in every for number in range(size)]
        gone = [_rank_name(rank) for rank in every if rank not in ranks]
    empty = [
        name for name in sorted(ranks.values()) if not any(_is_part(file) for file in _names(os.path.join(path, name)))
    ]
    words = [f"{size} {what}-parallel" for size, what in zip(sizes, ("tensor", "pipeline", "expert"))]
    what = f"it is a Megatron-LM checkpoint of {listed(words)} ranks: {len(ranks):,} of {total:,} folders"
    what += f"; missing: {listed(gone)}" if gone else ""
    what += f"; without a file of weights: {listed(empty)}" if empty else ""
    what += "" if gone or empty else ", all there"
    tool = "" if gone or empty else "tools/checkpoint/convert.py of Megatron-LM makes one of it"
    each = f"its files: ckptool inspect {quote(os.path.join(path, '*/*.pt'))}"
    return NotACheckpointError(what, kind="megatron", path=path, next="; ".join(filter(None, (tool, each))))


def _rank_name(rank: tuple[int, ...]) -> str:
    return "mp_rank_" + "_".join(f"{number:0{2 if place == 0 else 3}d}" for place, number in enumerate(rank))


def _is_part(name: str) -> bool:
    return name in ("model_optim_rng.pt", "model_rng.pt", "model_states.pt")
