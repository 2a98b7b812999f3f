"""The package as an index shows it."""

from __future__ import annotations

import re
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

_LINKS = re.compile(r"\[[^]]*\]\(([^)]*)\)")


def test_the_description_has_no_link_that_an_index_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=given.update))
    runpy.run_path(str(ROOT / "setup.py"))
    readme, description = (ROOT / "README.md").read_text(encoding="utf-8"), given["long_description"]
    links = _LINKS.findall(readme)
    assert [link for link in links if link.startswith("https:")] == _LINKS.findall(description)
    assert all(f"`{link}`" in description for link in links if not link.startswith("https:"))


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(documents) > 10
    for document in documents:
        links = [link.partition("#")[0] for link in _LINKS.findall(document.read_text(encoding="utf-8"))]
        assert all((document.parent / link).exists() for link in links if not link.startswith(("https:", "mailto:")))
