"""The header of a GGUF file (llama.cpp) in a sentence; tensors are not read.

Source: ``docs/gguf.md`` of ggml-org/ggml, and ``ggml.h`` for the numbers of types.
"""

from __future__ import annotations

from collections import Counter
from struct import Struct
from struct import error as StructError
from typing import Final

from ...base.text import counted, cut, listed
from ...files.sources import Source

#: Bytes of the header that are read: vocabularies take some MB.
_MOST: Final = 32 << 20
#: Values, tensors and strings in an array that are looked at.
_LOOKED: Final = 1_000_000
#: Bytes of a value by its type; 8 is a string, 9 an array.
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING: Final = 8
_ARRAY: Final = 9
_TYPES: Final = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"))),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), 10)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 20)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


class _Header:
    """The header from its beginning on; raises StructError at its end, or where too much would be read."""

    def __init__(self, source: Source) -> None:
        self.data = source.read(0, min(source.size, _MOST))
        self.order = "<" if int.from_bytes(self.data[4:8], "little") < 1 << 16 else ">"
        self.at = 4
        self.version = self.number("I")
        #: Version 1 counted with 32 bits.
        self.count = "I" if self.version == 1 else "Q"

    def number(self, code: str) -> int:
        shape = Struct(self.order + code)
        (value,) = shape.unpack_from(self.data, self.at)
        self.at += shape.size
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

    def value(self, kind: int) -> str:
        """A value, told where it is a string."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number(self.count)
            if inner in _WIDTHS:
                self.skip(_WIDTHS[inner] * count)
            elif inner == _STRING:
                for _ in range(min(count, _LOOKED)):
                    self.skip(self.number(self.count))
            else:
                raise StructError("arrays in arrays")
            return ""
        if kind not in _WIDTHS:
            raise StructError("no type")
        self.skip(_WIDTHS[kind])
        return ""


def summary(source: Source) -> str:
    """``version 3, architecture llama, 291 tensors (Q4_K 193, F32 98), 25 metadata values``; what can be read of it."""
    parts: list[str] = []
    types: Counter[str] = Counter()
    try:
        header = _Header(source)
        parts.append(f"version {header.version}" + (", big-endian" if header.order == ">" else ""))
        tensors, values = header.number(header.count), header.number(header.count)
        parts += [counted(tensors, "tensor"), counted(values, "metadata value")]
        for _ in range(min(values, _LOOKED)):
            name, text = header.text(), header.value(header.number("I"))
            if name == "general.architecture":
                parts.insert(1, f"architecture {cut(text, 40)}")
        for _ in range(min(tensors, _LOOKED)):
            header.text()
            header.skip(8 * header.number("I"))
            kind = header.number("I")
            types[_TYPES.get(kind, f"type {kind}")] += 1
            header.skip(8)
    except StructError:
        pass  # cut, or longer than is read: what is known so far is said
    if types:
        place = next(number for number, part in enumerate(parts) if "tensor" in part)
        parts[place] += f" ({listed([f'{name} {count:,}' for name, count in types.most_common()], most=8)})"
    return ", ".join(parts)
