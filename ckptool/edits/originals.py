"""Give tensors of a converted model the names, the order and the values that they had before the conversion."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..base.dtypes import BY_NAME, is_block
from ..base.errors import RefusedError
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.container import Original
from ..checkpoint.objects import mapping
from ..checkpoint.quantized import quantization
from ..checkpoint.survey import TensorEntry
from ..files.sources import Computed
from ..pickles.nodes import Ref
from ..values.dequantized import Dequantization, dequantized, rearranged
from ..values.torch.adapters import StoredTensor
from .recompute import Recomputation, refuse_blocks


def with_originals(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with plain tensors, named and laid out as in the model from which they were converted.

    Quantized tensors get the float32 values that the gguf package computes, bit for bit, while the output is written;
    plain tensors keep their bytes. Tensors whose original is not known keep their names. Raise RefusedError if the gguf
    package is missing or does not dequantize a type, or for big-endian blocks.
    """
    found, work = quantization(checkpoint), Recomputation(checkpoint)
    refuse_blocks(checkpoint, found)
    known, kept, left = checkpoint.container.originals(), list[str](), list[str]()
    entries = {entry.ref: entry for entry in work.checkpoint.survey.tensors if entry.state_dict >= 0}
    for state_dict in work.checkpoint.survey.state_dicts:
        items = dict[str, tuple[Ref, Ref]]()
        for name, ref in mapping(work.checkpoint.graph, state_dict.ref) or ():
            entry = entries.get(ref)
            if entry is None:
                left.append(str(work.checkpoint.graph.nodes[name]))
                continue
            kept += [entry.key] if entry.key not in known else []
            for original in known.get(entry.key, (Original(entry.key),)):
                if original.name in items:
                    what = f"two tensors would be called {quoted(original.name)}"
                    raise RefusedError(what, path=checkpoint.path)
                items[original.name] = work.editor.text(name, original.name), _made(work, entry, original)
        work.editor.refill(state_dict.ref, [*items.values()])
    number = len(found.weights)
    what = "tensors get the names and the order from before their conversion"
    what = f"{pluralize(number, 'weight')} turned back into float32 ({found.words})" if number else what
    notes = [f"names of GGUF kept, because no table has them: {join_limited(kept, most=4)}"] if kept else []
    notes += [f"metadata left out: {join_limited(left, most=3)}"] if left else []
    return work.done([Change("dequantize", "", number, 0, what, tuple(notes))])


def _made(work: Recomputation, entry: TensorEntry, original: Original) -> Ref:
    """Return the tensor, with other values or in another order if its original had these."""
    tensor, shape, block = entry.tensor, entry.tensor.shape, is_block(entry.tensor.dtype)
    if not (block or original.heads or original.added or original.part >= 0):
        return entry.ref
    stored = StoredTensor.of(work.checkpoint, entry.path, tensor)
    if original.part >= 0:
        stored, shape = stored.rows(original.part, 1), shape[1:]
    dtype = BY_NAME["float32" if block or original.added else tensor.dtype]
    size, width = prod(shape) * dtype.itemsize, work.width(dtype)
    if block or original.added:
        numbers: Mapping[str, float] = {"heads": original.heads, "added": original.added}
        how = Dequantization(original.name, "gguf", (("code", stored),), shape, ("float32",), numbers, width)
        piece = Computed(size, dequantized, (how,))
    else:
        piece = Computed(size, rearranged, (stored, original.heads, width))
    return work.tensor(original.name, dtype, shape, piece)
