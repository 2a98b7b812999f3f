"""The faults of ``make mutants`` fit the package as it is: each text is there, and so are the tests that find it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT
from mutants.run import ALL, LAWS, Mutant, holder


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.breaks)
def test_a_fault_has_its_place_and_its_tests(mutant: Mutant) -> None:
    assert isinstance(holder(ROOT / "ckptool", mutant), Path), f"{mutant.old!r} is not there once: choose another fault"
    assert all((ROOT / test).exists() for test in mutant.tests.split())


def test_there_is_a_fault_for_each_law() -> None:
    laws = re.findall(r"^\d\. \*\*(.*)\.\*\*", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.M)
    assert [mutant.breaks for mutant in LAWS] == [law.lower() for law in laws]
