"""A safetensors file that is a pickle as well: torch.load runs it under any name but .safetensors."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

import ckptool
from ckptool.cli.main import run


def both(pickle: bytes) -> bytes:
    """A file of one tensor. Its size begins with BINUNICODE of five bytes; strings that are popped hide the header."""
    data = b"0" + pickle
    entry = b'":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(data), len(data))
    size = ord("X") + 5 * 256
    parts, left = [b'{"0'], size - 3 - 2 - 100
    while left:
        step = min(left, 100) if left == 100 or left - min(left, 100) == 0 or left - 100 >= 50 else left - 50
        parts.append(b"U" + bytes([step - 3]) + b"a" * (step - 3) + b"0")
        left -= step
    header = b"".join(parts) + b"U" + bytes([100]) + b"a" * (100 - len(entry)) + entry
    assert len(header) == size and json.loads(header)
    return struct.pack("<Q", size) + header + data


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_it_is_not_valid(name: str, tmp_path: Path) -> None:
    data = both(b"cos\nsystem\n(S'true'\ntR.")
    assert len(load(data)) == 1
    path = tmp_path / name
    path.write_bytes(data)
    report = ckptool.validate(path)
    assert report["status"] == "invalid"
    assert {"two-formats"} <= {note["code"] for check in report["checks"] for note in check["notes"]}
    assert run(["strip-module", str(path), "-o", str(tmp_path / "out.safetensors")]) == 4


def test_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(both(b"cos\nsystem\n(S'true'\ntR."))
    (tmp_path / "config.json").write_text("{}")
    assert run(["validate", str(tmp_path)]) == 1


@pytest.mark.parametrize("end", [b"I1\n.", b"cnot a module\nx\n."])
def test_what_names_nothing_is_no_second_format(end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(both(end))
    assert ckptool.validate(path)["status"] == "valid"


def test_one_that_ends_in_a_zip_archive_is_both(tmp_path: Path) -> None:
    """zipfile and pandas read the archive, which begins in the last tensor."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("data.txt", b"a text")
    data = archive.getvalue()
    path, plain = tmp_path / "x.safetensors", tmp_path / "plain.safetensors"
    for at, content in ((path, data), (plain, data[:-1])):
        save_file({"a": torch.ones(3), "z": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, at)
    assert zipfile.is_zipfile(path)
    report = ckptool.validate(path)
    assert report["status"] == "invalid"
    assert any("a zip archive at once" in check["message"] for check in report["checks"])
    assert ckptool.scan(path)["verdict"] == "unknown"
    assert ckptool.validate(plain)["status"] == "valid"
    assert ckptool.scan(plain)["verdict"] == "weights-only"
