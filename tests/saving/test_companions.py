"""Files of a folder that are no part of the checkpoint go along with an edit of it, and are told where they do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import save_file

import ckptool
from ckptool.cli.main import run

ALONG = {
    "config.json": b'{"hidden_size": 8}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b\n",
    "modeling_own.py": b"raise SystemExit\n",
    "README.md": b"# A model\n",
    "optimizer.pt": b"whatever it is",
    "training_args.bin": b"this, too",
}
LEFT = {
    "tf_model.h5": b"other weights",
    "pytorch_model.bin": b"the same in another format",
    "model.gguf": b"quantized",
    "unknown.pt": b"who knows",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights in two shards, and what stands beside such weights."""
    path = tmp_path / "model"
    path.mkdir()
    tensors = {f"module.{name}": torch.randn(4, 3) for name in "abcd"}
    save_file(tensors, tmp_path / "in.safetensors")
    with ckptool.open(tmp_path / "in.safetensors") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "safetensors", max_shard_size=100), path, force=True)
    for name, data in {**ALONG, **LEFT}.items():
        (path / name).write_bytes(data)
    (path / "runs").mkdir()
    (path / ".gitattributes").write_bytes(b"* filter=lfs\n")
    return path


def beside(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json")
    }


@pytest.mark.parametrize("form", ["an edit", "no edit", "converted", "of the index"])
def test_what_belongs_to_the_weights_goes_along(form: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ckptool.open(folder / "model.safetensors.index.json" if form == "of the index" else folder) as checkpoint:
        edited = {
            "an edit": lambda: ckptool.cast(checkpoint, "float16"),
            "no edit": lambda: checkpoint,
            "converted": lambda: ckptool.convert(checkpoint, "torch", max_shard_size="5GB"),
            "of the index": lambda: ckptool.strip_module(checkpoint),
        }[form]()
        ckptool.save(edited, out)
    found = beside(out)
    weights = found.pop("pytorch_model.bin", b"") if form == "converted" else b"x"
    assert found == ALONG and weights != LEFT["pytorch_model.bin"]


def test_a_link_is_followed(folder: Path, tmp_path: Path) -> None:
    """The cache of huggingface_hub is a folder of links."""
    blobs = tmp_path / "blobs"
    folder.rename(blobs)
    folder = tmp_path / "snapshots" / "0123"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), tmp_path / "out")
    assert beside(tmp_path / "out") == ALONG
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


def test_a_dcp_folder_keeps_what_frameworks_put_there(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / "dcp4", source)
    for name in ("meta.pt", "common.pt", "metadata.json", "notes.txt"):
        (source / name).write_bytes(name.encode())
    with ckptool.open(source) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out")
        ckptool.save(ckptool.convert(checkpoint, "torch", allow_loss=["all"]), tmp_path / "one.pth")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"meta.pt", "common.pt", "metadata.json", "notes.txt", ".metadata"} <= names


@pytest.mark.parametrize("way", ["../secret", "/etc/hostname", "sub/../../secret"])
def test_a_link_out_of_the_folder_is_followed_on_demand(
    way: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cloned repository may bring a link to any file."""
    (tmp_path / "secret").write_text("top secret")
    (folder / "sub").mkdir()
    (folder / "added_tokens.txt").symlink_to(way)
    (folder / "same.txt").symlink_to("merges.txt")
    assert run(["strip-module", str(folder), "-o", str(tmp_path / "out")]) == 0
    assert "links out of the folder, not followed without --follow-links: added_tokens.txt" in capsys.readouterr().out
    assert not (tmp_path / "out" / "added_tokens.txt").exists()
    assert (tmp_path / "out" / "same.txt").read_bytes() == ALONG["merges.txt"]
    assert run(["strip-module", str(folder), "-o", str(tmp_path / "more"), "--follow-links", "-q"]) == 0
    assert (tmp_path / "more" / "added_tokens.txt").is_file() and not (
        tmp_path / "more" / "added_tokens.txt"
    ).is_symlink()


def test_weights_that_are_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shard = next(iter(folder.glob("*.safetensors")))
    shard.rename(tmp_path / "private.safetensors")
    shard.symlink_to(tmp_path / "private.safetensors")
    assert ckptool.validate(folder)["valid"]
    assert run(["strip-module", str(folder), "-o", str(tmp_path / "out"), "-q"]) == 4
    assert not (tmp_path / "out").exists()
    assert run(["strip-module", str(folder), "-o", str(tmp_path / "out"), "-q", "--follow-links"]) == 0


@pytest.mark.parametrize("there", [["epoch_1.pth", "ema.pt"], ["model.bin"], ["x.safetensors", "y.safetensors"]])
def test_force_replaces_no_other_checkpoints(
    there: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    for name in there:
        torch.save({}, out / name)
    assert run(["strip-module", str(folder), "-o", str(out), "--force", "-q"]) == 4
    assert "would be lost" in capsys.readouterr().err and sorted(path.name for path in out.iterdir()) == sorted(there)


def test_force_replaces_what_an_index_names_and_nothing_beside_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["strip-module", str(folder), "-o", str(out), "-q"]) == 0
    (out / "pytorch_model.bin").write_bytes(b"others")
    assert run(["strip-module", str(folder), "-o", str(out), "--force", "-q"]) == 4
    (out / "pytorch_model.bin").unlink()
    assert run(["strip-module", str(folder), "-o", str(out), "--force", "-q"]) == 0


def test_force_replaces_a_dcp_folder_but_no_stray_file_in_it(folder: Path, tmp_path: Path) -> None:
    how = ["convert", str(folder), "--to-format", "dcp", "-o", str(tmp_path / "out"), "--allow-loss", "all", "-q"]
    assert run(how) == 0 and run([*how, "--force"]) == 0
    (tmp_path / "out" / "__7_0.distcp").write_bytes(b"of another save")
    assert run([*how, "--force"]) == 4
