"""Every row of the table of damage, for every command: one sentence with the true cause, and the next step."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from command_line import say
from crafted_files import FLOATS, TENSOR, Code, altered, by_key, entries, legacy, name, put, tensor

COMMANDS = ("inspect", "keys", "strip-module", "validate", "salvage")


def run(command: str, path: Path, out: Path) -> tuple[int, str, str]:
    more = ("-o", out) if command in ("strip-module", "salvage") else ()
    return say(command, path, *more)


def training() -> bytes:
    """A model, then its optimizer: 12 storages of 4 kB."""
    torch.manual_seed(0)
    model = {f"module.layer{n}.weight": torch.randn(32, 32) for n in range(6)}
    state = {n: {"step": torch.tensor(float(n)), "exp_avg": torch.randn(32, 32)} for n in range(6)}
    value = {
        "epoch": 7,
        "model": model,
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(6))}]},
        "names": ["a", "b"],
    }
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


TRAINING = training()


def tarred() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as found:
        info = tarfile.TarInfo("model.pth")
        info.size = len(TRAINING)
        found.addfile(info, io.BytesIO(TRAINING))
    return out.getvalue()


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as found:
        found.writestr("model.pth", TRAINING)
    return out.getvalue()


class Kind(NamedTuple):
    """A file that is something else: ``cause`` and ``next`` are patterns for what must be said."""

    data: bytes
    cause: str
    next: str


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 46830571\n"
KINDS = {
    "LFS pointer": Kind(LFS, r"Git LFS pointer .*46\.8 MB", r"git lfs pull"),
    "HTML page": Kind(b"<!DOCTYPE html><html><title>Sign in</title>", r"web page .*Sign in", r"download"),
    "JSON error": Kind(b'{"error": "Repository not found"}', r"JSON", r"download"),
    "empty": Kind(b"", r"empty", r"download"),
    "gzip": Kind(gzip.compress(TRAINING), r"gzip", r"ckptool inspect .*!model\.pth"),
    "PNG": Kind(b"\x89PNG\r\n\x1a\n" + bytes(99), r"PNG", r""),
    "tar of a checkpoint": Kind(tarred(), r"tar archive.*model\.pth", r"ckptool \S+ .*!model"),
    "zip of a checkpoint": Kind(zipped(), r"zip archive.*model\.pth", r"ckptool \S+ .*!model"),
    "symlink as text": Kind(b"../../models/resnet18.pth", r"symbolic link", r"point"),
    "first block zeroed": Kind(bytes(4096) + TRAINING[4096:], r"zeros", r"again|salvage"),
    "zeros": Kind(bytes(9999), r"zeros", r"again"),
    "random bytes": Kind(bytes(range(150, 256)) * 9 + bytes(9), r"not a checkpoint", r""),
    "random bytes without controls": Kind(bytes(range(200, 256)) * 9, r"not a checkpoint", r""),
    "a path in prose": Kind(b"This is a readme.\nIt has two lines.\n", r"text", r""),
}


STEPS = ["validate", "inspect", "keys", "strip-module", "salvage"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", by_key(KINDS))
def test_what_is_no_checkpoint_is_named(kind: Kind, command: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.pth", tmp_path / "out.pth"
    path.write_bytes(kind.data)
    code, _, err = run(command, path, out)
    salvaged = command == "salvage" and kind is KINDS["first block zeroed"]
    assert code == 3 or (salvaged and code == 1), err
    if salvaged:
        return
    assert re.search(kind.cause, err, re.S), err
    assert re.search(kind.next, err), err
    assert (err.count("\n") <= 2, "Traceback" in err, out.exists()) == (True, False, False)
    assert "weights_only" not in err.replace("weights_only=False) if you trust it", "")


@pytest.mark.parametrize("command", STEPS)
@pytest.mark.parametrize("share", [0.4, 0.5, 0.75, 0.98])
def test_a_cut_zip_tells_how_much_is_there(share: float, command: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.pth", tmp_path / "out.pth"
    size = int(len(TRAINING) * share)
    path.write_bytes(TRAINING[:size])
    code, said, err = run(command, path, out)
    if command == "salvage":
        # At 98 % the directory is gone, and every storage is there.
        assert code == (0 if share == 0.98 else 1), err
        assert re.search(r"lost: (\d+ tensors|nothing)", said), said
        return
    assert code == (1 if command == "validate" else 3)
    told = re.search(r"cut at ([\d.]+ kB) of about ([\d.]+ kB): ([\d,]+) of 18 tensors whole", err + said)
    assert told, err
    assert float(told[1].split()[0]) == pytest.approx(size / 1000, rel=0.01)
    assert float(told[2].split()[0]) == pytest.approx(len(TRAINING) / 1000, rel=0.1)
    run("salvage", path, out)
    kept = [tensor for tensor in flat(torch.load(out, weights_only=True)).values() if tensor is not None]
    assert int(told[3]) == len(kept)
    assert "ckptool salvage" in err + said


def flat(value: object, path: str = "") -> dict[str, torch.Tensor | None]:
    """The tensors by their paths."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: item for name, inner in pairs for key, item in flat(inner, f"{path}/{name}").items()}


def legacy_two() -> bytes:
    """Two tensors, the storages in the order of the keys."""
    ids = [("storage", name("torch", "FloatStorage"), key, "cpu", 100, None) for key in "01"]
    held = [Code(put(item) + b"Q") for item in ids]
    value = {"module.a": tensor((100,), of=held[0]), "module.b": tensor((100,), of=held[1])}
    return legacy(value, {"0": (100, FLOATS * 25), "1": (100, FLOATS * 25)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cut_legacy_file(command: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.pth", tmp_path / "out.pth"
    path.write_bytes(legacy_two()[:-50])
    code, said, err = run(command, path, out)
    assert code == {"inspect": 0, "keys": 0, "validate": 1, "strip-module": 3, "salvage": 1}[command], err
    if command == "salvage":
        assert list(torch.load(out, weights_only=True)) == ["module.a"]
        return
    assert re.search(r"cut at [\d.]+ kB of [\d.]+ kB: 1 of 2 storages whole", said + err), said + err
    assert "ckptool salvage" in said + err


# -- flipped bits -----------------------------------------------------------------------------------------------


def flipped(data: bytes, offset: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def test_a_flipped_bit_in_a_storage_names_the_record_and_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    weight = torch.load(io.BytesIO(TRAINING), weights_only=True)["model"]["module.layer3.weight"]
    offset = TRAINING.index(weight.numpy().tobytes()) + 5
    path.write_bytes(flipped(TRAINING, offset, 3))
    said = say("validate", path)
    assert said.code == 1
    assert "archive/data/3" in said.out
    assert 'model["module.layer3.weight"]' in said.out or "model.module.layer3.weight" in said.out
    assert not torch.equal(
        torch.load(path, weights_only=True)["model"]["module.layer3.weight"], weight
    )  # torch says nothing
    saved = say("salvage", path, "-o", tmp_path / "out.pth")
    assert saved.code == 1
    assert "layer3.weight" in saved.out
    assert "module.layer3.weight" not in torch.load(tmp_path / "out.pth", weights_only=True)["model"]


def test_tied_tensors_of_a_damaged_storage_are_all_named(tmp_path: Path) -> None:
    data = altered("data/0", entries({"a": TENSOR, "b": TENSOR, "c": 1}), data=FLOATS, listed={"crc": 9})
    (tmp_path / "seed.pth").write_bytes(data)
    assert re.search(r"damaged tensors a and b", say("validate", tmp_path / "seed.pth").out)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flipped_bit_in_the_pickle(command: str, tmp_path: Path) -> None:
    """The name of a key is another, and torch loads it."""
    path, out = tmp_path / "model.pth", tmp_path / "out.pth"
    data = flipped(TRAINING, TRAINING.index(b"layer3.weight") + 5, 1)
    path.write_bytes(data)
    assert "module.layer1.weight" in torch.load(path, weights_only=True)["model"]
    code, said, err = run(command, path, out)
    assert code == {"inspect": 0, "keys": 0, "strip-module": 3, "validate": 1, "salvage": 3}[command], said + err
    assert "data.pkl has another checksum" in re.sub(r"'archive/(data.pkl)'", r"\1", said + err), said + err
    assert not out.exists()


def test_legacy_is_never_called_verified(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    data = legacy()
    path.write_bytes(flipped(data, len(data) - 3))
    said = say("validate", path)
    assert (said.code, "cannot be seen" in said.out) == (0, True)
    assert "coverage PARTIAL" in said.out


def test_four_kib_of_zeros(tmp_path: Path) -> None:
    """Anywhere behind the first block: found, or read as no checkpoint."""
    path = tmp_path / "model.pth"
    clean = torch.load(io.BytesIO(TRAINING), weights_only=True)
    for begin in range(512, len(TRAINING) - 4096, 4096):
        path.write_bytes(TRAINING[:begin] + bytes(4096) + TRAINING[begin + 4096 :])
        said = say("validate", path)
        assert said.code == 1, begin
        out = tmp_path / f"{begin}.pth"
        saved = say("salvage", path, "-o", out)
        assert saved.code in (1, 3), saved
        assert out.exists() is (saved.code == 1)
        if out.exists():
            compare(clean, out)


def compare(clean: object, out: Path) -> int:
    """Nothing in the output is other than it was; how much there is."""
    expected, found = flat(clean), flat(torch.load(out, weights_only=True))
    for key, value in found.items():
        assert value is not None and key in expected
        assert torch.equal(value, expected[key])  # type: ignore[arg-type]
    return len(found)


def test_a_damaged_directory_is_no_reason_to_lose_a_tensor(tmp_path: Path) -> None:
    path, out = tmp_path / "model.pth", tmp_path / "out.pth"
    start = TRAINING.index(b"PK\x01\x02")
    path.write_bytes(TRAINING[:start] + bytes(200) + TRAINING[start + 200 :])
    assert say("inspect", path).code == 3
    assert "salvage" in say("inspect", path).err
    saved = say("salvage", path, "-o", out)
    assert saved.code == 0, saved.err
    assert compare(torch.load(io.BytesIO(TRAINING), weights_only=True), out) == 18
