"""The header of a GGUF file: its metadata, and the names, types, shapes and places of its tensors.

    "GGUF" | u32 version | u64 tensors | u64 entries | entries | tensors | padding | the bytes of all tensors

Sources: docs/gguf.md of ggml; ggml/src/gguf.cpp of llama.cpp and gguf_reader.py of the gguf package, which both read
versions 2 and 3. Strings have a length of 64 bits. Nothing declares the size of the header, so it is read in growing
pieces: a remote header of 8 MB takes three requests.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from math import prod
from struct import Struct, calcsize, pack, unpack, unpack_from
from typing import Any, Final

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError
from ...base.findings import Finding
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import quoted
from ...files.sources import Source, refuse_unfinished
from ..tensor_table import TensorEntry, cut_error, repeated

MAGIC: Final = b"GGUF"
ALIGNMENT: Final = "general.alignment"
#: The most bytes of a header; vocabularies of 256,000 tokens take 15 MB.
MAX_HEADER: Final = 256 << 20
#: Bytes that are read at a time, bytes that need no announcement, and bytes that are announced after these: a remote
#: file takes a request for 4 MiB.
_STEP, _START, _AHEAD = 64 << 10, 256 << 10, 8 << 20
#: The most bytes of the name of an entry, by docs/gguf.md.
_MAX_KEY: Final = 65_535
#: The most entries, tensors, arrays in arrays, and decoded elements; a million tensors would take 2 GB of memory.
_MOST: Final = 200_000
#: The most elements of an array that is decoded with the header, and the most bytes of longer arrays in all.
SHORT, _LONG = 1_000, 32 << 20
#: From Python 3.11 on, a repetition can be possessive, and keeps no positions to go back to.
_POSSESSIVE: Final = b"+" if sys.version_info >= (3, 11) else b""
#: So many texts of fewer than 48 bytes, each behind its length: three times as fast as one after the other. Frequent
#: lengths come first. ``_ROOM`` is more than such texts take.
_MANY, _ROOM = 256, 16 << 10
_TEXTS: Final = (
    re.escape(bytes([size])) + b"\0{7}%s.{%d}%s" % (_POSSESSIVE, size, _POSSESSIVE)
    for size in sorted(range(48), key=lambda size: abs(size - 8))
)
_SHORT_TEXTS: Final = regex(b"(?:%s){%d}%s" % (b"|".join(_TEXTS), _MANY, _POSSESSIVE), re.DOTALL)
#: The most levels of arrays in arrays.
_MAX_DEPTH: Final = 8
#: What llama.cpp reads at most: dimensions, and bytes of a tensor name.
_MOST_DIMENSIONS, _LONGEST_NAME = 4, 63
_UINT32, STRING, ARRAY = 4, 8, 9
_SURROGATE: Final = regex("[\ud800-\udfff]")
#: The number formats of values by their type.
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES: Final = "uint8 int8 uint16 int16 uint32 int32 float32 bool string array uint64 int64 float64"
#: The dtypes of tensors by their type (``GGMLQuantizationType`` of the gguf package). The others were removed.
_DTYPES: Final = """
    float32 float16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL
    IQ3_S IQ2_S IQ4_XS int8 int16 int32 int64 float64 IQ1_M bfloat16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4 Q1_0
"""
TENSOR_TYPES: Final = {number: BY_NAME[name] for number, name in enumerate(_DTYPES.split()) if name != "-"}


class Array(NamedTuple):
    """An array that is not decoded: its element type, its length, and the bytes of its elements in the file."""

    kind: int
    number: int
    begin: int
    end: int


class Header(NamedTuple):
    """The header of one file. ``places`` has the type of each entry, and the first and last byte of its value;
    ``data`` is the offset of the tensors' bytes; ``problems`` are what llama.cpp refuses although the file can be read.
    """

    version: int
    order: str
    alignment: int
    metadata: dict[str, Any]
    places: dict[str, tuple[int, int, int]]
    data: int
    entries: list[TensorEntry]
    problems: list[Finding]


def read_header(source: Source) -> Header:
    """Read and check a header; raise MalformedError with the rule that the file breaks."""
    refuse_unfinished(source)
    raw = source.read(len(MAGIC), 4)
    big = raw[:2] == b"\0\0"
    version = int.from_bytes(raw, "big" if big else "little")
    if version not in (2, 3):
        what = f"it is of version {version} of GGUF, versions 2 and 3 are read"
        raise MalformedError(what, path=source.name, next="convert the model again with the current llama.cpp")
    reader = _Reader(source, ">" if big else "<")
    reader.at = len(MAGIC) + len(raw)
    tensors, number = reader.numbers("QQ")
    if max(tensors, number) > _MOST:
        raise reader.broken(f"it declares {tensors:,} tensors and {number:,} entries, {_MOST:,} are the most")
    metadata, places = dict[str, Any](), dict[str, tuple[int, int, int]]()
    for _ in range(number):
        name = reader.string("the name of an entry", _MAX_KEY)
        if name in metadata:
            raise reader.broken(f"the entry {quoted(name)} is in it twice", name)
        (kind,) = reader.numbers("I")
        begin = reader.place
        metadata[name] = reader.value(kind, name)
        places[name] = kind, begin, reader.place
    alignment = metadata.get(ALIGNMENT, 32)
    if places.get(ALIGNMENT, (_UINT32,))[0] != _UINT32:
        raise reader.broken(f"{ALIGNMENT} is not of the type uint32", ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1) or alignment > MAX_HEADER:
        raise reader.broken(f"{ALIGNMENT} is {alignment:,}, not a power of two", ALIGNMENT)
    found = [reader.tensor() for _ in range(tensors)]
    data = -(-reader.place // alignment) * alignment
    entries = [each._replace(begin=data + each.begin, end=data + each.end) for each in found]
    if (twice := repeated(each.name for each in entries)) is not None:
        raise reader.broken(f"the tensor {quoted(twice)} is in it twice", twice)
    if any(entry.end > source.size for entry in entries):
        raise cut_error(source, entries, reader.broken, "it is cut, or an offset is wrong;")
    problems = [*islice(_problems(metadata, entries, data, alignment, source.size), LIMITS.listed)]
    return Header(version, reader.order, alignment, metadata, places, data, entries, problems)


def _problems(
    metadata: dict[str, Any], entries: list[TensorEntry], data: int, alignment: int, size: int
) -> Iterator[Finding]:
    """Yield what llama.cpp refuses although a file of ``size`` bytes can be read."""
    finding = partial(Finding, "gguf-layout", "error")
    for name in (*metadata, *(each.name for each in entries)):
        if not name.isascii() and _SURROGATE.search(name):
            yield finding(f"the name {quoted(name)} is not UTF-8", name)
    expected = data
    for name, _, shape, begin, end in entries:
        title = f"tensor {quoted(name)}"
        if begin % alignment:
            yield finding(f"{title} begins at {begin - data:,}, not at a multiple of {alignment}", name)
        elif begin != expected:
            place = f"{begin - data:,} of the data; llama.cpp expects it at {expected - data:,}"
            yield finding(f"{title} begins at {place}", name)
        if len(shape) > _MOST_DIMENSIONS:
            yield finding(f"{title} has {len(shape)} dimensions, llama.cpp reads {_MOST_DIMENSIONS}", name)
        if len(name.encode("utf-8", "surrogateescape")) > _LONGEST_NAME:
            yield finding(f"{title} has a name of more than {_LONGEST_NAME} bytes, which llama.cpp refuses", name)
        expected = -(-end // alignment) * alignment
    at, before = data, ""
    for entry in sorted(entries, key=lambda each: (each.begin, each.end)):
        if entry.begin < at and entry.end > entry.begin:
            yield finding(f"tensor {quoted(entry.name)} begins within tensor {quoted(before)}", entry.name)
        at, before = (entry.end, entry.name) if entry.end > at else (at, before)
    if size - at > alignment:
        yield Finding("gguf-layout", "warning", f"{size - at:,} bytes follow the last tensor")


def elements(source: Source, arrays: Mapping[str, Array], order: str) -> dict[str, list[Any]]:
    """Return the elements of arrays of any length; arrays in arrays are lists. Raise MalformedError for too many."""
    total = sum(array.end - array.begin for array in arrays.values())
    if total > _LONG:
        what = f"its arrays have {total:,} bytes, {_LONG:,} are read at most"
        raise MalformedError(what, path=source.name, next="read the header alone, with `ckptool inspect`")
    return {
        name: _Reader(source, order, begin, end).elements(kind, number)
        for name, (kind, number, begin, end) in arrays.items()
    }


class _Reader:
    """Reads values one after the other, of a file from ``begin`` on. ``data`` are the bytes from ``base`` on."""

    def __init__(self, source: Source, order: str, begin: int = 0, end: int = -1) -> None:
        self.source, self.order, self.base, self.at = source, order, begin, 0
        self.end = source.size if end < 0 else end
        self.data = source.read(begin, min(_STEP, self.end - begin))
        self._announced = begin + _START
        #: How many elements may be decoded, and arrays in arrays skipped.
        self.decoded = self.nested = _MOST

    @property
    def place(self) -> int:
        """The offset of the next value in the file."""
        return self.base + self.at

    def broken(self, rule: str, where: str = "") -> MalformedError:
        what = f"not a valid GGUF file: {rule}"
        if "\ufffd".encode() in self.data[: self.at]:
            what += "; bytes before it are U+FFFD, as in a file that was stored as text"
        return MalformedError(what, path=self.source.name, where=where, next="it is damaged: get the file again")

    def need(self, size: int) -> None:
        """Have the next ``size`` bytes in ``data``, without those before; raise MalformedError if the file ends."""
        if self.at + size <= len(self.data):
            return
        place = self.place
        begin = max(place, self.base + len(self.data))
        if place + size > self.end:
            raise self.broken(f"the header ends after byte {self.end:,}, within what it declares")
        if place + size > MAX_HEADER:
            raise self.broken(f"its header has more than {MAX_HEADER:,} bytes")
        if begin >= self._announced:
            self._announced = min(begin + _AHEAD, self.end)
            self.source.prefetch([(begin, self._announced - begin)])
        more = self.source.read(begin, min(max(place + size - begin, _STEP), self.end - begin))
        self.data, self.base, self.at = self.data[self.at :] + more, place, 0
        if size > len(self.data):
            raise self.broken("it shrank while it was read")

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """Return the next numbers."""
        size = calcsize(self.order + codes)
        self.need(size)
        values = unpack_from(self.order + codes, self.data, self.at)
        self.at += size
        return tuple(map(shortest, values)) if codes[-1] == "f" else values

    def string(self, what: str, most: int = MAX_HEADER) -> str:
        (size,) = self.numbers("Q")
        if size > most:
            raise self.broken(f"{what} has {size:,} bytes, {most:,} are the most")
        self.need(size)
        text = self.data[self.at : self.at + size].decode("utf-8", "surrogateescape")
        self.at += size
        return text

    def value(self, kind: int, name: str) -> Any:
        """Return the next value of a type; an array that is long or holds arrays is not decoded."""
        if kind in NUMBERS or kind == STRING:
            return self.elements(kind, 1, f"the text of {quoted(name)}")[0]
        if kind != ARRAY:
            raise self.broken(f"the entry {quoted(name)} is of the unknown type {kind}", name)
        inner, count = self.numbers("IQ")
        if count <= min(SHORT, self.decoded) and (inner == STRING or inner in NUMBERS):
            self.decoded -= count
            return self.elements(inner, count)
        begin = self.place
        self.skip(1, inner, count)
        return Array(inner, count, begin, self.place)

    def skip(self, depth: int, kind: int, count: int) -> None:
        """Go behind the elements of an array."""
        if kind in NUMBERS:
            self.at += calcsize(self.order + NUMBERS[kind]) * count
            self.need(0)
        elif kind == STRING:
            self._skip_strings(count)
        elif kind != ARRAY or depth >= _MAX_DEPTH:
            what = f"arrays are nested more than {_MAX_DEPTH} deep" if kind == ARRAY else f"type {kind} is unknown"
            raise self.broken(what)
        else:
            self.nested -= count
            if self.nested < 0:
                raise self.broken(f"its arrays hold more than {_MOST:,} arrays")
            for _ in range(count):
                self.skip(depth + 1, *self.numbers("IQ"))

    def _skip_strings(self, count: int) -> None:
        unpack, last = Struct(self.order + "Q").unpack_from, min(self.end, MAX_HEADER) - _ROOM
        while count:  # half a million in large vocabularies
            number = min(count, _MANY)
            self.need(_ROOM if self.place <= last else 0)
            if number == _MANY and self.order == "<" and (match := _SHORT_TEXTS.match(self.data, self.at)):
                self.at = match.end()
            else:
                for _ in range(number):
                    if self.at + 8 > len(self.data):
                        self.need(8)
                    self.at += 8 + unpack(self.data, self.at)[0]
            count -= number
        self.need(0)

    def elements(self, kind: int, count: int, what: str = "a text") -> list[Any]:
        """Return the next elements; ``what`` describes a text in an error."""
        if kind == STRING:
            return [self.string(what) for _ in range(count)]
        if kind == ARRAY:
            return [self.elements(*self.numbers("IQ")) for _ in range(count)]
        return [*self.numbers(f"{count}{NUMBERS[kind]}")]

    def tensor(self) -> TensorEntry:
        """Return the next tensor; ``begin`` is an offset from the start of the data."""
        name = self.string("the name of a tensor", _MAX_KEY)
        (dimensions,) = self.numbers("I")
        if dimensions > LIMITS.dimensions:
            raise self.broken(f"tensor {quoted(name)} has {dimensions:,} dimensions", name)
        *sizes, kind, offset = self.numbers(f"{dimensions}QIQ")
        shape, dtype, row = tuple(reversed(sizes)), TENSOR_TYPES.get(kind), (1, *reversed(sizes))[-1]
        if dtype is None:
            step = "a newer ckptool may know it; the gguf package of the program that wrote the file does"
            known = f"tensor {quoted(name)} is of type {kind}, which GGUF removed or ckptool does not know"
            raise MalformedError(known, path=self.source.name, where=name, next=step)
        # The strides of an empty tensor are numbers, too.
        if prod(max(size, 1) for size in shape) >= 1 << 62 or offset >= 1 << 62:
            raise self.broken(f"tensor {quoted(name)} is larger than any tensor can be", name)
        if row % dtype.packed:
            rule = f"rows of {row:,} elements do not divide into blocks of {dtype.packed}"
            raise self.broken(f"tensor {quoted(name)}: {rule}", name)
        return TensorEntry(name, dtype.name, shape, offset, offset + prod(shape) // dtype.packed * dtype.itemsize)


def type_name(kind: int) -> str:
    """Return the name of a value type, such as "string"."""
    return dict(enumerate(_TYPE_NAMES.split())).get(kind, f"type {kind}")


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same in float32: 1e-05, not 9.999999747378752e-06."""
    for near in (float(f"{value:.{digits}g}") for digits in (6, 7, 8)):
        with suppress(OverflowError):
            if near != near or unpack("<f", pack("<f", near))[0] == value:
                return near
    return value
