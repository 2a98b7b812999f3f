"""A model at the root of a checkpoint, beside the state of its optimizer and other entries, is its state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.base.errors import RefusedError

MODELS = {
    "dcp_beside": {"embed.weight", "layers.0.wq.weight", "layers.0.norm_weight"},
    "dcp_flat": {"embed.weight", "layers.0.wq.weight", "layers.0.norm_weight"},
    "real/megatron_core": {"decoder.w", "decoder.b"},
}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(name: str, tmp_path: Path) -> Path:
    """The same object in a file of torch.save, as torch makes it of the folder."""
    out = tmp_path / "saved.pth"
    dcp_to_torch_save(FIXTURES / name, out)
    return out


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def keys(path: Path) -> set[str]:
    with ckptool.open(path) as checkpoint:
        (state_dict,) = checkpoint.state_dicts
        assert state_dict.path == ""
        return {entry.key for entry in checkpoint.survey.tensors_in([""])}


def test_the_model_is_the_state_dict(name: str, saved: Path) -> None:
    assert keys(FIXTURES / name) == keys(saved) == MODELS[name]


def test_it_becomes_safetensors_and_the_rest_is_named(name: str, saved: Path, tmp_path: Path) -> None:
    whole = load(saved)
    out = tmp_path / "out.safetensors"
    for path in (FIXTURES / name, saved):
        with ckptool.open(path) as checkpoint:
            with pytest.raises(RefusedError, match="entries outside the state dict"):
                ckptool.convert(checkpoint, "safetensors", strict=True)
            beside = ckptool.convert(checkpoint, "safetensors", allow_loss=["entries"]).changes[-1].notes[0]
            assert next(key for key in whole if key not in MODELS[name]) in beside
            ckptool.save(ckptool.convert(checkpoint, "safetensors", key="."), out, force=True)
        made = load_file(out)
        assert made.keys() == MODELS[name]
        assert all(torch.equal(made[key], whole[key]) for key in made)


def test_an_edit_of_keys_leaves_the_rest_alone(name: str, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "renamed.pth"
    with ckptool.open(saved) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), out)
    expected = {f"module.{key}" if key in MODELS[name] else key: value for key, value in load(saved).items()}
    assert oracle.difference(load(out), expected) == ""
    assert ckptool.diff(saved, out, ignore=["prefix"])["same"]


def test_a_model_below_the_root_comes_first(tmp_path: Path) -> None:
    """A tensor with a dot in its name beside a state dict is a value like any other."""
    path = tmp_path / "nested.pth"
    torch.save({"model": {"a.weight": torch.ones(2)}, "best.weight": torch.ones(1), "epoch": 3, "note": ""}, path)
    with ckptool.open(path) as checkpoint:
        assert [item.path for item in checkpoint.state_dicts] == ["model"]


@pytest.mark.parametrize(
    "value",
    [
        {"optimizer.state.exp_avg.w.weight": torch.ones(2), "epoch": 1, "rng/shard_0_1": [1]},
        {"loss.best": torch.ones(()), "epoch": 3, "note": "x", "lr": 0.1},
        {"w/a.weight": torch.ones(2), "w.weight": torch.ones(2), "a": 1, "b": 2, "c": 3},
        {1: torch.ones(2), "w.weight": torch.ones(2), "a": 1, "b": 2, "c": 3},
    ],
    ids=["no model", "no parameter", "paths", "numbers"],
)
def test_other_roots_are_none(tmp_path: Path, value: object) -> None:
    path = tmp_path / "other.pth"
    torch.save(value, path)
    with ckptool.open(path) as checkpoint:
        assert checkpoint.state_dicts == []
