"""Whisper and CLIP as OpenAI and OpenCLIP name them, against transformers: both give the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import assert_equal, converted
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

#: What the converter of transformers replaces in the names of OpenAI, in its order.
WHISPER = {
    "blocks": "layers",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
    ".attn.query": ".self_attn.q_proj",
    ".attn.key": ".self_attn.k_proj",
    ".attn.value": ".self_attn.v_proj",
    ".attn_ln": ".self_attn_layer_norm",
    ".attn.out": ".self_attn.out_proj",
    ".cross_attn.query": ".encoder_attn.q_proj",
    ".cross_attn.key": ".encoder_attn.k_proj",
    ".cross_attn.value": ".encoder_attn.v_proj",
    ".cross_attn_ln": ".encoder_attn_layer_norm",
    ".cross_attn.out": ".encoder_attn.out_proj",
    "decoder.ln.": "decoder.layer_norm.",
    "encoder.ln.": "encoder.layer_norm.",
    "token_embedding": "embed_tokens",
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "decoder.positional_embedding": "decoder.embed_positions.weight",
    "ln_post": "layer_norm",
}
WIDTH, ROWS = 16, 30


def whisper_config() -> Any:
    sizes = {"d_model": WIDTH, "vocab_size": ROWS, "num_mel_bins": 4, "encoder_layers": 3, "decoder_layers": 2}
    sizes |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 4 * WIDTH for side in ("encoder", "decoder")}
    sizes |= {"max_source_positions": 8, "max_target_positions": 6, "decoder_start_token_id": 1}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    return pytest.importorskip("transformers").WhisperConfig(**sizes, attn_implementation="eager")


def whisper_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Save a model of transformers, and return its tensors, without the output layer, which is tied."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    transformers.WhisperForConditionalGeneration(whisper_config()).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def loaded(kind: str, folder: Path, own: Any) -> Any:
    """The model that transformers makes of a folder, in which it misses nothing and leaves nothing over."""
    transformers = pytest.importorskip("transformers")
    own.save_pretrained(folder)
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def test_whisper_has_the_names_that_transformers_replaces(tmp_path: Path) -> None:
    own = whisper_folder(tmp_path / "hf")
    made = converted(own, "openai:whisper", tmp_path)
    renamed = {}
    for name, value in made.items():
        for old, new in WHISPER.items():
            name = name.replace(old, new)
        renamed[f"model.{name}"] = value
    assert_equal(renamed, own)
    assert_equal(converted(made, "hf:whisper", tmp_path), own)
    with pytest.raises(RefusedError, match="it has the names of openai:whisper already"):
        converted(made, "openai:whisper", tmp_path)
    tied = own | {"proj_out.weight": own["model.decoder.embed_tokens.weight"].clone()}
    assert_equal(converted(tied, "openai:whisper", tmp_path), made)


def test_whisper_says_the_same_as_the_model_of_openai(tmp_path: Path) -> None:
    whisper = pytest.importorskip("whisper.model")
    torch.manual_seed(2)
    dims = whisper.ModelDimensions(4, 8, WIDTH, 2, 3, ROWS, 6, WIDTH, 2, 2)
    model = whisper.Whisper(dims).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding)
    torch.save({"dims": vars(dims), "model_state_dict": model.state_dict()}, tmp_path / "tiny.pt")
    made = ckptool.convert(tmp_path / "tiny.pt", "safetensors", to_names="hf:whisper")
    (tmp_path / "hf").mkdir()
    ckptool.save(made, tmp_path / "hf" / "model.safetensors")
    other = loaded("WhisperForConditionalGeneration", tmp_path / "hf", whisper_config())
    sound, tokens = torch.randn(1, 4, 16), torch.tensor([[1, 7, 3]])
    with torch.no_grad():
        found = other(input_features=sound, decoder_input_ids=tokens).logits
        assert torch.allclose(found, model(sound, tokens), atol=1e-5, rtol=0)
    back = ckptool.convert(tmp_path / "hf" / "model.safetensors", "safetensors", to_names="openai:whisper")
    ckptool.save(back, tmp_path / "back.safetensors")
    assert_equal(load_file(tmp_path / "back.safetensors"), model.state_dict())


def clip_config() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 2}
    text = {"num_hidden_layers": 2, "vocab_size": ROWS, "max_position_embeddings": 6, "eos_token_id": 2}
    vision = {"num_hidden_layers": 3, "image_size": 8, "patch_size": 4}
    return pytest.importorskip("transformers").CLIPConfig(
        text_config=sizes | text | {"bos_token_id": 0}, vision_config=sizes | vision, projection_dim=8
    )


def as_openai(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a CLIP of transformers as OpenAI has them, put together by hand."""
    made = {"logit_scale": own["logit_scale"], "text_projection": own["text_projection.weight"].T}
    made |= {"visual.proj": own["visual_projection.weight"].T}
    for side, prefix in (("text_model", ""), ("vision_model", "visual.")):
        places = own[f"{side}.embeddings.position_embedding.weight"]
        made[f"{prefix}positional_embedding"] = places
        layers = {int(name.split(".")[3]) for name in own if name.startswith(f"{side}.encoder")}
        for layer in layers:
            old, new = f"{side}.encoder.layers.{layer}.", f"{prefix}transformer.resblocks.{layer}."
            for kind in ("weight", "bias"):
                heads = [own[f"{old}self_attn.{head}_proj.{kind}"] for head in "qkv"]
                made[f"{new}attn.in_proj_{kind}"] = torch.cat(heads)
                made[f"{new}attn.out_proj.{kind}"] = own[f"{old}self_attn.out_proj.{kind}"]
                made[f"{new}ln_1.{kind}"] = own[f"{old}layer_norm1.{kind}"]
                made[f"{new}ln_2.{kind}"] = own[f"{old}layer_norm2.{kind}"]
                made[f"{new}mlp.c_fc.{kind}"] = own[f"{old}mlp.fc1.{kind}"]
                made[f"{new}mlp.c_proj.{kind}"] = own[f"{old}mlp.fc2.{kind}"]
    for kind in ("weight", "bias"):
        made[f"ln_final.{kind}"] = own[f"text_model.final_layer_norm.{kind}"]
        made[f"visual.ln_pre.{kind}"] = own[f"vision_model.pre_layrnorm.{kind}"]
        made[f"visual.ln_post.{kind}"] = own[f"vision_model.post_layernorm.{kind}"]
    made["token_embedding.weight"] = own["text_model.embeddings.token_embedding.weight"]
    made["visual.class_embedding"] = own["vision_model.embeddings.class_embedding"]
    made["visual.conv1.weight"] = own["vision_model.embeddings.patch_embedding.weight"]
    return made


def test_clip_has_the_tensors_of_openai(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    own = transformers.CLIPModel(clip_config()).state_dict()
    own = {name: torch.randn_like(value) for name, value in own.items()}
    assert_equal(converted(own, "openai:clip", tmp_path), as_openai(own))
    sizes = {"input_resolution": torch.tensor(8), "context_length": torch.tensor(6), "vocab_size": torch.tensor(ROWS)}
    assert_equal(converted(as_openai(own) | sizes, "hf:clip", tmp_path), own)


def test_clip_sees_the_same_as_the_model_of_open_clip(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip.model")
    torch.manual_seed(4)
    vision = open_clip.CLIPVisionCfg(layers=3, width=WIDTH, head_width=8, patch_size=4, image_size=8)
    text = open_clip.CLIPTextCfg(context_length=6, vocab_size=ROWS, width=WIDTH, heads=2, layers=2)
    model = open_clip.CLIP(8, vision, text, quick_gelu=True).eval()
    own = {name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()}
    model.load_state_dict(own)
    (tmp_path / "hf").mkdir()
    save_file(converted(own, "hf:clip", tmp_path), tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    other = loaded("CLIPModel", tmp_path / "hf", clip_config())
    image, words = torch.randn(1, 3, 8, 8), torch.tensor([[0, 5, 9, 3, 4, ROWS - 1]])
    with torch.no_grad():
        found = other(input_ids=words, pixel_values=image)
        seen, read, _ = model(image, words)
    assert torch.allclose(found.image_embeds, seen, atol=1e-6, rtol=0)
    assert torch.allclose(found.text_embeds, read, atol=1e-6, rtol=0)
    assert_equal(converted(load_file(tmp_path / "hf" / "model.safetensors"), "openai:clip", tmp_path), own)


def test_whisper_without_its_last_layer_is_refused(tmp_path: Path) -> None:
    own = whisper_folder(tmp_path / "hf")
    short = {name: value for name, value in own.items() if ".layers.2." not in name}
    save_file(short, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(RefusedError, match=r"2 values of \{E\}, and its configuration or another tensor says 3"):
        ckptool.convert(tmp_path / "hf" / "model.safetensors", "safetensors", to_names="openai:whisper")
