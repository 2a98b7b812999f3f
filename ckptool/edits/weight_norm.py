"""Rename or fold the two tensors of a weight norm: a magnitude and a direction.

Old: ``weight_g`` and ``weight_v`` (torch/nn/utils/weight_norm.py). New: ``parametrizations.weight.original0`` and
``original1`` (torch/nn/utils/parametrizations.py). Folded: ``weight``, the product that the module computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError, TargetError
from ..base.globs import Globs, Patterns
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import human_bytes, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.objects import mapping
from ..checkpoint.survey import TensorEntry
from ..checkpoint.tensors import Tensor
from ..files.sources import Computed
from ..formats.opening import takes_path
from ..values.elements import StorageReader, elements, reblocked, storage_reader, swapped, tensor_size
from ..values.torch.compute import normalized
from ..values.torch.loads import need_torch
from .keys import by_table
from .optimizers import optimizers
from .recompute import Recomputation, has_arithmetic, refuse_bits

Form = Literal["new", "old", "fold"]

_OLD: Final = regex(r"(?P<module>(?:.+\.)?)(?P<name>[^.]+)_(?P<part>[gv])\Z")
_NEW: Final = regex(r"(?P<module>(?:.+\.)?)parametrizations\.(?P<name>[^.]+)\.original(?P<part>[01])\Z")
_PARAMETRIZED: Final = regex(r"(?P<module>(?:.+\.)?)parametrizations\.(?P<name>[^.]+)\.")
#: Bytes of rows that are folded at once, and the most bytes of a row, or of a tensor that has one norm for all rows.
_STEP: Final = 4 << 20
_MOST: Final = 1 << 28


class _Norm(NamedTuple):
    """A weight norm: its state dict, the names of magnitude, direction and weight, and the tensors of the two."""

    state_dict: int
    names: tuple[str, str]
    weight: str
    entries: tuple[TensorEntry, TensorEntry]


@takes_path
def weight_norm(
    checkpoint: Checkpoint, form: Form, *, key: str | None = None, include: Patterns = (), exclude: Patterns = ()
) -> Checkpoint:
    """Bring weight norms into another form: "new" and "old" names, or "fold" them into plain weights.

    Names change, and bytes move; only folding computes values, as ``torch._weight_norm`` does. A folded weight cannot
    be split again. Raise RefusedError if there is no weight norm.
    """
    if form not in ("new", "old", "fold"):
        raise TargetError(f"{form!r} is not a form of weight norms", next="`--weight-norm new`")
    work = Recomputation(checkpoint, key, Globs(include, exclude))
    norms = list(_norms(work))
    if not norms:
        why = "there is no weight norm in it: no tensors weight_g and weight_v, nor their new names"
        raise RefusedError(why, path=checkpoint.path, next="a folded weight cannot be split again")
    if form == "fold":
        return _folded(work, norms, key)
    table = {old: new for norm in norms for old, new in zip(norm.names, _named(norm.weight, form)) if old != new}
    label = f"{pluralize(len(norms), 'weight norm')} with the {form} names"
    if not table:
        return work.done([Change("weight-norm", key or "", 0, len(norms), f"{label} already")])
    return by_table(checkpoint, table, key=key, label=label)


def _named(weight: str, form: Form) -> tuple[str, str]:
    module, _, name = weight.rpartition(".")
    start = f"{module}." if module else ""
    if form == "old":
        return f"{weight}_g", f"{weight}_v"
    return f"{start}parametrizations.{name}.original0", f"{start}parametrizations.{name}.original1"


def _norms(work: Recomputation) -> Iterator[_Norm]:
    found: dict[tuple[int, str, bool], dict[str, TensorEntry]] = {}
    for entry in work.chosen:
        match = _OLD.match(entry.key) or _NEW.match(entry.key)
        if match is not None and entry.state_dict >= 0:
            pair = found.setdefault((entry.state_dict, match["module"] + match["name"], match.re is _OLD), {})
            pair["g" if match["part"] in "g0" else "v"] = entry
    others = [entry.key for entry in work.chosen if not _NEW.match(entry.key)]
    more = {match["module"] + match["name"]: name for name in others if (match := _PARAMETRIZED.match(name))}
    for (state_dict, weight, old), pair in found.items():
        if weight in more and not old:
            what = f"{quoted(weight)} has another parametrization: {quoted(more[weight])}"
            raise RefusedError(what, path=work.checkpoint.path, next="fold it with torch.nn.utils.parametrize")
        if len(pair) == 2 and dimension(pair["g"].tensor.shape, pair["v"].tensor.shape) is not None:
            yield _Norm(state_dict, (pair["g"].key, pair["v"].key), weight, (pair["g"], pair["v"]))


def dimension(magnitude: tuple[int, ...], direction: tuple[int, ...]) -> int | None:
    """Return the dimension along which magnitudes differ, -1 for one magnitude, or None if the shapes do not fit."""
    if not magnitude:
        return -1
    if len(magnitude) != len(direction):
        return None
    for at, size in enumerate(magnitude):
        if size == direction[at] and all(other == 1 for place, other in enumerate(magnitude) if place != at):
            return at
    return None


def _folded(work: Recomputation, norms: list[_Norm], key: str | None) -> Checkpoint:
    need_torch("folding weight norms", work.checkpoint.path)
    nodes = work.checkpoint.graph.nodes
    done: dict[tuple[int, int], int] = {}
    for number, state_dict in enumerate(work.checkpoint.survey.state_dicts):
        inside = [norm for norm in norms if norm.state_dict == number]
        if not inside:
            continue
        names = {str(nodes[name]) for name, _ in state_dict.items}
        taken = next((norm.weight for norm in inside if norm.weight in names), "")
        if taken:
            raise RefusedError(f"{quoted(taken)} exists beside its weight norm", path=work.checkpoint.path)
        made = {norm.names[0]: norm for norm in inside}
        gone = {norm.names[1] for norm in inside}
        items = []
        for name, value in mapping(work.checkpoint.graph, state_dict.ref) or ():
            norm = made.get(str(nodes[name]))
            if norm is not None:
                both = norm.entries[0].ref, norm.entries[1].ref
                if both not in done:
                    done[both] = _product(work, norm)
                items.append((work.editor.text(name, norm.weight), done[both]))
            elif nodes[name] not in gone:
                items.append((name, value))
        work.editor.refill(state_dict.ref, items)
    notes = ("states of the optimizer stay as they are, and fit no more",) if optimizers(work.checkpoint.graph) else ()
    what = f"{pluralize(len(norms), 'weight norm')} folded into {pluralize(len(norms), 'weight')}"
    return work.done([Change("weight-norm", key or "", len(norms), 0, what, notes)])


def _product(work: Recomputation, norm: _Norm) -> int:
    tensors, path = [entry.tensor for entry in norm.entries], work.checkpoint.path
    bad = next((entry for entry in norm.entries if not _is_plain(work, entry.tensor)), None)
    if bad is not None or tensors[0].dtype != tensors[1].dtype:
        name = quoted((bad or norm.entries[0]).key)
        raise RefusedError(f"{name} is not a plain floating-point tensor of the dtype of the direction", path=path)
    for entry in norm.entries:
        refuse_bits(work.checkpoint, entry.ref, entry.key)
    axis = dimension(tensors[0].shape, tensors[1].shape)
    size = tensor_size(tensors[1])
    at_once = max(size if axis else size // max(tensors[1].shape[0], 1), tensor_size(tensors[0]))
    if at_once > _MOST:
        what = f"folding {quoted(norm.weight)} needs {human_bytes(at_once)} in memory, more than {human_bytes(_MOST)}"
        raise RefusedError(what, path=path)
    readers = [storage_reader(work.checkpoint, tensor.storage) for tensor in tensors]
    piece = Computed(size, folded, (readers[0], tensors[0], readers[1], tensors[1]))
    dtype, direction = BY_NAME[tensors[1].dtype], tensors[1]
    return work.tensor(norm.weight, dtype, direction.shape, piece, direction.location, direction.requires_grad)


def _is_plain(work: Recomputation, tensor: Tensor) -> bool:
    present = bool(tensor.storage) and work.checkpoint.body(tensor.storage) is not None
    present = present and tensor not in work.quantized.tensors
    return tensor.kind == "dense" and present and has_arithmetic(tensor) and BY_NAME[tensor.dtype].itemsize > 1


def folded(g_reader: StorageReader, g: Tensor, v_reader: StorageReader, v: Tensor) -> Iterator[bytes]:
    """Yield the elements of a folded weight, in the byte order of the file."""
    axis = dimension(g.shape, v.shape)
    assert axis is not None
    magnitudes = b"".join(elements(g_reader, g))
    # Along the first dimension, each row has its own norm. Otherwise all of the tensor is one block.
    rows = v.shape[0] if axis == 0 else 1
    width, size = len(magnitudes) // max(rows, 1), tensor_size(v) // max(rows, 1)
    step = max(_STEP // max(size, 1), 1) if axis == 0 else 1
    for number, data in enumerate(reblocked(elements(v_reader, v), max(step * size, 1))):
        part = magnitudes[number * step * width :][: step * width]
        shape, norms = ((len(data) // size, *each[1:]) if axis == 0 else each for each in (v.shape, g.shape))
        yield swapped(normalized(data, part, shape, norms, axis, v.dtype), v_reader.width)
