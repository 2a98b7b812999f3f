"""Situations about folders of transformers, and about safetensors."""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import state

from .situation import Situation, error_of, holds, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


@cache
def llama() -> Any:
    """Return a tiny Llama with values that only a file can give it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(config)


def loads_llama(output: str) -> None:
    """Check that transformers loads a folder without a missing key, and with these values."""
    model, info = type(llama()).from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"], f"missing: {info['missing_keys']}"
    loaded = model.state_dict()
    for key, tensor in llama().state_dict().items():
        assert torch.equal(loaded[key], tensor), f"{key} has other values"


def shards(path: str, suffix: str = "safetensors") -> list[str]:
    """Save the model in shards; return their names."""
    llama().save_pretrained(path, max_shard_size="2KB")
    names = sorted(item.name for item in Path(path).glob("*-of-*"))
    if suffix == "bin":
        index = index_of(path)
        for name in names:
            torch.save(load_file(f"{path}/{name}"), f"{path}/{bin_name(name)}")
            os.remove(f"{path}/{name}")
        os.remove(f"{path}/model.safetensors.index.json")
        index["weight_map"] = {key: bin_name(name) for key, name in index["weight_map"].items()}
        Path(path, "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
        names = [bin_name(name) for name in names]
    return names


def bin_name(name: str) -> str:
    return name.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")


def index_of(path: str) -> dict[str, Any]:
    value = json.loads(Path(path, "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def write_index(path: str, index: dict[str, Any]) -> None:
    Path(path, "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@situation()
def missing_shard() -> str:
    names = shards("model", "bin")
    os.remove(f"model/{names[1]}")
    return error_of(type(llama()).from_pretrained, "model")


@situation(ends=loads_llama)
def index_names_the_wrong_shard() -> str:
    names = shards("model")
    index = index_of("model")
    index["weight_map"]["lm_head.weight"] = names[0]
    write_index("model", index)
    return (
        "Some weights of LlamaForCausalLM were not initialized from the model checkpoint at model and are newly "
        "initialized: ['lm_head.weight']"
    )


@situation(ends=loads_llama)
def stale_index() -> str:
    shards("model")
    index = index_of("model")
    index["weight_map"] = {key: name.replace("of-00003", "of-00005") for key, name in index["weight_map"].items()}
    write_index("model", index)
    return error_of(type(llama()).from_pretrained, "model")


@situation(ends=loads_llama)
def no_index() -> str:
    shards("model")
    os.remove("model/model.safetensors.index.json")
    return error_of(type(llama()).from_pretrained, "model")


@situation(ends=loads_llama)
def index_without_metadata() -> str:
    shards("model")
    write_index("model", {"weight_map": index_of("model")["weight_map"]})
    return error_of(type(llama()).from_pretrained, "model")


@situation()
def two_sets_of_weights() -> str:
    shards("model", "bin")
    save_file({key: value.clone() * 0 for key, value in llama().state_dict().items()}, "model/model.safetensors",
              {"format": "pt"})  # fmt: skip
    return ""


@situation(ends=holds({"transformer.wte.weight": torch.ones(8, 4)}))
def tied_weights() -> str:
    weight = torch.ones(8, 4)
    value = {"transformer.wte.weight": weight, "lm_head.weight": weight, "transformer.ln_f.weight": torch.ones(4)}
    torch.save(value, "pytorch_model.bin")
    return error_of(save_file, value, "model.safetensors")


@situation(ends=holds())
def not_contiguous() -> str:
    value = state()
    value["fc.weight"] = value["fc.weight"].t().contiguous().t()
    torch.save(value, "model.pth")
    return error_of(save_file, value, "model.safetensors")


@situation(ends=holds())
def no_format() -> str:
    os.mkdir("model")
    save_file(state(), "model/model.safetensors")
    return "AttributeError: 'NoneType' object has no attribute 'get'"


@situation(ends=holds())
def renamed_to_safetensors() -> str:
    torch.save(state(), "model.safetensors")
    return error_of(load_file, "model.safetensors")


@situation(ends=holds())
def safetensors_by_torch_load() -> str:
    save_file(state(), "model.safetensors", {"format": "pt"})
    shutil.move("model.safetensors", "model.pth")
    return error_of(torch.load, "model.pth", weights_only=False)


@situation(ends=lambda output: _is_resumable(output))
def trainer_random_states() -> str:
    llama().save_pretrained("checkpoint-500")
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(states, "checkpoint-500/rng_state.pth")
    return error_of(torch.load, "checkpoint-500/rng_state.pth")


def _is_resumable(output: str) -> None:
    path = f"{output}/rng_state.pth" if os.path.isdir(output) else output
    value = torch.load(path, weights_only=True)
    before = np.random.get_state()
    np.random.set_state(value["numpy"])
    np.random.set_state(before)
