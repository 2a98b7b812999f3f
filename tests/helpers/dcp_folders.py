"""DCP folders of any number of ranks, made by one process: the classes are torch's, the pieces are of torch.save."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_types
from torch.distributed.checkpoint.filesystem import _StorageInfo


def archive(value: Any) -> bytes:
    """What torch.save writes for a value."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def write_ranks(folder: Path, state: Mapping[str, Any], ranks: int) -> Path:
    """A folder of so many ranks: each tensor is cut along its first dimension, other values are the first rank's."""
    folder.mkdir()
    listed: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    parts: list[list[bytes]] = [[] for _ in range(ranks)]

    def put(rank: int, index: dcp_types.MetadataIndex, data: bytes) -> None:
        at = sum(map(len, parts[rank]))
        places[index] = _StorageInfo(f"__{rank}_0.distcp", at, len(data))
        parts[rank].append(data)

    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            listed[name] = dcp_types.BytesStorageMetadata()
            put(0, dcp_types.MetadataIndex(name), archive(value))
            continue
        chunks = []
        pieces = value.chunk(ranks) if value.dim() else [value]
        begin = 0
        for rank, piece in enumerate(pieces):
            offset = torch.Size((begin, *[0] * (value.dim() - 1)) if value.dim() else ())
            chunks.append(dcp_types.ChunkStorageMetadata(offset, piece.shape))
            put(rank, dcp_types.MetadataIndex(name, offset, len(chunks) - 1), archive(piece.clone()))
            begin += piece.shape[0] if value.dim() else 0
        listed[name] = dcp_types.TensorStorageMetadata(
            dcp_types.TensorProperties(dtype=value.dtype), value.shape, chunks
        )
    for rank, data in enumerate(parts):
        (folder / f"__{rank}_0.distcp").write_bytes(b"".join(data))
    found = dcp_types.Metadata(listed, {name: tuple(name.split(".")) for name in state}, places, version="1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    return folder


def write_boxes(folder: Path, tensors: Mapping[str, tuple[torch.Tensor, list[Any]]]) -> Path:
    """A folder of one rank in which each tensor is in the pieces of some boxes: (offsets, sizes)."""
    folder.mkdir()
    listed: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    parts: list[bytes] = []
    for name, (value, boxes) in tensors.items():
        chunks = []
        for number, (offsets, sizes) in enumerate(boxes):
            piece = value[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
            chunks.append(dcp_types.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            data = archive(piece.clone())
            places[dcp_types.MetadataIndex(name, torch.Size(offsets), number)] = _StorageInfo(
                "__0_0.distcp", sum(map(len, parts)), len(data)
            )
            parts.append(data)
        listed[name] = dcp_types.TensorStorageMetadata(
            dcp_types.TensorProperties(dtype=value.dtype), value.shape, chunks
        )
    (folder / "__0_0.distcp").write_bytes(b"".join(parts))
    found = dcp_types.Metadata(listed, {name: (name,) for name in tensors}, places, version="1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    return folder
