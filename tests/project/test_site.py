"""The pages of the documentation: all in the index, links that lead somewhere, examples that were run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
EVERY = [*ROOT.glob("*.md"), *PAGES]
_FENCE = re.compile(r"^(`{3,})(\w*).*?^\1$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(``.+?``|[^]]*)\]\(([^)]*)\)")


def prose(page: Path) -> str:
    """A page without what is in blocks of code and comments."""
    return _FENCE.sub("", re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def links(page: Path) -> dict[str, str]:
    """The links of a page to others and within it: text by target."""
    return {target: text for text, target in _LINK.findall(prose(page)) if not re.match("https?:|mailto:", target)}


def anchors(page: Path) -> set[str]:
    """What a link to a heading is called on a code forge and on the site."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[.+?\]\((.+?)\)", prose(DOCS / "index.md"), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES if page.name != "index.md"]


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_answer_to_missing_keys_is_two_clicks_from_the_readme() -> None:
    errors = DOCS / "errors.md"
    assert "docs/errors.md" in links(ROOT / "README.md")
    entries = [text for text in errors.read_text(encoding="utf-8").split("\n##") if "Missing key(s)" in text]
    assert entries
    assert all("$ ckptool " in text for text in entries)


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_what_commands_print_was_printed_by_them(page: Path) -> None:
    by_hand = re.sub(r"^\]\]\] -->$.*?^<!-- \[\[\[end", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    blocks = [block[0].splitlines()[1:-1] for block in _FENCE.finditer(by_hand) if block[2] in ("console", "pycon")]
    assert all(line.startswith("$ ") for block in blocks for line in block)
