"""The folders of DCP that accelerate saves for one model under FSDP, read as one checkpoint."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import CkptoolError

SAVED = FIXTURES / "ranks" / "accelerate_fsdp"
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


def oracle(kind: str) -> dict[str, torch.Tensor]:
    """The tensors as FSDP gathers them."""
    whole = load_file(SAVED.with_suffix(".safetensors"))
    return {key.removeprefix(f"{kind}."): value for key, value in whole.items() if key.startswith(f"{kind}.")}


def codes(path: Path) -> set[str]:
    return {finding["code"] for finding in ckptool.inspect(path)["findings"]}


def test_it_is_the_model_and_the_optimizer_that_were_saved(tmp_path: Path) -> None:
    assert ckptool.validate(SAVED)["valid"]
    ckptool.save(ckptool.convert(SAVED, "torch"), tmp_path / "one.pth")
    whole = torch.load(tmp_path / "one.pth")
    weights = oracle("weights")
    assert whole["model"].keys() == weights.keys()
    assert all(torch.equal(whole["model"][name], value) for name, value in weights.items())
    for slot in ("exp_avg", "exp_avg_sq"):
        moments = oracle(slot)
        assert {name for name, state in whole["optimizer"]["state"].items() if slot in state} == moments.keys()
        assert all(torch.equal(whole["optimizer"]["state"][name][slot], value) for name, value in moments.items())
    said = say("inspect", SAVED)
    assert "for accelerate: 2 ranks" in said.out and "scheduler.bin (the learning rate schedule)" in said.out


def test_the_files_of_a_folder_are_missing(folder: Path, tmp_path: Path) -> None:
    """A lost file of the optimizer leaves the model whole; without its metadata nothing says what is in it."""
    (folder / OPTIMIZER / "__1_0.distcp").unlink()
    assert not ckptool.validate(folder)["valid"]
    with pytest.raises(CkptoolError):
        ckptool.save(ckptool.convert(folder, "torch"), tmp_path / "one.pth")
    (folder / OPTIMIZER / ".metadata").unlink()
    with pytest.raises(CkptoolError, match=r"no \.metadata") as caught:
        ckptool.open(folder)
    assert caught.value.path == str(folder / OPTIMIZER)
    shutil.rmtree(folder / OPTIMIZER)
    assert ckptool.validate(folder)["valid"]
    with ckptool.open(folder) as checkpoint:
        assert list(checkpoint) == ["model"]


def test_a_second_model_is_under_the_name_of_its_folder(folder: Path) -> None:
    shutil.copytree(folder / MODEL, folder / "pytorch_model_fsdp_1")
    with ckptool.open(folder) as checkpoint:
        assert list(checkpoint) == ["model", "pytorch_model_fsdp_1", "optimizer"]
    assert ckptool.validate(folder)["valid"]
    first, second = (ckptool.hash(folder, key=key)["content"] for key in ("model", "pytorch_model_fsdp_1.model"))
    assert first == second


@pytest.mark.parametrize("place", ["../optimizer_0/__0_0.distcp", "x/__0_0.distcp", "optimizer_0/__0_0.distcp", ".."])
def test_metadata_leads_to_no_file_of_another_folder(place: str, folder: Path) -> None:
    metadata: Any = pickle.loads((folder / MODEL / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = place
    (folder / MODEL / ".metadata").write_bytes(pickle.dumps(metadata, protocol=2))
    assert "outside-path" in codes(folder) and not ckptool.validate(folder)["valid"]


def test_beside_weights_of_hugging_face_it_is_named(folder: Path) -> None:
    shutil.copy(FIXTURES / "model.safetensors", folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    report = ckptool.inspect(folder)
    assert report["format"] == "hf-safetensors"
    steps = [str(finding["next"]) for finding in report["findings"] if finding["next"]]
    assert any(step.endswith(f"{folder / MODEL}") for step in steps), steps
