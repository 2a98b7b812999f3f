"""torch opens no archive without a version that it knows, and its C++ follows no pickle that begins without a protocol:
packages, the items of DCP folders and TorchScript archives like that were valid."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from dcp_folders import write_ranks

import ckptool

Change = Callable[[str, bytes], "bytes | None"]


def changed(old: Path, new: Path, change: Change) -> Path:
    """A copy of an archive with other records; None leaves one out."""
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        for item in source.infolist():
            data = change(item.filename.partition("/")[2], source.read(item))
            if data is not None:
                target.writestr(item.filename, data)
    return new


def without(name: str, data: bytes) -> bytes | None:
    return None if name in ("version", ".data/version") else data


def eleven(name: str, data: bytes) -> bytes | None:
    return b"11\n" if name in ("version", ".data/version") else data


@pytest.mark.parametrize("change", [without, eleven])
def test_packages(change: Change, tmp_path: Path) -> None:
    path = changed(FIXTURES / "package.pt", tmp_path / "p.pt", change)
    with pytest.raises(RuntimeError):
        torch.package.PackageImporter(path)
    assert ckptool.validate(FIXTURES / "package.pt")["valid"]
    assert not ckptool.validate(path)["valid"]


@pytest.mark.parametrize("change", [without, eleven])
def test_items_of_dcp(change: Change, tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "saved", {"w": torch.ones(2)}, 1)
    assert ckptool.validate(folder)["valid"]
    file = folder / "__0_0.distcp"
    size = file.stat().st_size
    changed(file, tmp_path / "item", change)
    # The archive is found from its end, and may have bytes before it: those of another size take the place.
    data = (tmp_path / "item").read_bytes()
    file.write_bytes(data)
    metadata = (folder / ".metadata").read_bytes()
    before, after = (b"M" + number.to_bytes(2, "little") for number in (size, len(data)))
    assert before in metadata
    (folder / ".metadata").write_bytes(metadata.replace(before, after))
    report = ckptool.validate(folder)
    assert not report["valid"]
    assert "version" in str(report["checks"])


def test_pickles_of_torchscript(tmp_path: Path) -> None:
    def bare(name: str, data: bytes) -> bytes | None:
        if name != "data.pkl":
            return data
        assert next(pickletools.genops(data))[0].name == "PROTO"
        return data[2:]

    path = changed(FIXTURES / "torchscript.pt", tmp_path / "s.pt", bare)
    with pytest.raises(RuntimeError, match="PROTO"):
        torch.jit.load(str(path))
    assert not ckptool.validate(path)["valid"]
