"""The first line of inspect says who wrote a file, in the words of the file: these were printed as they are."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from conftest import FIXTURES

from ckptool.cli.main import run


@pytest.mark.parametrize(
    ("name", "record"),
    [("torchscript.pt", "version"), ("package.pt", "python_version"), ("exported.pt2", "archive_version")],
)
def test_nothing_of_it_acts(name: str, record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(FIXTURES / name) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            new.writestr(item.filename, b"3\x1b[31m\xc2\x9b" if item.filename.endswith(f"/{record}") else data)
    run(["inspect", str(path)])
    out, err = capsys.readouterr()
    assert out and not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in (out + err).replace("\n", ""))
