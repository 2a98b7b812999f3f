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


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_a_missing_file_is_counted_and_named(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RANKS / "torchtitan/step-2", tmp_path / "run"))
    (folder / name).unlink()
    report = ckptool.inspect(folder)
    assert "2 ranks, 2 files" in report["writer"] and report["writer"].endswith("incomplete")
    assert (report["world_size"], report["complete"]) == (2, False)
    errors = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert [error["code"] for error in errors] == ["missing-file"]  # its tensors are no second cause
    assert "in-pieces" not in {finding["code"] for finding in report["findings"]}


@pytest.mark.parametrize("name", ["torchtitan/step-2", "dcp_zstd"])
def test_swapped_files_are_said_to_be(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RANKS / name, tmp_path / "run"))
    one, two = folder / "__0_0.distcp", folder / "__1_0.distcp"
    two.rename(folder / "spare")
    one.rename(two)
    (folder / "spare").rename(one)
    said = say("inspect", folder)
    assert said.code == 0
    assert "they may have been swapped, and renaming them is enough" in said.out and "incomplete" in said.out


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


def test_the_iteration_is_in_the_name_where_no_file_says_it(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RANKS / "megatron_dist_tp2/iter_0000002", tmp_path / "iter_0000030"))
    assert ckptool.inspect(folder)["step"] == 2  # the file counts
    core = Path(shutil.copytree(FIXTURES / "real/megatron_core", tmp_path / "iter_0000040"))
    (core / "common.pt").unlink()
    assert "step" not in ckptool.inspect(core)  # it might be of any framework


def test_a_later_iteration_is_named_with_its_command(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RANKS / "megatron_dist_tp2", tmp_path / "run"))
    shutil.copytree(run / "iter_0000002", run / "iter_0000001")
    assert "also there: iter_0000001\n" in say("inspect", run).out
    shutil.copytree(run / "iter_0000002", run / "iter_0000004")
    later = f"also there: iter_0000001 and iter_0000004\n  -> ckptool inspect {run / 'iter_0000004'}\n"
    assert later in say("inspect", run).out
