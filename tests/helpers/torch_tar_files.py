"""Files as torch 0.1 wrote them, tar archives with pickles inside, made by hand."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


class Placeholder(tuple):  # type: ignore[type-arg]
    """Stands for a tensor or storage in the object: its number."""


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, Placeholder):
            return obj[0]
        return None


def dump(value: object) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def placeholder(key: int | str) -> Placeholder:
    return Placeholder((str(key),))


Stored = tuple[int, str, Any, torch.Tensor]
Viewed = tuple[int, int, int, int]
Placed = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


def archive(
    path: Path, value: object, storages: Iterable[Stored], tensors: Iterable[Placed], views: Iterable[Viewed] = ()
) -> Path:
    """Write a file as torch 0.1 did."""
    storages, tensors = list(storages), list(tensors)
    first = dump(len(storages))
    for key, location, cls, data in storages:
        first += dump((key, location, cls)) + struct.pack("<q", data.numel()) + data.numpy().tobytes()
    first += dump(list(views))
    second = dump(len(tensors))
    for key, storage, shape, strides, offset in tensors:
        second += dump((key, storage, torch.FloatTensor)) + struct.pack("<i4x", len(shape))
        second += struct.pack(f"<{2 * len(shape) + 1}q", *shape, *strides, offset)
    parts = {"sys_info": dump({"protocol_version": 1000}), "pickle": dump(value)}
    return members(path, {**parts, "tensors": second, "storages": first})


def members(path: Path, parts: dict[str, bytes], style: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:", format=style) as file:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def typical(path: Path, location: str = "cpu") -> Path:
    """Tensors that share storages, views of storages, odd strides, a scalar and an empty one."""
    one, two = torch.arange(24, dtype=torch.float32), torch.arange(6, dtype=torch.int64)
    value = {
        "whole": placeholder(11),
        "turned": placeholder(12),
        "again": [placeholder(11)],
        "view": placeholder(13),
        "scalar": placeholder(14),
        "empty": placeholder(15),
        "long": placeholder(16),
        "epoch": 3,
        "state": OrderedDict([("w", placeholder(11)), ("b", placeholder(13))]),
    }
    tensors = [
        (11, 1, (4, 6), (6, 1), 0),
        (12, 1, (6, 4), (1, 6), 0),
        (13, 3, (2, 2), (2, 1), 1),
        (14, 1, (), (), 7),
        (15, 4, (0, 3), (3, 1), 0),
        (16, 2, (3,), (2,), 1),
    ]
    stored = [
        (1, location, torch.FloatStorage, one),
        (2, location, torch.LongStorage, two),
        (4, location, torch.FloatStorage, torch.zeros(0)),
    ]
    return archive(path, value, stored, tensors, [(3, 1, 4, 6)])
