"""A DCP folder of a whole checkpoint, as one process writes it: ``dcp.load`` reads it at any number of ranks.

Sources in torch/distributed/checkpoint: ``traverse_state_dict`` (_traverse.py) says what becomes an item,
``FileSystemWriter`` (filesystem.py) how items lie in a file, metadata.py what ``.metadata`` is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.graph_editor import used_storages
from ...checkpoint.objects import is_ordered_dict
from ...checkpoint.tensors import is_contiguous
from ...checkpoint.views import without_views
from ...files.sources import Files, Piece, Plan, merged
from ...files.zips.writer import RecordContent, checksummed, plan_archive
from ...pickles.encode import encode
from ...pickles.nodes import Call, Graph, Ref, children
from ...pickles.opcodes import NEWOBJ
from ...values.elements import tensor_size
from ..losses import Loss, refuse_edited
from ..promises import Promise
from ..rows import rows
from ..torch.zip_writer import renumbered, storage_contents
from .leaves import Items, Leaf, object_items, plain_dtype, tensor_items

# -- The ``.metadata`` of a DCP folder, made from a list of what is in its one file

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: Of torch.distributed.checkpoint, which writes it and does not look at it.
_VERSION: Final = "1.0.0"


class Placed(NamedTuple):
    """An item: ``at`` and ``length`` in bytes of the file; with ``dtype`` "" an object, else a tensor in one piece."""

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    at: int
    length: int


def metadata_pickle(items: Sequence[Placed], file: str) -> bytes:
    """The pickle of a ``Metadata``; the same for the same items."""
    builder = Builder()
    sizes = _Sizes(builder)
    listed, places, storage = [], [], []
    for item in items:
        name = builder.add(item.name)
        listed += [
            name,
            _tensor(builder, sizes, item) if item.dtype else _made(builder, _METADATA, "BytesStorageMetadata"),
        ]
        places += [name, builder.group(builder.constant(step) for step in item.path)]
        index = [("fqn", name), ("index", builder.constant(0 if item.dtype else None))]
        if item.dtype:
            index.append(("offset", sizes.of((0,) * len(item.shape))))
        storage.append(_made(builder, _METADATA, "MetadataIndex", index))
        where = [
            ("relative_path", builder.constant(file)),
            ("offset", builder.constant(item.at)),
            ("length", builder.constant(item.length)),
        ]
        storage.append(_made(builder, _FILESYSTEM, "_StorageInfo", where))
    unsaid = [(name, builder.constant(None)) for name in ("checkpoint_id", "save_id", "load_id")]
    fields = [
        ("state_dict_metadata", builder.pairs(listed)),
        ("planner_data", builder.pairs(places)),
        ("storage_data", builder.pairs(storage)),
        ("storage_meta", _made(builder, _METADATA, "StorageMeta", [*unsaid, ("modules", builder.sequence(()))])),
        ("version", builder.constant(_VERSION)),
    ]
    return encode(builder.graph(_made(builder, _METADATA, "Metadata", fields)))


def _made(builder: Builder, module: str, name: str, fields: Sequence[tuple[str, Ref]] = ()) -> Ref:
    """An object of a class, with what goes into its ``__dict__``."""
    call = Call(NEWOBJ, builder.named(module, name), builder.constant(()))
    if not fields:
        return builder.add(call)
    state = builder.pairs([ref for key, value in fields for ref in (builder.constant(key), value)])
    return builder.add(call.filled((), (), (state,)))


class _Sizes:
    """Every ``torch.Size`` once, and what all properties share: a third of what must be read."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.layout = builder.call("torch.serialization", "_get_layout", [builder.constant("torch.strided")])
        self.memory = builder.call(_METADATA, "_MEM_FORMAT_ENCODING", [builder.constant(0)])
        self._known: dict[tuple[int, ...], Ref] = {}

    def of(self, numbers: tuple[int, ...]) -> Ref:
        known = self._known.get(numbers)
        if known is None:
            known = self.builder.call("torch", "Size", [self.builder.numbers(numbers)])
            self._known[numbers] = known
        return known


def _tensor(builder: Builder, sizes: _Sizes, item: Placed) -> Ref:
    zeros = (0,) * len(item.shape)
    chunk = [("offsets", sizes.of(zeros)), ("sizes", sizes.of(item.shape))]
    # dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
    state = builder.group(
        [
            builder.named("torch", item.dtype),
            sizes.layout,
            builder.constant(False),
            sizes.memory,
            builder.constant(False),
        ]
    )
    properties = Call(NEWOBJ, builder.named(_METADATA, "TensorProperties"), builder.constant(()))
    fields = [
        ("properties", builder.add(properties.filled((), (), (state,)))),
        ("size", sizes.of(item.shape)),
        ("chunks", builder.sequence([_made(builder, _METADATA, "ChunkStorageMetadata", chunk)])),
    ]
    return _made(builder, _METADATA, "TensorStorageMetadata", fields)


_FILE: Final = "__0_0.distcp"
_ROOT: Final = "archive"


def losses(checkpoint: Checkpoint, *, tied: bool = False) -> list[Loss]:
    """What the folder would lack, kind by kind; ``tied`` whether tensors that share memory may be copied each."""
    walk = Items(checkpoint)
    plain = [(leaf.name, leaf.tensor) for leaf in walk.leaves if leaf.plain and leaf.tensor]
    users: dict[str, list[str]] = {}
    for leaf in walk.leaves:
        for key in _storages(walk, leaf):
            users.setdefault(key, []).append(leaf.name)
    shared = dict.fromkeys(name for names in users.values() if len(names) > 1 for name in names)
    found = [
        Loss("keys", tuple(walk.nameless)),
        Loss("containers", tuple(walk.containers)),
        Loss("strides", tuple(where for where, tensor in plain if not is_contiguous(tensor))),
        Loss("sharing", () if tied else tuple(shared)),
        Loss("requires-grad", tuple(where for where, tensor in plain if tensor.requires_grad or tensor.cls)),
        Loss("devices", tuple(dict.fromkeys(tensor.location for _, tensor in plain if tensor.location != "cpu"))),
    ]
    return [loss for loss in found if loss.where]


def _storages(walk: Items, leaf: Leaf) -> set[str]:
    """The storages with bytes in them that an item holds, or a part of them."""
    if leaf.plain and leaf.tensor:
        return {leaf.tensor.storage} if tensor_size(leaf.tensor) else set()
    found: set[str] = set()
    seen, work = set[Ref](), [leaf.ref]
    while work:
        ref = work.pop()
        if ref in seen:
            continue
        seen.add(ref)
        storage = walk.reader.storage(ref)
        if storage is not None and storage.nbytes:
            found.add(storage.key)
        work += children(walk.graph.nodes[ref])
    return found


def has_ordered_dicts(checkpoint: Checkpoint) -> bool:
    """Are there OrderedDicts, which come back as dicts, without the versions of modules that they carry?"""
    return any(is_ordered_dict(checkpoint.graph, item.ref) for item in checkpoint.state_dicts)


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Files, bool]:
    """The folder; raises RefusedError for what an edit left in it that it cannot hold."""
    refuse_edited(checkpoint, lambda: losses(checkpoint), "a DCP folder")
    return folder_plan(checkpoint), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """The tensors and the objects that are items."""
    return Promise("dcp", tensors=tensor_items(checkpoint), leaves=object_items(checkpoint))


def folder_plan(checkpoint: Checkpoint) -> Files:
    """The folder, without what ``losses`` tells: objects first, then tensors, as torch has it.

    Raises RefusedError where bytes are missing, or two values would have one name.
    """
    leaves = Items(checkpoint).leaves
    used_storages(checkpoint.graph, checkpoint.path)  # raises for what may be one, and is not understood
    pieces: list[Piece] = []
    placed: dict[str, Placed] = {}
    at = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.plain):
        item = _tensor_item(checkpoint, leaf) if leaf.plain else _object_item(checkpoint, leaf)
        shape = leaf.tensor.shape if leaf.plain and leaf.tensor else ()
        dtype = plain_dtype(leaf.tensor).name if leaf.plain and leaf.tensor else ""  # type: ignore[union-attr]
        placed[leaf.name] = Placed(leaf.name, leaf.path, dtype, shape, at, item.size)
        pieces += item.pieces
        at += item.size
    # Listed in the order of the object, which is that in which it is put together again.
    listing = metadata_pickle([placed[leaf.name] for leaf in leaves], _FILE)
    return Files(((_FILE, Plan(merged(pieces))), (".metadata", Plan((listing,)))))


def _tensor_item(checkpoint: Checkpoint, leaf: Leaf) -> Plan:
    tensor = leaf.tensor
    assert tensor is not None
    dtype = plain_dtype(tensor)
    assert dtype is not None
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
    """An object as torch.save writes it, with the storages that it uses."""
    builder = Builder()
    root = builder.graft(checkpoint.graph, leaf.ref)
    graph, storages = renumbered(without_views(builder.graph(root, checkpoint.graph.style.protocol)))
    return _archive(graph, storage_contents(checkpoint, _ROOT, storages, leaf.where), checkpoint.container.byteorder)


def _archive(graph: Graph, storages: Iterator[RecordContent] | list[RecordContent], byteorder: str) -> Plan:
    """An archive as torch.save writes it to a stream."""
    data = encode(graph)
    contents = [
        *(_record(name, text) for name, text in (("data.pkl", data), (".format_version", b"1"))),
        *(_record(name, text) for name, text in ((".storage_alignment", b"64"), ("byteorder", byteorder.encode()))),
        *storages,
        _record("version", b"3\n"),
        # Forty digits that nobody reads; torch takes them from the names and checksums.
        _record(".data/serialization_id", b"%040d" % zlib.crc32(data)),
    ]
    return plan_archive(contents)


def _record(name: str, data: bytes) -> RecordContent:
    return RecordContent(f"{_ROOT}/{name}", data, zlib.crc32(data), len(data))
