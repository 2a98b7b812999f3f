"""What ``inspect`` says of a DCP folder as a save: who wrote it, at which step, whether it is whole, and what to do."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import say
from conftest import FIXTURES
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool

RANKS = FIXTURES / "ranks"
#: Folders with the framework and the step in the first line, and the state dict in their object.
FOLDERS = {
    RANKS / "torchtitan/step-2": ("for torchtitan: 2 ranks", 2, ""),
    RANKS / "dcp_zstd": ("1.0.0: 2 ranks", 2, "model"),
    RANKS / "megatron_dist_tp2": ("for Megatron-LM (2 tensor-parallel ranks): 2 ranks", 2, ""),
    RANKS / "megatron_dist_pp2": ("for Megatron-LM (2 pipeline-parallel ranks): 2 ranks", 2, ""),
    FIXTURES / "real/megatron_core": ("for Megatron-LM: 2 ranks", 3, ""),
    FIXTURES / "real/lightning_sharded": ("for Lightning: 2 ranks", 1, "state_dict"),
}


@pytest.mark.parametrize("name", FOLDERS, ids=lambda path: path.name)
def test_it_says_what_it_is_and_how_to_make_one_file_of_it(name: Path, tmp_path: Path) -> None:
    words, step, key = FOLDERS[name]
    folder = shutil.copytree(name, tmp_path / "run")
    report = ckptool.inspect(folder)
    assert words in report["writer"] and report["writer"].endswith(f", step {step}, all there")
    assert (report["world_size"], report["step"], report["complete"]) == (2, step, True)
    (command,) = (finding["next"] for finding in report["findings"] if finding["code"] == "in-pieces")
    assert say(*shlex.split(command)[1:]).code == 0
    with ckptool.open(folder) as checkpoint:
        weights = {entry.key for entry in checkpoint.survey.tensors_in([key])}
    assert weights and load_file(tmp_path / "run.safetensors").keys() == weights


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({"train_state": {"step": torch.tensor(7, dtype=torch.int32)}}, 7),
        ({"global_step": 8, "step": 1}, 8),
        ({"step": torch.tensor(9)}, 9),
        ({"step": torch.tensor([9])}, None),
        ({"step": torch.tensor(9.0)}, None),
        ({"step": "nine"}, None),
        ({"step": True}, None),
        ({"epoch": 4}, None),
    ],
    ids=str,
)
def test_a_step_is_a_whole_number(state: dict[str, object], step: int | None, tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.zeros(2, 2)}, **state}, checkpoint_id=tmp_path / "run", no_dist=True)
    report = ckptool.inspect(tmp_path / "run")
    assert report.get("step") == step
    assert ("step" in report["writer"]) == (step is not None)
    dcp_to_torch_save(tmp_path / "run", tmp_path / "whole.pth")
    assert torch.load(tmp_path / "whole.pth").keys() == {"model", *state}
