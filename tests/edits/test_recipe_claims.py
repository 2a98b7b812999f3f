"""Which models a recipe takes: every family under every other family's configuration, numbers missing and wrong."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import assert_equal, converted
from safetensors.torch import load_file
from test_recipe_tables import EXPERTS, State, tiny

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.edits.recipes import families

SIZES: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 6}
#: The class and the sizes of a small model for each type that built-in recipes describe.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 2}),
    "phi3": ("Phi3", SIZES),
    "gpt2": ("GPT2", {"n_embd": 8, "n_head": 4, "n_layer": 2}),
    "gpt_neox": ("GPTNeoX", {"intermediate_size": 6}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    **EXPERTS,
}
#: Types with tensors of the same names, and with other arithmetic or another layout.
ALIKE = ("gemma", "granite", "helium", "ernie4_5", "cohere", "gpt_bigcode", "openai-gpt", "olmo", "stablelm", "glm")
#: Where the names of each type lead to.
TARGETS = {
    "llama": ("meta:llama2", "meta:llama3", "megatron:llama", "vllm:llama", "hf:phi3", "fused:gate_up"),
    "mistral": ("mistral", "megatron:mistral", "vllm:mistral", "fused:gate_up"),
    "qwen2": ("megatron:qwen2", "vllm:qwen2"),
    "qwen3": ("megatron:qwen3", "vllm:qwen3"),
    "phi3": ("hf:llama", "split:gate_up"),
    "gpt2": ("split:gpt2", "nanogpt"),
    "gpt_neox": ("split:gpt_neox", "neox:layers"),
    "bloom": ("split:bloom",),
    "falcon": ("split:falcon",),
    **{kind: (f"stacked:{kind}",) for kind in EXPERTS},
}
#: Layouts that any model may have.
ANY = ("fused:gate_up",)
PAIRS = [(kind, target) for kind, targets in TARGETS.items() for target in targets]


@cache
def sample(kind: str) -> tuple[State, dict[str, Any]]:
    """The tensors that transformers writes for a small model, and its configuration."""
    import tempfile

    name, sizes = MODELS[kind]
    model = tiny(name, "LMHeadModel" if name == "GPT2" else "ForCausalLM", **sizes)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return load_file(Path(folder) / "model.safetensors"), config


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(("kind", "target"), PAIRS)
def test_the_configuration_of_another_model_is_refused(kind: str, target: str, tmp_path: Path) -> None:
    """The way there and back works under the own configuration; under others neither does."""
    state, config = sample(kind)
    made = converted(state, target, tmp_path / "own", config)
    back = f"hf:{kind}" if target not in ANY else "split:gate_up"
    # The names and the layout of vLLM's files are those of Phi 3.
    own = {kind, target.removeprefix("hf:"), *(["phi3"] if target.startswith("vllm:") else [])}
    if target.startswith("hf:"):
        assert_equal(converted(made, back, tmp_path / "b", config | {"model_type": target.removeprefix("hf:")}), state)
    elif not target.endswith("gate_up"):
        assert_equal(converted(made, back, tmp_path / "back", config), state)
    others = [sample(other)[1] for other in MODELS if other not in own]
    others += [config | {"model_type": other} for other in ALIKE]
    if target in ANY:
        return
    for other in others:
        if target == "split:gate_up" and other["model_type"] in ("glm", "phi3"):
            continue
        with pytest.raises(RefusedError, match=r"its configuration says model_type"):
            converted(state, target, tmp_path / "other", other)
        if not target.startswith(("hf:", "split:gate_up")):
            with pytest.raises(RefusedError, match=r"its configuration says model_type"):
                converted(made, back, tmp_path / "other", other)


def numbers(config: dict[str, Any]) -> list[str]:
    """The fields of a configuration that are sizes."""
    named = ("_size", "_heads", "_layers", "_dim", "_embd", "n_head", "n_layer", "_experts")
    return [name for name, value in config.items() if type(value) is int and name.endswith(named)]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("kind", "target"), PAIRS)
def test_a_number_that_is_missing_or_wrong_never_moves_other_rows(kind: str, target: str, tmp_path: Path) -> None:
    """A number that is missing is derived or asked for; the number of layers is checked."""
    state, config = sample(kind)
    wanted, refused = converted(state, target, tmp_path, config), set()
    for field in numbers(config):
        for changed in ({name: config[name] for name in config if name != field}, config | {field: config[field] + 1}):
            try:
                made = converted(state, target, tmp_path, changed)
            except RefusedError as error:
                assert field in changed or "not known" in str(error), (field, str(error))
                refused |= {field} & changed.keys()
                continue
            assert_equal(made, wanted)
    if target not in ("fused:gate_up", "split:gate_up"):
        layers = {"num_hidden_layers", "n_layer", "num_layers"} & config.keys()
        assert layers & refused or kind in EXPERTS, refused


@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": 4, "max_position_embeddings": 8},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
    ],
)
def test_what_llama_lacks_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    state, config = sample("phi3")
    with pytest.raises(RefusedError, match=next(iter(more))):
        converted(state, "hf:llama", tmp_path, {**config, "rope_parameters": None, **more})
    if "sliding_window" in more:
        converted(state, "hf:llama", tmp_path / "wide", config | {"sliding_window": 8, "max_position_embeddings": 8})


def unet(blocks: int, layers: int) -> State:
    """Names of a UNet of diffusers with so many layers a block, of tiny tensors."""
    names = ["time_embedding.linear_1", "time_embedding.linear_2", "conv_in", "conv_norm_out", "conv_out"]
    resnet = ("norm1", "conv1", "time_emb_proj", "norm2", "conv2")
    for block in range(blocks):
        names += [f"down_blocks.{block}.resnets.{layer}.{part}" for layer in range(layers) for part in resnet]
        names += [f"up_blocks.{block}.resnets.{layer}.{part}" for layer in range(layers + 1) for part in resnet]
        names += [f"down_blocks.{block}.downsamplers.0.conv", f"up_blocks.{block}.upsamplers.0.conv"]
    names = [name for name in names if name not in (f"down_blocks.{blocks - 1}.downsamplers.0.conv",)]
    names = [name for name in names if name != f"up_blocks.{blocks - 1}.upsamplers.0.conv"]
    names += [f"mid_block.resnets.{layer}.{part}" for layer in range(2) for part in resnet]
    names += [f"mid_block.attentions.0.{part}" for part in ("norm", "proj_in", "proj_out", "transformer_blocks.0.x")]
    return {f"{name}.{kind}": torch.randn(2) for name in names for kind in ("weight", "bias")}


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_unet_of_another_depth_is_refused(blocks: int, layers: int, tmp_path: Path) -> None:
    """latent-diffusion counts blocks by threes in these names: two layers and a sampler."""
    state = unet(blocks, layers)
    if layers != 2:
        with pytest.raises(RefusedError):
            converted(state, "ldm:unet", tmp_path, {})
        return
    made = converted(state, "ldm:unet", tmp_path, {"_class_name": "UNet2DConditionModel"})
    assert_equal(converted(made, "diffusers:unet", tmp_path, {}), state)
    with pytest.raises(RefusedError, match="_class_name"):
        converted(state, "ldm:unet", tmp_path, {"_class_name": "UNetMotionModel"})
    for gone in (
        "down_blocks.0.downsamplers",
        "up_blocks.0.resnets.1",
        f"up_blocks.{blocks - 1}.",
        "down_blocks.0.res",
    ):
        fewer = {name: value for name, value in state.items() if not name.startswith(gone)}
        if len(fewer) < len(state):
            with pytest.raises(RefusedError):
                converted(fewer, "ldm:unet", tmp_path, {})


@pytest.mark.parametrize(
    "beside",
    [
        "stages.0.blocks.0.attn_block.attn.proj.weight",
        "stages.0.blocks.0.attn.attention_biases",
        "stages.0.global_block.blocks.conv1.se.fc1.weight",
        "blocks.0.attn.q_bias",
    ],
)
def test_rows_ordered_by_head_are_refused_by_names(beside: str, tmp_path: Path) -> None:
    state = {"blocks.0.attn.qkv.weight": torch.randn(24, 8)}
    assert len(converted(state, "split:qkv", tmp_path, {"architecture": "vit_tiny_patch16_224"})) == 3
    with pytest.raises(RefusedError):
        converted(state | {beside: torch.randn(8)}, "split:qkv", tmp_path, {})
    with pytest.raises(RefusedError, match="model_type"):
        converted(state, "split:qkv", tmp_path, {"model_type": "exaone4_5"})


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_of_its_own_is_not_left_out(equal: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=12, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=4, pad_token_id=0,
        max_source_positions=6, max_target_positions=6,
    )  # fmt: skip
    state = transformers.WhisperForConditionalGeneration(config).state_dict()
    state["proj_out.weight"] = state["proj_out.weight"].clone() + (0 if equal else 1)
    if equal:
        assert "decoder.token_embedding.weight" in converted(state, "openai:whisper", tmp_path, {})
        return
    with pytest.raises(RefusedError, match=r"'proj_out.weight' differs from 'model.decoder.embed_tokens.weight'"):
        converted(state, "openai:whisper", tmp_path, {})
    path = tmp_path / "model.safetensors"
    made = ckptool.convert(path, "safetensors", to_names="openai:whisper", allow_loss=["entries"])
    assert any("left out: proj_out.weight" in note for change in made.changes for note in change.notes)


def test_every_family_is_in_this_file_or_has_a_test_of_its_own() -> None:
    named = {f"hf:{kind}" for kind in MODELS} | {target for _, target in PAIRS}
    elsewhere = {"hf:baichuan", "hf:internlm2", "deepseek:v3", "hf:whisper", "openai:whisper", "hf:clip", "openai:clip"}
    elsewhere |= {"torch:mha", "split:mha", "timm:qkv", "split:qkv"}
    libraries = ("diffusers:", "ldm:", "flux:", "sd1:", "sd2:", "sd3:", "sdxl:")
    assert {family for family in families() if not family.startswith(libraries)} == named | elsewhere


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind not in EXPERTS])
def test_a_gap_in_the_layers_is_refused(kind: str, tmp_path: Path) -> None:
    """The first layer, or the last one, is missing as a whole."""
    state, config = sample(kind)
    for layer in ("0", "1"):
        fewer = {name: value for name, value in state.items() if f".{layer}." not in name}
        assert len(fewer) < len(state)
        for target in TARGETS[kind]:
            if not target.endswith("gate_up"):
                with pytest.raises(RefusedError):
                    converted(fewer, target, tmp_path, config)
