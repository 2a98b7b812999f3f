"""What ``inspect`` tells, as JSON-ready dicts. The keys are a contract (``schema``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Final

from .accounting import Account, account
from .checkpoint import Checkpoint, layout_of
from .checks import Verdict, findings, storage_flaws, weights_only
from .limits import LIMITS
from .locations import MapLocation, lands_on
from .objects import Scalar, class_name, mapping, scalar
from .pickles.nodes import Call, Global, Graph, List, Node
from .prefixes import Naming, common_prefix, naming_of
from .programs import program_of
from .remedies import sanitize_step
from .sharding import Spread, spread
from .survey import StateDict, Survey, TensorEntry

__all__ = ["inspection"]

#: Arguments of an object that are shown.
_SHOWN: Final = 3


def inspection(checkpoint: Checkpoint, map_location: MapLocation = None) -> dict[str, Any]:
    """The report of ``inspect``, schema ``ckptool.inspect/1``.

    ``tensors`` counts places: tied tensors count at each. ``parameters`` counts elements of state dicts (of
    all tensors where there is no state dict), those of one tensor once. Bytes count once.
    """
    checkpoint = checkpoint.tolerating()
    survey = checkpoint.survey
    sums = account(survey)
    flaws = storage_flaws(checkpoint)
    verdict = weights_only(checkpoint, flaws)
    kind, container = layout_of(checkpoint)
    in_state = [entry for entry in survey.tensors if entry.state_dict >= 0] or survey.tensors
    style = checkpoint.graph.style
    program = program_of(checkpoint)
    shards = spread(survey.reader, survey.tensors)
    namings = [naming_of(_names(checkpoint, item)) for item in checkpoint.state_dicts]
    return {
        "schema": "ckptool.inspect/1",
        "path": checkpoint.path,
        "bytes": checkpoint.source.size,
        "format": checkpoint.format,
        "writer": checkpoint.container.writer,
        "loads": checkpoint.traits.loads,
        "protocol": style.protocol if checkpoint.pickled else None,
        "byteorder": checkpoint.container.byteorder,
        "metadata": dict(checkpoint.container.metadata),
        "layout": {"kind": kind, "container": container},
        **({"program": dict(program.described)} if program is not None else {}),
        **({"sharding": _sharding(shards)} if shards is not None else {}),
        "state_dicts": _state_dicts(checkpoint, namings),
        "entries": _entries(checkpoint, sums),
        "devices": [
            {"location": share.name, "tensors": share.tensors, "bytes": share.nbytes}
            | ({"other_bytes": share.others} if share.others else {})
            | ({"lands_on": _landing(survey, share.name, map_location)} if map_location is not None else {})
            for share in sums.devices
        ],
        "dtypes": [{"dtype": share.name, "tensors": share.tensors, "bytes": share.nbytes} for share in sums.dtypes],
        "tensors": len(survey.tensors),
        "parameters": _parameters(in_state),
        "storages": len(survey.reader.storages),
        "storage_bytes": sums.storage_bytes,
        "unused_bytes": sums.unused_bytes,
        "shared_storages": sums.shared_storages,
        "device_names": [
            {"path": name.path, "device": name.device, "kind": "torch.device" if name.is_object else "str"}
            for name in survey.devices
        ],
        "weights_only": _verdict(verdict),
        "findings": [
            finding._asdict()
            for finding in findings(checkpoint, sums, verdict, flaws, namings, map_location, sanitize_step)
        ],
    }


def _sharding(shards: Spread) -> dict[str, Any]:
    return {
        "tensors": shards.tensors,
        "partial": shards.partial,
        "kinds": list(shards.kinds),
        "ranks": list(shards.ranks),
        "meshes": [mesh.report for mesh in shards.meshes],
        "words": shards.words,
    }


def _landing(survey: Survey, tag: str, location: MapLocation) -> str:
    """Where a tag lands; tensors saved on meta have no storage at all, and nothing moves them."""
    if tag == "meta" and all(storage.location != "meta" for storage in survey.reader.storages.values()):
        return tag
    return lands_on(tag, location)


def _parameters(entries: Sequence[TensorEntry]) -> int:
    """Elements of the distinct tensors: the same view of the same storage counts once."""
    seen = set()
    total = 0
    for entry in entries:
        tensor = entry.tensor
        if tensor.storage:
            mark = (tensor.storage, tensor.offset, tensor.shape, tensor.stride)
            if mark in seen:
                continue
            seen.add(mark)
        total += tensor.numel
    return total


def _state_dicts(checkpoint: Checkpoint, namings: Sequence[Naming]) -> list[dict[str, Any]]:
    held: list[list[TensorEntry]] = [[] for _ in checkpoint.state_dicts]
    for entry in checkpoint.survey.tensors:
        if entry.state_dict >= 0:
            held[entry.state_dict].append(entry)
    return [_state_dict(*found) for found in zip(checkpoint.state_dicts, held, namings)]


def _state_dict(state_dict: StateDict, entries: list[TensorEntry], naming: Naming) -> dict[str, Any]:
    names, prefix, wrappers = naming
    return {
        "key": state_dict.path,
        "container": state_dict.container,
        "confidence": state_dict.confidence,
        "keys": len(names),
        "tensors": len(entries),
        "parameters": _parameters(entries),
        "bytes": sum(entry.tensor.own_bytes for entry in _distinct(entries)),
        "prefix": {"name": prefix.name, "keys": prefix.keys, "status": prefix.status},
        "wrappers": wrappers,
        "common_prefix": common_prefix(names),
        "metadata": state_dict.metadata >= 0,
    }


def _names(checkpoint: Checkpoint, state_dict: StateDict) -> list[str]:
    return [str(checkpoint.graph.nodes[key]) for key, _ in state_dict.items]


def _distinct(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    seen: dict[object, TensorEntry] = {}
    for entry in entries:
        tensor = entry.tensor
        mark = (tensor.storage, tensor.offset, tensor.shape, tensor.stride) if tensor.storage else entry.ref
        seen.setdefault(mark, entry)
    return list(seen.values())


def _entries(checkpoint: Checkpoint, sums: Account) -> list[dict[str, Any]]:
    """The top-level entries; the tensors of a bare state dict are left to ``keys``."""
    survey, graph = checkpoint.survey, checkpoint.graph
    bare = any(state_dict.path == "" for state_dict in survey.state_dicts)
    by_path = {state_dict.path: number for number, state_dict in enumerate(survey.state_dicts)}
    result = []
    lengths: dict[int, int | None] = {}
    for number, entry in enumerate(survey.entries):
        tensor = survey.reader.tensor(entry.ref)
        if bare and tensor is not None:
            continue
        if entry.ref not in lengths:
            items = mapping(graph, entry.ref)
            lengths[entry.ref] = None if items is None else len(items)
        node = graph.nodes[entry.ref]
        described: dict[str, Any] = {"key": entry.key, "type": class_name(graph, entry.ref)}
        if tensor is not None:
            described |= {"type": "Tensor", "dtype": tensor.dtype, "shape": list(tensor.shape)}
        elif lengths[entry.ref] is not None:
            described["length"] = lengths[entry.ref]
        elif isinstance(node, tuple | List):
            described["length"] = len(node if isinstance(node, tuple) else node.items)
        elif node is None or isinstance(node, bool | int | float | str):
            described["value"] = _json_value(scalar(graph, entry.ref))
        elif isinstance(node, Global):
            described["value"] = f"{node.module}.{node.name}"
        elif given := _arguments(graph, node):
            described["arguments"] = given
        described |= {"bytes": sums.entry_bytes[number], "tensors": sums.entry_tensors[number]}
        if entry.path in by_path:
            described["state_dict"] = by_path[entry.path]
        result.append(described)
    return result


def _arguments(graph: Graph, node: Node) -> list[Scalar]:
    """The few plain values that an object is made of alone: which member of an enumeration it is."""
    args = graph.nodes[node.args] if isinstance(node, Call) and not node.states else ()
    if type(args) is not tuple or len(args) > _SHOWN:
        return []
    values = [graph.nodes[ref] for ref in args]
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return [_json_value(scalar(graph, ref)) for ref in args] if plain else []


def _json_value(value: Scalar) -> Scalar:
    """What JSON can carry: no NaN, no infinity, no number of more digits than Python itself prints."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > LIMITS.int_digits * 3:
        return f"an integer of {value.bit_length():,} bits"
    return value


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "torch": verdict.torch,
        "loads": verdict.loads,
        "blockers": [
            {"global": blocker.name, "count": blocker.number, "called": blocker.called}
            if blocker.name
            else {"rule": blocker.rule, "count": blocker.number}
            for blocker in verdict.blockers
        ],
    }
