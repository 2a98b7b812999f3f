"""``convert --tied keep-first`` left names out and did not say which; a name that says another format was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES

import ckptool


def test_second_names_are_named(tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    said = say("convert", FIXTURES / "tied.pth", "-o", out, "--tied", "keep-first")
    with ckptool.open(out) as written:
        (pair,) = [(name, kept) for name, kept in written.container.metadata.items() if name != "format"]
    assert f"{pair[0]!r} for {pair[1]!r}" in said.out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.safetensors", ["--to-format", "torch"]),
        ("a.safetensors", ["--to-format", "legacy"]),
        ("a.safetensors", ["--to-format", "dcp"]),
        ("a.pth", ["--to-format", "safetensors"]),
        ("a.pth", ["--max-shard-size", "80"]),
    ],
)
def test_a_name_of_another_format_is_refused(name: str, options: list[str], tmp_path: Path) -> None:
    said = say("convert", FIXTURES / "bare.pth", "-o", tmp_path / name, *options)
    assert said.code == 4
    assert "the name says" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["folder", "model-1.5", "model.v2"])
def test_other_shards_keep_the_format(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    for source in (FIXTURES / "bare.pth", FIXTURES / "model.safetensors"):
        said = say("convert", source, "-o", out, "--max-shard-size", "80", "--force", "--allow-loss", "all")
        assert said.code == 0, said.all
        suffix = source.suffix.replace(".pth", ".bin")
        assert {path.suffix for path in out.iterdir()} == {suffix, ".json"}
        for file in out.iterdir():
            file.unlink()
        out.rmdir()


def test_a_folder_of_one_file_is_called_so(tmp_path: Path) -> None:
    said = say("convert", FIXTURES / "bare.pth", "-o", tmp_path / "x", "--max-shard-size", "5GB")
    assert "torch-zip -> torch-zip, one file in a folder" in said.out
    assert len(list((tmp_path / "x").iterdir())) == 1
