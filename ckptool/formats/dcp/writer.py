"""A DCP folder of a whole checkpoint, as one process writes it: ``dcp.load`` reads it at any number of ranks.

Sources in torch/distributed/checkpoint: ``traverse_state_dict`` (_traverse.py) makes the items, ``FileSystemWriter``
(filesystem.py) lays them out in a file, metadata.py has the classes of ``.metadata``.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from ...base.dtypes import Dtype
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.graph_editor import used_storages
from ...checkpoint.objects import is_ordered_dict
from ...checkpoint.tensors import Tensor, is_contiguous
from ...checkpoint.views import without_views
from ...files.sources import FolderPlan, Piece, Plan, merge_pieces
from ...files.zips.writer import RecordContent, checksummed, plan_archive
from ...pickles.encode import encode
from ...pickles.nodes import Call, Graph, Ref, children
from ...pickles.opcodes import NEWOBJ
from ...values.elements import tensor_size
from ..losses import Loss, refuse_edited
from ..promises import Promise
from ..rows import rows
from ..torch.zip_writer import archive_contents, record_content, renumbered, storage_contents
from .leaves import Items, Leaf, object_items, tensor_items

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: Of torch.distributed.checkpoint, which writes it and does not look at it.
_VERSION: Final = "1.0.0"
_FILE: Final = "__0_0.distcp"
_ROOT: Final = "archive"


class Placed(NamedTuple):
    """An item at its place: ``at`` and ``length`` in bytes of the file."""

    leaf: Leaf
    at: int
    length: int


def metadata_pickle(items: Iterable[Placed], file: str) -> bytes:
    """Return the pickle of the ``Metadata`` of items in one file; the same bytes for the same items."""
    builder = _MetadataBuilder()
    constant = builder.constant
    listed, places, storage = [], [], []
    for leaf, at, length in items:
        name = builder.add(leaf.name)
        index = {"fqn": name, "index": constant(0 if leaf.dtype else None)}
        if leaf.dtype and leaf.tensor:
            listed += [name, builder.tensor_metadata(leaf.dtype, leaf.tensor.shape)]
            index["offset"] = builder.size((0,) * len(leaf.tensor.shape))
        else:
            listed += [name, builder.instance("BytesStorageMetadata")]
        places += [name, builder.group(map(constant, leaf.path))]
        where = {"relative_path": constant(file), "offset": constant(at), "length": constant(length)}
        storage.append(builder.instance("MetadataIndex", index))
        storage.append(builder.instance("_StorageInfo", where, _FILESYSTEM))
    unset = dict.fromkeys(("checkpoint_id", "save_id", "load_id"), constant(None))
    fields = {
        "state_dict_metadata": builder.pairs(listed),
        "planner_data": builder.pairs(places),
        "storage_data": builder.pairs(storage),
        "storage_meta": builder.instance("StorageMeta", {**unset, "modules": builder.sequence(())}),
        "version": constant(_VERSION),
    }
    return encode(builder.graph(builder.instance("Metadata", fields)))


class _MetadataBuilder(Builder):
    """A builder of the objects in ``.metadata``.

    Every ``torch.Size`` is there once, and so is what all properties share: a third of what must be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout = self.call("torch.serialization", "_get_layout", [self.constant("torch.strided")])
        self._memory_format = self.call(_METADATA, "_MEM_FORMAT_ENCODING", [self.constant(0)])
        self._sizes: dict[tuple[int, ...], Ref] = {}

    def size(self, numbers: tuple[int, ...]) -> Ref:
        """Add a ``torch.Size``."""
        if numbers not in self._sizes:
            self._sizes[numbers] = self.call("torch", "Size", [self.numbers(numbers)])
        return self._sizes[numbers]

    def instance(self, name: str, fields: Mapping[str, Ref] | None = None, module: str = _METADATA) -> Ref:
        """Add an object of a class, with these fields in its ``__dict__``."""
        pairs = [ref for key, value in (fields or {}).items() for ref in (self.constant(key), value)]
        return self._new(module, name, (self.pairs(pairs),) if pairs else ())

    def _new(self, module: str, name: str, states: tuple[Ref, ...]) -> Ref:
        call = Call(NEWOBJ, self.named(module, name), self.constant(()))
        return self.add(call.filled((), (), states) if states else call)

    def tensor_metadata(self, dtype: Dtype, shape: tuple[int, ...]) -> Ref:
        """Add the metadata of a tensor in one piece."""
        no = self.constant(False)
        # dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
        state = self.group([self.named("torch", dtype.name), self._layout, no, self._memory_format, no])
        chunk = {"offsets": self.size((0,) * len(shape)), "sizes": self.size(shape)}
        fields = {
            "properties": self._new(_METADATA, "TensorProperties", (state,)),
            "size": self.size(shape),
            "chunks": self.sequence([self.instance("ChunkStorageMetadata", chunk)]),
        }
        return self.instance("TensorStorageMetadata", fields)


def losses(checkpoint: Checkpoint, *, tied: bool = False) -> list[Loss]:
    """Return what the folder would lack, by kind; ``tied`` says that tensors that share memory may be copied."""
    walk = Items(checkpoint)
    plain = [(leaf.name, leaf.tensor) for leaf in walk.leaves if leaf.dtype and leaf.tensor]
    users: dict[str, list[str]] = {}
    for leaf in walk.leaves:
        for key in _storages(walk, leaf):
            users.setdefault(key, []).append(leaf.name)
    shared = dict.fromkeys(name for names in users.values() if len(names) > 1 for name in names)
    places: dict[str, Collection[str]] = {
        "keys": walk.nameless,
        "containers": walk.containers,
        "strides": [name for name, tensor in plain if not is_contiguous(tensor)],
        "sharing": () if tied else shared,
        "requires-grad": [name for name, tensor in plain if tensor.requires_grad or tensor.cls],
        "devices": dict.fromkeys(tensor.location for _, tensor in plain if tensor.location != "cpu"),
    }
    return [Loss(kind, tuple(where)) for kind, where in places.items() if where]


def _storages(walk: Items, leaf: Leaf) -> list[str]:
    """Return the storages with bytes in them that an item holds, or a part of them, each once and in its order."""
    if leaf.dtype and leaf.tensor:
        return [leaf.tensor.storage] if tensor_size(leaf.tensor) else []
    keys: dict[str, None] = {}  # a set of texts has another order in each run, and the message would have, too
    seen, work = set[Ref](), [leaf.ref]
    while work:
        ref = work.pop()
        if ref in seen:
            continue
        seen.add(ref)
        storage = walk.reader.storage(ref)
        if storage is not None and storage.nbytes:
            keys[storage.key] = None
        work += children(walk.graph.nodes[ref])
    return list(keys)


def has_ordered_dicts(checkpoint: Checkpoint) -> bool:
    """Return whether there are OrderedDicts: they come back as dicts, without the versions of modules in them."""
    return any(is_ordered_dict(checkpoint.graph, item.ref) for item in checkpoint.state_dicts)


def plan(checkpoint: Checkpoint, target: Target) -> tuple[FolderPlan, bool]:
    """Plan the folder: objects first, then tensors, as torch writes them.

    Raises RefusedError for what an edit left in it that it cannot hold, missing bytes, and two values of one name.
    """
    refuse_edited(checkpoint, lambda: losses(checkpoint), "a DCP folder")
    leaves = Items(checkpoint).leaves
    used_storages(checkpoint.graph, checkpoint.path)  # raises for what may be a storage and is not understood
    pieces: list[Piece] = []
    placed: dict[str, Placed] = {}
    at = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.dtype is not None):
        if leaf.dtype and leaf.tensor:
            item = _tensor_item(checkpoint, leaf, leaf.tensor, leaf.dtype)
        else:
            item = _object_item(checkpoint, leaf)
        placed[leaf.name] = Placed(leaf, at, item.size)
        pieces += item.pieces
        at += item.size
    # Listed in the order of the object, which is that in which it is put together again.
    listing = metadata_pickle((placed[leaf.name] for leaf in leaves), _FILE)
    return FolderPlan(((_FILE, Plan(merge_pieces(pieces))), (".metadata", Plan((listing,))))), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the tensors and the objects that are items."""
    return Promise("dcp", tensors=tensor_items(checkpoint), leaves=object_items(checkpoint))


def _tensor_item(checkpoint: Checkpoint, leaf: Leaf, tensor: Tensor, dtype: Dtype) -> Plan:
    builder = Builder()
    graph = builder.graph(builder.tensor(contiguous(dtype, tensor.shape, "0")))
    size = tensor_size(tensor)
    name = f"{_ROOT}/data/0"
    body = rows(checkpoint, leaf.where, leaf.ref, tensor)
    whole = checkpoint.body(tensor.storage)
    known = whole.crc if whole and whole.piece == body and whole.size == size else None
    content = RecordContent(name, body, known, size) if known else checksummed(name, body)
    return _archive(graph, [content if size else RecordContent(name, b"", 0, 0)], "little")


def _object_item(checkpoint: Checkpoint, leaf: Leaf) -> Plan:
    """Plan an object as torch.save writes it, with the storages that it uses."""
    builder = Builder()
    root = builder.graft(checkpoint.graph, leaf.ref)
    graph, storages = renumbered(without_views(builder.graph(root, checkpoint.graph.style.protocol)))
    return _archive(graph, storage_contents(checkpoint, _ROOT, storages, leaf.where), checkpoint.container.byteorder)


def _archive(graph: Graph, storages: Iterable[RecordContent], byteorder: str) -> Plan:
    """Plan an archive as torch.save writes it to a stream."""
    data = encode(graph)
    # Forty digits that nobody reads; torch takes them from the names and checksums.
    identity = record_content(_ROOT, ".data/serialization_id", b"%040d" % zlib.crc32(data))
    return plan_archive([*archive_contents(_ROOT, data, byteorder, storages), identity])
