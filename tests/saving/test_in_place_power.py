"""A loss of power while a file is edited in place: whatever reached the disk, it is the former version or the new."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_place_edits import checkpoint_of, each_size, in_place, read, to_one

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.files.sources import BytesSource
from ckptool.files.zips.reader import read_archive


class Disk:
    """What a run did to a file, from one fsync to the next: the bytes that were safe, and the writes since."""

    def __init__(self, data: bytes) -> None:
        self.epochs: list[tuple[bytes, list[tuple[int, bytes]]]] = [(data, [])]
        self.data = bytearray(data)

    def write(self, at: int, data: bytes) -> None:
        self.data.extend(bytes(max(at + len(data) - len(self.data), 0)))
        self.data[at : at + len(data)] = data
        self.epochs[-1][1].append((at, data))

    def sync(self) -> None:
        self.epochs.append((bytes(self.data), []))

    def states(self, grain: int, chance: random.Random, most: int) -> Iterator[bytes]:
        """Disks after a loss of power: any subset of the units of ``grain`` bytes, and any size on the way."""
        for safe, writes in self.epochs:
            image = bytearray(safe)
            sizes = {len(safe)}
            units: set[int] = set()
            for at, data in writes:
                image.extend(bytes(max(at + len(data) - len(image), 0)))
                image[at : at + len(data)] = data
                sizes.add(len(image))
                units |= set(range(at // grain, -(-(at + len(data)) // grain)))
            sizes |= set(range(-(-len(safe) // grain) * grain, len(image), grain))
            for kept in _subsets(sorted(units), chance, most):
                state = bytearray(safe.ljust(len(image), b"\0"))
                for unit in kept:
                    state[unit * grain : (unit + 1) * grain] = image[unit * grain : (unit + 1) * grain]
                for size in sorted({len(safe), len(image), *chance.sample(sorted(sizes), min(5, len(sizes)))}):
                    yield bytes(state[:size])


def _subsets(units: list[int], chance: random.Random, most: int) -> Iterator[set[int]]:
    if 2 ** len(units) <= most:
        yield from ({unit for n, unit in enumerate(units) if bits >> n & 1} for bits in range(2 ** len(units)))
        return
    yield set()
    yield set(units)
    yield from ({unit} for unit in [*units[:8], *units[-8:]])
    yield from ({*units} - {unit} for unit in [*units[:8], *units[-8:]])
    for _ in range(most):
        yield {unit for unit in units if chance.random() < chance.choice((0.1, 0.5, 0.9))}


@pytest.mark.sampled(every=5)
@each_size
@pytest.mark.parametrize("grain", [512, 4096])
@pytest.mark.parametrize("before", [0, 1])
def test_a_loss_of_power_at_every_instant(
    size: str, grain: int, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Former or new whatever reached the disk; ``before`` are edits that the file has already."""
    path = checkpoint_of(tmp_path / "in.pth", size)
    for _ in range(before):
        in_place(path, lambda c: ckptool.set(c, "of_before", 1))
    former = contents(path.read_bytes())
    disk = Disk(path.read_bytes())
    place = 0
    real_write, real_seek, real_sync = os.write, os.lseek, os.fsync

    def seek(fd: int, at: int, how: int) -> int:
        nonlocal place
        place = real_seek(fd, at, how)
        return place

    def write(fd: int, data: Any) -> int:
        nonlocal place
        disk.write(place, bytes(data))
        place += len(data)
        return real_write(fd, data)

    def sync(fd: int) -> None:
        disk.sync()
        real_sync(fd)

    with ckptool.open(path) as checkpoint, monkeypatch.context() as patch:
        edited = to_one(checkpoint)
        for name, function in (("lseek", seek), ("write", write), ("fsync", sync)):
            patch.setattr(os, name, function)
        ckptool.save_in_place(edited)
    assert bytes(disk.data) == path.read_bytes()
    new = contents(path.read_bytes())
    chance = random.Random(f"{size}{grain}{before}")
    seen: set[str] = set()
    tried = 0
    lost = tmp_path / "lost.pth"
    for state in disk.states(grain, chance, 1500):
        tried += 1
        found = contents(state)
        assert found in (former, new)
        last = state.startswith(disk.epochs[-1][0])
        assert last <= (found == new)
        if chance.random() < (1 if tried < 60 else 0.03):
            lost.write_bytes(state)
            assert read(lost) == (found == new)
            whole = disk.epochs[0][0]
            if found == former and len(ckptool.history(lost)["versions"]) > before + 1:
                seen.add("unfinished")
                ckptool.undo(lost)
                assert lost.read_bytes() == whole
            elif found == former and state != whole:
                seen.add("behind")  # it grew, and nothing in there tells of an edit: nothing leads there either
                with pytest.raises(RefusedError, match="bytes follow the archive"):
                    in_place(lost, to_one)
    assert tried >= (1000 if size == "large" else 250 if grain == 512 else 8) and "unfinished" in seen


def contents(data: bytes) -> dict[str, bytes]:
    """Every record of an archive, as our reader finds it, which finds the directory as torch does."""
    archive = read_archive(BytesSource(data))
    return {record.name: archive.read(record, 1 << 20) for record in archive.records}
