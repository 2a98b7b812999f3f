"""Which torch a verdict is about unless another is named: the installed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptool.safety.torch_lists import INSTALLED, NEWEST, VERSIONS, installed_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cpu'", "2.13"),
        ('from typing import Optional\n__version__ = "2.6.1"\n', "2.6"),
        ("__version__ = '1.5.0'", VERSIONS[0]),
        ("__version__ = '2.99.0'", NEWEST),
        ("__version__ = '3.0.0'", NEWEST),
        ("nothing", ""),
        ("", ""),
    ],
)
def test_the_version_of_the_installed_torch_is_read_without_importing_it(
    text: str, version: str, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    assert installed_version([str(tmp_path / "nowhere"), str(tmp_path)]) == version


def test_here_it_is_the_torch_that_is_imported() -> None:
    torch: Any = pytest.importorskip("torch")
    assert ".".join(torch.__version__.split(".")[:2]) == INSTALLED
