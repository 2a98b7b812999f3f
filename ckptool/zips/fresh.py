"""A new archive, laid out as torch 2.7 and later write it.

Source: ``PyTorchStreamWriter`` (caffe2/serialize/inline_container.cc): every record padded to 64 bytes, its checksum
and sizes in a descriptor behind it, end records in zip64 always.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from ..source import Piece, Plan, merged
from .read import FULL32, LOCAL

__all__ = ["Content", "fresh"]

_GRID: Final = 64
_u16, _u32, _u64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack


class Content(NamedTuple):
    """A record to be: its whole name, its bytes as stored (``stored`` of them), and its CRC-32 and size inflated.

    ``deflated`` whether the bytes are a deflate stream; ``crc`` 0 for "not computed".
    """

    name: str
    body: Piece
    stored: int
    crc: int
    size: int
    deflated: bool = False


def fresh(contents: Iterable[Content]) -> Plan:
    """The plan of an archive with these records, in this order."""
    pieces: list[Piece] = []
    directory: list[bytes] = []
    at = 0
    for content in contents:
        header, descriptor = _around(content, at)
        directory.append(_entry(content, at))
        pieces += [header, content.body, descriptor]
        at += len(header) + content.stored + len(descriptor)
    listed = b"".join(directory)
    return Plan(merged([*pieces, listed, _end(len(directory), at, len(listed))]))


def _around(content: Content, at: int) -> tuple[bytes, bytes]:
    """The local header with its padding, and the descriptor."""
    name = content.name.encode("utf-8")
    wide = b""
    if content.size >= FULL32:
        wide += _u64(content.size) + _u64(0)  # torch leaves the compressed size 0 here
    if at >= FULL32:
        wide += _u64(at)
    if wide:
        wide = _u16(1) + _u16(len(wide)) + wide
    padding = -(at + LOCAL.size + len(name) + len(wide) + 4) % _GRID
    extra = wide + b"FB" + _u16(padding) + b"Z" * padding
    flags = 0x0808 if content.stored else 0x0800
    method = 8 if content.deflated else 0
    fixed = LOCAL.pack(b"PK\x03\x04", 0, flags, method, 0, 0, 0, 0, 0, len(name), len(extra))
    descriptor = b""
    if content.stored:
        pack = _u64 if wide else _u32
        descriptor = b"PK\x07\x08" + _u32(content.crc) + pack(content.stored) + pack(content.size)
    return fixed + name + extra, descriptor


def _entry(content: Content, at: int) -> bytes:
    name = content.name.encode("utf-8")
    wide = b"".join(_u64(value) for value in (content.size, content.stored, at) if value >= FULL32)
    if wide:
        wide = _u16(1) + _u16(len(wide)) + wide
    flags = 0x0808 if content.stored else 0x0800
    return (
        b"PK\x01\x02"
        + _u16(0) * 2
        + _u16(flags)
        + _u16(8 if content.deflated else 0)
        + bytes(4)
        + _u32(content.crc)
        + _u32(min(content.stored, FULL32))
        + _u32(min(content.size, FULL32))
        + _u16(len(name))
        + _u16(len(wide))
        + bytes(10)
        + _u32(min(at, FULL32))
        + name
        + wide
    )


def _end(count: int, directory: int, size: int) -> bytes:
    wide = b"PK\x06\x06" + _u64(44) + _u16(0x031E) + _u16(45) + bytes(8) + _u64(count) * 2 + _u64(size)
    locator = b"PK\x06\x07" + bytes(4) + _u64(directory + size) + _u32(1)
    counts = _u16(min(count, 0xFFFF)) * 2
    plain = b"PK\x05\x06" + bytes(4) + counts + _u32(min(size, FULL32)) + _u32(min(directory, FULL32)) + bytes(2)
    return wide + _u64(directory) + locator + plain
