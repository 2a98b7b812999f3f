"""Cast tensors to another dtype; the values are computed piece by piece while the output is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ..base.dtypes import BY_NAME, DTYPES, Dtype, dtype_named, is_complex
from ..base.errors import RefusedError, TargetError, adding_path
from ..base.globs import Globs, Patterns
from ..base.text import human_bytes, join_limited, pluralize
from ..checkpoint.backends import backend_arguments
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import StorageData
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapped_name
from ..checkpoint.paths import within
from ..checkpoint.sharding import is_sharded
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import Tensor, rebuild_calls
from ..files.sources import Computed, Deferred
from ..formats.opening import takes_path
from ..pickles.nodes import Call, Global, Ref
from ..values.elements import StorageReader, number_width, storage_reader, swapped, whole_chunks
from ..values.torch import compute
from .optimizers import optimizers
from .sharded import recast_spread
from .storages import Use, chosen_tensors, copied_call, has_bits, repointed, storage_uses, with_plain_ids

#: Kinds of tensors that are cast whole, and kinds whose parts with values are cast. The other parts of the latter, such
#: as indices, keep their dtype.
_WHOLE: Final = ("dense", "meta")
_IN_PARTS: Final = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested", "jagged")
#: This dtype packs two values into each byte.
_FLOAT4: Final = "float4_e2m1fn_x2"


def check_dtype(name: str) -> Dtype:
    """Return the dtype to cast to; raise TargetError if it is unknown or values cannot be cast to it."""
    dtype = dtype_named(name)
    if dtype is not None and dtype.name == _FLOAT4:
        raise TargetError(f"torch itself cannot cast to {_FLOAT4}", next="--dtype float8_e4m3fn")
    if dtype is None or not _has_values(dtype):
        from difflib import get_close_matches

        near = get_close_matches(name, [item.name for item in DTYPES if item.floating], 1)
        raise TargetError(f"{name!r} is not a dtype to cast to", next=f"--dtype {near[0] if near else 'bfloat16'}")
    return dtype


def _has_values(dtype: Dtype) -> bool:
    """Return whether torch can cast elements of this dtype.

    It cannot cast packed pairs of values, nor bits that have no meaning without a scale.
    """
    return dtype.name != _FLOAT4 and dtype.name.startswith(
        ("float", "bfloat", "complex", "bcomplex", "int", "uint", "bool")
    )


@takes_path
def cast(
    checkpoint: Checkpoint,
    dtype: object,
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    no_overflow: bool = False,
    optimizer: bool = False,
) -> Checkpoint:
    """Cast tensors to another dtype: floating-point tensors, or the tensors that ``include`` names.

    ``dtype`` is a name or a torch dtype. ``key`` is the path of one state dict. Without ``key`` and ``include``,
    optimizer states keep their dtype, because second moments would become 0 in a narrower one; ``optimizer`` casts them
    too. Tensors that share a storage still share it, so every tensor that shares one with a chosen tensor is also cast.
    Quantized tensors are unchanged. The values are computed while the output is written. ``no_overflow`` refuses finite
    values that would become infinite or NaN; by default they are counted. Raise TargetError for an unknown dtype.

    >>> half = ckptool.cast("model.pth", torch.bfloat16)
    >>> half["conv1.weight"].dtype
    'bfloat16'
    """
    target = check_dtype(str(dtype).removeprefix("torch."))
    only, original = Globs(include, exclude), checkpoint
    checkpoint = with_plain_ids(original)
    survey, reader = checkpoint.survey, checkpoint.survey.reader
    uses = storage_uses(checkpoint.graph, reader)
    if not (target.floating or is_complex(target.name) or only.include):
        message = f"{target.name} would cut off the fraction: a cast is not a quantization"
        raise TargetError(message, path=checkpoint.path, next="name the tensors with --include where that is meant")
    all_kinds = optimizer or only.include or key is not None
    spared = [] if all_kinds else [item.path for item in optimizers(checkpoint.graph)]
    chosen = [entry for entry in chosen_tensors(checkpoint, key, only) if not _is_in(entry, spared)]
    wanted, left = _storages_to_cast(checkpoint, chosen, target, only)
    leaves = {part.storage for e in survey.tensors if e.tensor.requires_grad for part in reader.parts(e.tensor)}
    editor = GraphEditor(checkpoint.graph)
    added: dict[str, StorageData] = {}
    overflows = _Overflows(checkpoint)
    width = number_width(target) if checkpoint.container.byteorder == "big" and target.storage else 1
    before = after = tensors = tied = 0
    for name, users in uses.tensors.items():
        if name not in wanted:
            continue
        storage = reader.storages[name]
        dtypes = {use.tensor.dtype for use in users}
        exists = checkpoint.body(name) is not None or storage.location == "meta"
        if name in uses.pinned or len(dtypes) > 1 or not exists:
            left.append(f"{wanted[name]} (its storage has other uses as well)")
            continue
        source = BY_NAME[dtypes.pop()]
        reasons = (_unloadable(editor, use, source, target) for use in users)
        reason = _lossy(source, target, name in leaves) or next(filter(None, reasons), "")
        if reason:
            left.append(f"{wanted[name]} ({reason})")
            continue
        numel = storage.nbytes // source.itemsize
        size = numel * target.itemsize
        if storage.location != "meta":
            overflows.counts[name] = Deferred()
            refused = overflows.first.get(name, "a tensor") if no_overflow else ""
            how = Casting(source, target, width, overflows.counts[name], refused)
            parameters = storage_reader(checkpoint, name), 0, numel, how
            added[name] = StorageData(Computed(size, cast_elements, parameters, _part_cast), size)
        for use in users:
            _recast(editor, use, name, numel, target)
        tensors += len(users)
        tied += len(users) > 1
        before, after = before + storage.nbytes, after + size
    without_storage = {
        entry.ref
        for entry in chosen
        if not entry.tensor.storage and entry.tensor.kind == "meta" and _is_cast(entry.tensor, target, only)
    }
    tensors += sum(_recast_meta(editor, ref, target) for ref in without_storage)
    for entry in chosen:
        if not is_sharded(entry.tensor) or not _is_cast(entry.tensor, target, only):
            continue
        storages = {part.storage for part in reader.parts(entry.tensor) if part.storage}
        if storages <= added.keys():
            recast_spread(checkpoint, editor, entry.ref, target.name)
            tensors += not storages
    changes = []
    if tensors:
        notes = (f"{pluralize(tied, 'storage')} shared by several stays shared",) if tied else ()
        summary = f"{pluralize(tensors, 'tensor')} cast to {target.name}: {human_bytes(before)} -> {human_bytes(after)}"
        changes.append(Change("cast", key or "", tensors, 0, summary, notes))
    kept = sum(_is_in(entry, spared) and _is_cast(entry.tensor, target, only) for entry in survey.tensors)
    if kept:
        summary = f"{pluralize(kept, 'tensor')} of {join_limited([repr(path) for path in spared])} stay"
        changes.append(Change("cast", "", 0, kept, summary, ("--optimizer casts the states of optimizers, too",)))
    if left:
        changes.append(Change("cast", "", 0, len(left), f"not cast: {join_limited(left, most=3)}"))
    if not tensors:
        summary = f"no tensor to cast: the chosen ones are {target.name} already, or not floating"
        return original.changed(original.graph, [*changes, Change("cast", "", 0, 0, summary)])
    return checkpoint.changed(editor.done(), changes, added, needs_relayout=True, deferred_changes=(overflows.changes,))


def _storages_to_cast(
    checkpoint: Checkpoint, chosen: Sequence[TensorEntry], target: Dtype, only: Globs
) -> tuple[dict[str, str], list[str]]:
    """Return the storages to cast, each with the path of a chosen tensor in it, and the tensors that cannot be cast."""
    reader = checkpoint.survey.reader
    wanted: dict[str, str] = {}
    left: list[str] = []
    for entry in chosen:
        tensor = entry.tensor
        sharded, source = is_sharded(tensor), BY_NAME.get(tensor.dtype)
        if sharded and not _is_cast(tensor, target, only):
            continue
        if not tensor.storage and (tensor.kind in _IN_PARTS or sharded):
            parts = [part for part in reader.parts(tensor) if part.storage and part.dtype == tensor.dtype]
        else:
            parts = [tensor] if tensor.kind in _WHOLE and tensor.storage else []
        if sharded and not parts:
            continue  # this file has only the tensor's dtype, no values
        if parts and source is not None:
            if _is_cast(tensor, target, only):
                wanted.update((part.storage, entry.path) for part in parts if part.storage not in wanted)
        elif tensor.kind != "meta" and (source is None or source.floating or tensor.kind == "quantized"):
            left.append(f"{entry.path} ({tensor.kind})")
    return wanted, left


def _is_cast(tensor: Tensor, target: Dtype, only: Globs) -> bool:
    """Return whether a chosen tensor's dtype means that it is to be cast."""
    source = BY_NAME.get(tensor.dtype)
    if source is None or source.name == target.name or not _has_values(source):
        return False
    if tensor.kind == "meta" and _lossy(source, target, tensor.requires_grad):
        return False
    return source.floating or (bool(only.include) and (tensor.kind in _WHOLE or is_sharded(tensor)))


def _is_in(entry: TensorEntry, paths: Sequence[str]) -> bool:
    return any(within(entry.path, path) for path in paths)


class _Overflows:
    """Counts, by storage, of finite values that became infinite or NaN; complete once the values are computed.

    ``users`` lists the tensors of ``checkpoint``: their paths and storages.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        survey = checkpoint.survey
        self.users = [
            (entry.path or "the tensor", {part.storage for part in survey.reader.parts(entry.tensor)})
            for entry in survey.tensors
        ]
        #: The path of the first tensor in each storage.
        self.first = {key: path for path, storages in reversed(self.users) for key in storages}
        self.counts: dict[str, Deferred] = {}

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

    ``width`` is the size in bytes of the numbers whose byte order is swapped. ``overflows`` counts finite values that
    become infinite or NaN. If ``refused``, the path of a tensor, is not "", such values are refused.
    """

    source: Dtype
    target: Dtype
    width: int
    overflows: Deferred
    refused: str


def cast_elements(storage: StorageReader, begin: int, numel: int, how: Casting) -> Iterator[bytes]:
    """Yield ``numel`` elements of a storage, starting at element ``begin``, in another dtype."""
    source, target = how.source, how.target
    how.overflows.value = 0
    for data in whole_chunks(storage.loaded(begin * source.itemsize, numel * source.itemsize), source.itemsize):
        with adding_path(storage.path):
            elements, overflowed = compute.cast_elements(data, source.name, target.name)
        how.overflows.value += overflowed
        if overflowed and how.refused:
            values = f"{pluralize(overflowed, 'finite value')} would be infinite or NaN in {target.name}"
            step = "leave it out with --exclude, or leave out --no-overflow"
            raise RefusedError(f"{how.refused}: {values}", path=storage.path, next=step)
        yield swapped(elements, how.width)


def _part_cast(parameters: tuple[Any, ...], begin: int, size: int) -> tuple[object, ...]:
    storage, first, _, how = parameters
    width = how.target.itemsize
    return storage, first + begin // width, size // width, how


def _lossy(source: Dtype, target: Dtype, leaf: bool) -> str:
    """Return what a tensor would lose in another dtype apart from precision, or ""."""
    if is_complex(source.name) and not is_complex(target.name):
        return "its imaginary part would be lost"
    if leaf and not (target.floating or is_complex(target.name)):
        return "torch cannot load it with requires_grad"
    return ""


def _unloadable(editor: GraphEditor, use: Use, source: Dtype, target: Dtype) -> str:
    """Return why torch could not load this tensor in another dtype, or "" if it can."""
    args = editor.graph.nodes[use.args]
    signed = (
        target.storage
        and is_complex(source.name) == is_complex(target.name)
        and (target.floating or is_complex(target.name))
    )
    if has_bits(editor.graph, use) and not signed:
        return "it carries a conjugate or negative bit"
    if not target.storage and type(args) is tuple and len(args) > 4 and editor.graph.nodes[args[4]] is True:
        # torch/_utils.py, _rebuild_tensor_v3: set_() on a leaf that requires a gradient.
        return "torch cannot load it with requires_grad"
    return ""


def _recast(editor: GraphEditor, use: Use, key: str, numel: int, target: Dtype) -> None:
    """Point a tensor at the storage class of another dtype, as ``Tensor._reduce_ex_internal`` writes it.

    A dtype without a storage class gets an UntypedStorage.
    """
    graph = editor.graph
    cls = editor.named("torch", target.storage) if target.storage else editor.named("torch.storage", "UntypedStorage")
    args = repointed(editor, use, key, numel if target.storage else numel * target.itemsize, cls=cls)
    func = graph.nodes[use.func]
    assert type(func) is Global
    is_v3 = mapped_name(func).endswith("._rebuild_tensor_v3")
    if target.storage and is_v3:
        # (..., hooks, dtype[, metadata]) -> (..., hooks[, metadata])
        args = (*args[:6], *args[7:])
        _set_function(editor, use, "_rebuild_tensor_v2")
    elif not target.storage and is_v3:
        args = (*args[:6], editor.named("torch", target.name), *args[7:])
    elif not target.storage:
        grad = args[4] if len(args) > 4 else editor.constant(False)
        hooks = args[5] if len(args) > 5 else editor.call("collections", "OrderedDict")
        more = () if backend_arguments(mapped_name(func)) else args[6:]
        args = (*args[:4], grad, hooks, editor.named("torch", target.name), *more)
        _set_function(editor, use, "_rebuild_tensor_v3")
    editor.changed[use.args] = args


def _recast_meta(editor: GraphEditor, ref: Ref, target: Dtype) -> bool:
    """Recast a tensor without a storage, ``_rebuild_meta_tensor_no_storage(dtype, ...)``, even inside a parameter.

    Return whether there was such a call.
    """
    for call in rebuild_calls(editor.graph, ref):
        args = editor.node(call.args_ref)
        if call.short_name == "_rebuild_meta_tensor_no_storage" and type(args) is tuple:
            editor.changed[call.args_ref] = (editor.named("torch", target.name), *args[1:])
            return True
    return False


def _set_function(editor: GraphEditor, use: Use, name: str) -> None:
    """Make another function of ``torch._utils`` rebuild the tensor."""
    func = editor.named("torch._utils", name)
    holder = editor.node(use.holder)
    assert isinstance(holder, Call | tuple)
    editor.changed[use.holder] = copied_call(holder, func) if isinstance(holder, Call) else (func, *holder[1:])
