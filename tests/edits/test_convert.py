"""From every format that is read to every format that is written: the same names, shapes, dtypes and values."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import TargetError
from ckptool.cli.main import run

#: A checkpoint of each format, most of them made of one zip.
SOURCES = ("torch", "legacy", "safetensors", "dcp", "torch shards", "safetensors shards", "torchscript", "tar")
TARGETS = ("torch", "legacy", "safetensors", "dcp", "torch shards", "safetensors shards")


def convert(source: Path, kind: str, out: Path) -> Path:
    target, _, shards = kind.partition(" ")
    with ckptool.open(source) as checkpoint:
        size = 80 if shards else 0
        ckptool.save(ckptool.convert(checkpoint, target, tied="clone", allow=["all"], max_shard_size=size), out)
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    made = {kind: convert(FIXTURES / "bare.pth", kind, folder / kind.replace(" ", "-")) for kind in TARGETS}
    return made | {"torchscript": FIXTURES / "script_net.pt", "tar": FIXTURES / "torch01.tar"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_tensors_are_the_same(source: str, target: str, sources: dict[str, Path], tmp_path: Path) -> None:
    out = convert(sources[source], target, tmp_path / "out")
    assert ckptool.hash(out)["content"] == ckptool.hash(sources[source])["content"]
    assert out.is_dir() == (target == "dcp" or "shards" in target)
    assert ckptool.validate(out)["valid"]


@pytest.mark.parametrize("target", ["dcp", "legacy"])
def test_shards_are_for_formats_that_have_an_index(target: str) -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint, pytest.raises(TargetError, match="shards"):
        ckptool.convert(checkpoint, target, max_shard_size="5GB")


@pytest.mark.parametrize(
    ("target", "name"),
    [("torch", "in.pth"), ("legacy", "in.pth"), ("safetensors", "in.safetensors"), ("dcp", "in.dcp")],
)
def test_an_output_in_a_folder_is_called_by_its_format(target: str, name: str, tmp_path: Path) -> None:
    source = convert(FIXTURES / "bare.pth", "safetensors shards", tmp_path / "in")
    assert run(["convert", str(source), "--to-format", target, "--out-dir", str(tmp_path / "out"), "-q"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
