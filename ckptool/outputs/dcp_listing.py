"""The ``.metadata`` of a DCP folder, made from a list of what is in its one file.

Source: the dataclasses of torch/distributed/checkpoint/metadata.py and ``_StorageInfo`` of filesystem.py: each is made
without arguments and filled from a dict, as ``pickle`` does it with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..building import Builder
from ..pickles import encode
from ..pickles.nodes import Call, Ref
from ..pickles.opcodes import NEWOBJ

__all__ = ["Placed", "metadata_pickle"]

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
    listed, places, storage = [], [], []
    for item in items:
        name = builder.add(item.name)
        listed += [name, _tensor(builder, item) if item.dtype else _made(builder, _METADATA, "BytesStorageMetadata")]
        places += [name, builder.group(builder.constant(step) for step in item.path)]
        index = [("fqn", name), ("index", builder.constant(0 if item.dtype else None))]
        if item.dtype:
            index.append(("offset", _size(builder, (0,) * len(item.shape))))
        storage.append(_made(builder, _METADATA, "MetadataIndex", index))
        where = [
            ("relative_path", builder.constant(file)),
            ("offset", builder.constant(item.at)),
            ("length", builder.constant(item.length)),
        ]
        storage.append(_made(builder, _FILESYSTEM, "_StorageInfo", where))
    about = [(name, builder.constant(None)) for name in ("checkpoint_id", "save_id", "load_id")]
    fields = [
        ("state_dict_metadata", builder.pairs(listed)),
        ("planner_data", builder.pairs(places)),
        ("storage_data", builder.pairs(storage)),
        ("storage_meta", _made(builder, _METADATA, "StorageMeta", [*about, ("modules", builder.sequence(()))])),
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


def _size(builder: Builder, numbers: Sequence[int]) -> Ref:
    return builder.call("torch", "Size", [builder.numbers(numbers)])


def _tensor(builder: Builder, item: Placed) -> Ref:
    zeros = (0,) * len(item.shape)
    chunk = [("offsets", _size(builder, zeros)), ("sizes", _size(builder, item.shape))]
    # dtype, layout, requires_grad, memory format, pinned: ``TensorProperties.__getstate__``.
    state = builder.group(
        [
            builder.named("torch", item.dtype),
            builder.call("torch.serialization", "_get_layout", [builder.constant("torch.strided")]),
            builder.constant(False),
            builder.call(_METADATA, "_MEM_FORMAT_ENCODING", [builder.constant(0)]),
            builder.constant(False),
        ]
    )
    properties = Call(NEWOBJ, builder.named(_METADATA, "TensorProperties"), builder.constant(()))
    fields = [
        ("properties", builder.add(properties.filled((), (), (state,)))),
        ("size", _size(builder, item.shape)),
        ("chunks", builder.sequence([_made(builder, _METADATA, "ChunkStorageMetadata", chunk)])),
    ]
    return _made(builder, _METADATA, "TensorStorageMetadata", fields)
