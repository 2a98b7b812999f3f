"""Folders of DeepSpeed whose files have whole tensors: universal checkpoints, and the layers of a pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import CkptoolError, NotACheckpointError

UNIVERSAL = FIXTURES / "ranks" / "zero_universal"
PIPELINE = FIXTURES / "real" / "pipeline"


def whole(folder: Path, out: Path) -> Any:
    ckptool.save(ckptool.convert(folder, "torch"), out, force=True)
    return torch.load(out)


def problems(path: Path) -> list[str]:
    with ckptool.open(path) as checkpoint:
        return [problem.message for problem in checkpoint.container.problems if problem.level == "error"]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# -- universal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "global_step3_universal"])
def test_a_universal_checkpoint_is_what_it_was_made_of(inner: str, tmp_path: Path) -> None:
    """Weights and moments of the parameters; buffers and what is frozen as the model has them, in their own dtypes."""
    state = whole(UNIVERSAL / inner, tmp_path / "one.pth")
    oracle = load_file(UNIVERSAL.with_suffix(".safetensors"))
    weights = {key[8:]: value for key, value in oracle.items() if key.startswith("weights.")}
    module = {key[7:]: value for key, value in oracle.items() if key.startswith("module.")}
    assert state["module"].keys() == module.keys()
    for name, value in state["module"].items():
        assert same(value, weights.get("first.weight" if name == "third.weight" else name, module[name]))
    assert state["module"]["third.weight"].data_ptr() == state["module"]["first.weight"].data_ptr()
    for slot in ("exp_avg", "exp_avg_sq"):
        wanted = {key[len(slot) + 1 :]: value for key, value in oracle.items() if key.startswith(slot + ".")}
        assert {name for name, own in state["optimizer"]["state"].items() if slot in own} == wanted.keys()
        assert all(same(state["optimizer"]["state"][name][slot], value) for name, value in wanted.items())
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [
        ["first.weight", "second.weight"],
        ["first.bias", "second.bias", "third.bias"],
    ]
    assert state["global_steps"] == 3
    assert ckptool.validate(UNIVERSAL / inner)["valid"]


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    shutil.copytree(UNIVERSAL, tmp_path / "run")
    return tmp_path / "run" / "global_step3_universal"


def test_each_missing_weight_is_named(universal: Path, tmp_path: Path) -> None:
    for name in ("first.weight", "third.bias"):
        path = universal / "zero" / name / "fp32.pt"
        data = path.read_bytes()
        path.unlink()
        assert any(name in text for text in problems(universal))
        with pytest.raises(CkptoolError, match="is not there"):
            whole(universal, tmp_path / "one.pth")
        path.write_bytes(data[: len(data) // 2])
        assert any(name in text for text in problems(universal))
        path.write_bytes(data)
    assert not problems(universal)


def test_a_weight_of_another_shape_is_named(universal: Path) -> None:
    shutil.copy(universal / "zero" / "first.bias" / "fp32.pt", universal / "zero" / "second.bias" / "fp32.pt")
    assert any("'second.bias' is of the shape [5]" in text for text in problems(universal))


def test_files_that_are_no_parameters_are_named(universal: Path) -> None:
    torch.save([1, 2], universal / "zero" / "first.bias" / "fp32.pt")
    assert any("there is no parameter in it" in text for text in problems(universal))


# -- pipelines --------------------------------------------------------------------------------------------------------


def test_the_layers_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    """Each layer is under its number, as ``PipelineModule.state_dict`` has it."""
    state = whole(PIPELINE, tmp_path / "one.pth")
    (step,) = (path for path in PIPELINE.iterdir() if path.is_dir())
    wanted = {
        f"{number}.{name}": value
        for number in range(2)
        for name, value in torch.load(step / f"layer_{number:02d}-model_states.pt").items()
    }
    assert state["module"].keys() == wanted.keys()
    assert all(same(state["module"][name], value) for name, value in wanted.items())
    words = ckptool.inspect(PIPELINE)["writer"]
    assert words == "DeepSpeed, pipeline: 2 layers of 2 stages, step 0"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    shutil.copytree(PIPELINE, tmp_path / "run")
    return tmp_path / "run" / "global_step0"


def test_a_stage_of_a_pipeline_that_is_missing_is_named(pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "mp_rank_01_model_states.pt").unlink()
    assert problems(pipeline) == ["2 stages saved it, and mp_rank_01_model_states.pt is not there"]
    with pytest.raises(CkptoolError, match="is not there"):
        whole(pipeline, tmp_path / "one.pth")


def test_stages_of_two_steps_are_named(pipeline: Path) -> None:
    path = pipeline / "mp_rank_01_model_states.pt"
    state = torch.load(path)
    torch.save({**state, "global_steps": 9}, path)
    assert any("is of step 9" in text for text in problems(pipeline))


def test_layers_that_are_cut_themselves_are_not_joined(pipeline: Path) -> None:
    for path in sorted(pipeline.glob("layer_*")):
        path.rename(pipeline / path.name.replace("-model", "-model_00-model"))
    with pytest.raises(NotACheckpointError, match="DeepSpeed checkpoint"):
        ckptool.open(pipeline)
