"""slim: every value stays, nothing that no tensor reads does; dedupe ties, ``--for inference`` drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, Fixture
from output_checks import VIEWS, edited, every, saved
from tensor_storages import held, needed, same_sharing, same_values
from torch import nn

import ckptool


@every
def test_no_value_changes(item: Fixture, out: Path) -> None:
    before = oracle.load(item.path)
    after = edited(item.path, out, ckptool.slim)
    same_values(before, after)
    same_sharing(before, after)
    if item.path.name not in VIEWS and not any(
        isinstance(value, torch.UntypedStorage | torch.TypedStorage) for value in values(before)
    ):
        assert held(after) <= needed(before)


def values(loaded: Any) -> list[Any]:
    return list(loaded.values()) if isinstance(loaded, dict) else []


@every
def test_dedupe_changes_no_value(item: Fixture, out: Path) -> None:
    before = oracle.load(item.path)
    after = edited(item.path, out, lambda c: ckptool.slim(c, dedupe=True))
    same_values(before, after)
    assert held(after) <= held(before)


# -- dedupe -------------------------------------------------------------------------------------------------


def test_dedupe_ties_exactly_what_has_the_same_bytes(tmp_path: Path, out: Path) -> None:
    same = torch.arange(6.0)
    state = {
        "a.w": same.clone(),
        "b.w": same.clone().view(2, 3),
        "c.w": same.clone() + 1,
        "d.w": same.clone().view(torch.int32),
        "e.w": nn.Parameter(same.clone()),
    }
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(3.0)}}, "param_groups": []}
    path = saved({"model": state, "optimizer": optimizer}, tmp_path / "in.pth")
    found = edited(path, out, lambda c: ckptool.slim(c, dedupe=True))
    same_values(oracle.load(path), found)
    marks = [value.untyped_storage().data_ptr() for value in found["model"].values()]
    assert marks[0] == marks[1] == marks[4] and len(set(marks)) == 3
    one, two = found["optimizer"]["state"].values()
    assert one["step"].data_ptr() != two["step"].data_ptr()


# -- views of all kinds -------------------------------------------------------------------------------------


def test_views_that_overlap_share_and_others_do_not(tmp_path: Path, out: Path) -> None:
    big = torch.arange(10_000.0)
    path = saved({"a.w": big[:10], "b.w": big[5:15], "c.w": big[9000:9010]}, tmp_path / "in.pth")
    found = edited(path, out, ckptool.slim)
    assert [value.untyped_storage().nbytes() for value in found.values()] == [60, 60, 40]
    assert found["a.w"].data_ptr() + 20 == found["b.w"].data_ptr()


def test_a_choice_of_tensors(tmp_path: Path, out: Path) -> None:
    path = saved({"a.w": torch.arange(4000.0)[:3], "b.w": torch.arange(4000.0)[:3]}, tmp_path / "in.pth")
    found = edited(path, out, lambda c: ckptool.slim(c, include=["a.*"]))
    assert [value.untyped_storage().nbytes() for value in found.values()] == [12, 16000]


def test_a_storage_that_is_a_value_of_its_own_stays(tmp_path: Path, out: Path) -> None:
    big = torch.arange(4000.0)
    path = saved({"model": {"a.w": big[:3]}, "all": big.storage()}, tmp_path / "in.pth")
    found = edited(path, out, ckptool.slim)
    assert oracle.difference(oracle.load(path), found) == ""


# -- for inference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ddp4_training.pth", "lightning.ckpt", "wrapped.pth", "mmcv.pth", "ema_odd_names.pth"]
)
def test_for_inference(name: str, out: Path) -> None:
    expected = oracle.load(FIXTURES / name)
    for key in [key for key in expected if "optim" in key or "sched" in key or "scaler" in key or "ema" in key]:
        del expected[key]
    found = edited(FIXTURES / name, out, lambda c: ckptool.slim(c, purpose="inference"))
    assert oracle.difference(expected, found) == ""


# -- entries go by their keys ----------------------------------------------------------------------------------
# One object, such as None or an interned string, may be the value of several entries: only the chosen one is dropped.


def test_for_inference_leaves_out_the_average_within_a_state_dict(tmp_path: Path, out: Path) -> None:
    """Stable Diffusion has it under names without dots."""
    weights = {f"model.diffusion_model.out.{number}.weight": torch.randn(2, 2) for number in range(3)}
    average = {"model_ema." + name.removeprefix("model.").replace(".", ""): value for name, value in weights.items()}
    counters = {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(3)}
    torch.save({"state_dict": {**weights, **average, **counters}}, tmp_path / "in.ckpt")
    ckptool.save(ckptool.slim(tmp_path / "in.ckpt", purpose="inference"), out)
    assert list(torch.load(out)["state_dict"]) == list(weights)
    dotted = {"net_ema." + name.removeprefix("model."): value for name, value in weights.items()}
    torch.save({**weights, **dotted}, tmp_path / "in.ckpt")
    ckptool.save(ckptool.slim(tmp_path / "in.ckpt", purpose="inference"), out, force=True)
    assert list(torch.load(out)) == list(weights)
    other = {**weights, "model_ema.another": torch.ones(2)}
    torch.save({"state_dict": other}, tmp_path / "in.ckpt")
    ckptool.save(ckptool.slim(tmp_path / "in.ckpt", purpose="inference"), out, force=True)
    assert list(torch.load(out)["state_dict"]) == list(other)
