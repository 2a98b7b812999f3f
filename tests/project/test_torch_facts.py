"""The comparison of our lists with the sources of torch: what was read is what is installed, what moves is named."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ckptool.safety.torch_lists import NEWEST, VERSIONS

facts = SimpleNamespace(**runpy.run_path(str(ROOT / "fixtures" / "generators" / "torch_facts.py")))


def installed() -> Path:
    """The folder that has torch."""
    return Path(pytest.importorskip("torch").__file__).parents[1]


def test_our_lists_are_those_of_torch() -> None:
    assert [*facts.differences(facts.stored())] == []


def test_what_is_stored_is_what_the_installed_torch_says() -> None:
    version, found = facts.facts_of(installed())
    if version not in VERSIONS:
        pytest.skip(f"no lists for torch {version}")
    assert facts.moved(facts.known_facts(facts.stored())[version], found) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("allowed torch.bcomplex32", "allowed torch.complex16"),
        ("opcode REDUCE", "opcode OBJ"),
        ("dtype bcomplex32", "dtype complex16"),
        ("restored cpu", "restored gpu"),
        ("blocked sys", "blocked subprocess"),
        ("scalar 7 FLOAT", "scalar 77 FLOAT"),
    ],
)
def test_what_moves_is_named(old: str, new: str) -> None:
    entries = facts.stored()
    entries[NEWEST]["removed"].append(old)
    entries[NEWEST]["added"].append(new)
    said = [*facts.differences(entries)]
    spelled = new.replace("FLOAT", "float32")
    assert f"torch {NEWEST}: {spelled} is in torch, not in our list" in said
    # Devices that torch can restore are more in ours: other packages add some.
    assert len(said) == (1 if old == "restored cpu" else 2)
