"""The bytes of a tensor of a checkpoint: those of the tensor that torch loads, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.base.errors import RefusedError

COMPLEX = torch.randn(2, 3, dtype=torch.complex64)
WITH_BYTES: dict[str, Callable[[], torch.Tensor]] = {
    "conj": lambda: COMPLEX.conj(),
    "neg": lambda: COMPLEX.conj().imag,
    "both": lambda: torch._neg_view(COMPLEX.conj()),
    "neg of integers": lambda: torch._neg_view(torch.arange(-3, 4)),
    "transposed": lambda: COMPLEX.t().conj(),
    "bfloat16": lambda: torch.randn(4).bfloat16(),
    "empty": lambda: torch.empty(0, 3),
}
WITHOUT: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "sparse and empty": lambda: torch.zeros(3, 3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("kind", [*WITH_BYTES, *WITHOUT])
def test_bytes_are_those_of_the_values(kind: str, tmp_path: Path) -> None:
    value = (WITH_BYTES | WITHOUT)[kind]()
    torch.save({"t": value}, tmp_path / "t.pth")
    with ckptool.open(tmp_path / "t.pth") as checkpoint:
        if kind in WITHOUT:
            with pytest.raises(RefusedError):
                checkpoint["t"].tobytes()
            return
        plain = value.resolve_conj().resolve_neg().contiguous()
        assert checkpoint["t"].tobytes() == plain.flatten().view(torch.uint8).numpy().tobytes()
