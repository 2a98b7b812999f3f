"""A file laid out anew took over a root folder whose name is no UTF-8, and could not write it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FIXTURES

import ckptool


@pytest.mark.parametrize("root", [b"\xff\xfe\xfd\xfc", b"a\\bc", b"a\nbc"])
def test_the_folder_of_the_output_is_a_plain_name(root: bytes, tmp_path: Path) -> None:
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes((FIXTURES / "bare.pth").read_bytes().replace(b"bare/", root + b"/"))
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.drop(checkpoint, ["conv1.*"]), out)
    assert ckptool.validate(out)["valid"]
    assert len(torch.load(out, weights_only=True)) == 7
