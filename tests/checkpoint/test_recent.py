"""Files with the same pickle share its graph and what was found in it, and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.base.lazy import Recent
from ckptool.formats.opening import open_checkpoint


def test_only_the_latest_result_for_the_same_arguments_is_kept() -> None:
    recent: Recent[int] = Recent()
    made = iter(range(100))
    graph, twin = [1], [1]

    def result(*arguments: object, small: bool = True) -> int:
        return recent.result(lambda: next(made), *arguments, small=small)

    assert [result(graph, 1), result(graph, 1), result(twin, 1), result(graph, 2), result(graph, 1)] == [0, 0, 1, 2, 3]
    data, same = b"xy" * 9, bytes(bytearray(b"xy" * 9))
    assert data is not same
    assert [result(data), result(same), result(b"xz"), result(data)] == [4, 4, 5, 6]
    assert [result(graph, small=False), result(data), result(graph)] == [7, 6, 8]


@pytest.fixture
def epochs(tmp_path: Path) -> list[Path]:
    """Return two files of one run: their pickles are the same, their values differ."""
    paths = [tmp_path / f"epoch_{number}.pth" for number in range(2)]
    for number, path in enumerate(paths):
        torch.save({"fc.weight": torch.full((2, 3), float(number)), "fc.bias": torch.full((2,), float(number))}, path)
    return paths


def test_the_graph_is_shared_and_the_values_are_not(epochs: list[Path]) -> None:
    with open_checkpoint(epochs[0]) as first, open_checkpoint(epochs[1]) as second:
        assert first.graph is second.graph
        assert first.survey is second.survey
        assert first["fc.weight"].tolist() != second["fc.weight"].tolist()
        renamed = ckptool.add_prefix(first, "model")
        assert list(renamed) == ["model.fc.weight", "model.fc.bias"]
        assert list(second) == list(first) == ["fc.weight", "fc.bias"]
        assert not ckptool.diff(first, second)["same"]


def test_a_damaged_file_after_a_good_one(epochs: list[Path], tmp_path: Path) -> None:
    short, hostile = tmp_path / "short.pth", tmp_path / "hostile.pth"
    with zipfile.ZipFile(epochs[0]) as good, zipfile.ZipFile(short, "w") as bad, zipfile.ZipFile(hostile, "w") as evil:
        for name in good.namelist():
            bad.writestr(name, good.read(name)[:4] if name.endswith("/data/0") else good.read(name))
            evil.writestr(name, good.read(name))
        evil.writestr("epoch_0/other.pkl", b"cposix\nsystem\n(S'true'\ntR.")
    order = [epochs[0], short, epochs[1], hostile, epochs[0]]
    reports = [ckptool.validate(path) for path in order]
    assert [report["valid"] for report in reports] == [True, False, True, False, True]
    found = [item["verdict"] for item in ckptool.scan(*map(str, order))["files"]]
    assert found == ["weights-only", "weights-only", "weights-only", "unsafe", "weights-only"]


def test_a_graph_that_keeps_what_was_read_from_tensors_is_not_shared() -> None:
    """The ranks of a mesh are in a tensor, and the pickle is the same whatever they are."""
    path = FIXTURES / "dtensor.pt"
    with open_checkpoint(path) as first, open_checkpoint(path) as second:
        assert first.container.pickle == second.container.pickle
        assert first.graph is not second.graph
