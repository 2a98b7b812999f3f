"""Compute the values of tensors: choose the storages that an edit may change, and stream the results into the output.

Tensors that share a storage change together. Optimizer states, quantized and packed tensors, and storages that are also
held by something else stay unchanged, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import isfinite, prod
from typing import Final, Protocol

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import CkptoolError, MalformedError, RefusedError, TargetError, adding_path
from ..base.globs import MATCH_ALL, Globs
from ..base.records import NamedTuple, new_tuple
from ..base.steps import AnyStep, advised, command, suggested_output
from ..base.text import pluralize, quoted
from ..checkpoint.backends import FROM_STORAGE, backend_arguments
from ..checkpoint.checkpoint import Change, Checkpoint, DeferredChanges, rescue_step
from ..checkpoint.container import StorageData
from ..checkpoint.graph_builder import contiguous
from ..checkpoint.graph_editor import GraphEditor, without_views
from ..checkpoint.objects import mapped_name, mapping
from ..checkpoint.paths import within
from ..checkpoint.quantized import Quantization, quantization
from ..checkpoint.selection import dotted, only_one, selected
from ..checkpoint.survey import StateDict, TensorEntry
from ..checkpoint.tensors import Storage, Tensor, TensorReader, contiguous_strides, is_sharded, view_id
from ..files.sources import Computed, Piece, size_of
from ..pickles.nodes import Call, Global, Graph, Persistent, Ref, children
from ..safety.storages import storage_flaws
from ..values.elements import StorageReader, number_width, reblocked, storage_reader, swapped, whole_chunks
from ..values.interpretation import lazy_bits
from .optimizers import optimizers

#: Kinds of tensors that are computed whole, and kinds whose parts with values are computed. The other parts of the
#: latter, such as indices, stay unchanged.
WHOLE: Final = ("dense", "meta")
_IN_PARTS: Final = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested", "jagged")
#: Floating-point dtypes without arithmetic: a scale that is only an exponent, and two values packed into a byte.
_NO_ARITHMETIC: Final = ("float8_e8m0fnu", "float4_e2m1fn_x2")

#: Bytes of a storage that are computed at once: they and their results stay in the processor's cache.
_STEP: Final = 1 << 20


class SharedStorage(NamedTuple):
    """A storage that an edit may change, the path of one tensor in it, and the uses of all tensors that read it.

    ``body`` has its bytes, or None if they are missing or were not looked up.
    """

    storage: Storage
    path: str
    uses: list[Use]
    body: StorageData | None = None

    @property
    def key(self) -> str:
        """The key of the storage."""
        return self.storage.key

    @property
    def dtype(self) -> Dtype | None:
        """The dtype of all its tensors; None if they differ or torch does not have it."""
        first = self.uses[0].tensor.dtype
        alike = len(self.uses) == 1 or all(use.tensor.dtype == first for use in self.uses)
        return BY_NAME.get(first) if alike else None

    @property
    def view(self) -> Tensor | None:
        """The tensor, if all uses are the same view of the storage; otherwise None."""
        first = self.uses[0].tensor
        return first if len({view_id(use.tensor) for use in self.uses}) == 1 else None


class Operation(Protocol):
    """An operation on elements: plain data, so that another process can carry it out.

    ``source`` is the dtype of the elements it reads, ``target`` the dtype of the results.
    """

    @property
    def source(self) -> Dtype: ...

    @property
    def target(self) -> Dtype: ...

    def results(self, pieces: Iterator[list[bytes]], path: str) -> Iterator[bytes]:
        """Yield the results for each piece, both in little-endian order.

        A piece has the same number of elements from each storage, in buffers that are overwritten once the next piece
        is requested. ``path`` is for error messages.
        """
        ...


def has_arithmetic(tensor: Tensor) -> bool:
    """Return whether torch can calculate with the elements: real floating-point numbers with a sign."""
    dtype = BY_NAME.get(tensor.dtype)
    return dtype is not None and dtype.floating and dtype.name not in _NO_ARITHMETIC


def quantized_refusal(checkpoint: Checkpoint, found: Quantization, reason: str) -> RefusedError:
    """Return the error for an edit that computes with weights, of a checkpoint whose weights are quantized."""
    step: AnyStep = "do it with the plain weights that were quantized"
    if checkpoint.container.in_blocks:
        step = plain_step(checkpoint, ".safetensors", "plain")
    elif found.is_reversible:
        output = suggested_output(checkpoint.path, "plain")
        step = "turn them back first: " + command("dequantize", checkpoint.path, output=output)
    return RefusedError(f"it has quantized weights ({found.words}): {reason}", path=checkpoint.path, next=step)


def refuse_blocks(checkpoint: Checkpoint, found: Quantization) -> None:
    """Raise RefusedError if weights are in blocks of GGUF and the gguf package cannot compute their values."""
    from ..values.dequantized import need_gguf  # imported only for GGUF

    types = {weight.code.dtype for weight in found.weights if weight.arithmetic == "gguf"}
    if types and checkpoint.container.byteorder == "big":
        what = "its blocks are big-endian, and the gguf package dequantizes little-endian ones"
        raise RefusedError(what, path=checkpoint.path, next="convert a copy first: gguf-convert-endian COPY little")
    if types:
        need_gguf(types, checkpoint.path)


def plain_step(checkpoint: Checkpoint, extension: str, word: str = "") -> AnyStep:
    """Return the command that turns blocks back into plain weights, or why they cannot be turned back."""
    try:
        refuse_blocks(checkpoint, quantization(checkpoint))
        checkpoint.container.originals()
    except CkptoolError as error:
        return advised(f"its weights cannot be turned back: {error.what}", error.step)
    output = suggested_output(checkpoint.path, word, extension)
    return "turn them back first: " + command("convert", checkpoint.path, output=output)


class Recomputation:
    """An edit that computes values, from the choice of tensors to the edited checkpoint.

    ``key`` and ``only`` choose tensors. Without them, optimizer states stay unchanged, because their numbers do not
    follow from new values of the parameters; ``optimizer`` chooses them too. ``checkpoint`` has the persistent ids of
    zips. ``left`` lists tensors that were chosen but stay unchanged, with the reasons.
    """

    def __init__(
        self, original: Checkpoint, key: str | None = None, only: Globs = MATCH_ALL, *, optimizer: bool = False
    ) -> None:
        self.original = original
        self.checkpoint = with_plain_ids(original)
        self.reader = self.checkpoint.survey.reader
        self.editor = GraphEditor(self.checkpoint.graph)
        self.added: dict[str, StorageData] = {}
        self.left: list[str] = []
        self._key, self._only = key, only
        #: The CRC-32 of everything that is read to compute values.
        self._checksums = self.checkpoint.cache.checksums = {}
        #: Whether a function that rebuilds tensors takes their dtype.
        self._is_v3: dict[Ref, bool] = {}
        self._optimizer = bool(optimizer or only.include or key is not None)

    @cached_property
    def spared(self) -> list[str]:
        """The paths of the optimizers that stay unchanged."""
        return [] if self._optimizer else [item.path for item in optimizers(self.checkpoint.graph)]

    @cached_property
    def quantized(self) -> Quantization:
        """The quantized weights. None of their parts is computed: codes and scales are no values of a weight."""
        return quantization(self.checkpoint)

    @cached_property
    def _quantized_storages(self) -> frozenset[str]:
        parts = (part for tensor in self.quantized.tensors for part in self.reader.parts(tensor))
        return frozenset(part.storage for part in parts if part.storage)

    @cached_property
    def chosen(self) -> list[TensorEntry]:
        """The chosen tensors, without the optimizer states that stay unchanged."""
        entries = chosen_tensors(self.checkpoint, self._key, self._only)
        return [entry for entry in entries if not any(within(entry.path, path) for path in self.spared)]

    @cached_property
    def _uses(self) -> Uses:
        return storage_uses(self.checkpoint.graph, self.reader)

    def storage(self, key: str, path: str = "") -> SharedStorage:
        """Return a storage that some tensor uses, whether or not it may be changed."""
        return SharedStorage(self.reader.storages[key], path, self._uses.tensors[key])

    def is_pinned(self, key: str) -> bool:
        """Return whether something other than a tensor holds the storage, so that it must stay unchanged."""
        return key in self._uses.pinned

    def storages(self, keys: Container[str]) -> Iterator[SharedStorage]:
        """Yield the storages among ``keys`` whose bytes are present and which only tensors hold."""
        for key in self._uses.tensors:
            on_meta = self.reader.storages[key].location == "meta"
            if key in keys and not (on_meta or self.is_pinned(key)) and self.checkpoint.body(key) is not None:
                yield self.storage(key)

    def choose(
        self, wanted: Callable[[Tensor], bool], unfit: Callable[[SharedStorage, Dtype], str] | None = None
    ) -> Iterator[tuple[SharedStorage, Dtype]]:
        """Yield each storage that holds chosen and ``wanted`` tensors, and the dtype of its elements.

        This includes storages on meta, which have no bytes. ``unfit`` returns the reason why a storage must stay
        unchanged, or ""; by default that is a conjugate or negative bit.
        """
        unfit = unfit or self._lazy_bits
        paths = self._wanted_storages(wanted)
        for key in self._uses.tensors:
            if key not in paths:
                continue
            storage = self.reader.storages[key]
            on_meta = storage.location == "meta"
            body = None if on_meta else self.checkpoint.body(key)
            item = new_tuple(SharedStorage, (storage, paths[key], self._uses.tensors[key], body))
            present, dtype = on_meta or body is not None, item.dtype
            if self.is_pinned(key) or dtype is None or not present:
                self.left.append(f"{item.path} (its storage has other uses as well)")
            elif reason := unfit(item, dtype):
                self.left.append(f"{item.path} ({reason})")
            else:
                yield item, dtype

    def _wanted_storages(self, wanted: Callable[[Tensor], bool]) -> dict[str, str]:
        """Return the storages of wanted tensors, each with a path; list tensors of other kinds in ``left``."""
        paths: dict[str, str] = {}
        for entry in self.chosen:
            tensor = entry.tensor
            sharded, source = is_sharded(tensor), BY_NAME.get(tensor.dtype)
            if sharded and not wanted(tensor):
                continue
            if not tensor.storage and (tensor.kind in _IN_PARTS or sharded):
                parts = [part for part in self.reader.parts(tensor) if part.storage and part.dtype == tensor.dtype]
            else:
                parts = [tensor] if tensor.kind in WHOLE and tensor.storage else []
            if sharded and not parts:
                continue  # this file has only the tensor's dtype, no values
            if parts and source is not None:
                if wanted(tensor):
                    for part in parts:
                        if part.storage not in self._quantized_storages:
                            paths.setdefault(part.storage, entry.path)
                        elif tensor not in self.quantized.tensors:
                            self.left.append(f"{entry.path} (its storage also holds part of a quantized weight)")
            elif tensor.kind != "meta" and (source is None or source.floating or tensor.kind == "quantized"):
                self.left.append(f"{entry.path} ({tensor.kind})")
        return paths

    def _lazy_bits(self, item: SharedStorage, _: Dtype) -> str:
        bits = any(has_bits(self.checkpoint.graph, use) for use in item.uses)
        return "it carries a conjugate or negative bit" if bits else ""

    def compute(self, item: SharedStorage, how: Operation, others: Sequence[StorageReader] = ()) -> None:
        """Replace the elements of a storage by results of an operation on them and ``others`` of the same size."""
        numel = item.storage.nbytes // how.source.itemsize
        piece = None
        if item.storage.location != "meta":
            reader = storage_reader(self.checkpoint, item.key, item.body)
            width = reader.width if how.target == how.source else self.width(how.target)
            parameters = (reader, *others), 0, numel, width, how
            for each in (reader, *others):
                each.cache.checksums = self._checksums
            size = numel * how.target.itemsize
            piece = new_tuple(Computed, (size, elementwise, parameters, False))
        self.replace(item, piece, None if how.target == how.source else how.target)

    def replace(self, item: SharedStorage, piece: Piece | None, dtype: Dtype | None = None) -> None:
        """Give a storage as many other elements, of ``dtype`` unless it is None; ``piece`` is None on meta."""
        self._refuse_quantized(item)
        if piece is not None:
            self.added[item.storage.key] = new_tuple(StorageData, (piece, size_of(piece), None, False))
        if dtype is not None and (source := item.dtype) is not None:
            for use in item.uses:
                self._recast(use, item.key, item.storage.nbytes // source.itemsize, dtype)

    def reshape(self, item: SharedStorage, shape: tuple[int, ...], piece: Piece) -> None:
        """Give all tensors of a storage another shape, in row-major order, and other bytes.

        All tensors must be the same ``view`` of the storage.
        """
        assert item.view is not None
        self._refuse_quantized(item)
        for use in item.uses:
            numel = size_of(piece) // item.storage.dtype.itemsize
            self.editor.changed[use.args] = repointed(self.editor, use, item.key, numel, shape=shape)
        self.added[item.key] = StorageData(piece, size_of(piece))

    def tensor(
        self, name: str, dtype: Dtype, shape: tuple[int, ...], piece: Piece, location: str = "cpu", grad: bool = False
    ) -> Ref:
        """Add a tensor in row-major order, with a storage of its own; return its reference, for the entry of a mapping.

        ``name`` is the key of the storage, unless another storage has it. ``grad``: it requires a gradient.
        """
        key = self.free_key(name)
        self.added[key] = StorageData(piece, prod(shape) * dtype.itemsize)
        return self.editor.tensor(contiguous(dtype, shape, key)._replace(location=location, requires_grad=grad))

    def refill(self, state_dict: StateDict, new: Mapping[str, Ref]) -> None:
        """Give a state dict other values for these keys, at the end for keys that it lacks."""
        graph, left = self.checkpoint.graph, dict(new)
        held = mapping(graph, state_dict.ref) or ()
        items = [(name, left.pop(str(graph.nodes[name]), ref)) for name, ref in held]
        self.editor.refill(state_dict.ref, [*items, *((self.editor.add(name), ref) for name, ref in left.items())])

    def free_key(self, name: str) -> str:
        """Return ``name``, or a longer key if another storage has it."""
        number = 0
        while name in self.reader.storages or name in self.added:
            number += 1
            name = f"{name}.{number}"
        return name

    def width(self, dtype: Dtype) -> int:
        """Return the size in bytes of the numbers to swap before new elements of a dtype are written; 1 for none."""
        return number_width(dtype) if self.checkpoint.container.byteorder == "big" and dtype.storage else 1

    def _refuse_quantized(self, item: SharedStorage) -> None:
        if item.key in self._quantized_storages:
            raise quantized_refusal(self.checkpoint, self.quantized, f"{item.path or 'a tensor'} is part of one")

    def done(
        self,
        changes: Sequence[Change],
        *,
        others: Sequence[Checkpoint] = (),
        deferred_changes: Sequence[DeferredChanges] = (),
    ) -> Checkpoint:
        """Return the edited checkpoint, or the original one with these changes if nothing was computed."""
        if not (self.added or self.editor.changed):
            return self.original.changed(self.original.graph, changes)
        if self.original.edited:  # removed tensors still describe their storages, by the former dtype
            used = {*self.checkpoint.graph.reachable()}
            stale = (ref for ref, storage in self.reader.uses() if storage.key in self.added and ref not in used)
            self.editor.changed |= dict.fromkeys(stale)
        graph = self.editor.done()
        return self.checkpoint.changed(
            graph, changes, self.added, needs_relayout=True, others=others, deferred_changes=deferred_changes
        )

    def _recast(self, use: Use, key: str, numel: int, target: Dtype) -> None:
        """Point a tensor at the storage class of another dtype, as ``Tensor._reduce_ex_internal`` writes it."""
        editor = self.editor
        module, storage_class = ("torch", target.storage) if target.storage else ("torch.storage", "UntypedStorage")
        numel = numel if target.storage else numel * target.itemsize
        args = repointed(editor, use, key, numel, cls=editor.named(module, storage_class))
        func = editor.graph.nodes[use.func]
        assert type(func) is Global
        is_v3 = self._is_v3.get(use.func)
        if is_v3 is None:
            is_v3 = self._is_v3[use.func] = mapped_name(func).endswith("._rebuild_tensor_v3")
        if target.storage and is_v3:
            # (..., hooks, dtype[, metadata]) -> (..., hooks[, metadata])
            args = (*args[:6], *args[7:])
            self._set_function(use, "_rebuild_tensor_v2")
        elif not target.storage and is_v3:
            args = (*args[:6], editor.named("torch", target.name), *args[7:])
        elif not target.storage:
            grad = args[4] if len(args) > 4 else editor.constant(False)
            hooks = args[5] if len(args) > 5 else editor.call("collections", "OrderedDict")
            more = () if backend_arguments(mapped_name(func)) else args[6:]
            args = (*args[:4], grad, hooks, editor.named("torch", target.name), *more)
            self._set_function(use, "_rebuild_tensor_v3")
        editor.changed[use.args] = args

    def _set_function(self, use: Use, name: str) -> None:
        """Make another function of ``torch._utils`` rebuild the tensor."""
        func = self.editor.named("torch._utils", name)
        holder = self.editor.node(use.holder)
        assert isinstance(holder, Call | tuple)
        new = copied_call(holder, func) if isinstance(holder, Call) else (func, *holder[1:])
        self.editor.changed[use.holder] = new


def elementwise(
    storages: Sequence[StorageReader], begin: int, numel: int, width: int, how: Operation
) -> Iterator[bytes]:
    """Yield the results for ``numel`` elements from ``begin`` on; numbers of ``width`` bytes are swapped."""
    path = storages[0].path
    with adding_path(path):
        for data in how.results(_pieces(storages, begin, numel, how.source.itemsize), path):
            yield swapped(data, width)


def _pieces(storages: Sequence[StorageReader], begin: int, numel: int, itemsize: int) -> Iterator[list[bytes]]:
    """Yield the elements in pieces: the same number from each storage."""
    streams = [storage.loaded(begin * itemsize, numel * itemsize, _STEP) for storage in storages]
    if len(streams) == 1:
        yield from ([data] for data in whole_chunks(streams[0], itemsize))
        return
    aligned = [reblocked(stream, _STEP) for stream in streams]
    while any(parts := [next(stream, b"") for stream in aligned]):
        if len({len(part) for part in parts}) > 1:
            raise MalformedError("a storage ends too early", path=storages[0].path)
        yield parts


# -- the calls that make tensors from storages

_REBUILDS = frozenset(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"))


class Use(NamedTuple):
    """A tensor's use of a storage, with references to the nodes involved.

    ``args`` is the tuple (storage, offset, shape, strides, ...), ``storage`` the Persistent in it, and ``func`` the
    rebuild function. ``holder`` is the node that refers to ``func``: the call itself, or the arguments of a
    ``_rebuild_from_type_v2`` call.
    """

    holder: Ref
    func: Ref
    args: Ref
    storage: Ref
    tensor: Tensor


class Uses(NamedTuple):
    """The uses of each storage by key, and the keys of storages that are also values themselves."""

    tensors: dict[str, list[Use]]
    pinned: frozenset[str]


def with_plain_ids(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with persistent ids as in zips; the same checkpoint if it already has these."""
    graph = without_views(checkpoint.graph)
    return checkpoint if graph is checkpoint.graph else checkpoint.changed(graph, [], needs_relayout=True)


def chosen_tensors(checkpoint: Checkpoint, key: str | None, only: Globs) -> list[TensorEntry]:
    """Return the tensors that match ``only``, in the state dict at ``key`` unless it is None."""
    survey = checkpoint.survey
    tensors = survey.tensors if key is None else survey.tensors_in([item.path for item in selected(checkpoint, key)])
    only = dotted(only, checkpoint)
    return [entry for entry in tensors if only.match(entry.key, entry.path)] if only else tensors


def tensors_of(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, Tensor]:
    """Return the tensors of a state dict by key."""
    reader, nodes = checkpoint.survey.reader, checkpoint.graph.nodes
    return {str(nodes[name]): tensor for name, ref in state_dict.items if (tensor := reader.tensor(ref)) is not None}


def named_tensors(checkpoint: Checkpoint, key: str | None) -> tuple[StateDict, dict[str, Ref], dict[str, Tensor]]:
    """Return the state dict at ``key``, or the only one, with its values and its tensors by key."""
    state_dict, nodes = only_one(checkpoint, selected(checkpoint, key)), checkpoint.graph.nodes
    return state_dict, {str(nodes[name]): ref for name, ref in state_dict.items}, tensors_of(checkpoint, state_dict)


def chosen_storages(checkpoint: Checkpoint, key: str | None, only: Globs) -> set[str]:
    """Return the keys of the chosen tensors' storages; all storages if nothing narrows the choice."""
    reader = checkpoint.survey.reader
    if key is None and not only:
        return {*reader.storages}
    return {part.storage for entry in chosen_tensors(checkpoint, key, only) for part in reader.parts(entry.tensor)}


def storage_uses(graph: Graph, reader: TensorReader) -> Uses:
    """Return all storage uses that are reachable from the root."""
    uses: dict[str, list[Use]] = {}
    pinned: set[str] = set()
    known: set[Ref] = set()
    functions: dict[Ref, str] = {}
    for ref, function in graph.of_type(Global):
        module, _, name = mapped_name(function).rpartition(".")
        if module in ("torch._utils", "torch._tensor", "torch.tensor"):
            functions[ref] = name
        elif backend_arguments(mapped_name(function)) == FROM_STORAGE:
            functions[ref] = "_rebuild_tensor_v2"
    reachable = list(graph.reachable())
    for ref in reachable:
        node = graph.nodes[ref]
        if type(node) is not Call or node.func not in functions:
            continue
        name, holder, func, args = functions[node.func], ref, node.func, node.args
        outer = graph.nodes[args]
        if name.startswith("_rebuild_from_type") and type(outer) is tuple and len(outer) > 2:
            # (function, type, arguments, state): the inner function's call has no node of its own.
            name, holder, func, args = functions.get(outer[0], ""), node.args, outer[0], outer[2]
        parts = graph.nodes[args]
        tensor = reader.tensor(ref)
        if name not in _REBUILDS or type(parts) is not tuple or tensor is None or not tensor.storage:
            continue
        known.add(args)
        uses.setdefault(tensor.storage, []).append(new_tuple(Use, (holder, func, args, parts[0], tensor)))
    mentions = dict(reader.uses())
    in_use = {use.storage for group in uses.values() for use in group}
    # A reference that the pickle took only once has one parent: the arguments of its tensor. So nothing else holds it.
    if graph.fetched is not None and mentions.keys() <= in_use and mentions.keys().isdisjoint(graph.fetched):
        reachable = []
    for ref in reachable:
        node = graph.nodes[ref]
        inside = node if type(node) is tuple else () if type(node) is str else children(node)
        if mentions.keys().isdisjoint(inside):
            continue
        # The first argument of a rebuild call is the use itself.
        pinned.update(mentions[child].key for child in inside[1 if ref in known else 0 :] if child in mentions)
    if (storage := reader.storage(graph.root)) is not None:
        pinned.add(storage.key)
    return Uses(uses, frozenset(pinned))


def has_bits(graph: Graph, use: Use) -> bool:
    """Return whether the tensor has a conjugate or negative bit, which a dict in the last argument records."""
    args = graph.nodes[use.args]
    return type(args) is tuple and len(args) > 6 and bool(mapping(graph, args[-1]))


def refuse_bits(checkpoint: Checkpoint, ref: Ref, name: str) -> None:
    """Raise RefusedError for a tensor with a conjugate or negative bit: its values are not the bytes in its storage."""
    if any(lazy_bits(checkpoint.survey.reader, ref)):
        what = f"{quoted(name)} carries a conjugate or negative bit, so its values are not the bytes in the file"
        step = "load it with torch, and save it again after resolve_conj() and resolve_neg()"
        raise RefusedError(what, path=checkpoint.path, next=step)


def repointed(
    editor: GraphEditor,
    use: Use,
    key: str,
    numel: int,
    *,
    offset: int = -1,
    shape: tuple[int, ...] | None = None,
    cls: Ref = -1,
) -> tuple[Ref, ...]:
    """Return a use's arguments with another storage: ``key``, ``numel`` elements, class ``cls`` (-1: unchanged).

    ``offset`` is in elements (-1: unchanged). With a ``shape``, the tensor begins at the start of the storage, in
    row-major order. Call this for every use of a storage. It removes the old mention of the storage, because torch uses
    the first of two mentions that disagree.
    """
    graph = editor.graph
    persistent = graph.nodes[use.storage]
    assert isinstance(persistent, Persistent)
    pid = graph.nodes[persistent.pid]
    args = editor.node(use.args)
    assert type(pid) is tuple and type(args) is tuple
    new = (pid[0], cls if cls >= 0 else pid[1], editor.text(pid[2], key), pid[3], _number(editor, pid[4], numel))
    storage = editor.add(Persistent(editor.add(new, persistent.pid)), use.storage)
    editor.changed[use.storage] = None
    if shape is None:
        return (storage, args[1] if offset < 0 else _number(editor, args[1], offset), *args[2:])
    numbers = args[2] if shape == use.tensor.shape else editor.numbers(shape)
    strides = editor.numbers(contiguous_strides(shape))
    return (storage, _number(editor, args[1], 0), numbers, strides, *args[4:])


def _number(editor: GraphEditor, ref: Ref, value: int) -> Ref:
    return ref if editor.node(ref) == value else editor.constant(value)


def copied_call(node: Call, func: Ref = -1) -> Call:
    """Return a copy of a call, with another function unless ``func`` is -1."""
    call = Call(node.op, node.func if func < 0 else func, node.args, node.kwargs)
    return call.filled(node.items, node.pairs, node.states)


def misdescribed(checkpoint: Checkpoint) -> dict[Ref, str]:
    """Map references to paths of tensors and storages that the pickle describes in a way torch cannot read."""
    flaws = (flaw for flaw in storage_flaws(checkpoint) if flaw.code in ("geometry", "arguments"))
    return {flaw.ref: flaw.where or "a tensor" for flaw in flaws if flaw.refused_by_torch}


def check_bytes(checkpoint: Checkpoint, storages: Iterable[Storage]) -> None:
    """Raise MalformedError if the bytes of a storage are missing, or torch refuses their number."""
    for storage in storages:
        if storage.location == "meta" or not storage.nbytes or storage.dtype.name == "unknown":
            continue
        stored = checkpoint.body(storage.key)
        if stored is None:
            message = f"the bytes of storage {storage.key!r} are not in the file"
        elif checkpoint.container.keeps_format and stored.size != storage.nbytes:
            message = f"storage {storage.key!r} has {stored.size:,} bytes where the pickle says {storage.nbytes:,}"
        else:
            continue
        raise MalformedError(message, path=checkpoint.path, next=rescue_step(checkpoint))


def one_for_each(number: int, noun: str, weights: Sequence[float] | None) -> list[float]:
    """Return one finite weight for each of ``number`` items, 1 by default; raise TargetError for other weights."""
    given = [1.0] * number if weights is None else list(weights)
    example = "give one for each: `--weights 0.7,0.3`"
    if not number or len(given) != number:
        raise TargetError(f"{pluralize(len(given), 'weight')} for {pluralize(number, noun)}", next=example)
    with suppress(OverflowError):
        factors = [float(weight) for weight in given]
        if all(map(isfinite, factors)):
            return factors
    raise TargetError("the weights must be finite numbers", next=example)
