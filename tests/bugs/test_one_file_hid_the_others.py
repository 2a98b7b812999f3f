"""A file of a DCP folder that could not be opened made the whole folder unreadable, and was not named; a broken index
was not named either; and every piece of a cut file had a line of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import MalformedError, UnreadableError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "dcp4", tmp_path / "saved"))


def test_the_others_are_read(folder: Path) -> None:
    path = folder / "__2_0.distcp"
    path.unlink()
    path.mkdir()
    with ckptool.open(folder) as checkpoint:
        (problem,) = checkpoint.container.problems
        assert problem.message.startswith(f"{path.name} cannot be read: it is a directory, not a file, and with it ")
        assert len(checkpoint.survey.tensors) == 12
    assert len(ckptool.get(folder, "model.norm.weight").tobytes()) == 12


def test_a_stray_one_that_cannot_be_opened(folder: Path) -> None:
    (folder / "__7_0.distcp").symlink_to("nowhere")
    with ckptool.open(folder) as checkpoint:
        (problem,) = checkpoint.container.problems
    assert problem.level == "warning" and "__7_0.distcp cannot be read" in problem.message
    assert ckptool.validate(folder)["status"] == "valid"


def test_metadata_that_cannot_be_opened(folder: Path) -> None:
    (folder / ".metadata").unlink()
    (folder / ".metadata").mkdir()
    with pytest.raises(UnreadableError, match=r"\.metadata cannot be read: it is a directory"):
        ckptool.open(folder)


def test_an_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(MalformedError, match=r"model\.safetensors\.index\.json is not a valid index of shards"):
        ckptool.open(tmp_path)


def test_one_line_for_a_cut_file(folder: Path) -> None:
    os.truncate(folder / "__1_0.distcp", 10)
    with ckptool.open(folder) as checkpoint:
        (problem,) = checkpoint.container.problems
    assert problem.message.startswith("__1_0.distcp has 10 bytes, and optimizer.param_groups.0.lr ends at 1,261")
    assert problem.message.endswith("and 9 more")


def test_one_line_for_objects_of_a_damaged_file(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with ckptool.open(folder) as checkpoint:
        (problem,) = checkpoint.container.problems
    assert problem.message.startswith("__1_0.distcp cannot be read: it begins with zeros")
    assert problem.message.endswith(" and 10 more")
