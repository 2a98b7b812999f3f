"""A folder of shards with an index, split as huggingface_hub splits (``serialization/_base.py``,
``split_state_dict_into_shards_factory``): keys in their order, a new shard where the next tensor does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ...base.errors import TargetError
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.survey import StateDict
from ...files.sources import Files, Plan
from ...pickles.nodes import Dict, Graph, Ref, Style, children, relocated
from ...values.elements import tensor_size
from ..losses import refuse_edited, whole_state_dict
from ..promises import Promise, tensor_facts
from ..safetensors import writer as safetensors_writer
from ..torch import zip_writer
from .files import index_name

#: What files are called where nobody says otherwise.
_USUAL: Final = {"safetensors": "model", "torch": "pytorch_model"}
#: Of torch.save.
_PROTOCOL: Final = 2
_UNITS: Final = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([TGMK]B)?\s*\Z", re.I)


class Item(NamedTuple):
    """A tensor to be put into a shard: its name, its bytes, and the storages that they are in."""

    name: str
    size: int
    storages: tuple[str, ...] = ()


def parse_size(text: str) -> int:
    """``5GB`` in bytes: powers of ten, as huggingface_hub has them, or a plain number of bytes.

    Raises TargetError for anything else.
    """
    found = _SIZE.match(text)
    size = int(float(found[1]) * _UNITS.get((found[2] or "").upper(), 1)) if found else 0
    if size < 1:
        raise TargetError(f"{text!r} is no size of a shard", next="say it like 5GB, 200MB or 1.5GB")
    return size


def split(items: Iterable[Item], most: int) -> list[list[str]]:
    """The names in each shard. A tensor of more than ``most`` bytes is a shard of its own; what shares a storage goes
    where the first of it is."""
    shards: list[dict[str, None]] = []
    current: dict[str, None] = {}
    filled = 0
    place: dict[str, dict[str, None]] = {}
    groups = _groups(items)
    later: dict[str, list[str]] = {}
    for item, group in groups:
        if group and group in place:
            later.setdefault(group, []).append(item.name)
            continue
        if item.size > most:
            shards.append({item.name: None})
            place[group] = shards[-1]
            continue
        if filled + item.size > most:
            shards.append(current)
            current, filled = {}, 0
        current[item.name] = None
        filled += item.size
        place[group] = current
    if current:
        shards.append(current)
    for group, shard in place.items():  # in the order of their first tensors
        shard.update(dict.fromkeys(later.get(group, ())))
    return [list(shard) for shard in shards]


def _groups(items: Iterable[Item]) -> list[tuple[Item, str]]:
    """Each item, and a storage that stands for all that belong together: those of one tensor do. "" for no storage."""
    leader: dict[str, str] = {}

    def first(key: str) -> str:
        while leader.setdefault(key, key) != key:
            leader[key] = leader[leader[key]]
            key = leader[key]
        return key

    found = [(item, next(iter(item.storages), "")) for item in items]
    for item, key in found:
        for other in item.storages[1:]:
            leader[first(other)] = first(key)
    return [(item, first(key) if key else "") for item, key in found]


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Files, bool]:
    """The files of a folder: shards of at most ``target.shard_size`` bytes, an index where there is more than one.

    Raises as the plan of a single file does.
    """
    whole = whole_state_dict(checkpoint, target, "a folder of shards")
    if target.format == "safetensors":
        refuse_edited(checkpoint, lambda: safetensors_writer.losses(checkpoint, whole), "safetensors")
        return _safetensors(checkpoint, whole, target, target.shard_size), True
    return _torch(checkpoint, whole, target, target.shard_size), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """What each tensor is, wherever it comes to be."""
    whole = whole_state_dict(checkpoint, target, "a folder of shards")
    if target.format == "safetensors":
        chosen = safetensors_writer.chosen_tensors(checkpoint, whole, target.tied)
        tensors = {one.name: (one.tensor.dtype, one.tensor.shape) for one in chosen.tensors}
        return Promise("hf-safetensors", tensors=tensors)
    reader = checkpoint.survey.reader
    items = [(str(checkpoint.graph.nodes[key]), value) for key, value in whole.items if reader.tensor(value)]
    return Promise("hf-torch", tensors=tensor_facts(items, reader, checkpoint.stored_size))


def _safetensors(checkpoint: Checkpoint, state_dict: StateDict, target: Target, most: int) -> Files:
    chosen = safetensors_writer.chosen_tensors(checkpoint, state_dict, target.tied)
    items = [Item(named.name, tensor_size(named.tensor)) for named in chosen.tensors]
    shards = split(items, most)
    if len(shards) < 2:
        single = safetensors_writer.file_plan(checkpoint, state_dict, tied=target.tied, metadata=target.metadata)
        return Files(((f"{_stem(target)}.safetensors", single),))
    # Every shard says what it is for; the other texts, which are about the whole, stand in the index.
    own = {name: text for name, text in target.metadata.items() if name == "format"}
    texts = {name: text for name, text in {**chosen.names, **target.metadata}.items() if name != "format"}

    by_name = {named.name: named for named in chosen.tensors}

    def one(names: Sequence[str]) -> Plan:
        part = chosen._replace(tensors=[by_name[name] for name in names], names={})
        return safetensors_writer.plan_chosen(checkpoint, part, own)

    return _files(target, "safetensors", shards, one, sum(item.size for item in items), texts)


def _stem(target: Target) -> str:
    """What the name of each file begins with."""
    return (target.stem or _USUAL[target.format]) + (target.variant and f".{target.variant}")


def _torch(checkpoint: Checkpoint, state_dict: StateDict, target: Target, most: int) -> Files:
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    entries = {str(graph.nodes[key]): (key, value) for key, value in state_dict.items}
    items = []
    total = 0
    seen: set[str] = set()
    for name, (_, value) in entries.items():
        tensor = reader.tensor(value)
        if tensor is None:
            continue
        used = {part.storage: reader.storages[part.storage].nbytes for part in reader.parts(tensor) if part.storage}
        items.append(Item(name, sum(used.values()), tuple(key for key, size in used.items() if size)))
        total += sum(size for key, size in used.items() if key not in seen)
        seen |= used.keys()

    def one(names: Sequence[str], root: str) -> Plan:
        part = _part(graph, [ref for name in names for ref in entries[name]])
        return zip_writer.archive_plan(checkpoint.changed(part, [], needs_relayout=True, root=root))

    shards = split(items, most)
    if len(shards) < 2:
        stem = _stem(target)
        return Files(((f"{stem}.bin", one([item.name for item in items], stem)),))
    numbered = {id(names): _name(_stem(target), number, len(shards)) for number, names in enumerate(shards, 1)}
    return _files(target, "bin", shards, lambda names: one(names, numbered[id(names)]), total, {})


def _part(graph: Graph, pairs: Sequence[Ref]) -> Graph:
    """A dict of some entries of a graph, and nothing that they do not lead to."""
    places: dict[Ref, Ref] = {}
    work = list(reversed(pairs))
    while work:
        ref = work.pop()
        if ref not in places:
            places[ref] = len(places)
            work.extend(reversed(children(graph.nodes[ref])))
    nodes = [relocated(graph.nodes[ref], places) for ref in places]
    return Graph([*nodes, Dict([places[ref] for ref in pairs])], len(nodes), Style(_PROTOCOL))


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}"


def _files(
    target: Target,
    suffix: str,
    shards: Sequence[Sequence[str]],
    one: Callable[[Sequence[str]], Plan],
    total: int,
    texts: Mapping[str, str],
) -> Files:
    """Each shard, and the index last."""
    files = []
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"{_name(_stem(target), number, len(shards))}.{suffix}"
        files.append((file, one(names)))
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total, **texts}, "weight_map": places}
    name = index_name(target.stem or _USUAL[target.format], suffix, target.variant)
    files.append((name, Plan((json.dumps(index, indent=2).encode(),))))
    return Files(tuple(files))
