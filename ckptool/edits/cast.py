"""Other dtypes for tensors: their values are computed while the output is written, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME, DTYPES, SHORT_NAMES, Dtype
from ..base.errors import CkptoolError, RefusedError, TargetError
from ..base.globs import EVERY, Globs
from ..base.text import counted, human_bytes, listed
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Body
from ..checkpoint.graph_editor import Rewrite
from ..checkpoint.objects import mapped_name
from ..checkpoint.paths import within
from ..checkpoint.selection import selected_tensors
from ..checkpoint.sharding import is_sharded
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import Tensor, rebuild_calls
from ..files.sources import Computed
from ..pickles.nodes import Call, Global, Ref
from ..pickles.opcodes import REDUCE
from ..values.elements import loaded_bytes, number_width, swapped, whole_chunks
from .optimizers import optimizers
from .sharded import recast_spread
from .storages import Use, is_marked, repointed, storage_uses, with_plain_ids

#: Kinds of tensors whose values can be cast one by one; the parts of the others have meanings of their own.
_PLAIN: Final = ("dense",)
_VALUES: Final = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested", "jagged")


#: Turns little-endian elements of one dtype into those of another as torch does, (elements, dtype, target) to
#: (elements, how many finite values are none any more).
Caster: TypeAlias = "Callable[[bytes, str, str], tuple[bytes, int]]"


def check_dtype(name: str) -> Dtype:
    """The dtype to cast to; raises TargetError for one that is unknown, or that values cannot be cast to."""
    dtype = BY_NAME.get(SHORT_NAMES.get(name, name))
    if dtype is not None and dtype.name == "float4_e2m1fn_x2":
        raise TargetError("torch itself cannot cast to float4_e2m1fn_x2", next="--dtype float8_e4m3fn")
    if dtype is None or not _has_values(dtype):
        from difflib import get_close_matches

        near = get_close_matches(name, [item.name for item in DTYPES if item.floating], 1)
        raise TargetError(f"{name!r} is no dtype to cast to", next=f"--dtype {near[0] if near else 'bfloat16'}")
    return dtype


def _has_values(dtype: Dtype) -> bool:
    """Can torch cast its elements? Not two values in a byte, bits without a meaning, numbers without a scale."""
    return dtype.name != "float4_e2m1fn_x2" and dtype.name.startswith(
        ("float", "bfloat", "complex", "int", "uint", "bool")
    )


def cast(
    original: Checkpoint,
    dtype: str,
    caster: Caster,
    *,
    key: str | None = None,
    only: Globs = EVERY,
    strict: bool = False,
    everything: bool = False,
) -> Checkpoint:
    """Give tensors another dtype: the floating ones, or with patterns in ``only`` just those that match.

    ``key`` is the path of one state dict. Without it and without patterns the states of optimizers stay, which do not
    survive a narrower dtype: second moments become 0; ``everything`` casts them, too. Storages that tensors share stay
    shared, so what shares one with a chosen tensor is cast too. Quantized tensors stay. The values are computed by
    ``caster`` while the output is written; ``strict`` refuses finite values that would become infinite or NaN, which
    are counted otherwise. Raises TargetError for an unknown dtype.
    """
    target = check_dtype(dtype)
    checkpoint = with_plain_ids(original)
    survey = checkpoint.survey
    reader = survey.reader
    uses = storage_uses(checkpoint.graph, reader)
    if not (target.floating or _complex(target) or only.include):
        what = f"{target.name} would cut off what is behind the point: a cast is no quantization"
        raise TargetError(what, path=checkpoint.path, next="name the tensors with --include where that is meant")
    spared = (
        () if everything or only.include or key is not None else [item.path for item in optimizers(checkpoint.graph)]
    )
    wanted, left = _wanted(checkpoint, target, key, only, spared)
    leaves = {
        part.storage for entry in survey.tensors if entry.tensor.requires_grad for part in reader.parts(entry.tensor)
    }
    rewrite = Rewrite(checkpoint.graph)
    added: dict[str, Body] = {}
    tally = _Tally(checkpoint, strict)
    before = after = tensors = tied = 0
    for name, users in uses.tensors.items():
        if name not in wanted:
            continue
        storage = reader.storages[name]
        kinds = {use.tensor.dtype for use in users}
        there = checkpoint.body(name) is not None or storage.location == "meta"
        if name in uses.pinned or len(kinds) > 1 or not there:
            left.append(f"{wanted[name]} (its storage is used in another way, too)")
            continue
        source = BY_NAME[users[0].tensor.dtype]
        reason = _lossy(source, target, name in leaves)
        reason = reason or next(filter(None, (_unfit(rewrite, use, source, target) for use in users)), "")
        if reason:
            left.append(f"{wanted[name]} ({reason})")
            continue
        numel = storage.nbytes // source.itemsize
        size = numel * target.itemsize
        if storage.location != "meta":
            added[name] = Body(Computed(size, _casting(checkpoint, name, numel, source, target, caster, tally)), size)
        for use in users:
            _recast(rewrite, use, name, numel, target)
        tensors += len(users)
        tied += len(users) > 1
        before, after = before + storage.nbytes, after + size
    bare = {
        entry.ref
        for entry in _chosen(checkpoint, key, only, spared)
        if not entry.tensor.storage and entry.tensor.kind == "meta" and _casts(entry.tensor, target, only)
    }
    tensors += sum(_recast_meta(rewrite, ref, target) for ref in bare)
    spread = [entry for entry in _chosen(checkpoint, key, only, spared) if is_sharded(entry.tensor)]
    for entry in spread:
        held = {part.storage for part in reader.parts(entry.tensor) if part.storage}
        if _casts(entry.tensor, target, only) and held <= added.keys():
            recast_spread(checkpoint, rewrite, entry.ref, target.name)
            tensors += not held
    changes = []
    if tensors:
        notes = (f"{counted(tied, 'storage')} shared by several stays shared",) if tied else ()
        what = f"{counted(tensors, 'tensor')} cast to {target.name}: {human_bytes(before)} -> {human_bytes(after)}"
        changes.append(Change("cast", key or "", tensors, 0, what, notes))
    kept = [entry for entry in survey.tensors if _spared(entry, spared) and _casts(entry.tensor, target, only)]
    if kept:
        what = f"{counted(len(kept), 'tensor')} of {listed([repr(path) for path in spared])} stay"
        changes.append(Change("cast", "", 0, len(kept), what, ("--all casts the states of optimizers, too",)))
    if left:
        changes.append(Change("cast", "", 0, len(left), f"not cast: {listed(left, most=3)}"))
    if not tensors:
        what = f"no tensor to cast: what is chosen is {target.name} already, or no floating tensor"
        return original.changed(original.graph, [*changes, Change("cast", "", 0, 0, what)])
    return checkpoint.changed(rewrite.done(), changes, added, anew=True, later=(tally.changes,))


def _wanted(
    checkpoint: Checkpoint, target: Dtype, key: str | None, only: Globs, spared: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The storages to cast, each with the path of a tensor that wants it; and the paths of tensors that cannot be."""
    survey = checkpoint.survey
    wanted: dict[str, str] = {}
    left: list[str] = []
    for entry in _chosen(checkpoint, key, only, spared):
        tensor = entry.tensor
        if is_sharded(tensor) and not _casts(tensor, target, only):
            continue
        if not tensor.storage and (tensor.kind in _VALUES or is_sharded(tensor)):
            parts = [part for part in survey.reader.parts(tensor) if part.storage and part.dtype == tensor.dtype]
        else:
            parts = [tensor] if tensor.kind in (*_PLAIN, "meta") and tensor.storage else []
        source = BY_NAME.get(tensor.dtype)
        if is_sharded(tensor) and not parts:
            continue  # nothing of it is here, but its dtype
        if parts and source is not None:
            if _casts(tensor, target, only):
                wanted.update((part.storage, entry.path) for part in parts if part.storage not in wanted)
        elif tensor.kind != "meta" and (source is None or source.floating or tensor.kind == "quantized"):
            left.append(f"{entry.path} ({tensor.kind})")
    return wanted, left


def _casts(tensor: Tensor, target: Dtype, only: Globs) -> bool:
    """Is a chosen tensor to be cast, as far as its dtype tells?"""
    source = BY_NAME.get(tensor.dtype)
    if source is None or source.name == target.name or not _has_values(source):
        return False
    if tensor.kind == "meta" and _lossy(source, target, tensor.requires_grad):
        return False
    return source.floating or (bool(only.include) and (tensor.kind in (*_PLAIN, "meta") or is_sharded(tensor)))


def _spared(entry: TensorEntry, paths: Sequence[str]) -> bool:
    return any(within(entry.path, path) for path in paths)


def _chosen(checkpoint: Checkpoint, key: str | None, only: Globs, spared: Sequence[str]) -> Iterator[TensorEntry]:
    for entry in selected_tensors(checkpoint, key):
        if (not only or only.match(entry.key, entry.path)) and not _spared(entry, spared):
            yield entry


class _Tally:
    """Counts what overflows while values are computed, storage by storage."""

    def __init__(self, checkpoint: Checkpoint, strict: bool) -> None:
        self.checkpoint = checkpoint
        self.strict = strict
        self.found: dict[str, int] = {}

    def add(self, key: str, target: Dtype, count: int) -> None:
        self.found[key] = self.found.get(key, 0) + count
        if self.strict and count:
            path = self.paths({key})[0]
            what = f"{path}: {counted(count, 'finite value')} would be infinite or NaN in {target.name}"
            raise RefusedError(
                what, path=self.checkpoint.path, next="leave it out with --exclude, or leave out --strict"
            )

    def paths(self, keys: set[str]) -> list[str]:
        survey = self.checkpoint.survey
        found = [entry for entry in survey.tensors if keys & {p.storage for p in survey.reader.parts(entry.tensor)}]
        return [entry.path or "the tensor" for entry in found] or ["a tensor"]

    def changes(self) -> list[Change]:
        """What is to be said once everything was computed."""
        keys = {key for key, count in self.found.items() if count}
        if not keys:
            return []
        what = f"{counted(sum(self.found.values()), 'finite value')} became infinite or NaN"
        return [Change("overflow", "", len(keys), 0, f"{what}: in {listed(self.paths(keys), most=3)}")]


def _casting(
    checkpoint: Checkpoint, key: str, numel: int, source: Dtype, target: Dtype, caster: Caster, tally: _Tally
) -> Callable[[], Iterator[bytes]]:
    width = number_width(target) if checkpoint.container.byteorder == "big" and target.storage else 1

    def chunks() -> Iterator[bytes]:
        tally.found[key] = 0
        for data in whole_chunks(loaded_bytes(checkpoint, key, 0, numel * source.itemsize), source.itemsize):
            try:
                made, overflowed = caster(data, source.name, target.name)
            except CkptoolError as error:
                error.path = error.path or checkpoint.path
                raise
            if overflowed:
                tally.add(key, target, overflowed)
            yield swapped(made, width)

    return chunks


def _lossy(source: Dtype, target: Dtype, leaf: bool) -> str:
    """What a tensor of one dtype would lose in another besides precision, "" for nothing."""
    if _complex(source) and not _complex(target):
        return "its imaginary part would be lost"
    if leaf and not (target.floating or _complex(target)):
        return "torch cannot load it with requires_grad"
    return ""


def _unfit(rewrite: Rewrite, use: Use, source: Dtype, target: Dtype) -> str:
    """Why torch could not load this tensor in another dtype, "" if it can."""
    args = rewrite.graph.nodes[use.args]
    signed = target.storage and _complex(source) == _complex(target) and (target.floating or _complex(target))
    if is_marked(rewrite.graph, use) and not signed:
        return "it carries a conjugate or negative bit"
    if not target.storage and type(args) is tuple and len(args) > 4 and rewrite.graph.nodes[args[4]] is True:
        # torch/_utils.py, _rebuild_tensor_v3: set_() on a leaf that requires a gradient.
        return "torch cannot load it with requires_grad"
    return ""


def _complex(dtype: Dtype) -> bool:
    return dtype.name.startswith("complex")


def _recast(rewrite: Rewrite, use: Use, key: str, numel: int, target: Dtype) -> None:
    """The use with the storage class of another dtype, or without one: as ``Tensor._reduce_ex_internal`` writes it."""
    graph = rewrite.graph
    cls = rewrite.named("torch", target.storage) if target.storage else rewrite.named("torch.storage", "UntypedStorage")
    args = repointed(rewrite, use, key, numel if target.storage else numel * target.itemsize, cls=cls)
    func = graph.nodes[use.func]
    assert type(func) is Global
    name = mapped_name(func).rpartition(".")[2]
    if target.storage:
        if name == "_rebuild_tensor_v3":
            # (..., hooks, dtype[, metadata]) -> (..., hooks[, metadata])
            args = (*args[:6], *args[7:])
            _rename(rewrite, use, rewrite.named("torch._utils", "_rebuild_tensor_v2"))
    elif name == "_rebuild_tensor_v3":
        args = (*args[:6], rewrite.named("torch", target.name), *args[7:])
    else:
        grad = args[4] if len(args) > 4 else rewrite.constant(False)
        hooks = args[5] if len(args) > 5 else _no_hooks(rewrite)
        args = (*args[:4], grad, hooks, rewrite.named("torch", target.name), *args[6:])
        _rename(rewrite, use, rewrite.named("torch._utils", "_rebuild_tensor_v3"))
    rewrite.changed[use.args] = args


def _recast_meta(rewrite: Rewrite, ref: Ref, target: Dtype) -> bool:
    """A tensor without a storage: ``_rebuild_meta_tensor_no_storage(dtype, ...)``, a parameter around it or not."""
    for call in rebuild_calls(rewrite.graph, ref):
        args = rewrite.node(call.args_ref)
        if call.short_name == "_rebuild_meta_tensor_no_storage" and type(args) is tuple:
            rewrite.changed[call.args_ref] = (rewrite.named("torch", target.name), *args[1:])
            return True
    return False


def _rename(rewrite: Rewrite, use: Use, func: Ref) -> None:
    """Let another function rebuild the tensor."""
    holder = rewrite.node(use.holder)
    if isinstance(holder, Call):
        rewrite.changed[use.holder] = Call(holder.op, func, holder.args, holder.kwargs).filled(
            holder.items, holder.pairs, holder.states
        )
    else:
        assert type(holder) is tuple
        rewrite.changed[use.holder] = (func, *holder[1:])


def _no_hooks(rewrite: Rewrite) -> Ref:
    return rewrite.add(Call(REDUCE, rewrite.named("collections", "OrderedDict"), rewrite.constant(())))
