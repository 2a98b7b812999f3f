"""Write a folder of shards with an index, split as huggingface_hub splits (``serialization/_base.py``,
``split_state_dict_into_shards_factory``): keys in order, and a new shard when the next tensor does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ...base.errors import TargetError
from ...base.lazy import regex
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.graph_builder import Builder
from ...checkpoint.survey import StateDict
from ...files.sources import FolderPlan, Plan
from ...pickles.nodes import Dict, Ref
from ...values.elements import tensor_size
from ..losses import Fit, Promise, refuse_emptied, refuse_texts, tensor_facts, whole_state_dict
from ..names.hf import ADAPTER_CONFIG, index_name
from ..safetensors import writer as safetensors_writer
from ..torch import zip_writer

#: The usual stems of file names.
_USUAL: Final = {"safetensors": "model", "torch": "pytorch_model"}
_ADAPTER: Final = "adapter_model"
_UNITS: Final = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_SIZE: Final = regex(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([TGMK]B)?\s*\Z", re.I)


class Item(NamedTuple):
    """A tensor to assign to a shard: its name, its size in bytes, and the storages that hold it."""

    name: str
    size: int
    storages: tuple[str, ...] = ()


def parse_size(text: str) -> int:
    """Return the bytes in a text like ``5GB`` (powers of ten, as in huggingface_hub) or a plain number of bytes. Raises
    TargetError for any other text."""
    match = _SIZE.match(text)
    size = int(float(match[1]) * _UNITS.get((match[2] or "").upper(), 1)) if match else 0
    if size < 1:
        raise TargetError(f"{text!r} is not a size of a shard", next="write it like 5GB, 200MB or 1.5GB")
    return size


def split(items: Iterable[Item], most: int) -> list[list[str]]:
    """Return the tensor names of each shard. A tensor of more than ``most`` bytes gets its own shard. Tensors that
    share a storage go into the same shard."""
    shards: list[dict[str, None]] = []
    current: dict[str, None] = {}
    filled = 0
    shard_of: dict[str, dict[str, None]] = {}
    later: dict[str, list[str]] = {}
    for item, group in _groups(items):
        if group and group in shard_of:
            later.setdefault(group, []).append(item.name)
            continue
        if item.size > most:
            shards.append({item.name: None})
            shard_of[group] = shards[-1]
            continue
        if filled + item.size > most:
            shards.append(current)
            current, filled = {}, 0
        current[item.name] = None
        filled += item.size
        shard_of[group] = current
    if current:
        shards.append(current)
    for group, shard in shard_of.items():  # in the order of their first tensors
        shard.update(dict.fromkeys(later.get(group, ())))
    return [list(shard) for shard in shards]


def _with_parts(checkpoint: Checkpoint, items: Sequence[Item]) -> Sequence[Item]:
    """Return the items with the tensors of each quantized weight one after the other, to go into one shard."""
    if not checkpoint.survey.may_be_quantized:
        return items
    from ...checkpoint.quantized import quantization  # few models are quantized

    by_name, ordered = {item.name: item for item in items}, dict[str, Item]()
    weights = [[part.key for _, part in weight.parts] for weight in quantization(checkpoint).weights]
    whole = {names[0]: names for names in weights if by_name.keys() >= {*names}}
    parts = {name for names in whole.values() for name in names[1:]}
    for item in items:
        for name in whole.get(item.name, () if item.name in parts else (item.name,)):
            group = (f"weight {item.name}",) if item.name in whole else ()
            ordered[name] = by_name[name]._replace(storages=(*by_name[name].storages, *group))
    return list(ordered.values())


def _groups(items: Iterable[Item]) -> list[tuple[Item, str]]:
    """Return each item with one representative storage of all items connected by shared storages, or "" without
    storage."""
    leader: dict[str, str] = {}

    def first(key: str) -> str:
        while leader.setdefault(key, key) != key:
            leader[key] = leader[leader[key]]
            key = leader[key]
        return key

    keyed = [(item, next(iter(item.storages), "")) for item in items]
    for item, key in keyed:
        for other in item.storages[1:]:
            leader[first(other)] = first(key)
    return [(item, first(key) if key else "") for item, key in keyed]


def fit(checkpoint: Checkpoint, target: Target) -> Fit:
    """Return what the shards would lack; their names keep the parts that are standard in the input's names."""
    _, stem, variant = checkpoint.container.shard_layout
    stem = stem if stem in (_ADAPTER, "diffusion_pytorch_model") else ""
    stem = _ADAPTER if checkpoint.companions.get(ADAPTER_CONFIG) else stem
    target = target._replace(stem=stem, variant=variant)
    if target.format == "safetensors":
        return safetensors_writer.fit(checkpoint, target)
    refuse_texts(checkpoint, target)
    storages = checkpoint.survey.reader.storages
    inside = {entry.tensor.storage for entry in checkpoint.survey.tensors_in([target.key]) if entry.tensor.storage}
    return Fit("a folder of shards", target, relayout=True, size=sum(storages[key].nbytes for key in inside))


def plan(checkpoint: Checkpoint, target: Target) -> tuple[FolderPlan, bool]:
    """Plan a folder: shards of at most ``target.shard_size`` bytes, and an index if there are several. Raises the same
    errors as the plan of a single file."""
    whole = whole_state_dict(checkpoint, target, "a folder of shards")
    if target.format == "safetensors":
        safetensors_writer.refuse_unfit(checkpoint, whole)
        return _safetensors(checkpoint, whole, target), True
    return _torch(checkpoint, whole, target), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the facts of each tensor, whichever file holds it."""
    whole = whole_state_dict(checkpoint, target, "a folder of shards")
    if target.format == "safetensors":
        chosen = safetensors_writer.chosen_tensors(checkpoint, whole, target.tied)
        tensors = {named.name: (named.tensor.dtype, named.tensor.shape) for named in chosen.tensors}
        return Promise("hf-safetensors", tensors=tensors)
    reader = checkpoint.survey.reader
    items = [(str(checkpoint.graph.nodes[key]), value) for key, value in whole.items if reader.tensor(value)]
    return Promise("hf-torch", tensors=tensor_facts(items, reader, checkpoint.stored_size))


def _safetensors(checkpoint: Checkpoint, state_dict: StateDict, target: Target) -> FolderPlan:
    chosen = safetensors_writer.chosen_tensors(checkpoint, state_dict, target.tied)
    refuse_emptied(checkpoint, len(chosen.tensors))
    items = [Item(named.name, tensor_size(named.tensor)) for named in chosen.tensors]
    shards = split(_with_parts(checkpoint, items), target.shard_size)
    if len(shards) < 2:
        single = safetensors_writer.plan_chosen(checkpoint, chosen, target.metadata)
        return FolderPlan(((f"{_stem(target)}.safetensors", single),))
    # Every shard names its framework; other texts concern the whole and go into the index.
    own = {name: text for name, text in target.metadata.items() if name == "format"}
    texts = {name: text for name, text in {**chosen.names, **target.metadata}.items() if name != "format"}
    by_name = {named.name: named for named in chosen.tensors}

    def shard_plan(names: Sequence[str], stem: str) -> Plan:
        part = chosen._replace(tensors=[by_name[name] for name in names], names={})
        return safetensors_writer.plan_chosen(checkpoint, part, own)

    return _files(target, "safetensors", shards, shard_plan, sum(item.size for item in items), texts)


def _stem(target: Target) -> str:
    return (target.stem or _USUAL[target.format]) + (target.variant and f".{target.variant}")


def _torch(checkpoint: Checkpoint, state_dict: StateDict, target: Target) -> FolderPlan:
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    entries = {str(graph.nodes[key]): (key, value) for key, value in state_dict.items}
    items = []
    sizes: dict[str, int] = {}
    for name, (_, value) in entries.items():
        tensor = reader.tensor(value)
        if tensor is None:
            continue
        used = {part.storage: reader.storages[part.storage].nbytes for part in reader.parts(tensor) if part.storage}
        items.append(Item(name, sum(used.values()), tuple(key for key, size in used.items() if size)))
        sizes |= used

    def shard_plan(names: Sequence[str], stem: str) -> Plan:
        builder, places = Builder(), dict[Ref, Ref]()
        pairs = [builder.graft(graph, ref, places) for name in names for ref in entries[name]]
        part = builder.graph(builder.add(Dict(pairs)))
        return zip_writer.archive_plan(checkpoint.changed(part, [], needs_relayout=True, root=stem))

    shards = split(_with_parts(checkpoint, items), target.shard_size)
    if len(shards) < 2:
        stem = _stem(target)
        return FolderPlan(((f"{stem}.bin", shard_plan([item.name for item in items], stem)),))
    return _files(target, "bin", shards, shard_plan, sum(sizes.values()), {})


def _files(
    target: Target,
    suffix: str,
    shards: Sequence[Sequence[str]],
    shard_plan: Callable[[Sequence[str], str], Plan],
    total: int,
    texts: Mapping[str, str],
) -> FolderPlan:
    """Return each shard, and the index last. ``shard_plan`` takes tensor names and the stem of the file name."""
    files = []
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        stem = f"{_stem(target)}-{number:05d}-of-{len(shards):05d}"
        files.append((f"{stem}.{suffix}", shard_plan(names, stem)))
        places |= dict.fromkeys(names, f"{stem}.{suffix}")
    index = {"metadata": {"total_size": total, **texts}, "weight_map": places}
    name = index_name(target.stem or _USUAL[target.format], suffix, target.variant)
    files.append((name, Plan((json.dumps(index, indent=2).encode(),))))
    return FolderPlan(tuple(files))
