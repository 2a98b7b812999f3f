"""Read a ``.metadata`` file, a pickle of ``torch.distributed.checkpoint.metadata.Metadata``.

Python's own unpickler reads it, because a large model has a million pieces. Nothing is imported and nothing of torch
is made: ``_Unpickler`` has a stand-in for each class and function that torch writes there, and refuses every other
name. ``_checked`` bounds the work beforehand. Sources: metadata.py and filesystem.py of torch/distributed/checkpoint.
"""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import chain
from typing import Any, Final

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.standard_library import STANDARD_LIBRARY
from ...base.text import quoted
from ...pickles import opcodes as op
from ..folders import TOO_LARGE
from ..pieces.boxes import Box
from .metadata import Item, Metadata, ValueMetadata

_MODULE: Final = "torch.distributed.checkpoint.metadata"
#: Before torch 2.3, TensorProperties came from the sharded tensor package. Before 2.0, all classes were elsewhere.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_OLD: Final = "torch.distributed._shard.checkpoint"
_PLANNER: Final = "torch.distributed.checkpoint.planner"
#: The most steps from the root to a value: no real state dict is nested that deep.
_MAX_DEPTH: Final = 200
#: The most fields of an object: a hostile file may share one dict a million times.
_MAX_FIELDS: Final = 20
#: The most numbers of shapes and pieces, and characters of paths, that are read per byte.
_NUMBERS_PER_BYTE: Final = 4
#: The most classes of other libraries: real files have one.
_MAX_FOREIGN: Final = 16
#: The fields of each class, in the order in which torch writes them; it leaves out the last ones.
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("fqn", "index", "offset"),
    "_StorageInfo": ("relative_path", "offset", "length", "transform_descriptors"),
    "BytesStorageMetadata": (),
}


class _Refused(pickle.UnpicklingError):
    """The pickle has something that torch never writes there."""


def read_listing(data: bytes, where: str) -> Metadata:
    """Read a ``.metadata`` file; raise MalformedError if it is anything else."""
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects, and no cycles
    try:
        checked, end = _checked(data)
        unpickler = _Unpickler(BytesIO(checked))
        return _Reader(len(data)).metadata(unpickler.load(), end, sorted(unpickler.foreign))
    except _Refused as error:
        raise MalformedError(str(error), where=where) from error
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"it is not a pickle as torch.distributed.checkpoint writes it ({error})"
        raise MalformedError(what, where=where) from error
    finally:
        if collecting:
            gc.enable()


# -- bounds ------------------------------------------------------------------------------------------------------------

#: The longest string that the expression for runs of opcodes covers.
_SHORT: Final = 64
#: What takes the place of an opcode that fills a dict, or of FRAME with its size.
_AS_PAIRS: Final = {None: b"", b"}": b"NQ", b"u": b"ta", b"s": b"\x86a"}
#: Opcodes of one byte that make an object, which takes about 70 bytes.
_MAKING: Final = b"]}R\x81\x85\x86\x87"
#: Objects allowed in a file of any size, and bytes required per further one. torch writes ten bytes per object.
_FEW_OBJECTS, _BYTES_PER_OBJECT = 250_000, 4


def _checked(data: bytes) -> tuple[bytearray, int]:
    """Return a pickle that the standard unpickler reads in bounded time and memory, and the size of the original.

    Only opcodes are accepted that a pickler of protocol 2 or later writes here. Sizes are those of the file, memo
    numbers are not beyond it, and objects are counted. Dicts become ``_Pairs``: nothing is hashed, because the hash of
    tuples that share tuples may take forever.
    """
    if data[:1] != b"\x80" or data[1] not in range(2, 6):
        raise _Refused("it is not a pickle of protocol 2 to 5")
    if sum(map(data.count, _MAKING)) > _FEW_OBJECTS + len(data) // _BYTES_PER_OBJECT:
        raise _Refused("it makes more objects than a file of its size can list")
    match = _runs(min(len(data) >> 17, 255))
    checked = bytearray(data[:2])  # a list of its parts would take several times its size
    at = 2
    while True:
        run = match(data, at)
        assert run is not None  # it matches nothing as well
        plain, special = run.groups()
        checked += plain
        checked += _AS_PAIRS.get(special, b"")
        at = run.end()
        if special and len(special) > 1 and int.from_bytes(special[1:], "little") > len(data) - at:
            raise _Refused("it is cut: a frame ends after the file")
        if plain or special:
            continue
        code = data[at] if at < len(data) else -1
        if code in (op.SHORT_BINUNICODE, op.BINUNICODE):
            width = 1 if code == op.SHORT_BINUNICODE else 4
            end = at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
            checked += data[at:end]
            at = end
        elif code == op.STOP:
            checked += b"."
            return checked, at + 1
        elif code < 0:
            raise _Refused("it is cut: it ends before its last opcode")
        else:
            raise _Refused(f"it has the opcode 0x{code:02x} at byte {at:,}, which torch never writes there")


@lru_cache(maxsize=4)
def _runs(top: int) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Return a function that matches a run of opcodes, and the opcode after it if it is one of ``_AS_PAIRS``.

    ``top`` is the highest third byte of a memo number.
    """
    tokens = (
        rb"h.|\x94|K.|M..|J....|[(NR\]taeb\x85-\x89\x93]|\)\x81?|j....|q.",
        rb"r..[\0-%b]\0" % re.escape(bytes([top])),
        _sized(b"\x8a", 1, range(1, 10)),
        _sized(b"\x8c", 1, range(_SHORT)),
        _sized(b"X", 4, range(_SHORT)),
        rb"G.{8}|c[^\n]{1,200}\n[^\n]{1,200}\n",
    )
    return re.compile(rb"((?:%b){0,8192})([}us]|\x95.{8})?" % b"|".join(tokens), re.DOTALL).match


def _sized(code: bytes, width: int, sizes: Iterable[int]) -> bytes:
    """Return the expression for an opcode with a size of ``width`` bytes and as many bytes after it."""
    return re.escape(code) + b"(?:%b)" % b"|".join(
        re.escape(size.to_bytes(width, "little")) + b".{%d}" % size for size in sizes
    )


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class _Pairs:
    """A dict, as the tuples of keys and values, in turn, with which a pickle fills it."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches: list[tuple[Any, ...]] = []

    def extend(self, batches: list[object]) -> None:
        """Add a tuple; the unpickler calls this for the APPEND that ``_checked`` writes."""
        (batch,) = batches
        if type(batch) is not tuple or len(batch) % 2:
            raise _Refused("it fills a dict with something else than keys and values")
        self.batches.append(batch)

    def flat(self, most: int) -> tuple[Any, ...]:
        """Return keys and values in turn; refuse more than ``most``: a file may use one tuple several times."""
        if sum(map(len, self.batches)) > most:
            raise _Refused("it has a dict of more entries than torch writes")
        return self.batches[0] if len(self.batches) == 1 else tuple(chain.from_iterable(self.batches))


class _Record:
    """An object with its state; the subclasses stand for torch's classes."""

    __slots__ = ("state",)

    def __init__(self, *_: object) -> None:
        raise _Refused(f"it calls {type(self).__name__}")

    def __setstate__(self, state: object) -> None:
        if hasattr(self, "state"):
            raise _Refused(f"it fills a {type(self).__name__} twice")
        self.state = state


class _Foreign(_Record):
    """An object of a class of another library, such as Megatron-core's subclass of Metadata."""

    __slots__ = ()


class _Constant:
    """What a function returned: a layout, a path, or a member of an enumeration."""


_CONSTANT: Final = _Constant()


def _ordered() -> _Pairs:
    return _Pairs()


def _refuse_unless(condition: object, what: str) -> None:
    if not condition:
        raise _Refused(f"it makes a {what} that torch cannot make")


def _size(numbers: object) -> tuple[int, ...]:
    _refuse_unless(isinstance(numbers, tuple), "Size")
    return numbers  # type: ignore[return-value]  # a reader checks the numbers


def _layout(name: object) -> _Constant:
    _refuse_unless(type(name) is str and name.removeprefix("torch.") in _LAYOUTS, "layout")
    return _CONSTANT


def _memory_format(number: object) -> _Constant:
    _refuse_unless(type(number) is int and 0 <= number < len(_FORMAT_MEMBERS), "memory format")
    return _CONSTANT


def _write_type(number: object) -> _Constant:
    _refuse_unless(type(number) is int and 1 <= number <= 3, "WriteItemType")
    return _CONSTANT


def _path(*parts: object) -> _Constant:
    _refuse_unless(all(type(part) is str for part in parts), "path")
    return _CONSTANT


def _member(cls: object, name: object) -> _Constant:
    """Some versions of Python 3.11 pickle a member of an enumeration by name, with getattr."""
    if cls is not _memory_format or name not in _FORMAT_MEMBERS:
        raise _Refused("it calls builtins.getattr, which torch never writes there: loading runs it")
    return _CONSTANT


_LAYOUTS: Final = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
_FORMAT_MEMBERS: Final = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


def _classes(*modules: str, names: Iterable[str]) -> dict[str, type[_Record]]:
    made = {name: type(name, (_Record,), {"__slots__": ()}) for name in names}
    return {f"{module}.{name}": made[name] for module in modules for name in made}


#: All globals that torch's writer puts in a ``.metadata``, except dtypes. They include the plans of all ranks, which
#: Megatron-LM adds (``all_local_plans`` in its dist_checkpointing/strategies/state_dict_saver.py).
STAND_INS: Final[Mapping[str, Callable[..., object]]] = {
    **_classes(_MODULE, f"{_OLD}.metadata", names=_FIELDS),
    **_classes(_MODULE, _SHARDED, names=("TensorProperties",)),
    **_classes(_MODULE, names=("StorageMeta",)),
    **_classes("torch.distributed.checkpoint.filesystem", f"{_OLD}.filesystem", names=("_StorageInfo",)),
    **_classes(_PLANNER, names=("SavePlan", "WriteItem", "TensorWriteData")),
    f"{_PLANNER}.WriteItemType": _write_type,
    f"{_MODULE}._MEM_FORMAT_ENCODING": _memory_format,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _memory_format,
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _ordered,
    "builtins.getattr": _member,
    **dict.fromkeys((f"pathlib.{name}" for name in _PATHS), _path),
    **dict.fromkeys((f"pathlib._local.{name}" for name in _PATHS[:2]), _path),
}


class _Unpickler(pickle.Unpickler):
    """The standard unpickler without any way out of the pickle: every name is one of ``STAND_INS``, a dtype, or a class
    of another library, for which a bare object stands."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.foreign: dict[str, type[_Foreign]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in STAND_INS:
            return STAND_INS[full]
        if module == "torch" and name in BY_NAME:
            return BY_NAME[name]
        if not _is_foreign_class(full) or (full not in self.foreign and len(self.foreign) == _MAX_FOREIGN):
            raise _Refused(f"it names {quoted(full)}, which torch never writes there: loading it imports or runs it")
        if full not in self.foreign:
            self.foreign[full] = type(name.rpartition(".")[2], (_Foreign,), {"__slots__": ()})
        return self.foreign[full]

    def persistent_load(self, pid: object) -> _Pairs:
        """Make a dict; ``_checked`` writes a persistent id in place of each, and accepts no other."""
        return _Pairs()


def _is_foreign_class(name: str) -> bool:
    """Return whether a name looks like another library's class. All classes of torch and Python are known."""
    package, _, last = name.partition(".")
    return package not in STANDARD_LIBRARY | {"torch"} and last.rpartition(".")[2].lstrip("_")[:1].isupper()


# -- content -----------------------------------------------------------------------------------------------------------


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < TOO_LARGE


class _Reader:
    """Read the stand-ins of a file with ``size`` bytes; ``flaws`` has messages about invalid parts."""

    def __init__(self, size: int) -> None:
        self.flaws: list[str] = []
        self._size = size
        #: Numbers of pieces, shapes and paths that may still be read.
        self._left = _NUMBERS_PER_BYTE * size
        #: Sizes and boxes by value, so that equal ones share one object.
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._boxes: dict[Box, Box] = {}

    def metadata(self, root: object, end: int, foreign: list[str]) -> Metadata:
        """Return the content of the whole file."""
        listed, places, storage, meta, version = _fields(root, "Metadata") or [None] * 5
        if listed is None:
            kind = type(root).__name__.removeprefix("_Pairs") or "dict"
            raise _Refused(f"it is a pickle of {kind}, not of {_MODULE}.Metadata")
        values = self._read_values(listed)
        paths = self._read_paths(places, values)
        items = self._read_items(storage)
        if meta is not None and not isinstance(meta, _Record):
            self._note("its storage_meta is not an object: torch sets load_id on it")
        return Metadata(end, values, paths, items, version if type(version) is str else "", self.flaws, foreign)

    def _note(self, text: str) -> None:
        if len(self.flaws) < LIMITS.listed:
            self.flaws.append(text)

    def _pairs(self, value: object) -> list[tuple[Any, Any]]:
        """Return the entries of a dict; report anything else except None."""
        if type(value) is not _Pairs:
            if value is not None:
                self._note(f"a {type(value).__name__} where a dict belongs")
            return []
        flat = value.flat(self._size)
        return list(zip(flat[::2], flat[1::2]))

    def _named(self, value: object) -> list[tuple[str, Any]]:
        """Return the entries of a dict with string keys; report anything else."""
        pairs = self._pairs(value)
        named = [(key, inner) for key, inner in pairs if type(key) is str]
        if len(named) < len(pairs):
            self._note("a key is not a string")
        return named

    def _read_values(self, listed: object) -> dict[str, ValueMetadata]:
        values: dict[str, ValueMetadata] = {}
        for name, entry in self._named(listed):
            value = self._value(entry)
            if value is None:
                self._note(f"the entry of {quoted(name)} is invalid")
            else:
                values[name] = value
        return values

    def _value(self, entry: object) -> ValueMetadata | None:
        """Return a tensor or an object; None for anything else, or if too many numbers were read."""
        if type(entry).__name__ == "BytesStorageMetadata":
            return ValueMetadata(None)
        properties, size, chunks = _fields(entry, "TensorStorageMetadata") or [None] * 3
        shape, dtype = self._shape(size), _dtype(properties)
        if shape is None or dtype is None or type(chunks) is not list:
            return None
        self._left -= (len(chunks) + 1) * (len(shape) + 1)
        boxes = [self._box(chunk, len(shape)) for chunk in chunks] if self._left >= 0 else [None]
        return None if None in boxes else ValueMetadata(dtype, shape, tuple(boxes))  # type: ignore[arg-type]

    def _shape(self, value: object) -> tuple[int, ...] | None:
        """Return a ``torch.Size``, or None for anything else."""
        if type(value) is not tuple or len(value) > LIMITS.dimensions or not {*map(type, value)} <= {int}:
            return None
        known = self._sizes.get(value)
        if known is None and all(map(_is_count, value)):
            known = self._sizes[value] = value
        return known

    def _box(self, chunk: object, dimensions: int) -> Box | None:
        """Return the box of a piece, or None if it has not this many dimensions."""
        at, size = _fields(chunk, "ChunkStorageMetadata") or [None] * 2
        offsets, sizes = self._shape(at), self._shape(size)
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == dimensions:
            return None
        box = offsets, sizes
        return self._boxes.setdefault(box, box)

    def _read_paths(self, places: object, values: Mapping[str, ValueMetadata]) -> dict[str, tuple[str | int, ...]]:
        paths: dict[str, tuple[str | int, ...]] = {}
        for name, path in self._named(places):
            if self._left < 0 or not _is_path(path):
                self._note(f"the path of {quoted(name)} in the object is invalid")
                continue
            paths[name] = path
            spelled = ".".join(map(str, path))
            self._left -= len(spelled)
            if spelled != name and name in values:
                # create_default_local_load_plan looks up the name that the path spells.
                self._note(f"{quoted(name)} belongs at {quoted(spelled)}, under which torch looks for it: Missing key")
        # DefaultSavePlanner writes the path of every value. A damaged key would move its value to the root.
        without = next((name for name in values if name not in paths), None) if paths else None
        unknown = next((name for name in paths if name not in values), None)
        if without is not None and unknown is not None:
            self._note(f"{quoted(without)} has no path in the object, and {quoted(unknown)} has one but is no value")
        return paths

    def _read_items(self, storage: object) -> list[Item]:
        items = []
        for number, (key, value) in enumerate(self._pairs(storage)):
            item = self._item(key, value)
            if item is None:
                self._note(f"entry {number:,} of storage_data is invalid")
            else:
                items.append(item)
        return items

    def _item(self, key: object, value: object) -> Item | None:
        """Return the item of an index and a file range, or None if one of them is invalid."""
        name, _, offset = _fields(key, "MetadataIndex") or [None] * 3
        file, at, length, transforms = _fields(value, "_StorageInfo") or [None] * 4
        place = self._shape(offset)
        if type(name) is not str or type(file) is not str or (offset is not None and place is None):
            return None
        if not (type(at) is type(length) is int and 0 <= at < TOO_LARGE and 0 <= length < TOO_LARGE):
            return None
        if transforms is None:
            return Item(name, place, file, at, length)
        self._left -= len(transforms) if type(transforms) is list else self._left
        if self._left <= 0 or not all(type(transform) is str for transform in transforms):
            return None
        return Item(name, place, file, at, length, tuple(transforms))


def _fields(value: object, cls: str) -> Sequence[Any] | None:
    """Return the fields of an object of class ``cls``, or of a class of another library; None for a missing field.

    Return None for anything else.
    """
    if not isinstance(value, _Record) or (type(value).__name__ != cls and not isinstance(value, _Foreign)):
        return None
    state = getattr(value, "state", None)
    if type(state) is not _Pairs:
        return None
    flat, order = state.flat(2 * _MAX_FIELDS), _FIELDS[cls]
    names = flat[::2]
    if names == order[: len(names)]:
        return flat[1::2] + (None,) * (len(order) - len(names))
    if not all(type(name) is str for name in names):
        return None
    fields = dict(zip(names, flat[1::2]))
    return [fields.get(name) for name in order]


def _dtype(properties: object) -> Dtype | None:
    """Return the dtype, which ``TensorProperties.__getstate__`` writes first; None if ``__setstate__`` would fail.

    The state has five values, six with the strides since torch 2.15.
    """
    state: Sequence[object] = getattr(properties, "state", ())
    if type(state) is not tuple or len(state) not in (5, 6) or state[3] is not _CONSTANT:
        return None
    return state[0] if isinstance(state[0], Dtype) else None


def _is_path(value: object) -> bool:
    """Return whether a value is the path of a value in the object: names and list indices."""
    if type(value) is not tuple or not 0 < len(value) <= _MAX_DEPTH or type(value[0]) is not str:
        return False
    return all(type(step) is str or _is_count(step) for step in value)
