"""Items that torch compressed with zstd are read like any others; without a package for it, that is what is said."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import ZStandard

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.cli.main import run
from ckptool.files import compressed as zstd
from ckptool.files.sources import BytesSource

zstandard = pytest.importorskip("zstandard")
STATE = {
    "model": {"up.weight": torch.arange(60_000.0).reshape(300, 200), "mix.weight": torch.ones(3, dtype=torch.bfloat16)},
    "epoch": 3,
    "note": ["some", {"values": torch.zeros(2)}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(path, _extensions=[ZStandard()]))
    return path


def test_pieces_of_many_ranks(tmp_path: Path) -> None:
    """Those of the fixture, compressed one by one."""
    folder, out = tmp_path / "packed", tmp_path / "out.safetensors"
    folder.mkdir()
    source = FIXTURES / "dcp4"
    metadata: Any = pickle.loads((source / ".metadata").read_bytes())
    files: dict[str, bytes] = {}
    for info in metadata.storage_data.values():
        data = (source / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        before = files.get(info.relative_path, b"")
        packed = io.BytesIO()
        with zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as stream:
            stream.write(data)
        info.offset, info.length, info.transform_descriptors = len(before), len(packed.getvalue()), ["stream.zstd/1"]
        files[info.relative_path] = before + packed.getvalue()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = tmp_path / "expected.safetensors"
    for path, output in ((folder, out), (source, expected)):
        with ckptool.open(path) as checkpoint:
            ckptool.save(ckptool.convert(checkpoint, "safetensors", key="model"), output)
    assert out.read_bytes() == expected.read_bytes()
    assert load_file(out).keys() == load_file(expected).keys() != set()


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(zstd, "available", lambda: False)
    assert run(["keys", str(folder)]) == 0
    capsys.readouterr()
    assert run(["convert", str(folder), "-o", str(folder.parent / "out.pt")]) == 3
    assert "pip install 'ckptool[zstd]'" in capsys.readouterr().err
    assert run(["validate", str(folder)]) == 1
    assert "pip install 'ckptool[zstd]'" in capsys.readouterr().out


def packed(data: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor().compress(data))


def test_a_bomb_is_refused() -> None:
    data = packed(bytes(1 << 24))
    with pytest.raises(MalformedError, match="inflates to more than"):
        zstd.ZstdSource(BytesSource(data), 0, len(data), 1 << 20, "bomb")
