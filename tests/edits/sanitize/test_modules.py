"""Pickled modules become the state dict that ``module.state_dict()`` gives, names and versions included."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES
from naive_sanitize import sanitized
from torch import nn

import ckptool
from ckptool import sanitize
from ckptool.base.errors import RefusedError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.weight = self.first.weight
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


class Parts(nn.Module):
    """Buffers that are not persistent, and what is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_buffer("no_buffer", None)
        self.register_parameter("no_parameter", None)
        self.register_module("no_module", None)
        self.inner = nn.Linear(2, 2)
        self.inner.weight.requires_grad_(False)
        self.view = nn.Parameter(torch.arange(4.0)[1:3])
        self.args = argparse.Namespace(a=1)


class OwnNorm(nn.BatchNorm2d):
    """A class that is not there: what it counts says its version."""


MODULES: dict[str, Any] = {
    "Linear": nn.Linear(2, 3),
    "nested": nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.InstanceNorm2d(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    ),
    "norm without statistics": nn.BatchNorm1d(3, track_running_stats=False),
    "other norms": nn.ModuleList([nn.LayerNorm(3), nn.GroupNorm(2, 4), nn.RMSNorm(3)]),
    "own norm": OwnNorm(2),
    "tied": Tied(),
    "parts": Parts(),
    "DataParallel": nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "ParameterList": nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]),
    "LSTM": nn.LSTM(2, 3, 2),
    "transformer": nn.TransformerEncoderLayer(4, 2, 8),
    "weight_norm": nn.utils.weight_norm(nn.Linear(2, 2)),
    "averaged": torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
    "observer": torch.ao.quantization.MinMaxObserver(),
    "empty": nn.Module(),
    "compiled": torch.compile(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "traced": torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))),
}
WHERE: dict[str, Any] = {
    "root": (lambda module: module, lambda loaded: loaded),
    "dict": (lambda module: {"epoch": 1, "model": module}, lambda loaded: loaded["model"]),
    "list": (lambda module: [{"m": [0, module]}], lambda loaded: loaded[0]["m"][1]),
}


@pytest.mark.sampled(every=9)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_becomes_its_state_dict(name: str, where: str, legacy: bool, tmp_path: Path, out: Path) -> None:
    put, take = WHERE[where]
    module = MODULES[name]
    torch.save(put(module), tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    result = sanitized(tmp_path / "in.pth", out, as_state_dict=True)
    found = oracle.difference(module.state_dict(), take(result.loaded))
    assert not found, found
    assert any("-> state dict" in what for _, what in result.changes)


def test_classes_with_their_source_in_legacy_files(out: Path) -> None:
    """Torch before 1.6 wrote ('module', class, file, source) as a persistent id."""
    for name in ("whole_model_legacy.pth", "whole_parallel.pth", "whole_model.pth"):
        with ckptool.open(FIXTURES / name) as checkpoint:
            ckptool.save(sanitize(checkpoint, as_state_dict=True), out, force=True)
        loaded = torch.load(out, map_location="cpu")
        prefix = "module." if name == "whole_parallel.pth" else ""
        assert {f"{prefix}conv.weight", f"{prefix}bn.running_mean"} <= set(loaded)
        assert loaded._metadata[f"{prefix}bn"] == {"version": 2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [nn.LazyLinear(2), torch.ao.nn.quantized.Linear(2, 2)], ids=["lazy", "packed"])
def test_modules_whose_state_is_not_in_tensors_are_refused(module: Any, tmp_path: Path, out: Path) -> None:
    torch.save({"m": module}, tmp_path / "in.pth")
    packed = isinstance(module, torch.ao.nn.quantized.Linear)
    with pytest.raises(RefusedError, match=r"m(\.weight)? \(torch\.") as refusal:
        sanitized(tmp_path / "in.pth", out, as_state_dict=True, drop_unknown=packed)
    if packed:
        assert "drop_unknown" not in refusal.value.next and "plain tensors: module.state_dict()" in refusal.value.next


def test_the_versions_are_those_of_torch(tmp_path: Path, out: Path) -> None:
    """Every module of torch.nn that can be made without arguments, and the norms."""
    made = []
    for name in dir(nn):
        kind = getattr(nn, name)
        if (
            isinstance(kind, type)
            and issubclass(kind, nn.Module)
            and not {"Lazy", "Transformer"} & {name[:4], name[:11]}
        ):
            for arguments in ((), (3,), (2, 2)):
                try:
                    made.append(kind(*arguments))
                except (TypeError, ValueError):
                    continue
                break
    assert len(made) > 100
    torch.save(made, tmp_path / "in.pth")
    loaded = sanitized(tmp_path / "in.pth", out, as_state_dict=True).loaded
    for module, state in zip(made, loaded):
        found = oracle.difference(module.state_dict(), state)
        assert not found, (type(module), found)


def test_without_as_state_dict_a_module_is_refused(tmp_path: Path, out: Path) -> None:
    torch.save({"m": nn.Linear(1, 1), "x": 1}, tmp_path / "in.pth")
    with pytest.raises(RefusedError, match="it holds a pickled module at m") as refusal:
        sanitized(tmp_path / "in.pth", out)
    assert "as_state_dict" in refusal.value.next
    with pytest.raises(RefusedError, match="it holds a pickled module at m"):
        sanitized(tmp_path / "in.pth", out, drop_unknown=True)
