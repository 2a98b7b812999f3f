"""The comparison of our lists with the sources of torch: what was read is what is installed, what moves is named."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ckptool.safety.torch_lists import VERSIONS

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
