"""Whatever stands beside a checkpoint in its folder is looked at like a file alone, or named as not looked at."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import FIXTURES, examples
from crafted_files import SYSTEM, TENSOR, dumped, legacy, plain
from dcp_folders import write_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_files import tarred
from safetensors.torch import save_file

import ckptool
from ckptool.base.limits import LIMITS
from ckptool.reports import checks

EVIL = {
    "zip": plain(SYSTEM),
    "legacy": legacy(SYSTEM),
    "bare": dumped(SYSTEM),
    "protocol 0": b"cposix\nsystem\n(S'true'\ntR.",
    "protocol 4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "broken behind the call": dumped(SYSTEM)[:-1] + b"\xff",
    "tar": tarred(dumped(SYSTEM)),
    "a zip in a zip": plain({"w": TENSOR}, {"0": plain(SYSTEM)}),
}
#: Whether the content is looked at.
GOOD = {
    "zip": (plain(TENSOR), True),
    "legacy": (legacy(), True),
    "bare": (pickle.dumps({"lr": 0.1}), True),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", True),
    "nothing": (b"", True),
    "text": (b"some words\n", True),
    "noise": (bytes(range(128, 256)), False),
}
NAMES = (
    *("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt", "other.ckpt"),
    *("objects.pkl", "model.joblib", "adapter_model.bin", "no_suffix", "weights.h5", ".hidden.pt"),
    *("checkpoint-500/optimizer.pt", "unet/diffusion_pytorch_model.bin", "1_Pooling/a/b/pytorch_model.bin"),
)


def folder_of(kind: str, path: Path) -> Path:
    if kind == "dcp":
        return write_ranks(path, {"w": torch.zeros(4, 2)}, 2)
    path.mkdir()
    if kind == "safetensors":
        save_file({"w": torch.zeros(3)}, path / "model.safetensors")
    else:
        torch.save({"w": torch.zeros(3)}, path / "pytorch_model.bin")
    (path / "config.json").write_text("{}")
    return path


@settings(max_examples=examples(60))
@given(st.data())
def test_a_file_that_runs_something_is_found_wherever_it_stands(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["safetensors", "torch", "dcp"]))
    folder = folder_of(kind, tmp_path_factory.mktemp("case") / "model")
    names = [name for name in NAMES if kind != "torch" or name != "pytorch_model.bin"]
    evil = data.draw(st.sampled_from([None, *names]))
    wanted: dict[str, bool] = {}
    for name in {*data.draw(st.sets(st.sampled_from(names), max_size=4)), *([evil] if evil else [])}:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == evil:
            path.write_bytes(EVIL[data.draw(st.sampled_from(list(EVIL)))])
        else:
            content, wanted[name] = GOOD[data.draw(st.sampled_from(list(GOOD)))]
            path.write_bytes(content)
    report = ckptool.validate(folder)
    files = {item["name"]: item for item in report["files"]}
    assert report["valid"] == (evil is None), report["checks"]
    for name, looked in wanted.items():
        assert files[name]["looked_at"] == looked, (name, files[name])
    assert not evil or evil in files
    if not all(item["looked_at"] for item in files.values()):
        assert report["coverage"] == "partial"
        assert "unread files" in report["not_checked"]


def test_what_a_trainer_writes_is_valid(tmp_path: Path) -> None:
    """A class that is merely outside of torch's list is a warning, as in a file alone."""
    folder = folder_of("safetensors", tmp_path / "model")
    from argparse import Namespace

    torch.save(Namespace(lr=0.1), folder / "training_args.bin")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    report = ckptool.validate(folder)
    beside = next(check for check in report["checks"] if check["name"] == "beside")
    assert report["valid"] and beside["status"] == "warning"
    assert [note["where"] for note in beside["notes"]] == ["training_args.bin"]
    assert "argparse.Namespace" in str(report["globals"])


def test_more_files_than_are_looked_at_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("safetensors", tmp_path / "model")
    for number in range(9):
        (folder / f"x{number}.txt").touch()
    monkeypatch.setattr(checks, "LIMITS", LIMITS._replace(listed=6))
    last = ckptool.validate(folder)["files"][-1]
    assert (last["looked_at"], last["why"]) == (False, "more than 6 files")
    assert ckptool.scan(folder)["verdict"] == "unknown"


def test_the_work_is_linear_in_the_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("safetensors", tmp_path / "model")
    for number in range(30):
        (folder / f"state{number}.pkl").write_bytes(pickle.dumps({"step": number}))
    listed = []
    listing = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listed.append(path) or listing(path))
    assert ckptool.scan(folder)["verdict"] == "weights-only"
    assert len(listed) < 10


@pytest.mark.parametrize("name", ["torchscript.pt", "exported.pt2", "package.pt", "script_net.pt"])
def test_a_program_in_a_folder_of_weights_is_told(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ckptool.scan(tmp_path)["verdict"] == "weights-only"
    (tmp_path / "sub").mkdir()
    shutil.copy(source, tmp_path / "sub")
    report = ckptool.scan(tmp_path)
    assert report["verdict"] == "program"
    assert f"sub/{name}" in str(report["files"])
    assert say("validate", "--safe", tmp_path).code == 1
    assert "nothing that is run" not in say("validate", tmp_path).out
