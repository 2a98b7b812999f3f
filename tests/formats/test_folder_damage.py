"""Every file of a folder missing, cut, exchanged, or something else: the file is named, and nothing is made of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from crafted_files import TENSOR, plain
from safetensors.torch import load_file, save_file

from ckptool.cli.main import run

SHARDS = 3


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layers.{n}.{kind}": torch.randn(20, 4 + n) for n in range(SHARDS) for kind in ("weight", "bias")}


#: The folders of many ranks that are fixtures.
COPIED = {
    "dcp": FIXTURES / "dcp4",
    "zero2": FIXTURES / "ranks" / "zero2_whole" / "global_step3",
    "zero3": FIXTURES / "ranks" / "zero3_whole" / "global_step3",
    "fsdp": FIXTURES / "ranks" / "fsdp1_mesh",
    "verl": FIXTURES / "ranks" / "verl_fsdp2",
}
#: Those whose files are found by their names alone, without a listing.
UNLISTED = ("zero2", "zero3", "fsdp", "verl")


def write_shards(folder: Path, suffix: str, seed: int = 0) -> Path:
    """Three shards of different shapes, an index and a side file."""
    folder.mkdir()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    places: dict[str, str] = {}
    tensors = state(seed)
    for number in range(SHARDS):
        name = f"{stem}-{number + 1:05d}-of-{SHARDS:05d}.{suffix}"
        part = {key: value for key, value in tensors.items() if f".{number}." in key}
        (save_file if suffix == "safetensors" else torch.save)(part, folder / name)
        places |= dict.fromkeys(part, name)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def made(kind: str, folder: Path, seed: int = 0) -> Path:
    if kind in COPIED:
        return Path(shutil.copytree(COPIED[kind], folder))
    return write_shards(folder, kind, seed)


FILES: dict[str, list[str]] = {
    "dcp": [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))],
    **{kind: sorted(path.name for path in COPIED[kind].glob("*.pt")) for kind in UNLISTED},
    **{
        suffix: [
            *(f"{stem}-{n:05d}-of-{SHARDS:05d}.{suffix}" for n in range(1, SHARDS + 1)),
            f"{stem}.{suffix}.index.json",
        ]
        for suffix, stem in (("safetensors", "model"), ("bin", "pytorch_model"))
    },
}
#: Those that hold tensors.
DATA = {kind: [name for name in names if not name.endswith((".metadata", ".json"))] for kind, names in FILES.items()}
EVERY = [(kind, name) for kind, names in FILES.items() for name in names]
EVERY_DATA = [(kind, name) for kind, names in DATA.items() for name in names]


class Told(NamedTuple):
    """What came of it: exit codes, what was said by ``validate`` and by the others, and what they wrote."""

    validate: int
    convert: int
    edit: int
    text: str
    others: str
    written: list[str]


def told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    before = set(os.listdir(tmp_path))

    def said(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run([*arguments])
        found = capsys.readouterr()
        return code, found.out + found.err

    validate, text = said("validate", str(folder))
    convert, one = said("convert", str(folder), "-o", str(tmp_path / "out.pth"))
    edit, two = said("add-module", str(folder), "-o", str(tmp_path / "edited"))
    return Told(validate, convert, edit, text, one + two, sorted(set(os.listdir(tmp_path)) - before))


def refused(folder: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The file is named, and nothing is written."""
    found = told(folder, tmp_path, capsys)
    assert found.validate in (1, 3) and name in found.text
    assert found.convert in (3, 4) and found.edit in (3, 4) and found.others.count(name) >= 2
    assert found.written == []
    assert "a bug" not in found.text + found.others
    return found.text


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else in the place of a file."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


_PAGE = b"<!DOCTYPE html><html><title>Not found</title></html>"
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000\n"
CHANGES: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": instead(lambda path: path.symlink_to("nowhere")),
    "a folder": instead(Path.mkdir),
    "a web page": lambda path: path.write_bytes(_PAGE),
    "an LFS pointer": lambda path: path.write_bytes(_POINTER),
    "a symbolic link that Git checked out": lambda path: path.write_bytes(b"../../blobs/0123456789abcdef"),
    "a message of a server": lambda path: path.write_bytes(b'{"error": "Repository not found"}'),
    **({"a pipe": instead(os.mkfifo)} if hasattr(os, "mkfifo") else {}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_file_that_is_not_what_it_was(
    kind: str, name: str, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(kind, tmp_path / "in")
    CHANGES[change](folder / name)
    if name.endswith(".index.json") and change == "removed":
        # The names of the shards tell the same: it is read, but transformers does not load it.
        found = told(folder, tmp_path, capsys)
        assert f"there is no index, {name}" in found.text and (found.validate, found.convert) == (1, 0)
        return
    refused(folder, name, tmp_path, capsys)


@pytest.mark.sampled(every=3)
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_file_that_may_not_be_read(kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(kind, tmp_path / "in")
    (folder / name).chmod(0)
    assert "no permission" in refused(folder, name, tmp_path, capsys)


def exchanged(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


@pytest.mark.parametrize(("one", "two"), list(combinations(FILES["dcp"], 2)))
def test_two_files_of_dcp_exchanged(one: str, two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("dcp", tmp_path / "in")
    exchanged(folder / one, folder / two)
    text = refused(folder, one, tmp_path, capsys)
    assert two in text or one == ".metadata"


@pytest.mark.parametrize(
    ("kind", "one", "two"), [(kind, *pair) for kind in ("safetensors", "bin") for pair in combinations(FILES[kind], 2)]
)
def test_two_files_of_shards_exchanged(
    kind: str, one: str, two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard says itself which tensors it has: nothing is lost, and it is said."""
    folder = made(kind, tmp_path / "in")
    exchanged(folder / one, folder / two)
    if two.endswith(".json"):
        refused(folder, two, tmp_path, capsys)
        return
    found = told(folder, tmp_path, capsys)
    assert found.validate == 0
    assert "in another shard than the index says" in found.text
    loaded = torch.load(tmp_path / "out.pth")
    assert all(torch.equal(loaded[name], value) for name, value in state().items())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("kind", "name"), EVERY_DATA)
def test_a_copy_of_another_file(kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(kind, tmp_path / "in")
    other = DATA[kind][DATA[kind].index(name) - 1]
    shutil.copy(folder / other, folder / name)
    refused(folder, name, tmp_path, capsys)


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind not in UNLISTED])
def test_a_file_too_many(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(kind, tmp_path / "in")
    stray = {"dcp": "__9_0.distcp", "safetensors": "model-00004-of-00003.safetensors"}.get(
        kind, "pytorch_model-00004-of-00003.bin"
    )
    shutil.copy(folder / DATA[kind][0], folder / stray)
    found = told(folder, tmp_path, capsys)
    assert found.validate == 0 and stray in found.text


#: What may stand in the place of a file.
STAND_INS = (_POINTER, _PAGE, b"../../blobs/0123456789abcdef", b'{"error": "Repository not found"}', b"")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *((f"{number}.safetensors", data) for number, data in enumerate(STAND_INS)),
        ("program.ptl", b"\x10\0\0\0PTMF" + bytes(30)),
        ("policy.zip", plain({"w": TENSOR}).replace(b"seed/data.pkl", b"policy/a.pth")),
        ("other.mar", plain({"w": TENSOR}).replace(b"seed/data.pkl", b"policy/a.pth")),
    ],
)
def test_a_folder_with_one_good_file_is_not_good(name: str, data: bytes, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "good.safetensors")
    (tmp_path / "notes.zip").write_bytes(plain({"w": TENSOR}).replace(b"seed/data.pkl", b"seed/note.txt"))
    assert say("validate", tmp_path)[0] == 0
    (tmp_path / name).write_bytes(data)
    code, out, err = say("validate", tmp_path)
    assert code and name in out + err
    assert say("inspect", tmp_path)[0] == 3


# -- what is whole of a folder with gaps ------------------------------------------------------------------------------

ALL_RANKS = FIXTURES / "ranks"


def gap(name: str, file: str, tmp_path: Path) -> Path:
    """A copy of a fixture without some files."""
    folder = Path(shutil.copytree(ALL_RANKS / name, tmp_path / "gap"))
    for path in list(folder.rglob(file)):
        path.unlink()
    return folder


def step_of(text: str) -> list[str]:
    return shlex.split(text.partition("-> ckptool ")[2].partition("\n")[0])


def same(path: Path, name: str, part: str) -> None:
    """What was written is what was saved."""
    wanted = {key: value for key, value in load_file(ALL_RANKS / f"{name}.safetensors").items() if key.startswith(part)}
    made = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert made and {part + key for key in made} == wanted.keys()
    assert all(torch.equal(value, wanted[part + key]) for key, value in made.items())


@pytest.mark.parametrize("name", ["zero2_bf16", "zero1_fp16"])
def test_weights_in_16_bits_are_whole_without_a_partition(name: str, tmp_path: Path) -> None:
    folder, out = gap(name, "*zero_pp_rank_1_*", tmp_path), tmp_path / "a.safetensors"
    for options in ([], ["--key", "module"]):
        refused = say("convert", folder, "-o", out, *options)
        assert refused.code in (3, 4) and not out.exists()
    asked = say("convert", folder, "-o", out, "--key", "module", "--deepspeed-16bit", "--tied", "keep-first")
    assert asked.code == 0 and "is not there" in asked.err
    model = torch.load(next(folder.rglob("mp_rank_00_model_states.pt")), weights_only=True)["module"]
    assert all(torch.equal(value, model[key]) for key, value in load_file(out).items())


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", ["hsdp1", "hsdp2"])
def test_a_replica_that_is_missing_is_a_warning(name: str, number: int, tmp_path: Path) -> None:
    folder, out = gap(name, f"*rank{number}.p*", tmp_path), tmp_path / "a.safetensors"
    found = say("inspect", folder)
    assert "the other files have all parts of every tensor" in found.out and "error" not in found.out
    made = say(*step_of(found.out)[:-1], out)
    assert made.code == 0
    same(out, name, "weights.")


@pytest.mark.parametrize(("name", "file"), [("fsdp2_3", "optimizer.rank1.pth"), ("verl_fsdp1", "optim*_1.pt")])
def test_a_model_is_whole_without_a_file_of_the_optimizer(name: str, file: str, tmp_path: Path) -> None:
    folder, out = gap(name, file, tmp_path), tmp_path / "a.safetensors"
    for refused in (
        say("convert", folder, "-o", tmp_path / "all.pth"),
        say("convert", folder, "-o", tmp_path / "a.dcp"),
    ):
        assert refused.code in (3, 4)
    assert say("salvage", folder, "-o", out).code == 3 and not out.exists()
    made = say("convert", folder, "-o", out, "--key", "model")
    assert made.code == 0 and "is not there" in made.err
    same(out, name, "weights.")


@pytest.mark.parametrize("name", ["fsdp2_3", "verl_fsdp1", "verl_fsdp2"])
def test_a_model_with_a_gap_is_refused(name: str, tmp_path: Path) -> None:
    folder, out = gap(name, "model*1.p*", tmp_path), tmp_path / "a.safetensors"
    assert say("convert", folder, "-o", out, "--key", "model").code in (3, 4) and not out.exists()
    assert "extract" not in step_of(say("inspect", folder).out)[:1] or "model" not in step_of(
        say("inspect", folder).out
    )
