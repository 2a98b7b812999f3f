"""Situations about devices, and about states of random number generators."""

from __future__ import annotations

import os
import random
from unittest import mock

import numpy as np
import torch
from stand_ins import STATE, Net, called, instance, state

from .situation import Situation, error_of, fits, holds, loaded, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


def save_on(device: str, value: object, path: str) -> None:
    """Save with the tag of a device that this machine does not have."""
    with mock.patch("torch.serialization.location_tag", return_value=device):
        torch.save(value, path)


@situation(ends=holds())
def cuda_without_gpu() -> str:
    save_on("cuda:1", state(), "model.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=holds())
def old_xla_tensors() -> str:
    arrays = {
        key: called("torch._utils._rebuild_xla_tensor", value.numpy(), value.dtype, "xla:0", False)
        for key, value in STATE.items()
    }
    torch.save(arrays, "model.pth")
    return "AttributeError: Can't get attribute '_rebuild_xla_tensor' on <module 'torch._utils' from 'torch/_utils.py'>"


@situation(ends=holds(entry="state_dict"))
def npu_tensors() -> str:
    tensors = {}
    for key, value in STATE.items():
        storage = torch.storage.TypedStorage(wrap_storage=value.untyped_storage(), dtype=value.dtype, _internal=True)
        place = (storage, 0, tuple(value.shape), value.stride(), False, {}, 2)
        tensors[key] = called("torch_npu.utils.storage._rebuild_npu_tensor", *place)
    torch.save({"state_dict": tensors}, "model.pth")
    return error_of(torch.load, "model.pth", weights_only=False)


@situation(ends=holds())
def xser() -> str:
    os.mkdir("model.pt.tensors")
    references = {}
    for number, (key, value) in enumerate(STATE.items()):
        references[key] = instance("torch_xla.utils.serialization.TensorReference", tid=number)
        torch.save(value, f"model.pt.tensors/tensor_{number}.pt")
    torch.save({"model": references}, "model.pt")
    return error_of(torch.load, "model.pt", weights_only=False)


@situation()
def rng_state_moved() -> str:
    torch.save({"model": state(), "rng_states": [torch.get_rng_state()], "epoch": 3}, "checkpoint.pt")
    return "TypeError: RNG state must be a torch.ByteTensor"


@situation(ends=lambda output: _resumes(output))
def accelerate_random_states() -> str:
    states = {
        "step": 7,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, "random_states_0.pkl")
    return error_of(torch.load, "random_states_0.pkl")


def _resumes(output: str) -> None:
    """Do what ``load_accelerator_state`` does, and put the states of this process back."""
    value = loaded(output)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.setstate(value["random_state"])
    np.random.set_state(value["numpy_random_seed"])
    torch.set_rng_state(value["torch_manual_seed"])
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@situation(ends=lambda output: _is_float32(output))
def half_on_cpu() -> str:
    torch.save({key: value.half() if value.is_floating_point() else value for key, value in state().items()},
               "model.half.pth")  # fmt: skip
    return "RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'"


def _is_float32(output: str) -> None:
    fits(Net)(output)
    assert all(value.dtype in (torch.float32, torch.int64) for value in loaded(output).values())


@situation()
def meta_tensors() -> str:
    torch.save({key: value.to("meta") for key, value in state().items()}, "model.pth")
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(torch.load("model.pth"), assign=True)
    return error_of(model.to, "cpu")
