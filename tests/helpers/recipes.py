"""Tensors under other names, by built-in recipes, and how tests compare them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ckptool


def converted(
    tensors: Mapping[str, torch.Tensor], family: str, folder: Path, config: Any = None
) -> dict[str, torch.Tensor]:
    """The tensors under the names of a family, through files in a folder, perhaps with a configuration beside them."""
    folder.mkdir(exist_ok=True, parents=True)
    source, made = folder / "model.safetensors", folder / f"{family.replace(':', '-')}.safetensors"
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, source)
    if config is not None:
        text = json.dumps(config) if isinstance(config, dict) else config.to_json_string()
        (folder / "config.json").write_text(text)
    made.unlink(missing_ok=True)
    ckptool.save(ckptool.convert(source, "safetensors", to_names=family), made)
    return load_file(made)


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
