"""Give a Megatron-LM model the names of another library, and cut its rows into the tensors that this library expects.

The layout of rows is from ``megatron/core/transformer/attention.py`` and ``mlp.py``. For A heads of size d in G groups
with m = A/G heads each, the rows of group g start at g(m+2)d: md rows for queries, d for keys, d for values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from math import prod
from typing import Final, Literal, NamedTuple, TypeAlias

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import CkptoolError, RefusedError, TargetError
from ..base.steps import Setting, advice
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.objects import mapping
from ..checkpoint.selection import selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, is_contiguous
from ..files.sources import FolderSource, Span
from ..formats.megatron.args import Arguments, arguments, number
from ..formats.opening import open_checkpoint, takes_path
from ..formats.pieces.chunks import Chunk, joined
from ..pickles.nodes import Ref
from .recompute import Recomputation

#: How the rows of a tensor are cut into other tensors:
#: ``vocabulary``  without the rows that pad the vocabulary;
#: ``heads``       queries, keys and values, which are interleaved by groups of heads;
#: ``halves``      the gate projection and the up projection.
Cut: TypeAlias = Literal["", "vocabulary", "heads", "halves"]


class Rule(NamedTuple):
    """A tensor's name, and the names of the tensors that its rows are cut into; {} stands for the layer."""

    source: str
    names: tuple[str, ...]
    cut: Cut = ""


def _in_layer(source: str, *names: str, cut: Cut = "") -> Rule:
    return Rule(f"decoder.layers.{{}}.{source}", tuple(f"model.layers.{{}}.{name}" for name in names), cut)


# Sources: transformers, ``models/llama/modeling_llama.py``, ``models/qwen2/modeling_qwen2.py`` and
# ``models/qwen3/modeling_qwen3.py``; Megatron-LM, ``megatron/core/models/gpt/gpt_model.py`` and
# ``tools/checkpoint/loader_llama_mistral.py``.

_ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

#: Llama, and Mistral, which has the same names. Transformer Engine fuses a norm with the linear layer after it.
_LLAMA: Final = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    _in_layer("input_layernorm.weight", "input_layernorm.weight"),
    _in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _in_layer("self_attention.linear_qkv.weight", *(f"{name}.weight" for name in _ATTENTION), cut="heads"),
    _in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    _in_layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", cut="halves"),
    _in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)

#: Llama with biases for queries, keys and values (``--add-qkv-bias`` in Megatron-LM).
_QWEN2: Final = (
    *_LLAMA,
    _in_layer("self_attention.linear_qkv.bias", *(f"{name}.bias" for name in _ATTENTION), cut="heads"),
)

#: Llama with norms for queries and keys (``--qk-layernorm`` in Megatron-LM).
_QWEN3: Final = (
    *_LLAMA,
    _in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

#: The table of each family.
FAMILIES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "hf:llama": _LLAMA,
    "hf:mistral": _LLAMA,
    "hf:qwen2": _QWEN2,
    "hf:qwen3": _QWEN3,
}

#: Tensors that a model may lack: with tied embeddings the head is the embedding.
OPTIONAL: Final = frozenset(("lm_head.weight",))


def table(family: str) -> tuple[Rule, ...]:
    """Return the table of a family; raise TargetError for an unknown family."""
    if family not in FAMILIES:
        raise TargetError(f"{family!r} is not a family of names", next=f"one of {join_limited(list(FAMILIES))}")
    return FAMILIES[family]


_NUMBER: Final = re.compile(r"(?<=\.layers\.)\d{1,6}(?=\.)")
#: The file with non-tensor values in Megatron-LM's distributed format, up to version 0.16.
_COMMON: Final = "common.pt"
_EXTRA: Final = re.compile(r"(?:\A|\.)_extra_state(?:/|\Z)")
_LAYERS: Final = ".layers."
#: Maximum number of stacked layers; no model has more.
_MOST_LAYERS: Final = 1 << 16

#: Rows in a tensor: (first, count).
_RowRange: TypeAlias = tuple[int, int]


class _Source(NamedTuple):
    """A tensor to be cut, or one layer in a tensor of stacked layers.

    ``layer`` is the number of the layer, or -1. ``row`` is the first row of the layer, and ``shape`` its shape.
    """

    name: str
    ref: Ref
    tensor: Tensor
    rule: Rule
    layer: int
    row: int
    shape: tuple[int, ...]


@takes_path
def named_as(checkpoint: Checkpoint, family: str, *, key: str | None = None) -> Checkpoint:
    """Give a Megatron-LM model the names and tensors of another library: "hf:llama" for transformers.

    ``key`` is the path of its state dict. Raise TargetError for an unknown family, RefusedError for a model that does
    not belong to the family, or without the arguments of the training run.
    """
    rules = {rule.source: rule for rule in table(family)}
    nodes = checkpoint.graph.nodes
    chosen = [
        item for item in selected(checkpoint, key) if any(_rule(str(nodes[name]), rules) for name, _ in item.items)
    ]
    if not chosen:
        what = "there is no model of Megatron-LM in it: no state dict has embedding.word_embeddings.weight"
        raise RefusedError(what, path=checkpoint.path, next=advice("leave ", Setting("to_names", None), " out"))
    state_dict = chosen[0]
    own = _arguments(checkpoint)
    _check_arguments(checkpoint, family, own)
    sources, left = _sources(checkpoint, state_dict, rules)
    if left:
        what = f"{family} has no name for {join_limited([quoted(name) for name in left], most=3)}"
        raise RefusedError(what, path=checkpoint.path, next="name another family, or drop what the model does not need")
    _check_layers(checkpoint, sources, own)
    _check_names(checkpoint, family, sources, rules.values())
    work = Recomputation(checkpoint)
    made: dict[str, tuple[Ref, Ref]] = {}
    for source in sources:
        for name, ref in _cut(work, source, own).items():
            made[name] = work.editor.add(name), ref
    inside = {key for key, _ in state_dict.items}
    kept = [item for item in mapping(checkpoint.graph, state_dict.ref) or () if item[0] not in inside]
    work.editor.refill(state_dict.ref, [*made.values(), *kept])
    number_before = pluralize(len({source.name for source in sources}), "tensor")
    what = f"{number_before} of Megatron-LM made into {len(made):,} with the names of {family}"
    notes = (*_extra_note(checkpoint, state_dict), *_vocabulary_note(sources, own))
    return work.done([Change("to-names", state_dict.path, len(made), 0, what, notes)])


def fitting_family(checkpoint: Checkpoint, key: str | None) -> str:
    """Return the first family whose names fit the Megatron-LM model in a state dict, or ""."""
    for family in FAMILIES:
        with suppress(CkptoolError):
            named_as(checkpoint, family, key=key)
            return family
    return ""


def _arguments(checkpoint: Checkpoint) -> Arguments:
    """Return the arguments of the training run; raise RefusedError if they are missing."""
    own = arguments(checkpoint.graph)
    beside = checkpoint.source.beside if isinstance(checkpoint.source, FolderSource) else ()
    for path in beside if not own else ():
        if os.path.basename(path) == _COMMON:
            with closing(open_checkpoint(path)) as other:
                own = arguments(other.graph)
    if not own:
        what = "the arguments of the run are not in it: how its heads are grouped is not known"
        raise RefusedError(what, path=checkpoint.path, next="take the folder that Megatron-LM saved, with its args")
    return own


#: Features that no family here has: an argument, whether its value means the feature, and a description.
_FOREIGN: Final[Sequence[tuple[str, Callable[[object], bool], str]]] = (
    ("attention_output_gate", bool, "its attention has a gate, whose rows no table describes"),
    ("multi_latent_attention", bool, "its attention is latent"),
    ("swiglu", lambda value: not value, "its MLP has no gate of SiLU"),
    ("normalization", lambda value: value != "RMSNorm", "its norms are others than RMSNorm"),
    ("apply_layernorm_1p", bool, "the weights of its norms are stored minus 1"),
    ("rotary_interleaved", bool, "its rotary embedding is interleaved"),
    ("rotary_percent", lambda value: value not in (None, 1), "only some of each head is rotated"),
    ("position_embedding_type", lambda value: value not in ("rope", "yarn"), "its positions are not rotary"),
)


def _check_arguments(checkpoint: Checkpoint, family: str, own: Arguments) -> None:
    """Raise RefusedError if the arguments describe a model that the family does not have."""
    for name, is_foreign, what in _FOREIGN:
        if name in own and is_foreign(own[name]):
            message = f"{what} ({name} = {own[name]!r}), unlike a model of {family}"
            raise RefusedError(message, path=checkpoint.path, next=advice("leave ", Setting("to_names", None), " out"))


def _rule(name: str, rules: Mapping[str, Rule]) -> Rule | None:
    return rules.get(_NUMBER.sub("{}", name, count=1)) or rules.get(_of_layers(name))


def _of_layers(name: str) -> str:
    """Return the name of one layer's tensor, with {} for the number, from the name of a tensor of stacked layers."""
    return name.replace(_LAYERS, _LAYERS + "{}.", 1)


def _sources(
    checkpoint: Checkpoint, state_dict: StateDict, rules: Mapping[str, Rule]
) -> tuple[list[_Source], list[str]]:
    """Return the tensors with their rules, stacked layers one by one, and the names without a rule."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    sources, left = [], []
    for key, ref in state_dict.items:
        name, tensor = str(graph.nodes[key]), reader.tensor(ref)
        if tensor is None or _EXTRA.search(name):
            continue
        match = _NUMBER.search(name)
        rule = rules.get(_NUMBER.sub("{}", name, count=1))
        if rule is not None:
            sources.append(_Source(name, ref, tensor, rule, int(match[0]) if match else -1, 0, tensor.shape))
        elif (stacked := rules.get(_of_layers(name))) and len(tensor.shape) > 1 and tensor.shape[0] <= _MOST_LAYERS:
            rows = tensor.shape[1]
            sources += [
                _Source(name, ref, tensor, stacked, layer, layer * rows, tensor.shape[1:])
                for layer in range(tensor.shape[0])
            ]
        else:
            left.append(name)
    order = {rule.source: place for place, rule in enumerate(rules.values())}
    last = max((source.layer for source in sources), default=-1) + 1

    def place(source: _Source) -> tuple[int, int]:
        """Return a sort key for the order in a model: embeddings, the layers, then the rest."""
        at = order[source.rule.source]
        return (source.layer if source.layer >= 0 else -1 if not at else last), at

    return sorted(sources, key=place), left


def _check_layers(checkpoint: Checkpoint, sources: Sequence[_Source], own: Arguments) -> None:
    """Raise RefusedError if a layer lacks a tensor that others have, or layers are missing at the end."""
    layers: dict[int, set[str]] = {}
    for source in sources:
        layers.setdefault(source.layer, set()).update(source.rule.names)
    numbered = {layer: names for layer, names in layers.items() if layer >= 0}
    common = set().union(*numbered.values())
    count = max(numbered, default=-1) + 1
    for layer in range(count):
        missing = sorted(common - numbered.get(layer, set()))
        if missing:
            what = f"layer {layer} lacks {quoted(missing[0].format(layer))}"
            raise RefusedError(what, path=checkpoint.path, next="see what is there with ckptool keys")
    wanted = number(own, "num_layers") or count
    if wanted != count:
        what = f"it has {pluralize(count, 'layer')}, and the model {wanted:,}, as its arguments say"
        raise RefusedError(what, path=checkpoint.path, next="get the parts again that are missing")


def _check_names(checkpoint: Checkpoint, family: str, sources: Sequence[_Source], rules: Iterable[Rule]) -> None:
    """Raise RefusedError if nothing becomes one of the family's tensors."""
    made = {name for source in sources for name in source.rule.names}
    missing = [name for rule in rules for name in rule.names if name not in made and name not in OPTIONAL]
    if missing:
        what = f"a model of {family} has {quoted(missing[0].format(0))}, and nothing here becomes that"
        raise RefusedError(what, path=checkpoint.path, next=f"name another family: {join_limited(list(FAMILIES))}")


def _cut(work: Recomputation, source: _Source, own: Arguments) -> dict[str, Ref]:
    """Return the new tensors by name."""
    checkpoint = work.checkpoint
    names = [name.format(source.layer) for name in source.rule.names]
    parts = _row_ranges(checkpoint, source, own)
    rows = source.shape[0] if source.shape else 0
    if parts == [[(0, rows)]] and source.shape == source.tensor.shape:
        return {names[0]: source.ref}
    tensor, dtype = source.tensor, BY_NAME.get(source.tensor.dtype)
    if tensor.kind != "dense" or dtype is None or dtype.packed > 1:
        raise _misfit(checkpoint, source, f"it is {tensor.kind}, of the dtype {tensor.dtype}")
    body = checkpoint.body(tensor.storage)
    if body is None or not isinstance(body.piece, Span) or body.compressed or not is_contiguous(tensor):
        raise RefusedError(f"the bytes of {quoted(source.name)} are not in one piece", path=checkpoint.path)
    if tensor.offset < 0 or (tensor.offset + tensor.numel) * dtype.itemsize > body.size:
        raise _misfit(checkpoint, source, "it reaches beyond its storage")
    width = prod(source.shape[1:]) * dtype.itemsize
    first = body.piece.offset + tensor.offset * dtype.itemsize + source.row * width
    start = Span(body.piece.source, first, rows * width)
    refs = {}
    for name, ranges in zip(names, parts):
        shape = (sum(count for _, count in ranges), *source.shape[1:])
        refs[name] = work.tensor(name, dtype, shape, _gathered(start, ranges, shape, dtype, name), tensor.location)
    return refs


def _gathered(start: Span, ranges: Sequence[_RowRange], shape: tuple[int, ...], dtype: Dtype, name: str) -> Span:
    """Return the bytes of some rows, one range after the other."""
    width, rest, at, chunks = prod(shape[1:]) * dtype.itemsize, (0,) * (len(shape) - 1), 0, []
    for row, count in ranges:
        chunks.append(Chunk(((at, *rest), (count, *shape[1:])), start.source, start.offset + row * width))
        at += count
    span = joined(chunks, shape, dtype.itemsize, name).span
    assert span is not None
    return span


def _row_ranges(checkpoint: Checkpoint, source: _Source, own: Arguments) -> list[list[_RowRange]]:
    """Return the rows of each tensor that this one is cut into."""
    rows = source.shape[0] if source.shape else 0
    if source.rule.cut == "vocabulary":
        return [[(0, min(rows, number(own, "vocab_size") or rows))]]
    if source.rule.cut == "halves":
        if rows % 2:
            raise _misfit(checkpoint, source, "a gate and what it is for are halves, and its rows are odd")
        return [[(0, rows // 2)], [(rows // 2, rows // 2)]]
    if source.rule.cut == "heads":
        heads = number(own, "num_attention_heads")
        # Without grouped attention each head is its own group.
        groups = number(own, "num_query_groups") if own.get("group_query_attention", True) else heads
        groups = groups or heads
        size = number(own, "kv_channels") or number(own, "hidden_size") // max(heads, 1)
        if not groups or heads % groups or rows != (heads + 2 * groups) * size:
            what = f"{heads} heads in {groups} groups of the size {size} take {(heads + 2 * groups) * size:,} rows"
            raise _misfit(checkpoint, source, f"{what}, and it has {rows:,}")
        queries = heads // groups * size
        starts = range(0, rows, queries + 2 * size)
        return [
            [(start, queries) for start in starts],
            [(start + queries, size) for start in starts],
            [(start + queries + size, size) for start in starts],
        ]
    return [[(0, rows)]]


def _misfit(checkpoint: Checkpoint, source: _Source, why: str) -> RefusedError:
    return RefusedError(f"{quoted(source.name)} cannot be cut: {why}", path=checkpoint.path)


def _extra_note(checkpoint: Checkpoint, state_dict: StateDict) -> tuple[str, ...]:
    """Return the note on non-tensor layer state, such as FP8 scales, which other libraries do not keep."""
    nodes = checkpoint.graph.nodes
    extra = [key for key, ref in state_dict.items if _EXTRA.search(str(nodes[key])) and nodes[ref] is not None]
    return (f"without {pluralize(len(extra), '_extra_state')}",) if extra else ()


def _vocabulary_note(sources: Sequence[_Source], own: Arguments) -> tuple[str, ...]:
    """Return the note on the rows that pad the vocabulary; empty if there are none."""
    cut = next((source for source in sources if source.rule.cut == "vocabulary"), None)
    rows, wanted = cut.shape[0] if cut else 0, number(own, "vocab_size")
    if not rows or wanted == rows:
        return ()
    if not wanted:
        return (f"the vocabulary keeps its {rows:,} rows, padding included: its size is not in the arguments",)
    return (f"the vocabulary cut from {rows:,} to {wanted:,} rows",) if wanted < rows else ()
