"""The page of ``ckptool report`` without a browser: what it holds, and that nothing in it can act."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKPOINTS, FIXTURES, by_name
from page_files import HOSTILE, hostile, pair

import ckptool
from ckptool.base.text import visible
from ckptool.files.sources import FileSource
from ckptool.reports.page.content import FIGURES, NUMBERS


def written(folder: Path, *inputs: Path, **how: Any) -> str:
    """The page on checkpoints, as text."""
    return Path(ckptool.report(*inputs, output=folder / "page.html", force=True, **how).path).read_text("utf-8")


def data_of(page: str) -> dict[str, Any]:
    """The columns of a page."""
    (packed,) = re.findall(r'<script type="application/octet-stream" id="data">([^<]*)</script>', page)
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return data


@pytest.mark.parametrize("item", CHECKPOINTS, ids=by_name)
def test_the_numbers_are_those_of_stats(item: Any, tmp_path: Path) -> None:
    try:
        rows = ckptool.stats(item.path, all=True)["tensors"]
    except ckptool.CkptoolError:
        return
    data = data_of(written(tmp_path, item.path))
    assert data["path"] == [row["path"] for row in rows]
    assert data["dtype"] == [row["dtype"] for row in rows]
    assert data["bytes"] == [row["bytes"] for row in rows]
    for name in NUMBERS:
        assert [str(value) for value in data["stats"][name]] == [str(row.get(name)) for row in rows]
    assert data["stats"]["counts"] == [row["histogram"] and row["histogram"]["counts"] for row in rows]


def test_the_figures_are_those_of_diff(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    data, report = data_of(written(tmp_path, a, b)), ckptool.diff(a, b)
    assert report["values"]
    paths = dict(zip(data["path"], range(len(data["bytes"]))))
    for item in report["values"]:
        row = paths[item["path"]]
        assert [data["diff"][name][row] for name in FIGURES] == [item.get(name) for name in FIGURES]
    fates = data["diff"]["fate"]
    assert {path for path, row in paths.items() if fates[row] == "changed"} == {
        item["path"] for item in report["changed"]
    }
    assert [path for path, row in paths.items() if fates[row] == "only in B"] == ['model["new.weight"]']
    renamed = {path: data["diff"]["partner"][row] for path, row in paths.items() if fates[row] == "renamed"}
    assert renamed == {'model["embed.weight"]': 'model["encoder.weight"]'}
    assert {"same", "only in A"} < set(fates)


def test_the_bytes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a = {f"layers.{number}.weight": torch.randn(300, 400) for number in range(4)}
    torch.save(a, tmp_path / "a.pt")
    size = (tmp_path / "a.pt").stat().st_size
    read: Counter[str] = Counter()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: FileSource, offset: int, what: Any) -> Any:
            read[Path(self.name).name] += what if isinstance(what, int) else len(what)
            return method(self, offset, what)

        return call

    for name in ("read", "read_into"):
        monkeypatch.setattr(FileSource, name, counted(getattr(FileSource, name)))
    page = written(tmp_path, tmp_path / "a.pt")
    assert size < read.pop("a.pt") < 1.2 * size and "agree with their CRC-32" in page


@pytest.mark.parametrize("shape", [(300, 400), (60,)])
def test_checksums_of_what_was_read_for_its_numbers_are_compared(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    hurt = torch.randn(shape)
    torch.save({"whole": torch.randn(50), "hurt": hurt}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(hurt.numpy().tobytes()) + 100] ^= 1
    (tmp_path / "b.pt").write_bytes(data)
    for names, side in ((("b.pt",), ""), (("b.pt", "a.pt"), "A: "), (("a.pt", "b.pt"), "B: ")):
        page = written(tmp_path, *(tmp_path / name for name in names))
        assert "has another checksum than the one on record: damaged tensor hurt" in page
        assert f"What to do with {side[:1] or 'it'}</h2>" in page
        assert f">{side}invalid: 1 check failed<" in page and (not side or f">{'AB'['A' in side]}: valid<" in page)


def test_hostile_names_are_inert_and_shown_escaped(tmp_path: Path) -> None:
    path = hostile(tmp_path)
    page = written(tmp_path, path)
    names = data_of(page)["name"]
    assert (
        len(names) == len(HOSTILE) and "state_dict.__proto__" in names and 'state_dict["lone\\ud800surrogate"]' in names
    )
    assert "<img" not in page and "alert(1)</script>" not in page and page.count("<script") == 2
    assert [char for char in page if visible(char) != char and char != "\n"] == []
    assert page.count("</script>") == 2


def test_the_policy_allows_this_style_and_this_program_alone(tmp_path: Path) -> None:
    page = written(tmp_path, FIXTURES / "bare.pth", no_values=True)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    for rule, tag in (("style-src", "style"), ("script-src", "script")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert not re.search(r"""\s(on\w+|style)=["']|https?://(?!www\.w3\.org/)|innerHTML|eval\(""", page)


def test_nothing_is_written_over_and_nothing_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(ckptool.CkptoolError, match="exists"):
        ckptool.report(FIXTURES / "bare.pth", output=path)
    with pytest.raises(ckptool.CkptoolError):
        ckptool.report(FIXTURES / "html_page.pth", output=path, force=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
