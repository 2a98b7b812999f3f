"""Each of many views of one deflated storage inflated it from its beginning: hash and diff took minutes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.values import elements


def test_a_storage_is_inflated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = tmp_path / "plain.pth", tmp_path / "deflated.pth"
    base = torch.arange(4000.0)
    torch.save({f"k{number}": base[number * 4 : number * 4 + 2] for number in range(500)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    times = 0
    inflate = elements.contents

    def counted(*how: object) -> object:
        nonlocal times
        times += 1
        return inflate(*how)  # type: ignore[arg-type]

    monkeypatch.setattr(elements, "contents", counted)
    assert ckptool.hash(path)["content"] == ckptool.hash(plain)["content"]
    assert times <= 4  # some threads may begin at once
