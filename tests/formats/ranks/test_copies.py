"""Copies of one tensor in several files of a save, and ranks without a file: what contradicts itself is not joined."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from command_line import say
from conftest import WHOLE, examples
from helpers.rank_files import save_ranks
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptool
from ckptool.formats import pieces

VALUES = {"a.weight": torch.randn(7, 6), "b.bias": torch.randn(5)}


class Cut(NamedTuple):
    """A mesh, and the placements of every tensor on it."""

    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    @property
    def world(self) -> int:
        return prod(self.mesh)

    @property
    def pieces(self) -> int:
        """The number of parts of a tensor. With more than 5, some ranks have no element of any tensor."""
        return prod(size for size, one in zip(self.mesh, self.placements) if isinstance(one, Shard))

    def part_of(self, rank: int) -> tuple[int, ...]:
        """The coordinates that decide which part a rank has."""
        place = torch.unravel_index(torch.tensor(rank), self.mesh)
        return tuple(int(at) for at, one in zip(place, self.placements) if isinstance(one, Shard))

    def has_all(self, ranks: set[int]) -> bool:
        """Return whether some ranks have all the parts."""
        return {self.part_of(rank) for rank in ranks} == {self.part_of(rank) for rank in range(self.world)}


cuts = (
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([Replicate(), Shard(0)])), min_size=1, max_size=3)
    .map(lambda pairs: Cut(tuple(size for size, _ in pairs), tuple(one for _, one in pairs)))
    .filter(lambda cut: 2 <= cut.world <= 9)
)
#: As torch saves a tensor that has its storage to itself, that is a part of one, and in files without checksums.
storages = st.sampled_from(["own", "view", "legacy"])
patterns = st.sampled_from(["model_rank{}.pt", "shard-{}.pth", "{:02d}.bin"])


def make(cut: Cut, storage: str, altered: int = -1) -> Callable[[int], object]:
    """Return what each rank saves; one of them has another value in each of its tensors."""

    def state(rank: int) -> object:
        mesh = init_device_mesh("cpu", cut.mesh)
        made = {
            name: distribute_tensor(value, mesh, cut.placements, src_data_rank=None) for name, value in VALUES.items()
        }
        for name, part in made.items():
            local = part.to_local()
            if storage == "view":
                local = torch.cat([local.flatten(), torch.randn(3)])[:-3].view(local.shape)
            else:
                local = local.clone()
            if rank == altered and local.numel():
                local.view(-1)[-1] += 1
            shape, stride = VALUES[name].shape, VALUES[name].stride()
            made[name] = DTensor.from_local(local, mesh, cut.placements, run_check=False, shape=shape, stride=stride)
        return made

    return state


def joined(folder: Path) -> dict[str, torch.Tensor]:
    """What torch loads of the file that the folder becomes."""
    out = folder.with_suffix(".joined.pth")
    ckptool.save(ckptool.convert(folder, "torch"), out, force=True)
    state: dict[str, torch.Tensor] = torch.load(out)
    return state


def refused(folder: Path) -> str:
    """Return why the folder is not converted."""
    out = folder.with_suffix(".refused.pth")
    result = say("convert", folder, "-o", out)
    assert (result.code, out.exists()) == (3, False), result.all
    return result.err


def same(state: dict[str, torch.Tensor]) -> bool:
    return state.keys() == VALUES.keys() and all(torch.equal(state[name], value) for name, value in VALUES.items())


@given(cuts, storages, patterns, st.data())
@settings(max_examples=examples(25), deadline=None)
def test_a_copy_that_differs_is_never_joined(
    tmp_path_factory: pytest.TempPathFactory, cut: Cut, storage: str, pattern: str, data: st.DataObject
) -> None:
    altered, at_once = data.draw(st.integers(0, cut.world - 1)), data.draw(st.sampled_from([0, 1 << 20]))
    parts = [cut.part_of(rank) for rank in range(cut.world)]
    assume(cut.pieces <= 5)
    folder = tmp_path_factory.mktemp("ranks") / "run"
    with mock.patch.object(pieces, "_AT_ONCE", at_once):
        save_ranks(folder, cut.world, make(cut, storage), pattern, legacy=storage == "legacy")
        assert same(joined(folder)) and ckptool.validate(folder)["valid"]
        shutil.rmtree(folder)
        save_ranks(folder, cut.world, make(cut, storage, altered), pattern, legacy=storage == "legacy")
        if parts.count(parts[altered]) == 1:
            assert not same(joined(folder))
            return
        first, *others = [rank for rank, part in enumerate(parts) if part == parts[altered]]
        message = refused(folder)
        different = others if altered == first else [altered]
        assert all(pattern.format(rank) in message for rank in (first, *different[:1])), message
        assert "a.weight" in message and "b.bias" in message
        assert not ckptool.validate(folder)["valid"]
        assert "is not the same as" in say("hash", folder).err or "are not the same as" in say("hash", folder).err
        if storage == "own" or at_once:
            assert "the same as in" in say("inspect", folder).out


@pytest.mark.sampled
@given(cuts, patterns, st.data())
@settings(max_examples=100 if WHOLE else 8, deadline=None)
def test_a_rank_without_a_file_is_named(
    tmp_path_factory: pytest.TempPathFactory, cut: Cut, pattern: str, data: st.DataObject
) -> None:
    assume(cut.pieces <= 5)
    gone = data.draw(st.sets(st.integers(0, cut.world - 1), min_size=1, max_size=cut.world - 1))
    left = {*range(cut.world)} - gone
    folder = save_ranks(tmp_path_factory.mktemp("ranks") / "run", cut.world, make(cut, "own"), pattern)
    for rank in gone:
        (folder / pattern.format(rank)).unlink()
    if cut.has_all(left) and (len(left) > 1 or "rank" in pattern):
        assert same(joined(folder))
        assert "not there" in say("inspect", folder).out
        return
    report = say("validate", folder)
    if len(left) == 1 and cut.has_all(left):
        return  # a whole checkpoint in one file
    assert report.code == 1
    message = refused(folder)
    if "rank" in pattern:
        assert any(pattern.format(rank) in message for rank in gone)
    elif len(left) > 1:
        assert f"{cut.world} ranks saved it, and rank" in message
    for rank in left:
        alone = say("validate", folder / pattern.format(rank))
        assert alone.code == 1 and "not found beside it" in alone.out
        assert "ckptool" not in alone.out.splitlines()[-1]  # no command makes a part whole


@pytest.mark.parametrize("different", [True, False])
@pytest.mark.parametrize("names", [("pp", "tp"), ("stage", "tp"), ("dp", "tp"), ()])
def test_parts_of_a_mesh_are_no_copies(names: tuple[str, ...], different: bool, tmp_path: Path) -> None:
    """The ranks of one dimension have different layers, or copies; the names in the files are the same."""

    def state(rank: int) -> object:
        half = rank // 2
        mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=names)["tp"]
            if names
            else DeviceMesh("cpu", [half * 2, half * 2 + 1])
        )
        value = VALUES["a.weight"] + half * different
        return {"layers.0.weight": distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)}

    folder = save_ranks(tmp_path / "run", 4, state)
    if different:
        message = refused(folder)
        assert "model_rank2.pt and model_rank3.pt" in message and "spread over different ranks" in message
        return
    assert torch.equal(joined(folder)["layers.0.weight"], VALUES["a.weight"])


@pytest.mark.parametrize(("outer", "taken"), [("pp", False), ("dp", True)])
def test_new_layers_of_two_stages_are_not_taken_for_one(outer: str, taken: bool, tmp_path: Path) -> None:
    """Ones are equal in all layers; the name of the dimension says that the ranks have different ones."""

    def state(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, "tp"))["tp"]
        return {"layers.0.weight": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)}

    folder = save_ranks(tmp_path / "run", 4, state)
    if taken:
        assert joined(folder)["layers.0.weight"].tolist() == [[1.0] * 3] * 4
    else:
        assert "two stages of a pipeline" in refused(folder)


def test_ranks_of_one_dimension_may_save_alone(tmp_path: Path) -> None:
    """With data parallelism outside of the mesh the other ranks have copies; a warning says that they exist."""

    def state(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["tp"]
        return {"a.weight": distribute_tensor(VALUES["a.weight"], mesh, [Shard(0)], src_data_rank=None)}

    folder = save_ranks(tmp_path / "run", 4, state)
    for rank in (1, 3):
        (folder / f"model_rank{rank}.pt").unlink()
    assert torch.equal(joined(folder)["a.weight"], VALUES["a.weight"])
    assert "part of one of 4 ranks, which has dp" in say("inspect", folder).out
    (folder / "model_rank2.pt").unlink()
    assert "model_rank2.pt is not there" in refused(folder)


def old_state(mesh: DeviceMesh) -> dict[str, object]:
    """What torch 2.9 and earlier pickled of a mesh (torch/distributed/device_mesh.py): the ranks as a tensor."""
    place = mesh.get_coordinate()
    return {
        "_device_type": mesh.device_type,
        "mesh": mesh.mesh.clone(),
        "_mesh_dim_names": mesh.mesh_dim_names,
        "_coordinate_on_dim": None if place is None else list(place),
        "_thread_id": None,
    }


@pytest.mark.parametrize("pattern", ["model_rank{}.pt", "part{}.pt"])
def test_meshes_of_old_versions_of_torch(pattern: str, tmp_path: Path) -> None:
    def state(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
        return {"w.weight": distribute_tensor(VALUES["a.weight"] + rank // 2, mesh, [Shard(0)], src_data_rank=None)}

    with mock.patch.object(DeviceMesh, "__getstate__", old_state):
        folder = save_ranks(tmp_path / "run", 4, state, pattern)
    assert "spread over different ranks" in refused(folder)
    report = say("validate", folder / pattern.format(3))
    assert "rank 3 of 2" not in report.out
    (folder / pattern.format(3)).unlink()
    assert ("is not there" in refused(folder)) and not ckptool.validate(folder)["valid"]


@pytest.mark.parametrize(("ranks", "warned"), [([0, 1, 2], False), ([2, 0, 1], True), ([0, 2, 1], True)])
def test_a_mesh_whose_ranks_do_not_ascend(ranks: list[int], warned: bool, tmp_path: Path) -> None:
    """full_tensor() gathers in the order of the process group, which torch sorts; DCP goes by the place in the mesh."""

    def state(rank: int) -> object:
        part = distribute_tensor(VALUES["a.weight"], DeviceMesh("cpu", ranks), [Shard(0)], src_data_rank=None)
        return {"a.weight": part}

    folder = save_ranks(tmp_path / "run", 3, state)
    assert torch.equal(joined(folder)["a.weight"], VALUES["a.weight"])
    assert ("full_tensor() of torch joins them in the order of the ranks" in say("inspect", folder).out) == warned
