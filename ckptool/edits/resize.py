"""Give the token embedding of a model, its head and its bias another number of rows.

As ``resize_token_embeddings`` of transformers does, except that it adds noise to the mean:
https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Final, Literal

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.steps import NextStep, command
from ..base.text import join_limited, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import Tensor, extent, is_contiguous
from ..files.sources import Computed, Piece, Source, Span
from ..formats.opening import takes_path
from ..formats.pieces.chunks import Chunk, joined
from ..values.elements import StorageReader, as_in_file, elements, reblocked, storage_reader, swapped
from ..values.torch.compute import mean_row
from ..values.torch.loads import need_torch
from .model_config import EMBEDDING, HEAD, with_vocabulary
from .optimizers import optimizers
from .outputs import suggested_edit
from .recompute import Recomputation, SharedStorage, has_arithmetic, quantized_refusal
from .storages import has_bits

Fill = Literal["mean", "zero"]

#: Biases of heads: one number per token. The one of BART has the shape (1, tokens).
_BIAS: Final = regex(
    r"(?:\A|\.)(?:(?:(?:generator_)?lm_head(?:\.decoder)?|embed_out|output_layer|cls\.predictions(?:\.decoder)?)\.bias"
    r"|final_logits_bias)\Z"
)
#: Bytes of rows that are summed at once.
_STEP: Final = 4 << 20
#: A number of tokens to add, of less than 12 digits.
_MORE: Final = regex(r"\+0{0,9}[1-9][0-9]{0,10}")
_INCLUDE: Final = "name its tensors with `--include GLOB`"


class _Table(NamedTuple):
    """A tensor with one row per token: its entry, and the dimension of the rows."""

    entry: TensorEntry
    axis: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.entry.tensor.shape[self.axis]

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape with another number of rows."""
        shape = self.entry.tensor.shape
        return (*shape[: self.axis], rows, *shape[self.axis + 1 :])


@takes_path
def resize(
    checkpoint: Checkpoint,
    vocab: int | str,
    *,
    fill: Fill = "mean",
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Give the token embedding, the head and its bias ``vocab`` rows; the text "+64" means 64 more than there are.

    The first rows are kept. New rows are the mean of all old rows, or zeros if ``fill`` is "zero", and in the bias of a
    tied head. The rows are summed in float64, in their order, and the mean is rounded once. Tied tensors stay tied. The
    ``config.json`` of a folder is updated. ``include`` names the tensors instead, for a model with other names. Raise
    RefusedError if there is no embedding, or several of different sizes, or it is quantized.

    >>> ckptool.resize("model.pth", 10, fill="zero", include="fc.*").changes[0].words
    'fc.weight and fc.bias: 2 -> 10 rows; new rows are zeros'
    """
    added = int(vocab) if isinstance(vocab, str) and _MORE.fullmatch(vocab) else 0
    if isinstance(vocab, str) and not added:
        raise _not_a_count(vocab)
    if not isinstance(vocab, str) and vocab < 1:
        raise TargetError("a vocabulary has one token or more", next="`--vocab 32000`")
    if fill not in ("mean", "zero"):
        raise TargetError(f"{fill!r} is not a way to fill rows", next="`--fill mean`")
    work = Recomputation(checkpoint, key, Globs(include, exclude))
    tables = _tables(work, bool(include))
    old = tables[0].rows
    rows = old + added if isinstance(vocab, str) else vocab
    if rows == old:
        return work.done([Change("resize", key or "", 0, len(tables), f"there are {old:,} rows already")])
    if rows > old and fill == "mean":
        need_torch("computing a mean", checkpoint.path)
    embeddings = {table.entry.tensor.storage for table in tables if EMBEDDING.search(table.entry.key)}
    heads = {table.entry.tensor.storage for table in tables if HEAD.search(table.entry.key)}
    for storage, table in {table.entry.tensor.storage: table for table in reversed(tables)}.items():
        item = work.storage(storage, table.entry.path)
        tensor = _checked(work, item, table, fill)
        # The bias of a tied head gets zeros, as transformers does it.
        mean = fill == "mean" and (not _BIAS.search(table.entry.key) or bool(include) or not heads <= embeddings)
        work.reshape(item, table.shape(rows), _piece(work, tensor, table, rows, mean))
    notes = [f"new rows are {'the mean of the old ones' if fill == 'mean' else 'zeros'}"] if rows > old else []
    done = {table.entry.tensor.storage for table in tables}
    inside = [entry for entry in work.chosen if entry.state_dict >= 0 and entry.tensor.storage not in done]
    others = [entry.key for entry in inside if entry.tensor.shape[:1] == (old,)]
    if others:
        notes.append(f"also has {old:,} rows, and stays: {join_limited(others, most=3)}")
    if optimizers(checkpoint.graph):
        notes.append("states of the optimizer keep their size, so it cannot go on")
    names = join_limited([table.entry.key for table in tables], most=4)
    change = Change("resize", key or "", len(tables), 0, f"{names}: {old:,} -> {rows:,} rows", tuple(notes))
    return with_vocabulary(work.done([change]), old, rows)


def resize_step(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...] | None]) -> NextStep:
    """Return the command that gives the tensors ``wanted`` these shapes, with more rows; no step if none does that.

    A vocabulary that is larger by more than a half is another one: its rows have another meaning.
    """
    try:
        tables = _tables(Recomputation(checkpoint, None, Globs((), ())), named=False)
        old, rows = tables[0].rows, max((max(shape or (0,)) for shape in wanted.values()), default=0)
        if {table.entry.key: table.shape(rows) for table in tables} != dict(wanted) or not old < rows <= old * 3 // 2:
            return NextStep()
        resize(checkpoint, rows, fill="zero")  # a trial
    except RefusedError:
        return NextStep()
    return command("resize", checkpoint.path, output=suggested_edit(checkpoint, "resized"), vocab=str(rows))


def _tables(work: Recomputation, named: bool) -> list[_Table]:
    """Return the tensors to resize, at least one; all have the same number of rows."""
    path, entries = work.checkpoint.path, [entry for entry in work.chosen if entry.state_dict >= 0]
    quantized = [item for item in work.quantized.weights if _is_vocabulary(item.name)]
    parts = work.quantized.tensors if named else frozenset(item.code for item in quantized)
    if any(entry.tensor in parts for entry in entries):
        raise quantized_refusal(work.checkpoint, work.quantized, "the rows of tokens are among them")
    odd = next((entry.key for entry in entries if _is_part(entry.key)), "")
    if odd:
        what = f"the embedding or the head is stored in several tensors, as quantized weights are: {quoted(odd)}"
        raise RefusedError(what, path=path, next="resize the model before it is quantized")
    if not named:
        tables = [entry for entry in entries if len(entry.tensor.shape) == 2]
        tables = [entry for entry in tables if EMBEDDING.search(entry.key) or HEAD.search(entry.key)]
        if not any(EMBEDDING.search(entry.key) for entry in tables):
            raise RefusedError("no tensor has the name of a token embedding", path=path, next=_INCLUDE)
        entries = tables + [entry for entry in entries if _BIAS.search(entry.key)]
    flat = next((entry.key for entry in entries if not entry.tensor.numel or not entry.tensor.shape), "")
    if flat or not entries:
        what = f"{quoted(flat)} has no rows" if flat else "no tensor is chosen"
        raise RefusedError(what, path=path, next=_INCLUDE)
    found = [_Table(entry, len(entry.tensor.shape) - 1 if _BIAS.search(entry.key) else 0) for entry in entries]
    other = next((table for table in found if table.rows != found[0].rows), None)
    if other is not None:
        first = found[0]
        what = f"{quoted(first.entry.key)} has {first.rows:,} rows and {quoted(other.entry.key)} {other.rows:,}"
        raise RefusedError(what, path=path, next="choose those of one vocabulary with `--include GLOB`")
    return found


def _is_part(name: str) -> bool:
    """Return whether a name is a part of an embedding or a head, such as ``lm_head.qweight``."""
    module, _, last = name.rpartition(".")
    return last not in ("weight", "bias") and (_is_vocabulary(module) or _is_vocabulary(f"{module}.weight"))


def _is_vocabulary(name: str) -> bool:
    return bool(EMBEDDING.search(name) or HEAD.search(name))


def _checked(work: Recomputation, item: SharedStorage, table: _Table, fill: Fill) -> Tensor:
    """Return the tensor, which is the only view of its storage; raise RefusedError if it cannot be resized."""
    name, path, tensor = quoted(table.entry.key), work.checkpoint.path, table.entry.tensor
    dtype = BY_NAME.get(tensor.dtype)
    if tensor.kind != "dense" or dtype is None or not dtype.floating or dtype.packed > 1:
        kind = tensor.kind if tensor.kind != "dense" else tensor.dtype
        raise RefusedError(f"{name} is {kind}: only plain floating-point tensors can be resized", path=path)
    if fill == "mean" and not has_arithmetic(tensor):
        step = "fill with zeros: `--fill zero`"
        raise RefusedError(f"{name} is {tensor.dtype}, which has no mean", path=path, next=step)
    if work.is_pinned(item.key) or item.view is None or any(has_bits(work.checkpoint.graph, use) for use in item.uses):
        what = f"{name} shares its storage with other tensors"
        raise RefusedError(what, path=path, next="first: " + command("slim", path))
    body, reach = work.checkpoint.body(item.key), tensor.offset + extent(tensor.shape, tensor.stride)
    if body is None or min(tensor.stride) < 0 or tensor.offset < 0 or reach * dtype.itemsize > body.size:
        raise RefusedError(f"the bytes of {name} are not all in the file", path=path)
    return tensor


def _piece(work: Recomputation, tensor: Tensor, table: _Table, rows: int, mean: bool) -> Piece:
    """Return the bytes of the tensor with so many rows: those that it has, and new ones."""
    reader, width = storage_reader(work.checkpoint, tensor.storage), BY_NAME[tensor.dtype].itemsize
    kept = tensor._replace(shape=table.shape(min(rows, table.rows)))
    made = tensor, table.rows, max(rows - table.rows, 0), mean
    body = reader.body
    if body is None or not isinstance(body.piece, Span) or body.compressed or not is_contiguous(kept):
        return Computed(prod(table.shape(rows)) * width, resized, (reader, kept, *made))
    source, begin = body.piece.source, body.piece.offset + tensor.offset * width
    new = NewRows(reader, *made)
    if not new.size:
        return Span(source, begin, kept.numel * width)
    length = tensor.numel // table.rows
    chunks = [
        Chunk(((0, 0), (table.rows, length)), source, begin),
        Chunk(((table.rows, 0), (rows - table.rows, length)), new, 0),
    ]
    whole = joined(chunks, (rows, length), width, table.entry.key).span
    assert whole is not None
    return whole


class NewRows(Source):
    """The bytes of ``number`` rows to add to a tensor of ``rows`` rows: their mean, or zeros.

    The mean is computed when the first byte is read.
    """

    def __init__(self, reader: StorageReader, tensor: Tensor, rows: int, number: int, mean: bool) -> None:
        self.name = reader.path
        self.reader, self.tensor, self.rows, self.number, self.mean = reader, tensor, rows, number, mean
        self.size = number * (tensor.numel // rows) * BY_NAME[tensor.dtype].itemsize

    @cached_property
    def _row(self) -> bytes:
        size = self.size // self.number
        if not self.mean:
            return bytes(size)
        blocks = reblocked(elements(self.reader, self.tensor), max(_STEP // size, 1) * size)
        row = mean_row(blocks, self.tensor.numel // self.rows, self.tensor.dtype)
        return swapped(row, self.reader.width)

    def read(self, offset: int, size: int) -> bytes:
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        begin = offset % len(self._row)
        return (self._row * (-(-(begin + size) // len(self._row))))[begin : begin + size]

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        if self.mean and self.reader.body is not None and isinstance(self.reader.body.piece, Span):
            yield self.reader.body.piece


def resized(reader: StorageReader, kept: Tensor, tensor: Tensor, rows: int, number: int, mean: bool) -> Iterator[bytes]:
    """Yield the rows of ``kept``, then new rows, in the byte order of the file."""
    yield from as_in_file(reader, kept)
    new = NewRows(reader, tensor, rows, number, mean)
    for offset in range(0, new.size, _STEP):
        yield new.read(offset, _STEP)


def parse_rows(text: str) -> int | str:
    """Parse a number of tokens, or a text such as "+64" for that many more; raise TargetError for other texts."""
    if _MORE.fullmatch(text):
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text)):
        raise _not_a_count(text)
    return int(text)


def _not_a_count(text: str) -> TargetError:
    step = "`--vocab 32000`"
    return TargetError(f"{text!r} is not a number of tokens", next=step + ", or +64 for 64 more")
