"""Tensors that stand behind each other were read together, also where they are in different files of a folder: what was
compared were the bytes at that place in the first file. A tensor that differs was said to be the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from conftest import FIXTURES
from safetensors.torch import save_file

import ckptool


def header(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def write(folder: Path, value: int) -> Path:
    """The second shard's tensor begins where, in the first one, the second tensor does."""
    folder.mkdir()
    first = {"a": torch.zeros(4, dtype=torch.int64), "c": torch.ones(8, dtype=torch.int64)}
    one, two = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file(first, one)
    for length in range(1, 200):
        name = "b" * length
        save_file({name: torch.full((4,), value)}, two)
        if header(two) == header(one) + 32:
            break
    assert header(two) == header(one) + 32
    index = {"metadata": {}, "weight_map": {"a": one.name, name: two.name, "c": one.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_tensor_that_differs_in_the_second_shard(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", 5), write(tmp_path / "two", 6)
    report = ckptool.diff(one, two)
    assert not report["same"]
    assert ckptool.diff(one, write(tmp_path / "three", 5))["same"]


def test_a_folder_of_dcp_and_its_copy(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "dcp4", tmp_path / "copy"))
    assert ckptool.diff(FIXTURES / "dcp4", folder)["same"]
