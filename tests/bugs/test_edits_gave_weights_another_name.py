"""An edit of a folder called its weights model.safetensors, whatever they were called: peft and diffusers look for
adapter_model and diffusion_pytorch_model, and found nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"])
def test_the_name_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "in" / name)
    (tmp_path / "in" / "config.json").write_text("{}")
    with ckptool.open(tmp_path / "in") as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, "config.json"}
