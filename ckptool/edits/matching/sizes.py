"""Name the reasons why tensors have other sizes in a checkpoint than in a model, and what helps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize, shape_text
from .names import Shape
from .state_dict_errors import Mismatch

#: Modules with one row for each token, beside those with "emb" in their names.
_VOCABULARY: Final = frozenset(("wte", "lm_head", "output_layer", "shared"))
#: Embeddings of other things than tokens.
_OTHER_EMBEDDINGS: Final = regex(r"(?:patch|type|spk|speaker|emb_g|lang|class|label|time|pos)", re.IGNORECASE)
_ADAPTERS: Final = regex(r"lora_|\.adapter|lokr|hada_|prompt_encoder")
#: The second matrix of LoRA, whose columns are the rank.
_SECOND: Final = regex(r"lora_(?:embedding_)?[Bb]\b|lora[_.]up|_b\Z")
_SPEAKERS: Final = regex(r"(?:spk|speaker|emb_g|language_emb|lang_emb)", re.IGNORECASE)
_POSITIONS: Final = regex(
    r"(?:pos_?emb|position_?emb|positional|pos_table|relative_position|relative_coords|attention_bias|rel_pos|\bwpe\b|embed_positions"
    r"|position_ids|attn_mask|rotary|freqs_cis|(?:cos|sin)_cached|attn\.(?:masked_)?bias\Z)",
    re.IGNORECASE,
)
#: Buffers that a model computes itself when it is built. A copy without them loses nothing.
_COMPUTED: Final = regex(
    r"(?:relative_position_index|attention_bias_idxs|relative_coords_table|attn_mask|position_ids|inv_freq|freqs_cis|(?:cos|sin)_cached"
    r"|rotary_emb\.freqs|attn\.(?:masked_)?bias)\Z"
)
#: Numbers of processes that models are cut for.
_PARTS: Final = (2, 4, 8, 16, 32, 64)
#: A module within one of several equal blocks: ``layers.0.attention.wq``.
_IN_BLOCK: Final = regex(r"\.\d+\.[A-Za-z_]\w*\.[A-Za-z_]\w*\Z")
#: A classifier has at most so many modules, and one in so many keys.
_HEADS: Final = 3
_SHARE: Final = 4


class Cause(NamedTuple):
    """A reason why keys do not load, with what helps, as a clause for a message.

    ``keys`` are the keys of the model that it explains, and ``unused`` the keys of the file that have no place there.
    ``replaceable`` says that a copy without the keys loses nothing, because they are computed or trained again.
    """

    kind: str
    message: str
    keys: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    replaceable: bool = False


#: Makes the message from all tensors of a kind, and from the shapes of all tensors in the file.
_Message: TypeAlias = "Callable[[Sequence[Mismatch], Mapping[str, Shape]], str]"
#: A rule: the kind, a test for one tensor, and the message.
_Rule: TypeAlias = "tuple[str, Callable[[Mismatch], bool], str | _Message]"


def size_causes(mismatches: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> list[Cause]:
    """Return the reasons for the tensors of other sizes, each tensor under one of them.

    ``shapes`` are the shapes of all tensors in the file. The last resort is a model that was built with other sizes.
    """
    if parts := _parts(mismatches):
        return [Cause("part", _cut(parts), _keys(mismatches))]
    groups: dict[str, list[Mismatch]] = {}
    rest: list[Mismatch] = []
    for item in mismatches:
        kind = next((kind for kind, fits, _ in _RULES if fits(item)), "")
        groups.setdefault(kind, []).append(item) if kind else rest.append(item)
    tokens = {_rows(item) for item in groups.get("vocabulary", ())}
    others = [item for item in rest if _rows(item) in tokens]
    if others:  # the bias of the head, and the head itself
        groups["vocabulary"] += others
        rest = [item for item in rest if item not in others]
    if rest and len(rest) * 2 > len(mismatches) and not _is_head(rest, len(shapes)):
        groups = {}  # the model is another one, which other kinds would only obscure
        rest = list(mismatches)
    causes = []
    for kind, _, message in _RULES:
        items = groups.get(kind)
        if items:
            computed = kind == "positions" and all(_COMPUTED.search(item.key) for item in items)
            text = message if isinstance(message, str) else message(items, shapes)
            causes.append(Cause(kind, text, _keys(items), replaceable=computed))
    if rest and _is_head(rest, len(shapes)):
        causes.append(Cause("classes", _other_classes(rest), _keys(rest), replaceable=True))
    elif rest:
        causes.append(Cause("configuration", _other_configuration(rest), _keys(rest)))
    return causes


def sizes_text(mismatches: Sequence[Mismatch]) -> str:
    """Return the sizes of the first tensor on both sides, and how many others differ."""
    first, count = mismatches[0], len(mismatches)
    more = f", and {count - 1:,} more {'differ' if count > 2 else 'differs'}" if count > 1 else ""
    return f"{first.key!r} is {shape_text(first.saved)} in the file and {shape_text(first.wanted)} in the model{more}"


def _keys(items: Sequence[Mismatch]) -> tuple[str, ...]:
    return tuple(item.key for item in items)


# -- tests for one tensor


def _is_head(items: Sequence[Mismatch], keys: int) -> bool:
    """Return whether the tensors may be the last layer of a classifier."""
    modules = {item.key.rpartition(".")[0] for item in items}
    few = len(modules) <= _HEADS and len(items) * _SHARE <= max(keys, 8)
    layer = all(_other_rows(item) and item.key.endswith(("weight", "bias")) for item in items)
    return few and layer and not any(map(_IN_BLOCK.search, modules))


def _rows(item: Mismatch) -> tuple[int, int]:
    """Return the number of rows on both sides, if nothing else differs: the first size, or the last of one row."""
    if len(item.saved) != len(item.wanted) or not item.saved:
        return 0, 0
    differing = [pair for pair in zip(item.saved, item.wanted) if pair[0] != pair[1]]
    one_row = item.saved[:-1] == item.wanted[:-1] and set(item.saved[:-1]) <= {1}
    return differing[0] if len(differing) == 1 and (one_row or item.saved[0] != item.wanted[0]) else (0, 0)


def _parts(mismatches: Sequence[Mismatch]) -> float:
    """Return by what number all tensors are cut, some by rows and some by columns: 2 if the file has halves, 0.5 if the
    model wants halves; 0 for anything else. Tensor parallelism cuts this way; another width changes rows and columns.
    """
    ratios, axes = set[float](), set[int]()
    for key, saved, wanted in mismatches:
        differing = [axis for axis, pair in enumerate(zip(saved, wanted)) if pair[0] != pair[1]]
        if len(saved) != len(wanted) or len(differing) != 1 or not saved[differing[0]] or _ADAPTERS.search(key):
            return 0
        ratios.add(wanted[differing[0]] / saved[differing[0]])
        axes.update(differing)
    ratio = ratios.pop()
    return ratio if not ratios and axes == {0, 1} and (ratio in _PARTS or 1 / ratio in _PARTS) else 0


def _is_empty(item: Mismatch) -> bool:
    return item.saved == (0,) != item.wanted


def _is_transposed(item: Mismatch) -> bool:
    return len(item.saved) == 2 and item.saved == item.wanted[::-1]


def _is_squeezed(item: Mismatch) -> bool:
    """Return whether only sizes of 1 differ: a linear layer and a convolution with a kernel of 1."""
    same = [size for size in item.saved if size != 1] == [size for size in item.wanted if size != 1]
    return same and len(item.saved) != len(item.wanted)


def _is_packed(item: Mismatch) -> bool:
    """Return whether the tensor has the form of 4-bit weights of bitsandbytes: two elements in each byte."""
    packed, plain = math.prod(item.saved), math.prod(item.wanted)
    return len(item.saved) == 2 and item.saved[1] == 1 and len(item.wanted) > 1 and packed * 2 == plain


def _is_flat(item: Mismatch) -> bool:
    return len(item.saved) == 1 < len(item.wanted) and item.saved != (0,)


def _of_model(fits: Callable[[Mismatch], bool]) -> Callable[[Mismatch], bool]:
    """Return a test for a tensor of the model in the form that ``fits`` finds in a file."""
    return lambda item: fits(Mismatch(item.key, item.wanted, item.saved))


def _is_position(item: Mismatch) -> bool:
    """Return whether a tensor has another size only because of the image size or the sequence length."""
    same = len(item.saved) == len(item.wanted) and any(a == b > 1 for a, b in zip(item.saved, item.wanted))
    return bool(_COMPUTED.search(item.key) or (same and _POSITIONS.search(item.key)))


def _is_vocabulary(item: Mismatch) -> bool:
    if len(item.saved) != 2 or not _other_rows(item) or _OTHER_EMBEDDINGS.search(item.key):
        return False
    return any("emb" in part or part in _VOCABULARY for part in item.key.lower().split("."))


def _is_adapter(item: Mismatch) -> bool:
    """Return whether only the rank of an adapter differs: the rows of the first matrix, the columns of the second."""
    if not _ADAPTERS.search(item.key) or len(item.saved) != len(item.wanted):
        return False
    if _SECOND.search(item.key):
        return item.saved[:1] + item.saved[2:] == item.wanted[:1] + item.wanted[2:]
    return item.saved[1:] == item.wanted[1:]


def _is_input(item: Mismatch) -> bool:
    """Return whether a convolution differs in the number of its input channels, which only the first one can."""
    others = [(*shape[:1], *shape[2:]) for shape in (item.saved, item.wanted)]
    return len(item.saved) == len(item.wanted) >= 3 and others[0] == others[1]


def _other_rows(item: Mismatch) -> bool:
    return bool(item.saved) and len(item.saved) == len(item.wanted) and item.saved[1:] == item.wanted[1:]


# -- messages


def _cut(ratio: float) -> str:
    if ratio > 1:
        return (
            f"each tensor has 1/{ratio:.0f} of the rows or columns: the file is one of {ratio:.0f} parts of a model,"
            " cut for as many processes; inspect and convert the folder with all parts"
        )
    return (
        f"the model takes 1/{1 / ratio:.0f} of the rows or columns of each tensor, as one of {1 / ratio:.0f} processes:"
        " build it for one process, or load the file with the library that cuts it"
    )


def _other_classes(items: Sequence[Mismatch]) -> str:
    modules = list(dict.fromkeys(item.key.rpartition(".")[0] or "the tensor" for item in items))
    names = join_limited([repr(name) for name in modules])
    return (
        f"{names} {'have' if len(modules) > 1 else 'has'} one row for each class, and the model has another number of"
        f" classes: build the model with {items[0].saved[0]:,}, or train this part again"
    )


def _other_configuration(items: Sequence[Mismatch]) -> str:
    return (
        "the model is built with other sizes than the model that was saved, such as another width, depth or variant"
        f" ({pluralize(len(items), 'key')} {'differs' if len(items) == 1 else 'differ'}): build it with the"
        " configuration of the file"
    )


def _other_vocabulary(items: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> str:
    saved, wanted = _rows(items[0])
    names = join_limited(list(dict.fromkeys(item.key for item in items)), most=4)
    number, more = abs(saved - wanted), wanted > saved
    if number * 2 > min(saved, wanted):
        return (
            f"there is one row for each token in {names}, {saved:,} in the file and {wanted:,} in the model, which is"
            f" another tokenizer: build the model with the tokenizer and the vocab_size of the file, {saved}"
        )
    after = f", and model.resize_token_embeddings({wanted}) after it" if more else ""
    return (
        f"the vocabulary has {saved:,} rows in the file and {wanted:,} in the model, where"
        f" {pluralize(number, 'row')} {'was' if number == 1 else 'were'} {'added' if more else 'removed'},"
        f" in {names}: build the model with vocab_size={saved}, or call model.resize_token_embeddings({saved}) before"
        f" loading{after}"
    )


def _other_positions(items: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> str:
    tables = [item for item in items if not _COMPUTED.search(item.key)]
    ends = list(dict.fromkeys(item.key.rpartition(".")[2] for item in items if item not in tables))
    parts = []
    if tables:
        parts.append(
            f"the table of positions {tables[0].key} is {shape_text(tables[0].saved)} in the file and"
            f" {shape_text(tables[0].wanted)} in the model, which is another image size or sequence length: build the"
            " model with the size in the file, or resize the table as timm.layers.resample_abs_pos_embed, or"
            " interpolate_pos_encoding=True of transformers, does for images"
        )
    if ends:
        parts.append(f"the model computes {join_limited(ends)} itself: load without {'them' if ends[1:] else 'it'}")
    return "; ".join(parts)


def _other_rank(items: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> str:
    first = items[0]
    pair = next((pair for pair in zip(first.saved, first.wanted) if pair[0] != pair[1]), (0, 0))
    return (
        f"the adapter has another rank than the one in the model, {pair[0]:,} in the file and {pair[1]:,} in the model:"
        " build the model with the adapter_config.json that belongs to the file, whose 'r' is the rank"
    )


def _transposed(items: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> str:
    layers = list(dict.fromkeys(_layer(item.key).rpartition(".")[2] for item in items))
    blocks = {_layer(_layer(item.key)) for item in items}
    square = [
        name
        for name, shape in shapes.items()
        if shape is not None and len(shape) == 2 and shape[0] == shape[1] and _layer(_layer(name)) in blocks
    ]
    too = f"; {join_limited(square, most=2)} may be too, as square shapes do not show it" if square else ""
    return (
        f"{pluralize(len(items), 'weight')} of {join_limited(layers, most=4)} {'is' if len(items) == 1 else 'are'}"
        " transposed: one side has nn.Linear, the other Conv1D (GPT-2) or a Keras layout; state[key] = state[key].T"
        f" turns each{too}"
    )


def _squeezed(items: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> str:
    key = items[0].key
    return (
        f"{pluralize(len(items), 'tensor')} differ{'s' if len(items) == 1 else ''} only in dimensions of size 1, as"
        f" nn.Linear and a convolution with a kernel of 1 do: state[{key!r}].reshape({items[0].wanted}) gives the other"
        " form"
    )


def _layer(name: str) -> str:
    """Return the name of the module that holds a tensor or module."""
    return name.rpartition(".")[0]


_EMPTY: Final = (
    "the tensors have no values: with DeepSpeed ZeRO-3 each rank holds a part of every weight, and one rank saved"
    " without gathering them; save again on all ranks, with trainer.save_model(), model.save_checkpoint() or"
    " zero3_save_16bit_model, or convert the folder global_stepN that DeepSpeed saved beside it"
)
_QUANTIZED: Final = (
    "the weights were quantized to 4 bits by bitsandbytes, two in each byte: load them into a model that is quantized"
    " the same way, from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))"
)
_PARTITIONED_MODEL: Final = (
    "the model has no values in these places: DeepSpeed ZeRO-3 has cut it into parts for the processes; load the file"
    " before deepspeed.initialize, with from_pretrained, or within"
    " deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)"
)
_QUANTIZED_MODEL: Final = (
    "the model is quantized to 4 bits by bitsandbytes, and the file is not: from_pretrained quantizes what it loads,"
    " load_state_dict does not"
)
_FLAT: Final = (
    "the tensors are flat, as FSDP holds them, or one rank's part: save again with FULL_STATE_DICT, or inspect the"
    " folder with the files of all ranks"
)
_FLAT_MODEL: Final = (
    "the tensors of the model are flat: FSDP has cut it into parts; load the file before the model is wrapped, or"
    " within FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
)
_SPEAKER: Final = "there is one row for each speaker or language: build the model with the configuration of the file"
_CHANNELS: Final = (
    "the first layer takes another number of input channels: build the model with the number of the file (for example"
    " in_chans or in_channels)"
)
_RULES: Final[tuple[_Rule, ...]] = (
    ("empty", _is_empty, _EMPTY),
    ("quantized", _is_packed, _QUANTIZED),
    ("partitioned-model", _of_model(_is_empty), _PARTITIONED_MODEL),
    ("quantized-model", _of_model(_is_packed), _QUANTIZED_MODEL),
    ("positions", _is_position, _other_positions),
    ("squeezed", _is_squeezed, _squeezed),
    ("flat", _is_flat, _FLAT),
    ("flat-model", _of_model(_is_flat), _FLAT_MODEL),
    ("adapter", _is_adapter, _other_rank),
    ("transposed", _is_transposed, _transposed),
    ("vocabulary", _is_vocabulary, _other_vocabulary),
    ("speakers", lambda item: _other_rows(item) and bool(_SPEAKERS.search(item.key)), _SPEAKER),
    ("channels", _is_input, _CHANNELS),
)
