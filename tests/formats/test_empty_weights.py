"""Weights that ZeRO-3 left empty are invalid in every format; tensors that are empty by right are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from command_line import say
from safetensors.torch import save_file
from torch import nn

State = dict[str, torch.Tensor]


def model() -> State:
    torch.manual_seed(0)
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in ("q_proj", "up_proj", "down_proj")]
    state = {name: torch.randn(4, 4) for name in ("model.embed_tokens.weight", *names)}
    return state | {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.randn(8, 4)}


def biased() -> State:
    return dict(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).state_dict())


def adapter() -> State:
    return {
        f"base_model.model.layers.{layer}.q_proj.lora_{part}.weight": torch.randn(2, 2)
        for layer in range(2)
        for part in "AB"
    }


def emptied(state: State, which: Callable[[str, torch.Tensor], bool]) -> State:
    return {name: torch.empty(0) if which(name, value) else value for name, value in state.items()}


def every(name: str, value: torch.Tensor) -> bool:
    return value.is_floating_point()


def matrices(name: str, value: torch.Tensor) -> bool:
    """Those above DeepSpeed's ``stage3_param_persistence_threshold``."""
    return value.dim() > 1


WRITERS: Mapping[str, Callable[[State, Path], Path]] = {
    "pth": lambda state, path: _saved(state, path / "model.pth"),
    "wrapped": lambda state, path: _saved({"state_dict": state, "epoch": 3}, path / "model.ckpt"),
    "legacy": lambda state, path: _saved(state, path / "model.pt", _use_new_zipfile_serialization=False),
    "safetensors": lambda state, path: _safe(state, path / "weights.safetensors"),
    "folder": lambda state, path: _safe(state, path / "model.safetensors", "config.json").parent,
    "folder of bin": lambda state, path: _saved(state, path / "pytorch_model.bin", "config.json").parent,
    "file of a folder": lambda state, path: _safe(state, path / "model.safetensors", "config.json"),
    "adapter": lambda state, path: _safe(state, path / "adapter_model.safetensors", "adapter_config.json").parent,
    "adapter file": lambda state, path: _safe(state, path / "adapter_model.safetensors"),
    "adapter of bin": lambda state, path: _saved(state, path / "adapter_model.bin", "adapter_config.json").parent,
}


def _saved(state: object, path: Path, config: str = "", **how: bool) -> Path:
    torch.save(state, path, **how)
    return _described(path, config)


def _safe(state: State, path: Path, config: str = "") -> Path:
    save_file(state, path, {"format": "pt"})
    return _described(path, config)


def _described(path: Path, config: str) -> Path:
    if config:
        (path.parent / config).write_text(json.dumps({"model_type": "llama", "peft_type": "LORA", "hidden_size": 4}))
    return path


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("which", [every, matrices])
@pytest.mark.parametrize("made", [model, biased, adapter])
def test_weights_without_values_are_invalid(
    writer: str, which: Callable[[str, torch.Tensor], bool], made: Callable[[], State], tmp_path: Path
) -> None:
    path = WRITERS[writer](emptied(made(), which), tmp_path)
    said = say("validate", path)
    assert said.code == 1
    assert "INVALID" in said.out and "[0]" in said.out and "ZeRO-3" in said.out
    assert "save again on all ranks" in said.out
    assert "save again on all ranks" in say("inspect", path).out
    converted = say("convert", path, "-o", tmp_path / "out.safetensors", "--allow-loss", "all")
    assert converted.code == 4 and not (tmp_path / "out.safetensors").exists()
    (tmp_path / "whole").mkdir()
    assert say("validate", WRITERS[writer](made(), tmp_path / "whole")).code == 0


@pytest.mark.parametrize("writer", ["adapter", "adapter file", "adapter of bin"])
def test_an_adapter_without_tensors_is_invalid(writer: str, tmp_path: Path) -> None:
    said = say("validate", WRITERS[writer]({}, tmp_path))
    assert said.code == 1 and "it has no tensor" in said.out


LEGITIMATE: Mapping[str, State] = {
    "no features": dict(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 0)).state_dict()),
    "a norm of nothing": dict(nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(0)).state_dict()),
    "an embedding of nothing": dict(nn.Sequential(nn.Linear(4, 2), nn.Embedding(0, 4)).state_dict()),
    "an empty buffer": {**biased(), "mask": torch.empty(0)},
    "a pruned index": {**model(), "pruned.indices": torch.empty(0, dtype=torch.long)},
    "one empty parameter": {**model(), "prompt": torch.empty(0)},
    "a batch norm of nothing": dict(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(0)).state_dict()),
}


@pytest.mark.parametrize("name", LEGITIMATE)
@pytest.mark.parametrize("writer", ["pth", "wrapped", "legacy", "safetensors"])
def test_tensors_that_are_empty_by_right_are_valid(name: str, writer: str, tmp_path: Path) -> None:
    said = say("validate", WRITERS[writer](LEGITIMATE[name], tmp_path))
    assert said.code == 0, said.out


def test_an_empty_tensor_alone_is_valid(tmp_path: Path) -> None:
    for number, value in enumerate((torch.empty(0), [torch.empty(0)], {"indices": torch.empty(0)}, {})):
        torch.save(value, tmp_path / f"{number}.pt")
        assert say("validate", tmp_path / f"{number}.pt").code == 0


def test_an_adapter_is_not_merged_as_tensors(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "base.pth")
    torch.save(adapter(), tmp_path / "lora.pth")
    said = say("merge", tmp_path / "base.pth", tmp_path / "lora.pth", "-o", tmp_path / "out.pth")
    assert said.code == 4 and "is an adapter" in said.err and not (tmp_path / "out.pth").exists()
    peft = {"base_model.model." + name: value for name, value in model().items()} | adapter()
    torch.save(peft, tmp_path / "peft.pth")
    assert say("merge", tmp_path / "peft.pth", tmp_path / "lora.pth", "-o", tmp_path / "out.pth").code == 0
