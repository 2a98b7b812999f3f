"""Name the family of a model by the names of its tensors, as the libraries that write them choose them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Final

#: Keys that are looked at; every family shows within its first layers.
_LOOKED_AT: Final = 4_000
#: Families and the patterns that their keys match. The first family with a match for each pattern is the answer.
_FAMILIES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("a LoRA adapter (PEFT)", (r"\.lora_A\.",)),
    ("Stable Diffusion (original names)", (r"diffusion_model\.input_blocks\.", r"first_stage_model\.")),
    ("a diffusion U-Net (diffusers)", (r"down_blocks\.\d+\.resnets\.", r"mid_block\.", r"time_embedding\.")),
    ("an image autoencoder (diffusers)", (r"encoder\.down_blocks\.", r"decoder\.up_blocks\.")),
    ("SAM", (r"image_encoder\.blocks\.", r"mask_decoder\.")),
    ("CLIP (OpenAI names)", (r"visual\.", r"transformer\.resblocks\.", r"token_embedding\.")),
    ("CLIP (transformers)", (r"text_model\.encoder\.layers\.", r"vision_model\.")),
    ("Whisper (transformers)", (r"encoder\.conv1\.", r"decoder\.layers\.\d+\.encoder_attn\.")),
    ("Whisper (OpenAI names)", (r"encoder\.blocks\.\d+\.attn\.", r"decoder\.blocks\.\d+\.cross_attn\.")),
    ("wav2vec 2.0 or HuBERT", (r"feature_extractor\.conv_layers\.", r"encoder\.layers\.\d+\.")),
    ("T5 (transformers)", (r"block\.\d+\.layer\.0\.SelfAttention\.",)),
    ("Mixtral or another mixture of experts", (r"layers\.\d+\.\w+\.experts\.\d+\.",)),
    ("Llama or one like it (transformers)", (r"layers\.\d+\.self_attn\.q_proj\.", r"layers\.\d+\.mlp\.gate_proj\.")),
    ("Llama (Meta's names)", (r"layers\.\d+\.attention\.wq\.", r"layers\.\d+\.feed_forward\.w1\.")),
    ("GPT of Megatron-LM", (r"decoder\.layers\..*self_attention\.linear_qkv\.",)),
    ("GPT-2", (r"(?:^|\.)h\.\d+\.attn\.c_attn\.",)),
    ("GPT-NeoX", (r"layers\.\d+\.attention\.query_key_value\.",)),
    ("BERT or one like it", (r"encoder\.layer\.\d+\.attention\.self\.query\.",)),
    ("Swin Transformer", (r"layers\.\d+\.blocks\.\d+\.attn\.relative_position_bias_table",)),
    ("ViT (timm or DINO)", (r"patch_embed\.proj\.", r"blocks\.\d+\.attn\.qkv\.")),
    ("ViT (torchvision)", (r"conv_proj\.", r"encoder\.layers\.encoder_layer_\d+\.")),
    ("ResNet", (r"(?:^|\.)layer1\.0\.conv1\.", r"(?:^|\.)layer4\.0\.conv1\.")),
    ("ConvNeXt", (r"stages\.\d+\.(?:blocks\.)?\d+\.(?:dwconv|conv_dw)\.",)),
    ("YOLO (ultralytics)", (r"(?:^|\.)model\.0\.conv\.weight", r"(?:^|\.)model\.\d+\.(?:m\.0\.)?cv1\.conv\.")),
    ("HiFi-GAN", (r"(?:^|\.)ups\.0\.", r"resblocks\.0\.convs1\.")),
)


def family_of_model(names: Iterable[str]) -> str:
    """Return the family of a model with these keys, such as "GPT-2", or "" if the names show none."""
    text = "\n".join(islice(names, _LOOKED_AT))
    return next((family for family, parts in _FAMILIES if all(re.search(part, text, re.M) for part in parts)), "")
