"""Folders of DeepSpeed whose files have whole tensors: universal, pipelines, models without ZeRO, experts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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


def broken(folder: Path, words: str, tmp_path: Path) -> None:
    """A file or a parameter is named, and nothing is made of it."""
    assert any(words in text for text in problems(folder)), problems(folder)
    with pytest.raises(CkptoolError):
        whole(folder, tmp_path / "one.pth")
    assert not ckptool.validate(folder)["valid"]


def _copy(source: str, target: str) -> Callable[[Path], object]:
    return lambda zero: shutil.copy(zero / source, zero / target)


def _lose(*names: str) -> Callable[[Path], object]:
    return lambda zero: [(zero / "first.weight" / f"{name}.pt").unlink() for name in names]


def _of_another_step(zero: Path) -> None:
    path = zero / "third.bias" / "step.pt"
    torch.save(torch.load(path) + 5, path)


def _stale(zero: Path) -> None:
    """A parameter of another save is no part of this one."""
    shutil.copytree(zero / "first.weight", zero / "old.weight")


def _stale_weights(zero: Path) -> None:
    _stale(zero)
    for path in (zero / "old.weight").glob("[!f]*.pt"):
        path.unlink()


_LOST = "zero/first.weight/{}.pt is not there, and others of its group have one"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_copy("first.bias/fp32.pt", "second.bias/fp32.pt"), "'second.bias' is of the shape [5]"),
        (_copy("second.weight/exp_avg.pt", "first.weight/exp_avg.pt"), "exp_avg.pt: 'first.weight' is of the shape"),
        (_copy("second.weight/exp_avg_sq.pt", "first.weight/exp_avg_sq.pt"), "exp_avg_sq.pt: 'first.weight' is of"),
        (_lose("exp_avg"), _LOST.format("exp_avg")),
        (_lose("exp_avg", "exp_avg_sq"), _LOST.format("exp_avg")),
        (_lose("step"), _LOST.format("step")),
        (_lose("exp_avg", "exp_avg_sq", "step"), _LOST.format("exp_avg")),
        (_of_another_step, "zero/third.bias/step.pt is of step 8, and others of its group of 3"),
        (_stale, "zero/old.weight is of no parameter in mp_rank_00_model_states.pt"),
        (_stale_weights, "zero/old.weight is of no parameter in mp_rank_00_model_states.pt"),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[[Path], object], words: str, universal: Path, tmp_path: Path
) -> None:
    change(universal / "zero")
    broken(universal, words, tmp_path)


def test_a_parameter_that_was_never_updated_is_that_of_the_model(universal: Path, tmp_path: Path) -> None:
    """DeepSpeed puts it there in 32 bits, without states and without the dimension of a cut."""
    own = universal / "zero" / "first.weight"
    for path in own.glob("[!f]*.pt"):
        path.unlink()
    value = torch.load(own / "fp32.pt")["param"]
    torch.save({"param": value}, own / "fp32.pt")
    state = whole(universal, tmp_path / "one.pth")
    assert torch.equal(state["module"]["first.weight"], value) and "first.weight" not in state["optimizer"]["state"]


def test_weights_of_another_dtype_are_a_warning(universal: Path) -> None:
    path = universal / "zero" / "third.bias" / "fp32.pt"
    state = torch.load(path)
    torch.save({**state, "param": state["param"].double()}, path)
    (finding,) = (item for item in ckptool.inspect(universal)["findings"] if item["code"] == "odd-dtype")
    assert finding["message"].startswith("zero/third.bias/fp32.pt is of float64, zero/first.bias/fp32.pt of float32")


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


def test_stages_of_two_steps_are_named(pipeline: Path) -> None:
    path = pipeline / "mp_rank_01_model_states.pt"
    state = torch.load(path)
    torch.save({**state, "global_steps": 9}, path)
    assert any("is of step 9" in text for text in problems(pipeline))


#: The shapes of the layers of a pipeline on two stages; functions have none.
STAGES = (({"weight": (9, 4)}, {}), ({"weight": (4, 4), "bias": (4,)}, {"weight": (4, 4), "bias": (4,)}))


def trained(folder: Path, *, frozen: bool = False, tied: bool = False, states: bool = True) -> Path:
    """A pipeline with the optimizer's state, as DeepSpeed writes it without ZeRO."""
    folder.mkdir()
    torch.manual_seed(0)
    number, embedding = 0, torch.randn(9, 4)
    for stage, layers in enumerate(STAGES):
        own = [embedding] if tied and stage else []
        for layer in layers:
            tensors = {name: torch.randn(shape) for name, shape in layer.items()}
            tensors |= {"weight": embedding} if number == 0 else {}
            own += tensors.values()
            extra = {"running": torch.ones(4)} if frozen and tensors else {}
            if tensors:
                torch.save(tensors | extra, folder / f"layer_{number:02d}-model_states.pt")
            number += 1
        moments = {at: {"step": torch.tensor(1.0), "exp_avg": value * 2} for at, value in enumerate(own)}
        optimizer = {"state": moments if states else {}, "param_groups": [{"lr": 0.1, "params": [*range(len(own))]}]}
        facts = {"global_steps": 1, "dp_world_size": 1, "mp_world_size": 2, "ds_version": "0.19.8"}
        model = {"module": None, "optimizer": optimizer, "param_shapes": None, **facts}
        torch.save(model, folder / f"mp_rank_{stage:02d}_model_states.pt")
    return folder


def test_a_gap_is_no_loss_if_the_optimizer_tells_of_all_tensors(tmp_path: Path) -> None:
    """Functions have no parameters, and no files. A tied layer is listed by two stages."""
    for number, options in enumerate(({}, {"tied": True}, {"states": False})):
        folder = trained(tmp_path / str(number), **options)
        assert ckptool.validate(folder)["valid"] and len(whole(folder, tmp_path / "one.pth")["module"]) == 5
        assert {item["level"] for item in ckptool.inspect(folder)["findings"]} == {"note"}
    folder = trained(tmp_path / "frozen", frozen=True)
    assert "layer_01-model_states.pt" in next(
        item["message"] for item in ckptool.inspect(folder)["findings"] if item["code"] == "no-layer"
    )


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"tied": True}, {"states": False}], ids=str)
@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_lost_layer_is_seen_by_what_the_optimizer_lists(
    number: int, options: dict[str, bool], tmp_path: Path
) -> None:
    folder = trained(tmp_path / "run", **options)
    (folder / f"layer_{number:02d}-model_states.pt").unlink()
    broken(folder, f"layer_{number:02d}-model_states.pt", tmp_path)


def test_a_gap_that_nothing_explains_is_an_error(pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "layer_00-model_states.pt").unlink()
    for path in pipeline.glob("mp_rank_*"):
        torch.save({**torch.load(path), "optimizer": None}, path)
    broken(pipeline, "layer_00-model_states.pt", tmp_path)


def test_the_content_of_a_file_decides_what_it_is(pipeline: Path, tmp_path: Path) -> None:
    kinds = {
        "layer_00-model_states.pt": "the state dict of a layer",
        "mp_rank_00_model_states.pt": "a model file of DeepSpeed",
    }
    for (one, own), (other, its) in (kinds.items(), reversed(kinds.items())):
        data = (pipeline / one).read_bytes()
        torch.save(torch.load(pipeline / other), tmp_path / "file")
        shutil.copy(tmp_path / "file", pipeline / one)
        broken(pipeline, f"{one}: it holds {its}, not {own}", tmp_path)
        (pipeline / one).write_bytes(data)
    assert not problems(pipeline)


def test_parameters_that_a_stage_names_are_looked_for(pipeline: Path, tmp_path: Path) -> None:
    """With ZeRO each stage has the shapes of its parameters; those of tied layers are under their keys."""
    layers = [torch.load(pipeline / f"layer_{number:02d}-model_states.pt") for number in range(2)]
    for number, layer in enumerate(layers):
        path = pipeline / f"mp_rank_{number:02d}_model_states.pt"
        shapes = {f"{number}.{name}": value.shape for name, value in layer.items()}
        shapes["tied_modules.embed.weight"] = torch.Size([3, 3])
        torch.save({**torch.load(path), "param_shapes": [shapes]}, path)
    assert not problems(pipeline)
    path, name = pipeline / "layer_01-model_states.pt", next(iter(layers[1]))
    data = path.read_bytes()
    path.unlink()
    broken(pipeline, f"mp_rank_01_model_states.pt names '1.{name}' of the shape", tmp_path)
    path.write_bytes(data)
    torch.save({**layers[1], name: torch.ones(9, 9)}, path)
    broken(pipeline, f"names '1.{name}' of the shape {list(layers[1][name].shape)}, and no layer has it", tmp_path)


# -- models that are not cut, and experts -----------------------------------------------------------------------------

EXPERTS = ("moe", "moe_zero2")


@pytest.mark.parametrize("inner", ["", "global_step3"])
def test_a_model_without_zero_is_what_deepspeed_wrote(inner: str, tmp_path: Path) -> None:
    folder = FIXTURES / "real" / "zero0" / inner
    assert ckptool.validate(folder)["valid"]
    state = whole(folder, tmp_path / "one.pth")
    expected = torch.load(next(FIXTURES.glob("real/zero0/*/*.pt")))
    assert str(state) == str(expected) and state["module"].keys() == expected["module"].keys()
    assert ckptool.hash(folder)["content"] == ckptool.hash(next(FIXTURES.glob("real/zero0/*/*.pt")))["content"]


@pytest.mark.parametrize("inner", ["", "global_step3"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_their_places_in_the_model(name: str, inner: str, tmp_path: Path) -> None:
    """The module is that of the engines of all ranks; every tensor of every file is in the whole."""
    folder = FIXTURES / "ranks" / name / inner
    assert ckptool.validate(folder)["valid"]
    ckptool.save(ckptool.convert(folder, "torch", key="module"), tmp_path / "module.pth")
    module, oracle = torch.load(tmp_path / "module.pth"), load_file(FIXTURES / "ranks" / f"{name}.safetensors")
    assert {f"module.{key}" for key in module} == oracle.keys()
    assert all(same(value, oracle[f"module.{key}"]) for key, value in module.items())
    with ckptool.open(folder) as checkpoint:
        joined = len(checkpoint.survey.tensors)
    alone = 0
    for path in (FIXTURES / "ranks" / name / "global_step3").iterdir():
        with ckptool.open(path) as checkpoint:
            alone += len(checkpoint.survey.tensors)
    # Rank 0 has its part of the optimizer in the file of the model, too.
    with ckptool.open(FIXTURES / "ranks" / name / "global_step3/mp_rank_00_model_states.pt") as checkpoint:
        again = [entry for entry in checkpoint.survey.tensors if entry.path.startswith("optimizer")]
    assert joined == alone - len(again)


def test_where_the_partitions_are_missing_the_weights_in_16_bits_can_be_taken(tmp_path: Path) -> None:
    """The file of the model is as without ZeRO, but says that there were partitions."""
    folder = Path(shutil.copytree(FIXTURES / "real" / "zero2", tmp_path / "zero2"))
    for path in folder.glob("*/*optim_states.pt"):
        path.unlink()
    for path in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        with pytest.raises(NotACheckpointError, match="missing: the optimizer's files") as caught:
            ckptool.open(path)
        assert caught.value.step.commands[0].name == "extract"
