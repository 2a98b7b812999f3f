"""Do the tensors lie in their storages, and are the storages there? Nobody else asks: torch's mmap path trusts it."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Final, NamedTuple

from ..base.dtypes import BY_NAME, storage_dtype
from ..base.text import shown
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import UNEDITABLE
from ..checkpoint.objects import callable_name, mapped_name
from ..checkpoint.programs import program_of
from ..checkpoint.tensors import ID_PARTS, Tensor, TensorReader, extent, storage_mention
from ..pickles.nodes import Call, Global, Persistent, Ref
from .arguments import Refused, refused_calls
from .torch_lists import NEWEST, allowed, registered


class Flaw(NamedTuple):
    """``code``: "missing-storage", "storage-size", "geometry" or "arguments"; ``path`` a tensor or key of a storage.

    ``refused`` says that torch.load fails on it, for certain; ``ref`` is the reference of the tensor, storage or other
    object, -1 for none.
    """

    code: str
    path: str
    message: str
    refused: bool
    ref: Ref = -1


_NESTED: Final = "torch._utils._rebuild_nested_tensor"
#: Formats with persistent ids that stand for something else than storages.
_OTHER_IDS: Final = {"torch-legacy": "module", "torch-package": "reduce_package"}


def storage_flaws(checkpoint: Checkpoint) -> list[Flaw]:
    """Everything that is wrong between tensors, storages and the bytes that are there."""
    flaws = _missing(checkpoint) + _geometry(checkpoint)
    return flaws + _arguments(checkpoint, {flaw.ref for flaw in flaws if flaw.code == "geometry"})


def _missing(checkpoint: Checkpoint) -> list[Flaw]:
    container = checkpoint.container
    if checkpoint.traits.in_a_row and any(problem.code in UNEDITABLE for problem in container.problems):
        return []
    flaws = []
    for key, storage in checkpoint.survey.reader.storages.items():
        if storage.location == "meta" and checkpoint.traits.in_a_row:
            continue  # a legacy file has no bytes of it; in a zip even an empty one is a record
        size = checkpoint.added[key].size if key in checkpoint.added else container.stored_size(key)
        if size is None:
            if storage.nbytes or not checkpoint.traits.in_a_row:
                flaws.append(Flaw("missing-storage", key, f"the bytes of storage {key!r} are not in the file", True))
        elif size != storage.nbytes:
            what = f"storage {key!r} holds {size:,} bytes where the pickle says {storage.nbytes:,}"
            flaws.append(Flaw("storage-size", key, what, True))
    return flaws


def _arguments(checkpoint: Checkpoint, known: Collection[Ref]) -> list[Flaw]:
    """Calls that torch fails at; nothing where the pickle is for another loader than torch.load."""
    if not checkpoint.pickled or program_of(checkpoint) is not None:
        return []
    survey = checkpoint.survey
    names = allowed(NEWEST) | registered(NEWEST)
    # The other pickles of a legacy file, which torch loads before and after it.
    # Those of shards are in its own, but for what they throw away.
    beside = checkpoint.container.others if not checkpoint.anew else ()
    found = []
    for other in beside:
        led_to = set(other.reachable()) if checkpoint.traits.sharded else frozenset[Ref]()
        for ref, refusal in refused_calls(other, TensorReader(other), names).items():
            if ref not in led_to:
                what = f"in a pickle beside the checkpoint's: {refusal.why}"
                found.append(Flaw("arguments", "", what, refusal.sure))
    refused = refused_calls(checkpoint.graph, survey.reader, names)
    if checkpoint.traits.in_a_row and not checkpoint.anew:
        # ``_legacy_load`` reads the storages last, and ``_rebuild_nested_tensor`` the sizes when it is called.
        nodes = checkpoint.graph.nodes
        makers = {ref for ref, node in enumerate(nodes) if type(node) is Global and mapped_name(node) == _NESTED}
        for ref, node in enumerate(nodes if makers else ()):
            if type(node) is Call and node.func in makers:
                refused[ref] = Refused(
                    "a nested tensor in a legacy file, whose sizes torch reads before they are there"
                )
    if not refused:
        return found
    paths = {entry.ref: entry.path or "the tensor" for entry in survey.tensors}
    return found + [
        Flaw(
            "arguments",
            paths.get(ref, ""),
            f"{paths[ref]}: {what.why}" if ref in paths else what.why,
            what.sure,
            ref,
        )
        for ref, what in refused.items()
        if ref not in known
    ]


def _geometry(checkpoint: Checkpoint) -> list[Flaw]:
    """Every tensor that the pickle makes, also one that nothing leads to: torch makes them all."""
    survey = checkpoint.survey
    reader, nodes = survey.reader, checkpoint.graph.nodes
    paths = cache(lambda: {entry.ref: entry.path or "the tensor" for entry in survey.tensors})
    flaws = []
    rebuilds: dict[Ref, bool] = {}
    typed: dict[Ref, bool] = {}  # has a class of storages a dtype?
    misfits: dict[tuple[object, ...], str] = {}  # most tensors are laid out like another one
    # The readers of older formats, and of shards, look at the ids themselves.
    own_ids = checkpoint.traits.former or checkpoint.traits.sharded
    for ref, node in enumerate(nodes):
        if type(node) is Persistent:
            storage = reader.storage(ref)
            pid = nodes[node.pid]
            count = len(pid) if type(pid) is tuple else 0
            if storage is not None and type(pid) is tuple:
                # Torch asks each mention for its dtype, also where the first one decides which storage it is.
                if pid[1] not in typed:
                    cls = storage_mention(checkpoint.graph, ref)[0]
                    typed[pid[1]] = storage_dtype(cls).name != "unknown" and cls.rpartition(".")[2] != "TypedStorage"
                if not typed[pid[1]]:
                    cls = storage_mention(checkpoint.graph, ref)[0]
                    what = f"the storage class {shown(cls)} is none that torch knows the dtype of"
                    flaws.append(Flaw("geometry", "", what, True, ref))
            if storage is not None and count > ID_PARTS and not own_ids:
                what = f"a storage is described by {count} values, of which torch takes {ID_PARTS}"
                flaws.append(Flaw("geometry", "", what, True, ref))
            other = _OTHER_IDS.get(checkpoint.format)
            if storage is None and (other is None or (other == "module" and ref not in reader.modules)):
                flaws.append(Flaw("geometry", "", "a storage is described in a way that torch cannot read", True, ref))
            continue
        tensor = reader.tensor(ref) if type(node) is Call else None
        if tensor is None:
            if type(node) is not Call:
                continue
            if node.func not in rebuilds:
                rebuilds[node.func] = _rebuilds(callable_name(checkpoint.graph, node.func))
            if rebuilds[node.func]:
                what = "a tensor that cannot be: its shape, strides, offset or storage make no sense"
                flaws.append(Flaw("geometry", paths().get(ref, ""), what, True, ref))
            continue
        for part in reader.parts(tensor) if tensor.parts else (tensor,):
            if not part.storage:
                continue
            nbytes = reader.storages[part.storage].nbytes
            layout = (part.shape, part.stride, part.offset, part.dtype, nbytes)
            if layout not in misfits:
                misfits[layout] = _misfit(part, nbytes)
            if misfits[layout]:
                path = paths().get(ref, "a tensor that no key leads to")
                flaws.append(Flaw("geometry", path, f"{path}: {misfits[layout]}", True, ref))
    return flaws


def _rebuilds(name: str) -> bool:
    """Is it one of torch's functions that make a tensor of what is in the file?"""
    module, _, function = name.rpartition(".")
    # Of torch._utils a checkpoint names nothing else: what is called otherwise there is a damaged name.
    return module == "torch._utils" or (module in ("torch._tensor", "torch.tensor") and function.startswith("_rebuild"))


def _misfit(tensor: Tensor, nbytes: int) -> str:
    """Why a view does not fit into a storage of ``nbytes`` bytes, or ""."""
    if len(tensor.stride) != len(tensor.shape):
        return "shape and stride have different lengths"
    if min(tensor.shape, default=0) < 0 or min(tensor.stride, default=0) < 0 or tensor.offset < 0:
        return "a negative size, stride or offset"
    dtype = BY_NAME.get(tensor.dtype)
    if dtype is None:
        return ""
    size = extent(tensor.shape, tensor.stride)
    if size == 0:
        return ""
    end = -(-(tensor.offset + size) // dtype.packed) * dtype.itemsize
    if end <= nbytes:
        return ""
    return f"it reads {end:,} bytes of a storage that has {nbytes:,}"
