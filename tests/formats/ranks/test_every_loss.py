"""Every file of every layout of ranks lost, empty, replaced, mixed up or renamed: nothing is made of the rest.

A folder that is damaged is refused, or its output equals that of the sound folder: replicas, and files that the
checkpoint does not need.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from helpers.rank_files import save_ranks
from test_sets import NAMES, model, optimizer

import ckptool
from ckptool.base.errors import CkptoolError

#: Not read: random generators and schedules beside the checkpoint, and step counters of each rank.
BESIDE = ("random_states", "scheduler", "step_0.pt", "step_1.pt")
#: Folders that are not one checkpoint, or whose flat vectors have no names to convert.
NOT_ONE = ("partial", "torchtitan", "trainer_zero2", "trainer_zero3", "dcp_zstd", "accelerate_fsdp")
#: What nobody can see: the extra state of a rank may have any entries, and the states of a parameter the same shape.
UNSEEN = re.compile(r"extra_state\S+ replaced by another dict|zero_universal .* saved again")
LAYOUTS = sorted(
    path.name
    for path in (FIXTURES / "ranks").iterdir()
    if path.is_dir() and path.name not in NOT_ONE and not path.name.startswith(("local", "megatron_dist"))
)
SETS = [f"{world} ranks, {number}" for world in (2, 3) for number in range(len(NAMES)) if (world, number) != (2, 4)]


def build(layout: str, folder: Path) -> Path:
    if layout in LAYOUTS:
        return Path(shutil.copytree(FIXTURES / "ranks" / layout, folder))
    if layout == "pipeline":
        return Path(shutil.copytree(FIXTURES / "real" / "pipeline", folder))
    world, number = int(layout[0]), int(layout[-1])
    for make, name in zip((model(world), optimizer(world)), NAMES[number]):
        save_ranks(folder, world, make, name)
    if world == 2:
        save_ranks(folder, world, lambda rank: 2, "step_{}.pt")
    return folder


def content(folder: Path, out: Path) -> str:
    """The hash of the output; "" if the folder is refused."""
    try:
        ckptool.save(ckptool.convert(folder, "torch"), out, force=True)
    except CkptoolError:
        return ""
    return str(ckptool.hash(out)["content"])


def files_of(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*")) if path.suffix in (".pt", ".pth", ".bin", ".ckpt"))
    return [path for path in found if path.is_file() and not path.name.startswith(BESIDE)]


def resaved(data: bytes, path: Path) -> None:
    """Write an archive of torch with another folder in it, as ``torch.save`` does for a file object."""
    path.with_suffix(".tmp").write_bytes(data)
    with zipfile.ZipFile(path.with_suffix(".tmp")) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            new.writestr(f"archive/{entry.filename.partition('/')[2]}", old.read(entry))
    path.with_suffix(".tmp").unlink()


ALONE: dict[str, Callable[[Path], object]] = {
    "lost": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "replaced by noise": lambda path: path.write_bytes(bytes(range(128, 256)) * 9),
    "replaced by a page": lambda path: path.write_bytes(b"<!DOCTYPE html><html>Sign in</html>"),
    "replaced by a number": lambda path: torch.save(2, path),
    "replaced by another dict": lambda path: torch.save({"other": torch.ones(2)}, path),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "renamed": lambda path: path.rename(path.with_name(f"aside{path.suffix}")),
}


def damages(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield what is done, and a function that does it to a copy of the folder."""
    files = [path.relative_to(folder) for path in files_of(folder)]
    kinds: dict[str, list[Path]] = {}
    for file in files:
        kinds.setdefault(re.sub(r"\d+", "N", str(file)), []).append(file)
        for name, damage in ALONE.items():
            yield f"{file} {name}", lambda copy, file=file, damage=damage: damage(copy / file)
        number = re.search(r"(?<=rank[_.])\d+|\d+(?=\D*$)", file.name)
        if number:
            other = file.with_name(f"{file.name[: number.start()]}9{file.name[number.end() :]}")
            yield f"{file} renamed {other}", lambda copy, file=file, other=other: (copy / file).rename(copy / other)
    for own in kinds.values():
        if len(own) > 2:
            yield f"all but {own[-1]} lost", lambda copy, own=own: [(copy / file).unlink() for file in own[:-1]]
        for file, other in zip(own, own[1:] + own[:1]) if len(own) > 1 else ():
            yield (
                f"{file} replaced by {other}",
                lambda copy, file=file, other=other: shutil.copy(copy / other, copy / file),
            )
    firsts = [own[0] for own in kinds.values()]
    for file, other in zip(firsts, firsts[1:] + firsts[:1]) if len(firsts) > 1 else ():
        yield (
            f"{file} replaced by {other}, saved again",
            lambda copy, file=file, other=other: resaved((copy / other).read_bytes(), copy / file),
        )


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("layout", [*LAYOUTS, *SETS, "pipeline"])
def test_nothing_is_made_of_a_folder_in_which_a_file_is_not_what_it_was(layout: str, tmp_path: Path) -> None:
    folder, out, copy = build(layout, tmp_path / "sound"), tmp_path / "out.pth", tmp_path / "copy"
    sound = content(folder, out)
    assert sound and ckptool.validate(folder)["valid"], layout
    for name, damage in damages(folder):
        if UNSEEN.search(f"{layout} {name}"):
            continue
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        damage(copy)
        made = content(copy, out)
        assert made in ("", sound), (layout, name)
        findings = made and [item for item in ckptool.inspect(copy)["findings"] if item["level"] == "warning"]
        assert not made or findings or " renamed " in name or layout == "zero_universal", (layout, name)
