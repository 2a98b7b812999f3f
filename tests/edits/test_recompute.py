"""Edits that compute values: the example of docs/library.md, and results of other shapes, against torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import ROOT
from tensor_storages import same_sharing
from test_edit_properties import adam

import ckptool
from ckptool import Checkpoint
from ckptool.base.dtypes import BY_NAME
from ckptool.edits.recompute import Recomputation


def scale(checkpoint: Checkpoint, factor: float, **how: Any) -> Checkpoint:
    """The example of docs/library.md."""
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    _, code = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    result: Checkpoint = names["scale"](checkpoint, factor, **how)
    return result


def checkpoint_value() -> dict[str, Any]:
    weight = torch.randn(6, 4)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "turned": torch.randn(3, 5).t(),
            "half": torch.randn(7, dtype=torch.float16),
            "eight": torch.randn(8).to(torch.float8_e4m3fn),
            "scales": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
            "count": torch.tensor(3),
            "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
            "sparse": torch.eye(3).to_sparse(),
            "negative": torch._neg_view(torch.randn(3)),
        },
        "optimizer": adam(),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(checkpoint_value(), tmp_path / "in.pth")
    return tmp_path / "in.pth"


def test_the_example_of_the_documentation(path: Path, tmp_path: Path) -> None:
    expected, out = oracle.load(path), tmp_path / "out.pth"
    with ckptool.open(path) as checkpoint:
        edited = scale(checkpoint, -1.5)
        ckptool.save(edited, out)
    found = oracle.load(out)
    for name in ("weight", "tied", "turned", "half", "eight"):
        value = expected["model"][name]
        expected["model"][name] = (value.double() * -1.5).to(value.dtype)
    expected["model"]["sparse"] = torch.eye(3).mul(-1.5).to_sparse()
    for name, value in expected["model"].items():
        one = value if value.is_sparse or value.is_quantized else value.clone()
        two = found["model"][name]
        assert oracle.difference(one, two if two.is_sparse or two.is_quantized else two.clone()) == "", name
    assert oracle.difference(expected["optimizer"], found["optimizer"]) == ""
    same_sharing(oracle.load(path)["model"], found["model"])


def test_the_example_says_what_it_leaves_unchanged(path: Path) -> None:
    with ckptool.open(path) as checkpoint:
        work = Recomputation(checkpoint)
        chosen = [item.path for item, _ in work.choose(lambda tensor: BY_NAME[tensor.dtype].floating)]
    assert "model.weight" in chosen and not any(name.startswith("optimizer") for name in chosen)
    assert work.spared == ["optimizer"]
    assert work.left == ["model.quantized (quantized)", "model.negative (it carries a conjugate or negative bit)"]
