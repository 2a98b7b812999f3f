"""slim --for inference and redact --args dropped every entry that held the same object: None, an interned string."""

from __future__ import annotations

from pathlib import Path

import torch

import ckptool


def test_an_entry_goes_by_its_key(tmp_path: Path) -> None:
    path, out = tmp_path / "a.pth", tmp_path / "b.pth"
    name = "cosine"
    entries = {"model": {"w.x": torch.zeros(2)}, "lr_scheduler": name, "name": name, "optimizer": None, "note": None}
    torch.save({**entries, "args": None}, path)
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.redact(ckptool.slim(checkpoint, purpose="inference"), ["args"]), out)
    assert list(torch.load(out)) == ["model", "name", "note"]
