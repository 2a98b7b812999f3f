"""Pickles and configuration that a checkpoint carries where torch.load runs nothing: in tensors and in metadata.

TransformerEngine keeps a layer's state in a byte tensor and unpickles it: ``set_extra_state`` calls ``pickle.loads`` on
the values of ``*_extra_state``, whatever their dtype (transformer_engine/pytorch/module/base.py). Other programs read
JSON and YAML from safetensors metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...base.errors import MalformedError
from ...base.text import quoted
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.container import FoundPickle
from ...checkpoint.survey import EXTRA_STATE
from ...checkpoint.tensors import Tensor, view_id
from ...files.compressed import compression_of
from ...safety.configuration import mapping_findings
from ...values.elements import elements, storage_reader, tensor_size
from .budget import unchecked
from .graph_parts import as_bytes, may_begin_pickle
from .pickle_search import active_pickles, value_pickles

#: The first bytes of a tensor: if no pickle, archive or encoded text may begin so, the rest is not searched.
_HEAD: Final = 512
#: The most bytes of a tensor that are searched; a layer's extra state has a few thousand.
_MOST: Final = 64 << 20
_NOTE: Final = "a tensor that holds a pickle; TransformerEngine unpickles such values of *_extra_state"


def carried_pickles(checkpoint: Checkpoint) -> Iterator[FoundPickle]:
    """Yield the pickles in byte tensors and in metadata, and metadata configuration that runs code. Only the first 512
    bytes of a tensor are read if they rule out a pickle, except of ``*_extra_state``."""
    for file, texts in checkpoint.container.held_texts():
        where = f"{file}: __metadata__" if file else "__metadata__"
        yield from active_pickles(mapping_findings(texts), where)
        for key, text in texts.items():
            for held in (key, text):
                yield from value_pickles(as_bytes(held), f"{where}: {quoted(key)}")
    seen = set()
    for path, part in checkpoint.survey.byte_tensors():
        if view_id(part) not in seen:
            seen.add(view_id(part))
            yield from _in_tensor(checkpoint, path, part)


def _in_tensor(checkpoint: Checkpoint, path: str, tensor: Tensor) -> Iterator[FoundPickle]:
    where = f"tensor {quoted(path)}" if path else "the tensor"
    try:
        data = _first(checkpoint, tensor, _HEAD)
        if not (EXTRA_STATE in path or may_begin_pickle(data) or compression_of(data)):
            return
        data = _first(checkpoint, tensor, _MOST)
    except MalformedError:  # other checks report the missing bytes
        return
    found = False
    for pickle in value_pickles(data, where):
        found = True
        yield pickle._replace(note=pickle.note or _NOTE)
    large = len(data) < tensor_size(tensor) and may_begin_pickle(data)
    if not found and (large or (EXTRA_STATE in path and tensor.dtype == "uint8" and any(data))):
        yield unchecked(where, "it may hold a pickle, and is not followed to its end")


def _first(checkpoint: Checkpoint, tensor: Tensor, size: int) -> bytes:
    parts, got = list[bytes](), 0
    for part in elements(storage_reader(checkpoint, tensor.storage), tensor):
        parts.append(part)
        got += len(part)
        if got >= size:
            break
    return b"".join(parts)[:size]
