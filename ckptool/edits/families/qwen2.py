"""Qwen2: Llama with biases for queries, keys and values (``--add-qkv-bias`` in Megatron-LM).

Source: transformers, ``models/qwen2/modeling_qwen2.py``.
"""

from __future__ import annotations

from typing import Final

from . import llama
from .table import Rule

_ATTENTION: Final = "model.layers.{}.self_attn."

RULES: Final = (
    *llama.RULES,
    Rule(
        "decoder.layers.{}.self_attention.linear_qkv.bias",
        (_ATTENTION + "q_proj.bias", _ATTENTION + "k_proj.bias", _ATTENTION + "v_proj.bias"),
        "heads",
    ),
)
