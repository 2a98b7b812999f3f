"""A whole module of the legacy format, laid out anew as a zip, kept persistent ids ('module', ...) that zips lack."""

from __future__ import annotations

from pathlib import Path

import torch

import ckptool


def test_a_legacy_module_loads_after_a_cast(tmp_path: Path) -> None:
    old, new = tmp_path / "old.pth", tmp_path / "new.pth"
    module = torch.nn.Linear(3, 2)
    torch.save(module, old, _use_new_zipfile_serialization=False)
    with ckptool.open(old) as checkpoint:
        ckptool.save(ckptool.cast(checkpoint, "float64"), new)
    loaded = torch.load(new, weights_only=False)
    assert torch.equal(loaded.weight, module.weight.double())
