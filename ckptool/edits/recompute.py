"""Compute the values of tensors: choose the storages that an edit may change, and stream the results into the output.

Tensors that share a storage change together. Optimizer states, quantized and packed tensors, and storages that are also
held by something else stay unchanged, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Final, Protocol

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import MalformedError, RefusedError, adding_path
from ..base.globs import MATCH_ALL, Globs
from ..base.records import NamedTuple, new_tuple
from ..checkpoint.backends import backend_arguments
from ..checkpoint.checkpoint import Change, Checkpoint, DeferredChanges
from ..checkpoint.container import StorageData
from ..checkpoint.graph_builder import contiguous
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapped_name
from ..checkpoint.paths import within
from ..checkpoint.quantized import Quantization, quantization
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import Storage, Tensor, is_sharded, view_id
from ..files.sources import Computed, Piece, size_of
from ..pickles.nodes import Call, Global, Ref
from ..values.elements import StorageReader, number_width, reblocked, storage_reader, swapped, whole_chunks
from .optimizers import optimizers
from .storages import Use, Uses, chosen_tensors, copied_call, has_bits, repointed, storage_uses, with_plain_ids

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
    step = "do it with the plain weights that were quantized"
    return RefusedError(f"it has quantized weights ({found.words}): {reason}", path=checkpoint.path, next=step)


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
        return [entry for entry in chosen_tensors(self.checkpoint, self._key, self._only) if not self.is_spared(entry)]

    def is_spared(self, entry: TensorEntry) -> bool:
        """Return whether a tensor belongs to an optimizer that stays unchanged."""
        return any(within(entry.path, path) for path in self.spared)

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
            elif tensor.kind != "meta" and (source is None or source.floating or tensor.kind == "quantized"):
                self.left.append(f"{entry.path} ({tensor.kind})")
        return paths

    def _lazy_bits(self, item: SharedStorage, _: Dtype) -> str:
        bits = any(has_bits(self.checkpoint.graph, use) for use in item.uses)
        return "it carries a conjugate or negative bit" if bits else ""

    def compute(self, item: SharedStorage, how: Operation, others: Sequence[StorageReader] = ()) -> None:
        """Replace the elements of a storage by the results of an operation on them.

        ``others`` are storages of the same size, from which the operation reads as well.
        """
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
        """Give a storage other bytes: as many elements, of ``dtype`` unless that is None.

        ``piece`` is None for a storage on meta. ``width`` says in which byte order to write.
        """
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
        graph = self.editor.done()
        return self.checkpoint.changed(
            graph, changes, self.added, needs_relayout=True, others=others, deferred_changes=deferred_changes
        )

    def _recast(self, use: Use, key: str, numel: int, target: Dtype) -> None:
        """Point a tensor at the storage class of another dtype, as ``Tensor._reduce_ex_internal`` writes it.

        A dtype without a storage class gets an UntypedStorage.
        """
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
