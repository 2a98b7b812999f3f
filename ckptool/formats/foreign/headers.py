"""One-line summaries of GGUF and NumPy headers. The data after the header is not read.

Sources: ``docs/gguf.md`` of ggml-org/ggml, ``ggml.h`` for the type numbers; ``numpy/lib/format.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from struct import Struct
from struct import error as StructError
from typing import Final

from ...base.text import cut, join_limited, pluralize
from ...files.sources import Source

#: The most bytes of a GGUF header that are read: vocabularies take a few MB.
_MAX_HEADER: Final = 32 << 20
#: The most metadata values, tensors and array strings that are visited.
_MAX_ITEMS: Final = 1_000_000
#: The size of a value in bytes by its type; 8 is a string, 9 an array.
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING: Final = 8
_ARRAY: Final = 9
_TYPES: Final = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"))),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), 10)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 20)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


class _GgufHeader:
    """A cursor over the header. Raises StructError at its end, or if too much would be read."""

    def __init__(self, source: Source) -> None:
        self.data = source.read(0, min(source.size, _MAX_HEADER))
        self.order = "<" if int.from_bytes(self.data[4:8], "little") < 1 << 16 else ">"
        self.at = 4
        self.version = self.number("I")
        #: Version 1 had 32-bit counts.
        self.count = "I" if self.version == 1 else "Q"

    def number(self, code: str) -> int:
        form = Struct(self.order + code)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(value)

    def skip(self, size: int) -> None:
        if self.at + size > len(self.data):
            raise StructError("beyond the header")
        self.at += size

    def text(self) -> str:
        size = self.number(self.count)
        begin = self.at
        self.skip(size)
        return self.data[begin : begin + min(size, 200)].decode("utf-8", "replace")

    def value(self, type: int) -> str:
        """Skip a value; return it if it is a string, else ""."""
        if type == _STRING:
            return self.text()
        if type == _ARRAY:
            inner, count = self.number("I"), self.number(self.count)
            if inner in _WIDTHS:
                self.skip(_WIDTHS[inner] * count)
            elif inner == _STRING:
                for _ in range(min(count, _MAX_ITEMS)):
                    self.skip(self.number(self.count))
            else:
                raise StructError("nested arrays")
        elif type in _WIDTHS:
            self.skip(_WIDTHS[type])
        else:
            raise StructError("unknown type")
        return ""


def gguf_summary(source: Source) -> str:
    """Return ``version 3, architecture llama, 291 tensors (Q4_K 193, F32 98), 25 metadata values``, as far as the
    header can be read."""
    parts: list[str] = []
    types: Counter[str] = Counter()
    try:
        header = _GgufHeader(source)
        parts.append(f"version {header.version}" + (", big-endian" if header.order == ">" else ""))
        tensors, values = header.number(header.count), header.number(header.count)
        parts += [pluralize(tensors, "tensor"), pluralize(values, "metadata value")]
        for _ in range(min(values, _MAX_ITEMS)):
            name, text = header.text(), header.value(header.number("I"))
            if name == "general.architecture":
                parts.insert(1, f"architecture {cut(text, 40)}")
        for _ in range(min(tensors, _MAX_ITEMS)):
            header.text()
            header.skip(8 * header.number("I"))
            number = header.number("I")
            types[_TYPES.get(number, f"type {number}")] += 1
            header.skip(8)
    except StructError:
        pass  # cut, or longer than the part that is read
    if types:
        place = next(number for number, part in enumerate(parts) if "tensor" in part)
        parts[place] += f" ({join_limited([f'{name} {count:,}' for name, count in types.most_common()], most=8)})"
    return ", ".join(parts)


_KINDS: Final = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_OTHER_KINDS: Final = {"b": "bool", "O": "objects (a pickle)", "S": "bytes", "U": "text", "V": "raw"}


def npy_summary(source: Source) -> str:
    """Return ``float32 4x3`` for an .npy file."""
    return npy_header_summary(source.read(0, 4096)) or "its header is damaged"


def npy_header_summary(head: bytes) -> str:
    """Summarise the first bytes of an .npy file; return "" if they hold no valid header."""
    wide = head[6:7] != b"\x01"
    size = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    text = head[12 if wide else 10 :][: min(size, 4000)]
    descr = re.search(rb"'descr'\s*:\s*'([^']{1,20})'", text)
    shape = re.search(rb"'shape'\s*:\s*\(([\d, L]{0,400})\)", text)
    if shape is None:
        return ""
    sizes = "x".join(part.strip(" L") for part in shape.group(1).decode("ascii").split(",") if part.strip(" L"))
    name = _dtype_name(descr.group(1).decode("ascii", "replace")) if descr else "records"
    return f"{name} {sizes or 'scalar'}"


def _dtype_name(descr: str) -> str:
    """Return "float32" for ``<f4``."""
    kind, size = descr[1:2], descr[2:]
    if kind in _KINDS and size.isdigit() and len(size) < 4:
        return f"{_KINDS[kind]}{8 * int(size)}" + (" (big-endian)" if descr[:1] == ">" else "")
    return _OTHER_KINDS.get(kind, cut(descr, 20))
