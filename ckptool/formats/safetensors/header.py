"""The header of a safetensors file: the names, dtypes, shapes and places of its tensors.

    u64 N | N bytes of JSON | the bytes of all tensors

Source: the format description of huggingface/safetensors, and the parser of safetensors 0.8 where it is stricter. Every
rule is checked, and a file that breaks one is refused with that rule. One rule is ckptool's own: a name may occur only
once, while the library takes the last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import isfinite, prod
from operator import mul
from typing import Any, Final

from ...base.dtypes import BY_SAFETENSORS
from ...base.errors import MalformedError, RefusedError
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.records import NamedTuple, new_tuple
from ...base.steps import command, suggested_output
from ...base.text import join_limited, pluralize, quoted
from ...files.sources import Source, refuse_unfinished
from ..tensor_table import TensorEntry, cut_error, repeated


def strict_json(text: str | bytes, subject: str, parse_int: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text; ``parse_int`` replaces ``int``. Raises ValueError, whose message calls the text
    ``subject``, for invalid JSON (including NaN and Infinity), for too deep nesting, and for an object with a name
    twice: one reader may take the first, another the last."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique_names, parse_constant=_no_constant, parse_int=parse_int)
    except KeyError as error:
        raise ValueError(f"the name {quoted(error.args[0])} is in {subject} twice") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} is not JSON: {error}") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise KeyError(repeated(name for name, _ in pairs))
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


#: Bits of one element. Elements of 4 and 6 bits are packed, and a tensor ends on a byte boundary.
BITS: Final = {name: 8 * dtype.itemsize for name, dtype in BY_SAFETENSORS.items()}
BITS.update(F4=4, F6_E2M3=6, F6_E3M2=6)
#: The most bytes of a header that the library reads.
MAX_HEADER: Final = 100_000_000
METADATA: Final = "__metadata__"
_FIELDS: Final = ("dtype", "shape", "data_offsets")
_MAX_SIZE: Final = 1 << 64
_INTEGERS: Final = frozenset((int,))
#: The number of kinds of tensors to remember. More would let a hostile file fill a dict with colliding hashes.
_MOST_KINDS: Final = 64
#: The deepest nesting of objects and lists that the library reads, including the header itself.
_MAX_DEPTH: Final = 127
#: "-0" as an integer: the library reads it as a float.
_MINUS_ZERO: Final = regex(r"-0(?![0-9.eE])")
_HALF: Final = regex(r"\\u[dD][89a-fA-F]")
_SURROGATE: Final = regex("[\ud800-\udfff]")


class Header(NamedTuple):
    """The tensors in JSON order, and the metadata. ``oddities`` are messages about spellings that the library accepts
    but never writes."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    oddities: tuple[str, ...] = ()


def read_header(source: Source, *, cut: bool = False) -> Header:
    """Read and check the header; raise MalformedError with the rule that the file breaks. With ``cut``, the file may
    end before its last tensor, or continue after it."""
    if source.size < 8:
        raise _broken(source, "it has fewer than the 8 bytes of the header's length")
    size = int.from_bytes(source.read(0, 8), "little")
    refuse_unfinished(source)
    if size > MAX_HEADER:
        raise _broken(source, f"the header claims {size:,} bytes, {MAX_HEADER:,} are the most")
    if 8 + size > source.size:
        raise _broken(source, f"the header claims {size:,} bytes, the file ends after {source.size - 8:,}")
    raw = source.read(8, size)
    fields = _parsed(source, raw)
    metadata = fields.pop(METADATA, {})
    if metadata is None:  # the library accepts null
        metadata = {}
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise _broken(source, f"{METADATA} must be an object whose values are all strings")
    data = 8 + size
    alike: dict[tuple[str, tuple[int, ...]], _Kind] = {}
    # Each parsed entry is freed before the next one is made, because it takes more memory than the result.
    entries = tuple([_entry(source, name, fields.pop(name), data, alike) for name in list(fields)])
    _check_tiling(source, entries, data, cut)
    return Header(entries, metadata, () if raw[:1] == b"{" else ("the header begins with blanks",))


def _broken(source: Source, rule: str, where: str = "") -> MalformedError:
    what = f"not a valid safetensors file: {rule}"
    return MalformedError(what, path=source.name, where=where, next="it is damaged: get the file again")


def _parsed(source: Source, raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _broken(source, f"the header is not UTF-8 at byte {8 + error.start:,}") from None
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise _broken(source, "the header must begin with '{'")
    parse_int = lambda number: -0.0 if number == "-0" else int(number)  # noqa: E731
    try:
        # A custom parse_int is slow and rarely needed.
        fields = strict_json(text, "the header", parse_int if _MINUS_ZERO.search(text) else None)
    except ValueError as error:
        raise _broken(source, str(error)) from None
    assert isinstance(fields, dict)
    # Half of a surrogate pair can only come from an escape, because the text is valid UTF-8.
    half = _HALF.search(text) and next((name for name in _strings(fields) if _SURROGATE.search(name)), None)
    if half:
        raise _broken(source, f"the text {quoted(half)} holds half of a character")
    return fields


def _strings(fields: dict[str, Any]) -> Iterator[str]:
    work: list[Any] = [fields]
    while work:
        value = work.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            work += (*value, *value.values())
        elif isinstance(value, list):
            work += value


class _Kind(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    size: int


def _entry(
    source: Source, name: str, value: Any, data: int, alike: dict[tuple[str, tuple[int, ...]], _Kind]
) -> TensorEntry:
    """Return a tensor; raise MalformedError with the rule that it breaks. ``data`` is the end of the header. ``alike``
    has the first kinds of tensors: most tensors have one of few, and share its objects, which saves two thirds of their
    memory, and its checks."""

    def broken(rule: str) -> MalformedError:
        return _broken(source, f"tensor {quoted(name)}: {rule}", name)

    if not isinstance(value, dict):
        raise broken("its entry must be an object with dtype, shape and data_offsets")
    try:
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    except KeyError as error:
        raise broken(f"{error.args[0]} is missing") from None
    if len(value) > len(_FIELDS):  # the library parses unknown fields but ignores them
        rule = _unreadable([value[field] for field in value.keys() - _FIELDS])
        if rule:
            raise broken(rule)
    if type(dtype) is not str or dtype not in BITS:
        raise broken(f"the dtype {quoted(str(dtype))} is unknown")
    if type(shape) is not list or not _INTEGERS.issuperset(map(type, shape)):
        raise broken("its shape must be a list of integers of at least 0")
    known = alike.get((dtype, tuple(shape)))
    if known is None and not all(_is_size(size) for size in shape):
        raise broken("its shape must be a list of integers of at least 0")
    if len(shape) > LIMITS.dimensions:
        raise broken(f"{len(shape):,} dimensions are more than any tensor has, {LIMITS.dimensions:,} are followed")
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise broken("its data_offsets must be two integers of at least 0")
    begin, end = offsets
    if begin > end:
        raise broken(f"its data_offsets are reversed: {begin:,} and {end:,}")
    if known is None:
        bits = prod(shape) * BITS[dtype]
        # The library multiplies from the left, so a zero after an overflowing product does not help.
        if max(accumulate(shape, mul), default=0) >= _MAX_SIZE or bits >= _MAX_SIZE:
            raise broken("its shape has too many elements")
        if bits % 8:
            raise broken(f"{pluralize(prod(shape), 'element')} of {BITS[dtype]} bits do not end on a byte boundary")
        known = _Kind(dtype, tuple(shape), bits // 8)
        if len(alike) < _MOST_KINDS:
            alike[dtype, known.shape] = known
    if known.size != end - begin:
        raise broken(f"its shape takes {known.size:,} bytes, its data_offsets span {end - begin:,}")
    return new_tuple(TensorEntry, (name, known.dtype, known.shape, data + begin, data + end))


def _unreadable(values: list[Any]) -> str:
    depth = 2  # the header and the entry
    while values:
        deeper: list[Any] = []
        for value in values:
            if isinstance(value, dict | list):
                deeper.append(value)
            elif isinstance(value, int | float) and not _in_range(value):
                return "a number in it is out of range"
        depth += bool(deeper)
        if depth > _MAX_DEPTH:
            return f"objects and lists are nested more than {_MAX_DEPTH} deep"
        values = [part for value in deeper for part in (value.values() if isinstance(value, dict) else value)]
    return ""


def _in_range(number: float) -> bool:
    try:
        return isfinite(number)
    except OverflowError:
        return False


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _check_tiling(source: Source, entries: tuple[TensorEntry, ...], data: int, cut: bool) -> None:
    """Raise MalformedError unless the tensors fill the file from the header to its end, without holes or overlaps."""
    at = data
    for entry in in_file_order(entries):
        if entry.begin > at:
            rule = f"a hole of {entry.begin - at:,} bytes before tensor {quoted(entry.name)}"
            raise _broken(source, rule, entry.name)
        if entry.begin < at:
            raise _broken(source, f"tensor {quoted(entry.name)} begins within the one before it", entry.name)
        at = entry.end
    if at > source.size and not cut:
        raise cut_error(source, entries, partial(_broken, source), "it is cut,", salvaged=True)
    if at < source.size and not cut:
        raise _broken(source, f"{pluralize(source.size - at, 'byte')} after the last tensor")


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors in byte order."""
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


#: The places of a file's tensors in larger tensors, in the header of files that torch.distributed.checkpoint writes:
#: torch/distributed/checkpoint/_hf_utils.py, and ``filesystem.py``, which writes it into every safetensors file.
SHARDING_INFO: Final = "DCP_SHARDING_INFO"
VERSION: Final = "DCP_VERSION"


def saved_offsets(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, tuple[int, ...]]], where: str
) -> dict[str, tuple[int, ...]]:
    """Return each tensor's offset in the larger tensor that it is a piece of, in elements per dimension. As in torch, a
    file without sharding information has whole tensors. Raises MalformedError if the information is invalid."""
    if SHARDING_INFO not in metadata:
        return {name: (0,) * len(shape) for name, shape in tensors}
    entries = _offsets(metadata[SHARDING_INFO])
    offsets_of = {}
    for name, shape in tensors:
        offsets = entries.get(name)
        valid = isinstance(offsets, list) and len(offsets) == len(shape)
        if offsets is None or not valid or not all(type(at) is int and 0 <= at < 1 << 62 for at in offsets):
            raise MalformedError(f"{SHARDING_INFO} does not say where {quoted(name)} belongs", where=where)
        offsets_of[name] = tuple(offsets)
    return offsets_of


def whole_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the metadata, without sharding information that only has zero offsets. Such information must name every
    tensor of the file, and no reader needs it."""
    return without_sharding(metadata) if SHARDING_INFO in metadata and not is_piece(metadata) else metadata


def without_sharding(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the metadata without the sharding information and its version."""
    return {name: text for name, text in metadata.items() if name not in (SHARDING_INFO, VERSION)}


def common_metadata(headers: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Return the metadata that all files share."""
    first, *others = headers
    return {name: text for name, text in first.items() if all(header.get(name) == text for header in others)}


def is_piece(metadata: Mapping[str, str]) -> bool:
    """Return whether some tensor of the file begins within a larger one, or its place is invalid. Always False for a
    file of the first rank."""
    if SHARDING_INFO not in metadata:
        return False
    try:
        entries = _offsets(metadata[SHARDING_INFO])
    except MalformedError:
        return True
    return not all(isinstance(offsets, list) and not any(offsets) for offsets in entries.values())


def metadata_for(metadata: Mapping[str, str], names: Iterable[str], path: str) -> Mapping[str, str]:
    """Return the metadata for a file of some of the tensors; raise RefusedError for a tensor whose place is unknown."""
    texts = whole_metadata(metadata)
    if SHARDING_INFO not in texts:
        return texts
    entries = _parse(texts[SHARDING_INFO])
    unknown = [name for name in names if name not in entries]
    if unknown:
        what = f"its tensors are pieces, and {SHARDING_INFO} does not say where {join_limited(unknown, most=3)} belong"
        folder = os.path.dirname(path) or os.curdir
        step = "edit the whole: " + command("convert", folder, output=suggested_output(path, "whole"))
        raise RefusedError(what, path=path, next=step)
    return {**texts, SHARDING_INFO: json.dumps({name: entries[name] for name in names})}


def _offsets(text: str) -> dict[str, Any]:
    """Return the offsets by tensor name, None for a tensor without offsets; raise MalformedError if it is not JSON."""
    entries = _parse(text)
    return {name: entry.get("saved_offsets") if isinstance(entry, dict) else None for name, entry in entries.items()}


def _parse(text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{SHARDING_INFO} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise MalformedError(f"{SHARDING_INFO} is not an object")
    return entries
