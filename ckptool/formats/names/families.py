"""Name the family of a model by the names of its tensors, as the libraries that write them choose them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from ...base.lazy import regex

#: Keys that are looked at; every family shows within its first layers.
_LOOKED_AT: Final = 4_000
#: Families and the parts of names that they have. The first family that has all its parts is the answer. A part that
#: begins with a dot starts a segment; ``#`` is a segment that is a number.
_FAMILIES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("a LoRA adapter (kohya)", (".lora_unet_",)),
    ("a LoRA adapter (kohya)", (".lora_te",)),
    ("a LoRA adapter (diffusers)", (".unet.", ".lora_A.")),
    ("a LoRA adapter (diffusers)", (".unet.", "lora.down.")),
    ("a LoRA adapter (diffusers)", (".transformer.", ".lora_A.", "transformer_blocks.")),
    ("a LoRA adapter (PEFT)", (".lora_A.",)),
    ("a LoRA adapter", (".lora_down.", ".lora_up.")),
    ("Stable Diffusion (original names)", (".diffusion_model.input_blocks.", ".first_stage_model.")),
    ("a diffusion U-Net (diffusers)", (".down_blocks.#.resnets.", ".mid_block.", ".time_embedding.")),
    ("an image autoencoder (diffusers)", (".encoder.down_blocks.", ".decoder.up_blocks.")),
    ("SAM", (".image_encoder.blocks.", ".mask_decoder.")),
    ("CLIP (OpenAI names)", (".visual.", ".transformer.resblocks.", ".token_embedding.")),
    ("CLIP (transformers)", (".text_model.encoder.layers.", ".vision_model.")),
    ("Whisper (transformers)", (".encoder.conv1.", ".decoder.layers.#.encoder_attn.")),
    ("Whisper (OpenAI names)", (".encoder.blocks.#.attn.", ".decoder.blocks.#.cross_attn.")),
    ("wav2vec 2.0 or HuBERT", (".feature_extractor.conv_layers.", ".encoder.layers.#.")),
    ("T5 (transformers)", (".block.#.layer.#.SelfAttention.",)),
    ("Mixtral or another mixture of experts", (".layers.#.", ".experts.#.")),
    ("Llama or one like it (transformers)", (".layers.#.self_attn.q_proj.", ".layers.#.mlp.gate_proj.")),
    ("Llama (Meta's names)", (".layers.#.attention.wq.", ".layers.#.feed_forward.w1.")),
    ("GPT of Megatron-LM", (".decoder.layers.", ".self_attention.linear_qkv.")),
    ("GPT-2", (".h.#.attn.c_attn.",)),
    ("GPT-NeoX", (".layers.#.attention.query_key_value.",)),
    ("BERT or one like it", (".encoder.layer.#.attention.self.query.",)),
    ("Swin Transformer", (".layers.#.blocks.#.attn.relative_position_bias_table",)),
    ("ViT (timm or DINO)", (".patch_embed.proj.", ".blocks.#.attn.qkv.")),
    ("ViT (torchvision)", (".conv_proj.", ".encoder.layers.encoder_layer_")),
    ("ResNet", (".layer1.#.conv1.", ".layer4.#.conv1.")),
    ("ConvNeXt", (".stages.#.blocks.#.conv_dw.",)),
    ("ConvNeXt", (".stages.#.#.dwconv.",)),
    ("YOLO (ultralytics)", (".model.#.conv.weight", ".model.#.m.#.cv1.conv.")),
    ("YOLO (ultralytics)", (".model.#.conv.weight", ".model.#.cv1.conv.")),
    ("HiFi-GAN", (".ups.#.", ".resblocks.#.convs1.")),
)
_NUMBER: Final = regex(r"\.\d+(?=\.)")


def family_of_model(names: Iterable[str]) -> str:
    """Return the family of a model with these keys, such as "GPT-2", or "" if the names show none."""
    text = _NUMBER.sub(".#", "." + "\n.".join(islice(names, _LOOKED_AT)))
    return next((family for family, parts in _FAMILIES if all(part in text for part in parts)), "")
