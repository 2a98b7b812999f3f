"""Read a ``.metadata`` file, a pickle of ``torch.distributed.checkpoint.metadata.Metadata``.

Python's own unpickler reads it, because a large model has a million pieces. Nothing is imported and nothing of torch
is made: ``_Unpickler`` has a stand-in for each class and function that torch writes there, and refuses every other
name. ``CheckedPickle`` bounds the work beforehand. Sources: metadata.py and filesystem.py of
torch/distributed/checkpoint.
"""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BufferedReader, RawIOBase
from itertools import chain
from typing import Any, ClassVar, Final

from ...base.dtypes import BY_NAME, TORCH_NAMES, Dtype
from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.text import quoted
from ...pickles import opcodes as op
from ...safety.calls import STANDARD_LIBRARY
from ..folders import TOO_LARGE
from ..pieces import Box
from .metadata import Item, Metadata, ValueMetadata

_MODULE: Final = "torch.distributed.checkpoint.metadata"
#: Before torch 2.3, TensorProperties came from the sharded tensor package. Before 2.0, all classes were elsewhere.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_OLD: Final = "torch.distributed._shard.checkpoint"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
_PLANNER: Final = "torch.distributed.checkpoint.planner"
#: The most steps from the root to a value: no real state dict is nested that deep.
_MAX_DEPTH: Final = 200
#: The most fields of an object: a hostile file may share one dict a million times.
_MAX_FIELDS: Final = 20
#: The most numbers of shapes and pieces, and characters of paths, that are read per byte.
_NUMBERS_PER_BYTE: Final = 4
#: The most classes of other libraries: real files have one.
_MAX_FOREIGN: Final = 16


def read_listing(data: bytes, where: str) -> Metadata:
    """Read a ``.metadata`` file; raise MalformedError if it is anything else."""
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects, and no cycles
    try:
        checked = CheckedPickle(data)
        shapes = _Shapes()
        unpickler = _Unpickler(BufferedReader(checked, CHUNK), shapes)
        root, foreign = unpickler.load(), sorted(unpickler.foreign)
        del unpickler  # and with it the memo, which holds every part of the file
        return _Reader(len(data), shapes).metadata(root, checked.end, foreign)
    except Refused as error:
        raise MalformedError(str(error), where=where) from error
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"it is not a pickle as torch.distributed.checkpoint writes it ({error})"
        raise MalformedError(what, where=where) from error
    finally:
        if collecting:
            gc.enable()


class _List(list[Any]):
    """A list; a plain one stands for a dict, as its keys and values in turn."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        _refuse_unless(type(state) is _Parts, "list")
        self.extend(state.parts)  # type: ignore[attr-defined]


class _Parts(NamedTuple):
    parts: tuple[object, ...]


class _Pair(NamedTuple):
    """A key and a value that were put into a dict by themselves."""

    key: Any
    value: Any


def _flat(pairs: Sequence[Any]) -> Sequence[Any]:
    if _Pair not in map(type, pairs):
        return pairs
    return list(chain.from_iterable(part if type(part) is _Pair else (part,) for part in pairs))


class _Record:
    """An object of one of torch's classes. ``values`` has its fields in the ``order`` in which torch writes them, None
    for the last one if torch leaves it out."""

    order: ClassVar[tuple[str, ...]] = ()
    __slots__ = ("values",)
    values: Sequence[Any]

    def __init__(self, *_: object) -> None:
        raise Refused(f"it calls {_kind(self)}")

    def __setstate__(self, state: Any) -> None:
        """Set the fields from a dict, which is a flat tuple or list of keys and values."""
        if type(state) not in (tuple, list) or len(state) > 2 * _MAX_FIELDS:
            raise Refused(f"it has a {_kind(self)} with something else than fields")
        names, order = state[::2], self.order
        if names == order:
            self.values = state[1::2]
        elif names == order[:-1] != ():
            self.values = (*state[1::2], None)
        else:
            flat = _flat(state)
            if not {*map(type, flat[::2])} <= {str}:
                raise Refused(f"it has a {_kind(self)} with a field that has no name")
            self.values = tuple(map(dict(zip(flat[::2], flat[1::2])).get, order))


def _record(*order: str) -> type[_Record]:
    return type("_Record", (_Record,), {"order": order, "__slots__": ()})


_Metadata: Final = _record("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_Tensor: Final = _record("properties", "size", "chunks")
_Object: Final = _record()
_Chunk: Final = _record("offsets", "sizes")
_Index: Final = _record("fqn", "index", "offset")
_Place: Final = _record("relative_path", "offset", "length", "transform_descriptors")


class _Properties(_Record):
    """``TensorProperties``, whose state is a tuple."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        self.values = state


class _Foreign(_Properties):
    """An object of a class of another library, such as Megatron-core's subclass of Metadata."""

    __slots__ = ()


class _Shapes:
    """The shapes and offsets of a file, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._ids: set[int] = set()

    def make(self, numbers: object) -> tuple[int, ...]:
        """Return the numbers of a ``torch.Size``, which a reader checks."""
        try:
            return self._known[numbers]  # type: ignore[index]
        except (KeyError, TypeError):
            _refuse_unless(type(numbers) is tuple, "Size")
            return self.shape(numbers) or numbers  # type: ignore[return-value]

    def shape(self, value: object) -> tuple[int, ...] | None:
        """Return the known tuple that equals ``value``, or None if that is no shape."""
        if id(value) in self._ids:
            return value  # type: ignore[return-value]
        if type(value) is not tuple or len(value) > LIMITS.dimensions or not {*map(type, value)} <= {int}:
            return None
        known = self._known.get(value)
        if known is None and all(map(_is_count, value)):
            known = self._known[value] = value
            self._ids.add(id(value))
        return known


#: What a function returned: a layout, a path, or a member of an enumeration.
_CONSTANT: Final = object()


def _refuse_unless(condition: object, what: str) -> None:
    if not condition:
        raise Refused(f"it makes a {what} that torch cannot make")


def _maker(what: str, is_valid: Callable[..., bool]) -> Callable[..., object]:
    """Return a stand-in for a function, which takes the arguments that ``is_valid`` accepts."""

    def make(*arguments: object) -> object:
        _refuse_unless(is_valid(*arguments), what)
        return _CONSTANT

    return make


def _member(cls: object, name: object) -> object:
    """Some versions of Python 3.11 pickle a member of an enumeration by name, with getattr."""
    if cls is not _memory_format or name not in _FORMAT_MEMBERS:
        raise Refused("it calls builtins.getattr, which torch never writes there: loading runs it")
    return _CONSTANT


_LAYOUTS: Final = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
_FORMAT_MEMBERS: Final = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_layout: Final = _maker("layout", lambda name: type(name) is str and name.removeprefix("torch.") in _LAYOUTS)
_memory_format: Final = _maker("memory format", lambda n: type(n) is int and 0 <= n < len(_FORMAT_MEMBERS))
_path: Final = _maker("path", lambda *parts: {*map(type, parts)} <= {str})
_METADATA_CLASSES: Final = {
    **{"Metadata": _Metadata, "TensorStorageMetadata": _Tensor, "BytesStorageMetadata": _Object},
    **{"ChunkStorageMetadata": _Chunk, "MetadataIndex": _Index},
}

#: All globals that torch's writer puts in a ``.metadata``, except dtypes. They include the plans of all ranks, which
#: Megatron-LM adds (``all_local_plans`` in its dist_checkpointing/strategies/state_dict_saver.py).
STAND_INS: Final[Mapping[str, Callable[..., object]]] = {
    **{f"{place}.{name}": cls for place in (_MODULE, f"{_OLD}.metadata") for name, cls in _METADATA_CLASSES.items()},
    **{f"{place}._StorageInfo": _Place for place in (_FILESYSTEM, f"{_OLD}.filesystem")},
    **{f"{place}.TensorProperties": _Properties for place in (_MODULE, _SHARDED)},
    f"{_MODULE}.StorageMeta": _Record,
    **{f"{_PLANNER}.{name}": _Record for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    f"{_PLANNER}.WriteItemType": _maker("WriteItemType", lambda number: type(number) is int and 1 <= number <= 3),
    f"{_MODULE}._MEM_FORMAT_ENCODING": _memory_format,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _memory_format,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": list,
    **dict.fromkeys(("builtins.getattr", "__builtin__.getattr"), _member),
    **dict.fromkeys((f"pathlib.{name}" for name in _PATHS), _path),
    **dict.fromkeys((f"pathlib._local.{name}" for name in _PATHS[:2]), _path),
}


class _Unpickler(pickle.Unpickler):
    """The standard unpickler without any way out of the pickle: every name is one of ``STAND_INS``, a dtype, or a class
    of another library, for which a bare object stands."""

    def __init__(self, file: BufferedReader, shapes: _Shapes) -> None:
        super().__init__(file)
        self.shapes = shapes
        self.foreign: dict[str, type[_Foreign]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in STAND_INS:
            return STAND_INS[full]
        if module == "torch" and name in TORCH_NAMES:
            return BY_NAME[name]
        if full == "torch.Size":
            return self.shapes.make
        # All classes of torch and Python are known; another name may look like another library's class.
        package, last = module.partition(".")[0], name.rpartition(".")[2].lstrip("_")
        foreign = package not in STANDARD_LIBRARY | {"torch"} and last[:1].isupper()
        if not foreign or (full not in self.foreign and len(self.foreign) == _MAX_FOREIGN):
            raise Refused(f"it names {quoted(full)}, which torch never writes there: loading it imports or runs it")
        if full not in self.foreign:
            self.foreign[full] = type(name.rpartition(".")[2], (_Foreign,), {"__slots__": ()})
        return self.foreign[full]

    def persistent_load(self, pid: Any) -> _List | _Parts | _Pair:
        """Make what ``CheckedPickle`` writes as a persistent id; it accepts no other."""
        if pid is None:
            return _List()
        return _Pair(*pid) if len(pid) == 2 else _Parts(*pid)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < TOO_LARGE


class _Reader:
    """Read the stand-ins of a file with ``size`` bytes; ``flaws`` has messages about invalid parts."""

    def __init__(self, size: int, shapes: _Shapes) -> None:
        self.flaws: list[str] = []
        self._size = size
        #: Numbers of pieces, shapes and paths that may still be read.
        self._left = _NUMBERS_PER_BYTE * size
        self._shape = shapes.shape
        #: Boxes by value, so that equal ones share one object.
        self._boxes: dict[Box, Box] = {}

    def metadata(self, root: object, end: int, foreign: list[str]) -> Metadata:
        whole = _fields(_Metadata, root)
        if whole is None or whole[0] is None:
            raise Refused(f"it is a pickle of {_kind(root)}, not of {_MODULE}.Metadata")
        listed, places, storage, meta, version = whole
        values: dict[str, ValueMetadata] = {}
        for name, entry in self._named(listed):
            value = self._value(entry)
            if value is None:
                self._note(f"the entry of {quoted(name)} is invalid")
            else:
                values[name] = value
        paths = self._read_paths(places, values)
        items = []
        for number, (key, place) in enumerate(self._pairs(storage)):
            item = self._item(_fields(_Index, key), _fields(_Place, place))
            if item is None:
                self._note(f"entry {number:,} of storage_data is invalid")
            else:
                items.append(item)
        if meta is not None and not isinstance(meta, _Record):
            self._note("its storage_meta is not an object: torch sets load_id on it")
        return Metadata(end, values, paths, items, version if type(version) is str else "", self.flaws, foreign)

    def _note(self, text: str) -> None:
        if len(self.flaws) < LIMITS.listed:
            self.flaws.append(text)

    def _pairs(self, value: object) -> Iterator[tuple[Any, Any]]:
        """Yield the entries of a dict; report anything else except None."""
        if type(value) is not list:
            if value is not None:
                self._note(f"a {_kind(value)} where a dict belongs")
            return
        flat = [*reversed(_flat(value))]
        value.clear()
        while len(flat) > 1:  # and each entry is freed when it has been read
            yield flat.pop(), flat.pop()

    def _named(self, value: object) -> Iterator[tuple[str, Any]]:
        for key, inner in self._pairs(value):
            if type(key) is str:
                yield key, inner
            else:
                self._note("a key is not a string")

    def _value(self, entry: object) -> ValueMetadata | None:
        """Return a tensor or an object; None for anything else, or if too many numbers were read."""
        if type(entry) is _Object:
            return ValueMetadata(None)
        properties, size, chunks = _fields(_Tensor, entry) or (None, None, None)
        shape, dtype = self._shape(size), _dtype(properties)
        if shape is None or dtype is None or type(chunks) is not _List:
            return None
        self._left -= (len(chunks) + 1) * (len(shape) + 1)
        boxes = []
        for chunk in chunks if self._left >= 0 else [None]:
            offsets, sizes = map(self._shape, _fields(_Chunk, chunk) or (None, None))
            if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
                return None
            boxes.append(self._boxes.setdefault((offsets, sizes), (offsets, sizes)))
        return ValueMetadata(dtype, shape, tuple(boxes))

    def _read_paths(self, places: object, values: Mapping[str, ValueMetadata]) -> dict[str, tuple[str | int, ...]]:
        paths: dict[str, tuple[str | int, ...]] = {}
        for name, path in self._named(places):
            steps = path if type(path) is tuple and 0 < len(path) <= _MAX_DEPTH and type(path[0]) is str else (None,)
            if self._left < 0 or not all(type(step) is str or _is_count(step) for step in steps):
                self._note(f"the path of {quoted(name)} in the object is invalid")
                continue
            paths[name] = path
            spelled = ".".join(map(str, path))
            self._left -= len(spelled)
            if spelled != name and name in values:
                # create_default_local_load_plan looks up the name that the path spells.
                self._note(f"{quoted(name)} belongs at {quoted(spelled)}, under which torch looks for it: Missing key")
        # DefaultSavePlanner writes the path of every value. A damaged key would move its value to the root.
        without, unknown = values.keys() - paths.keys() if paths else (), paths.keys() - values.keys()
        if without and unknown:
            what = f"{quoted(min(without))} has no path in the object, and {quoted(min(unknown))} has one"
            self._note(f"{what} but is no value")
        return paths

    def _item(self, index: Sequence[Any] | None, place: Sequence[Any] | None) -> Item | None:
        if index is None or place is None:
            return None
        (name, _, begin), (file, at, length, transforms) = index, place
        offset = self._shape(begin)
        if type(name) is not str or type(file) is not str or (offset is None and begin is not None):
            return None
        if not (type(at) is type(length) is int and 0 <= at < TOO_LARGE and 0 <= length < TOO_LARGE):
            return None
        if transforms is None:
            return Item(name, offset, file, at, length)
        self._left -= len(transforms) if type(transforms) is _List else 1
        if self._left <= 0 or type(transforms) is not _List or not {*map(type, transforms)} <= {str}:
            return None
        return Item(name, offset, file, at, length, tuple(transforms))


def _fields(cls: type[_Record], value: object) -> Sequence[Any] | None:
    """Return the fields of an object of ``cls``, or of another library's class; None for anything else."""
    if type(value) is cls:
        return value.values
    if not isinstance(value, _Foreign):
        return None
    made = cls.__new__(cls)
    made.__setstate__(value.values)
    return made.values


def _kind(value: object) -> str:
    names = {list: "dict", _List: "list"} | {cls: name.rpartition(".")[2] for name, cls in STAND_INS.items()}
    return names.get(type(value), type(value).__name__)


def _dtype(properties: object) -> Dtype | None:
    """Return the dtype, which ``TensorProperties.__getstate__`` writes first; None if ``__setstate__`` would fail. The
    state has five values, six with the strides since torch 2.15."""
    state = properties.values if type(properties) is _Properties else ()
    if type(state) is not tuple or len(state) not in (5, 6) or state[3] is not _CONSTANT:
        return None
    return state[0] if isinstance(state[0], Dtype) else None


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
    """A file with the pickle ``data``, changed so that the standard unpickler reads it in bounded time and memory. It
    accepts only the opcodes with which protocol 2 and later write ``.metadata``. No size or memo number may exceed the
    size of the file, and the number of objects is limited. Dicts become lists, so that nothing is hashed: hashing
    tuples that share tuples may take forever. ``end`` is the size of the original in bytes."""

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
