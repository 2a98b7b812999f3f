"""Folders of DeepSpeed whose files fit by their sizes alone: what would give other tensors is named, and refused."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from hypothesis import example, given
from hypothesis import strategies as st
from test_deepspeed import SMALL, equal, joined, optimizer, refused
from zero_folders import Model, Unpickled, deepspeed, random_model, write_zero

import ckptool
from ckptool.base.errors import CkptoolError
from ckptool.formats import folder_format
from ckptool.values.numeric import ROUNDED


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """Write what is in a file again, changed."""
    state = torch.load(path, weights_only=False, pickle_module=Unpickled)
    change(state)
    with deepspeed():
        torch.save(state, path)


def model_file(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_partitions_of_two_saves_side_by_side(stage: int, seed: int, tmp_path: Path) -> None:
    """Names that differ in the precision alone, or in zeros before a number, are of one rank."""
    folder = write_zero(tmp_path / "step", SMALL, 2, stage)
    old = optimizer(folder, seed).name.removeprefix("bf16_")
    shutil.copy(optimizer(folder, seed), folder / old)
    assert f"{optimizer(folder, seed).name} and {old} are for one place" in refused(folder, tmp_path)
    (folder / old).unlink()
    path = model_file(folder, seed) if stage == 3 else folder / "mp_rank_00_model_states.pt"
    other = path.name.replace("_mp_rank_00", "_mp_rank_0") if stage == 3 else "mp_rank_0_model_states.pt"
    shutil.copy(path, folder / other)
    assert f"{path.name} and {other} are for one place" in refused(folder, tmp_path)


def _in_order(model: Any) -> None:
    shapes = model["param_shapes"]
    shapes[0] = dict(reversed(shapes[0].items()))


def _turned(model: Any) -> None:
    model["param_shapes"][0]["layer0.0.weight"] = torch.Size([5, 7])


@pytest.mark.parametrize("change", [_in_order, _turned])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_another_model_of_the_same_size(change: Callable[[Any], object], rank: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, 3)
    changed(model_file(folder, rank), change)
    assert "is of another save than zero_pp_rank_0" in refused(folder, tmp_path)


@pytest.mark.parametrize("shape", [[5, 7], [35]])
def test_shapes_are_those_of_the_file_of_the_model(shape: list[int], tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, 2)
    path = folder / "mp_rank_00_model_states.pt"
    changed(path, lambda model: model["param_shapes"][0].update({"layer0.0.weight": torch.Size(shape)}))
    words = f"{path.name}: 'layer0.0.weight' is of the shape [7, 5], and {shape} in its param_shapes"
    assert words in refused(folder, tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_under_the_name_of_another_that_does_not_know_its_own(stage: int, tmp_path: Path) -> None:
    """Saved through a buffer, a file has no name: two ranks with the same elements are one."""
    frozen = {"base.weight": torch.randn(6, 6)}
    folder = write_zero(tmp_path / "step", SMALL._replace(frozen=frozen), 2, stage)
    for path in folder.glob("*.pt"):
        with path.open("r+b") as file:
            state = torch.load(file, weights_only=False, pickle_module=Unpickled)
        with deepspeed(), path.open("wb") as file:
            torch.save(state, file)
    assert say("validate", folder).code == 0
    kinds = [optimizer, model_file] if stage == 3 else [optimizer]
    for kind in kinds:
        data = kind(folder, 1).read_bytes()
        shutil.copy(kind(folder, 0), kind(folder, 1))
        words = f"{kind(folder, 1).name} has the tensors of {kind(folder, 0).name}: one is a copy of the other"
        assert words in refused(folder, tmp_path)
        kind(folder, 1).write_bytes(data)


def test_layers_that_were_never_trained_are_no_copies(tmp_path: Path) -> None:
    """Those of a normalization are ones and zeros, in each rank."""
    group = {"norm.weight": torch.ones(6), "norm.bias": torch.zeros(6)}
    model = Model([group], {"exp_avg": [{name: torch.zeros(6) for name in group}]})
    for stage in (2, 3):
        found = joined(write_zero(tmp_path / str(stage), model, 3, stage), tmp_path)
        assert equal(found["module"], model.weights)


def _longer(state: Any, count: int, slot: str = "") -> None:
    """Change the length of the first partition, or of a moment of it."""
    own = state["optimizer_state_dict"]
    if slot:
        base = own.get("base_optimizer_state") or own["optimizer_state_dict"]
        place, key = base["state"][0], slot
    else:
        place, key = own["single_partition_of_fp32_groups"], 0
    value = place[key]
    place[key] = torch.cat([value, value[:count]]) if count > 0 else value[:count].clone()


@pytest.mark.parametrize(
    ("stage", "rank", "words"),
    [
        (2, 0, "rank_0_mp_rank_00_optim_states.pt: exp_avg of group 0 has 23 elements, its partition 20"),
        (2, 1, "rank_1_mp_rank_00_optim_states.pt: exp_avg of group 0 has 23 elements, its partition 20"),
        (3, 0, "is of another save than"),
        (3, 1, "is of another save than"),
    ],
)
def test_moments_that_are_longer_than_their_partition(stage: int, rank: int, words: str, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "step", SMALL, 2, stage)
    changed(optimizer(folder, rank), lambda state: _longer(state, 3, "exp_avg"))
    assert words in refused(folder, tmp_path)


@pytest.mark.parametrize(("first", "second"), [(-2, 2), (2, -2)])
@pytest.mark.parametrize("moments", [("exp_avg",), ()])
def test_partitions_of_unequal_length(first: int, second: int, moments: tuple[str, ...], tmp_path: Path) -> None:
    """Old versions do not say where parameters begin: all are as long as the rest, but for the end."""
    model = random_model([[(7, 5), (5,)], [(9,)]], moments)
    folder = write_zero(tmp_path / "step", model, 2, 2, change=lambda state: state.pop("param_slice_mappings"))
    assert equal(joined(folder, tmp_path)["module"], model.weights)
    for rank, count in enumerate((first, second)):
        changed(optimizer(folder, rank), lambda state, count=count: _longer(state, count))  # type: ignore[misc]
    assert f"its partition of group 0 has {20 + first} elements, those of others 20" in refused(folder, tmp_path)


@pytest.mark.parametrize("align", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stripped", ["", "last", "all"])
def test_paddings_of_all_versions(align: int, ranks: int, stripped: str, tmp_path: Path) -> None:
    """To a multiple of the ranks before 0.3.11, then of twice as many; stripped in all ranks, or in the last alone,
    from which old versions took more than it has."""
    for size in (1, 4, 9, 12, 31):
        value = torch.randn(size)
        whole = torch.cat([value, torch.zeros(-size % (align * ranks))])
        count = len(whole) // ranks
        parts = [whole[rank * count : (rank + 1) * count].clone() for rank in range(ranks)]
        if stripped == "all":
            parts = [part[: max(size - rank * count, 0)].clone() for rank, part in enumerate(parts)]
        elif stripped:
            parts[-1] = parts[-1][: count - (len(whole) - size)].clone()
        model = Model([{"weight": value}], {})
        own = iter(parts)

        def change(state: dict[str, Any], own: Any = own) -> None:
            state.pop("param_slice_mappings")
            state["single_partition_of_fp32_groups"] = [next(own)]

        folder = write_zero(tmp_path / str(size), model, ranks, 2, change=change)
        assert equal(joined(folder, tmp_path)["module"], model.weights), (size, parts)


@pytest.mark.parametrize("kept", ["nowhere", "head.weight", "other.weight"])
def test_tied_weights_lead_to_a_parameter(kept: str, tmp_path: Path) -> None:
    """Not to a name that is not there, to itself, or to another tied one: the weights of 16 bits are not taken."""
    model = SMALL._replace(aliases={"head.weight": "layer0.0.weight", "other.weight": "layer0.0.weight"})
    for stage in (2, 3):
        folder = write_zero(tmp_path / str(stage), model, 2, stage)
        assert equal(joined(folder, tmp_path)["module"], model.whole)
        path = model_file(folder, 0) if stage == 3 else folder / "mp_rank_00_model_states.pt"
        aliases = {"head.weight": kept, "other.weight": "head.weight"}
        changed(path, lambda state, aliases=aliases: state.update(shared_params=aliases))  # type: ignore[misc]
        assert f"'head.weight' is said to be {kept!r}, which is no parameter of its own" in refused(folder, tmp_path)


def test_a_file_of_a_rank_that_this_save_does_not_have_is_not_read(tmp_path: Path) -> None:
    """The folder of a save of two ranks still has a file of rank 2, from a save of three."""
    folder = Path(shutil.copytree(FIXTURES / "ranks" / "zero2_bf16", tmp_path / "zero"))
    before = ckptool.hash(folder)["content"]
    [other] = (FIXTURES / "ranks" / "zero2_bf16_3").rglob("*rank_2*optim_states.pt")
    shutil.copy(other, folder / "global_step3")
    found = {item["code"]: item["message"] for item in ckptool.inspect(folder)["findings"]}
    assert other.name in found["other-files"] and "incomplete" not in found
    assert ckptool.hash(folder)["content"] == before


# -- Folders of DeepSpeed with a file of another run: what the files have in common is compared, the weights included.


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
@example([0x80000001])
def test_rounding_is_that_of_torch(patterns: list[int]) -> None:
    data = struct.pack(f"<{len(patterns)}I", *patterns)
    values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        own = [int.from_bytes(ROUNDED[name](value), "little") for (value,) in struct.iter_unpack("<f", data)]
        there = values.to(dtype)
        assert [one for one, odd in zip(own, there.isnan().tolist()) if not odd] == bits_of(there[~there.isnan()])
        again = torch.tensor([one - (one >> 15 << 16) for one in own], dtype=torch.int16).view(dtype)
        assert torch.equal(again.isnan(), there.isnan())
