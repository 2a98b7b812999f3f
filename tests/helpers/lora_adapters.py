"""Write small PEFT adapters without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["factors", "write_adapter"]

SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "base_model_name_or_path": "base"}


def factors(module: str, out: int, inner: int, rank: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the two matrices of a module, with the names of PEFT."""
    generator = torch.Generator().manual_seed(seed + len(module))
    a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inner), (out, rank)))
    return {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    """Write an adapter with these tensors; ``settings`` add to a LoRA of rank 2."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}), encoding="utf-8")
    return folder
