"""Files of more than 4 GiB, where offsets and sizes need the wide fields of zip64. On the disk they are holes."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from .rows import Options, Skipped, Tally
from .stage import ENVIRONMENT

__all__ = ["large"]

_HUGE = (4 << 30) + (100 << 20)
#: Where the bytes are that are not zero: at both ends of a record, and around 2 and 4 GiB.
_MARK = b"a mark that must be at the same place in the output" * 9


def large(tally: Tally, options: Options) -> None:
    """The edits of a checkpoint with one record of 4.1 GiB and others behind it."""
    size = options.amount(_HUGE, 100 << 20)
    if shutil.disk_usage(options.scratch).free < 3 * size:
        raise Skipped("there is too little disk")
    source, out = options.scratch / "large.pth", options.scratch / "out.pth"
    _sparse(source, size)
    for command, more in (("strip-module", []), ("add-module", []), ("remap", ["--map", "cpu=cuda:1"])):
        tally.case(f"{command} of {size:,} bytes")
        before = _facts(source)
        call = [sys.executable, "-m", "ckptool", command, str(source), "-o", str(out), *more]
        done = subprocess.run(call, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        if tally.check(done.returncode == 0, f"it ends with {done.returncode}: {done.stderr.strip()}"):
            _compare(tally, source, out, command)
        tally.check(_facts(source) == before, "the input is not what it was")
        out.unlink(missing_ok=True)
    tally.note(f"a file of {source.stat().st_size / 1e9:.1f} GB")


def _facts(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_mode


def _sparse(path: Path, size: int) -> None:
    """A checkpoint whose tensors are holes, with marks in them."""
    tensors = {"module.huge": torch.empty(size, dtype=torch.uint8), "module.one": torch.empty(100)}
    tree = {"state_dict": tensors, "steps": [torch.empty(3, dtype=torch.int64)], "epoch": 7}
    with torch.serialization.skip_data():
        torch.save(tree, path)
    with zipfile.ZipFile(path) as archive, path.open("r+b") as file:
        for info in archive.infolist():
            if "/data/" not in info.filename:
                continue
            begin = _payload(path, info)
            for at in _places(info.file_size):
                file.seek(begin + at)
                file.write(_MARK[: min(len(_MARK), info.file_size - at)])


def _places(size: int) -> list[int]:
    """Where marks are in a record of this size."""
    wanted = (0, size - len(_MARK), (2 << 30) - 100, (4 << 30) - 100)
    return [at for at in wanted if 0 <= at <= size - len(_MARK)] or [0]


def _payload(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a record begin, by its local header."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        sizes: tuple[int, int] = struct.unpack("<HH", file.read(4))
        return info.header_offset + 30 + sum(sizes)


def _compare(tally: Tally, source: Path, out: Path, command: str) -> None:
    """Records, their places on the grid, their marks, and what torch makes of it; zeros are not read."""
    with zipfile.ZipFile(source) as one, zipfile.ZipFile(out) as other:
        pairs = list(zip(one.infolist(), other.infolist(), strict=True))
    for before, after in pairs:
        facts = (before.filename, before.compress_type, before.flag_bits)
        tally.check(facts == (after.filename, after.compress_type, after.flag_bits), f"another record: {after}")
        if before.filename.endswith("data.pkl"):
            continue
        same = (before.file_size, before.compress_size, before.CRC) == (after.file_size, after.compress_size, after.CRC)
        tally.check(same, f"another size or checksum: {after}")
        if "/data/" in before.filename:
            begin, moved = _payload(source, before), _payload(out, after)
            tally.check(moved % 64 == 0, f"{after.filename} begins at {moved:,}: not on the grid of 64 bytes")
            for at in _places(before.file_size):
                size = min(len(_MARK), before.file_size)
                marked = _bytes(source, begin + at, size) == _bytes(out, moved + at, size)
                tally.check(marked, f"{after.filename} holds something else at byte {at:,}")
    loaded = [torch.load(path, mmap=True, map_location="cpu") for path in (source, out)]
    _compare_loaded(tally, loaded[0], loaded[1], command)


def _compare_loaded(tally: Tally, before: dict[str, Any], after: dict[str, Any], command: str) -> None:
    rename = {"strip-module": lambda key: key.removeprefix("module."), "add-module": lambda key: "module." + key}
    names = [rename.get(command, str)(key) for key in before["state_dict"]]
    tally.check(list(after["state_dict"]) == names, f"the keys are {list(after['state_dict'])}")
    tally.check(list(after) == list(before) and after["epoch"] == before["epoch"], f"the entries are {list(after)}")
    tensors = [*before["state_dict"].values(), *before["steps"]]
    for one, other in zip(tensors, [*after["state_dict"].values(), *after["steps"]], strict=True):
        same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        tally.check(
            same and bytes(one[-1:].numpy().data) == bytes(other[-1:].numpy().data), f"another tensor: {other.shape}"
        )


def _bytes(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)
