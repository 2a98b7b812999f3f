"""redact left comments, other records, unused objects, tuple keys, the name of the folder, and shared texts."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

import ckptool

SECRET = b"alice"


def redacted(path: Path, out: Path, **how: object) -> bytes:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.redact(checkpoint, **how), out)  # type: ignore[arg-type]
    torch.load(out, weights_only=True)
    return out.read_bytes()


def test_what_stands_beside_the_object_goes(tmp_path: Path) -> None:
    path = tmp_path / "alice_model.pth"
    torch.save({"w.x": torch.zeros(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"/home/alice/x"
        archive.writestr("alice_model/notes.txt", "by alice")
    assert SECRET not in redacted(path, tmp_path / "out.pth")


def test_keys_that_are_tuples(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    torch.save({"w.x": torch.zeros(2), "files": {("/home/alice/t", 1): 2}}, path)
    assert SECRET not in redacted(path, tmp_path / "out.pth")


def test_a_text_at_two_places_goes_when_one_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    shared = "/home/alice/shared/thing"
    torch.save({"w.x": torch.zeros(2), "a": {"p": shared}, "z": {"q": shared}}, path)
    assert SECRET not in redacted(path, tmp_path / "out.pth", only=ckptool.Globs([], ["a*"]))


def test_keys_that_become_equal_stay_apart(tmp_path: Path) -> None:
    path, out = tmp_path / "m.pth", tmp_path / "out.pth"
    torch.save({"files": {"/a/b/x.txt": 1, "/c/d/x.txt": 2}, "w.x": torch.zeros(1)}, path)
    redacted(path, out)
    assert sorted(torch.load(out)["files"].values()) == [1, 2]
