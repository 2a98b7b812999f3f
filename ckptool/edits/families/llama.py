"""Llama, and Mistral, which has the same names.

Sources: transformers, ``models/llama/modeling_llama.py``; Megatron-LM, ``megatron/core/models/gpt/gpt_model.py`` and
``tools/checkpoint/loader_llama_mistral.py``. Transformer Engine fuses a norm with the linear layer after it.
"""

from __future__ import annotations

from typing import Final

from .table import Rule

_MEGATRON: Final = "decoder.layers.{}."
_LAYER: Final = "model.layers.{}."

RULES: Final = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Rule(_MEGATRON + "input_layernorm.weight", (_LAYER + "input_layernorm.weight",)),
    Rule(_MEGATRON + "self_attention.linear_qkv.layer_norm_weight", (_LAYER + "input_layernorm.weight",)),
    Rule(
        _MEGATRON + "self_attention.linear_qkv.weight",
        (
            _LAYER + "self_attn.q_proj.weight",
            _LAYER + "self_attn.k_proj.weight",
            _LAYER + "self_attn.v_proj.weight",
        ),
        "heads",
    ),
    Rule(_MEGATRON + "self_attention.linear_proj.weight", (_LAYER + "self_attn.o_proj.weight",)),
    Rule(_MEGATRON + "pre_mlp_layernorm.weight", (_LAYER + "post_attention_layernorm.weight",)),
    Rule(_MEGATRON + "mlp.linear_fc1.layer_norm_weight", (_LAYER + "post_attention_layernorm.weight",)),
    Rule(
        _MEGATRON + "mlp.linear_fc1.weight",
        (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
        "halves",
    ),
    Rule(_MEGATRON + "mlp.linear_fc2.weight", (_LAYER + "mlp.down_proj.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)
