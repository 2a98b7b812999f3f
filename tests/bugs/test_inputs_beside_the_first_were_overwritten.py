"""rename --like X -o X --force replaced X, an input; so did --map and match --apply."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES

from ckptool.cli.main import run


@pytest.mark.parametrize("command", ["rename", "edit", "match"])
def test_no_input_is_replaced(command: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    shutil.copy(FIXTURES / "bare.pth", other)
    before = other.read_bytes()
    own = {"rename": ["--like", str(other), "--by-order"], "edit": ["--like", str(other), "--by-order"]}
    arguments = own.get(command, [str(other), "--apply"])
    code = run([command, str(FIXTURES / "bare_module.pth"), *arguments, "-o", str(other), "--force"])
    assert code == 4
    assert other.read_bytes() == before
