"""Tensors under other names, by built-in recipes, and how tests compare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ckptool


def converted(tensors: Mapping[str, torch.Tensor], family: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors under the names of a family, through files in a folder."""
    source, made = folder / "source.safetensors", folder / f"{family.replace(':', '-')}.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, source)
    made.unlink(missing_ok=True)
    ckptool.save(ckptool.convert(source, "safetensors", to_names=family), made)
    return load_file(made)


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name
