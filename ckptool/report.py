"""What ``inspect`` and ``keys`` tell, as JSON-ready dicts. The keys are a contract (``schema``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from shlex import quote
from typing import Any

from .accounting import Account, account
from .checkpoint import Checkpoint, layout_of
from .checks import Verdict, findings, storage_flaws, weights_only
from .edits.select import normal_path, selected
from .errors import TargetError
from .limits import LIMITS
from .locations import MapLocation, lands_on
from .names import Globs
from .objects import Scalar, class_name, mapping, scalar
from .pickles.nodes import Global, List
from .prefixes import common_prefix, prefix_of, wrapper_counts
from .survey import StateDict, Survey, TensorEntry

__all__ = ["described", "inspection", "key_listing", "listed_entries", "listing"]


def inspection(checkpoint: Checkpoint, map_location: MapLocation = None) -> dict[str, Any]:
    """The report of ``inspect``, schema ``ckptool.inspect/1``.

    ``tensors`` counts places: tied tensors count at each. ``parameters`` counts elements of state dicts (of
    all tensors where there is no state dict), those of one tensor once. Bytes count once.
    """
    survey = checkpoint.survey
    sums = account(survey)
    flaws = storage_flaws(checkpoint)
    verdict = weights_only(checkpoint, flaws)
    kind, container = layout_of(checkpoint)
    in_state = [entry for entry in survey.tensors if entry.state_dict >= 0] or survey.tensors
    style = checkpoint.graph.style
    return {
        "schema": "ckptool.inspect/1",
        "path": checkpoint.path,
        "bytes": checkpoint.source.size,
        "format": checkpoint.format,
        "writer": checkpoint.container.writer,
        "protocol": style.protocol,
        "byteorder": checkpoint.container.byteorder,
        "layout": {"kind": kind, "container": container},
        "state_dicts": _state_dicts(checkpoint),
        "entries": _entries(checkpoint, sums),
        "devices": [
            {"location": share.name, "tensors": share.tensors, "bytes": share.nbytes}
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
        "findings": [finding._asdict() for finding in findings(checkpoint, sums, verdict, flaws, map_location)],
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


def _state_dicts(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    held: list[list[TensorEntry]] = [[] for _ in checkpoint.state_dicts]
    for entry in checkpoint.survey.tensors:
        if entry.state_dict >= 0:
            held[entry.state_dict].append(entry)
    return [_state_dict(checkpoint, item, entries) for item, entries in zip(checkpoint.state_dicts, held)]


def _state_dict(checkpoint: Checkpoint, state_dict: StateDict, entries: list[TensorEntry]) -> dict[str, Any]:
    names = _names(checkpoint, state_dict)
    prefix = prefix_of(names)
    return {
        "key": state_dict.path,
        "container": state_dict.container,
        "confidence": state_dict.confidence,
        "keys": len(names),
        "tensors": len(entries),
        "parameters": _parameters(entries),
        "bytes": sum(entry.tensor.own_bytes for entry in _distinct(entries)),
        "prefix": {"name": prefix.name, "keys": prefix.keys, "status": prefix.status},
        "wrappers": wrapper_counts(names),
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
        described |= {"bytes": sums.entry_bytes[number], "tensors": sums.entry_tensors[number]}
        if entry.path in by_path:
            described["state_dict"] = by_path[entry.path]
        result.append(described)
    return result


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


def key_listing(
    checkpoint: Checkpoint,
    *,
    key: str | None = None,
    everything: bool = False,
    globs: Globs = Globs(),
    sort: str = "file",
) -> dict[str, Any]:
    """The report of ``keys``, schema ``ckptool.keys/1``.

    The tensors of the state dicts found with high confidence, or of the one at ``key``; with ``everything`` all in
    the file, or all below the path ``key``. Where there is no state dict it is all in any case. ``sort`` is
    "file", "name" or "bytes" (largest first).
    """
    chosen = listed_entries(checkpoint, key, everything, globs, sort)
    return listing(checkpoint, chosen)


def listing(checkpoint: Checkpoint, chosen: Sequence[TensorEntry]) -> dict[str, Any]:
    """The report of ``keys`` on these tensors."""
    survey = checkpoint.survey
    return {
        "schema": "ckptool.keys/1",
        "path": checkpoint.path,
        "listed": len(chosen),
        "in_file": len(survey.tensors),
        "tensors": [described(survey, entry) for entry in chosen],
    }


def described(survey: Survey, entry: TensorEntry) -> dict[str, Any]:
    """One tensor at its place, as ``keys`` lists it."""
    tensor = entry.tensor
    return {
        "state_dict": survey.state_dicts[entry.state_dict].path if entry.state_dict >= 0 else None,
        "key": entry.key,
        "path": entry.path,
        "kind": tensor.kind,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride),
        "offset": tensor.offset,
        "location": tensor.location,
        "bytes": tensor.own_bytes,
        "storage": tensor.storage or None,
        "requires_grad": tensor.requires_grad,
        "class": tensor.cls or None,
    }


def listed_entries(
    checkpoint: Checkpoint,
    key: str | None = None,
    everything: bool = False,
    globs: Globs = Globs(),
    sort: str = "file",
) -> list[TensorEntry]:
    """The tensors that ``key_listing`` speaks of, in its order."""
    entries = _listed(checkpoint, checkpoint.survey, key, everything)
    if globs:
        entries = [entry for entry in entries if globs.match(entry.key, entry.path)]
    if sort == "name":
        return sorted(entries, key=lambda entry: entry.path if everything else entry.key)
    if sort == "bytes":
        return sorted(entries, key=lambda entry: -entry.tensor.own_bytes)
    return entries


def _listed(checkpoint: Checkpoint, survey: Survey, key: str | None, everything: bool) -> list[TensorEntry]:
    if everything and key is not None:
        base = normal_path(key)
        below = [entry for entry in survey.tensors if entry.path.startswith(base) and _starts_step(entry.path, base)]
        if not below:
            what = f"no tensor below {key!r}"
            raise TargetError(what, path=checkpoint.path, next=f"ckptool keys {quote(checkpoint.path)} --all")
        return below
    if everything:
        return survey.tensors
    chosen = {item.ref for item in selected(checkpoint, key)}
    if not chosen:
        return survey.tensors
    numbers = {number for number, item in enumerate(survey.state_dicts) if item.ref in chosen}
    return [entry for entry in survey.tensors if entry.state_dict in numbers]


def _starts_step(path: str, base: str) -> bool:
    """Does the path go on behind ``base`` with a new step?"""
    return not base or path[len(base) : len(base) + 1] in ("", ".", "[", "(")
