"""Rank files whose tensors say where they belong, read as one checkpoint: against the tensors that were spread."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import examples
from helpers.rank_files import save_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptool
from ckptool.base.errors import CkptoolError
from ckptool.formats import folder_format, pieces

Spread = Mapping[str, tuple[torch.Tensor, tuple[Any, ...]]]


def spread(tensors: Spread, mesh: tuple[int, ...], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The tensors as this rank of a mesh has them."""
    made = init_device_mesh("cpu", mesh, mesh_dim_names=names or None)
    return {name: part(value, made, placements) for name, (value, placements) in tensors.items()}


def part(value: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
    if not any(isinstance(one, _StridedShard) for one in placements):
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    # distribute_tensor takes none of these: the indices are cut as torch cuts them.
    local = value
    for dim, length in enumerate(value.shape):
        kept = torch.arange(length)
        for one, size, at in zip(placements, mesh.shape, mesh.get_coordinate()):
            if not isinstance(one, Replicate) and one.dim == dim:
                kept = _of_rows(one)._split_tensor(kept, size, with_padding=False)[0][at]
        local = local.index_select(dim, kept)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def _of_rows(one: Any) -> Any:
    return _StridedShard(0, split_factor=one.split_factor) if isinstance(one, _StridedShard) else Shard(0)


def loaded(folder: Path, out: Path, **how: Any) -> Any:
    """What torch loads of the one file that the folder becomes."""
    ckptool.save(ckptool.convert(ckptool.open(folder), "torch", **how), out, force=True)
    return torch.load(out)


def problems(folder: Path) -> dict[str, str]:
    with ckptool.open(folder) as checkpoint:
        return {problem.code: problem.message for problem in checkpoint.container.problems}


MODEL = {
    "embed.weight": (torch.randn(11, 6), (Shard(0),)),
    "proj.weight": (torch.randn(6, 10).bfloat16(), (Shard(1),)),
    "norm.weight": (torch.randn(6), (Replicate(),)),
    "short.bias": (torch.arange(2), (Shard(0),)),
    "scalar": (torch.tensor(3.5), (Replicate(),)),
}


def training(world: int, epoch: int = 3, mean: float = 1) -> dict[str, Any]:
    return {"model": spread(MODEL, (world,)), "epoch": epoch, "mean": torch.full((3,), mean)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "run", 4, lambda rank: training(4))


# -- the whole --------------------------------------------------------------------------------------------------------


placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 2)),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 2), st.integers(1, 3)),
)


@given(
    st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(0, 5)),
    st.lists(st.tuples(st.integers(1, 3), placements), min_size=1, max_size=3),
)
@settings(max_examples=examples(25))
def test_any_mesh_and_any_placements(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], cuts: list[tuple[int, Any]]
) -> None:
    value = torch.randn(shape)
    mesh, placed = tuple(size for size, _ in cuts), tuple(one for _, one in cuts)
    folder = tmp_path_factory.mktemp("ranks")
    world = torch.Size(mesh).numel()
    save_ranks(folder / "run", world, lambda rank: spread({"w.weight": (value, placed)}, mesh))
    assert torch.equal(loaded(folder / "run", folder / "one.pth")["w.weight"], value)


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    def make(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(6.0).reshape(2, 3)
        a, b, c = (DTensor.from_local(part, mesh, [Shard(0)]) for part in (local, local, local.clone()))
        return {"a.weight": a, "b.weight": b, "c.weight": c}

    state = loaded(save_ranks(tmp_path / "run", 2, make), tmp_path / "one.pth")
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr() != state["c.weight"].data_ptr()


# -- which folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epoch_{}.pth", "model_rank{}.pth"])
def test_plain_tensors_are_no_mesh(name: str, tmp_path: Path) -> None:
    for number in range(3):
        torch.save({"w.weight": torch.randn(2)}, tmp_path / name.format(number))
    assert folder_format(str(tmp_path)) is None


def test_numbers_without_a_word_are_ranks_where_they_complete_the_mesh(tmp_path: Path) -> None:
    value = torch.randn(7, 2)
    tensors = {"w.weight": (value, (Shard(0),))}
    save_ranks(tmp_path / "run", 3, lambda rank: spread(tensors, (3,)), "shard-{}.pth")
    assert torch.equal(loaded(tmp_path / "run", tmp_path / "one.pth")["w.weight"], value)
    (tmp_path / "run" / "shard-1.pth").unlink()
    refused(tmp_path / "run", tmp_path / "run", "3 ranks saved it, and rank 1 is not there")


# -- damage -----------------------------------------------------------------------------------------------------------


def refused(folder: Path, tmp_path: Path, *names: str) -> str:
    with pytest.raises(CkptoolError) as error:
        loaded(folder, tmp_path / "one.pth")
    assert not (tmp_path / "one.pth").exists()
    told = error.value.what + " ".join(problems(folder).values())
    assert all(name in told for name in names)
    return told


def test_swapped_names_do_no_harm(folder: Path, tmp_path: Path) -> None:
    (folder / "model_rank1.pt").rename(folder / "x")
    (folder / "model_rank2.pt").rename(folder / "model_rank1.pt")
    (folder / "x").rename(folder / "model_rank2.pt")
    assert torch.equal(loaded(folder, tmp_path / "one.pth")["model"]["embed.weight"], MODEL["embed.weight"][0])
    assert "model_rank2.pt was saved under the name of model_rank1.pt" in problems(folder)["renamed"]


def test_plain_tensors_that_differ_are_named(folder: Path, tmp_path: Path) -> None:
    save_ranks(tmp_path / "other", 4, lambda rank: training(4, mean=0))
    shutil.copyfile(tmp_path / "other" / "model_rank3.pt", folder / "model_rank3.pt")
    refused(folder, tmp_path, "'mean' cannot be joined")


def test_what_is_too_large_to_compare_at_once_is_compared_by_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_AT_ONCE", 0)

    def make(rank: int) -> object:
        spare = torch.zeros(9)
        spare[1] = rank
        # Views: no checksum on record is of their bytes alone.
        return {**spread({"w.weight": (torch.ones(4), (Shard(0),))}, (2,)), "same": spare[4:], "other": spare[:4]}

    folder = save_ranks(tmp_path / "run", 2, make)
    assert "'same' and 'other'" in problems(folder)["rank-values"]
    report = str(ckptool.validate(folder))
    assert "'other' in model_rank1.pt is not the same" in report
    assert "'same' in" not in report
