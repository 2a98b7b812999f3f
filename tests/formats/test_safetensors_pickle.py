"""A safetensors file that is a pickle as well: torch.load runs it under any name but .safetensors."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

import ckptool
from ckptool.cli.main import run
from ckptool.files.sources import BytesSource, Source, open_source
from ckptool.formats.safetensors.reader import read


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
    assert ckptool.scan(plain)["verdict"] == "unknown"  # the archive in the tensor is cut


def headed(size: int, nbytes: int, name: str = "w", dtype: str = "U8") -> bytes:
    """Return the start of a file: its header of ``size`` bytes, which ends in blanks, has one tensor."""
    shape = [nbytes if dtype == "U8" else nbytes // 2]
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= size
    return struct.pack("<Q", size) + text.ljust(size)


#: A pickle that names a global, on lines of its own.
CODE = b"0cos\nsystem\n(S'true'\ntR."


class Counted(Source):
    """Passes bytes on, and keeps the largest offset that was read."""

    def __init__(self, whole: Source) -> None:
        self.name, self.size, self.whole, self.most = "a.safetensors", whole.size, whole, 0

    def read(self, offset: int, size: int) -> bytes:
        data = self.whole.read(offset, size)
        self.most = max(self.most, offset + len(data))
        return data


@pytest.mark.parametrize("fill", [b"\1", b"\x80?", b"\0\0\x80?", random.Random(4).randbytes(1 << 16)])
def test_opening_reads_no_values(fill: bytes) -> None:
    values = fill * (3_000_000 // len(fill))
    for size in range(1 << 19, (1 << 19) + 256):
        source = Counted(BytesSource(headed(size, len(values), "layers.0.V", "BF16") + values))
        container = read(source)
        assert source.most <= size + 8
        assert not container.problems
        assert not container.audit(())


@pytest.mark.parametrize("first", [b"I0", b"L7", b"F3", b"V\1", b'S"'])
@pytest.mark.parametrize("values", [1000, 1_000_000])
def test_a_line_that_ends_in_the_values(first: bytes, values: int, tmp_path: Path) -> None:
    """The C unpickler reads a number up to a NUL, and skips the rest of its line."""
    end = (b'"\n' if first[:1] == b"S" else b"\n") + CODE
    line = b"a" * (values - len(end)) + end
    data = headed(int.from_bytes(first, "little"), len(line), dtype="BF16") + line
    assert len(load(data)) == 1
    with pytest.raises(TypeError):  # it reached the code, which the test makes harmless
        Harmless(io.BytesIO(data)).load()
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert ckptool.scan(path)["verdict"] == "unknown"
    assert ckptool.validate(path)["status"] == "invalid"
    with zipfile.ZipFile(tmp_path / "both.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "model.safetensors")
    assert ckptool.scan(tmp_path / "both.zip")["verdict"] == "unknown"


class Harmless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> None:
        assert (module, name) == ("os", "system")


@pytest.mark.parametrize("length", [1_000_000, 70_000_000])
def test_a_string_of_many_values(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for code in (CODE, b"0" * len(CODE)):
        path.write_bytes(both(b"B" + length.to_bytes(4, "little") + bytes(length) + code))
        with closing(open_source(path)) as source:
            container = read(source)
            assert not container.problems
            assert bool(container.audit(())) == (code == CODE)
        # Values that may be a pickle of more than 64 MiB are not followed.
        assert (ckptool.scan(path)["verdict"] == "weights-only") == (code != CODE and length < 64 << 20)
