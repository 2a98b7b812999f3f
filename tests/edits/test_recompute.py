"""Edits that compute values: the example of docs/library.md, and results of other shapes, against torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from ckptool.checkpoint.checkpoint import Change
from ckptool.edits.recompute import Recomputation
from ckptool.files.sources import Computed
from ckptool.values.elements import StorageReader, elements, storage_reader, swapped


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


# -- results of other shapes, and from several tensors ----------------------------------------------------------


def chained(storages: list[StorageReader], tensors: list[Any]) -> Iterator[bytes]:
    for storage, tensor in zip(storages, tensors):
        yield from (swapped(data, storage.width) for data in elements(storage, tensor))


def fused(checkpoint: Checkpoint, names: tuple[str, ...], new: str) -> Checkpoint:
    """Replace some vectors of the state dict by one that holds them all."""
    work = Recomputation(checkpoint)
    graph, (state,) = work.checkpoint.graph, checkpoint.state_dicts
    refs = {str(graph.nodes[key]): value for key, value in state.items}
    tensors = [tensor for name in names if (tensor := work.reader.tensor(refs[name]))]
    readers = [storage_reader(work.checkpoint, tensor.storage) for tensor in tensors]
    dtype, count = BY_NAME[tensors[0].dtype], sum(tensor.numel for tensor in tensors)
    piece = Computed(count * dtype.itemsize, chained, (readers, tensors))
    ref = work.tensor(new, dtype, (count,), piece)
    kept = [(key, value) for key, value in state.items if graph.nodes[key] not in names]
    work.editor.refill(state.ref, [*kept, (work.editor.add(new), ref)])
    return work.done([Change("fuse", new, 1, 0, "fused")])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64"])
def test_a_new_tensor_is_computed_from_several(dtype: str, tmp_path: Path) -> None:
    state = {name: torch.arange(12).reshape(3, 4).t().to(getattr(torch, dtype)) for name in ("q.w", "k.w", "v.w")}
    torch.save(state | {"o.w": torch.ones(2)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        ckptool.save(fused(checkpoint, ("q.w", "k.w", "v.w"), "qkv.w"), tmp_path / "out.pth")
    found = oracle.load(tmp_path / "out.pth")
    expected = torch.cat([value.flatten() for value in state.values()])
    assert list(found) == ["o.w", "qkv.w"]
    assert oracle.difference({"o.w": torch.ones(2), "qkv.w": expected}, found) == ""
