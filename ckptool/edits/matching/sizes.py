"""Name the reason why tensors have other sizes in a checkpoint than in a model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ...base.text import join_limited, pluralize, shape_text
from .state_dict_errors import Mismatch


class SizeDifference(NamedTuple):
    """The reason, with what helps; ``replaceable`` if the tensors are trained again anyway, such as a classifier."""

    kind: str
    message: str
    replaceable: bool = False


#: Modules with one row for each token. A model with at least this many rows there is a language model.
_VOCABULARY: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|embed_out|lm_head|output_layer|shared"
    r"|token_embedding|text_embedding\.embedding|text_embed|emb_text|ar_text_embedding|predictions\.decoder"
    r"|predictions|tokens?_embed\w*)(?:\.|$)"
)
_ROWS: Final = 200
_POSITIONS: Final = re.compile(
    r"(?:pos_?emb|position_?emb|positional|pos_table|relative_position|relative_coords|rel_pos|\bwpe\b|attn_mask"
    r"|position_ids|rotary|freqs_cis)",
    re.IGNORECASE,
)
_ADAPTERS: Final = re.compile(r"lora_|\.adapter|lokr|hada_|prompt_encoder")
_SPEAKERS: Final = re.compile(r"(?:spk|speaker|emb_g|language_emb|lang_emb)", re.IGNORECASE)


def size_difference(mismatches: Sequence[Mismatch], keys: int) -> SizeDifference:
    """Return the reason for one or more mismatches in a model with so many keys.

    The first rule that fits all of them, or most, counts; the last resort is a model that was built with other sizes.
    """
    count = len(mismatches)
    first = mismatches[0]
    shapes = f"{first.key!r} is {shape_text(first.saved)} in the file and {shape_text(first.wanted)} in the model"
    more = f", and {count - 1:,} more differ" if count > 1 else ""
    sizes = shapes + more
    for kind, fits, advice in _RULES:
        if sum(map(fits, mismatches)) * 2 > count:
            return SizeDifference(kind, f"{sizes}. {advice}")
    modules = list(dict.fromkeys(item.key.rpartition(".")[0] for item in mismatches))
    if len(modules) <= 3 and count * 4 <= max(keys, 8) and all(map(_other_rows, mismatches)):
        return SizeDifference(
            "classes",
            f"{sizes}. {_verb(modules)} one row for each class, and your model has another number of classes. Build"
            f" the model with {first.saved[0]:,}, or train this part again: the command leaves it out of a copy, and"
            " strict=False loads the rest.",
            replaceable=True,
        )
    return SizeDifference(
        "configuration",
        f"{sizes}. The model is built with other sizes than the model that was saved, such as another width, depth or"
        f" variant ({pluralize(count, 'key')} differ). Build it with the configuration of the file.",
    )


def _verb(modules: Sequence[str]) -> str:
    names = join_limited([repr(name or "the tensor") for name in modules])
    return f"{names} {'have' if len(modules) > 1 else 'has'}"


def _is_empty(item: Mismatch) -> bool:
    return item.saved == (0,) != item.wanted


def _is_transposed(item: Mismatch) -> bool:
    return len(item.saved) == 2 and item.saved == item.wanted[::-1]


def _is_packed(item: Mismatch) -> bool:
    """Return whether the tensor has the form of 4-bit weights of bitsandbytes: two elements in each byte."""
    packed, plain = math.prod(item.saved), math.prod(item.wanted)
    return len(item.saved) == 2 and item.saved[1] == 1 and len(item.wanted) > 1 and packed * 2 == plain


def _is_flat(item: Mismatch) -> bool:
    return len(item.saved) == 1 < len(item.wanted) and item.saved != (0,)


def _is_vocabulary(item: Mismatch) -> bool:
    return _other_rows(item) and max(item.saved[0], item.wanted[0]) >= _ROWS and bool(_VOCABULARY.search(item.key))


def _is_position(item: Mismatch) -> bool:
    return bool(_POSITIONS.search(item.key))


def _is_adapter(item: Mismatch) -> bool:
    return bool(_ADAPTERS.search(item.key))


def _is_speaker(item: Mismatch) -> bool:
    return _other_rows(item) and bool(_SPEAKERS.search(item.key))


def _is_input(item: Mismatch) -> bool:
    """Return whether a convolution differs in the number of its input channels, which only the first one can."""
    return len(item.saved) == len(item.wanted) >= 3 and [*item.saved[:1], *item.saved[2:]] == [
        *item.wanted[:1],
        *item.wanted[2:],
    ]


def _other_rows(item: Mismatch) -> bool:
    return bool(item.saved) and len(item.saved) == len(item.wanted) and item.saved[1:] == item.wanted[1:]


_RULES: Final = (
    (
        "empty",
        _is_empty,
        "The tensors have no values: with DeepSpeed ZeRO-3 each rank holds a part of every weight, and one rank saved"
        " without gathering them. Save again on all ranks, with trainer.save_model(), model.save_checkpoint() or"
        " zero3_save_16bit_model; or convert the folder global_stepN that DeepSpeed saved beside it.",
    ),
    (
        "quantized",
        _is_packed,
        "The weights were quantized to 4 bits by bitsandbytes, two in each byte. Load them into a model that is"
        " quantized the same way: from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True)).",
    ),
    (
        "flat",
        _is_flat,
        "The tensors are flat, as FSDP holds them, or one rank's part. Save again with FULL_STATE_DICT, or inspect the"
        " folder with the files of all ranks.",
    ),
    (
        "adapter",
        _is_adapter,
        "The adapter has another rank than the one in the model. Build the model with the adapter_config.json that"
        " belongs to the file: its 'r' is the rank.",
    ),
    (
        "vocabulary",
        _is_vocabulary,
        "There is one row for each token, and the tokenizer of the model has another number of tokens. Load with the"
        " tokenizer and the vocab_size of the file first, then call model.resize_token_embeddings(len(tokenizer)).",
    ),
    (
        "positions",
        _is_position,
        "Its size follows from the image size or the sequence length. Build the model with the size of the file (for"
        " example img_size or max_position_embeddings), or let the library interpolate it (timm does, with"
        " pretrained_cfg_overlay or resample_abs_pos_embed).",
    ),
    (
        "speakers",
        _is_speaker,
        "There is one row for each speaker or language. Build the model with the configuration of the file.",
    ),
    (
        "transposed",
        _is_transposed,
        "The matrix is transposed: one side uses nn.Linear and the other Conv1D (GPT-2) or a Keras layout. The values"
        " have to be transposed when they are loaded: state[key] = state[key].T.",
    ),
    (
        "channels",
        _is_input,
        "The first layer takes another number of input channels. Build the model with the number of the file (for"
        " example in_chans or in_channels).",
    ),
)
