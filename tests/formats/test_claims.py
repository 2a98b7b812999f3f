"""A format without checksums must not give wrong bytes a good name: what the input says of them is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
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
