"""cast --strict let integers and complex numbers overflow; a merge lost the account of the other file's cast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.base.errors import RefusedError

CASES = [
    (torch.tensor([100_000, 1]), "float16"),
    (torch.tensor([1e300 + 0j], dtype=torch.complex128), "complex64"),
    (torch.tensor([1e30]), "float16"),
]


@pytest.mark.parametrize(("tensor", "dtype"), CASES, ids=["integer", "complex", "float"])
def test_what_overflows_is_refused_with_strict(tensor: torch.Tensor, dtype: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save({"a.w": tensor}, path)
    with ckptool.open(path) as checkpoint, pytest.raises(RefusedError):
        ckptool.save(ckptool.cast(checkpoint, dtype, only=ckptool.Globs(["*"]), strict=True), out)
    assert not out.exists()


def test_the_account_survives_a_merge(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a.w": torch.tensor([1e30])}, path)
    with ckptool.open(path) as one, ckptool.open(path) as other:
        merged = ckptool.merge(one, ckptool.cast(other, "float16"))
        ckptool.save(merged, tmp_path / "b.pth")
        assert [change.edit for tell in merged.deferred_changes for change in tell()] == ["overflow"]
