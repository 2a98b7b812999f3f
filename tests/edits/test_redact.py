"""redact: what was private is nowhere in the output's bytes, and everything else is as it was."""

from __future__ import annotations

import argparse
import pathlib
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, Fixture
from output_checks import edited, every, saved

import ckptool
from ckptool.base.errors import TargetError
from ckptool.edits.redact import find_private

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SECRETS = (b"/home/jane", b"jane", b"/data/secret", b"C:\\Users", b"node17", b"D:\\projects")


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


def everything(path: Path) -> bytes:
    """The bytes of a file, and of its records inflated."""
    data = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            data += b"".join(archive.read(name) for name in archive.namelist())
    return data


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
    assert b"/data/secret" not in everything(out)


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
        assert b"/data/secret" not in everything(out)
        assert (found["config"].seed, found["config"].root) == (3, "all")
        assert (str(found["where"]), found["raw"], found["set"]) == ("set.txt", b"raw.bin", {"one.txt"})


def test_sources_of_old_modules(out: Path) -> None:
    path = FIXTURES / "whole_model_legacy.pth"
    with ckptool.open(path) as checkpoint:
        assert any(item.kind == "sources" for item in find_private(checkpoint))
        ckptool.save(ckptool.redact(checkpoint, ["sources"]), out)
    with ckptool.open(out) as checkpoint:
        assert not any(item.kind == "sources" for item in find_private(checkpoint))
    assert b"class " in path.read_bytes() and b"class " not in out.read_bytes()


@every
def test_every_file_afterwards_has_nothing_to_redact(item: Fixture, out: Path) -> None:
    with ckptool.open(item.path) as checkpoint:
        found = find_private(checkpoint)
    after = edited(item.path, out, ckptool.redact)
    with ckptool.open(out) as checkpoint:
        assert find_private(checkpoint) == []
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


# -- nothing is left behind ------------------------------------------------------------------------------------
# Comments, other records, unused objects, tuple keys, the name of the folder, shared strings.


SECRET = b"alice"


def redacted(path: Path, out: Path, **how: object) -> bytes:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.redact(checkpoint, **how), out)  # type: ignore[arg-type]
    torch.load(out, weights_only=True)
    return out.read_bytes()


def test_a_string_at_two_places_is_removed_when_one_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    shared = "/home/alice/shared/thing"
    torch.save({"w.x": torch.zeros(2), "a": {"p": shared}, "z": {"q": shared}}, path)
    assert SECRET not in redacted(path, tmp_path / "out.pth", exclude=["a*"])


# -- the next step ---------------------------------------------------------------------------------------------
