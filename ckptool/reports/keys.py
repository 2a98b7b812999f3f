"""What ``keys`` tells: the tensors of state dicts, or all in the file. The keys of the report are a contract."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import Any

from ..base.errors import TargetError
from ..base.globs import Globs
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import resolve, selected
from ..checkpoint.sharding import Sharding, sharding
from ..checkpoint.survey import Survey, TensorEntry


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
        "in_file": len(survey.tensors) + survey.unlisted,
        "tensors": [described(survey, entry) for entry in chosen],
    }


def described(survey: Survey, entry: TensorEntry) -> dict[str, Any]:
    """One tensor at its place, as ``keys`` lists it.

    A tensor that is spread over ranks has more: "sharding" (DTensor or ShardedTensor), "local_shape" (null for several
    parts or none), "placements" (by dimension of the mesh; for a ShardedTensor "Chunk(dim)" or "Enumerable"), "mesh"
    (device, names, shape, number of ranks), "rank" (null for unknown) and "parts" in the file: "shape", "offsets" (null
    for several blocks) and "ranges", for each dimension the [begin, end] of its stretches (null for unknown). ``shape``
    is that of all ranks together, ``bytes`` are those in the file.
    """
    tensor = entry.tensor
    part = sharding(survey.reader, entry.ref, tensor)
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
    } | (_spread(part, tensor.shape) if part else {})


def _spread(found: Sharding, whole: tuple[int, ...]) -> dict[str, Any]:
    """What is told of a tensor that is spread over ranks."""
    parts = []
    for part in found.parts:
        offsets = part.offsets(whole)
        ranges = None if part.ranges is None else [[list(stretch) for stretch in each] for each in part.ranges]
        offsets_told = None if offsets is None else list(offsets)
        parts.append({"shape": list(part.shape), "offsets": offsets_told, "ranges": ranges})
    return {
        "sharding": found.kind,
        "local_shape": None if found.local_shape is None else list(found.local_shape),
        "placements": list(found.placements),
        "mesh": found.mesh.report,
        "rank": found.rank if found.rank >= 0 else None,
        "parts": parts,
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
        found = resolve(checkpoint, key)
        inside = survey.inside(found.ref)
        below = [entry for entry in survey.tensors if entry.holder in inside or entry.ref == found.ref]
        if not below:
            what = f"no tensor below {key!r}"
            raise TargetError(what, path=checkpoint.path, next=f"ckptool keys {quote(checkpoint.path)} --all")
        return below
    if everything:
        return survey.tensors
    chosen = [item.path for item in selected(checkpoint, key)]
    return survey.tensors_in(chosen) if chosen else survey.tensors
