"""Folders of DeepSpeed that are not joined, and of Megatron-LM: named with what is there and what is missing.

Those of two ranks were written by DeepSpeed itself (fixtures/files/real); for other numbers of ranks, and for
Megatron-LM's older format, the files are made here with the names and keys that the frameworks write.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.base.errors import NotACheckpointError
from ckptool.cli.main import run


def deepspeed(path: Path, stage: int, ranks: int, model: int = 1, prefix: str = "") -> Path:
    """What an engine of ``ranks`` x ``model`` ranks saves."""
    path.mkdir(parents=True)
    facts = {"dp_world_size": ranks, "mp_world_size": model, "ds_version": "0.14.0", "global_steps": 100}
    for two in range(model):
        if stage < 3:
            torch.save({"module": {"w": torch.zeros(2)}, **facts}, path / f"mp_rank_{two:02d}_model_states.pt")
        for one in range(ranks):
            state = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": ranks, "fp32": torch.zeros(2)}}
            torch.save(state, path / f"{prefix}zero_pp_rank_{one}_mp_rank_{two:02d}_optim_states.pt")
            if stage == 3:
                torch.save(dict(facts), path / f"zero_pp_rank_{one}_mp_rank_{two:02d}_model_states.pt")
    return path


def megatron(path: Path, tensor: int, pipeline: int, experts: int) -> Path:
    for one, two, three in product(range(tensor), range(pipeline), range(experts)):
        inner = path / f"mp_rank_{one:02d}_{two:03d}_{three:03d}"
        inner.mkdir(parents=True)
        torch.save({"model": {"w": torch.zeros(2)}, "iteration": 100}, inner / "model_optim_rng.pt")
    return path


def told(path: Path) -> str:
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(path)
    assert caught.value.kind in ("deepspeed", "megatron")
    return f"{caught.value}\n{caught.value.next}"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_the_ranks_of_deepspeed_are_named(stage: int, prefix: str, tmp_path: Path) -> None:
    words = told(deepspeed(tmp_path / "global_step100", stage, 4, 2, prefix=prefix))
    assert "of 8 optimizer files" in words
    assert "its tensors are cut in ways that only the model knows: not joined" in words


def test_hostile_numbers_of_ranks_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "zero_pp_rank_999999_mp_rank_999999_optim_states.pt").write_bytes(b"")
    (tmp_path / f"zero_pp_rank_{'9' * 100}_mp_rank_00_optim_states.pt").write_bytes(b"")
    assert "DeepSpeed" in told(tmp_path)


def test_a_folder_with_a_few_such_names_is_no_such_folder(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "other.pt")
    assert run(["inspect", str(tmp_path)]) == 0
