"""Situations about LoRA and other adapters."""

from __future__ import annotations

import json
import os

import torch
from safetensors.torch import save_file

from .situation import Situation, holds, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)

LAYER = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def adapter(prefix: str = "base_model.model.", name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter as PEFT saves them."""
    return {
        f"{prefix}{LAYER}.lora_A{name}.weight": torch.ones(2, 8),
        f"{prefix}{LAYER}.lora_B{name}.weight": torch.ones(8, 2),
    }


def adapter_folder(path: str, tensors: dict[str, torch.Tensor]) -> None:
    os.mkdir(path)
    save_file(tensors, f"{path}/adapter_model.safetensors", {"format": "pt"})
    with open(f"{path}/adapter_config.json", "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)


def base_folder(path: str) -> None:
    os.mkdir(path)
    save_file({f"{LAYER}.weight": torch.ones(8, 8)}, f"{path}/model.safetensors", {"format": "pt"})
    with open(f"{path}/config.json", "w", encoding="utf-8") as file:
        json.dump({"model_type": "llama"}, file)


@situation()
def empty_adapter() -> str:
    adapter_folder("adapter", {key: torch.empty(0) for key in adapter()})
    return (
        f"RuntimeError: Error(s) in loading state_dict for PeftModel: size mismatch for base_model.model.{LAYER}"
        ".lora_A.default.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model"
        " is torch.Size([2, 8])."
    )


@situation(ends=holds(adapter()))
def wrapped_twice() -> str:
    adapter_folder("adapter", adapter("base_model.model.base_model.model."))
    adapter_folder("expected", adapter())
    return ""


@situation(ends=holds(adapter()))
def live_names() -> str:
    torch.save(adapter(name=".default"), "adapter.pth")
    adapter_folder("expected", adapter())
    return ""


@situation(ends=holds({f"{LAYER}.weight": torch.full((8, 8), 5.0)}))
def lora_merge() -> str:
    base_folder("base")
    adapter_folder("adapter", adapter())
    return ""


KOHYA = "lora_unet_down_blocks_0_attentions_0_proj_in"


@situation(ends=holds({"down_blocks.0.attentions.0.proj_in.weight": torch.full((8, 8), 3.0)}))
def merge_kohya() -> str:
    os.mkdir("unet")
    base = {"down_blocks.0.attentions.0.proj_in.weight": torch.ones(8, 8)}
    save_file(base, "unet/diffusion_pytorch_model.safetensors")
    with open("unet/config.json", "w", encoding="utf-8") as file:
        json.dump({"_class_name": "UNet2DConditionModel"}, file)
    down, up = torch.ones(2, 8), torch.ones(8, 2)
    save_file({f"{KOHYA}.lora_down.weight": down, f"{KOHYA}.lora_up.weight": up}, "lora.safetensors")
    return ""


@situation()
def peft_model_into_base() -> str:
    base_folder("base")
    torch.save({f"base_model.model.{LAYER}.base_layer.weight": torch.ones(8, 8), **adapter(name=".default")},
               "peft.pth")  # fmt: skip
    return ""
