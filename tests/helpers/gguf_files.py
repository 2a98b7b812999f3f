"""GGUF files, written byte by byte or by the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STRING, ARRAY = 8, 9


def text(value: str | bytes, order: str = "<") -> bytes:
    """A string behind its length."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(f"{order}Q", len(data)) + data


def entry(name: str | bytes, kind: int, value: bytes, order: str = "<") -> bytes:
    """An entry of the metadata."""
    return text(name, order) + struct.pack(f"{order}I", kind) + value


def tensor(name: str | bytes, shape: Sequence[int], kind: int = 0, offset: int = 0, order: str = "<") -> bytes:
    """The description of a tensor; ``shape`` is in the order of torch."""
    numbers = struct.pack(f"{order}I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
    return text(name, order) + numbers


def made(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
    order: str = "<",
) -> bytes:
    """A file; ``counts`` are the numbers of tensors and entries that it declares, by default the right ones."""
    numbers = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def written(path: Path, tensors: Mapping[str, Any], how: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write tensors with the gguf package: arrays, or pairs of bytes as an array and their type.

    ``how`` has calls of the writer: the name of a method without "add_", and its argument.
    """
    import gguf

    writer = gguf.GGUFWriter(path, options.pop("arch", "llama"), **options)
    for name, value in (how or {}).items():
        getattr(writer, f"add_{name}")(*value if isinstance(value, tuple) else (value,))
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
