"""Give the token embedding of a model, its head and its bias another number of rows.

As ``resize_token_embeddings`` of transformers does, except that it adds noise to the mean:
https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from ..checkpoint.tensors import Tensor, extent
from ..files.sources import Computed
from ..formats.opening import takes_path
from ..values.elements import StorageReader, as_in_file, elements, reblocked, storage_reader, swapped
from ..values.torch.compute import mean_row
from ..values.torch.loads import need_torch
from .convert import suggested_edit
from .model_config import EMBEDDING, HEAD, with_vocabulary
from .optimizers import optimizers
from .recompute import Recomputation, SharedStorage, has_arithmetic, has_bits, quantized_refusal

Fill = Literal["mean", "zero"]

#: Biases of heads: one number per token. The one of BART has the shape (1, tokens).
_BIAS: Final = regex(
    r"(?:\A|\.)(?:(?:(?:generator_)?lm_head(?:\.decoder)?|embed_out|output_layer|cls\.predictions(?:\.decoder)?)\.bias"
    r"|final_logits_bias)\Z"
)
#: Bytes of rows that are summed at once.
_STEP: Final = 4 << 20
#: A number of tokens, or of those to add, of less than 12 digits.
_COUNT: Final = regex(r"(?P<more>\+)?0{0,9}[1-9][0-9]{0,10}")
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
    count = _COUNT.fullmatch(str(vocab))
    if count is None:
        raise TargetError(f"{str(vocab)!r} is not a number of tokens", next="`--vocab 32000`, or +64 for 64 more")
    if fill not in ("mean", "zero"):
        raise TargetError(f"{fill!r} is not a way to fill rows", next="`--fill mean`")
    work = Recomputation(checkpoint, key, Globs(include, exclude))
    tables = _tables(work, bool(include))
    old = tables[0].rows
    rows = int(count[0]) + (old if count["more"] else 0)
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
        size = prod(table.shape(rows)) * BY_NAME[tensor.dtype].itemsize
        kept = tensor._replace(shape=table.shape(min(rows, old)))
        reader = storage_reader(work.checkpoint, tensor.storage)
        piece = Computed(size, resized, (reader, kept, tensor, old, max(rows - old, 0), mean))
        work.reshape(item, table.shape(rows), piece)
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
    """Return the command that gives the tensors ``wanted`` these shapes by at most half more rows, or no step."""
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
    plain = tensor.kind == "dense" and dtype is not None and dtype.floating and dtype.packed == 1
    if dtype is None or not plain or (fill == "mean" and not has_arithmetic(tensor)):
        kind = tensor.kind if tensor.kind != "dense" else tensor.dtype
        what = f"{name} is {kind}: only plain floating-point tensors can be resized, or filled with their mean"
        raise RefusedError(what, path=path)
    if work.is_pinned(item.key) or item.view is None or any(has_bits(work.checkpoint.graph, use) for use in item.uses):
        what = f"{name} shares its storage with other tensors"
        raise RefusedError(what, path=path, next="first: " + command("slim", path))
    body, reach = work.checkpoint.body(item.key), tensor.offset + extent(tensor.shape, tensor.stride)
    if body is None or min(tensor.stride) < 0 or tensor.offset < 0 or reach * dtype.itemsize > body.size:
        raise RefusedError(f"the bytes of {name} are not all in the file", path=path)
    return tensor


def resized(reader: StorageReader, kept: Tensor, tensor: Tensor, rows: int, number: int, mean: bool) -> Iterator[bytes]:
    """Yield the rows of ``kept``, then ``number`` new ones: the mean of the ``rows`` rows of ``tensor``, or zeros."""
    yield from as_in_file(reader, kept)
    size = tensor.numel // rows * BY_NAME[tensor.dtype].itemsize
    row = bytes(size)
    if mean and number:
        blocks = reblocked(elements(reader, tensor), max(_STEP // size, 1) * size)
        row = swapped(mean_row(blocks, tensor.numel // rows, tensor.dtype), reader.width)
    at_once = max(_STEP // size, 1)
    for first in range(0, number, at_once):
        yield row * min(at_once, number - first)
