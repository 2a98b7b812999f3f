"""Bare pickles of arrays, tensors and modules: inspect prints the command that makes a torch file of them."""

from __future__ import annotations

import collections
import io
import pickle
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
    """A class that the reader does not have."""

    def __init__(self) -> None:
        self.size = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.tied = self.inner[0].weight


TENSORS: dict[str, Any] = {
    "views": [base := torch.arange(12.0).reshape(3, 4), base.t(), base[1:, 1:]],
    "dtypes": {str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)},
    "empty and scalar": {"empty": torch.empty(0, 3), "scalar": torch.tensor(2)},
    "a parameter": {"w": nn.Parameter(torch.ones(2))},
    "beside an array": {"w": torch.ones(2), "a": np.ones(2)},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_in_a_bare_pickle_are_those_that_pickle_loads(name: str, protocol: int, tmp_path: Path) -> None:
    path, out = tmp_path / "t.pkl", tmp_path / "t.pth"
    path.write_bytes(pickle.dumps(TENSORS[name], protocol))
    assert run(["sanitize", str(path), "-o", str(out), "-q"]) == 0
    loaded, wanted = torch.load(out, weights_only=True), pickle.loads(path.read_bytes())
    for own, other in zip(*(value.values() if isinstance(value, dict) else value for value in (loaded, wanted))):
        assert torch.equal(own, torch.as_tensor(other)) and own.dtype == torch.as_tensor(other).dtype

    def storages(values: Any) -> int:
        return len({value.untyped_storage().data_ptr() for value in values})

    if name == "views":
        assert storages(loaded) == storages(wanted)


def test_a_pickled_module_becomes_its_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()
    Path("snap.pkl").write_bytes(pickle.dumps({"G_ema": model, "step": 3}))
    report = ckptool.inspect("snap.pkl")
    assert report["format"] == "bare-pickle" and report["tensors"] > 0
    assert run(["sanitize", "snap.pkl", "--as-state-dict", "-o", "snap.pth", "-q"]) == 0
    loaded = torch.load("snap.pth", weights_only=True)["G_ema"]
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


def test_arrays_beside_an_unknown_class_become_plain_values(tmp_path: Path) -> None:
    path, out = tmp_path / "policy_state.pkl", tmp_path / "p.pth"
    path.write_bytes(pickle.dumps({"weights": {"h": ARRAYS["weight"]}, "spec": Other()}))
    assert run(["sanitize", str(path), "-o", str(out), "-q"]) == 0
    assert same(torch.load(out, weights_only=True)["weights"]["h"], ARRAYS["weight"])


@pytest.mark.parametrize("value", [{"a": 1}, {"a": Other()}, {"a": np.array([Other()])}, {"a": np.array(["text"])}])
def test_other_pickles_are_not_opened(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(NotACheckpointError, match="bare pickle"):
        ckptool.open(path)


def test_only_a_named_one_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(ARRAYS))
    assert run(["inspect", str(tmp_path)]) == 3
    assert "the folder holds no checkpoint" in capsys.readouterr().err


class _Reduced:
    """An object that is pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("is_view", [False, True])
def test_a_view_of_a_storage_is_not_read_as_a_whole_storage(is_view: bool, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(4.0).storage(), buffer, _use_new_zipfile_serialization=False)
    saved = buffer.getvalue()
    assert saved.count(b"K\x04Nt") == 1
    if is_view:  # (key, offset, size) in place of None
        saved = saved.replace(b"K\x04Nt", b"K\x04X\x01\0\0\0vK\x01K\x03\x87t")
    storage = _Reduced(torch.storage._load_from_bytes, saved)
    tensor = _Reduced(torch._utils._rebuild_tensor_v2, storage, 0, (3,), (1,), False, collections.OrderedDict())
    (tmp_path / "t.pkl").write_bytes(pickle.dumps({"w": tensor}))
    if is_view:
        with pytest.raises(NotACheckpointError, match="bare pickle"):
            ckptool.open(tmp_path / "t.pkl")
    else:
        with ckptool.open(tmp_path / "t.pkl") as checkpoint:
            assert checkpoint["w"].shape == (3,)
