"""Qwen3: Llama with norms for queries and keys (``--qk-layernorm`` in Megatron-LM).

Source: transformers, ``models/qwen3/modeling_qwen3.py``.
"""

from __future__ import annotations

from typing import Final

from . import llama
from .table import Rule

RULES: Final = (
    *llama.RULES,
    Rule("decoder.layers.{}.self_attention.q_layernorm.weight", ("model.layers.{}.self_attn.q_norm.weight",)),
    Rule("decoder.layers.{}.self_attention.k_layernorm.weight", ("model.layers.{}.self_attn.k_norm.weight",)),
)
