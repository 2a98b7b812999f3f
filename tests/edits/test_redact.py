"""redact: what was private is nowhere in the output's bytes, and everything else is as it was."""

from __future__ import annotations

import argparse
import json
import pathlib
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from conftest import FIXTURES, Fixture
from output_checks import edited, every, saved
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import TargetError
from ckptool.edits.redact import private_and_left

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SECRETS = ("/home/jane", "jane", "/data/secret", "C:\\Users", "node17", "D:\\projects")


def training() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.origin = "/home/jane/weights/resnet.pth"  # type: ignore[attr-defined]
    return {
        "state_dict": OrderedDict([("a.w", torch.arange(3.0)), ("b.w", weight)]),
        "paths": ["/home/jane/data/imagenet/train.lmdb", "relative/path.txt", ("/data/secret/x y.txt", "/")],
        "windows": ["C:\\Users\\jane\\model.pth", "D:\\projects\\old\\x.pth"],
        "note": "trained by jane on /data/secret/set1 and see https://example.org/a/b",
        "hostname": "node17",
        "user": "jane",
        "best_k_models": {"/data/secret/epoch=1.ckpt": 0.5, "/data/secret/epoch=2.ckpt": 0.25},
        "args": {"seed": 3, "data": "/data/secret/all"},
        "epoch": 7,
        "unicode": "пути нет",
    }


def everything(path: Path) -> str:
    """The texts of a file or a folder, of zips with their records inflated."""
    if path.is_dir():
        return "".join(each.name + everything(each) for each in sorted(path.rglob("*")) if each.is_file())
    data = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            data += b"".join(archive.read(name) for name in archive.namelist())
    return data.decode("latin-1")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_nothing_private_is_left(legacy: bool, tmp_path: Path, out: Path) -> None:
    path = saved(training(), tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    assert all(secret in everything(path) for secret in SECRETS)
    found = edited(path, out, ckptool.redact)
    left = everything(out)
    assert [secret for secret in SECRETS if secret in left] == []
    expected = training()
    del expected["args"]
    expected["state_dict"]["b.w"].origin = "resnet.pth"
    expected |= {
        "paths": ["train.lmdb", "relative/path.txt", ("x y.txt", "/")],
        "windows": ["model.pth", "x.pth"],
        "note": "trained by user on set1 and see https://example.org/a/b",
        "hostname": "host",
        "user": "user",
        "best_k_models": {"epoch=1.ckpt": 0.5, "epoch=2.ckpt": 0.25},
    }
    assert oracle.difference(expected, found) == ""


def test_names_that_would_become_one_stay_two(tmp_path: Path, out: Path) -> None:
    told = {"/data/secret/a/last.ckpt": 1, "/data/secret/b/last.ckpt": 2, "last.ckpt": 3}
    path = saved({"a.w": torch.ones(2), "best_k_models": told}, tmp_path / "in.pth")
    found = edited(path, out, ckptool.redact)
    assert found["best_k_models"] == {"last.ckpt 2": 1, "last.ckpt 3": 2, "last.ckpt": 3}
    assert "/data/secret" not in everything(out)


def test_objects(tmp_path: Path, out: Path) -> None:
    """Attributes of objects, paths as objects, and texts that are bytes to torch."""
    value = {
        "a.w": torch.ones(2),
        "config": argparse.Namespace(root="/data/secret/all", seed=3),
        "where": pathlib.PurePosixPath("/data/secret/all/set.txt"),
        "raw": b"/data/secret/raw.bin",
        "set": {"/data/secret/one.txt"},
    }
    for protocol in (2, 4):
        path = saved(value, tmp_path / "in.pth", pickle_protocol=protocol)
        with ckptool.open(path) as checkpoint:
            ckptool.save(ckptool.redact(checkpoint, ["paths"]), out, force=True)
        found = torch.load(out, weights_only=False)
        assert "/data/secret" not in everything(out)
        assert (found["config"].seed, found["config"].root) == (3, "all")
        assert (str(found["where"]), found["raw"], found["set"]) == ("set.txt", b"raw.bin", {"one.txt"})


def test_sources_of_old_modules(out: Path) -> None:
    path = FIXTURES / "whole_model_legacy.pth"
    with ckptool.open(path) as checkpoint:
        assert any(item.kind == "sources" for item in private_and_left(checkpoint)[0])
        ckptool.save(ckptool.redact(checkpoint, ["sources"]), out)
    with ckptool.open(out) as checkpoint:
        assert not any(item.kind == "sources" for item in private_and_left(checkpoint)[0])
    assert b"class " in path.read_bytes() and b"class " not in out.read_bytes()


@every
def test_every_file_afterwards_has_nothing_to_redact(item: Fixture, out: Path) -> None:
    with ckptool.open(item.path) as checkpoint:
        found = private_and_left(checkpoint)[0]
    after = edited(item.path, out, ckptool.redact)
    with ckptool.open(out) as checkpoint:
        assert private_and_left(checkpoint)[0] == []
    if not found:
        assert oracle.difference(oracle.load(item.path), after) == ""


def test_an_unknown_kind() -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint, pytest.raises(TargetError, match="emails"):
        ckptool.redact(checkpoint, ["emails"])  # type: ignore[list-item]


def test_users_whose_names_begin_alike(tmp_path: Path, out: Path) -> None:
    homes = [f"/home/{name}/x" for name in ("anna", "anna.b", "_ci", *(f"u.{number}" for number in range(2000)))]
    said = "Anna.B and anna, not annab; by _ci or u.1999, not u.2000 (anna.b)"
    path = saved({"homes": homes, "said": said, "w": torch.ones(1)}, tmp_path / "in.pth")
    edited(path, out, ckptool.redact)
    assert torch.load(out)["said"] == "user and user, not annab; by user or user, not u.2000 (user)"


def test_a_string_at_two_places_is_removed_when_one_is_chosen(tmp_path: Path, out: Path) -> None:
    shared = "/home/alice/shared/thing"
    path = saved({"w.x": torch.zeros(2), "a": {"p": shared}, "z": {"q": shared}}, tmp_path / "m.pth")
    edited(path, out, lambda c: ckptool.redact(c, exclude=["a*"]))
    assert "alice" not in everything(out)


# -- texts beside the object, in every place where a format or a folder holds them ----------------------------

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
        result = ckptool.redact(path, **how)
        assert {
            name for name in ("a", "b", "args") if result.metadata.get(name) != ckptool.open(path).metadata[name]
        } == changed


def test_a_converted_checkpoint_has_the_redacted_header(tmp_path: Path) -> None:
    path = tmp_path / "l.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"a": TEXTS["path"], "format": "pt"})
    converted = ckptool.redact(ckptool.convert(path, "safetensors"))
    again, cast = ckptool.convert(ckptool.redact(path), "safetensors"), ckptool.cast(ckptool.redact(path), "bfloat16")
    for number, result in enumerate((converted, again, cast)):
        ckptool.save(result, tmp_path / f"{number}.safetensors")
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
