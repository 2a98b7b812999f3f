"""The ``.metadata`` file of a DCP folder: its tensors and objects, and where their pieces are.

It is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, which torch loads with plain ``pickle.load``. It
is read as a graph here, and nothing in it is executed. Few functions write this file, so any deviation from their
output is reported. Sources: metadata.py and filesystem.py of torch/distributed/checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.standard_library import STANDARD_LIBRARY
from ...base.text import pluralize, quoted
from ...checkpoint.objects import attributes, callable_name, class_name, initial_pairs, list_items, mapped_name, mapping
from ...pickles.decode import decode
from ...pickles.nodes import (
    Buffer,
    Call,
    Dict,
    Extension,
    Global,
    Graph,
    List,
    Node,
    Persistent,
    Ref,
    children,
    non_ascii_strings,
)
from ...pickles.opcodes import NEWOBJ, REDUCE
from ..folders import TOO_LARGE
from ..pieces.boxes import Box

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: Before torch 2.3, TensorProperties came from the sharded tensor package. Before 2.0, all classes were elsewhere.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_OLD: Final = "torch.distributed._shard.checkpoint"
_CLASSES: Final = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_FORMATS: Final = frozenset((f"{_MODULE}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING"))
_FORMAT_MEMBERS: Final = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_PLANNER: Final = "torch.distributed.checkpoint.planner"
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
#: All globals that torch's writer puts in a ``.metadata``, except dtypes. Includes the plans of all ranks, which
#: Megatron-LM adds (``all_local_plans`` in its dist_checkpointing/strategies/state_dict_saver.py).
EXPECTED: Final = _FORMATS.union(
    (
        *(f"{module}.{name}" for module in (_MODULE, f"{_OLD}.metadata") for name in _CLASSES),
        *(f"{module}.TensorProperties" for module in (_MODULE, _SHARDED)),
        f"{_MODULE}.StorageMeta",
        *(f"{module}._StorageInfo" for module in (_FILESYSTEM, f"{_OLD}.filesystem")),
        *(f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
        *(f"pathlib.{name}" for name in _PATHS),
        *(f"pathlib._local.{name}" for name in _PATHS[:2]),
    )
)
#: Another library's class counts as one of these if its objects have these fields.
_FIELDS: Final = {
    "Metadata": frozenset(("state_dict_metadata", "storage_data")),
    "TensorStorageMetadata": frozenset(("properties", "size", "chunks")),
    "ChunkStorageMetadata": frozenset(("offsets", "sizes")),
    "MetadataIndex": frozenset(("fqn",)),
    "_StorageInfo": frozenset(("relative_path", "offset", "length")),
}
#: The most piece and shape numbers that are read, per pickle node: a hostile file may share one list a million times.
_NUMBERS_PER_NODE: Final = 4
#: The most steps from the root to a value: no real state dict is nested that deep.
MAX_DEPTH: Final = 200


class Item(NamedTuple):
    """A file range that holds an archive of its own: ``length`` bytes from byte ``at`` of ``file``.

    ``offset`` is the piece's offset in its tensor, None for an object. ``transforms`` names the extensions that changed
    the bytes, such as compression.
    """

    name: str
    offset: tuple[int, ...] | None
    file: str
    at: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The place of the item, for messages."""
        return f"{self.file} at byte {self.at:,}"


class ValueMetadata(NamedTuple):
    """A tensor of ``shape`` in pieces, or an object with ``dtype`` None."""

    dtype: Dtype | None
    shape: tuple[int, ...] = ()
    chunks: tuple[Box, ...] = ()


class Metadata(NamedTuple):
    """The content of a ``.metadata`` file.

    - ``values``: tensors and objects, in file order; ``paths``: their places in the nested object.
    - ``items``: the content of the data files.
    - ``flaws``: messages about invalid content.
    - ``foreign``: globals that torch never writes there; ``subclasses``: other libraries' classes with fields only.
    - ``copies``: pairs of items, where two ranks saved the same piece; the first item counts.
    - ``graph``: None once it is no longer needed.
    """

    graph: Graph | None
    end: int
    values: dict[str, ValueMetadata]
    paths: Mapping[str, tuple[str | int, ...]]
    items: list[Item]
    version: str
    flaws: list[str]
    foreign: list[str]
    subclasses: list[str]
    copies: Sequence[tuple[Item, Item]] = ()


def foreign_globals(graph: Graph) -> tuple[list[str], list[str]]:
    """Return the unexpected globals of a ``.metadata`` in two lists: imported or called by loading, and harmless.

    Harmless are other libraries' classes whose objects only have fields, such as Megatron-core's subclass.
    """
    names = {ref: mapped_name(node) for ref, node in enumerate(graph.nodes) if isinstance(node, Global)}
    calls = [node for node in graph.nodes if isinstance(node, Call)]
    known = EXPECTED | ({_GETATTR} if all(_is_format_member(graph, node) for node in calls) else set())
    strange = {
        ref: name for ref, name in names.items() if name not in known and name.removeprefix("torch.") not in BY_NAME
    }
    if not strange:
        return [], []
    used: set[Ref] = {graph.root}
    for node in graph.nodes:
        used.update(children(node)[1:] if isinstance(node, Call) and _is_bare(graph, node) else children(node))
    called = {name for ref, name in strange.items() if ref in used or not _is_foreign_class(name)}
    return sorted(called), sorted(set(strange.values()) - called)


def _is_bare(graph: Graph, call: Call) -> bool:
    """Return whether a call is ``__new__`` of a class without arguments."""
    return call.op == NEWOBJ and graph.nodes[call.args] == ()


_OURS: Final = STANDARD_LIBRARY | {"torch"}
#: Some versions of Python 3.11 pickle an enum member by name, with getattr.
_GETATTR: Final = "builtins.getattr"


def _is_foreign_class(name: str) -> bool:
    """Return whether a name looks like another library's class. All classes of torch and Python are known."""
    package, _, last = name.partition(".")
    return package not in _OURS and last.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_format_member(graph: Graph, call: Call) -> bool:
    """Return False for a call of getattr, unless it returns a member of the memory format enum."""
    if callable_name(graph, call.func) != _GETATTR:
        return True
    args = _values(graph, call.args)
    if len(args) != 2 or not isinstance(args[0], Global):
        return False
    return mapped_name(args[0]) in _FORMATS and args[1] in _FORMAT_MEMBERS


def _values(graph: Graph, ref: Ref) -> list[object]:
    return [graph.nodes[item] for item in list_items(graph.nodes[ref])]


def pickle_flaws(graph: Graph) -> Iterator[str]:
    """Yield messages about everything that makes ``pickle.load`` fail, in time linear in the graph.

    Other libraries' names are not checked.
    """
    names: dict[Ref, str] = {}
    for node in graph.nodes:
        if isinstance(node, Persistent | Extension | Buffer):
            yield f"a {type(node).__name__.lower()} object, which pickle.load cannot make"
        elif isinstance(node, Global):
            if node.filling is not None:
                yield f"{mapped_name(node)} is filled as an object is"
            if node.module == "__builtin__" and graph.style.protocol > 2:
                yield f"a module of Python 2, {node.module}"
        elif isinstance(node, Call):
            name = names.get(node.func)
            if name is None:
                name = names[node.func] = callable_name(graph, node.func)
            if type(graph.nodes[node.args]) is not tuple:
                yield f"arguments of {name or 'a call'} that are not a tuple"
            if node.op == NEWOBJ and name.startswith("torch.") and name[len("torch.") :] in BY_NAME:
                yield f"{name} as a class"
            test = _TESTS.get(name.rpartition(".")[2])
            if name in EXPECTED and test is not None and not test(graph, node):
                yield f"a {name.rpartition('.')[2]} that torch cannot make"


def _is_unfilled(graph: Graph, node: Call) -> bool:
    return _is_bare(graph, node) and node.kwargs < 0 and not (node.items or node.pairs)


def _has_fields(graph: Graph, node: Call) -> bool:
    """Return whether an object has only fields: a class without arguments, then dicts with string keys as state."""
    states = [graph.nodes[ref] for ref in node.states]
    return _is_unfilled(graph, node) and all(
        isinstance(state, Dict) and all(type(graph.nodes[key]) is str for key in state.pairs[::2]) for state in states
    )


def _is_properties(graph: Graph, node: Call) -> bool:
    """Return whether ``TensorProperties.__setstate__`` accepts the state.

    It takes five values (six since torch 2.15, with strides); the fourth is an enum member.
    """
    for state in node.states:
        parts = graph.nodes[state]
        if not isinstance(parts, tuple | List) or len(list_items(parts)) not in (5, 6):
            return False
        encoding = graph.nodes[list_items(parts)[3]]
        name = callable_name(graph, encoding.func) if isinstance(encoding, Call) else ""
        if not name.endswith("MEM_FORMAT_ENCODING") and name != _GETATTR:
            return False
    return _is_unfilled(graph, node)


def _arguments(graph: Graph, node: Call) -> list[object] | None:
    """Return the arguments of a plain function call; None for any other call, or if the result is filled afterwards."""
    return None if node.op != REDUCE or node.filling is not None else _values(graph, node.args)


_Test = Callable[[Graph, Call], bool]


def _takes(values: Collection[object]) -> _Test:
    """Return a test for calls with one of these strings or integers as the only argument."""

    def test(graph: Graph, node: Call) -> bool:
        args = _arguments(graph, node)
        return args is not None and len(args) == 1 and type(args[0]) in (str, int) and args[0] in values

    return test


def _is_path(graph: Graph, node: Call) -> bool:
    args = _arguments(graph, node)
    return args is not None and all(type(part) is str for part in args)


def _is_size(graph: Graph, node: Call) -> bool:
    args = _arguments(graph, node)
    if args is None or len(args) != 1 or not isinstance(args[0], tuple | List):
        return args == []
    numbers = [graph.nodes[ref] for ref in list_items(args[0])]
    return all(type(number) is int and abs(number) < 1 << 63 for number in numbers)


def is_plain_ordered_dict(graph: Graph, node: Call) -> bool:
    """Return whether an OrderedDict call has the form that pickle writes, without attributes."""
    return initial_pairs(graph, node) is not None and not node.items and not node.states


LAYOUTS: Final = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
)
_TESTS: Final[dict[str, _Test]] = {
    **dict.fromkeys(_CLASSES, _has_fields),
    **dict.fromkeys(("StorageMeta", "_StorageInfo", "SavePlan", "WriteItem", "TensorWriteData"), _has_fields),
    "TensorProperties": _is_properties,
    "_MEM_FORMAT_ENCODING": _takes(range(3)),
    "MEM_FORMAT_ENCODING": _takes(range(3)),
    "WriteItemType": _takes(range(1, 4)),
    "_get_layout": _takes(LAYOUTS),
    **dict.fromkeys(_PATHS, _is_path),
    "Size": _is_size,
    "OrderedDict": is_plain_ordered_dict,
}


def read_metadata(data: bytes, where: str) -> Metadata:
    """Read a ``.metadata`` file; raise MalformedError if it is anything else."""
    decoded = decode(data, where=where)
    reader = _MetadataReader(decoded.graph, where)
    if decoded.memo > LIMITS.memo:
        reader.flaws.append(f"a memo of {decoded.memo:,} entries, for which pickle runs out of memory")
    return reader.metadata(decoded.end)


class _MetadataReader:
    """Read the objects of the graph; read shared ones once."""

    def __init__(self, graph: Graph, where: str) -> None:
        self.graph = graph
        self.where = where
        self.flaws: list[str] = []
        self._classes: dict[Ref, str] = {}

    def metadata(self, end: int) -> Metadata:
        root = self._fields(self.graph.root, "Metadata") or {}
        if self._value(root, "state_dict_metadata") is None:
            what = f"it is a pickle of {class_name(self.graph, self.graph.root)}, not of {_MODULE}.Metadata"
            raise MalformedError(what, where=self.where)
        values = self._read_values(root["state_dict_metadata"])
        paths = self._read_paths(root.get("planner_data"), values)
        items = self._read_items(root.get("storage_data"))
        meta = self._value(root, "storage_meta")
        if meta is not None and not (isinstance(meta, Call) and meta.op == NEWOBJ):
            self._note("its storage_meta is not an object: torch sets load_id on it")
        if any(non_ascii_strings(self.graph)):
            self._note("a string of Python 2 that is not ASCII: UnicodeDecodeError")
        for text in pickle_flaws(self.graph):
            self._note(text)
        for offset, text in self.graph.oddities:
            self._note(f"at byte {offset:,}: {text}")
        foreign, subclasses = foreign_globals(self.graph)
        version = self._value(root, "version")
        version = version if isinstance(version, str) else ""
        return Metadata(self.graph, end, values, paths, items, version, self.flaws, foreign, subclasses)

    def _value(self, fields: Mapping[str, Ref], name: str) -> Node:
        """Return the value of a field, or None if it is missing."""
        return self.graph.nodes[fields[name]] if name in fields else None

    def _read_values(self, ref: Ref | None) -> dict[str, ValueMetadata]:
        values: dict[str, ValueMetadata] = {}
        known: dict[Ref, ValueMetadata | None] = {}
        # Each tensor lists its own pieces. A list shared by a million names would be visited a million times.
        left = _NUMBERS_PER_NODE * len(self.graph.nodes)
        for key, value_ref in self._pairs(ref):
            if value_ref not in known:
                known[value_ref] = self._value_metadata(value_ref)
            value = known[value_ref]
            left -= (len(value.chunks) + 1) * (len(value.shape) + 1) if value else 0
            if value is None or left < 0:
                self._note(f"the entry of {quoted(key)} is invalid")
            else:
                values[key] = value
        return values

    def _read_paths(self, ref: Ref | None, values: Mapping[str, ValueMetadata]) -> dict[str, tuple[str | int, ...]]:
        paths: dict[str, tuple[str | int, ...]] = {}
        for key, value in self._pairs(ref):
            steps = _values(self.graph, value)
            path = tuple(step for step in steps if isinstance(step, str) or _is_count(step))
            if not path or len(path) < len(steps) or type(path[0]) is int or len(path) > MAX_DEPTH:
                self._note(f"the path of {quoted(key)} in the object is invalid")
                continue
            paths[key] = path  # type: ignore[assignment]  # _is_count takes int alone
            name = ".".join(map(str, path))
            if name != key and key in values:
                # create_default_local_load_plan looks up the name that the path spells.
                self._note(f"{quoted(key)} belongs at {quoted(name)}, under which torch looks for it: Missing key")
        # DefaultSavePlanner writes the path of every value. A damaged key would move its value to the root.
        without = next((key for key in values if key not in paths), None) if paths else None
        unknown = next((key for key in paths if key not in values), None)
        if without is not None and unknown is not None:
            self._note(f"{quoted(without)} has no path in the object, and {quoted(unknown)} has one but is no value")
        return paths

    def _read_items(self, ref: Ref | None) -> list[Item]:
        items = []
        for number, (key, value) in enumerate(mapping(self.graph, ref) or () if ref is not None else ()):
            item = self._item(key, value)
            if item is None:
                self._note(f"entry {number:,} of storage_data is invalid")
            else:
                items.append(item)
        return items

    def _note(self, text: str) -> None:
        if len(self.flaws) < LIMITS.listed:
            self.flaws.append(text)

    def _fields(self, ref: Ref, name: str) -> dict[str, Ref] | None:
        """Return the fields of an object of class ``name`` or of another library's similar class; None for other
        nodes."""
        nodes = self.graph.nodes
        node = nodes[ref]
        if not isinstance(node, Call):
            return None
        cls = self._classes.get(node.func)
        if cls is None:
            cls = self._classes[node.func] = class_name(self.graph, ref)
        if cls in EXPECTED:
            if cls.rpartition(".")[2] != name:
                return None
        elif not cls.endswith(name) and not (name in _FIELDS and _is_bare(self.graph, node)):
            return None
        fields = {str(nodes[key]): value for key, value in attributes(self.graph, node)}
        return fields if cls in EXPECTED or fields.keys() >= _FIELDS.get(name, frozenset()) else None

    def _pairs(self, ref: Ref | None) -> list[tuple[str, Ref]]:
        """Return the entries of a dict with string keys; report anything else."""
        pairs = mapping(self.graph, ref) if ref is not None else None
        if pairs is None and ref is not None and self.graph.nodes[ref] is not None:
            self._note(f"{class_name(self.graph, ref)} where a dict belongs")
        entries = []
        for key_ref, value in pairs or ():
            key = self.graph.nodes[key_ref]
            if isinstance(key, str):
                entries.append((key, value))
            else:
                self._note("a key is not a string")
        return entries

    def _size(self, ref: Ref | None) -> tuple[int, ...] | None:
        """Return the numbers of a ``torch.Size``, or None if it is not one."""
        node = self.graph.nodes[ref] if ref is not None else None
        if isinstance(node, Call):
            if callable_name(self.graph, node.func) != "torch.Size":
                return None
            args = list_items(self.graph.nodes[node.args])
            node = self.graph.nodes[args[0]] if len(args) == 1 else ()
        elif not isinstance(node, tuple):
            return None
        numbers = [self.graph.nodes[part] for part in list_items(node)]
        if len(numbers) > LIMITS.dimensions or not all(map(_is_count, numbers)):
            return None
        return tuple(numbers)  # type: ignore[arg-type]  # _is_count takes int alone

    def _value_metadata(self, ref: Ref) -> ValueMetadata | None:
        if self._fields(ref, "BytesStorageMetadata") is not None:
            return ValueMetadata(None)
        fields = self._fields(ref, "TensorStorageMetadata")
        if fields is None:
            return None
        shape, dtype = self._size(fields.get("size")), self._dtype(fields.get("properties"))
        if shape is None or dtype is None or "chunks" not in fields:
            return None
        boxes = []
        for chunk in list_items(self.graph.nodes[fields["chunks"]]):
            parts = self._fields(chunk, "ChunkStorageMetadata") or {}
            offsets, sizes = self._size(parts.get("offsets")), self._size(parts.get("sizes"))
            if offsets is None or sizes is None or len(offsets) != len(shape) or len(sizes) != len(shape):
                return None
            boxes.append((offsets, sizes))
        return ValueMetadata(dtype, shape, tuple(boxes))

    def _dtype(self, ref: Ref | None) -> Dtype | None:
        """Return the dtype, which ``TensorProperties.__getstate__`` writes first; None if it is unknown."""
        node = self.graph.nodes[ref] if ref is not None else None
        if not isinstance(node, Call) or not node.states:
            return None
        state = _values(self.graph, node.states[-1])
        named = state[0] if state else None
        return BY_NAME.get(named.name) if isinstance(named, Global) and named.module == "torch" else None

    def _item(self, key: Ref, value: Ref) -> Item | None:
        index, info = self._fields(key, "MetadataIndex"), self._fields(value, "_StorageInfo")
        if index is None or info is None:
            return None
        name = self._value(index, "fqn")
        is_piece = self._value(index, "offset") is not None
        offset = self._size(index["offset"]) if is_piece else None
        file, at, length = (self._value(info, field) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not isinstance(file, str) or (is_piece and offset is None):
            return None
        if type(at) is not int or type(length) is not int or not (_is_count(at) and _is_count(length)):
            return None
        names = list_items(self._value(info, "transform_descriptors"))
        return Item(name, offset, file, at, length, tuple(str(self.graph.nodes[ref]) for ref in names))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < TOO_LARGE


def merge_metadata(ranks: list[Metadata]) -> Metadata:
    """Merge metadata files that each rank wrote for itself. If several ranks have the same piece, the first one
    counts."""
    if len(ranks) == 1:
        return ranks[0]
    values: dict[str, ValueMetadata] = {}
    boxes: dict[str, dict[Box, None]] = {}
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    flaws: list[str] = []
    copies: list[tuple[Item, Item]] = []
    for rank in ranks:
        flaws += rank.flaws
        for name, value in rank.values.items():
            known = values.setdefault(name, value)
            if (known.dtype, known.shape) != (value.dtype, value.shape):
                flaws.append(f"the ranks do not agree on the dtype and shape of {quoted(name)}")
            else:
                boxes.setdefault(name, {}).update(dict.fromkeys(value.chunks))
        for item in rank.items:
            first = items.setdefault((item.name, item.offset), item)
            copies += [(first, item)] if first is not item and item.offset is not None else []
    values = {name: value._replace(chunks=tuple(boxes[name])) for name, value in values.items()}
    paths = {name: path for rank in reversed(ranks) for name, path in rank.paths.items()}
    version = f"{pluralize(len(ranks), 'rank')}, each with its own metadata"
    foreign = [name for rank in ranks for name in rank.foreign]
    subclasses = [name for rank in ranks for name in rank.subclasses]
    return Metadata(None, 0, values, paths, list(items.values()), version, flaws, foreign, subclasses, copies)


def placed(read: Metadata, folder: str, *, apart: bool) -> Metadata:
    """Return the metadata of a subfolder with paths from its parent; ``apart`` puts its values under the folder's
    name."""
    items = [item._replace(file=f"{folder}/{item.file}") for item in read.items]
    if not apart:
        return read._replace(items=items)

    def name_of(name: str) -> str:
        return f"{folder}.{name}"

    return read._replace(
        values={name_of(name): value for name, value in read.values.items()},
        paths={name_of(name): (folder, *read.paths.get(name, (name,))) for name in read.values},
        items=[item._replace(name=name_of(item.name)) for item in items],
    )


def united(parts: Sequence[Metadata]) -> Metadata:
    """Merge the metadata of several folders with distinct names."""
    first = parts[0]
    return first._replace(
        values={name: value for part in parts for name, value in part.values.items()},
        paths={name: path for part in parts for name, path in part.paths.items()},
        items=[item for part in parts for item in part.items],
        flaws=[flaw for part in parts for flaw in part.flaws],
        foreign=[name for part in parts for name in part.foreign],
        subclasses=[name for part in parts for name in part.subclasses],
    )
