"""The ``.metadata`` of a folder that is written: the pickle that torch would make of its ``Metadata``.

It is written as bytes, without a graph: a model of 20,000 tensors lists a million objects. ``listing`` is the other
direction. Source: metadata.py in torch/distributed/checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ...base.dtypes import Dtype
from ...pickles import emit
from ...pickles.batches import BATCH_SIZE
from .leaves import Leaf

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: Of torch.distributed.checkpoint, which writes it and does not look at it.
_VERSION: Final = "1.0.0"
#: That of Python's pickler.
_PROTOCOL: Final = 4


class Placed(NamedTuple):
    """An item at its place: ``at`` and ``length`` in bytes of the file."""

    leaf: Leaf
    at: int
    length: int


class _Named(NamedTuple):
    """A global."""

    module: str
    name: str


class _Called(NamedTuple):
    """The result of a function for one argument."""

    function: _Named
    argument: object


class _New(NamedTuple):
    """An object of a class with this state, None for none."""

    cls: _Named
    state: _Mapping | tuple[object, ...] | None = None


class _Tensor(NamedTuple):
    """The metadata of a tensor in one piece."""

    dtype: Dtype
    shape: tuple[int, ...]


class _Mapping(NamedTuple):
    """A dict."""

    pairs: Sequence[tuple[object, object]]


def metadata_pickle(items: Iterable[Placed], file: str) -> bytes:
    """Return the pickle of the ``Metadata`` of items in one file; the same bytes for the same items."""
    listed: list[tuple[object, object]] = []
    places: list[tuple[object, object]] = []
    storage: list[tuple[object, object]] = []
    for leaf, at, length in items:
        places.append((leaf.name, leaf.path))
        index: dict[str, object] = {"fqn": leaf.name, "index": 0 if leaf.dtype else None}
        if leaf.dtype and leaf.tensor:
            listed.append((leaf.name, _Tensor(leaf.dtype, leaf.tensor.shape)))
            index["offset"] = _size((0,) * len(leaf.tensor.shape))
        else:
            listed.append((leaf.name, _made("BytesStorageMetadata")))
        where = _made("_StorageInfo", _FILESYSTEM, relative_path=file, offset=at, length=length)
        storage.append((_made("MetadataIndex", _METADATA, **index), where))
    meta = _made("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
    metadata = _made(
        "Metadata",
        state_dict_metadata=_Mapping(listed),
        planner_data=_Mapping(places),
        storage_data=_Mapping(storage),
        storage_meta=meta,
        version=_VERSION,
    )
    return _Pickle().whole(metadata)


def _made(cls: str, module: str = _METADATA, **fields: object) -> _New:
    """Return an object of a class with these fields in its ``__dict__``."""
    return _New(_Named(module, cls), _Mapping(tuple(fields.items())) if fields else None)


def _size(numbers: tuple[int, ...]) -> _Called:
    return _Called(_Named("torch", "Size"), numbers)


def _tensor_metadata(dtype: Dtype, shape: tuple[int, ...]) -> _New:
    # dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
    state = (_Named("torch", dtype.name), _LAYOUT, False, _MEMORY_FORMAT, False)
    chunk = _made("ChunkStorageMetadata", offsets=_size((0,) * len(shape)), sizes=_size(shape))
    properties = _New(_Named(_METADATA, "TensorProperties"), state)
    return _made("TensorStorageMetadata", properties=properties, size=_size(shape), chunks=[chunk])


_LAYOUT: Final = _Called(_Named("torch.serialization", "_get_layout"), "torch.strided")
_MEMORY_FORMAT: Final = _Called(_Named(_METADATA, "_MEM_FORMAT_ENCODING"), 0)


class _Pickle:
    """A pickle of protocol 4, as Python's pickler writes it but without frames.

    Every string, global and result of a call is there once: a third of what must be read.
    """

    def __init__(self) -> None:
        self._out: list[bytes] = [b"\x80\x04"]
        self._known: dict[tuple[type, object], int] = {}
        self._count = 0
        #: The bytes of what is written alike each time, and how many objects they memoize.
        self._repeated: dict[_Tensor, tuple[bytes, int]] = {}

    def whole(self, value: object) -> bytes:
        """Return the pickle of a value."""
        self._save(value)
        return b"".join((*self._out, b"."))

    def _memoize(self, value: object = None) -> None:
        if value is not None:
            self._known[type(value), value] = self._count
        self._out.append(b"\x94")
        self._count += 1

    def _save(self, value: object) -> None:
        out = self._out
        if isinstance(value, str | _Named | _Called):
            place = self._known.get((type(value), value))
            if place is not None:
                out.append(emit.get(place, _PROTOCOL))
                return
            if isinstance(value, _Named):
                self._save(value.module)
                self._save(value.name)
                out.append(b"\x93")
            elif isinstance(value, _Called):
                self._save(value.function)
                self._save((value.argument,))
                out.append(b"R")
            else:
                out += emit.text(value, -1, _PROTOCOL)
            self._memoize(value)
        elif isinstance(value, _Tensor):
            self._save_tensor(value)
        elif isinstance(value, _New):
            self._save(value.cls)
            out.append(b")\x81")
            self._memoize()
            if value.state is not None:
                self._save(value.state)
                out.append(b"b")
        elif isinstance(value, _Mapping):
            out.append(b"}")
            self._memoize()
            for begin in range(0, len(value.pairs), BATCH_SIZE):
                out.append(b"(")
                for pair in value.pairs[begin : begin + BATCH_SIZE]:
                    self._save(pair[0])
                    self._save(pair[1])
                out.append(b"u")
        elif isinstance(value, list):
            out.append(b"]")
            self._memoize()
            for part in value:
                self._save(part)
                out.append(b"a")
        elif isinstance(value, tuple) and value:
            out.append(b"(" if len(value) > 3 else b"")
            for part in value:
                self._save(part)
            out.append(b"t" if len(value) > 3 else b"%c" % (0x84 + len(value)))
            self._memoize()
        else:
            out.append(emit.constant(value, -1, _PROTOCOL))

    def _save_tensor(self, tensor: _Tensor) -> None:
        """Write the metadata of a tensor: from the second of a dtype and shape on, all in it is fetched."""
        repeated = self._repeated.get(tensor)
        if repeated is not None:
            self._out.append(repeated[0])
            self._count += repeated[1]
            return
        begin, known, count = len(self._out), len(self._known), self._count
        self._save(_tensor_metadata(*tensor))
        if len(self._known) == known:
            self._repeated[tensor] = b"".join(self._out[begin:]), self._count - count
