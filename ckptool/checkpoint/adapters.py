"""Recognise adapter keys: tensors that change a base model when merged into it, but are not its weights.

Sources: PEFT (``utils/save_and_load.py``), kohya's sd-scripts (``networks/lora.py``), LyCORIS, torchtune and mlx-lm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

#: Keys of LoRA and DoRA in each library, LoHa, LoKr, IA3, prompts, trained tokens, OFT, BOFT and VeRA.
_KEY: Final = re.compile(
    r"(?:\A|[._])(?:lora_?(?:A|B|E|a|b|embedding_[AB]|magnitude_vector|down|up|mid)|lora\.(?:down|up)|dora_scale"
    r"|hada_[wt]\d(?:_[ab])?|lokr_[wt]\d(?:_[ab])?|ia3_l|prompt_embeddings|trainable_tokens_delta|b?oft_[RSrs]|vera_lambda_[bd])(?:\.|\Z)"
)


def adapter_keys(names: Iterable[str]) -> list[str]:
    """Return the names of adapter tensors."""
    return [name for name in names if _KEY.search(name)]
