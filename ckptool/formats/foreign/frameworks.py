"""Recognise the files, archives, pickles and folders of other programs. ``formats.json`` has the table of them."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import closing
from functools import cache
from typing import Any, Final

from ...base.errors import MalformedError, UnreadableError
from ...base.lazy import table
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import cut, join_limited, pluralize, quoted
from ...files.sources import Source
from ...files.zips.reader import Archive, Record, content_chunks
from ...pickles.nodes import Global, Node

#: The last eight bytes of a LevelDB table, in which TensorFlow stores variable names.
_LEVELDB_MAGIC: Final = bytes.fromhex("57fb808b247547db")


class ForeignFormat(NamedTuple):
    """A format that ckptool does not read: its short name, a noun phrase for it, and the tool that opens it."""

    kind: str
    description: str
    tool: str = ""


@cache
def _rows(part: str) -> list[tuple[ForeignFormat, dict[str, Any]]]:
    rows = table("formats/foreign/formats")[part]
    return [(ForeignFormat(row.pop("kind"), row.pop("is"), row.pop("tool", "")), row) for row in rows]


@cache
def foreign_kinds() -> frozenset[str]:
    """Return the kinds of all foreign formats. Such a file is never taken for a damaged torch checkpoint."""
    kinds = {known.kind for part in ("signatures", "archives", "pickles", "folders") for known, _ in _rows(part)}
    return frozenset(kinds - {"pickle"} | {"npz", "tensorflow-index", "flax", "msgpack"})


def match_magic(source: Source) -> ForeignFormat | None:
    """Return the format of a file with known magic bytes, or None. Call it before examining the file as text."""
    return next(_matches(source, "magic"), None)


def match_structure(head: bytes, source: Source) -> ForeignFormat | None:
    """Return the format of a file without magic bytes that is neither an archive nor a pickle; None if unknown."""
    size = len(_LEVELDB_MAGIC)
    if source.size > size and source.read(source.size - size, size) == _LEVELDB_MAGIC:
        # The first value of the table is an index header, whose first field is ``num_shards``. In a checkpoint of
        # TensorFlow's first format, which also holds the weights, it is the list of slices.
        tool = "tf.train.load_checkpoint reads it"
        if head[:2] == b"\0\0" and head[3:4] == b"\x0a":
            return ForeignFormat("tensorflow", "a TensorFlow checkpoint of the first version (V1)", tool)
        return ForeignFormat("tensorflow-index", "the index of a TensorFlow checkpoint: names, not weights", tool)
    known = next(_matches(source, ""), None) or _msgpack(head, source)
    return known or (_protobuf_model(source) if head[:1] in (b"\x08", b"\x0a") else None)


def _matches(source: Source, field: str) -> Iterator[ForeignFormat]:
    """Yield the signatures that a file fits, of those with magic bytes or ("") of those without."""
    heads: dict[int, str] = {}
    for known, row in _rows("signatures"):
        magic = row.get("magic", ())
        if bool(magic) is not bool(field):
            continue
        for at in row.get("at", (0,)):
            if at not in heads:
                heads[at] = source.read(at, 1024).decode("latin-1")
            if (not magic or heads[at].startswith(tuple(magic))) and _fits(source, heads[at], row):
                detail = _DETAILS[row["detail"]](source) if "detail" in row else ""
                yield known._replace(description=f"{known.description}: {detail}") if detail else known
                break


def _fits(source: Source, head: str, row: dict[str, Any]) -> bool:
    name = source.name
    if not name.lower().endswith(tuple(row.get("suffix", ("",)))) or not re.search(row.get("named", ""), name):
        return False
    if "beside" in row and not _is_beside(name, *row["beside"]):
        return False
    if "check" in row and not _is_llama2(source):
        return False
    if re.match(row.get("begins", ""), head, re.S | re.A) is None:
        return False
    holds: str = row.get("holds", "")
    return not holds or _holds(source.read(0, 1 << 16), holds)


def _holds(data: bytes, pattern: str) -> bool:
    return re.search(pattern, data.decode("latin-1"), re.S | re.A) is not None


def _is_beside(name: str, suffix: str, pattern: str) -> bool:
    """Return whether the file with another suffix, which describes bare numbers, matches the pattern."""
    from ...files.folders import open_folder  # few files need it

    folder, name = os.path.split(os.path.splitext(name)[0] + suffix)
    beside = open_folder(folder)
    if beside.size(name) is None:  # never tries to open a missing file: an audit of opens shows one
        return False
    try:
        with closing(beside.open(name)) as other:
            return _holds(other.read(0, 1024), pattern)
    except UnreadableError:
        return False


def _is_llama2(source: Source) -> bool:
    if source.size < 28:
        return False
    dim, hidden, layers, heads, kv_heads, vocabulary, length = struct.unpack("<7i", source.read(0, 28))
    if min(dim, hidden, layers, heads, kv_heads, length) <= 0 or not vocabulary or dim % heads or heads % kv_heads:
        return False
    floats = abs(vocabulary) * dim * (2 if vocabulary < 0 else 1) + dim
    floats += layers * (2 * dim + 2 * dim * dim + 2 * dim * (dim // heads) * kv_heads + 3 * dim * hidden)
    return bool(source.size == 28 + 4 * (floats + length * (dim // heads)))


def gguf_summary(source: Source) -> str:
    """Return ``version 3, architecture llama, 291 tensors``, as far as the header tells (docs/gguf.md of ggml)."""
    head = source.read(0, 1 << 16)
    order = "<" if int.from_bytes(head[4:8], "little") < 1 << 16 else ">"
    form = struct.Struct(order + ("4xII" if head[4:8] == b"\1\0\0\0" else "4xIQ"))  # version 1 had 32-bit counts
    if len(head) < form.size:
        return ""
    version, tensors = form.unpack_from(head)
    parts = [f"version {version}" + ", big-endian" * (order == ">"), pluralize(tensors, "tensor")]
    # The type of a string is 8; its length precedes it.
    name = re.search(rb"general\.architecture[\0\x08]{4}\0*([\1-\x28])\0*([!-~]+)", head)
    if name:
        parts.insert(1, f"architecture {name[2][: name[1][0]].decode()}")
    return ", ".join(parts)


_KINDS: Final = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_OTHER_KINDS: Final = {"b": "bool", "O": "objects (a pickle)", "S": "bytes", "U": "text", "V": "raw"}


def npy_summary(source: Source) -> str:
    """Return ``float32 4x3`` for an .npy file."""
    return _npy_header(source.read(0, 4096)) or "its header is damaged"


def _npy_header(head: bytes) -> str:
    """Summarise the first bytes of an .npy file (numpy/lib/format.py); return "" if they hold no valid header."""
    descr = re.search(rb"'descr'\s*:\s*'([<>|=]?)([a-zA-Z?])(\d{0,9})'", head)
    shape = re.search(rb"'shape'\s*:\s*\(([\d, L]{0,400})\)", head)
    if shape is None:
        return ""
    sizes = "x".join(part.strip(" L") for part in shape[1].decode("ascii").split(",") if part.strip(" L"))
    order, kind, size = (part.decode() for part in descr.groups()) if descr else ("", "", "")
    name = _OTHER_KINDS.get(kind, "records")
    if kind in _KINDS and size:
        name = f"{_KINDS[kind]}{8 * int(size)}" + " (big-endian)" * (order == ">")
    return f"{name} {sizes or 'scalar'}"


_DETAILS: Final = {"gguf": gguf_summary, "npy": npy_summary}

#: The most fields of a protobuf message that are read.
_MAX_FIELDS: Final = 64
_VARINT, _BYTES = 0, 2
#: The size of a value in bytes by wire type; a varint and a byte string carry their own sizes.
_WIDTHS: Final = {_VARINT: 0, 1: 8, _BYTES: 0, 5: 4}


class Field(NamedTuple):
    """A protobuf field: its number, its value if it is a varint, and the first bytes and size of a byte string."""

    number: int
    value: int
    head: bytes
    size: int


def fields(source: Source) -> list[Field]:
    """Return the first outermost fields of a protobuf message; an empty list if the source is not one."""
    message: list[Field] = []
    at = 0
    while at < source.size and len(message) < _MAX_FIELDS:
        block = source.read(at, 20)
        tag, used = _varint(block, 0)
        number, wire = tag >> 3, tag & 7
        field, width = Field(number, -1, b"", 0), _WIDTHS.get(wire, 0)
        if used > 0 and wire in (_VARINT, _BYTES):
            value, used = _varint(block, used)
            field = field._replace(value=value)
        if used < 0 or not 0 < number < 1 << 29 or wire not in _WIDTHS:
            return []
        if wire == _BYTES:
            width = field.value
            if at + used + width > source.size:
                return []
            field = Field(number, -1, source.read(at + used, min(width, 64)), width)
        message.append(field)
        at += used + width
    return message


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, offset after it); the offset is -1 if there is no varint."""
    value = 0
    for count, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    return 0, -1


def _protobuf_model(source: Source) -> ForeignFormat | None:
    """Recognise a model in protobuf: ONNX, Core ML or TensorFlow. Return None for anything else."""
    by_number = {field.number: field for field in reversed(fields(source))}
    first, second, graph = by_number.get(1), by_number.get(2), by_number.get(7)
    if first is None:
        return None
    if 0 < first.value < 100 and graph is not None and graph.size and max(by_number) < 64:
        producer = second.head.decode("utf-8", "replace") if second and second.size < 64 else ""
        description = "an ONNX model" + (f", written by {quoted(producer)}" if producer else "")
        return ForeignFormat("onnx", description, "onnx.load reads it, onnxruntime runs it")
    if 0 < first.value < 100 and second is not None and any(200 <= number <= 4000 for number in by_number):
        return ForeignFormat("coreml", f"a Core ML model, specification {first.value}", "coremltools reads it")
    if first.value == 1 and second is not None and (b"serve" in source.read(0, 4096) or source.name.endswith(".pb")):
        description = "a TensorFlow SavedModel: its graph, without its variables"
        return ForeignFormat("savedmodel", description, "tf.saved_model.load reads its folder")
    if source.name.endswith(".meta") and first.size and second is not None:
        description = "the graph of a TensorFlow checkpoint (.meta): without its variables"
        return ForeignFormat("tensorflow", description, "tf.compat.v1.train.import_meta_graph reads it")
    # A graph begins with a NodeDef: a name, then an operation.
    if re.fullmatch(rb"\x0a.[ -~]+?(?:\x12.[A-Za-z].*)?", first.head, re.S):
        return ForeignFormat("tensorflow", "a TensorFlow graph (.pb)", "tf.compat.v1.GraphDef reads it")
    return None


def _msgpack(head: bytes, source: Source) -> ForeignFormat | None:
    """Recognise a map whose first key is a printable string, as Flax and others write it; None for other data."""
    start = re.match(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:([\xa1-\xbf])|\xd9(.))", head, re.S)
    if start is None:
        return None
    size = start[1][0] & 31 if start[1] else start[2][0]
    key = head[start.end() : start.end() + size]
    if len(head) <= start.end() + size or not key.isascii() or not key.decode("ascii").isprintable():
        return None
    first = f"first key {quoted(key.decode('ascii'))}"
    # NumPy arrays are extensions of type 1 (flax/serialization.py).
    arrays = re.search(rb"\xc7.\x01|\xc8..\x01|\xc9....\x01", source.read(0, 1 << 16), re.S)
    if arrays or source.name.endswith(".msgpack"):
        return ForeignFormat("flax", f"a Flax msgpack file, {first}", "flax.serialization.msgpack_restore reads it")
    return ForeignFormat("msgpack", f"msgpack data, {first}", "the msgpack package reads it")


def foreign_archive(archive: Archive) -> ForeignFormat | None:
    """Return the format of a zip archive that is not one of torch's, or None if it is unknown."""
    records = {record.name: record for record in archive.records}
    if records and all(name.endswith(".npy") for name in records):
        first = ((name.removesuffix(".npy"), _head(archive, record)) for name, record in list(records.items())[:4])
        arrays = [f"{name} {_npy_header(head) or '(?)'}" for name, head in first]
        count = pluralize(len(records), "array")
        description = f"a NumPy archive (npz) of {count}: {join_limited(arrays, len(records), most=4)}"
        return ForeignFormat("npz", description, "numpy.load reads it")
    return next((known for known, row in _rows("archives") if records.keys() >= {*row["records"]}), None)


def archive_producer(archive: Archive) -> str:
    """Return the library that packed checkpoints into an archive, with its version; "" if unknown."""
    if "MAR-INF/MANIFEST.json" in archive.by_name:
        return "an archive of TorchServe (.mar)"
    record = archive.by_name.get("_stable_baselines3_version")
    if record is None:
        return ""
    version = re.match(rb"[\w.+-]{1,30}", _head(archive, record))
    return "a model of Stable-Baselines3" + (f" {version.group().decode('ascii')}" if version else "")


def _head(archive: Archive, record: Record) -> bytes:
    if record.method not in (0, 8):
        return b""
    size = min(record.size, LIMITS.inflated_bytes)
    try:
        return next(iter(content_chunks(archive.payload(record), size, record.method != 0, record.name)), b"")[:4096]
    except MalformedError:
        return b""


#: The key that Paddle appends to every state dict (paddle/framework/io.py: _build_saved_state_dict).
_PADDLE_KEY: Final = "StructuredToParameterName@@"
#: Bytes at the end of a pickle that are searched for that key.
_PADDLE_TAIL: Final = 1 << 18


def foreign_pickle(nodes: Collection[Node], source: Source) -> ForeignFormat | None:
    """Return the framework named by the decoded classes or keys of a bare pickle, or None if it is unknown."""
    tail = source.read(max(source.size - _PADDLE_TAIL, 0), _PADDLE_TAIL)
    if _PADDLE_KEY.encode() in tail or _PADDLE_KEY in [node for node in nodes if type(node) is str]:
        return ForeignFormat("paddle", "a parameter file of PaddlePaddle (.pdparams, .pdopt)", "paddle.load reads it")
    names = [node for node in nodes if isinstance(node, Global)]
    modules = {node.module.partition(".")[0] for node in names}
    known = next((known for known, row in _rows("pickles") if row["module"] in modules), None) if modules else None
    if known is None:
        return None
    model = next((f" ({cut(node.name, 60)})" for node in names if node.module.startswith("sklearn")), "")
    return known._replace(description=known.description + model)


def foreign_folder(names: Collection[str]) -> ForeignFormat | None:
    """Return the format of a folder by its file names, or None if it is unknown."""

    def is_there(name: str) -> bool:
        return any(re.search(name, other) for other in names) if "\\" in name else name in names

    return next((known for known, row in _rows("folders") if all(map(is_there, row["names"]))), None)
