"""Bare pickles of NumPy arrays: inspect prints a command that makes a file of torch with the same numbers of them."""

from __future__ import annotations

import collections
import pickle
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.base.errors import NotACheckpointError
from ckptool.cli.main import run

ARRAYS = {
    "weight": np.arange(12, dtype="float32").reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(3, dtype=">i4"),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), dtype="float16"),
    "mask": np.array([True, False]),
}
VALUES: dict[str, Any] = {
    "a dict": ARRAYS,
    "a training run": {
        "model": collections.OrderedDict(ARRAYS),
        "epoch": 3,
        "blobs": [np.ones(2)],
        "lr": np.float64(0.5),
    },
    "an array": ARRAYS["weight"],
}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, np.ndarray):
        native = theirs.astype(theirs.dtype.newbyteorder("="))
        return isinstance(ours, torch.Tensor) and ours.numpy().dtype == native.dtype and np.array_equal(ours, native)
    return bool(ours == theirs)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_the_printed_command_makes_a_file_of_torch(
    name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights.pkl").write_bytes(pickle.dumps(VALUES[name], protocol))
    with pytest.raises((RuntimeError, ValueError), match=r"Invalid magic number|ambiguous"):
        torch.load("weights.pkl", weights_only=False)
    assert run(["inspect", "weights.pkl"]) == 0
    [arrow] = [line for line in capsys.readouterr().out.splitlines() if "->" in line]
    assert arrow.strip() == "-> ckptool sanitize weights.pkl -o weights.loadable.pth"
    assert run(shlex.split(arrow)[2:]) == 0
    assert same(torch.load("weights.loadable.pth"), VALUES[name])


class Other:
    """Something that a pickle of arrays alone has not."""


@pytest.mark.parametrize("value", [{"a": 1}, {"a": ARRAYS["weight"], "b": Other()}, {"a": np.array([Other()])}])
def test_other_pickles_are_not_opened(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(NotACheckpointError, match="bare pickle"):
        ckptool.open(path)


def test_only_a_named_one_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(ARRAYS))
    assert run(["inspect", str(tmp_path)]) == 3
    assert "there is no checkpoint in this folder" in capsys.readouterr().err
