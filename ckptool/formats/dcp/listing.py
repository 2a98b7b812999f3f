"""Read a ``.metadata`` file as torch writes it, in one pass and without a graph: the tensors and items that it lists.

A million pieces make a pickle of 160 MB, and would make a graph of 20 million nodes. The entries that repeat for each
piece are matched by one regular expression, built from the file's own memo indices. Only the names, fields and types
that torch writes are accepted, so an accepted file has no flaws. Anything else is left to ``read_metadata``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, Final

from ...base.dtypes import BY_NAME, Dtype
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...pickles import opcodes as op
from ..folders import TOO_LARGE
from .metadata import EXPECTED, LAYOUTS, MAX_DEPTH, Item, Metadata, ValueMetadata, read_metadata

_u32, _u64 = Struct("<I").unpack_from, Struct("<Q").unpack_from

#: The most objects on the stack: picklers fill containers in batches of a thousand.
_MAX_STACK: Final = 20_000
#: The most tensors whose instructions are cached, and the most bytes of each: enough for one piece of few dimensions.
_MAX_TENSORS, _MAX_TENSOR = 256, 512
#: The most bytes of a global's module and name.
_MAX_NAME: Final = 200
#: The required and the optional fields of each class.
_FIELDS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    "Metadata": (
        frozenset(("state_dict_metadata",)),
        frozenset(("planner_data", "storage_data", "storage_meta", "version")),
    ),
    "TensorStorageMetadata": (frozenset(("properties", "size", "chunks")), frozenset()),
    "ChunkStorageMetadata": (frozenset(("offsets", "sizes")), frozenset()),
    "MetadataIndex": (frozenset(("fqn",)), frozenset(("offset", "index"))),
    "_StorageInfo": (frozenset(("relative_path", "offset", "length")), frozenset(("transform_descriptors",))),
    "StorageMeta": (frozenset(), frozenset(("checkpoint_id", "save_id", "load_id", "modules"))),
    "BytesStorageMetadata": (frozenset(), frozenset()),
    "TensorProperties": (frozenset(), frozenset()),
}


class _Declined(Exception):
    """The pickle differs from what torch writes."""


class _Name(str):
    """A global, ``module.name``."""

    __slots__ = ()


class _Tuple(tuple[Any, ...]):
    """A tuple in the pickle. A plain Python tuple stands for a ``torch.Size``."""

    __slots__ = ()


class _List(list[Any]):
    """A list."""

    __slots__ = ()


class _Pairs(list[Any]):
    """A dict: key, value, key, value ..."""

    __slots__ = ()


class _Object:
    """An object of class ``cls`` before its fields are set; ``value`` is the built object if the memo may share it."""

    __slots__ = ("cls", "value")

    def __init__(self, cls: str) -> None:
        self.cls = cls
        self.value: object = None


class _Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Index(NamedTuple):
    name: str
    offset: tuple[int, ...] | None


class _Info(NamedTuple):
    file: str
    at: int
    length: int
    transforms: tuple[str, ...]


class _Properties(NamedTuple):
    dtype: Dtype


class _Constant(NamedTuple):
    """The result of a call: a layout, a memory format's number, or a path."""

    function: str


class _Taken:
    """Replaces the value of an item after it was merged into its key."""


_TAKEN: Final = _Taken()
_Match = Callable[[bytes, int], "re.Match[bytes] | None"]
#: Types of values that the memo may share.
_SHARED: Final = frozenset((str, _Name, tuple, _Constant))

_INT: Final = rb"(?:K.|M..|J....|\x8a[\5-\x08].{5,8})"
_INTS: Final = rb"(?:(?:%b){1,3}[\x85-\x87]|\((?:%b){4,16}t)" % (_INT, _INT)
_GET: Final = rb"(?:h.|j....)"
_TEXT: Final = rb"(?:\x8c(.)([ -~]*)\x94|(%b))" % _GET
_INT_PARTS: Final = regex(rb"K.|M..|J....|\x8a[\5-\x08]", re.DOTALL)


def read_listing(data: bytes, where: str) -> Metadata:
    """Read a ``.metadata`` file; raise MalformedError if it is anything else."""
    return _as_written(data) or read_metadata(data, where)


def _as_written(data: bytes) -> Metadata | None:
    """Return the content of a pickle that torch wrote in its usual form, or None for any other."""
    try:
        return _Reader(data).read()
    except (_Declined, IndexError, UnicodeDecodeError):
        return None


def _require(condition: object) -> None:
    if not condition:
        raise _Declined


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < TOO_LARGE


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.max_memo = min(LIMITS.memo, LIMITS.few_nodes + len(data) // LIMITS.bytes_per_node)
        #: Memo indices of strings (the last one of each), and of classes by short name.
        self.places: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        #: Expressions left to try: field names may not be where they are expected.
        self.trials = 16
        #: By memo index of a class: a function that reads a run of entries that begin with this class.
        self.phrases: dict[int, Callable[[int], int]] = {}
        self.sizes: dict[bytes, tuple[int, ...]] = {}
        self.chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], _Chunk] = {}
        self.ints: dict[bytes, int] = {}
        self.texts: dict[bytes, str] = {}
        self.orders: dict[str, tuple[str, ...]] = {}
        #: Known tensors by instructions, with their memoized objects; their sizes; the start of the last tensor.
        self.tensors: dict[bytes, tuple[ValueMetadata, list[Any]]] = {}
        self.tensor_sizes: dict[int, None] = {}
        self.tensor_begun = -1, 0

    def read(self) -> Metadata:
        data, stack, memo = self.data, self.stack, self.memo
        _require(data[:1] == b"\x80" and data[1] in (4, 5))
        pos, frame = 2, -1
        while True:
            code = data[pos]
            pos += 1
            if code == op.MEMOIZE:
                self.need(1)
                top = stack[-1]
                if type(top) is str:
                    self.places[top] = len(memo)
                elif type(top) is _Name:
                    self.classes[top.rpartition(".")[2]] = len(memo)
                memo.append(top)
                _require(len(memo) <= self.max_memo)
            elif code in (op.BINGET, op.LONG_BINGET):
                ref = data[pos] if code == op.BINGET else _u32(data, _within(data, pos, 4))[0]
                phrase = self.phrases.get(ref)
                end = phrase(pos - 1) if phrase else -1
                if end >= 0:
                    pos = end
                    continue
                pos += 1 if code == op.BINGET else 4
                stack.append(self.shared(memo[ref]))
            elif code in (op.SHORT_BINUNICODE, op.BINUNICODE):
                size = data[pos] if code == op.SHORT_BINUNICODE else _u32(data, _within(data, pos, 4))[0]
                pos += size + (1 if code == op.SHORT_BINUNICODE else 4)
                stack.append(data[pos - size : pos].decode())
            elif code in _INT_SIZES or code == op.LONG1:
                size = _INT_SIZES.get(code) or data[pos] + 1
                stack.append(_int(data[pos - 1 : pos + size]))
                pos += size
            elif code == op.GLOBAL:
                lines = data[pos : pos + _MAX_NAME].split(b"\n", 2)
                _require(len(lines) == 3)
                stack.append(_named(lines[0].decode(), lines[1].decode()))
                pos += len(lines[0]) + len(lines[1]) + 2
            elif code == op.MARK:
                self.marks.append(len(stack))
                _require(len(self.marks) < 20)
            elif code == op.FRAME:
                _require(frame in (-1, pos - 1))
                frame = pos + 8 + _u64(data, _within(data, pos, 8))[0]
                pos += 8
            elif code == op.STOP:
                _require(pos == len(data) and frame in (-1, pos) and len(stack) == 1 and not self.marks)
                _require(type(stack[0]) is Metadata and len(memo) <= LIMITS.memo)
                return stack[0]._replace(end=pos)  # type: ignore[no-any-return]
            else:
                self.execute(code)
                if code == op.BUILD and type(stack[-1]) is ValueMetadata:
                    self.learn_tensor(pos)
            _require(len(stack) < _MAX_STACK)

    def shared(self, value: object) -> object:
        """Return a value fetched from the memo; decline objects that may still change."""
        if type(value) is _Object and value.value is not None:
            return value.value
        is_path = type(value) is _Tuple and all(type(part) in (str, int) for part in value)
        _require(is_path or type(value) in _SHARED)
        return value

    def need(self, count: int) -> None:
        """Decline unless ``count`` objects are above the last MARK."""
        _require(len(self.stack) - (self.marks[-1] if self.marks else 0) >= count)

    def popped(self) -> list[Any]:
        """Pop everything above the last MARK."""
        begin = self.marks.pop()
        parts = self.stack[begin:]
        del self.stack[begin:]
        return parts

    def execute(self, code: int) -> None:
        """Execute an opcode without an argument."""
        stack = self.stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code]())
        elif code in (op.TUPLE1, op.TUPLE2, op.TUPLE3):
            count = code - op.TUPLE1 + 1
            self.need(count)
            stack[-count:] = [_Tuple(stack[-count:])]
        elif code == op.TUPLE:
            stack.append(_Tuple(self.popped()))
        elif code in (op.SETITEMS, op.SETITEM):
            self.need(0 if code == op.SETITEMS else 3)
            parts = self.popped() if code == op.SETITEMS else [stack.pop(-2), stack.pop()]
            self.need(1)
            _require(type(stack[-1]) is _Pairs and len(parts) % 2 == 0)
            stack[-1] += _joined_items(parts)
        elif code in (op.APPENDS, op.APPEND):
            self.need(0 if code == op.APPENDS else 2)
            parts = self.popped() if code == op.APPENDS else [stack.pop()]
            self.need(1)
            _require(type(stack[-1]) is _List)
            stack[-1] += parts
        else:
            self.need(2)
            self.combine(code)

    def combine(self, code: int) -> None:
        """Execute an opcode that combines two objects into one."""
        stack = self.stack
        if code == op.STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            _require(type(name) is str and type(module) is str)
            stack.append(_named(module, name))
        elif code == op.NEWOBJ:
            args, cls = stack.pop(), stack.pop()
            short = cls.rpartition(".")[2] if type(cls) is _Name else ""
            _require(type(args) is _Tuple and not args and short in _FIELDS)
            stack.append(_Object(short))
        elif code == op.REDUCE:
            args, function = stack.pop(), stack.pop()
            _require(type(args) is _Tuple and type(function) is _Name)
            stack.append(self.called(function.rpartition(".")[2], args))
        else:
            _require(code == op.BUILD)
            state, made = stack.pop(), stack.pop()
            _require(type(made) is _Object and made.value is None)
            stack.append(self.built(made, state))

    def called(self, function: str, args: _Tuple) -> object:
        """Return the result of a function that torch calls."""
        if function.endswith("Path"):
            _require(all(type(part) is str for part in args))
            return _Constant("Path")
        _require(len(args) == 1)
        if function == "Size":
            numbers = args[0]
            _require(type(numbers) is _Tuple and len(numbers) <= LIMITS.dimensions and all(map(_is_count, numbers)))
            return tuple(numbers)
        if function == "_get_layout":
            _require(type(args[0]) is str and args[0] in LAYOUTS)
        else:
            _require(function.endswith("MEM_FORMAT_ENCODING") and type(args[0]) is int and 0 <= args[0] < 3)
            function = "MEM_FORMAT_ENCODING"
        return _Constant(function)

    def built(self, made: _Object, state: Any) -> object:
        """Return the value of an object with these fields."""
        cls = made.cls
        if cls == "TensorProperties":
            _require(type(state) is _Tuple and len(state) in (5, 6))  # six with the strides since torch 2.15
            dtype, layout, grad, memory_format, pinned, *strides = state
            _require(type(dtype) is _Name and dtype.removeprefix("torch.") in BY_NAME)
            _require(layout == _Constant("_get_layout") and memory_format == _Constant("MEM_FORMAT_ENCODING"))
            _require(type(grad) is type(pinned) is bool and {*map(type, strides)} <= {_Tuple, type(None)})
            made.value = _Properties(BY_NAME[dtype.removeprefix("torch.")])
            return made.value
        _require(type(state) is _Pairs and all(type(key) is str for key in state[::2]))
        fields = dict(zip(state[::2], state[1::2]))
        needed, possible = _FIELDS[cls]
        _require(len(fields) * 2 == len(state) and needed <= fields.keys() <= needed | possible)
        if cls in ("ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"):
            self.orders[cls] = tuple(fields)
            self.learn(cls)
            return _BUILDERS[cls](self, fields)
        if cls == "TensorStorageMetadata":
            shape, chunks, properties = fields["size"], fields["chunks"], fields["properties"]
            _require(type(properties) is _Properties and type(shape) is tuple and type(chunks) is _List)
            count = len(shape)
            for chunk in chunks:
                _require(type(chunk) is _Chunk and len(chunk.offsets) == count and len(chunk.sizes) == count)
            return ValueMetadata(properties.dtype, shape, tuple(chunks))
        made.value = made
        return self.metadata(fields) if cls == "Metadata" else made

    def metadata(self, fields: Mapping[str, Any]) -> Metadata:
        """Return the content of the whole file."""
        listed = fields["state_dict_metadata"]
        places, storage = fields.get("planner_data"), fields.get("storage_data")
        _require(type(listed) is _Pairs)
        _require(all(pairs is None or type(pairs) is _Pairs for pairs in (places, storage)))
        meta, version = fields.get("storage_meta"), fields.get("version")
        _require(meta is None or (type(meta) is _Object and meta.cls == "StorageMeta"))
        values: dict[str, ValueMetadata] = {}
        for name, value in zip(listed[::2], listed[1::2]):
            _require(type(name) is str)
            if type(value) is _Object and value.cls == "BytesStorageMetadata":
                value = ValueMetadata(None)
            _require(type(value) is ValueMetadata)
            values[name] = value
        paths: dict[str, tuple[str | int, ...]] = {}
        for name, path in zip(places[::2], places[1::2]) if places else ():
            _require(type(name) is str and type(path) is _Tuple and 0 < len(path) <= MAX_DEPTH)
            _require(all(type(step) is str or _is_count(step) for step in path) and type(path[0]) is str)
            _require(name not in values or ".".join(map(str, path)) == name)
            paths[name] = tuple(path)
        _require(not paths or values.keys() <= paths.keys() or paths.keys() <= values.keys())
        items = storage[::2] if storage else []
        for item, taken in zip(items, storage[1::2] if storage else ()):
            _require(type(item) is Item and taken is _TAKEN)
        return Metadata(None, 0, values, paths, items, version if type(version) is str else "", [], [], [])

    def chunk_of(self, fields: Mapping[str, Any]) -> _Chunk:
        """Return a piece of a tensor."""
        offsets, sizes = fields["offsets"], fields["sizes"]
        _require(type(offsets) is tuple and type(sizes) is tuple)
        return self.chunk(offsets, sizes)

    def chunk(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> _Chunk:
        """Return a piece; equal pieces share one object."""
        known = self.chunks.get((offsets, sizes))
        if known is None:
            known = _Chunk(offsets, sizes)
            self.chunks[known] = known
        return known

    def index_of(self, fields: Mapping[str, Any]) -> _Index:
        """Return the name and the offset of a piece."""
        name, offset, number = fields["fqn"], fields.get("offset"), fields.get("index")
        _require(type(name) is str and (offset is None or type(offset) is tuple))
        _require(number is None or type(number) is int)
        return _Index(name, offset)

    def info_of(self, fields: Mapping[str, Any]) -> _Info:
        """Return the file range of a piece."""
        file, at, length = fields["relative_path"], fields["offset"], fields["length"]
        transforms = fields.get("transform_descriptors")
        _require(type(file) is str and _is_count(at) and _is_count(length))
        _require(transforms is None or type(transforms) is _List)
        _require(all(type(name) is str for name in transforms or ()))
        return _Info(file, at, length, tuple(transforms or ()))

    def learn(self, cls: str) -> None:
        """Build the expression that matches further entries like the last one, now that its names are in the memo."""
        is_chunk, index = cls == "ChunkStorageMetadata", self.orders.get("MetadataIndex", ())
        first = cls if is_chunk else "MetadataIndex"
        begin = self.classes.get(first, -1)
        if cls == "MetadataIndex" or begin < 0 or begin in self.phrases or not self.trials:
            return
        if not is_chunk and (len(index) != 3 or len(self.orders[cls]) != 3):
            return  # an object, or a compressed piece
        self.trials -= 1
        parts = [(name, self.orders[name]) for name in ((cls,) if is_chunk else (first, cls))]
        wanted = {name for _, order in parts for name in order}
        if {"Size"} | {name for name, _ in parts} <= self.classes.keys() and wanted <= self.places.keys():
            match = re.compile(b"".join(self.expression(*part) for part in parts), re.DOTALL).match
            orders = [order for _, order in parts]
            read = self.read_chunks if is_chunk else self.read_items
            self.phrases[begin] = lambda pos: read(match, orders, pos)

    def learn_tensor(self, end: int) -> None:
        """Cache the instructions of the tensor that ends here: equal dtypes and shapes have equal instructions."""
        begin, memoized = self.tensor_begun
        size = end - begin
        if begin >= 0 and size <= _MAX_TENSOR and len(self.tensors) < _MAX_TENSORS:
            self.tensors[self.data[begin:end]] = self.stack[-1], self.memo[memoized:]
            self.tensor_sizes[size] = None
        self.tensor_begun = -1, 0
        begin = self.classes.get("TensorStorageMetadata", -1)
        if begin >= 0:
            self.phrases[begin] = self.read_tensor

    def read_tensor(self, pos: int) -> int:
        """Read a tensor with cached instructions, which build an equal value; return the offset after it, or -1."""
        for size in self.tensor_sizes:
            known = self.tensors.get(self.data[pos : pos + size])
            if known is not None:
                self.stack.append(known[0])
                self.memo += known[1]
                return pos + size
        self.tensor_begun = pos, len(self.memo)
        return -1

    def expression(self, cls: str, order: Sequence[str]) -> bytes:
        """Return the expression that matches an object with its fields in this order."""
        new_size = rb"(?:%b(%b)\x94\x85\x94R\x94|(%b))" % (_fetched(self.classes["Size"]), _INTS, _GET)
        kinds = {"fqn": _TEXT, "relative_path": _TEXT, "index": rb"(?:%b|N)" % _INT, "length": b"(%b)" % _INT}
        kinds |= dict.fromkeys(("offsets", "sizes"), new_size)
        kinds["offset"] = b"(%b)" % _INT if cls == "_StorageInfo" else new_size
        fields = [_fetched(self.places[name]) + kinds[name] for name in order]
        return _fetched(self.classes[cls]) + rb"\)\x81\x94\}\x94\(" + b"".join(fields) + b"ub"

    def read_chunks(self, match: _Match, orders: Sequence[Sequence[str]], pos: int) -> int:
        """Read the pieces that begin at ``pos``; return the offset after them, or -1 if there are none."""
        data, memo, stack = self.data, self.memo, self.stack
        stop = len(stack) + _MAX_STACK // 2
        swapped = orders[0][0] != "offsets"
        end = -1
        found = match(data, pos)
        while found is not None and len(stack) < stop:
            one, get_one, other, get_other = found.groups()
            memo += (None, None)
            first = self.size(one, get_one)
            second = self.size(other, get_other)
            stack.append(self.chunk(second, first) if swapped else self.chunk(first, second))
            end = found.end()
            found = match(data, end)
        return end

    def size(self, numbers: bytes | None, get: bytes) -> tuple[int, ...]:
        """Return a ``torch.Size``: new, cached or from the memo."""
        if numbers is None:
            size = self.memo[int.from_bytes(get[1:], "little")]
            _require(type(size) is tuple)
            return size  # type: ignore[no-any-return]
        known = self.sizes.get(numbers)
        if known is None:
            known = self.sizes[numbers] = _size(numbers)
        self.memo += (None, None, known)
        return known

    def read_items(self, match: _Match, orders: Sequence[Sequence[str]], pos: int) -> int:
        """Read the items that begin at ``pos``; return the offset after them, or -1 if there are none."""
        data, memo, stack, ints = self.data, self.memo, self.stack, self.ints
        stop = len(stack) + _MAX_STACK // 2
        early = orders[0].index("fqn") < orders[0].index("offset")
        order = orders[1]
        widths = [3 if name == "relative_path" else 1 for name in order]
        file_at, at_at, length_at = (
            5 + sum(widths[: order.index(name)]) for name in ("relative_path", "offset", "length")
        )
        end = -1
        found = match(data, pos)
        while found is not None and len(stack) < stop:
            groups = found.groups()
            memo += (None, None)
            if early:
                name = self.text(*groups[0:3])
                offset = self.size(*groups[3:5])
            else:
                offset = self.size(*groups[0:2])
                name = self.text(*groups[2:5])
            memo += (None, None)
            file = self.text(*groups[file_at : file_at + 3])
            at, length = groups[at_at], groups[length_at]
            begin, size = ints.get(at), ints.get(length)
            if begin is None:
                begin = ints[at] = _count(at)
            if size is None:
                size = ints[length] = _count(length)
            stack += (Item(name, offset, file, begin, size), _TAKEN)
            end = found.end()
            found = match(data, end)
        return end

    def text(self, size: bytes | None, text: bytes, get: bytes) -> str:
        """Return a string: new, cached or from the memo."""
        if size is None:
            known = self.memo[int.from_bytes(get[1:], "little")]
            _require(type(known) is str)
            return known  # type: ignore[no-any-return]
        _require(len(text) == size[0])
        known = self.texts.get(text)
        if known is None:
            known = self.texts[text] = text.decode()
        self.memo.append(known)
        return known


_BUILDERS: Final[Mapping[str, Callable[[_Reader, Mapping[str, Any]], object]]] = {
    "ChunkStorageMetadata": _Reader.chunk_of,
    "MetadataIndex": _Reader.index_of,
    "_StorageInfo": _Reader.info_of,
}
_CONSTANTS: Final[Mapping[int, Callable[[], object]]] = {
    op.EMPTY_TUPLE: _Tuple,
    op.EMPTY_LIST: _List,
    op.EMPTY_DICT: _Pairs,
    op.NONE: lambda: None,
    op.NEWTRUE: lambda: True,
    op.NEWFALSE: lambda: False,
}
_INT_SIZES: Final = {op.BININT1: 1, op.BININT2: 2, op.BININT: 4}


def _within(data: bytes, pos: int, size: int) -> int:
    _require(pos + size <= len(data))
    return pos


def _named(module: str, name: str) -> _Name:
    """Return a global that torch writes in this file; decline any other."""
    full = f"{module}.{name}"
    _require("." not in name and (full in EXPECTED or (module == "torch" and name in BY_NAME)))
    return _Name(full)


def _joined_items(parts: list[Any]) -> list[Any]:
    """Return the entries of a dict; merge each key and value of ``storage_data`` into one Item."""
    for place in range(0, len(parts), 2):
        key, value = parts[place], parts[place + 1]
        if type(key) is _Index or type(value) is _Info:
            _require(type(key) is _Index and type(value) is _Info)
            parts[place : place + 2] = (Item(key.name, key.offset, *value), _TAKEN)
    return parts


def _fetched(ref: int) -> bytes:
    """Return an expression for the opcode that fetches this memo entry."""
    return re.escape(b"h%c" % ref if ref < 256 else b"j" + ref.to_bytes(4, "little"))


def _int(code: bytes) -> int:
    """Return the number of a BININT1, BININT2, BININT or LONG1 instruction."""
    if code[0] == op.LONG1:
        _require(len(code) == code[1] + 2 <= 20)
        return int.from_bytes(code[2:], "little", signed=True)
    return int.from_bytes(code[1:], "little", signed=code[0] == op.BININT)


def _count(code: bytes) -> int:
    """Return a number of bytes or elements; decline a number out of range."""
    if code[0] == op.LONG1:
        _require(len(code) == code[1] + 2)
    value = _int(code)
    _require(0 <= value < TOO_LARGE)
    return value


def _size(code: bytes) -> tuple[int, ...]:
    """Return the numbers in the instructions that build a tuple."""
    last = code[-1]
    numbers: list[int] = []
    pos, stop = int(code[:1] == b"("), len(code) - 1
    while pos < stop:
        part = _INT_PARTS.match(code, pos)
        _require(part is not None)
        assert part is not None
        end = part.end() + (code[pos + 1] if code[pos] == op.LONG1 else 0)
        numbers.append(_count(code[pos:end]))
        pos = end
    _require(pos == stop and (code[:1] == b"(" or len(numbers) == last - op.TUPLE1 + 1))
    return tuple(numbers)
