"""A DCP folder of a whole checkpoint, as a single process writes it: ``dcp.load`` reads it with any number of ranks.

Sources in torch/distributed/checkpoint: ``traverse_state_dict`` (_traverse.py) makes the items, ``FileSystemWriter``
(filesystem.py) lays them out in a file, metadata.py has the classes of ``.metadata``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import RefusedError, TargetError
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.container import Manifest
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.graph_editor import used_storages, without_views
from ...checkpoint.objects import class_name, mapping
from ...checkpoint.paths import as_children, joined
from ...checkpoint.tensors import Tensor, is_contiguous, rebuild_calls
from ...files.sources import AssembledSource, BytesSource, Computed, FolderPlan, Piece, Plan, Span, merge_pieces
from ...files.zips.writer import RecordContent, checksummed, plan_archive, with_crc
from ...pickles import emit
from ...pickles.batches import BATCH_SIZE
from ...pickles.encode import encode
from ...pickles.nodes import Call, Graph, List, Ref
from ...values.elements import tensor_size
from ...values.interpretation import rows
from ..losses import Fit, Loss, Promise, refuse_edited, storages_within
from ..torch.zip_writer import archive_contents, record_content, renumbered, storage_contents

_FILE: Final = "__0_0.distcp"
_ROOT: Final = "archive"
_STORAGE: Final = f"{_ROOT}/data/0"
_ANY_CRC: Final = b"\xa7\x1c\xd6\x59"


def fit(checkpoint: Checkpoint, target: Target) -> Fit:
    """Return what the folder would lack, and how OrderedDicts come back."""
    if target.metadata:
        message = "a DCP folder has no header for metadata"
        raise TargetError(message, path=checkpoint.path, next="leave `--metadata=` out")
    if target.tied == "keep-first":
        raise TargetError("a DCP folder cannot record other names of a tensor", next="`--tied clone` copies each")
    # DCP loads an OrderedDict as a dict.
    ordered = any(item.container == "OrderedDict" for item in checkpoint.state_dicts)
    notes = ("OrderedDicts come back as dicts, without the versions of modules",) if ordered else ()
    losses = _losses(checkpoint, tied=target.tied == "clone")
    return Fit("a DCP folder", target, losses, notes, {"sharing": "`--allow-loss sharing`"})


def _losses(checkpoint: Checkpoint, *, tied: bool = False) -> list[Loss]:
    """Return what the folder would lack, by kind. ``tied``: tensors that share memory may be copied."""
    walk = items_of(checkpoint)
    plain = [(leaf.name, leaf.tensor) for leaf in walk.leaves if leaf.dtype and leaf.tensor]
    users: dict[str, list[str]] = {}
    for leaf in walk.leaves:
        plain_storage = [leaf.tensor.storage] if leaf.tensor and tensor_size(leaf.tensor) else []
        for key in plain_storage if leaf.dtype else storages_within(checkpoint, leaf.ref):
            users.setdefault(key, []).append(leaf.name)
    # Attributes of dicts, and values under keys without a name.
    left = set(storages_within(checkpoint, walk.graph.root)) - users.keys()
    left -= {leaf.tensor.storage for leaf in walk.leaves if leaf.dtype and leaf.tensor}  # tensors without elements
    beside = [entry.path for entry in checkpoint.survey.tensors if entry.tensor.storage in left]
    shared = dict.fromkeys(name for names in users.values() if len(names) > 1 for name in names)
    places: dict[str, Collection[str]] = {
        "entries": () if walk.nameless else beside or list(left),
        "keys": walk.nameless,
        "containers": walk.containers,
        "strides": [name for name, tensor in plain if not is_contiguous(tensor)],
        "sharing": () if tied else shared,
        "requires-grad": [name for name, tensor in plain if tensor.requires_grad or tensor.cls],
        "devices": dict.fromkeys(tensor.location for _, tensor in plain if tensor.location != "cpu"),
    }
    drops = ("entries", "keys") if left else ()
    return [Loss(kind, tuple(where), kind in drops) for kind, where in places.items() if where]


def plan(checkpoint: Checkpoint, target: Target) -> tuple[FolderPlan, bool]:
    """Plan the folder: objects first, then tensors, as torch writes them. Raises RefusedError for edited content that
    it cannot hold, missing bytes, or two values with one name."""
    refuse_edited(checkpoint, lambda: _losses(checkpoint), "a DCP folder")
    walk = items_of(checkpoint)
    leaves = walk.leaves
    used_storages(walk.graph, checkpoint.path, walk.reader)  # raises if a possible storage is not understood
    pieces: list[Piece] = []
    placed: dict[str, tuple[Leaf, int, int]] = {}
    at = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.dtype is not None):
        item = (_tensor_item if leaf.dtype else _object_item)(checkpoint, leaf)
        size = item.size
        placed[leaf.name] = leaf, at, size
        pieces += item.pieces
        at += size
    # Listed in object order, in which the object is rebuilt.
    listing = metadata_pickle((placed[leaf.name] for leaf in leaves), _FILE)
    return FolderPlan(((_FILE, Plan(merge_pieces(pieces))), (".metadata", Plan((listing,))))), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the list of all items, and the objects among them."""
    return Promise("dcp", manifest=listed_items(checkpoint), leaves=object_items(checkpoint))


def _tensor_item(checkpoint: Checkpoint, leaf: Leaf) -> Plan:
    tensor, dtype = leaf.tensor, leaf.dtype
    assert tensor is not None and dtype is not None
    size = tensor_size(tensor)
    if not size:
        return _tensor_archive(dtype, tensor.shape, RecordContent(_STORAGE, b"", 0, 0))
    body, crc = rows(checkpoint, leaf.where, leaf.ref, tensor)
    source = with_crc(body)
    frame = _frame(dtype, tensor.shape, size) if crc or source else None
    if crc and frame:
        return Plan((frame[0], body, _filled_in(frame[1], crc)))
    if source and frame:
        return Plan((frame[0], body, Computed(len(frame[1]), _looked_up, (frame[1], source), late=True)))
    return _tensor_archive(dtype, tensor.shape, checksummed(_STORAGE, body))


@lru_cache(maxsize=256)
def _frame(dtype: Dtype, shape: tuple[int, ...], size: int) -> tuple[bytes, bytes] | None:
    """Return the bytes around a tensor's bytes in its item, with ``_ANY_CRC`` as checksum; None if they contain it."""
    body = Span(BytesSource(b""), 0, size)
    content = RecordContent(_STORAGE, body, int.from_bytes(_ANY_CRC, "little"), size)
    before, _, after = _tensor_archive(dtype, shape, content).pieces
    assert isinstance(before, bytes) and isinstance(after, bytes)
    # The checksum is in the descriptor and in the directory.
    return (before, after) if after.count(_ANY_CRC) == 2 else None


def _filled_in(after: bytes, crc: int) -> bytes:
    return after.replace(_ANY_CRC, crc.to_bytes(4, "little"))


def _looked_up(after: bytes, source: AssembledSource) -> tuple[bytes]:
    return (_filled_in(after, source.crc()),)


def _tensor_archive(dtype: Dtype, shape: tuple[int, ...], content: RecordContent) -> Plan:
    builder = Builder()
    graph = builder.graph(builder.tensor(contiguous(dtype, shape, "0")))
    return _archive(encode(graph), [content], "little")


def _object_item(checkpoint: Checkpoint, leaf: Leaf) -> Plan:
    builder = Builder()
    root = builder.graft(checkpoint.graph, leaf.ref)
    graph, storages = renumbered(without_views(builder.graph(root, checkpoint.graph.style.protocol)))
    contents = storage_contents(checkpoint, _ROOT, storages, leaf.where)
    return _archive(encode(graph), contents, checkpoint.container.byteorder)


def _archive(data: bytes, storages: Iterable[RecordContent], byteorder: str) -> Plan:
    # Forty digits that nothing reads; torch derives them from names and checksums.
    identity = record_content(_ROOT, ".data/serialization_id", b"%040d" % zlib.crc32(data))
    return plan_archive([*archive_contents(_ROOT, data, byteorder, storages), identity])


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: The version that torch.distributed.checkpoint writes; it does not check it when loading.
_VERSION: Final = "1.0.0"
#: The protocol of Python's pickler.
_PROTOCOL: Final = 4


class _Named(NamedTuple):
    module: str
    name: str


class _Called(NamedTuple):
    function: _Named
    argument: object


class _New(NamedTuple):
    cls: _Named
    state: Mapping[str, object] | tuple[object, ...] | None = None


class _Alike(NamedTuple):
    """The object ``make(*key, *values)``. Except for the values, all objects with its key are written alike."""

    make: Callable[..., object]
    key: tuple[object, ...]
    values: tuple[object, ...] = ()


def metadata_pickle(items: Iterable[tuple[Leaf, int, int]], file: str) -> bytes:
    """Return the pickled ``Metadata`` of items in one file: each with the byte at which it begins, and its size. The
    same items give the same bytes."""
    listed, places, storage = dict[object, object](), dict[object, object](), dict[object, object]()
    for leaf, at, length in items:
        shape = leaf.tensor.shape if leaf.dtype and leaf.tensor else None
        listed[leaf.name] = _made("BytesStorageMetadata") if shape is None else _Alike(_tensor, (leaf.dtype, shape))
        places[leaf.name] = leaf.path
        index = _Alike(_index, (-1 if shape is None else len(shape),), (leaf.name,))
        storage[index] = _Alike(_place, (file,), (at, length))
    metadata = _made(
        "Metadata",
        state_dict_metadata=listed,
        planner_data=places,
        storage_data=storage,
        storage_meta=_made("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=_VERSION,
    )
    return _Pickle().whole(metadata)


def _made(cls: str, module: str = _METADATA, **fields: object) -> _New:
    return _New(_Named(module, cls), fields or None)


def _size(numbers: tuple[int, ...]) -> _Called:
    return _Called(_Named("torch", "Size"), numbers)


def _tensor(dtype: Dtype, shape: tuple[int, ...]) -> _New:
    # The values are dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
    state = (_Named("torch", dtype.name), _LAYOUT, False, _MEMORY_FORMAT, False)
    chunk = _made("ChunkStorageMetadata", offsets=_size((0,) * len(shape)), sizes=_size(shape))
    properties = _New(_Named(_METADATA, "TensorProperties"), state)
    return _made("TensorStorageMetadata", properties=properties, size=_size(shape), chunks=[chunk])


def _index(dimensions: int, name: str) -> _New:
    """Return the index of a tensor, or of an object with -1 dimensions."""
    if dimensions < 0:
        return _made("MetadataIndex", fqn=name, index=None)
    return _made("MetadataIndex", fqn=name, index=0, offset=_size((0,) * dimensions))


def _place(file: str, at: int, length: int) -> _New:
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
        elif isinstance(value, dict):
            out.append(b"}")
            self._memoize()
            pairs = list(value.items())
            for begin in range(0, len(pairs), BATCH_SIZE):
                out.append(b"(")
                for pair in pairs[begin : begin + BATCH_SIZE]:
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


#: The most levels of nested mappings.
_DEPTH: Final = 200
_PLAIN_CALLS: Final = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
#: The arguments of ``_rebuild_tensor_v2`` without the dict of bits (conjugation, negation).
_PLAIN_ARGUMENTS: Final = 6


class Leaf(NamedTuple):
    """A value that becomes an item: its flat name, its path in the object, and its path as ``inspect`` shows it.
    ``tensor`` is None for any other object. ``dtype`` is None for an item stored as an object, which may be a
    tensor."""

    name: str
    path: tuple[str | int, ...]
    where: str
    ref: Ref
    tensor: Tensor | None
    dtype: Dtype | None


class Items:
    """The values of an object that become items, and the containers and keys that are lost. Raises RefusedError if two
    values would have the same name, or a folder cannot hold the object."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.leaves: list[Leaf] = []
        #: Paths of containers that come back as another kind, or not at all.
        self.containers: list[str] = []
        #: Paths of entries whose keys give no name: tuples, bytes, objects.
        self.nameless: list[str] = []
        self._terminal: dict[Ref, bool] = {}
        if mapping(self.graph, self.graph.root) is None or self.reader.tensor(self.graph.root):
            what = f"a DCP folder holds a dict, and this is {class_name(self.graph, self.graph.root)}"
            raise RefusedError(what, path=checkpoint.path, next="torch.save holds any object")
        self._follow(self.graph.root, (), "", 0)
        names: dict[str, str] = {}
        for leaf in self.leaves:
            if leaf.name in names:
                what = f"{names[leaf.name]} and {leaf.where} would both be called {leaf.name!r}"
                raise RefusedError(what, path=checkpoint.path, next="rename one")
            names[leaf.name] = leaf.where

    def _check_depth(self, depth: int) -> None:
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)

    def _follow(self, ref: Ref, path: tuple[str | int, ...], where: str, depth: int) -> None:
        self._check_depth(depth)
        node = self.graph.nodes[ref]
        tensor = self.reader.tensor(ref)
        inner = None if tensor else mapping(self.graph, ref)
        if inner is not None:
            if not inner and path:
                self.containers.append(where)
            for step, value, key_ref in as_children(self.graph, inner):
                spelled = joined(where, step)
                key = self.graph.nodes[key_ref]
                if type(key) not in (str, int, float, bool, type(None)):
                    self.nameless.append(spelled)
                    continue
                if not isinstance(key, str):
                    self.containers.append(spelled)
                self._follow(value, (*path, str(key)), spelled, depth + 1)
        elif isinstance(node, List) and not self._is_terminal(ref, depth):
            for number, value in enumerate(node.items):
                place, spelled = (*path, number), f"{where}[{number}]"
                if mapping(self.graph, value) is not None and not self._has_items(value, depth):
                    self._leaf(value, place, spelled)  # no loader accepts a list with a missing place
                else:
                    self._follow(value, place, spelled, depth + 1)
        else:
            self._leaf(ref, path, where)

    def _leaf(self, ref: Ref, path: tuple[str | int, ...], where: str) -> None:
        tensor = self.reader.tensor(ref)
        self.leaves.append(Leaf(".".join(map(str, path)), path, where, ref, tensor, self._plain_dtype(ref)))

    def _plain_dtype(self, ref: Ref) -> Dtype | None:
        """Return the dtype of a tensor that DCP stores in pieces, or None: DCP copies elements."""
        tensor = self.reader.tensor(ref)
        dtype = BY_NAME.get(tensor.dtype) if tensor and tensor.kind == "dense" and tensor.storage else None
        if dtype is None or dtype.packed > 1 or dtype.name.startswith(("q", "bits", "float4")):
            return None
        return dtype if self._is_bare(ref) else None

    def _is_bare(self, ref: Ref) -> bool:
        """Return whether a tensor has no attributes, no class of its own and no lazy bits: an object keeps them."""
        for call in rebuild_calls(self.graph, ref):
            node = self.graph.nodes[call.ref]
            if not isinstance(node, Call) or node.states:
                return False
            if call.short_name in _PLAIN_CALLS:
                return len(call.args) <= _PLAIN_ARGUMENTS or not mapping(self.graph, call.args[-1])
            if call.short_name != "_rebuild_parameter":
                return False
        return False

    def _is_terminal(self, ref: Ref, depth: int) -> bool:
        """Return whether a list is stored as one object: no mappings with items and no plain tensors are in it."""
        if ref in self._terminal:
            return self._terminal[ref]
        self._check_depth(depth)
        self._terminal[ref] = True  # for a list that contains itself
        node = self.graph.nodes[ref]
        terminal = True
        for part in node.items if isinstance(node, List) else ():
            inner = self.graph.nodes[part]
            if isinstance(inner, List):
                terminal = terminal and self._is_terminal(part, depth + 1)
            elif self._plain_dtype(part) or self._has_items(part, depth):
                terminal = False
        self._terminal[ref] = terminal
        return terminal

    def _has_items(self, ref: Ref, depth: int) -> bool:
        """Return whether a value is a mapping with anything except empty mappings in it."""
        self._check_depth(depth)
        inner = None if self.reader.tensor(ref) else mapping(self.graph, ref)
        return any(mapping(self.graph, value) is None or self._has_items(value, depth + 1) for _, value in inner or ())


def items_of(checkpoint: Checkpoint) -> Items:
    """Return the items of a checkpoint, computed once per graph."""
    key = ("items of dcp", checkpoint.graph.root)
    known: Items | None = checkpoint.graph.cache.get(key)
    if known is None or known.checkpoint.path != checkpoint.path:
        known = checkpoint.graph.cache[key] = Items(checkpoint)
    return known


def listed_items(checkpoint: Checkpoint) -> Manifest:
    """Return dtype, shape and path of each item by name; the dtype is "" and the shape () for an object."""
    leaves = items_of(checkpoint).leaves
    plain = {leaf.name: (leaf.dtype.name, leaf.tensor.shape) for leaf in leaves if leaf.dtype and leaf.tensor}
    return {leaf.name: (*plain.get(leaf.name, ("", ())), leaf.path) for leaf in leaves}


def object_items(checkpoint: Checkpoint) -> dict[str, Graph]:
    """Return each object that is an item, by name."""
    graph = without_views(checkpoint.graph)
    objects = [leaf for leaf in items_of(checkpoint).leaves if not leaf.dtype]
    return {leaf.name: Graph(graph.nodes, leaf.ref, graph.style) for leaf in objects}
