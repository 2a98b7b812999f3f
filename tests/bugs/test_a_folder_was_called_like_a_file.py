"""An edit of a DCP folder with ``-o x.pth`` wrote a folder called x.pth, which nobody would look into."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import FIXTURES

from ckptool.cli.main import run

FOLDER = FIXTURES / "dcp4"


@pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.bin", "x.ckpt", "x.pth.tar", "x.safetensors"])
@pytest.mark.parametrize("edit", [["drop", "optimizer"], ["add-module"], ["strip-module"]], ids=lambda edit: edit[0])
def test_it_names_the_command_that_makes_a_file(
    edit: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert run([edit[0], str(FOLDER), *edit[1:], "-o", str(out)]) == 4
    option = " --to-format torch" if name.endswith(".tar") else ""
    assert (
        f"-> make one file of it, and edit that: ckptool convert {FOLDER} -o {out}{option}\n" in capsys.readouterr().err
    )
    assert not out.exists()


def test_what_it_names_works(tmp_path: Path) -> None:
    out = tmp_path / "x.pth"
    assert run(["convert", str(FOLDER), "-o", str(out)]) == 0
    assert out.is_file()
