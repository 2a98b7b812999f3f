"""Models of Stable Diffusion in one file against diffusers: the tables give what its own loader makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
EMBEDDING = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
EMBEDDING |= {"projection_class_embeddings_input_dim": 16}
#: The blocks of Stable Diffusion 1 and 2, SDXL and the SDXL refiner: those with attention, and layers in each.
UNETS = {
    "sd1": ("AAAR", 1, {}),
    "sd2": ("AAAR", 1, {"use_linear_projection": True}),
    "sdxl": ("RAA", [1, 2, 3], {"use_linear_projection": True, **EMBEDDING}),
    "refiner": ("RAAR", 2, {"use_linear_projection": True, **EMBEDDING}),
}
State = dict[str, torch.Tensor]
Model = tuple[str, Callable[[Any], Any]]


def vae(diffusers: Any, blocks: int, **more: Any) -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * blocks,
        up_block_types=["UpDecoderBlock2D"] * blocks,
        block_out_channels=[4, 8, 8, 12][:blocks],
        norm_num_groups=2,
        layers_per_block=2,
        **more,
    )


def unet(diffusers: Any, kind: str) -> Any:
    blocks, depth, more = UNETS[kind]
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
    )


SIZES = {"attention_head_dim": 4, "num_attention_heads": 2, "joint_attention_dim": 6, "pooled_projection_dim": 5}
SIZES |= {"in_channels": 4, "num_layers": 3}
IMAGE = {"sample_size": 8, "caption_projection_dim": 8, "pos_embed_max_size": 8}
NO_QUANT = {"use_quant_conv": False, "use_post_quant_conv": False}
NORMS = {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
#: Models by name: their family in files with the whole model, and the model of diffusers.
MODELS: dict[str, Model] = {
    "vae": ("ldm:vae", lambda diffusers: vae(diffusers, 2)),
    "vae of four blocks": ("ldm:vae", lambda diffusers: vae(diffusers, 4, **NO_QUANT)),
    **{f"unet of {kind}": ("ldm:unet", partial(unet, kind=kind)) for kind in UNETS},
    "flux": ("flux:transformer", lambda diffusers: flux(diffusers, guidance_embeds=True)),
    "flux without guidance": ("flux:transformer", lambda diffusers: flux(diffusers, guidance_embeds=False)),
    "sd3": ("sd3:transformer", lambda diffusers: diffusers.SD3Transformer2DModel(**SIZES, **IMAGE)),
    "sd3 with norms": ("sd3:transformer", lambda diffusers: diffusers.SD3Transformer2DModel(**SIZES, **IMAGE, **NORMS)),
}


def flux(diffusers: Any, **more: Any) -> Any:
    return diffusers.FluxTransformer2DModel(**SIZES, num_single_layers=3, axes_dims_rope=(2, 2, 0), **more)


def read_by_diffusers(family: str, tensors: State, model: Any) -> State:
    """What the loader of diffusers for models in one file makes of tensors."""
    single_file_utils = pytest.importorskip("diffusers.loaders.single_file_utils")
    read = {
        "ldm:vae": lambda: single_file_utils.convert_ldm_vae_checkpoint(dict(tensors), model.config),
        "ldm:unet": lambda: single_file_utils.convert_ldm_unet_checkpoint(dict(tensors), model.config),
        "flux:transformer": lambda: single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(dict(tensors)),
        "sd3:transformer": lambda: single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers(dict(tensors)),
    }
    return read[family]()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_one_that_diffusers_loads(name: str, tmp_path: Path) -> None:
    """With and without the prefix of the part, and beside other parts."""
    family, make = MODELS[name]
    model = make(pytest.importorskip("diffusers"))
    torch.manual_seed(len(name))
    own = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    # The loader has the width of Flux in it, which is the number of rows of most tensors.
    own = narrow(own, 3072 // 8) if family.startswith("flux") else own
    made = converted(own, family, tmp_path)
    assert_equal(read_by_diffusers(family, made, model), own)
    back = f"diffusers:{family.partition(':')[2]}"
    assert_equal(converted(made | OTHERS, back, tmp_path), own)
    if family.startswith("ldm"):
        prefix = {"ldm:vae": "first_stage_model.", "ldm:unet": "model.diffusion_model."}[family]
        assert_equal(converted({key.removeprefix(prefix): each for key, each in made.items()}, back, tmp_path), own)


def narrow(state: State, rows: int, columns: int = 1) -> State:
    """Tensors with these names and values of their own, whose rows are made so many times as many."""
    made = {}
    for at, (name, value) in enumerate(state.items()):
        shape = (value.shape[0] * rows, *(columns for _ in value.shape[1:]))
        made[name] = torch.arange(shape[0]).reshape(-1, *(1 for _ in shape[1:])).expand(shape) + float(at)
    return made


def test_a_vae_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    ldm = converted(vae(pytest.importorskip("diffusers"), 3).state_dict(), "ldm:vae", tmp_path)
    del ldm["first_stage_model.decoder.up.1.block.1.conv1.weight"]
    with pytest.raises(RefusedError, match=r"conv1.weight' is missing"):
        converted(ldm, "diffusers:vae", tmp_path)


@pytest.mark.parametrize("family", ["sdxl:text_encoder_2", "sd2:text_encoder", "sdxl:text_encoder", "sd1:text_encoder"])
def test_a_text_encoder_is_the_one_that_diffusers_loads(family: str, tmp_path: Path) -> None:
    """The second one of SDXL and that of Stable Diffusion 2 have the names of OpenCLIP, the others a prefix."""
    transformers = pytest.importorskip("transformers")
    single_file_utils = pytest.importorskip("diffusers.loaders.single_file_utils")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 20, "max_position_embeddings": 6, "projection_dim": 8, "bos_token_id": 0, "eos_token_id": 1}
    model = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**sizes))
    own = model.state_dict()
    if family in ("sdxl:text_encoder", "sd1:text_encoder"):
        own = {name: value for name, value in own.items() if name.startswith("text_model.")}
        made = converted(own, family, tmp_path)
        assert_equal(single_file_utils.convert_ldm_clip_checkpoint(dict(made)), own)
        others = {"first_stage_model.quant_conv.bias": torch.ones(2)}
    else:
        made = converted(own, family, tmp_path)
        prefix = "conditioner.embedders.1.model." if family.startswith("sdxl") else "cond_stage_model.model."
        found = single_file_utils.convert_open_clip_checkpoint(model, dict(made), prefix=prefix)
        # The loader leaves the projection of Stable Diffusion 2 out.
        assert_equal(found, {name: value for name, value in own.items() if name in found})
        assert own.keys() - found.keys() <= {"text_projection.weight"}
        others = {"model_ema.decay": torch.tensor(0.9999), prefix + "logit_scale": torch.tensor(4.6)}
    assert_equal(converted(made | others, f"diffusers:{family.partition(':')[2]}", tmp_path), own)
