"""One item of a ``.distcp`` file: an archive of ``torch.save`` with one object, somewhere within the file."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...base.dtypes import Dtype
from ...base.errors import MalformedError, NotACheckpointError, PickleError
from ...base.text import listed
from ...checkpoint.container import AMBIGUOUS, DAMAGED
from ...checkpoint.tensors import Tensor, TensorReader, contiguous_strides, extent
from ...files.sources import FileSource, SliceSource, Source, Span
from ...files.zips.reader import Archive, Record, read_archive
from ...pickles.nodes import Graph
from ..torch.zip_reader import TorchZip, read_records
from .chunks import RowSource, SignSource
from .forms import item_flaw, lazy_bits, tensor_flaw
from .metadata import Item


class Opened(NamedTuple):
    """An item, and the file of torch.save that it is: all that is looked at in one alone is looked at here."""

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


class _Held(SliceSource):
    """A stretch of a file that was read already."""

    def __init__(self, item: Item, file: FileSource) -> None:
        super().__init__(file, item.at, item.length, item.place)
        self._data = file.read(item.at, self.size)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + max(size, 0)]


def item_source(item: Item, file: FileSource) -> SliceSource:
    """The bytes of an item, a small one read already."""
    if item.length <= _SMALL:
        return _Held(item, file)
    return SliceSource(file, item.at, item.length, item.place)


def open_item(item: Item, file: FileSource) -> Opened:
    """Open an item; raises MalformedError, which names it, where it is no archive of torch.save that torch.load takes
    and every reader reads alike."""
    try:
        opened = Opened(item, read_records(read_archive(item_source(item, file))))
        for problem in opened.zip.problems:
            if problem.refused or problem.code in AMBIGUOUS or problem.code == DAMAGED:
                raise MalformedError(problem.message, where=item.place)
        flaw = item_flaw(opened.graph)
        if flaw:
            raise MalformedError(f"torch does not load it: {flaw}", where=item.place)
        return opened
    except (MalformedError, NotACheckpointError) as error:
        why = MalformedError.__str__(error) if isinstance(error, PickleError) else error.what
        what = f"{item.name!r}: no archive of torch.save is where .metadata says ({why})"
        raise MalformedError(what, path=file.name, where=item.place) from error


def storage_span(opened: Opened, key: str) -> tuple[Span, Record]:
    """Where the bytes of a storage of an item are in the file, and their record; raises MalformedError."""
    record = opened.archive.find(f"data/{key}")
    if record is None or record.method != 0:
        what = f"{opened.item.name!r}: the bytes of its storage are {'compressed' if record else 'missing'}"
        raise MalformedError(what, where=opened.item.place)
    span = opened.archive.payload(record)
    assert isinstance(span.source, SliceSource)
    return Span(span.source.source, span.source.offset + span.offset, span.size), record


def record_crc(opened: Opened, span: Span) -> int | None:
    """The CRC-32 on record of a span of the file that is one whole record of the item; None for any other."""
    for record in opened.archive.records:
        if record.size == span.size and record.size and not record.method:
            offset = opened.item.at + opened.archive.payload(record).offset
            if isinstance(span.source, FileSource) and offset == span.offset:
                return record.crc
    return None


def tensor_rows(opened: Opened, dtype: Dtype, shape: tuple[int, ...]) -> tuple[Source, int]:
    """The elements of the tensor in an item, row by row: (source, offset in bytes).

    Raises MalformedError where it is no tensor of this dtype and shape, or its bytes are not there.
    """
    item = opened.item
    reader = TensorReader(opened.graph)
    tensor = reader.tensor(opened.graph.root)
    if tensor is None or tensor.kind != "dense":
        what = f"{item.name!r}: .metadata speaks of a tensor, and the item holds none that is plain"
        raise MalformedError(what, where=item.place)
    if (tensor.dtype, tensor.shape) != (dtype.name, shape):
        what = (
            f"{item.name!r}: .metadata speaks of {_words(dtype.name, shape)},"
            f" and the item holds {_words(tensor.dtype, tensor.shape)}"
        )
        raise MalformedError(what, where=item.place)
    flaw = tensor_flaw(opened.graph)
    if flaw:
        raise MalformedError(f"{item.name!r}: torch does not load it: {flaw}", where=item.place)
    if 0 in shape:
        return opened.archive.source, 0
    span, _ = storage_span(opened, tensor.storage)
    storage = reader.storages[tensor.storage]
    if storage.nbytes != span.size:
        what = f"{item.name!r}: its storage has {span.size:,} bytes, and should have {storage.nbytes:,}"
        raise MalformedError(what, where=item.place)
    if tensor.requires_grad and not (dtype.floating or dtype.name.startswith("complex")):
        raise MalformedError(f"{item.name!r}: {dtype.name} cannot require gradients", where=item.place)
    if min(tensor.stride, default=0) < 0 or tensor.offset < 0 or len(tensor.stride) != len(shape):
        raise MalformedError(f"{item.name!r}: strides that make no sense", where=item.place)
    if (tensor.offset + extent(shape, tensor.stride)) * dtype.itemsize > span.size:
        raise MalformedError(f"{item.name!r}: the tensor reaches beyond its storage", where=item.place)
    begin = span.offset + tensor.offset * dtype.itemsize
    rows: tuple[Source, int] = span.source, begin
    if not _in_rows(tensor):
        rows = RowSource(span.source, begin, shape, tensor.stride, dtype.itemsize, item.place), 0
    bits = lazy_bits(opened.graph)
    if not bits:
        return rows
    signs = _signs(dtype, bits)
    if not signs:
        raise MalformedError(f"{item.name!r}: {dtype.name} with the flag {listed(sorted(bits))}", where=item.place)
    return SignSource(*rows, tensor.numel * dtype.itemsize, signs), 0


def _signs(dtype: Dtype, bits: set[str]) -> bytes:
    """The sign bits of one element that the flags turn round; b"" where the dtype cannot have them."""
    parts = 2 if dtype.name.startswith("complex") else 1
    if (parts == 1 and ("conj" in bits or not dtype.floating)) or dtype.packed > 1:
        return b""
    width = dtype.itemsize // parts
    sign, same = b"\0" * (width - 1) + b"\x80", b"\0" * width
    real, imaginary = "neg" in bits, ("neg" in bits) != ("conj" in bits)
    return (sign if real else same) + (sign if imaginary else same) * (parts - 1)


def _in_rows(tensor: Tensor) -> bool:
    return all(
        size == 1 or step == wanted
        for size, step, wanted in zip(tensor.shape, tensor.stride, contiguous_strides(tensor.shape))
    )


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
