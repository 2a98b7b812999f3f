"""Cast tensors to another dtype; the values are computed piece by piece while the output is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..base.dtypes import BY_NAME, DTYPES, Dtype, dtype_named, is_complex
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.records import NamedTuple
from ..base.steps import option
from ..base.text import human_bytes, join_limited, pluralize
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.paths import within
from ..checkpoint.selection import dotted
from ..checkpoint.tensors import Tensor, is_sharded, rebuild_calls
from ..files.sources import Deferred
from ..formats.opening import takes_path
from ..pickles.nodes import Graph, Ref
from ..values.torch import compute
from .recompute import WHOLE, Recomputation, SharedStorage, Use, has_bits, quantized_refusal
from .sharded import recast_spread

#: This dtype packs two values into each byte.
_FLOAT4: Final = "float4_e2m1fn_x2"


def check_dtype(name: str) -> Dtype:
    """Return the dtype to cast to; raise TargetError if it is unknown or values cannot be cast to it."""
    dtype = dtype_named(name)
    if dtype is not None and dtype.name == _FLOAT4:
        raise TargetError(f"torch itself cannot cast to {_FLOAT4}", next="`--to-dtype float8_e4m3fn`")
    if dtype is None or not _has_values(dtype):
        from difflib import get_close_matches

        near = get_close_matches(name, [item.name for item in DTYPES if item.floating], 1)
        step = option("to_dtype", near[0] if near else "bfloat16")
        raise TargetError(f"{name!r} is not a dtype to cast to", next=step)
    return dtype


def _has_values(dtype: Dtype) -> bool:
    """Return whether torch can cast elements of this dtype."""
    kinds = ("float", "bfloat", "complex", "bcomplex", "int", "uint", "bool")
    return dtype.name != _FLOAT4 and dtype.name.startswith(kinds)


@takes_path
def cast(
    checkpoint: Checkpoint,
    to_dtype: object,
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    no_overflow: bool = False,
    optimizer: bool = False,
) -> Checkpoint:
    """Cast tensors to another dtype: floating-point tensors, or the tensors that ``include`` names.

    ``to_dtype`` is a name or a torch dtype. ``key`` is the path of one state dict. Without ``key`` and ``include``,
    optimizer states keep their dtype, because second moments would become 0 in a narrower one; ``optimizer`` casts them
    too. Tensors that share a storage still share it, so every tensor that shares one with a chosen tensor is also cast.
    Quantized weights are unchanged, with their scales and all other parts. The values are computed while the output is
    written. ``no_overflow`` refuses finite values that would become infinite or NaN; by default they are counted. Raise
    TargetError for an unknown dtype.

    >>> half = ckptool.cast("model.pth", torch.bfloat16)
    >>> half["conv1.weight"].dtype
    'bfloat16'
    """
    target = check_dtype(str(to_dtype).removeprefix("torch."))
    only = dotted(Globs(include, exclude), checkpoint)
    work = Recomputation(checkpoint, key, only, optimizer=optimizer)
    survey, reader = work.checkpoint.survey, work.reader
    if not (target.floating or is_complex(target.name) or only.include):
        message = f"{target.name} would cut off the fraction: a cast is not a quantization"
        raise TargetError(message, path=checkpoint.path, next="name the tensors with `--include=`, if it is meant")

    def wanted(tensor: Tensor) -> bool:
        return _is_cast(tensor, target, only)

    leaves = {part.storage for e in survey.tensors if e.tensor.requires_grad for part in reader.parts(e.tensor)}

    def unfit(item: SharedStorage, source: Dtype) -> str:
        reasons = (_unloadable(work.checkpoint.graph, use, source, target) for use in item.uses)
        return _lossy(source, target, item.key in leaves) or next(filter(None, reasons), "")

    overflows = _Overflows(work.checkpoint)
    before = after = tensors = tied = 0
    for item, source in work.choose(wanted, unfit):
        refused = overflows.first.get(item.key, "a tensor") if no_overflow else ""
        work.compute(item, Casting(source, target, overflows.count(item.key), refused))
        tensors += len(item.uses)
        tied += len(item.uses) > 1
        before += item.storage.nbytes
        after += item.storage.nbytes // source.itemsize * target.itemsize
    cast_entries = [entry for entry in work.chosen if wanted(entry.tensor)]
    # Several paths may lead to one of these tensors, and it is cast once.
    without_storage = {e.ref for e in cast_entries if not e.tensor.storage and e.tensor.kind == "meta"}
    tensors += sum(_recast_meta(work.editor, ref, target) for ref in without_storage)
    for entry in cast_entries:
        storages = {part.storage for part in reader.parts(entry.tensor) if part.storage}
        if is_sharded(entry.tensor) and storages <= work.added.keys():
            recast_spread(work.checkpoint, work.editor, entry.ref, target.name)
            tensors += not storages
    changes = []
    if tensors:
        notes = (f"{pluralize(tied, 'storage')} shared by several stays shared",) if tied else ()
        summary = f"{pluralize(tensors, 'tensor')} cast to {target.name}: {human_bytes(before)} -> {human_bytes(after)}"
        changes.append(Change("cast", key or "", tensors, 0, summary, notes))
    for path in work.spared:
        kept = sum(within(entry.path, path) and wanted(entry.tensor) for entry in survey.tensors)
        if kept:
            step = "`--optimizer` casts them as well"
            changes.append(Change("cast", path, 0, kept, f"{pluralize(kept, 'tensor')} not cast", (step,)))
    if parts := work.quantized.tensors & {entry.tensor for entry in work.chosen}:
        if checkpoint.container.in_blocks:
            raise quantized_refusal(checkpoint, work.quantized, "these are not cast")
        what = f"{pluralize(len(parts), 'tensor')} of quantized weights not cast ({work.quantized.words})"
        changes.append(Change("cast", "", 0, len(parts), what))
    if work.left:
        changes.append(Change("cast", "", 0, len(work.left), f"not cast: {join_limited(work.left, most=3)}"))
    if not tensors and not work.left:
        summary = f"no tensor to cast: all are {target.name} already, or not floating-point"
        changes.append(Change("cast", "", 0, 0, summary))
    return work.done(changes, deferred_changes=(overflows.changes,))


def _is_cast(tensor: Tensor, target: Dtype, only: Globs) -> bool:
    source = BY_NAME.get(tensor.dtype)
    if source is None or source.name == target.name or not _has_values(source):
        return False
    if tensor.kind == "meta" and _lossy(source, target, tensor.requires_grad):
        return False
    return source.floating or (bool(only.include) and (tensor.kind in WHOLE or is_sharded(tensor)))


class _Overflows:
    """Counts, by storage, of finite values that became infinite or NaN; complete once the values are computed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        survey = checkpoint.survey
        self.users = [
            (entry.path or "the tensor", {part.storage for part in survey.reader.parts(entry.tensor)})
            for entry in survey.tensors
        ]
        #: The path of the first tensor in each storage.
        self.first = {key: path for path, storages in reversed(self.users) for key in storages}
        self.counts: dict[str, Deferred] = {}

    def count(self, key: str) -> Deferred:
        """Return a new count for a storage."""
        self.counts[key] = Deferred()
        return self.counts[key]

    def changes(self) -> list[Change]:
        """Return the change to report once all values are computed; empty if nothing overflowed."""
        keys = {key for key, count in self.counts.items() if count.value}
        if not keys:
            return []
        summary = f"{pluralize(sum(self.counts[key].value for key in keys), 'finite value')} became infinite or NaN"
        paths = [path for path, storages in self.users if keys & storages] or ["a tensor"]
        return [Change("overflow", "", len(keys), 0, f"{summary}: in {join_limited(paths, most=3)}")]


class Casting(NamedTuple):
    """How to cast elements from one dtype to another.

    ``overflows`` counts finite values that become infinite or NaN. If ``refused``, the path of a tensor, is not "",
    such values are refused.
    """

    source: Dtype
    target: Dtype
    overflows: Deferred
    refused: str

    def results(self, pieces: Iterator[list[bytes]], path: str) -> Iterator[bytes]:
        """Yield the elements in the other dtype."""
        self.overflows.value = 0
        for (data,) in pieces:
            elements, overflowed = compute.cast_elements(data, self.source.name, self.target.name)
            self.overflows.value += overflowed
            if overflowed and self.refused:
                values = f"{pluralize(overflowed, 'finite value')} would be infinite or NaN in {self.target.name}"
                step = "leave it out with `--exclude=`, or leave out `--no-overflow=`"
                raise RefusedError(f"{self.refused}: {values}", path=path, next=step)
            yield elements


def _lossy(source: Dtype, target: Dtype, leaf: bool) -> str:
    """Return what a tensor would lose in another dtype apart from precision, or ""."""
    if is_complex(source.name) and not is_complex(target.name):
        return "its imaginary part would be lost"
    if leaf and not (target.floating or is_complex(target.name)):
        return "torch cannot load it with requires_grad"
    return ""


def _unloadable(graph: Graph, use: Use, source: Dtype, target: Dtype) -> str:
    """Return why torch could not load this tensor in another dtype, or "" if it can."""
    args = graph.nodes[use.args]
    signed = (
        target.storage
        and is_complex(source.name) == is_complex(target.name)
        and (target.floating or is_complex(target.name))
    )
    if has_bits(graph, use) and not signed:
        return "it carries a conjugate or negative bit"
    if not target.storage and type(args) is tuple and len(args) > 4 and graph.nodes[args[4]] is True:
        # torch/_utils.py, _rebuild_tensor_v3: set_() on a leaf that requires a gradient.
        return "torch cannot load it with requires_grad"
    return ""


def _recast_meta(editor: GraphEditor, ref: Ref, target: Dtype) -> bool:
    """Recast a tensor without a storage, ``_rebuild_meta_tensor_no_storage(dtype, ...)``, even inside a parameter."""
    for call in rebuild_calls(editor.graph, ref):
        args = editor.node(call.args_ref)
        if call.short_name == "_rebuild_meta_tensor_no_storage" and type(args) is tuple:
            editor.changed[call.args_ref] = (editor.named("torch", target.name), *args[1:])
            return True
    return False
