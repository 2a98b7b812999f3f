"""Recognise the files, archives, pickles and folders of other programs. ``formats.json`` has the table of them."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from functools import cache
from typing import Any, Final

from ...base.errors import MalformedError, UnreadableError
from ...base.lazy import regex, table
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import cut, pluralize
from ...files.sources import Source
from ...files.zips.reader import Archive
from ...pickles.nodes import Global, Node

#: The last eight bytes of a LevelDB table, in which TensorFlow stores variable names.
_LEVELDB_MAGIC: Final = bytes.fromhex("57fb808b247547db")
_FLAGS: Final = int(re.S | re.A)


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
    return frozenset(kinds - {"pickle"} | {"npz", "tensorflow-index"})


def match_magic(source: Source) -> ForeignFormat | None:
    """Return the format of a file with known magic bytes, or None. Call it before examining the file as text."""
    return next(_matches(source, magic=True), None)


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
    return next(_matches(source, magic=False), None)


#: A place in a file, the pattern of what begins there, the format, and the row of the table.
_Row = tuple[int, re.Pattern[str], ForeignFormat, dict[str, Any]]


@cache
def _signatures(magic: bool) -> tuple[list[_Row], list[_Row], dict[int, re.Pattern[str]]]:
    """Return the rows with magic bytes, or those without; the rows among them that have no bytes to compare; and a
    pattern for each place, which matches wherever another row may."""
    rows, starts = list[_Row](), dict[int, list[str]]()
    for known, row in _rows("signatures"):
        first, begins = "|".join(map(re.escape, row.get("magic", ()))), row.get("begins", "")
        for at in row.get("at", (0,)) if bool(first) is magic else ():
            rows.append((at, regex(f"(?={first})(?:{begins})", _FLAGS), known, row))
            starts.setdefault(at, []).extend(filter(None, [first or begins]))
    unmarked = [found for found in rows if not found[-1].keys() & {"magic", "begins"}]
    return rows, unmarked, {at: re.compile("|".join(starts[at]), _FLAGS) for at in starts}


def _matches(source: Source, *, magic: bool) -> Iterator[ForeignFormat]:
    """Yield the signatures that a file fits, of those with magic bytes or of those without."""
    rows, unmarked, starts = _signatures(magic)
    head = source.read(0, max(starts) + 1024).decode("latin-1")
    begins = any(pattern.match(head, at) for at, pattern in starts.items())
    for at, pattern, known, row in rows if begins else unmarked:  # few files begin like any row
        if pattern.match(head, at) and _fits(source, row):
            yield known


def _fits(source: Source, row: dict[str, Any]) -> bool:
    name = source.name
    if not name.lower().endswith(tuple(row.get("suffix", ("",)))):
        return False
    if "named" in row and not re.search(row["named"], name):
        return False
    if "beside" in row and not _is_beside(name, *row["beside"]):
        return False
    if "check" in row and not _is_llama2(source):
        return False
    return "holds" not in row or _holds(source.read(0, 1 << 16), row["holds"])


def _holds(data: bytes, pattern: str) -> bool:
    return re.search(pattern, data.decode("latin-1"), _FLAGS) is not None


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


def foreign_archive(archive: Archive) -> ForeignFormat | None:
    """Return the format of a zip archive that is not one of torch's, or None if it is unknown."""
    names = archive.by_name.keys()
    if names and all(name.endswith(".npy") for name in names):
        arrays = pluralize(len(names), "array")
        return ForeignFormat("npz", f"a NumPy archive (npz) of {arrays}", "numpy.load reads it")
    return next((known for known, row in _rows("archives") if names >= {*row["records"]}), None)


def archive_producer(archive: Archive) -> str:
    """Return the library that packed checkpoints into an archive, with its version; "" if unknown."""
    if "MAR-INF/MANIFEST.json" in archive.by_name:
        return "an archive of TorchServe (.mar)"
    record = archive.by_name.get("_stable_baselines3_version")
    if record is None:
        return ""
    version = None
    with suppress(MalformedError):
        version = re.match(rb"[\w.+-]{1,30}", archive.read(record, LIMITS.text_bytes))
    return "a model of Stable-Baselines3" + (f" {version.group().decode('ascii')}" if version else "")


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
