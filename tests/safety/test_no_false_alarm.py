"""A clean file is valid, and nothing is said of it but what torch's list does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CORPUS, MANIFEST, Fixture, by_name, corpus_files, needs_corpus

from ckptool.reports.validate import validation_report

#: What torch.save wrote, and nobody meddled with; protocol 0 of the old format is broken by torch itself.
CLEAN = [
    item
    for item in MANIFEST
    if item.container in ("torch-zip", "torch-legacy")
    # No torch reads UntypedStorage back from the legacy format, although it writes it.
    and not item.path.name.startswith(("hostile_", "zip_", "truncated", "legacy_untyped"))
    and item.path.name != "legacy_protocol0.pth"
]
#: Checks that may say something of a file that nothing is wrong with.
ALLOWED = {"globals", "program", "weights-only"}


def complaints(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (check["name"], check["message"])
        for check in report["checks"]
        if check["status"] == "fail" or (check["status"] == "warning" and check["name"] not in ALLOWED)
    ]


@pytest.mark.parametrize("item", CLEAN, ids=by_name)
def test_a_clean_fixture_is_valid(item: Fixture) -> None:
    report = validation_report(str(item.path))
    assert (complaints(report), report["status"]) == ([], "valid")
    if item.loads and item.container == "torch-zip":
        assert {check["name"]: check["status"] for check in report["checks"]}["weights-only"] == "pass"


def test_there_are_clean_fixtures() -> None:
    assert len(CLEAN) > 70


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: str(path.name))
def test_a_real_checkpoint_is_valid(path: Path) -> None:
    """Or it is no torch checkpoint at all, and named so."""
    assert path.parent == CORPUS
    report = validation_report(str(path))
    if report["status"] == "unreadable":
        assert report["format"] not in (None, "torch-zip", "torch-legacy")
        return
    assert (complaints(report), report["status"]) == ([], "valid")
