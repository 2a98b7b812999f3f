"""The report of ``keys``: tensors in state dicts, or in the whole file. Its keys are a stable contract (``schema``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..base.globs import Globs, Patterns, split_globs
from ..base.records import TypedDict
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.quantized import Quantization
from ..checkpoint.selection import select_entries
from ..checkpoint.sharding import MeshReport, Sharding, sharding
from ..checkpoint.survey import Survey, TensorEntry
from ..formats.opening import CheckpointOrPath, opened
from ..pickles.nodes import Ref


class PartReport(TypedDict):
    """A part of a sharded tensor that is in the file.

    ``offsets`` is None if the part has several blocks. ``ranges`` lists, for each dimension, the [begin, end] of each
    block; it is None if they are unknown.
    """

    shape: list[int]
    offsets: list[int] | None
    ranges: list[list[list[int]]] | None


class ShardingFields(TypedDict, total=False):
    """The fields of a tensor that is sharded over ranks.

    ``sharding`` is DTensor or ShardedTensor. ``local_shape`` is None unless the file has exactly one part.
    ``placements`` has one element per dimension of the mesh, for a ShardedTensor "Chunk(dim)" or "Enumerable". ``mesh``
    has device, names, shape and number of ranks. ``rank`` is None if it is unknown.
    """

    sharding: str
    local_shape: list[int] | None
    placements: list[str]
    mesh: MeshReport
    rank: int | None
    parts: list[PartReport]


_Dense = TypedDict(
    "_Dense",
    {
        "state_dict": "str | None",
        "key": str,
        "path": str,
        "kind": str,
        "dtype": str,
        "shape": "list[int]",
        "stride": "list[int]",
        "offset": int,
        "location": str,
        "bytes": int,
        "storage": "str | None",
        "requires_grad": bool,
        "class": "str | None",
    },
)


class TensorReport(_Dense, ShardingFields):
    """One tensor at its place. For a sharded one, ``shape`` covers all ranks, ``bytes`` only this file."""


class KeysReport(TypedDict):
    """The report of ``keys``, schema ``ckptool.keys/1``. ``metadata`` has the texts stored with the tensors."""

    schema: Literal["ckptool.keys/1"]
    path: str
    listed: int
    in_file: int
    metadata: dict[str, str]
    tensors: list[TensorReport]


def keys_report(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> KeysReport:
    """Return the report of ``keys`` for these tensors."""
    survey = checkpoint.survey
    return {
        "schema": "ckptool.keys/1",
        "path": checkpoint.path,
        "listed": len(entries),
        "in_file": len(survey.tensors) + survey.unlisted,
        "metadata": dict(checkpoint.metadata),
        "tensors": [tensor_report(survey, entry) for entry in entries],
    }


def tensor_report(survey: Survey, entry: TensorEntry) -> TensorReport:
    """Return one tensor as ``keys`` lists it."""
    tensor = entry.tensor
    shard = sharding(survey.reader, entry.ref, tensor)
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
        **_sharding_fields(shard, tensor.shape),
    }


def _sharding_fields(shard: Sharding | None, shape: tuple[int, ...]) -> ShardingFields:
    if shard is None:
        return {}
    parts: list[PartReport] = []
    for part in shard.parts:
        offsets = part.offsets(shape)
        ranges = None if part.ranges is None else [[list(stretch) for stretch in each] for each in part.ranges]
        parts.append(
            {"shape": list(part.shape), "offsets": None if offsets is None else list(offsets), "ranges": ranges}
        )
    return {
        "sharding": shard.kind,
        "local_shape": None if shard.local_shape is None else list(shard.local_shape),
        "placements": list(shard.placements),
        "mesh": shard.mesh.report,
        "rank": shard.rank if shard.rank >= 0 else None,
        "parts": parts,
    }


def plain_entries(entries: Sequence[TensorEntry], found: Quantization) -> tuple[list[TensorEntry], dict[Ref, int]]:
    """Return entries in which each quantized weight is one, with the name and shape of its plain weight and its format
    as the dtype; also the stored bytes of all its parts, by the reference of the code.
    """
    weights = {weight.parts[0][1].ref: weight for weight in found.weights if weight.shape is not None}
    parts = {part.ref for weight in weights.values() for _, part in weight.parts[1:]}
    listed = []
    for entry in entries:
        if weight := weights.get(entry.ref):
            tensor = entry.tensor._replace(dtype=weight.format, shape=weight.shape or (), kind="dense")
            path = entry.path.replace(entry.key, weight.name) if entry.key in entry.path else entry.path
            listed.append(entry._replace(key=weight.name, path=path, tensor=tensor))
        elif entry.ref not in parts:
            listed.append(entry)
    return listed, {ref: sum(part.tensor.own_bytes for _, part in weight.parts) for ref, weight in weights.items()}


def near_pattern(globs: Globs, entries: Sequence[TensorEntry]) -> str:
    """Return ``; did you mean ...?`` with a pattern similar to an included one that matches a tensor, or ""."""
    from ..base.nearest import did_you_mean

    keys, paths = [entry.key for entry in entries], [entry.path for entry in entries]
    parts = (part for glob in globs.include for part in split_globs(glob))
    return next(filter(None, (did_you_mean(part, keys, paths) for part in parts)), "")


def keys(
    path: CheckpointOrPath,
    *,
    key: str | None = None,
    all: bool = False,
    include: Patterns = (),
    exclude: Patterns = (),
    sort: Literal["file", "name", "bytes"] = "file",
) -> KeysReport:
    """Return the JSON of ``ckptool keys``, schema ``ckptool.keys/1``.

    Listed are the tensors in the state dicts, or in the one at the path ``key``; with ``all`` every tensor in the file,
    or below ``key``. ``include`` and ``exclude`` are patterns for keys and paths. ``sort`` is "file", "name" or
    "bytes".

    >>> report = ckptool.keys("training.pth", include=["*.head.*"])
    >>> [(item["key"], item["shape"]) for item in report["tensors"]]
    [('module.head.weight', [5, 12, 1, 1]), ('module.head.bias', [5])]
    """
    with opened(path) as checkpoint:
        return keys_report(checkpoint, select_entries(checkpoint, key, all, Globs(include, exclude), sort))
