"""redact: texts beside the object, in every place where a format or a folder holds them."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

import pytest
import torch
from command_line import say
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool

#: Paths and names as programs of all systems spell them; none may stay.
TEXTS = {
    "path": "/home/bob.smith/models/v1-5.safetensors",
    "blanks": "/home/bob.smith/my faces/alice",
    "windows": r"C:\Users\bob.smith\models\v1.ckpt",
    "windows with slashes": "C:/Users/bob.smith/models/v1.ckpt",
    "JSON": json.dumps({"/home/bob.smith/faces/alice": {"n": 10, "dir": "/home/bob.smith/my faces/x"}}),
    "JSON of windows": json.dumps({"C:\\Users\\bob.smith\\faces": [r"D:\old data\bob.smith\x.png", "E:/x y/secret/z"]}),
    "sentence": "trained by bob.smith on /data/secret/set1",
}
PRIVATE = ("bob.smith", "/home", "Users", "old data", "x y", "my faces", "/data/secret")


def told(*words: str) -> str:
    """Run ckptool, and return what it prints."""
    result = say(*words)
    assert result.code == 0
    return result.out + result.err


def private_in(text: str) -> list[str]:
    return [word for word in PRIVATE if word in text]


def everything(path: Path) -> str:
    """The texts of a file or a folder, of zips with their records and comments."""
    if path.is_dir():
        return "".join(each.name + everything(each) for each in sorted(path.rglob("*")) if each.is_file())
    if not zipfile.is_zipfile(path):
        return path.read_bytes().decode("latin-1")
    with zipfile.ZipFile(path) as archive:
        parts = [archive.comment, *(name.encode() + archive.read(name) for name in archive.namelist())]
    return b"".join(parts).decode("latin-1")


@pytest.mark.parametrize("kind", TEXTS)
def test_headers_of_safetensors(kind: str, tmp_path: Path) -> None:
    tensors = {"lora_unet_a.lora_down.weight": torch.randn(4, 4), "lora_unet_a.alpha": torch.tensor(4.0)}
    texts = {"format": "pt", "ss_base": TEXTS["path"], "ss_x": TEXTS[kind], "ss_network_dim": "8", "args": "{}"}
    path, out = tmp_path / "l.safetensors", tmp_path / "o.safetensors"
    save_file(tensors, path, metadata=texts)
    assert "__metadata__.ss_x" in told("redact", str(path))
    told("redact", str(path), "--redact", "all", "-o", str(out))
    assert not private_in(everything(out))
    with safe_open(out, "pt") as file:
        left = file.metadata()
    assert left.keys() == texts.keys() - {"args"} and (left["format"], left["ss_network_dim"]) == ("pt", "8")
    if kind.startswith("JSON"):
        json.loads(left["ss_x"])
    assert all(torch.equal(load_file(out)[name], value) for name, value in tensors.items())
    assert "nothing private is recognised" in told("redact", str(out))


def test_include_exclude_and_kinds_choose_entries_of_a_header(tmp_path: Path) -> None:
    path = tmp_path / "l.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"a": TEXTS["path"], "b": TEXTS["path"], "args": "x"})
    for how, changed in (
        ({"include": ["__metadata__.a"]}, {"a"}),
        ({"exclude": ["*a"]}, {"b", "args"}),
        ({"kinds": "args"}, {"args"}),
    ):
        edited = ckptool.redact(path, **how)
        assert {
            name for name in ("a", "b", "args") if edited.metadata.get(name) != ckptool.open(path).metadata[name]
        } == changed


def test_a_converted_checkpoint_has_the_redacted_header(tmp_path: Path) -> None:
    path = tmp_path / "l.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"a": TEXTS["path"], "format": "pt"})
    for number, edited in enumerate(
        (
            ckptool.redact(ckptool.convert(path, "safetensors")),
            ckptool.convert(ckptool.redact(path), "safetensors"),
            ckptool.cast(ckptool.redact(path), "bfloat16"),
        )
    ):
        ckptool.save(edited, tmp_path / f"{number}.safetensors")
        assert not private_in(everything(tmp_path / f"{number}.safetensors"))


def folder(path: Path) -> Path:
    """Save a folder as the Trainer of transformers does."""
    path.mkdir()
    index = {"metadata": {"total_size": 16}, "weight_map": {}}
    for number in (1, 2):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(
            {f"w{number}": torch.ones(2)},
            path / name,
            metadata={"format": "pt", "from": TEXTS["path"], "n": f"/data/secret/{number}"},
        )
        index["weight_map"][f"w{number}"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"_name_or_path": TEXTS["path"], "model_type": "llama", "hidden_size": 8}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": TEXTS["windows"], "epoch": 1.5}))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"/usr/": 1}}}))
    torch.save(argparse.Namespace(output_dir=TEXTS["path"], seed=3), path / "training_args.bin")
    return path


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    path, out = folder(tmp_path / "in"), tmp_path / "out"
    found = told("redact", str(path))
    assert all(name in found for name in ("config.json", "trainer_state.json", "training_args.bin", "__metadata__"))
    report = told("redact", str(path), "--redact", "all", "-o", str(out))
    assert "may stay" not in report and not private_in(everything(out))
    assert json.loads((out / "config.json").read_text()) == {
        "_name_or_path": "v1-5.safetensors", "model_type": "llama", "hidden_size": 8,
    }  # fmt: skip
    assert json.loads((out / "trainer_state.json").read_text()) == {"best_model_checkpoint": "v1.ckpt", "epoch": 1.5}
    assert (out / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(out / "training_args.bin").seed == 3


def test_comments_and_records_of_a_zip(tmp_path: Path) -> None:
    path, out = tmp_path / "a.pth", tmp_path / "o.pth"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/notes.txt", TEXTS["path"])
        archive.comment = b"saved as /data/secret/a.pth"
    found = told("redact", str(path))
    assert "notes.txt" in found and "comment" in found
    told("redact", str(path), "--redact", "all", "-o", str(out))
    assert not private_in(everything(out)) and torch.equal(torch.load(out)["w"], torch.ones(2))
