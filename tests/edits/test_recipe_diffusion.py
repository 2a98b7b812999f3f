"""Models of Stable Diffusion in one file against diffusers: the tables give what its own loader makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import assert_equal, converted

from ckptool.base.errors import RefusedError

#: A text encoder and an entry of training, as files with the whole model have them.
OTHERS = {
    "cond_stage_model.transformer.text_model.final_layer_norm.weight": torch.ones(3),
    "model_ema.decay": torch.tensor(0.9999),
}

#: The settings of models that also take the size of the image.
EMBEDDING = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 16,
}
#: The blocks of Stable Diffusion 1 and 2, SDXL and the SDXL refiner: those with attention, and layers in each.
UNETS = {
    "sd1": ("AAAR", 1, {}),
    "sd2": ("AAAR", 1, {"use_linear_projection": True}),
    "sdxl": ("RAA", [1, 2, 3], {"use_linear_projection": True, **EMBEDDING}),
    "refiner": ("RAAR", 2, {"use_linear_projection": True, **EMBEDDING}),
}


def single_file() -> Any:
    """The loader of diffusers for models in one file."""
    pytest.importorskip("diffusers")
    from diffusers.loaders import single_file_utils

    return single_file_utils


def vae(blocks: int, **more: Any) -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(blocks)
    return diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * blocks,
        up_block_types=["UpDecoderBlock2D"] * blocks,
        block_out_channels=[4, 8, 8, 12][:blocks],
        norm_num_groups=2,
        layers_per_block=2,
        **more,
    ).eval()


@pytest.mark.parametrize("prefix", ["first_stage_model.", "vae.", ""])
@pytest.mark.parametrize(("blocks", "more"), [(2, {}), (4, {"use_quant_conv": False, "use_post_quant_conv": False})])
def test_a_vae_is_the_one_that_diffusers_loads(prefix: str, blocks: int, more: dict[str, Any], tmp_path: Path) -> None:
    oracle, model = single_file(), vae(blocks, **more)
    own = model.state_dict()
    ldm = converted(own, "ldm:vae", tmp_path)
    assert all(name.startswith("first_stage_model.") for name in ldm)
    assert_equal(oracle.convert_ldm_vae_checkpoint(dict(ldm), model.config), own)
    whole = {prefix + name.removeprefix("first_stage_model."): value for name, value in ldm.items()}
    whole |= OTHERS if prefix else {}
    back = converted(whole, "diffusers:vae", tmp_path)
    assert_equal(back, own)
    again = vae(blocks, **more)
    again.load_state_dict(back)
    image = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(image).sample, model(image).sample)


def test_a_vae_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    ldm = converted(vae(3).state_dict(), "ldm:vae", tmp_path)
    del ldm["first_stage_model.decoder.up.1.block.1.conv1.weight"]
    with pytest.raises(RefusedError, match=r"conv1.weight' is missing"):
        converted(ldm, "diffusers:vae", tmp_path)


def unet(kind: str) -> Any:
    diffusers = pytest.importorskip("diffusers")
    blocks, depth, more = UNETS[kind]
    torch.manual_seed(len(kind))
    kinds = {"A": ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), "R": ("DownBlock2D", "UpBlock2D")}
    return diffusers.UNet2DConditionModel(
        down_block_types=[kinds[block][0] for block in blocks],
        up_block_types=[kinds[block][1] for block in reversed(blocks)],
        block_out_channels=[4, 8, 8, 12][: len(blocks)],
        transformer_layers_per_block=depth,
        norm_num_groups=2,
        attention_head_dim=2,
        cross_attention_dim=6,
        **more,
    ).eval()


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
@pytest.mark.parametrize("kind", UNETS)
def test_a_unet_is_the_one_that_diffusers_loads(kind: str, prefix: str, tmp_path: Path) -> None:
    oracle, model = single_file(), unet(kind)
    own = model.state_dict()
    ldm = converted(own, "ldm:unet", tmp_path)
    assert_equal(oracle.convert_ldm_unet_checkpoint(dict(ldm), model.config), own)
    whole = {prefix + name.removeprefix("model.diffusion_model."): value for name, value in ldm.items()}
    back = converted(whole | (OTHERS if prefix else {}), "diffusers:unet", tmp_path)
    assert_equal(back, own)
    again = unet(kind)
    again.load_state_dict(back)
    inputs = (torch.randn(1, 4, 16, 16), torch.tensor([3]), torch.randn(1, 5, 6))
    added = {"text_embeds": torch.randn(1, 4), "time_ids": torch.randn(1, 3)}
    with torch.no_grad():
        one, other = (each(*inputs, added_cond_kwargs=added).sample for each in (model, again))
    assert torch.equal(one, other)


def text_encoder(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.CLIPTextConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=20,
        max_position_embeddings=6,
        projection_dim=8,
        bos_token_id=0,
        eos_token_id=1,
    )
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize("family", ["sdxl:text_encoder_2", "sd2:text_encoder"])
def test_a_text_encoder_is_the_one_that_diffusers_loads(family: str, tmp_path: Path) -> None:
    oracle, model = single_file(), text_encoder("CLIPTextModelWithProjection")
    own = model.state_dict()
    ldm = converted(own, family, tmp_path)
    wanted = f"diffusers:{family.partition(':')[2]}"
    prefix = "conditioner.embedders.1.model." if family.startswith("sdxl") else "cond_stage_model.model."
    found = oracle.convert_open_clip_checkpoint(model, dict(ldm), prefix=prefix)
    # The loader leaves the projection of Stable Diffusion 2 out.
    assert_equal(found, {name: value for name, value in own.items() if name in found})
    assert own.keys() - found.keys() <= {"text_projection.weight"}
    whole = ldm | OTHERS | {prefix + "logit_scale": torch.tensor(4.6)}
    whole = {name: value for name, value in whole.items() if not name.startswith("cond_stage_model.transformer.")}
    assert_equal(converted(whole, wanted, tmp_path), own)


@pytest.mark.parametrize("family", ["sdxl:text_encoder", "sd1:text_encoder"])
def test_a_text_encoder_with_names_of_transformers_loses_its_prefix(family: str, tmp_path: Path) -> None:
    oracle, own = single_file(), text_encoder("CLIPTextModelWithProjection").state_dict()
    own = {name: value for name, value in own.items() if name.startswith("text_model.")}
    ldm = converted(own, family, tmp_path)
    assert_equal(oracle.convert_ldm_clip_checkpoint(dict(ldm)), own)
    whole = ldm | {"first_stage_model.quant_conv.bias": torch.ones(2)}
    assert_equal(converted(whole, "diffusers:text_encoder", tmp_path), own)


def narrow(state: dict[str, torch.Tensor], rows: int, columns: int = 1) -> dict[str, torch.Tensor]:
    """Tensors with these names and values of their own, whose rows are made so many times as many.

    The loader of diffusers has the width of the real model in it, which is the number of rows of most tensors.
    """
    made = {}
    for at, (name, value) in enumerate(state.items()):
        shape = (value.shape[0] * rows, *(columns for _ in value.shape[1:]))
        made[name] = torch.arange(shape[0]).reshape(-1, *(1 for _ in shape[1:])).expand(shape) + float(at)
    return made


@pytest.mark.parametrize("guidance", [True, False])
def test_flux_is_the_one_that_diffusers_loads(guidance: bool, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    oracle = single_file()
    torch.manual_seed(6)
    model = diffusers.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=5,
        in_channels=4,
        axes_dims_rope=(2, 2, 0),
        guidance_embeds=guidance,
    )
    own = narrow(model.state_dict(), 3072 // 8)
    flux = converted(own, "flux:transformer", tmp_path)
    assert_equal(oracle.convert_flux_transformer_checkpoint_to_diffusers(dict(flux)), own)
    assert_equal(converted(flux | OTHERS, "diffusers:transformer", tmp_path), own)


@pytest.mark.parametrize("more", [{}, {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}])
def test_stable_diffusion_3_is_the_one_that_diffusers_loads(more: dict[str, Any], tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    oracle = single_file()
    torch.manual_seed(7)
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=3,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=8,
        pooled_projection_dim=5,
        pos_embed_max_size=8,
        **more,
    )
    own = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    sd3 = converted(own, "sd3:transformer", tmp_path)
    assert_equal(oracle.convert_sd3_transformer_checkpoint_to_diffusers(dict(sd3)), own)
    assert_equal(converted(sd3 | OTHERS, "diffusers:transformer", tmp_path), own)
