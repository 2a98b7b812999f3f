"""A format without checksums must not give wrong bytes a good name: what the input says of them is looked at."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import write_ranks
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import MalformedError
from ckptool.cli.main import run

NAMES = ("net.a", "net.b", "other.c")


def damaged(path: Path, which: str) -> Path:
    """A checkpoint of two state dicts in which a bit of one tensor is another one."""
    tensors = {name: torch.randn(50, 40) for name in NAMES}
    torch.save({head: {n: t for n, t in tensors.items() if n.startswith(head)} for head in ("net", "other")}, path)
    with ckptool.open(path) as checkpoint:
        (entry,) = (entry for entry in checkpoint.survey.tensors if entry.key == which)
        stored = checkpoint.container.stored(entry.tensor.storage)
        assert stored.span is not None
        at = stored.span.offset + 1234
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("to", ["safetensors", "legacy", "shards"])
def test_a_flipped_bit_is_not_passed_on(
    which: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = damaged(tmp_path / "in.pth", which), tmp_path / "out"
    how = {
        "safetensors": ["--to-format", "safetensors", "--key", "net", "--allow-loss", "entries"],
        "shards": ["--to-format", "safetensors", "--key", "net", "--allow-loss", "entries", "--max-shard-size", "9KB"],
        "legacy": ["--to-format", "legacy"],
    }[to]
    code = run(["convert", str(source), "-o", str(out), *how])
    said = capsys.readouterr().err
    if which == "other.c" and to != "legacy":
        # What does not go into the output need not be whole.
        assert code == 0 and out.exists()
        return
    assert code == 3 and not out.exists() and [file.name for file in tmp_path.iterdir()] == ["in.pth"]
    assert f'net["{which}"]' in said or f'other["{which}"]' in said
    assert "checksum" in said and f"ckptool salvage {source}" in said


@pytest.mark.parametrize("flip", [False, True])
def test_large_inputs_are_looked_at_by_a_thread(flip: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1 << 20), "b": torch.ones(3)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        stored = checkpoint.container.stored(checkpoint.survey.tensors[0].tensor.storage)
    assert stored.span is not None and stored.size > 2 << 20
    if flip:
        with (tmp_path / "in.pth").open("r+b") as file:
            file.seek(stored.span.offset + stored.size - 1)
            file.write(b"\x01")
    assert run(["convert", str(tmp_path / "in.pth"), "-o", str(tmp_path / "x.safetensors"), "-q"]) == (3 if flip else 0)
    assert (tmp_path / "x.safetensors").exists() != flip


def test_what_is_whole_of_it_can_be_converted(tmp_path: Path) -> None:
    source = damaged(tmp_path / "in.pth", "net.b")
    found = ckptool.salvage(source)
    ckptool.save(found.checkpoint, tmp_path / "whole.pth")
    with ckptool.open(tmp_path / "whole.pth") as checkpoint:
        ckptool.save(
            ckptool.convert(checkpoint, "safetensors", key="net", allow_loss=["entries"]), tmp_path / "x.safetensors"
        )
    assert list(load_file(tmp_path / "x.safetensors")) == ["net.a"]


def test_deflated_records_and_those_without_a_checksum(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(999.0), "b": torch.ones(3)}, tmp_path / "in.pth")
    with zipfile.ZipFile(tmp_path / "in.pth") as plain, zipfile.ZipFile(tmp_path / "x.pth", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(999.0), "b": torch.ones(3)}, tmp_path / "y.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("x", "y"):
        with ckptool.open(tmp_path / f"{name}.pth") as checkpoint:
            ckptool.save(ckptool.convert(checkpoint, "safetensors"), tmp_path / f"{name}.safetensors")
        assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["a"], torch.arange(999.0))


def test_a_folder_of_shards_is_looked_at_too(tmp_path: Path) -> None:
    tensors = {name: torch.randn(30, 30) for name in "abc"}
    torch.save(tensors, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch", max_shard_size="4KB"), tmp_path / "shards")
    last = tmp_path / "shards" / "pytorch_model-00003-of-00003.bin"
    with ckptool.open(last) as checkpoint:
        stored = checkpoint.container.stored(checkpoint.survey.tensors[0].tensor.storage)
        assert stored.span is not None
        at = stored.span.offset
    data = bytearray(last.read_bytes())
    data[at] ^= 1
    last.write_bytes(data)
    with ckptool.open(tmp_path / "shards") as checkpoint:
        converted = ckptool.convert(checkpoint, "safetensors")
        with pytest.raises(MalformedError, match="storage of c does not match its checksum"):
            ckptool.save(converted, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


# -- pieces of DCP, which get a checksum of their own in every output --------------------------------------------

TARGETS = {
    "torch": ["convert", "--to-format", "torch"],
    "legacy": ["convert", "--to-format", "legacy"],
    "dcp": ["convert", "--to-format", "dcp"],
    "safetensors": ["convert", "--to-format", "safetensors", "--key", "model", "--allow-loss", "all"],
    "shards": [
        "convert",
        "--to-format",
        "safetensors",
        "--key",
        "model",
        "--allow-loss",
        "all",
        "--max-shard-size",
        "500",
    ],
    "drop": ["drop", "other"],
    "extract": ["extract", "model"],
    "add-module": ["add-module", "--key", "model"],
    "remap": ["remap", "--to", "cuda:0"],
}


@pytest.mark.parametrize("how", TARGETS)
@pytest.mark.parametrize("which", ["model", "note"])
def test_a_flipped_bit_in_a_piece_of_dcp_is_not_passed_on(how: str, which: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"model.w": torch.randn(8, 33), "model.b": torch.randn(8), "other": torch.randn(4, 5)}
    state["note"] = {"t": torch.randn(99), "n": 3}
    folder = write_ranks(tmp_path / "in", state, 3)
    command, *more = TARGETS[how]
    out = tmp_path / "out"
    assert run([command, str(folder), *more, "-o", str(out), "-q"]) == 0
    data = {path: path.read_bytes() for path in folder.iterdir()}
    wanted = state["model.w"][5].numpy().tobytes() if which == "model" else state["note"]["t"].numpy().tobytes()
    (path,) = (path for path, raw in data.items() if wanted in raw)
    at = data[path].index(wanted) + 41
    path.write_bytes(data[path][:at] + bytes([data[path][at] ^ 4]) + data[path][at + 1 :])
    assert ckptool.validate(folder)["status"] == "invalid"
    bad = tmp_path / "bad"
    code = run([command, str(folder), *more, "-o", str(bad), "-q"])
    if code == 0:
        # What does not go into the output need not be whole; what goes keeps the checksum that tells.
        assert ckptool.validate(bad)["status"] == "invalid" or ckptool.diff(out, bad)["same"]
        assert which == "note" or how == "remap"  # which finds nothing to do, and copies the files
    else:
        assert code == 3 and not bad.exists()


def test_a_view_that_becomes_an_item_is_looked_at(tmp_path: Path) -> None:
    """Of a storage that several tensors are views of, each item has a part, under a checksum of its own."""
    torch.save(dict(zip("abc", torch.randn(3, 500))), tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        stored = checkpoint.container.stored(checkpoint.survey.tensors[0].tensor.storage)
    assert stored.span is not None
    data = bytearray((tmp_path / "in.pth").read_bytes())
    data[stored.span.offset + 3000] ^= 1
    (tmp_path / "in.pth").write_bytes(data)
    how = ["--to-format", "dcp", "--allow-loss", "all", "--tied", "clone"]
    assert run(["convert", str(tmp_path / "in.pth"), "-o", str(tmp_path / "out"), *how]) == 3
