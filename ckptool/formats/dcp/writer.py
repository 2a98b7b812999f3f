"""A DCP folder of a whole checkpoint, as one process writes it: ``dcp.load`` reads it at any number of ranks.

Sources in torch/distributed/checkpoint: ``traverse_state_dict`` (_traverse.py) says what becomes an item,
``FileSystemWriter`` (filesystem.py) how items lie in a file, metadata.py what ``.metadata`` is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import RefusedError
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.graph_editor import used_storages
from ...checkpoint.objects import class_name, is_ordered_dict, mapping
from ...checkpoint.paths import as_children, joined
from ...checkpoint.tensors import Tensor, rebuild_calls
from ...checkpoint.views import without_views
from ...files.sources import Files, Piece, Plan, merged
from ...files.zips.writer import Content, fresh, summed
from ...pickles.encode import encode
from ...pickles.nodes import Call, Graph, List, Ref, children
from ...pickles.opcodes import NEWOBJ
from ...values.elements import holds_rows, tensor_size
from ..losses import Loss
from ..rows import rows
from ..torch.zip_writer import renumbered, storage_contents

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
#: Mappings within mappings that are followed.
_DEPTH: Final = 200
#: Arguments of ``_rebuild_tensor_v2`` without the dict of its bits.
_PLAIN_ARGUMENTS: Final = 6


class Leaf(NamedTuple):
    """What becomes an item: its flat name, its place in the object, and in words as ``inspect`` spells it.

    ``tensor`` is None for an object; ``plain`` says that it becomes a tensor in pieces rather than an object.
    """

    name: str
    path: tuple[str | int, ...]
    where: str
    ref: Ref
    tensor: Tensor | None
    plain: bool


class _Walk:
    """The items of an object, and what does not come through."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.leaves: list[Leaf] = []
        #: Paths of containers that are another kind afterwards, or gone.
        self.containers: list[str] = []
        #: Paths of entries whose keys nothing can be called after: tuples, bytes, objects.
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
                raise RefusedError(what, path=checkpoint.path, next="rename one: ckptool rename")
            names[leaf.name] = leaf.where

    def _follow(self, ref: Ref, path: tuple[str | int, ...], where: str, depth: int) -> None:
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)
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
                    self._leaf(value, place, spelled)  # nobody loads a list with a hole
                else:
                    self._follow(value, place, spelled, depth + 1)
        else:
            self._leaf(ref, path, where)

    def _leaf(self, ref: Ref, path: tuple[str | int, ...], where: str) -> None:
        tensor = self.reader.tensor(ref)
        self.leaves.append(Leaf(".".join(map(str, path)), path, where, ref, tensor, self._is_plain(ref)))

    def _is_plain(self, ref: Ref) -> bool:
        tensor = self.reader.tensor(ref)
        return tensor is not None and _dtype(tensor) is not None and self._is_bare(ref)

    def _is_bare(self, ref: Ref) -> bool:
        """Is it a tensor or Parameter and nothing else: no attributes, no class of its own, no conjugate bit?

        What is more than that becomes an object, which keeps it.
        """
        *wrappers, call = rebuild_calls(self.graph, ref)
        nodes = [self.graph.nodes[one.ref] for one in (*wrappers, call)]
        if any(isinstance(node, Call) and node.states for node in nodes):
            return False
        if any(wrapper.short_name != "_rebuild_parameter" for wrapper in wrappers):
            return False
        if call.short_name not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return False
        return len(call.args) <= _PLAIN_ARGUMENTS or not mapping(self.graph, call.args[-1])

    def _is_terminal(self, ref: Ref, depth: int) -> bool:
        """Is it a list that is stored as it is? One with mappings or plain tensors in it, in any list in it, is not.

        Who loads it looks at the list that the items make: what became an object is no tensor to him, and an empty
        mapping is not there.
        """
        if ref in self._terminal:
            return self._terminal[ref]
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)
        self._terminal[ref] = True  # where it leads back to itself
        node = self.graph.nodes[ref]
        found = True
        for part in node.items if isinstance(node, List) else ():
            inner = self.graph.nodes[part]
            if isinstance(inner, List):
                found = found and self._is_terminal(part, depth + 1)
            elif self._is_plain(part) or self._has_items(part, depth):
                found = False
        self._terminal[ref] = found
        return found

    def _has_items(self, ref: Ref, depth: int) -> bool:
        """Is it a mapping with something else than empty mappings in it?"""
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)
        inner = None if self.reader.tensor(ref) else mapping(self.graph, ref)
        return any(mapping(self.graph, value) is None or self._has_items(value, depth + 1) for _, value in inner or ())


def leaves(checkpoint: Checkpoint) -> list[Leaf]:
    """What becomes items. Raises RefusedError where two would have one name, or a folder cannot hold it."""
    return _Walk(checkpoint).leaves


def losses(checkpoint: Checkpoint, *, tied: bool = False) -> list[Loss]:
    """What the folder would lack, kind by kind; ``tied`` whether tensors that share memory may be copied each."""
    walk = _Walk(checkpoint)
    plain = [(leaf.name, leaf.tensor) for leaf in walk.leaves if leaf.plain and leaf.tensor]
    users: dict[str, list[str]] = {}
    for leaf in walk.leaves:
        for key in _storages(walk, leaf):
            users.setdefault(key, []).append(leaf.name)
    shared = dict.fromkeys(name for names in users.values() if len(names) > 1 for name in names)
    found = [
        Loss("keys", tuple(walk.nameless)),
        Loss("containers", tuple(walk.containers)),
        Loss("strides", tuple(where for where, tensor in plain if not holds_rows(tensor))),
        Loss("sharing", () if tied else tuple(shared)),
        Loss("requires-grad", tuple(where for where, tensor in plain if tensor.requires_grad or tensor.cls)),
        Loss("devices", tuple(dict.fromkeys(tensor.location for _, tensor in plain if tensor.location != "cpu"))),
    ]
    return [loss for loss in found if loss.where]


def _storages(walk: _Walk, leaf: Leaf) -> set[str]:
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


def plan(checkpoint: Checkpoint) -> Files:
    """The folder, without what ``losses`` tells: objects first, then tensors, as torch has it.

    Raises RefusedError where bytes are missing, or two values would have one name.
    """
    leaves = _Walk(checkpoint).leaves
    used_storages(checkpoint.graph, checkpoint.path)  # raises for what may be one, and is not understood
    pieces: list[Piece] = []
    placed: dict[str, Placed] = {}
    at = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.plain):
        item = _tensor_item(checkpoint, leaf) if leaf.plain else _object_item(checkpoint, leaf)
        shape = leaf.tensor.shape if leaf.plain and leaf.tensor else ()
        dtype = _dtype(leaf.tensor).name if leaf.plain and leaf.tensor else ""  # type: ignore[union-attr]
        placed[leaf.name] = Placed(leaf.name, leaf.path, dtype, shape, at, item.size)
        pieces += item.pieces
        at += item.size
    # Listed in the order of the object, which is that in which it is put together again.
    listing = metadata_pickle([placed[leaf.name] for leaf in leaves], _FILE)
    return Files(((_FILE, Plan(merged(pieces))), (".metadata", Plan((listing,)))))


def _dtype(tensor: Tensor) -> Dtype | None:
    """The dtype of a tensor that DCP stores in pieces; it copies elements, which not every dtype of torch allows."""
    dtype = BY_NAME.get(tensor.dtype)
    if tensor.kind != "dense" or not tensor.storage or dtype is None:
        return None
    odd = dtype.packed > 1 or dtype.name.startswith(("q", "bits", "float4"))
    return None if odd else dtype


def _tensor_item(checkpoint: Checkpoint, leaf: Leaf) -> Plan:
    tensor = leaf.tensor
    assert tensor is not None
    dtype = _dtype(tensor)
    assert dtype is not None
    builder = Builder()
    graph = builder.graph(builder.tensor(contiguous(dtype, tensor.shape, "0")))
    size = tensor_size(tensor)
    name = f"{_ROOT}/data/0"
    body = rows(checkpoint, leaf.where, leaf.ref, tensor)
    whole = checkpoint.body(tensor.storage)
    known = whole.crc if whole and whole.piece == body and whole.size == size else None
    content = Content(name, body, known, size) if known else summed(name, body)
    return _archive(graph, [content if size else Content(name, b"", 0, 0)], "little")


def _object_item(checkpoint: Checkpoint, leaf: Leaf) -> Plan:
    """An object as torch.save writes it, with the storages that it uses."""
    builder = Builder()
    root = builder.graft(checkpoint.graph, leaf.ref)
    graph, storages = renumbered(without_views(builder.graph(root, checkpoint.graph.style.protocol)))
    return _archive(graph, storage_contents(checkpoint, _ROOT, storages, leaf.where), checkpoint.container.byteorder)


def _archive(graph: Graph, storages: Iterator[Content] | list[Content], byteorder: str) -> Plan:
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
    return fresh(contents)


def _record(name: str, data: bytes) -> Content:
    return Content(f"{_ROOT}/{name}", data, zlib.crc32(data), len(data))
