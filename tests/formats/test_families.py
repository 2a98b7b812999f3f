"""The family of a model by its names: the models of transformers and torchvision say their own names."""

from __future__ import annotations

import pytest

from ckptool.formats.names.families import family_of_model

transformers = pytest.importorskip("transformers")

_TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
MODELS = {
    "LlamaForCausalLM": (_TEXT, "Llama"),
    "MistralForCausalLM": (_TEXT | {"num_key_value_heads": 2}, "Llama or one like it"),
    "Qwen2ForCausalLM": (_TEXT | {"num_key_value_heads": 2}, "Llama or one like it"),
    "GPT2LMHeadModel": ({"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16}, "GPT-2"),
    "GPTNeoXForCausalLM": (_TEXT, "GPT-NeoX"),
    "BertForMaskedLM": (_TEXT, "BERT"),
    "RobertaForMaskedLM": (_TEXT, "BERT or one like it"),
    "T5ForConditionalGeneration": (
        {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 16},
        "T5",
    ),
    "WhisperForConditionalGeneration": (
        {
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 8,
            "decoder_ffn_dim": 8,
            "vocab_size": 64,
            "pad_token_id": 0,
        },
        "Whisper",
    ),
    "ViTForImageClassification": (
        {k: v for k, v in _TEXT.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4},
        "",
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_models_of_transformers(name: str, prefix: str) -> None:
    settings, family = MODELS[name]
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**settings))
    found = family_of_model(prefix + key for key in model.state_dict())
    assert (family in found) if family else found in ("", "BERT or one like it")


def test_other_names_show_no_family() -> None:
    assert family_of_model([]) == ""
    assert family_of_model(["fc.weight", "fc.bias", "layer1.weight"]) == ""
    assert family_of_model(["layer1.0.conv1.weight", "layer4.0.conv1.weight", "fc.weight"]) == "ResNet"
    assert family_of_model(["base_model.model.layers.0.self_attn.q_proj.lora_A.weight"]) == "a LoRA adapter (PEFT)"
    assert family_of_model(["base_model.model.transformer.h.0.c_attn.lora_A.weight"]) == "a LoRA adapter (PEFT)"
    assert family_of_model(["lora_te_text_model_encoder_layers_0_mlp_fc1.alpha"]) == "a LoRA adapter (kohya)"
    for name in ("to_q.lora_A.weight", "processor.to_q_lora.down.weight", "to_q.lora.down.weight"):
        assert family_of_model([f"unet.down_blocks.0.attentions.0.{name}"]) == "a LoRA adapter (diffusers)"
