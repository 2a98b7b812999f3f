"""A checkpoint in a notebook: the summary of inspect as HTML, escaped, with its keys folded and long lists cut off."""

from __future__ import annotations

from collections import OrderedDict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, corpus_files
from process_probe import probe

import ckptool
from ckptool.checkpoint.checkpoint import PUBLIC
from ckptool.reports.summary import facts

TAGS = {"div", "b", "table", "tr", "td", "th", "br", "code", "details", "summary", "pre"}


class Page(HTMLParser):
    """The tags of a page, all closed in order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.rows = 0
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS and not attrs
        self.rows += tag == "tr"
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def page(path: Path) -> Page:
    with ckptool.open(path) as checkpoint:
        return Page(checkpoint._repr_html_())


@pytest.mark.parametrize("path", [*sorted(FIXTURES.iterdir()), *corpus_files()], ids=lambda path: path.name)
def test_every_checkpoint_has_a_page_with_the_words_of_inspect(path: Path) -> None:
    try:
        found = page(path)
        report = ckptool.inspect(path)
    except ckptool.CkptoolError:
        pytest.skip("not a checkpoint")
    assert f"{report['tensors']:,} tensor" in found.text
    for label, text in facts(report):
        assert label in found.text and (len(text) > 300 or text in found.text)


def test_nothing_in_a_file_becomes_markup(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror='a()'>&amp;\"\x1b[31m"
    state = OrderedDict([(hostile, torch.zeros(2)), ("b" * 5000, torch.zeros(2))])
    path = tmp_path / "<b>&.pth"
    torch.save({hostile: hostile, "state_dict": state, "args": {hostile: [hostile]}}, path)
    found = page(path)
    assert "<script>alert(1)</script>" in found.text and "\x1b" not in found.text
    assert len(found.text) < 10_000


def test_long_lists_are_cut_off_and_counted(tmp_path: Path) -> None:
    state = OrderedDict((f"layer.{number}.weight", torch.zeros(1)) for number in range(1234))
    torch.save({"state_dict": state, **{f"entry {number}": number for number in range(100)}}, tmp_path / "a.pth")
    found = page(tmp_path / "a.pth")
    assert "1,034 more" in found.text and "71 more" in found.text
    assert found.rows < 300


def test_an_edited_checkpoint_shows_what_it_is_now() -> None:
    with ckptool.open(FIXTURES / "ddp4_training.pth") as checkpoint:
        found = Page(ckptool.strip_module(checkpoint)._repr_html_())
    assert "no prefix" in found.text and "module.head" not in found.text


def test_html_is_imported_when_it_is_drawn() -> None:
    found = probe(f"import ckptool; checkpoint = ckptool.open({str(FIXTURES / 'bare.pth')!r}); repr(checkpoint)")
    assert found.modules & {"html", "click", "ckptool.reports.html"} == set()


def test_completion_shows_public_names() -> None:
    assert dir(ckptool) == sorted(ckptool.__all__)
    with ckptool.open(FIXTURES / "ddp4_training.pth") as checkpoint:
        for names in (dir(ckptool.Checkpoint), dir(checkpoint)):
            public = [name for name in names if not name.startswith("_")]
            assert public == sorted([*PUBLIC, "get", "items", "keys", "values"])
        assert all(hasattr(checkpoint, name) for name in PUBLIC)
        assert checkpoint._ipython_key_completions_() == ["epoch", "best_mIoU", "state_dict", "optimizer"]
        assert "module.head.bias" in checkpoint["state_dict"]._ipython_key_completions_()
