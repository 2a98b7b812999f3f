"""The ``.metadata`` of a DCP folder: which tensors and objects there are, and where their pieces lie.

It is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, which torch reads with plain ``pickle.load``. Here
it is read as a graph, and nothing in it is run. Sources: metadata.py and filesystem.py of torch/distributed/checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.text import counted, shown
from ...checkpoint.objects import attributes, callable_name, class_name, elements, mapped_name, mapping
from ...pickles.decode import decode
from ...pickles.nodes import Call, Global, Graph, Ref, children, non_ascii_strings
from ...pickles.opcodes import NEWOBJ
from .forms import metadata_flaws

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: Before torch 2.3 properties were those of sharded tensors, and before 2.0 all of it stood in another package.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_OLD: Final = "torch.distributed._shard.checkpoint"
_CLASSES: Final = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_FORMATS: Final = frozenset((f"{_MODULE}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING"))
_PLANNER: Final = "torch.distributed.checkpoint.planner"
#: Everything that torch's own writer names in a ``.metadata``, besides dtypes; with the plans of all ranks, which
#: Megatron-LM puts in (``all_local_plans`` in its dist_checkpointing/strategies/state_dict_saver.py).
EXPECTED: Final = _FORMATS.union(
    (
        *(f"{module}.{name}" for module in (_MODULE, f"{_OLD}.metadata") for name in _CLASSES),
        f"{_MODULE}.TensorProperties",
        f"{_SHARDED}.TensorProperties",
        f"{_MODULE}.StorageMeta",
        f"{_FILESYSTEM}._StorageInfo",
        f"{_OLD}.filesystem._StorageInfo",
        *(f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"pathlib.{name}" for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")),
        *(f"pathlib._local.{name}" for name in ("PosixPath", "WindowsPath")),
        "collections.OrderedDict",
    )
)
#: The fields without which an object of another class is none of these.
_FIELDS: Final = {
    "Metadata": frozenset(("state_dict_metadata", "storage_data")),
    "TensorStorageMetadata": frozenset(("properties", "size", "chunks")),
    "ChunkStorageMetadata": frozenset(("offsets", "sizes")),
    "MetadataIndex": frozenset(("fqn",)),
    "_StorageInfo": frozenset(("relative_path", "offset", "length")),
}
#: Numbers of pieces and shapes that are followed, for each node of the pickle.
_EACH: Final = 4
#: Steps from the root to a value: no state dict is nested so deep.
_DEPTH: Final = 200
_TOO_LARGE: Final = 1 << 62

#: Where a piece of a tensor lies, in elements: (offsets, sizes), one of each a dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Item(NamedTuple):
    """A stretch of a file, with an archive of its own: ``at`` and ``length`` in bytes of the file ``file``.

    ``offset`` is that of the piece within its tensor, None for an object. ``transforms`` name what was done to the
    bytes, such as compression.
    """

    name: str
    offset: tuple[int, ...] | None
    file: str
    at: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"{self.file} at byte {self.at:,}"


class Listed(NamedTuple):
    """What a name stands for: a tensor of ``shape`` in pieces, or with ``dtype`` None an object."""

    dtype: Dtype | None
    shape: tuple[int, ...] = ()
    chunks: tuple[Box, ...] = ()


class Metadata(NamedTuple):
    """``listed`` by name, in the order of the file; ``paths`` say where in the nested object each belongs; ``items`` is
    what the files hold; ``odd`` are remarks on what makes no sense; ``foreign`` are names that torch never writes
    there, ``relatives`` classes of other libraries with nothing but fields. ``graph`` is None once nobody needs it."""

    graph: Graph | None
    end: int
    listed: dict[str, Listed]
    paths: Mapping[str, tuple[str | int, ...]]
    items: list[Item]
    version: str
    odd: list[str]
    foreign: list[str]
    relatives: list[str]


def box_text(box: Box) -> str:
    """``[0:4, 8:16]``, "all" for a scalar."""
    return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*box))}]" if box[0] else "(a scalar)"


def foreign_globals(graph: Graph) -> tuple[list[str], list[str]]:
    """The names in a ``.metadata`` that torch does not write there, which reading it as torch does imports or calls;
    and of these apart the classes of objects that only have fields: a subclass, as Megatron-core has one."""
    names = {ref: mapped_name(node) for ref, node in enumerate(graph.nodes) if isinstance(node, Global)}
    calls = [node for node in graph.nodes if isinstance(node, Call)]
    known = {_GETATTR} if all(_is_member(graph, node) for node in calls) else set()
    strange = {
        ref: name
        for ref, name in names.items()
        if name not in EXPECTED and name not in known and name.removeprefix("torch.") not in BY_NAME
    }
    if not strange:
        return [], []
    used: set[Ref] = {graph.root}
    for node in graph.nodes:
        used.update(children(node)[1:] if isinstance(node, Call) and _is_bare(graph, node) else children(node))
    called = {name for ref, name in strange.items() if ref in used or not _is_class(name)}
    return sorted(called), sorted(set(strange.values()) - called)


def _is_bare(graph: Graph, call: Call) -> bool:
    """Is it an object that ``__new__`` made of a class alone?"""
    return call.op == NEWOBJ and graph.nodes[call.args] == ()


def _is_class(name: str) -> bool:
    """Is it named as a class of another library is? Of torch and Python all classes that belong here are known."""
    package, _, last = name.partition(".")
    return package not in _OURS and last.rpartition(".")[2].lstrip("_")[:1].isupper()


_OURS: Final = frozenset(("torch", *sys.stdlib_module_names))
#: How some versions of Python 3.11 pickle a member of an enumeration: by its name.
_GETATTR: Final = "builtins.getattr"


def _is_member(graph: Graph, call: Call) -> bool:
    """Is it no call of getattr, or one that gives a member of the enumeration of memory formats?"""
    if callable_name(graph, call.func) != _GETATTR:
        return True
    args = [graph.nodes[ref] for ref in elements(graph.nodes[call.args])]
    return len(args) == 2 and isinstance(args[0], Global) and mapped_name(args[0]) in _FORMATS and args[1] in _MEMBERS


_MEMBERS: Final = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def read_metadata(data: bytes, where: str) -> Metadata:
    """Read a ``.metadata``; raises MalformedError where it is none."""
    decoded = decode(data, where=where)
    reader = _Reader(decoded.graph, where)
    if decoded.memo > LIMITS.memo:
        reader.odd.append(f"a memo of {decoded.memo:,} entries, for which pickle runs out of memory")
    return reader.metadata(decoded.end)


class _Reader:
    """Reads the objects of the graph, equal ones once."""

    def __init__(self, graph: Graph, where: str) -> None:
        self.graph = graph
        self.where = where
        self.odd: list[str] = []
        self._classes: dict[Ref, str] = {}

    def metadata(self, end: int) -> Metadata:
        root = self._fields(self.graph.root, "Metadata")
        nodes = self.graph.nodes
        if root is None or "state_dict_metadata" not in root or nodes[root["state_dict_metadata"]] is None:
            what = f"it is a pickle of {class_name(self.graph, self.graph.root)}, not of {_MODULE}.Metadata"
            raise MalformedError(what, where=self.where)
        listed: dict[str, Listed] = {}
        read: dict[Ref, Listed | None] = {}
        # Each tensor has pieces of its own; one list of them under a million names would be gone through as often.
        left = _EACH * len(self.graph.nodes)
        for key, value in self._pairs(root.get("state_dict_metadata")):
            if value not in read:
                read[value] = self._listed(value)
            found = read[value]
            left -= (len(found.chunks) + 1) * (len(found.shape) + 1) if found else 0
            if found is None or left < 0:
                self._note(f"what it says of {shown(key)} makes no sense")
            else:
                listed[key] = found
        paths: dict[str, tuple[str | int, ...]] = {}
        for key, value in self._pairs(root.get("planner_data")):
            path = tuple(self._step(ref) for ref in elements(self.graph.nodes[value]))
            if not path or None in path or type(path[0]) is int or len(path) > _DEPTH:
                self._note(f"the place of {shown(key)} in the object makes no sense")
                continue
            paths[key] = path  # type: ignore[assignment]  # None was looked for
            if ".".join(map(str, path)) != key and key in listed:
                # create_default_local_load_plan: it asks for what the place is called.
                at = shown(".".join(map(str, path)))
                self._note(f"{shown(key)} belongs at {at}, under which torch looks for it: Missing key")
        items = []
        storage = root.get("storage_data")
        for number, (key_ref, value) in enumerate(mapping(self.graph, storage) or () if storage is not None else ()):
            item = self._item(key_ref, value)
            if item is None:
                self._note(f"entry {number:,} of storage_data makes no sense")
            else:
                items.append(item)
        meta = nodes[root["storage_meta"]] if "storage_meta" in root else None
        if meta is not None and not (isinstance(meta, Call) and meta.op == NEWOBJ):
            self._note("its storage_meta is not an object: torch sets load_id on it")
        if any(non_ascii_strings(self.graph)):
            self._note("a string of Python 2 that is not ASCII: UnicodeDecodeError")
        version = nodes[root["version"]] if "version" in root else ""
        version = version if isinstance(version, str) else ""
        foreign, relatives = foreign_globals(self.graph)
        for text in metadata_flaws(self.graph, EXPECTED):
            self._note(text)
        for offset, text in self.graph.oddities:
            self._note(f"at byte {offset:,}: {text}")
        return Metadata(self.graph, end, listed, paths, items, version, self.odd, foreign, relatives)

    def _note(self, text: str) -> None:
        if len(self.odd) < LIMITS.listed:
            self.odd.append(text)

    def _fields(self, ref: Ref, name: str) -> dict[str, Ref] | None:
        """The attributes of an object of the class ``name``, or of another class of that which has its fields; None for
        anything else."""
        node = self.graph.nodes[ref]
        if not isinstance(node, Call):
            return None
        cls = self._classes.get(node.func)
        if cls is None:
            cls = self._classes[node.func] = class_name(self.graph, ref)
        nodes = self.graph.nodes
        if cls in EXPECTED:
            if cls.rpartition(".")[2] != name:
                return None
        elif not cls.endswith(name) and not (name in _FIELDS and _is_bare(self.graph, node)):
            return None
        found = {str(nodes[key]): value for key, value in attributes(self.graph, node)}
        return found if cls in EXPECTED or found.keys() >= _FIELDS.get(name, frozenset()) else None

    def _pairs(self, ref: Ref | None) -> list[tuple[str, Ref]]:
        """The entries of a dict whose keys are strings; nothing for what is none."""
        pairs = mapping(self.graph, ref) if ref is not None else None
        if pairs is None and ref is not None and self.graph.nodes[ref] is not None:
            self._note(f"{class_name(self.graph, ref)} where a dict belongs")
        found = []
        for key_ref, value in pairs or ():
            key = self.graph.nodes[key_ref]
            if isinstance(key, str):
                found.append((key, value))
            else:
                self._note("a key is not a string")
        return found

    def _step(self, ref: Ref) -> str | int | None:
        node = self.graph.nodes[ref]
        if isinstance(node, str) or (type(node) is int and 0 <= node < _TOO_LARGE):
            return node
        return None

    def _size(self, ref: Ref | None) -> tuple[int, ...] | None:
        """The numbers of a ``torch.Size``."""
        if ref is None:
            return None
        node = self.graph.nodes[ref]
        if isinstance(node, Call):
            if callable_name(self.graph, node.func) != "torch.Size":
                return None
            args = elements(self.graph.nodes[node.args])
            node = self.graph.nodes[args[0]] if len(args) == 1 else ()
        elif not isinstance(node, tuple):
            return None
        numbers = [self.graph.nodes[part] for part in elements(node)]
        if len(numbers) > LIMITS.dimensions:
            return None
        found = tuple(number for number in numbers if type(number) is int and 0 <= number < _TOO_LARGE)
        return found if len(found) == len(numbers) else None

    def _listed(self, ref: Ref) -> Listed | None:
        if self._fields(ref, "BytesStorageMetadata") is not None:
            return Listed(None)
        fields = self._fields(ref, "TensorStorageMetadata")
        if fields is None:
            return None
        shape, dtype = self._size(fields.get("size")), self._dtype(fields.get("properties"))
        if shape is None or dtype is None or "chunks" not in fields:
            return None
        boxes = []
        for chunk in elements(self.graph.nodes[fields["chunks"]]):
            parts = self._fields(chunk, "ChunkStorageMetadata") or {}
            offsets, sizes = self._size(parts.get("offsets")), self._size(parts.get("sizes"))
            if offsets is None or sizes is None or len(offsets) != len(shape) or len(sizes) != len(shape):
                return None
            boxes.append((offsets, sizes))
        return Listed(dtype, shape, tuple(boxes))

    def _dtype(self, ref: Ref | None) -> Dtype | None:
        """The first of the five values that ``TensorProperties.__getstate__`` gives."""
        node = self.graph.nodes[ref] if ref is not None else None
        if not isinstance(node, Call) or not node.states:
            return None
        state = elements(self.graph.nodes[node.states[-1]])
        named = self.graph.nodes[state[0]] if state else None
        return BY_NAME.get(named.name) if isinstance(named, Global) and named.module == "torch" else None

    def _item(self, key: Ref, value: Ref) -> Item | None:
        index, info = self._fields(key, "MetadataIndex"), self._fields(value, "_StorageInfo")
        if index is None or info is None:
            return None
        nodes = self.graph.nodes
        name = nodes[index["fqn"]] if "fqn" in index else None
        there = "offset" in index and nodes[index["offset"]] is not None
        offset = self._size(index["offset"]) if there else None
        file, at, length = (
            nodes[info[part]] if part in info else None for part in ("relative_path", "offset", "length")
        )
        if not isinstance(name, str) or not isinstance(file, str) or (there and offset is None):
            return None
        if type(at) is not int or type(length) is not int or not 0 <= at < _TOO_LARGE or not 0 <= length < _TOO_LARGE:
            return None
        names = elements(nodes[info["transform_descriptors"]]) if "transform_descriptors" in info else ()
        return Item(name, offset, file, at, length, tuple(str(nodes[ref]) for ref in names))


def merged_metadata(found: list[Metadata]) -> Metadata:
    """Those that the ranks wrote each for itself, as one: of a piece that several have, the first counts."""
    if len(found) == 1:
        return found[0]
    listed: dict[str, Listed] = {}
    boxes: dict[str, dict[Box, None]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    odd: list[str] = []
    for one in found:
        odd += one.odd
        for name, path in one.paths.items():
            paths.setdefault(name, path)
        for name, value in one.listed.items():
            known = listed.setdefault(name, value)
            if (known.dtype, known.shape) != (value.dtype, value.shape):
                odd.append(f"the ranks do not agree on the dtype and shape of {shown(name)}")
            else:
                boxes.setdefault(name, {}).update(dict.fromkeys(value.chunks))
        for item in one.items:
            items.setdefault((item.name, item.offset), item)
    listed = {name: value._replace(chunks=tuple(boxes[name])) for name, value in listed.items()}
    words = f"{counted(len(found), 'rank')}, each with its own metadata"
    foreign = [name for one in found for name in one.foreign]
    relatives = [name for one in found for name in one.relatives]
    return Metadata(None, 0, listed, paths, list(items.values()), words, odd, foreign, relatives)
