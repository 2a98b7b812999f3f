"""Names of rank files: what differs in the number of a rank alone."""

from __future__ import annotations

import pytest

from ckptool.formats.names.ranks import rank_sets


@pytest.mark.parametrize(
    ("pattern", "label", "world"),
    [
        ("model_world_size_3_rank_{}.pt", "model", 3),
        ("extra_state_world_size_3_rank_{}.pt", "extra_state", 3),
        ("pytorch_model_fsdp_rank{}.bin", "pytorch_model_fsdp", 0),
        ("pytorch_model_fsdp_0_rank{}.bin", "pytorch_model_fsdp_0", 0),
        ("mp_rank_{:02d}.pt", "mp", 0),
        ("rank-{}.pth", "", 0),
        ("RANK{:05d}_weights.pth.tar", "weights", 0),
    ],
)
def test_sets_of_ranks(pattern: str, label: str, world: int) -> None:
    [found] = rank_sets([pattern.format(rank) for rank in (2, 0, 1)] + ["config.json", ".rank3.pt", "rank.pt"])
    assert (found.label, found.world, found.named) == (label, world, True)
    assert found.files == {rank: pattern.format(rank) for rank in range(3)}
    assert found.name_of(7) == pattern.format(7)
    stem = found.files[1].rsplit(".", 1)[0]
    assert found.rank_of(stem, 5) == 1
    assert found.rank_of("archive", 5) == 5


@pytest.mark.parametrize("name", ["frank_1.pt", "rank.pt", "rankings-2024.csv", "rank_1.json", "rank12345678.pt"])
def test_names_that_are_no_ranks(name: str) -> None:
    assert not rank_sets([name])


def test_two_files_of_one_rank_are_a_pair() -> None:
    """Whatever the order: what is taken does not depend on the hashes of names."""
    names = ["model.rank1.pth", "model.rank0.pth", "model.rank01.pth"]
    for own in (names, names[::-1]):
        [found] = rank_sets(own)
        assert found.files == {0: "model.rank0.pth", 1: "model.rank01.pth"}
        assert found.twice == (("model.rank01.pth", "model.rank1.pth"),)
