"""Models of Stable Diffusion in one file against diffusers: the tables give what its own loader makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

#: A text encoder and an entry of training, as files with the whole model have them.
OTHERS = {
    "cond_stage_model.transformer.text_model.final_layer_norm.weight": torch.ones(3),
    "model_ema.decay": torch.tensor(0.9999),
}


def converted(tensors: Mapping[str, torch.Tensor], family: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors under the names of a family; the input must not change."""
    source, made = folder / "source.safetensors", folder / f"{family.replace(':', '-')}.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, source)
    ckptool.save(ckptool.convert(source, "safetensors", to_names=family), made)
    return load_file(made)


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


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


def test_the_report_says_what_is_left_out(tmp_path: Path) -> None:
    whole = converted(vae(2).state_dict(), "ldm:vae", tmp_path) | OTHERS
    save_file(whole, tmp_path / "whole.safetensors")
    made = ckptool.convert(tmp_path / "whole.safetensors", "safetensors", to_names="diffusers:vae")
    notes = [note for change in made.changes for note in change.notes]
    assert f"left out: 2 tensors of other models in the file, such as '{min(OTHERS)}'" in notes
