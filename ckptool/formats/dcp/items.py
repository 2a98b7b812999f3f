"""One item of a ``.distcp`` file: an archive of ``torch.save`` with one object, somewhere within the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError, NotACheckpointError, PickleError
from ...base.text import join_limited
from ...checkpoint.container import AMBIGUOUS, DAMAGED
from ...checkpoint.objects import callable_name, elements, mapped_name
from ...checkpoint.tensors import ID_PARTS, Tensor, TensorReader, contiguous_strides, extent
from ...files.sources import FileSource, SliceSource, Source, Span
from ...files.zips.reader import Archive, Record, read_archive
from ...pickles.nodes import Call, Dict, Global, Graph, Node, Persistent, Ref, non_utf8_strings
from ...pickles.opcodes import NAMES, REDUCE
from ..torch.zip_reader import TorchZip, read_records
from .chunks import RowSource, SignSource
from .metadata import Item, is_ordered_dict


class OpenedItem(NamedTuple):
    """An item, and the file of torch.save that it is, with all checks of a single item done."""

    item: Item
    zip: TorchZip

    @property
    def archive(self) -> Archive:
        """The records of its archive."""
        return self.zip.archive

    @property
    def graph(self) -> Graph:
        """The object in it."""
        return self.zip.graph


#: Bytes of an item that is read in one go: most have some hundreds besides their tensor.
_SMALL: Final = 1 << 16


class _BufferedItem(SliceSource):
    """A stretch of a file in memory."""

    def __init__(self, item: Item, file: FileSource) -> None:
        super().__init__(file, item.at, item.length, item.place)
        self._data = file.read(item.at, self.size)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + max(size, 0)]


def item_source(item: Item, file: FileSource) -> SliceSource:
    """Return the bytes of an item, small ones read at once."""
    if item.length <= _SMALL:
        return _BufferedItem(item, file)
    return SliceSource(file, item.at, item.length, item.place)


def open_item(item: Item, file: FileSource) -> OpenedItem:
    """Open an item.

    Raises MalformedError, which names it, where it is not an archive that torch.load takes and all readers read alike.
    """
    try:
        opened = OpenedItem(item, read_records(read_archive(item_source(item, file))))
        for problem in opened.zip.problems:
            if problem.refused or problem.code in AMBIGUOUS or problem.code == DAMAGED:
                raise MalformedError(problem.message, where=item.place)
        flaw = _load_flaw(opened.graph)
        if flaw:
            raise MalformedError(f"torch does not load it: {flaw}", where=item.place)
        return opened
    except (MalformedError, NotACheckpointError) as error:
        why = MalformedError.__str__(error) if isinstance(error, PickleError) else error.what
        what = f"{item.name!r}: no archive of torch.save is where .metadata says ({why})"
        raise MalformedError(what, path=file.name, where=item.place) from error


def storage_span(opened: OpenedItem, key: str) -> tuple[Span, Record]:
    """Return where the bytes of a storage are in the file, and their record; raises MalformedError."""
    record = opened.archive.find(f"data/{key}")
    if record is None or record.method != 0:
        what = f"{opened.item.name!r}: the bytes of its storage are {'compressed' if record else 'missing'}"
        raise MalformedError(what, where=opened.item.place)
    span = opened.archive.payload(record)
    assert isinstance(span.source, SliceSource)
    return Span(span.source.source, span.source.offset + span.offset, span.size), record


def record_crc(opened: OpenedItem, span: Span) -> int | None:
    """Return the CRC-32 on record of a span of the file that is one whole record of the item; None for any other."""
    for record in opened.archive.records:
        if record.size == span.size and record.size and not record.method:
            offset = opened.item.at + opened.archive.payload(record).offset
            if isinstance(span.source, FileSource) and offset == span.offset:
                return record.crc
    return None


def tensor_rows(opened: OpenedItem, dtype: Dtype, shape: tuple[int, ...]) -> tuple[Source, int]:
    """Return the elements of the tensor in an item, row by row: (source, offset in bytes).

    Raises MalformedError where it is not a tensor of this dtype and shape, or its bytes are missing.
    """
    item = opened.item

    def malformed(what: str) -> MalformedError:
        return MalformedError(f"{item.name!r}: {what}", where=item.place)

    reader = TensorReader(opened.graph)
    tensor = reader.tensor(opened.graph.root)
    if tensor is None or tensor.kind != "dense":
        raise malformed(".metadata lists a tensor, and the item does not hold a plain one")
    if (tensor.dtype, tensor.shape) != (dtype.name, shape):
        wanted, actual = _tensor_text(dtype.name, shape), _tensor_text(tensor.dtype, tensor.shape)
        raise malformed(f".metadata lists {wanted}, and the item holds {actual}")
    flaw = _tensor_flaw(opened.graph)
    if flaw:
        raise malformed(f"torch does not load it: {flaw}")
    if 0 in shape:
        return opened.archive.source, 0
    span, _ = storage_span(opened, tensor.storage)
    storage = reader.storages[tensor.storage]
    if storage.nbytes != span.size:
        raise malformed(f"its storage has {span.size:,} bytes, and should have {storage.nbytes:,}")
    if tensor.requires_grad and not (dtype.floating or dtype.name.startswith("complex")):
        raise malformed(f"{dtype.name} cannot require gradients")
    if min(tensor.stride, default=0) < 0 or tensor.offset < 0 or len(tensor.stride) != len(shape):
        raise malformed("its strides are invalid")
    if (tensor.offset + extent(shape, tensor.stride)) * dtype.itemsize > span.size:
        raise malformed("the tensor reaches beyond its storage")
    begin = span.offset + tensor.offset * dtype.itemsize
    rows: tuple[Source, int] = span.source, begin
    if not _is_contiguous(tensor):
        rows = RowSource(span.source, begin, shape, tensor.stride, dtype.itemsize, item.place), 0
    flags = _lazy_flags(opened.graph)
    if not flags:
        return rows
    signs = _sign_bits(dtype, flags)
    if not signs:
        raise malformed(f"{dtype.name} with the flag {join_limited(sorted(flags))}")
    return SignSource(*rows, tensor.numel * dtype.itemsize, signs), 0


def _sign_bits(dtype: Dtype, flags: set[str]) -> bytes:
    """Return the sign bits of one element that the flags flip; b"" where the dtype cannot have the flags."""
    parts = 2 if dtype.name.startswith("complex") else 1
    if (parts == 1 and ("conj" in flags or not dtype.floating)) or dtype.packed > 1:
        return b""
    width = dtype.itemsize // parts
    sign, same = b"\0" * (width - 1) + b"\x80", b"\0" * width
    real, imaginary = "neg" in flags, ("neg" in flags) != ("conj" in flags)
    return (sign if real else same) + (sign if imaginary else same) * (parts - 1)


def _is_contiguous(tensor: Tensor) -> bool:
    strides = contiguous_strides(tensor.shape)
    return all(size == 1 or step == wanted for size, step, wanted in zip(tensor.shape, tensor.stride, strides))


def _tensor_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


#: The functions that make a tensor (torch/_utils.py), and their least number of arguments: one more is metadata.
_REBUILDERS: Final = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
_DICT: Final = "collections.OrderedDict"
#: Flags in the metadata of a tensor: what torch does to its elements when it reads them.
_LAZY: Final = ("conj", "neg")
#: Types of their values, which are converted to bool.
_FLAGS: Final = (bool, int, float, type(None))


def _load_flaw(graph: Graph) -> str:
    """Return why ``torch.load`` fails at the pickle of an item, even over values that it drops, or ""."""
    nodes = graph.nodes
    for node in nodes:
        if type(node) is Persistent:
            pid = nodes[node.pid]
            if type(pid) is not tuple or len(pid) != ID_PARTS or nodes[pid[0]] not in ("storage", b"storage"):
                return "it describes a storage in a way that torch cannot read"
    return "a byte string of Python 2 in it is not UTF-8" if any(True for _ in non_utf8_strings(graph)) else ""


def _tensor_flaw(graph: Graph) -> str:
    """Return why ``torch.load(weights_only=True)`` refuses an item that should be a plain tensor, "" where it does not.

    DCP loads every tensor so, and its writer saves only detached ones.
    """
    if graph.refused:
        return f"it has the opcode {NAMES[next(iter(graph.refused))]}"
    for ref, node in enumerate(graph.nodes):
        if isinstance(node, Global):
            name = mapped_name(node)
            if name not in (*_REBUILDERS, _DICT) and not _is_torch_type(name):
                return f"it names {name}"
            if node.filling is not None:
                return f"{name} is filled as an object is"
        elif isinstance(node, Persistent) and node.filling is not None:
            return "its storage is filled as an object is"
        elif isinstance(node, Call) and ref != graph.root:
            name = callable_name(graph, node.func)
            if name != _DICT or not is_ordered_dict(graph, node):
                return f"it calls {name}"
    root = graph.nodes[graph.root]
    least = _REBUILDERS.get(callable_name(graph, root.func)) if isinstance(root, Call) and root.op == REDUCE else None
    if not isinstance(root, Call) or least is None:
        return "it is not written as torch.save writes a tensor"
    if root.filling is not None:
        return "the tensor is filled as an object is"
    args = _root_arguments(graph)
    if not least <= len(args) <= least + 1:
        return f"its tensor is made of {len(args)} arguments"
    if type(args[4]) is not bool:
        return "its requires_grad is not a bool"
    if not isinstance(args[5], Call | Dict) or args[5].pairs:
        return "its hooks are not an empty dict"
    if len(args) > least:
        flags = args[least]
        if not isinstance(flags, Dict):
            return "its metadata is not a dict"
        if not all(graph.nodes[name] in _LAZY and type(graph.nodes[flag]) in _FLAGS for name, flag in _entries(flags)):
            return "its metadata is more than the flags conj and neg"
    return ""


def _root_arguments(graph: Graph) -> list[Node]:
    root = graph.nodes[graph.root]
    return [graph.nodes[ref] for ref in elements(graph.nodes[root.args])] if isinstance(root, Call) else []


def _lazy_flags(graph: Graph) -> set[str]:
    """Return which of "conj" and "neg" the metadata of an item without flaws has, whatever their values."""
    args = _root_arguments(graph)
    flags = args[-1] if len(args) > 6 else None
    return {str(graph.nodes[name]) for name, _ in _entries(flags)} if isinstance(flags, Dict) else set()


def _entries(node: Dict) -> Iterator[tuple[Ref, Ref]]:
    return zip(node.pairs[::2], node.pairs[1::2])


def _is_torch_type(name: str) -> bool:
    """Return whether a name is a class of storages or a dtype."""
    return name.startswith("torch.") and (name.endswith("Storage") or name.removeprefix("torch.") in BY_NAME)
