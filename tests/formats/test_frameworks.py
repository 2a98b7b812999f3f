"""Checkpoints that training frameworks wrote themselves (fixtures/files/real): read, checked, converted, cleaned."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from conftest import FIXTURES, REAL, Real, by_name

import ckptool

HERE = FIXTURES / "real"
READ = [item for item in REAL if item.kind in ("torch-zip", "dcp", "hf-torch", "hf-safetensors")]


@pytest.mark.parametrize("item", READ, ids=by_name)
def test_each_is_valid_and_can_be_copied(item: Real, tmp_path: Path) -> None:
    with ckptool.open(item.path) as checkpoint:
        assert checkpoint.container.format == item.kind
        assert checkpoint.survey.tensors
        paths = [entry.path for entry in checkpoint.survey.tensors]
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "copy.pth")
    assert ckptool.validate(item.path)["valid"]
    with ckptool.open(tmp_path / "copy.pth") as copy:
        assert [entry.path for entry in copy.survey.tensors] == paths


def codes(path: Path) -> list[str]:
    return [finding["code"] for finding in ckptool.inspect(path)["findings"]]


def test_weights_in_folders_within_are_told() -> None:
    (note,) = (item for item in ckptool.inspect(HERE / "sentences")["findings"] if item["code"] == "inner-weights")
    assert note["next"] == f"ckptool inspect {HERE / 'sentences' / '2_Dense'}"
    with ckptool.open(HERE / "sentences" / "2_Dense") as checkpoint:
        assert [entry.key for entry in checkpoint.survey.tensors] == ["linear.bias", "linear.weight"]


def test_the_members_of_a_zip(tmp_path: Path) -> None:
    """Those of Stable-Baselines3 are deflated or stored; both are what ``zipfile`` says."""
    with zipfile.ZipFile(HERE / "ppo.zip") as file:
        for name in (name for name in file.namelist() if name.endswith(".pth")):
            (tmp_path / name).write_bytes(file.read(name))
            with ckptool.open(f"{HERE / 'ppo.zip'}!{name}") as inner, ckptool.open(tmp_path / name) as plain:
                assert [entry.path for entry in inner.survey.tensors] == [e.path for e in plain.survey.tensors]


def test_a_method_of_a_class_is_no_attack() -> None:
    """Python pickles it as ``getattr(Class, 'name')``: it is named among the globals, and is no dangerous call."""
    assert "dangerous-call" not in codes(HERE / "ppo_policy.pt")
    assert "weights-only" in codes(HERE / "ppo_policy.pt")
