"""Tensors of every kind, each with one element changed, and files in other containers and byte orders."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Files without all of their bytes.
CUT = ("truncated.pth", "truncated_legacy.pth", "zip_missing_storage.pth", "zip_short_storage.pth")


def saved(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def as_big_endian(source: Path, target: Path, swap: dict[str, int]) -> None:
    """The same zip checkpoint as a big-endian machine writes it; ``swap`` is the width of each storage."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            key = name.rpartition("/data/")[2]
            if name.endswith("/byteorder"):
                data = b"big"
            elif key in swap:
                width = swap[key]
                data = b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))
            new.writestr(name, data)


KINDS: dict[str, Callable[[], Any]] = {
    "dense": lambda: torch.randn(5, 7),
    "scalar": lambda: torch.tensor(3),
    "view": lambda: torch.randn(6, 8)[1:5, 2:7],
    "transposed": lambda: torch.randn(6, 8).t(),
    "float8": lambda: torch.randn(9).to(torch.float8_e4m3fn),
    "bfloat16": lambda: torch.randn(9).to(torch.bfloat16),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "sparse": lambda: torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
    "csr": lambda: torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
}


def copied(value: Any) -> Any:
    """Another object that is the same; deepcopy does not know every kind of tensor."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bumped(tensor: Any) -> Any:
    """The tensor with one element that differs."""
    other = copied(tensor.detach())
    if other.is_nested:
        other.values()[0] += 1
    elif other.layout == torch.sparse_coo:
        other._values()[0] += 1
    elif other.layout == torch.sparse_csr:
        other.values()[0] += 1
    elif other.is_quantized:
        other.int_repr()
        other = torch._make_per_tensor_quantized_tensor(
            other.int_repr() ^ (torch.arange(8) == 2).to(torch.int8), 0.1, 3
        )
    elif other.dtype == torch.float8_e4m3fn:
        other.view(torch.uint8)[0] ^= 1
    elif other.dtype == torch.bool:
        other[0] = ~other[0]
    else:
        other[(0,) * other.dim()] += 1
    return torch.nn.Parameter(other) if isinstance(tensor, torch.nn.Parameter) else other
