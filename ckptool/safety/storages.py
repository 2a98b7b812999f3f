"""Check that tensors fit in their storages, and that the storages exist, because torch's mmap path trusts the file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Final

from ..base.dtypes import BY_NAME, storage_dtype
from ..base.findings import UNJOINED, Finding
from ..base.text import quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import callable_name
from ..checkpoint.programs import program_of
from ..checkpoint.tensors import ID_PARTS, Tensor, TensorReader, extent, storage_mention
from ..pickles.nodes import Call, Persistent, Ref
from .arguments import CallChecker, Refusal
from .torch_lists import ever_listed

_NESTED: Final = "torch._utils._rebuild_nested_tensor"
#: Formats with persistent ids that stand for something other than storages.
_OTHER_IDS: Final = {"torch-legacy": "module", "torch-package": "reduce_package"}


def storage_flaws(checkpoint: Checkpoint) -> list[Finding]:
    """Return every contradiction between tensors, storages and the bytes in the file."""
    if checkpoint.edited:
        return _flaws(checkpoint)
    # A comparison of copies may add problems, which matter here.
    name = checkpoint.survey.reader, len(checkpoint.container.problems)
    if checkpoint.cache.flaws[0] != name:
        checkpoint.cache.flaws = name, _flaws(checkpoint)
    return list(checkpoint.cache.flaws[1])


def _flaws(checkpoint: Checkpoint) -> list[Finding]:
    misfits = sorted(_misfits(checkpoint), key=lambda flaw: flaw.ref)
    return [*_missing(checkpoint), *misfits, *_failing_calls(checkpoint, {flaw.ref for flaw in misfits})]


def _tensor_paths(checkpoint: Checkpoint) -> dict[Ref, str]:
    return {entry.ref: entry.path or "the tensor" for entry in checkpoint.survey.tensors}


def _missing(checkpoint: Checkpoint) -> Iterator[Finding]:
    container, in_sequence = checkpoint.container, checkpoint.traits.storages_in_sequence
    if in_sequence and any(problem.blocks_edits for problem in container.problems):
        return
    unjoined = {key for problem in container.problems if problem.code == UNJOINED for key in problem.storages or ()}
    for key, storage in checkpoint.survey.reader.storages.items():
        if key in unjoined:
            continue  # its bytes are there, as a tensor that is not read as one storage
        if storage.location == "meta" and in_sequence:
            continue  # a legacy file has no bytes for it; in a zip even an empty one is a record
        size = checkpoint.added[key].size if key in checkpoint.added else container.stored_size(key)
        if size is None:
            if storage.nbytes or not in_sequence:
                message = f"the bytes of storage {key!r} are not in the file"
                yield Finding("missing-storage", "error", message, key, refused=True)
        elif size != storage.nbytes:
            message = f"storage {key!r} holds {size:,} bytes where the pickle says {storage.nbytes:,}"
            yield Finding("storage-size", "error", message, key, refused=True)


def _failing_calls(checkpoint: Checkpoint, known: Collection[Ref]) -> Iterator[Finding]:
    """Yield the calls at which torch fails; nothing if the pickle is for a loader other than torch.load."""
    if not checkpoint.pickled or program_of(checkpoint) is not None:
        return
    survey = checkpoint.survey
    names = ever_listed()
    # Check the other pickles of a legacy file, which torch loads before and after. The other pickles of shards are part
    # of the checkpoint's own graph, except for unreachable nodes.
    for other in checkpoint.container.others if not checkpoint.needs_relayout else ():
        known_refs = checkpoint.container.read_with_object(other)
        for ref, refusal in CallChecker(other, TensorReader(other)).refused(names).items():
            if ref not in known_refs:
                message = f"in a pickle beside the checkpoint's: {refusal.message}"
                yield Finding("arguments", "error", message, refused=refusal.certain)
    refused = CallChecker(checkpoint.graph, survey.reader).refused(names)
    if checkpoint.traits.storages_in_sequence and not checkpoint.needs_relayout:
        # ``_legacy_load`` reads the storages last, but ``_rebuild_nested_tensor`` reads the sizes when it is called.
        calls = checkpoint.graph.of_type(Call)
        early = (ref for ref, node in calls if callable_name(checkpoint.graph, node.func) == _NESTED)
        refused.update((ref, Refusal(f"{_NESTED} in a legacy file: its sizes are read too early")) for ref in early)
    paths = _tensor_paths(checkpoint) if refused else {}
    for ref, refusal in refused.items():
        if ref not in known:
            path = paths.get(ref, "")
            message = f"{path}: {refusal.message}" if path else refusal.message
            yield Finding("arguments", "error", message, path, refused=refusal.certain, ref=ref)


def _misfits(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the flaws of every storage and tensor that the pickle makes, including unreachable ones."""
    reader = checkpoint.survey.reader
    paths = cache(lambda: _tensor_paths(checkpoint))
    rebuilds: dict[Ref, bool] = {}
    dtypes: dict[Ref, bool] = {}  # whether a storage class has a dtype
    reasons: dict[tuple[object, ...], str] = {}  # many tensors share one layout
    for ref, call in checkpoint.graph.of_type(Call):
        tensor = reader.tensor(ref)
        if tensor is None:
            if call.func not in rebuilds:
                module, _, function = callable_name(checkpoint.graph, call.func).rpartition(".")
                # A checkpoint names nothing else in torch._utils, so any other name there is damaged.
                rebuilds[call.func] = module == "torch._utils" or (
                    module in ("torch._tensor", "torch.tensor") and function.startswith("_rebuild")
                )
            if rebuilds[call.func]:
                message = "an impossible tensor: its shape, strides, offset or storage make no sense"
                yield Finding("geometry", "error", message, paths().get(ref, ""), refused=True, ref=ref)
            continue
        for part in reader.parts(tensor) if tensor.parts else (tensor,):
            if not part.storage:
                continue
            nbytes = reader.storages[part.storage].nbytes
            layout = (part.shape, part.stride, part.offset, part.dtype, nbytes)
            if layout not in reasons:
                reasons[layout] = _misfit(part, nbytes)
            if reasons[layout]:
                path = paths().get(ref, "a tensor that no key leads to")
                yield Finding("geometry", "error", f"{path}: {reasons[layout]}", path, refused=True, ref=ref)
    for ref, node in checkpoint.graph.of_type(Persistent):
        for message in _id_problems(checkpoint, ref, node, dtypes):
            yield Finding("geometry", "error", message, refused=True, ref=ref)


def _id_problems(checkpoint: Checkpoint, ref: Ref, node: Persistent, dtypes: dict[Ref, bool]) -> Iterator[str]:
    reader = checkpoint.survey.reader
    pid = checkpoint.graph.nodes[node.pid]
    if reader.storage(ref) is None:
        other = _OTHER_IDS.get(checkpoint.format)
        if other is None or (other == "module" and ref not in reader.modules):
            yield "a storage is described in a way that torch cannot read"
    elif type(pid) is tuple:
        # Torch asks each mention for its dtype, even if the first mention decides which storage it is.
        cls = storage_mention(checkpoint.graph, ref)[0] if not dtypes.get(pid[1]) else ""
        if pid[1] not in dtypes:
            dtypes[pid[1]] = storage_dtype(cls).name != "unknown" and cls.rpartition(".")[2] != "TypedStorage"
        if not dtypes[pid[1]]:
            yield f"torch has no dtype for the storage class {quoted(cls)}"
        # The readers of older formats and of shards check the ids themselves. The TorchScript reader takes five values
        # and ignores others (torch/csrc/jit/serialization/unpickler.cpp, BINPERSID).
        if len(pid) > ID_PARTS and not (checkpoint.container.checks_ids or program_of(checkpoint) is not None):
            yield f"a storage is described by {len(pid)} values, but torch takes {ID_PARTS}"


def _misfit(tensor: Tensor, nbytes: int) -> str:
    if len(tensor.stride) != len(tensor.shape):
        return "shape and stride have different lengths"
    if min(tensor.shape, default=0) < 0 or min(tensor.stride, default=0) < 0 or tensor.offset < 0:
        return "a negative size, stride or offset"
    dtype, size = BY_NAME.get(tensor.dtype), extent(tensor.shape, tensor.stride)
    if dtype is None or size == 0:
        return ""
    end = -(-(tensor.offset + size) // dtype.packed) * dtype.itemsize
    return f"it reads {end:,} bytes of a storage that has {nbytes:,}" if end > nbytes else ""
