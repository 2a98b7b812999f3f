"""A DCP folder of a whole checkpoint, as a single process writes it: ``dcp.load`` reads it with any number of ranks.

Sources in torch/distributed/checkpoint: ``traverse_state_dict`` (_traverse.py) makes the items, ``FileSystemWriter``
(filesystem.py) lays them out in a file, metadata.py has the classes of ``.metadata``.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final

from ...base.dtypes import Dtype
from ...base.errors import TargetError
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.graph_builder import Builder, contiguous
from ...checkpoint.graph_editor import used_storages, without_views
from ...checkpoint.objects import is_ordered_dict
from ...checkpoint.tensors import Tensor, is_contiguous
from ...files.sources import (
    AssembledSource,
    BytesSource,
    Computed,
    FolderPlan,
    Piece,
    Plan,
    Span,
    merge_pieces,
)
from ...files.zips.writer import RecordContent, checksummed, plan_archive, with_crc
from ...pickles.encode import encode
from ...values.elements import tensor_size
from ..losses import Fit, Loss, refuse_edited, storages_within
from ..nested_rows import rows
from ..promises import Promise
from ..torch.zip_writer import archive_contents, record_content, renumbered, storage_contents
from .leaves import Leaf, items_of, listed_items, object_items
from .metadata_writer import Placed, metadata_pickle

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
    ordered = any(is_ordered_dict(checkpoint.graph, item.ref) for item in checkpoint.state_dicts)
    notes = ("OrderedDicts come back as dicts, without the versions of modules",) if ordered else ()
    losses = _losses(checkpoint, tied=target.tied == "clone")
    return Fit("a DCP folder", target, losses, notes, {"sharing": "`--allow-loss sharing`"})


def _losses(checkpoint: Checkpoint, *, tied: bool = False) -> list[Loss]:
    """Return what the folder would lack, by kind. ``tied``: tensors that share memory may be copied."""
    walk = items_of(checkpoint)
    plain = [(leaf.name, leaf.tensor) for leaf in walk.leaves if leaf.dtype and leaf.tensor]
    users: dict[str, list[str]] = {}
    for leaf in walk.leaves:
        for key in _storages(checkpoint, leaf):
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


def _storages(checkpoint: Checkpoint, leaf: Leaf) -> list[str]:
    """Return the nonempty storages that an item holds, fully or in part, each once and in order."""
    if leaf.dtype and leaf.tensor:
        return [leaf.tensor.storage] if tensor_size(leaf.tensor) else []
    return storages_within(checkpoint, leaf.ref)


def plan(checkpoint: Checkpoint, target: Target) -> tuple[FolderPlan, bool]:
    """Plan the folder: objects first, then tensors, as torch writes them. Raises RefusedError for edited content that
    it cannot hold, missing bytes, or two values with one name."""
    refuse_edited(checkpoint, lambda: _losses(checkpoint), "a DCP folder")
    walk = items_of(checkpoint)
    leaves = walk.leaves
    used_storages(walk.graph, checkpoint.path, walk.reader)  # raises if a possible storage is not understood
    pieces: list[Piece] = []
    placed: dict[str, Placed] = {}
    at = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.dtype is not None):
        if leaf.dtype and leaf.tensor:
            item = _tensor_item(checkpoint, leaf, leaf.tensor, leaf.dtype)
        else:
            item = _object_item(checkpoint, leaf)
        size = item.size
        placed[leaf.name] = Placed(leaf, at, size)
        pieces += item.pieces
        at += size
    # Listed in object order, in which the object is rebuilt.
    listing = metadata_pickle((placed[leaf.name] for leaf in leaves), _FILE)
    return FolderPlan(((_FILE, Plan(merge_pieces(pieces))), (".metadata", Plan((listing,))))), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the list of all items, and the objects among them."""
    return Promise("dcp", manifest=listed_items(checkpoint), leaves=object_items(checkpoint))


def _tensor_item(checkpoint: Checkpoint, leaf: Leaf, tensor: Tensor, dtype: Dtype) -> Plan:
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
    """Return the bytes before and after a tensor's bytes in its item, equal for all tensors of one dtype and shape,
    with ``_ANY_CRC`` as their checksum; None if they contain these four bytes by chance."""
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
