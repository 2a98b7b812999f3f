"""The report of ``inspect``. Its keys are a stable contract (``schema``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from ..base.errors import TargetError
from ..base.findings import UNMERGED
from ..base.map_location import MapLocation, check_device, restored_location
from ..base.prefixes import common_prefix, wrapper_counts, wrapper_prefix
from ..base.records import TypedDict
from ..base.steps import as_step
from ..base.text import json_value
from ..checkpoint.checkpoint import Checkpoint, layout_of
from ..checkpoint.container import is_complete
from ..checkpoint.objects import class_name, mapping, scalar
from ..checkpoint.programs import ProgramReport, program_of
from ..checkpoint.quantized import Quantization, quantization
from ..checkpoint.sharding import MeshReport
from ..checkpoint.survey import Account, StateDict, Survey, TensorEntry, account
from ..formats.names.hf import family_of_model
from ..formats.opening import CheckpointOrPath, opened
from ..formats.rank_part import shards_of
from ..pickles.nodes import Call, Global, Graph, List, Node
from ..safety.rules import UNKNOWN
from ..safety.verdict import Verdict
from .findings import Naming, facts, findings
from .loads import VerdictReport, checkpoint_verdict, verdict_report

if TYPE_CHECKING:
    from typing import NotRequired

    from .loads import LoadReport

#: Maximum number of an object's arguments that are shown.
_MAX_ARGUMENTS: Final = 3


class Layout(TypedDict):
    """The kind of the root (bare, wrapped, module, tensor or other), and its type."""

    kind: str
    container: str


class ShardingReport(TypedDict):
    """The tensors that are sharded over ranks; ``partial`` counts the tensors that are not whole in this file."""

    tensors: int
    partial: int
    kinds: list[str]
    ranks: list[int]
    meshes: list[MeshReport]
    words: str


class QuantizedReport(TypedDict):
    """The quantized weights: how many have each format. ``plain`` counts the other weights, ``tensors`` all parts of
    quantized ones, with scales of activations.
    """

    formats: dict[str, int]
    plain: int
    tensors: int


class PrefixReport(TypedDict):
    """The wrapper prefix of a state dict; ``status`` says whether all, some or none of the keys have it."""

    name: str
    keys: int
    status: str


class StateDictReport(TypedDict):
    """A state dict: ``key`` is its path, ``confidence`` high or low. All keys begin with ``common_prefix``."""

    key: str
    container: str
    confidence: str
    keys: int
    tensors: int
    parameters: int
    bytes: int
    prefix: PrefixReport
    wrappers: dict[str, int]
    common_prefix: str
    metadata: bool


class EntryReport(TypedDict):
    """A top-level entry. ``state_dict`` is an index in ``state_dicts``."""

    key: str
    type: str
    dtype: NotRequired[str]
    shape: NotRequired[list[int]]
    length: NotRequired[int]
    value: NotRequired[object]
    arguments: NotRequired[list[object]]
    bytes: int
    tensors: int
    state_dict: NotRequired[int]


class DeviceReport(TypedDict):
    """A location tag: ``other_bytes`` are in no tensor, ``lands_on`` is the device after map_location."""

    location: str
    tensors: int
    bytes: int
    other_bytes: NotRequired[int]
    lands_on: NotRequired[str]


class DtypeReport(TypedDict):
    """A dtype of tensors."""

    dtype: str
    tensors: int
    bytes: int


class DeviceName(TypedDict):
    """A device that is named outside of storages; ``kind`` is str or torch.device."""

    path: str
    device: str
    kind: str


#: A reason why torch.load(weights_only=True) refuses the file: a global, or a rule.
Blocker = TypedDict("Blocker", {"global": str, "rule": str, "count": int, "called": bool}, total=False)


class WeightsOnly(TypedDict):
    """Whether torch.load(weights_only=True) in this version of torch loads the file."""

    torch: str
    loads: bool
    blockers: list[Blocker]


class FindingReport(TypedDict):
    """A finding: ``level`` is note, warning or error; ``next`` is the command to type, or ""."""

    code: str
    level: str
    message: str
    next: str


class _Optional(TypedDict, total=False):
    world_size: int
    step: int
    complete: bool
    family: str
    model: str
    quantized: QuantizedReport
    program: ProgramReport
    sharding: ShardingReport
    load: LoadReport


class InspectReport(_Optional):
    """The report of ``inspect``, schema ``ckptool.inspect/1``.

    ``tensors`` counts places, so a tied tensor counts at each. ``parameters`` counts the elements in state dicts (in
    all tensors if there is no state dict), each tensor once; quantized weights count as without
    quantization. Bytes count once. ``loads`` is what torch.load takes: the file, each file, or the converted output.
    ``loader`` loads the checkpoint as it is; it is None if only the program that wrote it does. ``family`` is the kind
    of model if the names show it, ``model`` what the metadata says about it. ``world_size``, ``step`` and ``complete``
    are for folders that many ranks wrote: the number of ranks, the step if it is known, and whether all files are there
    and whole.
    """

    schema: Literal["ckptool.inspect/1"]
    path: str
    bytes: int
    format: str
    writer: str
    loads: str
    loader: str | None
    protocol: int | None
    byteorder: str
    metadata: dict[str, str]
    layout: Layout
    state_dicts: list[StateDictReport]
    entries: list[EntryReport]
    devices: list[DeviceReport]
    dtypes: list[DtypeReport]
    tensors: int
    parameters: int
    storages: int
    storage_bytes: int
    unused_bytes: int
    shared_storages: int
    device_names: list[DeviceName]
    weights_only: WeightsOnly
    safety: VerdictReport
    findings: list[FindingReport]


def inspection(
    checkpoint: Checkpoint, map_location: MapLocation = None, *, judged: bool = True, steps: bool = True
) -> InspectReport:
    """Return the report of ``inspect``. Unless ``judged``, nothing is searched for code, and the verdict is unknown.

    Without ``steps``, findings have no next step.
    """
    checkpoint = checkpoint.lenient()
    survey = checkpoint.survey
    sums = account(survey)
    quantized = quantization(checkpoint)
    known = facts(checkpoint, steps=steps, quantized=quantized)
    layout, container = layout_of(checkpoint)
    program = program_of(checkpoint)
    shards = shards_of(checkpoint)
    nodes = checkpoint.graph.nodes
    every = ([str(nodes[key]) for key, _ in item.items] for item in checkpoint.state_dicts)
    namings = [Naming(names, wrapper_prefix(names), wrapper_counts(names)) for names in every]
    entries: list[list[TensorEntry]] = [[] for _ in checkpoint.state_dicts]
    for entry in survey.tensors:
        if entry.state_dict >= 0:
            entries[entry.state_dict].append(entry)
    state_dicts = [_state_dict(*found, quantized) for found in zip(checkpoint.state_dicts, entries, namings)]
    optional: _Optional = {}
    if quantized:
        optional["quantized"] = _quantized(survey, quantized)
    unmerged = "a model with an unmerged LoRA (PEFT)" if any(fact.code == UNMERGED for fact in known.others) else ""
    if family := unmerged or next(filter(None, (family_of_model(naming.names) for naming in namings)), ""):
        optional["family"] = family
    if checkpoint.container.model:
        optional["model"] = checkpoint.container.model
    if program is not None:
        optional["program"] = program.described
    if shards is not None:
        optional["sharding"] = {
            "tensors": shards.tensors,
            "partial": shards.partial,
            "kinds": list(shards.kinds),
            "ranks": list(shards.ranks),
            "meshes": [mesh.report for mesh in shards.meshes],
            "words": shards.words,
        }
    if (save := checkpoint.container.rank_save) is not None and save.kind == "rank":
        optional["world_size"], optional["complete"] = save.ranks, is_complete(checkpoint.container.problems)
        if save.step is not None:
            optional["step"] = save.step
    return {
        "schema": "ckptool.inspect/1",
        "path": checkpoint.path,
        "bytes": checkpoint.source.size,
        "format": checkpoint.format,
        "writer": checkpoint.container.writer,
        "loads": checkpoint.traits.loads,
        "loader": (program.loader if program is not None else checkpoint.traits.loader) or None,
        "protocol": checkpoint.graph.style.protocol if checkpoint.pickled else None,
        "byteorder": checkpoint.container.byteorder,
        "metadata": dict(checkpoint.metadata),
        "layout": {"kind": layout, "container": container},
        **optional,
        "state_dicts": state_dicts,
        "entries": _entries(checkpoint, sums),
        "devices": _devices(survey, sums, map_location),
        "dtypes": [{"dtype": share.name, "tensors": share.tensors, "bytes": share.nbytes} for share in sums.dtypes],
        "tensors": len(survey.tensors),
        "parameters": state_dicts[0]["parameters"]
        if len(state_dicts) == 1 and state_dicts[0]["tensors"]
        else _parameters([entry for entry in survey.tensors if entry.state_dict >= 0] or survey.tensors, quantized),
        "storages": len(survey.reader.storages),
        "storage_bytes": sums.storage_bytes,
        "unused_bytes": sums.unused_bytes,
        "shared_storages": sums.shared_storages,
        "device_names": [
            {"path": name.path, "device": name.device, "kind": "torch.device" if name.is_object else "str"}
            for name in survey.devices
        ],
        "weights_only": {
            "torch": known.verdict.torch,
            "loads": known.verdict.loads,
            "blockers": [
                {"global": blocker.name, "count": blocker.number, "called": blocker.called}
                if blocker.name
                else {"rule": blocker.rule, "count": blocker.number}
                for blocker in known.verdict.blockers
            ],
        },
        "safety": verdict_report(checkpoint_verdict(checkpoint, quick=True) if judged else Verdict(UNKNOWN)),
        "findings": [
            {
                "code": finding.code,
                "level": finding.level,
                "message": finding.message,
                "next": as_step(finding.next).line,
            }
            for finding in findings(checkpoint, known, sums, namings, map_location, steps=steps)
        ],
    }


def _devices(survey: Survey, sums: Account, map_location: MapLocation) -> list[DeviceReport]:
    devices = []
    for share in sums.devices:
        device: DeviceReport = {"location": share.name, "tensors": share.tensors, "bytes": share.nbytes}
        if share.others:
            device["other_bytes"] = share.others
        if map_location is not None:
            # Tensors saved on meta have no storage, so nothing moves them.
            fixed = share.name == "meta" and all(each.location != "meta" for each in survey.reader.storages.values())
            device["lands_on"] = share.name if fixed else restored_location(share.name, map_location)
        devices.append(device)
    return devices


def _view(entry: TensorEntry) -> Hashable:
    tensor = entry.tensor
    return (tensor.storage, tensor.offset, tensor.shape, tensor.stride) if tensor.storage else entry.ref


def _parameters(entries: Sequence[TensorEntry], quantized: Quantization) -> int:
    """Count the elements; equal views of a storage count once, and quantized weights as without quantization."""
    views = {_view(entry): entry.tensor.numel for entry in entries if entry.tensor.storage}
    count = sum(views.values()) + sum(entry.tensor.numel for entry in entries if not entry.tensor.storage)
    return count + quantized.surplus(entry.tensor for entry in entries) if quantized else count


def _quantized(survey: Survey, found: Quantization) -> QuantizedReport:
    """Count weights of state dicts; all, if there is no state dict. A plain weight has two dimensions or more."""
    inside = [weight for weight in found.weights if weight.parts[0][1].state_dict >= 0] or found.weights
    entries = [entry for entry in survey.tensors if entry.state_dict >= 0] or survey.tensors
    others = (entry for entry in entries if len(entry.tensor.shape) > 1 and entry.tensor not in found.tensors)
    formats = dict(Counter(weight.format for weight in inside).most_common())
    return {"formats": formats, "plain": len({_view(entry) for entry in others}), "tensors": len(found.tensors)}


def _state_dict(
    state_dict: StateDict, entries: list[TensorEntry], naming: Naming, quantized: Quantization
) -> StateDictReport:
    names, prefix, wrappers = naming
    distinct = {_view(entry): entry.tensor for entry in reversed(entries)}.values()
    return {
        "key": state_dict.path,
        "container": state_dict.container,
        "confidence": state_dict.confidence,
        "keys": len(names),
        "tensors": len(entries),
        "parameters": _parameters(entries, quantized),
        "bytes": sum(tensor.own_bytes for tensor in distinct),
        "prefix": {"name": prefix.name, "keys": prefix.keys, "status": prefix.status},
        "wrappers": wrappers,
        "common_prefix": common_prefix(names),
        "metadata": state_dict.metadata >= 0,
    }


def _entries(checkpoint: Checkpoint, sums: Account) -> list[EntryReport]:
    """Return the top-level entries. The tensors of a bare state dict are left to ``keys``."""
    survey, graph = checkpoint.survey, checkpoint.graph
    bare = any(state_dict.path == "" for state_dict in survey.state_dicts)
    numbers = {state_dict.path: number for number, state_dict in enumerate(survey.state_dicts)}
    reports = []
    lengths: dict[int, int | None] = {}
    for number, entry in enumerate(survey.entries):
        tensor = survey.reader.tensor(entry.ref)
        if bare and tensor is not None:
            continue
        if entry.ref not in lengths:
            items = mapping(graph, entry.ref)
            lengths[entry.ref] = None if items is None else len(items)
        node, length = graph.nodes[entry.ref], lengths[entry.ref]
        report: dict[str, Any] = {"key": entry.key, "type": class_name(graph, entry.ref)}
        if tensor is not None:
            report |= {"type": "Tensor", "dtype": tensor.dtype, "shape": list(tensor.shape)}
        elif length is not None:
            report["length"] = length
        elif isinstance(node, tuple | List):
            report["length"] = len(node if isinstance(node, tuple) else node.items)
        elif node is None or isinstance(node, bool | int | float | str):
            report["value"] = json_value(scalar(graph, entry.ref))
        elif isinstance(node, Global):
            report["value"] = f"{node.module}.{node.name}"
        elif arguments := _arguments(graph, node):
            report["arguments"] = arguments
        report |= {"bytes": sums.entry_bytes[number], "tensors": sums.entry_tensors[number]}
        if entry.path in numbers:
            report["state_dict"] = numbers[entry.path]
        reports.append(cast("EntryReport", report))
    return reports


def _arguments(graph: Graph, node: Node) -> list[object]:
    args = graph.nodes[node.args] if isinstance(node, Call) and not node.states else ()
    if type(args) is not tuple or len(args) > _MAX_ARGUMENTS:
        return []
    values = [graph.nodes[ref] for ref in args]
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return [json_value(scalar(graph, ref)) for ref in args] if plain else []


def inspect(path: CheckpointOrPath, *, map_location: MapLocation = None) -> InspectReport:
    """Return the JSON of ``ckptool inspect``, schema ``ckptool.inspect/1``.

    >>> report = ckptool.inspect("training.pth")
    >>> report["format"], report["tensors"], report["weights_only"]["loads"]
    ('torch-zip', 38, True)
    """
    location = _as_map_location(map_location)
    with opened(path) as checkpoint:
        return inspection(checkpoint, location)


def _as_map_location(given: Any) -> MapLocation:
    """Return a ``map_location`` with the names of devices: None, a string, a torch.device, or a dict of them.

    Raise TargetError for a device that torch cannot restore, or for a function, which only torch can call.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        pairs = {str(origin): str(target) for origin, target in given.items()}
        for target in pairs.values():
            check_device(target)
        return pairs
    if callable(given):
        raise TargetError("a function as map_location can only be called by torch", next="give a device, or a dict")
    check_device(str(given))
    return str(given)
