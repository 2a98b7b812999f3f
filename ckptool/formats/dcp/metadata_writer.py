"""Write a ``.metadata`` file: the pickle that torch would make of its ``Metadata``.

It is written as bytes, without a graph, because a model of 20,000 tensors lists a million objects. ``listing`` reads
it. Source: metadata.py in torch/distributed/checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...base.dtypes import Dtype
from ...base.records import NamedTuple
from ...pickles import emit
from ...pickles.batches import BATCH_SIZE
from .leaves import Leaf

#: Creates an object without arguments, and begins the dict of its fields.
_EMPTY: Final = b")\x81\x94}\x94("
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
    """A global."""

    module: str
    name: str


class _Called(NamedTuple):
    """The result of a function call with one argument."""

    function: _Named
    argument: object


class _New(NamedTuple):
    """An object of a class with this state, or without one if None."""

    cls: _Named
    state: _Mapping | tuple[object, ...] | None = None


class _Tensor(NamedTuple):
    """The metadata of a tensor in one piece."""

    dtype: Dtype
    shape: tuple[int, ...]


class _Index(NamedTuple):
    """The index of a tensor in one piece."""

    name: str
    dimensions: int


class _Info(NamedTuple):
    """The range of an item in the file."""

    file: str
    at: int
    length: int


class _Mapping(NamedTuple):
    """A dict."""

    pairs: Sequence[tuple[object, object]]


def metadata_pickle(items: Iterable[Placed], file: str) -> bytes:
    """Return the pickled ``Metadata`` of items in one file; the same items give the same bytes."""
    listed: list[tuple[object, object]] = []
    places: list[tuple[object, object]] = []
    storage: list[tuple[object, object]] = []
    for leaf, at, length in items:
        places.append((leaf.name, leaf.path))
        if leaf.dtype and leaf.tensor:
            listed.append((leaf.name, _Tensor(leaf.dtype, leaf.tensor.shape)))
            storage.append((_Index(leaf.name, len(leaf.tensor.shape)), _Info(file, at, length)))
        else:
            listed.append((leaf.name, _made("BytesStorageMetadata")))
            storage.append((_made("MetadataIndex", fqn=leaf.name, index=None), _Info(file, at, length)))
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
    # The values are dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
    state = (_Named("torch", dtype.name), _LAYOUT, False, _MEMORY_FORMAT, False)
    chunk = _made("ChunkStorageMetadata", offsets=_size((0,) * len(shape)), sizes=_size(shape))
    properties = _New(_Named(_METADATA, "TensorProperties"), state)
    return _made("TensorStorageMetadata", properties=properties, size=_size(shape), chunks=[chunk])


_LAYOUT: Final = _Called(_Named("torch.serialization", "_get_layout"), "torch.strided")
_MEMORY_FORMAT: Final = _Called(_Named(_METADATA, "_MEM_FORMAT_ENCODING"), 0)


#: Types of values that are written once, and fetched from the memo afterwards.
_ONCE: Final = frozenset((str, _Named, _Called))


class _Pickle:
    """A pickle of protocol 4, as Python's pickler writes it but without frames.

    Every string, global and call result is written only once, which leaves a third of the bytes to read.
    """

    def __init__(self) -> None:
        self._out: list[bytes] = [b"\x80\x04"]
        self._known: dict[tuple[type, object], int] = {}
        self._count = 0
        #: Repeated tensor metadata: its bytes, and the number of objects that they memoize.
        self._repeated: dict[_Tensor, tuple[bytes, int]] = {}
        #: The bytes before and after the name of an index, by dimensions; and before the numbers of a file range.
        self._indices: dict[int, tuple[bytes, bytes]] = {}
        self._infos: dict[str, tuple[bytes, bytes]] = {}

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
        elif isinstance(value, _Tensor):
            self._save_tensor(value)
        elif isinstance(value, _Index):
            self._save_index(value)
        elif isinstance(value, _Info):
            self._save_info(value)
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

    def _save_index(self, index: _Index) -> None:
        """Write an index. After the first with these dimensions, everything in it is fetched from the memo."""
        name = index.name
        around = self._indices.get(index.dimensions)
        if around is None:
            size = _size((0,) * index.dimensions)
            self._save(_made("MetadataIndex", fqn=name, index=0, offset=size))
            after = self._get("index") + emit.constant(0, -1, _PROTOCOL) + self._get("offset") + self._get(size) + b"ub"
            begin = self._get(_Named(_METADATA, "MetadataIndex")) + _EMPTY + self._get("fqn")
            self._indices[index.dimensions] = begin, after
            return
        self._out += around[0], self._get(name), around[1]
        self._count += 2

    def _save_info(self, info: _Info) -> None:
        """Write a file range. After the first, everything except the numbers is fetched from the memo."""
        around = self._infos.get(info.file)
        if around is None:
            fields = {"relative_path": info.file, "offset": info.at, "length": info.length}
            self._save(_made("_StorageInfo", _FILESYSTEM, **fields))
            begin = self._get(_Named(_FILESYSTEM, "_StorageInfo")) + _EMPTY + self._get("relative_path")
            self._infos[info.file] = begin + self._get(info.file) + self._get("offset"), self._get("length")
            return
        at, length = (emit.constant(number, -1, _PROTOCOL) for number in (info.at, info.length))
        self._out += around[0], at, around[1], length, b"ub"
        self._count += 2

    def _get(self, value: object) -> bytes:
        """Return the opcode that fetches a written value from the memo."""
        return emit.get(self._known[type(value), value], _PROTOCOL)

    def _save_tensor(self, tensor: _Tensor) -> None:
        """Write the metadata of a tensor. After the first with its dtype and shape, everything is fetched from the
        memo."""
        repeated = self._repeated.get(tensor)
        if repeated is not None:
            self._out.append(repeated[0])
            self._count += repeated[1]
            return
        begin, known, count = len(self._out), len(self._known), self._count
        self._save(_tensor_metadata(*tensor))
        if len(self._known) == known:
            self._repeated[tensor] = b"".join(self._out[begin:]), self._count - count
