"""Check a ``.metadata`` pickle, so that Python's unpickler reads it in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from io import RawIOBase
from typing import Any, Final

from ...pickles import opcodes as op

#: The longest string that the expression for runs of opcodes covers.
_SHORT: Final = 64
#: The replacements of opcodes. A dict becomes a flat list of keys and values, or of a ``_Pair`` for an entry by itself.
#: A list becomes a ``_List``, which is filled with ``_Parts``, so that neither takes the other's. FRAME goes, with its
#: size.
_REPLACED: Final = {
    b"}": b"]",
    b"\x94}": b"\x94]",
    b"u": b"e",
    b"s": b"\x86Qa",
    b"]": b"NQ",
    b"a": b"\x85\x85Qb",
    b"e": b"t\x85Qb",
}
#: The pickle memoizes the numbers of a ``torch.Size``, the arguments with them, and the result. Memoizing the result
#: three times instead takes half the memory: nothing refers to the arguments. No string has these bytes.
_SIZES: Final = tuple((b"%c\x94\x85\x94R\x94" % code, b"%c\x85R\x94\x94\x94" % code) for code in b"\x85\x86\x87")
#: Bytes of the checked pickle that are made at once.
CHUNK: Final = 1 << 18
#: Opcodes of one byte that make an object, which takes about 70 bytes.
_MAKING: Final = b"]}R\x81\x85\x86\x87"
#: Objects allowed in a file of any size, and bytes required per further one. torch writes ten bytes per object.
_FEW_OBJECTS, _BYTES_PER_OBJECT = 250_000, 4


class Refused(ValueError):
    """The pickle has something that torch never writes there."""


class CheckedPickle(RawIOBase):
    """A file with the pickle ``data``, changed so that the standard unpickler reads it in bounded time and memory.

    It accepts only the opcodes with which protocol 2 and later write ``.metadata``. No size or memo number may exceed
    the size of the file, and the number of objects is limited. Dicts become lists, so that nothing is hashed: hashing
    tuples that share tuples may take forever. ``end`` is the size of the original in bytes.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__()
        if data[:1] != b"\x80" or data[1] not in range(2, 6):
            raise Refused("it is not a pickle of protocol 2 to 5")
        if sum(map(data.count, _MAKING)) > _FEW_OBJECTS + len(data) // _BYTES_PER_OBJECT:
            raise Refused("it makes more objects than a file of its size can list")
        self.end = 0
        self._data = data
        self._chunks = self._checked()
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy the next bytes to ``buffer``."""
        if not self._rest:
            chunk = next(self._chunks, b"")
            for before, after in _SIZES:
                chunk = chunk.replace(before, after)
            self._rest = memoryview(chunk)
        part = self._rest[: len(buffer)]
        self._rest = self._rest[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def _checked(self) -> Iterator[bytes]:
        """Yield the changed pickle in chunks."""
        data = self._data
        match = _runs(min(len(data) >> 17, 255))
        checked = bytearray(data[:2])
        at = 2
        while True:
            run = match(data, at)
            assert run is not None  # it matches nothing as well
            plain, fields, special = run.groups()
            checked += plain
            at = run.end()
            if fields is not None:
                # The fields of an object become a flat tuple. Nothing refers to it, so the memo gets the object twice.
                checked += b"\x94\x94("
                checked += fields
                checked += b"tb"
            elif special:
                checked += _REPLACED.get(special, b"")
                if special[0] == op.FRAME and int.from_bytes(special[1:], "little") > len(data) - at:
                    raise Refused("it is cut: a frame ends after the file")
            elif not plain:
                code = data[at] if at < len(data) else -1
                if code in (op.SHORT_BINUNICODE, op.BINUNICODE):
                    width = 1 if code == op.SHORT_BINUNICODE else 4
                    end = at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
                    checked += data[at:end]
                    at = end
                elif code == op.STOP:
                    self.end = at + 1
                    yield bytes(checked + b".")
                    return
                elif code < 0:
                    raise Refused("it is cut: it ends before its last opcode")
                else:
                    raise Refused(f"it has the opcode 0x{code:02x} at byte {at:,}, which torch never writes there")
            if len(checked) >= CHUNK:
                yield bytes(checked)
                checked.clear()


@lru_cache(maxsize=4)
def _runs(top: int) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Return a function that matches a run of opcodes, and after it the fields of an object, or one of ``_REPLACED``.
    ``top`` is the highest third byte of a memo number."""
    tokens = (
        rb"h.|\x94(?!}\x94\()|K.|M..|J....|[(NRtb\x85-\x89\x93]|\)\x81?|j....|q.",
        rb"r..[\0-%b]\0" % re.escape(bytes([top])),
        _sized(b"\x8a", 1, range(1, 10)),
        _sized(b"\x8c", 1, range(_SHORT)),
        _sized(b"X", 4, range(_SHORT)),
        rb"G.{8}|c[^\n]{1,200}\n[^\n]{1,200}\n",
    )
    token = b"|".join(tokens)
    fields = rb"\x94}\x94\(((?:%b){1,40})ub" % token
    return re.compile(rb"((?:%b){0,8192})(?:%b|(\x94}|[}\]aesu]|\x95.{8}))?" % (token, fields), re.DOTALL).match


def _sized(code: bytes, width: int, sizes: Iterable[int]) -> bytes:
    """Return the expression for an opcode with a size of ``width`` bytes and as many bytes after it."""
    return re.escape(code) + b"(?:%b)" % b"|".join(
        re.escape(size.to_bytes(width, "little")) + b".{%d}" % size for size in sizes
    )
