"""Pickles and configuration that a checkpoint carries where torch.load runs nothing: in tensors and in metadata.

TransformerEngine keeps a layer's state in a byte tensor and unpickles it: ``set_extra_state`` calls ``pickle.loads`` on
the values of ``*_extra_state``, whatever their dtype (transformer_engine/pytorch/module/base.py). Other programs read
JSON and YAML from safetensors metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from ...base.errors import MalformedError
from ...base.text import human_bytes, quoted
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.container import FoundPickle
from ...checkpoint.tensors import Tensor, view_id
from ...files.sources import BytesSource, Source
from ...pickles.lexer import NOTHING, outcome
from ...safety.configuration import mapping_findings
from ...values.elements import elements, storage_reader, tensor_size
from .pickle_search import active_pickles, find_pickles

#: The first bytes of a tensor, enough to tell whether it may hold a pickle.
_HEAD: Final = 512
#: The most bytes of a tensor that are searched; a layer's extra state has a few thousand.
_MOST: Final = 64 << 20
_ZIP: Final = b"PK\x03\x04"
_NOTE: Final = "a tensor that holds a pickle; TransformerEngine unpickles such values of *_extra_state"


def carried_pickles(checkpoint: Checkpoint) -> Iterator[FoundPickle]:
    """Yield the pickles in byte tensors, and metadata configuration that runs code.

    Only the first 512 bytes of a tensor are read, unless a pickle or an archive begins there.
    """
    for file, texts in checkpoint.container.texts():
        yield from active_pickles(mapping_findings(texts), f"{file}: __metadata__" if file else "__metadata__")
    seen = set()
    for path, part in checkpoint.survey.byte_tensors():
        if view_id(part) not in seen:
            seen.add(view_id(part))
            yield from _in_tensor(checkpoint, path, part)


def _in_tensor(checkpoint: Checkpoint, path: str, tensor: Tensor) -> Iterator[FoundPickle]:
    where = f"tensor {quoted(path)}" if path else "the tensor"
    try:
        head = _first(checkpoint, tensor, _HEAD)
        if not (_is_binary(head) or outcome(head) != NOTHING):
            return
        data = _first(checkpoint, tensor, _MOST)
    except MalformedError:  # other checks report the missing bytes
        return
    content: Source = BytesSource(data, where)
    found = find_pickles(content, strict=False)
    first = next(found, None)
    if first is not None:
        yield from (
            pickle._replace(where=f"{where}: {pickle.where}" if pickle.where else where, note=pickle.note or _NOTE)
            for pickle in chain((first,), found)
        )
    elif len(data) < tensor_size(tensor) and _is_binary(head):
        what = f"it may hold a pickle of {human_bytes(tensor_size(tensor))}; only {human_bytes(_MOST)} were read"
        yield FoundPickle(where, None, what, unchecked=True)


def _is_binary(head: bytes) -> bool:
    return (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")) or head[:4] == _ZIP


def _first(checkpoint: Checkpoint, tensor: Tensor, size: int) -> bytes:
    """Return the first bytes of a tensor in element order, at most ``size``."""
    parts: list[bytes] = []
    got = 0
    for part in elements(storage_reader(checkpoint, tensor.storage), tensor):
        parts.append(part[: size - got])
        got += len(parts[-1])
        if got >= size:
            break
    return b"".join(parts)
