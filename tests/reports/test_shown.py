"""Reports as a notebook shows them: static, small, inert, and dictionaries like any other."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import torch
from conftest import FIXTURES
from page_files import HOSTILE, hostile, pair

import ckptool
from ckptool.base.text import visible


class Tags(HTMLParser):
    """The tags of a text, and what is between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href", "style") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


INERT = {"div", "b", "table", "tr", "td", "th", "svg", "path"}


def test_statistics_have_a_table() -> None:
    report = ckptool.stats(FIXTURES / "bare.pth")
    shown = Tags(report._repr_html_())  # type: ignore[attr-defined]
    assert shown.tags <= INERT and {"svg", "table"} <= shown.tags
    assert {row["key"] for row in report["tensors"]} <= set(shown.texts)
    assert f"{report['tensors'][0]['mean']:.4g}" in shown.texts
    assert json.loads(json.dumps(report)) == report and isinstance(report, dict)


def test_hostile_names_are_texts(tmp_path: Path) -> None:
    html = ckptool.stats(hostile(tmp_path), all=True)._repr_html_()  # type: ignore[attr-defined]
    assert Tags(html).tags <= INERT and html.count("<tr>") == len(HOSTILE) + 1
    assert [char for char in html if visible(char) != char] == []


def test_many_tensors_are_few_rows(tmp_path: Path) -> None:
    torch.save({f"{n}.weight": torch.full((3,), float(n)) for n in range(500)}, tmp_path / "a.pt")
    html = ckptool.stats(tmp_path / "a.pt")._repr_html_()  # type: ignore[attr-defined]
    assert "450 more" in html and len(html) < 50_000


def test_differences_have_a_table(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    report = ckptool.diff(a, b)
    shown = Tags(report._repr_html_())  # type: ignore[attr-defined]
    assert shown.tags <= INERT
    assert {item["path"] for item in (*report["values"], *report["changed"], *report["only_in_b"])} <= set(shown.texts)
    assert f"{report['values'][0]['max_abs']:.4g}" in shown.texts
    same = ckptool.diff(a, a)._repr_html_()  # type: ignore[attr-defined]
    assert Tags(same).texts[-1] == ": the same" and "<table>" not in same
