"""A safetensors file of one state dict, byte for byte as ``safetensors.torch.save_file`` writes it.

The library sorts tensors by dtype (widest first), then by name, and pads the header with spaces to a multiple of 8
bytes (``safetensors/src/tensor.rs``, ``prepare``; the order of dtypes was determined with safetensors 0.8).

An edit keeps the order of the tensors, and spells the header like the library: compact JSON with the metadata first.
If the tensors stay as they are, the header gets more spaces, so that they move by whole blocks, which a filesystem can
share between the two files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from json.encoder import encode_basestring
from typing import Final

from ...base.dtypes import BY_NAME
from ...base.errors import RefusedError, TargetError
from ...base.records import NamedTuple, new_tuple
from ...base.text import join_limited, quoted
from ...checkpoint.checkpoint import Checkpoint, Target, Tied
from ...checkpoint.survey import StateDict
from ...checkpoint.tensors import Tensor, ViewId, extent, is_contiguous, view_id
from ...files.sources import FILESYSTEM_BLOCK, Piece, Plan, Span, merge_pieces
from ...pickles.nodes import Ref
from ...values.elements import tensor_size
from ...values.interpretation import is_more, lazy_bits, rows
from ..losses import (
    Fit,
    Loss,
    Promise,
    entries_outside,
    refuse_edited,
    refuse_emptied,
    storages_within,
    whole_state_dict,
)
from ..tensor_table import TensorEntry
from .header import MAX_HEADER, METADATA, metadata_for

_ALIGNMENT: Final = 8
#: The fewest bytes of tensors for which the header is padded to whole blocks.
_SHARED: Final = 1 << 20
#: A torch dtype with two values per element; the format counts single values.
_PAIRS: Final = "float4_e2m1fn_x2"
#: The order of dtypes in a file, from last to first.
_ORDER: Final = (
    *("BOOL", "F4", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16"),
    *("BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
_RANK: Final = {name: number for number, name in enumerate(_ORDER)}


class Named(NamedTuple):
    """A tensor with its name and node."""

    name: str
    tensor: Tensor
    ref: Ref


class Chosen(NamedTuple):
    """The tensors that go into the file. ``names`` maps each omitted name to the kept name of the same tensor."""

    tensors: list[Named]
    names: dict[str, str]


def fit(checkpoint: Checkpoint, target: Target) -> Fit:
    """Return what a file or a folder of shards would lack, and the names that "keep-first" removes."""
    chosen = whole_state_dict(checkpoint, target, "a safetensors file")
    texts = {"format": "pt", **checkpoint.metadata, **target.metadata}
    names = chosen_tensors(checkpoint, chosen, target.tied).names if target.tied == "keep-first" else {}
    pairs = join_limited([f"{other!r} for {kept!r}" for other, kept in names.items()], most=3)
    inside = checkpoint.survey.tensors_in([chosen.path]) if target.shard_size else ()
    return Fit(
        "safetensors",
        target._replace(metadata=texts),
        _losses(checkpoint, chosen, target.tied),
        (f"without the second names of tied tensors, noted in the header: {pairs}",) if names else (),
        size=sum(tensor_size(entry.tensor) for entry in inside),
    )


def refuse_unfit(checkpoint: Checkpoint, state_dict: StateDict) -> None:
    """Raise RefusedError for edited content that the file's format cannot hold."""
    refuse_edited(
        checkpoint, lambda: [*entries_outside(checkpoint, state_dict), *_losses(checkpoint, state_dict)], "safetensors"
    )


def _losses(checkpoint: Checkpoint, state_dict: StateDict, tied: Tied = "") -> list[Loss]:
    graph, inside = checkpoint.graph, checkpoint.survey.tensors_in([state_dict.path])
    dense = [entry for entry in inside if _is_plain(entry.tensor)]
    odd = [entry for entry in inside if not _is_plain(entry.tensor)] if len(dense) < len(inside) else []
    more = {entry.key: entry.ref for entry in dense if is_more(graph, entry.ref, entry.tensor)}
    places: dict[str, Collection[str]] = {
        "dtypes": [entry.key for entry in odd if _lacks_dtype(entry.tensor)],
        "layouts": [entry.key for entry in odd if not _lacks_dtype(entry.tensor)],
        "strides": [entry.key for entry in dense if not is_contiguous(entry.tensor)],
        "sharing": [] if tied == "clone" else _sharing(chosen_tensors(checkpoint, state_dict, tied).tensors),
        "requires-grad": [entry.key for entry in inside if _may_learn(entry.tensor)],
        "attributes": list(more),
        "devices": dict.fromkeys(entry.tensor.location for entry in dense if entry.tensor.location != "cpu"),
    }
    owning = {entry.key for entry in odd if entry.tensor.own_bytes and entry.tensor.location != "meta"}
    # An attribute may also be a tensor.
    owning |= {key for key, ref in more.items() if len(storages_within(checkpoint, ref)) > 1}
    dropping = ("dtypes", "layouts", "attributes")
    return [
        Loss(kind, tuple(where), kind in dropping and not owning.isdisjoint(where))
        for kind, where in places.items()
        if where
    ]


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """Plan the file of the state dict that a target names."""
    whole = whole_state_dict(checkpoint, target, "a safetensors file")
    refuse_unfit(checkpoint, whole)
    chosen = chosen_tensors(checkpoint, whole, target.tied)
    refuse_emptied(checkpoint, len(chosen.tensors))
    # A converted file is sorted as the library sorts; an edited file keeps its order.
    return plan_chosen(checkpoint, chosen, target.metadata, in_order=checkpoint.target is None), True


def promise(checkpoint: Checkpoint, target: Target) -> Promise:
    """Promise the header: names, dtypes and shapes, and the metadata texts."""
    chosen = chosen_tensors(checkpoint, whole_state_dict(checkpoint, target, "a safetensors file"), target.tied)
    manifest = {named.name: (_dtype(named.tensor), tuple(_shape(named.tensor))) for named in chosen.tensors}
    return Promise("safetensors", manifest=manifest, texts={**target.metadata, **chosen.names})


def plan_chosen(checkpoint: Checkpoint, chosen: Chosen, metadata: Mapping[str, str], *, in_order: bool = False) -> Plan:
    """Plan a file of the chosen tensors. ``metadata`` becomes the header's texts. Names omitted for another tensor are
    added to the texts as ``save_model`` does: name -> kept name. With ``in_order``, tensors stay in state dict order
    unless one would become misaligned. Raises RefusedError if bytes of a tensor are missing."""
    places = metadata_for(metadata, [named.name for named in chosen.tensors], checkpoint.path)
    texts = {**chosen.names, **places}
    header: dict[str, TensorEntry] = {}
    pieces: list[Piece] = []
    at = 0
    for named, piece in _arranged(checkpoint, chosen, in_order):
        name, tensor = named.name, named.tensor
        if name in header:
            what = f"two tensors would be called {quoted(name)}, and the header holds one of a name"
            raise RefusedError(what, path=checkpoint.path, next="rename one")
        size = tensor_size(tensor)
        if name == METADATA:
            raise TargetError(f"a tensor is called {METADATA}, which a safetensors file has for itself")
        header[name] = new_tuple(TensorEntry, (name, _dtype(tensor), tuple(_shape(tensor)), at, at + size))
        pieces.append(piece)
        at += size
    try:
        text = _header_text(list(header.values()), texts)
    except UnicodeEncodeError as error:
        half = error.object[max(error.start - 40, 0) :]
        what = f"no header of safetensors holds half a surrogate pair: {quoted(half)}"
        raise RefusedError(what, path=checkpoint.path, next="give it another name with rename") from error
    tensors = merge_pieces(pieces)
    if checkpoint.target is None and len(tensors) == 1 and isinstance(tensors[0], Span) and tensors[0].size >= _SHARED:
        shift = (tensors[0].offset - 8 - len(text)) % FILESYSTEM_BLOCK
        text += b" " * (shift if shift % _ALIGNMENT == 0 else 0)
    if len(text) > MAX_HEADER:
        what = f"its header would be {len(text):,} bytes, and safetensors reads none of more than {MAX_HEADER:,}"
        raise RefusedError(what, path=checkpoint.path, next="make shards: `--max-shard-size 5GB`")
    return Plan((len(text).to_bytes(8, "little") + text, *tensors))


def _arranged(checkpoint: Checkpoint, chosen: Chosen, in_order: bool) -> list[tuple[Named, Piece]]:
    pairs = [(named, rows(checkpoint, repr(named.name), named.ref, named.tensor)[0]) for named in chosen.tensors]
    if not (in_order and _keeps_places(pairs)):
        pairs.sort(key=lambda pair: _place(pair[0]))
    return pairs


def _keeps_places(pairs: list[tuple[Named, Piece]]) -> bool:
    """Return whether every tensor begins at a multiple of its element width, or was already misaligned."""
    at = 0
    begin = min((piece.offset for _, piece in pairs if isinstance(piece, Span)), default=0)
    for named, piece in pairs:
        width = BY_NAME[named.tensor.dtype].itemsize
        if at % width and not (isinstance(piece, Span) and (piece.offset - begin) % width):
            return False
        at += tensor_size(named.tensor)
    return True


def _is_plain(tensor: Tensor) -> bool:
    dtype = BY_NAME.get(tensor.dtype)
    return tensor.kind == "dense" and bool(tensor.storage) and dtype is not None and bool(dtype.safetensors)


def _lacks_dtype(tensor: Tensor) -> bool:
    dtype = BY_NAME.get(tensor.dtype)
    return tensor.kind in ("dense", "quantized") or (dtype is None and tensor.kind != "unknown")


def _may_learn(tensor: Tensor) -> bool:
    return tensor.requires_grad or tensor.cls in ("Parameter", "Variable")


def _sharing(tensors: Sequence[Named]) -> list[str]:
    """Return the names of tensors that share bytes, by the rules of ``save_file``: two rows of one storage do not
    (``_find_shared_tensors`` and ``_filter_shared_not_shared`` of safetensors/torch.py)."""
    uses: dict[str, list[tuple[int, int, int, str]]] = {}
    times = Counter([tensor.storage for _, tensor, _ in tensors])
    for number, (name, tensor, _) in enumerate(tensors if len(times) < len(tensors) else ()):
        if times[tensor.storage] > 1 and tensor_size(tensor):
            size = BY_NAME[tensor.dtype].itemsize
            begin = tensor.offset * size
            end = begin + extent(tensor.shape, tensor.stride) * size
            uses.setdefault(tensor.storage, []).append((begin, end, number, name))
    shared: list[tuple[int, str]] = []
    for parts in uses.values():
        group: list[tuple[int, str]] = []
        reached = 0
        for begin, end, number, name in [*sorted(parts), (1 << 62, 0, 0, "")]:
            if group and begin >= reached:
                shared += group if len(group) > 1 else ()
                group = []
            group.append((number, name))
            reached = max(reached, end)
    return [name for _, name in sorted(shared)]


def chosen_tensors(checkpoint: Checkpoint, state_dict: StateDict, tied: Tied) -> Chosen:
    """Return the tensors that go into a file, in state dict order."""
    chosen = Chosen([], {})
    kept: dict[ViewId, str] = {}
    for entry in checkpoint.survey.tensors_in([state_dict.path]):
        if not _is_plain(entry.tensor):
            continue
        if tied == "keep-first" and tensor_size(entry.tensor):
            view = view_id(entry.tensor, lazy_bits(checkpoint.survey.reader, entry.ref))
            if view in kept:
                chosen.names[entry.key] = kept[view]
                continue
            kept[view] = entry.key
        chosen.tensors.append(new_tuple(Named, (entry.key, entry.tensor, entry.ref)))
    return chosen


def _place(named: Named) -> tuple[int, bytes]:
    return -_RANK[_dtype(named.tensor)], named.name.encode("utf-8", "surrogatepass")


def _dtype(tensor: Tensor) -> str:
    return BY_NAME[tensor.dtype].safetensors


def _shape(tensor: Tensor) -> list[int]:
    shape = list(tensor.shape)
    if tensor.dtype == _PAIRS:
        if not shape:
            raise TargetError(f"a scalar of {tensor.dtype} has no last dimension to count values in")
        shape[-1] *= 2
    return shape


def _header_text(tensors: Sequence[TensorEntry], texts: Mapping[str, str]) -> bytes:
    """Return the header for tensors in byte order, whose offsets count from the end of the header; raise
    UnicodeEncodeError for half a surrogate pair."""
    spelled = json.dumps(dict(texts), ensure_ascii=False, separators=(",", ":"))
    entries = [f'"{METADATA}":{spelled}'] if texts else []
    # Many tensors have one of few shapes. Joined from strings, because a dict and two lists for each tensor take ten
    # times as much memory.
    spelled_shape = cache(lambda shape: ",".join(map(str, shape)))
    for name, dtype, shape, begin, end in tensors:
        fields = f'"dtype":"{dtype}","shape":[{spelled_shape(shape)}],"data_offsets":[{begin},{end}]'
        entries.append(f"{encode_basestring(name)}:{{{fields}}}")
    text = f"{{{','.join(entries)}}}".encode()
    return text + b" " * (-len(text) % _ALIGNMENT)
