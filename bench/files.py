"""The checkpoints that the benchmark measures on, and the program that writes one of them.

`python bench/files.py PATH TENSORS ROWS COLUMNS` writes one; run.py calls it as a subprocess, so that torch
and two gigabytes of tensors never live in the process that measures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Part of each file name: raise it when the recipe below changes, and files from before are not reused.
RECIPE = 1
PREFIX = "module."
CUT, FLIPPED, TWIN, PLAIN = ".cut", ".flipped", ".twin", ".plain"
# Files that jobs make beside an input.
SIDES = (CUT, FLIPPED, TWIN, PLAIN)
TAG = "cuda:0"
_PARTS = ("attn.query", "attn.key", "attn.value", "attn.out", "mlp")
_TENSORS_PER_LAYER = 2 * len(_PARTS)
# What torch.save adds to the data of one tensor here (measured: 345 to 380 bytes): its share of the pickle,
# a zip header, the padding to 64 bytes and an entry in the zip directory.
_OVERHEAD = 400


@dataclass(frozen=True)
class Spec:
    """One checkpoint: `tensors` float32 tensors of `rows` x `columns` elements."""

    label: str
    tensors: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The file's name in the work folder."""
        return f"input-{self.tensors}x{self.rows}x{self.columns}-r{RECIPE}.pt"

    @property
    def size(self) -> int:
        """The file's size in bytes, a little on the high side."""
        return self.tensors * (self.rows * self.columns * 4 + _OVERHEAD)


# 5,000,000 bytes a tensor is no multiple of 64 or 4096, as in real files: the records need padding.
BIG = Spec("2 GB, 400 tensors", 400, 1000, 1250)
MANY = Spec("20,000 tensors", 20_000, 1, 220)
LARGE = Spec("200,000 tensors", 200_000, 1, 220)
QUICK_BIG = Spec("100 MB, 100 tensors", 100, 500, 500)
QUICK_MANY = Spec("2,000 tensors", 2_000, 1, 220)
EVERY_SPEC = (BIG, MANY, LARGE, QUICK_BIG, QUICK_MANY)


def make(spec: Spec, path: Path) -> None:
    """Write the checkpoint at `path` in a subprocess; raises CalledProcessError if that fails."""
    numbers = (str(spec.tensors), str(spec.rows), str(spec.columns))
    subprocess.run([sys.executable, __file__, str(path), *numbers], check=True)


def cut_in_half(source: Path, cut: Path) -> None:
    """A copy of the first half of a file."""
    unfinished = cut.with_suffix(".unfinished")
    shutil.copyfile(source, unfinished)
    os.truncate(unfinished, source.stat().st_size // 2)
    os.replace(unfinished, cut)


def copy(source: Path, twin: Path) -> None:
    """A whole copy of a file."""
    unfinished = twin.with_suffix(".unfinished")
    shutil.copyfile(source, unfinished)
    os.replace(unfinished, twin)


def flip_one(source: Path, other: Path) -> None:
    """A copy of a file with one flipped bit in the last tensor; torch.save puts some small records behind it."""
    import zipfile

    unfinished = other.with_suffix(".unfinished")
    shutil.copyfile(source, unfinished)
    with zipfile.ZipFile(source) as archive:
        last = [entry for entry in archive.infolist() if "/data/" in entry.filename][-1]
    with unfinished.open("r+b") as file:
        file.seek(last.header_offset + 26)
        sizes = file.read(4)
        place = last.header_offset + 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")
        file.seek(place + last.file_size - 4)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.replace(unfinished, other)


def tensor_names(count: int) -> list[str]:
    """`count` keys as a DataParallel transformer has them."""
    names = []
    for index in range(count):
        layer, place = divmod(index, _TENSORS_PER_LAYER)
        part, is_bias = divmod(place, 2)
        names.append(f"{PREFIX}layers.{layer}.{_PARTS[part]}.{'bias' if is_bias else 'weight'}")
    return names


def module_versions(names: list[str]) -> dict[str, dict[str, int]]:
    """The `_metadata` of a state dict with these keys: an entry for each module, outer before inner."""
    versions: dict[str, dict[str, int]] = {"": {"version": 1}}
    for name in names:
        segments = name.split(".")
        for end in range(1, len(segments)):
            versions.setdefault(".".join(segments[:end]), {"version": 1})
    return versions


def _write(path: Path, tensors: int, rows: int, columns: int) -> None:
    """Save a state dict of random numbers whose storages say that they were on a GPU."""
    from collections import OrderedDict

    import torch

    generator = torch.Generator().manual_seed(tensors)
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in tensor_names(tensors):
        # Random data, because a file of zeros might be stored sparse or compressed, and copied for nothing.
        state[name] = torch.rand((rows, columns), generator=generator)
    state._metadata = OrderedDict(module_versions(list(state)))  # type: ignore[attr-defined]

    def tag_of(storage: object) -> str:
        return f"{TAG[:-1]}{0}"  # a new string each time, as torch makes it: the pickle repeats it, unshared

    # torch.save looks this function up in its module at each call, so it can be replaced on a machine without a GPU.
    keep, torch.serialization.location_tag = torch.serialization.location_tag, tag_of
    unfinished = path.with_suffix(".unfinished")
    try:
        torch.save(state, unfinished)
    finally:
        torch.serialization.location_tag = keep
    os.replace(unfinished, path)  # only a whole file gets the name that later runs reuse


if __name__ == "__main__":
    _write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
