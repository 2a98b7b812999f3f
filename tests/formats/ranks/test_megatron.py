"""Folders of Megatron-LM, a file for each tensor-parallel and pipeline rank, against the model that it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES, examples
from helpers.megatron_folders import arguments, save_megatron
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import CkptoolError, NotACheckpointError

RANKS = FIXTURES / "ranks"
FOLDERS = ("megatron_gpt", "megatron_pp2", "megatron_tp2", "megatron_tp2_pp2")


def model_of(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """The model that torch loads of the one file that a folder becomes."""
    ckptool.save(ckptool.extract(path, "model"), out, force=True)
    return torch.load(out)


def problems(path: Path) -> list[str]:
    with ckptool.open(path) as checkpoint:
        return [problem.message for problem in checkpoint.container.problems if problem.level == "error"]


def whole_model(layers: int, *, width: int = 8, inner: int = 6, rows: int = 16, gated: bool = True) -> dict[str, Any]:
    """A model under the names of Megatron-LM, with biases."""

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    model = {"embedding.word_embeddings.weight": new(rows, width)}
    for layer in range(layers):
        start = f"decoder.layers.{layer}."
        model |= {
            start + "self_attention.linear_qkv.layer_norm_weight": new(width),
            start + "self_attention.linear_qkv.weight": new(4 * width, width),
            start + "self_attention.linear_qkv.bias": new(4 * width),
            start + "self_attention.linear_proj.weight": new(width, width),
            start + "self_attention.linear_proj.bias": new(width),
            start + "mlp.linear_fc1.weight": new(inner * (1 + gated), width),
            start + "mlp.linear_fc2.weight": new(width, inner),
        }
    return model | {"decoder.final_layernorm.weight": new(width), "output_layer.weight": new(rows, width)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_the_model_is_what_megatron_loads_in_one_process(name: str, tmp_path: Path) -> None:
    made = model_of(RANKS / name, tmp_path / "one.pth")
    wanted = {
        key[8:]: value for key, value in load_file(RANKS / f"{name}.safetensors").items() if key[:8] == "weights."
    }
    tensors = {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], value) and tensors[key].dtype == value.dtype for key, value in wanted.items())
    assert ckptool.validate(RANKS / name)["valid"]


@settings(max_examples=examples(25))
@given(
    tensor=st.sampled_from((1, 2, 4)),
    pipeline=st.sampled_from((1, 2, 3)),
    gated=st.booleans(),
    inner=st.sampled_from((4, 8)),
)
def test_a_model_that_is_cut_is_joined(
    tensor: int, pipeline: int, gated: bool, inner: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    layers = pipeline * 2
    model = whole_model(layers, inner=inner, gated=gated)
    save_megatron(folder, model, arguments(tensor, pipeline, num_layers=layers, swiglu=gated), layers, gated=gated)
    assert same(model_of(folder, folder / "one.pth"), model)


def test_names_before_megatron_core(tmp_path: Path) -> None:
    inner = tmp_path / "iter_0000001"
    dense = torch.randn(8, 4)
    for rank in range(2):
        (inner / f"mp_rank_{rank:02d}").mkdir(parents=True)
        layers = {"layers.0.attention.dense.weight": dense.chunk(2, 1)[rank].clone(), "layers.0.norm.weight": dense[0]}
        model = {"language_model": {"transformer": layers}}
        torch.save({"model": model}, inner / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    made = model_of(inner, tmp_path / "one.pth")
    assert torch.equal(made["language_model"]["transformer"]["layers.0.attention.dense.weight"], dense)


def test_fewer_groups_of_heads_than_ranks_are_refused(tmp_path: Path) -> None:
    """Some ranks then have the same keys and values, and none says so."""
    args = arguments(4, 1, num_layers=1, num_query_groups=2, group_query_attention=True)
    folder = save_megatron(tmp_path, whole_model(1, inner=8), args, 1)
    assert any("linear_qkv.weight" in text and "cannot be joined" in text for text in problems(folder))


def test_the_state_of_an_optimizer_is_left_out_and_named(tmp_path: Path) -> None:
    args = arguments(2, 1, num_layers=1)
    folder = save_megatron(tmp_path, whole_model(1), args, 1, optimizer={"state": {0: {"step": 3}}})
    with ckptool.open(folder) as checkpoint:
        assert "optimizer" not in checkpoint
        assert any("the state of the optimizer is not joined" in item.message for item in checkpoint.container.problems)


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """Change the object in a file."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_megatron(tmp_path / "run", whole_model(4), arguments(2, 2, num_layers=4, swiglu=True), 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(iteration=9), "another save"),
        (lambda state: setattr(state["args"], "tensor_model_parallel_size", 4), "another save"),
        (lambda state: setattr(state["args"], "hidden_size", 4096), "another save"),
        (lambda state: state["args"].__dict__.update(rank=2, world_size=4), "it was saved as mp_rank_00_001"),
        (lambda state: state["model"].pop("decoder.layers.0.mlp.linear_fc2.weight"), "it is not there"),
        (lambda state: state["model"].update({"embedding.word_embeddings.weight": torch.ones(2)}), "another shape"),
        (lambda state: state.pop("model"), "there is no model"),
    ],
)
def test_a_file_of_another_save_is_named(change: Any, words: str, folder: Path) -> None:
    path = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    changed(path, change)
    assert any(words in text and "mp_rank_01_000" in text for text in problems(folder))
    with pytest.raises(CkptoolError):
        model_of(folder, folder.parent / "one.pth")


def test_files_that_do_not_say_their_ranks_are_warned_of(folder: Path) -> None:
    run = say("convert", folder, "-o", folder.parent / "one.safetensors", "--key", "model", "--allow-loss", "entries")
    assert run.code == 0 and "warning" in run.err and "do not name their ranks" in run.err
    assert "do not say" not in say("inspect", RANKS / "megatron_tp2_pp2").out


def test_a_tensor_that_only_one_rank_has_is_named(folder: Path) -> None:
    path = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    changed(path, lambda state: state["model"].update({"decoder.layers.0.extra.weight": torch.ones(2)}))
    assert any("mp_rank_00_000" in text and "extra.weight" in text for text in problems(folder))


def test_ranks_in_the_arguments_may_say_nothing(tmp_path: Path) -> None:
    """The rank without the number of ranks, or one rank in all files, as the converter of Megatron-LM writes them."""
    alone = arguments(2, 1, num_layers=1, rank=1, swiglu=True)
    assert not problems(save_megatron(tmp_path / "one", whole_model(1), alone, 1))
    same_rank = arguments(2, 2, num_layers=4, rank=0, world_size=4, swiglu=True)
    assert not problems(save_megatron(tmp_path / "two", whole_model(4), same_rank, 4))


@pytest.mark.parametrize(("context", "pipeline_first"), [(1, True), (2, True), (2, False)])
def test_ranks_of_other_orders(context: int, pipeline_first: bool, tmp_path: Path) -> None:
    """Megatron-core, parallel_state.py: tp-cp-ep-dp-pp, and with use_tp_pp_dp_mapping tp-cp-ep-pp-dp."""
    world = 8 * context
    own = arguments(2, 2, num_layers=4, world_size=world, context_parallel_size=context, swiglu=True)
    own.use_tp_pp_dp_mapping = pipeline_first
    folder = save_megatron(tmp_path, whole_model(4), own, 4)
    for path in folder.glob("*/*.pt"):
        tensor, stage = (int(number) for number in path.parent.name.split("_")[2:])
        rank = tensor + stage * (2 * context if pipeline_first else world // 2)
        changed(path, lambda state, rank=rank: setattr(state["args"], "rank", rank))  # type: ignore[misc]
    with ckptool.open(folder) as checkpoint:
        assert not [item for item in checkpoint.container.problems if item.level != "note"]


@pytest.mark.parametrize(
    ("own", "beside", "name"),
    [
        ({}, {}, "linear_fc1"),  # no word about a gate
        ({"swiglu": True}, {"checkpoint_version": 0}, "linear_qkv"),
    ],
)
def test_what_the_files_do_not_tell_is_not_guessed(
    own: dict[str, Any], beside: dict[str, Any], name: str, tmp_path: Path
) -> None:
    folder = save_megatron(tmp_path, whole_model(1), arguments(2, 1, num_layers=1, **own), 1, **beside)
    assert any(name in text and "cannot be joined" in text for text in problems(folder))


def test_a_pipeline_without_an_end_is_warned_of(tmp_path: Path) -> None:
    folder = save_megatron(tmp_path, whole_model(4), arguments(1, 3, num_layers=4), 3)
    for path in folder.glob("*/*.pt"):
        changed(path, lambda state: state.pop("args"))
    shutil.rmtree(folder / "mp_rank_00_002")
    with ckptool.open(folder) as checkpoint:
        assert any("later ones may be missing" in item.message for item in checkpoint.container.problems)


def test_copies_that_differ_are_found_by_validate(folder: Path) -> None:
    path = folder / "mp_rank_01_001" / "model_optim_rng.pt"
    changed(path, lambda state: state["model"]["decoder.final_layernorm.weight"].add_(1))
    report = ckptool.validate(folder)
    assert not report["valid"]
    assert "decoder.final_layernorm.weight" in str(report)


def test_a_tensor_without_a_rule_is_refused_unless_all_have_it(folder: Path) -> None:
    for rank in range(2):
        path = folder / f"mp_rank_{rank:02d}_000" / "model_optim_rng.pt"
        more = {"adapter.gate": torch.arange(3), "adapter.scale": torch.full((3,), float(rank))}
        # Parts of a tensor of zeros are equal as well.
        more |= {"adapter.zeros": torch.zeros(3), "mixer.norm.weight": torch.rand(3)}
        changed(path, lambda state, more=more: state["model"].update(more))  # type: ignore[misc]
    (text,) = [text for text in problems(folder) if "adapter" in text]
    assert all(name in text for name in ("adapter.scale", "adapter.zeros", "mixer.norm.weight"))
    assert "adapter.gate" not in text
    with pytest.raises(CkptoolError, match="cannot be joined"):
        model_of(folder, folder.parent / "one.pth")


@pytest.mark.parametrize("kind", ["stages", "experts", "expert ranks"])
def test_what_is_not_joined_is_named(kind: str, folder: Path) -> None:
    for path in sorted(folder.glob("*/*.pt")):
        state = torch.load(path, weights_only=False)
        if kind == "stages":
            state["model0"] = state.pop("model")
        elif kind == "experts":
            state["model"]["decoder.layers.0.mlp.experts.linear_fc1.weight"] = torch.ones(2, 2)
        torch.save(state, path)
        if kind == "expert ranks":
            path.parent.rename(path.parent.with_name(path.parent.name + "_000"))
    with pytest.raises(NotACheckpointError, match="stages" if kind == "stages" else "experts"):
        ckptool.open(folder)


def test_the_missing_ranks_of_a_folder_that_is_not_joined_are_named(tmp_path: Path) -> None:
    for name in ("mp_rank_00_000_000", "mp_rank_01_000_001"):
        (tmp_path / name).mkdir()
        torch.save({}, tmp_path / name / "model_optim_rng.pt")
    with pytest.raises(NotACheckpointError, match="mp_rank_00_000_001 and mp_rank_01_000_000"):
        ckptool.open(tmp_path)
