"""Write a ``.metadata`` file: the pickle that torch would make of its ``Metadata``.

It is written as bytes, without a graph, because a model of 20,000 tensors lists a million objects. ``listing`` reads
it. Source: metadata.py in torch/distributed/checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ...base.dtypes import Dtype
from ...base.records import NamedTuple
from ...pickles import emit
from ...pickles.batches import BATCH_SIZE
from .leaves import Leaf

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: The version that torch.distributed.checkpoint writes; it does not check it when loading.
_VERSION: Final = "1.0.0"
#: The protocol of Python's pickler.
_PROTOCOL: Final = 4


class Placed(NamedTuple):
    """An item and its range in the file: ``length`` bytes from byte ``at``."""

    leaf: Leaf
    at: int
    length: int


class _Named(NamedTuple):
    module: str
    name: str


class _Called(NamedTuple):
    function: _Named
    argument: object


class _Mapping(NamedTuple):
    pairs: Sequence[tuple[object, object]]


class _New(NamedTuple):
    cls: _Named
    state: _Mapping | tuple[object, ...] | None = None


class _Alike(NamedTuple):
    """The object ``make(*key, *values)``. Except for the values, all objects with its key are written alike."""

    make: Callable[..., object]
    key: tuple[object, ...]
    values: tuple[object, ...] = ()


def metadata_pickle(items: Iterable[Placed], file: str) -> bytes:
    """Return the pickled ``Metadata`` of items in one file; the same items give the same bytes."""
    listed: list[tuple[object, object]] = []
    places: list[tuple[object, object]] = []
    storage: list[tuple[object, object]] = []
    for leaf, at, length in items:
        places.append((leaf.name, leaf.path))
        if leaf.dtype and leaf.tensor:
            value: object = _Alike(_tensor, (leaf.dtype, leaf.tensor.shape))
            index: object = _Alike(_index, (len(leaf.tensor.shape),), (leaf.name,))
        else:
            value = _made("BytesStorageMetadata")
            index = _made("MetadataIndex", fqn=leaf.name, index=None)
        listed.append((leaf.name, value))
        storage.append((index, _Alike(_info, (file,), (at, length))))
    metadata = _made(
        "Metadata",
        state_dict_metadata=_Mapping(listed),
        planner_data=_Mapping(places),
        storage_data=_Mapping(storage),
        storage_meta=_made("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=_VERSION,
    )
    return _Pickle().whole(metadata)


def _made(cls: str, module: str = _METADATA, **fields: object) -> _New:
    """Return an object of a class with these fields in its ``__dict__``."""
    return _New(_Named(module, cls), _Mapping(tuple(fields.items())) if fields else None)


def _size(numbers: tuple[int, ...]) -> _Called:
    return _Called(_Named("torch", "Size"), numbers)


def _tensor(dtype: Dtype, shape: tuple[int, ...]) -> _New:
    # The values are dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
    state = (_Named("torch", dtype.name), _LAYOUT, False, _MEMORY_FORMAT, False)
    chunk = _made("ChunkStorageMetadata", offsets=_size((0,) * len(shape)), sizes=_size(shape))
    properties = _New(_Named(_METADATA, "TensorProperties"), state)
    return _made("TensorStorageMetadata", properties=properties, size=_size(shape), chunks=[chunk])


def _index(dimensions: int, name: str) -> _New:
    return _made("MetadataIndex", fqn=name, index=0, offset=_size((0,) * dimensions))


def _info(file: str, at: int, length: int) -> _New:
    return _made("_StorageInfo", _FILESYSTEM, relative_path=file, offset=at, length=length)


_LAYOUT: Final = _Called(_Named("torch.serialization", "_get_layout"), "torch.strided")
_MEMORY_FORMAT: Final = _Called(_Named(_METADATA, "_MEM_FORMAT_ENCODING"), 0)
#: Types of values that are written once, and fetched from the memo afterwards.
_ONCE: Final = frozenset((str, _Named, _Called))
#: Stands for a value of an ``_Alike``.
_HOLE: Final = object()


class _Pickle:
    """A pickle of protocol 4, as Python's pickler writes it but without frames. Every string, global and call result is
    written only once, which leaves a third of the bytes to read."""

    def __init__(self) -> None:
        self._out: list[bytes] = [b"\x80\x04"]
        self._known: dict[tuple[type, object], int] = {}
        self._count = 0
        #: The bytes around the values of objects that are alike, and the number of objects that they memoize.
        self._alike: dict[tuple[object, ...], tuple[list[bytes], int]] = {}

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
        if type(value) in _ONCE:
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
                out += emit.text(str(value), -1, _PROTOCOL)
            self._memoize(value)
        elif isinstance(value, _Alike):
            self._save_alike(value)
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
            out.append(_MARK if value is _HOLE else emit.constant(value, -1, _PROTOCOL))

    def _save_alike(self, value: _Alike) -> None:
        """Write an object. After the first with its key, everything but the values is fetched from the memo."""
        key = (value.make, value.key)
        if key not in self._alike:
            self._save(value.make(*value.key, *value.values))
            begin, count = len(self._out), self._count
            self._save(value.make(*value.key, *(_HOLE for _ in value.values)))
            self._alike[key] = b"".join(self._out[begin:]).split(_MARK), self._count - count
            del self._out[begin:]
            self._count = count
            return
        (first, *around), count = self._alike[key]
        self._out.append(first)
        for own, after in zip(value.values, around):
            self._save(own)
            self._out.append(after)
        self._count += count


#: Bytes that no pickle of the fields of an object contains.
_MARK: Final = b"\0a value\0"
