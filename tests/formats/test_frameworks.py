"""Checkpoints that training frameworks wrote themselves (fixtures/files/real): read, checked, converted, cleaned."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
from conftest import FIXTURES, REAL, Real, by_name

import ckptool
from ckptool.pickles.decode import decode
from ckptool.safety.calls import suspicious_calls

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


class Outer:
    class Inner:
        pass

    @staticmethod
    def method() -> None:
        pass


def test_what_python_writes_for_members() -> None:
    for protocol in (0, 1, 2, 3):
        for value in (Outer.method, [Outer.Inner, Outer.Inner()]):
            if isinstance(value, list) and protocol < 2:
                continue  # made by copyreg, from the class itself
            graph = decode(pickle.dumps(value, protocol)).graph
            found = suspicious_calls(graph)
            assert not found or isinstance(value, list), (protocol, found)


@pytest.mark.parametrize(
    "body",
    [
        b"c__builtin__\ngetattr\n(cos\nPath\nVsystem\ntR",  # of a module of the list
        b"c__builtin__\ngetattr\n(cnet\nmodels\nVsystem\ntR",  # of what may be a module
        b"c__builtin__\ngetattr\n(cnet\nNet\nV__globals__\ntR",  # of the machinery of Python
        b"c__builtin__\ngetattr\n(cnet\nNet\nVrun\ntR(VecX\ntR",  # called
        b"c__builtin__\ngetattr\n(cbuiltins\nObject\nVx\ntR",
        b"c__builtin__\ngetattr\n(cnet\nNet.models\nVx\ntR",
        b"c__builtin__\ngetattr\n(cnet\nNet\nVx\nNtR",  # with a default
    ],
)
def test_what_reaches_further_is_one(body: bytes) -> None:
    assert suspicious_calls(decode(body + b".").graph)
