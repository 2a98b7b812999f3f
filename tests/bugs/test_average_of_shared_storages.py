"""average changed tensors that were excluded, or in no state dict, when they shared a storage with an averaged one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.base.errors import RefusedError


def test_what_is_not_averaged_does_not_change(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for number, path in enumerate(paths):
        both = torch.arange(10.0) * (number + 1)
        torch.save({"a": both[:5], "b": both[5:]}, path)
    checkpoints = [ckptool.open(path) for path in paths]
    with pytest.raises(RefusedError, match="shares its storage"):
        ckptool.average(checkpoints, only=ckptool.Globs(["a"]))


def test_a_negative_bit_in_one_of_them_is_seen(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    torch.save({"w": torch._neg_view(torch.tensor([1.0, 2.0]))}, paths[0])
    torch.save({"w": torch.tensor([5.0, 7.0])}, paths[1])
    with pytest.raises(RefusedError, match="negative bit"):
        ckptool.average([ckptool.open(path) for path in paths])
