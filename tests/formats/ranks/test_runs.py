"""Folders of DeepSpeed with a file of another run: what the files have in common is compared, the weights included."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from hypothesis import given
from hypothesis import strategies as st
from test_deepspeed import SMALL, optimizer, refused
from test_deepspeed_damage import changed, model_file
from zero_folders import random_model, write_zero

import ckptool
from ckptool.base.errors import CkptoolError
from ckptool.formats import folder_format
from ckptool.values.numeric import ROUNDED

RANKS = FIXTURES / "ranks"
SHAPES = [[(7, 5), (5,)], [(9,), (4, 3)]]


def optimizers(name: str) -> list[Path]:
    return sorted((RANKS / name).glob("global_step*/*optim_states.pt"))


RUNS = sorted(
    path.name
    for path in RANKS.iterdir()
    if len(optimizers(path.name)) > 1 and getattr(folder_format(str(path)), "name", "") == "deepspeed"
)


def is_whole(folder: Path) -> bool:
    try:
        with ckptool.open(folder) as checkpoint:
            return not any(problem.blocks_edits for problem in checkpoint.container.problems)
    except CkptoolError:
        return False


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", RUNS)
def test_the_optimizer_of_a_rank_is_not_taken_from_another_run(name: str, tmp_path: Path) -> None:
    assert is_whole(RANKS / name)
    for other in RUNS:
        for rank in range(min(len(optimizers(name)), len(optimizers(other)))) if other != name else ():
            folder = tmp_path / f"{other}{rank}"
            shutil.copytree(RANKS / name, folder)
            path = folder / optimizers(name)[rank].relative_to(RANKS / name)
            shutil.copyfile(optimizers(other)[rank], path)
            assert not is_whole(folder), (other, rank)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("taken", ["rank 0", "rank 2", "all ranks", "model"])
def test_weights_are_those_of_the_model_before_rounding(
    stage: int, dtype: torch.dtype, taken: str, tmp_path: Path
) -> None:
    """Two runs of one configuration, at one step: only the values differ."""
    folders = []
    for name in ("one", "two"):
        model = random_model(SHAPES)
        folder = write_zero(tmp_path / name, model, 3, stage)
        module = {key: value.to(dtype) for key, value in model.weights.items()}
        changed(folder / "mp_rank_00_model_states.pt", lambda state, module=module: state.update(module=module))
        folders.append(folder)
    one, two = folders
    assert ckptool.validate(one)["valid"]
    ranks = {"rank 0": [0], "rank 2": [2], "all ranks": [0, 1, 2], "model": []}[taken]
    paths = [optimizer(one, rank) for rank in ranks] or [one / "mp_rank_00_model_states.pt"]
    for path in paths:
        shutil.copyfile(two / path.name, path)
    message = refused(one, tmp_path)
    assert (paths[0].name if len(paths) == 1 else "mp_rank_00_model_states.pt") in message
    assert "rounded" in message and not ckptool.validate(one)["valid"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_configuration_of_another_run(stage: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, stage)
    files = sorted(folder.glob("*.pt"))
    for path in files:
        changed(path, lambda state: state.update(ds_config={"train_batch_size": 4, "bf16": {"enabled": True}}))
    assert is_whole(folder)
    for path in files:
        data = path.read_bytes()
        changed(path, lambda state: state.update(ds_config={"train_batch_size": 4, "bf16": {"enabled": False}}))
        assert "ds_config" in refused(folder, tmp_path)
        path.write_bytes(data)
    for path in files:  # the path of a file may be another on every machine
        changed(path, lambda state, path=path: state.update(ds_config=f"/tmp/{path.name}.json"))
    assert is_whole(folder)


def _buffer(state: Any, name: str) -> None:
    state["module"][name] = state["module"][name] + 1


@pytest.mark.parametrize(("name", "own"), [("layer.table", False), ("norm.running_mean", True)])
def test_buffers_of_all_ranks(name: str, own: bool, tmp_path: Path) -> None:
    """Statistics of a layer may be the rank's own; anything else is a copy."""
    model = SMALL._replace(buffers={name: torch.randn(6)})
    folder = write_zero(tmp_path / "step", model, 3, 3)
    assert is_whole(folder)
    changed(model_file(folder, 2), lambda state: _buffer(state, name))
    assert is_whole(folder) == own
    found = say("inspect", folder).out
    if own:
        assert f"ranks have values of their own: '{name}'" in found
    else:
        assert f"'{name}' in {model_file(folder, 2).name} is not the same as in {model_file(folder, 0).name}" in found


def bits_of(value: torch.Tensor) -> list[int]:
    return [number & 0xFFFF for number in value.view(torch.int16).tolist()]


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_rounding_is_that_of_torch(patterns: list[int]) -> None:
    data = struct.pack(f"<{len(patterns)}I", *patterns)
    values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        own = [int.from_bytes(ROUNDED[name](value), "little") for (value,) in struct.iter_unpack("<f", data)]
        there = values.to(dtype)
        assert [one for one, odd in zip(own, there.isnan().tolist()) if not odd] == bits_of(there[~there.isnan()])
        again = torch.tensor([one - (one >> 15 << 16) for one in own], dtype=torch.int16).view(dtype)
        assert torch.equal(again.isnan(), there.isnan())
