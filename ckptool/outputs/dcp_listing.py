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
