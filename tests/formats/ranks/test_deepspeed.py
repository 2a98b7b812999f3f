"""Folders of DeepSpeed: what ckptool joins is what DeepSpeed itself gathered, and what does not fit is named.

The folders of the fixtures were written by DeepSpeed, its Trainer, Lightning and accelerate; beside each is what its
engine had. Others are cut here by the rules of ZeRO, whatever the shapes and the number of ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from zero_folders import Model, random_model, write_zero

import ckptool
from ckptool.base.errors import UnreadableError
from ckptool.checkpoint.container import is_complete
from ckptool.files.folders import LocalFolder
from ckptool.formats.names.deepspeed import explain

RANKS = FIXTURES / "ranks"
FOLDERS = {
    path.stem if path.suffix == ".safetensors" else path.name: path
    for path in sorted(RANKS.iterdir())
    if path.is_dir() and any(path.glob("**/*zero_pp_rank*_optim_states.pt")) and not any(path.glob("**/*_expert_*"))
}


def step_of(name: str) -> Path:
    """The folder with the files of a fixture."""
    return next(FOLDERS[name].glob("**/*_optim_states.pt")).parent


def oracle(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """What the engine had: the state dict of the module, the weights in 32 bits, and the moments."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(RANKS / f"{FOLDERS[name].name}.safetensors").items():
        kind, _, own = key.partition(".")
        found.setdefault(kind, {})[own] = value
    return found


def joined(folder: Path, tmp_path: Path) -> Any:
    """What torch loads of the file that is made of a folder."""
    with ckptool.open(folder) as checkpoint:
        ckptool.save(checkpoint, tmp_path / "joined.pth", force=True)
    return torch.load(tmp_path / "joined.pth", weights_only=True)


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == two.keys()
    return same and all(one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_what_the_engine_had(name: str, tmp_path: Path) -> None:
    found, expected = joined(step_of(name), tmp_path), oracle(name)
    kept = {"third.weight": "first.weight", "lm_head.weight": "model.embed_tokens.weight"}
    weights = expected.pop("weights")
    whole = {
        key: weights.get(key, weights.get(kept.get(key, ""), value)) for key, value in expected.pop("module").items()
    }
    assert equal(found["module"], whole)
    assert expected
    states = found["optimizer"]["state"]
    for moment, values in expected.items():
        assert equal({key: states[key][moment] for key in values}, values)
    assert states.keys() == weights.keys()
    assert {key for group in found["optimizer"]["param_groups"] for key in group["params"]} == weights.keys()
    assert all(state["step"].item() == found["global_steps"] for state in states.values() if "step" in state)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_weights_as_they_were_trained(name: str, tmp_path: Path) -> None:
    with ckptool.open(step_of(name)) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch", deepspeed_16bit=True), tmp_path / "half.pth")
    found = torch.load(tmp_path / "half.pth", weights_only=True)
    assert equal(dict(found["module"]), oracle(name)["module"])
    assert "optimizer" in found


def test_weights_of_stage_3_are_cast_as_training_did(tmp_path: Path) -> None:
    """The partitions in 32 bits are copied to the weights after each step; which dtype that is, the files say."""
    for name, dtype in (("zero3_bf16", "bfloat16"), ("zero3_fp16", "float16")):
        out = tmp_path / f"{name}.safetensors"
        said = say("convert", step_of(name), "-o", out, "--key", "module", "--deepspeed-16bit")
        assert said.code == 0 and f"cast to {dtype}" in said.out
        assert equal(load_file(out), oracle(name)["module"])


def test_the_file_that_names_the_latest_step_is_not_replaced(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pth")
    (tmp_path / "latest").write_text("global_step3")
    said = say("convert", str(tmp_path / "in.pth"), "--to-format", "torch", "-o", str(tmp_path / "latest"), "--force")
    assert said.code == 4 and "the latest step is 'global_step3'" in said.err
    assert (tmp_path / "latest").read_text() == "global_step3"
    # A checkpoint of that name is like any other.
    shutil.copyfile(tmp_path / "in.pth", tmp_path / "latest")
    assert say("add-module", str(tmp_path / "in.pth"), "-o", str(tmp_path / "latest"), "--force").code == 0
    assert list(torch.load(tmp_path / "latest")) == ["module.w"]


def test_client_state_comes_along(tmp_path: Path) -> None:
    found = joined(FOLDERS["lightning_zero2.ckpt"], tmp_path)
    assert (found["epoch"], found["global_step"], found["hyper_parameters"]) == (0, 3, {"size": 7})
    assert not {"param_shapes", "shared_params", "buffer_names", "dp_world_size"} & found.keys()


# -- cut by the rules -----------------------------------------------------------------------------------------------

SHAPES = st.lists(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4), min_size=1, max_size=3
)


@settings(max_examples=examples(60))
@given(data=st.data(), shapes=SHAPES, ranks=st.integers(1, 5), stage=st.sampled_from([1, 2, 3]), stripped=st.booleans())
def test_whatever_was_cut_is_joined(
    data: st.DataObject, shapes: list[list[tuple[int, ...]]], ranks: int, stage: int, stripped: bool, tmp_path: Path
) -> None:
    model = random_model(shapes, ("exp_avg", "exp_avg_sq"))
    if stage < 3 and data.draw(st.booleans()):
        paddings = [[data.draw(st.integers(0, 9)) for _ in own[1:]] + [0] for own in shapes]
        model = model._replace(paddings=paddings)
    first = next(iter(model.weights))
    extra = {"base.weight": torch.randn(3, 3).bfloat16().float()}
    model = model._replace(frozen=extra, buffers={"seen": torch.tensor(3)}, aliases={"head.weight": first})
    folder = tmp_path / "step"
    shutil.rmtree(folder, ignore_errors=True)
    found = joined(write_zero(folder, model, ranks, stage, stripped=stripped), tmp_path)
    expected = model.whole | {"base.weight": extra["base.weight"].bfloat16()}
    assert equal(found["module"], expected)
    for moment, groups in model.moments.items():
        for group in groups:
            for name, value in group.items():
                assert torch.equal(found["optimizer"]["state"][name][moment], value)
    if prod(model.weights[first].shape):
        assert found["module"]["head.weight"].data_ptr() == found["module"][first].data_ptr()


def test_tied_weights_that_only_the_module_shows(tmp_path: Path) -> None:
    """Versions of DeepSpeed before 0.9 say nothing of them."""
    model = random_model([[(3, 3), (5,)]])._replace(aliases={"head.weight": "layer0.0.weight"})
    folder = write_zero(tmp_path / "step", model, 2, 2)
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "shared_params": {}}, path)
    found = joined(folder, tmp_path)["module"]
    assert found["head.weight"].data_ptr() == found["layer0.0.weight"].data_ptr()


# -- what does not fit ------------------------------------------------------------------------------------------------


def refused(folder: Path, tmp_path: Path) -> str:
    """Nothing is made of it, and this is why."""
    said = say("convert", folder, "-o", tmp_path / "out.pth")
    assert said.code in (3, 4) and not (tmp_path / "out.pth").exists()
    code, out, err = say("validate", folder)
    assert code in (1, 3)
    with suppress(UnreadableError), ckptool.open(folder) as checkpoint:
        assert not is_complete(checkpoint.container.problems)
        assert checkpoint.container.writer.endswith("incomplete")
    return said.err + out + err


SMALL = random_model([[(7, 5), (5,)], [(9,)]])


def optimizer(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_of_another_step(stage: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 3, stage)
    other = write_zero(tmp_path / "other", SMALL, 3, stage, step=4)
    for rank in range(3):
        spoiled = Path(shutil.copytree(folder, tmp_path / f"rank{rank}"))
        shutil.copy(optimizer(other, rank), optimizer(spoiled, rank))
        words = refused(spoiled, tmp_path)
        assert f"{optimizer(spoiled, rank).name} is of another save than" in words and "step 4" in words


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_too_many(stage: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, stage)
    optimizer(folder, 2).write_bytes(optimizer(folder, 1).read_bytes().replace(b"_rank_1_mp", b"_rank_2_mp"))
    assert "is of another save: 2 ranks saved this one" in refused(folder, tmp_path)


def exchanged(folder: Path, one: Path, two: Path) -> None:
    aside = folder / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_two_ranks_exchanged_that_do_not_know_their_names(tmp_path: Path) -> None:
    """Below stage 3 a file says where its parameters begin."""
    folder = write_zero(tmp_path / "step", SMALL, 2, 2)
    for rank in range(2):
        state = optimizer(folder, rank).read_bytes()
        name = optimizer(folder, rank).stem.encode()
        optimizer(folder, rank).write_bytes(state.replace(name, b"x" * len(name)))
    assert say("validate", folder).code == 0
    exchanged(folder, optimizer(folder, 0), optimizer(folder, 1))
    assert "says that it has another part of 'layer" in refused(folder, tmp_path)


def test_the_model_of_another_step_is_a_warning(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, 2)
    other = write_zero(tmp_path / "other", SMALL, 2, 2, step=4)
    shutil.copy(other / "mp_rank_00_model_states.pt", folder)
    assert "is of step 4, the optimizer's files of 3" in say("validate", folder).out


def test_partitions_of_another_model(tmp_path: Path) -> None:
    for stage in (2, 3):
        folder = write_zero(tmp_path / f"step{stage}", SMALL, 2, stage)
        model = random_model([[(7, 6), (5,)], [(9,)]])
        other = write_zero(tmp_path / f"other{stage}", model, 2, stage)
        for path in other.glob("*_model_states.pt"):
            shutil.copy(path, folder)
        assert "elements, its parameters take" in refused(folder, tmp_path)


def _set(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.__setitem__(name, value)


def _emptied(state: dict[str, Any]) -> None:
    state["fp32_flat_groups"] = [torch.empty(0) for _ in state["fp32_flat_groups"]]


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        (2, _set("partition_count", [2, 1]), "as those of experts are: not joined"),
        (3, _set("ds_zero_partition_groups", [{"ranks": [0]}]), "(ds_zero_partition_groups), which are not joined"),
        (3, _emptied, "the partitions are empty: they were offloaded (to NVMe)"),
        (2, _set("single_partition_of_fp32_groups", [torch.ones(3)]), "describes other groups of parameters"),
        (2, lambda state: state.pop("single_partition_of_fp32_groups"), "has no partitions of parameters in 32 bits"),
        (3, _set("fp32_flat_groups", []), "has no partitions of parameters in 32 bits"),
        (3, _set("partition_count", 1 << 40), "1,099,511,627,776 ranks (partition_count)"),
        (2, _set("param_alignment_paddings", [[0], [0]]), "describes other groups of parameters"),
    ],
)
def test_what_is_not_joined_is_named(
    stage: int, change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    assert words in refused(write_zero(tmp_path / "step", SMALL, 2, stage, change=change), tmp_path)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (
            ["zero_pp_rank_2_mp_rank_01_optim_states.pt", "mp_rank_01_model_states.pt"],
            ["optimizer state of rank 0 of mp_rank 00", "optimizer state of rank 1 of mp_rank 01", "mp_rank_00_model"],
        ),
        (
            ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt", "layer_00-x"],
            ["the optimizer state of rank 1", "the model state of rank 0"],
        ),
        (["mp_rank_00_model_states.pt", "layer_1_expert_2_mp_rank_00_model_states.pt"], ["layer_1_expert_1_mp_rank"]),
        (
            ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "expert_1_mp_rank_00_model_states.pt"],
            ["expert_0_mp_rank_00_model_states.pt", "the model's files"],
        ),
    ],
)
def test_the_missing_files_of_a_folder_that_is_not_joined_are_named(
    names: list[str], missing: list[str], tmp_path: Path
) -> None:
    error = explain(LocalFolder(str(tmp_path)), names)
    assert error is not None and all(name in str(error) for name in missing), str(error)


@pytest.mark.parametrize(
    "change",
    [
        _set("base_optimizer_state", [{"exp_avg": torch.ones(3)}]),
        lambda state: state["base_optimizer_state"]["state"][0].__setitem__("absmax1", torch.ones(2)),
    ],
)
def test_moments_that_are_not_of_parameters_are_left_out(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, 2, change=change)
    assert "without the state of the optimizer: " in say("inspect", folder).out
    found = joined(folder, tmp_path)
    assert "optimizer" not in found and equal(found["module"], SMALL.weights)


assert isinstance(SMALL, Model)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("folder", "name", "what"),
    [
        ("ranks/moe/global_step3", "mp_rank_00_model_states.pt", "it lacks the experts of the model"),
        ("ranks/moe_zero2/global_step3", "mp_rank_00_model_states.pt", "it lacks the experts of the model"),
        ("ranks/moe/global_step3", "layer_0_expert_0_mp_rank_00_model_states.pt", "it holds one expert of a model"),
        ("real/pipeline/global_step0", "layer_00-model_states.pt", "it holds one layer of a model"),
    ],
)
def test_a_file_without_the_rest_of_the_model_is_no_whole_model(
    folder: str, name: str, what: str, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if together:
        shutil.copytree(FIXTURES / folder, "run")
    else:
        Path("run").mkdir()
        shutil.copy(FIXTURES / folder / name, "run")
    path = f"run/{name}"
    for words in (["inspect", path], ["convert", path, "-o", "out.pth"], ["match", path, path]):
        said = say(*words)
        assert what in said.all, said.all
        assert said.code == 0 or words[0] != "inspect"
    assert not Path("out.pth").exists()
    assert ckptool.validate(path)["valid"] == together  # with the rest it is as it should be
