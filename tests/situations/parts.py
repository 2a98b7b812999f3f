"""Situations about files that several processes wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from conftest import FIXTURES
from safetensors.torch import load_file
from stand_ins import STATE, Net, state, trained
from torch.distributed.checkpoint import state_dict_saver

from .situation import Situation, error_of, holds, loaded, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


def copied(name: str, target: str) -> None:
    """Copy a folder that real processes wrote."""
    shutil.copytree(FIXTURES / name, target)


def _same_as(name: str, output: str) -> None:
    """Check that an output has the weights that the ranks had together."""
    value, expected = loaded(output), load_file(FIXTURES / name)
    for key, tensor in value.items():
        assert torch.equal(tensor, expected[f"weights.{key}"].to(tensor.dtype)), f"{key} has other values"
    assert len(value) > 1


@situation(ends=lambda output: _same_as("ranks/accelerate_fsdp.safetensors", output))
def accelerate_fsdp() -> str:
    copied("ranks/accelerate_fsdp", "checkpoint")
    return ""


def _has_tensors(output: str) -> None:
    value = loaded(output)
    assert value and all(isinstance(each, torch.Tensor) and each.numel() for each in value.values())


@situation()
def no_metadata() -> str:
    copied("dcp4", "checkpoint")
    os.remove("checkpoint/.metadata")
    return "FileNotFoundError: [Errno 2] No such file or directory: 'checkpoint/.metadata'"


@situation()
def local_state_dicts() -> str:
    copied("ranks/local_2", "checkpoint")
    return ""


@situation()
def flat_parameters() -> str:
    torch.save({"_flat_param": torch.ones(30), "fc._flat_param": torch.ones(10)}, "model.pth")
    return error_of(Net().load_state_dict, torch.load("model.pth"))


@situation()
def optimizer_by_name() -> str:
    value = {
        "model": state(),
        "optimizer": {"state": {key: {"step": torch.tensor(1.0), "exp_avg": tensor.float().clone()}
                                for key, tensor in trained().named_parameters()}},
    }  # fmt: skip
    with torch.no_grad():
        state_dict_saver.save(value, checkpoint_id="checkpoint", no_dist=True)
    return "RuntimeError: Missing key in checkpoint state_dict: optimizer.state.0.step."


@situation(ends=lambda output: _has_tensors(output))
def zero_stage_0() -> str:
    copied("real/zero0", "checkpoint")
    return "ValueError: unknown zero stage 0"


@situation(ends=lambda output: _same_as("ranks/zero2_bf16.safetensors", output))
def ranks_of_an_older_save() -> str:
    copied("ranks/zero2_bf16", "checkpoint")
    [other] = (FIXTURES / "ranks" / "zero2_bf16_3").rglob("*rank_2*optim_states.pt")
    shutil.copy(other, "checkpoint/global_step3")
    return (
        "ValueError: Expected 2 of '*_optim_states.pt' under 'checkpoint' but found 3 files. Possibly due to an "
        "overwrite of an old checkpoint, or a checkpoint didn't get saved by one or more processes."
    )


@situation(ends=lambda output: _same_as("ranks/lightning_zero2.ckpt.safetensors", output))
def lightning_deepspeed() -> str:
    copied("ranks/lightning_zero2.ckpt", "epoch.ckpt")
    return "IsADirectoryError: [Errno 21] Is a directory: 'epoch.ckpt'"


def _is_whole_llama(output: str) -> None:
    """Check joined tensors, under the names of Meta, or of transformers with the rows of queries permuted."""
    value = loaded(output)
    parts = [torch.load(FIXTURES / "llama_parts" / f"consolidated.0{part}.pth") for part in range(2)]
    joined = torch.cat([part["layers.0.attention.wq.weight"] for part in parts])
    head = torch.cat([part["output.weight"] for part in parts])
    if "output.weight" in value:
        assert torch.equal(value["layers.0.attention.wq.weight"], joined) and torch.equal(value["output.weight"], head)
    else:  # convert_llama_weights_to_hf.py, permute
        wanted = joined.view(4, 1, 2, 8).transpose(1, 2).reshape(8, 8)
        assert torch.equal(value["model.layers.0.self_attn.q_proj.weight"], wanted)
        assert torch.equal(value["lm_head.weight"], head)
    assert len(value) == 12


@situation(ends=lambda output: _is_whole_llama(output))
def meta_shards() -> str:
    copied("llama_parts", "Llama-2-13b")
    return ""


@situation(ends=holds())
def torchtune_shards() -> str:
    os.mkdir("finetuned")
    items = list(STATE.items())
    torch.save(dict(items[:3]), "finetuned/hf_model_0001_0.pt")
    torch.save(dict(items[3:]), "finetuned/hf_model_0002_0.pt")
    return ""


@situation()
def speechbrain() -> str:
    folder = Path("CKPT+2024-03-01+12-00-00+00")
    folder.mkdir()
    torch.save(state(), folder / "model.ckpt")
    optimizer = torch.optim.SGD(trained().parameters(), 0.1, momentum=0.9)
    torch.save(optimizer.state_dict(), folder / "optimizer.ckpt")
    (folder / "brain.ckpt").write_text("avg_train_loss: 0.5\noptimizer_step: 100\nstep: 100\n", encoding="utf-8")
    (folder / "counter.ckpt").write_text("3", encoding="utf-8")
    (folder / "dataloader-TRAIN.ckpt").write_text("100", encoding="utf-8")
    (folder / "CKPT.yaml").write_text("# yamllint disable\nWER: 5.0\nunixtime: 1709290800.0\n", encoding="utf-8")
    return ""
